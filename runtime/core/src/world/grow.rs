//! [`World::grow`]: the remaining ranks, and processes that join, recreate the world.

use super::builder::{Meeting, config_at};
use super::init::open_recorder;
use super::job_secret::JobSecret;
use super::round::Round;
use super::session::{MeetingStore, StoreHost};
use super::{World, WorldBuilder, WorldShared};
use crate::backend::BackendSet;
use crate::config::Config;
use crate::config::rendezvous::Rendezvous;
use crate::op::deadline::Deadline;
use crate::op::error::{Error, ErrorKind, Result};
use crate::store::TcpStoreServer;
use rcomm_recorder::model::Rank;
use rcomm_recorder::record::{FlightRecorder, OnConflict};
use std::sync::Arc;
use std::sync::atomic::Ordering;

impl<B: BackendSet> World<B> {
    /// Recreates this world, with `size` ranks: the remaining processes keep their ranks, and processes that join
    /// ([`Config::joins`], `RCOMM_JOIN=1`) take the other ranks below `size`. So a job continues with replacements for
    /// the ranks that it has lost, or with more ranks than before, without a restart of the remaining processes.
    ///
    /// Every remaining rank calls this with the same list of `lost` ranks
    /// ([`find_absent`](crate::ProcessGroup::find_absent) returns one) and the same size; ranks that were excluded by
    /// [`shrink`](Self::shrink) are not listed again. Afterwards [`group`](Self::group) is the group of all `size`
    /// ranks. All other groups have ended. The program makes those that it needs again, as the processes that joined
    /// do. The processes that joined know nothing of the program's state: the program sends it to them.
    ///
    /// The new world has a new attempt number ([`Rendezvous::attempt`]), in records too: readers judge the newest
    /// attempt. The store must still be there: it must not be served by a rank that was lost.
    ///
    /// # Blocking
    /// Until all `size` ranks have come, for [`Config::init_timeout`] at most; then until the backends have connected,
    /// for at most the same time.
    ///
    /// # Errors
    /// `InvalidArgument` if the caller is in the list, if a listed rank is not in the group, or if `size` leaves no
    /// place for a remaining rank; `Mismatch` if another rank gives another list or size. `Rendezvous` names the ranks
    /// that did not arrive. After these errors the old world is unchanged, except for the groups with a lost member,
    /// which may be aborted. The call may be repeated, also with another list: the n-th calls of all ranks belong
    /// together, not counting those that returned `InvalidArgument` for their arguments. After any other error the
    /// world may have ended: a further call then returns `Closed`. A world whose backends or dump writer are the
    /// program's own needs [`grow_with`](Self::grow_with).
    pub fn grow(&mut self, lost: &[Rank], size: u32) -> Result<()> {
        let builder = Self::builder(Config::clone(&self.shared.config));
        self.grow_with(lost, size, builder)
    }

    /// Like [`grow`](Self::grow), with the configuration, backends and dump writer of `builder`. The world's own store
    /// is used, and its own place in the job.
    ///
    /// # Blocking
    /// See [`grow`](Self::grow).
    ///
    /// # Errors
    /// Those of [`grow`](Self::grow).
    pub fn grow_with(&mut self, lost: &[Rank], size: u32, builder: WorldBuilder<B>) -> Result<()> {
        let round = self.next_round(lost, size)?;
        let (shared, attempt) = (self.shared.clone(), round.attempt);
        shared.abort_groups_with(lost);
        let deadline = Deadline::In(builder.config.init_timeout).started();
        let met = shared.meet_anew(&round, &builder.config, deadline);
        let (meeting, ring) = met.inspect_err(|_| {
            // Also where this rank has not met the others: they count the round, which fails for them too.
            shared.failed_rounds.fetch_add(1, Ordering::Relaxed);
        })?;
        let server = self.end_for_next(deadline);
        *self = builder.build(meeting, server).inspect_err(|error| {
            ring.note_failure(&error.failure(shared.place.rank));
            ring.mark_closed();
        })?;
        tracing::warn!(?lost, size, attempt, "the world was recreated");
        Ok(())
    }

    /// The round that these arguments ask for.
    fn next_round(&self, lost: &[Rank], size: u32) -> Result<Round> {
        let refuse = |message: String| Err(Error::new(ErrorKind::InvalidArgument, message));
        let own_rank = self.shared.place.rank;
        if self.threads.is_none() {
            let message = "this world has ended: it could not be recreated";
            return Err(Error::new(ErrorKind::Closed, message));
        }
        if let Some(outsider) = lost.iter().find(|rank| !self.group.ranks().contains(rank)) {
            return refuse(format!(
                "rank {outsider} is listed as lost and is not in the world's group"
            ));
        }
        if lost.contains(&own_rank) {
            return refuse(format!("rank {own_rank} lists itself as lost"));
        }
        let mut stay = self.group.ranks().to_vec();
        stay.retain(|rank| !lost.contains(rank));
        stay.sort_unstable();
        if let Some(last) = stay.last().filter(|&&last| last >= size) {
            return refuse(format!(
                "a world of {size} has no place for rank {last}: ranks keep their numbers"
            ));
        }
        let failed = self.shared.failed_rounds.load(Ordering::Relaxed);
        Ok(Round {
            attempt: self.shared.place.attempt + 1 + failed,
            size,
            stay,
        })
    }

    /// Ends everything of this world but its store; returns the store's server if it runs in this process.
    fn end_for_next(&mut self, deadline: Deadline) -> Option<TcpStoreServer> {
        for group in self.shared.last_groups().iter().rev() {
            if let Err(error) = group.shut_down(deadline) {
                group.close(None, error);
            }
        }
        let mut threads = self.threads.take()?;
        threads.watchdog.stop();
        let recorder = &self.shared.recorder;
        if self.shared.has_failed() {
            // The record of the failure stays until the job has ended well.
            recorder.mark_closed();
        } else if let Err(error) = recorder.discard() {
            tracing::warn!(%error, "the ring file could not be removed");
        }
        threads.server.take()
    }
}

impl WorldShared {
    /// Meets the ranks of this round. Returns the meeting, and this rank's ring in the new world.
    ///
    /// # Errors
    /// `Mismatch` if another rank wants another round; `Rendezvous` names the ranks that did not arrive; `Io` if
    /// another process has the place of this rank's ring, or the recorder cannot make it; otherwise the store's error,
    /// or `InvalidArgument` for options that cannot be used. The old world is then as it was, and its record is the
    /// newest again.
    fn meet_anew(
        &self,
        round: &Round,
        config: &Config,
        deadline: Deadline,
    ) -> Result<(Meeting, Arc<FlightRecorder>)> {
        round.publish(&*self.store)?;
        let place = place_in(&self.place, round);
        let config = config_at(config, &place);
        let ring = open_recorder(&place, &config, OnConflict::Refuse)?.map(Arc::new);
        let ring = ring.ok_or_else(|| {
            let message = format!(
                "another process records as this rank of attempt {}",
                round.attempt
            );
            Error::new(ErrorKind::Io, message)
        })?;
        let store = MeetingStore::of_unknown_past(self.store.clone(), StoreHost::of(&place));
        let met = JobSecret::of(&config, &place).and_then(|secret| {
            let ring = Some(ring.clone());
            Meeting::hold(place, config, (store, secret), ring, deadline)
        });
        let meeting = met.inspect_err(|_| {
            if let Err(error) = ring.discard() {
                tracing::warn!(%error, "the ring file could not be removed");
            }
        })?;
        Ok((meeting, ring))
    }
}

/// The place of a process in the world of this round.
pub(super) fn place_in(place: &Rendezvous, round: &Round) -> Rendezvous {
    let is_as_large = place.world_size == round.size;
    Rendezvous {
        world_size: round.size,
        attempt: round.attempt,
        // It is not known how many of the added ranks are on this host.
        local_world_size: place.local_world_size.filter(|_| is_as_large),
        ..place.clone()
    }
}
