//! How jobs of real processes end, live and from the rings that they leave: one answer from both, and no
//! wrong one on the way to it.

use rcomm_analyzer::source::{RingSource, Source};
use rcomm_analyzer::{Anchor, Code, Live, LiveOptions, Policy, Report, Severity, Verdict, analyze};
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::Dump;
use rcomm_tests::fault::Fault;
use rcomm_tests::process::{CULPRIT, Job, wait_until};
use rustix::process::{Pid, Signal, kill_process};
use std::sync::Arc;
use std::time::{Duration, Instant};

const RANKS: u32 = 4;

/// A job that takes so many steps before its fault.
fn start(fault: Fault, steps: &str, pause_ms: &str) -> Job {
    Job::start(env!("CARGO_BIN_EXE_rank"), RANKS, fault, |_, command| {
        // Nothing here waits for a time-out.
        command.args([steps, pause_ms]);
        command.env("RCOMM_TIMEOUT_MS", "120000");
    })
}

fn send(job: &Job, rank: Rank, signal: Signal) {
    let pid = i32::try_from(job.pid(rank)).ok().and_then(Pid::from_raw);
    kill_process(pid.expect("a child has a number"), signal).expect("a child of this process");
}

/// A view of the rings, with every report that it ever had.
struct View {
    source: RingSource,
    live: Live,
    anchor: Anchor,
    latest: Option<Arc<Report>>,
}

fn judge(dumps: &[Arc<Dump>], policy: &Policy) -> Report {
    analyze::<Arc<Dump>>(dumps, policy)
}

impl View {
    fn of(job: &Job) -> Self {
        let source = RingSource::new(job.folder().join("rings"), None);
        let live = Live::new(LiveOptions::default(), judge, vec![source.name()]);
        Self {
            source,
            live,
            anchor: Anchor::now(),
            latest: None,
        }
    }

    /// Looks until the report is as it should be. Of the errors on the way each must name `culprits`.
    fn wait(
        &mut self,
        what: &str,
        culprits: &[Rank],
        mut is_so: impl FnMut(&Report) -> bool,
    ) -> Arc<Report> {
        wait_until(what, || {
            let poll = self.source.poll(Instant::now() + Duration::from_secs(10));
            // Before the first ring is there, nothing can be asked.
            self.live.observe(0, poll, self.anchor.moment());
            if let Some(snapshot) = self.live.refresh(self.anchor.moment()) {
                accuses_only(&snapshot.report, culprits);
                self.latest = Some(snapshot.report);
            }
            self.latest.clone().filter(|report| is_so(report))
        })
    }

    fn wait_for_all(&mut self) {
        self.wait("all ranks at work", &[], |report| {
            report.input.ranks_read == RANKS as usize && report.input.entries > 100
        });
    }
}

fn accuses_only(report: &Report, culprits: &[Rank]) {
    for finding in &report.findings {
        let is_root = finding.severity == Severity::Error && finding.caused_by.is_none();
        assert!(
            !is_root || finding.culprit_ranks == culprits,
            "{:?}: {}",
            report.verdict,
            finding.sentence
        );
    }
}

/// Judged from the rings that the processes left.
fn from_rings(job: &Job) -> Report {
    let dumps: Vec<Dump> = (0..RANKS).map(|rank| job.ring(rank).snapshot()).collect();
    analyze(&dumps, &Policy::default())
}

fn first(report: &Report) -> (Verdict, Code, &[Rank]) {
    let first = report.findings.first();
    let first = first.unwrap_or_else(|| panic!("{:?} without a finding", report.verdict));
    (report.verdict, first.code, &first.culprit_ranks)
}

#[test]
fn a_job_that_runs_to_its_end_has_ended() {
    let job = start(Fault::None, "2000", "5");
    let mut view = View::of(&job);
    view.wait_for_all();
    let report = view.wait("the end", &[], |report| report.end.is_some());
    // On a busy machine ranks may have come late before.
    assert!(
        matches!(report.verdict, Verdict::Ended | Verdict::Slow),
        "{:?}",
        report.verdict
    );
    let end = report.end.as_ref().map(|end| end.sentence.as_str());
    let end = end.unwrap_or_default();
    assert!(end.contains("all 4 ranks ended in order"), "{end}");
}

#[test]
fn a_job_that_is_killed_as_a_whole_is_cancelled() {
    let mut job = start(Fault::None, "100000000", "0");
    let mut view = View::of(&job);
    view.wait_for_all();
    // All at one moment: no survivor may notice the end of a peer.
    for signal in [Signal::STOP, Signal::KILL] {
        for rank in 0..RANKS {
            send(&job, rank, signal);
        }
    }
    for rank in 0..RANKS {
        job.wait(rank);
    }
    let report = view.wait("the end", &[], |report| report.end.is_some());
    assert_eq!(
        report.verdict,
        Verdict::Cancelled,
        "{:?} {:?}",
        report.end,
        report.findings
    );
    let after = from_rings(&job);
    // The two looks convert the time of the end with clocks of their own.
    let printed = |report: &Report| {
        report
            .end
            .as_ref()
            .map(|end| (end.how, end.sentence.clone()))
    };
    assert_eq!(
        (after.verdict, printed(&after)),
        (report.verdict, printed(&report))
    );
}

#[test]
fn a_rank_that_is_killed_in_the_middle_leads_from_the_first_moment_to_the_last() {
    let mut job = start(Fault::None, "100000000", "0");
    let mut view = View::of(&job);
    view.wait_for_all();
    send(&job, CULPRIT, Signal::KILL);
    view.wait("the finding", &[CULPRIT], |report| {
        !report.findings.is_empty()
    });
    for rank in 0..RANKS {
        job.wait(rank);
    }
    let report = view.wait("the end", &[CULPRIT], |report| report.end.is_some());
    assert_eq!(
        first(&report),
        (Verdict::Crashed, Code::E150, &[CULPRIT][..])
    );
}

#[test]
fn a_stopped_rank_is_named_wherever_it_is() {
    let job = start(Fault::None, "100000000", "0");
    let mut view = View::of(&job);
    view.wait_for_all();
    send(&job, CULPRIT, Signal::STOP);
    let report = view.wait("the finding", &[CULPRIT], |report| {
        report.verdict == Verdict::Stuck
    });
    assert_eq!(first(&report), (Verdict::Stuck, Code::E151, &[CULPRIT][..]));
    assert_eq!(first(&from_rings(&job)), first(&report));
}

#[test]
fn a_hang_that_is_cancelled_stays_the_hang_that_it_was() {
    let mut job = start(Fault::StopJoining, "3", "0");
    let mut view = View::of(&job);
    let report = view.wait("the hang", &[CULPRIT], |report| {
        report.verdict == Verdict::Stuck
    });
    let stuck = (Verdict::Stuck, Code::E101, &[CULPRIT][..]);
    assert_eq!(first(&report), stuck);
    for signal in [Signal::STOP, Signal::KILL] {
        for rank in 0..RANKS {
            send(&job, rank, signal);
        }
    }
    for rank in 0..RANKS {
        job.wait(rank);
    }
    let report = view.wait("the end", &[CULPRIT], |report| report.end.is_some());
    assert_eq!(first(&report), stuck);
    let after = from_rings(&job);
    assert_eq!(first(&after), stuck);
    assert_eq!(after.findings[0].sentence, report.findings[0].sentence);
}
