//! [`StoreCollectives`]: collectives of small values over a store, which need no group.

use super::limit::{after, with_limit};
use super::{BatchRequest, Store, which_are_set};
use crate::op::error::{Error, ErrorKind, Result};
use rcomm_recorder::model::text;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The most ranks that an error lists by number.
const MAX_RANKS: usize = 64;
/// How long a rank whose wait has timed out asks the store which ranks were absent.
const NAMING_TIME: Duration = Duration::from_secs(2);

/// Collectives of small values over a store: for the control of a job, while no group is there yet, or none is usable.
/// They work with any [`Store`]. A call that does not time out takes a rank three requests at most, and one for each
/// key of its earlier calls that it removes.
///
/// All ranks make collectives of the same name, and call the same methods in the same order. Values of earlier calls
/// are removed from the store by each [`barrier`](Self::barrier), [`all_gather`](Self::all_gather) and
/// [`all_sum`](Self::all_sum).
///
/// # Blocking
/// For at most `timeout` in each call, and two seconds more to find out which ranks were absent.
///
/// # Errors
/// `Timeout` names the ranks that had not come; otherwise the error of the store.
///
/// # Thread safety
/// One call at a time: others wait for it.
pub struct StoreCollectives {
    store: Arc<dyn Store>,
    name: String,
    rank: u32,
    size: u32,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The number of the last call.
    calls: u64,
    /// The keys that this rank has set and not removed yet.
    set_keys: Vec<String>,
}

impl StoreCollectives {
    /// The collectives of `size` ranks, for rank `rank`. `name` distinguishes the keys from others in the store, so
    /// each name is used once only.
    ///
    /// # Errors
    /// `InvalidArgument` if `rank` is not below `size`.
    pub fn new(store: Arc<dyn Store>, name: &str, rank: u32, size: u32) -> Result<Self> {
        if rank >= size {
            let message = format!("rank {rank} is not one of {size} ranks");
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        }
        Ok(Self {
            store,
            name: name.to_owned(),
            rank,
            size,
            state: Mutex::default(),
        })
    }

    /// Returns once all ranks have called it.
    ///
    /// # Errors
    /// As described on the type.
    pub fn barrier(&self, timeout: Duration) -> Result<()> {
        self.call("barrier", timeout, |call| {
            call.meet(b"", 0, timeout).map(drop)
        })
    }

    /// The sum of the numbers of all ranks, on all ranks; it wraps.
    ///
    /// # Errors
    /// As described on the type.
    pub fn all_sum(&self, number: i64, timeout: Duration) -> Result<i64> {
        self.call("all_sum", timeout, |call| call.meet(b"", number, timeout))
    }

    /// The values of all ranks, in the order of ranks, on all ranks.
    ///
    /// # Errors
    /// As described on the type.
    pub fn all_gather(&self, value: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.call("all_gather", timeout, |call| {
            call.set_own(value)?;
            let values = call.get_all(timeout)?;
            call.sweep();
            Ok(values)
        })
    }

    /// The value of rank `root`, on all ranks. Only `root` passes one; it does not wait.
    ///
    /// # Errors
    /// `InvalidArgument` if `root` is no rank, if it passes no value, or another rank passes one; otherwise as
    /// described on the type.
    pub fn broadcast(&self, value: Option<&[u8]>, root: u32, timeout: Duration) -> Result<Vec<u8>> {
        self.check_root(root, value.is_some())?;
        self.call("broadcast", timeout, |call| match value {
            Some(value) => call.set_own(value).map(|()| value.to_vec()),
            None => call.get(root, timeout),
        })
    }

    /// The values of all ranks, in the order of ranks, on rank `root`; `None` on the others, which do not wait.
    ///
    /// # Errors
    /// `InvalidArgument` if `root` is no rank; otherwise as described on the type.
    pub fn gather(
        &self,
        value: &[u8],
        root: u32,
        timeout: Duration,
    ) -> Result<Option<Vec<Vec<u8>>>> {
        self.check_root(root, root == self.rank)?;
        self.call("gather", timeout, |call| {
            call.set_own(value)?;
            if root != self.rank {
                return Ok(None);
            }
            call.get_all(timeout).map(Some)
        })
    }

    /// This rank's value of those that `root` passes: one for each rank, in their order. Only `root` passes values; it
    /// does not wait.
    ///
    /// # Errors
    /// `InvalidArgument` as [`broadcast`](Self::broadcast), and if `root` passes another number of values; otherwise as
    /// described on the type.
    pub fn scatter(
        &self,
        values: Option<&[&[u8]]>,
        root: u32,
        timeout: Duration,
    ) -> Result<Vec<u8>> {
        self.check_root(root, values.is_some())?;
        let Some(values) = values else {
            return self.call("scatter", timeout, |call| call.get(self.rank, timeout));
        };
        let (given, size) = (values.len(), self.size);
        if given != size as usize {
            let message = format!("{given} values were given to scatter to {size} ranks");
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        }
        self.call("scatter", timeout, |call| {
            let keys: Vec<String> = (0..size).map(|rank| call.key(rank)).collect();
            let pairs: Vec<(&str, &[u8])> = keys
                .iter()
                .zip(values)
                .filter(|(key, _)| **key != call.own_key)
                .map(|(key, value)| (key.as_str(), *value))
                .collect();
            self.store.multi_set(&pairs)?;
            call.state.set_keys.extend(keys);
            Ok(values[self.rank as usize].to_vec())
        })
    }

    /// Refuses a root that is no rank, and a call in which another rank than the root passes a value, or the root none.
    fn check_root(&self, root: u32, passes_value: bool) -> Result<()> {
        let (rank, size) = (self.rank, self.size);
        let message = if root >= size {
            format!("root {root} is not one of {size} ranks")
        } else if passes_value && root != rank {
            format!("rank {rank} passes what only rank {root}, the root, may pass")
        } else if !passes_value && root == rank {
            format!("rank {rank} is the root and passes nothing")
        } else {
            return Ok(());
        };
        Err(Error::new(ErrorKind::InvalidArgument, message))
    }

    /// Runs a call under keys of its own, once earlier calls have ended. The store's own time-out does not make it longer.
    fn call<R>(
        &self,
        name: &str,
        timeout: Duration,
        body: impl FnOnce(&mut Call<'_>) -> Result<R>,
    ) -> Result<R> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.calls += 1;
        let prefix = format!("{}/{}/{name}", self.name, state.calls);
        let mut call = Call {
            own_key: format!("{prefix}/{}", self.rank),
            collectives: self,
            prefix,
            earlier_keys: std::mem::take(&mut state.set_keys),
            state: &mut state,
        };
        let limit = after(timeout.saturating_add(NAMING_TIME));
        let result = with_limit(limit, || body(&mut call));
        // Keys that `sweep` has not removed are left for the next call.
        let mut earlier_keys = std::mem::take(&mut call.earlier_keys);
        earlier_keys.append(&mut call.state.set_keys);
        call.state.set_keys = earlier_keys;
        result
    }
}

/// One call of a collective, on this rank.
struct Call<'a> {
    collectives: &'a StoreCollectives,
    prefix: String,
    /// The key of this rank.
    own_key: String,
    /// The keys of earlier calls.
    earlier_keys: Vec<String>,
    state: &'a mut State,
}

impl Call<'_> {
    fn key(&self, rank: u32) -> String {
        format!("{}/{rank}", self.prefix)
    }

    fn set_own(&mut self, value: &[u8]) -> Result<()> {
        self.collectives.store.set(&self.own_key, value)?;
        self.state.set_keys.push(self.own_key.clone());
        Ok(())
    }

    /// Waits for all ranks, and returns the sum of their numbers. The last rank to arrive sets the key `done`, on which
    /// the others wait: so the store wakes each of them once.
    fn meet(&mut self, value: &[u8], number: i64, timeout: Duration) -> Result<i64> {
        let (sum, count) = (
            format!("{}/sum", self.prefix),
            format!("{}/count", self.prefix),
        );
        let done = format!("{}/done", self.prefix);
        let store = &self.collectives.store;
        let replies = store.batch(&[
            BatchRequest::Set {
                key: &self.own_key,
                value,
            },
            BatchRequest::Add {
                key: &sum,
                delta: number,
            },
            BatchRequest::Add {
                key: &count,
                delta: 1,
            },
        ])?;
        self.state.set_keys.push(self.own_key.clone());
        let is_last = matches!(replies[..], [.., super::BatchReply::Count(count)]
            if count == i64::from(self.collectives.size));
        if is_last {
            self.state
                .set_keys
                .extend([sum.clone(), count, done.clone()]);
            let sum = store.add(&sum, 0)?;
            store.set(&done, sum.to_string().as_bytes())?;
            self.sweep();
            return Ok(sum);
        }
        let sum = match store.get(&done, timeout) {
            Ok(sum) => sum,
            Err(error) => return Err(self.name_absent(error, timeout)),
        };
        self.sweep();
        let text = String::from_utf8_lossy(&sum);
        text.parse().map_err(|error: std::num::ParseIntError| {
            let message = format!("the store holds {text:?} in place of the sum of all ranks");
            Error::new(ErrorKind::Store, message).with_source(error)
        })
    }

    fn get(&self, rank: u32, timeout: Duration) -> Result<Vec<u8>> {
        let value = self.collectives.store.get(&self.key(rank), timeout);
        value.map_err(|error| match error.kind() {
            ErrorKind::Timeout => self.late(&[rank], timeout),
            _ => error,
        })
    }

    fn get_all(&self, timeout: Duration) -> Result<Vec<Vec<u8>>> {
        let keys: Vec<String> = (0..self.collectives.size)
            .map(|rank| self.key(rank))
            .collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let values = self.collectives.store.multi_get(&keys, timeout);
        values.map_err(|error| self.name_absent(error, timeout))
    }

    /// Names the ranks that have not come, if `error` is a time-out.
    fn name_absent(&self, error: Error, timeout: Duration) -> Error {
        if error.kind() != ErrorKind::Timeout {
            return error;
        }
        let keys: Vec<String> = (0..self.collectives.size)
            .map(|rank| self.key(rank))
            .collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let until = Instant::now() + NAMING_TIME;
        let arrived = which_are_set(&*self.collectives.store, &keys, until);
        let absent = (0..).zip(arrived).filter(|(_, arrived)| !arrived);
        let absent: Vec<u32> = absent.map(|(rank, _)| rank).collect();
        // This rank has come: if the store does not show its own key, it did not answer.
        if absent.contains(&self.collectives.rank) {
            return error.with_more("the store did not say which ranks are absent");
        }
        self.late(&absent, timeout)
    }

    /// The error of a call for which these ranks did not arrive in time.
    fn late(&self, absent: &[u32], timeout: Duration) -> Error {
        let message = format!(
            "{:?} over the store: {} did not arrive within {}",
            self.prefix,
            text::ranks(absent, MAX_RANKS),
            text::duration(timeout)
        );
        Error::new(ErrorKind::Timeout, message).with_ranks(absent)
    }

    /// Removes what this rank set in earlier calls: every rank has reached this call, so none reads those values any
    /// more.
    fn sweep(&mut self) {
        for key in self.earlier_keys.drain(..) {
            // A key that stays does no harm.
            let _ = self.collectives.store.delete(&key);
        }
    }
}

impl fmt::Debug for StoreCollectives {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StoreCollectives")
            .field("name", &self.name)
            .field("rank", &self.rank)
            .field("size", &self.size)
            .finish()
    }
}
