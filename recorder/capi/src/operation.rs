//! Functions that record operations, from begin to retired.

use crate::outcome::{RCOMM_RECORDER_ANY, RCOMM_RECORDER_NONE, quietly};
use crate::table::{Handle, SignatureNumber, list};
use rcomm_recorder::model::{OpType, Peer, ReduceOp};
use rcomm_recorder::record::{
    CallSite, CallSiteId, GroupHandle, Operation, SignatureId, SignatureRef, Start, Ticket,
};
use std::time::Duration;

/// An operation as it is issued.
#[repr(C)]
pub struct CallOperation {
    /// The number of the operation's group.
    pub group: u32,
    /// Number of the call site, or `RCOMM_RECORDER_NONE`.
    pub call_site: u32,
    /// The operation's signature.
    pub signature: SignatureNumber,
    /// Per group, +1 per collective; point-to-point operations carry the current value.
    pub collective_seq_id: u64,
    /// Per group, +1 per point-to-point operation or batch.
    pub p2p_seq_id: u64,
    /// Per group, +1 per logical operation.
    pub op_id: u64,
    /// The peer of a send or receive, as a rank of the group, `RCOMM_RECORDER_ANY`, or `RCOMM_RECORDER_NONE`.
    pub peer: u32,
    /// The root as a rank of the group, or `RCOMM_RECORDER_NONE`.
    pub root: u32,
    /// The operation's time-out in ms; 0 = unknown.
    pub timeout_ms: u64,
    /// Elements sent to each rank of the group; NULL if the operation has no splits.
    pub input_splits: *const u64,
    /// Number of input splits.
    pub input_split_count: usize,
    /// Elements received from each rank of the group; NULL if the operation has no splits.
    pub output_splits: *const u64,
    /// Number of output splits.
    pub output_split_count: usize,
    /// The operation's code: one of `RCOMM_RECORDER_ALL_REDUCE` and so on.
    pub op: u8,
    /// The code of the operation's reduction, as `RCOMM_SUM` and so on in rcomm.h; 255 = none or unknown.
    pub reduction: u8,
    /// 1 if the operation is counted by `p2p_seq_id`, otherwise 0.
    pub is_p2p: u8,
    /// 1 if the operation starts when it is issued, otherwise 0.
    pub starts_at_once: u8,
}

/// Refers to an operation that was begun, for later calls. Free to copy, and to pass to other threads.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CallTicket {
    /// For the recorder's use only.
    pub words: [u64; 3],
}

const NO_TICKET: CallTicket = CallTicket { words: [0; 3] };

/// Records that the calling thread issues an operation now. Returns its ticket; if it was not recorded, one that later
/// calls ignore.
///
/// # Safety
/// `recorder` is NULL or a valid handle; `operation` is NULL or points to an operation whose splits are
/// NULL or as many as their counts.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_recorder_begin(
    recorder: *const Handle,
    operation: *const CallOperation,
) -> CallTicket {
    quietly(NO_TICKET, || {
        // SAFETY: `recorder` is NULL or a valid handle, and `operation` is NULL or points to an operation
        // that the caller does not change; both for the time of this call.
        let (recorder, call) = unsafe { (Handle::recorder(recorder)?, operation.as_ref()?) };
        // SAFETY: both lists are NULL or as long as their counts, and the caller does not change them
        // during this call, which copies them.
        let (input_splits, output_splits) = unsafe {
            (
                list(call.input_splits, call.input_split_count),
                list(call.output_splits, call.output_split_count),
            )
        };
        let site = CallSiteId::of_row(call.call_site);
        let signature = SignatureId::of_words(call.signature.words);
        let ticket = recorder.begin(&Operation {
            group: GroupHandle::of_row(call.group),
            op: OpType::from_code(call.op).unwrap_or(OpType::Other),
            signature: SignatureRef::Id(signature),
            collective_seq_id: call.collective_seq_id,
            p2p_seq_id: call.p2p_seq_id,
            op_id: call.op_id,
            is_p2p: call.is_p2p != 0,
            peer: match call.peer {
                RCOMM_RECORDER_NONE => Peer::None,
                RCOMM_RECORDER_ANY => Peer::Any,
                rank => Peer::Rank(rank),
            },
            root: (call.root != RCOMM_RECORDER_NONE).then_some(call.root),
            reduce_op: ReduceOp::from_code(call.reduction),
            input_splits,
            output_splits,
            timeout: Duration::from_millis(call.timeout_ms),
            call_site: Some(CallSite::Id(site)),
            start: match call.starts_at_once {
                0 => Start::InTurn,
                _ => Start::AtOnce,
            },
        });
        Some(CallTicket {
            words: ticket.to_words(),
        })
    })
}

/// Calls `act` with the recorder and the ticket, unless the ticket refers to no operation.
///
/// # Safety
/// `recorder` is NULL or a valid handle.
#[inline]
unsafe fn with_ticket(
    recorder: *const Handle,
    ticket: CallTicket,
    act: impl FnOnce(&rcomm_recorder::record::FlightRecorder, Ticket),
) {
    quietly((), || {
        // SAFETY: `recorder` is NULL or a valid handle, as this function requires of its caller.
        let recorder = unsafe { Handle::recorder(recorder)? };
        let is_known = ticket.words[0] != 0;
        is_known.then(|| act(recorder, Ticket::of_words(ticket.words)))
    });
}

/// Records that an operation was seen to have started, now.
///
/// # Safety
/// `recorder` is NULL or a valid handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_recorder_started(recorder: *const Handle, ticket: CallTicket) {
    // SAFETY: the caller keeps `recorder` alive during the call, if it is not NULL. The ticket consists of numbers that
    // safe code looks up: a wrong one cannot violate memory safety.
    unsafe {
        with_ticket(recorder, ticket, |recorder, ticket| {
            recorder.started(ticket)
        })
    }
}

/// Records that an operation was seen to have completed, now.
///
/// # Safety
/// `recorder` is NULL or a valid handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_recorder_completed(recorder: *const Handle, ticket: CallTicket) {
    // SAFETY: the caller keeps `recorder` alive during the call, if it is not NULL.
    unsafe {
        with_ticket(recorder, ticket, |recorder, ticket| {
            recorder.completed(ticket)
        })
    }
}

/// Records that an operation was seen to have completed, now, and its run time in nanoseconds, as measured by the
/// backend.
///
/// # Safety
/// `recorder` is NULL or a valid handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_recorder_completed_after(
    recorder: *const Handle,
    ticket: CallTicket,
    duration_ns: u64,
) {
    // SAFETY: the caller keeps `recorder` alive during the call, if it is not NULL.
    unsafe {
        with_ticket(recorder, ticket, |recorder, ticket| {
            let duration = Duration::from_nanos(duration_ns);
            recorder.completed_at(ticket, recorder.now(), Some(duration));
        });
    }
}

/// Records that an operation ended with an error or a time-out, now.
///
/// # Safety
/// `recorder` is NULL or a valid handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_recorder_failed(recorder: *const Handle, ticket: CallTicket) {
    // SAFETY: the caller keeps `recorder` alive during the call, if it is not NULL.
    unsafe { with_ticket(recorder, ticket, |recorder, ticket| recorder.failed(ticket)) }
}

/// Records that an operation is no longer watched: its further progress will not be recorded.
///
/// # Safety
/// `recorder` is NULL or a valid handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rcomm_recorder_retired(recorder: *const Handle, ticket: CallTicket) {
    // SAFETY: the caller keeps `recorder` alive during the call, if it is not NULL.
    unsafe {
        with_ticket(recorder, ticket, |recorder, ticket| {
            recorder.retired(ticket)
        })
    }
}
