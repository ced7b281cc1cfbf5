//! One rank's end of a communicator: its connection to the hub, and its state.

use super::lifecycle::Name;
use super::operation::Factor;
use super::profiler;
use super::window::Signals;
use super::{
    IN_PROGRESS, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, SUCCESS,
    SYSTEM_ERROR, fail,
};
use crate::calls::JOINED;
use crate::handles::{Handles, end_process};
use crate::hub;
use crate::stream::lock;
use crate::trouble;
use crate::wire::{FAILED, Reply, Request, RequestKind};
use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::Duration;

static COMMS: Handles<Comm> = Handles::new("communicator");

/// The communicator behind a handle; `None` for null.
pub(super) fn comm_of(handle: *mut c_void) -> Option<Arc<Comm>> {
    COMMS.get(handle)
}

/// Makes a handle for a communicator.
pub(super) fn admit(comm: &Arc<Comm>) -> *mut c_void {
    COMMS.insert(Arc::clone(comm))
}

/// Ends a handle and returns its communicator; `None` for null.
pub(super) fn dismiss(handle: *mut c_void) -> Option<Arc<Comm>> {
    COMMS.remove(handle)
}

/// What waits for an answer.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum WaitsFor {
    /// A kernel, which ends when the communicator is stopped.
    Device,
    /// A call on the host, which also ends when the communicator is stopped (`childAbortFlag`, init.cc:2918,
    /// which the bootstrap's sockets check).
    Bootstrap,
}

/// Work of a call in the background; the communicator counts it until this value is dropped.
pub(super) struct Job(Arc<Comm>);

impl Drop for Job {
    fn drop(&mut self) {
        self.0.jobs.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A kernel that a graph holds; the communicator counts it until this value is dropped.
pub(super) struct Captured(Arc<Comm>);

impl Captured {
    pub(super) fn of(comm: &Arc<Comm>) -> Self {
        comm.captured.fetch_add(1, Ordering::AcqRel);
        Self(Arc::clone(comm))
    }
}

impl Drop for Captured {
    fn drop(&mut self) {
        self.0.captured.fetch_sub(1, Ordering::AcqRel);
    }
}

#[derive(Default)]
struct Replies {
    arrived: HashMap<u64, Reply>,
    lost: bool,
}

/// One rank's end of a communicator.
pub(super) struct Comm {
    /// The name of the hub's socket.
    pub(super) hub: Vec<u8>,
    pub(super) rank: c_int,
    pub(super) size: c_int,
    /// The rank's device, counted from 0.
    pub(super) device: c_int,
    /// Whether calls on it block, from its configuration ("blocking", nccl.h). A communicator that is split off it
    /// inherits this, unless a configuration states it.
    pub(super) is_blocking: bool,
    pub(super) name: Name,
    /// `commHash`.
    pub(super) hash: u64,
    /// The context that the profiler plug-in gave to the communicator when all ranks had joined.
    profiled: OnceLock<profiler::Context>,
    writer: Mutex<Option<UnixStream>>,
    replies: Mutex<Replies>,
    arrived: Condvar,
    /// The result of the communicator's own calls (`asyncResult`).
    pub(super) state: AtomicI32,
    /// An error of the connections, which is never cleared (`proxyState->asyncResult`).
    network: AtomicI32,
    /// Number of ranks once all have joined; 0 before.
    pub(super) joined: AtomicI32,
    /// Number of kernels that graphs hold (`localPersistentRefs`).
    captured: AtomicUsize,
    /// Whether the communicator was stopped: its work on the device ends, and no new work begins.
    pub(super) stopped: AtomicBool,
    /// Whether it was revoked: only management calls are accepted.
    pub(super) revoked: AtomicBool,
    /// Whether it was aborted or destroyed: its connection to the hub is closed.
    pub(super) aborted: AtomicBool,
    /// Whether `ncclCommFinalize` or `ncclCommRevoke` was called (`finalizeCalled`).
    pub(super) finalizing: AtomicBool,
    /// Whether it was finalized: the other ranks may leave without an error.
    pub(super) finalized: AtomicBool,
    /// Number of collectives that this rank's kernels have begun.
    pub(super) collectives: AtomicU64,
    /// Number of splits, shrinks and exchanges, which all ranks make together on the host.
    pub(super) derivations: AtomicU64,
    /// Number of splits, without shrinks (`childCount`).
    pub(super) splits: AtomicU32,
    /// Number of calls that have work in the background.
    jobs: AtomicUsize,
    /// Counters of signals, from the first one-sided operation on.
    pub(super) signals: Mutex<Option<Arc<Signals>>>,
    /// Number of ids of requests that were given out.
    ids: AtomicU64,
    /// Number of kernels and one-sided operations that the device has not ended.
    pub(super) pending: AtomicUsize,
    /// Memory that kernels outside graphs use: begin and end.
    in_use: Mutex<Vec<(u64, u64)>>,
    /// The factors of the user's reductions, in order of creation.
    pub(super) factors: Mutex<Vec<Factor>>,
    /// Whether its memory is released (`memManager->released`).
    pub(super) suspended: AtomicBool,
    /// Whether messages were part of a group whose end was simulated.
    pub(super) has_simulated_messages: AtomicBool,
}

/// Breaks the connections of all communicators of this process; returns the number of these communicators. The error is
/// that of the thread that serves the network (`proxyState->asyncResult`); no operation needs to be in progress.
#[unsafe(no_mangle)]
pub extern "C" fn rcomm_simulator_break_connections() -> u64 {
    let mut broken = 0;
    COMMS.any(|comm| {
        comm.record_error(REMOTE_ERROR, "the connection to the other ranks broke");
        broken += 1;
        false
    });
    broken
}

impl Comm {
    pub(super) fn new(
        hub: &[u8],
        (rank, size): (c_int, c_int),
        device: c_int,
        is_blocking: bool,
        (name, hash): (Name, u64),
    ) -> Arc<Self> {
        Arc::new(Self {
            hub: hub.to_vec(),
            rank,
            size,
            device,
            is_blocking,
            name,
            hash,
            profiled: OnceLock::new(),
            writer: Mutex::new(None),
            replies: Mutex::default(),
            arrived: Condvar::new(),
            state: AtomicI32::new(IN_PROGRESS),
            network: AtomicI32::new(SUCCESS),
            joined: AtomicI32::new(0),
            captured: AtomicUsize::new(0),
            stopped: AtomicBool::new(false),
            revoked: AtomicBool::new(false),
            aborted: AtomicBool::new(false),
            finalizing: AtomicBool::new(false),
            finalized: AtomicBool::new(false),
            collectives: AtomicU64::new(0),
            derivations: AtomicU64::new(0),
            splits: AtomicU32::new(0),
            jobs: AtomicUsize::new(0),
            signals: Mutex::new(None),
            ids: AtomicU64::new(0),
            pending: AtomicUsize::new(0),
            in_use: Mutex::default(),
            factors: Mutex::default(),
            suspended: AtomicBool::new(false),
            has_simulated_messages: AtomicBool::new(false),
        })
    }

    /// Connects and waits for all ranks (`ncclCommInitRankFunc`, init.cc:1831); returns the status.
    pub(super) fn join(self: &Arc<Self>, key: u64) -> c_int {
        if let Some(delay) = trouble::setting("init_delay_ms") {
            std::thread::sleep(Duration::from_millis(delay));
        }
        trouble::die_in_init();
        if let Err(status) = self.name.poll() {
            return self.set_state(status);
        }
        let connected =
            hub::address(&self.hub).and_then(|address| UnixStream::connect_addr(&address));
        let halves = connected.and_then(|stream| Ok((stream.try_clone()?, stream)));
        let (reader, writer) = match halves {
            Ok(halves) => halves,
            Err(error) => {
                return self.set_state(fail(SYSTEM_ERROR, &format!("bootstrap: {error}")));
            }
        };
        *lock(&self.writer) = Some(writer);
        let comm = Arc::clone(self);
        let listening = std::thread::Builder::new()
            .name("sim/comm".into())
            .spawn(move || comm.listen(reader));
        if let Err(error) = listening {
            return self.set_state(fail(SYSTEM_ERROR, &format!("bootstrap: {error}")));
        }
        let mut request = Request::new(RequestKind::Join, self.next_id(), key);
        request.rank = self.rank;
        request.op = self.size;
        request.data_type = self.device;
        let status = match self.ask(&request, &[]) {
            true => self
                .answer(request.id, WaitsFor::Bootstrap)
                .map_or_else(|status| status, |_| SUCCESS),
            false => fail(REMOTE_ERROR, "the bootstrap root is gone"),
        };
        if status == SUCCESS {
            self.joined.store(self.size, Ordering::Release);
            JOINED.fetch_add(1, Ordering::Relaxed);
            // `ncclProfilerPluginInit` at the end of `initTransportsRank` (init.cc).
            let opened = profiler::open_context(self.hash, self.name.at(), self.rank, self.size);
            if let Some(context) = opened {
                let _ = self.profiled.set(context);
            }
        }
        self.set_state(status)
    }

    /// The result of `ncclCommGetAsyncError` (init.cc): the communicator's state, or, if that is `ncclSuccess`, the
    /// state of its connections.
    pub(super) fn async_error(&self) -> c_int {
        match self.state.load(Ordering::Acquire) {
            SUCCESS => self.network.load(Ordering::Acquire),
            other => other,
        }
    }

    /// Handles a refused call and returns its status, which becomes the state of a communicator that does not
    /// block (`ncclEnqueueCheck`, enqueue.cc, and `groupCleanup`, group.cc: `ncclCommSetAsyncError` unless
    /// `blocking`).
    pub(super) fn refuse(&self, status: c_int) -> c_int {
        if !self.is_blocking {
            self.state.store(status, Ordering::Release);
        }
        status
    }

    /// Ends a process whose call changes what an unfinished launch reads without a lock: the registrations
    /// (`ncclRegister`, register/register.cc) and the user's reductions (`ncclRedOpCreatePreMulSum`, enqueue.cc).
    pub(super) fn end_if_launching(&self, call: &str) {
        // A thread that launches reports its end through the state, and is counted for a moment longer.
        let is_launching = || self.is_blocking || self.state.load(Ordering::Acquire) == IN_PROGRESS;
        if self.has_jobs() && is_launching() {
            end_process(&format!("{call} during a launch that is not finished"));
        }
    }

    /// The context that the profiler plug-in gave to the communicator; `None` before all ranks have joined, and if
    /// there is no plug-in or its `init` failed.
    pub(super) fn profiled(&self) -> Option<&profiler::Context> {
        self.profiled.get()
    }

    /// Sets the communicator's state, and returns it.
    pub(super) fn set_state(&self, status: c_int) -> c_int {
        self.state.store(status, Ordering::Release);
        status
    }

    /// Receives what the hub sends, until the connection is closed.
    fn listen(&self, mut from: UnixStream) {
        loop {
            let reply = Reply::receive(&mut from);
            let mut replies = lock(&self.replies);
            match reply {
                Ok(reply) if reply.id == FAILED => {
                    // Between the devices of one host there is no connection that could break.
                    let is_noticed = trouble::setting("local_peers").is_none()
                        || self.joined.load(Ordering::Acquire) == 0;
                    if is_noticed {
                        self.record_error(reply.status, &String::from_utf8_lossy(&reply.payload));
                    }
                }
                Ok(reply) => {
                    replies.arrived.insert(reply.id, reply);
                }
                Err(_) => {
                    replies.lost = true;
                    if !self.aborted.load(Ordering::Acquire) {
                        self.record_error(REMOTE_ERROR, "the connection to the other ranks broke");
                    }
                }
            }
            let lost = replies.lost;
            drop(replies);
            self.arrived.notify_all();
            if lost {
                return;
            }
        }
    }

    /// Records an asynchronous error, which `ncclCommGetAsyncError` returns, unless the communicator is finalized.
    /// Kernels do not end because of it.
    pub(super) fn record_error(&self, status: c_int, text: &str) {
        if self.finalized.load(Ordering::Acquire) {
            return;
        }
        // The first error is kept.
        let _ = self.network.compare_exchange(
            SUCCESS,
            fail(status, text),
            Ordering::AcqRel,
            Ordering::Acquire,
        );
    }

    /// Works as `ncclCommEnsureReady`, init.cc:422: "Attempt to use communicator before the previous operation
    /// returned ncclSuccess".
    pub(super) fn ensure_ready(&self) -> c_int {
        match self.async_error() {
            SUCCESS if self.revoked.load(Ordering::Acquire) => {
                fail(INVALID_USAGE, "the communicator was revoked")
            }
            SUCCESS => SUCCESS,
            IN_PROGRESS => fail(
                INVALID_ARGUMENT,
                "Attempt to use communicator before the previous operation returned ncclSuccess",
            ),
            error => error,
        }
    }

    /// Notes memory that a kernel uses until [`give_back`](Self::give_back) is called with the same ranges.
    pub(super) fn take_memory(&self, ranges: &[(u64, u64)]) {
        lock(&self.in_use).extend(ranges);
    }

    /// Notes that a kernel no longer uses this memory.
    pub(super) fn give_back(&self, ranges: &[(u64, u64)]) {
        let mut in_use = lock(&self.in_use);
        for range in ranges {
            if let Some(index) = in_use.iter().position(|used| used == range) {
                in_use.swap_remove(index);
            }
        }
    }

    /// Whether a kernel outside graphs uses some of this memory.
    pub(super) fn uses(&self, begin: u64, end: u64) -> bool {
        let overlaps = |(used_begin, used_end): &(u64, u64)| *used_begin < end && begin < *used_end;
        lock(&self.in_use).iter().any(overlaps)
    }

    /// Counts work in the background until the returned value is dropped.
    pub(super) fn begin_job(self: &Arc<Self>) -> Job {
        self.jobs.fetch_add(1, Ordering::AcqRel);
        Job(Arc::clone(self))
    }

    /// Whether it has unfinished work, on the device or in the background.
    pub(super) fn is_busy(&self) -> bool {
        self.pending.load(Ordering::Acquire) > 0 || self.has_jobs()
    }

    /// Whether it has unfinished work in the background.
    pub(super) fn has_jobs(&self) -> bool {
        self.jobs.load(Ordering::Acquire) > 0
    }

    /// Waits until the communicator has no work in the background, and none on the device, which first does what
    /// precedes that work on its stream (`ncclStrongStreamSynchronize` in `commDestroySync`, init.cc:2741, and
    /// `commRevokeAsync`, 2941).
    pub(super) fn drain(&self) {
        while self.is_busy() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until no graph holds an operation of it (`localPersistentRefs`, init.cc:2751).
    pub(super) fn wait_for_graphs(&self) {
        while self.captured.load(Ordering::Acquire) > 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub(super) fn next_id(&self) -> u64 {
        self.ids.fetch_add(1, Ordering::Relaxed)
    }

    /// Sends a request to the hub; returns whether it was sent.
    pub(super) fn ask(&self, request: &Request, payload: &[u8]) -> bool {
        lock(&self.writer)
            .as_mut()
            .is_some_and(|writer| request.send(writer, payload).is_ok())
    }

    /// Waits for an answer and returns its payload.
    ///
    /// # Errors
    /// The status of the answer, or the one that a call returns because the communicator was stopped or aborted, or
    /// because a call on the host has lost its connection.
    pub(super) fn answer(&self, id: u64, waits_for: WaitsFor) -> Result<Vec<u8>, c_int> {
        let mut replies = lock(&self.replies);
        loop {
            if let Some(reply) = replies.arrived.remove(&id) {
                if reply.status != SUCCESS {
                    return Err(fail(reply.status, &String::from_utf8_lossy(&reply.payload)));
                }
                return Ok(reply.payload);
            }
            if self.aborted.load(Ordering::Acquire) {
                return Err(REMOTE_ERROR);
            }
            if self.stopped.load(Ordering::Acquire) {
                return Err(match waits_for {
                    WaitsFor::Device => REMOTE_ERROR,
                    WaitsFor::Bootstrap => INTERNAL_ERROR,
                });
            }
            if replies.lost && waits_for == WaitsFor::Bootstrap {
                return Err(fail(REMOTE_ERROR, "the bootstrap root is gone"));
            }
            replies = self
                .arrived
                .wait(replies)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Ends the communicator's work on the device, and rejects new work (`setCommAbortFlags`, init.cc:2915: kernels
    /// check the flag while they wait for a peer).
    pub(super) fn stop(&self) {
        if !self.stopped.swap(true, Ordering::AcqRel) {
            self.ask(&Request::new(RequestKind::Stop, 0, 0), &[]);
        }
        let _replies = lock(&self.replies);
        self.arrived.notify_all();
    }

    /// Works as [`stop`](Self::stop), and closes the connection to the hub.
    pub(super) fn abort(&self) {
        self.stop();
        self.aborted.store(true, Ordering::Release);
        if let Some(writer) = lock(&self.writer).take() {
            let _ = writer.shutdown(std::net::Shutdown::Both);
        }
        let _replies = lock(&self.replies);
        self.arrived.notify_all();
    }

    /// Waits until the communicator is stopped.
    pub(super) fn hang(&self) {
        let mut replies = lock(&self.replies);
        while !self.stopped.load(Ordering::Acquire) {
            replies = self
                .arrived
                .wait(replies)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}
