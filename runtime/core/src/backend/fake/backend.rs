//! [`FakeBackend`]: one rank's operations, and how they are matched with those of the other ranks.

use super::carry_out::carry_out;
use super::fabric::{FabricState, FakeFabric, FakeFaultKind, Message};
use crate::backend::{AbortReason, Backend, Call, Done, GroupContext, Observer, Pending, Progress};
use crate::op::Op;
use crate::op::deadline::Deadline;
use crate::op::error::{Error, ErrorKind, Result};
use rcomm_recorder::model::{OpType, Peer, Rank};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// One rank's side of a group of threads.
pub struct FakeBackend {
    pub(super) fabric: Arc<FakeFabric>,
    pub(super) rank: Rank,
    pub(super) group: GroupContext,
}

/// An operation of one rank, waiting for the others.
pub(super) struct FakeOp {
    state: Mutex<FakeOpState>,
    changed: Condvar,
    /// Taken when the operation ends, since the observer holds this operation and the cycle would leak both.
    observer: Mutex<Option<Arc<dyn Observer>>>,
}

pub(super) struct FakeOpState {
    progress: Progress,
    pub(super) op: Option<Op<'static>>,
    /// How many sends and receives of this operation are not matched with their other half yet.
    unmatched_parts: usize,
    done: Done,
}

impl FakeOp {
    pub(super) fn lock(&self) -> MutexGuard<'_, FakeOpState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn observer(&self) -> MutexGuard<'_, Option<Arc<dyn Observer>>> {
        self.observer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the operation, unless it has ended already.
    pub(super) fn end(&self, progress: Progress) {
        let mut state = self.lock();
        if state.progress.has_ended() {
            return;
        }
        state.progress = progress;
        drop(state);
        self.changed.notify_all();
        let observer = self.observer().take();
        if let Some(observer) = observer {
            observer.ended();
        }
    }

    pub(super) fn has_ended(&self) -> bool {
        self.lock().progress.has_ended()
    }
}

impl Pending for FakeOp {
    fn progress(&self) -> Progress {
        self.lock().progress.clone()
    }

    fn wait(&self, deadline: Deadline) -> Progress {
        let deadline = deadline.started();
        let state = self.lock();
        let waited = self
            .changed
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
    /// The backend's name in a configuration.
    pub const NAME: &'static str = "fake";

    /// Joins a collective; the last rank to join runs it for all.
    fn join(&self, state: &mut FabricState, fake_op: &Arc<FakeOp>, turn: u64) {
        let size = self.group.size() as usize;
        let group_state = state.groups.entry(self.group.wire_id).or_default();
        let members = group_state
            .turns
            .entry(turn)
            .or_insert_with(|| vec![None; size]);
        members[self.group.group_rank as usize] = Some(fake_op.clone());
        if let Some(error) = group_state.left.values().next() {
            fake_op.end(Progress::Failed(error.clone()));
            return;
        }
        let fake_ops: Vec<Arc<FakeOp>> = members.iter().flatten().cloned().collect();
        if fake_ops.len() == size {
            group_state.turns.remove(&turn);
            carry_out(&fake_ops, &self.group.info.ranks);
        }
    }

    /// Matches each send or receive with its other half, or keeps it until the other half is issued.
    fn post(&self, state: &mut FabricState, fake_op: &Arc<FakeOp>, parts: usize) {
        let group_state = state.groups.entry(self.group.wire_id).or_default();
        let owner = self.group.group_rank;
        for part in 0..parts {
            let own_end = end_of(&fake_op.lock(), part);
            if let Some(error) = own_end.peer.and_then(|peer| group_state.left.get(&peer)) {
                fake_op.end(Progress::Failed(error.clone()));
                return;
            }
            let found = group_state.unmatched.iter().position(|message| {
                let other_end = end_of(&message.fake_op.lock(), message.part);
                own_end.matches_with(owner, &other_end, message.owner)
            });
            match found {
                Some(index) => {
                    let peer = group_state.unmatched.remove(index);
                    let own_half = (fake_op, part, owner);
                    let peer_half = (&peer.fake_op, peer.part, peer.owner);
                    if own_end.is_send {
                        deliver(own_half, peer_half);
                    } else {
                        deliver(peer_half, own_half);
                    }
                }
                None => group_state.unmatched.push(Message {
                    owner,
                    fake_op: fake_op.clone(),
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
        let parts = if let Op::Coalesced(ops) = &op {
            ops.len()
        } else {
            1
        };
        let fake_op = Arc::new(FakeOp {
            state: Mutex::new(FakeOpState {
                progress: Progress::Queued,
                op: Some(op),
                unmatched_parts: parts,
                done: Done::default(),
            }),
            changed: Condvar::new(),
            observer: Mutex::new(Some(observer)),
        });
        let mut state = self.fabric.lock();
        if let Some(error) = state
            .groups
            .get(&self.group.wire_id)
            .and_then(|group_state| group_state.left.get(&self.group.group_rank))
        {
            return Err(error.clone());
        }
        let fault = if is_p2p {
            None
        } else {
            state.take_fault(self.rank, &self.group.info.name, call.seq)
        };
        match fault {
            // Only the caller holds the operation: it is not matched with those of the other ranks.
            Some(FakeFaultKind::Stall) => return Ok(fake_op),
            Some(FakeFaultKind::Skip) => {
                fake_op.end(Progress::Completed(Done::default()));
                return Ok(fake_op);
            }
            Some(FakeFaultKind::Lie) => {
                fake_op.lock().op = Some(Op::Barrier);
            }
            None => {}
        }
        fake_op.lock().progress = Progress::Started;
        let observer = fake_op.observer().clone();
        if let Some(observer) = observer {
            observer.started();
        }
        if is_p2p {
            self.post(&mut state, &fake_op, parts);
            if parts == 0 {
                fake_op.end(Progress::Completed(Done::default()));
            }
        } else {
            self.join(&mut state, &fake_op, call.turn);
        }
        Ok(fake_op)
    }

    fn abort(&self, reason: &AbortReason) {
        let mut state = self.fabric.lock();
        let group_state = state.groups.entry(self.group.wire_id).or_default();
        let own_rank = self.group.group_rank;
        let lost = Error::new(
            ErrorKind::PeerLost,
            format!("rank {} left the group: {reason}", self.rank),
        )
        .with_rank(self.rank);
        group_state.left.entry(own_rank).or_insert(lost.clone());
        for (_, members) in std::mem::take(&mut group_state.turns) {
            for (rank, fake_op) in members.into_iter().enumerate() {
                let error = if rank == own_rank as usize {
                    &reason.error
                } else {
                    &lost
                };
                if let Some(fake_op) = fake_op {
                    fake_op.end(Progress::Failed(error.clone()));
                }
            }
        }
        group_state.unmatched.retain(|message| {
            let peer = end_of(&message.fake_op.lock(), message.part).peer;
            let error = match (message.owner == own_rank, peer) {
                (true, _) => &reason.error,
                (false, Some(peer)) if peer == own_rank => &lost,
                _ => return true,
            };
            message.fake_op.end(Progress::Failed(error.clone()));
            false
        });
    }

    fn shutdown(&self, _: Deadline) -> Result<()> {
        Ok(())
    }
}

/// One end of a message: its direction, its peer and its tag.
struct MessageEnd {
    is_send: bool,
    peer: Option<u32>,
    tag: u32,
}

impl MessageEnd {
    /// Whether this end, of group rank `own_rank`, and `other`, of group rank `other_rank`, are the two ends of one
    /// message.
    fn matches_with(&self, own_rank: u32, other: &MessageEnd, other_rank: u32) -> bool {
        self.is_send != other.is_send
            && self.tag == other.tag
            && self.peer.is_none_or(|peer| peer == other_rank)
            && other.peer.is_none_or(|peer| peer == own_rank)
    }
}

fn part_of<'b>(op: &'b mut Op<'static>, part: usize) -> &'b mut Op<'static> {
    if let Op::Coalesced(ops) = op {
        &mut ops[part]
    } else {
        op
    }
}

/// The part `part` of an operation, as an end of a message.
fn end_of(state: &FakeOpState, part: usize) -> MessageEnd {
    let op = state.op.as_ref();
    let op = if let Some(Op::Coalesced(ops)) = op {
        ops.get(part)
    } else {
        op
    };
    // An operation that is not a message is never in `unmatched` and matches none.
    let peer = op.map_or(Peer::Rank(u32::MAX), Op::peer);
    MessageEnd {
        is_send: op.is_none_or(|op| op.op_type() != OpType::Recv),
        peer: match peer {
            Peer::Rank(peer) => Some(peer),
            Peer::Any => None,
            Peer::None => Some(u32::MAX),
        },
        tag: op.and_then(Op::tag).unwrap_or(0),
    }
}

/// Copies a message from its sender to its receiver. Each of the two is given as an operation, the part of its block,
/// and the group rank. An operation ends when its last message has been copied, or with an error as soon as one does
/// not fit its receiver.
fn deliver(send: (&Arc<FakeOp>, usize, u32), recv: (&Arc<FakeOp>, usize, u32)) {
    let (sender, send_part, source) = send;
    let (receiver, recv_part, _) = recv;
    let message = {
        let mut state = sender.lock();
        let op = state.op.as_mut().map(|op| part_of(op, send_part));
        let Some(Op::Send { buffer, .. }) = op else {
            return;
        };
        buffer.to_owned()
    };
    let filled = message.and_then(|message| {
        let mut state = receiver.lock();
        let op = state.op.as_mut().map(|op| part_of(op, recv_part));
        if let Some(Op::Recv { buffer, .. }) = op {
            buffer.copy_from(&message)
        } else {
            Ok(())
        }
    });
    let mismatch = filled.err().map(|error| {
        Error::new(
            ErrorKind::Mismatch,
            format!("send and receive differ: {error}"),
        )
    });
    for (fake_op, source) in [(sender, None), (receiver, Some(source))] {
        if let Some(error) = &mismatch {
            fake_op.end(Progress::Failed(error.clone()));
            continue;
        }
        let mut state = fake_op.lock();
        state.unmatched_parts -= 1;
        state.done.source = state.done.source.or(source);
        let finished = (state.unmatched_parts == 0).then_some(state.done);
        drop(state);
        if let Some(done) = finished {
            fake_op.end(Progress::Completed(done));
        }
    }
}
