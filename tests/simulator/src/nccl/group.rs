//! Operations on their way to a stream: `ncclGroupStart` and `ncclGroupEnd`, and what runs there.
//!
//! As in group.cc (`ncclGroupStart`, 97; `ncclGroupEndInternal`, 766; `doLaunches`, 309): groups belong to the thread that opened them and nest; nothing is launched before the
//! outermost ends; what a group holds for one communicator runs as one kernel, so that sends and receives
//! do not wait for each other.

use super::comm::{Comm, WaitsFor};
use super::lifecycle::run_or_spawn;
use super::{
    IN_PROGRESS, INTERNAL_ERROR, INVALID_USAGE, REMOTE_ERROR, SUCCESS, UNHANDLED_CUDA_ERROR, fail,
};
use crate::cuda::memory::check;
use crate::stream::Stream;
use crate::trouble::{self, Fate};
use crate::wire::{Ask, Request};
use std::cell::RefCell;
use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// One operation of a group of calls.
#[derive(Clone)]
pub(super) struct Item {
    pub(super) request: Request,
    pub(super) input: Option<(usize, usize)>,
    pub(super) output: usize,
}

/// Copies out of device memory.
fn read(at: usize, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    if length > 0 {
        check(at, length);
        // SAFETY: the caller of NCCL vouches for its buffers until the operation ends, as with the
        // real library; device memory is host memory here.
        unsafe { std::ptr::copy_nonoverlapping(at as *const u8, bytes.as_mut_ptr(), length) };
    }
    bytes
}

fn write(at: usize, bytes: &[u8]) {
    if !bytes.is_empty() {
        check(at, bytes.len());
        // SAFETY: as for `read`; the reply has the length of the caller's output.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at as *mut u8, bytes.len()) };
    }
}

/// The kernel: all items are under way before one is waited for, as within `ncclGroupStart/End`.
fn run(comm: &Comm, items: &[Item], fate: Fate) {
    match fate {
        Fate::Hangs => return comm.hang(),
        Fate::EndsCommunicator => {
            comm.end(REMOTE_ERROR, "ordered by RCOMM_SIM");
            return comm.hang();
        }
        Fate::Runs | Fate::IsNotLaunched => {}
    }
    if comm.stopped.load(Ordering::Acquire) {
        return;
    }
    let mut asked = Vec::with_capacity(items.len());
    for item in items {
        let mut request = item.request;
        request.id = comm.next_id();
        if !matches!(request.ask, Ask::Send | Ask::Recv) {
            request.seq = comm.collectives.fetch_add(1, Ordering::AcqRel);
        }
        let payload = item
            .input
            .map_or_else(Vec::new, |(at, length)| read(at, length));
        comm.ask(&request, &payload);
        asked.push((request.id, item.output));
    }
    for (id, output) in asked {
        match comm.answer(id, WaitsFor::Device) {
            Ok(bytes) => write(output, &bytes),
            Err(_) => return,
        }
    }
}

/// What runs as one on a stream.
struct Kernel {
    comm: Arc<Comm>,
    stream: Arc<Stream>,
    items: Vec<Item>,
}

pub(super) struct Launch {
    pub(super) comm: Arc<Comm>,
    pub(super) stream: Arc<Stream>,
    pub(super) item: Item,
}

thread_local! {
    static GROUP: RefCell<(usize, Vec<Launch>)> = const { RefCell::new((0, Vec::new())) };
}

/// Whether the thread has a group open.
pub(super) fn is_in_group() -> bool {
    GROUP.with_borrow(|(depth, _)| *depth > 0)
}

/// Launches now, or when the thread's group ends.
///
/// nccl.h does not say what becomes of a group of which one call is refused. Its sources forget the others
/// (`groupCleanup`, group.cc); here they are launched.
pub(super) fn enqueue(launch_one: Launch) -> c_int {
    if !trouble::next_call_is_taken() {
        return fail(UNHANDLED_CUDA_ERROR, "Cuda failure 999 'unknown error'");
    }
    GROUP.with_borrow_mut(|(depth, waiting)| {
        if *depth > 0 {
            waiting.push(launch_one);
            SUCCESS
        } else {
            launch(vec![launch_one])
        }
    })
}

fn launch(launches: Vec<Launch>) -> c_int {
    // One kernel for each communicator and stream, in order of first use.
    let mut kernels: Vec<Kernel> = Vec::new();
    for Launch { comm, stream, item } in launches {
        let same = |kernel: &&mut Kernel| {
            Arc::ptr_eq(&kernel.comm, &comm) && Arc::ptr_eq(&kernel.stream, &stream)
        };
        match kernels.iter_mut().find(same) {
            Some(kernel) => kernel.items.push(item),
            None => kernels.push(Kernel {
                comm,
                stream,
                items: vec![item],
            }),
        }
    }
    let mut status = SUCCESS;
    for kernel in kernels {
        let fate = trouble::next_operation();
        if fate == Fate::IsNotLaunched {
            return fail(UNHANDLED_CUDA_ERROR, "Cuda failure 999 'unknown error'");
        }
        if trouble::order("connect_hangs").is_some() {
            status = connect_in_vain(&kernel.comm);
            continue;
        }
        match trouble::order("launch_delay_ms") {
            Some(delay) if !kernel.comm.is_blocking => {
                status = launch_later(kernel, fate, Duration::from_millis(delay));
            }
            _ => kernel.launch(fate),
        }
    }
    status
}

/// As where a peer does not answer: the call does not return, or the communicator is in progress, until that
/// is aborted (sockets look at the abort flag, and give `ncclInternalError`: `socketProgressOpt`, misc/socket.cc).
fn connect_in_vain(comm: &Arc<Comm>) -> c_int {
    comm.state.store(IN_PROGRESS, Ordering::Release);
    let (job, comm) = (comm.begin_job(), Arc::clone(comm));
    run_or_spawn(comm.is_blocking, move || {
        comm.hang();
        let status = comm.settle(fail(INTERNAL_ERROR, "the communicator was aborted"));
        drop(job);
        status
    })
}

/// As where the library has to connect to peers first: a communicator that does not block is in progress
/// until then (`groupLaunchNonBlocking`, group.cc:762 and 857).
fn launch_later(kernel: Kernel, fate: Fate, delay: Duration) -> c_int {
    let comm = Arc::clone(&kernel.comm);
    comm.state.store(IN_PROGRESS, Ordering::Release);
    let job = comm.begin_job();
    run_or_spawn(comm.is_blocking, move || {
        std::thread::sleep(delay);
        kernel.launch(fate);
        let status = comm.settle(SUCCESS);
        drop(job);
        status
    })
}

impl Kernel {
    fn launch(self, fate: Fate) {
        let Self {
            comm,
            stream,
            items,
        } = self;
        // What is captured runs when its graph does, and nobody waits for that.
        let counts = stream.capture().is_none();
        if counts {
            comm.pending.fetch_add(1, Ordering::AcqRel);
        }
        stream.push(Arc::new(move || {
            run(&comm, &items, fate);
            if counts {
                comm.pending.fetch_sub(1, Ordering::AcqRel);
            }
        }));
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGroupStart() -> c_int {
    GROUP.with_borrow_mut(|(depth, _)| *depth += 1);
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGroupEnd() -> c_int {
    let waiting = GROUP.with_borrow_mut(|(depth, waiting)| {
        if *depth == 0 {
            return None;
        }
        *depth -= 1;
        Some(if *depth == 0 {
            std::mem::take(waiting)
        } else {
            Vec::new()
        })
    });
    match waiting {
        Some(launches) => launch(launches),
        None => fail(INVALID_USAGE, "ncclGroupEnd: not in a group call."),
    }
}
