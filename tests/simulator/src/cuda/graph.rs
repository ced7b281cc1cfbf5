//! Graphs: what a capture gathers, to be run as often as it is launched ("Graph Management" in the driver's
//! manual), and the program's objects that they keep alive.

use super::{INVALID_VALUE, SUCCESS, put, stream_of};
use crate::callback::{self, HostFunction};
use crate::capture::Capture;
use crate::handles::Handles;
use crate::stream::{Work, lock};
use std::ffi::{c_int, c_uint, c_void};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// The work that a capture has gathered, and the objects that must exist as long as the graph.
#[derive(Default)]
pub(crate) struct Graph {
    pub(crate) work: Mutex<Vec<Work>>,
    objects: Mutex<Vec<Arc<UserObject>>>,
}

/// `CUuserObject`. The caller's handle and graphs hold references to it.
struct UserObject {
    /// The argument of the destructor.
    at: usize,
    destroy: HostFunction,
}

/// A destructor to be called, and when.
type Released = (Instant, HostFunction, usize);

/// Where destructors wait for the thread that calls them.
fn releases() -> &'static Sender<Released> {
    static RELEASES: OnceLock<Sender<Released>> = OnceLock::new();
    RELEASES.get_or_init(|| {
        let (sender, released) = channel::<Released>();
        let release = move || {
            for (due, destroy, at) in released {
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
                // SAFETY: the caller of `cuUserObjectCreate` guarantees that `destroy` may be called once with `at`,
                // on any thread, and a value is dropped once.
                unsafe { callback::call(destroy, at) };
            }
        };
        let thread = std::thread::Builder::new().name("sim/objects".into());
        thread.spawn(release).expect("a thread can be started");
        sender
    })
}

impl Drop for UserObject {
    /// "The destructor is called when the last reference goes" (`cuUserObjectCreate`), but by a thread of the driver,
    /// some time after the call that destroyed the graph (seen on an H100 with CUDA 13.0 and NCCL 2.30.7).
    fn drop(&mut self) {
        const DELAY: Duration = Duration::from_millis(300);
        // The thread receives as long as the process exists.
        let _ = releases().send((Instant::now() + DELAY, self.destroy, self.at));
    }
}

static GRAPHS: Handles<Graph> = Handles::new("graph");
static EXECUTABLES: Handles<Graph> = Handles::new("executable graph");
static OBJECTS: Handles<UserObject> = Handles::new("user object");

/// Makes an empty graph for a capture to fill; returns its handle.
pub(crate) fn begin() -> *mut c_void {
    GRAPHS.insert(Arc::default())
}

/// Removes the graph of a capture that has failed.
pub(crate) fn discard(handle: *mut c_void) {
    drop(GRAPHS.remove(handle));
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamBeginCapture_v2(handle: *mut c_void, mode: c_int) -> c_int {
    crate::calls::note();
    // The default stream cannot be captured.
    if !handle.is_null() && Capture::begin(&stream_of(handle), mode) {
        SUCCESS
    } else {
        INVALID_VALUE
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamEndCapture(handle: *mut c_void, graph: *mut *mut c_void) -> c_int {
    crate::calls::note();
    match Capture::end(&stream_of(handle)) {
        Err(status) => {
            // SAFETY: `graph` is null, which `put` refuses, or the caller lets a handle be written there.
            unsafe { put(graph, std::ptr::null_mut()) };
            status
        }
        Ok((made, work)) => {
            if let Some(made) = GRAPHS.get(made) {
                *lock(&made.work) = work;
            }
            // SAFETY: `graph` is null, which `put` refuses, or the caller lets a handle be written there.
            unsafe { put(graph, made) }
        }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphInstantiateWithFlags(
    executable: *mut *mut c_void,
    graph: *mut c_void,
    _flags: u64,
) -> c_int {
    crate::calls::note();
    // The driver 580.159.04 with an H100 refuses this too.
    if super::context::current() == 0 {
        return super::INVALID_CONTEXT;
    }
    let Some(graph) = GRAPHS.get(graph) else {
        return INVALID_VALUE;
    };
    // An executable graph holds its own references to the graph's objects.
    let copy = Graph {
        work: Mutex::new(lock(&graph.work).clone()),
        objects: Mutex::new(lock(&graph.objects).clone()),
    };
    // SAFETY: `executable` is null, which `put` refuses, or the caller lets a handle be written there.
    unsafe { put(executable, EXECUTABLES.insert(Arc::new(copy))) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphLaunch(executable: *mut c_void, handle: *mut c_void) -> c_int {
    crate::calls::note();
    let Some(graph) = EXECUTABLES.get(executable) else {
        return INVALID_VALUE;
    };
    let stream = stream_of(handle);
    for work in &*lock(&graph.work) {
        stream.push(Arc::clone(work));
    }
    // "The graph may be destroyed" while it runs: its objects stay until it has run.
    stream.push(Arc::new(move || {
        let _running = &graph;
    }));
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphExecDestroy(executable: *mut c_void) -> c_int {
    crate::calls::note();
    EXECUTABLES
        .remove(executable)
        .map_or(INVALID_VALUE, |_| SUCCESS)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphDestroy(graph: *mut c_void) -> c_int {
    crate::calls::note();
    GRAPHS.remove(graph).map_or(INVALID_VALUE, |_| SUCCESS)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuUserObjectCreate(
    out: *mut *mut c_void,
    at: *mut c_void,
    destroy: Option<HostFunction>,
    references: c_uint,
    flags: c_uint,
) -> c_int {
    crate::calls::note();
    // CU_USER_OBJECT_NO_DESTRUCTOR_SYNC (1) is the one flag, "currently required"; only one reference is
    // supported here.
    let (Some(destroy), 1, 1) = (destroy, references, flags) else {
        return INVALID_VALUE;
    };
    let at = at.expose_provenance();
    // SAFETY: `out` is null, which `put` refuses, or the caller lets a handle be written there.
    unsafe { put(out, OBJECTS.insert(Arc::new(UserObject { at, destroy }))) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuUserObjectRelease(object: *mut c_void, count: c_uint) -> c_int {
    crate::calls::note();
    if count != 1 {
        return INVALID_VALUE;
    }
    OBJECTS.remove(object).map_or(INVALID_VALUE, |_| SUCCESS)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphRetainUserObject(
    graph: *mut c_void,
    object: *mut c_void,
    count: c_uint,
    flags: c_uint,
) -> c_int {
    crate::calls::note();
    const MOVE: c_uint = 1;
    let (Some(graph), 1) = (GRAPHS.get(graph), count) else {
        return INVALID_VALUE;
    };
    let kept = match flags {
        MOVE => OBJECTS.remove(object),
        0 => OBJECTS.get(object),
        _ => None,
    };
    match kept {
        None => INVALID_VALUE,
        Some(kept) => {
            lock(&graph.objects).push(kept);
            SUCCESS
        }
    }
}
