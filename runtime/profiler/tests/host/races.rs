//! Communicators and the process end while threads report events.

use crate::job::{Job, Until, dumps, operation};
use crate::library::{Call, Comm, Handle, NONE, Plugin};
use rcomm_recorder::model::EntryState;
use std::path::Path;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};

fn ring() -> rcomm_recorder::publish::Dump {
    let directory = std::env::var("RCOMM_RING_DIR").expect("the test sets it");
    let mut rings = dumps(Path::new(&directory));
    assert_eq!(rings.len(), 1);
    rings.remove(0)
}

fn all_reduce() -> Call {
    Call::all_reduce(16, 2)
}

fn call_in(plugin: &Plugin, comm: &Comm, group: Handle) -> Handle {
    let called = plugin.call(comm, group, &all_reduce(), false);
    plugin.stop(called);
    called
}

/// Aborts one of two communicators in the middle of a group call on both. Afterwards, no operation of either
/// communicator is watched, and those of the aborted one have failed.
pub(crate) fn grouped(plugin: &Plugin) {
    for round in 0..200 {
        let [kept, aborted] = [1, 2].map(|number| {
            let hash = round * 2 + number;
            plugin.init(None, hash, 0, 2).expect("a communicator")
        });
        let group = plugin.group_api(&kept);
        let calls = [&kept, &aborted, &kept, &aborted, &kept];
        let handles = calls.map(|comm| call_in(plugin, comm, group));
        plugin.finalize(&aborted);
        // Only one operation gets a plan.
        let task = plugin.task(&kept, handles[0], &all_reduce());
        assert_ne!(task, NONE, "round {round}");
        assert_eq!(plugin.task(&aborted, handles[1], &all_reduce()), NONE);
        plugin.stop(task);
        plugin.stop(group);
        for channel in 0..2 {
            let kernel = plugin.kernel(&kept, task, channel, 1);
            plugin.kernel_ends(kernel, 2);
        }
        if round % 50 == 0 {
            let entries = ring().entries;
            let last = &entries[entries.len() - 5..];
            let states = last.iter().map(|entry| (entry.state, entry.retired));
            let states: Vec<_> = states.collect();
            let (left, failed) = ((EntryState::Scheduled, true), (EntryState::Failed, true));
            let done = (EntryState::Completed, true);
            assert_eq!(states, [done, failed, left, failed, left], "round {round}");
        }
        plugin.finalize(&kept);
    }
}

/// Two threads report operations on one communicator, and a third ends it at any moment. Afterwards, nothing is open,
/// and the next communicator's operations are whole.
pub(crate) fn aborts(plugin: &Plugin) {
    for round in 0..30 {
        let comm = plugin.init(None, round, 0, 2).expect("a communicator");
        let next = plugin
            .init(None, 1_000 + round, 0, 2)
            .expect("a communicator");
        let begin = Barrier::new(4);
        let progress = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for thread in 0..2 {
                let (begin, comm, progress) = (&begin, &comm, &progress);
                scope.spawn(move || {
                    begin.wait();
                    for _ in 0..40 {
                        report_events(plugin, comm, 2 * thread);
                        progress.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            scope.spawn(|| {
                begin.wait();
                while progress.load(Ordering::Relaxed) < 2 * round {
                    std::hint::spin_loop();
                }
                plugin.finalize(&comm);
            });
            // These operations take the slots that the end of the other communicator frees.
            begin.wait();
            for _ in 0..40 {
                report_events(plugin, &next, 0);
            }
        });
        let ring = ring();
        for entry in ring.entries.iter() {
            assert!(entry.retired, "round {round}: {entry:?}");
        }
        let name = format!("nccl-{:016x}", 1_000 + round);
        let mut groups = ring.groups.iter();
        let group = groups.position(|group| group.info.name == name);
        let group = group.expect("the next communicator") as u32;
        let its_entries = ring.entries.iter().filter(|entry| entry.group == group);
        let states: Vec<_> = its_entries.map(|entry| entry.state).collect();
        assert_eq!(states, [EntryState::Completed; 40], "round {round}");
        for communicator in ring.communicators() {
            assert_eq!(communicator.links, [], "round {round}");
        }
        plugin.finalize(&next);
    }
}

/// Reports an operation with its events on two channels, from `first` on. Only this thread reports the events of these
/// channels.
fn report_events(plugin: &Plugin, comm: &Comm, first: u8) {
    let group = plugin.group_api(comm);
    let called = call_in(plugin, comm, group);
    let task = plugin.task(comm, called, &all_reduce());
    plugin.stop(task);
    plugin.stop(group);
    let pid = std::process::id();
    for channel in first..first + 2 {
        let kernel = plugin.kernel(comm, task, channel, 1);
        let transfer = plugin.transfer(comm, task, (channel, 1, true), pid);
        plugin.stop(transfer);
        plugin.kernel_ends(kernel, 2);
    }
}

/// Runs operations until the process is killed, and creates the file `runs` after the first 51.
pub(crate) fn killed(plugin: &Plugin) {
    let comm = plugin.init(None, 7, 0, 2).expect("a communicator");
    for number in 0_u64.. {
        operation(plugin, &comm, &all_reduce(), Until::Done);
        if number == 50 {
            let directory = std::env::var("RCOMM_RING_DIR").expect("the test sets it");
            std::fs::write(Path::new(&directory).join("runs"), "").expect("writable");
        }
    }
}

#[test]
fn an_abort_within_a_group_call_leaves_no_operation_open() {
    crate::life::assert_passes("grouped-6", |command| {
        command.env("RCOMM_NCCL_EVENTS", "1024");
    });
}

#[test]
fn a_communicator_that_ends_while_two_threads_use_it_leaves_nothing_open() {
    crate::life::assert_passes("aborts-6", |command| {
        command.env("RCOMM_NCCL_EVENTS", "1024");
    });
}

#[test]
fn the_ring_of_a_process_that_was_killed_amid_events_is_whole() {
    let directory = tempfile::tempdir().expect("a folder");
    let mut child = crate::life::command("killed-6", directory.path())
        .spawn()
        .expect("this test program");
    let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while !directory.path().join("runs").exists() {
        assert!(std::time::Instant::now() < end, "it did not begin in time");
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    child.kill().expect("it runs");
    child.wait().expect("it ends");
    let rings = dumps(directory.path());
    let [ring] = &rings[..] else {
        panic!("not exactly one ring");
    };
    assert!(ring.entries.len() > 50);
    let open = ring.entries.iter().filter(|entry| !entry.retired).count();
    assert!(
        open <= 1,
        "{open} operations are open; at most one ran at a time"
    );
    let numbers = ring.entries.iter().map(|entry| entry.collective_seq_id);
    let numbers: Vec<u64> = numbers.collect();
    assert!(numbers.windows(2).all(|pair| pair[1] == pair[0] + 1));
}

#[test]
fn a_ring_with_operations_that_an_abort_has_ended_outlives_an_exit_with_status_0() {
    let mut last = crate::faults::all(Until::Done);
    last[1].0 = Until::Running;
    let mut job = Job::start(6, last, |_| {});
    job.close();
    let left = job.dumps();
    let ring = left.iter().find(|dump| dump.identity.rank == Some(1));
    let ring = ring.expect("the ring of the rank that was aborted");
    let entries = ring.entries.iter();
    let failed = entries.filter(|entry| entry.state == EntryState::Failed);
    assert_eq!(failed.count(), 1);
}

/// Ends the process by `exit` with status 0 while a thread reports events.
pub(crate) fn exits(plugin: &'static Plugin) {
    let comm = plugin.init(None, 7, 0, 2).expect("a communicator");
    let number = std::sync::Arc::new(AtomicU64::new(0));
    let seen = number.clone();
    std::thread::spawn(move || {
        loop {
            report_events(plugin, &comm, 0);
            number.fetch_add(1, Ordering::Relaxed);
        }
    });
    while seen.load(Ordering::Relaxed) < 100 {
        std::thread::yield_now();
    }
    // SAFETY: `exit` takes an int, and runs the handlers that this process has registered, which is the purpose.
    unsafe { libc::exit(0) };
}

#[test]
fn a_process_may_exit_while_a_thread_reports_events() {
    for version in [3, 6] {
        for _ in 0..5 {
            crate::life::assert_passes(&format!("exits-{version}"), |_| {});
        }
    }
}
