//! Who waits for whom, across groups.
//!
//! The graph has two kinds of nodes: ranks, and what they are inside of ([`Place`]: a collective of a
//! group, or a batch of messages of one rank). A rank points at every place where it has arrived and
//! that has not completed; a place points at every rank that has not arrived there. Whoever waits can
//! walk to the cause: ranks that wait for nothing, places where everybody is and nothing moves, and
//! cycles. Those are the *sinks* of the graph of strongly connected components, found here by Tarjan's
//! algorithm without recursion.
//!
//! *Arrived* is not *issued*: a program that runs ahead of its device issues operations that the device
//! has not come to. Where the records show starts, started is arrived. Else, on devices, the oldest
//! unfinished operation of a rank is where it is. A host backend runs the groups independently, so
//! there the oldest unfinished operation of each group is.

use crate::align::{Aligned, GroupIx, Presence, RecordIx, Why};
use crate::p2p::{self, Half, Messages, Other};
use crate::policy::Policy;
use crate::record::{NONE, Record};
use rcomm_recorder::model::{EntryState, OpType, Rank};
use rcomm_recorder::publish::Recorder;
use std::collections::{BTreeMap, HashMap};

/// How sure it is that a rank's device has come to an operation that the rank issued.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Arrival {
    /// Behind an older unfinished operation of its group.
    Queued,
    /// First of its group, behind an unfinished operation of another group.
    Head,
    /// There.
    Arrived,
}

/// Something unfinished that a rank has issued.
#[derive(Clone, Debug)]
pub(crate) struct Pending {
    pub(crate) group: GroupIx,
    /// Position in the record's operations of its first entry.
    pub(crate) position: u32,
    pub(crate) what: What,
    pub(crate) arrival: Arrival,
}

/// A collective, or a batch of messages.
#[derive(Clone, Debug)]
pub(crate) enum What {
    Collective { seq: u32 },
    Batch { halves: Vec<Half> },
}

/// Where ranks wait.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    Collective {
        group: GroupIx,
        seq: u32,
    },
    /// Messages that one rank posted together: the record and its pending number.
    Batch {
        group: GroupIx,
        record: RecordIx,
        pending: usize,
    },
}

/// Why a rank is not where others wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Missing {
    /// Never issued it.
    Absent,
    /// Issued it, and is held by something older.
    Held(Arrival),
    /// Its record does not tell.
    Unknown(Why),
    /// May or may not be the one: a receive from anybody, or a record that names no peer.
    Candidate,
}

/// Number of a node: ranks first, in the order of [`Aligned::expected`], then places.
pub(crate) type Node = usize;

/// The graph.
#[derive(Debug)]
pub(crate) struct WaitGraph {
    /// Of each record: what is unfinished, in order of issue.
    pub(crate) pending: Vec<Vec<Pending>>,
    pub(crate) places: Vec<Place>,
    /// Of each place: who is there, as positions in `expected`.
    pub(crate) arrived: Vec<Vec<Node>>,
    /// Of each place: who is not, and why.
    pub(crate) missing: Vec<Vec<(Node, Missing)>>,
    /// Of each rank: the places where it waits.
    pub(crate) waits_in: Vec<Vec<usize>>,
    pub(crate) ranks: usize,
    by_collective: HashMap<(GroupIx, u32), usize>,
    node_of_rank: HashMap<Rank, Node>,
}

impl WaitGraph {
    /// Builds the graph of everything unfinished (in a snapshot: unfinished for too long).
    pub(crate) fn new(aligned: &Aligned<'_>, messages: &Messages, policy: &Policy) -> Self {
        let node_of_rank = aligned
            .expected
            .iter()
            .enumerate()
            .map(|(node, &rank)| (rank, node))
            .collect();
        let ranks = aligned.expected.len();
        let mut graph = Self {
            pending: Vec::with_capacity(aligned.records.len()),
            places: Vec::new(),
            arrived: Vec::new(),
            missing: Vec::new(),
            waits_in: vec![Vec::new(); ranks],
            ranks,
            by_collective: HashMap::new(),
            node_of_rank,
        };
        let now = now_of_snapshot(aligned, policy);
        for record in 0..aligned.records.len() {
            let mut pending = pending_of(aligned, messages, record);
            if let Some((now, overdue)) = now {
                pending.retain(|one| {
                    let op = aligned.op(record, one.position);
                    now.saturating_sub(aligned.created_ns(record, op)) >= overdue
                });
            }
            graph.pending.push(pending);
        }
        for record in 0..aligned.records.len() {
            graph.enter_places(aligned, record);
        }
        for place in 0..graph.places.len() {
            graph.missing[place] = match graph.places[place] {
                Place::Collective { group, seq } => graph.missing_from(aligned, group, seq),
                Place::Batch {
                    group,
                    record,
                    pending,
                } => graph.missing_from_batch(aligned, messages, group, record, pending),
            };
            for (node, why) in &mut graph.missing[place] {
                let record = aligned.record_of(aligned.expected[*node]);
                if record.is_some_and(|record| front_is_lost(&aligned.records[record])) {
                    *why = Missing::Unknown(Why::HistoryLost);
                }
            }
            prefer_what_is_known(&mut graph.missing[place]);
        }
        graph
    }

    /// The node of a rank.
    pub(crate) fn node(&self, rank: Rank) -> Option<Node> {
        self.node_of_rank.get(&rank).copied()
    }

    /// The place of a collective, if anybody waits there.
    pub(crate) fn collective(&self, group: GroupIx, seq: u32) -> Option<usize> {
        self.by_collective.get(&(group, seq)).copied()
    }

    /// How a record's unfinished collective stands, if it is unfinished.
    pub(crate) fn arrival(&self, record: RecordIx, group: GroupIx, seq: u32) -> Option<Arrival> {
        let found = self.pending[record].iter().find(|one| {
            one.group == group && matches!(one.what, What::Collective { seq: s } if s == seq)
        });
        found.map(|one| one.arrival)
    }

    /// The nodes that a node points at.
    pub(crate) fn successors(&self, node: Node) -> impl Iterator<Item = Node> + '_ {
        let (places, missing): (&[usize], &[(Node, Missing)]) = if node < self.ranks {
            (&self.waits_in[node], &[])
        } else {
            (&[], &self.missing[node - self.ranks])
        };
        places
            .iter()
            .map(|&place| place + self.ranks)
            .chain(missing.iter().map(|&(rank, _)| rank))
    }

    /// Stops taking the operations at the head of their group's queue for held: used where that alone
    /// closes a cycle.
    pub(crate) fn release_heads(&mut self, places: &[usize]) {
        for &place in places {
            self.missing[place].retain(|&(_, why)| why != Missing::Held(Arrival::Head));
        }
    }

    /// The strongly connected components, each before those that point at it.
    pub(crate) fn components(&self) -> Vec<Vec<Node>> {
        components(self.ranks + self.places.len(), |node| {
            self.successors(node).collect()
        })
    }

    /// Everybody who waits, directly or through others, for one of `targets`: ranks, ascending.
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

    /// Who points at each node.
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

    fn enter_places(&mut self, aligned: &Aligned<'_>, record: RecordIx) {
        let Some(node) = self.node(aligned.records[record].rank) else {
            return;
        };
        for at in 0..self.pending[record].len() {
            let one = &self.pending[record][at];
            if one.arrival != Arrival::Arrived {
                continue;
            }
            let place = match one.what {
                What::Collective { seq } => {
                    let group = one.group;
                    match self.by_collective.get(&(group, seq)) {
                        Some(&place) => place,
                        None => {
                            let place = self.add(Place::Collective { group, seq });
                            self.by_collective.insert((group, seq), place);
                            place
                        }
                    }
                }
                What::Batch { .. } => {
                    let group = one.group;
                    self.add(Place::Batch {
                        group,
                        record,
                        pending: at,
                    })
                }
            };
            self.arrived[place].push(node);
            self.waits_in[node].push(place);
        }
    }

    fn add(&mut self, place: Place) -> usize {
        self.places.push(place);
        self.arrived.push(Vec::new());
        self.missing.push(Vec::new());
        self.places.len() - 1
    }

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
                Presence::Issued(_) => {
                    let record = aligned.record_of(rank);
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

    fn missing_from_batch(
        &self,
        aligned: &Aligned<'_>,
        messages: &Messages,
        group: GroupIx,
        record: RecordIx,
        pending: usize,
    ) -> Vec<(Node, Missing)> {
        let What::Batch { halves } = &self.pending[record][pending].what else {
            return Vec::new();
        };
        let mut missing: BTreeMap<Node, Missing> = BTreeMap::new();
        for &half in halves {
            for (rank, why) in self.other_ends(aligned, messages, group, record, half) {
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

    /// Who has to come so that a half can complete.
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
            if op.kind == OpType::Recv
                && any_is_served(aligned, messages, group, me as u32, record, half)
            {
                return Vec::new();
            }
            let others = ranks.iter().filter(|&&rank| rank != ranks[me]);
            return others.map(|&rank| (rank, Missing::Candidate)).collect();
        };
        let rank = ranks[peer as usize];
        let ends = if op.kind == OpType::Send {
            (me as u32, peer)
        } else {
            (peer, me as u32)
        };
        let other = messages
            .pairs
            .get(&(group, ends))
            .map_or(Other::Missing, |pair| {
                let list = if op.kind == OpType::Send {
                    &pair.sends
                } else {
                    &pair.receives
                };
                match list.binary_search_by_key(&half.position, |half| half.position) {
                    Ok(at) if op.kind == OpType::Send => messages.receive_of(pair, at),
                    Ok(at) => messages.send_of(pair, at),
                    Err(_) => Other::Lost,
                }
            });
        let Some(there) = aligned.record_of(rank) else {
            return vec![(rank, Missing::Unknown(Why::NoRecord))];
        };
        match other {
            Other::Lost => Vec::new(),
            Other::Posted(other) => {
                let held = self.pending[there].iter().find(
                    |one| matches!(&one.what, What::Batch { halves } if halves.contains(&other)),
                );
                match held.map(|one| one.arrival) {
                    None | Some(Arrival::Arrived) => Vec::new(),
                    Some(arrival) => vec![(rank, Missing::Held(arrival))],
                }
            }
            Other::Missing if aligned.records[there].cut => {
                vec![(rank, Missing::Unknown(Why::Cut))]
            }
            Other::Missing if op.kind == OpType::Send && takes_from_any(messages, group, peer) => {
                vec![(rank, Missing::Candidate)]
            }
            Other::Missing => vec![(rank, Missing::Absent)],
        }
    }
}

/// Whether the ring has dropped the very operation that a rank is in: a program that ran far ahead of
/// its device, and a small ring.
pub(crate) fn front_is_lost(record: &Record) -> bool {
    record.wrapped()
        && !record.ops.is_empty()
        && !record.ops.iter().any(|op| op.completed() || op.retired)
}

/// Whether the receiver of a group also takes from whoever sends first.
fn takes_from_any(messages: &Messages, group: GroupIx, receiver: u32) -> bool {
    messages.any.contains_key(&(group, receiver))
}

/// Whether somebody has sent what this receive from anybody would take.
fn any_is_served(
    aligned: &Aligned<'_>,
    messages: &Messages,
    group: GroupIx,
    me: u32,
    record: RecordIx,
    half: Half,
) -> bool {
    let Some(list) = messages.any.get(&(group, me)) else {
        return false;
    };
    let earlier = list
        .iter()
        .filter(|any| any.position < half.position)
        .count();
    let _ = (aligned, record);
    // Sends to me that none of my receives by name takes.
    let unclaimed: usize = (0..aligned.groups[group].ranks.len() as u32)
        .filter_map(|source| messages.pairs.get(&(group, (source, me))))
        .map(|pair| pair.sends.len().saturating_sub(pair.receives.len()))
        .sum();
    unclaimed > earlier
}

/// A member whose record does not tell is not suspected while another's record does.
fn prefer_what_is_known(missing: &mut Vec<(Node, Missing)>) {
    let known = |why: Missing| matches!(why, Missing::Absent | Missing::Held(_));
    if missing.iter().any(|&(_, why)| known(why)) {
        missing.retain(|&(_, why)| known(why));
    }
}

/// In a snapshot: the moment of judgement and the age from which on an operation is overdue.
fn now_of_snapshot(aligned: &Aligned<'_>, policy: &Policy) -> Option<(i64, i64)> {
    if !policy.snapshot {
        return None;
    }
    let overdue = i64::try_from(policy.overdue.as_nanos()).unwrap_or(i64::MAX);
    Some((now_ns(aligned, policy)?, overdue))
}

/// The moment of judgement in common time: the policy's, the dumps' own, else the newest moment that
/// any record knows of.
pub(crate) fn now_ns(aligned: &Aligned<'_>, policy: &Policy) -> Option<i64> {
    let of_records = aligned.records.iter().enumerate().map(|(at, record)| {
        let time = record.identity.dump_time_ns.max(record.newest_ns());
        time.saturating_sub(aligned.offsets_ns[at])
    });
    policy
        .now_ns
        .or_else(|| of_records.max())
        .filter(|&now| now > 0)
}

/// Backends whose operations run on a device, in the order of one queue unless shown otherwise.
fn on_device(backend: &str) -> bool {
    [
        "nccl", "rccl", "xccl", "hccl", "cncl", "mccl", "eccl", "flagcx",
    ]
    .iter()
    .any(|name| backend.starts_with(name))
}

fn pending_of(aligned: &Aligned<'_>, messages: &Messages, record: RecordIx) -> Vec<Pending> {
    let whole = &aligned.records[record];
    let mut pending: Vec<Pending> = Vec::new();
    let mut started: Vec<bool> = Vec::new();
    for (lane_at, lane) in aligned.lanes[record].iter().enumerate() {
        if lane.member == NONE {
            continue;
        }
        let mut at = lane.pending_from;
        while at < lane.collectives.len() {
            let block = aligned.block(record, lane, at);
            let teller = aligned.op(record, lane.collectives[block.end - 1]);
            if !teller.completed() {
                let any_started = block.clone().any(|at| {
                    let op = aligned.op(record, lane.collectives[at]);
                    op.state == EntryState::Started || op.started_us != NONE
                });
                pending.push(Pending {
                    group: lane.group,
                    position: lane.collectives[at],
                    what: What::Collective { seq: teller.seq },
                    arrival: Arrival::Queued,
                });
                started.push(any_started);
            }
            at = block.end;
        }
        let tellers = messages.tellers(record, lane_at);
        let mut at = 0;
        // Sends and receives that later ones of the same pair have overtaken are over.
        let over = overtaken(aligned, record, &lane.messages, tellers);
        while at < lane.messages.len() {
            let teller = tellers[at];
            let end = at
                + tellers[at..]
                    .iter()
                    .take_while(|&&other| other == teller)
                    .count();
            let op = aligned.op(record, teller);
            let halves: Vec<Half> = (at..end)
                .filter(|&at| !over[at] && aligned.op(record, lane.messages[at]).kind.is_p2p())
                .map(|at| Half {
                    position: lane.messages[at],
                    teller,
                })
                .collect();
            if p2p::pending(op) && !halves.is_empty() {
                pending.push(Pending {
                    group: lane.group,
                    position: halves[0].position,
                    what: What::Batch { halves },
                    arrival: Arrival::Queued,
                });
                started.push(op.state == EntryState::Started || op.started_us != NONE);
            }
            at = end;
        }
    }
    let mut order: Vec<usize> = (0..pending.len()).collect();
    order.sort_by_key(|&at| pending[at].position);
    let backend = |at: &usize| {
        let op = aligned.op(record, pending[*at].position);
        on_device(&aligned.shared.calls.get(op.call).signature.backend)
    };
    let device = whole.recorder == Recorder::Nccl || order.iter().any(backend);
    let mut lane_has_head: HashMap<(GroupIx, bool), bool> = HashMap::new();
    for (nth, &at) in order.iter().enumerate() {
        let one = &mut pending[at];
        let is_message = matches!(one.what, What::Batch { .. });
        // A device runs a group's messages and collectives in one order; a host does not.
        let lane = (one.group, is_message && !device);
        let head = !std::mem::replace(lane_has_head.entry(lane).or_default(), true);
        one.arrival = if aligned.groups[one.group].shows_starts {
            if started[at] {
                Arrival::Arrived
            } else if head {
                Arrival::Head
            } else {
                Arrival::Queued
            }
        } else if device {
            if nth == 0 {
                Arrival::Arrived
            } else if head {
                Arrival::Head
            } else {
                Arrival::Queued
            }
        } else if head || is_message {
            Arrival::Arrived
        } else {
            Arrival::Queued
        };
    }
    let lost = device && front_is_lost(whole);
    let mut sorted = Vec::with_capacity(pending.len());
    for at in order {
        let mut one = pending[at].clone();
        if lost {
            one.arrival = one.arrival.min(Arrival::Head);
        }
        sorted.push(one);
    }
    sorted
}

/// Marks the halves that a later completed one of the same peer and direction has overtaken.
fn overtaken(aligned: &Aligned<'_>, record: RecordIx, list: &[u32], tellers: &[u32]) -> Vec<bool> {
    let mut over = vec![false; list.len()];
    let mut done_after: Vec<(OpType, u32)> = Vec::new();
    for at in (0..list.len()).rev() {
        let op = aligned.op(record, list[at]);
        if !op.kind.is_p2p() {
            continue;
        }
        let key = (op.kind, op.peer);
        if aligned.op(record, tellers[at]).completed() {
            if !done_after.contains(&key) {
                done_after.push(key);
            }
        } else if done_after.contains(&key) {
            over[at] = true;
        }
    }
    over
}

/// Tarjan's strongly connected components (R. Tarjan, "Depth-first search and linear graph
/// algorithms", SIAM J. Comput. 1972), with its recursion unrolled. A component comes out before those
/// that point at it.
fn components(nodes: usize, successors: impl Fn(Node) -> Vec<Node>) -> Vec<Vec<Node>> {
    const UNSEEN: usize = usize::MAX;
    let mut index = vec![UNSEEN; nodes];
    let mut low = vec![0; nodes];
    let mut on_stack = vec![false; nodes];
    let mut stack = Vec::new();
    let mut found = Vec::new();
    let mut next = 0;
    for root in 0..nodes {
        if index[root] != UNSEEN {
            continue;
        }
        let mut calls: Vec<(Node, Vec<Node>, usize)> = vec![(root, successors(root), 0)];
        index[root] = next;
        low[root] = next;
        next += 1;
        stack.push(root);
        on_stack[root] = true;
        while let Some((node, to, at)) = calls.last_mut() {
            if let Some(&child) = to.get(*at) {
                *at += 1;
                let node = *node;
                if index[child] == UNSEEN {
                    index[child] = next;
                    low[child] = next;
                    next += 1;
                    stack.push(child);
                    on_stack[child] = true;
                    calls.push((child, successors(child), 0));
                } else if on_stack[child] {
                    low[node] = low[node].min(index[child]);
                }
                continue;
            }
            let node = *node;
            calls.pop();
            if let Some((parent, ..)) = calls.last() {
                low[*parent] = low[*parent].min(low[node]);
            }
            if low[node] == index[node] {
                let mut component = Vec::new();
                while let Some(member) = stack.pop() {
                    on_stack[member] = false;
                    component.push(member);
                    if member == node {
                        break;
                    }
                }
                component.sort_unstable();
                found.push(component);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn components_come_out_before_those_that_point_at_them() {
        // 0 -> 1 -> 2 -> 1, 3 alone
        let edges = [vec![1], vec![2], vec![1], vec![]];
        let found = components(4, |node| edges[node].clone());
        assert_eq!(found, vec![vec![1, 2], vec![0], vec![3]]);
    }

    #[test]
    fn a_long_chain_does_not_recurse() {
        let found = components(200_000, |node| {
            if node + 1 < 200_000 {
                vec![node + 1]
            } else {
                vec![]
            }
        });
        assert_eq!(found.len(), 200_000);
        assert_eq!(found[0], vec![199_999]);
    }
}
