//! A process that joins a running job: it waits for a round that asks for its rank.

use super::builder::{Meeting, config_at};
use super::grow::place_in;
use super::init::open_recorder;
use super::job_secret::JobSecret;
use super::round::Round;
use super::session::{MeetingStore, StoreHost};
use super::{World, WorldBuilder, session};
use crate::backend::BackendSet;
use crate::config::rendezvous::Rendezvous;
use crate::op::deadline::Deadline;
use crate::op::error::{Error, ErrorKind, Result};
use crate::store::Store;
use rcomm_recorder::model::text;
use rcomm_recorder::record::OnConflict;
use std::sync::Arc;
use std::time::Duration;

/// The pause between two reads of the newest round.
const PAUSE: Duration = Duration::from_millis(20);
/// The longest time for one request that waits for the first round.
const SLICE: Duration = Duration::from_secs(1);

/// Makes the world of the first round that asks for the rank of `place` and in which all ranks arrive.
///
/// # Errors
/// `InvalidArgument` if this rank would have to serve the store; `Rendezvous` if there is no such round before the
/// deadline. Otherwise those of [`WorldBuilder::init`].
pub(super) fn join<B: BackendSet>(
    mut builder: WorldBuilder<B>,
    place: Rendezvous,
    deadline: Deadline,
) -> Result<World<B>> {
    let store: Arc<dyn Store> = match builder.store.take() {
        Some(store) => store,
        None if place.serves_store() => {
            let message = "this process joins as rank 0, which serves the job's store: a job can replace its rank 0 \
                           only if its launcher or the program serves the store";
            return Err(Error::new(ErrorKind::InvalidArgument, message).with_rank(0));
        }
        None => {
            let config = &builder.config;
            let tls = config.read_tls()?;
            let secret = JobSecret::of(config, &place)?;
            Arc::new(session::connect(
                &secret,
                config,
                tls.as_ref(),
                &place,
                deadline,
            )?)
        }
    };
    let limit = builder.config.init_timeout;
    let mut missed = Missed::NoRound;
    loop {
        let wait = SLICE.min(deadline.remaining());
        let round = Round::newest(&*store, wait)?.filter(|round| missed.is_older_than(round));
        let seat = match &round {
            Some(round) => seat_in(round, &place, &store)?,
            None => Seat::None,
        };
        match round {
            Some(round) if seat == Seat::Free => {
                let place = place_in(&place, &round);
                let config = config_at(&builder.config, &place);
                let ring = open_recorder(&place, &config, OnConflict::Refuse)?.map(Arc::new);
                let store = MeetingStore::of_unknown_past(store.clone(), StoreHost::of(&place));
                let met = JobSecret::of(&config, &place).and_then(|secret| {
                    Meeting::hold(place, config, (store, secret), ring.clone(), deadline)
                });
                match met {
                    Ok(meeting) => {
                        let rank = meeting.rank();
                        return builder.build(meeting, None).inspect_err(|error| {
                            if let Some(ring) = &ring {
                                ring.note_failure(&error.failure(rank));
                                ring.mark_closed();
                            }
                        });
                    }
                    Err(error) if error.kind() == ErrorKind::Rendezvous => {
                        if let Some(ring) = ring
                            && let Err(error) = ring.discard()
                        {
                            tracing::warn!(%error, "the ring file could not be removed");
                        }
                        missed = Missed::Failed(round.attempt, error);
                    }
                    Err(error) => return Err(error),
                }
            }
            Some(round) if seat == Seat::Taken => missed = Missed::Taken(round),
            Some(round) => missed = Missed::Closed(round),
            None => {}
        }
        if deadline.has_passed() {
            return Err(missed.into_error(&place, limit));
        }
        std::thread::sleep(PAUSE);
    }
}

/// Whether a round has a place for a process that joins as a certain rank.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Seat {
    /// The round does not ask for the rank.
    None,
    /// A process has joined it as this rank. A second one would be refused, and its ring would replace that of the
    /// first, which is the record of this rank in that round even if the process has died since.
    Taken,
    /// The round asks for the rank, and no process has joined it as this rank yet.
    Free,
}

/// Whether the round has a place for the rank of `place`.
///
/// # Errors
/// Those of the store.
fn seat_in(round: &Round, place: &Rendezvous, store: &Arc<dyn Store>) -> Result<Seat> {
    if !round.is_open_for(place.rank) {
        return Ok(Seat::None);
    }
    let place = place_in(place, round);
    let root = session::part_for_next_world(store, place.attempt)?;
    let is_taken = root.check(&[place.check_in_keys().rank()])?;
    Ok(if is_taken { Seat::Taken } else { Seat::Free })
}

/// Why this process has not joined yet.
enum Missed {
    /// The ranks of the job have begun no round.
    NoRound,
    /// In the newest round the process of this rank stays, or there is no such rank.
    Closed(Round),
    /// Another process has joined the newest round as this rank.
    Taken(Round),
    /// The ranks did not find each other in the round of this attempt.
    Failed(u32, Error),
}

impl Missed {
    /// Whether `round` is newer than the one that was missed.
    fn is_older_than(&self, round: &Round) -> bool {
        match self {
            Self::NoRound => true,
            Self::Closed(missed) | Self::Taken(missed) => missed.attempt < round.attempt,
            Self::Failed(attempt, _) => *attempt < round.attempt,
        }
    }

    /// The error of a process that could not join within `limit`.
    fn into_error(self, place: &Rendezvous, limit: Duration) -> Error {
        let (rank, job, limit) = (place.rank, &place.job, text::duration(limit));
        let message = match self {
            Self::Failed(_, error) => return error,
            Self::NoRound => format!(
                "rank {rank} cannot join job {job:?}: its ranks did not call World::grow within {limit}"
            ),
            Self::Closed(round) => format!(
                "rank {rank} cannot join job {job:?}: its ranks wanted {round}, and nothing else within {limit}"
            ),
            Self::Taken(round) => format!(
                "rank {rank} cannot join job {job:?}: its ranks wanted {round}, to which another process came as rank \
                 {rank} before this one, and nothing else within {limit}"
            ),
        };
        Error::new(ErrorKind::Rendezvous, message).with_rank(rank)
    }
}
