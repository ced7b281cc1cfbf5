//! The findings on the rings of plain NCCL processes: for each fault, the first finding is right, without rcomm in the
//! program.

use crate::job::{GRAPH, Job, LATE, MESSAGE, Until};
use rcomm_analyzer::{Code, Policy, Report, Verdict, analyze};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

pub(crate) const COUNT: usize = 1 << 20;
const VERSIONS: [u32; 4] = [3, 4, 5, 6];

fn judge(job: &Job) -> Report {
    let policy = Policy {
        world_size: Some(4),
        ..Policy::default()
    };
    analyze(&job.dumps(), &policy)
}

pub(crate) fn all(until: Until) -> [(Until, usize); 4] {
    [(until, COUNT); 4]
}

pub(crate) fn with_one(rank: usize, until: Until, others: Until) -> [(Until, usize); 4] {
    let mut last = all(others);
    last[rank].0 = until;
    last
}

pub(crate) fn first(report: &Report) -> (Code, &[u32], &str) {
    let finding = report.findings.first();
    let finding = finding.unwrap_or_else(|| panic!("no finding: {report:?}"));
    (finding.code, &finding.culprit_ranks, &finding.sentence)
}

#[test]
fn a_healthy_job_has_no_finding_in_any_version() {
    for version in VERSIONS {
        let job = Job::start(version, all(Until::Done), |_| {});
        let dumps = job.dumps();
        assert_eq!(dumps.len(), 4);
        for dump in &dumps {
            // Up to version 4 NCCL does not report a call, so copies in place are not seen.
            let copies = if version < 5 { 10 } else { 20 };
            assert_eq!(dump.entries.len(), 16 + copies, "version {version}");
            let open = dump.entries.iter().filter(|it| !it.retired).count();
            assert_eq!(open, 0, "version {version}");
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

#[test]
fn a_rank_that_never_calls_is_named() {
    for version in VERSIONS {
        let job = Job::start(
            version,
            with_one(2, Until::NotCalled, Until::Running),
            |_| {},
        );
        let report = judge(&job);
        let (code, culprits, sentence) = first(&report);
        assert_eq!(
            (code, culprits),
            (Code::E101, &[2][..]),
            "version {version}: {sentence}"
        );
        assert!(
            sentence.contains("never issued all_reduce #6"),
            "{sentence}"
        );
    }
}

#[test]
fn a_rank_whose_call_is_never_launched_is_named() {
    for version in [5, 6] {
        let job = Job::start(version, with_one(1, Until::Called, Until::Running), |_| {});
        let report = judge(&job);
        let (code, culprits, sentence) = first(&report);
        assert_eq!(
            (code, culprits),
            (Code::E101, &[1][..]),
            "version {version}: {sentence}"
        );
        assert!(sentence.contains("has not started it"), "{sentence}");
    }
}

#[test]
fn a_rank_whose_device_never_reaches_the_operation_is_named() {
    for version in VERSIONS {
        let job = Job::start(version, with_one(3, Until::Planned, Until::Running), |_| {});
        let report = judge(&job);
        let (code, culprits, sentence) = first(&report);
        assert_eq!(
            (code, culprits),
            (Code::E101, &[3][..]),
            "version {version}: {sentence}"
        );
        assert!(sentence.contains("has not started it"), "{sentence}");
    }
}

#[test]
fn a_hang_inside_a_replayed_graph_is_reported_with_rank_and_channel() {
    for version in [5, 6] {
        let graph = |command: &mut std::process::Command| {
            command.env(GRAPH, "1");
        };
        let job = Job::start(
            version,
            with_one(2, Until::NotCalled, Until::Running),
            graph,
        );
        let report = judge(&job);
        let (code, culprits, sentence) = first(&report);
        assert_eq!(
            (code, culprits),
            (Code::E101, &[2][..]),
            "version {version}: {sentence}"
        );
        assert!(sentence.contains("all_reduce #3"), "{sentence}");
        assert!(sentence.contains("graph replays"), "{sentence}");

        let last = with_one(1, Until::OneChannelLeft, Until::OneChannelStarves);
        let job = Job::start(version, last, graph);
        let report = judge(&job);
        let (code, culprits, sentence) = first(&report);
        assert_eq!(
            (code, culprits),
            (Code::E135, &[][..]),
            "version {version}: {sentence}"
        );
        assert!(sentence.contains("channel 3 from rank 1"), "{sentence}");
    }
}

#[test]
fn a_channel_that_is_stuck_towards_a_peer_is_named() {
    for version in [4, 5, 6] {
        let last = with_one(1, Until::OneChannelLeft, Until::OneChannelStarves);
        let job = Job::start(version, last, |_| {});
        let report = judge(&job);
        let (code, culprits, sentence) = first(&report);
        assert_eq!(
            (code, culprits),
            (Code::E135, &[][..]),
            "version {version}: {sentence}"
        );
        assert!(sentence.contains("channel 3 from rank 1"), "{sentence}");
        assert!(sentence.contains("to rank 2"), "{sentence}");
        assert!(sentence.contains("step 5 of 16"), "{sentence}");
    }
}

#[test]
fn faults_are_found_with_the_events_that_are_recorded_by_default() {
    let cases = [
        (
            with_one(2, Until::NotCalled, Until::Running),
            Code::E101,
            &[2][..],
            "never issued",
        ),
        (
            with_one(3, Until::Planned, Until::Running),
            Code::E101,
            &[3],
            "has not started it",
        ),
        (
            with_one(1, Until::OneChannelLeft, Until::OneChannelStarves),
            Code::E135,
            &[],
            "channel 3",
        ),
    ];
    for (last, expected, ranks, says) in cases {
        let job = Job::start(6, last, |command| {
            command.env("RCOMM_NCCL_EVENTS", "256");
        });
        let report = judge(&job);
        let (code, culprits, sentence) = first(&report);
        assert_eq!((code, culprits), (expected, ranks), "{sentence}");
        assert!(sentence.contains(says), "{sentence}");
    }
}

#[test]
fn the_channel_of_a_message_that_is_stuck_is_named() {
    for version in [4, 6] {
        let mut last = all(Until::Done);
        (last[0].0, last[1].0) = (Until::OneChannelLeft, Until::OneChannelStarves);
        let job = Job::start(version, last, |command| {
            command.env(MESSAGE, "1");
        });
        let report = judge(&job);
        let (code, culprits, sentence) = first(&report);
        assert_eq!(
            (code, culprits),
            (Code::E135, &[][..]),
            "version {version}: {sentence}"
        );
        assert!(sentence.contains("channel 1 from rank 0"), "{sentence}");
        assert!(sentence.contains("to rank 1"), "{sentence}");
    }
}

#[test]
fn a_rank_whose_kernels_are_short_each_time_is_named_as_the_late_one() {
    for version in [4, 6] {
        let job = Job::start(version, all(Until::Done), |command| {
            command.env(LATE, "2").env("RCOMM_NCCL_EVENTS", "1024");
        });
        let report = judge(&job);
        let (code, culprits, sentence) = first(&report);
        assert_eq!(
            (code, culprits),
            (Code::W220, &[2][..]),
            "version {version}: {sentence}"
        );
        assert_eq!(report.verdict, Verdict::Slow);
    }
}

#[test]
fn a_rank_that_was_killed_is_named() {
    for version in VERSIONS {
        let mut job = Job::start(
            version,
            with_one(2, Until::NotCalled, Until::Running),
            |_| {},
        );
        job.kill(2);
        let report = judge(&job);
        let (code, culprits, sentence) = first(&report);
        assert_eq!(culprits, &[2], "version {version}: {sentence}");
        assert_eq!(code, Code::E150, "version {version}: {sentence}");
    }
}

#[test]
fn a_stopped_rank_is_named_by_its_missing_call() {
    for version in VERSIONS {
        let job = Job::start(
            version,
            with_one(0, Until::NotCalled, Until::Running),
            |_| {},
        );
        let pid = Pid::from_raw(job.ranks[0].0.id() as i32).expect("a process");
        kill_process(pid, Signal::STOP).expect("it runs");
        // The signal takes effect some time later; a child that has stopped is not reaped by this.
        let stopped = waitpid(Some(pid), WaitOptions::UNTRACED).expect("a child");
        assert!(stopped.is_some_and(|(_, status)| status.stopped()));
        let report = judge(&job);
        let (code, culprits, sentence) = first(&report);
        assert_eq!(
            (code, culprits),
            (Code::E151, &[0][..]),
            "version {version}: {sentence}"
        );
        assert!(
            sentence.contains("never issued all_reduce #6"),
            "{sentence}"
        );
    }
}

#[test]
fn a_rank_with_another_count_is_named() {
    for version in VERSIONS {
        let mut last = all(Until::Running);
        last[3].1 = COUNT + 4;
        let job = Job::start(version, last, |_| {});
        let report = judge(&job);
        let (code, culprits, sentence) = first(&report);
        assert_eq!(
            (code, culprits),
            (Code::E112, &[3][..]),
            "version {version}: {sentence}"
        );
        assert_eq!(report.verdict, Verdict::Mismatch);
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
