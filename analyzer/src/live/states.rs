//! The states of ranks and groups that every view shows and every filter matches.

use super::Snapshot;
use rcomm_recorder::model::Rank;
use rcomm_verdict::{
    Code, Finding, GroupRef, InstanceReport, InstanceState, Report, Severity, Verdict,
};
use std::collections::{BTreeSet, HashMap, HashSet};

/// State of a rank, from best to worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RankState {
    /// No problem.
    Ok,
    /// Waiting for others in a job that is stuck or wrong.
    Waits,
    /// Its newest operations have failed and none is pending, in a job that is in trouble.
    Failed,
    /// Arrives late repeatedly.
    Late,
    /// No record of it was read.
    Unread,
    /// Has stopped answering.
    Silent,
    /// A root cause.
    Root,
}

impl RankState {
    /// Every state, in the order of a legend.
    pub const ALL: [Self; 7] = [
        Self::Ok,
        Self::Waits,
        Self::Failed,
        Self::Root,
        Self::Late,
        Self::Silent,
        Self::Unread,
    ];

    /// The key of the state in JSON.
    pub const fn key(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Waits => "waits",
            Self::Failed => "failed",
            Self::Late => "late",
            Self::Unread => "unread",
            Self::Silent => "silent",
            Self::Root => "root",
        }
    }

    /// The state with this key; `None` if there is none.
    pub fn of_key(key: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.key() == key)
    }

    /// The name of the state for readers.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Root => "at fault",
            Self::Unread => "no record",
            other => other.key(),
        }
    }

    /// Whether the state says that something is wrong with the rank or its job.
    pub fn is_problem(self) -> bool {
        self != Self::Ok
    }

    /// The words that `state:` of a filter is compared with. A rank in no trouble that is in an operation is also
    /// `running`, whether that runs or is queued.
    pub const fn filter_words(self, is_pending: bool) -> &'static str {
        match self {
            Self::Ok if is_pending => "ok running",
            Self::Waits => "waits waiting",
            Self::Unread => "no record, unread, silent",
            Self::Root => "root, at fault",
            other => other.key(),
        }
    }
}

/// State of a group, from worst to best.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GroupState {
    /// The root cause is in this group.
    Bad,
    /// Members are blocked in this group.
    Waiting,
    /// An operation of this group has failed, and none is pending.
    Failed,
    /// Operations are in flight.
    Busy,
    /// No operation is in flight.
    Idle,
}

impl GroupState {
    /// The name of the state for readers.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Bad => "stuck",
            Self::Waiting => "waiting",
            Self::Failed => "failed",
            Self::Busy => "busy",
            Self::Idle => "idle",
        }
    }

    /// Whether the state says that something is wrong with the group.
    pub fn is_problem(self) -> bool {
        matches!(self, Self::Bad | Self::Waiting | Self::Failed)
    }

    /// The words that `state:` of a filter is compared with.
    const fn filter_words(self) -> &'static str {
        match self {
            Self::Busy => "busy running",
            Self::Idle => "idle ok",
            other => other.word(),
        }
    }
}

/// The states of the ranks and groups of one report.
#[derive(Clone, Debug, Default)]
pub struct States {
    ranks: HashMap<Rank, RankState>,
    /// Ranks that are root causes, ascending.
    roots: Vec<Rank>,
    /// See [`States::suspect`].
    suspect: Option<Rank>,
    groups: HashMap<GroupRef, GroupState>,
    /// For each group the index of its oldest pending operation in the report, else of its first failed one.
    oldest: HashMap<GroupRef, usize>,
}

impl States {
    /// The states in a snapshot, without findings whose code is in `muted`.
    pub fn of_snapshot(snapshot: &Snapshot, muted: &BTreeSet<Code>) -> Self {
        let mut states = Self::default();
        // With a collector as source there are no records here; its report says which ranks were read. A report on a
        // job whose ranks are all silent has no ranks.
        for view in snapshot.ranks.iter() {
            let state = match view.dumps.is_empty() {
                true => RankState::Unread,
                false => RankState::Ok,
            };
            states.ranks.insert(view.rank, state);
        }
        states.set_reported(&snapshot.report, muted);
        for view in snapshot.ranks.iter().filter(|view| view.silent) {
            states.set(view.rank, RankState::Silent);
        }
        states
    }

    /// The states in a report that is not the newest: those of the ranks as [`States::in_trouble`] had them then.
    pub fn of_past(
        report: &Report,
        in_trouble: impl IntoIterator<Item = (Rank, RankState)>,
    ) -> Self {
        let mut states = Self::default();
        states.set_reported(report, &BTreeSet::new());
        let ranks = report.ranks.iter().map(|row| (row.rank, RankState::Ok));
        states.ranks = ranks.chain(in_trouble).collect();
        states
    }

    /// The state of a rank becomes this one, unless it has a worse one.
    fn set(&mut self, rank: Rank, state: RankState) {
        let known = self.ranks.entry(rank).or_insert(state);
        *known = (*known).max(state);
    }

    /// Sets what the report says, without findings whose code is in `muted`.
    fn set_reported(&mut self, report: &Report, muted: &BTreeSet<Code>) {
        let unmuted: Vec<&Finding> = (report.findings.iter())
            .filter(|finding| !muted.contains(&finding.code))
            .collect();
        let hangs = matches!(report.verdict, Verdict::Stuck | Verdict::Mismatch);
        self.set_ranks(report, &unmuted, hangs);
        self.set_groups(report, &unmuted, hangs);
    }

    fn set_ranks(&mut self, report: &Report, unmuted: &[&Finding], hangs: bool) {
        for row in &report.ranks {
            let known = self.ranks.entry(row.rank).or_insert(RankState::Unread);
            if row.read {
                *known = RankState::Ok;
            }
            let has_failed = row.failure.is_some() && row.pending == 0;
            if has_failed && report.verdict.is_trouble() {
                self.set(row.rank, RankState::Failed);
            }
        }
        if hangs {
            for wait in &report.waits {
                self.set(wait.rank, RankState::Waits);
            }
        }
        let mut roots = BTreeSet::new();
        for finding in unmuted {
            let is_error = finding.severity == Severity::Error;
            let state = match finding.code {
                Code::W220 => RankState::Late,
                Code::W150 => RankState::Silent,
                _ if is_error && finding.caused_by.is_none() => {
                    roots.extend(culprits_of(finding));
                    RankState::Root
                }
                _ => continue,
            };
            for &rank in culprits_of(finding) {
                self.set(rank, state);
            }
            if is_error {
                for &rank in &finding.victim_ranks {
                    self.set(rank, RankState::Waits);
                }
            }
        }
        self.roots = roots.into_iter().collect();
        let late = unmuted.iter().filter(|finding| finding.code == Code::W220);
        let mut late = late.filter_map(|finding| finding.culprit_ranks.first());
        self.suspect = self.roots.first().or_else(|| late.next()).copied();
    }

    fn set_groups(&mut self, report: &Report, unmuted: &[&Finding], hangs: bool) {
        let accused: HashSet<&GroupRef> = (unmuted.iter())
            .filter(|f| f.severity == Severity::Error && f.caused_by.is_none())
            .filter_map(|f| f.group.as_ref())
            .collect();
        // Operations that ranks are in come before operations that have failed.
        let has_failed =
            |(_, instance): &(usize, &InstanceReport)| instance.state == InstanceState::Failed;
        let instances = report.in_flight.iter().enumerate();
        let (failed, pending): (Vec<_>, Vec<_>) = instances.partition(has_failed);
        for (at, instance) in pending.into_iter().chain(failed) {
            if !self.oldest.contains_key(&instance.group) {
                self.oldest.insert(instance.group.clone(), at);
            }
        }
        for group in &report.groups {
            let oldest = self.oldest(report, &group.group);
            let state = if accused.contains(&group.group) {
                GroupState::Bad
            } else if oldest.is_some_and(|oldest| oldest.state == InstanceState::Failed) {
                GroupState::Failed
            } else if hangs && oldest.is_some_and(InstanceReport::is_blocked) {
                GroupState::Waiting
            } else if group.in_flight > 0 {
                GroupState::Busy
            } else {
                GroupState::Idle
            };
            self.groups.insert(group.group.clone(), state);
        }
    }

    /// The state of a rank; `Unread` if the report does not include it.
    pub fn rank(&self, rank: Rank) -> RankState {
        self.ranks.get(&rank).copied().unwrap_or(RankState::Unread)
    }

    /// The ranks in each state, ascending, without those in no trouble.
    pub fn in_trouble(&self) -> impl Iterator<Item = (RankState, Vec<Rank>)> {
        RankState::ALL.into_iter().filter_map(|state| {
            let ranks = self.ranks.iter().filter(|&(_, &of)| of == state);
            let mut ranks: Vec<Rank> = ranks.map(|(&rank, _)| rank).collect();
            ranks.sort_unstable();
            (state.is_problem() && !ranks.is_empty()).then_some((state, ranks))
        })
    }

    /// Ranks that are root causes, ascending.
    pub fn roots(&self) -> &[Rank] {
        &self.roots
    }

    /// The first rank at fault or, if there is none, the first one that is late; `None` without either.
    pub fn suspect(&self) -> Option<Rank> {
        self.suspect
    }

    /// The state of a group; `Idle` if the report does not include it.
    pub fn group(&self, group: &GroupRef) -> GroupState {
        self.groups.get(group).copied().unwrap_or(GroupState::Idle)
    }

    /// The name of a group's state for readers, where `report` is the report of these states. A group whose operation
    /// has failed is `failed`, also if its ranks are at fault: none of them is stuck any more.
    pub fn group_word(&self, report: &Report, group: &GroupRef) -> &'static str {
        self.ended_state(report, group).word()
    }

    /// The words that `state:` of a filter is compared with for a group; see [`Self::group_word`].
    pub fn group_filter_words(&self, report: &Report, group: &GroupRef) -> &'static str {
        self.ended_state(report, group).filter_words()
    }

    /// The state of a group, but `Failed` in place of `Bad` if the operation at fault has failed.
    fn ended_state(&self, report: &Report, group: &GroupRef) -> GroupState {
        let oldest = self.oldest(report, group);
        match oldest.is_some_and(|oldest| oldest.state == InstanceState::Failed) {
            true => GroupState::Failed,
            false => self.group(group),
        }
    }

    /// The oldest pending operation of a group: the first that `report` lists, which must be the report of which these
    /// are the states. If none is pending, the first operation that has failed; `None` if there is neither.
    pub fn oldest<'a>(&self, report: &'a Report, group: &GroupRef) -> Option<&'a InstanceReport> {
        let index = *self.oldest.get(group)?;
        report.in_flight.get(index)
    }
}

/// The culprits of a finding; if it names none, the ranks of the cycle.
fn culprits_of(finding: &Finding) -> &[Rank] {
    if finding.culprit_ranks.is_empty() {
        &finding.cycle
    } else {
        &finding.culprit_ranks
    }
}
