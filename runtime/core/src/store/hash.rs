//! A store for the threads of one process.

use super::table::{Table, sum};
use super::{QueueStore, Store, barrier_timed_out, timed_out};
use crate::op::error::{Error, ErrorKind, Result};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A [`Store`] in this process's memory, shared by its threads through an `Arc`.
#[derive(Default)]
pub struct HashStore {
    table: Mutex<Table>,
    changed: Condvar,
}

impl HashStore {
    /// An empty store.
    pub fn new() -> Self {
        Self::default()
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        // No code that runs under the lock leaves the table half changed, so a poisoned lock is usable.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the table, and wakes all waiting threads.
    fn change<T>(&self, change: impl FnOnce(&mut Table) -> T) -> T {
        let result = change(&mut self.lock());
        self.changed.notify_all();
        result
    }

    /// Calls `take` again after every change until it returns a value; after `timeout`, returns the error that
    /// `timeout_error` makes.
    fn take_when<T>(
        &self,
        timeout: Duration,
        mut take: impl FnMut(&mut Table) -> Option<T>,
        timeout_error: impl FnOnce(&Table) -> Error,
    ) -> Result<T> {
        let deadline = Instant::now().checked_add(timeout);
        let mut table = self.lock();
        loop {
            if let Some(result) = take(&mut table) {
                return Ok(result);
            }
            let left = match deadline {
                Some(deadline) => deadline.saturating_duration_since(Instant::now()),
                None => timeout,
            };
            if left.is_zero() {
                return Err(timeout_error(&table));
            }
            table = self
                .changed
                .wait_timeout(table, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
}

fn missing<'a>(table: &Table, keys: &[&'a str]) -> Vec<&'a str> {
    keys.iter()
        .filter(|key| !table.has(key.as_bytes()))
        .copied()
        .collect()
}

impl Store for HashStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.change(|table| table.set(key.as_bytes(), value));
        Ok(())
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.take_when(
            timeout,
            |table| table.get(key.as_bytes()).map(<[u8]>::to_vec),
            |_| timed_out([key], timeout),
        )
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.change(|table| table.add(key.as_bytes(), delta))
            .map_err(|reason| {
                Error::new(
                    ErrorKind::Store,
                    format!("cannot add {delta} to {key:?}: {reason}"),
                )
            })
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        Ok(self.change(|table| {
            table
                .compare_set(key.as_bytes(), expected, desired)
                .to_vec()
        }))
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        self.take_when(
            timeout,
            |table| missing(table, keys).is_empty().then_some(()),
            |table| timed_out(missing(table, keys), timeout),
        )
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        Ok(missing(&self.lock(), keys).is_empty())
    }

    fn delete(&self, key: &str) -> Result<bool> {
        Ok(self.lock().delete(key.as_bytes()))
    }

    fn num_keys(&self) -> Result<u64> {
        Ok(self.lock().len() as u64)
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        let table = self.lock();
        let text = |key| String::from_utf8_lossy(key).into_owned();
        Ok(table.keys().map(text).collect())
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.change(|table| table.append(key.as_bytes(), value));
        Ok(())
    }

    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.take_when(
            timeout,
            |table| {
                keys.iter()
                    .map(|key| table.get(key.as_bytes()).map(<[u8]>::to_vec))
                    .collect()
            },
            |table| timed_out(missing(table, keys), timeout),
        )
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        self.change(|table| {
            for (key, value) in pairs {
                table.set(key.as_bytes(), value);
            }
        });
        Ok(())
    }

    fn barrier(&self, key: &str, world_size: u32, timeout: Duration) -> Result<()> {
        let arrived = |table: &Table| {
            let text = table.get(key.as_bytes());
            sum(text, 0).unwrap_or(0)
        };
        self.add(key, 1)?;
        self.take_when(
            timeout,
            |table| (arrived(table) >= i64::from(world_size)).then_some(()),
            |table| barrier_timed_out(key, Some(arrived(table)), world_size, timeout),
        )
    }
}

impl QueueStore for HashStore {
    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        self.change(|table| table.queue_push(key.as_bytes(), value));
        Ok(())
    }

    fn queue_pop(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        self.take_when(
            timeout,
            |table| table.queue_pop(key.as_bytes()),
            |_| timed_out([key], timeout),
        )
    }

    fn try_queue_pop(&self, key: &str) -> Result<Option<Vec<u8>>> {
        Ok(self.lock().queue_pop(key.as_bytes()))
    }

    fn queue_len(&self, key: &str) -> Result<u64> {
        Ok(self.lock().queue_len(key.as_bytes()) as u64)
    }
}
