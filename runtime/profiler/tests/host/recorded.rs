//! What a ring holds of a communicator, its operations and its transfers.

use crate::job::{Until, copy, operation};
use crate::library::Plugin;
use crate::life::{job_rings, passes, small};
use rcomm_recorder::model::EntryState;

#[test]
fn a_ring_has_the_communicator_s_name_and_the_plan_s_algorithm_and_protocol() {
    for version in [3, 4, 5, 6] {
        passes(&format!("clean-{version}"), |_| {});
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
    // Version 3 gives the largest number of channels that the operation may have.
    assert_eq!((kernel.channels, kernel.started), (2, 0b11));
}

#[test]
pub(crate) fn copies_to_the_own_rank_end_with_their_plan_and_leave_no_slot_taken() {
    for version in [3, 4, 5, 6] {
        passes(&format!("copies-{version}"), |_| {});
    }
}

pub(crate) fn copies(plugin: &Plugin) {
    let comm = plugin.init(Some("w"), 7, 0, 2).expect("a communicator");
    // More than the plug-in follows at a time.
    for _ in 0..5_000 {
        copy(plugin, &comm, true);
    }
    operation(plugin, &comm, &small(), Until::Running);
    let [ring] = &job_rings()[..] else {
        panic!("not exactly one ring");
    };
    let open = ring.entries.iter().filter(|it| !it.retired);
    let open: Vec<_> = open.map(|it| (it.op.name(), it.state)).collect();
    assert_eq!(open, [("all_reduce", EntryState::Started)]);
}

#[test]
fn transfers_are_recorded_with_each_word_that_asks_for_them() {
    for version in [3, 4, 5, 6] {
        for words in ["network", "steps", "channels,network"] {
            passes(&format!("masked-{version}"), |command| {
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
        .map(|it| (it.channel, it.peer, it.is_send))
        .collect();
    assert_eq!(seen.len(), 2, "{seen:?}");
    assert!(
        seen.contains(&(1, 1, true)) && seen.contains(&(1, 1, false)),
        "{seen:?}"
    );
}
