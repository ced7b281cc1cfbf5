//! The ranks that have joined a communicator, as keys in the store. The last rank to join removes all keys of the
//! rendezvous, since no rank reads them any more. After a failure, the keys stay.

use super::arrivals::{Arrivals, remove};
use super::members::BootstrapGroup;
use super::peer_info;
use rcomm_core::Result;

fn arrivals(members: &BootstrapGroup) -> Arrivals<'_> {
    Arrivals {
        store: members.store.as_ref(),
        name: "joined",
        ranks: members.ranks.len() as u32,
    }
}

/// Publishes that this rank has joined. To be called once by each rank. The last rank removes all keys of the
/// rendezvous.
///
/// # Errors
/// `Store`.
pub(super) fn publish(members: &BootstrapGroup) -> Result<()> {
    let joined = arrivals(members);
    if joined.note(members.own_index)? {
        peer_info::remove_outcome(members);
        for key in joined.keys() {
            remove(joined.store, &key);
        }
    }
    Ok(())
}

/// Returns for each rank, by index, whether it has joined. Once all ranks have joined, the keys are gone, and no rank
/// counts as joined.
///
/// # Errors
/// `Store`.
pub(super) fn read(members: &BootstrapGroup) -> Result<Vec<bool>> {
    arrivals(members).read()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::members::Scope;
    use rcomm_core::store::{HashStore, Store};
    use std::sync::Arc;

    #[test]
    fn no_key_stays_once_all_ranks_have_joined() {
        for ranks in [1, 2, 48, 49, 1024] {
            let store = Arc::new(HashStore::new());
            let members = |own_index| BootstrapGroup {
                scope: Scope::Group,
                store: store.clone(),
                ranks: (0..ranks).collect(),
                own_index,
                name: "all".to_owned(),
            };
            for key in ["arrived", "verdict"] {
                store.set(key, b"1").unwrap();
            }
            for index in (0..ranks).rev() {
                assert!(store.check(&["arrived", "verdict"]).unwrap());
                let joined = read(&members(0)).unwrap();
                let expected: Vec<bool> = (0..ranks).map(|other| other > index).collect();
                assert_eq!(joined, expected);
                publish(&members(index)).unwrap();
            }
            assert_eq!(store.num_keys().unwrap(), 0, "{ranks} ranks");
        }
    }
}
