//! The status server of a rank.
//!
//! | route | answer |
//! |---|---|
//! | `GET /status` | [`RankAnswer`], small: for polling |
//! | `GET /dump` | the whole record as JSON; header `rcomm-change` numbers the answer, `rcomm-entries` is the ring's capacity |
//! | `GET /dump?since=N` | what changed since answer N, with header `rcomm-since: N`; the whole record if N is unknown |
//! | `GET /peers` | a list of [`PeerEndpoint`]: the other ranks' endpoints |
//! | `GET /waits` | a list of [`WaitStatistics`]: for how long threads of the process wait, and for what |
//! | `GET /metrics` | the same as metrics, in Prometheus' text format 0.0.4 |
//! | `GET /threads` | a list of [`OwnThread`](super::OwnThread): what the threads of the process wait in, and their probable callers |
//! | `GET /ping` | `pong`: the process serves its endpoint |
//! | `GET /handlers` | the names of the program's own handlers, as a list |
//! | `POST /handlers/NAME?key=value` | the text that the program's handler returns; 400 with its text if it fails, 404 if there is none |
//! | `POST /dump` | [`WrittenDump`]: the process has written its dump; 501 if it writes none |
//!
//! One thread, `rcomm/endpoint`, serves the endpoint. Up to two more of the same name run the callbacks of `GET
//! /peers`, `POST /dump` and `POST /handlers/NAME`, which may block, and read the states of the threads for `GET
//! /threads`. The endpoint reads the ring and takes no lock that operations take, so it answers while the program is
//! stuck. Until the first connection it sleeps and holds only its socket. The thread may start later than the socket
//! listens ([`Endpoint::bind`]): the system holds connections until then. The mode 0600 of a unix socket restricts
//! access; over TCP every request carries the token (`Authorization: Bearer ...`), inside TLS if the job uses it
//! ([`Listen::Tls`]). Requests have no body. At most [`MAX_CONNECTIONS`] connections are served at a time, each for at
//! most [`CONNECTION_TIME`]; if there are more, one that has not made an admitted request is closed
//! ([`Places`](super::places::Places)). Clients that ask without pause take at most a hundredth of a core from the
//! ranks: they wait for each answer ([`Share`]).

use super::answer::{
    CHANGE_HEADER, ENTRIES_HEADER, EndpointAddress, EndpointToken, GroupAnswer, PeerEndpoint,
    RankAnswer, SINCE_HEADER, WrittenDump,
};
use super::connections::{Listener, bind_tcp, bind_unix, serve};
use super::handlers::{self, HandlerParameters, ProgramHandlers};
use super::share::{RULES, Rules, Share, Visitor};
use super::tls::Tls;
use super::wait_routes::{self, ListWaits};
use super::waits::WaitStatistics;
use crate::error::{Error, Result};
use crate::record::FlightRecorder;
use crate::record::changes::Changes;
use crate::record::decode;
use axum::extract::{Query, Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use nix::sys::signal::{SigSet, Signal};
use serde::Deserialize;
use std::fs;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use subtle::ConstantTimeEq;

/// Maximum number of connections served at a time. A further one takes the place of one that has not made an admitted
/// request; if there is none, it waits.
pub const MAX_CONNECTIONS: usize = 32;
/// Maximum number of connections of one host that have not made an admitted request.
pub(super) const STRANGERS_PER_HOST: usize = 16;
/// Maximum duration of a connection, and so of an answer.
pub const CONNECTION_TIME: Duration = Duration::from_secs(60);
/// Maximum time for a client to send a request's head, and for setting TLS up with it.
pub(super) const HEADER_TIME: Duration = Duration::from_secs(5);

/// The address on which an endpoint listens.
#[derive(Clone, Debug)]
pub enum Listen {
    /// On a unix socket of mode 0600 at this path, in a directory that exists.
    Unix(PathBuf),
    /// On a TCP address (port 0: any free one), for clients with the token.
    Tcp(std::net::SocketAddr, EndpointToken),
    /// Like [`Tcp`](Self::Tcp), with TLS.
    Tls(std::net::SocketAddr, EndpointToken, Tls),
}

impl Listen {
    /// A unix socket next to the recorder's ring file; `None` if the ring is in memory.
    pub fn beside(recorder: &FlightRecorder) -> Option<Self> {
        let ring = recorder.storage().path()?;
        Some(Self::Unix(ring.with_extension("sock")))
    }
}

type FindPeers = Arc<dyn Fn() -> Vec<PeerEndpoint> + Send + Sync>;
type WriteDump = Arc<dyn Fn() -> std::result::Result<String, String> + Send + Sync>;

/// Callbacks of the process that owns the endpoint, for the endpoint's own routes.
struct Callbacks {
    peers: FindPeers,
    dump: Option<WriteDump>,
}

/// A running status server. When this value is dropped, it stops the server, waits for callbacks that run, and removes
/// the server's unix socket, and the socket's folder if that is then empty.
pub struct Endpoint {
    address: EndpointAddress,
    callbacks: Arc<Mutex<Callbacks>>,
    program_handlers: Arc<ProgramHandlers>,
    waits: Arc<Mutex<ListWaits>>,
    /// Dropping this end of the pair stops the thread.
    stop: Option<UnixStream>,
    server: Server,
}

/// The thread of an endpoint, which may still have to be started.
#[derive(Clone)]
struct Server(Arc<Mutex<ServerState>>);

enum ServerState {
    /// The thread has not been started. This is what it will do; it owns the socket.
    Waiting(Box<dyn FnOnce() + Send>),
    Running(JoinHandle<()>),
    Ended,
}

impl Server {
    fn lock(&self) -> MutexGuard<'_, ServerState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the thread, unless it was started or the endpoint is gone. If it cannot be started, the socket is closed.
    fn start(&self) -> io::Result<()> {
        let mut state = self.lock();
        match std::mem::replace(&mut *state, ServerState::Ended) {
            ServerState::Waiting(serve) => {
                let thread = std::thread::Builder::new().name("rcomm/endpoint".to_owned());
                *state = ServerState::Running(thread.spawn(serve)?);
            }
            other => *state = other,
        }
        Ok(())
    }

    /// Joins the thread, which has been told to stop. A thread that was not started will not be started any more.
    fn end(&self) {
        let state = std::mem::replace(&mut *self.lock(), ServerState::Ended);
        if let ServerState::Running(thread) = state {
            // A panicked thread has nothing left to clean up.
            let _ = thread.join();
        }
    }
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Endpoint").field(&self.address).finish()
    }
}

impl Endpoint {
    /// Starts a thread that serves this recorder's ring. A stale socket file is replaced.
    ///
    /// # Errors
    ///
    /// If another process answers on the socket, the address is not available, or the thread cannot be started.
    pub fn serve(recorder: Arc<FlightRecorder>, listen: Listen) -> Result<Self> {
        Self::serve_within(recorder, listen, RULES)
    }

    /// Listens like [`serve`](Self::serve), and answers once the returned function has been called, which starts the
    /// thread. Clients can connect and send requests before. If the thread cannot be started, the function returns the
    /// error, and the socket is gone.
    ///
    /// # Errors
    ///
    /// If another process answers on the socket, or the address is not available.
    pub fn bind(
        recorder: Arc<FlightRecorder>,
        listen: Listen,
    ) -> Result<(Self, impl FnOnce() -> io::Result<()> + Send + use<>)> {
        let endpoint = Self::bind_within(recorder, listen, RULES)?;
        let server = endpoint.server.clone();
        let socket = match &endpoint.address {
            EndpointAddress::Unix(path) => Some(path.clone()),
            EndpointAddress::Tcp(_) => None,
        };
        let start = move || {
            server.start().inspect_err(|_| {
                if let Some(socket) = &socket {
                    let _ = fs::remove_file(socket);
                }
            })
        };
        Ok((endpoint, start))
    }

    /// Works like [`serve`](Self::serve), with these rules for the processor time of answers.
    pub(super) fn serve_within(
        recorder: Arc<FlightRecorder>,
        listen: Listen,
        rules: Rules,
    ) -> Result<Self> {
        let endpoint = Self::bind_within(recorder, listen, rules)?;
        let started = endpoint.server.start();
        started.map_err(|error| listen_error(&endpoint.address.to_string(), &error))?;
        Ok(endpoint)
    }

    fn bind_within(recorder: Arc<FlightRecorder>, listen: Listen, rules: Rules) -> Result<Self> {
        let callbacks = Arc::new(Mutex::new(Callbacks {
            peers: Arc::new(Vec::new),
            dump: None,
        }));
        let bound = match listen {
            Listen::Unix(path) => {
                let address = EndpointAddress::Unix(path.clone());
                match bind_unix(&path) {
                    Ok(listener) => Ok((Listener::Unix(listener), address, None)),
                    Err(error) => Err((address, error)),
                }
            }
            Listen::Tcp(wanted, token) => bind_tcp(wanted, token, None),
            Listen::Tls(wanted, token, tls) => bind_tcp(wanted, token, Some(tls)),
        };
        let (listener, address, token) =
            bound.map_err(|(address, error)| listen_error(&address.to_string(), &error))?;
        let pair = UnixStream::pair().and_then(|(stop, stopped)| {
            stopped.set_nonblocking(true)?;
            Ok((stop, stopped))
        });
        let (stop, stopped) = pair.map_err(|error| listen_error(&address.to_string(), &error))?;
        let program_handlers = Arc::new(ProgramHandlers::default());
        let waits: Arc<Mutex<ListWaits>> = Arc::new(Mutex::new(Arc::new(Vec::new)));
        let served = (callbacks.clone(), program_handlers.clone(), waits.clone());
        let work = move || {
            // Tokio's writes raise SIGPIPE on this thread if a client is gone. Rust programs ignore the signal; it
            // would end other programs. If the signal cannot be blocked, the endpoint is served even so.
            let mut blocked = SigSet::empty();
            blocked.add(Signal::SIGPIPE);
            let _ = blocked.thread_block();
            if listener.wait_for_connection(&stopped) {
                let share = Share::new(rules);
                let router = router(recorder, served, token);
                // If Tokio's runtime or its listener cannot be made, this thread has nothing to serve. Open connections
                // end with that runtime.
                let _ = serve(listener, router, share, stopped);
            }
        };
        let waiting = ServerState::Waiting(Box::new(work));
        Ok(Self {
            address,
            callbacks,
            program_handlers,
            waits,
            stop: Some(stop),
            server: Server(Arc::new(Mutex::new(waiting))),
        })
    }

    /// The address; over TCP with the port that was bound.
    pub fn address(&self) -> &EndpointAddress {
        &self.address
    }

    /// Sets a fixed answer to `GET /peers`.
    pub fn set_peers(&self, peers: Vec<PeerEndpoint>) {
        self.find_peers(move || peers.clone());
    }

    /// Sets the function that answers `GET /peers`.
    ///
    /// The function runs on a separate thread and may block without delaying `/status` and `GET /dump`. A drop of the
    /// endpoint waits until the function returns.
    pub fn find_peers(&self, find: impl Fn() -> Vec<PeerEndpoint> + Send + Sync + 'static) {
        self.callbacks().peers = Arc::new(find);
    }

    /// Sets the function that writes this rank's dump on `POST /dump`. It returns the dump's location, or why there
    /// is no dump.
    ///
    /// The function runs on a separate thread, like that of [`find_peers`](Self::find_peers).
    pub fn write_dumps(
        &self,
        write: impl Fn() -> std::result::Result<String, String> + Send + Sync + 'static,
    ) {
        self.callbacks().dump = Some(Arc::new(write));
    }

    /// Sets the function that answers `GET /waits` and `GET /metrics`. The function runs on the endpoint's thread and
    /// must not block.
    pub fn list_waits(&self, list: impl Fn() -> Vec<WaitStatistics> + Send + Sync + 'static) {
        let mut waits = self.waits.lock().unwrap_or_else(PoisonError::into_inner);
        *waits = Arc::new(list);
    }

    /// Adds a handler of the program, which answers `POST /handlers/NAME`, or replaces the handler of this name. The
    /// handler gets the pairs of the request's query, and returns a text, or why it failed.
    ///
    /// The handler runs on a separate thread, as the function of [`find_peers`](Self::find_peers) does; at most two
    /// callbacks run at a time.
    ///
    /// # Errors
    /// If the name is empty, longer than 64 bytes, or holds anything but lower-case letters, digits, `-` and `_`; or if
    /// there are 64 others.
    pub fn handle(
        &self,
        name: &str,
        handler: impl Fn(&HandlerParameters) -> std::result::Result<String, String>
        + Send
        + Sync
        + 'static,
    ) -> Result<()> {
        let added = self.program_handlers.add(name, Arc::new(handler));
        added.map_err(|why| Error::Endpoint {
            address: self.address.to_string(),
            why,
        })
    }

    fn callbacks(&self) -> MutexGuard<'_, Callbacks> {
        self.callbacks
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        drop(self.stop.take());
        self.server.end();
        if let EndpointAddress::Unix(path) = &self.address {
            let _ = fs::remove_file(path);
            // If the ring file was removed first, its directory could not be removed because of the socket.
            if let Some(directory) = path.parent() {
                let _ = fs::remove_dir(directory);
            }
        }
    }
}

fn listen_error(address: &str, error: &io::Error) -> Error {
    Error::Endpoint {
        address: address.to_owned(),
        why: format!("cannot listen there: {error}"),
    }
}

/// The state that the routes share.
pub(super) struct Served {
    pub(super) recorder: Arc<FlightRecorder>,
    changes: Mutex<Changes>,
    callbacks: Arc<Mutex<Callbacks>>,
    pub(super) program_handlers: Arc<ProgramHandlers>,
    pub(super) waits: Arc<Mutex<ListWaits>>,
}

fn router(
    recorder: Arc<FlightRecorder>,
    (callbacks, program_handlers, waits): (
        Arc<Mutex<Callbacks>>,
        Arc<ProgramHandlers>,
        Arc<Mutex<ListWaits>>,
    ),
    token: Option<EndpointToken>,
) -> Router {
    // Answers are numbered from the current time in microseconds. A read of the ring takes longer than a
    // microsecond, so the numbers are above those of an earlier process of this rank.
    let before_first = wall_now().cast_unsigned() / 1_000;
    let changes = Mutex::new(Changes::numbered_after(before_first, recorder.memory().1));
    let served = Arc::new(Served {
        recorder,
        changes,
        callbacks,
        program_handlers,
        waits,
    });
    let router = Router::new()
        .route("/status", get(status))
        .route("/dump", get(dump).post(write_dump))
        .route("/peers", get(list_peers))
        .route("/waits", get(wait_routes::list))
        .route("/metrics", get(wait_routes::metrics))
        .route("/threads", get(wait_routes::threads))
        .route("/ping", get(async || "pong\n"))
        .route("/handlers", get(handlers::list))
        .route("/handlers/{name}", post(handlers::run))
        .with_state(served);
    router.layer(middleware::from_fn(move |request, next| {
        let token = token.clone();
        async move { check_token(token.as_ref(), request, next).await }
    }))
}

/// Admits a request that carries the token. If the endpoint has no token, admits any request: the mode of its unix
/// socket decides who connects.
async fn check_token(token: Option<&EndpointToken>, request: Request, next: Next) -> Response {
    let Some(token) = token else {
        return admit(request, next).await;
    };
    let presented = request
        .headers()
        .get(header::AUTHORIZATION)
        .and_then(|value| value.as_bytes().strip_prefix(b"Bearer "))
        .unwrap_or_default();
    if token.as_str().as_bytes().ct_eq(presented).into() {
        return admit(request, next).await;
    }
    let why = "missing or wrong token\n";
    (StatusCode::UNAUTHORIZED, why).into_response()
}

/// Answers an admitted request, whose connection keeps its place from now on, when it is its turn.
async fn admit(request: Request, next: Next) -> Response {
    let visitor = request.extensions().get::<Arc<Visitor>>().cloned();
    if let Some(visitor) = visitor
        && !visitor.admit().await
    {
        let why =
            "other requests have used the processor time that answers may take: ask again later\n";
        return (StatusCode::SERVICE_UNAVAILABLE, why).into_response();
    }
    next.run(request).await
}

fn wall_now() -> i64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| {
            i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
        })
}

async fn status(State(served): State<Arc<Served>>) -> Json<RankAnswer> {
    Json(rank_answer(&served.recorder, served.recorder.now_ns()))
}

fn rank_answer(recorder: &FlightRecorder, now_ns: i64) -> RankAnswer {
    let (memory, layout) = recorder.memory();
    let dump = decode::dump_of(memory, layout, now_ns, []);
    let groups = dump.groups.into_iter().map(|group| GroupAnswer {
        id: group.info.id,
        name: group.info.name,
        desc: group.info.desc,
        size: group.info.ranks.len() as u64,
        status: group.status.unwrap_or_default(),
    });
    RankAnswer {
        identity: dump.identity,
        status: dump.status.unwrap_or_default(),
        groups: groups.collect(),
        records: recorder.counters().records,
        entries: recorder.entries() as u64,
        failures: dump.failures,
    }
}

#[derive(Deserialize)]
struct DumpQuery {
    since: Option<u64>,
}

async fn dump(
    State(served): State<Arc<Served>>,
    Query(query): Query<DumpQuery>,
) -> impl IntoResponse {
    let (memory, layout) = served.recorder.memory();
    let mut changes = served
        .changes
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    // An unknown number comes from an earlier process of this rank: everything is new.
    let since = query.since.filter(|&since| changes.knows(since));
    let (mut dump, number) =
        changes.since(memory, layout, since.unwrap_or(0), served.recorder.now_ns());
    drop(changes);
    dump.identity.reason = "requested at its endpoint".to_owned();
    let mut headers = HeaderMap::new();
    headers.insert(CHANGE_HEADER, HeaderValue::from(number));
    headers.insert(ENTRIES_HEADER, HeaderValue::from(served.recorder.entries()));
    if let Some(since) = since {
        headers.insert(SINCE_HEADER, HeaderValue::from(since));
    }
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/json"),
    );
    (headers, dump.to_json())
}

async fn list_peers(
    State(served): State<Arc<Served>>,
    Extension(visitor): Extension<Arc<Visitor>>,
) -> Response {
    let find = {
        let callbacks = served
            .callbacks
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        callbacks.peers.clone()
    };
    match visitor.elsewhere(move || find()).await {
        Ok(peers) => Json(peers).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

async fn write_dump(
    State(served): State<Arc<Served>>,
    Extension(visitor): Extension<Arc<Visitor>>,
) -> Response {
    let write = {
        let callbacks = served
            .callbacks
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        callbacks.dump.clone()
    };
    let Some(write) = write else {
        let why = "this process does not write dumps\n";
        return (StatusCode::NOT_IMPLEMENTED, why).into_response();
    };
    match visitor.elsewhere(move || write()).await {
        Ok(Ok(place)) => Json(WrittenDump { place }).into_response(),
        Ok(Err(why)) => (StatusCode::INTERNAL_SERVER_ERROR, why).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}
