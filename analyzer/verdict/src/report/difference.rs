//! The changes between two reports: of two runs, or of two moments of one run.
//!
//! Two findings are the same if their code, group, sequence number and culprits are equal. Their sentences may differ,
//! since the age of a wait grows.

use crate::report::{Finding, GroupRef, Report, Severity, Verdict};
use rcomm_recorder::model::Rank;
use serde::Serialize;

/// The changes between two reports. Its JSON form is named [`Difference::SCHEMA`].
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    /// [`Difference::SCHEMA`].
    pub schema: &'static str,
    /// The verdicts of both, the first report's first.
    pub verdicts: [Verdict; 2],
    /// The [words](Report::word) of both verdicts.
    #[serde(skip)]
    pub words: [&'static str; 2],
    /// Errors and warnings of the second report that the first one lacks.
    pub new: Vec<Finding>,
    /// Errors and warnings of both reports, as in the second.
    pub remaining: Vec<Finding>,
    /// Errors and warnings of the first report that the second one lacks.
    pub gone: Vec<Finding>,
    /// Groups of either report: those of the second, in its order, then those that only the first has.
    pub groups: Vec<GroupChange>,
    /// Ranks whose record only the first report read.
    pub ranks_lost: Vec<Rank>,
    /// Ranks whose record only the second report read.
    pub ranks_gained: Vec<Rank>,
    /// Ranks with pending work in the second report whose newest call is the same in both.
    pub ranks_unmoved: Vec<Rank>,
}

/// One group before and after.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GroupChange {
    /// The group.
    pub group: GroupRef,
    /// Number of the newest collective that any member issued, before and after; `None` if unknown.
    pub last_seq: [Option<u64>; 2],
    /// Number of the newest collective that the member furthest behind issued, before and after; `None` if unknown.
    pub min_seq: [Option<u64>; 2],
    /// Median arrival lag, ms, before and after; `None` if it was not measured.
    pub lag_p50_ms: [Option<f64>; 2],
}

impl GroupChange {
    /// How many collectives the group issued in between; `None` if either number is unknown, or if the number went
    /// down, as between two runs.
    pub fn advanced(&self) -> Option<u64> {
        let [before, after] = self.last_seq;
        after?.checked_sub(before?)
    }
}

impl Difference {
    /// Name and version of the JSON form.
    pub const SCHEMA: &'static str = "rcomm.diff/1";

    /// Compares two reports.
    pub fn between(before: &Report, after: &Report) -> Self {
        let above_note = |report: &Report| -> Vec<Finding> {
            let findings = report.findings.iter();
            findings
                .filter(|finding| finding.severity != Severity::Note)
                .cloned()
                .collect()
        };
        let (old, now) = (above_note(before), above_note(after));
        let (remaining, new) = now
            .into_iter()
            .partition(|finding| old.iter().any(|other| is_same(other, finding)));
        let gone = old
            .into_iter()
            .filter(|finding| !after.findings.iter().any(|other| is_same(other, finding)))
            .collect();
        let read = |report: &Report| -> Vec<Rank> {
            let read = report.ranks.iter().filter(|rank| rank.read);
            read.map(|rank| rank.rank).collect()
        };
        let (read_before, read_after) = (read(before), read(after));
        let lacking_in = |others: &[Rank], ranks: &[Rank]| -> Vec<Rank> {
            let lacking = ranks.iter().filter(|rank| !others.contains(rank));
            lacking.copied().collect()
        };
        Self {
            schema: Self::SCHEMA,
            verdicts: [before.verdict, after.verdict],
            words: [before.word(), after.word()],
            new,
            remaining,
            gone,
            groups: compare_groups(before, after),
            ranks_lost: lacking_in(&read_after, &read_before),
            ranks_gained: lacking_in(&read_before, &read_after),
            ranks_unmoved: unmoved(before, after),
        }
    }
}

fn is_same(finding: &Finding, other: &Finding) -> bool {
    (
        finding.code,
        &finding.group,
        finding.seq,
        &finding.culprit_ranks,
    ) == (other.code, &other.group, other.seq, &other.culprit_ranks)
}

/// The changes of all groups of either report.
fn compare_groups(before: &Report, after: &Report) -> Vec<GroupChange> {
    let find = |report: &Report, group: &GroupRef| {
        let mut groups = report.groups.iter();
        groups.find(|known| known.group == *group).cloned()
    };
    let only_before = before
        .groups
        .iter()
        .filter(|group| find(after, &group.group).is_none());
    after
        .groups
        .iter()
        .chain(only_before)
        .map(|known| {
            let sides = [before, after].map(|report| find(report, &known.group));
            let [old, now] = &sides;
            let last =
                |side: &Option<crate::report::GroupReport>| side.as_ref().and_then(|g| g.last_seq);
            let min =
                |side: &Option<crate::report::GroupReport>| side.as_ref().and_then(|g| g.min_seq);
            let lag = |side: &Option<crate::report::GroupReport>| {
                side.as_ref().and_then(|g| g.lag_p50_ms)
            };
            GroupChange {
                group: known.group.clone(),
                last_seq: [last(old), last(now)],
                min_seq: [min(old), min(now)],
                lag_p50_ms: [lag(old), lag(now)],
            }
        })
        .collect()
}

/// Ranks with pending work in the second report and the same newest call in both.
fn unmoved(before: &Report, after: &Report) -> Vec<Rank> {
    after
        .ranks
        .iter()
        .filter(|rank| rank.pending > 0 && rank.last_call.is_some())
        .filter(|rank| {
            before
                .ranks
                .iter()
                .any(|old| old.rank == rank.rank && old.last_call == rank.last_call)
        })
        .map(|rank| rank.rank)
        .collect()
}
