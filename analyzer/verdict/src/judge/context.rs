//! The input of the checks, and the drafts of findings that they return.

use crate::align::clocks::Offset;
use crate::align::p2p::{Half, Messages};
use crate::align::pending::{Arrival, PendingKind};
use crate::align::record::Op;
use crate::align::{Aligned, GroupIx, Presence, RecordIx, event};
use crate::judge::disagreement::Disagreement;
use crate::judge::lateness::Lateness;
use crate::judge::life::Life;
use crate::judge::policy::{Policy, now_ns};
use crate::judge::wait_graph::{Missing, Node, Place, WaitGraph};
use crate::judge::wait_root::WaitRoot;
use crate::report::format::format_ranks;
use crate::report::{Code, Evidence, Finding, FrameRef, GroupRef, SeqKind};
use rcomm_recorder::model::{Frame, OpType, Rank};

/// The input of all checks: the aligned records and everything derived from them.
pub(crate) struct Context<'a> {
    pub(crate) policy: &'a Policy,
    pub(crate) life: &'a Life,
    pub(crate) aligned: &'a Aligned<'a>,
    pub(crate) messages: &'a Messages,
    pub(crate) graph: &'a WaitGraph,
    pub(crate) reversed: Vec<Vec<Node>>,
    pub(crate) wait_roots: Vec<WaitRoot>,
    pub(crate) disagreements: Vec<Disagreement>,
    pub(crate) lateness: &'a Lateness,
    /// For each record: the offset of its clock, if common collectives show it.
    pub(crate) clocks: Vec<Option<Offset>>,
}

/// A finding before it is ranked among the others.
#[derive(Clone, Debug)]
pub(crate) struct FindingDraft {
    pub(crate) code: Code,
    pub(crate) confidence: f64,
    pub(crate) culprits: Vec<Rank>,
    pub(crate) alternatives: Vec<Vec<Rank>>,
    /// Nodes whose waiters are victims of this finding.
    pub(crate) targets: Vec<Node>,
    pub(crate) at: Option<OpRef>,
    pub(crate) cycle: Vec<Rank>,
    pub(crate) sentence: String,
    /// The age in the sentence, ms, if the sentence contains one.
    pub(crate) age_ms: Option<f64>,
    pub(crate) evidence: Vec<Evidence>,
    pub(crate) ruled_out: Vec<String>,
    /// Reasons why it is not certain.
    pub(crate) doubts: Vec<String>,
    pub(crate) frames: Vec<FrameRef>,
    pub(crate) diff: Vec<String>,
    pub(crate) next: String,
    /// Whether it explains others' waits; else it is a consequence of the first finding that does.
    pub(crate) is_root: bool,
    /// Set if clocks decided the finding: the two ranks whose times were compared, and the difference of these times,
    /// ns.
    pub(crate) by_clock: Option<([Rank; 2], i64)>,
}

impl FindingDraft {
    pub(crate) fn new(code: Code, sentence: String) -> Self {
        Self {
            code,
            confidence: 0.9,
            culprits: Vec::new(),
            alternatives: Vec::new(),
            targets: Vec::new(),
            at: None,
            cycle: Vec::new(),
            sentence,
            age_ms: None,
            evidence: Vec::new(),
            ruled_out: Vec::new(),
            doubts: Vec::new(),
            frames: Vec::new(),
            diff: Vec::new(),
            next: String::new(),
            is_root: true,
            by_clock: None,
        }
    }
}

impl From<Finding> for FindingDraft {
    /// A draft with the code, ranks, sentence and next step of a finding, and no evidence.
    fn from(finding: Finding) -> Self {
        Self {
            culprits: finding.culprit_ranks,
            next: finding.next,
            ..Self::new(finding.code, finding.sentence)
        }
    }
}

/// The operation that a finding is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OpRef {
    pub(crate) group: GroupIx,
    pub(crate) seq: u64,
    pub(crate) kind: SeqKind,
    pub(crate) op: String,
}

impl Context<'_> {
    /// Whether the end of a record's process is a cause ([`Life::went_first`]).
    pub(crate) fn went_first(&self, record: RecordIx) -> bool {
        self.life.went_first(self.aligned.records[record].rank)
    }

    /// A group as findings name it.
    pub(crate) fn group_ref(&self, group: GroupIx) -> GroupRef {
        let group = &self.aligned.groups[group];
        GroupRef {
            name: group.name.clone(),
            desc: group.desc.clone(),
            ranks: group.ranks.clone(),
        }
    }

    /// The description of a group; without one, its name and its ranks.
    pub(crate) fn group_name(&self, group: GroupIx) -> String {
        let group = &self.aligned.groups[group];
        if !group.desc.is_empty() && group.desc != "undefined" {
            group.desc.clone()
        } else if group.ranks.is_empty() {
            group.name.clone()
        } else {
            format!("{} ({})", group.name, format_ranks(&group.ranks))
        }
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

    pub(crate) fn ranks(&self, nodes: &[Node]) -> Vec<Rank> {
        nodes.iter().map(|&node| self.rank(node)).collect()
    }

    /// The name of the operation that most members issued under a number; `collective` if none did.
    pub(crate) fn usual_op(&self, group: GroupIx, seq: u32) -> String {
        let call = event::usual_call(self.aligned, group, seq);
        call.map_or("collective", |call| {
            self.aligned.shared.calls.get(call).op_name()
        })
        .to_owned()
    }

    /// The recorder's own name of a collective in upper case, as in PyTorch's logs (`_REDUCE_SCATTER_BASE`); `None` for
    /// a message, or if it equals the name in the finding.
    pub(crate) fn recorded_name(&self, at: &OpRef) -> Option<String> {
        if at.kind != SeqKind::CollectiveSeqId {
            return None;
        }
        let call = event::usual_call(self.aligned, at.group, u32::try_from(at.seq).ok()?)?;
        let name = &self.aligned.shared.calls.get(call).signature.op_name;
        let ours = name.is_empty() || name.eq_ignore_ascii_case(&at.op);
        (!ours).then(|| name.to_ascii_uppercase())
    }

    /// A part of a sentence, like `, and 63 of 64 ranks wait in all`; empty if no more ranks wait for `targets` than
    /// the `counted` ones that the sentence has already.
    pub(crate) fn in_all(&self, targets: &[Node], counted: usize) -> String {
        let waiting = self.graph.waiting_for(targets, &self.reversed);
        let waiting = waiting
            .iter()
            .filter(|node| !targets.contains(node))
            .count();
        if waiting > counted {
            format!(", and {waiting} of {} ranks wait in all", self.graph.ranks)
        } else {
            String::new()
        }
    }

    /// A collective as findings refer to it.
    pub(crate) fn op_ref(&self, group: GroupIx, seq: u32) -> OpRef {
        OpRef {
            group,
            seq: self.recorded_seq(group, seq),
            kind: SeqKind::CollectiveSeqId,
            op: self.usual_op(group, seq),
        }
    }

    /// The sequence number that the records show: torchcomms numbers collectives in another way than [`Aligned`] does.
    pub(crate) fn recorded_seq(&self, group: GroupIx, seq: u32) -> u64 {
        for member in 0..self.aligned.groups[group].ranks.len() {
            let Some((record, lane)) = self.aligned.lane(group, member) else {
                continue;
            };
            if self.aligned.records[record].recorder
                != rcomm_recorder::publish::Recorder::Torchcomms
            {
                break;
            }
            if let Ok(at) = self.aligned.find(record, lane, seq) {
                return u64::from(self.aligned.op(record, lane.collectives[at]).p2p_seq);
            }
        }
        u64::from(seq)
    }

    /// The operation of a place; for a batch, its first message.
    pub(crate) fn op_ref_of_place(&self, place: usize) -> OpRef {
        match self.graph.places[place] {
            Place::Collective { group, seq } => self.op_ref(group, seq),
            Place::Batch {
                group,
                record,
                pending,
            } => {
                let position = self.first_of_batch(record, pending);
                self.op_ref_of_message(record, group, position)
            }
        }
    }

    /// The position of a batch's first message.
    pub(crate) fn first_of_batch(&self, record: RecordIx, pending: usize) -> u32 {
        self.graph.pending[record][pending].position
    }

    /// The messages of a batch; empty for a collective.
    pub(crate) fn halves(&self, record: RecordIx, pending: usize) -> &[Half] {
        match &self.graph.pending[record][pending].what {
            PendingKind::Batch { halves } => halves,
            PendingKind::Collective { .. } => &[],
        }
    }

    /// A message as one rank recorded it.
    pub(crate) fn op_ref_of_message(
        &self,
        record: RecordIx,
        group: GroupIx,
        position: u32,
    ) -> OpRef {
        let op = self.aligned.op(record, position);
        OpRef {
            group,
            seq: u64::from(op.p2p_seq),
            kind: SeqKind::P2pSeqId,
            op: self.aligned.shared.calls.get(op.call).op_name().to_owned(),
        }
    }

    /// An operation as text, like `all_reduce #41 on group dp` or `send #7 to rank 2 on group pp`.
    pub(crate) fn describe_op(&self, record: RecordIx, op: &Op) -> String {
        let lane = &self.aligned.lanes[record][usize::from(op.group)];
        let name = self.aligned.shared.calls.get(op.call).op_name();
        let group = self.group_name(lane.group);
        if op.kind.is_p2p() {
            let ranks = &self.aligned.groups[lane.group].ranks;
            let peer = ranks.get(op.peer as usize);
            let peer = peer.map_or("any rank".to_owned(), |peer| format!("rank {peer}"));
            let towards = if op.kind == OpType::Send {
                "to"
            } else {
                "from"
            };
            format!("{name} #{} {towards} {peer} on group {group}", op.p2p_seq)
        } else {
            let seq = if op.is_p2p {
                u64::from(op.p2p_seq)
            } else {
                self.recorded_seq(lane.group, op.seq)
            };
            format!("{name} #{seq} on group {group}")
        }
    }

    /// The newest recorded call of a rank; the end marker of a batch only if there is no other. `None` if it recorded
    /// none.
    pub(crate) fn last_op(&self, record: RecordIx) -> Option<&Op> {
        let position = self.last_position(record)?;
        Some(self.aligned.op(record, position))
    }

    fn last_position(&self, record: RecordIx) -> Option<u32> {
        let ops = &self.aligned.records[record].ops;
        let newest = ops.iter().rposition(|op| op.kind != OpType::Coalesced);
        let position = newest.or(ops.len().checked_sub(1))?;
        u32::try_from(position).ok()
    }

    /// The newest operation that a rank completed; for a batch, one of its operations. `None` if it completed none.
    pub(crate) fn last_completed(&self, record: RecordIx) -> Option<&Op> {
        let ops = &self.aligned.records[record].ops;
        let newest = ops.iter().rposition(Op::completed)?;
        let done = &ops[newest];
        if done.kind != OpType::Coalesced {
            return Some(done);
        }
        // The marker is not a call that the program made.
        let mut members = ops[..newest].iter().rev();
        let member = members
            .find(|op| op.group == done.group && (op.p2p_seq, op.seq) == (done.p2p_seq, done.seq));
        Some(member.unwrap_or(done))
    }

    /// Whether an operation is unfinished, as far as all records together show. The end marker of a batch decides for
    /// the operations in it, and a recorder without states still shows which operations it retired.
    fn is_unfinished(&self, record: RecordIx, position: u32) -> bool {
        let op = self.aligned.op(record, position);
        let group = self.aligned.lanes[record][usize::from(op.group)].group;
        let mut unfinished = self.graph.pending[record].iter();
        unfinished.any(|one| match &one.what {
            PendingKind::Batch { halves } => halves.iter().any(|half| half.position == position),
            PendingKind::Collective { seq } => {
                one.group == group && one.position <= position && op.seq <= *seq
            }
        })
    }

    /// The stack of a call, outward from the innermost frame that is not part of the communication library; the whole
    /// stack if there is no such frame.
    pub(crate) fn own_frames(&self, op: &Op) -> impl Iterator<Item = &Frame> {
        let frames = &self.aligned.shared.frames;
        self.own_frame_ids(op.stack)
            .filter_map(|frame| frames.get(frame as usize))
    }

    /// As [`Context::own_frames`], of a stack of [`Shared::stacks`](crate::align::record::Shared::stacks):
    /// equal numbers are equal frames.
    pub(crate) fn own_frame_ids(&self, stack: u32) -> impl Iterator<Item = u32> {
        let shared = self.aligned.shared;
        let stack = shared.stacks.get(stack as usize);
        let frames = stack.into_iter().flatten().copied();
        let is_own = |frame: u32| {
            let frame = shared.frames.get(frame as usize);
            frame.is_some_and(|frame| !is_library(&frame.filename))
        };
        // If all frames are of the library, the whole stack is returned.
        let own = frames.clone().position(is_own).unwrap_or(0);
        frames.skip(own)
    }

    /// The call site in the source: the first of [`Context::own_frames`]. `None` if no stack was recorded.
    pub(crate) fn call_site(&self, op: &Op) -> Option<&Frame> {
        self.own_frames(op).next()
    }

    /// The file name and line of a frame, like `data.py:88`.
    pub(crate) fn name_site(frame: &Frame) -> String {
        let file = frame
            .filename
            .rsplit(['/', '\\'])
            .next()
            .unwrap_or(&frame.filename);
        format!("{file}:{}", frame.line)
    }

    /// The call site in parentheses, like ` (data.py:88)`; empty if it was not recorded.
    pub(crate) fn at_site(&self, op: &Op) -> String {
        self.call_site(op).map_or(String::new(), |frame| {
            format!(" ({})", Self::name_site(frame))
        })
    }

    /// The stack of a call as findings show it, at most 12 frames.
    pub(crate) fn frames_of(&self, record: RecordIx, op: &Op, when: &str) -> Vec<FrameRef> {
        const SHOWN: usize = 12;
        let rank = self.aligned.records[record].rank;
        self.own_frames(op)
            .take(SHOWN)
            .map(|frame| FrameRef {
                rank,
                when: when.to_owned(),
                name: frame.name.clone(),
                filename: frame.filename.clone(),
                line: frame.line,
            })
            .collect()
    }

    /// What a rank did last, for the end of a sentence: the call, its call site and the phase.
    pub(crate) fn last_seen(&self, record: RecordIx) -> String {
        let inside = self.graph.pending[record].iter();
        let inside = inside
            .filter(|one| one.arrival == Arrival::Arrived)
            .map(|one| one.position);
        let (does, position) = match (inside.min(), self.last_position(record)) {
            (Some(position), _) => ("is in", Some(position)),
            // The rank is not yet in an operation that its device has not reached.
            (None, Some(position)) if self.is_unfinished(record, position) => {
                ("has issued", Some(position))
            }
            (None, position) => ("last issued", position),
        };
        let mut text = match position {
            Some(position) => {
                let op = self.aligned.op(record, position);
                format!(
                    "it {does} {}{}",
                    self.describe_op(record, op),
                    self.at_site(op)
                )
            }
            None => "it issued nothing that is recorded".to_owned(),
        };
        if let Some(status) = &self.aligned.records[record].status
            && !status.phase.is_empty()
        {
            text.push_str(&format!(", phase `{}`", status.phase));
        }
        text
    }

    /// An entry as evidence. `group` is the group of the finding.
    pub(crate) fn evidence(&self, record: RecordIx, position: u32, group: GroupIx) -> Evidence {
        let op = self.aligned.op(record, position);
        let lane = &self.aligned.lanes[record][usize::from(op.group)];
        let whole = &self.aligned.records[record];
        let seq = if op.kind.is_p2p() || op.is_p2p {
            u64::from(op.p2p_seq)
        } else {
            self.recorded_seq(lane.group, op.seq)
        };
        let call = self.aligned.shared.calls.get(op.call);
        let mut text = call.describe();
        if let Some(&peer) = self.aligned.groups[lane.group].ranks.get(op.peer as usize)
            && op.kind.is_p2p()
        {
            let towards = if op.kind == OpType::Send {
                "to"
            } else {
                "from"
            };
            text.push_str(&format!(" {towards} rank {peer}"));
        }
        Evidence {
            rank: whole.rank,
            record_id: whole.record_id(op),
            state: op.state,
            group: (lane.group != group).then(|| self.group_ref(lane.group)),
            seq,
            op: text,
        }
    }

    /// The entry of a rank for a collective, as evidence; `None` if its record does not hold it.
    pub(crate) fn evidence_of(&self, node: Node, group: GroupIx, seq: u32) -> Option<Evidence> {
        let rank = self.rank(node);
        let member = self.aligned.groups[group]
            .ranks
            .iter()
            .position(|&r| r == rank)?;
        let (record, lane) = self.aligned.lane(group, member)?;
        let Presence::Issued(at) = self.aligned.presence(group, member, seq) else {
            return None;
        };
        Some(self.evidence(record, lane.collectives[at], group))
    }

    /// The entries of the first `most` ranks that wait at a place, as evidence; for a batch, its first message.
    pub(crate) fn evidence_of_place(&self, place: usize, most: usize) -> Vec<Evidence> {
        match self.graph.places[place] {
            Place::Collective { group, seq } => {
                let arrived = self.graph.arrived[place].iter().take(most);
                arrived
                    .filter_map(|&node| self.evidence_of(node, group, seq))
                    .collect()
            }
            Place::Batch {
                group,
                record,
                pending,
            } => {
                vec![self.evidence(record, self.first_of_batch(record, pending), group)]
            }
        }
    }

    /// A rank's newest entry in a group, as evidence of how far it came.
    pub(crate) fn evidence_of_newest(&self, record: RecordIx, group: GroupIx) -> Option<Evidence> {
        let lane = self.aligned.lanes[record]
            .iter()
            .find(|lane| lane.group == group)?;
        let newest = lane.collectives.last().max(lane.messages.last())?;
        Some(self.evidence(record, *newest, group))
    }

    /// How long the first rank at a place has waited, ms; `None` if times are unknown or it is less than 1 ms.
    ///
    /// If no record states when it was taken, no wait is known: its newest operation may be much older.
    pub(crate) fn waited_ms(&self, place: usize) -> Option<f64> {
        let records = self.aligned.records.iter();
        let mut taken = records.map(|record| record.identity.dump_time_ns);
        if self.policy.now_ns.is_none() && taken.all(|time| time == 0) {
            return None;
        }
        let now = now_ns(self.aligned, self.policy)?;
        let since = self.waiting_since(place)?;
        let ms = now.saturating_sub(since) as f64 / 1e6;
        (ms >= 1.0).then_some(ms)
    }

    /// When the newest of the files was written whose records state no time, ns since the epoch. `None` if this is
    /// unknown, or if the file is older than the newest record or more than a day younger: then it was copied, and its
    /// time means nothing.
    pub(crate) fn written_ns(&self) -> Option<i64> {
        const COPIED_NS: i64 = 86_400_000_000_000;
        let newest = now_ns(self.aligned, self.policy)?;
        let written = self.policy.written_ns?;
        (newest..newest.saturating_add(COPIED_NS))
            .contains(&written)
            .then_some(written)
    }

    /// When the first of the ranks that wait at a place issued the operation, common time, ns.
    pub(crate) fn waiting_since(&self, place: usize) -> Option<i64> {
        match self.graph.places[place] {
            Place::Collective { .. } => self.arrivals(place).map(|(at_ns, _)| at_ns).min(),
            Place::Batch {
                record, pending, ..
            } => {
                let first = self
                    .aligned
                    .op(record, self.first_of_batch(record, pending));
                Some(self.aligned.created_ns(record, first))
            }
        }
    }

    /// Whether the last member of a collective came so long ago that it should have finished; also true if this is not
    /// a snapshot or times are unknown. Until then the others have waited for this member, and the fabric has had no
    /// time.
    pub(crate) fn is_long_complete(&self, place: usize) -> bool {
        let now = now_ns(self.aligned, self.policy).filter(|_| self.policy.snapshot);
        let last = self.arrivals(place).max();
        now.zip(last).is_none_or(|(now, (last_ns, timeout_ms))| {
            let age = u128::try_from(now.saturating_sub(last_ns)).unwrap_or(0);
            age >= self.policy.overdue_after(timeout_ms).as_nanos()
        })
    }

    /// Whether an unfinished operation is overdue whose last member did not come just now.
    pub(crate) fn is_anything_overdue(&self) -> bool {
        let is_fresh = |group: usize, seq: u32| {
            let place = self.graph.collective(group, seq);
            place.is_some_and(|place| {
                self.graph.missing[place].is_empty() && !self.is_long_complete(place)
            })
        };
        self.graph
            .pending
            .iter()
            .enumerate()
            .any(|(record, pending)| {
                pending.iter().enumerate().any(|(at, one)| {
                    let fresh = match one.what {
                        PendingKind::Collective { seq } => is_fresh(one.group, seq),
                        _ => false,
                    };
                    self.graph.is_overdue(record, at) && !fresh
                })
            })
    }

    /// When the ranks that are inside a collective issued it, common time, ns, with its time-out there, ms.
    pub(crate) fn arrivals(&self, place: usize) -> impl Iterator<Item = (i64, u64)> {
        let at = match self.graph.places[place] {
            Place::Collective { group, seq } => Some((group, seq)),
            Place::Batch { .. } => None,
        };
        let nodes = at.map_or(&[][..], |_| &self.graph.arrived[place]);
        nodes.iter().filter_map(move |&node| {
            let (group, seq) = at?;
            let record = self.aligned.record_in(group, self.rank(node))?;
            let pending = self.graph.pending[record].iter().find(|one| {
                one.group == group
                    && matches!(one.what, PendingKind::Collective { seq: s } if s == seq)
            })?;
            let op = self.aligned.op(record, pending.position);
            let timeout_ms = self.aligned.shared.calls.get(op.call).timeout_ms;
            Some((self.aligned.created_ns(record, op), timeout_ms))
        })
    }

    /// The places where others wait for a rank, and why it is missing there.
    pub(crate) fn missed_at(&self, node: Node) -> Vec<(usize, Missing)> {
        let before = &self.reversed[node];
        let mut places = Vec::new();
        for &place in before {
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
            .find(|one| one.group == group && one.seq == seq)
    }
}

/// Whether a file belongs to the communication library or its wrappers.
fn is_library(filename: &str) -> bool {
    ["/torch/", "torch/distributed/", "/torchcomms/", "c10d"]
        .iter()
        .any(|part| filename.contains(part))
}
