//! Tests of life cycles, limits and invalid input, none of which may harm the process.

use crate::deepening::asks_for_steps;
use crate::job::{Until, dumps, operation};
use crate::library::{Call, Handle, NONE, Plugin, mask};
use rcomm_nccl_profiler::abi::event;
use rcomm_recorder::model::{EntryState, Peer};
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// Runs a part of a test in a new process, which has recorded nothing yet, and waits until the process ends.
pub(crate) fn run_part(part: &str, directory: &Path, change: impl Fn(&mut Command)) -> Output {
    let mut command = command(part, directory);
    change(&mut command);
    command.output().expect("this test program")
}

/// Returns the command of a process that runs this part.
pub(crate) fn command(part: &str, directory: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("a file"));
    command
        .args(["--exact", "life::part", "--nocapture", "--ignored"])
        .env("RCOMM_TEST_PART", part)
        .env("RANK", "0")
        .env("WORLD_SIZE", "2")
        .env("TORCHELASTIC_RUN_ID", part)
        .env("RCOMM_RING_DIR", directory)
        .env_remove("RCOMM_NCCL_EVENTS")
        .stdin(Stdio::null());
    command
}

/// Asserts that a part succeeds in a new process; returns the folder of its rings.
pub(crate) fn assert_passes(part: &str, change: impl Fn(&mut Command)) -> tempfile::TempDir {
    let directory = tempfile::tempdir().expect("a folder");
    let output = run_part(part, directory.path(), change);
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{part}: {}\n{text}\n{errors}",
        output.status
    );
    // The plug-in catches its own panics, so they do not end the process.
    assert!(!errors.contains("panicked"), "{part}: {errors}");
    directory
}

/// Not a test by itself: see [`run_part`].
#[test]
#[ignore = "the other tests run it as a separate process"]
fn part() {
    let Ok(part) = std::env::var("RCOMM_TEST_PART") else {
        return;
    };
    let (name, version) = part.rsplit_once('-').unwrap_or((&part, "6"));
    let version = version.parse().expect("a number");
    let plugin = Plugin::open(version).expect("this version");
    match name {
        "reload" => reload(plugin),
        "many" => many_communicators(&plugin),
        "flood" => flood(&plugin),
        "threads" => threads(&plugin),
        "nonsense" => nonsense(&plugin),
        "fork" => fork(&plugin),
        "graphs" => graphs(&plugin),
        "abort" => abort(&plugin),
        "silent" => silent(&plugin),
        "order" => order(&plugin),
        "random" => crate::random::random(&plugin),
        "deeper" => crate::deepening::deeper(&plugin),
        "named" => crate::deepening::named(&plugin),
        "old" => old(&plugin),
        "killed" => crate::races::killed(&plugin),
        "aborts" => crate::races::aborts(&plugin),
        "grouped" => crate::races::grouped(&plugin),
        "clean" => crate::recorded::clean(&plugin),
        "copies" => crate::recorded::copies(&plugin),
        "masked" => crate::recorded::masked(&plugin),
        "surplus" => crate::recorded::surplus(&plugin),
        "collnet" => crate::recorded::collnet(&plugin),
        "plans" => crate::unreported::plans(&plugin),
        "crowded" => crate::recorded::crowded(&plugin),
        "dead" => crate::old_rings::dead(),
        "tidy" => crate::old_rings::tidy(&plugin),
        "exits" => crate::races::exits(Box::leak(Box::new(plugin))),
        other => panic!("no part {other}"),
    }
    // The harness's regular exit would remove the ring.
    // SAFETY: `_exit` takes an int and does not return; what this process has not written out is not needed.
    unsafe { libc::_exit(0) };
}

/// Makes the plug-in ask for all events for which it can ask.
pub(crate) fn all_events(command: &mut Command) {
    command.env("RCOMM_NCCL_EVENTS", "channels,steps");
}

/// A small all-reduce on two channels.
pub(crate) fn small() -> Call {
    Call::all_reduce(16, 2)
}

/// Returns the records of the rings of this process's job.
pub(crate) fn job_rings() -> Vec<rcomm_recorder::publish::Dump> {
    let directory = std::env::var("RCOMM_RING_DIR").expect("the test sets it");
    dumps(Path::new(&directory))
}

#[test]
fn the_ring_survives_a_reload_of_the_plugin() {
    for version in [3, 4, 5, 6] {
        assert_passes(&format!("reload-{version}"), |_| {});
    }
}

fn reload(plugin: Plugin) {
    let version = plugin.version;
    let mut plugin = plugin;
    for round in 1..=3 {
        let comm = plugin
            .init(Some("w"), 7 + round, 0, 2)
            .expect("a communicator");
        operation(&plugin, &comm, &small(), Until::Done);
        plugin.finalize(&comm);
        drop(plugin);
        plugin = Plugin::open(version).expect("the plug-in opens again");
        let [ring] = &job_rings()[..] else {
            panic!("not exactly one ring");
        };
        assert_eq!(ring.entries.len() as u64, round);
    }
}

#[test]
fn the_first_4096_communicators_take_constant_memory_and_further_ones_are_not_recorded() {
    assert_passes("many-6", |_| {});
}

fn many_communicators(plugin: &Plugin) {
    let init = |hash| plugin.init(None, hash, 0, 2).expect("a communicator");
    let mut comms = vec![init(1)];
    let before = resident();
    comms.extend((2..=5_000).map(init));
    let grown = resident().saturating_sub(before);
    // This includes the test's own list of communicators.
    assert!(grown < 1_024, "{grown} KiB for 4,999 communicators");
    for comm in &comms {
        operation(plugin, comm, &small(), Until::Done);
    }
    let [ring] = &job_rings()[..] else {
        panic!("not exactly one ring");
    };
    let named = ring
        .groups
        .iter()
        .filter(|group| group.info.name.starts_with("nccl-"))
        .count();
    assert_eq!(named, 4_096);
    assert_eq!(ring.entries.len(), 4_096);
    assert!(
        ring.entries
            .iter()
            .all(|it| it.state == EntryState::Completed)
    );
    for comm in &comms {
        plugin.finalize(comm);
    }
}

#[test]
fn millions_of_events_keep_the_newest_operations_in_constant_memory() {
    assert_passes("flood-6", |_| {});
}

/// Returns the resident memory of this process, KiB, on a system with pages of 4 KiB.
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("proc");
    statm
        .split(' ')
        .nth(1)
        .expect("a number")
        .parse::<usize>()
        .expect("a number")
        * 4
}

fn flood(plugin: &Plugin) {
    let comm = plugin.init(Some("w"), 7, 0, 2).expect("a communicator");
    let pid = std::process::id();
    let play = |operations: u32| {
        for _ in 0..operations {
            let group = plugin.group_api(&comm);
            let called = plugin.call(&comm, group, &small(), false);
            plugin.stop(called);
            let task = plugin.task(&comm, called, &small());
            plugin.stop(task);
            plugin.stop(group);
            for channel in 0..2 {
                let kernel = plugin.kernel(&comm, task, channel, 1);
                let transfer = plugin.transfer(&comm, task, (channel, 1, true), pid);
                plugin.stop(transfer);
                plugin.kernel_ends(kernel, 2);
            }
        }
    };
    play(40_000);
    let before = resident();
    // Each operation makes 17 calls of the plug-in.
    play(160_000);
    let grown = resident().saturating_sub(before);
    assert!(grown < 1_024, "{grown} KiB more");
    let [ring] = &job_rings()[..] else {
        panic!("not exactly one ring");
    };
    assert_eq!(ring.entries.len(), 16_384);
    let newest = ring.entries.last().expect("an entry");
    assert_eq!(
        (newest.record_id, newest.collective_seq_id),
        (200_000, 200_000)
    );
    assert!(
        ring.entries
            .iter()
            .all(|it| it.state == EntryState::Completed)
    );
}

#[test]
fn communicators_on_threads_of_their_own_do_not_mix() {
    for version in [3, 4, 5, 6] {
        assert_passes(&format!("threads-{version}"), |_| {});
    }
}

fn threads(plugin: &Plugin) {
    std::thread::scope(|scope| {
        for hash in 1..=4 {
            scope.spawn(move || {
                let comm = plugin.init(None, hash, 0, 2).expect("a communicator");
                for _ in 0..300 {
                    operation(plugin, &comm, &small(), Until::Done);
                }
                plugin.finalize(&comm);
            });
        }
    });
    let [ring] = &job_rings()[..] else {
        panic!("not exactly one ring");
    };
    assert_eq!(ring.entries.len(), 1_200);
    for group in 0..4 {
        let entries = ring.entries.iter().filter(|entry| entry.group == group);
        let numbers: Vec<u64> = entries.map(|entry| entry.collective_seq_id).collect();
        assert_eq!(numbers, (1..=300).collect::<Vec<_>>());
    }
    assert!(
        ring.entries
            .iter()
            .all(|entry| entry.state == EntryState::Completed && entry.retired)
    );
}

#[test]
fn invalid_handles_contexts_and_names_do_no_harm() {
    for version in [3, 4, 5, 6] {
        assert_passes(&format!("nonsense-{version}"), all_events);
    }
}

fn nonsense(plugin: &Plugin) {
    let mut comm = plugin.init(None, 7, 0, 2).expect("a communicator");
    assert!(asks_for_steps());
    assert_eq!(plugin.unknown(&comm), NONE);
    let nameless = Call {
        func: c"",
        ..small()
    };
    operation(plugin, &comm, &nameless, Until::Done);
    // Random bit patterns serve as handles.
    let mut word = 0x9e37_79b9_7f4a_7c15_u64;
    for _ in 0..100_000 {
        word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let handle = Handle(std::ptr::without_provenance_mut((word >> 3) as usize));
        plugin.stop_anything(handle);
        plugin.record(handle, (word & 31) as i32, 0, 0);
        plugin.kernel(&comm, handle, 255, 0);
        plugin.transfer(&comm, handle, (255, -1, true), std::process::id());
        plugin.step(&comm, handle, -1);
    }
    let task = plugin.task(&comm, NONE, &small());
    let kernel = plugin.kernel(&comm, task, 0, 0);
    // A proxy thread also serves other processes of its host, whose handles have no meaning here.
    assert_eq!(plugin.transfer(&comm, task, (0, 1, true), 1), NONE);
    // These are an operation whose names are null, and a plan whose handle NCCL does not want.
    let unnamed = plugin.task_without_names(&comm);
    assert_ne!(unnamed, NONE);
    plugin.stop(unnamed);
    plugin.start_without_out(&comm);
    plugin.finalize(&comm);
    plugin.stop_anything(kernel);
    plugin.stop_anything(task);
    assert_eq!(plugin.task(&comm, NONE, &small()), NONE);
    comm.context = NONE;
    assert_eq!(plugin.task(&comm, NONE, &small()), NONE);
    assert_eq!(job_rings().len(), 1);
}

#[test]
fn a_forked_child_records_nothing_and_its_parent_continues() {
    assert_passes("fork-6", |_| {});
}

fn fork(plugin: &Plugin) {
    let comm = plugin.init(Some("w"), 7, 0, 2).expect("a communicator");
    operation(plugin, &comm, &small(), Until::Done);
    // SAFETY: the child calls the plug-in, which takes no lock and no memory there, compares, and ends; it
    // uses nothing that another thread of the parent may have held.
    let child = unsafe { libc::fork() };
    if child == 0 {
        for _ in 0..10 {
            let task = plugin.task(&comm, NONE, &small());
            plugin.stop(task);
        }
        plugin.finalize(&comm);
        // The exit handlers must not touch the parent's ring.
        // SAFETY: `exit` takes an int. It runs the handlers of this process, which is the purpose, in a
        // child with this one thread.
        unsafe { libc::exit(0) };
    }
    let mut status = 0;
    // SAFETY: `child` is a child of this process that is waited for once, and `status` holds an int.
    unsafe { libc::waitpid(child, &mut status, 0) };
    assert_eq!(status, 0);
    operation(plugin, &comm, &small(), Until::Done);
    let [ring] = &job_rings()[..] else {
        panic!("not exactly one ring");
    };
    assert_eq!(ring.entries.len(), 2);
}

#[test]
fn operations_replayed_by_a_graph_are_numbered_in_a_separate_group() {
    assert_passes("graphs-6", |_| {});
}

fn graphs(plugin: &Plugin) {
    let comm = plugin.init(Some("w"), 7, 0, 2).expect("a communicator");
    let group = plugin.group_api(&comm);
    let captured = plugin.call(&comm, group, &small(), true);
    plugin.stop(captured);
    plugin.stop(group);
    operation(plugin, &comm, &small(), Until::Done);
    for _ in 0..3 {
        let task = plugin.task(&comm, captured, &small());
        plugin.stop(task);
        for channel in 0..2 {
            let kernel = plugin.kernel(&comm, task, channel, 1);
            plugin.kernel_ends(kernel, 2);
        }
    }
    let [ring] = &job_rings()[..] else {
        panic!("not exactly one ring");
    };
    if mask() & event::KERNEL_CH == 0 {
        assert_eq!(ring.entries.len(), 2);
        assert_eq!(ring.groups.len(), 1);
        assert!(ring.entries.iter().all(|entry| entry.retired));
        return;
    }
    let seen: Vec<_> = ring
        .entries
        .iter()
        .map(|entry| {
            let name = ring.groups[entry.group as usize].info.name.as_str();
            (name, entry.collective_seq_id, entry.graph_id, entry.state)
        })
        .collect();
    let (called, replays) = ("nccl-0000000000000007", "nccl-0000000000000007-graphs");
    let done = EntryState::Completed;
    assert_eq!(
        seen,
        [
            (called, 1, Some(0), done),
            (called, 2, None, done),
            (replays, 1, None, done),
            (replays, 2, None, done),
            (replays, 3, None, done),
        ]
    );
}

#[test]
fn pending_operations_of_an_aborted_communicator_are_recorded_as_failed() {
    for version in [3, 4, 5, 6] {
        assert_passes(&format!("abort-{version}"), |_| {});
    }
}

fn abort(plugin: &Plugin) {
    let comm = plugin.init(Some("w"), 7, 0, 2).expect("a communicator");
    operation(plugin, &comm, &small(), Until::Done);
    operation(plugin, &comm, &small(), Until::Running);
    std::thread::scope(|scope| {
        // The proxy thread still reports when the communicator ends.
        scope.spawn(|| operation(plugin, &comm, &small(), Until::OneChannelLeft));
        plugin.finalize(&comm);
    });
    let [ring] = &job_rings()[..] else {
        panic!("not exactly one ring");
    };
    let states: Vec<_> = ring.entries.iter().map(|entry| entry.state).collect();
    assert_eq!(states[..2], [EntryState::Completed, EntryState::Failed]);
}

#[test]
fn without_a_ring_the_plugin_prints_one_line_and_requests_no_events() {
    let directory = tempfile::tempdir().expect("a folder");
    let file = directory.path().join("file");
    std::fs::write(&file, "").expect("writable");
    for (variable, value) in [
        ("RCOMM_RING_DIR", file.to_str().expect("text")),
        ("RCOMM_NCCL_EVENTS", "everything"),
    ] {
        let output = run_part("silent-6", directory.path(), |command| {
            command.env(variable, value);
        });
        assert!(output.status.success(), "{output:?}");
        let errors = String::from_utf8_lossy(&output.stderr);
        let lines: Vec<&str> = errors
            .lines()
            .filter(|line| line.contains("profiler plug-in"))
            .collect();
        assert_eq!(lines.len(), 1, "{errors}");
        assert!(lines[0].contains("records nothing"), "{errors}");
    }
    let output = run_part("silent-6", directory.path(), |command| {
        command.env("RCOMM_NCCL_EVENTS", "none");
    });
    assert!(output.status.success(), "{output:?}");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!errors.contains("plug-in"), "{errors}");
}

fn silent(plugin: &Plugin) {
    for hash in 0..3 {
        let comm = plugin
            .init(Some("w"), hash, 0, 2)
            .expect("a plug-in without a ring refuses nothing");
        assert_eq!((comm.context, mask()), (NONE, 0));
        assert_eq!(plugin.task(&comm, NONE, &small()), NONE);
    }
}

#[test]
fn calls_keep_their_numbers_when_plans_come_in_another_order() {
    assert_passes("order-6", |_| {});
}

fn order(plugin: &Plugin) {
    let comm = plugin.init(Some("w"), 7, 0, 4).expect("a communicator");
    let group = plugin.group_api(&comm);
    let calls = [
        Call::all_reduce(8, 1),
        Call::all_reduce(1 << 20, 1),
        Call::message(c"Send", 4, 3),
        Call::message(c"Recv", 4, 2),
    ];
    let called = calls.map(|call| {
        let handle = plugin.call(&comm, group, &call, false);
        plugin.stop(handle);
        handle
    });
    // NCCL carries out this operation without reporting events after the call.
    let unreported = plugin.call(&comm, group, &Call::all_reduce(2, 1), false);
    plugin.stop(unreported);
    for index in [1, 0, 3, 2] {
        let task = plugin.task(&comm, called[index], &calls[index]);
        plugin.stop(task);
        let kernel = plugin.kernel(&comm, task, 0, 1);
        plugin.kernel_ends(kernel, 2);
    }
    plugin.stop(group);
    let [ring] = &job_rings()[..] else {
        panic!("not exactly one ring");
    };
    let peers: Vec<_> = ring.entries.iter().map(|entry| entry.peer).collect();
    assert_eq!(
        peers,
        [
            Peer::None,
            Peer::None,
            Peer::Rank(3),
            Peer::Rank(2),
            Peer::None
        ]
    );
    let numbers: Vec<_> = ring
        .entries
        .iter()
        .map(|entry| entry.collective_seq_id)
        .collect();
    assert_eq!(numbers, [1, 2, 2, 2, 3]);
    let ends: Vec<_> = ring
        .entries
        .iter()
        .map(|entry| (entry.state, entry.retired))
        .collect();
    assert_eq!(ends[..4], [(EntryState::Completed, true); 4]);
    assert_eq!(ends[4], (EntryState::Scheduled, true));
}

#[test]
fn versions_1_and_2_are_refused_with_one_line_and_version_7_does_not_exist() {
    let directory = tempfile::tempdir().expect("a folder");
    for version in [1, 2] {
        let output = run_part(&format!("old-{version}"), directory.path(), |_| {});
        assert!(output.status.success(), "{output:?}");
        let errors = String::from_utf8_lossy(&output.stderr);
        let lines: Vec<&str> = errors
            .lines()
            .filter(|line| line.contains("plug-in"))
            .collect();
        assert_eq!(
            lines,
            [
                "rcomm: NCCL profiler plug-in: records nothing: this version of NCCL is older than 2.26, the oldest that \
                 the plug-in supports"
            ]
        );
    }
    assert!(Plugin::open(7).is_none());
}

fn old(plugin: &Plugin) {
    for _ in 0..3 {
        let refused = plugin.init(Some("w"), 7, 0, 2);
        assert_eq!(refused.err(), Some(5));
    }
}

#[test]
fn replays_of_graphs_are_recorded_only_if_each_rank_reports_them() {
    // Without events of channels, NCCL reports the replays of a plan only if the plan uses the network.
    assert_passes("graphs-6", |command| {
        command.env("RCOMM_NCCL_EVENTS", "calls");
    });
}
