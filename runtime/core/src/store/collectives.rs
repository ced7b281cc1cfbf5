//! [`StoreCollectives`]: collectives of small values over a store, which need no group.

use super::limit::{after, with_limit};
use super::{BatchRequest, Store, absent_among};
use crate::op::error::{Error, ErrorKind, Result};
use rcomm_recorder::model::text;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The most ranks that an error lists by number.
const MAX_RANKS: usize = 64;
/// How long after its time-out a call still expects the answer of a store: a live one answers at once.
const GRACE: Duration = Duration::from_secs(1);
/// How much longer a call whose wait has timed out may take to ask the store which ranks were absent.
const NAMING_TIME: Duration = Duration::from_secs(1);

/// What an error adds if the store could not be asked who was late.
const NOT_SAID: &str = "the store did not say which ranks are absent";

/// Collectives of small values over a store: for the control of a job, while no group is there yet, or none is usable.
/// They work with any [`Store`]. A call that does not time out takes a rank three requests at most, and one for each
/// key of its earlier calls that it removes.
///
/// All ranks make collectives of the same name, and call the same methods in the same order. Values of earlier calls
/// are removed from the store by each [`barrier`](Self::barrier), [`all_gather`](Self::all_gather) and
/// [`all_sum`](Self::all_sum).
///
/// # Blocking
/// For at most `timeout` in each call, and two seconds more to find out which ranks were absent. A call may take longer
/// if the store does not obey limits ([`Store::obeys_limits`]) and stops answering.
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
        self.call("barrier", timeout, |call| call.meet(b"", 0).map(drop))
    }

    /// The sum of the numbers of all ranks, on all ranks; it wraps.
    ///
    /// # Errors
    /// As described on the type.
    pub fn all_sum(&self, number: i64, timeout: Duration) -> Result<i64> {
        self.call("all_sum", timeout, |call| call.meet(b"", number))
    }

    /// The values of all ranks, in the order of ranks, on all ranks.
    ///
    /// # Errors
    /// As described on the type.
    pub fn all_gather(&self, value: &[u8], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.call("all_gather", timeout, |call| {
            call.set_own(value)?;
            let values = call.get_all()?;
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
            None => call.get(root, root),
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
            call.get_all().map(Some)
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
            return self.call("scatter", timeout, |call| call.get(self.rank, root));
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
            call.ask(|store| store.multi_set(&pairs))?;
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

    /// Runs a call under keys of its own, once earlier calls have ended. The store's own time-out does not make it
    /// longer.
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
            timeout,
            deadline: after(timeout),
        };
        let limit = call.deadline + GRACE + NAMING_TIME;
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
    timeout: Duration,
    /// When `timeout` has passed.
    deadline: Instant,
}

impl Call<'_> {
    fn key(&self, rank: u32) -> String {
        format!("{}/{rank}", self.prefix)
    }

    /// Makes a request that leaves time to name the absent ranks.
    fn ask<T>(&self, request: impl FnOnce(&dyn Store) -> Result<T>) -> Result<T> {
        with_limit(self.deadline + GRACE, || request(&*self.collectives.store))
    }

    /// How long this call may still wait for other ranks.
    fn time_left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    fn set_own(&mut self, value: &[u8]) -> Result<()> {
        self.ask(|store| store.set(&self.own_key, value))?;
        self.state.set_keys.push(self.own_key.clone());
        Ok(())
    }

    /// Waits for all ranks, and returns the sum of their numbers. The last rank to arrive sets the key `done`, on which
    /// the others wait: so the store wakes each of them once.
    fn meet(&mut self, value: &[u8], number: i64) -> Result<i64> {
        let (sum, count) = (
            format!("{}/sum", self.prefix),
            format!("{}/count", self.prefix),
        );
        let done = format!("{}/done", self.prefix);
        let requests = [
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
        ];
        let replies = self.ask(|store| store.batch(&requests))?;
        self.state.set_keys.push(self.own_key.clone());
        let is_last = matches!(replies[..], [.., super::BatchReply::Count(count)]
            if count == i64::from(self.collectives.size));
        if is_last {
            self.state
                .set_keys
                .extend([sum.clone(), count, done.clone()]);
            let sum = self.ask(|store| store.add(&sum, 0))?;
            self.ask(|store| store.set(&done, sum.to_string().as_bytes()))?;
            self.sweep();
            return Ok(sum);
        }
        let sum = self
            .ask(|store| store.get(&done, self.time_left()))
            .map_err(|error| self.name_absent(error))?;
        self.sweep();
        let text = String::from_utf8_lossy(&sum);
        text.parse().map_err(|error: std::num::ParseIntError| {
            let message = format!("the store holds {text:?} in place of the sum of all ranks");
            Error::new(ErrorKind::Store, message).with_source(error)
        })
    }

    /// The value under the key of `rank`, which `setter` sets.
    fn get(&self, rank: u32, setter: u32) -> Result<Vec<u8>> {
        let key = self.key(rank);
        let value = self.ask(|store| store.get(&key, self.time_left()));
        value.map_err(|error| {
            if error.kind() != ErrorKind::Timeout {
                return error;
            }
            match self.collectives.store.check(&[&key]) {
                Ok(false) => self.late(&[setter]),
                // It came after the wait had ended.
                Ok(true) => error,
                Err(_) => error.with_more(NOT_SAID),
            }
        })
    }

    fn get_all(&self) -> Result<Vec<Vec<u8>>> {
        let keys: Vec<String> = (0..self.collectives.size)
            .map(|rank| self.key(rank))
            .collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        self.ask(|store| store.multi_get(&keys, self.time_left()))
            .map_err(|error| self.name_absent(error))
    }

    /// Names the ranks that have not come, if `error` is a time-out.
    fn name_absent(&self, error: Error) -> Error {
        if error.kind() != ErrorKind::Timeout {
            return error;
        }
        let keys: Vec<String> = (0..self.collectives.size)
            .map(|rank| self.key(rank))
            .collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let until = self.deadline + GRACE + NAMING_TIME;
        match absent_among(&*self.collectives.store, &keys, until).at_least() {
            Err(_) => error.with_more(NOT_SAID),
            // The last one came after the wait had ended.
            Ok(absent) if absent.is_empty() => error,
            Ok(absent) => {
                let absent: Vec<u32> = absent.into_iter().map(|rank| rank as u32).collect();
                self.late(&absent)
            }
        }
    }

    /// The error of a call for which these ranks did not arrive in time.
    fn late(&self, absent: &[u32]) -> Error {
        let message = format!(
            "{:?} over the store: {} did not arrive within {}",
            self.prefix,
            text::ranks(absent, MAX_RANKS),
            text::duration(self.timeout)
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
