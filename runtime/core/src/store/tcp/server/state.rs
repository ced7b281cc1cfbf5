//! The server's table and its waiters, and what each request does to both.
//!
//! The module does no I/O: its input is requests, its output reply bytes and the numbers of woken
//! connections.

use crate::store::table::{ENTRY_OVERHEAD, Table};
use crate::store::tcp::protocol::{
    MAX_MESSAGE, MAX_VALUE, Request, STOP_WAITING, Strings, Violation, WAIT_CANCELED,
};
use std::collections::HashMap;

/// The number of a connection, for as long as it is open.
pub(super) type ConnectionId = usize;

type Key = Box<[u8]>;

/// The key under which the server stores how many clients it refused, and the address of the last.
const REFUSED: &[u8] = b"/rcomm/refused";

/// The wait of a connection, which has at most one at a time.
enum PendingWait {
    /// For these keys, of which `missing` are not set yet.
    Keys { keys: Vec<Key>, missing: usize },
    /// At the barrier of this key.
    Barrier(Key),
}

impl PendingWait {
    /// The bytes that are counted for the wait toward the store's limit. Each key is held twice: here, and in the
    /// map of waiting connections.
    fn bytes(&self) -> usize {
        match self {
            PendingWait::Keys { keys, .. } => keys
                .iter()
                .map(|key| 2 * (key.len() + ENTRY_OVERHEAD))
                .sum(),
            PendingWait::Barrier(key) => 2 * (key.len() + ENTRY_OVERHEAD),
        }
    }
}

/// The table, and the waits of all connections.
pub(super) struct State {
    table: Table,
    /// The most bytes of the table and the pending waits together.
    max_bytes: usize,
    /// The most keys and queues of the table.
    max_names: usize,
    /// Bytes of all pending waits.
    wait_bytes: usize,
    pending: HashMap<ConnectionId, PendingWait>,
    /// Connections that wait for each key, in order of arrival, once for each time a wait names the key.
    waiting: HashMap<Key, Vec<ConnectionId>>,
    /// Connections that wait at each barrier, by its key.
    at_barrier: HashMap<Key, Vec<ConnectionId>>,
    /// Connections whose wait has ended and to which [`STOP_WAITING`] is not sent yet.
    woken: Vec<ConnectionId>,
}

impl State {
    /// An empty store that may hold at most this many bytes, and this many keys and queues.
    pub(super) fn new(max_bytes: usize, max_names: usize) -> Self {
        Self {
            table: Table::default(),
            max_bytes,
            max_names,
            wait_bytes: 0,
            pending: HashMap::new(),
            waiting: HashMap::new(),
            at_barrier: HashMap::new(),
            woken: Vec::new(),
        }
    }

    /// Counts a client that was refused. Ranks read this count when another rank does not arrive.
    pub(super) fn count_refused(&mut self, peer: &str) {
        let refused = self.table.get(REFUSED).map(String::from_utf8_lossy);
        let times = refused.and_then(|text| text.split(' ').next()?.parse::<u64>().ok());
        let text = format!("{} {peer}", times.unwrap_or(0).saturating_add(1));
        self.table.set(REFUSED, text.as_bytes());
    }

    /// Checks that the limits allow this many more bytes under this key, and the key itself if it is new.
    fn admit(&self, key: &[u8], more: usize) -> Result<(), Violation> {
        let is_new = !self.table.has(key);
        if is_new && self.table.names() >= self.max_names {
            return Err(Violation::TooManyStoredKeys(self.max_names));
        }
        let more = more
            + if is_new {
                key.len() + ENTRY_OVERHEAD
            } else {
                0
            };
        self.admit_bytes(more)
    }

    fn admit_bytes(&self, more: usize) -> Result<(), Violation> {
        let (held, limit) = (self.table.bytes() + self.wait_bytes, self.max_bytes);
        if held + more > limit {
            return Err(Violation::StoreFull { held, more, limit });
        }
        Ok(())
    }

    /// Executes `request` and adds its reply, if there is one now, to `out`.
    pub(super) fn apply(
        &mut self,
        from: ConnectionId,
        request: Request<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), Violation> {
        match request {
            Request::Validate(_) => return Err(Violation::ValidatedTwice),
            Request::Hello(_) | Request::Proof(_) => return Err(Violation::ProofOutOfTurn),
            Request::Set(key, value) => self.set(key, value)?,
            Request::CompareSet {
                key,
                expected,
                desired,
            } => {
                self.admit(key, desired.len())?;
                reply_string(out, self.table.compare_set(key, expected, desired));
                self.wake_all(key);
            }
            Request::Get(key) => reply_string(out, self.table.get(key).unwrap_or_default()),
            Request::Add(key, delta) => {
                let count = self.add(key, delta)?;
                reply_number(out, count);
            }
            Request::Check(mut keys) => {
                let are_set = keys.all(|key| self.table.has(key));
                out.push(u8::from(!are_set));
            }
            Request::Wait(keys) => self.wait(from, keys, out)?,
            Request::GetNumKeys => reply_number(out, self.table.len() as i64),
            Request::DeleteKey(key) => reply_number(out, i64::from(self.table.delete(key))),
            Request::Append(key, value) => {
                let length = self.table.get(key).map_or(0, <[u8]>::len) + value.len();
                if length as u64 > MAX_VALUE {
                    return Err(Violation::ValueGrowsTooLong(length));
                }
                self.admit(key, value.len())?;
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
                    self.set(key, value)?;
                }
            }
            Request::CancelWait => {
                self.forget(from);
                out.push(WAIT_CANCELED);
            }
            Request::Ping(nonce) => out.extend_from_slice(&nonce),
            Request::QueuePush(key, value) => {
                self.admit(key, ENTRY_OVERHEAD + value.len())?;
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

    /// Ends the wait of a connection that has cancelled it, was refused or is gone.
    pub(super) fn forget(&mut self, connection: ConnectionId) {
        match self.take_pending(connection) {
            None => {}
            Some(PendingWait::Keys { keys, .. }) => {
                for key in keys {
                    remove_from(&mut self.waiting, &key, connection);
                }
            }
            Some(PendingWait::Barrier(key)) => remove_from(&mut self.at_barrier, &key, connection),
        }
    }

    fn take_pending(&mut self, connection: ConnectionId) -> Option<PendingWait> {
        let pending = self.pending.remove(&connection)?;
        self.wait_bytes -= pending.bytes();
        Some(pending)
    }

    fn put_pending(&mut self, connection: ConnectionId, pending: PendingWait) {
        self.wait_bytes += pending.bytes();
        self.pending.insert(connection, pending);
    }

    fn set(&mut self, key: &[u8], value: &[u8]) -> Result<(), Violation> {
        let held = self.table.get(key).map_or(0, <[u8]>::len);
        self.admit(key, value.len().saturating_sub(held))?;
        self.table.set(key, value);
        self.wake_all(key);
        Ok(())
    }

    fn add(&mut self, key: &[u8], delta: i64) -> Result<i64, Violation> {
        // A counter has at most 19 digits and a sign.
        self.admit(key, 20)?;
        let count = self.table.add(key, delta).map_err(Violation::CannotAdd)?;
        self.wake_all(key);
        Ok(count)
    }

    /// Replies to WAIT at once if all keys are there; otherwise notes which keys the connection waits for.
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
        let missing = keys.len();
        let pending = PendingWait::Keys { keys, missing };
        self.admit_bytes(pending.bytes())?;
        let PendingWait::Keys { keys, .. } = &pending else {
            return Ok(());
        };
        for key in keys {
            match self.waiting.get_mut(key) {
                Some(connections) => connections.push(from),
                None => {
                    self.waiting.insert(key.clone(), vec![from]);
                }
            }
        }
        self.put_pending(from, pending);
        Ok(())
    }

    /// Adds the connection to those at a barrier. The last one ends the waits of the others, and gets its reply at
    /// once.
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
                self.take_pending(connection);
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
        self.put_pending(from, PendingWait::Barrier(key.into()));
        Ok(())
    }

    /// Notes that `key` was set: each connection that waits for it has one missing key fewer.
    fn wake_all(&mut self, key: &[u8]) {
        // Checked first because most keys are set while no connection waits.
        if self.waiting.is_empty() || !self.table.has(key) {
            return;
        }
        for connection in self.waiting.remove(key).unwrap_or_default() {
            self.wake(connection);
        }
    }

    /// Notes that a value was added to the queue `key`: wakes one waiter.
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

    /// Notes that a connection waits for one key fewer. Without a missing key, its wait ends.
    fn wake(&mut self, connection: ConnectionId) {
        if let Some(PendingWait::Keys { missing, .. }) = self.pending.get_mut(&connection) {
            *missing -= 1;
            if *missing == 0 {
                self.take_pending(connection);
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
