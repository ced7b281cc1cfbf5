//! `ncclGroupStart` and `ncclGroupEnd`, and how operations are launched and run on their streams.
//!
//! As in group.cc (`ncclGroupStart`, 97; `ncclGroupEndInternal`, 766; `doLaunches`, 309): groups belong to the
//! thread that opened them and nest; nothing is launched before the outermost ends, and nothing at all if one call was
//! refused; what a group holds for one communicator and stream runs as one kernel, so that sends and receives do not
//! wait for each other.

use super::comm::{Captured, Comm, WaitsFor};
use super::lifecycle::run_or_spawn;
use super::operation::Factor;
use super::order::Place;
use super::profiler::{self, Event, Part};
use super::{
    IN_PROGRESS, INTERNAL_ERROR, INVALID_ARGUMENT, INVALID_USAGE, REMOTE_ERROR, SUCCESS,
    UNHANDLED_CUDA_ERROR, fail,
};
use crate::cuda::memory::check;
use crate::handles::end_process;
use crate::stream::Stream;
use crate::trouble::{self, Outcome};
use crate::wire::{Request, RequestKind};
use std::cell::RefCell;
use std::ffi::{c_int, c_uint};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// One operation of a group of calls.
#[derive(Clone)]
pub(super) struct Item {
    pub(super) request: Request,
    /// Address and bytes of the input; `None` without an input.
    pub(super) input: Option<(usize, usize)>,
    pub(super) factor: Factor,
    /// Address of the output; 0 without an output.
    pub(super) output: usize,
    /// The parts that its call has reported to the profiler plug-in.
    pub(super) parts: Vec<Part>,
}

impl Item {
    /// The memory that the operation uses: its input, and the first byte of its output, whose length only the hub
    /// knows.
    fn memory(&self) -> impl Iterator<Item = (u64, u64)> {
        let input = self.input.map(|(at, length)| (at, at + length));
        let output = (self.output != 0).then_some((self.output, self.output + 1));
        let ranges = input.into_iter().chain(output);
        ranges.map(|(begin, end)| (begin as u64, end as u64))
    }
}

/// Copies out of device memory.
pub(super) fn read(at: usize, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    if length > 0 {
        check(at, length);
        // SAFETY: these bytes are live memory of a device (`check`), which is the host's here, and `bytes`
        // is as long. The caller of NCCL leaves its buffers to the operation until that has ended.
        unsafe { std::ptr::copy_nonoverlapping(at as *const u8, bytes.as_mut_ptr(), length) };
    }
    bytes
}

fn write(at: usize, bytes: &[u8]) {
    if !bytes.is_empty() {
        check(at, bytes.len());
        // SAFETY: these bytes are live memory of a device (`check`), which is the host's here. The caller
        // of NCCL leaves its output to the operation until that has ended, and the hub's answer is no copy
        // of it in this process.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at as *mut u8, bytes.len()) };
    }
}

/// Runs a kernel and reports it to the profiler.
fn run(comm: &Comm, items: &[Item], tasks: &[Event], outcome: Outcome) {
    let kernels = match comm.profiled() {
        Some(profiled) if !comm.stopped.load(Ordering::Acquire) => profiled.device_starts(tasks),
        _ => Vec::new(),
    };
    if carry_out(comm, items, outcome) {
        profiler::device_stops(&kernels);
    }
}

/// Runs the items of a kernel; returns whether all of them completed. All items are issued before one is waited for, as
/// within `ncclGroupStart/End`.
fn carry_out(comm: &Comm, items: &[Item], outcome: Outcome) -> bool {
    match outcome {
        Outcome::Hangs => {
            comm.hang();
            return false;
        }
        Outcome::FailsCommunicator => {
            comm.record_error(REMOTE_ERROR, "requested by RCOMM_SIM");
            comm.hang();
            return false;
        }
        Outcome::Runs | Outcome::IsNotLaunched | Outcome::NeverConnects => {}
    }
    if comm.stopped.load(Ordering::Acquire) {
        return false;
    }
    let mut requests = Vec::with_capacity(items.len());
    for item in items {
        let mut request = item.request;
        request.factor = item.factor.read();
        request.id = comm.next_id();
        if !matches!(request.kind, RequestKind::Send | RequestKind::Recv) {
            request.seq = comm.collectives.fetch_add(1, Ordering::AcqRel);
        }
        let payload = item
            .input
            .map_or_else(Vec::new, |(at, length)| read(at, length));
        comm.ask(&request, &payload);
        requests.push((request.id, item.output));
    }
    for (id, output) in requests {
        match comm.answer(id, WaitsFor::Device) {
            Ok(bytes) => write(output, &bytes),
            Err(_) => return false,
        }
    }
    true
}

/// Operations of one communicator that run as one kernel on a stream.
struct Kernel {
    comm: Arc<Comm>,
    stream: Arc<Stream>,
    items: Vec<Item>,
}

/// One operation, to be launched on a stream.
pub(super) struct Launch {
    pub(super) comm: Arc<Comm>,
    pub(super) stream: Arc<Stream>,
    pub(super) item: Item,
}

/// What a thread's group of calls holds until it ends.
#[derive(Default)]
struct Group {
    depth: usize,
    launches: Vec<Launch>,
    /// Calls other than operations that run when the group ends, such as joining and freeing a communicator.
    jobs: Vec<Box<dyn FnOnce() -> c_int + Send>>,
    /// Status of the first call in it that was refused; `SUCCESS` if none was.
    error: c_int,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

/// Whether the thread has a group open.
pub(super) fn is_in_group() -> bool {
    GROUP.with_borrow(|group| group.depth > 0)
}

/// Leaves a group open on this thread, as a call that returns early does (`ncclCommDestroy`, init.cc:2901:
/// `ncclCommEnsureReady` fails between `ncclGroupStartInternal` and `ncclGroupEndInternal`).
pub(super) fn leak_depth() {
    GROUP.with_borrow_mut(|group| group.depth += 1);
}

/// Runs `job` now, or when the thread's group ends (`ncclAsyncLaunch`, group.cc:35).
pub(super) fn run_or_defer(job: impl FnOnce() -> c_int + Send + 'static) -> c_int {
    if !is_in_group() {
        return job();
    }
    GROUP.with_borrow_mut(|group| group.jobs.push(Box::new(job)));
    SUCCESS
}

/// Notes that a call of the thread's group was refused: nothing of the group is launched then (`ncclGroupError`,
/// group.cc:790).
pub(super) fn note_refused(status: c_int) {
    GROUP.with_borrow_mut(|group| {
        if group.depth > 0 && group.error == SUCCESS {
            group.error = status;
        }
    });
}

/// Launches an operation now, or when the thread's group ends.
pub(super) fn enqueue(mut operation: Launch) -> c_int {
    if !trouble::next_call_is_accepted() {
        let status = fail(UNHANDLED_CUDA_ERROR, "Cuda failure 999 'unknown error'");
        note_refused(status);
        return operation.comm.refuse(status);
    }
    let Launch { comm, stream, item } = &mut operation;
    if let Some(profiled) = comm.profiled() {
        item.parts = profiled.call(comm, &item.request, stream.capture().is_some());
    }
    if is_in_group() {
        GROUP.with_borrow_mut(|group| group.launches.push(operation));
        return SUCCESS;
    }
    let status = launch(vec![operation]);
    profiler::group_ends();
    status
}

/// Launches operations as kernels: here, or on a thread if their communicators do not block.
fn launch(launches: Vec<Launch>) -> c_int {
    // Each communicator and stream gets one kernel, in order of first use.
    let mut kernels: Vec<Kernel> = Vec::new();
    for Launch { comm, stream, item } in launches {
        let takes_item = |kernel: &&mut Kernel| {
            Arc::ptr_eq(&kernel.comm, &comm) && Arc::ptr_eq(&kernel.stream, &stream)
        };
        match kernels.iter_mut().find(takes_item) {
            Some(kernel) => kernel.items.push(item),
            None => kernels.push(Kernel {
                comm,
                stream,
                items: vec![item],
            }),
        }
    }
    let mut comms: Vec<Arc<Comm>> = Vec::new();
    for kernel in &kernels {
        if !comms.iter().any(|comm| Arc::ptr_eq(comm, &kernel.comm)) {
            comms.push(Arc::clone(&kernel.comm));
        }
    }
    let Some(is_blocking) = comms.first().map(|comm| comm.is_blocking) else {
        return SUCCESS;
    };
    // A communicator of one rank launches no kernel, but a copy on the stream (`ncclLaunchOneRank`,
    // enqueue.cc).
    if comms.iter().all(|comm| comm.size == 1) {
        return launch_all(kernels);
    }
    let jobs: Vec<_> = comms.iter().map(Comm::begin_job).collect();
    if is_blocking {
        let status = launch_all(kernels);
        drop(jobs);
        return status;
    }
    // Each call of a communicator that does not block starts a thread, which launches (`ncclGroupEndInternal`,
    // group.cc:825 to 854, since 2.23); the communicator is in progress until then.
    for comm in &comms {
        comm.set_state(IN_PROGRESS);
    }
    let delay = Duration::from_millis(trouble::setting("launch_delay_ms").unwrap_or(0));
    run_or_spawn(false, move || {
        std::thread::sleep(delay);
        let status = launch_all(kernels);
        for comm in &comms {
            comm.set_state(status);
        }
        drop(jobs);
        status
    })
}

/// Launches kernels. Launches none if the driver refuses one, or one never connects.
fn launch_all(kernels: Vec<Kernel>) -> c_int {
    let mut outcomes = Vec::with_capacity(kernels.len());
    for kernel in &kernels {
        let is_message = |item: &Item| item.request.kind.is_made_of_messages();
        if kernel.comm.has_simulated_messages.load(Ordering::Acquire)
            && kernel.items.iter().any(is_message)
        {
            end_process("a message after a simulated one, whose connection was never made");
        }
        let outcome = trouble::next_operation();
        if outcome == Outcome::IsNotLaunched {
            return fail(UNHANDLED_CUDA_ERROR, "Cuda failure 999 'unknown error'");
        }
        if outcome == Outcome::NeverConnects {
            // This waits as for a peer that does not answer, until the communicator is stopped (sockets check the abort
            // flag, and return `ncclInternalError`: `socketProgressOpt`, misc/socket.cc).
            kernel.comm.hang();
            return fail(INTERNAL_ERROR, "the communicator was aborted");
        }
        outcomes.push(outcome);
    }
    for (kernel, outcome) in kernels.into_iter().zip(outcomes) {
        kernel.launch(outcome);
    }
    SUCCESS
}

impl Kernel {
    fn launch(self, outcome: Outcome) {
        let Self {
            comm,
            stream,
            items,
        } = self;
        // What is captured runs when its graph does, and stays as long as the graph: the library counts it
        // (`localPersistentRefs`, enqueue.cc:1731).
        let parts: Vec<Part> = items.iter().flat_map(|item| item.parts.clone()).collect();
        let tasks = move |comm: &Comm| match comm.profiled() {
            Some(profiled) => profiled.launch(&parts),
            None => Vec::new(),
        };
        if stream.capture().is_some() {
            let captured = Captured::of(&comm);
            stream.push(Arc::new(move || {
                let _captured = &captured;
                // The plan of a graph reports its tasks each time that it runs.
                run(&comm, &items, &tasks(&comm), outcome);
            }));
            return;
        }
        comm.pending.fetch_add(1, Ordering::AcqRel);
        let memory: Vec<(u64, u64)> = items.iter().flat_map(Item::memory).collect();
        comm.take_memory(&memory);
        let tasks = tasks(&comm);
        let place = Place::next(&comm);
        stream.push(Arc::new(move || {
            let room = place.start(&comm);
            run(&comm, &items, &tasks, outcome);
            drop(room);
            comm.give_back(&memory);
            comm.pending.fetch_sub(1, Ordering::AcqRel);
        }));
    }
}

/// `ncclSimInfo_t`.
#[repr(C)]
pub struct SimInfo {
    size: usize,
    magic: c_uint,
    version: c_uint,
    estimated_time: f32,
}

/// Simulates the end of a group whose communicators block. The connections that its collectives need are really made.
/// Each kernel's estimate overwrites the previous one (`topoGetAlgoInfo`, enqueue.cc:2067).
fn simulate(launches: &[Launch], info: &mut SimInfo) -> c_int {
    for Launch { comm, item, .. } in launches {
        let bytes = item.request.length;
        if item.request.kind.is_made_of_messages() {
            // The peers count as connected from now on, and are not (`p2pTaskAppend`, enqueue.cc:2669); the messages
            // stay in their queues.
            comm.has_simulated_messages.store(true, Ordering::Release);
        } else if bytes > 0 {
            if trouble::next_operation() == Outcome::NeverConnects {
                comm.hang();
                return fail(INTERNAL_ERROR, "the communicator was aborted");
            }
            // There is no estimate for kernels that use windows (`ncclMakeSymmetricTaskList`, enqueue.cc:402).
            if trouble::setting("no_estimate").is_none() {
                info.estimated_time = 10.0 + bytes as f32 / 20e3;
            }
        }
    }
    SUCCESS
}

/// `ncclGroupSimulateEnd`, group.cc:117, and `ncclGroupEndInternal`, 766.
///
/// A communicator that does not block launches the calls for real, on its thread, and nothing is estimated
/// (`groupLaunchNonBlocking`, 762). The copy of a communicator of one rank is made for real as well
/// (`ncclLaunchOneRank`, enqueue.cc:3040).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGroupSimulateEnd(info: *mut SimInfo) -> c_int {
    // SAFETY: the caller's pointer is null or to a structure that no other code uses during this call.
    let info = unsafe { info.as_mut() };
    let simulated = GROUP.with_borrow_mut(|group| {
        let is_launched = |launch: &Launch| !launch.comm.is_blocking || launch.comm.size == 1;
        let is_simulated = group.depth == 1 && group.error == SUCCESS && group.jobs.is_empty();
        if !is_simulated || group.launches.iter().any(is_launched) {
            return None;
        }
        group.depth = 0;
        Some(std::mem::take(&mut group.launches))
    });
    let Some(launches) = simulated else {
        return end_group();
    };
    profiler::group_ends();
    match info {
        Some(info) if info.magic == 0x7468_5283 && info.size >= size_of::<SimInfo>() => {
            simulate(&launches, info)
        }
        _ => fail(
            INVALID_ARGUMENT,
            "ncclSimInfo_t argument not initialized via NCCL_SIM_INFO_INITIALIZER",
        ),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGroupStart() -> c_int {
    GROUP.with_borrow_mut(|group| group.depth += 1);
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGroupEnd() -> c_int {
    end_group()
}

/// Ends the thread's group. Exported functions do not call each other, since tests take single names out of copies of
/// this library.
fn end_group() -> c_int {
    let ended = GROUP.with_borrow_mut(|group| match group.depth {
        0 => None,
        1 => Some(std::mem::take(group)),
        _ => {
            group.depth -= 1;
            Some(Group::default())
        }
    });
    let Some(group) = ended else {
        return fail(INVALID_USAGE, "ncclGroupEnd: not in a group call.");
    };
    if group.error != SUCCESS {
        // All calls of the group are dropped (`groupCleanup`, group.cc:883).
        for launch in &group.launches {
            launch.comm.refuse(group.error);
        }
        profiler::group_ends();
        return group.error;
    }
    // All jobs run at once (`asyncJobLaunch`, group.cc).
    let statuses = std::thread::scope(|scope| {
        let jobs: Vec<_> = group.jobs.into_iter().map(|job| scope.spawn(job)).collect();
        let statuses = jobs
            .into_iter()
            .map(|job| job.join().unwrap_or(INTERNAL_ERROR));
        statuses.collect::<Vec<c_int>>()
    });
    let launched = launch(group.launches);
    if !is_in_group() {
        profiler::group_ends();
    }
    let bad = statuses.into_iter().find(|&status| status != SUCCESS);
    bad.unwrap_or(launched)
}
