//! The functions that NCCL calls, for each version of its interface.

use crate::abi::{
    self, DescriptorV3, DescriptorV4, DescriptorV5, INVALID_USAGE, Logger, ProxyOp, ProxyOpArgsV3,
    SUCCESS, StateArgs, event, state,
};
use crate::events::{Named, Task, TransferFacts};
use crate::names;
use crate::opening::{guarded, print_line, process, process_or_open};
use crate::process::{Call, Process, naming};
use crate::settings::CommunicatorIdentity;
use crate::steps::Progress;
use rcomm_recorder::model::LinkWait;
use rcomm_recorder::record::KernelPlan;
use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

/// Answers the start of a communicator. `has_calls` states whether this version of NCCL reports calls.
///
/// # Safety
/// `context` and `mask` are each null or valid for writes, `mask` until all communicators of the process have ended: it
/// is one global variable of NCCL's. The communicator's name is null or ends with a zero and stays as it is during the
/// call.
unsafe fn init(
    context: *mut *mut c_void,
    mask: *mut c_int,
    communicator: Option<(*const c_char, CommunicatorIdentity)>,
    has_calls: bool,
) -> c_int {
    let (at, events) = guarded((None, 0), || {
        let identity = communicator.map(|(_, identity)| identity);
        let Some(process) = process_or_open(identity, has_calls) else {
            return (None, 0);
        };
        let at = process.add_communicator();
        if at.is_some() {
            // SAFETY: `mask` is null or valid until all communicators have ended, by this function's contract. It is an
            // aligned `int` that NCCL never writes, and reads by atomic loads; from 2.29 on it also reads it plainly
            // for its log, after `init` has returned (`printProfilerEventMask`), which on a 64-bit system is one load.
            unsafe { process.mask_place.begins(mask) };
        }
        if let (Some(at), Some((name, identity))) = (at, communicator)
            && let Some(communicator) = process.communicators.get(at)
        {
            communicator.naming.store(naming::DONE, Ordering::Relaxed);
            // SAFETY: the caller's name is null or ends with a zero, and stays as it is during this call,
            // which copies it.
            let name = String::from_utf8_lossy(unsafe { names::text(name) });
            process.create_group(
                communicator,
                &name,
                identity.hash,
                identity.rank,
                Some(identity.size),
            );
            process.follow_largest(&identity);
        }
        // NCCL has one mask for all communicators: a communicator without a slot is recognized by its null context.
        (at, process.current_mask() as c_int)
    });
    // SAFETY: each pointer is written through only if it is not null (checked); then it is valid for writes by this
    // function's contract.
    unsafe {
        if !context.is_null() {
            *context = at.map_or(std::ptr::null_mut(), Process::context);
        }
        if !mask.is_null() {
            // Other threads may call NCCL on earlier communicators, and NCCL then reads the mask.
            AtomicI32::from_ptr(mask).store(events, Ordering::Relaxed);
        }
    }
    SUCCESS
}

/// Refuses versions 1 and 2 of the interface, which have no events of channels.
///
/// # Safety
/// `mask` is null or valid for writes.
pub(crate) unsafe extern "C" fn init_old(_: *mut *mut c_void, mask: *mut c_int) -> c_int {
    static PRINTED: AtomicBool = AtomicBool::new(false);
    if !PRINTED.swap(true, Ordering::Relaxed) {
        guarded((), || {
            print_line(
                "records nothing: this version of NCCL is older than 2.26, the oldest that the plug-in supports",
            );
        });
    }
    if !mask.is_null() {
        // SAFETY: `mask` is not null (checked), so it is valid for writes by the contract.
        unsafe { *mask = 0 };
    }
    INVALID_USAGE
}

/// # Safety
/// Same as [`init`], without a name.
pub(crate) unsafe extern "C" fn init_v3(context: *mut *mut c_void, mask: *mut c_int) -> c_int {
    // SAFETY: `init` asks of both pointers what this function asks of its caller, and gets no name.
    unsafe { init(context, mask, None, false) }
}

fn identity_of(hash: u64, rank: c_int, size: c_int) -> CommunicatorIdentity {
    CommunicatorIdentity {
        hash,
        rank: u32::try_from(rank).unwrap_or(0),
        size: u32::try_from(size).unwrap_or(0),
    }
}

/// # Safety
/// Same as [`init`].
pub(crate) unsafe extern "C" fn init_v4(
    context: *mut *mut c_void,
    mask: *mut c_int,
    name: *const c_char,
    hash: u64,
    _nodes: c_int,
    size: c_int,
    rank: c_int,
    _log: Logger,
) -> c_int {
    // SAFETY: `init` asks of the pointers and the name what this function asks of its caller.
    unsafe {
        init(
            context,
            mask,
            Some((name, identity_of(hash, rank, size))),
            false,
        )
    }
}

/// # Safety
/// Same as [`init`].
pub(crate) unsafe extern "C" fn init_v5(
    context: *mut *mut c_void,
    hash: u64,
    mask: *mut c_int,
    name: *const c_char,
    _nodes: c_int,
    size: c_int,
    rank: c_int,
    _log: Logger,
) -> c_int {
    // SAFETY: `init` asks of the pointers and the name what this function asks of its caller.
    unsafe {
        init(
            context,
            mask,
            Some((name, identity_of(hash, rank, size))),
            true,
        )
    }
}

/// # Safety
/// None: the context is a number that is looked up, and any other is ignored.
pub(crate) unsafe extern "C" fn finalize(context: *mut c_void) -> c_int {
    guarded((), || {
        if let Some(process) = process() {
            process.communicator_ends(context);
        }
    });
    SUCCESS
}

/// # Safety
/// None: the handle is a number that is looked up, and any other is ignored.
pub(crate) unsafe extern "C" fn stop(handle: *mut c_void) -> c_int {
    guarded((), || {
        if let Some(process) = process() {
            process.stops(handle);
        }
    });
    SUCCESS
}

/// # Safety
/// The texts are null or end with a zero, and stay as they are during the call.
unsafe fn call_of(
    function: *const c_char,
    datatype: *const c_char,
    count: usize,
    root: Option<c_int>,
    peer: Option<c_int>,
) -> Call {
    // SAFETY: both texts are null or end with a zero, and the caller leaves them as they are during this
    // call, which keeps nothing of them.
    let (function, datatype) = unsafe { (names::text(function), names::text(datatype)) };
    let op = names::operation(function);
    use rcomm_recorder::model::OpType::{Broadcast, Gather, Reduce, Scatter};
    let is_rooted = matches!(op, Broadcast | Gather | Reduce | Scatter);
    Call {
        op,
        dtype: names::dtype(datatype),
        count: count as u64,
        root: root
            .filter(|_| is_rooted)
            .and_then(|root| u32::try_from(root).ok()),
        peer: peer.and_then(|peer| u32::try_from(peer).ok()),
    }
}

/// # Safety
/// The texts of `coll` are null or end with a zero, and stay as they are while the task is used.
unsafe fn coll_task<'t>(
    coll: &'t abi::Coll,
    named: Option<Named<'t>>,
) -> Task<'t, impl FnOnce() -> Call> {
    // SAFETY: the texts of `coll` are null or end with a zero, and the caller does not change them while the task,
    // whose `call` reads them, is used.
    let call =
        move || unsafe { call_of(coll.func, coll.datatype, coll.count, Some(coll.root), None) };
    // SAFETY: as above.
    let plan = unsafe {
        KernelPlan {
            // In version 3, the task names its communicator, and gives only the largest number of channels that it may
            // use.
            channels: if named.is_some() { 0 } else { coll.channels },
            algorithm: names::algorithm(names::text(coll.algorithm)),
            protocol: names::protocol(names::text(coll.protocol)),
        }
    };
    Task {
        call,
        peer: None,
        plan,
        named,
    }
}

fn transfer_of(facts: &ProxyOp) -> TransferFacts {
    TransferFacts {
        pid: facts.pid as u32,
        channel: facts.channel,
        peer: u32::try_from(facts.peer).unwrap_or(u32::MAX),
        steps: u32::try_from(facts.steps).unwrap_or(0),
        is_send: facts.is_send != 0,
    }
}

/// Answers the start of an event with the handle that `body` returns; null if the event is not recorded.
///
/// # Safety
/// `out` is null or valid for writes.
unsafe fn answer(out: *mut *mut c_void, body: impl FnOnce(&Process) -> *mut c_void) -> c_int {
    let none = std::ptr::null_mut();
    let handle = guarded(none, || process().map_or(none, body));
    if !out.is_null() {
        // SAFETY: `out` is not null (checked), so it is valid for writes by the contract.
        unsafe { *out = handle };
    }
    SUCCESS
}

/// # Safety
/// `out` is null or valid for writes. `descriptor` points to a descriptor of this version: the member of its facts
/// that its kind names is set, with texts that are null or end with a zero; nothing changes it during the call.
pub(crate) unsafe extern "C" fn start_v3(
    context: *mut c_void,
    out: *mut *mut c_void,
    descriptor: *mut DescriptorV3,
) -> c_int {
    // SAFETY: the caller passes a descriptor of version 3, which has the layout and size of `DescriptorV3`. Each arm
    // reads only the member of `facts` that the kind names, which is set. Its texts are null or end with a zero and
    // outlive this call, after which nothing holds them. `answer` gets `out` as the caller passed it.
    unsafe {
        let it = &*descriptor;
        answer(out, |process| match u64::from(it.kind) {
            event::GROUP => process.plan_starts(context),
            event::COLL => {
                let named = &it.facts.coll;
                let communicator = Named {
                    name: names::text(named.comm_name),
                    hash: named.comm_hash,
                    rank: u32::try_from(it.rank).unwrap_or(0),
                };
                let task = coll_task(&named.coll, Some(communicator));
                process.task_starts(context, it.parent, task)
            }
            event::P2P => {
                let p2p = &it.facts.p2p;
                let communicator = Named {
                    name: names::text(p2p.comm_name),
                    hash: p2p.comm_hash,
                    rank: u32::try_from(it.rank).unwrap_or(0),
                };
                let task = Task {
                    call: || call_of(p2p.func, p2p.datatype, p2p.count, None, Some(p2p.peer)),
                    peer: u32::try_from(p2p.peer).ok(),
                    plan: KernelPlan::default(),
                    named: Some(communicator),
                };
                process.task_starts(context, it.parent, task)
            }
            event::KERNEL_CH => process.kernel_starts(it.parent, it.facts.kernel_ch.channel, None),
            event::PROXY_OP => {
                process.transfer_starts(it.parent, &transfer_of(&it.facts.proxy_op), true)
            }
            event::PROXY_STEP => process.step_starts(it.parent, it.facts.proxy_step.step),
            _ => std::ptr::null_mut(),
        })
    }
}

/// # Safety
/// Same as [`start_v3`], with a descriptor of version 4.
pub(crate) unsafe extern "C" fn start_v4(
    context: *mut c_void,
    out: *mut *mut c_void,
    descriptor: *mut DescriptorV4,
) -> c_int {
    // SAFETY: as in `start_v3`, with the layout `DescriptorV4`: each arm reads the member that the kind
    // names, and its texts outlive this call. `answer` gets `out` as the caller passed it.
    unsafe {
        let it = &*descriptor;
        answer(out, |process| match u64::from(it.kind) {
            event::GROUP => process.plan_starts(context),
            event::COLL => {
                let task = coll_task(&it.facts.coll, None);
                process.task_starts(context, it.parent, task)
            }
            event::P2P => process.task_starts(context, it.parent, p2p_task(&it.facts.p2p)),
            event::KERNEL_CH => {
                let kernel = &it.facts.kernel_ch;
                process.kernel_starts(it.parent, kernel.channel, Some(kernel.timer))
            }
            event::PROXY_OP => {
                process.transfer_starts(it.parent, &transfer_of(&it.facts.proxy_op), false)
            }
            event::PROXY_STEP => process.step_starts(it.parent, it.facts.proxy_step.step),
            _ => std::ptr::null_mut(),
        })
    }
}

/// # Safety
/// The texts of `p2p` are null or end with a zero, and stay as they are while the task is used.
unsafe fn p2p_task<'t>(p2p: &'t abi::P2p) -> Task<'t, impl FnOnce() -> Call> {
    Task {
        // SAFETY: both texts are null or end with a zero, and the caller leaves them as they are while the task is
        // used.
        call: move || unsafe { call_of(p2p.func, p2p.datatype, p2p.count, None, Some(p2p.peer)) },
        peer: u32::try_from(p2p.peer).ok(),
        plan: KernelPlan {
            channels: p2p.channels,
            ..KernelPlan::default()
        },
        named: None,
    }
}

/// # Safety
/// Same as [`start_v3`], with a descriptor of version 5 or 6.
pub(crate) unsafe extern "C" fn start_v5(
    context: *mut c_void,
    out: *mut *mut c_void,
    descriptor: *mut DescriptorV5,
) -> c_int {
    // SAFETY: as in `start_v3`, with the layout `DescriptorV5`: each arm reads the member that the kind
    // names, and its texts outlive this call. `answer` gets `out` as the caller passed it.
    unsafe {
        let it = &*descriptor;
        answer(out, |process| match it.kind {
            event::GROUP_API => process.group_starts(),
            event::GROUP => {
                // Since version 5 a plan needs no handle.
                process.plan_starts(context);
                std::ptr::null_mut()
            }
            event::COLL_API => {
                let api = &it.facts.coll_api;
                let call = call_of(api.func, api.datatype, api.count, Some(api.root), None);
                process.call_starts(context, it.parent, &call, api.graph_captured)
            }
            event::P2P_API => {
                let api = &it.facts.p2p_api;
                let call = call_of(api.func, api.datatype, api.count, None, None);
                process.call_starts(context, it.parent, &call, api.graph_captured)
            }
            event::COLL => {
                let task = coll_task(&it.facts.coll.coll, None);
                process.task_starts(context, it.parent, task)
            }
            event::P2P => process.task_starts(context, it.parent, p2p_task(&it.facts.p2p.p2p)),
            event::KERNEL_CH => {
                let kernel = &it.facts.kernel_ch;
                process.kernel_starts(it.parent, kernel.channel, Some(kernel.timer))
            }
            event::PROXY_OP => {
                process.transfer_starts(it.parent, &transfer_of(&it.facts.proxy_op), false)
            }
            event::PROXY_STEP => process.step_starts(it.parent, it.facts.proxy_step.step),
            _ => std::ptr::null_mut(),
        })
    }
}

fn wait_of(state: c_int) -> Option<LinkWait> {
    Some(match state {
        state::SEND_GPU_WAIT | state::RECV_GPU_WAIT => LinkWait::Device,
        state::SEND_PEER_WAIT => LinkWait::Peer,
        state::SEND_WAIT => LinkWait::Send,
        state::RECV_WAIT => LinkWait::Receive,
        state::RECV_FLUSH_WAIT => LinkWait::Flush,
        _ => return None,
    })
}

/// How far a transfer's first steps are by its state in version 3; the number of these steps comes with the state.
fn progress_of(state: c_int) -> Option<Progress> {
    Some(match state {
        state::SEND_POSTED | state::RECV_TRANSMITTED => Progress::Waiting(LinkWait::Device),
        state::SEND_REM_FIFO_WAIT => Progress::Waiting(LinkWait::Peer),
        state::SEND_TRANSMITTED => Progress::Waiting(LinkWait::Send),
        state::RECV_POSTED => Progress::Waiting(LinkWait::Receive),
        state::RECV_RECEIVED => Progress::Waiting(LinkWait::Flush),
        state::SEND_DONE | state::RECV_DONE => Progress::Done,
        _ => return None,
    })
}

/// # Safety
/// `arguments` is null, or points to the arguments that version 3 defines for this state, of an event of a kind that
/// has this state.
pub(crate) unsafe extern "C" fn record_v3(
    handle: *mut c_void,
    state: c_int,
    arguments: *mut StateArgs,
) -> c_int {
    guarded((), || {
        let Some(process) = process() else { return };
        if let Some(wait) = wait_of(state) {
            process.step_waits(handle, wait);
        } else if let Some(progress) = progress_of(state)
            && !arguments.is_null()
        {
            // SAFETY: these states are those of a transfer, for which NCCL passes a transfer's arguments in
            // version 3; not null (checked). One int of them is read.
            let steps = unsafe { (*arguments.cast::<ProxyOpArgsV3>()).steps };
            process.transfer_progresses(handle, progress, u32::try_from(steps).unwrap_or(0));
        }
    });
    SUCCESS
}

/// # Safety
/// `arguments` is null, or points to the arguments that version 4 and later define for this state.
pub(crate) unsafe extern "C" fn record_v4(
    handle: *mut c_void,
    state: c_int,
    arguments: *mut StateArgs,
) -> c_int {
    let wait = wait_of(state);
    if wait.is_none() && (state != state::KERNEL_CH_STOP || arguments.is_null()) {
        return SUCCESS;
    }
    guarded((), || {
        let Some(process) = process() else { return };
        match wait {
            Some(wait) => process.step_waits(handle, wait),
            // SAFETY: in this state NCCL passes the device's clock, eight bytes; not null (checked).
            None => process.kernel_ended_at(handle, unsafe { *arguments.cast::<u64>() }),
        }
    });
    SUCCESS
}
