//! The functions of `nccl.h` for sends, receives and the caller's own reductions, and the implementations of the
//! collectives, which `configured` exports. Arguments are checked as in `ArgsCheck` (misc/argcheck.cc:201) and
//! `ncclEnqueueCheck` (enqueue.cc:3124), and user reductions are made as in `ncclRedOpCreatePreMulSum`
//! (enqueue.cc:3176).

use super::comm::{Comm, comm_of};
use super::group::{Item, Launch, enqueue, note_refused, read};
use super::{INVALID_ARGUMENT, SUCCESS, fail, no_comm};
use crate::cuda;
use crate::handles::end_process;
use crate::number::size_of_type;
use crate::stream::lock;
use crate::wire::{Request, RequestKind};
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// `ncclAvg`.
const AVG: c_int = 4;

/// The smallest value of a user-defined reduction (`ncclNumOps`).
const FIRST_USER_OP: c_int = 5;

/// `ncclScalarDevice`.
const SCALAR_DEVICE: c_int = 0;

/// The factor of a user's reduction.
#[derive(Clone, Copy)]
pub(super) enum Factor {
    Value(f64),
    /// An address in device memory, the size of the number there in bytes, and its type. A kernel reads it.
    OnDevice(usize, usize, c_int),
}

impl Factor {
    /// The factor, as a kernel finds it.
    pub(super) fn read(self) -> f64 {
        match self {
            Self::Value(factor) => factor,
            Self::OnDevice(at, size, data_type) => number_of(data_type, &read(at, size)),
        }
    }
}

/// The number in these bytes. Of `ncclDataType_t`, 6 and 9 are the 16-bit floats, 7 and 8 those of 32 and 64 bits.
fn number_of(data_type: c_int, bytes: &[u8]) -> f64 {
    match (data_type, bytes) {
        (6, &[a, b]) => rcomm::f16::from_le_bytes([a, b]).to_f64(),
        (9, &[a, b]) => rcomm::bf16::from_le_bytes([a, b]).to_f64(),
        (7, &[a, b, c, d]) => f64::from(f32::from_le_bytes([a, b, c, d])),
        (_, bytes) => f64::from_le_bytes(bytes.try_into().expect("eight bytes")),
    }
}

/// The arguments of one call.
struct Call {
    kind: RequestKind,
    send: *const c_void,
    receive: *mut c_void,
    /// Elements of this rank's input; 0 if it has none.
    input: usize,
    /// Elements of an input on a rank that has one; the hub compares this number between the ranks.
    length: usize,
    data_type: c_int,
    op: c_int,
    /// The root or the peer; 0 if the operation has none.
    rank: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
}

impl Call {
    /// A call in which all ranks have an input of `count` elements.
    fn new(
        kind: RequestKind,
        (send, receive): (*const c_void, *mut c_void),
        (count, data_type): (usize, c_int),
        (comm, stream): (*mut c_void, *mut c_void),
    ) -> Self {
        Self {
            kind,
            send,
            receive,
            input: count,
            length: count,
            data_type,
            op: 0,
            rank: 0,
            comm,
            stream,
        }
    }

    fn enqueue(&self) -> c_int {
        let Some(comm) = comm_of(self.comm) else {
            return no_comm();
        };
        match self.check(&comm) {
            Ok(launch) => enqueue(launch),
            Err(status) => {
                note_refused(status);
                comm.refuse(status)
            }
        }
    }

    /// Checks the arguments and returns what is to be launched.
    ///
    /// # Errors
    /// The status with which the call is refused.
    fn check(&self, comm: &Arc<Comm>) -> Result<Launch, c_int> {
        let status = comm.ensure_ready();
        if status != SUCCESS {
            return Err(status);
        }
        if comm.suspended.load(Ordering::Acquire) {
            // "The communicator cannot be used while suspended" (nccl.h); its memory is unmapped.
            end_process("an operation on a suspended communicator");
        }
        let Some(size) = size_of_type(self.data_type) else {
            let text = format!("invalid type {}", self.data_type);
            return Err(fail(INVALID_ARGUMENT, &text));
        };
        if self.rank < 0 || self.rank >= comm.size {
            let text = format!("invalid root or peer {} of {}", self.rank, comm.size);
            return Err(fail(INVALID_ARGUMENT, &text));
        }
        let Some(factor) = self.factor(comm) else {
            let text = format!("invalid reduction operation {}", self.op);
            return Err(fail(INVALID_ARGUMENT, &text));
        };
        // `ncclLaunchOneRank` (device/onerank.cu:44 of 2.30.7) scales no 8-bit floats, and a mean is a scaled sum.
        if comm.size == 1 && self.op == AVG && matches!(self.data_type, 10 | 11) {
            let text = "a communicator of one rank computes no mean of 8-bit floats";
            return Err(fail(INVALID_ARGUMENT, text));
        }
        let mut request = Request::new(self.kind, 0, 0);
        request.rank = self.rank;
        request.data_type = self.data_type;
        request.op = if self.op >= FIRST_USER_OP { 0 } else { self.op };
        request.length = (self.length * size) as u64;
        let input = (self.input > 0).then_some((self.send as usize, self.input * size));
        Ok(Launch {
            comm: Arc::clone(comm),
            stream: cuda::stream_of(self.stream),
            item: Item {
                request,
                input,
                factor,
                output: self.receive as usize,
                parts: Vec::new(),
            },
        })
    }

    /// The factor of the caller's reduction, 1 for one of NCCL's; `None` if the communicator has no such reduction.
    fn factor(&self, comm: &Comm) -> Option<Factor> {
        if self.op < FIRST_USER_OP {
            return Some(Factor::Value(1.0));
        }
        let at = usize::try_from(self.op - FIRST_USER_OP).ok()?;
        lock(&comm.factors).get(at).copied()
    }
}

fn ranks_of(comm: *mut c_void) -> usize {
    comm_of(comm).map_or(1, |comm| usize::try_from(comm.size).unwrap_or(1))
}

fn is_rank(comm: *mut c_void, rank: c_int) -> bool {
    comm_of(comm).is_some_and(|comm: Arc<Comm>| comm.rank == rank)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclRedOpCreatePreMulSum(
    op: *mut c_int,
    scalar: *mut c_void,
    data_type: c_int,
    residence: c_int,
    handle: *mut c_void,
) -> c_int {
    let Some(comm) = comm_of(handle) else {
        return no_comm();
    };
    comm.end_if_launching("ncclRedOpCreatePreMulSum");
    let status = comm.ensure_ready();
    if status != SUCCESS {
        return status;
    }
    let Some(size) = size_of_type(data_type) else {
        return fail(INVALID_ARGUMENT, "invalid type");
    };
    if !(6..=9).contains(&data_type) {
        return fail(INVALID_ARGUMENT, "PreMulSum wants a floating point type");
    }
    let factor = match residence {
        SCALAR_DEVICE => Factor::OnDevice(scalar.addr(), size, data_type),
        _ => {
            // SAFETY: the caller's `scalar` is a value of this type on the host, as `ncclScalarHostImmediate`
            // promises, and stays as it is during this call: `size` bytes, in which any pattern is a value.
            let bytes = unsafe { std::slice::from_raw_parts(scalar.cast::<u8>(), size) };
            Factor::Value(number_of(data_type, bytes))
        }
    };
    let mut factors = lock(&comm.factors);
    factors.push(factor);
    // SAFETY: the caller lets an int be written to `op`, which is not null.
    unsafe { *op = FIRST_USER_OP + c_int::try_from(factors.len() - 1).unwrap_or(c_int::MAX) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclRedOpDestroy(op: c_int, handle: *mut c_void) -> c_int {
    let Some(comm) = comm_of(handle) else {
        return no_comm();
    };
    comm.end_if_launching("ncclRedOpDestroy");
    if op < FIRST_USER_OP {
        fail(INVALID_ARGUMENT, "a built-in reduction cannot be destroyed")
    } else {
        SUCCESS
    }
}

pub(super) fn all_reduce(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    data_type: c_int,
    op: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    Call {
        op,
        ..Call::new(
            RequestKind::AllReduce,
            (send, receive),
            (count, data_type),
            (comm, stream),
        )
    }
    .enqueue()
}

#[allow(clippy::too_many_arguments, reason = "as nccl.h has it")]
pub(super) fn reduce(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    data_type: c_int,
    op: c_int,
    root: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    Call {
        op,
        rank: root,
        ..Call::new(
            RequestKind::Reduce,
            (send, receive),
            (count, data_type),
            (comm, stream),
        )
    }
    .enqueue()
}

pub(super) fn broadcast(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    data_type: c_int,
    root: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    let input = if is_rank(comm, root) { count } else { 0 };
    Call {
        input,
        rank: root,
        ..Call::new(
            RequestKind::Broadcast,
            (send, receive),
            (count, data_type),
            (comm, stream),
        )
    }
    .enqueue()
}

pub(super) fn all_gather(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    data_type: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    Call::new(
        RequestKind::AllGather,
        (send, receive),
        (count, data_type),
        (comm, stream),
    )
    .enqueue()
}

pub(super) fn reduce_scatter(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    data_type: c_int,
    op: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    let all = count * ranks_of(comm);
    Call {
        op,
        ..Call::new(
            RequestKind::ReduceScatter,
            (send, receive),
            (all, data_type),
            (comm, stream),
        )
    }
    .enqueue()
}

pub(super) fn all_to_all(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    data_type: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    let all = count * ranks_of(comm);
    Call::new(
        RequestKind::AllToAll,
        (send, receive),
        (all, data_type),
        (comm, stream),
    )
    .enqueue()
}

/// "On non-root ranks, recvbuff is not used" (nccl.h).
pub(super) fn gather(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    data_type: c_int,
    root: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    Call {
        rank: root,
        ..Call::new(
            RequestKind::Gather,
            (send, receive),
            (count, data_type),
            (comm, stream),
        )
    }
    .enqueue()
}

/// "On non-root ranks, sendbuff is not used" (nccl.h).
pub(super) fn scatter(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    data_type: c_int,
    root: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    let all = count * ranks_of(comm);
    let input = if is_rank(comm, root) { all } else { 0 };
    Call {
        input,
        rank: root,
        ..Call::new(
            RequestKind::Scatter,
            (send, receive),
            (all, data_type),
            (comm, stream),
        )
    }
    .enqueue()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclSend(
    send: *const c_void,
    count: usize,
    data_type: c_int,
    peer: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    Call {
        rank: peer,
        ..Call::new(
            RequestKind::Send,
            (send, std::ptr::null_mut()),
            (count, data_type),
            (comm, stream),
        )
    }
    .enqueue()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclRecv(
    receive: *mut c_void,
    count: usize,
    data_type: c_int,
    peer: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    Call {
        input: 0,
        rank: peer,
        ..Call::new(
            RequestKind::Recv,
            (std::ptr::null(), receive),
            (count, data_type),
            (comm, stream),
        )
    }
    .enqueue()
}
