//! The symbols of `libnccl.so.2`. Contracts are those of `nccl.h` 2.30.7.

use crate::cuda;
use crate::hub;
use crate::number::size_of_type;
use crate::stream::{Stream, lock};
use crate::trouble::{self, Fate};
use crate::wire::{Ask, FAILED, Reply, Request};
use std::cell::RefCell;
use std::collections::HashMap;
use std::ffi::{CString, c_char, c_int, c_void};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

const SUCCESS: c_int = 0;
const SYSTEM_ERROR: c_int = 2;
const INVALID_ARGUMENT: c_int = 4;
const INVALID_USAGE: c_int = 5;
const REMOTE_ERROR: c_int = 6;
const IN_PROGRESS: c_int = 7;

/// First value of a reduction that was made at run time (`ncclNumOps`).
const FIRST_USER_OP: c_int = 5;

/// `ncclUniqueId`: the name of the hub's socket.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct UniqueId {
    internal: [u8; 128],
}

impl UniqueId {
    fn name(&self) -> &[u8] {
        let end = self
            .internal
            .iter()
            .position(|&byte| byte == 0)
            .unwrap_or(self.internal.len());
        &self.internal[..end]
    }
}

/// The head of `ncclConfig_t`.
#[repr(C)]
pub struct ConfigHead {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
}

#[derive(Default)]
struct Replies {
    arrived: HashMap<u64, Reply>,
    lost: bool,
}

/// One rank's end of a communicator.
struct Comm {
    hub: Vec<u8>,
    rank: AtomicI32,
    size: AtomicI32,
    device: c_int,
    writer: Mutex<Option<UnixStream>>,
    replies: Mutex<Replies>,
    arrived: Condvar,
    /// What `ncclCommGetAsyncError` says.
    state: AtomicI32,
    aborted: AtomicBool,
    /// Nothing is expected of the others any more.
    finalized: AtomicBool,
    collectives: AtomicU64,
    ids: AtomicU64,
    pending: AtomicUsize,
    factors: Mutex<Vec<f64>>,
}

static LAST_ERROR: Mutex<Option<CString>> = Mutex::new(None);

fn fail(status: c_int, text: &str) -> c_int {
    *lock(&LAST_ERROR) = CString::new(text.replace('\0', " ")).ok();
    status
}

impl Comm {
    fn new(hub: &[u8], rank: c_int, size: c_int) -> Arc<Self> {
        Arc::new(Self {
            hub: hub.to_vec(),
            rank: AtomicI32::new(rank),
            size: AtomicI32::new(size),
            device: cuda::current_device(),
            writer: Mutex::new(None),
            replies: Mutex::default(),
            arrived: Condvar::new(),
            state: AtomicI32::new(IN_PROGRESS),
            aborted: AtomicBool::new(false),
            finalized: AtomicBool::new(false),
            collectives: AtomicU64::new(0),
            ids: AtomicU64::new(0),
            pending: AtomicUsize::new(0),
            factors: Mutex::default(),
        })
    }

    /// Connects and waits for all ranks.
    fn join(self: &Arc<Self>, key: u64) -> c_int {
        if let Some(delay) = trouble::order("init_delay_ms") {
            std::thread::sleep(Duration::from_millis(delay));
        }
        let connected =
            hub::address(&self.hub).and_then(|address| UnixStream::connect_addr(&address));
        let halves = connected.and_then(|stream| Ok((stream.try_clone()?, stream)));
        let (reader, writer) = match halves {
            Ok(halves) => halves,
            Err(error) => return self.settle(fail(SYSTEM_ERROR, &format!("bootstrap: {error}"))),
        };
        *lock(&self.writer) = Some(writer);
        let comm = Arc::clone(self);
        let listening = std::thread::Builder::new()
            .name("sim/comm".into())
            .spawn(move || comm.listen(reader));
        if let Err(error) = listening {
            return self.settle(fail(SYSTEM_ERROR, &format!("bootstrap: {error}")));
        }
        let mut request = Request::new(Ask::Join, self.next_id(), key);
        request.rank = self.rank.load(Ordering::Relaxed);
        request.op = self.size.load(Ordering::Relaxed);
        request.data_type = self.device;
        let status = match self.ask(&request, &[]) {
            true => self
                .answer(request.id)
                .map_or_else(|status| status, |_| SUCCESS),
            false => fail(REMOTE_ERROR, "the bootstrap root is gone"),
        };
        self.settle(status)
    }

    fn settle(&self, status: c_int) -> c_int {
        self.state.store(status, Ordering::Release);
        status
    }

    fn listen(&self, mut from: UnixStream) {
        loop {
            let reply = Reply::receive(&mut from);
            let mut replies = lock(&self.replies);
            match reply {
                Ok(reply) if reply.id == FAILED => {
                    self.end(reply.status, &String::from_utf8_lossy(&reply.payload));
                }
                Ok(reply) => {
                    replies.arrived.insert(reply.id, reply);
                }
                Err(_) => {
                    replies.lost = true;
                    if !self.aborted.load(Ordering::Acquire) {
                        self.end(REMOTE_ERROR, "the connection to the other ranks broke");
                    }
                }
            }
            let lost = replies.lost;
            drop(replies);
            self.arrived.notify_all();
            if lost {
                return;
            }
        }
    }

    /// An asynchronous error: seen by `ncclCommGetAsyncError`, and kernels do not end by themselves.
    fn end(&self, status: c_int, text: &str) {
        if self.finalized.load(Ordering::Acquire) {
            return;
        }
        // An error before it is one too, and came first.
        let _ = self.state.compare_exchange(
            SUCCESS,
            fail(status, text),
            Ordering::AcqRel,
            Ordering::Acquire,
        );
    }

    fn next_id(&self) -> u64 {
        self.ids.fetch_add(1, Ordering::Relaxed)
    }

    fn ask(&self, request: &Request, payload: &[u8]) -> bool {
        lock(&self.writer)
            .as_mut()
            .is_some_and(|writer| request.send(writer, payload).is_ok())
    }

    /// Waits for an answer: until it comes, or the communicator is aborted.
    fn answer(&self, id: u64) -> Result<Vec<u8>, c_int> {
        let mut replies = lock(&self.replies);
        loop {
            if let Some(reply) = replies.arrived.remove(&id) {
                if reply.status != SUCCESS {
                    return Err(fail(reply.status, &String::from_utf8_lossy(&reply.payload)));
                }
                return Ok(reply.payload);
            }
            if self.aborted.load(Ordering::Acquire) {
                return Err(REMOTE_ERROR);
            }
            if replies.lost && self.state.load(Ordering::Acquire) == IN_PROGRESS {
                return Err(fail(REMOTE_ERROR, "the bootstrap root is gone"));
            }
            replies = self
                .arrived
                .wait(replies)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn abort(&self) {
        self.aborted.store(true, Ordering::Release);
        if let Some(writer) = lock(&self.writer).take() {
            let _ = writer.shutdown(std::net::Shutdown::Both);
        }
        let _replies = lock(&self.replies);
        self.arrived.notify_all();
    }

    fn hang(&self) {
        let mut replies = lock(&self.replies);
        while !self.aborted.load(Ordering::Acquire) {
            replies = self
                .arrived
                .wait(replies)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// One operation of a group of calls.
#[derive(Clone)]
struct Item {
    request: Request,
    input: Option<(usize, usize)>,
    output: usize,
}

/// Copies out of, and into, what the test calls device memory.
fn read(at: usize, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    if length > 0 {
        // SAFETY: the caller of NCCL vouches for its buffers until the operation ends, as with the
        // real library; device memory is host memory here.
        unsafe { std::ptr::copy_nonoverlapping(at as *const u8, bytes.as_mut_ptr(), length) };
    }
    bytes
}

fn write(at: usize, bytes: &[u8]) {
    if !bytes.is_empty() {
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
        Fate::Runs => {}
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
        match comm.answer(id) {
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

struct Launch {
    comm: Arc<Comm>,
    stream: Arc<Stream>,
    item: Item,
}

thread_local! {
    static GROUP: RefCell<(usize, Vec<Launch>)> = const { RefCell::new((0, Vec::new())) };
}

fn launch(launches: Vec<Launch>) {
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
    for kernel in kernels {
        let fate = trouble::next_operation();
        let Kernel {
            comm,
            stream,
            items,
        } = kernel;
        comm.pending.fetch_add(1, Ordering::AcqRel);
        stream.push(Arc::new(move || {
            run(&comm, &items, fate);
            // A graph runs this more than once.
            let pending = &comm.pending;
            let _ = pending.fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| n.checked_sub(1));
        }));
    }
}

fn comm_of(handle: *mut c_void) -> Option<Arc<Comm>> {
    if handle.is_null() {
        return None;
    }
    // SAFETY: a handle that is not null is one of ours, from `Arc::into_raw`, not yet destroyed.
    unsafe {
        Arc::increment_strong_count(handle.cast::<Comm>());
        Some(Arc::from_raw(handle.cast::<Comm>()))
    }
}

struct Call {
    ask: Ask,
    send: *const c_void,
    receive: *mut c_void,
    /// Elements of the input; 0 where this rank brings none.
    input: usize,
    /// Bytes that all inputs have, for the hub's comparison, in elements.
    length: usize,
    data_type: c_int,
    op: c_int,
    rank: c_int,
}

fn enqueue(call: &Call, handle: *mut c_void, stream: *mut c_void) -> c_int {
    let Some(comm) = comm_of(handle) else {
        return fail(INVALID_ARGUMENT, "comm argument is NULL");
    };
    let state = comm.state.load(Ordering::Acquire);
    if state != SUCCESS {
        return fail(
            if state == IN_PROGRESS {
                INVALID_USAGE
            } else {
                state
            },
            "the communicator is not ready",
        );
    }
    let Some(size) = size_of_type(call.data_type) else {
        return fail(
            INVALID_ARGUMENT,
            &format!("invalid type {}", call.data_type),
        );
    };
    let ranks = comm.size.load(Ordering::Relaxed);
    if call.rank < 0 || call.rank >= ranks {
        return fail(
            INVALID_ARGUMENT,
            &format!("invalid root or peer {} of {ranks}", call.rank),
        );
    }
    let factor = if call.op >= FIRST_USER_OP {
        let at = usize::try_from(call.op - FIRST_USER_OP).unwrap_or(usize::MAX);
        match lock(&comm.factors).get(at) {
            Some(factor) => *factor,
            None => {
                return fail(
                    INVALID_ARGUMENT,
                    &format!("invalid reduction operation {}", call.op),
                );
            }
        }
    } else {
        1.0
    };
    let mut request = Request::new(call.ask, 0, 0);
    request.rank = call.rank;
    request.data_type = call.data_type;
    request.op = if call.op >= FIRST_USER_OP { 0 } else { call.op };
    request.factor = factor;
    request.length = (call.length * size) as u64;
    let input = (call.input > 0).then_some((call.send as usize, call.input * size));
    let item = Item {
        request,
        input,
        output: call.receive as usize,
    };
    let launch_one = Launch {
        comm,
        stream: cuda::stream_of(stream),
        item,
    };
    GROUP.with_borrow_mut(|(depth, waiting)| {
        if *depth > 0 {
            waiting.push(launch_one);
        } else {
            launch(vec![launch_one]);
        }
    });
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetVersion(version: *mut c_int) -> c_int {
    let code = trouble::order("version")
        .and_then(|code| c_int::try_from(code).ok())
        .unwrap_or(23_007);
    // SAFETY: the caller passes a valid pointer.
    unsafe { *version = code };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetUniqueId(id: *mut UniqueId) -> c_int {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let nanos = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |d| d.as_nanos());
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let name = format!("rcomm-sim-{}-{nanos:x}-{number}", std::process::id());
    if let Err(error) = hub::start(name.as_bytes()) {
        return fail(SYSTEM_ERROR, &format!("bootstrap: {error}"));
    }
    let mut internal = [0; 128];
    internal[..name.len()].copy_from_slice(name.as_bytes());
    // SAFETY: the caller passes a valid pointer.
    unsafe { *id = UniqueId { internal } };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetErrorString(status: c_int) -> *const c_char {
    let text = match status {
        0 => c"no error",
        1 => c"unhandled cuda error",
        2 => c"unhandled system error",
        3 => c"internal error",
        4 => c"invalid argument",
        5 => c"invalid usage",
        6 => c"remote process exited or there was a network error",
        7 => c"NCCL operation in progress",
        _ => c"unknown result code",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclGetLastError(_comm: *mut c_void) -> *const c_char {
    // Leaked: the real library's text lives until the next error, in any thread.
    lock(&LAST_ERROR)
        .clone()
        .map_or(c"".as_ptr(), |text| text.into_raw().cast_const())
}

/// Joins, waiting or in the background as the configuration says ("blocking", nccl.h).
unsafe fn start(
    comm: &Arc<Comm>,
    key: u64,
    out: *mut *mut c_void,
    config: *const ConfigHead,
) -> c_int {
    // SAFETY: null or the caller's configuration.
    let head = unsafe { config.as_ref() };
    if head.is_some_and(|head| {
        head.magic != 0xcafe_beef || head.size < size_of::<ConfigHead>() || head.version == 0
    }) {
        return fail(
            INVALID_ARGUMENT,
            "ncclConfig_t argument not initialized via NCCL_CONFIG_INITIALIZER",
        );
    }
    // SAFETY: the caller passes a valid pointer.
    unsafe { *out = Arc::into_raw(Arc::clone(comm)).cast_mut().cast() };
    if head.is_some_and(|head| head.blocking == 0) {
        let joining = Arc::clone(comm);
        let spawned = std::thread::Builder::new()
            .name("sim/join".into())
            .spawn(move || joining.join(key));
        return if spawned.is_ok() {
            IN_PROGRESS
        } else {
            fail(SYSTEM_ERROR, "no thread")
        };
    }
    comm.join(key)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankConfig(
    out: *mut *mut c_void,
    ranks: c_int,
    id: UniqueId,
    rank: c_int,
    config: *mut ConfigHead,
) -> c_int {
    if ranks < 1 || rank < 0 || rank >= ranks {
        return fail(
            INVALID_ARGUMENT,
            &format!("Invalid rank requested : {rank}/{ranks}"),
        );
    }
    let comm = Comm::new(id.name(), rank, ranks);
    // SAFETY: the caller passes valid pointers.
    unsafe { start(&comm, 0, out, config) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommInitRankScalable(
    out: *mut *mut c_void,
    ranks: c_int,
    rank: c_int,
    count: c_int,
    ids: *mut UniqueId,
    config: *mut ConfigHead,
) -> c_int {
    if count < 1 {
        return fail(INVALID_ARGUMENT, "nId must be at least 1");
    }
    // SAFETY: the caller passes `count` ids; the first one's hub serves all, which no rank can tell.
    let first = unsafe { *ids };
    // SAFETY: as the caller of this function.
    unsafe { ncclCommInitRankConfig(out, ranks, first, rank, config) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommFinalize(handle: *mut c_void) -> c_int {
    let Some(comm) = comm_of(handle) else {
        return fail(INVALID_ARGUMENT, "comm argument is NULL");
    };
    comm.state.store(IN_PROGRESS, Ordering::Release);
    let flush = move || {
        while comm.pending.load(Ordering::Acquire) > 0 && !comm.aborted.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(1));
        }
        comm.finalized.store(true, Ordering::Release);
        comm.state.store(SUCCESS, Ordering::Release);
    };
    match std::thread::Builder::new()
        .name("sim/finalize".into())
        .spawn(flush)
    {
        Ok(_) => IN_PROGRESS,
        Err(_) => fail(SYSTEM_ERROR, "no thread"),
    }
}

fn free(handle: *mut c_void) -> c_int {
    let Some(comm) = comm_of(handle) else {
        return SUCCESS;
    };
    comm.abort();
    // SAFETY: the handle's own count, from `start`; the caller does not use the handle again.
    drop(unsafe { Arc::from_raw(handle.cast::<Comm>()) });
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommDestroy(handle: *mut c_void) -> c_int {
    if let Some(comm) = comm_of(handle) {
        // Whoever is finalized goes without harm to the others.
        comm.ask(&Request::new(Ask::Leave, 0, 0), &[]);
    }
    free(handle)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommAbort(handle: *mut c_void) -> c_int {
    free(handle)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclCommGetAsyncError(handle: *mut c_void, state: *mut c_int) -> c_int {
    let Some(comm) = comm_of(handle) else {
        return fail(INVALID_ARGUMENT, "comm argument is NULL");
    };
    // SAFETY: the caller passes a valid pointer.
    unsafe { *state = comm.state.load(Ordering::Acquire) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclRedOpCreatePreMulSum(
    op: *mut c_int,
    scalar: *mut c_void,
    data_type: c_int,
    _residence: c_int,
    handle: *mut c_void,
) -> c_int {
    let Some(comm) = comm_of(handle) else {
        return fail(INVALID_ARGUMENT, "comm argument is NULL");
    };
    let Some(size) = size_of_type(data_type) else {
        return fail(INVALID_ARGUMENT, "invalid type");
    };
    let bytes = read(scalar as usize, size);
    let factor = match (data_type, bytes.as_slice()) {
        (6, &[a, b]) => rcomm::f16::from_le_bytes([a, b]).to_f64(),
        (9, &[a, b]) => rcomm::bf16::from_le_bytes([a, b]).to_f64(),
        (7, &[a, b, c, d]) => f64::from(f32::from_le_bytes([a, b, c, d])),
        (8, bytes) => f64::from_le_bytes(bytes.try_into().expect("eight bytes")),
        _ => return fail(INVALID_ARGUMENT, "PreMulSum wants a floating point type"),
    };
    let mut factors = lock(&comm.factors);
    factors.push(factor);
    // SAFETY: the caller passes a valid pointer.
    unsafe { *op = FIRST_USER_OP + c_int::try_from(factors.len() - 1).unwrap_or(c_int::MAX) };
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclRedOpDestroy(op: c_int, _handle: *mut c_void) -> c_int {
    if op < FIRST_USER_OP {
        fail(INVALID_ARGUMENT, "a built-in reduction cannot be destroyed")
    } else {
        SUCCESS
    }
}

fn ranks_of(handle: *mut c_void) -> usize {
    comm_of(handle).map_or(1, |comm| {
        usize::try_from(comm.size.load(Ordering::Relaxed)).unwrap_or(1)
    })
}

fn is_rank(handle: *mut c_void, rank: c_int) -> bool {
    comm_of(handle).is_some_and(|comm| comm.rank.load(Ordering::Relaxed) == rank)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllReduce(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    data_type: c_int,
    op: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    enqueue(
        &Call {
            ask: Ask::AllReduce,
            send,
            receive,
            input: count,
            length: count,
            data_type,
            op,
            rank: 0,
        },
        comm,
        stream,
    )
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclReduce(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    data_type: c_int,
    op: c_int,
    root: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    enqueue(
        &Call {
            ask: Ask::Reduce,
            send,
            receive,
            input: count,
            length: count,
            data_type,
            op,
            rank: root,
        },
        comm,
        stream,
    )
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclBroadcast(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    data_type: c_int,
    root: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    let input = if is_rank(comm, root) { count } else { 0 };
    enqueue(
        &Call {
            ask: Ask::Broadcast,
            send,
            receive,
            input,
            length: count,
            data_type,
            op: 0,
            rank: root,
        },
        comm,
        stream,
    )
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAllGather(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    data_type: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    enqueue(
        &Call {
            ask: Ask::AllGather,
            send,
            receive,
            input: count,
            length: count,
            data_type,
            op: 0,
            rank: 0,
        },
        comm,
        stream,
    )
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclReduceScatter(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    data_type: c_int,
    op: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    let all = count * ranks_of(comm);
    enqueue(
        &Call {
            ask: Ask::ReduceScatter,
            send,
            receive,
            input: all,
            length: all,
            data_type,
            op,
            rank: 0,
        },
        comm,
        stream,
    )
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn ncclAlltoAll(
    send: *const c_void,
    receive: *mut c_void,
    count: usize,
    data_type: c_int,
    comm: *mut c_void,
    stream: *mut c_void,
) -> c_int {
    let all = count * ranks_of(comm);
    enqueue(
        &Call {
            ask: Ask::AllToAll,
            send,
            receive,
            input: all,
            length: all,
            data_type,
            op: 0,
            rank: 0,
        },
        comm,
        stream,
    )
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
    enqueue(
        &Call {
            ask: Ask::Send,
            send,
            receive: std::ptr::null_mut(),
            input: count,
            length: count,
            data_type,
            op: 0,
            rank: peer,
        },
        comm,
        stream,
    )
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
    enqueue(
        &Call {
            ask: Ask::Recv,
            send: std::ptr::null(),
            receive,
            input: 0,
            length: count,
            data_type,
            op: 0,
            rank: peer,
        },
        comm,
        stream,
    )
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
        Some(launches) => {
            launch(launches);
            SUCCESS
        }
        None => fail(INVALID_USAGE, "ncclGroupEnd: not in a group call."),
    }
}
