//! Which part of a store a world uses: a process may make one world after another, and the store of a launcher or of
//! the program outlives them.
//!
//! The key `rcomm/worlds/<attempt>` counts the worlds whose ranks have all left. The first world uses the store as it
//! is, a later one the keys below `rcomm/world/<count>`, so that it finds no key of an earlier one. Ranks of PyTorch
//! see the dump flag of the first world only.

use crate::config::Config;
use crate::config::rendezvous::Rendezvous;
use crate::op::deadline::Deadline;
use crate::op::error::{Error, ErrorKind, Result};
use crate::store::{PrefixStore, Store, TcpStore};
use crate::world::job_secret::JobSecret;
use rcomm_recorder::publish::Tls;
use std::sync::Arc;
use std::time::Duration;

/// The pause between two attempts to reach the store of a new world.
const RETRY: Duration = Duration::from_millis(5);

/// The key that counts the worlds that have ended.
fn worlds(attempt: u32) -> String {
    format!("rcomm/worlds/{attempt}")
}

/// Returns the part of the store that the next world uses.
///
/// # Errors
/// Those of the store.
pub(super) fn part_for_next_world(store: &Arc<dyn Store>, attempt: u32) -> Result<Arc<dyn Store>> {
    let ended = store.add(&worlds(attempt), 0)?;
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
    store.add(&worlds(attempt), 1).map(drop)
}

/// Connects to the job's TCP store. A store of rank 0's earlier world, which rank 0 is about to close, is not used.
///
/// # Errors
/// Those of [`JobSecret::connect_store`]; `Rendezvous` if rank 0 does not begin a new world before the deadline.
pub(super) fn connect(
    secret: &JobSecret,
    config: &Config,
    tls: Option<&Tls>,
    place: &Rendezvous,
    deadline: Deadline,
) -> Result<TcpStore> {
    loop {
        let store = secret.connect_store(config, tls, place, deadline.remaining())?;
        if place.uses_agent_store || place.serves_store() {
            return Ok(store);
        }
        match store.add(&worlds(place.attempt), 0) {
            Ok(0) => return Ok(store),
            // Also where the store was closed before it replied.
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::Store => {}
            Err(error) => return Err(error),
        }
        if deadline.remaining().is_zero() {
            let message = format!(
                "the store at {} port {} is that of a world that has ended: rank 0 has not begun a new one",
                place.master_addr, place.master_port
            );
            return Err(Error::new(ErrorKind::Rendezvous, message).with_rank(0));
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
