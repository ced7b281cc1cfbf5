//! Graphs: what a capture gathered, to be run as often as it is launched ("Graph Management" in the
//! driver's manual).

use super::{INVALID_VALUE, SUCCESS, put, stream_of};
use crate::capture::Capture;
use crate::handles::Handles;
use crate::stream::Work;
use std::ffi::{c_int, c_void};
use std::sync::Arc;

/// What a capture gathered.
struct Graph(Vec<Work>);

static GRAPHS: Handles<Graph> = Handles::new("graph");
static EXECUTABLES: Handles<Graph> = Handles::new("executable graph");

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamBeginCapture_v2(handle: *mut c_void, mode: c_int) -> c_int {
    // The default stream cannot be captured.
    if !handle.is_null() && Capture::begin(&stream_of(handle), mode) {
        SUCCESS
    } else {
        INVALID_VALUE
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamEndCapture(handle: *mut c_void, graph: *mut *mut c_void) -> c_int {
    match Capture::end(&stream_of(handle)) {
        Err(status) => {
            // SAFETY: the caller's pointer.
            unsafe { put(graph, std::ptr::null_mut()) };
            status
        }
        // SAFETY: the caller's pointer.
        Ok(work) => unsafe { put(graph, GRAPHS.insert(Arc::new(Graph(work)))) },
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphInstantiateWithFlags(
    executable: *mut *mut c_void,
    graph: *mut c_void,
    _flags: u64,
) -> c_int {
    let Some(graph) = GRAPHS.get(graph) else {
        return INVALID_VALUE;
    };
    // SAFETY: the caller's pointer.
    unsafe { put(executable, EXECUTABLES.insert(graph)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphLaunch(executable: *mut c_void, handle: *mut c_void) -> c_int {
    let Some(graph) = EXECUTABLES.get(executable) else {
        return INVALID_VALUE;
    };
    let stream = stream_of(handle);
    for work in &graph.0 {
        stream.push(Arc::clone(work));
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphExecDestroy(executable: *mut c_void) -> c_int {
    EXECUTABLES
        .remove(executable)
        .map_or(INVALID_VALUE, |_| SUCCESS)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphDestroy(graph: *mut c_void) -> c_int {
    GRAPHS.remove(graph).map_or(INVALID_VALUE, |_| SUCCESS)
}
