//! How the ranks of a communicator find each other over the store, step by step.
//!
//! Each rank leaves a card (who it is, its device, its library), the first of them an id, and each reads
//! all before it joins: so that two ranks on one device, and libraries that differ, are refused in words
//! rather than by a hang. A rank that gives up says so, and the others stop waiting for it.

use super::Shared;
use super::birth::{Birth, Seat, Step};
use super::comm::Comm;
use super::options::DeviceSharing;
use super::sys::UniqueId;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result};
use crate::store::Store;
use rcomm_recorder::model::Rank;
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What a rank says of itself before it joins.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Card {
    rank: Rank,
    host: String,
    device: u16,
    uuid: String,
    /// `NCCL_VERSION_CODE`.
    version: i32,
}

impl Card {
    /// Says what keeps these ranks from forming one communicator, if anything does.
    fn check_all(cards: &[Card], devices: DeviceSharing) -> Result<()> {
        let Some(first) = cards.first() else {
            return Ok(());
        };
        let version = |card: &Card| super::library::Version(card.version);
        for (at, card) in cards.iter().enumerate() {
            if card.version != first.version {
                return Err(Error::new(
                    ErrorKind::Rendezvous,
                    format!(
                        "the ranks have different releases of NCCL: rank {} has {}, rank {} has {}",
                        first.rank,
                        version(first),
                        card.rank,
                        version(card)
                    ),
                ));
            }
            let same = |other: &&Card| other.host == card.host && other.uuid == card.uuid;
            if devices == DeviceSharing::Refused
                && let Some(other) = cards[..at].iter().find(same)
            {
                return Err(Error::new(
                    ErrorKind::Rendezvous,
                    format!(
                        "rank {} (cuda:{}) and rank {} (cuda:{}) use the same device {} of host {}: \
                         give each a device of its own, or set NCCL_MULTI_RANK_GPU_ENABLE=1 with NCCL \
                         2.30 or later",
                        other.rank, other.device, card.rank, card.device, card.uuid, card.host
                    ),
                ));
            }
        }
        Ok(())
    }
}

/// Whose communicator it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scope {
    /// All members of the group, under their ranks there.
    Group,
    /// Two of them: who sends, and who receives.
    Pair,
}

/// Who is to join, and where they meet.
pub(super) struct Meeting {
    pub(super) scope: Scope,
    /// Prefixed for this one communicator.
    pub(super) store: Arc<dyn Store>,
    /// The members' ranks in the world, in the order of their ranks in the communicator.
    pub(super) ranks: Vec<Rank>,
    /// This rank's place among them.
    pub(super) own: u32,
    /// What the library's logs call the communicator.
    pub(super) name: String,
}

enum Stage {
    Cards,
    Joining(Birth),
    Joined(Option<Comm>),
}

/// One rank's way into a communicator.
pub(super) struct Rally {
    meeting: Meeting,
    stage: Stage,
    next_look: Instant,
    pause: Duration,
    ids: Vec<UniqueId>,
}

impl Rally {
    const FIRST_PAUSE: Duration = Duration::from_micros(200);
    const LONGEST_PAUSE: Duration = Duration::from_millis(50);

    /// Leaves this rank's card, and its id if it is among those that make one.
    ///
    /// # Errors
    /// `Store`; `Backend` if the library cannot make an id.
    pub(super) fn begin(shared: &Shared, meeting: Meeting) -> Result<Self> {
        let own = meeting.own;
        let card = Card {
            rank: meeting.ranks[own as usize],
            host: shared.host.clone(),
            device: shared.device.ordinal(),
            uuid: shared.device.uuid(),
            version: shared.library.version().0,
        };
        let card = serde_json::to_vec(&card).map_err(|error| {
            Error::new(ErrorKind::Rendezvous, "a card cannot be written").with_source(error)
        })?;
        let per_id = shared.options.ranks_per_id.max(1);
        if own.is_multiple_of(per_id) {
            let id = shared.library.unique_id()?;
            let key = format!("id/{}", own / per_id);
            meeting.store.set(&key, &id.internal)?;
        }
        meeting.store.set(&format!("card/{own}"), &card)?;
        Ok(Self {
            meeting,
            stage: Stage::Cards,
            next_look: Instant::now(),
            pause: Self::FIRST_PAUSE,
            ids: Vec::new(),
        })
    }

    /// Goes as far as it can without waiting; `true` when all ranks have joined.
    ///
    /// # Errors
    /// `Rendezvous` names ranks that do not fit together; `PeerLost` names the rank that gave up.
    pub(super) fn step(&mut self, shared: &Shared) -> Result<bool> {
        if Instant::now() < self.next_look {
            return Ok(false);
        }
        let result = self.try_step(shared);
        self.next_look = Instant::now() + self.pause;
        self.pause = (self.pause * 2).min(Self::LONGEST_PAUSE);
        result
    }

    /// The communicator, once [`step`](Self::step) has said that it is there.
    pub(super) fn into_comm(self) -> Option<(Comm, Vec<UniqueId>)> {
        match self.stage {
            Stage::Cards | Stage::Joining(_) => None,
            Stage::Joined(comm) => Some((comm?, self.ids)),
        }
    }

    fn try_step(&mut self, shared: &Shared) -> Result<bool> {
        if let Stage::Cards = self.stage {
            let per_id = shared.options.ranks_per_id.max(1);
            let size = self.meeting.ranks.len() as u32;
            let cards = (0..size).map(|at| format!("card/{at}"));
            let ids = (0..size.div_ceil(per_id)).map(|at| format!("id/{at}"));
            let keys: Vec<String> = cards.chain(ids).collect();
            let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
            let store = &self.meeting.store;
            if !store.check(&keys)? {
                self.look_for_failure()?;
                return Ok(false);
            }
            let values = store.multi_get(&keys, Duration::from_secs(10))?;
            let (cards, ids) = values.split_at(size as usize);
            let cards = cards.iter().map(|card| read_card(card));
            let cards = cards.collect::<Result<Vec<Card>>>()?;
            Card::check_all(&cards, shared.options.device_sharing)?;
            self.ids = ids.iter().map(|id| read_id(id)).collect::<Result<_>>()?;
            let seat = Seat {
                ids: self.ids.clone(),
                rank: self.meeting.own,
                size,
                name: self.meeting.name.clone(),
            };
            let _entered = shared.device.enter()?;
            let birth = Birth::join(&shared.library, &shared.device, seat, &shared.options.comm)?;
            self.stage = Stage::Joining(birth);
        }
        if let Stage::Joining(birth) = &mut self.stage
            && let Step::Ready(comm) = birth.step()?
        {
            self.stage = Stage::Joined(comm);
            self.say("joined", "")?;
        }
        if let Stage::Joined(_) = self.stage {
            return Ok(true);
        }
        self.look_for_failure()?;
        Ok(false)
    }

    /// Stops where another rank has given up.
    fn look_for_failure(&self) -> Result<()> {
        let store = &self.meeting.store;
        if !store.check(&["failed"])? {
            return Ok(());
        }
        let said = store.get("failed", Duration::from_secs(10))?;
        let said = String::from_utf8_lossy(&said).into_owned();
        let (rank, why) = said.split_once(' ').unwrap_or(("", &said));
        let error = Error::new(
            ErrorKind::PeerLost,
            format!("rank {rank} could not join: {why}"),
        );
        Err(match rank.parse() {
            Ok(rank) => error.with_rank(rank),
            Err(_) => error,
        })
    }

    fn say(&self, word: &str, text: &str) -> Result<()> {
        let key = format!("{word}/{}", self.meeting.own);
        self.meeting.store.set(&key, text.as_bytes())
    }

    /// Tells the others that this rank gives up, and says who is to blame as far as can be told.
    ///
    /// # Blocking
    /// For `patience` at most, until every other rank that is alive has said what became of it.
    pub(super) fn give_up(&self, error: Error, patience: Duration) -> Error {
        match self.try_give_up(&error, patience) {
            Ok(more) => error.with_more(&more),
            Err(_) => error,
        }
    }

    fn try_give_up(&self, error: &Error, patience: Duration) -> Result<String> {
        let own = self.meeting.ranks[self.meeting.own as usize];
        let store = &self.meeting.store;
        // The first to give up is the one that the others name.
        store.compare_set("failed", b"", format!("{own} {error}").as_bytes())?;
        self.say("left", "")?;
        let deadline = Deadline::In(patience).started();
        let (mut absent, mut mute) = self.look_for_silent()?;
        while !deadline.has_passed() {
            if absent.is_empty() && mute.is_empty() {
                break;
            }
            std::thread::sleep(Self::LONGEST_PAUSE);
            // The rank that serves the store may have given up, too: what is known then has to do.
            match self.look_for_silent() {
                Ok(silent) => (absent, mute) = silent,
                Err(_) => break,
            }
        }
        let mut said = Vec::new();
        if !absent.is_empty() {
            said.push(format!("did not come: rank {}", absent.join(", ")));
        }
        if !mute.is_empty() {
            said.push(format!(
                "came, and is silent since: rank {}",
                mute.join(", ")
            ));
        }
        Ok(said.join("; "))
    }
}

impl Rally {
    /// Ranks that have not said what became of them: those that never came, and those that did.
    fn look_for_silent(&self) -> Result<(Vec<String>, Vec<String>)> {
        let store = &self.meeting.store;
        let (mut absent, mut mute) = (Vec::new(), Vec::new());
        for (at, rank) in self.meeting.ranks.iter().enumerate() {
            let has_said = |word: &str| store.check(&[&format!("{word}/{at}")]);
            if has_said("left")? || has_said("joined")? {
                continue;
            }
            if has_said("card")? {
                mute.push(rank.to_string());
            } else {
                absent.push(rank.to_string());
            }
        }
        Ok((absent, mute))
    }
}

fn read_card(bytes: &[u8]) -> Result<Card> {
    serde_json::from_slice(bytes).map_err(|error| {
        Error::new(
            ErrorKind::Rendezvous,
            "another rank's card cannot be read: is it of another version of rcomm?",
        )
        .with_source(error)
    })
}

fn read_id(bytes: &[u8]) -> Result<UniqueId> {
    let internal = bytes.try_into().map_err(|_| {
        Error::new(
            ErrorKind::Rendezvous,
            format!(
                "a unique id of {} bytes, not {}",
                bytes.len(),
                UniqueId::BYTES
            ),
        )
    })?;
    Ok(UniqueId { internal })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card(rank: Rank, uuid: &str, version: i32) -> Card {
        Card {
            rank,
            host: "a".to_owned(),
            device: 0,
            uuid: uuid.to_owned(),
            version,
        }
    }

    fn refusal(cards: &[Card]) -> String {
        let refused = Card::check_all(cards, DeviceSharing::Refused);
        refused.unwrap_err().to_string()
    }

    #[test]
    fn ranks_on_one_device_are_named() {
        let cards = [card(4, "x", 1), card(5, "y", 1), card(6, "x", 1)];
        let refusal = refusal(&cards);
        assert!(
            refusal.starts_with("rank 4 (cuda:0) and rank 6 (cuda:0) use the same device x"),
            "{refusal}"
        );
        Card::check_all(&cards, DeviceSharing::Allowed).unwrap();
    }

    #[test]
    fn ranks_with_different_releases_are_named() {
        let refusal = refusal(&[card(0, "x", 22_707), card(1, "y", 23_007)]);
        assert!(
            refusal.ends_with("rank 0 has 2.27.7, rank 1 has 2.30.7"),
            "{refusal}"
        );
    }
}
