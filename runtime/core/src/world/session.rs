//! Which part of a store a world uses: a process may make one world after another, and the store of a launcher or of
//! the program outlives them.
//!
//! The key `rcomm/worlds/<attempt>` counts the worlds whose ranks have all left. Within an attempt, the first world
//! uses the store as it is. A later one uses the keys below `rcomm/world/<count>`, so that it finds no key of an
//! earlier world that all ranks have left. A world that some rank never left is not counted: the next one uses the same
//! keys. Ranks of PyTorch read the dump flag (`exception_dump`) without a prefix, so they see only that of an attempt's
//! first world.

use crate::config::Config;
use crate::config::rendezvous::Rendezvous;
use crate::op::deadline::Deadline;
use crate::op::error::{Error, ErrorKind, Result};
use crate::store::{PrefixStore, Store, TcpStore};
use crate::world::init::name_store_host;
use crate::world::job_secret::JobSecret;
use rcomm_recorder::publish::Tls;
use std::sync::Arc;
use std::time::Duration;

/// The pause between two tries to reach the store of a new world.
const RETRY: Duration = Duration::from_millis(5);
/// The least time for a request to the store of a new world.
const LEAST_WAIT: Duration = Duration::from_millis(100);

/// The key of the number of worlds of an attempt whose ranks have all left.
fn ended_worlds_key(attempt: u32) -> String {
    format!("rcomm/worlds/{attempt}")
}

/// Returns the part of the store that the next world uses.
///
/// # Errors
/// Those of the store.
pub(super) fn part_for_next_world(store: &Arc<dyn Store>, attempt: u32) -> Result<Arc<dyn Store>> {
    let ended = store.add(&ended_worlds_key(attempt), 0)?;
    Ok(match ended {
        0 => store.clone(),
        ended => Arc::new(PrefixStore::new(
            format!("rcomm/world/{ended}"),
            store.clone(),
        )),
    })
}

/// Counts a world that all its ranks have left. Called before the ranks learn that all have left, so that none of them
/// makes its next world before the count.
///
/// # Errors
/// Those of the store.
pub(super) fn count_ended_world(store: &dyn Store, attempt: u32) -> Result<()> {
    store.add(&ended_worlds_key(attempt), 1).map(drop)
}

/// Whose process serves the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StoreHost {
    /// Rank 0's.
    Rank0,
    /// The launcher's, or another one that the program has chosen; it may not be known which.
    Other,
}

impl StoreHost {
    /// Who serves the store of a rank at this place, if nothing more is known.
    pub(super) fn of(place: &Rendezvous) -> Self {
        match place.uses_agent_store {
            true => Self::Other,
            false => Self::Rank0,
        }
    }
}

/// The store through which the ranks of a new world meet.
pub(super) struct MeetingStore {
    pub(super) store: Arc<dyn Store>,
    pub(super) host: StoreHost,
    /// Whether it is known that no world of this attempt has ended in it, so that it need not be asked.
    pub(super) is_first: bool,
}

impl MeetingStore {
    /// A store that may have served worlds of this attempt before.
    pub(super) fn of_unknown_past(store: Arc<dyn Store>, host: StoreHost) -> Self {
        Self {
            store,
            host,
            is_first: false,
        }
    }

    /// The part of the store that the next world uses.
    ///
    /// # Errors
    /// Those of the store.
    pub(super) fn part(&self, attempt: u32) -> Result<Arc<dyn Store>> {
        match self.is_first {
            true => Ok(self.store.clone()),
            false => part_for_next_world(&self.store, attempt),
        }
    }
}

/// Connects to the job's TCP store. If rank 0 serves it, a store of rank 0's earlier world is not used, since rank 0 is
/// about to close it: tries again until rank 0 serves the store of a new world.
///
/// # Errors
/// Those of [`JobSecret::connect_store`] and [`JobSecret::connect_to_counter`], and those of the store but `Store`,
/// after which it tries again; `Rendezvous` if there is no store of a new world before the deadline.
pub(super) fn connect(
    secret: &JobSecret,
    config: &Config,
    tls: Option<&Tls>,
    place: &Rendezvous,
    deadline: Deadline,
) -> Result<TcpStore> {
    if place.uses_agent_store || place.serves_store() {
        return secret.connect_store(config, tls, place, deadline.remaining());
    }
    let ended = ended_worlds_key(place.attempt);
    loop {
        let counter = (ended.as_str(), LEAST_WAIT);
        let (store, ended) = secret.connect_to_counter(config, tls, place, deadline, counter)?;
        let closed = match ended {
            Ok(0) => return Ok(store),
            Ok(_) => None,
            // The store was closed before it replied.
            Err(error) if error.kind() == ErrorKind::Store => Some(error),
            Err(error) => return Err(name_store_host(error, &store, StoreHost::Rank0, place.rank)),
        };
        if deadline.remaining().is_zero() {
            let (host, port) = (&place.master_addr, place.master_port);
            let reason = if closed.is_none() {
                "is that of a world that has ended: rank 0 has not begun a new one in time"
            } else {
                "was closed before it replied, and rank 0 did not open another in time"
            };
            let message = format!("the store at {host} port {port} {reason}");
            let error = Error::new(ErrorKind::Rendezvous, message).with_rank(0);
            return Err(match closed {
                Some(closed) => error.with_source(closed),
                None => error,
            });
        }
        std::thread::sleep(RETRY);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::HashStore;

    #[test]
    fn a_later_world_finds_no_key_of_an_earlier_one() {
        let store: Arc<dyn Store> = Arc::new(HashStore::new());
        for world in 0..3_u8 {
            let part = part_for_next_world(&store, 0).unwrap();
            assert!(!part.check(&["key"]).unwrap());
            part.set("key", &[world]).unwrap();
            // Every rank of a world uses the same part.
            let other = part_for_next_world(&store, 0).unwrap();
            assert_eq!(other.get("key", Duration::ZERO).unwrap(), [world]);
            count_ended_world(&*store, 0).unwrap();
        }
        // Worlds are counted for each attempt: the first world of another attempt uses the store as it is, and finds
        // the key of the first world.
        assert!(
            part_for_next_world(&store, 1)
                .unwrap()
                .check(&["key"])
                .unwrap()
        );
    }
}
