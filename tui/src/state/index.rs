//! Index of a snapshot: the state of each rank and group, computed once per snapshot.

use crate::page::table::Mark;
use crate::page::theme::Tone;
use rcomm_analyzer::format::GroupNames;
use rcomm_analyzer::{
    Code, Finding, GroupRef, InstanceReport, InstanceState, RankReport, Severity, Snapshot, Verdict,
};
use rcomm_recorder::model::Rank;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

/// State of a rank, from best to worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RankState {
    /// No problem.
    Ok,
    /// Waiting for others.
    Waits,
    /// Its operations have failed, and it has issued none since.
    Failed,
    /// Arrives late repeatedly.
    Late,
    /// Has no record, or has stopped answering.
    Silent,
    /// A root cause.
    Root,
}

impl RankState {
    /// Every state with its character, its tone and its name.
    pub const ALL: &'static [(Self, char, Tone, &'static str)] = &[
        (Self::Ok, '#', Tone::Good, "ok"),
        (Self::Waits, '.', Tone::Waiting, "waits"),
        (Self::Failed, 'x', Tone::Late, "failed"),
        (Self::Root, '!', Tone::Bad, "root"),
        (Self::Late, '~', Tone::Late, "late"),
        (Self::Silent, '?', Tone::Silent, "silent"),
    ];

    fn row(self) -> (char, Tone, &'static str) {
        let found = Self::ALL.iter().find(|(state, ..)| *state == self);
        found.map_or(('?', Tone::Silent, "unknown"), |&(_, c, tone, word)| {
            (c, tone, word)
        })
    }

    /// The character and the tone of the state.
    pub fn mark(self) -> Mark {
        let (glyph, tone, _) = self.row();
        Mark::new(glyph, tone)
    }

    /// The name of the state.
    pub fn word(self) -> &'static str {
        self.row().2
    }
}

/// State of a group, from worst to best.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GroupState {
    /// An error that nothing else causes is in this group.
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
    /// The mark in front of the row of a group in this state.
    pub fn mark(self) -> Mark {
        match self {
            Self::Bad => Mark::new('!', Tone::Bad),
            Self::Waiting => Mark::new('.', Tone::Waiting),
            Self::Failed => Mark::new('x', Tone::Late),
            Self::Busy | Self::Idle => Mark::NONE,
        }
    }

    /// The name of the state.
    pub fn word(self) -> &'static str {
        match self {
            Self::Bad => "stuck",
            Self::Waiting => "waiting",
            Self::Failed => "failed",
            Self::Busy => "busy",
            Self::Idle => "idle",
        }
    }
}

/// The ranks of one host, ascending.
#[derive(Clone, Debug, PartialEq)]
pub struct Host {
    /// Host name; empty if the records have none.
    pub name: Arc<str>,
    /// Indices into the snapshot's ranks.
    pub ranks: Vec<usize>,
}

/// The index of one snapshot; see the documentation of the module.
#[derive(Debug, Default)]
pub struct FrameIndex {
    /// One state per rank of the snapshot.
    pub states: Vec<RankState>,
    /// Ranks that are root causes, ascending.
    pub roots: Vec<Rank>,
    /// Index in the report of the gravest finding that is neither muted, a note, nor the consequence of another. The
    /// headline is about it, unless how the job ended comes first. `None` if there is none.
    pub head: Option<usize>,
    /// Hosts in order of their first rank.
    pub hosts: Vec<Host>,
    groups: HashMap<GroupRef, GroupState>,
    names: GroupNames,
    /// Index, in the report's operations in flight, of what [`Self::oldest`] returns.
    oldest: HashMap<GroupRef, usize>,
    /// Index of each rank in the report's ranks.
    reports: HashMap<Rank, usize>,
}

impl FrameIndex {
    /// Computes the index, without findings whose code is muted.
    pub fn new(snapshot: &Snapshot, muted: &BTreeSet<Code>) -> Self {
        let report = &snapshot.report;
        let unmuted: Vec<&Finding> = report
            .findings
            .iter()
            .filter(|finding| !muted.contains(&finding.code))
            .collect();
        let is_cause = |f: &&&Finding| f.caused_by.is_none() && f.severity != Severity::Note;
        let head = unmuted
            .iter()
            .filter(is_cause)
            .min_by_key(|finding| finding.severity)
            .and_then(|head| report.findings.iter().position(|f| f.id == head.id));
        let mut by_rank: HashMap<Rank, RankState> = HashMap::new();
        let mut set = |rank: Rank, state: RankState| {
            let known = by_rank.entry(rank).or_insert(state);
            *known = (*known).max(state);
        };
        let hangs = matches!(report.verdict, Verdict::Stuck | Verdict::Mismatch);
        if hangs {
            for wait in &report.waits {
                set(wait.rank, RankState::Waits);
            }
        }
        let mut roots = BTreeSet::new();
        for finding in &unmuted {
            let state = match finding.code {
                Code::W220 => RankState::Late,
                Code::W150 => RankState::Silent,
                _ if finding.severity == Severity::Error && finding.caused_by.is_none() => {
                    roots.extend(culprits_of(finding));
                    RankState::Root
                }
                _ => continue,
            };
            for &rank in culprits_of(finding) {
                set(rank, state);
            }
            if finding.severity == Severity::Error {
                for &rank in &finding.victim_ranks {
                    set(rank, RankState::Waits);
                }
            }
        }
        // With a collector as source there are no dumps here; the report says which ranks were read.
        let read: HashSet<Rank> = (report.ranks.iter())
            .filter(|rank| rank.read)
            .map(|rank| rank.rank)
            .collect();
        let states = snapshot.ranks.iter().map(|view| {
            let reported = by_rank.get(&view.rank).copied().unwrap_or(RankState::Ok);
            let is_failed = report.verdict.is_trouble() && report.failure(view.rank).is_some();
            let reported = match reported {
                RankState::Ok | RankState::Waits if is_failed => RankState::Failed,
                reported => reported,
            };
            let read = !view.dumps.is_empty() || read.contains(&view.rank);
            if view.silent || !read {
                reported.max(RankState::Silent)
            } else {
                reported
            }
        });
        let mut index = Self {
            states: states.collect(),
            roots: roots.into_iter().collect(),
            head,
            ..Self::default()
        };
        index.find_hosts(snapshot);
        index.find_groups(snapshot, &unmuted, hangs);
        index.reports = (report.ranks.iter().enumerate())
            .map(|(at, r)| (r.rank, at))
            .collect();
        index
    }

    /// Lists the hosts, each with the indices of its ranks, in the order of their first ranks.
    fn find_hosts(&mut self, snapshot: &Snapshot) {
        let mut index_of_host: HashMap<Arc<str>, usize> = HashMap::new();
        for (at, view) in snapshot.ranks.iter().enumerate() {
            let next = self.hosts.len();
            let index = *index_of_host.entry(view.host.clone()).or_insert(next);
            if index == next {
                self.hosts.push(Host {
                    name: view.host.clone(),
                    ranks: vec![],
                });
            }
            self.hosts[index].ranks.push(at);
        }
    }

    /// Finds the oldest operation in flight and the state of each group. `unmuted` are the findings whose codes are not
    /// muted; `hangs` is true if the verdict is stuck or mismatch.
    fn find_groups(&mut self, snapshot: &Snapshot, unmuted: &[&Finding], hangs: bool) {
        let report = &snapshot.report;
        let accused: HashSet<&GroupRef> = unmuted
            .iter()
            .filter(|f| f.severity == Severity::Error && f.caused_by.is_none())
            .filter_map(|f| f.group.as_ref())
            .collect();
        // Pending operations come before operations that have failed.
        let has_failed =
            |(_, instance): &&(usize, &InstanceReport)| instance.state == InstanceState::Failed;
        let instances: Vec<(usize, &InstanceReport)> =
            report.in_flight.iter().enumerate().collect();
        let (failed, pending): (Vec<_>, Vec<_>) = instances.iter().partition(has_failed);
        for &(at, instance) in pending.into_iter().chain(failed) {
            if !self.oldest.contains_key(&instance.group) {
                self.oldest.insert(instance.group.clone(), at);
            }
        }
        for group in &report.groups {
            let oldest = self.oldest(snapshot, &group.group);
            let state = if accused.contains(&group.group) {
                GroupState::Bad
            } else if oldest.is_some_and(|oldest| oldest.state == InstanceState::Failed) {
                GroupState::Failed
            } else if hangs && oldest.is_some_and(is_blocked) {
                GroupState::Waiting
            } else if group.in_flight > 0 {
                GroupState::Busy
            } else {
                GroupState::Idle
            };
            self.groups.insert(group.group.clone(), state);
        }
        self.names = GroupNames::of(report);
    }

    /// The names of the groups, as the report's sentences have them.
    pub fn names(&self) -> &GroupNames {
        &self.names
    }

    /// The state of a group; `Idle` if the report does not include it.
    pub fn group(&self, group: &GroupRef) -> GroupState {
        self.groups.get(group).copied().unwrap_or(GroupState::Idle)
    }

    /// The oldest pending operation of a group, which the report lists first. If none is pending, the first operation
    /// that has failed; `None` if there is neither.
    pub fn oldest<'a>(
        &self,
        snapshot: &'a Snapshot,
        group: &GroupRef,
    ) -> Option<&'a InstanceReport> {
        let at = *self.oldest.get(group)?;
        snapshot.report.in_flight.get(at)
    }

    /// The report on a rank; `None` if the report does not include it.
    pub fn report<'a>(&self, snapshot: &'a Snapshot, rank: Rank) -> Option<&'a RankReport> {
        let at = *self.reports.get(&rank)?;
        snapshot.report.ranks.get(at)
    }

    /// The state of a rank; `Silent` if the snapshot does not include it.
    pub fn rank(&self, snapshot: &Snapshot, rank: Rank) -> RankState {
        let at = snapshot.ranks.binary_search_by_key(&rank, |view| view.rank);
        at.ok()
            .and_then(|at| self.states.get(at).copied())
            .unwrap_or(RankState::Silent)
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

/// Whether an operation in flight has waited for other ranks beyond the threshold.
pub(super) fn is_blocked(instance: &InstanceReport) -> bool {
    instance.overdue && instance.state != InstanceState::Running
}

/// Age in ms, at the time of the snapshot, of the operation that a finding is about. If that age is unknown or the
/// operation is not pending, the largest age of a blocked operation; `None` if no operation is blocked.
pub fn since_ms(snapshot: &Snapshot, finding: &Finding) -> Option<f64> {
    let report = &snapshot.report;
    let its_instance = report.in_flight.iter().find(|instance| {
        finding.group.as_ref() == Some(&instance.group) && finding.seq == Some(instance.seq)
    });
    let blocked = || {
        report
            .in_flight
            .iter()
            .filter(|instance| is_blocked(instance))
    };
    its_instance
        .and_then(|instance| instance.age_ms)
        .or_else(|| blocked().filter_map(|i| i.age_ms).reduce(f64::max))
}
