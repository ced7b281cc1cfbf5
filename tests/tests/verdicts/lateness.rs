//! Judges lateness in jobs whose watchdogs notice completions only when they poll: slow ranks are named, and no other
//! ranks, however long the polling interval.

use crate::seeds;
use crate::tally::{is_claim, summary_of};
use rcomm_analyzer::{Code, Policy, Report, Severity, Verdict};
use rcomm_tests::generator::{Layout, PacedJob, PacedSpec, Random, Slow};

/// Polling intervals of the watchdog, µs; PyTorch's is 100 ms.
pub(crate) const POLL_INTERVALS_US: &[u64] = &[500, 5_000, 100_000];

/// A class of jobs: its name, and the parameters of the job for a seed and a polling interval in µs.
pub(crate) type Class = (&'static str, fn(u64, u64) -> PacedSpec);

/// Classes of jobs in which no rank is late.
pub(crate) const HEALTHY: &[Class] = &[
    ("healthy, replicas", |seed, interval_us| {
        PacedSpec::random(seed, Layout::Replicas, interval_us)
    }),
    ("healthy, sharded", |seed, interval_us| {
        PacedSpec::random(seed, Layout::Sharded, interval_us)
    }),
    ("healthy, pipeline", |seed, interval_us| {
        PacedSpec::random(seed, Layout::Pipeline(1), interval_us)
    }),
    ("healthy, interleaved pipeline", |seed, interval_us| {
        PacedSpec::random(seed, Layout::Pipeline(2), interval_us)
    }),
];

/// Classes of jobs in which one rank is late.
pub(crate) const SLOW: &[Class] = &[
    ("slow data loading", |seed, interval_us| {
        let mut spec = spec_of_any_layout(seed, interval_us);
        // The delay must exceed the error of clock offsets. They are estimated from completions, to within two polling
        // intervals: 200 ms at most.
        let ms = Random::new(seed).between(250, 400);
        spec.slow = Slow::Loading(rank_of_first_stage(&spec), ms);
        spec.waits = true;
        spec
    }),
    ("slow data loading, durations", |seed, interval_us| {
        let mut spec = spec_of_any_layout(seed, interval_us);
        spec.timing = true;
        let ms = Random::new(seed).between(30, 100);
        spec.slow = Slow::Loading(rank_of_first_stage(&spec), ms);
        // A host that runs a step ahead could make up for the delay, so that no other rank waits.
        spec.waits = true;
        spec
    }),
    ("slow issue, durations", |seed, interval_us| {
        let mut spec = spec_of_any_layout(seed, interval_us);
        spec.timing = true;
        spec.slow = Slow::Issuing(some_rank(&spec), Random::new(seed).between(12, 30));
        spec
    }),
    ("slow device, durations", |seed, interval_us| {
        let mut spec = spec_of_any_layout(seed, interval_us);
        spec.timing = true;
        spec.slow = Slow::Device(some_rank(&spec), Random::new(seed).between(13, 40));
        spec
    }),
];

/// Classes of jobs in which no single rank is late.
pub(crate) const NO_SINGLE_RANK: &[Class] = &[
    ("slow host", |seed, interval_us| {
        let mut spec = PacedSpec::random(seed, Layout::Sharded, interval_us);
        (spec.dp, spec.per_host, spec.hosts_named) = (16, 4, true);
        spec.slow = Slow::Host(seed as u32 % 4, 300);
        spec.waits = true;
        spec
    }),
    ("late by turns", |seed, interval_us| {
        let mut spec = spec_of_any_layout(seed, interval_us);
        spec.slow = Slow::ByTurns(60);
        spec
    }),
];

/// The parameters of a job whose layout follows from the seed.
fn spec_of_any_layout(seed: u64, interval_us: u64) -> PacedSpec {
    const LAYOUTS: &[Layout] = &[
        Layout::Replicas,
        Layout::Sharded,
        Layout::Pipeline(1),
        Layout::Pipeline(2),
    ];
    PacedSpec::random(seed, LAYOUTS[(seed % 4) as usize], interval_us)
}

/// A rank of the first stage, chosen by the seed: in a later stage, which begins to work later, a little lateness costs
/// nothing.
fn rank_of_first_stage(spec: &PacedSpec) -> u32 {
    some_rank(spec) % (spec.tp * spec.dp)
}

/// A rank of the job, chosen by the seed.
fn some_rank(spec: &PacedSpec) -> u32 {
    (Random::new(spec.seed ^ 0x0e).draw() % u64::from(spec.world())) as u32
}

/// The results of the jobs of a class, with one polling interval.
#[derive(Default)]
struct Row {
    jobs: usize,
    right: usize,
    /// The number of jobs in which an error or a warning names a rank that is not late.
    innocents: usize,
    /// The jobs that were judged wrongly or that are counted in `innocents`, with their reports.
    failures: Vec<String>,
}

/// Judges the jobs of a class with one polling interval. Prints the counts and returns them.
fn judge_class(
    (name, make): &Class,
    interval_us: u64,
    right: impl Fn(&PacedJob, &Report) -> bool,
) -> Row {
    let mut row = Row::default();
    for seed in seeds(6) {
        let spec = make(seed, interval_us);
        let job = spec.make();
        let report = job.judge(&Policy::default());
        row.jobs += 1;
        let is_innocent = |rank: &u32| !job.culprits.contains(rank);
        let mut claims = report.findings.iter().filter(|finding| is_claim(finding));
        let accuses = claims.any(|finding| finding.culprit_ranks.iter().any(is_innocent));
        row.innocents += usize::from(accuses);
        let is_right = right(&job, &report);
        row.right += usize::from(is_right);
        if accuses || !is_right {
            row.failures.push(format!(
                "{name}, seed {seed}: {} in {spec:?}",
                summary_of(&report)
            ));
        }
    }
    eprintln!(
        "| {name} | {} ms | {} | {} | {} |",
        interval_us as f64 / 1e3,
        row.jobs,
        row.right,
        row.innocents
    );
    row
}

/// Whether the verdict is `slow`, and the first finding names all late ranks and no other.
pub(crate) fn names_the_culprits(job: &PacedJob, report: &Report) -> bool {
    let first = report.findings.first();
    report.verdict == Verdict::Slow
        && first.is_some_and(|finding| {
            finding.code == Code::W220 && finding.culprit_ranks == job.culprits
        })
}

/// Judges the jobs of the classes with each polling interval. Panics if an error or a warning names a rank that is not
/// late, or if less than the share `least` of a class is judged right, and lists the jobs that were judged wrongly.
fn assert_rows(classes: &[Class], least: f64, right: impl Fn(&PacedJob, &Report) -> bool + Copy) {
    let mut misses = Vec::new();
    for class in classes {
        for &interval_us in POLL_INTERVALS_US {
            let row = judge_class(class, interval_us, right);
            if row.innocents > 0 || (row.right as f64) < least * row.jobs as f64 {
                misses.extend(row.failures);
            }
        }
    }
    assert!(misses.is_empty(), "{}", misses.join("\n"));
}

#[test]
fn healthy_jobs_have_no_late_rank_however_coarse_the_watchdog() {
    assert_rows(HEALTHY, 1.0, |_, report| {
        report.verdict == Verdict::Healthy
            && report
                .findings
                .iter()
                .all(|finding| finding.severity == Severity::Note)
    });
}

#[test]
fn slow_ranks_are_named_however_coarse_the_watchdog() {
    assert_rows(SLOW, 0.99, names_the_culprits);
}

#[test]
fn a_late_host_is_named_as_a_whole_and_lateness_by_turns_accuses_no_rank() {
    assert_rows(&NO_SINGLE_RANK[..1], 0.99, names_the_culprits);
    assert_rows(&NO_SINGLE_RANK[1..], 0.99, |_, report| {
        report
            .findings
            .iter()
            .all(|finding| finding.severity == Severity::Note)
    });
}
