//! The collectives as `nccl.h` exports them: without a configuration and, since NCCL 2.32, with one. Contracts are
//! those of `nccl.h` 2.32.3. Of a configuration, the tag for profiler plug-ins and the selection of algorithms are
//! checked and kept for tests; the other fields must not be set.

use super::operation::{
    all_gather, all_reduce, all_to_all, broadcast, gather, reduce, reduce_scatter, scatter,
};
use super::{INVALID_ARGUMENT, fail};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
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

/// The tag of the latest accepted call that had a configuration, for tests; 0 before.
#[unsafe(no_mangle)]
pub extern "C" fn rcomm_simulator_last_tag() -> u64 {
    LAST_TAG.load(Ordering::Acquire)
}

static LAST_ALGORITHMS: AtomicU64 = AtomicU64::new(0);

/// The algorithms to which the latest accepted call with a configuration was limited, one bit each in the order of
/// [`ALGORITHMS`], for tests; 0 if it was not limited.
#[unsafe(no_mangle)]
pub extern "C" fn rcomm_simulator_last_algorithms() -> u64 {
    LAST_ALGORITHMS.load(Ordering::Acquire)
}

/// The names of the algorithms (`config/algorithm_registry.cc` of 2.31.2).
const ALGORITHMS: [&str; 7] = [
    "TREE",
    "RING",
    "COLLNETDIRECT",
    "COLLNETCHAIN",
    "NVLS",
    "NVLSTREE",
    "PAT",
];
/// TREE and RING: what an all-reduce of two or more ranks can use without switches that reduce, those of NVLink (NVLS)
/// or of the network (COLLNET).
const AVAILABLE: u64 = 0b11;

/// The algorithms that a selection names, one bit each; `None` if it is not valid (`ncclAlgParse`,
/// `config/algorithm_parser.cc` of 2.31.2). A selection has names with commas between them, in upper or lower case,
/// each the beginning of the name of an algorithm; after a `^`, these are the algorithms that are left out.
fn selected(text: &str) -> Option<u64> {
    let (is_negated, names) = match text.strip_prefix('^') {
        Some(names) => (true, names),
        None => (false, text),
    };
    let mut mask = 0;
    for name in names.split(',') {
        let name = name.to_ascii_uppercase();
        let found = (ALGORITHMS.iter().enumerate())
            .filter(|(_, known)| !name.is_empty() && known.starts_with(&name))
            .fold(0, |mask, (at, _)| mask | 1 << at);
        if found == 0 {
            return None;
        }
        mask |= found;
    }
    Some(match is_negated {
        true => !mask & ((1 << ALGORITHMS.len()) - 1),
        false => mask,
    })
}

/// Checks a configuration, and keeps its tag and its algorithms; returns whether the call is accepted.
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
        && config.launch_completion_event.is_null()
        && matches!(config.force_alg_selection, 0 | 1)
        && [
            config.min_ctas,
            config.max_ctas,
            config.nvls_ctas,
            config.cga_cluster_size,
            config.cta_policy,
        ]
        .iter()
        // `NCCL_CONFIG_UNDEF_INT`: the simulator does not support these fields.
        .all(|&field| field == c_int::MIN)
        && config.user_profiler_tag >> 63 == 0;
    // A selection that is not valid or leaves nothing is an error, unless the caller lets the library choose then
    // (`ncclCollConfigGetAlgMask`, enqueue/enqueue.cc of 2.31.2).
    let selection = match config.alg_selection.is_null() {
        true => Some(0),
        // SAFETY: nccl.h wants null or a text that ends with a zero.
        false => unsafe { CStr::from_ptr(config.alg_selection) }
            .to_str()
            .ok()
            .and_then(selected)
            .map(|mask| mask & AVAILABLE)
            .filter(|&mask| mask != 0),
    };
    let is_valid = is_valid && (selection.is_some() || config.force_alg_selection == 0);
    if is_valid {
        LAST_ALGORITHMS.store(selection.unwrap_or(0), Ordering::Release);
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
                    "the configuration of the call is not valid",
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
