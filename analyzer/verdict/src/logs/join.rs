//! Adds logs to a report.

use super::attempts::Attempts;
use super::conclusion::Conclusion;
use super::digest::{Digest, TimedOutWait, is_world};
use super::facts::{Log, LoggedOp};
use super::rules;
use crate::report::format::format_ranks;
use crate::report::{
    Code, Finding, GroupRef, LogInput, LogLine, Report, SeqKind, Severity, Verdict,
};
use rcomm_recorder::model::OpType;
use std::collections::BTreeSet;

/// A finding cites at most this many lines.
const MAX_LINES: usize = 16;

impl LoggedOp {
    /// The name of the operation as findings spell it; the logged name in lower case if the operation is unknown.
    pub(super) fn word(&self) -> String {
        match self.kind {
            OpType::Other => self.name.to_ascii_lowercase(),
            known => known.name().to_owned(),
        }
    }
}

/// Adds what the logs show to a report. If no record was read and the report has no finding, the logs alone make the
/// verdict and the finding. Otherwise their lines become evidence of the first error that is no consequence of another
/// finding, or a separate finding if the records show no such error. Does nothing without logs.
pub fn join(report: &mut Report, logs: &[Log]) {
    if logs.is_empty() {
        return;
    }
    let are_logs_alone = report.input.ranks_read == 0 && report.findings.is_empty();
    let others = report.problems.iter().map(|problem| problem.path.as_str());
    let attempts = Attempts::new(logs, others);
    // Records are of the newest attempt.
    let age = match are_logs_alone {
        true => attempts.newest_with_facts(),
        false => 0,
    };
    let expected = u32::try_from(report.input.ranks_expected).ok();
    let digest = Digest::new(attempts.of_age(age), expected.filter(|&ranks| ranks > 0));
    report.input.logs = Some(LogInput {
        files: logs.len(),
        lines: logs.iter().map(|log| log.lines).sum(),
        facts: digest.all.len() as u64,
        other_attempts: attempts.facts_besides(age),
        left_out: logs.iter().map(|log| log.left_out).sum(),
        ranks: digest.named.len(),
    });
    let mut found = rules::judge(&digest);
    if are_logs_alone {
        if age > 0 {
            found = found.map(in_earlier_attempt);
        }
        stand_alone(report, found.unwrap_or_else(nothing_to_judge), &digest);
        return;
    }
    let Some(first) = first_error(report) else {
        if let Some(found) = found {
            add_to_silent_records(report, found, digest.any_timed_out());
        }
        return;
    };
    cite_waits(&mut report.findings[first], &digest.waits);
    if let Some(found) = found {
        compare(&mut report.findings[first], found);
    }
}

/// The index of the first error that is no consequence of another finding.
fn first_error(report: &Report) -> Option<usize> {
    let is_root = |finding: &Finding| {
        finding.severity == Severity::Error
            && finding.caused_by.is_none_or(|cause| cause == finding.id)
    };
    report.findings.iter().position(is_root)
}

/// Makes the report from logs alone.
fn stand_alone(report: &mut Report, found: Conclusion, digest: &Digest<'_>) {
    let stated = digest.world_size.unwrap_or(0) as usize;
    report.input.ranks_expected = report.input.ranks_expected.max(stated);
    report.verdict = found.verdict;
    let id = report.findings.len() as u32 + 1;
    report.findings.push(finding(id, found));
}

/// The conclusion on an attempt after which the job was started again.
fn in_earlier_attempt(mut found: Conclusion) -> Conclusion {
    found.sentence += "; the job was restarted after that, and the log shows no failure since";
    found
}

/// The conclusion if no rule applies.
fn nothing_to_judge() -> Conclusion {
    let mut found = Conclusion::new(
        Code::N302,
        Verdict::Inconclusive,
        0.0,
        "the log holds nothing from which the job can be judged".to_owned(),
    );
    found.next = "give the logs of all ranks, standard error included, or dumps".to_owned();
    found
}

/// Adds a finding of the logs to a report whose records show no error. The finding also states the verdict of the
/// records. `any_timed_out`: whether the logs show a time-out.
fn add_to_silent_records(report: &mut Report, mut found: Conclusion, any_timed_out: bool) {
    let is_over = matches!(report.verdict, Verdict::Cancelled | Verdict::Ended);
    if is_over && found.code.severity() == Severity::Note && !any_timed_out {
        // The records show how the job ended, and the log nothing more.
        return;
    }
    found.ruled_out.push(format!(
        "by the records alone, the verdict is {}",
        report.verdict.word()
    ));
    if found.code.severity() == Severity::Note {
        // The log shows a failure that the records do not show, so neither decides alone.
        if matches!(report.verdict, Verdict::Healthy | Verdict::Running) {
            report.verdict = Verdict::Inconclusive;
        }
    } else {
        report.verdict = found.verdict;
    }
    let id = report
        .findings
        .iter()
        .map(|known| known.id)
        .max()
        .unwrap_or(0)
        + 1;
    let group = found.group.as_deref();
    let group = group.and_then(|name| group_of(report, name));
    let finding = Finding {
        group,
        ..finding(id, found)
    };
    report.findings.insert(0, finding);
}

/// The finding that states a conclusion, without a group.
fn finding(id: u32, found: Conclusion) -> Finding {
    let mut log = found.lines;
    log.truncate(MAX_LINES);
    Finding {
        id,
        confidence: (found.confidence * 100.0).round() / 100.0,
        alternatives: found.alternatives,
        victim_count: found.victims.len(),
        victim_ranks: found.victims,
        seq: found.seq,
        seq_kind: found.seq.map(|_| SeqKind::CollectiveSeqId),
        op: found.op,
        ruled_out: found.ruled_out,
        next: found.next,
        log,
        ..Finding::new(found.code, found.culprits, found.sentence)
    }
}

/// Cites the logged time-outs of the operation that a finding is about. A time-out of a rank that by this finding never
/// issued the operation contradicts it.
fn cite_waits(finding: &mut Finding, waits: &[TimedOutWait<'_>]) {
    let Some(group) = finding.group.clone() else {
        return;
    };
    for wait in waits {
        let same_group = match wait.group {
            Some(name) => bare(name) == group.name,
            None => is_world(Some(&group.name)),
        };
        if !same_group || finding.seq.is_none() || wait.timed_out.seq != finding.seq {
            continue;
        }
        let accused = finding.culprit_ranks.contains(&wait.rank);
        let mut line = wait.seen.cite(format!(
            "timed out in {} #{}",
            wait.timed_out.op.word(),
            wait.timed_out.seq.unwrap_or(0)
        ));
        match finding.code {
            Code::E101 if accused && says_never_issued(finding) => {
                line.text += ", which by this finding it never issued";
                line.contradicts = true;
                push(finding, line, Place::First);
            }
            // The finding does not say whether the rank came.
            Code::E102 if accused => {
                line.text += ", so it had issued it";
                push(finding, line, Place::First);
            }
            _ => push(finding, line, Place::Last),
        }
    }
}

/// Whether a finding says of all its culprits that they never issued the operation. E101 is also about ranks that
/// issued it and have not started it, or that issued it after their peers' time-out.
fn says_never_issued(finding: &Finding) -> bool {
    let culprits = format_ranks(&finding.culprit_ranks);
    let rest = finding.sentence.strip_prefix(&culprits);
    rest.is_some_and(|rest| rest.starts_with(" never issued "))
}

/// The group that a log means by this name; `None` if the report has no group of this name, or several.
fn group_of(report: &Report, name: &str) -> Option<GroupRef> {
    let groups = report.groups.iter().map(|found| &found.group);
    let mut groups = groups.filter(|group| group.name == bare(name));
    let group = groups.next()?;
    groups.next().is_none().then(|| group.clone())
}

/// The name of a group without its description: `0` of `0(default_pg)`.
fn bare(name: &str) -> &str {
    name.split('(').next().unwrap_or(name).trim_end()
}

/// Compares the conclusion of the logs alone with a finding of the records, and cites the conclusion as agreeing or
/// contradicting. If the two are about different groups, both may be true, so the conclusion does not contradict. Does
/// nothing if the logs name no culprit.
fn compare(finding: &mut Finding, found: Conclusion) {
    if found.culprits.is_empty() {
        return;
    }
    let accused: BTreeSet<u32> = finding.culprit_ranks.iter().copied().collect();
    let agrees = found.culprits.iter().all(|rank| accused.contains(rank));
    let is_absence = matches!(finding.code, Code::E101 | Code::E102 | Code::E150);
    if agrees && found.code == Code::E150 && is_absence {
        // The absence of a rank proves little alone; the log adds how its process failed. It adds nothing about other
        // ranks that are absent: they may have ended because of this one.
        finding.sentence += &format!("; log: {}", found.sentence);
        let are_all = accused.len() == found.culprits.len();
        if are_all {
            finding.confidence = finding.confidence.max(0.95);
        }
    }
    let Some(mut line) = found.lines.into_iter().next() else {
        return;
    };
    line.text = found.sentence;
    let groups = finding.group.as_ref().zip(found.group.as_deref());
    let is_elsewhere = groups.is_some_and(|(group, name)| group.name != bare(name));
    line.contradicts = !agrees && !is_elsewhere;
    let place = match line.contradicts {
        true => Place::First,
        false => Place::Last,
    };
    push(finding, line, place);
}

/// Where a line is put among those that a finding cites.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Before the others, also if there are many: it is about a culprit, or contradicts the finding.
    First,
    /// After the others, if there are not too many.
    Last,
}

/// Adds a line to a finding, which keeps [`MAX_LINES`] at most.
fn push(finding: &mut Finding, line: LogLine, place: Place) {
    match place {
        Place::First => finding.log.insert(0, line),
        Place::Last => finding.log.push(line),
    }
    finding.log.truncate(MAX_LINES);
}
