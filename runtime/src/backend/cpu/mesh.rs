//! How the ranks of a world find and reach each other: one mesh for each rank, shared by its groups.
//!
//! Every rank listens on one port and puts its address under `cpu/addr/<rank>` in the store. Nothing is
//! connected until it is needed. A *lane* is one connection for one group, one kind of traffic and one
//! pair of ranks, so that no group's bytes stand in another's way; the higher rank dials, the lower
//! waits to be called. Who dials or calls without the job's secret is refused and counted (see
//! [`hello`](super::hello)).
//!
//! The thread `rcomm/mesh` answers callers. It never touches a lane that it has handed over.

use super::hello::{ANSWER_LEN, End, HELLO_LEN, Hello, Identity, LaneKind, PROOF_LEN, Verdict};
use super::host::Host;
use super::transport::{handover, shm::Segment};
use super::wait::{Interrupted, Patience};
use crate::backend::WorldContext;
use crate::error::{Error, ErrorKind, Result};
use crate::store::Store;
use rcomm_recorder::model::Rank;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Callers that may be in the middle of their first words at one time.
const MAX_GREETINGS: usize = 1024;
/// How long a caller may take over its first words.
const GREETING_TIME: Duration = Duration::from_secs(10);
/// How long a rank waits for a call before it asks whether the caller still lives.
const DOUBT: Duration = Duration::from_millis(50);
/// How long one try to connect may take.
const CONNECT_TIME: Duration = Duration::from_secs(2);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct LaneId {
    group: u64,
    kind: LaneKind,
    peer: Rank,
}

/// This rank's end of all connections of the world.
///
/// # Thread safety
/// Every method may be called from any thread.
pub(super) struct Mesh {
    identity: Identity,
    store: Arc<dyn Store>,
    desk: Arc<Desk>,
    host: Host,
    watched: Mutex<HashMap<Rank, Watched>>,
    closed: AtomicBool,
    wake: Arc<OwnedFd>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// What the listening thread and the others share.
struct Desk {
    arrived: Mutex<HashMap<LaneId, TcpStream>>,
    bell: Condvar,
    refused: AtomicU64,
    stop: AtomicBool,
}

/// A connection that tells when its peer is gone.
struct Watched {
    stream: TcpStream,
}

impl Mesh {
    /// Starts to listen and says so in the store.
    ///
    /// # Errors
    /// `Io` if the address cannot be listened on; `Store` if the store cannot be told.
    pub(super) fn open(world: &WorldContext, address: IpAddr) -> Result<Arc<Self>> {
        let listener = TcpListener::bind((address, 0))
            .map_err(|e| Error::io(format!("cannot listen on {address} for other ranks"), e))?;
        let facts = "cannot prepare the port for other ranks";
        listener
            .set_nonblocking(true)
            .map_err(|e| Error::io(facts, e))?;
        let address = listener.local_addr().map_err(|e| Error::io(facts, e))?;
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|e| Error::io(facts, e))?;
        let wake = Arc::new(wake);
        let identity = Identity::new(world.rank, world.world_size, &world.job, &world.secret);
        let desk = Arc::new(Desk {
            arrived: Mutex::new(HashMap::new()),
            bell: Condvar::new(),
            refused: AtomicU64::new(0),
            stop: AtomicBool::new(false),
        });
        let (host, keeper) = Host::enter(world, &identity)?;
        let reception = Reception {
            identity: identity.clone(),
            desk: desk.clone(),
            listener,
            keeper,
            wake: wake.clone(),
            greetings: Vec::new(),
        };
        let thread = std::thread::Builder::new()
            .name("rcomm/mesh".into())
            .spawn(move || reception.work())
            .map_err(|e| Error::io("cannot start the thread rcomm/mesh", e))?;
        let mesh = Arc::new(Self {
            identity,
            store: world.store.clone(),
            desk,
            host,
            watched: Mutex::new(HashMap::new()),
            closed: AtomicBool::new(false),
            wake,
            thread: Mutex::new(Some(thread)),
        });
        mesh.store
            .set(&address_key(world.rank), address.to_string().as_bytes())?;
        Ok(mesh)
    }

    /// This rank.
    pub(super) fn rank(&self) -> Rank {
        self.identity.rank
    }

    /// Callers that were refused: strangers, other jobs, other protocols.
    pub(super) fn refused(&self) -> u64 {
        self.desk.refused.load(Ordering::Relaxed)
    }

    /// Stops listening and ends the thread. Lanes that were handed over live on.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.desk.stop.store(true, Ordering::Release);
        // Only a full counter refuses the write, and then the thread is awake.
        let _ = rustix::io::write(&*self.wake, &1u64.to_ne_bytes());
        let thread = lock(&self.thread).take();
        if let Some(thread) = thread {
            // It ends by itself; a panic in it was already reported where it happened.
            let _ = thread.join();
        }
        self.desk.bell.notify_all();
        lock(&self.watched).clear();
    }

    /// What this rank shares with the others of its host.
    pub(super) fn host(&self) -> &Host {
        &self.host
    }

    /// The lane to `peer`, connected if it has to be.
    pub(super) fn connect(
        &self,
        group: u64,
        kind: LaneKind,
        peer: Rank,
        patience: &mut Patience<'_>,
    ) -> Result<TcpStream, Failure> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Failure::Closed);
        }
        let hello = Hello {
            kind,
            from: self.rank(),
            to: peer,
            group,
        };
        if self.rank() > peer {
            self.dial(hello, patience)
        } else {
            self.await_call(hello, patience)
        }
    }

    /// As [`connect`](Self::connect), but does not wait to be called: `None` if it has not been yet.
    pub(super) fn try_connect(
        &self,
        group: u64,
        kind: LaneKind,
        peer: Rank,
        patience: &mut Patience<'_>,
    ) -> Result<Option<TcpStream>, Failure> {
        if self.rank() > peer {
            return self.connect(group, kind, peer, patience).map(Some);
        }
        let id = LaneId { group, kind, peer };
        Ok(lock(&self.desk.arrived).remove(&id))
    }

    /// Whether `peer` is known to be gone. Opens a connection to it for that purpose if need be.
    pub(super) fn is_gone(&self, peer: Rank, patience: &mut Patience<'_>) -> Result<bool, Failure> {
        let mut watched = lock(&self.watched);
        if let Some(known) = watched.get(&peer) {
            let mut byte = [0];
            return Ok(match known.stream.peek(&mut byte) {
                Ok(0) => true,
                Ok(_) => false,
                Err(error) => error.kind() != io::ErrorKind::WouldBlock,
            });
        }
        drop(watched);
        if !self.store.check(&[&address_key(peer)]).unwrap_or(false) {
            // It has never been there.
            return Ok(false);
        }
        let hello = Hello {
            kind: LaneKind::Watch,
            from: self.rank(),
            to: peer,
            group: 0,
        };
        match self.dial(hello, patience) {
            Ok(stream) => {
                watched = lock(&self.watched);
                watched.insert(peer, Watched { stream });
                Ok(false)
            }
            Err(Failure::Gone(..)) => Ok(true),
            Err(other) => Err(other),
        }
    }

    fn await_call(&self, hello: Hello, patience: &mut Patience<'_>) -> Result<TcpStream, Failure> {
        let id = LaneId {
            group: hello.group,
            kind: hello.kind,
            peer: hello.to,
        };
        let began = Instant::now();
        let mut arrived = lock(&self.desk.arrived);
        loop {
            if let Some(stream) = arrived.remove(&id) {
                return Ok(stream);
            }
            patience.check()?;
            if self.closed.load(Ordering::Acquire) {
                return Err(Failure::Closed);
            }
            if began.elapsed() >= DOUBT {
                drop(arrived);
                if self.is_gone(hello.to, patience)? {
                    return Err(Failure::Gone(hello.to, None));
                }
                arrived = lock(&self.desk.arrived);
                if arrived.contains_key(&id) {
                    continue;
                }
            }
            let wait = self
                .desk
                .bell
                .wait_timeout(arrived, Duration::from_millis(10));
            arrived = wait.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn dial(&self, hello: Hello, patience: &mut Patience<'_>) -> Result<TcpStream, Failure> {
        let address = self.address_of(hello.to, patience)?;
        let gone = |error| Failure::Gone(hello.to, Some(error));
        let mut tries = 0;
        // One try: a rank listens before it gives its address away, so a refusal means that it ended.
        let stream = loop {
            patience.check()?;
            match TcpStream::connect_timeout(&address, CONNECT_TIME) {
                Ok(stream) => break stream,
                Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                    tries += 1;
                    if tries == 1 {
                        tracing::warn!(rank = hello.to, %address, "no answer: trying on");
                    }
                }
                Err(error) => {
                    let what = format!("{address}: {error}");
                    return Err(gone(io::Error::new(error.kind(), what)));
                }
            }
        };
        stream.set_nodelay(true).map_err(gone)?;
        stream.set_nonblocking(true).map_err(gone)?;
        let mut nonce = [0; 32];
        fill_random(&mut nonce).map_err(Failure::Io)?;
        let first = hello.encode(&self.identity, &nonce);
        let mut talk = Talk {
            stream: &stream,
            peer: hello.to,
            patience,
        };
        talk.say(&first)?;
        let mut answer = [0; ANSWER_LEN];
        talk.hear(&mut answer)?;
        let refuse = |verdict: Option<Verdict>| Failure::Refused {
            peer: hello.to,
            address,
            verdict,
        };
        let word = [answer[0], answer[1], answer[2], answer[3]];
        match Verdict::from_bytes(word) {
            Some(Verdict::Welcome) => {}
            other => return Err(refuse(other)),
        }
        let mut theirs = [0; 32];
        theirs.copy_from_slice(&answer[4..36]);
        let proof = &answer[36..];
        if !self
            .identity
            .believes(End::Acceptor, &first, &theirs, proof)
        {
            return Err(refuse(Some(Verdict::WrongSecret)));
        }
        talk.say(&self.identity.prove(End::Dialer, &first, &theirs))?;
        let mut last = [0; 4];
        talk.hear(&mut last)?;
        match Verdict::from_bytes(last) {
            Some(Verdict::Welcome) => Ok(stream),
            other => Err(refuse(other)),
        }
    }

    fn address_of(&self, peer: Rank, patience: &mut Patience<'_>) -> Result<SocketAddr, Failure> {
        let key = address_key(peer);
        loop {
            patience.check()?;
            match self.store.get(&key, Duration::from_millis(100)) {
                Ok(bytes) => {
                    let text = String::from_utf8_lossy(&bytes);
                    return text.parse().map_err(|_| Failure::Address {
                        peer,
                        text: text.into_owned(),
                    });
                }
                Err(error) if error.kind() == ErrorKind::Timeout => {}
                Err(error) => return Err(Failure::Store(error)),
            }
        }
    }
}

impl Drop for Mesh {
    fn drop(&mut self) {
        self.close();
    }
}

fn address_key(rank: Rank) -> String {
    format!("cpu/addr/{rank}")
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn fill_random(bytes: &mut [u8]) -> io::Result<()> {
    let mut filled = 0;
    while filled < bytes.len() {
        let flags = rustix::rand::GetRandomFlags::empty();
        filled += rustix::rand::getrandom(&mut bytes[filled..], flags)?;
    }
    Ok(())
}

/// Why a lane did not come about, or broke. Ranks are ranks of the world.
#[derive(Debug)]
pub(super) enum Failure {
    /// The deadline passed, or the group was stopped.
    Interrupted(Interrupted),
    /// The peer's process has ended, or cannot be reached.
    Gone(Rank, Option<io::Error>),
    /// Somebody answered at the peer's address, but not the peer.
    Refused {
        peer: Rank,
        address: SocketAddr,
        verdict: Option<Verdict>,
    },
    /// The peer's address in the store is none.
    Address { peer: Rank, text: String },
    /// The deadline passed, and these had not answered.
    Late(Vec<Rank>),
    /// This rank's own buffers cannot be used so.
    Argument(Error),
    /// The peer sent what no rank sends.
    Garbled(Rank, String),
    /// The ranks do not agree on the operation.
    Mismatch(Rank, String),
    /// The store failed.
    Store(Error),
    /// The system refused.
    Io(io::Error),
    /// The mesh was closed.
    Closed,
}

impl From<Interrupted> for Failure {
    fn from(interrupted: Interrupted) -> Self {
        Self::Interrupted(interrupted)
    }
}

/// First words over a socket, with patience.
struct Talk<'a, 'p> {
    stream: &'a TcpStream,
    peer: Rank,
    patience: &'a mut Patience<'p>,
}

impl Talk<'_, '_> {
    fn say(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        let mut said = 0;
        while said < bytes.len() {
            match (&*self.stream).write(&bytes[said..]) {
                Ok(some) => said += some,
                Err(error) => self.or_sleep(error, PollFlags::OUT)?,
            }
        }
        Ok(())
    }

    fn hear(&mut self, bytes: &mut [u8]) -> Result<(), Failure> {
        let mut heard = 0;
        while heard < bytes.len() {
            match (&*self.stream).read(&mut bytes[heard..]) {
                Ok(0) => {
                    let end = io::ErrorKind::UnexpectedEof.into();
                    return Err(Failure::Gone(self.peer, Some(end)));
                }
                Ok(some) => heard += some,
                Err(error) => self.or_sleep(error, PollFlags::IN)?,
            }
        }
        Ok(())
    }

    fn or_sleep(&mut self, error: io::Error, flags: PollFlags) -> Result<(), Failure> {
        if error.kind() != io::ErrorKind::WouldBlock && error.kind() != io::ErrorKind::Interrupted {
            return Err(Failure::Gone(self.peer, Some(error)));
        }
        self.patience.check()?;
        let mut socket = [PollFd::new(self.stream, flags)];
        match rustix::event::poll(&mut socket, Some(&milliseconds(10))) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(Failure::Io(error.into())),
        }
    }
}

fn milliseconds(count: i64) -> Timespec {
    Timespec {
        tv_sec: count / 1000,
        tv_nsec: count % 1000 * 1_000_000,
    }
}

/// The listening thread: takes every caller through its first words, none at another's cost.
struct Reception {
    identity: Identity,
    desk: Arc<Desk>,
    listener: TcpListener,
    /// Where neighbours ask for the shared memory, on the one rank of a host that made it.
    keeper: Option<(UnixListener, Arc<Segment>)>,
    wake: Arc<OwnedFd>,
    greetings: Vec<Greeting>,
}

/// How a caller came.
enum Caller {
    /// From anywhere, for a lane.
    Tcp(TcpStream),
    /// From this host and user, for the shared memory.
    Unix(UnixStream),
}

impl Caller {
    fn read(&self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => (&*stream).read(into),
            Self::Unix(stream) => (&*stream).read(into),
        }
    }

    fn write_all(&self, bytes: &[u8]) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => (&*stream).write_all(bytes),
            Self::Unix(stream) => (&*stream).write_all(bytes),
        }
    }

    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Tcp(stream) => stream.as_fd(),
            Self::Unix(stream) => stream.as_fd(),
        }
    }
}

/// One caller in the middle of its first words.
struct Greeting {
    stream: Caller,
    since: Instant,
    heard: Vec<u8>,
    /// The hello, and the nonce that we answered with.
    answered: Option<(Hello, [u8; HELLO_LEN], [u8; 32])>,
}

enum Outcome {
    /// Not all words are here yet.
    More,
    /// Proof given: it is what it says.
    Lane(LaneId),
    /// Not one of us, or gone.
    Refused,
}

impl Reception {
    fn work(mut self) {
        while !self.desk.stop.load(Ordering::Acquire) {
            let mut sockets = vec![PollFd::new(&*self.wake, PollFlags::IN)];
            // With all places taken, new callers wait in the queue of the system.
            if self.greetings.len() < MAX_GREETINGS {
                sockets.push(PollFd::new(&self.listener, PollFlags::IN));
                if let Some((listener, _)) = &self.keeper {
                    sockets.push(PollFd::new(listener, PollFlags::IN));
                }
            }
            for greeting in &self.greetings {
                sockets.push(PollFd::from_borrowed_fd(
                    greeting.stream.as_fd(),
                    PollFlags::IN,
                ));
            }
            let patience = if self.greetings.is_empty() {
                None
            } else {
                Some(milliseconds(250))
            };
            match rustix::event::poll(&mut sockets, patience.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "cannot wait for other ranks; no more will be heard");
                    return;
                }
            }
            drop(sockets);
            self.accept();
            self.listen();
        }
    }

    fn accept(&mut self) {
        self.accept_neighbours();
        while self.greetings.len() < MAX_GREETINGS {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    if stream.set_nonblocking(true).is_ok() && stream.set_nodelay(true).is_ok() {
                        self.greetings.push(Greeting::new(Caller::Tcp(stream)));
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    // Out of file descriptors, or a caller that left at once: others may still come.
                    tracing::warn!(%error, "a rank's call could not be taken");
                    std::thread::sleep(Duration::from_millis(1));
                    return;
                }
            }
        }
    }

    /// Takes the calls of this host's ranks; other users' are dropped.
    fn accept_neighbours(&mut self) {
        let Some((listener, _)) = &self.keeper else {
            return;
        };
        while self.greetings.len() < MAX_GREETINGS {
            let Ok((stream, _)) = listener.accept() else {
                // None there, or one that left at once.
                return;
            };
            let user = rustix::net::sockopt::socket_peercred(&stream).map(|peer| peer.uid);
            if user == Ok(rustix::process::geteuid()) && stream.set_nonblocking(true).is_ok() {
                self.greetings.push(Greeting::new(Caller::Unix(stream)));
            } else {
                self.desk.refused.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    fn listen(&mut self) {
        let mut at = 0;
        while at < self.greetings.len() {
            let outcome = self.greetings[at].hear(&self.identity);
            let expired = self.greetings[at].since.elapsed() > GREETING_TIME;
            match outcome {
                Outcome::More if !expired => at += 1,
                Outcome::Lane(id) => {
                    let greeting = self.greetings.swap_remove(at);
                    // Before the lane is handed over: its user may write at once. Four bytes always
                    // fit into a fresh socket; a broken one shows at first use.
                    let welcome = Verdict::Welcome.to_bytes();
                    match (greeting.stream, &self.keeper) {
                        (Caller::Tcp(stream), _) if id.kind != LaneKind::Segment => {
                            let _ = (&stream).write_all(&welcome);
                            lock(&self.desk.arrived).insert(id, stream);
                            self.desk.bell.notify_all();
                        }
                        (Caller::Unix(stream), Some((_, segment)))
                            if id.kind == LaneKind::Segment =>
                        {
                            if let Err(error) = handover::send(&stream, &welcome, segment.file()) {
                                tracing::warn!(%error, rank = id.peer, "cannot share memory");
                            }
                        }
                        _ => {
                            self.desk.refused.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
                Outcome::More | Outcome::Refused => {
                    self.greetings.swap_remove(at);
                    let count = self.desk.refused.fetch_add(1, Ordering::Relaxed) + 1;
                    tracing::warn!(count, "refused a caller that is not a rank of this job");
                }
            }
        }
    }
}

impl Greeting {
    fn new(stream: Caller) -> Self {
        Self {
            stream,
            since: Instant::now(),
            heard: Vec::with_capacity(HELLO_LEN),
            answered: None,
        }
    }

    fn hear(&mut self, identity: &Identity) -> Outcome {
        loop {
            let needed = match self.answered {
                None => HELLO_LEN,
                Some(_) => PROOF_LEN,
            };
            while self.heard.len() < needed {
                let mut more = [0; HELLO_LEN];
                let missing = needed - self.heard.len();
                match self.stream.read(&mut more[..missing]) {
                    Ok(0) => return Outcome::Refused,
                    Ok(some) => self.heard.extend_from_slice(&more[..some]),
                    Err(error)
                        if matches!(
                            error.kind(),
                            io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
                        ) =>
                    {
                        return Outcome::More;
                    }
                    Err(_) => return Outcome::Refused,
                }
            }
            match self.answered.take() {
                None => {
                    if !self.answer(identity) {
                        return Outcome::Refused;
                    }
                }
                Some((hello, first, nonce)) => {
                    if identity.believes(End::Dialer, &first, &nonce, &self.heard) {
                        return Outcome::Lane(LaneId {
                            group: hello.group,
                            kind: hello.kind,
                            peer: hello.from,
                        });
                    }
                    let _ = self.stream.write_all(&Verdict::WrongSecret.to_bytes());
                    return Outcome::Refused;
                }
            }
        }
    }

    /// Answers the hello; says whether it was for us.
    fn answer(&mut self, identity: &Identity) -> bool {
        let mut first = [0; HELLO_LEN];
        first.copy_from_slice(&self.heard);
        self.heard.clear();
        let mut answer = [0; ANSWER_LEN];
        let hello = match Hello::decode(&first, identity) {
            Ok(hello) => hello,
            Err(verdict) => {
                answer[..4].copy_from_slice(&verdict.to_bytes());
                let _ = self.stream.write_all(&answer);
                return false;
            }
        };
        let mut nonce = [0; 32];
        if let Err(error) = fill_random(&mut nonce) {
            tracing::error!(%error, "no random numbers: a rank's call was refused");
            return false;
        }
        answer[4..36].copy_from_slice(&nonce);
        answer[36..].copy_from_slice(&identity.prove(End::Acceptor, &first, &nonce));
        self.answered = Some((hello, first, nonce));
        self.stream.write_all(&answer).is_ok()
    }
}
