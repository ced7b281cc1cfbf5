//! NCCL's C interface, as in `nccl.h`: types, codes, and a table of functions found at run time.
//!
//! Codes are integers here, never Rust enums: a library newer than this file may return a result that this
//! file does not name, and a reduction made by `ncclRedOpCreatePreMulSum` is a value of `ncclRedOp_t` that
//! no header lists.
//!
//! Source: `nccl.h` of NCCL 2.32.3. A number in parentheses is the first release with that value or field. Each
//! optional function is listed with its first release, as found in the libraries that NVIDIA publishes
//! (`docs/NCCL.md`).

use super::simulated::SimInfo;
use libloading::Library;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

/// `ncclResult_t`.
pub(crate) type NcclResult = c_int;
/// `ncclDataType_t`.
pub(crate) type NcclDataType = c_int;
/// `ncclRedOp_t`.
pub(crate) type NcclRedOp = c_int;
/// `ncclComm_t`.
pub(crate) type NcclComm = *mut c_void;
/// `cudaStream_t`, the same handle as the driver's `CUstream`.
pub(crate) type RawStream = *mut c_void;

/// Values of `ncclResult_t`.
pub(crate) mod result {
    use super::NcclResult;
    /// The call succeeded.
    pub(crate) const SUCCESS: NcclResult = 0;
    /// The network failed, or a peer has exited.
    pub(crate) const REMOTE_ERROR: NcclResult = 6;
    /// A non-blocking communicator still has work in progress.
    pub(crate) const IN_PROGRESS: NcclResult = 7;
    /// A deadline inside the library passed (2.30).
    pub(crate) const TIMEOUT: NcclResult = 8;
}

/// Values of `ncclDataType_t`.
pub(crate) mod data_type {
    use super::NcclDataType;
    /// `ncclInt8`.
    pub(crate) const INT8: NcclDataType = 0;
    /// `ncclUint8`.
    pub(crate) const UINT8: NcclDataType = 1;
    /// `ncclInt32`.
    pub(crate) const INT32: NcclDataType = 2;
    /// `ncclUint32`.
    pub(crate) const UINT32: NcclDataType = 3;
    /// `ncclInt64`.
    pub(crate) const INT64: NcclDataType = 4;
    /// `ncclUint64`.
    pub(crate) const UINT64: NcclDataType = 5;
    /// `ncclFloat16`.
    pub(crate) const FLOAT16: NcclDataType = 6;
    /// `ncclFloat32`.
    pub(crate) const FLOAT32: NcclDataType = 7;
    /// `ncclFloat64`.
    pub(crate) const FLOAT64: NcclDataType = 8;
    /// `ncclBfloat16`.
    pub(crate) const BFLOAT16: NcclDataType = 9;
    /// `ncclFloat8e4m3` (2.24).
    pub(crate) const FLOAT8E4M3: NcclDataType = 10;
    /// `ncclFloat8e5m2` (2.24).
    pub(crate) const FLOAT8E5M2: NcclDataType = 11;
}

/// Values of `ncclRedOp_t` that the header names; others are made at run time.
pub(crate) mod red_op {
    use super::NcclRedOp;
    /// `ncclSum`.
    pub(crate) const SUM: NcclRedOp = 0;
    /// `ncclProd`.
    pub(crate) const PROD: NcclRedOp = 1;
    /// `ncclMax`.
    pub(crate) const MAX: NcclRedOp = 2;
    /// `ncclMin`.
    pub(crate) const MIN: NcclRedOp = 3;
    /// `ncclAvg`.
    pub(crate) const AVG: NcclRedOp = 4;
}

/// `NCCL_SPLIT_NOCOLOR`: the rank takes part in a split and gets no communicator.
pub(crate) const SPLIT_NO_COLOR: c_int = -1;
/// `NCCL_SHRINK_DEFAULT`: shrinks without ending pending work; the caller must have none.
pub(crate) const SHRINK_DEFAULT: c_int = 0;
/// `NCCL_SHRINK_ABORT`: ends pending work first.
pub(crate) const SHRINK_ABORT: c_int = 1;
/// `NCCL_REVOKE_DEFAULT`.
pub(crate) const REVOKE_DEFAULT: c_int = 0;
/// `NCCL_WIN_COLL_SYMMETRIC`: the caller guarantees that every rank passes the same offset into the window to a
/// collective.
pub(crate) const WIN_COLL_SYMMETRIC: c_int = 1;
/// `NCCL_WIN_REQUIRED_ALIGNMENT`, in bytes.
pub(crate) const WIN_ALIGNMENT: usize = 4096;
/// `ncclScalarDevice`: the scalar is in the device's memory, and is read when an operation runs.
pub(crate) const SCALAR_DEVICE: c_int = 0;
/// `ncclScalarHostImmediate`: the scalar is read before `ncclRedOpCreatePreMulSum` returns.
pub(crate) const SCALAR_HOST_IMMEDIATE: c_int = 1;
/// `ncclWindow_t`.
pub(crate) type RawWindow = *mut c_void;
/// `NCCL_SUSPEND_MEM`: a suspended communicator releases the device memory that it can restore.
pub(crate) const SUSPEND_MEM: c_int = 1;

/// Values of `ncclCommMemStat_t`.
pub(crate) mod mem_stat {
    use std::ffi::c_int;
    /// `ncclStatGpuMemSuspend`: bytes that a suspension releases.
    pub(crate) const SUSPENDABLE: c_int = 0;
    /// `ncclStatGpuMemSuspended`: 1 while suspended, else 0.
    pub(crate) const IS_SUSPENDED: c_int = 1;
    /// `ncclStatGpuMemPersist`: bytes that a suspension keeps.
    pub(crate) const PERSISTENT: c_int = 2;
    /// `ncclStatGpuMemTotal`: bytes in all.
    pub(crate) const TOTAL: c_int = 3;
}

/// `ncclWaitSignalDesc_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct WaitSignalDesc {
    /// Number of signals.
    pub(crate) op_cnt: c_int,
    /// The peer from which the signals are awaited.
    pub(crate) peer: c_int,
    /// 0: up to 2.30 each peer has one signal.
    pub(crate) sig_idx: c_int,
    /// 0: rcomm uses one context.
    pub(crate) ctx: c_int,
}

/// `ncclCommProperties_t` of 2.31.2 (`nccl_device/core.h`), followed by spare bytes in case a newer library writes
/// fields that it has added.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct CommProperties {
    size: usize,
    magic: c_uint,
    version: c_uint,
    rank: c_int,
    n_ranks: c_int,
    cuda_dev: c_int,
    nvml_dev: c_int,
    /// Whether the device API is supported, which NCCL derives from symmetric memory; C's `bool`, as a byte.
    pub(crate) device_api_support: u8,
    multimem_support: u8,
    gin_type: c_int,
    n_lsa_teams: c_int,
    /// Whether one-sided operations are supported; filled in from 2.29.7 on.
    pub(crate) host_rma_support: u8,
    railed_gin_type: c_int,
    /// NCCL's own number of the communicator; filled in from 2.31 on.
    pub(crate) comm_hash: u64,
    gin_min_stride: c_int,
    gin_connection_type: c_int,
    gin_support: [u8; 64],
    dev_comm_runtime_version_size: usize,
    reserved: [u64; 16],
}

impl CommProperties {
    /// The release whose layout this is.
    const VERSION: c_uint = 23_102;
    /// The last release that does not fill in `host_rma_support`.
    pub(crate) const LAST_WITHOUT_HOST_RMA: c_int = 22_903;

    /// Makes a structure in the layout of 2.31.2, marked with the library's version if that is older.
    pub(crate) fn new(version: c_int) -> Self {
        let version = c_uint::try_from(version).unwrap_or(Self::VERSION);
        Self {
            size: std::mem::offset_of!(Self, reserved),
            magic: Config::MAGIC,
            version: version.min(Self::VERSION),
            rank: 0,
            n_ranks: 0,
            cuda_dev: 0,
            nvml_dev: 0,
            device_api_support: 0,
            multimem_support: 0,
            gin_type: 0,
            n_lsa_teams: 0,
            host_rma_support: 0,
            railed_gin_type: 0,
            comm_hash: 0,
            gin_min_stride: 0,
            gin_connection_type: 0,
            gin_support: [0; 64],
            dev_comm_runtime_version_size: 0,
            reserved: [0; 16],
        }
    }
}

/// `ncclUniqueId`.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct UniqueId {
    /// Opaque bytes, passed from one rank to the others unchanged.
    pub(crate) internal: [u8; UniqueId::BYTES],
}

impl UniqueId {
    /// `NCCL_UNIQUE_ID_BYTES`.
    pub(crate) const BYTES: usize = 128;
}

/// `NCCL_CONFIG_UNDEF_INT`: the library's choice.
const UNDEF_INT: c_int = c_int::MIN;

/// `ncclConfig_t` of 2.32.3.
///
/// The library copies as many bytes as both this structure and its own have, and resets fields newer than `version` to
/// their defaults. So the newest layout works with every release from 2.18 on.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    /// 0 = calls return `ncclInProgress` instead of waiting for peers (2.14).
    pub(crate) blocking: c_int,
    /// Thread block cluster size (2.17).
    pub(crate) cga_cluster_size: c_int,
    /// Minimum number of thread blocks (2.17).
    pub(crate) min_ctas: c_int,
    /// Maximum number of thread blocks (2.17).
    pub(crate) max_ctas: c_int,
    /// Network module, NUL-terminated; null = the library's choice (2.17).
    pub(crate) net_name: *const c_char,
    /// 1 = a split communicator shares its parent's resources (2.18).
    pub(crate) split_share: c_int,
    /// Traffic class of the network (2.26).
    pub(crate) traffic_class: c_int,
    /// Name in the library's logs, NUL-terminated (2.27).
    pub(crate) comm_name: *const c_char,
    /// 0 = no in-network reduction (2.27).
    pub(crate) collnet_enable: c_int,
    /// Thread block policy (2.27).
    pub(crate) cta_policy: c_int,
    /// 1 = a shrunk communicator shares its parent's resources (2.27).
    pub(crate) shrink_share: c_int,
    /// Thread blocks for NVLink SHARP (2.27).
    pub(crate) nvls_ctas: c_int,
    /// Channels per network peer (2.28).
    pub(crate) n_channels_per_net_peer: c_int,
    /// NVLink-centric scheduling (2.28).
    pub(crate) nvlink_centric_sched: c_int,
    /// How CUDA graphs are used (2.29).
    pub(crate) graph_usage_mode: c_int,
    /// Contexts for one-sided operations (2.29).
    pub(crate) num_rma_ctx: c_int,
    /// Maximum number of point-to-point peers at once (2.30).
    pub(crate) max_p2p_peers: c_int,
    /// Whether NCCL orders the kernels that are captured into CUDA graphs (2.30.7).
    pub(crate) graph_stream_ordering: c_int,
    /// Whether NCCL orders launches by their order on the host, as `NCCL_LAUNCH_ORDER_IMPLICIT` (2.32).
    pub(crate) launch_order_implicit: c_int,
    /// Signals for one-sided operations (2.32).
    pub(crate) num_rma_sig: c_int,
    /// Whether one-sided operations connect when the communicator is made (2.32).
    pub(crate) rma_eager_init: c_int,
    /// `hostCftMode` (2.32).
    pub(crate) host_cft_mode: c_int,
    /// `nvlsHostMode` (2.32).
    pub(crate) nvls_host_mode: c_int,
}

impl Config {
    const MAGIC: c_uint = 0xcafe_beef;
    const VERSION: c_uint = 23_203;

    /// `NCCL_CONFIG_INITIALIZER`: all fields are undefined.
    pub(crate) const fn new() -> Self {
        Self {
            size: size_of::<Self>(),
            magic: Self::MAGIC,
            version: Self::VERSION,
            blocking: UNDEF_INT,
            cga_cluster_size: UNDEF_INT,
            min_ctas: UNDEF_INT,
            max_ctas: UNDEF_INT,
            net_name: std::ptr::null(),
            split_share: UNDEF_INT,
            traffic_class: UNDEF_INT,
            comm_name: std::ptr::null(),
            collnet_enable: UNDEF_INT,
            cta_policy: UNDEF_INT,
            shrink_share: UNDEF_INT,
            nvls_ctas: UNDEF_INT,
            n_channels_per_net_peer: UNDEF_INT,
            nvlink_centric_sched: UNDEF_INT,
            graph_usage_mode: UNDEF_INT,
            num_rma_ctx: UNDEF_INT,
            max_p2p_peers: UNDEF_INT,
            graph_stream_ordering: UNDEF_INT,
            launch_order_implicit: UNDEF_INT,
            num_rma_sig: UNDEF_INT,
            rma_eager_init: UNDEF_INT,
            host_cft_mode: UNDEF_INT,
            nvls_host_mode: UNDEF_INT,
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Self::new()
    }
}

/// `ncclCollConfig_t` of 2.32.3: the configuration of one call.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct CollConfig {
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

impl CollConfig {
    /// `NCCL_COLLCONFIG_INITIALIZER` with a tag for profiler plug-ins (0 = none) and the algorithms to choose from.
    /// The highest bit of the tag is cleared, since NCCL reserves tags that have it.
    pub(crate) fn new(tag: u64, algorithms: Option<&'static CStr>) -> Self {
        Self {
            size: size_of::<Self>(),
            magic: Config::MAGIC,
            version: Config::VERSION,
            ext: std::ptr::null_mut(),
            min_ctas: UNDEF_INT,
            max_ctas: UNDEF_INT,
            nvls_ctas: UNDEF_INT,
            cga_cluster_size: UNDEF_INT,
            alg_selection: algorithms.map_or(std::ptr::null(), CStr::as_ptr),
            // With 1, the initializer's value, a collective that none of the algorithms can carry out would be refused.
            force_alg_selection: c_int::from(algorithms.is_none()),
            cta_policy: UNDEF_INT,
            user_profiler_tag: tag & (u64::MAX >> 1),
            launch_completion_event: std::ptr::null_mut(),
        }
    }
}

/// A table of C functions, found by name in a shared library.
macro_rules! table {
    (
        $(#[$meta:meta])*
        $vis:vis struct $table:ident;
        required { $( $(#[$rmeta:meta])* $rfield:ident = $rname:literal: fn($($rarg:ty),*) -> $rret:ty; )* }
        optional { $( $(#[$ometa:meta])* $ofield:ident = $oname:literal, $since:literal: fn($($oarg:ty),*) -> $oret:ty; )* }
    ) => {
        $(#[$meta])*
        #[derive(Clone)]
        $vis struct $table {
            $( $(#[$rmeta])* pub(crate) $rfield: unsafe extern "C" fn($($rarg),*) -> $rret, )*
            $( $(#[$ometa])* pub(crate) $ofield: Option<unsafe extern "C" fn($($oarg),*) -> $oret>, )*
        }

        impl $table {
            /// Every optional function, with the release that introduced it.
            #[allow(dead_code, reason = "a table may have no optional functions")]
            pub(crate) const OPTIONAL: &'static [(&'static str, &'static str)] = &[$( ($oname, $since), )*];

            /// Every required function.
            #[cfg(test)]
            pub(crate) const REQUIRED: &'static [&'static str] = &[$( $rname, )*];

            /// Finds every function, or returns the name of the first required one that is missing.
            ///
            /// # Safety
            /// `library` must export the functions of this table with these signatures, and must stay
            /// loaded for as long as the table is used.
            pub(crate) unsafe fn find(library: &Library) -> Result<Self, &'static str> {
                Ok(Self {
                    $( $rfield: {
                        // SAFETY: the caller guarantees that the library's function of this name has this
                        // signature. The pointer is copied out of the `Symbol`, and the caller keeps the
                        // library loaded.
                        let found = unsafe { library.get::<unsafe extern "C" fn($($rarg),*) -> $rret>($rname.as_bytes()) };
                        *found.map_err(|_| $rname)?
                    }, )*
                    $( $ofield: {
                        // SAFETY: the caller guarantees that the library's function of this name, if it
                        // exists, has this signature, and keeps the library loaded.
                        let found = unsafe { library.get::<unsafe extern "C" fn($($oarg),*) -> $oret>($oname.as_bytes()) };
                        found.ok().map(|symbol| *symbol)
                    }, )*
                })
            }
        }
    };
}
pub(crate) use table;

table! {
    /// The functions of NCCL that rcomm calls. Required ones are in every release since 2.18.
    pub(crate) struct NcclTable;
    required {
        /// `ncclGetVersion`
        get_version = "ncclGetVersion": fn(*mut c_int) -> NcclResult;
        /// `ncclGetUniqueId`
        get_unique_id = "ncclGetUniqueId": fn(*mut UniqueId) -> NcclResult;
        /// `ncclGetErrorString`
        get_error_string = "ncclGetErrorString": fn(NcclResult) -> *const c_char;
        /// `ncclGetLastError`
        get_last_error = "ncclGetLastError": fn(NcclComm) -> *const c_char;
        /// `ncclCommInitRankConfig`
        comm_init_rank_config = "ncclCommInitRankConfig": fn(*mut NcclComm, c_int, UniqueId, c_int, *mut Config) -> NcclResult;
        /// `ncclCommFinalize`
        comm_finalize = "ncclCommFinalize": fn(NcclComm) -> NcclResult;
        /// `ncclCommDestroy`
        comm_destroy = "ncclCommDestroy": fn(NcclComm) -> NcclResult;
        /// `ncclCommAbort`
        comm_abort = "ncclCommAbort": fn(NcclComm) -> NcclResult;
        /// `ncclCommCount`
        comm_count = "ncclCommCount": fn(NcclComm, *mut c_int) -> NcclResult;
        /// `ncclCommGetAsyncError`
        comm_get_async_error = "ncclCommGetAsyncError": fn(NcclComm, *mut NcclResult) -> NcclResult;
        /// `ncclRedOpCreatePreMulSum`
        red_op_create_pre_mul_sum = "ncclRedOpCreatePreMulSum": fn(*mut NcclRedOp, *mut c_void, NcclDataType, c_int, NcclComm) -> NcclResult;
        /// `ncclRedOpDestroy`
        red_op_destroy = "ncclRedOpDestroy": fn(NcclRedOp, NcclComm) -> NcclResult;
        /// `ncclReduce`
        reduce = "ncclReduce": fn(*const c_void, *mut c_void, usize, NcclDataType, NcclRedOp, c_int, NcclComm, RawStream) -> NcclResult;
        /// `ncclBroadcast`
        broadcast = "ncclBroadcast": fn(*const c_void, *mut c_void, usize, NcclDataType, c_int, NcclComm, RawStream) -> NcclResult;
        /// `ncclAllReduce`
        all_reduce = "ncclAllReduce": fn(*const c_void, *mut c_void, usize, NcclDataType, NcclRedOp, NcclComm, RawStream) -> NcclResult;
        /// `ncclReduceScatter`
        reduce_scatter = "ncclReduceScatter": fn(*const c_void, *mut c_void, usize, NcclDataType, NcclRedOp, NcclComm, RawStream) -> NcclResult;
        /// `ncclAllGather`
        all_gather = "ncclAllGather": fn(*const c_void, *mut c_void, usize, NcclDataType, NcclComm, RawStream) -> NcclResult;
        /// `ncclSend`
        send = "ncclSend": fn(*const c_void, usize, NcclDataType, c_int, NcclComm, RawStream) -> NcclResult;
        /// `ncclRecv`
        recv = "ncclRecv": fn(*mut c_void, usize, NcclDataType, c_int, NcclComm, RawStream) -> NcclResult;
        /// `ncclGroupStart`
        group_start = "ncclGroupStart": fn() -> NcclResult;
        /// `ncclGroupEnd`
        group_end = "ncclGroupEnd": fn() -> NcclResult;
    }
    optional {
        /// `ncclCommSplit`
        comm_split = "ncclCommSplit", "2.18": fn(NcclComm, c_int, c_int, *mut NcclComm, *mut Config) -> NcclResult;
        /// `ncclCommRegister`
        comm_register = "ncclCommRegister", "2.19": fn(NcclComm, *mut c_void, usize, *mut *mut c_void) -> NcclResult;
        /// `ncclCommDeregister`
        comm_deregister = "ncclCommDeregister", "2.19": fn(NcclComm, *mut c_void) -> NcclResult;
        /// `ncclMemAlloc`
        mem_alloc = "ncclMemAlloc", "2.19": fn(*mut *mut c_void, usize) -> NcclResult;
        /// `ncclMemFree`
        mem_free = "ncclMemFree", "2.19": fn(*mut c_void) -> NcclResult;
        /// `ncclGroupSimulateEnd`
        group_simulate_end = "ncclGroupSimulateEnd", "2.22": fn(*mut SimInfo) -> NcclResult;
        /// `ncclCommInitRankScalable`
        comm_init_rank_scalable = "ncclCommInitRankScalable", "2.23": fn(*mut NcclComm, c_int, c_int, c_int, *mut UniqueId, *mut Config) -> NcclResult;
        /// `ncclCommShrink`
        comm_shrink = "ncclCommShrink", "2.27": fn(NcclComm, *mut c_int, c_int, *mut NcclComm, *mut Config, c_int) -> NcclResult;
        /// `ncclCommWindowRegister`
        comm_window_register = "ncclCommWindowRegister", "2.27": fn(NcclComm, *mut c_void, usize, *mut RawWindow, c_int) -> NcclResult;
        /// `ncclCommWindowDeregister`
        comm_window_deregister = "ncclCommWindowDeregister", "2.27": fn(NcclComm, RawWindow) -> NcclResult;
        /// `ncclCommQueryProperties`
        comm_query_properties = "ncclCommQueryProperties", "2.29": fn(NcclComm, *mut CommProperties) -> NcclResult;
        /// `ncclPutSignal`
        put_signal = "ncclPutSignal", "2.29": fn(*const c_void, usize, NcclDataType, c_int, RawWindow, usize, c_int, c_int, c_uint, NcclComm, RawStream) -> NcclResult;
        /// `ncclSignal`
        signal = "ncclSignal", "2.29": fn(c_int, c_int, c_int, c_uint, NcclComm, RawStream) -> NcclResult;
        /// `ncclWaitSignal`
        wait_signal = "ncclWaitSignal", "2.29": fn(c_int, *mut WaitSignalDesc, NcclComm, RawStream) -> NcclResult;
        /// `ncclGetPeerDevicePointer`
        get_peer_device_pointer = "ncclGetPeerDevicePointer", "2.29": fn(RawWindow, usize, c_int, *mut *mut c_void) -> NcclResult;
        /// `ncclAlltoAll`
        all_to_all = "ncclAlltoAll", "2.28": fn(*const c_void, *mut c_void, usize, NcclDataType, NcclComm, RawStream) -> NcclResult;
        /// `ncclGather`
        gather = "ncclGather", "2.28": fn(*const c_void, *mut c_void, usize, NcclDataType, c_int, NcclComm, RawStream) -> NcclResult;
        /// `ncclScatter`
        scatter = "ncclScatter", "2.28": fn(*const c_void, *mut c_void, usize, NcclDataType, c_int, NcclComm, RawStream) -> NcclResult;
        /// `ncclCommRevoke`
        comm_revoke = "ncclCommRevoke", "2.28.7": fn(NcclComm, c_int) -> NcclResult;
        /// `ncclCommSuspend`
        comm_suspend = "ncclCommSuspend", "2.29.7": fn(NcclComm, c_int) -> NcclResult;
        /// `ncclCommResume`
        comm_resume = "ncclCommResume", "2.29.7": fn(NcclComm) -> NcclResult;
        /// `ncclCommMemStats`
        comm_mem_stats = "ncclCommMemStats", "2.29.7": fn(NcclComm, c_int, *mut u64) -> NcclResult;
        /// `ncclAllReduceConfig`
        all_reduce_config = "ncclAllReduceConfig", "2.32": fn(*const c_void, *mut c_void, usize, NcclDataType, NcclRedOp, NcclComm, RawStream, *const CollConfig) -> NcclResult;
        /// `ncclReduceConfig`
        reduce_config = "ncclReduceConfig", "2.32": fn(*const c_void, *mut c_void, usize, NcclDataType, NcclRedOp, c_int, NcclComm, RawStream, *const CollConfig) -> NcclResult;
        /// `ncclBroadcastConfig`
        broadcast_config = "ncclBroadcastConfig", "2.32": fn(*const c_void, *mut c_void, usize, NcclDataType, c_int, NcclComm, RawStream, *const CollConfig) -> NcclResult;
        /// `ncclAllGatherConfig`
        all_gather_config = "ncclAllGatherConfig", "2.32": fn(*const c_void, *mut c_void, usize, NcclDataType, NcclComm, RawStream, *const CollConfig) -> NcclResult;
        /// `ncclReduceScatterConfig`
        reduce_scatter_config = "ncclReduceScatterConfig", "2.32": fn(*const c_void, *mut c_void, usize, NcclDataType, NcclRedOp, NcclComm, RawStream, *const CollConfig) -> NcclResult;
        /// `ncclAlltoAllConfig`
        all_to_all_config = "ncclAlltoAllConfig", "2.32": fn(*const c_void, *mut c_void, usize, NcclDataType, NcclComm, RawStream, *const CollConfig) -> NcclResult;
        /// `ncclGatherConfig`
        gather_config = "ncclGatherConfig", "2.32": fn(*const c_void, *mut c_void, usize, NcclDataType, c_int, NcclComm, RawStream, *const CollConfig) -> NcclResult;
        /// `ncclScatterConfig`
        scatter_config = "ncclScatterConfig", "2.32": fn(*const c_void, *mut c_void, usize, NcclDataType, c_int, NcclComm, RawStream, *const CollConfig) -> NcclResult;
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::collections::{BTreeMap, BTreeSet};

    /// Returns the text of the documentation page between this heading and the next.
    pub(crate) fn documented(heading: &str) -> String {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/NCCL.md");
        let page = std::fs::read_to_string(path).unwrap();
        let (_, section) = page.split_once(&format!("\n{heading}\n")).unwrap();
        section.split("\n#").next().unwrap().to_owned()
    }

    /// Returns the texts between backquotes.
    pub(crate) fn names(text: &str) -> Vec<&str> {
        text.split('`').skip(1).step_by(2).collect()
    }

    #[test]
    fn the_documentation_lists_the_functions_that_are_called_and_no_others() {
        let section = documented("### Functions of NCCL");
        let mut documented_names = BTreeMap::new();
        for row in section.lines().filter(|line| line.starts_with("| `")) {
            let cells: Vec<&str> = row.split('|').map(str::trim).collect();
            for name in names(cells[1]) {
                assert_eq!(
                    documented_names.insert(name, (cells[2], cells[3])),
                    None,
                    "{name}"
                );
            }
        }
        for name in NcclTable::REQUIRED {
            let row = documented_names.remove(name);
            assert_eq!(row, Some(("2.18.3 or before", "refused")), "{name}");
        }
        for (name, since) in NcclTable::OPTIONAL {
            let (first, without) = documented_names
                .remove(name)
                .unwrap_or_else(|| panic!("{name}"));
            let is_same = first == *since || first.starts_with(&format!("{since}."));
            assert!(is_same, "{name}: {first}");
            assert_ne!(without, "refused", "{name}");
        }
        assert!(documented_names.is_empty(), "{documented_names:?}");

        let section = documented("### Functions of the CUDA driver");
        let documented_names: BTreeSet<&str> = names(&section)
            .into_iter()
            .filter(|name| name.starts_with("cu"))
            .collect();
        let called = crate::cuda::CudaTable::REQUIRED;
        assert_eq!(documented_names, called.iter().copied().collect());

        let section = documented("### Functions of NVML");
        let documented_names: BTreeSet<&str> = names(&section)
            .into_iter()
            .filter(|name| name.starts_with("nvml"))
            .collect();
        let called = crate::cuda::nvlink::NvmlTable::REQUIRED;
        assert_eq!(documented_names, called.iter().copied().collect());
    }

    #[test]
    fn config_has_the_layout_of_the_header() {
        // 16 bytes of size, magic and version; 4 ints; a pointer; 2 ints; a pointer; 15 ints, and the end's alignment.
        // A C compiler finds the same numbers in the header of 2.32.3.
        assert_eq!(size_of::<Config>(), 16 + 16 + 8 + 8 + 8 + 60 + 4);
        assert_eq!(std::mem::offset_of!(Config, launch_order_implicit), 96);
        assert_eq!(std::mem::offset_of!(Config, rma_eager_init), 104);
        assert_eq!(size_of::<CollConfig>(), 72);
        assert_eq!(std::mem::offset_of!(CollConfig, alg_selection), 40);
        assert_eq!(std::mem::offset_of!(CollConfig, user_profiler_tag), 56);
        assert_eq!(std::mem::offset_of!(Config, net_name), 32);
        assert_eq!(std::mem::offset_of!(Config, comm_name), 48);
        assert_eq!(std::mem::offset_of!(Config, graph_stream_ordering), 92);
        assert_eq!(std::mem::offset_of!(CommProperties, device_api_support), 32);
        assert_eq!(std::mem::offset_of!(CommProperties, host_rma_support), 44);
        assert_eq!(std::mem::offset_of!(CommProperties, comm_hash), 56);
        assert_eq!(std::mem::offset_of!(CommProperties, reserved), 144);
    }
}
