//! Capturing streams into graphs, with the rules that callers must keep.
//!
//! Follows "Creating a Graph Using Stream Capture" and "Prohibited and Unhandled Operations" of the CUDA
//! programming guide, and `cuStreamBeginCapture`, `cuThreadExchangeStreamCaptureMode` and
//! `cuEventQuery` of the driver's manual: a wait on an event of a capture adds the waiting stream to the capture; all
//! streams must have been joined to the first again when the capture ends; an event of a capture cannot be
//! queried; and while a capture of mode "global" is active, calls that may wait or allocate are refused on
//! every thread that has not relaxed its own mode, and invalidate the capture. A capture of mode "thread local" forbids
//! nothing here; CUDA forbids the same calls on the thread that captures.

use crate::cuda::graph;
use crate::stream::{Event, Stream, Work, lock};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

// `CUDA_ERROR_STREAM_CAPTURE_…` and `CUDA_ERROR_CAPTURED_EVENT`.
pub(crate) const UNSUPPORTED: c_int = 900;
pub(crate) const INVALIDATED: c_int = 901;
pub(crate) const MERGE: c_int = 902;
pub(crate) const UNMATCHED: c_int = 903;
pub(crate) const UNJOINED: c_int = 904;
pub(crate) const ISOLATION: c_int = 905;
pub(crate) const CAPTURED_EVENT: c_int = 907;

// `CUstreamCaptureMode`.
const GLOBAL: c_int = 0;
const RELAXED: c_int = 2;

/// For each stream of a capture, by its key, how many of its operations precede a point in the capture.
pub(crate) type Seen = BTreeMap<usize, u64>;

/// A stream's part in a capture.
pub(crate) struct Member {
    pub(crate) capture: Arc<Capture>,
    pub(crate) seen: Seen,
}

impl Member {
    /// Adds work of this stream to the capture.
    pub(crate) fn push(&mut self, stream: usize, work: Work) {
        let mut state = lock(&self.capture.state);
        state.work.push(work);
        let issued = state.issued.entry(stream).or_default();
        *issued += 1;
        self.seen.insert(stream, *issued);
    }
}

/// An active capture. The work of all its streams is kept in order of issue, which is a valid order for
/// every stream.
pub(crate) struct Capture {
    pub(crate) id: u64,
    mode: c_int,
    origin: usize,
    /// The handle of the graph that the capture fills, as an address.
    graph: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    work: Vec<Work>,
    /// The number of operations of each stream so far, by the stream's key.
    issued: Seen,
    streams: Vec<Weak<Stream>>,
    invalidated: bool,
}

/// The active captures.
static ACTIVE: Mutex<Vec<Arc<Capture>>> = Mutex::new(Vec::new());

thread_local! {
    /// The thread's mode, as `cuThreadExchangeStreamCaptureMode` has set it.
    static MODE: Cell<c_int> = const { Cell::new(GLOBAL) };
}

/// Sets the mode of the calling thread; returns its previous mode.
pub(crate) fn exchange_mode(mode: c_int) -> c_int {
    MODE.replace(mode)
}

/// Whether a call that may wait or allocate is allowed on this thread at this time. If it is not, the captures
/// that forbid it are invalidated.
pub(crate) fn allows_unsafe_calls() -> bool {
    if MODE.get() == RELAXED {
        return true;
    }
    let active = lock(&ACTIVE);
    let mut strict = active.iter().filter(|capture| capture.mode == GLOBAL);
    let mut allowed = true;
    for capture in &mut strict {
        capture.invalidate();
        allowed = false;
    }
    allowed
}

impl Capture {
    /// Begins a capture of this stream; returns false if the stream is being captured already.
    pub(crate) fn begin(stream: &Arc<Stream>, mode: c_int) -> bool {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        if stream.capture().is_some() {
            return false;
        }
        let capture = Arc::new(Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            mode,
            origin: stream.key(),
            graph: graph::begin().addr(),
            state: Mutex::default(),
        });
        lock(&ACTIVE).push(capture.clone());
        stream.join(&capture, &Seen::new());
        true
    }

    /// Adds a stream to the capture.
    pub(crate) fn admit(&self, stream: &Arc<Stream>) {
        lock(&self.state).streams.push(Arc::downgrade(stream));
    }

    /// The handle of the graph that the capture fills.
    pub(crate) fn graph(&self) -> *mut c_void {
        std::ptr::without_provenance_mut(self.graph)
    }

    /// `CU_STREAM_CAPTURE_STATUS_ACTIVE`, or `…_INVALIDATED`.
    pub(crate) fn status(&self) -> c_int {
        match lock(&self.state).invalidated {
            false => 1,
            true => 2,
        }
    }

    pub(crate) fn invalidate(&self) {
        lock(&self.state).invalidated = true;
    }

    /// Ends the capture that began on this stream; returns the graph's handle and its work.
    ///
    /// # Errors
    /// The status that `cuStreamEndCapture` returns.
    pub(crate) fn end(stream: &Stream) -> Result<(*mut c_void, Vec<Work>), c_int> {
        let (capture, seen) = stream.seen().ok_or(crate::cuda::INVALID_VALUE)?;
        if capture.origin != stream.key() {
            return Err(UNMATCHED);
        }
        lock(&ACTIVE).retain(|other| other.id != capture.id);
        let state = std::mem::take(&mut *lock(&capture.state));
        for member in state.streams.iter().filter_map(Weak::upgrade) {
            member.leave_capture();
        }
        let is_joined = |(stream, issued)| seen.get(stream).is_some_and(|seen| seen >= issued);
        let status = if state.invalidated {
            INVALIDATED
        } else if !state.issued.iter().all(is_joined) {
            UNJOINED
        } else {
            return Ok((capture.graph(), state.work));
        };
        graph::discard(capture.graph());
        Err(status)
    }
}

/// `cuStreamWaitEvent`; returns its status.
pub(crate) fn wait(stream: &Arc<Stream>, event: &Arc<Event>) -> c_int {
    match (event.captured(), stream.capture()) {
        (Some((recorded_in, _)), Some(waiting_in)) if recorded_in.id != waiting_in.id => MERGE,
        (Some((capture, seen)), _) => {
            stream.join(&capture, &seen);
            0
        }
        (None, Some(waiting_in)) if event.was_recorded() => {
            waiting_in.invalidate();
            ISOLATION
        }
        _ => {
            event.hold(stream);
            0
        }
    }
}
