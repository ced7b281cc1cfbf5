//! Tests processes with several devices, each of which has a rank of its own in each communicator.

use crate::faults::first;
use crate::job::{Job, Until, without_launcher};
use rcomm_analyzer::{Code, Policy, Report, Verdict, analyze};

fn judge(job: &Job) -> Report {
    analyze(&job.dumps(), &Policy::default())
}

#[test]
fn a_device_that_never_calls_is_named_among_two_processes_with_four() {
    let mut second = [Until::Running; 4];
    second[1] = Until::NotCalled;
    for version in [4, 6] {
        let job = Job::of_devices(version, &[&[Until::Running; 4], &second], |_| {});
        let report = judge(&job);
        let (code, culprits, sentence) = first(&report);
        assert_eq!(
            (code, culprits),
            (Code::E101, &[5][..]),
            "version {version}: {sentence}"
        );
        assert!(
            sentence.contains("never issued all_reduce #6"),
            "{sentence}"
        );
        assert_eq!(
            (report.input.ranks_read, report.input.ranks_expected),
            (8, 8)
        );
    }
}

#[test]
fn one_process_with_eight_devices_and_no_launcher_is_healthy() {
    let job = Job::of_devices(6, &[&[Until::Done; 8]], without_launcher);
    let report = judge(&job);
    assert_eq!(report.findings.len(), 0, "{:?}", report.findings);
    assert_eq!(report.verdict, Verdict::Healthy, "{report:?}");
    assert_eq!(
        (report.input.ranks_read, report.input.ranks_expected),
        (8, 8)
    );
}

#[test]
fn a_process_without_a_record_leaves_all_of_its_ranks_open() {
    let job = Job::of_devices(6, &[&[Until::Running; 4], &[Until::Running; 4]], |_| {});
    let dumps = job.dumps();
    let first_process: Vec<_> = (dumps.iter())
        .filter(|dump| dump.identity.rank == Some(0))
        .collect();
    assert_eq!(first_process.len(), 1);
    let report = analyze(&first_process, &Policy::default());
    let mut findings = report.findings.iter();
    let accuses = findings.any(|finding| finding.code == Code::E101);
    assert!(!accuses, "{:?}", report.findings);
    assert_eq!(report.input.ranks_expected, 8);
}
