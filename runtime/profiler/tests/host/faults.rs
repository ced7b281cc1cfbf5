//! Tests that the first finding names each fault in a job of processes that simulate NCCL and load the plug-in.

use crate::job::{BEHIND, GRAPH, Job, LATE, MESSAGE, ON_PAIR, PAIR_FIRST, Until, without_launcher};
use rcomm_analyzer::{Code, Policy, Report, Verdict, analyze};
use std::process::Command;

/// Number of elements of the last operation, unless a test sets another.
pub(crate) const COUNT: usize = 1 << 20;
/// The versions of NCCL's profiler interface that the plug-in supports.
pub(crate) const PROFILER_VERSIONS: [u32; 4] = [3, 4, 5, 6];

pub(crate) fn judge(job: &Job) -> Report {
    let policy = Policy {
        world_size: Some(4),
        ..Policy::default()
    };
    analyze(&job.dumps(), &policy)
}

/// The last operations of a job in which all ranks get equally far.
pub(crate) fn all(until: Until) -> [(Until, usize); 4] {
    [(until, COUNT); 4]
}

/// The last operations of a job in which one rank gets as far as `until`, and the others as far as `others`.
pub(crate) fn with_one(rank: usize, until: Until, others: Until) -> [(Until, usize); 4] {
    let mut last_operations = all(others);
    last_operations[rank].0 = until;
    last_operations
}

/// Returns the code, the culprits and the sentence of the first finding.
pub(crate) fn first(report: &Report) -> (Code, &[u32], &str) {
    let finding = report.findings.first();
    let finding = finding.unwrap_or_else(|| panic!("no finding: {report:?}"));
    (finding.code, &finding.culprit_ranks, &finding.sentence)
}

#[test]
fn a_healthy_job_has_no_finding_in_any_version() {
    for version in PROFILER_VERSIONS {
        let job = Job::start(version, all(Until::Done), |_| {});
        let dumps = job.dumps();
        assert_eq!(dumps.len(), 4);
        for dump in &dumps {
            // Up to version 4 of the profiler interface, NCCL does not report calls, so copies in place are not seen.
            let copies = if version < 5 { 10 } else { 20 };
            assert_eq!(dump.entries.len(), 16 + copies, "version {version}");
            let pending = dump.entries.iter().filter(|entry| !entry.retired);
            assert_eq!(pending.count(), 0, "version {version}");
        }
        let report = judge(&job);
        assert_eq!(
            report.findings.len(),
            0,
            "version {version}: {:?}",
            report.findings
        );
        assert_eq!(
            report.verdict,
            Verdict::Healthy,
            "version {version}: {report:?}"
        );
    }
}

/// Asserts that the first finding has this code, these culprits, and these words in its sentence. `case` begins the
/// messages.
fn assert_first(report: &Report, code: Code, culprits: &[u32], says: &[&str], case: &str) {
    let (found, ranks, sentence) = first(report);
    assert_eq!((found, ranks), (code, culprits), "{case}: {sentence}");
    for words in says {
        assert!(sentence.contains(words), "{case}: {sentence}");
    }
    // NCCL has no receive from any rank; of a copy in place it does not report the peer.
    assert!(!sentence.contains("any rank"), "{case}: {sentence}");
}

/// Starts a job whose ranks end like `last_operations` in each of these versions, and asserts its first finding.
fn assert_finds(
    versions: &[u32],
    last_operations: [(Until, usize); 4],
    change: impl Fn(&mut Command),
    (code, culprits, says): (Code, &[u32], &[&str]),
) {
    for &version in versions {
        let job = Job::start(version, last_operations, &change);
        let case = format!("version {version}");
        assert_first(&judge(&job), code, culprits, says, &case);
    }
}

/// Returns a change that sets an environment variable.
fn variable(name: &'static str, value: &'static str) -> impl Fn(&mut Command) {
    move |command| {
        command.env(name, value);
    }
}

/// Asks for the events that are recorded by default, in a ring of 256 operations.
fn set_default_events(command: &mut Command) {
    command.env("RCOMM_NCCL_EVENTS", "256");
}

/// Rank 1 sends no more to rank 2 on channel 3.
pub(crate) fn one_channel_stuck() -> [(Until, usize); 4] {
    with_one(1, Until::OneChannelLeft, Until::OneChannelStarves)
}

#[test]
fn a_rank_that_never_calls_or_never_starts_is_named() {
    let never = "never issued all_reduce #6";
    let not_started = "has not started it";
    for (rank, until, versions, says) in [
        (2, Until::NotCalled, &PROFILER_VERSIONS[..], never),
        // Up to version 4 of the profiler interface, NCCL does not report calls.
        (1, Until::Called, &[5, 6], not_started),
        (3, Until::Planned, &PROFILER_VERSIONS, not_started),
    ] {
        let last_operations = with_one(rank, until, Until::Running);
        let expected = (Code::E101, &[rank as u32][..], &[says][..]);
        assert_finds(versions, last_operations, |_| {}, expected);
    }
}

#[test]
fn a_hang_inside_a_replayed_graph_is_reported_with_rank_and_channel() {
    let graph = variable(GRAPH, "1");
    let absent = with_one(2, Until::NotCalled, Until::Running);
    let says = ["all_reduce #3", "graph replays"];
    assert_finds(&[5, 6], absent, &graph, (Code::E101, &[2], &says));
    let says = ["channel 3 from rank 1"];
    assert_finds(
        &[5, 6],
        one_channel_stuck(),
        &graph,
        (Code::E135, &[], &says),
    );
}

#[test]
fn a_channel_that_is_stuck_towards_a_peer_is_named() {
    let says = [
        "channel 3 from rank 1",
        "to rank 2",
        "step 5 of 16",
        "waits for the network",
    ];
    let expected = (Code::E135, &[][..], &says[..]);
    assert_finds(&PROFILER_VERSIONS, one_channel_stuck(), |_| {}, expected);
    // Operations queued behind the stuck one do not become the first finding.
    assert_finds(
        &PROFILER_VERSIONS,
        one_channel_stuck(),
        variable(BEHIND, "1"),
        expected,
    );
    // Version 3 reports the progress of transfers without being asked for steps.
    assert_finds(&[3], one_channel_stuck(), set_default_events, expected);
}

#[test]
fn only_channels_known_to_have_finished_are_said_to_have() {
    let channels = variable("RCOMM_NCCL_EVENTS", "channels,256");
    // Version 3 states only an upper limit of the channels; this test states twice as many as the operation uses.
    for (version, says) in [
        (3, "channel 3 has not finished, channels 0, 1, 2 have"),
        (4, "channel 3 has not finished, the others have"),
        (6, "channel 3 has not finished, the others have"),
    ] {
        let expected = (Code::E135, &[][..], &[says][..]);
        assert_finds(&[version], one_channel_stuck(), &channels, expected);
    }
    for version in PROFILER_VERSIONS {
        let job = Job::start(version, all(Until::Running), &channels);
        let report = judge(&job);
        for finding in &report.findings {
            let sentence = &finding.sentence;
            assert!(!sentence.contains("not finished"), "{version}: {sentence}");
        }
    }
}

#[test]
fn faults_are_found_with_the_events_that_are_recorded_by_default() {
    let absent = with_one(2, Until::NotCalled, Until::Running);
    let planned = with_one(3, Until::Planned, Until::Running);
    assert_finds(
        &[4, 6],
        absent,
        set_default_events,
        (Code::E101, &[2], &["never issued"]),
    );
    assert_finds(
        &[4, 6],
        planned,
        set_default_events,
        (Code::E101, &[3], &["has not started it"]),
    );
    for version in [4, 6] {
        for behind in ["", BEHIND] {
            let job = Job::start(version, one_channel_stuck(), |command| {
                set_default_events(command);
                if !behind.is_empty() {
                    command.env(behind, "1");
                }
            });
            let report = judge(&job);
            let case = format!("version {version} {behind}");
            assert_first(
                &report,
                Code::E135,
                &[],
                &["channel 3 has not finished"],
                &case,
            );
            // Each rank has transfers under way, so which one is stuck is unknown; the finding says how to find out.
            let next = &report.findings[0].next;
            assert!(next.contains("RCOMM_NCCL_EVENTS=steps"), "{case}: {next}");
        }
    }
}

#[test]
fn the_channel_of_a_message_that_is_stuck_is_named() {
    let mut last_operations = all(Until::Done);
    (last_operations[0].0, last_operations[1].0) =
        (Until::OneChannelLeft, Until::OneChannelStarves);
    let message = variable(MESSAGE, "1");
    let says = ["channel 1 from rank 0", "to rank 1"];
    assert_finds(&[4, 6], last_operations, &message, (Code::E135, &[], &says));
    // Without steps, the two ends of the only transfer under way are known.
    let default = |command: &mut Command| {
        message(command);
        set_default_events(command);
    };
    let says = ["channel 1 from rank 0 to rank 1 has not finished"];
    assert_finds(&[4, 6], last_operations, default, (Code::E135, &[], &says));
}

#[test]
fn a_rank_whose_kernels_are_short_each_time_is_named_as_the_late_one() {
    for version in [4, 6] {
        let job = Job::start(version, all(Until::Done), |command| {
            command.env(LATE, "2").env("RCOMM_NCCL_EVENTS", "1024");
        });
        let report = judge(&job);
        assert_first(
            &report,
            Code::W220,
            &[2],
            &[],
            &format!("version {version}"),
        );
        assert_eq!(report.verdict, Verdict::Slow);
    }
}

#[test]
fn a_rank_that_was_killed_or_stopped_is_named() {
    for version in PROFILER_VERSIONS {
        let absent = with_one(2, Until::NotCalled, Until::Running);
        let case = format!("version {version}");
        let mut job = Job::start(version, absent, |_| {});
        job.kill(2);
        assert_first(&judge(&job), Code::E150, &[2], &[], &case);
        let job = Job::start(version, absent, |_| {});
        job.stop(2);
        let says = ["never issued all_reduce #6"];
        assert_first(&judge(&job), Code::E151, &[2], &says, &case);
    }
}

/// As in PyTorch's jobs: the others end at their time-outs, while the stopped process is still there.
#[test]
fn the_first_finding_names_a_stopped_rank_and_its_last_event_also_once_the_others_have_ended() {
    for version in PROFILER_VERSIONS {
        for aborts in [false, true] {
            let case = format!("version {version}, aborts: {aborts}");
            let absent = with_one(2, Until::NotCalled, Until::Running);
            // The device of rank 2 has ended the operation of the pair, as that of rank 3, whose proxy thread has seen
            // it.
            let mut job = Job::start(version, absent, variable(ON_PAIR, "2 running"));
            job.stop(2);
            assert_leads_while_stopped(&job, "where 3 ranks have waited", &case);
            for rank in [0, 1, 3] {
                match aborts {
                    true => job.close_one(rank),
                    false => job.kill(rank),
                }
            }
            let waited = "where 3 ranks waited, whose processes are gone;";
            assert_leads_while_stopped(&job, waited, &case);
        }
    }
}

/// Asserts that the first finding names rank 2 as stopped, with the words `others` on the other ranks, and that no
/// finding accuses another rank.
fn assert_leads_while_stopped(job: &Job, others: &str, case: &str) {
    let report = judge(job);
    let says = [
        "never issued all_reduce #6 on group world",
        others,
        "its last event is of all_reduce #6 on group nccl-000000000000def1",
    ];
    assert_first(&report, Code::E151, &[2], &says, case);
    let (_, _, sentence) = first(&report);
    assert!(!sentence.contains("inside"), "{case}: {sentence}");
    let findings = report.findings.iter();
    let mut accused = findings.flat_map(|it| it.culprit_ranks.iter());
    assert!(accused.all(|&rank| rank == 2), "{case}: {report:?}");
}

#[test]
fn a_rank_with_another_count_is_named() {
    for version in PROFILER_VERSIONS {
        let mut last_operations = all(Until::Running);
        last_operations[3].1 = COUNT + 4;
        let job = Job::start(version, last_operations, |_| {});
        let report = judge(&job);
        assert_first(
            &report,
            Code::E112,
            &[3],
            &[],
            &format!("version {version}"),
        );
        assert_eq!(report.verdict, Verdict::Mismatch);
    }
}

#[test]
fn a_program_without_a_launcher_is_one_job_whichever_communicator_is_the_first() {
    for version in [4, 5, 6] {
        let absent = with_one(2, Until::NotCalled, Until::Running);
        let job = Job::start(version, absent, |command| {
            without_launcher(command);
            command.env(PAIR_FIRST, "1");
        });
        let dumps = job.dumps();
        let identities = dumps.iter().map(|dump| {
            let identity = &dump.identity;
            (identity.job.as_str(), identity.rank, identity.world_size)
        });
        let mut identities: Vec<_> = identities.collect();
        identities.sort_unstable();
        let world = (0..4).map(|rank| ("nccl-0000000000000abc", Some(rank), Some(4)));
        assert_eq!(identities, world.collect::<Vec<_>>(), "version {version}");
        // The operations that were recorded before there was a world are kept.
        let says = ["rank 2 never issued all_reduce #6"];
        let case = format!("version {version}");
        assert_first(&judge(&job), Code::E101, &[2], &says, &case);
        for dump in &dumps {
            assert_eq!(dump.groups[0].info.name.len(), "nccl-".len() + 16);
            assert_ne!(dump.groups[0].info.name, "nccl-0000000000000abc");
        }
    }
}

#[test]
fn a_job_that_ends_cleanly_leaves_no_ring() {
    let mut job = Job::start(6, all(Until::Done), |_| {});
    assert_eq!(job.dumps().len(), 4);
    job.close();
    assert_eq!(job.dumps().len(), 0);
}

#[test]
fn a_rank_that_exits_with_an_error_leaves_its_ring() {
    let mut job = Job::start(6, all(Until::Running), |_| {});
    let (child, stdin) = &mut job.ranks[1];
    drop(stdin.take());
    let status = child.wait().expect("it ends");
    assert_eq!(status.code(), Some(3));
    assert_eq!(job.dumps().len(), 4);
}
