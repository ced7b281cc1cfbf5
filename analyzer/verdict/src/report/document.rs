//! The result of an analysis: one type for the command line, the terminal and the browser.

use crate::report::{Code, Finding, GroupRef, SeqKind, Severity, StackNode, Until};
use rcomm_recorder::model::Rank;
use serde::{Deserialize, Serialize};

/// The result of an analysis.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`Report::SCHEMA`].
    pub schema: String,
    /// The verdict on the job as a whole.
    pub verdict: Verdict,
    /// Errors first, then warnings; in each, root causes before consequences, then by confidence. What logs show is the
    /// first finding if the records show no error.
    pub findings: Vec<Finding>,
    /// Problems of the input, and other notes that are not findings.
    pub problems: Vec<Problem>,
    /// How the job ended; `None` while one of its processes may live.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end: Option<JobEnd>,
    /// The input that was read.
    pub input: Input,
    /// Every group, in a stable order (largest first, then by name).
    #[serde(default)]
    pub groups: Vec<GroupReport>,
    /// Every rank, ascending.
    #[serde(default)]
    pub ranks: Vec<RankReport>,
    /// Operations that at least one member has issued and not all have completed, oldest first.
    #[serde(default)]
    pub in_flight: Vec<InstanceReport>,
    /// The wait-for graph: which rank waits for which.
    #[serde(default)]
    pub waits: Vec<Wait>,
    /// The stacks of all ranks' newest calls, merged from the outermost frame inward.
    #[serde(default)]
    pub stacks: Vec<StackNode>,
    /// Where ranks were when their stacks were taken, from files with stacks: the place with the fewest ranks first.
    /// For a rank without a Python stack, the place is a native function.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub now: Vec<Place>,
}

/// A place in the program, and the ranks that were there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    /// The ranks, ascending.
    pub ranks: Vec<Rank>,
    /// The innermost line of the program, and what it has called: `step (train.py:13), within all_reduce`.
    pub place: String,
}

impl Report {
    /// Name and version of the JSON form.
    pub const SCHEMA: &'static str = "rcomm.report/1";

    /// A copy of this report as it would read `later_ms` milliseconds later if nothing but the time had changed:
    /// findings with an age that grows state the age at that time. The other sections are unchanged.
    #[must_use]
    pub fn after(&self, later_ms: f64) -> Self {
        let mut later = self.clone();
        for finding in &mut later.findings {
            let Some(age_ms) = finding.age_ms else {
                continue;
            };
            finding.sentence = finding.sentence_after(later_ms).into_owned();
            finding.age_ms = Some(age_ms + later_ms);
            let since = finding
                .since
                .as_mut()
                .filter(|since| since.until == Until::Now);
            if let Some(since) = since {
                since.age_ms = since.age_ms.map(|age_ms| age_ms + later_ms);
            }
        }
        later
    }

    /// The operations that ranks are in: those of [`in_flight`](Self::in_flight) that have not failed.
    pub fn pending(&self) -> impl Iterator<Item = &InstanceReport> {
        let instances = self.in_flight.iter();
        instances.filter(|instance| instance.state != InstanceState::Failed)
    }

    /// The error with which a rank's operations failed, empty if it is not recorded; `None` if one is pending, if the
    /// newest did not fail, or if the report lacks the rank.
    pub fn failure(&self, rank: Rank) -> Option<&str> {
        let index = self
            .ranks
            .binary_search_by_key(&rank, |report| report.rank)
            .ok()?;
        let report = &self.ranks[index];
        let failure = report.failure.as_deref();
        failure.filter(|_| report.pending == 0)
    }

    /// The share of the job's time that was lost because of the ranks that W220 names, 0..1; 0 if it names none.
    pub fn straggler_share(&self) -> f64 {
        let is_straggler = |rank: &Rank| {
            let mut named = self
                .findings
                .iter()
                .filter(|finding| finding.code == Code::W220);
            named.any(|finding| finding.culprit_ranks.contains(rank))
        };
        let ranks = self
            .ranks
            .iter()
            .filter(|report| is_straggler(&report.rank));
        ranks
            .filter_map(|report| report.lag_share)
            // The sum of no numbers is -0.0.
            .fold(0.0, |sum: f64, share| sum + share)
            .min(1.0)
    }

    /// The finding to show first: the first error or warning. `None` if there is none, or if the job is over and the
    /// verdict is `ended`, `cancelled` or `inconclusive`, or is `crashed` without an error: then a view shows first how
    /// it ended.
    pub fn lead(&self) -> Option<&Finding> {
        use Verdict::{Cancelled, Crashed, Ended, Inconclusive};
        let is_error = |finding: &Finding| finding.severity == Severity::Error;
        let over = self.end.is_some()
            && match self.verdict {
                Ended | Cancelled | Inconclusive => true,
                Crashed => !self.findings.iter().any(is_error),
                _ => false,
            };
        let mut findings = self.findings.iter();
        findings.find(|finding| finding.severity != Severity::Note && !over)
    }

    /// Whether a stuck job does not wait any more: the first error is that a rank failed (E150), no other rank is in an
    /// operation any more, and at least one rank recorded a failure. False if one of the others was not read.
    pub fn has_failed(&self) -> bool {
        let is_cause = |f: &&Finding| f.severity == Severity::Error && f.caused_by.is_none();
        let mut causes = self.findings.iter().filter(is_cause);
        let Some(first) = causes.next().filter(|first| first.code == Code::E150) else {
            return false;
        };
        let does_not_wait = |row: &RankReport| {
            first.culprit_ranks.contains(&row.rank) || row.read && row.pending == 0
        };
        self.verdict == Verdict::Stuck
            && self.ranks.iter().all(does_not_wait)
            && self.ranks.iter().any(|row| row.failure.is_some())
    }

    /// The verdict as views write it: its [word](Verdict::word), but `warning` for a healthy or running job with a
    /// warning, and `failed` for a stuck job [that has failed](Self::has_failed).
    pub fn word(&self) -> &'static str {
        match self.verdict {
            Verdict::Healthy | Verdict::Running if self.lead().is_some() => "warning",
            _ if self.has_failed() => "failed",
            verdict => verdict.word(),
        }
    }

    /// The sentence of the note N305 of a running job that is inconclusive: ranks have stopped communicating with
    /// nothing pending, one failed that no other waits for yet, or no rank has issued an operation. `None` for other
    /// jobs.
    pub fn silence(&self) -> Option<&str> {
        let mut problems = self.problems.iter();
        let is_silent = self.verdict == Verdict::Inconclusive && self.end.is_none();
        let note = problems.find(|problem| problem.code == Code::N305 && is_silent)?;
        Some(&note.sentence)
    }

    /// The exit code of a program that made this report. 1: at least one error or warning, or the verdict is `stuck`,
    /// `mismatch`, `slow` or `crashed`. Otherwise 2 if the verdict is `inconclusive`, else 0.
    pub fn exit_code(&self) -> u8 {
        let has_problem = self
            .findings
            .iter()
            .any(|finding| finding.severity != Severity::Note);
        match self.verdict {
            _ if has_problem => 1,
            Verdict::Healthy | Verdict::Running | Verdict::Ended | Verdict::Cancelled => 0,
            Verdict::Stuck | Verdict::Mismatch | Verdict::Slow | Verdict::Crashed => 1,
            Verdict::Inconclusive => 2,
        }
    }
}

/// The verdict on a job as a whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Every expected rank was read, and nothing recorded is pending or wrong.
    Healthy,
    /// The job runs: operations are pending, or were a moment ago in a live view, and none is overdue. A store that
    /// does not answer (E153) does not change that.
    Running,
    /// An operation does not end, and ranks wait in it.
    Stuck,
    /// Ranks issued calls that do not match.
    Mismatch,
    /// There is no error, but a rank is repeatedly late.
    Slow,
    /// The job is over: every process closed its world, or exited with 0.
    Ended,
    /// The job is over: it was terminated from outside, and nothing was wrong before.
    Cancelled,
    /// The job is over: a process failed or was killed, and nothing was wrong before.
    Crashed,
    /// The input is not enough to decide.
    Inconclusive,
}

impl Verdict {
    /// Every verdict.
    pub const ALL: [Self; 9] = [
        Self::Healthy,
        Self::Running,
        Self::Stuck,
        Self::Mismatch,
        Self::Slow,
        Self::Ended,
        Self::Cancelled,
        Self::Crashed,
        Self::Inconclusive,
    ];

    /// Whether the verdict is `stuck`, `mismatch` or `crashed`.
    pub const fn is_trouble(self) -> bool {
        matches!(self, Self::Stuck | Self::Mismatch | Self::Crashed)
    }

    /// The name of the verdict in JSON and in metrics.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Healthy => "healthy",
            Self::Running => "running",
            Self::Stuck => "stuck",
            Self::Mismatch => "mismatch",
            Self::Slow => "slow",
            Self::Ended => "ended",
            Self::Cancelled => "cancelled",
            Self::Crashed => "crashed",
            Self::Inconclusive => "inconclusive",
        }
    }
}

/// The end of a job that has no process left.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobEnd {
    /// The kind of end.
    pub how: EndKind,
    /// When the last process of the job ended, as far as the records show; wall clock, ns since the epoch.
    pub at_ns: i64,
    /// Ranks whose processes ended before the others', ascending; empty if that is unknown.
    pub first_ranks: Vec<Rank>,
    /// The end in one sentence, with the time of day.
    pub sentence: String,
    /// The attempt that is over, which the report is about.
    #[serde(default, skip_serializing_if = "is_first")]
    pub attempt: u32,
    /// A later attempt of the job that has begun; `None` if none was seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub later_attempt: Option<u32>,
}

/// Whether this is the first attempt, whose number reports leave out.
fn is_first(attempt: &u32) -> bool {
    *attempt == 0
}

/// The kind of a job's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EndKind {
    /// Every process closed its world, or exited with 0.
    Ended,
    /// The job was terminated from outside.
    Cancelled,
    /// Some processes failed or were killed first; the others followed.
    Crashed,
    /// The records do not show how the job ended.
    Unknown,
}

/// A problem of the input, or another note that is not a finding.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Problem {
    /// N300, N301, ...
    pub code: Code,
    /// The file (or source); empty if the problem is not about a particular one.
    pub path: String,
    /// What is wrong or not known, and what was done or can be done.
    pub sentence: String,
    /// Further files that the problem concerns.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub more_paths: Vec<String>,
}

impl Problem {
    /// N300: the input at `path` was left aside, or was read although it may be older than the others, or with a
    /// rank that its name does not state; `sentence` says why.
    pub fn stale_dump(path: impl Into<String>, sentence: impl Into<String>) -> Self {
        Self::new(Code::N300, path, sentence)
    }

    /// N301: the input at `path` could not be read, or only a part of it.
    pub fn unreadable_dump(path: impl Into<String>, sentence: impl Into<String>) -> Self {
        Self::new(Code::N301, path, sentence)
    }

    pub(crate) fn new(code: Code, path: impl Into<String>, sentence: impl Into<String>) -> Self {
        Self {
            code,
            path: path.into(),
            sentence: sentence.into(),
            more_paths: Vec::new(),
        }
    }

    /// The files (or sources) that the problem concerns; none if it is not about particular ones.
    pub fn paths(&self) -> impl Iterator<Item = &str> {
        let more = self.more_paths.iter().map(String::as_str);
        Some(self.path.as_str())
            .filter(|path| !path.is_empty())
            .into_iter()
            .chain(more)
    }
}

/// The input of an analysis.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Input {
    /// The number of files (or other sources).
    pub files: usize,
    /// The number of ranks that should have left a record.
    pub ranks_expected: usize,
    /// The number of ranks whose record was read.
    pub ranks_read: usize,
    /// Whether the job may have more ranks than `ranks_expected`: no input states how many it has.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub may_have_more: bool,
    /// The number of operations read.
    pub entries: u64,
    /// The logs that were read; `None` without logs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logs: Option<LogInput>,
}

/// The logs that were read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogInput {
    /// The number of logs.
    pub files: usize,
    /// The number of lines in these logs.
    pub lines: u64,
    /// The number of facts that were recognized and used. A fact is a line that states something about the end or the
    /// state of the job.
    pub facts: u64,
    /// The number of facts about other attempts of the job than the one that is judged; not used.
    #[serde(default)]
    pub other_attempts: u64,
    /// The number of facts beyond the limit, recognized but not used.
    pub left_out: u64,
    /// The number of ranks that logged a line, or that a line names.
    pub ranks: usize,
}

/// One group over all its ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GroupReport {
    /// The group.
    pub group: GroupRef,
    /// Backend of the group's newest operation; empty if it has none.
    pub backend: String,
    /// Number of the newest collective that any member issued; `None` if none did.
    pub last_seq: Option<u64>,
    /// The lowest number of a newest collective among the members that issued one; `None` if none did.
    pub min_seq: Option<u64>,
    /// The number of members whose record was read.
    pub ranks_read: usize,
    /// The number of pending collectives, without those that have failed.
    pub in_flight: usize,
    /// Age of the oldest pending collective, ms; `None` if there is none or times are unknown.
    pub oldest_ms: Option<f64>,
    /// How much later the last member arrived than the first (arrival lag), ms: median over the recorded collectives;
    /// `None` if it was not measured.
    pub lag_p50_ms: Option<f64>,
    /// Arrival lag, ms: 99th percentile; `None` if it was not measured.
    pub lag_p99_ms: Option<f64>,
    /// Median bus bandwidth of the group's collectives of at least 1 MiB, GB/s; `None` if it was not measured.
    pub busbw_gbs: Option<f64>,
    /// Time-out of the group's newest operation, ms; 0 = unknown.
    pub timeout_ms: u64,
}

/// One rank over all its groups.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankReport {
    /// Global rank.
    pub rank: Rank,
    /// Host; empty if unknown.
    pub host: String,
    /// Process id; 0 if unknown.
    pub pid: u32,
    /// Whether a record of the rank was read.
    pub read: bool,
    /// The phase that the rank reported last, if any.
    pub phase: Option<String>,
    /// The step that the rank reported last, if any.
    pub step: Option<i64>,
    /// The number of operations that the rank has issued, and that have neither completed nor failed.
    pub pending: usize,
    /// The error with which the rank's newest operations failed; empty if that is not recorded. `None` if they did not
    /// fail, or if the rank has issued others since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
    /// The number of operations that the rank's record no longer holds: the ring overwrote them, or could not keep
    /// them.
    pub lost: u64,
    /// The rank's newest recorded call as text (`all_gather #48211 on tp`).
    pub last_call: Option<String>,
    /// The largest of the rank's median arrival lags in its groups, ms; `None` if none was measured.
    pub lag_p50_ms: Option<f64>,
    /// The share of the job's time that was lost because of the rank, 0..1, by the rule of W220. The sum over all ranks
    /// is the whole share that was lost. `None` if that is unknown or an error was found.
    pub lag_share: Option<f64>,
}

/// One collective over all its ranks, or the messages that one rank posted together.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct InstanceReport {
    /// The group.
    pub group: GroupRef,
    /// Sequence number.
    pub seq: u64,
    /// The counter of `seq`.
    pub seq_kind: SeqKind,
    /// The operation.
    pub op: String,
    /// Bytes: of a collective, the largest input of a member; of a message, its buffer.
    pub bytes: u64,
    /// If members must pass equal sizes and did not, the smallest input of a member, bytes; else `None`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub least_bytes: Option<u64>,
    /// Ranks that issued the operation, ascending; of messages, the rank that posted them.
    pub joined: Vec<Rank>,
    /// Members whose record shows that they did not issue the operation, ascending.
    pub missing: Vec<Rank>,
    /// Members whose record does not show whether they issued the operation, ascending.
    pub unknown: Vec<Rank>,
    /// The state of the operation.
    pub state: InstanceState,
    /// The error with which the operation failed; `None` if it did not fail, or if the error is not recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The time since a rank first issued the operation, ms; `None` if the records do not note when they were taken.
    pub age_ms: Option<f64>,
    /// Whether the operation counts as stuck. In a snapshot of a running job, only overdue operations do
    /// ([`Policy::overdue_after`](crate::judge::Policy::overdue_after)); no rank is blamed for the others.
    #[serde(default = "overdue_by_default")]
    pub overdue: bool,
}

/// Reports without this field listed only overdue operations.
const fn overdue_by_default() -> bool {
    true
}

/// The state of an operation over all its members.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum InstanceState {
    /// All members, or both ends of the message, have issued the operation, and it is not [`Queued`](Self::Queued).
    Running,
    /// All members have issued the operation, and the record of one does not show that the operation has started there.
    Queued,
    /// Members are missing, or their records do not show whether they issued the operation.
    Waiting,
    /// One half of a message is missing.
    HalfOpen,
    /// Members issued different calls.
    Mismatch,
    /// The operation has failed on a rank, and no rank is in it any more.
    Failed,
}

impl InstanceReport {
    /// Whether ranks in the operation have waited for others beyond the threshold.
    pub fn is_blocked(&self) -> bool {
        self.overdue && !matches!(self.state, InstanceState::Running | InstanceState::Queued)
    }
}

impl InstanceState {
    /// The name of the state in JSON.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Running => "running",
            Self::Queued => "queued",
            Self::Waiting => "waiting",
            Self::HalfOpen => "half_open",
            Self::Mismatch => "mismatch",
            Self::Failed => "failed",
        }
    }

    /// The words with which `state:` of a filter is compared. A queued operation is also `running`, as its ranks and
    /// groups are.
    pub const fn filter_words(self) -> &'static str {
        match self {
            Self::Queued => "queued, running",
            other => other.word(),
        }
    }
}

/// One wait of the wait-for graph: a rank, and the ranks that it waits for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wait {
    /// The waiting rank.
    pub rank: Rank,
    /// The ranks that it waits for, ascending: those that have not come or, if all have, those whose processes are
    /// gone.
    pub on: Vec<Rank>,
    /// The group of the operation that it waits in.
    pub group: GroupRef,
    /// The operation that it waits in.
    pub op: String,
    /// Sequence number.
    pub seq: u64,
    /// The counter of `seq`.
    pub seq_kind: SeqKind,
}
