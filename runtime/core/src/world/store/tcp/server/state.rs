//! The server's table and its waiters, and what each request does to both.
//!
//! Pure: requests in, reply bytes and the numbers of woken connections out.

use crate::world::store::table::Table;
use crate::world::store::tcp::protocol::{
    MAX_MESSAGE, Request, STOP_WAITING, Strings, Violation, WAIT_CANCELED,
};
use std::collections::HashMap;

/// The number of a connection, for as long as it is open.
pub(super) type ConnectionId = usize;

type Key = Box<[u8]>;

/// What one connection waits for; it has at most one such wait.
enum Pending {
    Keys { keys: Vec<Key>, missing: usize },
    Barrier(Key),
}

#[derive(Default)]
pub(super) struct State {
    table: Table,
    pending: HashMap<ConnectionId, Pending>,
    /// Connections that wait for each key, in order of arrival, once for each time a wait names the key.
    waiting: HashMap<Key, Vec<ConnectionId>>,
    at_barrier: HashMap<Key, Vec<ConnectionId>>,
    /// Connections whose wait has ended and that are owed [`STOP_WAITING`].
    woken: Vec<ConnectionId>,
}

impl State {
    /// Executes `request` and adds its reply, if there is one now, to `out`.
    pub(super) fn apply(
        &mut self,
        from: ConnectionId,
        request: Request<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), Violation> {
        match request {
            Request::Validate(_) => return Err(Violation::ValidatedTwice),
            Request::Set(key, value) => self.set(key, value),
            Request::CompareSet {
                key,
                expected,
                desired,
            } => {
                reply_string(out, self.table.compare_set(key, expected, desired));
                self.wake_all(key);
            }
            Request::Get(key) => reply_string(out, self.table.get(key).unwrap_or_default()),
            Request::Add(key, delta) => {
                let count = self.add(key, delta)?;
                reply_number(out, count);
            }
            Request::Check(mut keys) => {
                let all = keys.all(|key| self.table.has(key));
                out.push(u8::from(!all));
            }
            Request::Wait(keys) => self.wait(from, keys, out)?,
            Request::GetNumKeys => reply_number(out, self.table.len() as i64),
            Request::DeleteKey(key) => reply_number(out, i64::from(self.table.delete(key))),
            Request::Append(key, value) => {
                self.table.append(key, value);
                self.wake_all(key);
            }
            Request::MultiGet(keys) => {
                let start = out.len();
                for key in keys {
                    reply_string(out, self.table.get(key).unwrap_or_default());
                    if out.len() - start > MAX_MESSAGE {
                        return Err(Violation::ReplyTooLong);
                    }
                }
            }
            Request::MultiSet(mut strings) => {
                while let (Some(key), Some(value)) = (strings.next(), strings.next()) {
                    self.set(key, value);
                }
            }
            Request::CancelWait => {
                self.forget(from);
                out.push(WAIT_CANCELED);
            }
            Request::Ping(nonce) => out.extend_from_slice(&nonce),
            Request::QueuePush(key, value) => {
                self.table.queue_push(key, value);
                self.wake_first(key);
            }
            Request::QueuePop(key) => {
                reply_number(out, self.table.queue_len(key) as i64);
                if let Some(value) = self.table.queue_pop(key) {
                    reply_string(out, &value);
                }
            }
            Request::QueueLen(key) => reply_number(out, self.table.queue_len(key) as i64),
            Request::ListKeys => {
                let keys = self.table.keys();
                reply_number(out, keys.len() as i64);
                keys.for_each(|key| reply_string(out, key));
            }
            Request::Barrier(key, world_size) => self.barrier(from, key, world_size, out)?,
        }
        Ok(())
    }

    /// The connections that were woken since the last call.
    pub(super) fn take_woken(&mut self) -> impl Iterator<Item = ConnectionId> {
        self.woken.drain(..)
    }

    /// Ends what the connection waits for: it cancelled, or it is gone.
    pub(super) fn forget(&mut self, connection: ConnectionId) {
        match self.pending.remove(&connection) {
            None => {}
            Some(Pending::Keys { keys, .. }) => {
                for key in keys {
                    remove_from(&mut self.waiting, &key, connection);
                }
            }
            Some(Pending::Barrier(key)) => remove_from(&mut self.at_barrier, &key, connection),
        }
    }

    fn set(&mut self, key: &[u8], value: &[u8]) {
        self.table.set(key, value);
        self.wake_all(key);
    }

    fn add(&mut self, key: &[u8], delta: i64) -> Result<i64, Violation> {
        let count = self.table.add(key, delta).map_err(Violation::CannotAdd)?;
        self.wake_all(key);
        Ok(count)
    }

    fn wait(
        &mut self,
        from: ConnectionId,
        keys: Strings<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), Violation> {
        if self.pending.contains_key(&from) {
            return Err(Violation::WaitsTwice);
        }
        let keys: Vec<Key> = keys
            .filter(|key| !self.table.has(key))
            .map(Key::from)
            .collect();
        if keys.is_empty() {
            out.push(STOP_WAITING);
            return Ok(());
        }
        for key in &keys {
            match self.waiting.get_mut(key) {
                Some(connections) => connections.push(from),
                None => {
                    self.waiting.insert(key.clone(), vec![from]);
                }
            }
        }
        let missing = keys.len();
        self.pending.insert(from, Pending::Keys { keys, missing });
        Ok(())
    }

    fn barrier(
        &mut self,
        from: ConnectionId,
        key: &[u8],
        world_size: i64,
        out: &mut Vec<u8>,
    ) -> Result<(), Violation> {
        if self.pending.contains_key(&from) {
            return Err(Violation::WaitsTwice);
        }
        if self.add(key, 1)? >= world_size {
            for connection in self.at_barrier.remove(key).unwrap_or_default() {
                self.pending.remove(&connection);
                self.woken.push(connection);
            }
            out.push(STOP_WAITING);
            return Ok(());
        }
        match self.at_barrier.get_mut(key) {
            Some(connections) => connections.push(from),
            None => {
                self.at_barrier.insert(key.into(), vec![from]);
            }
        }
        self.pending.insert(from, Pending::Barrier(key.into()));
        Ok(())
    }

    /// `key` has come: each connection that waits for it misses one key less.
    fn wake_all(&mut self, key: &[u8]) {
        // Checked first because most keys are set while no connection waits.
        if self.waiting.is_empty() || !self.table.has(key) {
            return;
        }
        for connection in self.waiting.remove(key).unwrap_or_default() {
            self.wake(connection);
        }
    }

    /// A value came into the queue `key`: serves one waiter.
    fn wake_first(&mut self, key: &[u8]) {
        let Some(connections) = self.waiting.get_mut(key) else {
            return;
        };
        let first = connections.remove(0);
        if connections.is_empty() {
            self.waiting.remove(key);
        }
        self.wake(first);
    }

    fn wake(&mut self, connection: ConnectionId) {
        if let Some(Pending::Keys { missing, .. }) = self.pending.get_mut(&connection) {
            *missing -= 1;
            if *missing == 0 {
                self.pending.remove(&connection);
                self.woken.push(connection);
            }
        }
    }
}

fn remove_from(lists: &mut HashMap<Key, Vec<ConnectionId>>, key: &[u8], connection: ConnectionId) {
    if let Some(connections) = lists.get_mut(key) {
        connections.retain(|&other| other != connection);
        if connections.is_empty() {
            lists.remove(key);
        }
    }
}

fn reply_number(out: &mut Vec<u8>, number: i64) {
    out.extend_from_slice(&number.to_le_bytes());
}

fn reply_string(out: &mut Vec<u8>, string: &[u8]) {
    out.extend_from_slice(&(string.len() as u64).to_le_bytes());
    out.extend_from_slice(string);
}
