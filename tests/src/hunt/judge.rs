//! Compares a report with what happened.

use super::Case;
use super::job::SECOND;
use rcomm_analyzer::{Finding, Report, Severity, Verdict};
use rcomm_recorder::model::Rank;
use std::fmt;

/// From this confidence on, naming an innocent rank is wrong.
const ACCUSES: f64 = 0.6;
/// A wait of this length, ns, is a hang beyond doubt: no pause of a healthy job is as long.
const HANGS: i64 = 12 * SECOND;
/// The end of a process this long ago, ns, must be noticed.
const NOTICED: i64 = 3 * SECOND;

/// What is true of a job at the moment at which it is judged.
#[derive(Clone, Debug, Default)]
pub struct Truth {
    /// The ranks at fault so far, ascending.
    pub guilty: Vec<Rank>,
    /// The longest wait of a rank that is not at fault, ns.
    pub waited: i64,
    /// Whether a rank's process ended by a fault, and long enough ago to be noticed.
    pub has_crashed: bool,
    /// Whether no process is left.
    pub is_over: bool,
    /// Whether all processes have exited with 0.
    pub ended_well: bool,
    /// Whether the job was ended from outside.
    pub was_cancelled: bool,
}

/// How good a report is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Grade {
    /// What it states is true, and it states what must be stated.
    Right,
    /// It states nothing that is clearly false, but leaves open what is wrong or by whom.
    Doubt,
    /// It states something false.
    Wrong,
}

impl fmt::Display for Grade {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Right => "right",
            Self::Doubt => "doubt",
            Self::Wrong => "WRONG",
        })
    }
}

/// The errors that no other finding causes.
pub(super) fn roots(report: &Report) -> impl Iterator<Item = &Finding> {
    let findings = report.findings.iter();
    findings.filter(|finding| finding.severity == Severity::Error && finding.caused_by.is_none())
}

impl Truth {
    /// What is true when the ranks are seen at these moments.
    pub(super) fn of(case: &Case, moments: &[i64]) -> Self {
        let history = &case.history;
        let latest = moments.iter().copied().max().unwrap_or(0);
        let struck = case.faults.iter().zip(&history.struck);
        let struck = struck.filter_map(|(fault, at)| at.map(|at| (fault, at)));
        let struck: Vec<_> = struck.filter(|&(_, at)| at <= latest).collect();
        let mut guilty: Vec<Rank> = struck.iter().map(|(fault, _)| fault.rank).collect();
        guilty.sort_unstable();
        let lives = history.lives.iter().zip(moments).zip(0..);
        let waits = lives.filter(|(_, rank)| !guilty.contains(rank));
        let waited = waits.flat_map(|((life, &moment), _)| {
            let gone = life.gone.map_or(i64::MAX, |gone| gone.at);
            let until = moment.min(gone).min(life.stopped.unwrap_or(i64::MAX));
            life.operations.iter().filter_map(move |operation| {
                let is_pending = operation.ended.is_none_or(|ended| ended > until);
                let until = operation.failed.map_or(until, |failed| failed.min(until));
                (is_pending && operation.issued <= until).then(|| until - operation.issued)
            })
        });
        let gone = |rank: &Rank| {
            let gone = history.lives[*rank as usize].gone;
            gone.filter(|gone| gone.at <= latest)
        };
        let crashed = |(fault, _): &(&super::Fault, i64)| {
            fault.wrong.ends_process()
                && gone(&fault.rank).is_some_and(|gone| gone.at + NOTICED <= latest)
        };
        let ranks: Vec<Rank> = (0..case.job.world()).collect();
        let is_over = ranks.iter().all(|rank| gone(rank).is_some());
        let ended_in_order = |rank: &Rank| gone(rank).is_some_and(|gone| gone.code == Some(0));
        Self {
            waited: waited.max().unwrap_or(0),
            has_crashed: struck.iter().any(crashed),
            is_over,
            ended_well: is_over && ranks.iter().all(ended_in_order),
            was_cancelled: history.asked.is_some_and(|asked| asked <= latest),
            guilty,
        }
    }

    /// Grades a report, with the reason for any grade but right.
    pub fn grade(&self, report: &Report) -> (Grade, String) {
        let accused = roots(report).find_map(|finding| {
            let mut named = finding.culprit_ranks.iter();
            let innocent = named.find(|rank| !self.guilty.contains(rank))?;
            (finding.confidence >= ACCUSES).then_some((finding.code, *innocent, finding.confidence))
        });
        if let Some((code, rank, confidence)) = accused {
            let text = format!("{code} accuses rank {rank} at {confidence:.2}");
            return (Grade::Wrong, text);
        }
        let is_hung = !self.guilty.is_empty() && self.waited >= HANGS;
        let verdict = report.verdict;
        let wrong = |why: &str| (Grade::Wrong, format!("{verdict:?}, but {why}"));
        let doubt = |why: &str| (Grade::Doubt, format!("{verdict:?}, {why}"));
        let claims = matches!(
            verdict,
            Verdict::Stuck | Verdict::Mismatch | Verdict::Crashed
        );
        if verdict == Verdict::Ended && !self.ended_well {
            return wrong("not all ranks ended in order");
        }
        if self.guilty.is_empty() {
            // The records, or the logs alone, show that processes have ended, but not the signal that ended them.
            let names_nobody = roots(report).all(|finding| finding.culprit_ranks.is_empty());
            return match verdict {
                Verdict::Crashed
                    if self.was_cancelled && (report.end.is_some() || names_nobody) =>
                {
                    doubt("the job was cancelled")
                }
                _ if claims => wrong("nothing is wrong"),
                Verdict::Cancelled if !self.was_cancelled => wrong("nothing was cancelled"),
                Verdict::Inconclusive | Verdict::Slow => doubt("nothing is wrong"),
                _ => (Grade::Right, String::new()),
            };
        }
        let shows = is_hung || self.has_crashed;
        match verdict {
            Verdict::Healthy | Verdict::Running if is_hung => wrong("the job hangs"),
            Verdict::Healthy | Verdict::Running if self.has_crashed => wrong("a rank has crashed"),
            Verdict::Cancelled if is_hung => wrong("the job hung"),
            Verdict::Cancelled if self.has_crashed => doubt("a rank has crashed"),
            _ if !shows => (Grade::Right, String::new()),
            _ if !claims => doubt("no rank is named"),
            _ => match roots(report).next() {
                Some(first) if !first.culprit_ranks.is_empty() => {
                    let mut named = first.culprit_ranks.iter();
                    match named.all(|rank| self.guilty.contains(rank)) {
                        true => (Grade::Right, String::new()),
                        false => doubt("an innocent rank is suspected"),
                    }
                }
                _ => doubt("no rank is named"),
            },
        }
    }
}
