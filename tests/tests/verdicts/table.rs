//! Judges jobs of every class, prints a table and asserts that each class is judged well enough. The table has for each
//! class how many jobs were judged, how many of them the records decide, how many of these reports are right, how many
//! leave open who is at fault, how many reports accuse a rank that is not at fault, and how many of the answers of each
//! class of confidence are right.

use crate::classes::{self, Rings};
use crate::lateness::{self, HEALTHY, NO_SINGLE_RANK, POLL_INTERVALS_US, SLOW};
use crate::tally::{
    Confidence, RIGHT, Share, first_is_true, is_claim, is_open, roots, summary_of, truth,
};
use crate::{hanging, judge, kind_of_hang, warnings, with_two_recorders};
use rcomm_analyzer::{Finding, Policy, Report, Severity, Verdict};
use rcomm_recorder::model::Rank;
use rcomm_tests::generator::{Damage, Job, Kind, PacedJob, Random, Spec};
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The result of one job.
struct Judged {
    /// Whether the records decide who is at fault.
    decidable: bool,
    /// Whether the report is right, as the class defines it.
    right: bool,
    /// Whether the report leaves open which rank is at fault, by [`is_open`].
    open: bool,
    /// Whether the report accuses a rank that is not at fault; for a healthy job, whether it claims a fault.
    accuses_innocent: bool,
    /// The confidence of the finding that counts as the answer; `None` if there is none.
    confidence: Option<f64>,
    /// The parameters of the job, its faults if it has any, and what its report says.
    summary: String,
}

/// A class of jobs.
struct Class {
    name: String,
    /// Makes and judges the job of a seed; `None` if the seed gives no job of the class.
    judge: Box<dyn Fn(u64) -> Option<Judged> + Sync>,
    /// Whether a report that leaves open which rank is at fault counts as right, since the records cannot always
    /// decide.
    may_be_open: bool,
}

impl Class {
    fn new(
        name: impl Into<String>,
        judge: impl Fn(u64) -> Option<Judged> + Sync + 'static,
    ) -> Self {
        Self {
            name: name.into(),
            judge: Box::new(judge),
            may_be_open: false,
        }
    }

    /// Returns the class with [`may_be_open`](Self::may_be_open) set.
    fn or_open(self) -> Self {
        Self {
            may_be_open: true,
            ..self
        }
    }

    /// Judges jobs until `wanted` of them are decidable, or a limited number of seeds has been tried.
    fn row(&self, wanted: usize) -> Row {
        let mut row = Row::default();
        for seed in 0..wanted as u64 * 12 + 150 {
            if row.decidable == wanted {
                break;
            }
            if let Some(judged) = (self.judge)(seed) {
                row.add_job(seed, judged);
            }
        }
        row
    }

    /// The name of the class, how many of the decidable jobs were judged acceptably, how many reports accuse an
    /// innocent rank, and the misses of the row; `None` if the row is good enough.
    fn complaint(&self, row: &Row) -> Option<String> {
        let accepted = row.right + if self.may_be_open { row.open } else { 0 };
        let share = accepted as f64 / row.decidable.max(1) as f64;
        let passes = row.decidable > 0 && row.innocents == 0 && share >= RIGHT;
        (!passes).then(|| {
            format!(
                "{}: accepted {accepted} of {} decidable jobs, innocents accused in {}:\n    {}",
                self.name,
                row.decidable,
                row.innocents,
                row.misses.join("\n    ")
            )
        })
    }
}

/// The results of the jobs of a class.
#[derive(Default)]
struct Row {
    jobs: usize,
    decidable: usize,
    right: usize,
    /// Decidable jobs whose reports are not right, but leave open which rank is at fault.
    open: usize,
    /// Jobs, decidable or not, whose reports accuse an innocent rank.
    innocents: usize,
    /// How often the answers were right, by their confidence.
    by_confidence: BTreeMap<Confidence, Share>,
    /// The jobs whose reports accuse an innocent rank, and the decidable jobs whose reports are not right.
    misses: Vec<String>,
}

impl Row {
    fn add_job(&mut self, seed: u64, judged: Judged) {
        self.jobs += 1;
        self.innocents += usize::from(judged.accuses_innocent);
        if judged.decidable {
            self.decidable += 1;
            self.right += usize::from(judged.right);
            self.open += usize::from(judged.open && !judged.right);
            if let Some(confidence) = judged.confidence {
                let class = Confidence::of(confidence);
                let share = self.by_confidence.entry(class).or_default();
                share.all += 1;
                share.right += usize::from(judged.right);
                share.claimed += confidence;
            }
        }
        if judged.accuses_innocent || (judged.decidable && !judged.right) {
            let miss = match (judged.accuses_innocent, judged.open) {
                (true, _) => "innocent accused",
                (false, true) => "open",
                (false, false) => "missed",
            };
            self.misses
                .push(format!("seed {seed}, {miss}: {}", judged.summary));
        }
    }

    fn add(&mut self, other: Self) {
        self.jobs += other.jobs;
        self.decidable += other.decidable;
        self.right += other.right;
        self.open += other.open;
        self.innocents += other.innocents;
        for (class, share) in other.by_confidence {
            let sum = self.by_confidence.entry(class).or_default();
            sum.all += share.all;
            sum.right += share.right;
            sum.claimed += share.claimed;
        }
    }

    /// The counts, then `right/all` for each class of confidence.
    fn cells(&self, name: &str) -> String {
        let shares = Confidence::ALL.map(|class| {
            let share = self.by_confidence.get(&class);
            share.map_or("-".to_owned(), |share| {
                format!("{}/{}", share.right, share.all)
            })
        });
        format!(
            "| {name} | {} | {} | {} | {} | {} | {} |",
            self.jobs,
            self.decidable,
            self.right,
            self.open,
            self.innocents,
            shares.join(" | ")
        )
    }
}

/// The result of a job that hangs, whose records may be damaged. Errors with a confidence of at most `unsure` may
/// accuse any rank.
fn judge_hang(job: &Job, unsure: f64) -> Judged {
    let report = judge(job);
    let guilty = job.culprits();
    // If the records do not decide who is at fault, an error with a confidence of at most one half does not count as an
    // accusation: it leaves that open.
    let unsure = if job.decidable {
        unsure
    } else {
        unsure.max(0.5)
    };
    let accuses = |finding: &Finding| {
        let innocent = |rank: &Rank| !guilty.contains(rank);
        finding.confidence > unsure && finding.culprit_ranks.iter().any(innocent)
    };
    Judged {
        decidable: job.decidable,
        right: first_is_true(job, &report),
        open: is_open(job, &report),
        accuses_innocent: roots(&report).any(accuses),
        confidence: confidence(&report, |finding| finding.severity == Severity::Error),
        summary: format!("{} judged as {}", truth(job), summary_of(&report)),
    }
}

/// The confidence of the first finding; `None` if there is none, or if `is_answer` does not hold for it.
fn confidence(report: &Report, is_answer: fn(&Finding) -> bool) -> Option<f64> {
    let first = report
        .findings
        .first()
        .filter(|finding| is_answer(finding))?;
    Some(first.confidence)
}

/// The result of a job with a fault that is reported by a warning or does not stop the job; `None` if this seed gives
/// none.
fn judge_warning(seed: u64, kind: Kind) -> Option<Judged> {
    let job = warnings::spec(seed, kind).make();
    if job.faults.is_empty() {
        return None;
    }
    let report = judge(&job);
    let guilty = job.culprits();
    let no_other = |finding: &Finding| {
        finding
            .culprit_ranks
            .iter()
            .all(|rank| guilty.contains(rank))
    };
    let is_of_kind = |finding: &&Finding| kind.codes().contains(&finding.code);
    let first = report.findings.iter().find(is_of_kind);
    Some(Judged {
        decidable: job.decidable,
        right: first.is_some_and(no_other),
        open: false,
        accuses_innocent: job.decidable
            && roots(&report).any(|finding| finding.confidence > 0.5 && !no_other(finding)),
        confidence: first.map(|finding| finding.confidence),
        summary: format!("{} judged as {}", truth(&job), summary_of(&report)),
    })
}

/// The result of a job without faults.
fn judge_healthy(job: &Job, policy: &Policy) -> Judged {
    let report = job.judge(policy);
    let fits = match report.verdict {
        Verdict::Healthy => true,
        Verdict::Running => policy.snapshot,
        _ => false,
    };
    let claims_fault = report.findings.iter().any(is_claim);
    Judged {
        decidable: true,
        right: fits && !claims_fault,
        open: false,
        accuses_innocent: claims_fault,
        confidence: None,
        summary: format!("{} in {:?}", summary_of(&report), job.spec),
    }
}

/// The result of a job that is judged for lateness.
fn judge_paced(
    seed: u64,
    (_, make): &lateness::Class,
    interval_us: u64,
    right: fn(&PacedJob, &Report) -> bool,
) -> Judged {
    let spec = make(seed, interval_us);
    let job = spec.make();
    let report = job.judge(&Policy::default());
    let innocent = |rank: &Rank| !job.culprits.contains(rank);
    let accuses =
        |finding: &Finding| is_claim(finding) && finding.culprit_ranks.iter().any(innocent);
    Judged {
        decidable: true,
        right: right(&job, &report),
        open: false,
        accuses_innocent: report.findings.iter().any(accuses),
        confidence: confidence(&report, is_claim),
        summary: format!("{} in {spec:?}", summary_of(&report)),
    }
}

fn is_silent(_: &PacedJob, report: &Report) -> bool {
    !report.findings.iter().any(is_claim)
}

/// The classes of jobs that hang.
fn hangs() -> Vec<Class> {
    let class_of = |kind: Kind, salt: u64| {
        Class::new(format!("{kind:?}"), move |seed| {
            Some(judge_hang(&hanging(seed, salt, 32, vec![kind])?, 0.0))
        })
    };
    let not_of_messages = Kind::HANGS
        .iter()
        .filter(|kind| !Kind::MESSAGES.contains(kind));
    let mut classes: Vec<Class> = not_of_messages.map(|&kind| class_of(kind, 31)).collect();
    classes.push(class_of(Kind::Members, 21));
    classes.push(class_of(Kind::Fabric, 3));
    for &kind in Kind::MESSAGES.iter().chain(Kind::HOSTS) {
        for (rings, name) in [(Rings::Long, ""), (Rings::Short, ", short rings")] {
            let class = Class::new(format!("{kind:?}{name}"), move |seed| {
                Some(judge_hang(&classes::job(seed, kind, rings)?, 0.5))
            });
            classes.push(match rings {
                Rings::Long => class,
                Rings::Short => class.or_open(),
            });
        }
    }
    classes.push(Class::new("two or three faults", |seed| {
        let mut random = Random::new(seed);
        let count = random.between(2, 3);
        let kinds = (0..count).map(|_| *random.pick(Kind::HANGS)).collect();
        Some(judge_hang(&hanging(seed, 1, 32, kinds)?, 0.0))
    }));
    classes.push(Class::new("two recorders", |seed| {
        let job = with_two_recorders(seed, vec![kind_of_hang(seed)]);
        (!job.faults.is_empty() && !job.blocked.is_empty()).then(|| judge_hang(&job, 0.0))
    }));
    for (name, damage) in [
        ("a record is missing", Damage::Missing),
        ("a record is cut short", Damage::Cut),
        ("a record of an earlier run", Damage::Stale),
        ("records of several versions", Damage::MixedVersions),
    ] {
        let class = Class::new(name, move |seed| {
            let mut job = hanging(seed, 32, 32, vec![kind_of_hang(seed)])?;
            let was_damaged = job.apply(damage, &mut Random::new(seed));
            was_damaged.then(|| judge_hang(&job, 0.5))
        });
        classes.push(class.or_open());
    }
    classes
}

/// The classes of jobs that do not hang.
fn others() -> Vec<Class> {
    let mut classes: Vec<Class> = Kind::WARNINGS
        .iter()
        .map(|&kind| Class::new(format!("{kind:?}"), move |seed| judge_warning(seed, kind)))
        .collect();
    for &interval_us in POLL_INTERVALS_US {
        let paced = |class: &'static lateness::Class, right| {
            let name = format!("{}, {} ms", class.0, interval_us as f64 / 1e3);
            Class::new(name, move |seed| {
                Some(judge_paced(seed, class, interval_us, right))
            })
        };
        let names: fn(&PacedJob, &Report) -> bool = lateness::names_the_culprits;
        classes.extend(SLOW.iter().map(|class| paced(class, names)));
        classes.push(paced(&NO_SINGLE_RANK[0], names));
        classes.push(paced(&NO_SINGLE_RANK[1], is_silent));
        classes.extend(HEALTHY.iter().map(|class| paced(class, is_silent)));
    }
    classes.push(Class::new("healthy", |seed| {
        Some(judge_healthy(
            &Spec::random(seed, 64).make(),
            &Policy::default(),
        ))
    }));
    classes.push(Class::new("healthy, two recorders", |seed| {
        Some(judge_healthy(
            &with_two_recorders(seed, Vec::new()),
            &Policy::default(),
        ))
    }));
    classes.push(Class::new("running, looked at", |seed| {
        let mut spec = Spec::random(seed.wrapping_add(6 << 32), 32);
        spec.recording.taken_at = Some(Random::new(seed).between(30, 95) as f64 / 100.0);
        let policy = Policy {
            snapshot: true,
            ..Policy::default()
        };
        Some(judge_healthy(&spec.make(), &policy))
    }));
    classes
}

/// Judges the classes on all processors, `wanted` decidable jobs of each, and prints the table. Returns the numbers of
/// classes and of jobs, and a [complaint](Class::complaint) about each class that is not good enough.
fn judge_and_print(wanted: usize) -> (usize, usize, Vec<String>) {
    let mut classes = hangs();
    classes.extend(others());
    let next = AtomicUsize::new(0);
    let rows: Mutex<BTreeMap<usize, Row>> = Mutex::default();
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some(class) = classes.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let at = classes.iter().position(|other| std::ptr::eq(other, class));
                    let row = class.row(wanted);
                    rows.lock()
                        .expect("no thread panics while it holds the rows")
                        .extend(at.map(|at| (at, row)));
                }
            });
        }
    });
    let rows = rows.into_inner().expect("no thread panicked");
    eprintln!(
        "| class | jobs | decidable | right first | left open | innocents accused | right/all at confidence <= 50 % | \
         <= 75 % | <= 90 % | > 90 % |"
    );
    eprintln!("|---|---|---|---|---|---|---|---|---|---|");
    let (mut sum, mut complaints) = (Row::default(), Vec::new());
    for (class, row) in classes.iter().zip(rows.into_values()) {
        eprintln!("{}", row.cells(&class.name));
        complaints.extend(class.complaint(&row));
        sum.add(row);
    }
    eprintln!("{}", sum.cells("all"));
    (classes.len(), sum.jobs, complaints)
}

#[test]
fn a_few_jobs_of_every_class_are_judged_right() {
    let (_, _, complaints) = judge_and_print(2);
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
}

#[test]
#[ignore = "judges more than 3,000 jobs, which takes minutes"]
fn the_table_of_classes() {
    let (classes, jobs, complaints) = judge_and_print(crate::seeds(42).end as usize);
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
    assert!(
        classes >= 30 && jobs >= 3000,
        "judged {jobs} jobs of {classes} classes, not at least 3,000 of at least 30: is RCOMM_VERDICT_SEEDS below 42?"
    );
}
