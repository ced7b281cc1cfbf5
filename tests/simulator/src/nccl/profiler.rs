//! NCCL's side of its profiler interface, version 6: the plug-in that `NCCL_PROFILER_PLUGIN` names is loaded with
//! the first communicator and sees each communicator and operation.
//!
//! As in NCCL, the mask of events is the process's (plugin/profiler.cc:219). A call's event starts and stops within the
//! call (`ncclProfilerStartGroupApiEvent`, plugin/profiler.cc:275), its task's when the plan is launched
//! (`ncclProfilerStartTaskEvents`, plugin/profiler.cc:476), and those of its channels when the device runs it
//! (`ncclProfilerStartKernelChEvent`, plugin/profiler.cc:679). All-to-all, gather and scatter are the sends and
//! receives that they consist of (`taskAppend`, enqueue.cc:3014).
//!
//! An operation has one channel here. No events of the proxy or the network are reported: all ranks are on one host.

use super::comm::Comm;
use crate::number::size_and_name_of_type;
use crate::wire::{Request, RequestKind};
use libloading::Library;
use std::cell::Cell;
use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};
use std::ptr::{null, null_mut};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::Instant;

// Kinds of events, as bits of the mask (`ncclProfileColl`, …).
const COLL: u64 = 1 << 1;
const P2P: u64 = 1 << 2;
const KERNEL_CH: u64 = 1 << 6;
const GROUP_API: u64 = 1 << 8;
const COLL_API: u64 = 1 << 9;
const P2P_API: u64 = 1 << 10;
/// `ncclProfilerKernelChStop`.
const KERNEL_CH_STOP: c_int = 22;

/// `ncclProfilerEventDescr_v6_t`.
#[repr(C)]
struct Descriptor {
    kind: u64,
    parent: *mut c_void,
    rank: c_int,
    details: Details,
}

/// The union of the descriptor: what each kind of event states.
#[repr(C)]
union Details {
    group_api: GroupApi,
    coll_api: CollApi,
    p2p_api: P2pApi,
    coll: Coll,
    p2p: P2p,
    kernel_ch: KernelCh,
    /// As many bytes as the longest member of the header's union has.
    words: [u64; 11],
}

#[repr(C)]
#[derive(Clone, Copy)]
struct GroupApi {
    graph_captured: bool,
    depth: c_int,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct CollApi {
    func: *const c_char,
    count: usize,
    datatype: *const c_char,
    root: c_int,
    stream: *mut c_void,
    graph_captured: bool,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct P2pApi {
    func: *const c_char,
    count: usize,
    datatype: *const c_char,
    stream: *mut c_void,
    graph_captured: bool,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Coll {
    seq_number: u64,
    func: *const c_char,
    send_buffer: *const c_void,
    receive_buffer: *mut c_void,
    count: usize,
    root: c_int,
    datatype: *const c_char,
    channels: u8,
    warps: u8,
    algorithm: *const c_char,
    protocol: *const c_char,
    parent_group: *mut c_void,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct P2p {
    func: *const c_char,
    buffer: *mut c_void,
    datatype: *const c_char,
    count: usize,
    peer: c_int,
    channels: u8,
    parent_group: *mut c_void,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct KernelCh {
    channel: u8,
    timer: u64,
}

type Init = unsafe extern "C" fn(
    context: *mut *mut c_void,
    comm_hash: u64,
    mask: *mut c_int,
    comm_name: *const c_char,
    nodes: c_int,
    ranks: c_int,
    rank: c_int,
    log: Option<unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, ...)>,
) -> c_int;

/// `ncclProfiler_v6_t`.
#[repr(C)]
struct Table {
    name: *const c_char,
    init: Init,
    start: unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *mut Descriptor) -> c_int,
    stop: unsafe extern "C" fn(*mut c_void) -> c_int,
    record: unsafe extern "C" fn(*mut c_void, c_int, *mut c_void) -> c_int,
    finalize: unsafe extern "C" fn(*mut c_void) -> c_int,
}

/// A plug-in that is loaded.
struct Plugin {
    table: *const Table,
    /// The library is never unloaded. NCCL unloads it with its last communicator, which no test needs.
    _library: Library,
}

// SAFETY: the table is constant and lives as long as the library, which is never unloaded; its functions may be called
// on any thread.
unsafe impl Send for Plugin {}
// SAFETY: as for `Send`.
unsafe impl Sync for Plugin {}

impl Plugin {
    fn table(&self) -> &Table {
        // SAFETY: `load` has seen that the address is not null; it is that of `ncclProfiler_v6`, which lives as long
        // as the library.
        unsafe { &*self.table }
    }
}

/// The plug-in that the environment names; `None` if it names none that can be loaded.
fn plugin() -> Option<&'static Plugin> {
    static PLUGIN: OnceLock<Option<Plugin>> = OnceLock::new();
    PLUGIN.get_or_init(load).as_ref()
}

/// Loads the plug-in by its path, or by the part of its name after `libnccl-profiler-` (plugin/plugin_open.cc).
fn load() -> Option<Plugin> {
    let named = std::env::var("NCCL_PROFILER_PLUGIN").ok()?;
    let names = [named.clone(), format!("libnccl-profiler-{named}.so")];
    // SAFETY: loading runs the initializers of a library that the environment names, as NCCL does.
    let mut opened = names
        .iter()
        .filter_map(|name| unsafe { Library::new(name) }.ok());
    let library = opened.next()?;
    // SAFETY: the symbol is taken as an address, which `table` follows while the library is loaded: for as long as the
    // process.
    let table: *const Table = unsafe {
        let symbol = library.get::<*const Table>(b"ncclProfiler_v6").ok()?;
        symbol.try_as_raw_ptr()?.cast_const().cast()
    };
    (!table.is_null()).then_some(Plugin {
        table,
        _library: library,
    })
}

/// The context that the plug-in has given to a communicator.
pub(super) struct Context {
    address: usize,
    rank: c_int,
    /// Whether the plug-in's `finalize` was called.
    finalized: AtomicBool,
}

/// The plug-in's handle of an event; 0 if it has none.
#[derive(Clone, Copy, Default)]
pub(super) struct Event(usize);

impl Event {
    fn pointer(self) -> *mut c_void {
        std::ptr::without_provenance_mut(self.0)
    }
}

/// A collective, or a message of an operation.
#[derive(Clone, Copy)]
pub(super) struct Part {
    /// The peer of a message.
    peer: Option<c_int>,
    func: &'static CStr,
    count: usize,
    datatype: &'static CStr,
    /// The root of a collective; without meaning in a message.
    root: c_int,
    /// The event of the call.
    api_event: Event,
}

thread_local! {
    /// The event of the thread's outermost group call; `None` if that was not reported. A plug-in that has no place for
    /// the event gives no handle, and is not asked again in this group.
    static GROUP: Cell<Option<Event>> = const { Cell::new(None) };
}

/// Returns NCCL's `commHash` of these parts: `eatHash` of include/bitops.h over each, then `digestHash` (init.cc).
pub(super) fn hash_of(parts: &[&[u8]]) -> u64 {
    let (mut a, mut b) = (1_u64, 1_u64);
    for part in parts {
        a ^= part.len() as u64;
        for word in part.chunks(8) {
            a = a.wrapping_add(b);
            b ^= a;
            a ^= a >> 31;
            a = a.wrapping_mul(0x9de6_2bbc_8cef_3ce3);
            b ^= b >> 32;
            b = b.wrapping_mul(0x485c_d631_1b59_9e79);
            let mut bytes = [0; 8];
            bytes[..word.len()].copy_from_slice(word);
            a = a.wrapping_add(u64::from_le_bytes(bytes));
        }
    }
    a ^= a >> 31;
    a = a.wrapping_mul(0xbac3_bd56_2846_de6b).wrapping_add(b);
    a ^= a >> 32;
    a.wrapping_mul(0x995a_187a_14e7_b445)
}

/// Reports to the plug-in a communicator that all ranks have joined, and returns the plug-in's context for it. `None`
/// if there is no plug-in, or its `init` fails.
pub(super) fn open_context(
    hash: u64,
    name: *const c_char,
    rank: c_int,
    size: c_int,
) -> Option<Context> {
    let plugin = plugin()?;
    let (mut context, mask) = (null_mut(), MASK.as_ptr());
    let nodes = 1;
    let log = None;
    // SAFETY: the context lives until the call returns, and the mask is a static; the name is null or a text that its
    // owner keeps for as long as the communicator.
    let code =
        unsafe { (plugin.table().init)(&mut context, hash, mask, name, nodes, size, rank, log) };
    (code == 0).then(|| Context {
        address: context.addr(),
        rank,
        finalized: AtomicBool::new(false),
    })
}

/// The process's mask of events (`ncclProfilerEventMask`, plugin/profiler.cc:219), which the plug-in may change at any
/// time.
static MASK: AtomicI32 = AtomicI32::new(0);

fn mask() -> u64 {
    u64::try_from(MASK.load(Ordering::Relaxed)).unwrap_or(0)
}

impl Context {
    fn start(&self, kind: u64, parent: Event, details: Details) -> Event {
        let Some(plugin) = plugin() else {
            return Event::default();
        };
        let mut handle = null_mut();
        let mut descriptor = Descriptor {
            kind,
            parent: parent.pointer(),
            rank: self.rank,
            details,
        };
        let context = std::ptr::without_provenance_mut(self.address);
        // SAFETY: handle and descriptor live until the call returns. The callers set the member of `details` that
        // belongs to `kind`, with constant texts. The context came from the plug-in.
        unsafe { (plugin.table().start)(context, &mut handle, &mut descriptor) };
        Event(handle.addr())
    }

    /// Reports a call, with the event of its group if this is the group's first call, and returns its parts.
    /// If the plug-in wants no events of groups, the call is not reported.
    pub(super) fn call(&self, comm: &Comm, request: &Request, is_captured: bool) -> Vec<Part> {
        let mut parts = parts_of(comm, request);
        if parts.is_empty() || mask() & GROUP_API == 0 {
            return parts;
        }
        if GROUP.get().is_none() {
            let mut details = Details { words: [0; 11] };
            details.group_api = GroupApi {
                graph_captured: is_captured,
                depth: 1,
            };
            GROUP.set(Some(self.start(GROUP_API, Event::default(), details)));
        }
        let group = GROUP.get().unwrap_or_default();
        for part in &mut parts {
            let mut details = Details { words: [0; 11] };
            let kind = match part.peer {
                Some(_) => {
                    details.p2p_api = P2pApi {
                        func: part.func.as_ptr(),
                        count: part.count,
                        datatype: part.datatype.as_ptr(),
                        stream: null_mut(),
                        graph_captured: is_captured,
                    };
                    P2P_API
                }
                None => {
                    details.coll_api = CollApi {
                        func: part.func.as_ptr(),
                        count: part.count,
                        datatype: part.datatype.as_ptr(),
                        root: part.root,
                        stream: null_mut(),
                        graph_captured: is_captured,
                    };
                    COLL_API
                }
            };
            if mask() & kind != 0 {
                part.api_event = self.start(kind, group, details);
                stop(part.api_event);
            }
        }
        parts
    }

    /// Reports the tasks of these parts, whose plan is launched, and returns their events, except those of messages to
    /// the rank itself: NCCL's proxy thread reports the channels, and gets no work for such a copy (`addP2pToPlan`,
    /// enqueue.cc:882).
    pub(super) fn launch(&self, parts: &[Part]) -> Vec<Event> {
        let started: Vec<Event> = parts.iter().map(|part| self.task(part)).collect();
        started.iter().for_each(|&event| stop(event));
        let is_reported = |(part, _): &(&Part, Event)| part.peer != Some(self.rank);
        let tasks = parts.iter().zip(started).filter(is_reported);
        tasks.map(|(_, event)| event).collect()
    }

    /// Starts the event of a part's task; returns no event if the plug-in wants none of this kind.
    fn task(&self, part: &Part) -> Event {
        let mut details = Details { words: [0; 11] };
        let kind = match part.peer {
            Some(peer) => {
                details.p2p = P2p {
                    func: part.func.as_ptr(),
                    buffer: null_mut(),
                    datatype: part.datatype.as_ptr(),
                    count: part.count,
                    peer,
                    channels: 1,
                    parent_group: null_mut(),
                };
                P2P
            }
            None => {
                details.coll = Coll {
                    seq_number: 0,
                    func: part.func.as_ptr(),
                    send_buffer: null(),
                    receive_buffer: null_mut(),
                    count: part.count,
                    root: part.root,
                    datatype: part.datatype.as_ptr(),
                    channels: 1,
                    warps: 16,
                    algorithm: c"RING".as_ptr(),
                    protocol: c"SIMPLE".as_ptr(),
                    parent_group: null_mut(),
                };
                COLL
            }
        };
        match mask() & kind {
            0 => Event::default(),
            _ => self.start(kind, part.api_event, details),
        }
    }

    /// Reports that the device begins these tasks; returns the events of their channels.
    pub(super) fn device_starts(&self, tasks: &[Event]) -> Vec<Event> {
        if mask() & KERNEL_CH == 0 {
            return Vec::new();
        }
        let channels = tasks.iter().map(|&task| {
            let mut details = Details { words: [0; 11] };
            details.kernel_ch = KernelCh {
                channel: 0,
                timer: device_clock(),
            };
            self.start(KERNEL_CH, task, details)
        });
        channels.collect()
    }
}

impl Context {
    /// Ends the context, as the call that frees its communicator does before it returns (`commFree`, init.cc:
    /// `ncclProfilerPluginFinalize`). All events of the communicator must have ended.
    pub(super) fn finalize(&self) {
        if self.address == 0 || self.finalized.swap(true, Ordering::AcqRel) {
            return;
        }
        if let Some(plugin) = plugin() {
            // SAFETY: the context came from this plug-in's `init`, and it is finalized once.
            unsafe { (plugin.table().finalize)(std::ptr::without_provenance_mut(self.address)) };
        }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        self.finalize();
    }
}

/// Reports that the device has ended the work of these channels.
pub(super) fn device_stops(channels: &[Event]) {
    for channel in channels.iter().filter(|channel| channel.0 != 0) {
        if let Some(plugin) = plugin() {
            let mut timer = device_clock();
            // SAFETY: the argument of this state is a clock of eight bytes, which lives until the call returns. The
            // handle is one that the plug-in gave and that was not stopped yet.
            unsafe {
                (plugin.table().record)(channel.pointer(), KERNEL_CH_STOP, (&raw mut timer).cast())
            };
        }
        stop(*channel);
    }
}

/// Reports the end of the thread's outermost group call.
pub(super) fn group_ends() {
    stop(GROUP.take().unwrap_or_default());
}

fn stop(event: Event) {
    if let (Some(plugin), true) = (plugin(), event.0 != 0) {
        // SAFETY: the handle is one that the plug-in gave.
        unsafe { (plugin.table().stop)(event.pointer()) };
    }
}

/// The device's clock, in nanoseconds; never 0.
fn device_clock() -> u64 {
    static BEGAN: OnceLock<Instant> = OnceLock::new();
    let began = *BEGAN.get_or_init(Instant::now);
    u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX) + 1
}

/// The collective or the messages that NCCL makes of a request; empty if it has nothing to launch.
fn parts_of(comm: &Comm, request: &Request) -> Vec<Part> {
    let (size, datatype) = size_and_name_of_type(request.data_type);
    // A communicator of one rank has no task, but a copy on the stream (`taskAppend`, enqueue.cc:3039).
    if comm.size == 1 && !matches!(request.kind, RequestKind::Send | RequestKind::Recv) {
        return Vec::new();
    }
    let ranks = usize::try_from(comm.size).unwrap_or(1);
    let count = usize::try_from(request.length).unwrap_or(0) / size.max(1);
    let part = |func, count, peer| Part {
        peer,
        func,
        count,
        datatype,
        root: request.rank,
        api_event: Event::default(),
    };
    let collective = |func, count| vec![part(func, count, None)];
    let is_root = comm.rank == request.rank;
    let per_rank = count / ranks;
    let send = |count, to| part(c"Send", count, Some(to));
    let receive = |count, from| part(c"Recv", count, Some(from));
    let parts = match request.kind {
        RequestKind::AllReduce => collective(c"AllReduce", count),
        RequestKind::Reduce => collective(c"Reduce", count),
        RequestKind::Broadcast => collective(c"Broadcast", count),
        RequestKind::AllGather => collective(c"AllGather", count),
        RequestKind::ReduceScatter => collective(c"ReduceScatter", per_rank),
        RequestKind::Send => vec![send(count, request.rank)],
        RequestKind::Recv => vec![receive(count, request.rank)],
        RequestKind::AllToAll => (0..comm.size)
            .flat_map(|peer| [send(per_rank, peer), receive(per_rank, peer)])
            .collect(),
        RequestKind::Gather => {
            let mut parts = vec![send(count, request.rank)];
            parts.extend(
                (0..comm.size)
                    .filter(|_| is_root)
                    .map(|peer| receive(count, peer)),
            );
            parts
        }
        RequestKind::Scatter => {
            let to = (0..comm.size).filter(|_| is_root);
            let mut parts: Vec<Part> = to.map(|peer| send(per_rank, peer)).collect();
            parts.push(receive(per_rank, request.rank));
            parts
        }
        RequestKind::Join
        | RequestKind::Leave
        | RequestKind::Split
        | RequestKind::Shrink
        | RequestKind::Exchange
        | RequestKind::Stop => Vec::new(),
    };
    // Empty operations are dropped, except a single send or receive.
    match count {
        0 if !matches!(request.kind, RequestKind::Send | RequestKind::Recv) => Vec::new(),
        _ => parts,
    }
}
