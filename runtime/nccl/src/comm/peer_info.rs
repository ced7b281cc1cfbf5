//! How the ranks of a communicator find each other over the store. Each rank publishes a [`PeerInfo`] (its rank, device
//! and library), and the first rank reads and compares all of them.
//!
//! The first rank waits for one counter, reads every value once, and publishes one outcome: the unique ids, or the
//! reason why these ranks cannot form a communicator. All other ranks wait for the outcome's key. So N ranks read O(N)
//! keys in total; if every rank read every value, they would read N² keys.
//!
//! The keys do not stay. Each rank removes its value once it has read the ids, since the first rank has read all values
//! by then; the last rank to join removes the rest (`joined`).
//!
//! Ranks on the same device (unless sharing is allowed), with libraries of different versions, or with different
//! selections of algorithms are refused here, with their numbers: NCCL could hang.

use super::arrivals::remove;
use super::members::BootstrapGroup;
use crate::context::options::DeviceSharing;
use crate::library::Version;
use crate::library::sys::UniqueId;
use rcomm_core::store::Store;
use rcomm_core::{Error, ErrorKind, Result};
use rcomm_recorder::model::Rank;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::Duration;

/// The description that a rank publishes of itself before it joins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PeerInfo {
    pub(crate) rank: Rank,
    pub(crate) host: String,
    pub(crate) device: u16,
    pub(crate) uuid: String,
    /// `NCCL_VERSION_CODE`.
    pub(crate) version: i32,
    /// The algorithms that the rank's library may use, if they are limited.
    pub(crate) algorithms: Option<String>,
    /// A unique id, if this rank makes one.
    pub(crate) id: Option<Vec<u8>>,
}

impl PeerInfo {
    /// Checks whether these ranks can form one communicator.
    ///
    /// # Errors
    /// Names the ranks that do not fit together, and why.
    fn check_all(infos: &[Self], devices: DeviceSharing) -> Result<(), String> {
        let Some(first) = infos.first() else {
            return Ok(());
        };
        let mut by_device: BTreeMap<&str, &Self> = BTreeMap::new();
        for info in infos {
            if info.version != first.version {
                return Err(format!(
                    "the ranks have different releases of NCCL: rank {} has {}, rank {} has {}: load the same one on all",
                    first.rank,
                    Version(first.version),
                    info.rank,
                    Version(info.version)
                ));
            }
            if info.algorithms != first.algorithms {
                let named =
                    |info: &Self| info.algorithms.clone().unwrap_or_else(|| "all".to_owned());
                return Err(format!(
                    "the ranks let NCCL use different algorithms: rank {} has {}, rank {} has {}: set \
                     RCOMM_NCCL_ALGORITHMS to the same value on all",
                    first.rank,
                    named(first),
                    info.rank,
                    named(info)
                ));
            }
            // Only the UUID is compared: two containers of one machine may have different host names. MIG instances
            // of one device have different UUIDs.
            if let Some(other) = by_device.insert(&info.uuid, info)
                && devices == DeviceSharing::Refused
            {
                return Err(format!(
                    "rank {} (cuda:{}) and rank {} (cuda:{}) use the same device {} of host {}: give each a \
                     device of its own, or set NCCL_MULTI_RANK_GPU_ENABLE=1 with NCCL 2.30 or later",
                    other.rank, other.device, info.rank, info.device, info.uuid, info.host
                ));
            }
        }
        Ok(())
    }
}

/// Why a rank gives up, as it tells the others.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct GivenUp {
    rank: Rank,
    reason: String,
    /// Whether the rank has only waited in vain: another rank is at fault, and it may be unknown which.
    has_timed_out: bool,
}

impl GivenUp {
    pub(super) fn new(rank: Rank, error: &Error) -> Self {
        Self {
            rank,
            reason: error.to_string(),
            has_timed_out: error.kind() == ErrorKind::Timeout,
        }
    }

    /// Returns the value for the store.
    ///
    /// # Errors
    /// `Rendezvous` if it cannot be written.
    pub(super) fn to_bytes(&self) -> Result<Vec<u8>> {
        serde_json::to_vec(self).map_err(|error| unreadable("written", error))
    }

    /// Reads a value of the store.
    ///
    /// # Errors
    /// `Rendezvous` if it cannot be read.
    pub(super) fn from_bytes(bytes: &[u8]) -> Result<Self> {
        serde_json::from_slice(bytes).map_err(|error| unreadable("read", error))
    }

    /// The error of another rank that learns of this. The rank that gives up is its cause, unless it has timed out.
    pub(super) fn error_elsewhere(&self) -> Error {
        let message = format!("rank {} could not join: {}", self.rank, self.reason);
        match self.has_timed_out {
            true => Error::new(ErrorKind::Timeout, message),
            false => Error::new(ErrorKind::PeerLost, message).with_rank(self.rank),
        }
    }
}

/// The outcome of the exchange, for all ranks. The first rank publishes it, or a rank that gives up before.
#[derive(Debug, Serialize, Deserialize)]
enum Outcome {
    /// The ranks may join with these ids.
    Ids(Vec<Vec<u8>>),
    /// The ranks cannot join, for this reason.
    Refused(String),
    /// A rank gave up.
    GivenUp(GivenUp),
}

/// The key of the number of ranks whose values may be read.
const COUNTER: &str = "arrived";
/// The key of the [`Outcome`].
const OUTCOME: &str = "verdict";
/// The largest number of values that are requested at once, so that a reply stays small.
pub(super) const MAX_KEYS_PER_READ: usize = 256;
/// How long the store may take to return values that are already there.
const STORE_TIME: Duration = Duration::from_secs(10);

/// Publishes this rank's [`PeerInfo`] for the first rank.
///
/// # Errors
/// `Store`; `Rendezvous` if the description cannot be written.
pub(crate) fn publish_info(members: &BootstrapGroup, info: &PeerInfo) -> Result<()> {
    let info = serde_json::to_vec(info).map_err(|error| unreadable("written", error))?;
    members.store.set(&info_key(members.own_index), &info)?;
    // The value is written before the counter: the counter is the number of values that may be read.
    members.store.add(COUNTER, 1).map(drop)
}

/// Returns the unique ids; `None` until all ranks have arrived and the first rank has compared their descriptions.
///
/// # Errors
/// `Rendezvous` names ranks that do not fit together, or says that a published value cannot be read; those of
/// [`GivenUp::error_elsewhere`]; `Store`.
pub(crate) fn poll(
    members: &BootstrapGroup,
    devices: DeviceSharing,
) -> Result<Option<Vec<UniqueId>>> {
    let store = &members.store;
    if members.own_index == 0 && !store.check(&[OUTCOME])? {
        let arrived = store.add(COUNTER, 0)?;
        if arrived < members.ranks.len() as i64 {
            return Ok(None);
        }
        let infos = read_all(members)?;
        let outcome = match PeerInfo::check_all(&infos, devices) {
            Ok(()) => Outcome::Ids(infos.into_iter().filter_map(|info| info.id).collect()),
            Err(reason) => Outcome::Refused(reason),
        };
        publish_outcome(store.as_ref(), &outcome)?;
    } else if members.own_index != 0 && !store.check(&[OUTCOME])? {
        return Ok(None);
    }
    let outcome = store.get(OUTCOME, STORE_TIME)?;
    let outcome = serde_json::from_slice(&outcome).map_err(|error| unreadable("read", error))?;
    match outcome {
        Outcome::Ids(ids) => {
            remove(store.as_ref(), &info_key(members.own_index));
            ids.iter()
                .map(|id| read_id(id))
                .collect::<Result<_>>()
                .map(Some)
        }
        Outcome::Refused(reason) => Err(Error::new(ErrorKind::Rendezvous, reason)),
        Outcome::GivenUp(given_up) => Err(given_up.error_elsewhere()),
    }
}

/// Ends the rendezvous for the ranks that still wait for the outcome. Returns a function that tells whether the rank of
/// an index has arrived. If the ids were published before, all ranks have arrived.
///
/// # Errors
/// `Store`; `Rendezvous` if an outcome cannot be read or written.
pub(super) fn give_up(
    members: &BootstrapGroup,
    given_up: GivenUp,
) -> Result<impl Fn(usize) -> Result<bool> + use<>> {
    let outcome = Outcome::GivenUp(given_up);
    // Once the ids are published, ranks remove their values.
    let all_have_arrived = matches!(
        publish_outcome(members.store.as_ref(), &outcome)?,
        Outcome::Ids(_)
    );
    let store = members.store.clone();
    Ok(move |at: usize| Ok(all_have_arrived || store.check(&[&info_key(at as u32)])?))
}

/// Publishes an outcome. Returns the outcome that the store keeps, which is the first.
fn publish_outcome(store: &dyn Store, outcome: &Outcome) -> Result<Outcome> {
    let outcome = serde_json::to_vec(outcome).map_err(|error| unreadable("written", error))?;
    let kept = store.compare_set(OUTCOME, b"", &outcome)?;
    serde_json::from_slice(&kept).map_err(|error| unreadable("read", error))
}

/// Removes the remaining keys of the exchange. All ranks must have read the outcome.
pub(crate) fn remove_outcome(members: &BootstrapGroup) {
    remove(members.store.as_ref(), COUNTER);
    remove(members.store.as_ref(), OUTCOME);
}

fn info_key(index: u32) -> String {
    format!("peer_info/{index}")
}

fn read_all(members: &BootstrapGroup) -> Result<Vec<PeerInfo>> {
    let keys: Vec<String> = (0..members.ranks.len() as u32).map(info_key).collect();
    let mut infos = Vec::with_capacity(keys.len());
    for keys in keys.chunks(MAX_KEYS_PER_READ) {
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        for info in members.store.multi_get(&keys, STORE_TIME)? {
            let info = serde_json::from_slice(&info).map_err(|error| unreadable("read", error))?;
            infos.push(info);
        }
    }
    Ok(infos)
}

/// Returns the error for a published value that cannot be read or written. `action` is `read` or `written`.
pub(super) fn unreadable(action: &str, error: serde_json::Error) -> Error {
    let message = format!(
        "what a rank has published for the others cannot be {action}: run the same version of rcomm on all ranks"
    );
    Error::new(ErrorKind::Rendezvous, message).with_source(error)
}

fn read_id(bytes: &[u8]) -> Result<UniqueId> {
    let internal = bytes.try_into().map_err(|_| {
        Error::new(
            ErrorKind::Rendezvous,
            format!(
                "a rank has published a unique id of {} bytes; those of NCCL have {}",
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
    use crate::comm::counting_store::CountingStore;
    use crate::comm::members::Scope;
    use rcomm_core::store::HashStore;
    use std::sync::Arc;

    fn info(rank: Rank, uuid: &str, version: i32) -> PeerInfo {
        PeerInfo {
            rank,
            host: "a".to_owned(),
            device: 0,
            uuid: uuid.to_owned(),
            version,
            algorithms: None,
            id: None,
        }
    }

    fn refusal(infos: &[PeerInfo]) -> String {
        PeerInfo::check_all(infos, DeviceSharing::Refused).unwrap_err()
    }

    #[test]
    fn ranks_on_the_same_device_are_refused_unless_sharing_is_allowed() {
        let mut infos = [info(4, "x", 1), info(5, "y", 1), info(6, "x", 1)];
        // Rank 6 is in another container of the same machine.
        infos[2].host = "b".to_owned();
        let refusal = refusal(&infos);
        assert!(
            refusal.starts_with("rank 4 (cuda:0) and rank 6 (cuda:0) use the same device x"),
            "{refusal}"
        );
        PeerInfo::check_all(&infos, DeviceSharing::Allowed).unwrap();
    }

    #[test]
    fn ranks_with_different_releases_of_nccl_are_refused() {
        let refusal = refusal(&[info(0, "x", 22_707), info(1, "y", 23_007)]);
        assert!(
            refusal.contains("rank 0 has 2.27.7, rank 1 has 2.30.7: load"),
            "{refusal}"
        );
    }

    #[test]
    fn the_number_of_keys_that_are_read_grows_linearly_with_the_number_of_ranks() {
        const RANKS: u32 = 1024;
        const PER_ID: u32 = 128;
        let store = Arc::new(CountingStore::default());
        let members = |index| BootstrapGroup {
            scope: Scope::Group,
            store: store.clone(),
            ranks: (0..RANKS).collect(),
            own_index: index,
            name: "all".to_owned(),
        };
        let groups: Vec<BootstrapGroup> = (0..RANKS).map(members).collect();
        let mut polls = 0;
        for members in groups.iter().rev() {
            // At least one rank has not arrived, so there is no outcome: the first rank checks two keys, and the
            // second rank one.
            for early in [&groups[0], &groups[1]] {
                let none = poll(early, DeviceSharing::Refused).unwrap();
                assert!(none.is_none());
                polls += 1;
            }
            let index = members.own_index;
            let mut info = info(index, &format!("device {index}"), 23_007);
            info.id = index
                .is_multiple_of(PER_ID)
                .then(|| vec![(index / PER_ID) as u8; UniqueId::BYTES]);
            publish_info(members, &info).unwrap();
        }
        for members in &groups {
            let ids = poll(members, DeviceSharing::Refused).unwrap();
            let ids = ids.expect("all ranks have arrived");
            let firsts: Vec<u8> = ids.iter().map(|id| id.internal[0]).collect();
            assert_eq!(firsts, (0..8).collect::<Vec<u8>>());
        }
        // Each rank increases the counter, checks for the outcome and reads it. The first rank also reads the
        // counter and each value once, and writes the outcome.
        let keys = store.keys() - 3 * polls / 2;
        assert_eq!(keys, u64::from(4 * RANKS + 2));
        // The values are gone; the counter and the outcome go when all have joined.
        assert_eq!(store.num_keys().unwrap(), 2);
        remove_outcome(&groups[0]);
        assert_eq!(store.num_keys().unwrap(), 0);
    }

    #[test]
    fn a_rank_that_gives_up_ends_the_rendezvous_for_all() {
        let store = Arc::new(HashStore::new());
        let members = |index| BootstrapGroup {
            scope: Scope::Group,
            store: store.clone(),
            ranks: vec![4, 5, 6],
            own_index: index,
            name: "all".to_owned(),
        };
        let error = Error::new(ErrorKind::Backend, "no memory");
        let has_arrived = give_up(&members(2), GivenUp::new(6, &error)).unwrap();
        assert!(!has_arrived(0).unwrap());
        for index in [0, 1] {
            let step = poll(&members(index), DeviceSharing::Refused);
            let error = step.err().unwrap();
            assert_eq!(error.kind(), ErrorKind::PeerLost);
            assert_eq!(error.rank(), Some(6));
        }
    }

    #[test]
    fn a_rank_that_gives_up_since_it_has_waited_in_vain_is_not_the_cause() {
        let own = Error::new(ErrorKind::Timeout, "the ranks did not all join");
        let value = GivenUp::new(6, &own).to_bytes().unwrap();
        let error = GivenUp::from_bytes(&value).unwrap().error_elsewhere();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        assert!(error.ranks().is_empty());
        let sentence = "rank 6 could not join: the ranks did not all join";
        assert!(error.to_string().contains(sentence), "{error}");
    }
}
