//! Runs `rcomm-run demo` with real ranks, and checks the report that a live view reaches for each kind.
#![allow(clippy::unwrap_used)]

use rcomm_analyzer::source::{RingSource, Source as _};
use rcomm_analyzer::{Anchor, Code, Live, LiveOptions, Report, Verdict, analyze};
use rustix::process::{Pid, Signal, kill_process};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

const TIME_LIMIT: Duration = Duration::from_secs(120);

/// A demonstration of four ranks; rank 2 is at fault, except in a healthy one.
struct Demo {
    launcher: Child,
    rings: tempfile::TempDir,
}

impl Demo {
    fn start(kind: &str) -> Self {
        let rings = tempfile::tempdir().unwrap();
        let launcher = Command::new(env!("CARGO_BIN_EXE_rcomm-run"))
            .args(["demo", kind, "--after", "1"])
            .env("RCOMM_RING_DIR", rings.path())
            .env("RCOMM_DUMP_DIR", rings.path().join("dumps"))
            .env_remove("RCOMM_TIMEOUT_MS")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        Self { launcher, rings }
    }

    /// Polls the rings as rcomm-top does, until `wanted` accepts a report.
    fn wait_for(&self, wanted: impl Fn(&Report) -> bool) -> Arc<Report> {
        View::of(self.rings.path()).wait_for(wanted)
    }

    /// Ends the job as ctrl-c does, but by SIGTERM: a process in the background may ignore SIGINT.
    fn end(self) {
        self.ask_to_end();
        self.check_end();
    }

    fn ask_to_end(&self) {
        kill_process(Pid::from_child(&self.launcher), Signal::TERM).unwrap();
    }

    /// Waits for the end of the launcher, and checks its exit code and that no ring is left.
    fn check_end(mut self) {
        let status = self.launcher.wait().unwrap();
        // The exit code is that of the signal to the launcher, or of a rank that was killed before it.
        let codes = [Signal::TERM, Signal::KILL].map(|signal| Some(128 + signal.as_raw()));
        assert!(codes.contains(&status.code()), "{status}");
        assert_eq!(rings_below(self.rings.path()), 0, "rings are left");
    }
}

/// A live view of the job.
struct View {
    anchor: Anchor,
    source: RingSource,
    live: Live,
}

impl View {
    fn of(rings: &Path) -> Self {
        let source = RingSource::new(rings.to_owned(), None);
        let judge = |dumps: &[Arc<_>], policy: &_| analyze(dumps, policy);
        Self {
            anchor: Anchor::now(),
            live: Live::new(LiveOptions::default(), judge, vec![source.name()]),
            source,
        }
    }

    /// The report after another poll, if it can have changed.
    fn poll(&mut self) -> Option<Arc<Report>> {
        let poll = self.source.poll(Instant::now() + Duration::from_secs(10));
        self.live.observe(0, poll, self.anchor.moment());
        let snapshot = self.live.refresh(self.anchor.moment())?;
        Some(snapshot.report.clone())
    }

    fn wait_for(&mut self, wanted: impl Fn(&Report) -> bool) -> Arc<Report> {
        let deadline = Instant::now() + TIME_LIMIT;
        let mut last = String::new();
        while Instant::now() < deadline {
            if let Some(report) = self.poll() {
                if wanted(&report) {
                    return report;
                }
                last = first_line(&report);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        panic!("after {TIME_LIMIT:?} the report is still: {last}");
    }
}

impl Drop for Demo {
    fn drop(&mut self) {
        // If the test passed, the launcher has already ended.
        let _ = self.launcher.kill();
        let _ = self.launcher.wait();
    }
}

fn first_line(report: &Report) -> String {
    let sentence = report.findings.first().map(|finding| &finding.sentence);
    format!("{:?} {sentence:?}", report.verdict)
}

fn rings_below(folder: &Path) -> usize {
    rcomm_recorder::publish::list_rings(folder).unwrap().len()
}

/// Runs a demonstration of this kind until its report has this verdict, and checks that the first finding has this code
/// and names rank 2 alone. Then ends the demonstration.
#[track_caller]
fn first_finding_names_rank_2(kind: &str, verdict: Verdict, code: Code) {
    let demo = Demo::start(kind);
    let report = demo.wait_for(|report| report.verdict == verdict);
    let first = &report.findings[0];
    assert_eq!(
        (first.code, &*first.culprit_ranks),
        (code, &[2][..]),
        "{}",
        first_line(&report)
    );
    demo.end();
}

#[test]
fn a_healthy_job_has_no_faulty_verdict() {
    let demo = Demo::start("healthy");
    let has_made_20_steps = |report: &Report| {
        let steps = report.ranks.iter().filter_map(|rank| rank.step);
        report.ranks.len() == 4 && steps.min() >= Some(20)
    };
    let mut view = View::of(demo.rings.path());
    let report = view.wait_for(has_made_20_steps);
    let wrong = [Verdict::Stuck, Verdict::Mismatch, Verdict::Crashed];
    assert!(!wrong.contains(&report.verdict), "{}", first_line(&report));
    // The view shows that the job was cancelled, and still does when its records have been removed.
    demo.ask_to_end();
    view.wait_for(|report| report.verdict == Verdict::Cancelled);
    demo.check_end();
    for _ in 0..3 {
        if let Some(report) = view.poll() {
            assert_eq!(
                report.verdict,
                Verdict::Cancelled,
                "{}",
                first_line(&report)
            );
        }
    }
}

#[test]
fn a_slow_rank_is_named() {
    first_finding_names_rank_2("slow", Verdict::Slow, Code::W220);
}

#[test]
fn a_rank_that_does_not_return_from_loading_is_named() {
    first_finding_names_rank_2("stuck", Verdict::Stuck, Code::E101);
}

#[test]
fn a_killed_rank_is_named() {
    first_finding_names_rank_2("kill", Verdict::Stuck, Code::E150);
}

#[test]
fn a_stopped_rank_is_named() {
    first_finding_names_rank_2("freeze", Verdict::Stuck, Code::E151);
}

#[test]
fn a_rank_with_another_size_is_named() {
    first_finding_names_rank_2("mismatch", Verdict::Mismatch, Code::E112);
}

#[test]
fn a_rank_that_uses_groups_in_another_order_is_named() {
    first_finding_names_rank_2("deadlock", Verdict::Stuck, Code::E130);
}

#[test]
fn a_stage_that_does_not_send_is_named() {
    first_finding_names_rank_2("pipeline", Verdict::Stuck, Code::E120);
}
