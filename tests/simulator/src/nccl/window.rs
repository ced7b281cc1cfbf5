//! Windows and one-sided operations, as between devices of one host that reach each other's memory.
//!
//! Registration is collective, and without symmetric memory it succeeds and gives no window
//! (`ncclCommWindowRegister`, dev_runtime.cc:1333 and 1342). A peer out of reach has no address
//! (`ncclGetPeerDevicePointer`, dev_runtime.cc:1768). The source of a put must lie in a symmetric window
//! (`rmaTaskAppend`, enqueue.cc:2866), and missing support is an error of the communicator (2813). The first
//! one-sided operation of a communicator connects all its ranks (enqueue.cc:2912; `ncclRmaCeInit`,
//! rma/rma_ce.cc:19), and waits for them. A signal is counted for each pair of ranks of the communicator, after
//! the data of its put (`ncclRmaCePutLaunch`, rma/rma_ce.cc:372), and a wait blocks the stream until the count
//! is reached (`ncclRmaCeWaitLaunch`, 384).

use super::comm::{Comm, WaitsFor, comm_of};
use super::group::is_in_group;
use super::lifecycle::run_or_spawn;
use super::{
    IN_PROGRESS, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, SUCCESS, SYSTEM_ERROR,
    UNHANDLED_CUDA_ERROR, fail, no_comm, version,
};
use crate::cuda;
use crate::cuda::memory::{self, Mapping};
use crate::handles::{Handles, end_process};
use crate::number::size_of_type;
use crate::stream::{Stream, Work, lock};
use crate::trouble;
use crate::wire::{Request, RequestKind};
use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

const SYMMETRIC: c_int = 1;
const ALIGNMENT: u64 = 4096;
/// Bytes of a rank's description of its memory, which [`description`] makes.
const DESCRIPTION: usize = 32;

/// A registered window: the parts of all ranks.
struct Window {
    /// The handle of the communicator.
    comm: usize,
    /// The address of this rank's part, and its length.
    at: u64,
    size: u64,
    is_symmetric: bool,
    /// The addresses of the parts in this process, and their lengths, by rank.
    parts: Vec<(u64, u64)>,
    _mapped: Vec<Mapping>,
}

static WINDOWS: Handles<Window> = Handles::new("window");

/// Counters of signals, by sender, in memory that all ranks of a communicator reach.
pub(super) struct Signals {
    /// The addresses of all tables in this process, by rank.
    tables: Vec<u64>,
    _table: memory::Shared,
    _mapped: Vec<Mapping>,
    /// The number of signals that this rank has waited for so far, by sender.
    expected: std::sync::Mutex<Vec<u64>>,
}

impl Signals {
    /// The number of signals that the receiver has got from the sender.
    fn counter(&self, receiver: usize, sender: usize) -> &AtomicU64 {
        let at = self.tables[receiver] + (sender * size_of::<u64>()) as u64;
        // SAFETY: every table has a word for each rank, both arguments are ranks, and tables begin on a
        // page. They are mapped as long as `self` lives, and all processes use their words by atomic
        // operations alone.
        unsafe { AtomicU64::from_ptr(at as *mut u64) }
    }
}

/// Describes a rank's memory to the other ranks: process, file, offset and size.
fn description(file: (c_int, u64), offset: u64, size: u64) -> Vec<u8> {
    let mut description = Vec::with_capacity(DESCRIPTION);
    description.extend(u64::from(std::process::id()).to_le_bytes());
    description.extend(file.0.to_le_bytes());
    description.extend([0; 4]);
    description.extend(offset.to_le_bytes());
    description.extend(size.to_le_bytes());
    description
}

/// Exchanges the descriptions of all ranks and maps their memory. Returns the address of each part in this process
/// and its length, and the mappings.
#[allow(clippy::type_complexity, reason = "addresses and what keeps them")]
fn exchange(comm: &Comm, description: &[u8]) -> Result<(Vec<(u64, u64)>, Vec<Mapping>), c_int> {
    let mut request = Request::new(RequestKind::Exchange, comm.next_id(), 0);
    request.seq = comm.derivations.fetch_add(1, Ordering::AcqRel);
    if !comm.ask(&request, description) {
        return Err(fail(
            REMOTE_ERROR,
            "the connection to the other ranks broke",
        ));
    }
    let descriptions = comm.answer(request.id, WaitsFor::Bootstrap)?;
    let (mut parts, mut mapped) = (Vec::new(), Vec::new());
    for description in descriptions.chunks_exact(DESCRIPTION) {
        let word = |at: usize| {
            u64::from_le_bytes(description[at..at + 8].try_into().expect("eight bytes"))
        };
        let file = c_int::from_le_bytes(description[8..12].try_into().expect("four bytes"));
        let (offset, size) = (word(16), word(24));
        let path = format!("/proc/{}/fd/{file}", word(0));
        let mapping = Mapping::open(&path).map_err(|error| {
            fail(
                SYSTEM_ERROR,
                &format!("the memory of a peer ({path}): {error}"),
            )
        })?;
        parts.push((mapping.address() + offset, size));
        mapped.push(mapping);
    }
    Ok((parts, mapped))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommWindowRegister(
    handle: *mut c_void,
    at: *mut c_void,
    size: usize,
    out: *mut *mut c_void,
    flags: c_int,
) -> c_int {
    let Some(comm) = comm_of(handle) else {
        return no_comm();
    };
    // SAFETY: the caller keeps `out` valid for writes until the communicator is ready again.
    unsafe { *out = std::ptr::null_mut() };
    if at.is_null() || size == 0 {
        return fail(
            INVALID_ARGUMENT,
            &format!("invalid pointer {at:p} / size {size}"),
        );
    }
    if trouble::setting("no_symmetric").is_some() {
        return SUCCESS;
    }
    let status = comm.ensure_ready();
    if status != SUCCESS {
        return status;
    }
    let (at, size) = (at.addr() as u64, size as u64);
    let Some((file, offset)) = memory::file_of(at, size) else {
        // cuMemRetainAllocationHandle of memory that is not from the virtual memory API.
        return fail(UNHANDLED_CUDA_ERROR, "Cuda failure 1 'invalid argument'");
    };
    if offset % ALIGNMENT != 0 {
        return fail(INVALID_ARGUMENT, "Window address must be suitably aligned.");
    }
    comm.state.store(IN_PROGRESS, Ordering::Release);
    let out = out.expose_provenance();
    let key = handle.addr();
    let job = comm.begin_job();
    run_or_spawn(comm.is_blocking, move || {
        let status = match exchange(&comm, &description(file, offset, size)) {
            Err(status) => status,
            Ok((mut parts, mapped)) => {
                // This rank's part is at the address that the program uses.
                parts[usize::try_from(comm.rank).unwrap_or(0)].0 = at;
                let window = WINDOWS.insert(Arc::new(Window {
                    comm: key,
                    at,
                    size,
                    is_symmetric: flags & SYMMETRIC != 0,
                    parts,
                    _mapped: mapped,
                }));
                // SAFETY: the caller keeps `out`, whose address was exposed above, valid for writes until the
                // communicator is ready again, which it is after this.
                unsafe { *std::ptr::with_exposed_provenance_mut::<*mut c_void>(out) = window };
                SUCCESS
            }
        };
        let status = comm.set_state(status);
        drop(job);
        status
    })
}

/// "Deregistration is local to the rank" (user guide).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommWindowDeregister(comm: *mut c_void, window: *mut c_void) -> c_int {
    let Some(comm) = comm_of(comm) else {
        return no_comm();
    };
    comm.end_if_launching("ncclCommWindowDeregister");
    // A null window is not an error.
    drop(WINDOWS.remove(window));
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetPeerDevicePointer(
    window: *mut c_void,
    offset: usize,
    peer: c_int,
    out: *mut *mut c_void,
) -> c_int {
    let Some(window) = WINDOWS.get(window) else {
        return fail(INVALID_ARGUMENT, "window argument is NULL");
    };
    let part = usize::try_from(peer)
        .ok()
        .and_then(|peer| window.parts.get(peer));
    let Some((start, _)) = part else {
        let text = format!(
            "peer {peer} is not within valid range of ranks {}.",
            window.parts.len()
        );
        return fail(INVALID_ARGUMENT, &text);
    };
    let at = if trouble::setting("no_reach").is_some() {
        // The peer counts as outside of the NVLink domain.
        std::ptr::null_mut()
    } else {
        std::ptr::with_exposed_provenance_mut(*start as usize + offset)
    };
    // SAFETY: the caller lets an address be written to `out`, which is not null.
    unsafe { *out = at };
    SUCCESS
}

/// The beginning of `ncclCommProperties_t` (nccl_device/core.h, 2.31.2), up to the last field that is filled in.
#[repr(C)]
pub struct Properties {
    size: usize,
    magic: c_uint,
    version: c_uint,
    rank: c_int,
    ranks: c_int,
    devices: [c_int; 2],
    device_api_support: u8,
    multimem_support: u8,
    gin_type: c_int,
    lsa_teams: c_int,
    host_rma_support: u8,
    railed_gin_type: c_int,
    comm_hash: u64,
}

/// The first release whose `ncclCommProperties_t` has `commHash`.
const WITH_HASH: c_int = 23_100;

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommQueryProperties(
    handle: *mut c_void,
    properties: *mut Properties,
) -> c_int {
    let Some(comm) = comm_of(handle) else {
        return no_comm();
    };
    let status = comm.ensure_ready();
    if status != SUCCESS {
        return status;
    }
    // SAFETY: `properties` is null or points to a structure of the caller's that begins with these fields, and that no
    // other code uses during this call.
    let Some(properties) = (unsafe { properties.as_mut() }) else {
        return fail(INVALID_ARGUMENT, "props argument is NULL");
    };
    let asked = c_int::try_from(properties.version).unwrap_or(c_int::MAX);
    if properties.magic != 0xcafe_beef || asked > version() {
        return fail(INVALID_USAGE, "Cannot get communicator properties");
    }
    let has_windows = trouble::setting("no_symmetric").is_none();
    properties.rank = comm.rank;
    properties.ranks = comm.size;
    properties.device_api_support = u8::from(has_windows);
    properties.host_rma_support =
        u8::from(has_windows && trouble::setting("no_one_sided").is_none());
    properties.lsa_teams = 1;
    if asked >= WITH_HASH {
        properties.comm_hash = comm.hash;
    }
    SUCCESS
}

/// Returns `SUCCESS` if a one-sided operation with `peer` may be issued, else the status with which it is refused.
/// Missing support is an error of the communicator.
fn check(comm: &Comm, peer: c_int) -> c_int {
    let status = comm.ensure_ready();
    if status != SUCCESS {
        return status;
    }
    if peer < 0 || peer >= comm.size {
        let text = format!(
            "invalid root {peer} (root should be in the 0..{} range)",
            comm.size
        );
        return fail(INVALID_ARGUMENT, &text);
    }
    if trouble::setting("no_one_sided").is_some() {
        let text = "One sided RMA: host RMA is not supported in this communicator.";
        comm.set_state(INVALID_ARGUMENT);
        return fail(INVALID_ARGUMENT, text);
    }
    SUCCESS
}

/// Launches a one-sided operation after `delay`, and, if it is the communicator's first, after all ranks have
/// connected.
fn enqueue(
    comm: &Arc<Comm>,
    (stream, delay): (Arc<Stream>, Option<Duration>),
    make: impl FnOnce(&Arc<Signals>) -> Work + Send + 'static,
) -> c_int {
    if is_in_group() {
        end_process("one-sided operations in a group of calls are not simulated");
    }
    let connected = lock(&comm.signals).clone();
    if let (Some(signals), None) = (&connected, delay) {
        let work = make(signals);
        launch(comm, &stream, work);
        return SUCCESS;
    }
    comm.state.store(IN_PROGRESS, Ordering::Release);
    let owned = Arc::clone(comm);
    let job = comm.begin_job();
    run_or_spawn(comm.is_blocking, move || {
        if let Some(delay) = delay {
            std::thread::sleep(delay);
        }
        let status = match connected.map_or_else(|| connect(&owned), Ok) {
            Ok(signals) => {
                let work = make(&signals);
                *lock(&owned.signals) = Some(signals);
                launch(&owned, &stream, work);
                SUCCESS
            }
            Err(status) => status,
        };
        let status = owned.set_state(status);
        drop(job);
        status
    })
}

/// Makes this rank's table of signals, and maps those of all ranks.
fn connect(comm: &Comm) -> Result<Arc<Signals>, c_int> {
    let ranks = usize::try_from(comm.size).unwrap_or(0);
    let bytes = ranks * size_of::<u64>();
    let table = memory::Shared::create(bytes)
        .map_err(|error| fail(SYSTEM_ERROR, &format!("signals: {error}")))?;
    let (parts, mapped) = exchange(comm, &description(table.file(), 0, bytes as u64))?;
    Ok(Arc::new(Signals {
        tables: parts.into_iter().map(|(at, _)| at).collect(),
        _table: table,
        _mapped: mapped,
        expected: std::sync::Mutex::new(vec![0; ranks]),
    }))
}

fn launch(comm: &Arc<Comm>, stream: &Stream, work: Work) {
    comm.pending.fetch_add(1, Ordering::AcqRel);
    let comm = Arc::clone(comm);
    stream.push(Arc::new(move || {
        work();
        comm.pending.fetch_sub(1, Ordering::AcqRel);
    }));
}

/// Returns the communicator if a signal with these arguments may be sent to `peer`.
fn comm_that_signals(
    handle: *mut c_void,
    peer: c_int,
    signal_context_flags: (c_int, c_int, c_uint),
) -> Result<Arc<Comm>, c_int> {
    let Some(comm) = comm_of(handle) else {
        return Err(no_comm());
    };
    let status = check(&comm, peer);
    if status != SUCCESS {
        return Err(status);
    }
    if signal_context_flags != (0, 0, 0) {
        let text = "signal index, context and flags must be 0";
        return Err(fail(INVALID_ARGUMENT, text));
    }
    Ok(comm)
}

#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments, reason = "as nccl.h has it")]
pub unsafe extern "C" fn ncclPutSignal(
    from: *const c_void,
    count: usize,
    data_type: c_int,
    peer: c_int,
    window: *mut c_void,
    offset: usize,
    signal: c_int,
    context: c_int,
    flags: c_uint,
    handle: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    let comm = match comm_that_signals(handle, peer, (signal, context, flags)) {
        Ok(comm) => comm,
        Err(status) => return status,
    };
    let Some(target) = WINDOWS.get(window) else {
        return fail(INVALID_ARGUMENT, "ncclPutSignal: peerWin is NULL");
    };
    let bytes = count * size_of_type(data_type).unwrap_or(0);
    let source = from.addr() as u64;
    let holds_source = |window: &Window| {
        window.is_symmetric
            && window.comm == handle.addr()
            && source >= window.at
            && source + bytes as u64 <= window.at + window.size
    };
    if !WINDOWS.any(holds_source) {
        let text = "ncclPutSignal: srcWinHost is not in a valid symmetric window";
        return fail(INVALID_ARGUMENT, text);
    }
    let (to, size) = target.parts[usize::try_from(peer).unwrap_or(0)];
    if (offset + bytes) as u64 > size {
        // The library would write there.
        end_process("a put beyond the end of a window");
    }
    let this_rank = usize::try_from(comm.rank).unwrap_or(0);
    let peer = usize::try_from(peer).unwrap_or(0);
    let owned = Arc::clone(&comm);
    let delay = trouble::setting("put_delay_ms").map(Duration::from_millis);
    enqueue(&comm, (cuda::stream_of(stream), delay), move |signals| {
        let signals = Arc::clone(signals);
        Arc::new(move || {
            if owned.stopped.load(Ordering::Acquire) {
                return;
            }
            // The target stays mapped until this has run.
            let _window = &target;
            memory::check(source as usize, bytes);
            // SAFETY: the source is live memory of a device (`check`), and the target, checked above to end
            // within the peer's part, is mapped as long as `target` lives. They may overlap. The program
            // keeps accesses apart by signals.
            unsafe {
                std::ptr::copy(
                    source as *const u8,
                    (to as usize + offset) as *mut u8,
                    bytes,
                );
            }
            signals
                .counter(peer, this_rank)
                .fetch_add(1, Ordering::AcqRel);
        })
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclSignal(
    peer: c_int,
    signal: c_int,
    context: c_int,
    flags: c_uint,
    handle: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    let comm = match comm_that_signals(handle, peer, (signal, context, flags)) {
        Ok(comm) => comm,
        Err(status) => return status,
    };
    let this_rank = usize::try_from(comm.rank).unwrap_or(0);
    let peer = usize::try_from(peer).unwrap_or(0);
    enqueue(&comm, (cuda::stream_of(stream), None), move |signals| {
        let signals = Arc::clone(signals);
        Arc::new(move || {
            signals
                .counter(peer, this_rank)
                .fetch_add(1, Ordering::AcqRel);
        })
    })
}

/// `ncclWaitSignalDesc_t`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct WaitSignalDesc {
    count: c_int,
    peer: c_int,
    signal: c_int,
    context: c_int,
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclWaitSignal(
    length: c_int,
    wanted: *mut WaitSignalDesc,
    handle: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    let Some(comm) = comm_of(handle) else {
        return no_comm();
    };
    let status = check(&comm, 0);
    if status != SUCCESS {
        return status;
    }
    let Some(length) = usize::try_from(length)
        .ok()
        .filter(|length| *length > 0 && !wanted.is_null())
    else {
        return fail(INVALID_ARGUMENT, "ncclWaitSignal: invalid arguments");
    };
    // SAFETY: `wanted` is not null (checked) and holds `length` descriptors. The caller leaves them as they are during
    // this call, and they are copied here.
    let wanted = unsafe { std::slice::from_raw_parts(wanted, length) }.to_vec();
    for (index, descriptor) in wanted.iter().enumerate() {
        let is_rank = descriptor.peer >= 0 && descriptor.peer < comm.size;
        let is_supported = (descriptor.signal, descriptor.context) == (0, 0);
        if descriptor.count <= 0 || !is_supported || !is_rank {
            let text = format!("ncclWaitSignal: descriptor {index} is invalid");
            return fail(INVALID_ARGUMENT, &text);
        }
    }
    let this_rank = usize::try_from(comm.rank).unwrap_or(0);
    let owned = Arc::clone(&comm);
    enqueue(&comm, (cuda::stream_of(stream), None), move |signals| {
        let mut expected = lock(&signals.expected);
        let targets: Vec<(usize, u64)> = wanted
            .iter()
            .map(|wanted| {
                let peer = usize::try_from(wanted.peer).unwrap_or(0);
                expected[peer] += u64::try_from(wanted.count).unwrap_or(0);
                (peer, expected[peer])
            })
            .collect();
        drop(expected);
        let signals = Arc::clone(signals);
        Arc::new(move || {
            for &(peer, until) in &targets {
                while signals.counter(this_rank, peer).load(Ordering::Acquire) < until {
                    if owned.stopped.load(Ordering::Acquire) {
                        return;
                    }
                    std::thread::sleep(Duration::from_micros(50));
                }
            }
        })
    })
}
