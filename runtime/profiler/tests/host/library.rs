//! NCCL's side of the profiler interface: this module loads the plug-in and calls it as NCCL does.

#[cfg(not(fuzzing))]
use libloading::Library;
use rcomm_nccl_profiler::abi::{
    Coll, CollApi, CollV5, DescriptorV3, DescriptorV4, DescriptorV5, FactsV3, FactsV4, FactsV5,
    GroupApi, InitV3, InitV4, InitV5, KernelCh, NamedColl, NamedP2p, P2p, P2pApi, P2pV5, Profiler,
    ProxyOp, ProxyStep, event, state,
};
use std::ffi::{CStr, CString, c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicI32, Ordering};

/// A handle as NCCL treats it: a value to pass back, also between its threads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Handle(pub(crate) *mut c_void);

// SAFETY: a handle is only compared and passed to the plug-in, whose functions any thread may call; it is
// never followed here.
unsafe impl Send for Handle {}
// SAFETY: as for `Send`: a handle is a number to this program.
unsafe impl Sync for Handle {}

/// The handle of an event that was not started, or that the plug-in does not record.
pub(crate) const NONE: Handle = Handle(null_mut());

/// NCCL's `ncclProfilerEventMask`. The process has one, which the plug-in may change while there are communicators.
static MASK: AtomicI32 = AtomicI32::new(0);

/// Returns the events that the plug-in asks for now.
pub(crate) fn mask() -> u64 {
    MASK.load(Ordering::Relaxed) as u64
}

const TRANSFERS: u64 = event::PROXY_OP | event::PROXY_STEP;
/// NCCL starts an event only if the mask has one of the bits that belong to it (plugin/profiler.cc). It reports a call
/// (line 280 of 2.30.7) or a plan also if the plug-in asks only for an event below that.
const COLL_BITS: u64 = event::COLL | TRANSFERS | event::KERNEL_CH;
const P2P_BITS: u64 = event::P2P | TRANSFERS | event::KERNEL_CH;
const PLAN_BITS: u64 = event::GROUP | COLL_BITS | P2P_BITS;
const COLL_CALL_BITS: u64 = event::COLL_API | COLL_BITS;
const P2P_CALL_BITS: u64 = event::P2P_API | P2P_BITS;
const GROUP_CALL_BITS: u64 = event::GROUP_API | COLL_CALL_BITS | P2P_CALL_BITS | PLAN_BITS;

/// Whether the plug-in asks for one of these events.
fn asks_for(events: u64) -> bool {
    mask() & events != 0
}

/// A loaded plug-in, used through one version of its table; a fuzz target links it, so that its code is covered.
pub(crate) struct Plugin {
    #[cfg(not(fuzzing))]
    library: Library,
    pub(crate) version: u32,
}

/// A communicator of this host program.
#[derive(Clone, Debug)]
pub(crate) struct Comm {
    pub(crate) context: Handle,
    pub(crate) name: Option<CString>,
    pub(crate) hash: u64,
    pub(crate) rank: i32,
    pub(crate) size: i32,
}

/// A call of the program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub(crate) func: &'static CStr,
    pub(crate) count: usize,
    /// The other rank of a message; -1 for a collective.
    pub(crate) peer: i32,
    pub(crate) channels: u8,
    pub(crate) algorithm: &'static CStr,
    /// How long the device works on the operation, ns.
    pub(crate) device_ns: u64,
}

impl Call {
    pub(crate) const fn all_reduce(count: usize, channels: u8) -> Self {
        Self {
            func: c"AllReduce",
            count,
            peer: -1,
            channels,
            algorithm: c"RING",
            device_ns: 1_000,
        }
    }

    pub(crate) const fn message(func: &'static CStr, count: usize, peer: i32) -> Self {
        Self {
            func,
            count,
            peer,
            channels: 1,
            algorithm: c"RING",
            device_ns: 1_000,
        }
    }

    pub(crate) fn is_p2p(&self) -> bool {
        self.peer >= 0
    }
}

impl Plugin {
    /// Opens the plug-in with a version of the interface; `None` if it lacks that version.
    pub(crate) fn open(version: u32) -> Option<Self> {
        let plugin = Self {
            #[cfg(not(fuzzing))]
            library: crate::loader::load(),
            version,
        };
        (!plugin.address().is_null()).then_some(plugin)
    }

    #[cfg(fuzzing)]
    fn address(&self) -> *const c_void {
        use rcomm_nccl_profiler::{
            ncclProfiler_v3, ncclProfiler_v4, ncclProfiler_v5, ncclProfiler_v6,
        };
        match self.version {
            3 => (&raw const ncclProfiler_v3).cast(),
            4 => (&raw const ncclProfiler_v4).cast(),
            5 => (&raw const ncclProfiler_v5).cast(),
            6 => (&raw const ncclProfiler_v6).cast(),
            _ => null(),
        }
    }

    #[cfg(not(fuzzing))]
    fn address(&self) -> *const c_void {
        crate::loader::table(&self.library, self.version)
    }

    /// Returns the table as one of a version that the caller chooses: all versions have the common functions at the
    /// same offsets.
    fn table<I, D>(&self) -> &Profiler<I, D> {
        // SAFETY: `ncclProfiler_v1` to `_v6` are tables that live as long as the library, which `self`
        // keeps; `open` has made sure that there is one. The callers name the types of their version, or
        // use only those functions that have the same offset and type in all.
        unsafe { &*self.address().cast() }
    }

    /// Returns the communicator, or the code with which the plug-in refused it.
    pub(crate) fn init(
        &self,
        name: Option<&str>,
        hash: u64,
        rank: i32,
        size: i32,
    ) -> Result<Comm, c_int> {
        let name = name.map(|name| CString::new(name).expect("no zero in it"));
        let mut comm = Comm {
            context: NONE,
            name,
            hash,
            rank,
            size,
        };
        let text = comm.name.as_ref().map_or(null(), |name| name.as_ptr());
        let (context, mask) = (&mut comm.context.0, MASK.as_ptr());
        // SAFETY: the function of each version gets the arguments of that version. Context and text belong to `comm`,
        // which lives until the call returns, and the mask is a static.
        let code = unsafe {
            match self.version {
                0..=3 => (self.table::<InitV3, DescriptorV3>().init)(context, mask),
                4 => (self.table::<InitV4, DescriptorV4>().init)(
                    context, mask, text, hash, 2, size, rank, None,
                ),
                _ => (self.table::<InitV5, DescriptorV5>().init)(
                    context, hash, mask, text, 2, size, rank, None,
                ),
            }
        };
        if code == 0 { Ok(comm) } else { Err(code) }
    }

    /// Reports the end of a communicator, unless the plug-in gave it no context.
    pub(crate) fn finalize(&self, comm: &Comm) {
        if comm.context != NONE {
            // SAFETY: the context came from `init` of this plug-in; `finalize` follows no pointer.
            let code = unsafe { (self.table::<InitV3, DescriptorV3>().finalize)(comm.context.0) };
            assert_eq!(code, 0);
        }
    }

    /// Stops an event. NCCL does so only if the event has a handle.
    pub(crate) fn stop(&self, handle: Handle) {
        if handle != NONE {
            self.stop_anything(handle);
        }
    }

    /// Stops an event by any handle, also an invalid one.
    pub(crate) fn stop_anything(&self, handle: Handle) {
        // SAFETY: `stop_event` looks the handle up and follows no pointer, so any handle may be passed.
        let code = unsafe { (self.table::<InitV3, DescriptorV3>().stop_event)(handle.0) };
        assert_eq!(code, 0);
    }

    /// Reports a state with arguments as NCCL does: eight bytes since version 4, sixteen before.
    pub(crate) fn record(&self, handle: Handle, state: c_int, first: u64, second: i32) {
        if handle == NONE {
            return;
        }
        #[repr(C)]
        struct Args(u64, i32);
        let mut args = Args(first, second);
        let table = self.table::<InitV3, DescriptorV3>();
        // SAFETY: the arguments are sixteen bytes, aligned to eight: as long as those of any version and
        // state, and alive until the call returns.
        let code = unsafe {
            (table.record_event_state)(handle.0, state, std::ptr::from_mut(&mut args).cast())
        };
        assert_eq!(code, 0);
    }

    fn start_v3(&self, comm: &Comm, kind: u64, parent: Handle, facts: FactsV3) -> Handle {
        let mut handle = null_mut();
        let mut descriptor = DescriptorV3 {
            kind: kind as u8,
            parent: parent.0,
            rank: comm.rank,
            facts,
        };
        let start = self.table::<InitV3, DescriptorV3>().start_event;
        // SAFETY: handle and descriptor live until the call returns; the descriptor has the layout of
        // version 3, and the callers set the member of `facts` that belongs to `kind`, with texts that live
        // as long as `comm` or the process.
        let code = unsafe { start(comm.context.0, &mut handle, &mut descriptor) };
        assert_eq!(code, 0);
        Handle(handle)
    }

    fn start_v4(&self, comm: &Comm, kind: u64, parent: Handle, facts: FactsV4) -> Handle {
        let mut handle = null_mut();
        let mut descriptor = DescriptorV4 {
            kind: kind as u8,
            parent: parent.0,
            rank: comm.rank,
            facts,
        };
        let start = self.table::<InitV4, DescriptorV4>().start_event;
        // SAFETY: handle and descriptor live until the call returns; the descriptor has the layout of
        // version 4, and the callers set the member of `facts` that belongs to `kind`, with texts that live
        // as long as the process.
        let code = unsafe { start(comm.context.0, &mut handle, &mut descriptor) };
        assert_eq!(code, 0);
        Handle(handle)
    }

    fn start_v5(&self, comm: &Comm, kind: u64, parent: Handle, facts: FactsV5) -> Handle {
        let mut handle = null_mut();
        let mut descriptor = DescriptorV5 {
            kind,
            parent: parent.0,
            rank: comm.rank,
            facts,
        };
        let start = self.table::<InitV5, DescriptorV5>().start_event;
        // SAFETY: handle and descriptor live until the call returns; the descriptor has the layout of
        // versions 5 and 6, and the callers set the member of `facts` that belongs to `kind`, with texts
        // that live as long as the process.
        let code = unsafe { start(comm.context.0, &mut handle, &mut descriptor) };
        assert_eq!(code, 0);
        Handle(handle)
    }

    /// Whether NCCL reports calls in this version of the interface.
    pub(crate) fn has_calls(&self) -> bool {
        self.version >= 5
    }

    /// Reports the beginning of a group call.
    pub(crate) fn group_api(&self, comm: &Comm) -> Handle {
        if !asks_for(GROUP_CALL_BITS) {
            return NONE;
        }
        let group_api = GroupApi {
            graph_captured: false,
            depth: 1,
        };
        self.start_v5(comm, event::GROUP_API, NONE, FactsV5 { group_api })
    }

    /// Reports the beginning of a call; `group` is the event of the group call around it.
    pub(crate) fn call(
        &self,
        comm: &Comm,
        group: Handle,
        call: &Call,
        is_captured: bool,
    ) -> Handle {
        let wanted = if call.is_p2p() {
            P2P_CALL_BITS
        } else {
            COLL_CALL_BITS
        };
        if !asks_for(wanted) {
            return NONE;
        }
        if call.is_p2p() {
            let p2p_api = P2pApi {
                func: call.func.as_ptr(),
                count: call.count,
                datatype: c"ncclFloat32".as_ptr(),
                stream: null_mut(),
                graph_captured: is_captured,
            };
            return self.start_v5(comm, event::P2P_API, group, FactsV5 { p2p_api });
        }
        let coll_api = CollApi {
            func: call.func.as_ptr(),
            count: call.count,
            datatype: c"ncclFloat32".as_ptr(),
            root: 0,
            stream: null_mut(),
            graph_captured: is_captured,
        };
        self.start_v5(comm, event::COLL_API, group, FactsV5 { coll_api })
    }

    /// Reports the beginning of a plan of operations (`ncclProfilerStartGroupEvent`, in all versions).
    pub(crate) fn plan(&self, comm: &Comm) -> Handle {
        if !asks_for(PLAN_BITS) {
            return NONE;
        }
        let proxy_step = ProxyStep { step: 0 };
        match self.version {
            3 => self.start_v3(comm, event::GROUP, NONE, FactsV3 { proxy_step }),
            4 => self.start_v4(comm, event::GROUP, NONE, FactsV4 { proxy_step }),
            _ => self.start_v5(comm, event::GROUP, NONE, FactsV5 { proxy_step }),
        }
    }

    /// Reports a plan with this operation alone, up to the launch; `called` is the event of its call, if there is one.
    pub(crate) fn task(&self, comm: &Comm, called: Handle, call: &Call) -> Handle {
        let plan = self.plan(comm);
        let task = self.task_of(comm, plan, called, call);
        self.stop(plan);
        task
    }

    /// Reports an operation in a plan; `called` is the event of its call, if there is one. Up to version 4 the plan is
    /// its parent, and operations of a plan without a handle are not reported (`ncclProfilerStartTaskEvents`,
    /// plugin/profiler.cc:235 of 2.26.2 and 240 of 2.27.7).
    pub(crate) fn task_of(&self, comm: &Comm, plan: Handle, called: Handle, call: &Call) -> Handle {
        let wanted = if call.is_p2p() { P2P_BITS } else { COLL_BITS };
        if !asks_for(wanted) || (!self.has_calls() && plan == NONE) {
            return NONE;
        }
        let called = if self.has_calls() { called } else { plan };
        let text = comm.name.as_ref().map_or(null(), |name| name.as_ptr());
        if call.is_p2p() {
            let p2p = P2p {
                func: call.func.as_ptr(),
                buffer: null_mut(),
                datatype: c"ncclFloat32".as_ptr(),
                count: call.count,
                peer: call.peer,
                channels: call.channels,
            };
            return match self.version {
                3 => {
                    let p2p = NamedP2p {
                        comm_name: text,
                        comm_hash: comm.hash,
                        func: p2p.func,
                        buffer: p2p.buffer,
                        datatype: p2p.datatype,
                        count: p2p.count,
                        peer: p2p.peer,
                    };
                    self.start_v3(comm, event::P2P, called, FactsV3 { p2p })
                }
                4 => self.start_v4(comm, event::P2P, called, FactsV4 { p2p }),
                _ => {
                    let p2p = P2pV5 {
                        p2p,
                        parent_group: null_mut(),
                    };
                    self.start_v5(comm, event::P2P, called, FactsV5 { p2p })
                }
            };
        }
        // Version 3 gives only the largest number of channels that the plan may use (`nMaxChannels`, enqueue.cc:1774 of
        // 2.26.2), which may be all channels of the communicator: here twice as many as the plan uses.
        let channels = match self.version {
            3 => 2 * call.channels,
            _ => call.channels,
        };
        let coll = Coll {
            seq_number: 0,
            func: call.func.as_ptr(),
            send_buffer: null(),
            receive_buffer: null_mut(),
            count: call.count,
            root: 0,
            datatype: c"ncclFloat32".as_ptr(),
            channels,
            warps: 8,
            algorithm: call.algorithm.as_ptr(),
            protocol: c"SIMPLE".as_ptr(),
        };
        match self.version {
            3 => {
                let coll = NamedColl {
                    comm_name: text,
                    comm_hash: comm.hash,
                    coll,
                };
                self.start_v3(comm, event::COLL, called, FactsV3 { coll })
            }
            4 => self.start_v4(comm, event::COLL, called, FactsV4 { coll }),
            _ => {
                let coll = CollV5 {
                    coll,
                    parent_group: null_mut(),
                };
                self.start_v5(comm, event::COLL, called, FactsV5 { coll })
            }
        }
    }

    /// Reports a collective whose names are all null.
    pub(crate) fn task_without_names(&self, comm: &Comm) -> Handle {
        let coll = Coll {
            seq_number: 0,
            func: null(),
            send_buffer: null(),
            receive_buffer: null_mut(),
            count: 1,
            root: -1,
            datatype: null(),
            channels: 1,
            warps: 0,
            algorithm: null(),
            protocol: null(),
        };
        match self.version {
            3 => {
                let coll = NamedColl {
                    comm_name: null(),
                    comm_hash: comm.hash,
                    coll,
                };
                self.start_v3(comm, event::COLL, NONE, FactsV3 { coll })
            }
            4 => self.start_v4(comm, event::COLL, NONE, FactsV4 { coll }),
            _ => {
                let coll = CollV5 {
                    coll,
                    parent_group: null_mut(),
                };
                self.start_v5(comm, event::COLL, NONE, FactsV5 { coll })
            }
        }
    }

    /// Reports the beginning of a plan, with no place into which the plug-in could write the handle.
    pub(crate) fn start_without_out(&self, comm: &Comm) {
        /// A descriptor in memory for the longest one, which is that of version 3.
        #[repr(C)]
        struct Padded(DescriptorV5, u64);
        const { assert!(size_of::<Padded>() >= size_of::<DescriptorV3>()) };
        let descriptor = DescriptorV5 {
            kind: event::GROUP,
            parent: null_mut(),
            rank: comm.rank,
            facts: FactsV5 {
                proxy_step: ProxyStep { step: 0 },
            },
        };
        let mut padded = Padded(descriptor, 0);
        let start = self.table::<InitV5, DescriptorV5>().start_event;
        // SAFETY: for a plan, all versions read only the kind, which is in the first byte and, since version 5, in the
        // first eight. The memory is at least as long as the descriptor of any version.
        let code = unsafe { start(comm.context.0, null_mut(), (&raw mut padded).cast()) };
        assert_eq!(code, 0);
    }

    /// Reports that the device starts a channel. NCCL does so also for an operation without a handle
    /// (`ncclProfilerStartKernelChEvent`).
    pub(crate) fn kernel(&self, comm: &Comm, task: Handle, channel: u8, timer: u64) -> Handle {
        if !asks_for(event::KERNEL_CH) {
            return NONE;
        }
        let kernel_ch = KernelCh { channel, timer };
        match self.version {
            3 => self.start_v3(comm, event::KERNEL_CH, task, FactsV3 { kernel_ch }),
            4 => self.start_v4(comm, event::KERNEL_CH, task, FactsV4 { kernel_ch }),
            _ => self.start_v5(comm, event::KERNEL_CH, task, FactsV5 { kernel_ch }),
        }
    }

    /// Reports that the device has ended a channel.
    pub(crate) fn kernel_ends(&self, handle: Handle, timer: u64) {
        if self.version > 3 {
            self.record(handle, state::KERNEL_CH_STOP, timer, 0);
        }
        self.stop(handle);
    }

    /// Reports the beginning of a transfer of an operation of the process `pid`.
    pub(crate) fn transfer(
        &self,
        comm: &Comm,
        task: Handle,
        (channel, peer, is_send): (u8, i32, bool),
        pid: u32,
    ) -> Handle {
        if !asks_for(TRANSFERS) {
            return NONE;
        }
        let proxy_op = ProxyOp {
            pid: pid as i32,
            channel,
            peer,
            steps: 16,
            chunk_size: 1 << 17,
            is_send: is_send.into(),
        };
        match self.version {
            3 => self.start_v3(comm, event::PROXY_OP, task, FactsV3 { proxy_op }),
            4 => self.start_v4(comm, event::PROXY_OP, task, FactsV4 { proxy_op }),
            _ => self.start_v5(comm, event::PROXY_OP, task, FactsV5 { proxy_op }),
        }
    }

    /// Reports the beginning of a step of a transfer. Up to version 4, NCCL does so only if the transfer has a handle.
    pub(crate) fn step(&self, comm: &Comm, transfer: Handle, step: c_int) -> Handle {
        if !asks_for(event::PROXY_STEP) || (!self.has_calls() && transfer == NONE) {
            return NONE;
        }
        let proxy_step = ProxyStep { step };
        match self.version {
            3 => self.start_v3(comm, event::PROXY_STEP, transfer, FactsV3 { proxy_step }),
            4 => self.start_v4(comm, event::PROXY_STEP, transfer, FactsV4 { proxy_step }),
            _ => self.start_v5(comm, event::PROXY_STEP, transfer, FactsV5 { proxy_step }),
        }
    }

    /// Reports an event of a kind that the plug-in does not know, as a newer NCCL might.
    pub(crate) fn unknown(&self, comm: &Comm) -> Handle {
        let proxy_step = ProxyStep { step: 0 };
        match self.version {
            3 => self.start_v3(comm, 1 << 7, NONE, FactsV3 { proxy_step }),
            4 => self.start_v4(comm, 1 << 7, NONE, FactsV4 { proxy_step }),
            _ => self.start_v5(comm, 1 << 40, NONE, FactsV5 { proxy_step }),
        }
    }
}
