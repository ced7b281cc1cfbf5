//! [`Mesh`], the connections of one rank: which rank dials which, and whether a peer is still alive.

mod dial;

use super::handshake::{ChannelKind, Handshake, Identity};
use super::host::Host;
use super::links::Links;
use super::listener::{ChannelId, Listener, ListenerState};
use super::shortage::is_shortage;
use super::{KeysToPublish, PeerState, address_key, lock};
use crate::registered::Registry;
use crate::transport::TcpConnection;
use crate::wait::{Failure, WaitMode, WaitPolicy};
use rcomm_core::backend::WorldContext;
use rcomm_core::store::{Store, StoreQuery};
use rcomm_core::tuning::Tuning;
use rcomm_core::{Error, Result};
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::Tls;
use rustix::event::EventfdFlags;
use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a rank waits for a peer to connect before it checks whether the peer is still alive.
const LIVENESS_CHECK: Duration = Duration::from_millis(50);

/// This rank's connections to the other ranks of the world.
///
/// # Thread safety
/// Every method may be called from any thread.
pub(crate) struct Mesh {
    identity: Identity,
    tls: Option<Tls>,
    store: Arc<dyn Store>,
    shared: Arc<ListenerState>,
    host: Host,
    registry: Arc<Registry>,
    links: Links,
    tuning: Tuning,
    /// Number of ranks of this host according to the launcher; the world's size if the launcher gave no number.
    local_ranks: u32,
    wait_mode: OnceLock<WaitMode>,
    /// The connections that only show when a peer is gone.
    watched: Mutex<HashMap<Rank, WatchedPeer>>,
    /// The first failure of one of the groups of this rank since the newest group was made.
    failure: Mutex<Option<Error>>,
    is_closed: AtomicBool,
    /// Whether the thread that answers callers could not be started when it was due.
    is_listener_due: AtomicBool,
    /// An eventfd that wakes the thread `rcomm/mesh`.
    wake: Arc<OwnedFd>,
    thread: Mutex<ListenerThread>,
}

/// The thread `rcomm/mesh`. It is started when this rank first waits for a caller, or a moment after the start of the
/// world ([`WorldContext::later`]). Until then the system holds callers, and the thread would only take time from the
/// ranks that start.
enum ListenerThread {
    Waiting(Box<Listener>),
    Running(JoinHandle<()>),
    Ended,
}

/// The channel that a caller wants to have opened.
#[derive(Clone, Copy)]
pub(crate) struct ChannelRequest {
    pub(crate) group: u64,
    pub(crate) kind: ChannelKind,
    pub(crate) peer: Rank,
    /// Number of the channel's sockets; both ranks must request the same number.
    pub(crate) streams: usize,
}

/// State of the connection by which this rank detects that a peer is gone. It carries no data and is closed
/// when the peer drops its mesh or its process ends.
enum WatchedPeer {
    /// A thread is opening the connection. Only one thread does so at a time: of two connections, the peer
    /// keeps the later one, which need not be the one that this rank keeps.
    Dialing,
    Open(TcpStream),
}

impl Mesh {
    /// Listens on a port on each of these addresses, and opens the memory that the ranks of this host share. Returns
    /// the keys and values that the caller publishes in the store for the other ranks.
    ///
    /// # Errors
    /// `Io` if this rank cannot listen on an address, the thread of the rank that made the memory cannot be started, or
    /// memory cannot be shared although the configuration requires it; `Store` if the store fails.
    pub(crate) fn open(
        world: &WorldContext,
        addresses: &[IpAddr],
    ) -> Result<(Arc<Self>, KeysToPublish)> {
        let port_error = |error| Error::io("cannot prepare the port for other ranks", error);
        let (mut listeners, mut published) = (Vec::new(), Vec::new());
        for &address in addresses {
            let listener = TcpListener::bind((address, 0)).map_err(|error| {
                let message = format!("cannot listen on {address} for other ranks");
                Error::io(message, error)
            })?;
            listener.set_nonblocking(true).map_err(port_error)?;
            published.push(listener.local_addr().map_err(port_error)?.to_string());
            listeners.push(listener);
        }
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| port_error(error.into()))?;
        let wake = Arc::new(wake);
        let identity = Identity::new(world.rank, world.world_size, &world.job, &world.secret);
        let shared = Arc::new(ListenerState::new());
        let (host, segment_server) = Host::enter(world, &identity, shared.shortage.clone())?;
        let serves_segment = segment_server.is_some();
        let listener = Listener::new(
            identity.clone(),
            world.tls.clone(),
            shared.clone(),
            listeners,
            segment_server,
            wake.clone(),
        );
        let mesh = Arc::new(Self {
            identity,
            tls: world.tls.clone(),
            store: world.store.clone(),
            shared,
            host,
            registry: Arc::default(),
            links: Links::new(world),
            tuning: world.config.tuning.clone(),
            local_ranks: world.local_world_size.unwrap_or(world.world_size),
            wait_mode: OnceLock::new(),
            watched: Mutex::new(HashMap::new()),
            failure: Mutex::default(),
            is_closed: AtomicBool::new(false),
            is_listener_due: AtomicBool::new(false),
            wake,
            thread: Mutex::new(ListenerThread::Waiting(Box::new(listener))),
        });
        if serves_segment {
            let started = mesh.listen();
            started.map_err(|error| Error::io("cannot start the thread rcomm/mesh", error))?;
        }
        let later = Arc::downgrade(&mesh);
        world.later.add(move || {
            let Some(mesh) = later.upgrade() else { return };
            if let Err(error) = mesh.listen() {
                mesh.is_listener_due.store(true, Ordering::Relaxed);
                tracing::warn!(%error, "cannot start the thread rcomm/mesh: other ranks cannot connect to this one");
            }
        });
        let (host_key, host_note) = mesh.host.note(world.rank);
        let to_publish = vec![
            (host_key, host_note.into_bytes()),
            (address_key(world.rank), published.join(",").into_bytes()),
        ];
        Ok((mesh, to_publish))
    }

    pub(crate) fn rank(&self) -> Rank {
        self.identity.rank
    }

    /// Number of connections that were refused, or that ended or expired before their handshake was complete.
    pub(crate) fn refused(&self) -> u64 {
        self.shared.refused.load(Ordering::Relaxed)
    }

    /// Starts the thread that answers callers, unless it runs already. If it cannot be started, the ports stay open: a
    /// caller that is refused would take this rank for gone.
    fn listen(&self) -> io::Result<()> {
        let mut state = lock(&self.thread);
        let listener = match std::mem::replace(&mut *state, ListenerThread::Ended) {
            ListenerThread::Waiting(listener) => Arc::new(Mutex::new(Some(listener))),
            other => {
                *state = other;
                return Ok(());
            }
        };
        let taken = listener.clone();
        let work = move || {
            let listener = lock(&taken).take();
            if let Some(listener) = listener {
                listener.work();
            }
        };
        let thread = std::thread::Builder::new().name("rcomm/mesh".into());
        match thread.spawn(work) {
            Ok(thread) => {
                *state = ListenerThread::Running(thread);
                Ok(())
            }
            Err(error) => {
                let kept = lock(&listener).take();
                *state = kept.map_or(ListenerThread::Ended, ListenerThread::Waiting);
                Err(error)
            }
        }
    }

    /// Whether the thread that answers callers runs.
    #[cfg(test)]
    pub(crate) fn listens(&self) -> bool {
        matches!(*lock(&self.thread), ListenerThread::Running(_))
    }

    /// Stops listening and ends the thread. Channels that were handed over stay open.
    pub(crate) fn close(&self) {
        self.is_closed.store(true, Ordering::Release);
        self.shared.stop.store(true, Ordering::Release);
        // Only a full counter refuses the write, and then the thread is already awake.
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
        let thread = std::mem::replace(&mut *lock(&self.thread), ListenerThread::Ended);
        if let ListenerThread::Running(thread) = thread {
            // The thread ends by itself; a panic in it was already reported where it happened.
            let _ = thread.join();
        }
        self.shared.changed.notify_all();
        lock(&self.watched).clear();
    }

    /// Which algorithm is used for which operations.
    pub(crate) fn tuning(&self) -> &Tuning {
        &self.tuning
    }

    /// Returns `CorePerRank` if this host has a core for each of its ranks, judged by their number alone, else
    /// `Oversubscribed`. It is computed on the first call, which takes a dozen system calls.
    pub(crate) fn wait_mode(&self) -> WaitMode {
        let find_out = || WaitMode::for_local_ranks(self.local_ranks as usize);
        *self.wait_mode.get_or_init(find_out)
    }

    /// What this rank knows about its host, with the memory that it shares there.
    pub(crate) fn host(&self) -> &Host {
        &self.host
    }

    /// Notes why a group of this rank has failed, unless another has failed before.
    pub(crate) fn note_failure(&self, error: &Error) {
        lock(&self.failure).get_or_insert_with(|| error.clone());
    }

    /// The error of the first group of this rank that has failed since the newest group was made; `None` if none has.
    pub(crate) fn first_failure(&self) -> Option<Error> {
        lock(&self.failure).clone()
    }

    /// Forgets the failure, when a group is made: a program that makes a group after a failure continues.
    pub(crate) fn forget_failure(&self) {
        lock(&self.failure).take();
    }

    /// The connections of all groups, which are sampled into the ring while operations wait.
    pub(crate) fn links(&self) -> &Links {
        &self.links
    }

    /// Refuses all channels of this group from now on, also those that have arrived and were not taken: its operations
    /// have failed on this rank.
    pub(crate) fn give_up(&self, group: u64) {
        let mut arrived = lock(&self.shared.arrived);
        arrived.given_up.insert(group);
        arrived.channels.retain(|id, _| id.group != group);
    }

    /// Calls `look` with the sockets of this group that have arrived and were not taken yet.
    pub(crate) fn with_arrived<T>(
        &self,
        group: u64,
        look: impl FnOnce(&mut dyn Iterator<Item = (Rank, &TcpStream)>) -> T,
    ) -> T {
        let arrived = lock(&self.shared.arrived);
        let channels = arrived.channels.iter();
        let of_group = channels.filter(|(id, _)| id.group == group);
        look(&mut of_group.map(|(id, connection)| (id.peer, &connection.socket)))
    }

    /// The memory that this rank has allocated and that other ranks of the host can map.
    pub(crate) fn registry(&self) -> &Arc<Registry> {
        &self.registry
    }

    /// Opens the sockets of a channel and returns them: the higher rank dials them, the lower one waits until
    /// the peer has connected. Every call of the higher rank opens new sockets.
    ///
    /// # Errors
    /// `Late` or `Interrupted` once the policy ends the wait; `Gone` if the peer is gone or cannot be reached;
    /// `Refused` if the handshake fails; `Address` or `Store` if the store does not give the peer's address; `Io` if
    /// this rank lacks descriptors or memory, or cannot start the thread `rcomm/mesh`; `Closed` after
    /// [`close`](Self::close).
    pub(crate) fn connect(
        &self,
        request: ChannelRequest,
        policy: &mut WaitPolicy<'_>,
    ) -> Result<Vec<TcpConnection>, Failure> {
        if self.is_closed.load(Ordering::Acquire) {
            return Err(Failure::Closed);
        }
        if self.is_listener_due.load(Ordering::Relaxed) && self.listen().is_ok() {
            self.is_listener_due.store(false, Ordering::Relaxed);
        }
        let handshakes = (0..request.streams as u32).map(|stream| Handshake {
            kind: request.kind,
            from: self.rank(),
            to: request.peer,
            group: request.group,
            stream,
        });
        let is_dialer = self.rank() > request.peer;
        if !is_dialer {
            self.listen().map_err(Failure::Io)?;
        }
        handshakes
            .map(|handshake| match is_dialer {
                true => self.dial(handshake, policy),
                false => self.await_peer(handshake, policy),
            })
            .collect()
    }

    /// Works like [`connect`](Self::connect), but the lower rank does not wait: it gets `None` if the peer has
    /// not connected all sockets yet, and fails if callers cannot be accepted. The higher rank dials and waits for the
    /// handshakes in either case.
    pub(crate) fn try_connect(
        &self,
        request: ChannelRequest,
        policy: &mut WaitPolicy<'_>,
    ) -> Result<Option<Vec<TcpConnection>>, Failure> {
        if self.rank() > request.peer {
            return self.connect(request, policy).map(Some);
        }
        self.listen().map_err(Failure::Io)?;
        let ids = (0..request.streams as u32).map(|stream| ChannelId {
            group: request.group,
            kind: request.kind,
            peer: request.peer,
            stream,
        });
        let mut arrived = lock(&self.shared.arrived);
        if !ids.clone().all(|id| arrived.channels.contains_key(&id)) {
            drop(arrived);
            self.shared.shortage.check().map_err(Failure::Io)?;
            return Ok(None);
        }
        Ok(Some(
            ids.filter_map(|id| arrived.channels.remove(&id)).collect(),
        ))
    }

    /// Whether `peer` is gone or cannot be reached, so that this rank need not wait for it. If no connection to `peer`
    /// is watched, opens one to find out. Returns `false` also if the store fails, if `peer` has published no
    /// address, if this rank lacks descriptors or memory, or if another thread is already opening the connection. Fails
    /// if the wait ends before it is known, if the process at the peer's address refuses the handshake or is no rank,
    /// or if the address in the store is invalid.
    pub(crate) fn is_gone(&self, peer: Rank, policy: &mut WaitPolicy<'_>) -> Result<bool, Failure> {
        match self.find_gone(peer, policy) {
            Err(Failure::Store(_)) => Ok(false),
            Err(Failure::Gone(..)) => Ok(true),
            found => Ok(found? == PeerState::Gone),
        }
    }

    /// Works like [`is_gone`](Self::is_gone), but fails with `Failure::Gone` if a new connection broke, and with
    /// `Failure::Store` if the store was needed and failed.
    pub(crate) fn find_gone(
        &self,
        peer: Rank,
        policy: &mut WaitPolicy<'_>,
    ) -> Result<PeerState, Failure> {
        let mut watched = lock(&self.watched);
        match watched.get(&peer) {
            Some(WatchedPeer::Open(stream)) => match stream.peek(&mut [0]) {
                Ok(0) => return Ok(PeerState::Gone),
                // The connection broke; that does not show whether the process has ended.
                Err(error) if error.kind() != io::ErrorKind::WouldBlock => {
                    watched.insert(peer, WatchedPeer::Dialing);
                }
                _ => return Ok(PeerState::Unknown),
            },
            Some(WatchedPeer::Dialing) => return Ok(PeerState::Unknown),
            None => {
                watched.insert(peer, WatchedPeer::Dialing);
            }
        }
        drop(watched);
        let dialed = self.dial_to_watch(peer, policy);
        let mut watched = lock(&self.watched);
        watched.remove(&peer);
        match dialed {
            Ok(Some(stream)) => {
                watched.insert(peer, WatchedPeer::Open(stream));
                Ok(PeerState::Runs)
            }
            Ok(None) => Ok(PeerState::Unknown),
            // Only a refusal shows that the peer does not listen any more; any other error may be one of the network.
            Err(Failure::Gone(_, Some(error)))
                if error.kind() == io::ErrorKind::ConnectionRefused =>
            {
                Ok(PeerState::Gone)
            }
            // This rank lacks a descriptor, which shows nothing about the peer.
            Err(Failure::Io(error)) if is_shortage(&error) => Ok(PeerState::Unknown),
            Err(failure) => Err(failure),
        }
    }

    /// Opens a connection to `peer` that carries no data and only shows when the peer is gone. `None` if the peer has
    /// never published an address.
    fn dial_to_watch(
        &self,
        peer: Rank,
        policy: &mut WaitPolicy<'_>,
    ) -> Result<Option<TcpStream>, Failure> {
        let key = address_key(peer);
        let is_published = self.ask(policy, move |store| store.check(&[&key]))?;
        if !is_published.map_err(Failure::Store)? {
            return Ok(None);
        }
        let handshake = Handshake {
            kind: ChannelKind::Watch,
            from: self.rank(),
            to: peer,
            group: 0,
            stream: 0,
        };
        let connection = self.dial(handshake, policy)?;
        Ok(Some(connection.socket))
    }

    /// Waits until the peer has opened this socket, and takes the socket.
    fn await_peer(
        &self,
        handshake: Handshake,
        policy: &mut WaitPolicy<'_>,
    ) -> Result<TcpConnection, Failure> {
        let id = ChannelId {
            group: handshake.group,
            kind: handshake.kind,
            peer: handshake.to,
            stream: handshake.stream,
        };
        let began = Instant::now();
        let mut arrived = lock(&self.shared.arrived);
        loop {
            if let Some(stream) = arrived.channels.remove(&id) {
                return Ok(stream);
            }
            policy
                .check()
                .map_err(|interruption| Failure::of_wait_for(handshake.to, interruption))?;
            if self.is_closed.load(Ordering::Acquire) {
                return Err(Failure::Closed);
            }
            self.shared.shortage.check().map_err(Failure::Io)?;
            if began.elapsed() >= LIVENESS_CHECK {
                drop(arrived);
                let is_gone = self.is_gone(handshake.to, policy);
                arrived = lock(&self.shared.arrived);
                // A channel that the peer opened before it left is still valid, with all bytes that the
                // peer sent on it.
                if arrived.channels.contains_key(&id) {
                    continue;
                }
                if is_gone? {
                    return Err(Failure::Gone(handshake.to, None));
                }
            }
            let wait = self
                .shared
                .changed
                .wait_timeout(arrived, Duration::from_millis(10));
            arrived = wait.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Sends a request to the store and waits for the answer, until the policy's deadline or stop.
    fn ask<T: Send + 'static>(
        &self,
        policy: &mut WaitPolicy<'_>,
        ask: impl FnOnce(&dyn Store) -> rcomm_core::Result<T> + Send + 'static,
    ) -> Result<rcomm_core::Result<T>, Failure> {
        let query = match StoreQuery::put(&self.store, ask) {
            Ok(query) => query,
            Err(error) => return Ok(Err(error)),
        };
        loop {
            if let Some(answer) = query.answer_within(Duration::from_millis(10)) {
                return Ok(answer);
            }
            policy.check()?;
        }
    }
}

impl Drop for Mesh {
    fn drop(&mut self) {
        self.close();
    }
}
