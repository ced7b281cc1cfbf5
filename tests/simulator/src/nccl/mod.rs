//! The symbols of `libnccl.so.2`. Contracts are those of `nccl.h` 2.30.7; what the header leaves open
//! follows NCCL's sources and its user guide. Lines are those of the files below `src` at tag v2.30.7-1. What a later
//! release added is marked with that release.
//!
//! Behavior that a program must handle, and that is easily forgotten:
//!
//! | NCCL | its source | here |
//! |---|---|---|
//! | calls on a communicator that does not block launch on a thread, and return `ncclInProgress` | group.cc:825 and 854 | `launch` in `group.rs` |
//! | abort and destroy free device memory, which waits for all kernels of the device | init.cc:2824 (`commReclaim`), 338 | `reclaim` in `lifecycle.rs` |
//! | a destroy after an error fails, and leaves a group of calls open on its thread | init.cc:2892 and 2901 | `ncclCommDestroy`, `leak_depth` |
//! | a refused call is an error of the communicator from then on, if it does not block | enqueue.cc:3170 | `Comm::refuse` |
//! | a finalize after a finalize or revoke is refused, and is such an error | init.cc:2796 and 2820 | `ncclCommFinalize` |
//! | finalize and abort wait for every graph that holds an operation | init.cc:2751 | `Comm::wait_for_graphs` |
//! | an error of the connections persists after a revoke | init.cc:3455 | `Comm::async_error` |
//! | registrations change an array that a launch reads, without a lock | register/register.cc:73 and 195 | `Comm::end_if_launching` ends the process |
//! | the last deregistration of a range unmaps it, whatever the device is doing | register/register.cc:95 | `ncclCommDeregister` ends the process if a kernel uses the range |
//! | revoke and abort wait for what precedes the kernels on the stream | init.cc:2941 and 2741 | `Comm::drain` |
//! | one refused call makes the end of a group drop all its calls | group.cc:790 and 883 | `ncclGroupEnd` |

mod comm;
mod configured;
mod derive;
mod group;
mod lifecycle;
mod memory;
mod operation;
mod order;
mod profiler;
mod suspension;
mod window;

use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::Mutex;

pub(crate) use memory::is_registered;

use crate::stream::lock;
use crate::trouble;

pub(crate) const SUCCESS: c_int = 0;
const UNHANDLED_CUDA_ERROR: c_int = 1;
const SYSTEM_ERROR: c_int = 2;
const INTERNAL_ERROR: c_int = 3;
const INVALID_ARGUMENT: c_int = 4;
const INVALID_USAGE: c_int = 5;
const REMOTE_ERROR: c_int = 6;
const IN_PROGRESS: c_int = 7;

static LAST_ERROR: Mutex<Option<CString>> = Mutex::new(None);

/// Keeps the text for `ncclGetLastError` (`ncclDebugLog` keeps the last WARN, debug.cc:268) and returns the
/// status.
fn fail(status: c_int, text: &str) -> c_int {
    *lock(&LAST_ERROR) = CString::new(text.replace('\0', " ")).ok();
    status
}

fn no_comm() -> c_int {
    // CommCheck, misc/argcheck.cc:38.
    fail(INVALID_ARGUMENT, "comm argument is NULL")
}

/// The release that is simulated.
fn version() -> c_int {
    trouble::setting("version")
        .and_then(|code| c_int::try_from(code).ok())
        .unwrap_or(23_007)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(out: *mut c_int) -> c_int {
    // SAFETY: the caller lets an int be written to `out`, which is not null.
    unsafe { *out = version() };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetErrorString(status: c_int) -> *const c_char {
    // ncclGetErrorString, init.cc:3415.
    let text = match status {
        0 => c"no error",
        1 => c"unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        2 => c"unhandled system error (run with NCCL_DEBUG=INFO for details)",
        3 => c"internal error - please report this issue to the NCCL developers",
        4 => c"invalid argument (run with NCCL_DEBUG=WARN for details)",
        5 => c"invalid usage (run with NCCL_DEBUG=WARN for details)",
        6 => c"remote process exited or there was a network error",
        7 => c"NCCL operation in progress",
        _ => c"unknown result code",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetLastError(_comm: *mut c_void) -> *const c_char {
    // The text is leaked: the real library's text lives until the next error, in any thread. The function ignores the
    // communicator (ncclGetLastError, init.cc:3444).
    lock(&LAST_ERROR)
        .clone()
        .map_or(c"".as_ptr(), |text| text.into_raw().cast_const())
}
