//! The input of the checks, and the drafts of findings that they return.

mod describe;
mod draft;
mod evidence;
mod failed;
mod times;

pub(crate) use draft::{FindingDraft, OpRef};

use crate::align::clocks::Offset;
use crate::align::p2p::{Half, Messages};
use crate::align::pending::PendingKind;
use crate::align::{Aligned, Group, GroupIx, RecordIx};
use crate::judge::disagreement::Disagreement;
use crate::judge::lateness::Lateness;
use crate::judge::life::Life;
use crate::judge::outdated::StillInside;
use crate::judge::policy::Policy;
use crate::judge::records::unkept::Unkept;
use crate::judge::waits::wait_graph::{Missing, Node, Place, WaitGraph};
use crate::judge::waits::wait_root::WaitRoot;
use crate::report::GroupRef;
use crate::report::format::GroupNames;
use rcomm_recorder::model::Rank;

/// The input of all checks: the aligned records and everything derived from them.
pub(crate) struct Context<'a> {
    pub(crate) policy: &'a Policy,
    /// Whether the policy is that of [`of_young_files`](crate::judge::policy::of_young_files).
    pub(crate) young_files: bool,
    /// Whether the policy is that of [`of_young_dumps`](crate::judge::young::of_young_dumps).
    pub(crate) young_dumps: bool,
    /// Ranks with a record that was left aside (N300), ascending; some may have another record.
    pub(crate) left_aside: Vec<Rank>,
    /// Collectives that hang according to the groups' status and that no ring holds any longer.
    pub(crate) unkept: Vec<Unkept>,
    /// Groups in which, by their status alone, operations of these ranks have not completed.
    pub(crate) open_by_status: Vec<(GroupIx, Vec<Rank>)>,
    /// When the newest of the records was taken ([`newest_taken_ns`](crate::judge::policy::newest_taken_ns)).
    pub(crate) newest_taken_ns: Option<i64>,
    /// The collectives that are unfinished in some records and that others completed long before.
    pub(crate) still_inside: Vec<StillInside>,
    /// Whether an input could not be read, or only in part.
    pub(crate) lacks_input: bool,
    pub(crate) life: &'a Life,
    pub(crate) aligned: &'a Aligned<'a>,
    /// The names of the groups in sentences.
    pub(crate) names: GroupNames,
    pub(crate) messages: &'a Messages,
    pub(crate) graph: &'a WaitGraph,
    /// For each node of the graph: the nodes that wait for it.
    pub(crate) reversed: Vec<Vec<Node>>,
    pub(crate) wait_roots: Vec<WaitRoot>,
    pub(crate) disagreements: Vec<Disagreement>,
    pub(crate) lateness: &'a Lateness,
    /// For each record: the offset of its clock, if common collectives show it.
    pub(crate) clocks: Vec<Option<Offset>>,
}

/// The names of all groups of a job.
pub(crate) fn name_groups(aligned: &Aligned<'_>) -> GroupNames {
    let groups: Vec<GroupRef> = aligned.groups.iter().map(group_ref).collect();
    GroupNames::new(&groups)
}

fn group_ref(group: &Group) -> GroupRef {
    GroupRef {
        name: group.name.clone(),
        desc: group.desc.clone(),
        ranks: group.ranks.clone(),
    }
}

impl Context<'_> {
    /// Whether the end of a record's process is a cause ([`Life::went_first`]).
    pub(crate) fn went_first(&self, record: RecordIx) -> bool {
        self.life.went_first(self.aligned.records[record].rank)
    }

    /// A group as findings refer to it.
    pub(crate) fn group_ref(&self, group: GroupIx) -> GroupRef {
        group_ref(&self.aligned.groups[group])
    }

    /// The name of a group in sentences: [`GroupNames::in_text`].
    pub(crate) fn group_name(&self, group: GroupIx) -> String {
        self.names.in_text(&self.group_ref(group))
    }

    /// The record of a rank that covers the group of a place; `None` if it left no such record.
    pub(crate) fn record_at(&self, place: usize, node: Node) -> Option<RecordIx> {
        self.aligned
            .record_in(self.group_at(place), self.rank(node))
    }

    /// The group of a place.
    pub(crate) fn group_at(&self, place: usize) -> GroupIx {
        let (Place::Collective { group, .. } | Place::Batch { group, .. }) =
            self.graph.places[place];
        group
    }

    /// The rank of a node.
    pub(crate) fn rank(&self, node: Node) -> Rank {
        self.aligned.expected[node]
    }

    /// The ranks of these nodes, in the same order.
    pub(crate) fn ranks(&self, nodes: &[Node]) -> Vec<Rank> {
        nodes.iter().map(|&node| self.rank(node)).collect()
    }

    /// A part of a sentence, like `, and 63 of 64 ranks wait in all`; empty if no more ranks wait for `targets` than
    /// the `counted` ones that the sentence has already. If further ranks wait for another reason, the text ends with
    /// `because of it` or `because of them` instead of `in all`.
    pub(crate) fn waiting_in_all(&self, targets: &[Node], counted: usize) -> String {
        let waiting = self.graph.waiting_for(targets, &self.reversed);
        let waiting = waiting
            .iter()
            .filter(|node| !targets.contains(node))
            .count();
        if waiting > counted {
            let waits = |node: &Node| self.graph.waits(*node);
            let waiters = (0..self.graph.ranks).filter(waits);
            let why = match waiters.filter(|node| !targets.contains(node)).count() > waiting {
                false => "in all",
                true if targets.len() == 1 => "because of it",
                true => "because of them",
            };
            let waiting_nodes: Vec<Node> = self.graph.waiting_for(targets, &self.reversed);
            let waiting_nodes: Vec<Node> = waiting_nodes
                .into_iter()
                .filter(|node| !targets.contains(node))
                .collect();
            let verb = self.wait_or_waited(&waiting_nodes);
            format!(", and {waiting} of {} ranks {verb} {why}", self.graph.ranks)
        } else {
            String::new()
        }
    }

    /// Whether none of these ranks has a record that is judged, and each has one that was left aside.
    pub(crate) fn only_aside(&self, ranks: &[Rank]) -> bool {
        let is_aside = |rank: &Rank| {
            self.aligned.record_of(*rank).is_none() && self.left_aside.binary_search(rank).is_ok()
        };
        !ranks.is_empty() && ranks.iter().all(is_aside)
    }

    /// The position of a batch's first message.
    pub(crate) fn first_of_batch(&self, record: RecordIx, pending: usize) -> u32 {
        self.graph.pending[record][pending].position
    }

    /// The messages of a batch; empty for a collective.
    pub(crate) fn halves(&self, record: RecordIx, pending: usize) -> &[Half] {
        match &self.graph.pending[record][pending].kind {
            PendingKind::Batch { halves } => halves,
            PendingKind::Collective { .. } => &[],
        }
    }

    /// The places where others wait for a rank, and why the rank is missing there.
    pub(crate) fn missed_at(&self, node: Node) -> Vec<(usize, Missing)> {
        let waiting = &self.reversed[node];
        let mut places = Vec::new();
        for &place in waiting {
            let Some(place) = place.checked_sub(self.graph.ranks) else {
                continue;
            };
            let why = self.graph.missing[place]
                .iter()
                .find(|&&(rank, _)| rank == node);
            if let Some(&(_, why)) = why {
                places.push((place, why));
            }
        }
        places.sort_unstable();
        places.dedup();
        places
    }

    /// The disagreement of the members at a place, if there is one.
    pub(crate) fn disagreement_at(&self, place: usize) -> Option<&Disagreement> {
        let Place::Collective { group, seq } = self.graph.places[place] else {
            return None;
        };
        self.disagreements
            .iter()
            .find(|disagreement| disagreement.group == group && disagreement.seq == seq)
    }
}
