//! A shared map through which ranks exchange small values before they are connected.
//!
//! [`Store`] is the map that every implementation offers; [`QueueStore`] adds queues, which some implementations
//! offer. [`HashStore`] serves the threads of one process, [`FileStore`] the processes that share a file system,
//! [`TcpStore`] all other jobs, and [`PrefixStore`] gives each user of a store separate names.
//! [`rendezvous`](crate::config::rendezvous) describes how ranks find their store.

#![forbid(unsafe_code)]

mod collectives;
mod file;
mod hash;
pub(crate) mod limit;
mod prefix;
mod query;
mod table;
mod tcp;

pub use collectives::StoreCollectives;
pub use file::FileStore;
pub use hash::HashStore;
pub use prefix::PrefixStore;
pub use query::StoreQuery;
pub use tcp::addresses_of;
pub use tcp::{StoreAccess, StoreChoice, StoreLimits, TcpStore, TcpStoreServer};

use crate::op::error::{Error, ErrorKind, Result};
use rcomm_recorder::model::text;
use std::time::{Duration, Instant};

/// A request that never waits for another rank: several go to the store in one [`Store::batch`].
#[derive(Clone, Copy, Debug)]
pub enum BatchRequest<'a> {
    /// Like [`Store::set`].
    Set {
        /// The key to set.
        key: &'a str,
        /// The new value.
        value: &'a [u8],
    },
    /// Like [`Store::add`].
    Add {
        /// The counter.
        key: &'a str,
        /// The number to add.
        delta: i64,
    },
    /// Like [`Store::compare_set`].
    CompareSet {
        /// The key to compare and set.
        key: &'a str,
        /// The expected value.
        expected: &'a [u8],
        /// The new value.
        desired: &'a [u8],
    },
}

impl<'a> BatchRequest<'a> {
    fn key(&self) -> &'a str {
        match *self {
            Self::Set { key, .. } | Self::Add { key, .. } | Self::CompareSet { key, .. } => key,
        }
    }

    /// The same request for the key `name`.
    fn renamed(mut self, name: &'a str) -> Self {
        match &mut self {
            Self::Set { key, .. } | Self::Add { key, .. } | Self::CompareSet { key, .. } => {
                *key = name;
            }
        }
        self
    }
}

/// The reply to a [`BatchRequest`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BatchReply {
    /// The key was set.
    Done,
    /// The counter's new value.
    Count(i64),
    /// The value that [`Store::compare_set`] returns.
    Value(Vec<u8>),
}

/// A small shared map from keys to bytes.
///
/// # Blocking
/// `get`, `multi_get` and `wait` block until the keys are there, `barrier` until the ranks have called it, all
/// for at most `timeout`; no other method waits for another rank.
///
/// # Thread safety
/// Every method may be called from any thread at any time. A call that waits does not delay the calls of other
/// threads.
///
/// # Errors
/// [`ErrorKind::Timeout`] names the keys that were not there in time, gives the number of ranks that reached a barrier,
/// or says that the store did not answer; [`ErrorKind::Store`] describes the failure of the store, [`ErrorKind::Io`]
/// that of its file; [`ErrorKind::InvalidArgument`] names a limit of the store that a request exceeds.
pub trait Store: Send + Sync {
    /// Sets `key`, replacing the value that it had, and wakes the callers that wait for it.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;

    /// The value of `key`, once it is there.
    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>>;

    /// Adds to a counter (0 before the first `add`) and returns its new value.
    ///
    /// The counter is stored as decimal text, as in PyTorch.
    fn add(&self, key: &str, delta: i64) -> Result<i64>;

    /// Like [`add`](Self::add), for callers that may not be delayed: where the store may stop answering,
    /// this waits for at most `timeout`. The number may have been added even if this fails.
    fn add_within(&self, key: &str, delta: i64, timeout: Duration) -> Result<i64> {
        let _ = timeout;
        self.add(key, delta)
    }

    /// Sets `key` to `desired` if it holds `expected` (or is absent and `expected` is empty); returns
    /// what it holds afterwards, or `expected` where the key is absent and `expected` is not empty.
    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>>;

    /// Waits until every key is there.
    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()>;

    /// Whether every key is there now.
    fn check(&self, keys: &[&str]) -> Result<bool>;

    /// Removes `key`; returns whether it was there.
    fn delete(&self, key: &str) -> Result<bool>;

    /// The number of keys. A [`TcpStore`] also counts keys of its server that [`list_keys`](Self::list_keys) leaves
    /// out.
    fn num_keys(&self) -> Result<u64>;

    /// The names of all keys, in no particular order.
    fn list_keys(&self) -> Result<Vec<String>>;

    /// Appends `value` to the value of `key` (empty if absent), and wakes the callers that wait for `key`.
    fn append(&self, key: &str, value: &[u8]) -> Result<()>;

    /// The values of all `keys`, in their order, once every one is there.
    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>>;

    /// Sets every pair, in order. A reader may see the first without the last.
    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()>;

    /// Makes these requests in this order, and returns their replies. A [`TcpStore`] takes one round trip for all.
    /// Other users of the store may see the first request done and the last not.
    ///
    /// # Errors
    /// Those of the first request that fails; later requests may have been made or not.
    fn batch(&self, requests: &[BatchRequest<'_>]) -> Result<Vec<BatchReply>> {
        let make = |request: &BatchRequest<'_>| {
            Ok(match *request {
                BatchRequest::Set { key, value } => {
                    self.set(key, value)?;
                    BatchReply::Done
                }
                BatchRequest::Add { key, delta } => BatchReply::Count(self.add(key, delta)?),
                BatchRequest::CompareSet {
                    key,
                    expected,
                    desired,
                } => BatchReply::Value(self.compare_set(key, expected, desired)?),
            })
        };
        requests.iter().map(make).collect()
    }

    /// Returns once `world_size` calls have named `key`.
    ///
    /// The count stays stored under `key`, so a key serves for one barrier only.
    fn barrier(&self, key: &str, world_size: u32, timeout: Duration) -> Result<()>;

    /// The host and port of the process that serves this store, for messages; `None` if no such process is known.
    fn server(&self) -> Option<String> {
        None
    }

    /// Whether every call ends by the time that the calling thread has set for its requests ([`StoreQuery::here`]),
    /// also if the store has stopped answering. `false` unless an implementation says otherwise: such a store is asked
    /// on a thread of its own where the caller must not wait longer.
    fn obeys_limits(&self) -> bool {
        false
    }
}

/// A [`Store`] that also has first-in-first-out queues.
///
/// The names of queues are separate: a key and a queue may share a name. A queue that is not empty
/// satisfies `wait` and `check` for its name; `num_keys` and `list_keys` leave queues out.
pub trait QueueStore: Store {
    /// Adds `value` to the end of the queue, and wakes at least one of the callers that wait for it.
    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()>;

    /// Takes the first value of the queue, once there is one.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] if there was none within `timeout`.
    fn queue_pop(&self, key: &str, timeout: Duration) -> Result<Vec<u8>>;

    /// Takes the first value of the queue if there is one now.
    fn try_queue_pop(&self, key: &str) -> Result<Option<Vec<u8>>>;

    /// How many values the queue holds.
    fn queue_len(&self, key: &str) -> Result<u64>;
}

/// Whether each of the keys is present; `false` also for a key that could not be checked by `until`, or if the
/// store failed.
pub(crate) fn which_are_set(store: &dyn Store, keys: &[&str], until: Instant) -> Vec<bool> {
    let found = look_up(store, keys, until).into_iter();
    found.map(|found| found.unwrap_or(false)).collect()
}

/// Which keys are not present, as far as the store said it.
#[derive(Debug)]
pub struct Absence {
    /// The positions of keys that are not present.
    known: Vec<usize>,
    /// Why other keys could not be checked: they may be present.
    unknown: Option<Error>,
}

impl Absence {
    /// The positions of all keys that are not present.
    ///
    /// # Errors
    /// The store's, if some keys could not be checked.
    pub fn all(self) -> Result<Vec<usize>> {
        self.unknown.map_or(Ok(self.known), Err)
    }

    /// The positions of keys that are not present; there may be more of them if some could not be checked.
    ///
    /// # Errors
    /// The store's, if no key is known to be absent and some could not be checked.
    pub fn at_least(self) -> Result<Vec<usize>> {
        match self.unknown {
            Some(error) if self.known.is_empty() => Err(error),
            _ => Ok(self.known),
        }
    }
}

/// Which of the keys are not present, as far as the store says it by `until`.
///
/// # Blocking
/// At most until `until`, if the store obeys limits ([`Store::obeys_limits`]).
pub fn absent_among(store: &dyn Store, keys: &[&str], until: Instant) -> Absence {
    let mut absence = Absence {
        known: Vec::new(),
        unknown: None,
    };
    for (index, found) in look_up(store, keys, until).into_iter().enumerate() {
        match found {
            Ok(true) => {}
            Ok(false) => absence.known.push(index),
            Err(error) => absence.unknown = Some(error),
        }
    }
    absence
}

/// Whether each of the keys is present. One request checks all keys; if one is missing, the halves are checked
/// separately. If few keys are missing, this takes a few round trips.
fn look_up(store: &dyn Store, keys: &[&str], until: Instant) -> Vec<Result<bool>> {
    if keys.is_empty() {
        return Vec::new();
    }
    let found = match Instant::now() < until {
        true => limit::with_limit(until, || store.check(keys)),
        false => {
            let message = "the store was not asked for all keys in time";
            Err(Error::new(ErrorKind::Timeout, message))
        }
    };
    match found {
        Ok(false) if keys.len() > 1 => {
            let (left, right) = keys.split_at(keys.len() / 2);
            let mut found = look_up(store, left, until);
            found.append(&mut look_up(store, right, until));
            found
        }
        found => vec![found; keys.len()],
    }
}

/// Raises a counter to `least` if it is lower, and returns what it was.
pub(crate) fn raise(store: &dyn Store, key: &str, least: i64) -> Result<i64> {
    loop {
        let held = store.add(key, 0)?;
        if held >= least {
            return Ok(held);
        }
        let (expected, desired) = (held.to_string(), least.to_string());
        let now = store.compare_set(key, expected.as_bytes(), desired.as_bytes())?;
        if now == desired.as_bytes() {
            return Ok(held);
        }
    }
}

/// The error of a wait that ended without `missing`: the first few by name, the rest as a number.
fn timed_out<'a>(missing: impl IntoIterator<Item = &'a str>, timeout: Duration) -> Error {
    const NAMED: usize = 8;
    let mut missing = missing.into_iter();
    let named: Vec<String> = missing
        .by_ref()
        .take(NAMED)
        .map(|key| format!("{key:?}"))
        .collect();
    let rest = match missing.count() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let noun = if named.len() == 1 && rest.is_empty() {
        "key"
    } else {
        "keys"
    };
    Error::new(
        ErrorKind::Timeout,
        format!(
            "{noun} {}{rest} did not appear within {}",
            named.join(", "),
            text::duration(timeout)
        ),
    )
}

/// The error of a barrier that `arrived` of `world_size` ranks reached. `arrived` is `None` if the number is not known.
fn barrier_timed_out(key: &str, arrived: Option<i64>, world_size: u32, timeout: Duration) -> Error {
    let ranks = match arrived {
        Some(arrived) => format!("{arrived} of {world_size} ranks"),
        None => format!("not all {world_size} ranks"),
    };
    Error::new(
        ErrorKind::Timeout,
        format!(
            "barrier {key:?}: {ranks} arrived within {}",
            text::duration(timeout)
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_that_was_not_checked_is_not_called_absent() {
        let store = HashStore::new();
        store.set("here", b"").unwrap();
        let keys = ["here", "not here", "nor here"];
        let soon = Instant::now() + Duration::from_secs(60);
        let absent = |until| absent_among(&store, &keys, until);
        assert_eq!(absent(soon).all().unwrap(), [1, 2]);
        assert_eq!(absent(soon).at_least().unwrap(), [1, 2]);
        assert!(absent(Instant::now()).all().is_err());
        assert!(absent(Instant::now()).at_least().is_err());
        let partly = || Absence {
            known: vec![1],
            unknown: absent(Instant::now()).unknown,
        };
        assert_eq!(partly().at_least().unwrap(), [1]);
        assert!(partly().all().is_err());
        assert_eq!(which_are_set(&store, &keys, soon), [true, false, false]);
        assert_eq!(which_are_set(&store, &keys, Instant::now()), [false; 3]);
    }

    #[test]
    fn timeout_names_the_first_keys_and_counts_the_rest() {
        let keys: Vec<String> = (0..10).map(|index| format!("k{index}")).collect();
        let error = timed_out(keys.iter().map(String::as_str), Duration::from_millis(50));
        assert_eq!(
            error.to_string(),
            "keys \"k0\", \"k1\", \"k2\", \"k3\", \"k4\", \"k5\", \"k6\", \"k7\" and 2 more \
             did not appear within 50 ms"
        );
        let error = timed_out(["a"], Duration::from_secs(1));
        assert_eq!(error.to_string(), "key \"a\" did not appear within 1.0 s");
    }
}
