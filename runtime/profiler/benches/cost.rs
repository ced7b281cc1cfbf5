//! Measures what the plug-in costs NCCL: the time of the events of one operation, and the memory of a communicator. The
//! events are those that NCCL 2.29 and later report, for each choice of events. The time is compared with that of a
//! plug-in that does nothing, and with one that prints a line for each event.
//!
//! `cargo bench -p rcomm-nccl-profiler`. The bench loads the library as NCCL does, because thread-local variables cost
//! more in a library than in a program, and calls go through pointers to functions.

#![allow(clippy::print_stdout, missing_docs)]

use rcomm_nccl_profiler::abi::{
    Coll, CollApi, CollV5, DescriptorV5, FactsV5, GroupApi, InitV5, KernelCh, Profiler, ProxyOp,
    ProxyStep, event, state,
};
use std::ffi::{c_int, c_void};
use std::hint::black_box;
use std::io::Write;
use std::ptr::{null, null_mut};
use std::sync::atomic::AtomicI32;
use std::time::Instant;

#[path = "../tests/host/loader.rs"]
mod loader;

type Table = Profiler<InitV5, DescriptorV5>;

/// The states of a group call and of a transfer that NCCL reports although the plug-in does not need them.
const GROUP_START_STOPS: c_int = 23;
const GROUP_END_STARTS: c_int = 24;
const TRANSFER_IN_PROGRESS: c_int = 19;

/// The mask of events, which the plug-in may change while there are communicators.
static MASK: AtomicI32 = AtomicI32::new(0);

/// A plug-in that does nothing.
mod nothing {
    use super::*;

    /// # Safety
    /// `out` is valid for writes.
    pub(super) unsafe extern "C" fn start(
        _: *mut c_void,
        out: *mut *mut c_void,
        _: *mut DescriptorV5,
    ) -> c_int {
        // SAFETY: `Plugin::start` passes the address of a pointer of its own.
        unsafe { *out = std::ptr::without_provenance_mut(8) };
        0
    }

    /// # Safety
    /// None: the function ignores the handle.
    pub(super) unsafe extern "C" fn stop(_: *mut c_void) -> c_int {
        0
    }

    /// # Safety
    /// None: the function ignores its arguments.
    pub(super) unsafe extern "C" fn record(_: *mut c_void, _: c_int, _: *mut c_void) -> c_int {
        0
    }
}

/// The functions of a plug-in: those of the crate, or of a plug-in for comparison.
struct Plugin {
    start: unsafe extern "C" fn(*mut c_void, *mut *mut c_void, *mut DescriptorV5) -> c_int,
    stop: unsafe extern "C" fn(*mut c_void) -> c_int,
    record: unsafe extern "C" fn(*mut c_void, c_int, *mut c_void) -> c_int,
    context: *mut c_void,
    /// The process's own id. As NCCL does, the bench asks for it once: a system call in an operation would slow it
    /// down.
    pid: i32,
}

/// A plug-in that prints a line for each event.
mod printing {
    use super::*;

    fn line(what: &str, number: u64) {
        let mut out = std::io::stderr().lock();
        let _ = writeln!(out, "{what} {number}");
    }

    /// # Safety
    /// `out` is valid for writes, and `descriptor` holds a kind.
    pub(super) unsafe extern "C" fn start(
        _: *mut c_void,
        out: *mut *mut c_void,
        descriptor: *mut DescriptorV5,
    ) -> c_int {
        // SAFETY: `Plugin::start` passes the addresses of a pointer and a descriptor of its own.
        unsafe {
            line("start", (*descriptor).kind);
            *out = std::ptr::without_provenance_mut(8);
        }
        0
    }

    /// # Safety
    /// None: the function prints the handle, and does not follow it.
    pub(super) unsafe extern "C" fn stop(handle: *mut c_void) -> c_int {
        line("stop", handle.addr() as u64);
        0
    }

    /// # Safety
    /// None: the function prints the state, and ignores the arguments.
    pub(super) unsafe extern "C" fn record(_: *mut c_void, state: c_int, _: *mut c_void) -> c_int {
        line("state", state as u64);
        0
    }
}

/// The events of an operation.
#[derive(Clone, Copy)]
struct Shape {
    channels: u8,
    has_kernels: bool,
    has_transfers: bool,
    has_steps: bool,
}

impl Shape {
    /// Returns the number of calls of the plug-in for one operation: starts, stops and states.
    fn calls(self) -> u64 {
        let kernels = if self.has_kernels { 3 } else { 0 };
        let transfers = if self.has_transfers { 6 } else { 0 };
        let steps = if self.has_steps { 2 * 4 * STEPS } else { 0 };
        10 + u64::from(self.channels) * (kernels + transfers + steps as u64)
    }
}

impl Plugin {
    fn of(table: &Table, context: *mut c_void) -> Self {
        Self {
            start: table.start_event,
            stop: table.stop_event,
            record: table.record_event_state,
            context,
            pid: std::process::id() as i32,
        }
    }

    fn start(&self, kind: u64, parent: *mut c_void, facts: FactsV5) -> *mut c_void {
        let mut handle = null_mut();
        let mut descriptor = DescriptorV5 {
            kind,
            parent,
            rank: 0,
            facts,
        };
        // SAFETY: handle and descriptor live until the call returns; `facts` holds the member that belongs
        // to `kind`, with constant texts.
        unsafe { (self.start)(self.context, &mut handle, &mut descriptor) };
        handle
    }

    /// Reports a state, for which NCCL passes eight bytes.
    fn state(&self, handle: *mut c_void, state: c_int, mut argument: u64) {
        // SAFETY: the argument lives until the call returns, and the handle is one that `start` returned, which
        // `record` looks up and does not follow.
        unsafe { (self.record)(black_box(handle), state, (&raw mut argument).cast()) };
    }

    /// Reports a step of a transfer, and the two states in which it waits, one after the other.
    fn step(&self, transfer: *mut c_void, step: c_int, waits: [c_int; 2]) {
        let proxy_step = ProxyStep { step };
        let step = self.start(event::PROXY_STEP, transfer, FactsV5 { proxy_step });
        for wait in waits {
            self.state(step, wait, 0);
        }
        self.stop(step);
    }

    fn stop(&self, handle: *mut c_void) {
        // SAFETY: the handle is one that `start` returned, which `stop` looks up and does not follow.
        unsafe { (self.stop)(black_box(handle)) };
    }

    /// Reports one operation, all on this thread. Returns the time of the events that NCCL reports on the calling
    /// thread, and of those that NCCL reports on its proxy thread, in ns.
    fn operation(&self, shape: Shape) -> (u64, u64) {
        let started = Instant::now();
        let group_api = GroupApi {
            graph_captured: false,
            depth: 1,
        };
        let group = self.start(event::GROUP_API, null_mut(), FactsV5 { group_api });
        self.state(group, GROUP_START_STOPS, 0);
        let coll_api = CollApi {
            func: c"AllReduce".as_ptr(),
            count: 1 << 20,
            datatype: c"ncclBfloat16".as_ptr(),
            root: 0,
            stream: null_mut(),
            graph_captured: false,
        };
        let call = self.start(event::COLL_API, group, FactsV5 { coll_api });
        self.stop(call);
        self.state(group, GROUP_END_STARTS, 0);
        let plan = self.start(event::GROUP, null_mut(), FactsV5 { group_api });
        let coll = CollV5 {
            coll: Coll {
                seq_number: 0,
                func: c"AllReduce".as_ptr(),
                send_buffer: null(),
                receive_buffer: null_mut(),
                count: 1 << 20,
                root: 0,
                datatype: c"ncclBfloat16".as_ptr(),
                channels: shape.channels,
                warps: 16,
                algorithm: c"RING".as_ptr(),
                protocol: c"SIMPLE".as_ptr(),
            },
            parent_group: plan,
        };
        let task = self.start(event::COLL, call, FactsV5 { coll });
        self.stop(task);
        self.stop(plan);
        self.stop(group);
        let called = started.elapsed();
        let pid = self.pid;
        let started = Instant::now();
        // The proxy thread gets the transfers with the launch, before the device starts.
        let mut transfers = [[null_mut(); 2]; CHANNELS[1] as usize];
        for (channel, transfers) in (0..shape.channels).zip(&mut transfers) {
            for (is_send, transfer) in (0..).zip(transfers).filter(|_| shape.has_transfers) {
                let proxy_op = ProxyOp {
                    pid,
                    channel,
                    peer: 1,
                    steps: STEPS,
                    chunk_size: 1 << 17,
                    is_send,
                };
                *transfer = self.start(event::PROXY_OP, task, FactsV5 { proxy_op });
                self.state(*transfer, TRANSFER_IN_PROGRESS, 0);
            }
        }
        let mut kernels = [null_mut(); CHANNELS[1] as usize];
        let channels = 0..shape.channels;
        for (channel, kernel) in channels.zip(&mut kernels).filter(|_| shape.has_kernels) {
            let kernel_ch = KernelCh { channel, timer: 1 };
            *kernel = self.start(event::KERNEL_CH, task, FactsV5 { kernel_ch });
        }
        let count = usize::from(shape.channels);
        let under_way = transfers[..count].iter().filter(|_| shape.has_steps);
        for [receive, send] in under_way {
            for step in 0..STEPS {
                self.step(*receive, step, [state::RECV_WAIT, state::RECV_GPU_WAIT]);
                self.step(*send, step, [state::SEND_GPU_WAIT, state::SEND_WAIT]);
            }
        }
        for transfers in transfers[..count].iter().filter(|_| shape.has_transfers) {
            transfers.iter().for_each(|&transfer| self.stop(transfer));
        }
        for &kernel in kernels[..count].iter().filter(|_| shape.has_kernels) {
            self.state(kernel, state::KERNEL_CH_STOP, 2);
            self.stop(kernel);
        }
        (
            called.as_nanos() as u64,
            started.elapsed().as_nanos() as u64,
        )
    }
}

/// The time of the events of one operation, ns.
#[derive(Clone, Copy)]
struct Cost {
    calling_thread: u64,
    proxy_thread: u64,
}

impl Cost {
    fn sum(self) -> u64 {
        self.calling_thread + self.proxy_thread
    }
}

/// Returns the mean of each part over the middle half of `rounds` operations, less the time that reading the clock
/// takes. The clock has steps of 10 ns, which a median would show. The middle half leaves out the operations that other
/// programs slowed down.
fn measure(plugin: &Plugin, shape: Shape, rounds: usize) -> Cost {
    for _ in 0..rounds / 4 {
        plugin.operation(shape);
    }
    let (mut calls, mut proxies): (Vec<u64>, Vec<u64>) =
        (0..rounds).map(|_| plugin.operation(shape)).unzip();
    let mut clock: Vec<u64> = (0..rounds)
        .map(|_| {
            let started = Instant::now();
            started.elapsed().as_nanos() as u64
        })
        .collect();
    let middle = |values: &mut Vec<u64>| {
        values.sort_unstable();
        let quarter = values.len() / 4;
        let middle = &values[quarter..values.len() - quarter];
        middle.iter().sum::<u64>() / middle.len() as u64
    };
    let clock = middle(&mut clock);
    Cost {
        calling_thread: middle(&mut calls).saturating_sub(clock),
        proxy_thread: middle(&mut proxies).saturating_sub(clock),
    }
}

/// Prints the least of several measurements of each part, because other programs can only add to the time. `baseline`
/// has the measurements of a plug-in that does nothing, with the same events, which were taken by turns with `costs`.
fn print(name: &str, shape: Shape, costs: &[Cost], baseline: &[Cost]) {
    let least = |costs: &[Cost], part: fn(Cost) -> u64| {
        costs.iter().map(|&cost| part(cost)).min().unwrap_or(0)
    };
    let (both, nothing) = (least(costs, Cost::sum), least(baseline, Cost::sum));
    println!(
        "{name:40} calling thread {:5} ns   proxy thread {:6} ns   both {both:6} ns, {:6} ns more than a plug-in that does nothing; {:5} ns for each of {} calls",
        least(costs, |cost| cost.calling_thread),
        least(costs, |cost| cost.proxy_thread),
        both.saturating_sub(nothing),
        both / shape.calls(),
        shape.calls()
    );
}

/// Measures a plug-in in turn with one that does nothing, and prints both.
fn compare(name: &str, plugin: &Plugin, shape: Shape, rounds: usize) {
    let (baseline, costs): (Vec<Cost>, Vec<Cost>) = (0..TURNS)
        .map(|_| {
            let rounds = rounds / TURNS;
            (
                measure(&BASELINE, shape, rounds),
                measure(plugin, shape, rounds),
            )
        })
        .unzip();
    let name = format!("{name}, {} channels", shape.channels);
    print(
        &format!("{name}: does nothing"),
        shape,
        &baseline,
        &baseline,
    );
    print(&name, shape, &costs, &baseline);
}

/// The plug-in's table of NCCL 2.29 and later, from the library, which is never unloaded.
fn table() -> &'static Table {
    let library: &'static libloading::Library = Box::leak(Box::new(loader::load()));
    let table = loader::table(library, 6).cast::<Table>();
    // SAFETY: the plug-in has a table of this type for version 6 (checked: not null), which lives as long as the
    // library.
    unsafe { table.as_ref() }.expect("the plug-in has version 6")
}

/// Returns the plug-in of this crate. The plug-in reads the choice of events once in a process, so each choice needs a
/// process of its own: this one was started with `mask`.
fn rcomm_plugin(mask: &str) -> Plugin {
    assert_eq!(std::env::var("RCOMM_NCCL_EVENTS").as_deref(), Ok(mask));
    let table = table();
    let mut context = null_mut();
    // SAFETY: the context is valid for writes until the call returns, the mask always; the name ends with a zero.
    let code = unsafe {
        (table.init)(
            &mut context,
            7,
            MASK.as_ptr(),
            c"bench".as_ptr(),
            1,
            2,
            0,
            None,
        )
    };
    assert_eq!(code, 0);
    assert!(!context.is_null(), "no ring was created");
    Plugin::of(table, context)
}

/// What the plug-in is asked to record, and the events of NCCL that this leads to.
struct Mask {
    words: &'static str,
    has_kernels: bool,
    has_transfers: bool,
    has_steps: bool,
}

const MASKS: [Mask; 4] = [
    Mask {
        words: "calls",
        has_kernels: false,
        has_transfers: false,
        has_steps: false,
    },
    Mask {
        words: "channels",
        has_kernels: true,
        has_transfers: false,
        has_steps: false,
    },
    Mask {
        words: "channels,network",
        has_kernels: true,
        has_transfers: true,
        has_steps: false,
    },
    Mask {
        words: "steps",
        has_kernels: true,
        has_transfers: true,
        has_steps: true,
    },
];

impl Mask {
    fn shape(&self, channels: u8) -> Shape {
        Shape {
            channels,
            has_kernels: self.has_kernels,
            has_transfers: self.has_transfers,
            has_steps: self.has_steps,
        }
    }
}

/// Numbers of channels of an operation.
const CHANNELS: [u8; 2] = [2, 8];
/// Number of steps of a transfer.
const STEPS: c_int = 16;
/// Number of operations of a measurement.
const ROUNDS: usize = 40_000;
/// The number of parts of the rounds, between which the plug-ins take turns.
const TURNS: usize = 10;

const BASELINE: Plugin = Plugin {
    start: nothing::start,
    stop: nothing::stop,
    record: nothing::record,
    context: null_mut(),
    pid: 0,
};

/// Returns the resident memory of this process, KiB, shared memory included, on a system with pages of 4 KiB.
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("proc");
    let pages = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok());
    pages.map_or(0, |pages: usize| pages * 4)
}

/// Prints what the first communicator and each further one add to the process's memory.
fn memory() {
    const MANY: u64 = 4_000;
    let table = table();
    let add = |hash: u64| {
        let mut context = null_mut();
        let name = c"data parallel";
        // SAFETY: the context is valid for writes until the call returns, the mask always; the name ends with a zero.
        let code = unsafe {
            (table.init)(
                &mut context,
                hash,
                MASK.as_ptr(),
                name.as_ptr(),
                1,
                8,
                0,
                None,
            )
        };
        assert!(
            code == 0 && !context.is_null(),
            "the plug-in did not take the communicator"
        );
    };
    let empty = resident();
    add(1);
    let first = resident();
    (2..2 + MANY).for_each(add);
    let grown = (resident() - first) * 1024 / MANY as usize;
    println!(
        "memory: {} KiB with the first communicator, {grown} bytes with each further one",
        first - empty
    );
}

fn main() {
    if std::env::var("RCOMM_BENCH_PART").is_ok() {
        return memory();
    }
    if let Ok(words) = std::env::var("RCOMM_NCCL_EVENTS") {
        let mask = MASKS.iter().find(|mask| mask.words == words);
        let mask = mask.expect("RCOMM_NCCL_EVENTS has the words of a mask");
        let plugin = rcomm_plugin(&words);
        for channels in CHANNELS {
            compare(&words, &plugin, mask.shape(channels), ROUNDS);
        }
        return;
    }
    let printing = Plugin {
        start: printing::start,
        stop: printing::stop,
        record: printing::record,
        context: null_mut(),
        pid: 0,
    };
    let [.., default, _] = &MASKS;
    for channels in CHANNELS {
        compare(
            "prints each event",
            &printing,
            default.shape(channels),
            ROUNDS / 20,
        );
    }
    let directory = tempfile::tempdir_in("/dev/shm").expect("a directory in /dev/shm");
    for mask in &MASKS {
        let status = std::process::Command::new(std::env::current_exe().expect("a file"))
            .env("RCOMM_NCCL_EVENTS", mask.words)
            .env("RCOMM_RING_DIR", directory.path())
            .env("RANK", "0")
            .env("WORLD_SIZE", "2")
            .status();
        assert!(status.expect("this bench program").success());
    }
    let status = std::process::Command::new(std::env::current_exe().expect("a file"))
        .env("RCOMM_BENCH_PART", "memory")
        .env("RCOMM_RING_DIR", directory.path())
        .env("TORCHELASTIC_RUN_ID", "memory")
        .env("RANK", "0")
        .env("WORLD_SIZE", "8")
        .status();
    assert!(status.expect("this bench program").success());
}
