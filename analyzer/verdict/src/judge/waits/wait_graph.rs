//! The wait-for graph: which rank waits for which, across groups.
//!
//! The graph has two kinds of nodes: ranks, and the operations that they are in ([`Place`]: a collective of a group, or
//! a batch of messages of one rank). A rank points to every place where it has arrived and that has not completed; a
//! place points to every rank that has not arrived there. A rank in an access to a window points to its peer. From a
//! waiting rank, the edges lead to the cause: a rank that waits for nothing, a place where all have arrived and none
//! finishes, or a cycle. These are the *sinks* of the graph of strongly connected components.
//!
//! *Arrived* is not *issued*: a program that runs ahead of its device issues operations that the device has not
//! reached. If the records show starts, an operation that has started has arrived. Otherwise, on devices, a rank has
//! arrived at its oldest unfinished operation. A host backend runs groups independently, so there a rank has arrived at
//! the oldest unfinished collective of each group, and at all its messages.

use crate::align::p2p::{self, Counterpart, Half, Messages};
use crate::align::pending::{Arrival, Pending, PendingKind, active_ns, front_is_lost, pending_of};
use crate::align::{Aligned, GroupIx, Presence, RecordIx, UnknownReason};
use crate::judge::life::Life;
use crate::judge::life::raised::has_left;
use crate::judge::overcome::is_history;
use crate::judge::policy::{Policy, now_ns, own_written_ns};
use crate::judge::waits::components::components;
use crate::judge::waits::delivered::is_a_wait;
use crate::judge::waits::from_any::{any_is_served, possible_senders, takes_from_any};
use crate::judge::waits::stopped::stopped_nodes;
use rcomm_recorder::model::{EntryState, OpType, Rank};
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

/// An operation that ranks wait in.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    Collective {
        group: GroupIx,
        seq: u32,
    },
    /// Messages that one rank posted together: its record and the index in [`WaitGraph::pending`].
    Batch {
        group: GroupIx,
        record: RecordIx,
        pending: usize,
    },
}

/// Why a rank has not arrived where others wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Missing {
    /// The rank never issued the operation.
    Absent,
    /// The rank issued the operation, but its device has not, or may not have, reached the operation.
    Held(Arrival),
    /// The rank's record does not show whether the rank arrived.
    Unknown(UnknownReason),
    /// The rank may or may not be the missing one: others wait in a receive from any source, or the record of a message
    /// names no peer.
    Candidate,
}

/// Index of a node: ranks first, in the order of [`Aligned::expected`], then places.
pub(crate) type Node = usize;

/// The wait-for graph.
#[derive(Debug)]
pub(crate) struct WaitGraph {
    /// For each record: its unfinished operations, in order of issue.
    pub(crate) pending: Vec<Vec<Pending>>,
    /// For each record: whether each of its unfinished operations is overdue. Outside of a snapshot, all are in which a
    /// rank may wait ([`is_a_wait`]).
    pub(super) overdue: Vec<Vec<bool>>,
    /// For each record: whether the process of its rank went first.
    went_first: Vec<bool>,
    /// For each record: whether the program of its rank issues nothing more ([`has_left`]).
    left: Vec<bool>,
    pub(crate) places: Vec<Place>,
    /// For each place: the ranks that have arrived.
    pub(crate) arrived: Vec<Vec<Node>>,
    /// For each place: the ranks that have not arrived, and why.
    pub(crate) missing: Vec<Vec<(Node, Missing)>>,
    /// For each rank: the places where it waits.
    pub(crate) waits_in: Vec<Vec<usize>>,
    /// For each rank: the ranks without which its accesses to windows do not complete.
    pub(super) one_sided: Vec<Vec<Node>>,
    /// The waits in collectives that [`WaitGraph::drop_waits_of_stopped`] has removed: each the node of the rank, and
    /// the place.
    pub(super) completed_by_others: Vec<(Node, usize)>,
    /// The number of ranks.
    pub(crate) ranks: usize,
    by_collective: HashMap<(GroupIx, u32), usize>,
    node_of_rank: HashMap<Rank, Node>,
}

impl WaitGraph {
    /// Builds the graph of all unfinished operations.
    ///
    /// In a snapshot the age of an operation decides when to judge, never which rank to name. The graph has no places
    /// as long as nothing is due; from then on it has places for old and young operations alike. [`WaitGraph::due`]
    /// marks the nodes to which due waits lead; only these are worth a finding.
    pub(crate) fn new(
        aligned: &Aligned<'_>,
        messages: &Messages,
        policy: &Policy,
        young_files: bool,
        life: &Life,
    ) -> Self {
        let node_of_rank = aligned
            .expected
            .iter()
            .enumerate()
            .map(|(node, &rank)| (rank, node))
            .collect();
        let ranks = aligned.expected.len();
        let mut graph = Self {
            pending: Vec::new(),
            overdue: Vec::new(),
            went_first: (0..aligned.records.len())
                .map(|record| life.went_first(aligned.records[record].rank))
                .collect(),
            left: (0..aligned.records.len())
                .map(|record| has_left(aligned, policy, life, record))
                .collect(),
            places: Vec::new(),
            arrived: Vec::new(),
            missing: Vec::new(),
            waits_in: vec![Vec::new(); ranks],
            one_sided: vec![Vec::new(); ranks],
            completed_by_others: Vec::new(),
            ranks,
            by_collective: HashMap::new(),
            node_of_rank,
        };
        let taken_ns = policy.snapshot.then(|| now_ns(aligned, policy)).flatten();
        let of_records = aligned.shared.map(aligned.records.len(), |record| {
            let rank = aligned.records[record].rank;
            let mut pending = pending_of(aligned, messages, record);
            pending.retain(|operation| {
                // A program that ended in order did not wait for a message that it had left open.
                let is_message = matches!(operation.kind, PendingKind::Batch { .. });
                let op = aligned.op(record, operation.position);
                let failed = op.state == EntryState::Failed;
                // Neither did a program wait that has caught the error of the operation.
                (failed || !is_message || !life.ended_in_order(rank))
                    && !is_history(aligned, record, op)
            });
            let mut overdue: Vec<bool> = pending
                .iter()
                .map(|one| is_a_wait(aligned, record, one))
                .collect();
            if let Some(now) = taken_ns {
                // If no collective connects a clock to the others, ages are measured by that clock alone.
                let latest = aligned.records[record].latest_ns();
                let foreign = policy.now_ns.is_none() && !aligned.clock_known[record];
                // An operation that was pending when the record was taken may have ended since, so its age counts only
                // up to when the record was taken. The record of a dead process no longer changes, so its operations
                // age while others live.
                let dead = life.lives_on() && life.gone(aligned.records[record].rank).is_some();
                // A launch record dates an end more exactly than the last sign of life, which on a busy host may be
                // seconds older.
                let ended = life.gone(aligned.records[record].rank);
                let ended = ended.filter(|gone| gone.exit.is_some());
                let now = match aligned.records[record].identity.dump_time_ns {
                    _ if foreign => latest,
                    _ if dead => now,
                    _ if let Some(gone) = ended => now.min(gone.at_ns()),
                    // Hosts' clocks may differ, but one clock gave the times of a file and of its record.
                    0 if young_files => {
                        let own = own_written_ns(&aligned.records[record]);
                        own.map_or(now, |own| {
                            now.min(own.saturating_sub(aligned.offsets_ns[record]))
                        })
                    }
                    0 => now,
                    taken => now.min(taken.saturating_sub(aligned.offsets_ns[record])),
                };
                let active_ns = active_ns(aligned, record, &pending, life.end.is_some());
                let is_overdue = |(operation, active_ns): (&Pending, i64)| {
                    let op = aligned.op(record, operation.position);
                    let timeout_ms = aligned.shared.calls.get(op.call).timeout_ms;
                    let age = now.saturating_sub(active_ns);
                    let age = u64::try_from(age).map(Duration::from_nanos);
                    let is_old = age.is_ok_and(|age| age >= policy.overdue_after(timeout_ms));
                    is_old && is_a_wait(aligned, record, operation)
                };
                overdue = pending.iter().zip(active_ns).map(is_overdue).collect();
            }
            (pending, overdue)
        });
        (graph.pending, graph.overdue) = of_records.into_iter().unzip();
        if graph.is_anything_due() {
            for record in 0..aligned.records.len() {
                graph.enter_places(aligned, record);
            }
            if graph.places.is_empty() {
                graph.enter_unstarted(aligned);
            }
        }
        let young = graph.young_waits_of_dead(aligned, policy, life);
        for place in 0..graph.places.len() {
            graph.missing[place] = match graph.places[place] {
                Place::Collective { group, seq } => graph.missing_from(aligned, group, seq),
                Place::Batch {
                    record, pending, ..
                } => {
                    let batch = &graph.pending[record][pending];
                    graph.missing_from_batch(aligned, messages, record, batch)
                }
            };
            let (Place::Collective { group, .. } | Place::Batch { group, .. }) =
                graph.places[place];
            for (node, why) in &mut graph.missing[place] {
                let Some(record) = aligned.record_in(group, aligned.expected[*node]) else {
                    continue;
                };
                let is_outdated = aligned.lacks_newest(record) == Some(UnknownReason::Outdated);
                if front_is_lost(&aligned.records[record]) {
                    *why = Missing::Unknown(UnknownReason::HistoryLost);
                } else if is_outdated && matches!(why, Missing::Held(_)) {
                    *why = Missing::Unknown(UnknownReason::Outdated);
                }
            }
            prefer_known(&mut graph.missing[place]);
        }
        let stopped = stopped_nodes(aligned);
        graph.drop_waits(&young, &stopped);
        graph.drop_waits_of_stopped(&stopped);
        graph.enter_one_sided(aligned, policy, life);
        graph
    }

    /// Whether an unfinished operation of a record is overdue.
    pub(crate) fn is_overdue(&self, record: RecordIx, pending: usize) -> bool {
        self.overdue[record][pending]
    }

    /// Whether there is something to judge: an overdue operation, or a rank that issues nothing more. A wait for such a
    /// rank does not become more certain with age.
    fn is_anything_due(&self) -> bool {
        let mut overdue = self.overdue.iter().flatten();
        let mut issue_no_more = self.went_first.iter().chain(&self.left);
        overdue.any(|&overdue| overdue) || issue_no_more.any(|&ended| ended)
    }

    /// For each node: whether a wait that leads to it is due, because it is overdue or because a rank that it needs
    /// issues nothing more. Other young operations may complete at any moment.
    pub(crate) fn due(&self, aligned: &Aligned<'_>) -> Vec<bool> {
        let is_of = |of_records: &[bool], node: Node| {
            let mut records = aligned.records_of(aligned.expected[node]);
            records.any(|record| of_records[record])
        };
        let mut due = vec![false; self.ranks + self.places.len()];
        let spread = |from: Vec<Node>, due: &mut Vec<bool>| {
            let mut stack = from;
            while let Some(node) = stack.pop() {
                if !std::mem::replace(&mut due[node], true) {
                    stack.extend(self.successors(node));
                }
            }
        };
        let overdue = (0..self.places.len()).filter(|&place| self.is_place_overdue(aligned, place));
        spread(overdue.map(|place| place + self.ranks).collect(), &mut due);
        // At a young place only ranks that issue nothing more are missed for certain: the others may still come.
        for place in 0..self.places.len() {
            let missing = &self.missing[place];
            // The device of a program that has left may still carry out what was issued, and the cause of an exception
            // may be another rank that is missing there.
            let all_left = missing
                .iter()
                .all(|&(node, why)| why == Missing::Absent && is_of(&self.left, node));
            let missing = missing.iter().map(|&(node, _)| node);
            let ended: Vec<Node> = missing
                .filter(|&node| all_left || is_of(&self.went_first, node))
                .collect();
            if !ended.is_empty() {
                spread(ended, &mut due);
                due[place + self.ranks] = true;
            }
        }
        due
    }

    /// Whether the operation of a rank at a place is overdue.
    fn is_place_overdue(&self, aligned: &Aligned<'_>, place: usize) -> bool {
        match self.places[place] {
            Place::Batch {
                record, pending, ..
            } => self.overdue[record][pending],
            Place::Collective { group, seq } => self.arrived[place].iter().any(|&node| {
                let Some(record) = aligned.record_in(group, aligned.expected[node]) else {
                    return false;
                };
                let mut unfinished = self.pending[record].iter().zip(&self.overdue[record]);
                unfinished.any(|(operation, &overdue)| {
                    overdue
                        && operation.group == group
                        && matches!(operation.kind, PendingKind::Collective { seq: pending_seq } if pending_seq == seq)
                })
            }),
        }
    }

    /// The node of a rank; `None` if the rank is not expected.
    pub(crate) fn node(&self, rank: Rank) -> Option<Node> {
        self.node_of_rank.get(&rank).copied()
    }

    /// The place of a collective, if any rank waits there.
    pub(crate) fn collective(&self, group: GroupIx, seq: u32) -> Option<usize> {
        self.by_collective.get(&(group, seq)).copied()
    }

    /// How far a rank is in a collective; `None` unless the collective is unfinished in this record.
    pub(crate) fn arrival(&self, record: RecordIx, group: GroupIx, seq: u32) -> Option<Arrival> {
        let found = self.pending[record].iter().find(|operation| {
            operation.group == group
                && matches!(operation.kind, PendingKind::Collective { seq: pending_seq } if pending_seq == seq)
        });
        found.map(|operation| operation.arrival)
    }

    /// The nodes that a node points to.
    pub(crate) fn successors(&self, node: Node) -> impl Iterator<Item = Node> + '_ {
        let (places, ranks, missing): (&[usize], &[Node], &[(Node, Missing)]) = if node < self.ranks
        {
            (&self.waits_in[node], &self.one_sided[node], &[])
        } else {
            (&[], &[], &self.missing[node - self.ranks])
        };
        places
            .iter()
            .map(|&place| place + self.ranks)
            .chain(ranks.iter().copied())
            .chain(missing.iter().map(|&(rank, _)| rank))
    }

    /// Removes from the missing ranks of these places those whose devices may have reached the operation
    /// ([`Arrival::Head`]). Used if such ranks close a cycle.
    pub(crate) fn release_heads(&mut self, places: &[usize]) {
        for &place in places {
            self.missing[place].retain(|&(_, why)| why != Missing::Held(Arrival::Head));
        }
    }

    /// The strongly connected components, each before those that point to it.
    pub(crate) fn components(&self) -> Vec<Vec<Node>> {
        components(self.ranks + self.places.len(), |node| {
            self.successors(node).collect()
        })
    }

    /// The ranks that wait, directly or through others, for one of `targets`, ascending.
    pub(crate) fn waiting_for(&self, targets: &[Node], reversed: &[Vec<Node>]) -> Vec<Node> {
        let mut seen = vec![false; reversed.len()];
        let mut stack: Vec<Node> = targets.to_vec();
        for &target in targets {
            seen[target] = true;
        }
        let mut ranks = Vec::new();
        while let Some(node) = stack.pop() {
            for &before in &reversed[node] {
                if !seen[before] {
                    seen[before] = true;
                    stack.push(before);
                    if before < self.ranks {
                        ranks.push(before);
                    }
                }
            }
        }
        ranks.sort_unstable();
        ranks
    }

    /// For each node: the nodes that point to it.
    pub(crate) fn reversed(&self) -> Vec<Vec<Node>> {
        let nodes = self.ranks + self.places.len();
        let mut reversed = vec![Vec::new(); nodes];
        for node in 0..nodes {
            for next in self.successors(node) {
                reversed[next].push(node);
            }
        }
        reversed
    }

    /// Enters each rank at its oldest unfinished operation, unless its ring may have dropped that one. Used if starts
    /// are recorded and no unfinished operation has started on any rank.
    fn enter_unstarted(&mut self, aligned: &Aligned<'_>) {
        for record in 0..aligned.records.len() {
            if let Some(oldest) = self.pending[record].first_mut()
                && !oldest.held_open
                && !front_is_lost(&aligned.records[record])
            {
                oldest.arrival = Arrival::Arrived;
                self.enter_places(aligned, record);
            }
        }
    }

    /// Enters the rank of a record at the places of all unfinished operations at which it has arrived.
    fn enter_places(&mut self, aligned: &Aligned<'_>, record: RecordIx) {
        let Some(node) = self.node(aligned.records[record].rank) else {
            return;
        };
        for index in 0..self.pending[record].len() {
            let operation = &self.pending[record][index];
            if operation.arrival != Arrival::Arrived || operation.held_open {
                continue;
            }
            let place = match operation.kind {
                PendingKind::Collective { seq } => {
                    let group = operation.group;
                    match self.by_collective.get(&(group, seq)) {
                        Some(&place) => place,
                        None => {
                            let place = self.add(Place::Collective { group, seq });
                            self.by_collective.insert((group, seq), place);
                            place
                        }
                    }
                }
                PendingKind::Batch { .. } => {
                    let group = operation.group;
                    self.add(Place::Batch {
                        group,
                        record,
                        pending: index,
                    })
                }
            };
            self.arrived[place].push(node);
            self.waits_in[node].push(place);
        }
    }

    /// Adds a place where no rank has arrived, and returns its index.
    fn add(&mut self, place: Place) -> usize {
        self.places.push(place);
        self.arrived.push(Vec::new());
        self.missing.push(Vec::new());
        self.places.len() - 1
    }

    /// The members that have not arrived in a collective, and why. A member that issued it counts as arrived if its
    /// ring has dropped the collective.
    fn missing_from(
        &self,
        aligned: &Aligned<'_>,
        group: GroupIx,
        seq: u32,
    ) -> Vec<(Node, Missing)> {
        let mut missing = Vec::new();
        for (member, &rank) in aligned.groups[group].ranks.iter().enumerate() {
            let why = match aligned.presence(group, member, seq) {
                Presence::Lost => continue,
                // It has completed elsewhere, so it has started here, although the record does not show it.
                Presence::Issued(_) if aligned.is_over(group, seq) => continue,
                Presence::Issued(_) => {
                    let record = aligned.record_in(group, rank);
                    match record.and_then(|record| self.arrival(record, group, seq)) {
                        None | Some(Arrival::Arrived) => continue,
                        Some(arrival) => Missing::Held(arrival),
                    }
                }
                Presence::Absent => Missing::Absent,
                Presence::Unknown(why) => Missing::Unknown(why),
            };
            if let Some(node) = self.node(rank) {
                missing.push((node, why));
            }
        }
        missing
    }

    /// The ranks that must arrive before a rank's batch of messages can complete.
    pub(crate) fn missing_from_batch(
        &self,
        aligned: &Aligned<'_>,
        messages: &Messages,
        record: RecordIx,
        batch: &Pending,
    ) -> Vec<(Node, Missing)> {
        let PendingKind::Batch { halves } = &batch.kind else {
            return Vec::new();
        };
        let mut missing: BTreeMap<Node, Missing> = BTreeMap::new();
        for &half in halves {
            for (rank, why) in self.other_ends(aligned, messages, batch.group, record, half) {
                if let Some(node) = self.node(rank) {
                    missing
                        .entry(node)
                        .and_modify(|known| *known = why.min(*known))
                        .or_insert(why);
                }
            }
        }
        missing.into_iter().collect()
    }

    /// The ranks that must arrive before a half can complete, and why they have not. Empty if the record of the half
    /// does not list its rank as a member, or if the ring of the peer has dropped the other half.
    fn other_ends(
        &self,
        aligned: &Aligned<'_>,
        messages: &Messages,
        group: GroupIx,
        record: RecordIx,
        half: Half,
    ) -> Vec<(Rank, Missing)> {
        let ranks = &aligned.groups[group].ranks;
        let op = aligned.op(record, half.position);
        let Some(me) = ranks
            .iter()
            .position(|&rank| rank == aligned.records[record].rank)
        else {
            return Vec::new();
        };
        let Some(peer) = p2p::peer_of(op, me as u32, ranks.len() as u32) else {
            if op.kind == OpType::Recv && any_is_served(aligned, messages, group, me as u32, half) {
                return Vec::new();
            }
            return possible_senders(aligned, messages, group, me as u32);
        };
        let rank = ranks[peer as usize];
        let ends = if op.kind == OpType::Send {
            (me as u32, peer)
        } else {
            (peer, me as u32)
        };
        let pair = messages.pairs.get(&(group, ends));
        let certain = pair.is_none_or(|pair| pair.certain);
        let other = messages.other_half((group, ends), op.kind, half.position);
        let Some(peer_record) = aligned.record_in(group, rank) else {
            return vec![(rank, Missing::Unknown(UnknownReason::NoRecord))];
        };
        match other {
            Counterpart::Lost => Vec::new(),
            Counterpart::Posted(other) => {
                let held = self.pending[peer_record].iter().find(
                    |operation| matches!(&operation.kind, PendingKind::Batch { halves } if halves.contains(&other)),
                );
                match held.map(|operation| operation.arrival) {
                    None | Some(Arrival::Arrived) => Vec::new(),
                    Some(arrival) => vec![(rank, Missing::Held(arrival))],
                }
            }
            Counterpart::Missing if let Some(why) = aligned.lacks_newest(peer_record) => {
                vec![(rank, Missing::Unknown(why))]
            }
            Counterpart::Missing if !certain => {
                vec![(rank, Missing::Unknown(UnknownReason::HistoryLost))]
            }
            Counterpart::Missing
                if op.kind == OpType::Send && takes_from_any(messages, group, peer) =>
            {
                vec![(rank, Missing::Candidate)]
            }
            Counterpart::Missing => vec![(rank, Missing::Absent)],
        }
    }
}

/// Removes the members of which it is not known whether they arrived, if another is known not to have arrived.
fn prefer_known(missing: &mut Vec<(Node, Missing)>) {
    let known = |why: Missing| matches!(why, Missing::Absent | Missing::Held(_));
    if missing.iter().any(|&(_, why)| known(why)) {
        missing.retain(|&(_, why)| known(why));
    }
}
