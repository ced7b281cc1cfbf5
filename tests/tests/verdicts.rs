//! Verdicts on labelled jobs: the true root first, nobody else accused, the healthy left in peace.
//!
//! Jobs come from seeds, so each failure names the seed that makes it again. `RCOMM_VERDICT_SEEDS`
//! sets the number of seeds per property.

#![expect(
    clippy::print_stderr,
    reason = "the counts of a run are part of its result"
)]

use rcomm_analyzer::{Code, Finding, Policy, Report, Severity, Verdict, analyze};
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::Dump;
use rcomm_tests::generator::{Job, Kind, Random, Spec, Window};

fn seeds(default: u64) -> std::ops::Range<u64> {
    let asked = std::env::var("RCOMM_VERDICT_SEEDS").ok();
    0..asked.and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn judge(dumps: &[Dump]) -> Report {
    analyze(dumps, &Policy::default())
}

fn roots(report: &Report) -> impl Iterator<Item = &Finding> {
    let errors = report
        .findings
        .iter()
        .filter(|one| one.severity == Severity::Error);
    errors.filter(|one| one.caused_by.is_none())
}

/// Whether the first finding names one of the faults and nobody else.
fn first_is_true(job: &Job, report: &Report) -> bool {
    let Some(first) = report.findings.first() else {
        return false;
    };
    let truth = job.culprits();
    job.faults.iter().any(|fault| {
        let named = if fault.culprits.is_empty() {
            first.culprit_ranks.is_empty()
        } else {
            !first.culprit_ranks.is_empty()
                && first.culprit_ranks.iter().all(|rank| truth.contains(rank))
        };
        named && fault.kind.codes().contains(&first.code)
    })
}

fn told(report: &Report) -> String {
    let findings: Vec<String> = report
        .findings
        .iter()
        .take(3)
        .map(|one| {
            format!(
                "{} {:?} ({}) {}",
                one.code, one.culprit_ranks, one.confidence, one.sentence
            )
        })
        .collect();
    format!("{:?}: {}", report.verdict, findings.join(" | "))
}

fn truth(job: &Job) -> String {
    let faults: Vec<String> = job
        .faults
        .iter()
        .map(|fault| format!("{:?} on {:?} at {}", fault.kind, fault.culprits, fault.at))
        .collect();
    format!("{} ({:?})", faults.join(", "), job.spec)
}

/// At least this share of decidable jobs must be told right.
const RIGHT: f64 = 0.99;

/// What a property saw.
#[derive(Default)]
struct Tally {
    jobs: usize,
    misses: Vec<String>,
    accused: Vec<String>,
}

impl Tally {
    /// Judges a job; roots that are no surer than `unsure` may accuse anybody.
    fn take(&mut self, seed: u64, job: &Job, unsure: f64) {
        self.jobs += 1;
        let report = judge(&job.dumps);
        if !first_is_true(job, &report) {
            self.misses.push(format!(
                "seed {seed}: {} said {}",
                truth(job),
                told(&report)
            ));
        }
        let guilty = job.culprits();
        let sure = roots(&report).filter(|one| one.confidence > unsure);
        let wrong: Vec<Rank> = sure
            .flat_map(|one| one.culprit_ranks.iter().copied())
            .filter(|rank| !guilty.contains(rank))
            .collect();
        if !wrong.is_empty() {
            self.accused.push(format!(
                "seed {seed}: accused {wrong:?}; {} said {}",
                truth(job),
                told(&report)
            ));
        }
    }

    fn hold(&self, name: &str, right: f64) {
        let good = self.jobs - self.misses.len();
        let share = good as f64 / self.jobs.max(1) as f64;
        eprintln!(
            "{name}: {good} of {} right ({:.2} %), {} accuse an innocent",
            self.jobs,
            share * 100.0,
            self.accused.len()
        );
        assert!(self.jobs > 0, "{name}: no job was decidable");
        assert!(
            self.accused.is_empty() && share >= right,
            "{name}: innocents accused:\n{}\nmissed:\n{}",
            self.accused.join("\n"),
            self.misses.join("\n")
        );
    }
}

/// A job with faults that show and can be told, if this seed gives one.
fn faulty(seed: u64, salt: u64, most_ranks: u32, faults: Vec<Kind>) -> Option<Job> {
    let mut spec = Spec::random(seed.wrapping_add(salt << 32), most_ranks);
    spec.faults = faults;
    let job = spec.make();
    (!job.faults.is_empty() && job.decidable && !job.blocked.is_empty()).then_some(job)
}

fn hang(seed: u64) -> Kind {
    Kind::HANGS[(seed % Kind::HANGS.len() as u64) as usize]
}

#[test]
fn healthy_jobs_are_silent() {
    for seed in seeds(120) {
        let job = Spec::random(seed, 64).make();
        let report = judge(&job.dumps);
        assert!(
            job.blocked.is_empty(),
            "seed {seed}: the job itself hangs: {:?}",
            job.spec
        );
        let loud = report
            .findings
            .iter()
            .any(|one| one.severity != Severity::Note);
        assert!(!loud, "seed {seed}: {} in {:?}", told(&report), job.spec);
        assert_eq!(
            report.verdict,
            Verdict::Healthy,
            "seed {seed}: {:?}",
            job.spec
        );
    }
}

#[test]
fn the_true_root_comes_first() {
    let mut tally = Tally::default();
    for seed in seeds(400) {
        if let Some(job) = faulty(seed, 0, 64, vec![hang(seed)]) {
            tally.take(seed, &job, 0.0);
        }
    }
    tally.hold("one fault", RIGHT);
}

#[test]
fn several_faults_accuse_nobody_else() {
    let mut tally = Tally::default();
    for seed in seeds(150) {
        let mut random = Random::new(seed);
        let count = random.between(2, 3);
        let kinds = (0..count).map(|_| *random.pick(Kind::HANGS)).collect();
        if let Some(job) = faulty(seed, 1, 64, kinds) {
            tally.take(seed, &job, 0.0);
        }
    }
    tally.hold("two or three faults", RIGHT);
}

#[test]
fn the_verdict_does_not_depend_on_the_order_of_files() {
    for seed in seeds(80) {
        let Some(mut job) = faulty(seed, 5, 32, vec![hang(seed)]) else {
            continue;
        };
        let before = judge(&job.dumps);
        Random::new(seed).shuffle(&mut job.dumps);
        let after = judge(&job.dumps);
        assert_eq!(before, after, "seed {seed}: {}", truth(&job));
    }
}

#[test]
fn a_lost_dump_makes_no_innocent_rank_the_root() {
    let mut tally = Tally::default();
    for seed in seeds(150) {
        let Some(mut job) = faulty(seed, 2, 32, vec![hang(seed)]) else {
            continue;
        };
        let guilty = job.culprits();
        let innocent: Vec<usize> = (0..job.dumps.len())
            .filter(|&at| {
                job.dumps[at]
                    .identity
                    .rank
                    .is_some_and(|rank| !guilty.contains(&rank))
            })
            .collect();
        if innocent.is_empty() {
            continue;
        }
        job.dumps.remove(*Random::new(seed).pick(&innocent));
        tally.take(seed, &job, 0.5);
    }
    tally.hold("a dump lost", 0.9);
}

#[test]
fn everybody_inside_and_nobody_done_is_told_apart() {
    let mut tally = Tally::default();
    for seed in seeds(80) {
        if let Some(job) = faulty(seed, 3, 32, vec![Kind::Fabric]) {
            tally.take(seed, &job, 0.0);
        }
    }
    tally.hold("all arrived, stuck", RIGHT);
}

#[test]
fn who_is_late_in_every_step_is_named() {
    let (mut jobs, mut misses) = (0, Vec::new());
    for seed in seeds(60) {
        let mut spec = Spec::random(seed.wrapping_add(4 << 32), 32);
        spec.steps = 6;
        spec.recording.window = Window::Whole;
        spec.faults = vec![Kind::Slow];
        let job = spec.make();
        if job.faults.is_empty() {
            continue;
        }
        jobs += 1;
        let report = judge(&job.dumps);
        let named = report
            .findings
            .first()
            .is_some_and(|one| one.code == Code::W220 && one.culprit_ranks == job.culprits());
        if !named {
            misses.push(format!(
                "seed {seed}: {} said {}",
                truth(&job),
                told(&report)
            ));
        }
    }
    eprintln!("stragglers: {} of {jobs} named", jobs - misses.len());
    assert!(misses.len() * 100 <= jobs, "{}", misses.join("\n"));
}
