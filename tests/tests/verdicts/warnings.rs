//! Judges jobs whose faults are reported by warnings or do not stop the job: late ranks and hosts, short rings, uneven
//! and tiny operations, and others.

use crate::tally::{summary_of, truth};
use crate::{judge, seeds};
use rcomm_analyzer::{Code, Report};
use rcomm_recorder::model::{ProcessorWait, Rank};
use rcomm_recorder::publish::Recorder;
use rcomm_tests::generator::{Exchange, Kind, Spec, Window};

/// The spec of a job with one fault of this kind. The made job has no fault if the random layout of this seed offers no
/// place for one.
pub(crate) fn spec(seed: u64, kind: Kind) -> Spec {
    let mut spec = Spec::random(seed.wrapping_add(11 << 32), 32);
    spec.steps = 6;
    spec.micro_batches = 4;
    spec.recording.window = Window::Whole;
    match kind {
        Kind::Stalled | Kind::ShortRing | Kind::Dropped | Kind::SlowHost => {
            spec.recording.recorder = Recorder::Rcomm;
        }
        Kind::Turns => spec.steps = 24,
        Kind::Uneven => (spec.dp, spec.ep, spec.pp) = (4, 4, 1),
        Kind::Overrun => {
            spec.recording.recorder = Recorder::Nccl;
            spec.recording.starts = false;
            spec.recording.window = Window::Last;
            spec.recording.run_ahead = 400;
        }
        Kind::Threads => spec.recording.frames = true,
        Kind::Inverted => spec.recording.recorder = Recorder::Nccl,
        Kind::BufferedSends => {
            spec.recording.recorder = Recorder::Nccl;
            spec.recording.batched = false;
            spec.pp = spec.pp.max(2);
            spec.mix.exchange = Exchange::InOrder;
        }
        Kind::Clocks => {
            spec.recording.recorder = Recorder::Nccl;
            spec.recording.starts = false;
            spec.recording.notice_ms = 100;
        }
        _ => {}
    }
    spec.faults = vec![kind];
    spec
}

#[test]
fn every_kind_of_warning_is_reported_without_naming_an_innocent_rank() {
    for &kind in Kind::WARNINGS {
        let (mut jobs, mut misses) = (0, Vec::new());
        for seed in seeds(12) {
            let job = spec(seed, kind).make();
            if job.faults.is_empty() || !job.decidable {
                continue;
            }
            jobs += 1;
            let report = judge(&job);
            let is_reported = report.findings.iter().any(|finding| {
                kind.codes().contains(&finding.code)
                    && finding
                        .culprit_ranks
                        .iter()
                        .all(|rank| job.culprits().contains(rank))
            });
            if !is_reported {
                misses.push(format!(
                    "seed {seed}: {} judged as {}",
                    truth(&job),
                    summary_of(&report)
                ));
            }
        }
        eprintln!(
            "| {kind:?} | {jobs} | {} | {} | - | - | |",
            jobs - misses.len(),
            misses.len()
        );
        assert!(
            jobs > 0 && misses.is_empty(),
            "{kind:?}: {jobs} jobs\n{}",
            misses.join("\n")
        );
    }
}

#[test]
fn a_rank_that_is_late_in_every_step_is_named() {
    let (mut jobs, mut misses) = (0, Vec::new());
    for seed in seeds(25) {
        let mut spec = Spec::random(seed.wrapping_add(4 << 32), 32);
        spec.steps = 6;
        spec.recording.window = Window::Whole;
        spec.faults = vec![Kind::Slow];
        let job = spec.make();
        if job.faults.is_empty() || !job.decidable {
            continue;
        }
        jobs += 1;
        let report = judge(&job);
        let named = report.findings.first().is_some_and(|finding| {
            finding.code == Code::W220 && finding.culprit_ranks == job.culprits()
        });
        if !named {
            misses.push(format!(
                "seed {seed}: {} judged as {}",
                truth(&job),
                summary_of(&report)
            ));
        }
    }
    eprintln!("stragglers: {} of {jobs} named", jobs - misses.len());
    assert!(misses.len() * 100 <= jobs, "{}", misses.join("\n"));
}

/// The late ranks and the report of a job in which the threads of the late ranks waited `waited_ns` for a processor.
/// They waited since the first operation, or, with `is_after`, after the last operation was issued. The threads of the
/// other ranks waited `others_ns`; `None` if their waits are unknown.
fn judge_without_processor(
    waited_ns: u64,
    is_after: bool,
    others_ns: Option<u64>,
) -> (Vec<Rank>, Report) {
    let jobs = seeds(60).map(|seed| {
        let mut spec = spec(seed, Kind::Slow);
        spec.recording.recorder = Recorder::Rcomm;
        spec.make()
    });
    let mut late = jobs.filter(|job| {
        let report = judge(job);
        let first = report.findings.first();
        first.is_some_and(|finding| {
            finding.code == Code::W220 && finding.culprit_ranks == job.culprits()
        })
    });
    let mut job = late.next().expect("a job in which the late rank is named");
    let culprits = job.culprits();
    for dump in &mut job.dumps {
        let rank = dump.identity.rank;
        let waited_ns = if rank.is_some_and(|rank| culprits.contains(&rank)) {
            Some(waited_ns)
        } else {
            others_ns
        };
        let issued = dump.entries.iter().map(|entry| entry.time_created_ns);
        let since = if is_after { issued.max() } else { issued.min() };
        dump.processor_wait = waited_ns.map(|waited_ns| ProcessorWait {
            since_ns: since.unwrap_or_default() + i64::from(is_after),
            waited_ns,
        });
    }
    let report = judge(&job);
    (culprits, report)
}

#[test]
fn a_late_rank_that_had_no_processor_for_as_long_is_not_named() {
    const HOUR_NS: u64 = 3_600_000_000_000;
    let note = |report: &Report| {
        let mut problems = report.problems.iter();
        let note = problems.find(|problem| problem.code == Code::N306);
        note.map(|problem| problem.sentence.clone())
    };
    let (culprits, report) = judge_without_processor(HOUR_NS, false, None);
    let named = report
        .findings
        .iter()
        .any(|finding| finding.code == Code::W220);
    assert!(!named, "{}", summary_of(&report));
    let note = note(&report).expect("a note gives the reason");
    let names_rank = note.contains(&format!("rank {} on host", culprits[0]));
    assert!(
        names_rank && note.contains("had to wait for a processor for"),
        "{note}"
    );

    // If the others waited as long, all ranks of the host lack processors.
    let (_, report) = judge_without_processor(HOUR_NS, false, Some(HOUR_NS));
    let named = report
        .findings
        .iter()
        .any(|finding| finding.code == Code::W220);
    assert!(!named, "{}", summary_of(&report));

    // The rank waited little, or only later, or much less than the others, which waited inside their operations.
    let not_excused = [
        (1_000_000, false, None),
        (HOUR_NS, true, None),
        (HOUR_NS, false, Some(2 * HOUR_NS)),
    ];
    for (waited_ns, is_after, others_ns) in not_excused {
        let (culprits, report) = judge_without_processor(waited_ns, is_after, others_ns);
        let first = &report.findings[0];
        assert_eq!((first.code, &first.culprit_ranks), (Code::W220, &culprits));
    }
}

/// If every group with a rank of the late host contains a second rank of that host, no single rank is the last to
/// arrive.
#[test]
fn a_late_host_is_named_even_if_none_of_its_ranks_is_the_last_to_arrive() {
    // In the jobs of the later seeds, each delay of the host costs time in several groups.
    for seed in [2288, 384, 404, 760, 962] {
        let job = spec(seed, Kind::SlowHost).make();
        let report = judge(&job);
        let named = report.findings.first();
        let named = named.map(|finding| (finding.code, finding.culprit_ranks.clone()));
        let expected = Some((Code::W220, job.culprits()));
        assert_eq!(named, expected, "seed {seed}: {}", summary_of(&report));
        // The host is 200 ms late in each step but the first.
        let price_ms = report.findings[0].price.expect("lateness has a price").ms;
        let true_ms = f64::from(job.spec.steps - 1) * 200.0;
        assert!(
            (price_ms / true_ms - 1.0).abs() < 0.05,
            "seed {seed}: {price_ms} ms, {true_ms} ms"
        );
    }
}
