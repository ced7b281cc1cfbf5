//! Tests that the plug-in asks for more events for some time after a stall or a hang.

use crate::job::{Until, operation};
use crate::library::{Comm, NONE, Plugin, mask};
use crate::life::{assert_passes, small};
use rcomm_nccl_profiler::abi::event;

#[test]
fn after_a_stall_or_a_hang_the_plugin_asks_for_steps() {
    for version in [4, 5, 6] {
        assert_passes(&format!("deeper-{version}"), |_| {});
    }
}

/// Reports an operation that runs on the device for `ns`.
fn stall(plugin: &Plugin, comm: &Comm, ns: u64) {
    let task = plugin.task(comm, NONE, &small());
    plugin.stop(task);
    for channel in 0..2 {
        let kernel = plugin.kernel(comm, task, channel, 1_000);
        plugin.kernel_ends(kernel, 1_000 + ns);
    }
}

pub(crate) fn asks_for_steps() -> bool {
    mask() & event::PROXY_STEP != 0
}

/// Reports stalls and a hang, and checks when the plug-in asks for steps.
pub(crate) fn deeper(plugin: &Plugin) {
    const SECOND: u64 = 1_000_000_000;
    let comm = plugin.init(Some("w"), 7, 0, 2).expect("a communicator");
    stall(plugin, &comm, SECOND - 1);
    assert!(!asks_for_steps() && mask() & event::PROXY_OP != 0);
    stall(plugin, &comm, SECOND);
    assert!(asks_for_steps());
    // A communicator that begins now has the same mask.
    let other = plugin.init(Some("o"), 8, 0, 2).expect("a communicator");
    assert!(asks_for_steps());
    // Another stall does not extend the time with steps, and for some time after it no stall brings steps back.
    (1..4_096).for_each(|_| stall(plugin, &comm, SECOND));
    assert!(asks_for_steps());
    stall(plugin, &comm, SECOND);
    assert!(!asks_for_steps());
    stall(plugin, &comm, SECOND);
    assert!(!asks_for_steps());
    // An abort leaves an operation that has not ended.
    operation(plugin, &other, &small(), Until::Running);
    plugin.finalize(&other);
    assert!(asks_for_steps());
    operation(plugin, &comm, &small(), Until::Running);
    // After the end of the last communicator the mask does not change.
    plugin.finalize(&comm);
    let before = mask();
    assert_eq!(plugin.task(&comm, NONE, &small()), NONE);
    assert_eq!(mask(), before);
}

#[test]
fn events_that_the_user_has_named_stay_as_they_are_after_a_stall() {
    assert_passes("named-6", |command| {
        command.env("RCOMM_NCCL_EVENTS", "channels,network");
    });
}

/// Reports a stall to a plug-in whose events the user has named.
pub(crate) fn named(plugin: &Plugin) {
    let comm = plugin.init(Some("w"), 7, 0, 2).expect("a communicator");
    stall(plugin, &comm, 5_000_000_000);
    assert!(!asks_for_steps());
}
