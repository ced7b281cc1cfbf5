//! Counts the verdicts on the jobs of a property, and the right ones among them.

use rcomm_analyzer::{Finding, Report, Severity};
use rcomm_recorder::model::Rank;
use rcomm_tests::generator::{Job, Kind};
use std::collections::BTreeMap;

/// Whether the finding claims a fault: an error or a warning.
pub(crate) fn is_claim(finding: &Finding) -> bool {
    finding.severity != Severity::Note
}

/// The errors that no other finding causes.
pub(crate) fn roots(report: &Report) -> impl Iterator<Item = &Finding> {
    let errors = report
        .findings
        .iter()
        .filter(|finding| finding.severity == Severity::Error);
    errors.filter(|finding| finding.caused_by.is_none())
}

/// Whether the first finding names one of the faults and only ranks at fault; if the fault has no culprit, no rank.
pub(crate) fn first_is_true(job: &Job, report: &Report) -> bool {
    let Some(first) = report.findings.first() else {
        return false;
    };
    let truth = job.culprits();
    job.faults.iter().any(|fault| {
        let names_culprits = if fault.culprits.is_empty() {
            first.culprit_ranks.is_empty()
        } else {
            !first.culprit_ranks.is_empty()
                && first.culprit_ranks.iter().all(|rank| truth.contains(rank))
        };
        names_culprits && fault.kind.codes().contains(&first.code)
    })
}

/// Whether the report leaves open which rank is at fault: it has no error, or the confidence of its first error is at
/// most one half and it lists a rank at fault.
pub(crate) fn is_open(job: &Job, report: &Report) -> bool {
    // A report may also list the rank at which a fault was injected, even if no record can blame it.
    let injected = job.faults.iter().map(|fault| fault.rank);
    let truth: Vec<Rank> = job.culprits().into_iter().chain(injected).collect();
    let Some(first) = report
        .findings
        .iter()
        .find(|finding| finding.severity == Severity::Error)
    else {
        return true;
    };
    let sets = first.alternatives.iter().chain([&first.culprit_ranks]);
    let lists_culprit = |set: &Vec<Rank>| set.iter().any(|rank| truth.contains(rank));
    first.confidence <= 0.5 && sets.into_iter().any(lists_culprit)
}

/// The verdict and the first findings of a report, for messages.
pub(crate) fn summary_of(report: &Report) -> String {
    let findings: Vec<String> = report
        .findings
        .iter()
        .take(3)
        .map(|finding| {
            format!(
                "{} {:?} ({}) {}",
                finding.code, finding.culprit_ranks, finding.confidence, finding.sentence
            )
        })
        .collect();
    format!("{:?}: {}", report.verdict, findings.join(" | "))
}

/// The faults and the parameters of a job, for messages.
pub(crate) fn truth(job: &Job) -> String {
    let faults: Vec<String> = job
        .faults
        .iter()
        .map(|fault| format!("{:?} on {:?} at {}", fault.kind, fault.culprits, fault.at))
        .collect();
    format!("{} ({:?})", faults.join(", "), job.spec)
}

/// At least this share of decidable jobs must be judged right.
pub(crate) const RIGHT: f64 = 0.99;

/// The verdicts on the jobs of a property.
#[derive(Default)]
pub(crate) struct Tally {
    pub(crate) jobs: usize,
    right: usize,
    /// The number of jobs that were not judged right, but whose report leaves open which rank is at fault.
    open: usize,
    /// For each kind of fault, the number of its jobs that were judged right, and of all.
    kinds: BTreeMap<Kind, [usize; 2]>,
    /// How often a first finding that is an error was right, by its confidence.
    by_confidence: BTreeMap<Confidence, Share>,
    /// The jobs that were not judged right, with their reports.
    misses: Vec<String>,
    /// The jobs in which a rank that is not at fault is accused, with their reports.
    accused: Vec<String>,
}

impl Tally {
    /// Judges a job and counts the result. Errors with a confidence of at most `unsure` may accuse any rank.
    pub(crate) fn add(&mut self, seed: u64, job: &Job, unsure: f64) {
        self.jobs += 1;
        let report = crate::judge(job);
        let is_right = first_is_true(job, &report);
        self.right += usize::from(is_right);
        if let Some(first) = report
            .findings
            .first()
            .filter(|finding| finding.severity == Severity::Error)
        {
            let class = Confidence::of(first.confidence);
            let share = self.by_confidence.entry(class).or_default();
            share.all += 1;
            share.right += usize::from(is_right);
            share.claimed += first.confidence;
        }
        for fault in &job.faults {
            let counts = self.kinds.entry(fault.kind).or_default();
            counts[0] += usize::from(is_right);
            counts[1] += 1;
        }
        if !is_right {
            let is_open = is_open(job, &report);
            self.open += usize::from(is_open);
            self.misses.push(format!(
                "{}seed {seed}: {} judged as {}",
                if is_open { "open, " } else { "" },
                truth(job),
                summary_of(&report)
            ));
        }
        let guilty = job.culprits();
        let certain = roots(&report).filter(|finding| finding.confidence > unsure);
        let wrong: Vec<Rank> = certain
            .flat_map(|finding| finding.culprit_ranks.iter().copied())
            .filter(|rank| !guilty.contains(rank))
            .collect();
        if !wrong.is_empty() {
            self.accused.push(format!(
                "seed {seed}: accused {wrong:?}; {} judged as {}",
                truth(job),
                summary_of(&report)
            ));
        }
    }

    /// Prints the counts, and asserts that at least the share `right` of the jobs is right, that no innocent rank is
    /// accused, and that confidences are not too high.
    pub(crate) fn assert_right(&self, name: &str, right: f64) {
        self.assert_share(name, right, self.right);
    }

    /// Works as [`assert_right`](Self::assert_right), but a report that leaves open which rank is at fault counts as
    /// right, since the records cannot always decide it.
    pub(crate) fn assert_right_or_open(&self, name: &str, right: f64) {
        self.assert_share(name, right, self.right + self.open);
    }

    fn assert_share(&self, name: &str, right: f64, good: usize) {
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
        for (class, share) in &self.by_confidence {
            eprintln!("    confidence {class}: {share}");
        }
        for wrong in self.misses.iter().filter(|miss| !miss.starts_with("open")) {
            eprintln!("    wrong: {wrong}");
        }
        for (class, share) in &self.by_confidence {
            assert!(
                share.all < MIN_FINDINGS
                    || share.right as f64 >= class.min_share() * share.all as f64,
                "{name}: too few findings of confidence {class} are right: {share}; missed:\n{}",
                self.misses.join("\n")
            );
        }
        assert!(self.jobs > 0, "{name}: no job was decidable");
        assert!(
            self.accused.is_empty() && share >= right,
            "{name}: a share of {share:.4} is right, at least {right} expected; innocents accused:\n{}\nmissed:\n{}",
            self.accused.join("\n"),
            self.misses.join("\n")
        );
    }
}

/// A class of confidences of findings.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Confidence {
    /// Up to 0.5: the finding may well be wrong.
    UpTo50,
    /// Above 0.5, up to 0.75.
    UpTo75,
    /// Above 0.75, up to 0.9.
    UpTo90,
    /// Above 0.9.
    Above90,
}

impl Confidence {
    pub(crate) const ALL: [Self; 4] = [Self::UpTo50, Self::UpTo75, Self::UpTo90, Self::Above90];

    /// The class of this confidence.
    pub(crate) fn of(confidence: f64) -> Self {
        match confidence {
            c if c <= 0.5 => Self::UpTo50,
            c if c <= 0.75 => Self::UpTo75,
            c if c <= 0.9 => Self::UpTo90,
            _ => Self::Above90,
        }
    }

    /// The smallest share of the findings of this class that must be right.
    fn min_share(self) -> f64 {
        match self {
            Self::UpTo50 => 0.0,
            Self::UpTo75 => 0.5,
            Self::UpTo90 => 0.75,
            Self::Above90 => 0.9,
        }
    }
}

impl std::fmt::Display for Confidence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::UpTo50 => "<= 50 %",
            Self::UpTo75 => "<= 75 %",
            Self::UpTo90 => "<= 90 %",
            Self::Above90 => "> 90 %",
        })
    }
}

/// The smallest number of findings from which the confidences of a class are checked.
const MIN_FINDINGS: usize = 20;

/// How many findings were right, and the sum of their confidences.
#[derive(Default)]
pub(crate) struct Share {
    pub(crate) right: usize,
    pub(crate) all: usize,
    pub(crate) claimed: f64,
}

impl std::fmt::Display for Share {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let all = self.all.max(1) as f64;
        write!(
            f,
            "{} of {} right ({:.1} %), confidence {:.0} % on average",
            self.right,
            self.all,
            self.right as f64 * 100.0 / all,
            self.claimed * 100.0 / all
        )
    }
}
