//! Verdicts on labelled jobs: the true root first, nobody else accused, the healthy left in peace.
//!
//! Jobs come from seeds, so each failure names the seed that makes it again. `RCOMM_VERDICT_SEEDS`
//! sets the number of seeds per property; each property prints a line of the summary.

#![expect(
    clippy::print_stderr,
    reason = "the counts of a run are part of its result"
)]

use rcomm_analyzer::{Code, Finding, Policy, Report, Severity, Verdict};
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::Recorder;
use rcomm_tests::generator::{Damage, Job, Kind, Random, Spec, Window};
use std::collections::BTreeMap;

fn seeds(default: u64) -> std::ops::Range<u64> {
    let asked = std::env::var("RCOMM_VERDICT_SEEDS").ok();
    0..asked.and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// The largest job of a property: jobs of thousands of ranks are made in long runs only.
fn most_ranks(seed: u64, usual: u32) -> u32 {
    let long = std::env::var_os("RCOMM_VERDICT_SEEDS").is_some();
    if long && seed % 500 == 499 {
        4096
    } else {
        usual
    }
}

fn judge(job: &Job) -> Report {
    job.judge(&Policy::default())
}

fn is_loud(one: &Finding) -> bool {
    one.severity != Severity::Note
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

/// Whether the report leaves it open: it says nothing, or it is no surer than half and lists the truth.
fn is_open(job: &Job, report: &Report) -> bool {
    let truth = job.culprits();
    let Some(first) = report
        .findings
        .iter()
        .find(|one| one.severity == Severity::Error)
    else {
        return true;
    };
    let sets = first.alternatives.iter().chain([&first.culprit_ranks]);
    let listed = |set: &Vec<Rank>| set.iter().any(|rank| truth.contains(rank));
    first.confidence <= 0.5 && sets.into_iter().any(listed)
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
    right: usize,
    open: usize,
    kinds: BTreeMap<Kind, [usize; 2]>,
    misses: Vec<String>,
    accused: Vec<String>,
}

impl Tally {
    /// Judges a job; roots that are no surer than `unsure` may accuse anybody.
    fn take(&mut self, seed: u64, job: &Job, unsure: f64) {
        self.jobs += 1;
        let report = judge(job);
        let right = first_is_true(job, &report);
        self.right += usize::from(right);
        for fault in &job.faults {
            let counts = self.kinds.entry(fault.kind).or_default();
            counts[0] += usize::from(right);
            counts[1] += 1;
        }
        if !right {
            self.open += usize::from(is_open(job, &report));
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
        self.hold_with(name, right, self.right);
    }

    /// Where it cannot always be told, leaving it open is as good.
    fn hold_or_open(&self, name: &str, right: f64) {
        self.hold_with(name, right, self.right + self.open);
    }

    fn hold_with(&self, name: &str, right: f64, good: usize) {
        let share = good as f64 / self.jobs.max(1) as f64;
        let wrong = self.jobs - self.right - self.open;
        eprintln!(
            "| {name} | {} | {} | {wrong} | {} | {} | {:.2} % |",
            self.jobs,
            self.right,
            self.open,
            self.accused.len(),
            share * 100.0,
        );
        let kinds = self.kinds.iter();
        let kinds: Vec<String> = kinds
            .map(|(kind, [right, all])| format!("{kind:?} {right}/{all}"))
            .collect();
        eprintln!("    {}", kinds.join(", "));
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

/// Healthy jobs: whatever they do, no finding, and the verdict that fits.
fn hold_silence(name: &str, jobs: impl Iterator<Item = (u64, Job)>, policy: &Policy) {
    let (mut seen, mut loud) = (0, Vec::new());
    for (seed, job) in jobs {
        assert!(
            policy.snapshot || job.blocked.is_empty(),
            "seed {seed}: the job itself hangs: {:?}",
            job.spec
        );
        seen += 1;
        let report = job.judge(policy);
        let fits = match report.verdict {
            Verdict::Healthy => true,
            Verdict::Running => policy.snapshot,
            _ => false,
        };
        if !fits || report.findings.iter().any(is_loud) {
            loud.push(format!("seed {seed}: {} in {:?}", told(&report), job.spec));
        }
    }
    eprintln!(
        "| {name} | {seen} | {} | {} | 0 | 0 | |",
        seen - loud.len(),
        loud.len()
    );
    assert!(loud.is_empty(), "{name}: {}", loud.join("\n"));
}

#[test]
fn healthy_jobs_are_silent() {
    let jobs = seeds(50).map(|seed| (seed, Spec::random(seed, most_ranks(seed, 64)).make()));
    hold_silence("healthy", jobs, &Policy::default());
}

#[test]
fn looks_at_running_jobs_are_silent() {
    let policy = Policy {
        snapshot: true,
        ..Policy::default()
    };
    let jobs = seeds(25).map(|seed| {
        let mut spec = Spec::random(seed.wrapping_add(6 << 32), 32);
        spec.recording.taken_at = Some(Random::new(seed).between(30, 95) as f64 / 100.0);
        (seed, spec.make())
    });
    hold_silence("running, looked at", jobs, &policy);
}

#[test]
fn the_true_root_comes_first() {
    let mut tally = Tally::default();
    for seed in seeds(150) {
        if let Some(job) = faulty(seed, 0, most_ranks(seed, 64), vec![hang(seed)]) {
            tally.take(seed, &job, 0.0);
        }
    }
    tally.hold("one fault", RIGHT);
}

#[test]
fn several_faults_accuse_nobody_else() {
    let mut tally = Tally::default();
    for seed in seeds(60) {
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
    for seed in seeds(30) {
        let Some(mut job) = faulty(seed, 5, 32, vec![hang(seed)]) else {
            continue;
        };
        let before = judge(&job);
        Random::new(seed).shuffle(&mut job.dumps);
        let after = judge(&job);
        assert_eq!(before, after, "seed {seed}: {}", truth(&job));
    }
}

/// Damage to the records of those that are not at fault: who is at fault is found in this share of the
/// jobs, and nobody else is accused with more than half a conviction.
fn hold_under(damage: Damage, salt: u64, right: f64) {
    let mut tally = Tally::default();
    for seed in seeds(30) {
        let kind = hang(seed);
        if damage == Damage::OnlyActive && !shows_in_what_is_active(kind) {
            continue;
        }
        let Some(mut job) = faulty(seed, salt, 32, vec![kind]) else {
            continue;
        };
        // Members of a batch stay `scheduled` for ever: without its marker it seems unfinished.
        let batches = job.spec.pp > 1 && job.spec.recording.batched;
        if damage == Damage::OnlyActive && batches {
            continue;
        }
        if job.suffer(damage, &mut Random::new(seed)) {
            tally.take(seed, &job, 0.5);
        }
    }
    tally.hold_or_open(&format!("records {damage:?}"), right);
}

/// Faults that what is unfinished shows, without the operations before and without other groups.
fn shows_in_what_is_active(kind: Kind) -> bool {
    matches!(kind, Kind::Stuck | Kind::Crash)
}

#[test]
fn a_lost_dump_makes_no_innocent_rank_the_root() {
    hold_under(Damage::Missing, 2, 0.9);
}

#[test]
fn a_file_cut_short_makes_no_innocent_rank_the_root() {
    hold_under(Damage::Cut, 7, 0.9);
}

#[test]
fn a_file_of_an_earlier_run_makes_no_innocent_rank_the_root() {
    hold_under(Damage::Stale, 8, 0.85);
}

#[test]
fn files_of_several_versions_are_judged_together() {
    hold_under(Damage::MixedVersions, 9, 0.97);
}

#[test]
fn what_is_active_is_enough_to_tell_who_is_missing() {
    hold_under(Damage::OnlyActive, 10, 0.9);
}

#[test]
fn what_costs_time_or_room_is_warned_of() {
    for &kind in Kind::WARNINGS {
        let (mut jobs, mut misses) = (0, Vec::new());
        for seed in seeds(4) {
            let mut spec = Spec::random(seed.wrapping_add(11 << 32), 32);
            spec.steps = 6;
            spec.micro_batches = 4;
            spec.recording.window = Window::Whole;
            if matches!(kind, Kind::Stalled | Kind::ShortRing) {
                spec.recording.recorder = Recorder::Rcomm;
            }
            if kind == Kind::Uneven {
                (spec.dp, spec.ep, spec.pp) = (4, 4, 1);
            }
            spec.faults = vec![kind];
            let job = spec.make();
            if job.faults.is_empty() || !job.decidable {
                continue;
            }
            jobs += 1;
            let report = judge(&job);
            let told_it = report.findings.iter().any(|one| {
                kind.codes().contains(&one.code)
                    && one
                        .culprit_ranks
                        .iter()
                        .all(|rank| job.culprits().contains(rank))
            });
            if !told_it {
                misses.push(format!(
                    "seed {seed}: {} said {}",
                    truth(&job),
                    told(&report)
                ));
            }
        }
        eprintln!(
            "| {kind:?} | {jobs} | {} | {} | 0 | 0 | |",
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
fn everybody_inside_and_nobody_done_is_told_apart() {
    let mut tally = Tally::default();
    for seed in seeds(30) {
        if let Some(job) = faulty(seed, 3, 32, vec![Kind::Fabric]) {
            tally.take(seed, &job, 0.0);
        }
    }
    tally.hold("everybody inside", RIGHT);
}

#[test]
fn who_is_late_in_every_step_is_named() {
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
