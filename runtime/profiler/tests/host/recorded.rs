//! A ring holds the facts of a communicator, its operations and its transfers.

use crate::job::{Until, copy, operation};
use crate::library::{Call, NONE, Plugin};
use crate::life::{assert_passes, job_rings, small};
use rcomm_recorder::model::EntryState;

#[test]
fn a_ring_has_the_communicator_s_name_and_the_plan_s_algorithm_and_protocol() {
    for version in [3, 4, 5, 6] {
        assert_passes(&format!("clean-{version}"), |_| {});
    }
}

pub(crate) fn clean(plugin: &Plugin) {
    let comm = plugin.init(Some("tp"), 7, 1, 2).expect("a communicator");
    operation(plugin, &comm, &small(), Until::Done);
    operation(plugin, &comm, &small(), Until::Running);
    let [ring] = &job_rings()[..] else {
        panic!("not exactly one ring");
    };
    assert_eq!(ring.groups[0].info.name, "nccl-0000000000000007");
    assert_eq!(ring.groups[0].info.desc, "tp");
    let communicators = ring.communicators();
    let [kernel] = &communicators[0].kernels[..] else {
        panic!("not one operation under way: {communicators:?}");
    };
    assert_eq!((&*kernel.algorithm, &*kernel.protocol), ("RING", "SIMPLE"));
    // Version 3 gives only the largest number of channels that the operation may have.
    let channels = if plugin.version == 3 { 0 } else { 2 };
    assert_eq!((kernel.channels, kernel.started), (channels, 0b11));
}

#[test]
fn copies_to_the_own_rank_end_with_their_plan_and_leave_no_slot_taken() {
    for version in [3, 4, 5, 6] {
        assert_passes(&format!("copies-{version}"), |_| {});
    }
}

pub(crate) fn copies(plugin: &Plugin) {
    let comm = plugin.init(Some("w"), 7, 0, 2).expect("a communicator");
    // These are more operations than the plug-in follows at a time.
    for _ in 0..5_000 {
        copy(plugin, &comm, true);
    }
    operation(plugin, &comm, &small(), Until::Running);
    let [ring] = &job_rings()[..] else {
        panic!("not exactly one ring");
    };
    let open = ring.entries.iter().filter(|entry| !entry.retired);
    let open: Vec<_> = open.map(|entry| (entry.op.name(), entry.state)).collect();
    assert_eq!(open, [("all_reduce", EntryState::Started)]);
}

#[test]
fn operations_beyond_those_that_are_followed_are_recorded_once_each() {
    for version in [3, 4, 5, 6] {
        assert_passes(&format!("surplus-{version}"), |_| {});
    }
}

/// Reports the operations of a large all-to-all in one group call, which are more than the plug-in follows at a time.
pub(crate) fn surplus(plugin: &Plugin) {
    const COUNT: usize = 8_192 + 100;
    let comm = plugin.init(Some("w"), 7, 0, 2).expect("a communicator");
    let group = match plugin.has_calls() {
        true => plugin.group_api(&comm),
        false => NONE,
    };
    let send = Call::message(c"Send", 4, 1);
    let called: Vec<_> = (0..COUNT)
        .map(|_| {
            if !plugin.has_calls() {
                return NONE;
            }
            let called = plugin.call(&comm, group, &send, false);
            plugin.stop(called);
            called
        })
        .collect();
    let plan = plugin.plan(&comm);
    for called in called {
        let task = plugin.task_of(&comm, plan, called, &send);
        plugin.stop(task);
    }
    plugin.stop(plan);
    plugin.stop(group);
    let [ring] = &job_rings()[..] else {
        panic!("not exactly one ring");
    };
    let numbers = ring.entries.iter().map(|entry| entry.p2p_seq_id);
    assert!(
        numbers.eq(1..=COUNT as u64),
        "{} records",
        ring.entries.len()
    );
    let watched = ring.entries.iter().filter(|entry| !entry.retired).count();
    assert_eq!(watched, 8_192);
}

#[test]
fn transfers_are_recorded_with_each_word_that_asks_for_them() {
    for version in [3, 4, 5, 6] {
        for words in ["network", "steps", "channels,network"] {
            assert_passes(&format!("masked-{version}"), |command| {
                command.env("RCOMM_NCCL_EVENTS", words);
            });
        }
    }
}

pub(crate) fn masked(plugin: &Plugin) {
    let comm = plugin.init(Some("w"), 7, 0, 2).expect("a communicator");
    operation(plugin, &comm, &small(), Until::OneChannelLeft);
    let [ring] = &job_rings()[..] else {
        panic!("not exactly one ring");
    };
    let links = &ring.communicators()[0].links;
    let seen: Vec<_> = links
        .iter()
        .map(|link| (link.channel, link.peer, link.is_send))
        .collect();
    assert_eq!(seen.len(), 2, "{seen:?}");
    assert!(
        seen.contains(&(1, 1, true)) && seen.contains(&(1, 1, false)),
        "{seen:?}"
    );
}

#[test]
fn transfers_of_collnet_are_not_recorded_because_their_end_is_not_reported() {
    for version in [3, 4, 5, 6] {
        assert_passes(&format!("collnet-{version}"), |_| {});
    }
}

/// The peers `collnetDirect.out`, `collnetChain.up` and `nvls.out` are the number of ranks (graph/connect.cc:63, 198
/// and 261 of 2.26.2), which version 3 does not give. The transport for CollNet ends no transfer.
pub(crate) fn collnet(plugin: &Plugin) {
    let comm = plugin.init(Some("w"), 7, 0, 2).expect("a communicator");
    let pid = std::process::id();
    for algorithm in [c"COLLNET_DIRECT", c"COLLNET_CHAIN", c"NVLS"] {
        let call = Call {
            algorithm,
            ..small()
        };
        let task = plugin.task(&comm, NONE, &call);
        assert_ne!(task, NONE);
        assert_eq!(plugin.transfer(&comm, task, (0, 2, false), pid), NONE);
        assert_eq!(plugin.transfer(&comm, task, (0, 2, true), pid), NONE);
        for kernel in [0, 1].map(|channel| plugin.kernel(&comm, task, channel, 1)) {
            plugin.kernel_ends(kernel, 2);
        }
    }
    let task = plugin.task(&comm, NONE, &small());
    if plugin.version > 3 {
        assert_eq!(plugin.transfer(&comm, task, (0, 2, false), pid), NONE);
    }
    assert_ne!(plugin.transfer(&comm, task, (0, 1, false), pid), NONE);
    let [ring] = &job_rings()[..] else {
        panic!("not exactly one ring");
    };
    let peers: Vec<u32> = ring.communicators()[0]
        .links
        .iter()
        .map(|link| link.peer)
        .collect();
    assert_eq!(peers, [1]);
    let states = ring.entries.iter().map(|entry| entry.state);
    let completed = states.filter(|&state| state == EntryState::Completed);
    let completed = completed.count();
    assert_eq!(completed, 3);
}

#[test]
fn transfers_that_find_no_room_are_counted_in_the_record() {
    assert_passes("crowded-6", |_| {});
}

pub(crate) fn crowded(plugin: &Plugin) {
    let comm = plugin.init(Some("w"), 7, 0, 5_000).expect("a communicator");
    let task = plugin.task(&comm, NONE, &small());
    let pid = std::process::id();
    let begun =
        (1..5_000).filter(|&peer| plugin.transfer(&comm, task, (0, peer, true), pid) != NONE);
    let begun = begun.count() as u64;
    let [ring] = &job_rings()[..] else {
        panic!("not exactly one ring");
    };
    let communicator = &ring.communicators()[0];
    assert_eq!(communicator.links.len() as u64, begun);
    assert_eq!(begun + communicator.links_lost, 4_999);
}
