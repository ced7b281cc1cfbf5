//! The interface has the memory layout of NCCL's public headers: offsets and sizes in bytes on 64-bit Linux, as a C
//! compiler computed them for the headers of NCCL 2.26.2, 2.27.3, 2.28.3, 2.29.7 and 2.30.7. If several of these
//! releases have one version of the interface, they agree.

use rcomm_nccl_profiler::abi::{
    Coll, CollApi, DescriptorV3, DescriptorV4, DescriptorV5, GroupApi, InitV3, InitV4, InitV5,
    KernelCh, NamedColl, NamedP2p, P2p, P2pApi, Profiler, ProxyOp, ProxyOpArgsV3, ProxyStep,
};
use std::mem::offset_of;

/// Offset of the facts in all descriptors.
const FACTS: usize = 24;

#[test]
fn descriptors_and_tables_have_the_sizes_of_nccl() {
    assert_eq!(size_of::<DescriptorV3>(), 120);
    assert_eq!(size_of::<DescriptorV4>(), 104);
    // Version 6 has longer names for the same 112 bytes.
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
    let both = [
        (offset_of!(Coll, func), 48, 32),
        (offset_of!(Coll, count), 72, 56),
        (offset_of!(Coll, root), 80, 64),
        (offset_of!(Coll, datatype), 88, 72),
        (offset_of!(Coll, channels), 96, 80),
        (offset_of!(Coll, warps), 97, 81),
        (offset_of!(Coll, algorithm), 104, 88),
        (offset_of!(Coll, protocol), 112, 96),
    ];
    for (at, in_v3, since_v4) in both {
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
