//! The JSON sent to a page: the report, its age, and deltas between two reports.
//!
//! A snapshot and a delta are serialized once for all clients. A delta names the snapshot that it applies to; a client
//! with any other snapshot gets a full one. In a delta, `set` holds whole sections of the report by name, and `rows`
//! the changed rows of `groups` and `ranks` by index.

use rcomm_analyzer::matrix::{Matrix, Rows, matrix};
use rcomm_analyzer::{
    GroupRef, LaterAttempt, RankState, Report, Severity, Snapshot, States, Verdict,
};
use rcomm_recorder::model::Rank;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

/// Maximum number of columns of the matrix in every snapshot.
const MAX_COLUMNS: usize = 24;
/// Sections that are compared row by row.
const BY_ROW: [&str; 2] = ["groups", "ranks"];

/// The first line, the age and the sources of a snapshot.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Status {
    /// Name of the job; empty if unknown.
    pub(crate) job: String,
    /// Number of the snapshot, from 1.
    pub(crate) number: u64,
    /// The verdict as views write it: see [`Report::word`].
    pub(crate) word: String,
    /// What views say after that word: see [`Report::first_line`].
    pub(crate) sentence: String,
    /// Index of the finding that has this sentence; `None` if it is that of no finding.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) lead: Option<usize>,
    /// Time of the analysis, wall clock, ns since the epoch.
    pub(crate) judged_at_ns: i64,
    /// Duration of the analysis in milliseconds.
    pub(crate) judging_took_ms: f64,
    /// Ranks known, with a record or without.
    pub(crate) ranks: usize,
    /// Ranks that stopped answering.
    pub(crate) silent_ranks: Vec<u32>,
    /// The ranks in each state but `ok`, by the key of the state: the first and the last rank of each run of ranks.
    pub(crate) rank_states: RankRuns,
    /// A later attempt of the job, if its processes were seen and have left no record yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) later_attempt: Option<LaterAttempt>,
    /// How to look further at the rank at fault or late; `None` if there is no such rank, and for records that were
    /// written earlier.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) look: Option<Look>,
    /// Every source.
    pub(crate) sources: Vec<SourceState>,
}

/// How to look further at a rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Look {
    pub(crate) rank: Rank,
    /// The host on which the command must run; empty if unknown.
    pub(crate) host: String,
    /// A shell command; see [`Snapshot::look_command`].
    pub(crate) command: String,
}

impl Look {
    fn of(snapshot: &Snapshot, states: &States) -> Option<Self> {
        let view = snapshot.rank(states.suspect()?)?;
        Some(Self {
            rank: view.rank,
            host: view.host.to_string(),
            command: snapshot.look_command(view.rank)?,
        })
    }
}

/// Runs of ranks, each by its first and last, under the key of a [`RankState`].
pub(crate) type RankRuns = BTreeMap<String, Vec<(Rank, Rank)>>;

fn rank_states(states: &States) -> RankRuns {
    let in_trouble = states.in_trouble();
    in_trouble
        .map(|(state, ranks)| {
            let mut runs: Vec<(Rank, Rank)> = Vec::new();
            for rank in ranks {
                match runs.last_mut() {
                    Some((_, last)) if *last + 1 == rank => *last = rank,
                    _ => runs.push((rank, rank)),
                }
            }
            (state.key().to_owned(), runs)
        })
        .collect()
}

/// The ranks of these runs with their states; unknown keys are left out.
pub(crate) fn ranks_of(runs: &RankRuns) -> impl Iterator<Item = (Rank, RankState)> {
    let known = runs
        .iter()
        .filter_map(|(key, runs)| RankState::of_key(key).map(|state| (state, runs)));
    known.flat_map(|(state, runs)| {
        let ranks = runs.iter().flat_map(|&(first, last)| first..=last);
        ranks.map(move |rank| (rank, state))
    })
}

/// One source.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct SourceState {
    /// Name of the source.
    pub(crate) name: String,
    /// Ranks read in the last poll.
    pub(crate) answered: usize,
    /// Ranks known to the source.
    pub(crate) known: usize,
    /// Milliseconds since the last answer of the source; `None` if it never answered.
    pub(crate) silent_for_ms: Option<f64>,
    /// Error of the last poll, if it failed.
    pub(crate) error: Option<String>,
    /// What is left of the records of a job that is over; `None` before, and if unknown.
    pub(crate) remains: Option<String>,
}

/// The matrix of the group that matters most: the group of the first finding that names one, else the largest group
/// with a recorded collective, else the largest group.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Focus {
    /// The group.
    pub(crate) group: GroupRef,
    /// The group's newest collectives; members with equal cells share a row.
    #[serde(flatten)]
    pub(crate) matrix: Matrix,
}

/// Everything that a page shows at one moment.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct ApiSnapshot {
    pub(crate) status: Status,
    #[serde(serialize_with = "serialize_report")]
    pub(crate) report: Arc<Report>,
    pub(crate) focus: Option<Focus>,
}

fn serialize_report<S: serde::Serializer>(report: &Arc<Report>, to: S) -> Result<S::Ok, S::Error> {
    report.as_ref().serialize(to)
}

impl ApiSnapshot {
    pub(crate) fn of(snapshot: &Snapshot, records: Records) -> Self {
        Self {
            status: status_of(snapshot, records),
            report: snapshot.report.clone(),
            focus: focus_of(snapshot),
        }
    }
}

/// Whether records still change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Records {
    /// They are read from the processes of a job, again and again.
    Followed,
    /// They were written earlier, as dumps are: the processes in them may be gone, or others.
    Written,
}

pub(crate) fn status_of(snapshot: &Snapshot, records: Records) -> Status {
    let states = States::of_snapshot(snapshot, &BTreeSet::new());
    let sources = snapshot.sources.iter().map(|source| SourceState {
        name: source.name.clone(),
        answered: source.answered,
        known: source.known,
        silent_for_ms: source.silence.map(|silence| silence.as_secs_f64() * 1e3),
        error: source.error.clone(),
        remains: source.remains.clone(),
    });
    let silent = snapshot.ranks.iter().filter(|view| view.silent);
    let report = &snapshot.report;
    let lead = report.lead();
    Status {
        job: snapshot.job.clone(),
        number: snapshot.number,
        word: report.word().to_owned(),
        sentence: report.first_line(),
        lead: lead.and_then(|lead| {
            let mut findings = report.findings.iter();
            findings.position(|finding| std::ptr::eq(finding, lead))
        }),
        judged_at_ns: snapshot.at.wall_ns,
        judging_took_ms: snapshot.cost.as_secs_f64() * 1e3,
        ranks: snapshot.ranks.len(),
        silent_ranks: silent.map(|view| view.rank).collect(),
        rank_states: rank_states(&states),
        later_attempt: snapshot.later_attempt.clone(),
        look: match records {
            Records::Followed => Look::of(snapshot, &states),
            Records::Written => None,
        },
        sources: sources.collect(),
    }
}

fn focus_of(snapshot: &Snapshot) -> Option<Focus> {
    let report = &snapshot.report;
    let accused = report.findings.iter().find_map(|f| f.group.as_ref());
    let mut groups = report.groups.iter();
    let used = groups.find(|group| group.last_seq.is_some());
    let largest = || used.or(report.groups.first()).map(|group| &group.group);
    let group = accused.or_else(largest)?;
    Some(Focus {
        group: group.clone(),
        matrix: matrix(snapshot.dumps(), group, report, MAX_COLUMNS, Rows::Folded),
    })
}

/// The values of a snapshot that the history plot shows.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Point {
    /// Number of the snapshot.
    pub(crate) number: u64,
    /// Time of the analysis, wall clock, ns since the epoch.
    pub(crate) at_ns: i64,
    /// The verdict.
    pub(crate) verdict: Verdict,
    /// Operations that were pending.
    pub(crate) in_flight: usize,
    /// Age of the oldest pending operation in milliseconds; 0 if none is pending, or no age is known.
    pub(crate) oldest_ms: f64,
    /// Number of findings that are errors.
    pub(crate) errors: usize,
    /// Number of findings that are warnings.
    pub(crate) warnings: usize,
}

impl Point {
    pub(crate) fn of(snapshot: &Snapshot) -> Self {
        let report = &snapshot.report;
        let count = |severity| {
            let findings = report.findings.iter();
            findings
                .filter(|finding| finding.severity == severity)
                .count()
        };
        let ages = report.pending().filter_map(|instance| instance.age_ms);
        Self {
            number: snapshot.number,
            at_ns: snapshot.at.wall_ns,
            verdict: report.verdict,
            in_flight: report.pending().count(),
            oldest_ms: ages.fold(0.0, f64::max),
            errors: count(Severity::Error),
            warnings: count(Severity::Warning),
        }
    }
}

/// Changes from one snapshot to the next.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Delta {
    /// Number of the snapshot that the delta applies to.
    pub(crate) base: u64,
    status: Value,
    focus: Value,
    set: Map<String, Value>,
    rows: Map<String, Value>,
}

impl Delta {
    /// The delta from snapshot `base` with the JSON form `old` to `new`.
    pub(crate) fn between(base: u64, old: &Value, new: &Value) -> Self {
        let (mut set, mut rows) = (Map::new(), Map::new());
        if let Some(sections) = new["report"].as_object() {
            for (name, section) in sections {
                let before = &old["report"][name];
                if before == section {
                    continue;
                }
                match BY_ROW
                    .contains(&name.as_str())
                    .then(|| changed(before, section))
                {
                    Some(Some(changed)) => rows.insert(name.clone(), changed.into()),
                    _ => set.insert(name.clone(), section.clone()),
                };
            }
        }
        Self {
            base,
            status: new["status"].clone(),
            focus: new["focus"].clone(),
            set,
            rows,
        }
    }
}

/// Changed rows by index; `None` if the number of rows changed, or one of the two is not a list.
fn changed(before: &Value, after: &Value) -> Option<Map<String, Value>> {
    let (before, after) = (before.as_array()?, after.as_array()?);
    (before.len() == after.len()).then(|| {
        let rows = before.iter().zip(after).enumerate();
        rows.filter(|(_, (old, new))| old != new)
            .map(|(index, (_, new))| (index.to_string(), new.clone()))
            .collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_changes_are_sent_and_rows_by_index() {
        let old = json!({"status": {"number": 7}, "focus": null, "report": {
            "verdict": "running", "findings": [], "ranks": [{"rank": 0, "pending": 0}, {"rank": 1, "pending": 0}],
            "groups": [1, 2]}});
        let new = json!({"status": {"number": 8}, "focus": null, "report": {
            "verdict": "stuck", "findings": [], "ranks": [{"rank": 0, "pending": 0}, {"rank": 1, "pending": 1}],
            "groups": [1, 2, 3]}});
        let delta = serde_json::to_value(Delta::between(7, &old, &new))
            .expect("the delta can be written as JSON");
        assert_eq!(
            delta,
            json!({"base": 7, "status": {"number": 8}, "focus": null,
                "set": {"verdict": "stuck", "groups": [1, 2, 3]},
                "rows": {"ranks": {"1": {"rank": 1, "pending": 1}}}})
        );
    }
}
