//! The collectives as `nccl.h` exports them: without a configuration and, since NCCL 2.32, with one. Contracts are those
//! of `nccl.h` 2.32.3: of a configuration only the tag for profiler plug-ins is used here.

use super::operation::{
    all_gather, all_reduce, all_to_all, broadcast, gather, reduce, reduce_scatter, scatter,
};
use super::{INVALID_ARGUMENT, fail};
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU64, Ordering};

/// `ncclCollConfig_t`.
#[repr(C)]
pub struct CollConfig {
    size: usize,
    magic: c_uint,
    version: c_uint,
    ext: *mut c_void,
    min_ctas: c_int,
    max_ctas: c_int,
    nvls_ctas: c_int,
    cga_cluster_size: c_int,
    alg_selection: *const c_char,
    force_alg_selection: c_int,
    cta_policy: c_int,
    user_profiler_tag: u64,
    launch_completion_event: *mut c_void,
}

static LAST_TAG: AtomicU64 = AtomicU64::new(0);

/// The tag of the latest call that had one, for tests; 0 before.
#[unsafe(no_mangle)]
pub extern "C" fn rcomm_simulator_last_tag() -> u64 {
    LAST_TAG.load(Ordering::Acquire)
}

/// Checks a configuration and keeps its tag; returns whether the call goes on.
///
/// # Safety
/// `config` is null or points to a configuration.
unsafe fn accept(config: *const CollConfig) -> bool {
    // SAFETY: the caller's pointer is null or valid.
    let Some(config) = (unsafe { config.as_ref() }) else {
        return true;
    };
    // "An uninitialized config will result in a NCCL error" (nccl.h); tags with the highest bit are reserved.
    let is_valid = config.size == size_of::<CollConfig>()
        && config.magic == 0xcafe_beef
        && config.version >= 23_200
        && config.ext.is_null()
        && config.alg_selection.is_null()
        && config.launch_completion_event.is_null()
        && config.force_alg_selection == 1
        && [
            config.min_ctas,
            config.max_ctas,
            config.nvls_ctas,
            config.cga_cluster_size,
            config.cta_policy,
        ]
        .iter()
        .all(|&it| it == c_int::MIN)
        && config.user_profiler_tag >> 63 == 0;
    if is_valid {
        LAST_TAG.store(config.user_profiler_tag, Ordering::Release);
    }
    is_valid
}

/// Exports both forms of each collective. Neither calls the other by its exported name: tests take single names out of
/// copies of this library, and the rest must still load.
macro_rules! export {
    ($($plain:ident, $configured:ident => $call:ident($($name:ident: $kind:ty),* $(,)?);)*) => {$(
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $plain($($name: $kind),*) -> c_int {
            $call($($name),*)
        }

        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $configured($($name: $kind,)* config: *const CollConfig) -> c_int {
            // SAFETY: nccl.h wants the configuration null or valid.
            if unsafe { accept(config) } {
                $call($($name),*)
            } else {
                fail(
                    INVALID_ARGUMENT,
                    "the configuration of the call is not initialized",
                )
            }
        }
    )*};
}

export! {
    ncclAllReduce, ncclAllReduceConfig => all_reduce(
        send: *const c_void, receive: *mut c_void, count: usize, data_type: c_int, op: c_int,
        comm: *mut c_void, stream: *mut c_void,
    );
    ncclReduce, ncclReduceConfig => reduce(
        send: *const c_void, receive: *mut c_void, count: usize, data_type: c_int, op: c_int, root: c_int,
        comm: *mut c_void, stream: *mut c_void,
    );
    ncclBroadcast, ncclBroadcastConfig => broadcast(
        send: *const c_void, receive: *mut c_void, count: usize, data_type: c_int, root: c_int,
        comm: *mut c_void, stream: *mut c_void,
    );
    ncclAllGather, ncclAllGatherConfig => all_gather(
        send: *const c_void, receive: *mut c_void, count: usize, data_type: c_int,
        comm: *mut c_void, stream: *mut c_void,
    );
    ncclReduceScatter, ncclReduceScatterConfig => reduce_scatter(
        send: *const c_void, receive: *mut c_void, count: usize, data_type: c_int, op: c_int,
        comm: *mut c_void, stream: *mut c_void,
    );
    ncclAlltoAll, ncclAlltoAllConfig => all_to_all(
        send: *const c_void, receive: *mut c_void, count: usize, data_type: c_int,
        comm: *mut c_void, stream: *mut c_void,
    );
    ncclGather, ncclGatherConfig => gather(
        send: *const c_void, receive: *mut c_void, count: usize, data_type: c_int, root: c_int,
        comm: *mut c_void, stream: *mut c_void,
    );
    ncclScatter, ncclScatterConfig => scatter(
        send: *const c_void, receive: *mut c_void, count: usize, data_type: c_int, root: c_int,
        comm: *mut c_void, stream: *mut c_void,
    );
}
