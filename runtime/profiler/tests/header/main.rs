//! The interface has the memory layout of NCCL's public headers. A C compiler computed the expected offsets and sizes,
//! in bytes on 64-bit Linux, for the headers of NCCL 2.26.2, 2.27.7, 2.28.3, 2.29.7 and 2.30.7. Releases with the same
//! version of the interface agree. `releases` compares all of it with the headers themselves.

mod releases;

use rcomm_nccl_profiler::abi::{
    Coll, CollApi, CollV5, DescriptorV3, DescriptorV4, DescriptorV5, FactsV5, GroupApi, InitV3,
    InitV4, InitV5, KernelCh, NamedColl, NamedP2p, P2p, P2pApi, Profiler, ProxyOp, ProxyOpArgsV3,
    ProxyStep, event, state,
};
use rcomm_nccl_profiler::{
    ncclProfiler_v1, ncclProfiler_v2, ncclProfiler_v3, ncclProfiler_v4, ncclProfiler_v5,
    ncclProfiler_v6,
};
use std::ffi::{CStr, c_char, c_void};
use std::mem::offset_of;
use std::process::Command;
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicI32, Ordering};

/// Offset of the facts in all descriptors.
const FACTS: usize = 24;

#[test]
fn descriptors_and_tables_have_the_sizes_of_nccl() {
    assert_eq!(size_of::<DescriptorV3>(), 120);
    assert_eq!(size_of::<DescriptorV4>(), 104);
    // Version 6 has further kinds of events, in as many bytes.
    assert_eq!(size_of::<DescriptorV5>(), 112);
    assert_eq!(size_of::<ProxyOpArgsV3>(), 16);
    assert_eq!(size_of::<Profiler<InitV3, DescriptorV3>>(), 48);
    assert_eq!(size_of::<Profiler<InitV4, DescriptorV4>>(), 48);
    assert_eq!(size_of::<Profiler<InitV5, DescriptorV5>>(), 48);
}

#[test]
fn descriptors_have_the_same_head() {
    for (parent, rank, facts) in [
        (
            offset_of!(DescriptorV3, parent),
            offset_of!(DescriptorV3, rank),
            offset_of!(DescriptorV3, facts),
        ),
        (
            offset_of!(DescriptorV4, parent),
            offset_of!(DescriptorV4, rank),
            offset_of!(DescriptorV4, facts),
        ),
        (
            offset_of!(DescriptorV5, parent),
            offset_of!(DescriptorV5, rank),
            offset_of!(DescriptorV5, facts),
        ),
    ] {
        assert_eq!((parent, rank, facts), (8, 16, FACTS));
    }
}

#[test]
fn collectives_have_the_layout_of_nccl() {
    let v3 = offset_of!(NamedColl, coll);
    let offsets = [
        (offset_of!(Coll, func), 48, 32),
        (offset_of!(Coll, count), 72, 56),
        (offset_of!(Coll, root), 80, 64),
        (offset_of!(Coll, datatype), 88, 72),
        (offset_of!(Coll, channels), 96, 80),
        (offset_of!(Coll, warps), 97, 81),
        (offset_of!(Coll, algorithm), 104, 88),
        (offset_of!(Coll, protocol), 112, 96),
    ];
    for (at, in_v3, since_v4) in offsets {
        assert_eq!((FACTS + v3 + at, FACTS + at), (in_v3, since_v4));
    }
    assert_eq!(FACTS + offset_of!(NamedColl, comm_name), 24);
    assert_eq!(FACTS + offset_of!(NamedColl, comm_hash), 32);
}

#[test]
fn messages_have_the_layout_of_nccl() {
    for (at, known) in [
        (offset_of!(NamedP2p, comm_name), 24),
        (offset_of!(NamedP2p, comm_hash), 32),
        (offset_of!(NamedP2p, func), 40),
        (offset_of!(NamedP2p, datatype), 56),
        (offset_of!(NamedP2p, count), 64),
        (offset_of!(NamedP2p, peer), 72),
        (offset_of!(P2p, func), 24),
        (offset_of!(P2p, datatype), 40),
        (offset_of!(P2p, count), 48),
        (offset_of!(P2p, peer), 56),
        (offset_of!(P2p, channels), 60),
    ] {
        assert_eq!(FACTS + at, known);
    }
}

#[test]
fn calls_have_the_layout_of_nccl() {
    for (at, known) in [
        (offset_of!(GroupApi, graph_captured), 24),
        (offset_of!(GroupApi, depth), 28),
        (offset_of!(CollApi, func), 24),
        (offset_of!(CollApi, count), 32),
        (offset_of!(CollApi, datatype), 40),
        (offset_of!(CollApi, root), 48),
        (offset_of!(CollApi, graph_captured), 64),
        (offset_of!(P2pApi, func), 24),
        (offset_of!(P2pApi, count), 32),
        (offset_of!(P2pApi, datatype), 40),
        (offset_of!(P2pApi, graph_captured), 56),
    ] {
        assert_eq!(FACTS + at, known);
    }
}

#[test]
fn events_of_the_proxy_thread_have_the_layout_of_nccl() {
    for (at, known) in [
        (offset_of!(ProxyOp, pid), 24),
        (offset_of!(ProxyOp, channel), 28),
        (offset_of!(ProxyOp, peer), 32),
        (offset_of!(ProxyOp, steps), 36),
        (offset_of!(ProxyOp, is_send), 44),
        (offset_of!(ProxyStep, step), 24),
        (offset_of!(KernelCh, channel), 24),
        (offset_of!(KernelCh, timer), 32),
    ] {
        assert_eq!(FACTS + at, known);
    }
}

#[test]
fn tables_have_the_functions_in_the_order_of_nccl() {
    type Table = Profiler<InitV5, DescriptorV5>;
    // `ncclProfiler_v3_t` to `ncclProfiler_v6_t`: name, init, startEvent, stopEvent, recordEventState, finalize.
    let order = [
        offset_of!(Table, name),
        offset_of!(Table, init),
        offset_of!(Table, start_event),
        offset_of!(Table, stop_event),
        offset_of!(Table, record_event_state),
        offset_of!(Table, finalize),
    ];
    assert_eq!(order, [0, 8, 16, 24, 32, 40]);
}

#[test]
fn each_version_has_a_table_with_the_plug_in_s_name() {
    let names: [*const c_char; 6] = [
        ncclProfiler_v1.name,
        ncclProfiler_v2.name,
        ncclProfiler_v3.name,
        ncclProfiler_v4.name,
        ncclProfiler_v5.name,
        ncclProfiler_v6.name,
    ];
    for name in names {
        // SAFETY: the plug-in's name is a constant text that ends with a zero.
        assert_eq!(unsafe { CStr::from_ptr(name) }, c"rcomm");
    }
}

/// The releases of these headers, with their newest version of the interface.
const RELEASES: [(&str, u32); 5] = [
    ("2.26.2", 3),
    ("2.27.7", 4),
    ("2.28.3", 5),
    ("2.29.7", 6),
    ("2.30.7", 6),
];

/// The bits of `ncclProfileX` in `nccl_profiler.h`, with the first version that has each.
const EVENTS: [(&str, u32, u32); 15] = [
    ("Group", 0, 1),
    ("Coll", 1, 1),
    ("P2p", 2, 1),
    ("ProxyOp", 3, 1),
    ("ProxyStep", 4, 1),
    ("ProxyCtrl", 5, 1),
    ("KernelCh", 6, 3),
    ("NetPlugin", 7, 3),
    ("GroupApi", 8, 5),
    ("CollApi", 9, 5),
    ("P2pApi", 10, 5),
    ("KernelLaunch", 11, 5),
    ("CeColl", 12, 6),
    ("CeSync", 13, 6),
    ("CeBatch", 14, 6),
];

/// The states `ncclProfilerX` in `nccl_profiler.h` that the plug-in reads, with the first version that has each.
const STATES: [(&str, i32, u32); 15] = [
    ("ProxyOpSendPosted", 0, 1),
    ("ProxyOpSendRemFifoWait", 1, 1),
    ("ProxyOpSendTransmitted", 2, 1),
    ("ProxyOpSendDone", 3, 1),
    ("ProxyOpRecvPosted", 4, 1),
    ("ProxyOpRecvReceived", 5, 1),
    ("ProxyOpRecvTransmitted", 6, 1),
    ("ProxyOpRecvDone", 7, 1),
    ("ProxyStepSendGPUWait", 8, 1),
    ("ProxyStepSendWait", 9, 1),
    ("ProxyStepRecvWait", 10, 1),
    ("ProxyStepRecvFlushWait", 11, 1),
    ("ProxyStepRecvGPUWait", 12, 1),
    ("ProxyStepSendPeerWait_v4", 20, 4),
    ("KernelChStop", 22, 4),
];

#[test]
fn events_and_states_have_the_numbers_of_nccl() {
    let ours = [
        ("Group", event::GROUP),
        ("Coll", event::COLL),
        ("P2p", event::P2P),
        ("ProxyOp", event::PROXY_OP),
        ("ProxyStep", event::PROXY_STEP),
        ("KernelCh", event::KERNEL_CH),
        ("GroupApi", event::GROUP_API),
        ("CollApi", event::COLL_API),
        ("P2pApi", event::P2P_API),
    ];
    for (name, bits) in ours {
        let known = EVENTS.iter().find(|(event, ..)| *event == name);
        let (_, bit, since) = known.expect("an event of NCCL's");
        assert_eq!(bits, 1 << bit, "{name}");
        // A version ignores the bits of events that it lacks. The newest release has all events that the plug-in asks
        // for; the oldest lacks only those of calls.
        let in_all = RELEASES.iter().all(|(_, version)| version >= since);
        assert_eq!(in_all, !name.ends_with("Api"), "{name}");
    }
    let ours = [
        ("ProxyOpSendPosted", state::SEND_POSTED),
        ("ProxyOpSendRemFifoWait", state::SEND_REM_FIFO_WAIT),
        ("ProxyOpSendTransmitted", state::SEND_TRANSMITTED),
        ("ProxyOpSendDone", state::SEND_DONE),
        ("ProxyOpRecvPosted", state::RECV_POSTED),
        ("ProxyOpRecvReceived", state::RECV_RECEIVED),
        ("ProxyOpRecvTransmitted", state::RECV_TRANSMITTED),
        ("ProxyOpRecvDone", state::RECV_DONE),
        ("ProxyStepSendGPUWait", state::SEND_GPU_WAIT),
        ("ProxyStepSendWait", state::SEND_WAIT),
        ("ProxyStepRecvWait", state::RECV_WAIT),
        ("ProxyStepRecvFlushWait", state::RECV_FLUSH_WAIT),
        ("ProxyStepRecvGPUWait", state::RECV_GPU_WAIT),
        ("ProxyStepSendPeerWait_v4", state::SEND_PEER_WAIT),
        ("KernelChStop", state::KERNEL_CH_STOP),
    ];
    let known = STATES.map(|(name, number, _)| (name, number));
    assert_eq!(ours, known);
}

#[test]
fn events_of_known_shapes_allocate_nothing() {
    let output = Command::new(std::env::current_exe().expect("a file"))
        .args([
            "--exact",
            "allocations_are_counted",
            "--ignored",
            "--nocapture",
        ])
        .env("RANK", "0")
        .env("WORLD_SIZE", "2")
        .env("RCOMM_RING_DIR", "memory")
        .env_remove("RCOMM_NCCL_EVENTS")
        .output()
        .expect("this test program");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}");
    assert!(text.contains("2000 operations"), "{text}");
}

/// Not a test by itself: the test above runs it as a separate process, which has its own environment.
#[test]
#[ignore = "another test runs it as a separate process"]
#[allow(clippy::print_stdout, reason = "the other test reads it")]
fn allocations_are_counted() {
    static MASK: AtomicI32 = AtomicI32::new(0);
    let table = &ncclProfiler_v6;
    let mut context = null_mut();
    let first = allocation_counter::measure(|| {
        // SAFETY: the context lives until the call returns, and the mask is a static; the name is a constant.
        let code =
            unsafe { (table.init)(&mut context, 7, MASK.as_ptr(), c"w".as_ptr(), 1, 2, 0, None) };
        assert_eq!(code, 0);
    });
    assert!(
        first.count_total > 0,
        "the counter counts no allocation of the ring"
    );
    assert!(MASK.load(Ordering::Relaxed) != 0 && !context.is_null());
    let start = |kind: u64, parent: *mut c_void, facts: FactsV5| {
        let mut handle = null_mut();
        let mut descriptor = DescriptorV5 {
            kind,
            parent,
            rank: 0,
            facts,
        };
        // SAFETY: handle and descriptor live until the call returns, and each call below sets the facts of its kind,
        // with constant texts.
        unsafe { (table.start_event)(context, &mut handle, &mut descriptor) };
        handle
    };
    // SAFETY: the functions look a handle up and follow no pointer.
    let stop = |handle| unsafe { (table.stop_event)(handle) };
    let operation = || {
        let group_api = GroupApi {
            graph_captured: false,
            depth: 1,
        };
        let group = start(event::GROUP_API, null_mut(), FactsV5 { group_api });
        let coll_api = CollApi {
            func: c"AllReduce".as_ptr(),
            count: 8,
            datatype: c"ncclFloat32".as_ptr(),
            root: 0,
            stream: null_mut(),
            graph_captured: false,
        };
        let called = start(event::COLL_API, group, FactsV5 { coll_api });
        stop(called);
        let coll = Coll {
            seq_number: 0,
            func: c"AllReduce".as_ptr(),
            send_buffer: null(),
            receive_buffer: null_mut(),
            count: 8,
            root: 0,
            datatype: c"ncclFloat32".as_ptr(),
            channels: 1,
            warps: 8,
            algorithm: c"RING".as_ptr(),
            protocol: c"LL".as_ptr(),
        };
        let coll = CollV5 {
            coll,
            parent_group: null_mut(),
        };
        let task = start(event::COLL, called, FactsV5 { coll });
        stop(task);
        stop(group);
        let kernel_ch = KernelCh {
            channel: 0,
            timer: 1,
        };
        let kernel = start(event::KERNEL_CH, task, FactsV5 { kernel_ch });
        let proxy_op = ProxyOp {
            pid: std::process::id() as i32,
            channel: 0,
            peer: 1,
            steps: 4,
            chunk_size: 1,
            is_send: 1,
        };
        let transfer = start(event::PROXY_OP, task, FactsV5 { proxy_op });
        assert!(!kernel.is_null() && !transfer.is_null());
        stop(transfer);
        stop(kernel);
    };
    operation();
    let rest = allocation_counter::measure(|| (0..2_000).for_each(|_| operation()));
    assert_eq!(rest.count_total, 0);
    println!("2000 operations allocated nothing");
}
