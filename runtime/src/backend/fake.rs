//! [`FakeBackend`]: ranks that are threads of one process, and misbehave on request.
//!
//! For tests of programs and of this crate: any world size, no sockets, no shared memory. All ranks of
//! a test share a [`FakeFabric`]; the last rank to come to an operation carries it out for all, under
//! one lock. [`FakeFault`]s make a rank stall, skip or lie at a given operation, which is how hangs and
//! mismatches are made to order.

use super::cpu::reduce;
use super::{
    AbortReason, Backend, BackendFactory, Call, Done, GroupContext, Observer, Pending, Progress,
};
use crate::buffer::{Buffer, DeviceKind};
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result};
use crate::op::{Op, Reduction};
use rcomm_recorder::model::{OpType, Rank, ReduceOp};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// What a rank does wrong, at the operation of its group with this sequence number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FakeFault {
    /// Who, by its rank in the world.
    pub rank: Rank,
    /// In which group, by name.
    pub group: String,
    /// When: `collective_seq_id` of the operation.
    pub seq: u64,
    /// What.
    pub kind: FakeFaultKind,
}

/// What a rank does wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FakeFaultKind {
    /// Its operation never gets under way.
    Stall,
    /// Its operation ends well at once, and the others wait for it.
    Skip,
    /// It tells the others of another operation than the one it was given.
    Lie,
}

/// What the ranks of one test share.
#[derive(Default)]
pub struct FakeFabric {
    state: Mutex<FabricState>,
}

#[derive(Default)]
struct FabricState {
    faults: Vec<FakeFault>,
    groups: HashMap<u64, Meeting>,
}

/// One group as the fabric sees it.
#[derive(Default)]
struct Meeting {
    /// Who has come to each turn.
    turns: BTreeMap<u64, Vec<Option<Arc<Ticket>>>>,
    /// Sends and receives that wait for their other half, in order of issue.
    mail: Vec<Message>,
    /// Why a member takes part no more, by group rank.
    left: HashMap<u32, Error>,
}

struct Message {
    owner: u32,
    ticket: Arc<Ticket>,
    /// Which operation of a coalesced block it is; 0 otherwise.
    part: usize,
}

impl FakeFabric {
    /// A fabric without faults.
    pub fn new() -> Arc<Self> {
        Arc::new(Self::default())
    }

    /// Adds a fault.
    pub fn add_fault(&self, fault: FakeFault) {
        self.lock().faults.push(fault);
    }

    /// The factory for one rank of the world.
    pub fn factory(self: &Arc<Self>, rank: Rank) -> Arc<dyn BackendFactory> {
        Arc::new(FakeFactory {
            fabric: self.clone(),
            rank,
        })
    }

    fn lock(&self) -> MutexGuard<'_, FabricState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct FakeFactory {
    fabric: Arc<FakeFabric>,
    rank: Rank,
}

impl BackendFactory for FakeFactory {
    fn name(&self) -> &'static str {
        FakeBackend::NAME
    }

    fn device(&self) -> DeviceKind {
        DeviceKind::Cpu
    }

    fn connect(&self, group: GroupContext, _: Deadline) -> Result<Arc<dyn Backend>> {
        Ok(Arc::new(FakeBackend {
            fabric: self.fabric.clone(),
            rank: self.rank,
            group,
        }))
    }
}

/// One rank's side of a group of threads.
pub struct FakeBackend {
    fabric: Arc<FakeFabric>,
    rank: Rank,
    group: GroupContext,
}

/// An operation of one rank, waiting for the others.
struct Ticket {
    state: Mutex<TicketState>,
    moved: Condvar,
    /// Until the end: it holds this operation in turn.
    observer: Mutex<Option<Arc<dyn Observer>>>,
}

struct TicketState {
    progress: Progress,
    op: Option<Op<'static>>,
    /// Halves of a coalesced block that still wait.
    open: usize,
    done: Done,
}

impl Ticket {
    fn lock(&self) -> MutexGuard<'_, TicketState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn observer(&self) -> MutexGuard<'_, Option<Arc<dyn Observer>>> {
        self.observer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, progress: Progress) {
        let mut state = self.lock();
        if state.progress.has_ended() {
            return;
        }
        state.progress = progress;
        drop(state);
        self.moved.notify_all();
        let observer = self.observer().take();
        if let Some(observer) = observer {
            observer.ended();
        }
    }

    fn has_ended(&self) -> bool {
        self.lock().progress.has_ended()
    }
}

impl Pending for Ticket {
    fn progress(&self) -> Progress {
        self.lock().progress.clone()
    }

    fn wait(&self, deadline: Deadline) -> Progress {
        let deadline = deadline.started();
        let state = self.lock();
        let waited = self
            .moved
            .wait_timeout_while(state, deadline.remaining(), |state| {
                !state.progress.has_ended()
            });
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        state.progress.clone()
    }

    fn reclaim(&self) -> Option<Op<'static>> {
        let mut state = self.lock();
        if !state.progress.has_ended() {
            return None;
        }
        state.op.take()
    }
}

impl FakeBackend {
    /// The name by which a configuration asks for it.
    pub const NAME: &'static str = "fake";

    fn fault_at(&self, state: &FabricState, seq: u64) -> Option<FakeFaultKind> {
        let here = |fault: &&FakeFault| {
            fault.rank == self.rank && fault.group == self.group.info.name && fault.seq == seq
        };
        state.faults.iter().find(here).map(|fault| fault.kind)
    }

    /// Comes to a collective; the last to come carries it out.
    fn join(&self, state: &mut FabricState, ticket: &Arc<Ticket>, turn: u64) {
        let size = self.group.size() as usize;
        let meeting = state.groups.entry(self.group.wire_id).or_default();
        let seats = meeting
            .turns
            .entry(turn)
            .or_insert_with(|| vec![None; size]);
        seats[self.group.group_rank as usize] = Some(ticket.clone());
        if let Some(error) = meeting.left.values().next() {
            ticket.end(Progress::Failed(error.clone()));
            return;
        }
        let all: Vec<Arc<Ticket>> = seats.iter().flatten().cloned().collect();
        if all.len() == size {
            meeting.turns.remove(&turn);
            carry_out(&all, &self.group.info.ranks);
        }
    }

    /// Looks for the other half of each message.
    fn post(&self, state: &mut FabricState, ticket: &Arc<Ticket>, parts: usize) {
        let meeting = state.groups.entry(self.group.wire_id).or_default();
        let owner = self.group.group_rank;
        for part in 0..parts {
            let wanted = ends_of(&ticket.lock(), part);
            if let Some(error) = wanted.peer.and_then(|peer| meeting.left.get(&peer)) {
                ticket.end(Progress::Failed(error.clone()));
                return;
            }
            let other = meeting.mail.iter().position(|message| {
                let theirs = ends_of(&message.ticket.lock(), message.part);
                wanted.meets(owner, &theirs, message.owner)
            });
            match other {
                Some(at) => {
                    let other = meeting.mail.remove(at);
                    let mine = (ticket, part, owner);
                    let theirs = (&other.ticket, other.part, other.owner);
                    if wanted.is_send {
                        deliver(mine, theirs);
                    } else {
                        deliver(theirs, mine);
                    }
                }
                None => meeting.mail.push(Message {
                    owner,
                    ticket: ticket.clone(),
                    part,
                }),
            }
        }
    }
}

impl Backend for FakeBackend {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn issue(
        &self,
        op: Op<'static>,
        call: Call,
        observer: Arc<dyn Observer>,
    ) -> Result<Arc<dyn Pending>> {
        let is_p2p = op.is_p2p();
        let parts = match &op {
            Op::Coalesced(ops) => ops.len(),
            _ => 1,
        };
        let ticket = Arc::new(Ticket {
            state: Mutex::new(TicketState {
                progress: Progress::Queued,
                op: Some(op),
                open: parts,
                done: Done::default(),
            }),
            moved: Condvar::new(),
            observer: Mutex::new(Some(observer)),
        });
        let mut state = self.fabric.lock();
        if let Some(error) = state
            .groups
            .get(&self.group.wire_id)
            .and_then(|meeting| meeting.left.get(&self.group.group_rank))
        {
            return Err(error.clone());
        }
        let fault = if is_p2p {
            None
        } else {
            self.fault_at(&state, call.seq)
        };
        match fault {
            // Held by its caller only: nobody will ever meet it.
            Some(FakeFaultKind::Stall) => return Ok(ticket),
            Some(FakeFaultKind::Skip) => {
                ticket.end(Progress::Completed(Done::default()));
                return Ok(ticket);
            }
            Some(FakeFaultKind::Lie) => {
                ticket.lock().op = Some(Op::Barrier);
            }
            None => {}
        }
        ticket.lock().progress = Progress::Started;
        let observer = ticket.observer().clone();
        if let Some(observer) = observer {
            observer.started();
        }
        if is_p2p {
            self.post(&mut state, &ticket, parts);
            if parts == 0 {
                ticket.end(Progress::Completed(Done::default()));
            }
        } else {
            self.join(&mut state, &ticket, call.turn);
        }
        Ok(ticket)
    }

    fn abort(&self, reason: &AbortReason) {
        let mut state = self.fabric.lock();
        let meeting = state.groups.entry(self.group.wire_id).or_default();
        let own = self.group.group_rank;
        let lost = Error::new(
            ErrorKind::PeerLost,
            format!("rank {} left the group: {reason}", self.rank),
        )
        .with_rank(self.rank);
        meeting.left.entry(own).or_insert(lost.clone());
        for (_, seats) in std::mem::take(&mut meeting.turns) {
            for (rank, ticket) in seats.into_iter().enumerate() {
                let error = if rank == own as usize {
                    &reason.error
                } else {
                    &lost
                };
                if let Some(ticket) = ticket {
                    ticket.end(Progress::Failed(error.clone()));
                }
            }
        }
        meeting.mail.retain(|message| {
            let peer = ends_of(&message.ticket.lock(), message.part).peer;
            let error = match (message.owner == own, peer) {
                (true, _) => &reason.error,
                (false, Some(peer)) if peer == own => &lost,
                _ => return true,
            };
            message.ticket.end(Progress::Failed(error.clone()));
            false
        });
    }

    fn shutdown(&self, _: Deadline) -> Result<()> {
        Ok(())
    }
}

/// Who a message goes between.
struct Ends {
    is_send: bool,
    peer: Option<u32>,
    tag: u32,
}

impl Ends {
    fn meets(&self, own: u32, other: &Ends, owner: u32) -> bool {
        self.is_send != other.is_send
            && self.tag == other.tag
            && self.peer.is_none_or(|peer| peer == owner)
            && other.peer.is_none_or(|peer| peer == own)
    }
}

fn part_of<'b>(op: &'b mut Op<'static>, part: usize) -> &'b mut Op<'static> {
    match op {
        Op::Coalesced(ops) => &mut ops[part],
        op => op,
    }
}

fn ends_of(state: &TicketState, part: usize) -> Ends {
    let op = match &state.op {
        Some(Op::Coalesced(ops)) => ops.get(part),
        op => op.as_ref(),
    };
    match op {
        Some(Op::Send { peer, tag, .. }) => Ends {
            is_send: true,
            peer: Some(*peer),
            tag: *tag,
        },
        Some(Op::Recv { peer, tag, .. }) => Ends {
            is_send: false,
            peer: *peer,
            tag: *tag,
        },
        // Never in the mail; meets nothing.
        _ => Ends {
            is_send: true,
            peer: Some(u32::MAX),
            tag: 0,
        },
    }
}

/// Ends both halves of a message, or notes that a half of a block has ended.
fn deliver(send: (&Arc<Ticket>, usize, u32), recv: (&Arc<Ticket>, usize, u32)) {
    let (sender, send_part, source) = send;
    let (receiver, recv_part, _) = recv;
    let message = {
        let mut state = sender.lock();
        let op = state.op.as_mut().map(|op| part_of(op, send_part));
        match op {
            Some(Op::Send { buffer, .. }) => buffer.to_owned(),
            _ => return,
        }
    };
    let filled = message.and_then(|message| {
        let mut state = receiver.lock();
        let op = state.op.as_mut().map(|op| part_of(op, recv_part));
        match op {
            Some(Op::Recv { buffer, .. }) => buffer.copy_from(&message),
            _ => Ok(()),
        }
    });
    let mismatch = filled.err().map(|error| {
        Error::new(
            ErrorKind::Mismatch,
            format!("send and receive differ: {error}"),
        )
    });
    for (ticket, source) in [(sender, None), (receiver, Some(source))] {
        if let Some(error) = &mismatch {
            ticket.end(Progress::Failed(error.clone()));
            continue;
        }
        let mut state = ticket.lock();
        state.open -= 1;
        state.done.source = state.done.source.or(source);
        let finished = (state.open == 0).then_some(state.done);
        drop(state);
        if let Some(done) = finished {
            ticket.end(Progress::Completed(done));
        }
    }
}

/// Carries a collective out for all ranks.
fn carry_out(tickets: &[Arc<Ticket>], ranks: &[Rank]) {
    if tickets.iter().any(|ticket| ticket.has_ended()) {
        return;
    }
    let ops: Option<Vec<Op<'static>>> = tickets.iter().map(|it| it.lock().op.take()).collect();
    let Some(mut ops) = ops else { return };
    let result = run_all(&mut ops, ranks);
    for (ticket, op) in tickets.iter().zip(ops) {
        ticket.lock().op = Some(op);
        ticket.end(match &result {
            Ok(()) => Progress::Completed(Done::default()),
            Err(error) => Progress::Failed(error.clone()),
        });
    }
}

fn run_all(ops: &mut [Op<'static>], ranks: &[Rank]) -> Result<()> {
    if let Some(Op::Coalesced(first)) = ops.first() {
        let parts = first.len();
        let mut columns: Vec<Vec<Op<'static>>> = (0..parts).map(|_| Vec::new()).collect();
        for op in &mut *ops {
            match op {
                Op::Coalesced(parts) if parts.len() == columns.len() => {
                    for (column, part) in columns.iter_mut().zip(parts.drain(..)) {
                        column.push(part);
                    }
                }
                _ => return Err(differ(ops, ranks)),
            }
        }
        let result = columns.iter_mut().try_for_each(|part| run_all(part, ranks));
        for column in columns {
            for (op, part) in ops.iter_mut().zip(column) {
                if let Op::Coalesced(parts) = op {
                    parts.push(part);
                }
            }
        }
        return result;
    }
    let facts: Vec<_> = ops.iter().map(comparable).collect();
    if facts.iter().any(|fact| *fact != facts[0]) {
        return Err(differ(ops, ranks));
    }
    move_bytes(ops).map_err(|error| {
        Error::new(
            ErrorKind::Mismatch,
            format!("the ranks' buffers differ: {error}"),
        )
    })
}

/// What members must agree on, apart from sizes that may differ.
fn comparable(op: &Op<'_>) -> (OpType, Option<u32>, Option<ReduceOp>, Option<String>) {
    let even = !matches!(
        op,
        Op::AllGatherV { .. }
            | Op::ReduceScatterV { .. }
            | Op::AllToAll { .. }
            | Op::AllToAllVSingle { .. }
            | Op::Gather { .. }
            | Op::GatherV { .. }
            | Op::Scatter { .. }
            | Op::ScatterV { .. }
    );
    let shapes = |buffers: &[Buffer<'_>]| -> Vec<_> {
        let facts = buffers.iter().map(|buffer| (buffer.dtype(), buffer.len()));
        facts.collect()
    };
    let sizes = even.then(|| format!("{:?} {:?}", shapes(op.inputs()), shapes(op.outputs())));
    let reduction = op.reduction().map(|reduction| reduction.op);
    (op.op_type(), op.root(), reduction, sizes)
}

fn differ(ops: &[Op<'_>], ranks: &[Rank]) -> Error {
    let said: Vec<String> = ranks
        .iter()
        .zip(ops)
        .map(|(rank, op)| format!("rank {rank}: {} {:?}", op.op_type(), op.inputs()))
        .collect();
    Error::new(
        ErrorKind::Mismatch,
        format!("the ranks issued different operations: {}", said.join(", ")),
    )
}

fn bytes_of(buffer: &Buffer<'_>) -> Result<Vec<u8>> {
    Ok(buffer.as_bytes()?.to_vec())
}

fn write(buffer: &mut Buffer<'_>, bytes: &[u8]) -> Result<()> {
    let target = buffer.as_bytes_mut()?;
    if target.len() != bytes.len() {
        return Err(Error::new(
            ErrorKind::Mismatch,
            format!("{} bytes for a buffer of {}", bytes.len(), target.len()),
        ));
    }
    target.copy_from_slice(bytes);
    Ok(())
}

/// The reduction of one input of each rank.
fn combine(inputs: &[&Buffer<'_>], reductions: &[Reduction]) -> Result<Vec<u8>> {
    let dtype = inputs[0].dtype();
    let mut parts = Vec::with_capacity(inputs.len());
    for (input, reduction) in inputs.iter().zip(reductions) {
        let mut bytes = bytes_of(input)?;
        if reduction.op == ReduceOp::PremulSum {
            reduce::scale(dtype, &mut bytes, reduction.factor);
        }
        parts.push(bytes);
    }
    let mut out = vec![0; parts[0].len()];
    let parts: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
    reduce::combine(reductions[0].op, dtype, &parts, &mut out, None);
    Ok(out)
}

/// Byte range of part `at` of `parts` equal ones.
fn part(bytes: &[u8], at: usize, parts: usize) -> &[u8] {
    let len = bytes.len() / parts;
    &bytes[at * len..(at + 1) * len]
}

/// Moves and combines what the ranks have given; all are of one kind.
fn move_bytes(ops: &mut [Op<'static>]) -> Result<()> {
    let size = ops.len();
    let reductions: Vec<Reduction> = ops.iter().filter_map(Op::reduction).collect();
    let kind = ops[0].op_type();
    let root = ops[0].root().unwrap_or(0) as usize;
    // What each rank's i-th output ends as.
    let mut results: Vec<Vec<Option<Vec<u8>>>> = Vec::new();
    for own in 0..size {
        let outputs = ops[own].outputs().len();
        let mut result = vec![None; outputs];
        for (at, result) in result.iter_mut().enumerate() {
            let all = |pick: usize| -> Vec<&Buffer<'_>> {
                ops.iter().map(|op| &op.inputs()[pick]).collect()
            };
            *result = match kind {
                OpType::AllReduce | OpType::AllReduceCoalesced => {
                    Some(combine(&all(at), &reductions)?)
                }
                OpType::Reduce if own == root => Some(combine(&all(at), &reductions)?),
                OpType::Broadcast if own != root => Some(bytes_of(&ops[root].inputs()[at])?),
                OpType::AllGather | OpType::AllGatherV | OpType::Gather | OpType::GatherV => {
                    Some(bytes_of(&ops[at].inputs()[0])?)
                }
                OpType::AllGatherSingle | OpType::AllGatherCoalesced => {
                    let parts = all(at).into_iter().map(bytes_of);
                    Some(parts.collect::<Result<Vec<_>>>()?.concat())
                }
                OpType::ReduceScatter | OpType::ReduceScatterV => {
                    Some(combine(&all(own), &reductions)?)
                }
                OpType::ReduceScatterSingle | OpType::ReduceScatterCoalesced => {
                    let whole = combine(&all(at), &reductions)?;
                    Some(part(&whole, own, size).to_vec())
                }
                OpType::AllToAll => Some(bytes_of(&ops[at].inputs()[own])?),
                OpType::AllToAllSingle => {
                    let wholes = all(0).into_iter().map(bytes_of);
                    let wholes = wholes.collect::<Result<Vec<_>>>()?;
                    let parts = wholes.iter().map(|whole| part(whole, own, size));
                    Some(parts.collect::<Vec<_>>().concat())
                }
                OpType::AllToAllVSingle => Some(collect_splits(ops, own)?),
                OpType::Scatter | OpType::ScatterV => Some(bytes_of(&ops[root].inputs()[own])?),
                _ => None,
            };
        }
        results.push(result);
    }
    for (op, results) in ops.iter_mut().zip(results) {
        for (output, result) in op.outputs_mut().iter_mut().zip(results) {
            if let Some(bytes) = result {
                write(output, &bytes)?;
            }
        }
    }
    Ok(())
}

/// What comes to rank `own` in an all-to-all of uneven parts.
fn collect_splits(ops: &[Op<'_>], own: usize) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    for op in ops {
        let Some((input_splits, _)) = op.splits() else {
            continue;
        };
        let input = &op.inputs()[0];
        let element = crate::buffer::element_size(input.dtype());
        let before: usize = input_splits[..own].iter().sum();
        let range = before * element..(before + input_splits[own]) * element;
        bytes.extend_from_slice(&input.as_bytes()?[range]);
    }
    Ok(bytes)
}
