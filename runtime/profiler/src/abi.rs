//! NCCL's profiler interface, versions 3 to 6, with its layout in memory.
//!
//! The layouts come from NCCL's public headers of releases 2.26 to 2.30; the tests check offsets and sizes
//! against them. A descriptor begins in the same way in all versions: the kind of the event, its parent's
//! handle, the rank, and from byte 24 on the fields of this kind.

use std::ffi::{c_char, c_int, c_ulong, c_void};

/// `ncclSuccess`.
pub const SUCCESS: c_int = 0;
/// `ncclInvalidUsage`.
pub const INVALID_USAGE: c_int = 5;

/// The kinds of events that the plug-in handles, as bits of the mask by which it requests events.
pub mod event {
    /// A plan of operations, which is their parent up to version 4.
    pub const GROUP: u64 = 1 << 0;
    /// A collective that is part of a plan.
    pub const COLL: u64 = 1 << 1;
    /// A send or receive that is part of a plan.
    pub const P2P: u64 = 1 << 2;
    /// A network transfer of one channel with one peer.
    pub const PROXY_OP: u64 = 1 << 3;
    /// A step of such a transfer.
    pub const PROXY_STEP: u64 = 1 << 4;
    /// An operation's work on one channel of the device.
    pub const KERNEL_CH: u64 = 1 << 6;
    /// The outermost group call. Since version 5.
    pub const GROUP_API: u64 = 1 << 8;
    /// The call of a collective. Since version 5.
    pub const COLL_API: u64 = 1 << 9;
    /// The call of a send or receive. Since version 5.
    pub const P2P_API: u64 = 1 << 10;
}

/// The states of events that the plug-in reads.
pub mod state {
    use std::ffi::c_int;

    // The states of a transfer. NCCL reports them only in version 3, with the number of the steps that have reached
    // them.
    /// A send has given the device room for data.
    pub const SEND_POSTED: c_int = 0;
    /// A send has data, and waits for the peer's permission.
    pub const SEND_REM_FIFO_WAIT: c_int = 1;
    /// A send has passed data to the network.
    pub const SEND_TRANSMITTED: c_int = 2;
    /// The network has sent data.
    pub const SEND_DONE: c_int = 3;
    /// A receive waits for the network.
    pub const RECV_POSTED: c_int = 4;
    /// The network has received data, which is flushed to the device.
    pub const RECV_RECEIVED: c_int = 5;
    /// A receive has passed data to the device.
    pub const RECV_TRANSMITTED: c_int = 6;
    /// The device has taken received data.
    pub const RECV_DONE: c_int = 7;
    // The states of a step.
    /// A step waits for the device's data.
    pub const SEND_GPU_WAIT: c_int = 8;
    /// A step waits for the network to send.
    pub const SEND_WAIT: c_int = 9;
    /// A step waits for the network to receive.
    pub const RECV_WAIT: c_int = 10;
    /// A step waits for received data to be flushed to the device.
    pub const RECV_FLUSH_WAIT: c_int = 11;
    /// A step waits until the device has taken received data.
    pub const RECV_GPU_WAIT: c_int = 12;
    /// A step waits for the peer's permission to send. Since version 4.
    pub const SEND_PEER_WAIT: c_int = 20;
    /// The end of a channel's work, with the device's clock. Since version 4.
    pub const KERNEL_CH_STOP: c_int = 22;
}

/// NCCL's logger: level, subsystems, file, line, `printf` format and arguments.
pub type Logger =
    Option<unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, ...)>;

/// The description of an event.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Descriptor<K, U> {
    /// The kind: one byte up to version 4, eight since version 5.
    pub kind: K,
    /// Handle of the parent event.
    pub parent: *mut c_void,
    /// The rank in the communicator; only some kinds set it.
    pub rank: c_int,
    /// The fields of this kind.
    pub facts: U,
}

/// The description of an event in version 3.
pub type DescriptorV3 = Descriptor<u8, FactsV3>;
/// The description of an event in version 4.
pub type DescriptorV4 = Descriptor<u8, FactsV4>;
/// The description of an event in versions 5 and 6, which differ only in kinds that the plug-in does not request.
pub type DescriptorV5 = Descriptor<u64, FactsV5>;

/// The fields of each kind of event in version 3.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub union FactsV3 {
    pub coll: NamedColl,
    pub p2p: NamedP2p,
    pub proxy_op: ProxyOp,
    pub proxy_step: ProxyStep,
    pub kernel_ch: KernelCh,
}

/// The fields of each kind of event in version 4.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub union FactsV4 {
    pub coll: Coll,
    pub p2p: P2p,
    pub proxy_op: ProxyOp,
    pub proxy_step: ProxyStep,
    pub kernel_ch: KernelCh,
}

/// The fields of each kind of event in versions 5 and 6.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub union FactsV5 {
    pub group_api: GroupApi,
    pub coll_api: CollApi,
    pub p2p_api: P2pApi,
    pub coll: CollV5,
    pub p2p: P2pV5,
    pub proxy_op: ProxyOp,
    pub proxy_step: ProxyStep,
    pub kernel_ch: KernelCh,
}

/// A collective with its communicator: version 3.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub struct NamedColl {
    pub comm_name: *const c_char,
    pub comm_hash: u64,
    /// `channels` is the largest number that it may use.
    pub coll: Coll,
}

/// A collective in a plan.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub struct Coll {
    pub seq_number: u64,
    pub func: *const c_char,
    pub send_buffer: *const c_void,
    pub receive_buffer: *mut c_void,
    pub count: usize,
    pub root: c_int,
    pub datatype: *const c_char,
    pub channels: u8,
    pub warps: u8,
    pub algorithm: *const c_char,
    pub protocol: *const c_char,
}

/// A collective in a plan, with the handle of the plan.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub struct CollV5 {
    pub coll: Coll,
    pub parent_group: *mut c_void,
}

/// A send or receive with its communicator: version 3.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub struct NamedP2p {
    pub comm_name: *const c_char,
    pub comm_hash: u64,
    pub func: *const c_char,
    pub buffer: *mut c_void,
    pub datatype: *const c_char,
    pub count: usize,
    pub peer: c_int,
}

/// A send or receive in a plan.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub struct P2p {
    pub func: *const c_char,
    pub buffer: *mut c_void,
    pub datatype: *const c_char,
    pub count: usize,
    pub peer: c_int,
    pub channels: u8,
}

/// A send or receive in a plan, with the handle of the plan.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub struct P2pV5 {
    pub p2p: P2p,
    pub parent_group: *mut c_void,
}

/// The outermost group call.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub struct GroupApi {
    pub graph_captured: bool,
    pub depth: c_int,
}

/// The call of a collective.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub struct CollApi {
    pub func: *const c_char,
    pub count: usize,
    pub datatype: *const c_char,
    pub root: c_int,
    pub stream: *mut c_void,
    pub graph_captured: bool,
}

/// The call of a send or receive, which does not name the peer.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub struct P2pApi {
    pub func: *const c_char,
    pub count: usize,
    pub datatype: *const c_char,
    pub stream: *mut c_void,
    pub graph_captured: bool,
}

/// A network transfer.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub struct ProxyOp {
    /// The process that issued the operation: a proxy thread may serve other processes of its host.
    pub pid: i32,
    pub channel: u8,
    pub peer: c_int,
    pub steps: c_int,
    pub chunk_size: c_int,
    pub is_send: c_int,
}

/// A step of a transfer.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub struct ProxyStep {
    pub step: c_int,
}

/// A channel's work. Version 3 has no timer.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub struct KernelCh {
    pub channel: u8,
    /// When the work started, by the device's clock, ns.
    pub timer: u64,
}

/// The arguments of a state of a transfer in version 3.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(missing_docs)]
pub struct ProxyOpArgsV3 {
    pub transferred: usize,
    pub steps: c_int,
}

/// The arguments of a state: sixteen bytes in version 3, and eight since then. For
/// [`KERNEL_CH_STOP`](state::KERNEL_CH_STOP) they are the time of the device's clock.
pub type StateArgs = c_void;

type Start<D> = unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *mut D) -> c_int;
type Stop = unsafe extern "C" fn(*mut c_void) -> c_int;
type Record = unsafe extern "C" fn(*mut c_void, c_int, *mut StateArgs) -> c_int;

/// `init` of versions 1 to 3, of which the plug-in supports version 3. It does not name the communicator.
pub type InitV3 = unsafe extern "C" fn(*mut *mut c_void, *mut c_int) -> c_int;
/// `init` of version 4: the communicator's name and hash come after the mask.
pub type InitV4 = unsafe extern "C" fn(
    *mut *mut c_void,
    *mut c_int,
    *const c_char,
    u64,
    c_int,
    c_int,
    c_int,
    Logger,
) -> c_int;
/// `init` since version 5: the communicator's hash comes before the mask, its name after it.
pub type InitV5 = unsafe extern "C" fn(
    *mut *mut c_void,
    u64,
    *mut c_int,
    *const c_char,
    c_int,
    c_int,
    c_int,
    Logger,
) -> c_int;

/// The table of functions that NCCL looks up under a name with its version.
#[repr(C)]
#[allow(missing_docs)]
pub struct Profiler<I, D> {
    pub name: *const c_char,
    pub init: I,
    pub start_event: Start<D>,
    pub stop_event: Stop,
    pub record_event_state: Record,
    pub finalize: Stop,
}

// SAFETY: `init` may be shared (`I: Sync`). The other fields are functions and an address, which all threads
// may read at once; following the address takes `unsafe` code.
unsafe impl<I: Sync, D> Sync for Profiler<I, D> {}
