//! The client: each call of the [`Store`] as requests and replies.

use super::access::{StoreAccess, StoreLimits};
use super::addresses::addresses_of;
use super::checks::{PREFIX, checked_number, checked_request, checked_value, name_of, names_of};
use super::client::{Broken, Connection, GRACE, NONCE, Waited};
use super::encoder::Encoder;
use super::protocol::OpCode;
use super::server::TcpStoreServer;
use crate::op::error::{Error, ErrorKind, Result};
use crate::store::limit::{self, after};
use crate::store::{BatchReply, BatchRequest, Store, barrier_timed_out, timed_out};
use rcomm_recorder::model::text;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The key of PyTorch's counter of clients; it has no prefix.
const WORKERS: &[u8] = b"init/";
/// The most idle connections that are kept; more are open while more threads call at the same time.
const IDLE: usize = 8;

/// A [`Store`] at a server of rcomm or of PyTorch.
///
/// No two calls use a connection at the same time, so a call that waits does not delay other threads; connections are
/// kept for later calls. A `get` of a key that is there is one round trip. A `set` returns when the server has the
/// value, which makes it visible to every later call of any client.
///
/// A call that does not wait for other ranks fails with [`ErrorKind::Timeout`] when the server has not answered within
/// the store's own time-out. A call that waits fails at its own time-out, or at most 4 s later if the server falls
/// silent.
pub struct TcpStore {
    host: String,
    /// The address at which the server was reached. To look its name up again could last longer than a call may.
    address: String,
    port: u16,
    timeout: Duration,
    access: StoreAccess,
    idle: Mutex<Vec<Connection>>,
    /// Whether the server was seen to close a connection that asks for a missing key, as PyTorch's legacy server does.
    closes_on_missing: AtomicBool,
    /// The last field, so that the connections are closed before the server.
    server: Option<TcpStoreServer>,
}

impl TcpStore {
    /// Connects to the open server at `host` and `port`, trying again until it is there.
    ///
    /// `timeout` is for the connection, and for every later call that does not wait for other ranks.
    ///
    /// # Errors
    /// [`ErrorKind::Rendezvous`] if no store is there within `timeout`; at once if something answers that is not a
    /// store. [`ErrorKind::Unauthorized`] at once if the store requires a secret.
    ///
    /// # Blocking
    /// Up to `timeout`; the system's look-up of a host name may take longer.
    pub fn connect(host: impl Into<String>, port: u16, timeout: Duration) -> Result<Self> {
        Self::connect_with(host, port, timeout, &StoreAccess::Open)
    }

    /// Like [`connect`](Self::connect), with a proof of the secret if `access` has one.
    ///
    /// # Errors
    /// Those of [`connect`](Self::connect). [`ErrorKind::Unauthorized`] if the store has another secret, or none.
    pub fn connect_with(
        host: impl Into<String>,
        port: u16,
        timeout: Duration,
        access: &StoreAccess,
    ) -> Result<Self> {
        Self::dial(host.into(), port, timeout, access, None, &[])
    }

    /// Serves an open store at `host` (this host's name or address) and connects to it.
    ///
    /// Listens on the addresses of `host` and no other; `port` 0 lets the kernel choose.
    ///
    /// # Errors
    /// Those of [`TcpStoreServer::bind`] and [`connect`](Self::connect).
    pub fn host(host: impl Into<String>, port: u16, timeout: Duration) -> Result<Self> {
        Self::host_with(host, port, timeout, &StoreAccess::Open)
    }

    /// Like [`host`](Self::host), for the clients of `access`.
    ///
    /// # Errors
    /// Those of [`host`](Self::host).
    pub fn host_with(
        host: impl Into<String>,
        port: u16,
        timeout: Duration,
        access: &StoreAccess,
    ) -> Result<Self> {
        let host = host.into();
        let addresses = addresses_of(&host)?;
        let server = TcpStoreServer::bind_with(&addresses, port, access, StoreLimits::default())?;
        let port = server.port();
        Self::dial(host, port, timeout, access, Some(server), &[])
    }

    /// Connects to `server`, and stops it when the store is dropped. `access` is the access that the server was made
    /// with.
    ///
    /// # Errors
    /// Those of [`connect_with`](Self::connect_with).
    pub fn attach(server: TcpStoreServer, timeout: Duration, access: &StoreAccess) -> Result<Self> {
        let address = server.local_addr();
        let host = address.ip().to_string();
        Self::dial(host, address.port(), timeout, access, Some(server), &[])
    }

    /// Connects to the server; `server` is that server if it runs in this process. Sends the requests `first`, to which
    /// the caller reads the replies.
    pub(super) fn dial(
        host: String,
        port: u16,
        timeout: Duration,
        access: &StoreAccess,
        server: Option<TcpStoreServer>,
        first: &[u8],
    ) -> Result<Self> {
        let connection = Connection::dial(&host, port, timeout, access, first)?;
        Ok(Self {
            address: connection.server().unwrap_or_else(|| host.clone()),
            host,
            port,
            timeout,
            access: access.clone(),
            idle: Mutex::new(vec![connection]),
            closes_on_missing: AtomicBool::new(false),
            server,
        })
    }

    /// Takes the server out of the store, so that the caller decides when it stops; `None` if another process serves
    /// this store, or its server was taken before.
    pub(crate) fn take_server(&mut self) -> Option<TcpStoreServer> {
        self.server.take()
    }

    /// The port of the server.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Counts this process among the workers, as PyTorch's clients do when they know the world size.
    ///
    /// If this store hosts the server, it waits until `world_size` workers have been counted.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] gives the number of workers that were counted. Otherwise the error of the store.
    pub fn wait_for_workers(&self, world_size: u32, timeout: Duration) -> Result<()> {
        let deadline = after(timeout);
        // Longer than the deadline: a server that answers until then is not silent.
        let limit = after(timeout.saturating_add(GRACE));
        let count_workers = |more| limit::with_limit(limit, || self.add_raw(WORKERS, more));
        let mut count = count_workers(1)?;
        let mut pause = Duration::from_millis(1);
        while self.server.is_some() && count < i64::from(world_size) {
            if Instant::now() >= deadline {
                return Err(Error::new(
                    ErrorKind::Timeout,
                    format!(
                        "{count} of {world_size} ranks reached the store within {}",
                        text::duration(timeout)
                    ),
                ));
            }
            std::thread::sleep(pause);
            pause = (pause * 3 / 2).min(Duration::from_millis(10));
            count = count_workers(0)?;
        }
        Ok(())
    }

    /// Runs `exchange` on a connection that no other call uses, and keeps the connection if nothing went wrong.
    fn call<T>(
        &self,
        name: &str,
        exchange: impl FnOnce(&mut Connection, Instant) -> Result<T, Broken>,
    ) -> Result<T> {
        self.try_call_within(self.timeout, exchange)?
            .map_err(|broken| self.broken(name, broken))
    }

    /// Works like [`call`](Self::call), with this time-out instead of the store's own, but returns a broken exchange as
    /// it is.
    ///
    /// # Errors
    /// Those of a new connection, if one is needed.
    pub(super) fn try_call_within<T>(
        &self,
        timeout: Duration,
        exchange: impl FnOnce(&mut Connection, Instant) -> Result<T, Broken>,
    ) -> Result<Result<T, Broken>> {
        let deadline = after(timeout);
        let held = self.lock_idle().pop();
        let mut connection = match held {
            Some(connection) => connection,
            None => {
                let host = limit::choose(&self.address, &self.host);
                Connection::dial_again(host, self.port, timeout, &self.access)?
            }
        };
        let result = exchange(&mut connection, deadline);
        if result.is_ok() {
            let mut idle = self.lock_idle();
            if idle.len() < IDLE {
                idle.push(connection);
            }
        }
        Ok(result)
    }

    fn lock_idle(&self) -> std::sync::MutexGuard<'_, Vec<Connection>> {
        // The list is whole even if a thread panicked while it held the lock.
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The error of the call `name`, whose exchange was broken.
    pub(super) fn broken(&self, name: &str, broken: Broken) -> Error {
        let (host, port) = (&self.host, self.port);
        let store = |message| Error::new(ErrorKind::Store, message);
        match broken {
            Broken::Late => Error::new(
                ErrorKind::Timeout,
                format!(
                    "the store at {host} port {port} did not answer {name}: its process or the \
                     network to it may have stopped"
                ),
            ),
            Broken::Closed => store(format!(
                "the store at {host} port {port} closed the connection during {name}: its process \
                 is gone, or it refused the request"
            )),
            Broken::Failed(error) => store(format!(
                "the connection to the store at {host} port {port} broke during {name}"
            ))
            .with_source(error),
            Broken::Tls(why) => store(format!(
                "TLS with the store at {host} port {port} failed during {name}: {why}"
            )),
            Broken::Refused(reason) => store(format!(
                "the store at {host} port {port} refused {name}: {reason}"
            )),
            Broken::Garbled(answer) => store(format!(
                "the store at {host} port {port} answered {name} with {answer}"
            )),
        }
    }

    /// Sends a request to which the server does not reply, and a PING whose reply shows that the server has
    /// handled the request.
    pub(super) fn send_and_confirm(&self, name: &str, request: Encoder) -> Result<()> {
        let request = request.op(OpCode::Ping).u32(NONCE);
        self.ask(name, request, Connection::read_nonce)
    }

    /// Sends a request and reads the reply to it by `read`. `name` is the name of the call in errors.
    pub(super) fn ask<T>(
        &self,
        name: &str,
        request: Encoder,
        read: impl FnOnce(&mut Connection, Instant) -> Result<T, Broken>,
    ) -> Result<T> {
        let request = checked_request(request)?;
        self.call(name, |connection, deadline| {
            connection.send(request.bytes(), deadline)?;
            read(connection, deadline)
        })
    }

    /// Like [`ask`](Self::ask), for a request that waits for other ranks for `timeout`.
    fn ask_and_wait<T>(
        &self,
        name: &str,
        timeout: Duration,
        request: Encoder,
        read: impl FnOnce(&mut Connection) -> Result<T, Broken>,
    ) -> Result<T> {
        let request = checked_request(request)?;
        let waited = self.try_waiting_call(timeout, |connection, deadline| {
            connection.send(request.bytes(), deadline)?;
            read(connection)
        })?;
        waited.map_err(|broken| self.broken(name, broken))
    }

    /// Works like [`try_call_within`](Self::try_call_within), for a call that waits for other ranks for `timeout`. The
    /// connection, if one must be made, the wait and its cancellation end within [`GRACE`] after that.
    fn try_waiting_call<T>(
        &self,
        timeout: Duration,
        exchange: impl FnOnce(&mut Connection, Instant) -> Result<T, Broken>,
    ) -> Result<Result<T, Broken>> {
        limit::with_limit(after(timeout.saturating_add(GRACE)), || {
            self.try_call_within(self.timeout, exchange)
        })
    }

    /// Adds to the counter that the server stores under exactly this name.
    fn add_raw(&self, name: &[u8], delta: i64) -> Result<i64> {
        let request = Encoder::default().op(OpCode::Add).string(name).i64(delta);
        let call_name = format!("add of {delta} to {:?}", String::from_utf8_lossy(name));
        self.ask(&call_name, request, Connection::read_i64)
    }

    /// The values of `keys` once all are there. `op` is the request for the values, GET or MULTI_GET; `name` is
    /// the name of the call in errors.
    ///
    /// One write contains a check of the keys, a request for the values, and a wait. If a key was missing, the
    /// values are requested again when the wait ends.
    fn values(
        &self,
        name: &str,
        keys: &[&str],
        op: OpCode,
        timeout: Duration,
    ) -> Result<Vec<Vec<u8>>> {
        let names = names_of(keys)?;
        let wait = Encoder::default().op(OpCode::Wait).strings(&names);
        let ask = match (op, names.as_slice()) {
            (OpCode::Get, [name]) => Encoder::default().op(OpCode::Get).string(name),
            (op, names) => Encoder::default().op(op).strings(names),
        };
        let until = after(timeout);
        let read = |connection: &mut Connection, deadline| -> Result<Vec<Vec<u8>>, Broken> {
            names
                .iter()
                .map(|_| connection.read_string(deadline))
                .collect()
        };
        let wait_and_ask = |connection: &mut Connection| {
            Ok(match connection.read_wait(until)? {
                Waited::TimedOut => None,
                Waited::Ended => {
                    let deadline = after(GRACE);
                    connection.send(ask.bytes(), deadline)?;
                    Some(read(connection, deadline)?)
                }
            })
        };
        if !self.closes_on_missing.load(Ordering::Relaxed) {
            let mut missed = false;
            let requests = Encoder::default()
                .op(OpCode::Check)
                .strings(&names)
                .then(&ask)
                .then(&wait);
            let requests = checked_request(requests)?;
            // Everything but the wait is answered at once, however short the caller's time-out.
            let answered = self.try_waiting_call(timeout, |connection, deadline| {
                connection.send(requests.bytes(), deadline)?;
                missed = !connection.read_answer(deadline)?;
                let values = read(connection, deadline)?;
                if missed {
                    return wait_and_ask(connection);
                }
                // The wait has ended as well: its reply follows.
                match connection.read_answer(deadline)? {
                    true => Ok(Some(values)),
                    false => Err(Broken::Garbled(
                        "a cancellation that was not requested".to_owned(),
                    )),
                }
            })?;
            match answered {
                Ok(values) => return self.or_missing(values, keys, timeout),
                Err(Broken::Closed) if missed => {
                    self.closes_on_missing.store(true, Ordering::Relaxed);
                }
                Err(broken) => return Err(self.broken(name, broken)),
            }
        }
        let left = until.saturating_duration_since(Instant::now());
        let values = self.ask_and_wait(name, left, wait, wait_and_ask)?;
        self.or_missing(values, keys, timeout)
    }

    /// The result of a wait, or the time-out error: it names the keys that are known to be missing, or all keys if
    /// there are too many to check, or none is known to be.
    fn or_missing<T>(&self, result: Option<T>, keys: &[&str], timeout: Duration) -> Result<T> {
        /// The most keys that are checked one by one.
        const ASKED: usize = 64;
        result.map_or_else(
            || {
                let mut missing = keys.to_vec();
                let mut all_told = true;
                if keys.len() <= ASKED {
                    limit::with_limit(after(GRACE), || {
                        missing.retain(|key| {
                            let is_set = self.check(&[key]);
                            all_told &= is_set.is_ok();
                            is_set.is_ok_and(|is_set| !is_set)
                        });
                    });
                }
                // All keys may have been set since the deadline.
                if missing.is_empty() {
                    missing = keys.to_vec();
                }
                let error = timed_out(missing, timeout);
                Err(match all_told || keys.len() == 1 {
                    true => error,
                    false => {
                        error.with_more("the store did not say of all keys whether they are there")
                    }
                })
            },
            Ok,
        )
    }
}

impl Store for TcpStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let request = Encoder::default()
            .op(OpCode::Set)
            .string(&name_of(key)?)
            .string(checked_value(value)?);
        self.send_and_confirm(&format!("set of {key:?}"), request)
    }

    fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let name = format!("get of {key:?}");
        let values = self.values(&name, &[key], OpCode::Get, timeout)?;
        Ok(values.into_iter().next().unwrap_or_default())
    }

    fn add(&self, key: &str, delta: i64) -> Result<i64> {
        self.add_raw(&name_of(key)?, delta)
    }

    fn add_within(&self, key: &str, delta: i64, timeout: Duration) -> Result<i64> {
        let request = Encoder::default()
            .op(OpCode::Add)
            .string(&name_of(key)?)
            .i64(delta);
        let request = checked_request(request)?;
        let added = self.try_call_within(timeout.min(self.timeout), |connection, deadline| {
            connection.send(request.bytes(), deadline)?;
            connection.read_i64(deadline)
        })?;
        added.map_err(|broken| self.broken(&format!("add of {delta} to {key:?}"), broken))
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        let request = Encoder::default()
            .op(OpCode::CompareSet)
            .string(&name_of(key)?)
            .string(checked_value(expected)?)
            .string(checked_value(desired)?);
        self.ask(
            &format!("compare_set of {key:?}"),
            request,
            Connection::read_string,
        )
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        let until = after(timeout);
        let names = names_of(keys)?;
        let request = Encoder::default().op(OpCode::Wait).strings(&names);
        let read = |connection: &mut Connection| connection.read_wait(until);
        let waited = self.ask_and_wait("wait", timeout, request, read)?;
        self.or_missing((waited == Waited::Ended).then_some(()), keys, timeout)
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        let request = Encoder::default()
            .op(OpCode::Check)
            .strings(&names_of(keys)?);
        self.ask("check", request, Connection::read_answer)
    }

    fn delete(&self, key: &str) -> Result<bool> {
        let request = Encoder::default()
            .op(OpCode::DeleteKey)
            .string(&name_of(key)?);
        let name = format!("delete of {key:?}");
        Ok(self.ask(&name, request, Connection::read_i64)? != 0)
    }

    fn num_keys(&self) -> Result<u64> {
        let request = Encoder::default().op(OpCode::GetNumKeys);
        let count = self.ask("num_keys", request, Connection::read_i64)?;
        Ok(count.unsigned_abs())
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        let request = Encoder::default().op(OpCode::ListKeys);
        let names = self.ask("list_keys", request, |connection, deadline| {
            let count = connection.read_i64(deadline)?;
            (0..count)
                .map(|_| connection.read_string(deadline))
                .collect::<Result<Vec<_>, _>>()
        })?;
        let user_keys = names.iter().filter_map(|name| name.strip_prefix(&[PREFIX]));
        Ok(user_keys
            .map(|key| String::from_utf8_lossy(key).into_owned())
            .collect())
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        let request = Encoder::default()
            .op(OpCode::Append)
            .string(&name_of(key)?)
            .string(checked_value(value)?);
        self.send_and_confirm(&format!("append to {key:?}"), request)
    }

    fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
        self.values("multi_get", keys, OpCode::MultiGet, timeout)
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        checked_number(pairs.len())?;
        let mut request = Encoder::default()
            .op(OpCode::MultiSet)
            .i64(pairs.len() as i64);
        for (key, value) in pairs {
            request = request.string(&name_of(key)?).string(checked_value(value)?);
        }
        self.send_and_confirm("multi_set", request)
    }

    fn batch(&self, requests: &[BatchRequest<'_>]) -> Result<Vec<BatchReply>> {
        let mut encoder = Encoder::default();
        for request in requests {
            let name = name_of(request.key())?;
            encoder = match *request {
                BatchRequest::Set { value, .. } => encoder
                    .op(OpCode::Set)
                    .string(&name)
                    .string(checked_value(value)?),
                BatchRequest::Add { delta, .. } => encoder.op(OpCode::Add).string(&name).i64(delta),
                BatchRequest::CompareSet {
                    expected, desired, ..
                } => encoder
                    .op(OpCode::CompareSet)
                    .string(&name)
                    .string(checked_value(expected)?)
                    .string(checked_value(desired)?),
            };
        }
        // A SET has no reply: the reply to a later request shows that the server has handled it, and a PING
        // follows the last request.
        encoder = encoder.op(OpCode::Ping).u32(NONCE);
        self.ask("batch", encoder, |connection, deadline| {
            let mut replies = Vec::with_capacity(requests.len());
            for request in requests {
                replies.push(match request {
                    BatchRequest::Set { .. } => BatchReply::Done,
                    BatchRequest::Add { .. } => BatchReply::Count(connection.read_i64(deadline)?),
                    BatchRequest::CompareSet { .. } => {
                        BatchReply::Value(connection.read_string(deadline)?)
                    }
                });
            }
            connection.read_nonce(deadline)?;
            Ok(replies)
        })
    }

    fn barrier(&self, key: &str, world_size: u32, timeout: Duration) -> Result<()> {
        let until = after(timeout);
        let request = Encoder::default()
            .op(OpCode::Barrier)
            .string(&name_of(key)?)
            .i64(i64::from(world_size));
        let name = format!("barrier {key:?}");
        let read = |connection: &mut Connection| connection.read_wait(until);
        match self.ask_and_wait(&name, timeout, request, read)? {
            Waited::Ended => Ok(()),
            Waited::TimedOut => {
                let arrived = self.add_within(key, 0, GRACE).ok();
                Err(barrier_timed_out(key, arrived, world_size, timeout))
            }
        }
    }

    fn server(&self) -> Option<String> {
        Some(format!("{} port {}", self.host, self.port))
    }

    fn obeys_limits(&self) -> bool {
        true
    }
}
