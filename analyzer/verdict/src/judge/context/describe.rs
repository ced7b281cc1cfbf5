//! The text for processes, operations, call sites and phases.

use super::{Context, OpRef};
use crate::align::pending::{Arrival, PendingKind};
use crate::align::record::{NONE, Op};
use crate::align::{GroupIx, RecordIx, event};
use crate::judge::life::raised::{self, RAISED};
use crate::judge::waits::wait_graph::Place;
use crate::report::format::{is_library, printable};
use crate::report::{FrameRef, SeqKind};
use rcomm_recorder::model::{EntryState, Frame, OpType, Peer, Rank};
use std::collections::{BTreeMap, BTreeSet};

/// The verb for a rank that has issued an operation to which its device has not come.
const HAS_ISSUED: &str = "has issued";
/// The verb for a rank that has not returned from an operation.
const IS_IN: &str = "is in";

impl Context<'_> {
    /// The processes of these records, at most `most`, by host: their ids, separated by spaces, and a text like ` on
    /// host n1`, empty in a job of one host.
    pub(crate) fn processes(&self, records: &[RecordIx], most: usize) -> Vec<(String, String)> {
        let mut by_host: BTreeMap<&str, Vec<String>> = BTreeMap::new();
        for &record in records.iter().take(most) {
            let identity = &self.aligned.records[record].identity;
            by_host
                .entry(&identity.host)
                .or_default()
                .push(identity.pid.to_string());
        }
        let names_hosts = self.has_several_hosts();
        let part = |(host, pids): (&str, Vec<String>)| {
            let on_host = match host {
                "" => String::new(),
                _ if !names_hosts => String::new(),
                host => format!(" on host {}", printable(host)),
            };
            (pids.join(" "), on_host)
        };
        by_host.into_iter().map(part).collect()
    }

    /// Where a rank's process runs, like `, process 7 on host n1,`; empty in a job of one host, and if the process or
    /// its host is not recorded.
    pub(crate) fn whereabouts(&self, record: RecordIx) -> String {
        let identity = &self.aligned.records[record].identity;
        match self.has_several_hosts() && identity.pid > 0 && !identity.host.is_empty() {
            true => format!(
                ", process {} on host {},",
                identity.pid,
                printable(&identity.host)
            ),
            false => String::new(),
        }
    }

    /// The text `, all of host n1` if these are the records of all ranks of one host, and this host has several ranks
    /// and the job several hosts; else empty.
    pub(crate) fn whole_host(&self, records: &[RecordIx]) -> String {
        let host = |record: RecordIx| self.aligned.records[record].identity.host.as_str();
        let first = records.first().map_or("", |&record| host(record));
        let ranks = |records: &mut dyn Iterator<Item = RecordIx>| -> BTreeSet<Rank> {
            let on_first = records.filter(|&record| host(record) == first);
            on_first
                .map(|record| self.aligned.records[record].rank)
                .collect()
        };
        let named = ranks(&mut records.iter().copied());
        let on_host = ranks(&mut (0..self.aligned.records.len()));
        let is_whole = named == on_host && records.iter().all(|&record| host(record) == first);
        match named.len() > 1 && is_whole && !first.is_empty() && self.has_several_hosts() {
            true => format!(", all of host {}", printable(first)),
            false => String::new(),
        }
    }

    /// Whether the records name more than one host.
    fn has_several_hosts(&self) -> bool {
        let hosts = self.aligned.records.iter();
        let mut hosts = hosts.map(|record| record.identity.host.as_str());
        let first = hosts.find(|host| !host.is_empty());
        first.is_some_and(|first| hosts.any(|host| !host.is_empty() && host != first))
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
    pub(crate) fn recorded_name(&self, op_ref: &OpRef) -> Option<String> {
        if op_ref.kind != SeqKind::CollectiveSeqId {
            return None;
        }
        let call = event::usual_call(self.aligned, op_ref.group, u32::try_from(op_ref.seq).ok()?)?;
        let name = &self.aligned.shared.calls.get(call).signature.op_name;
        let ours = name.is_empty() || name.eq_ignore_ascii_case(&op_ref.op);
        (!ours).then(|| name.to_ascii_uppercase())
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

    /// The sequence number that the records show: torchcomms numbers collectives in another way than `Aligned` does.
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
            if let Ok(index) = self.aligned.find(record, lane, seq) {
                return u64::from(self.aligned.op(record, lane.collectives[index]).p2p_seq);
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

    /// An operation as text, like `all_reduce #41 on group dp_3` or `send #7 to rank 2 on group pp_0`.
    pub(crate) fn describe_op(&self, record: RecordIx, op: &Op) -> String {
        let group = self.aligned.lanes[record][usize::from(op.group)].group;
        let call = self.describe_call(record, op);
        format!("{call} on group {}", self.group_name(group))
    }

    /// Like [`Context::describe_op`], without the group.
    pub(crate) fn describe_call(&self, record: RecordIx, op: &Op) -> String {
        let lane = &self.aligned.lanes[record][usize::from(op.group)];
        let name = self.aligned.shared.calls.get(op.call).op_name();
        if op.kind.is_p2p() {
            let ranks = &self.aligned.groups[lane.group].ranks;
            let towards = if op.kind == OpType::Send {
                "to"
            } else {
                "from"
            };
            let known = match op.peer() {
                Peer::Rank(peer) => ranks.get(peer as usize),
                Peer::Any => return format!("{name} #{} {towards} any rank", op.p2p_seq),
                Peer::None => None,
            };
            let peer = known.map_or(String::new(), |peer| format!(" {towards} rank {peer}"));
            format!("{name} #{}{peer}", op.p2p_seq)
        } else {
            let seq = if op.is_p2p {
                u64::from(op.p2p_seq)
            } else {
                self.recorded_seq(lane.group, op.seq)
            };
            format!("{name} #{seq}")
        }
    }

    /// The newest recorded call of a rank; the end marker of a batch only if there is no other. `None` if it recorded
    /// none.
    pub(crate) fn last_op(&self, record: RecordIx) -> Option<&Op> {
        let position = self.last_position(record, None)?;
        Some(self.aligned.op(record, position))
    }

    /// The position of a record's newest operation, of those that this thread issued if one is given.
    fn last_position(&self, record: RecordIx, thread: Option<u32>) -> Option<u32> {
        let ops = &self.aligned.records[record].ops;
        let is_on_thread = |op: &Op| thread.is_none_or(|thread| op.thread == thread);
        let newest = ops
            .iter()
            .rposition(|op| op.kind != OpType::Coalesced && is_on_thread(op));
        let position = newest.or_else(|| ops.iter().rposition(is_on_thread))?;
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
        unfinished.any(|operation| match &operation.kind {
            PendingKind::Batch { halves } => halves.iter().any(|half| half.position == position),
            PendingKind::Collective { seq } => {
                operation.group == group && operation.position <= position && op.seq <= *seq
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

    /// Like [`Context::own_frames`], but by the indices of a stack and of its frames in
    /// [`Shared`](crate::align::shared::Shared): equal indices are equal frames.
    pub(crate) fn own_frame_ids(&self, stack: u32) -> impl Iterator<Item = u32> {
        let shared = self.aligned.shared;
        let stack = shared.stacks.get(stack as usize);
        let frames = stack.into_iter().flatten().copied();
        let is_own = |frame: u32| {
            let frame = shared.frames.get(frame as usize);
            frame.is_some_and(|frame| !is_library(&frame.filename))
        };
        // If all frames are of the library, the whole stack is returned.
        let first_own = frames.clone().position(is_own).unwrap_or(0);
        frames.skip(first_own)
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

    /// The `when` of a frame in an operation that has not completed: `waiting`, or `failed` if the operation has
    /// failed.
    pub(crate) fn waiting_or_failed(op: &Op) -> &'static str {
        match op.state {
            EntryState::Failed => "failed",
            _ => "waiting",
        }
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

    /// The newest operation of a rank on the thread that last used this group: other threads do not show what keeps the
    /// rank from its next operation there. The newest operation of all threads if that thread is unknown.
    pub(crate) fn last_op_for(&self, record: RecordIx, group: GroupIx) -> Option<&Op> {
        let thread = self.thread_of(record, group);
        let position = self.last_position(record, thread)?;
        Some(self.aligned.op(record, position))
    }

    /// The thread that issued a rank's newest operation on a group, by its number in the record; `None` if it is not
    /// recorded.
    pub(crate) fn thread_of(&self, record: RecordIx, group: GroupIx) -> Option<u32> {
        let lanes = &self.aligned.lanes[record];
        let is_there = |op: &&Op| {
            lanes
                .get(usize::from(op.group))
                .is_some_and(|lane| lane.group == group)
        };
        let ops = self.aligned.records[record].ops.iter();
        let newest = ops.rev().find(is_there)?;
        (newest.thread != NONE).then_some(newest.thread)
    }

    /// What a rank has issued on the thread that last used this group, since a common time, ns, when others began to
    /// wait there for it: how many operations, and the newest of them. `None` if it issued none, or none in the second
    /// half of that time. Collectives of this group do not count: they come before the one that the rank has not
    /// issued. Of a rank that has not used the group yet, the operations of all threads count.
    pub(crate) fn went_on(
        &self,
        record: RecordIx,
        group: GroupIx,
        since_ns: i64,
    ) -> Option<(usize, &Op)> {
        let thread = self.thread_of(record, group);
        let mut lanes = self.aligned.lanes[record].iter();
        let is_used = lanes.any(|lane| {
            lane.group == group && !(lane.collectives.is_empty() && lane.messages.is_empty())
        });
        if thread.is_none() && is_used {
            return None;
        }
        let ops = self.aligned.records[record].ops.iter().rev();
        let later = ops.take_while(|op| self.aligned.created_ns(record, op) > since_ns);
        let lanes = &self.aligned.lanes[record];
        let is_further = |op: &&Op| {
            let is_here = lanes[usize::from(op.group)].group == group && !op.is_p2p;
            thread.is_none_or(|thread| op.thread == thread) && !is_here
        };
        let later_ops: Vec<&Op> = later.filter(is_further).collect();
        let newest = later_ops.first()?;
        let age_ns = |ns: i64| self.as_of_ns().map(|now| now.saturating_sub(ns));
        let newest_age = age_ns(self.aligned.created_ns(record, newest));
        let goes_on = newest_age <= age_ns(since_ns).map(|waited| waited / 2);
        goes_on.then_some((later_ops.len(), newest))
    }

    /// What a rank did last, for the end of a sentence: the call, its call site and the phase.
    pub(crate) fn last_seen(&self, record: RecordIx) -> String {
        self.seen(record, None)
    }

    /// Like [`last_seen`](Self::last_seen), but only on the thread that last used the group of the operation `said`,
    /// and for a sentence that already states whether the rank has issued that operation. If the rank issued it last,
    /// it is not named again. `None` if the sentence already says all.
    pub(crate) fn last_seen_beside(&self, record: RecordIx, said: &OpRef) -> Option<String> {
        let thread = self.thread_of(record, said.group);
        let (does, position) = self.newest_call(record, thread);
        let op = position.map(|position| self.aligned.op(record, position));
        let is_said = |op: &&Op| {
            let lane = &self.aligned.lanes[record][usize::from(op.group)];
            lane.group == said.group && u64::from(op.seq) == said.seq && !op.is_p2p
        };
        let Some(op) = op.filter(is_said).filter(|_| does == HAS_ISSUED) else {
            return Some(self.seen(record, thread));
        };
        let site = self.call_site(op).map(Self::name_site);
        match (site, self.phase(record)) {
            (Some(site), Some(phase)) => Some(format!("it called it at {site}, phase `{phase}`")),
            (Some(site), None) => Some(format!("it called it at {site}")),
            (None, Some(phase)) => Some(format!("it is in phase `{phase}`")),
            (None, None) => None,
        }
    }

    /// What a rank does with the call that it is in, or else with the newest on a thread: a verb, and the position of
    /// the call, if there is one.
    fn newest_call(&self, record: RecordIx, thread: Option<u32>) -> (&'static str, Option<u32>) {
        let inside = self.graph.pending[record].iter();
        let inside = inside
            .filter(|operation| operation.arrival == Arrival::Arrived && !operation.held_open)
            .map(|operation| operation.position)
            .filter(|&position| {
                thread.is_none_or(|thread| self.aligned.op(record, position).thread == thread)
            });
        match (inside.min(), self.last_position(record, thread)) {
            (Some(position), _) => (IS_IN, Some(position)),
            // The rank is not yet in an operation that its device has not reached.
            (None, Some(position)) if self.is_unfinished(record, position) => {
                (HAS_ISSUED, Some(position))
            }
            (None, position) => ("last issued", position),
        }
    }

    /// The stack of the call that a rank is in, or else of its newest one.
    pub(crate) fn frames_of_newest(&self, record: RecordIx) -> Vec<FrameRef> {
        let (does, position) = self.newest_call(record, None);
        let Some(op) = position.map(|position| self.aligned.op(record, position)) else {
            return Vec::new();
        };
        match does {
            IS_IN => self.frames_of(record, op, Self::waiting_or_failed(op)),
            _ => self.frames_of(record, op, "last_seen"),
        }
    }

    /// Between which calls a rank is, like ` before barrier #7 (train.py:61)` if it is in that call, with `after` if that
    /// is its newest one; and the position of the call. `None` if it issued nothing, or the place of the call was not
    /// recorded.
    pub(crate) fn beside_newest(&self, record: RecordIx) -> Option<(u32, String)> {
        let (does, position) = self.newest_call(record, None);
        let position = position?;
        let op = self.aligned.op(record, position);
        let site = self.call_site(op).map(Self::name_site)?;
        let when = if does == IS_IN { "before" } else { "after" };
        let call = self.describe_call(record, op);
        Some((position, format!(" {when} {call} ({site})")))
    }

    /// What a rank does with its newest call, of those that this thread issued if one is given: the call, its call site
    /// and the phase.
    fn seen(&self, record: RecordIx, thread: Option<u32>) -> String {
        let (does, position) = self.newest_call(record, thread);
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
        if let Some(phase) = self.phase(record) {
            text.push_str(&format!(", phase `{phase}`"));
        }
        text
    }

    /// The phase that a rank named last ([`raised::phase`]).
    pub(crate) fn phase(&self, record: RecordIx) -> Option<&str> {
        raised::phase(self.aligned, self.life, record)
    }

    /// The phase of a rank ([`phase`](Self::phase)) if it is that of an exception that ends the program; else `None`.
    pub(crate) fn raised(&self, record: RecordIx) -> Option<&str> {
        self.phase(record).filter(|phase| phase.starts_with(RAISED))
    }
}
