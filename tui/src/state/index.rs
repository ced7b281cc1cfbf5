//! Index of a snapshot: the state of each rank and group, computed once per snapshot.

use crate::page::table::Mark;
use crate::page::theme::Tone;
use rcomm_analyzer::format::GroupNames;
use rcomm_analyzer::{
    Code, Finding, GroupRef, GroupState, InstanceReport, RankReport, RankState, Report, SeqKind,
    Severity, Snapshot, States,
};
use rcomm_recorder::model::Rank;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;

/// A state with a mark on the screen.
pub trait Marked {
    /// The character and the tone of the state; no character if there is nothing to point out.
    fn mark(self) -> Mark;
}

impl Marked for RankState {
    fn mark(self) -> Mark {
        match self {
            Self::Ok => Mark::new('#', Tone::Good),
            Self::Waits => Mark::new('.', Tone::Waiting),
            Self::Failed => Mark::new('x', Tone::Late),
            Self::Root => Mark::new('!', Tone::Bad),
            Self::Late => Mark::new('~', Tone::Late),
            Self::Silent => Mark::new('?', Tone::Silent),
            Self::Unread => Mark::new('-', Tone::Silent),
        }
    }
}

impl Marked for GroupState {
    fn mark(self) -> Mark {
        match self {
            Self::Bad => Mark::new('!', Tone::Bad),
            Self::Waiting => Mark::new('.', Tone::Waiting),
            Self::Failed => Mark::new('x', Tone::Late),
            Self::Busy | Self::Idle => Mark::NONE,
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
    /// Index in the report of the gravest finding that is neither muted, a note, nor the consequence of another. The
    /// headline is about it, unless it is about how the job ended.
    pub head: Option<usize>,
    /// Hosts in order of their first rank.
    pub hosts: Vec<Host>,
    /// The states as every live view computes them.
    shared: States,
    /// The first rank at fault or, if there is none, the first one that is late; `None` without either.
    pub suspect: Option<Rank>,
    /// Groups with a pending collective that is overdue.
    overdue: HashSet<GroupRef>,
    /// The names of the groups, as the sentences of the report have them.
    names: GroupNames,
    /// Index of the report on each rank among those of the snapshot.
    reports: HashMap<Rank, usize>,
}

impl FrameIndex {
    /// Computes the index, without findings whose code is muted.
    pub fn new(snapshot: &Snapshot, muted: &BTreeSet<Code>) -> Self {
        let report = &snapshot.report;
        let shared = States::of_snapshot(snapshot, muted);
        let states = snapshot.ranks.iter().map(|view| shared.rank(view.rank));
        let mut index = Self {
            states: states.collect(),
            suspect: shared.suspect(),
            overdue: overdue(report),
            shared,
            head: head_of(report, muted),
            names: GroupNames::of(report),
            ..Self::default()
        };
        index.find_hosts(snapshot);
        index.reports = (report.ranks.iter().enumerate())
            .map(|(index, row)| (row.rank, index))
            .collect();
        index
    }

    /// Lists the hosts, each with the indices of its ranks, in the order of their first ranks.
    fn find_hosts(&mut self, snapshot: &Snapshot) {
        let mut index_of_host: HashMap<Arc<str>, usize> = HashMap::new();
        for (rank_index, view) in snapshot.ranks.iter().enumerate() {
            let next = self.hosts.len();
            let index = *index_of_host.entry(view.host.clone()).or_insert(next);
            if index == next {
                self.hosts.push(Host {
                    name: view.host.clone(),
                    ranks: vec![],
                });
            }
            self.hosts[index].ranks.push(rank_index);
        }
    }

    /// The names of the groups, as the report's sentences have them.
    pub fn names(&self) -> &GroupNames {
        &self.names
    }

    /// Ranks that are root causes, ascending.
    pub fn roots(&self) -> &[Rank] {
        self.shared.roots()
    }

    /// The state of a group; `Idle` if the report does not include it.
    pub fn group(&self, group: &GroupRef) -> GroupState {
        self.shared.group(group)
    }

    /// The name of a group's state; see [`States::group_word`].
    pub fn group_word(&self, snapshot: &Snapshot, group: &GroupRef) -> &'static str {
        self.shared.group_word(&snapshot.report, group)
    }

    /// The words that `state:` of a filter is compared with for a group.
    pub fn group_filter_words(&self, snapshot: &Snapshot, group: &GroupRef) -> &'static str {
        self.shared.group_filter_words(&snapshot.report, group)
    }

    /// The oldest pending operation of a group; see [`States::oldest`].
    pub fn oldest<'a>(
        &self,
        snapshot: &'a Snapshot,
        group: &GroupRef,
    ) -> Option<&'a InstanceReport> {
        self.shared.oldest(&snapshot.report, group)
    }

    /// Whether a pending collective of a group is overdue: then the group's oldest one is.
    pub fn is_overdue(&self, group: &GroupRef) -> bool {
        self.overdue.contains(group)
    }

    /// The words that `state:` of a filter is compared with for a rank.
    pub fn filter_words(&self, snapshot: &Snapshot, rank: Rank) -> &'static str {
        let report = self.report(snapshot, rank);
        let is_pending = report.is_some_and(|report| report.pending > 0);
        self.shared.rank(rank).filter_words(is_pending)
    }

    /// The report on a rank; `None` if the report does not include it.
    pub fn report<'a>(&self, snapshot: &'a Snapshot, rank: Rank) -> Option<&'a RankReport> {
        let index = *self.reports.get(&rank)?;
        snapshot.report.ranks.get(index)
    }

    /// The state of a rank; `Unread` if the snapshot does not include it.
    pub fn rank(&self, rank: Rank) -> RankState {
        self.shared.rank(rank)
    }
}

/// Index in the report of the gravest finding that is neither muted, a note, nor the consequence of another; `None` if
/// there is none.
pub(super) fn head_of(report: &Report, muted: &BTreeSet<Code>) -> Option<usize> {
    let is_head = |finding: &Finding| {
        finding.caused_by.is_none()
            && finding.severity != Severity::Note
            && !muted.contains(&finding.code)
    };
    let findings = report.findings.iter().enumerate();
    let heads = findings.filter(|(_, finding)| is_head(finding));
    let (index, _) = heads.min_by_key(|(_, finding)| finding.severity)?;
    Some(index)
}

/// The groups with a pending collective that is overdue.
fn overdue(report: &Report) -> HashSet<GroupRef> {
    let overdue = report
        .pending()
        .filter(|instance| instance.overdue && instance.seq_kind == SeqKind::CollectiveSeqId);
    overdue.map(|instance| instance.group.clone()).collect()
}

/// Age in ms, at the time of the snapshot, of the operation that a finding is about. If that age is unknown or the
/// operation is not pending, the largest age of a blocked operation; `None` if no blocked operation has a known age.
pub fn since_ms(snapshot: &Snapshot, finding: &Finding) -> Option<f64> {
    let report = &snapshot.report;
    let its_instance = report.in_flight.iter().find(|instance| {
        finding.group.as_ref() == Some(&instance.group) && finding.seq == Some(instance.seq)
    });
    let blocked = || {
        report
            .in_flight
            .iter()
            .filter(|instance| instance.is_blocked())
    };
    its_instance
        .and_then(|instance| instance.age_ms)
        .or_else(|| blocked().filter_map(|i| i.age_ms).reduce(f64::max))
}
