//! Which ranks have joined a communicator, as bits of counters in the store: a key for 48 ranks, and not one for each,
//! since these keys stay there. The last rank to join removes the other keys of the rendezvous, which all have read by
//! then. After a failure they stay.

use super::members::BootstrapGroup;
use super::peer_info;
use rcomm_core::Result;

/// The bits of a sum of the store's, which has a sign.
const RANKS_PER_KEY: u32 = 48;
/// Counts the keys of which all ranks have joined.
const FULL: &str = "joined/full";

fn key_of(index: u32) -> String {
    format!("joined/{}", index / RANKS_PER_KEY)
}

fn bit_of(index: u32) -> i64 {
    1 << (index % RANKS_PER_KEY)
}

/// Publishes that this rank has joined. A rank does so once.
///
/// # Errors
/// `Store`.
pub(super) fn publish(members: &BootstrapGroup) -> Result<()> {
    let (ranks, own) = (members.ranks.len() as u32, members.own_index);
    let store = &members.store;
    let first = own / RANKS_PER_KEY * RANKS_PER_KEY;
    let all: i64 = (first..ranks.min(first + RANKS_PER_KEY)).map(bit_of).sum();
    // One rank sees the last bit of a key, and one the last key.
    if store.add(&key_of(own), bit_of(own))? != all {
        return Ok(());
    }
    let keys = ranks.div_ceil(RANKS_PER_KEY);
    if keys == 1 || store.add(FULL, 1)? == i64::from(keys) {
        peer_info::remove_outcome(members);
    }
    Ok(())
}

/// The ranks that have joined, by their index.
///
/// # Errors
/// `Store`.
pub(super) fn read(members: &BootstrapGroup) -> Result<Vec<bool>> {
    let ranks = members.ranks.len() as u32;
    let mut joined = Vec::with_capacity(ranks as usize);
    for first in (0..ranks).step_by(RANKS_PER_KEY as usize) {
        let bits = members.store.add(&key_of(first), 0)?;
        let of_key = first..ranks.min(first + RANKS_PER_KEY);
        joined.extend(of_key.map(|index| bits & bit_of(index) != 0));
    }
    Ok(joined)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::comm::members::Scope;
    use rcomm_core::store::{HashStore, Store};
    use std::sync::Arc;

    #[test]
    fn few_keys_stay_once_all_ranks_have_joined() {
        for (ranks, left) in [(1, 1), (2, 1), (48, 1), (49, 3), (1024, 23)] {
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
                let expected: Vec<bool> = (0..ranks).map(|it| it > index).collect();
                assert_eq!(joined, expected);
                publish(&members(index)).unwrap();
            }
            assert!(read(&members(0)).unwrap().iter().all(|it| *it));
            assert_eq!(store.num_keys().unwrap(), left, "{ranks} ranks");
        }
    }
}
