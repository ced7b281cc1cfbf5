//! The road of every operation: check, take the issue lock, give the sequence number, record, hand to
//! the backend, release the lock.

use super::group::Group;
use crate::backend::{Call, Done, Observer};
use crate::buffer::Buffer;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result};
use crate::hints::Hints;
use crate::op::Op;
use crate::work::{Flight, Tickets, Voyage};
use rcomm_recorder::model::DType;
use rcomm_recorder::record::{
    FlightRecorder, Operation, SignatureCache, SignatureKey, SignatureRef, Start, Tensor, Ticket,
};
use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// What a handle asks for each of its calls.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    pub(crate) timeout: Duration,
    pub(crate) hints: Hints,
}

/// How an operation is issued.
#[derive(Clone, Copy)]
struct Manner {
    lane: usize,
    terms: Terms,
    site: &'static Location<'static>,
    start: Start,
}

/// What is counted under the issue lock.
#[derive(Default)]
pub(super) struct Issue {
    pub(super) collective_seq: u64,
    pub(super) p2p_seq: u64,
    pub(super) op_id: u64,
    /// One for each lane.
    pub(super) turns: Vec<u64>,
    extension: Extension,
    signatures: SignatureCache,
    /// Space for the splits of one record: input, output.
    splits: [Vec<u64>; 2],
}

/// More time for the next operations, until the first collective among them has ended.
#[derive(Clone, Copy, Debug, Default)]
struct Extension {
    extra: Duration,
    /// The first collective of a backend that has it, counted from 1; 0 before one was issued.
    first: u64,
}

impl Issue {
    /// Nothing issued yet, in a group of this many lanes.
    pub(super) fn new(lanes: usize) -> Self {
        Self {
            turns: vec![0; lanes],
            ..Self::default()
        }
    }
}

impl Extension {
    /// What is left of it after this many collectives have ended.
    fn after(self, ended: u64) -> Self {
        if self.first != 0 && ended >= self.first {
            return Self::default();
        }
        self
    }
}

impl Group {
    /// The lane that takes this operation's buffers.
    fn lane_of(&self, op: &Op<'_>) -> Result<usize> {
        let Some(first) = op.any_buffer() else {
            return Ok(0);
        };
        let device = first.device().kind();
        let lane = self.lanes.iter().position(|lane| lane.device == device);
        lane.ok_or_else(|| {
            Error::new(
                ErrorKind::Unsupported,
                format!("{first:?}: the group has no backend for {device} memory"),
            )
        })
    }

    fn check(&self, op: &Op<'_>) -> Result<usize> {
        op.validate(self.group_rank, self.size())
            .and_then(|()| self.lane_of(op))
            .map_err(|error| error.in_group(self.label()))
    }

    /// Runs an operation on the caller's thread.
    pub(crate) fn run(
        &self,
        op: &mut Op<'_>,
        terms: Terms,
        site: &'static Location<'static>,
    ) -> Result<Done> {
        let lane = self.check(op)?;
        let (call, voyage, tickets, slot) = {
            let mut issue = self.lock();
            self.check_open(op.op_type())?;
            // With nothing before it its turn has come already.
            let before = self.ended.load(Ordering::Acquire);
            let start = if op.is_p2p() || before == issue.turns[lane] {
                Start::AtOnce
            } else {
                Start::InTurn
            };
            let manner = Manner {
                lane,
                terms,
                site,
                start,
            };
            let (call, voyage, tickets) = self.number(&mut issue, op, manner);
            (call, voyage, tickets, self.running.enter(&voyage))
        };
        let observer = Recorded {
            recorder: &self.recorder,
            tickets: &tickets,
        };
        let result = self.lanes[lane].backend.run(op, call, &observer);
        let result = match result {
            Ok(done) => {
                tickets.settled(&self.recorder, done);
                Ok(done)
            }
            Err(error) => {
                let error = self.settle_error(&voyage, error);
                tickets.failed(&self.recorder);
                tickets.retired(&self.recorder);
                Err(error)
            }
        };
        self.note_end(&voyage);
        self.running.leave(slot);
        result
    }

    /// Starts an operation.
    pub(crate) fn submit(
        self: &Arc<Self>,
        op: Op<'static>,
        terms: Terms,
        site: &'static Location<'static>,
    ) -> Result<Arc<Flight>> {
        let lane = self.check(&op)?;
        let mut issue = self.lock();
        self.check_open(op.op_type())?;
        let manner = Manner {
            lane,
            terms,
            site,
            start: Start::InTurn,
        };
        let (call, voyage, tickets) = self.number(&mut issue, &op, manner);
        // The watchdog ends what is overdue, after the dump; the backend only if the watchdog cannot.
        let deadline = Deadline::In(voyage.timeout.saturating_add(self.patience())).started();
        let call = Call { deadline, ..call };
        let flight = Flight::new(self.clone(), voyage, tickets);
        match self.lanes[lane].backend.issue(op, call, flight.clone()) {
            Ok(pending) => {
                flight.take_off(pending);
                self.watch.add_flight(flight.clone());
                Ok(flight)
            }
            Err(error) => {
                drop(issue);
                let error = self.settle_error(&voyage, error);
                flight.announce_failure();
                flight.retire();
                self.note_end(&voyage);
                Err(error)
            }
        }
    }

    /// Gives an operation its numbers and its record. Under the issue lock.
    fn number(&self, issue: &mut Issue, op: &Op<'_>, manner: Manner) -> (Call, Voyage, Tickets) {
        let is_p2p = op.is_p2p();
        let extension = self.extension(issue, !is_p2p);
        let Terms { timeout, hints } = manner.terms;
        let timeout = timeout.saturating_add(extension);
        let manner = Manner {
            terms: Terms { timeout, hints },
            ..manner
        };
        let (seq, turn) = if is_p2p {
            issue.p2p_seq += 1;
            (issue.p2p_seq, 0)
        } else {
            issue.collective_seq += 1;
            issue.turns[manner.lane] += 1;
            (issue.collective_seq, issue.turns[manner.lane])
        };
        let mut members = Vec::new();
        if let Op::Coalesced(ops) = op {
            members.reserve(ops.len());
            for member in ops {
                issue.op_id += 1;
                members.push(self.record(issue, member, is_p2p, manner));
            }
        }
        issue.op_id += 1;
        let own = self.record(issue, op, is_p2p, manner);
        let voyage = Voyage {
            record_id: own.record_id(),
            op: op.op_type(),
            seq,
            is_p2p,
            takes_turn: !is_p2p,
            ends_itself: false,
            timeout,
        };
        let call = Call {
            seq,
            turn,
            deadline: Deadline::In(timeout),
            hints,
        };
        (call, voyage, Tickets { members, own })
    }

    /// How much more time the operation that is issued now has; one that `counts` is a collective of a
    /// backend. Under the issue lock.
    pub(super) fn extension(&self, issue: &mut Issue, counts: bool) -> Duration {
        if issue.extension.extra.is_zero() {
            return Duration::ZERO;
        }
        issue.extension = issue.extension.after(self.ended.load(Ordering::Acquire));
        if counts && issue.extension.first == 0 && !issue.extension.extra.is_zero() {
            issue.extension.first = issue.turns.iter().sum::<u64>() + 1;
        }
        issue.extension.extra
    }

    /// Adds to the time that the operations issued from now on have, until the first collective among
    /// them has ended.
    pub(super) fn extend_timeout(&self, extra: Duration) {
        let mut issue = self.lock();
        let left = issue.extension.after(self.ended.load(Ordering::Acquire));
        issue.extension = Extension {
            extra: left.extra.saturating_add(extra),
            ..left
        };
    }

    /// How much more time the next operation has.
    pub(super) fn timeout_extension(&self) -> Duration {
        let extension = self.lock().extension;
        extension.after(self.ended.load(Ordering::Acquire)).extra
    }

    fn record(&self, issue: &mut Issue, op: &Op<'_>, is_p2p: bool, manner: Manner) -> Ticket {
        let Manner {
            lane,
            terms: Terms { timeout, .. },
            site,
            start,
        } = manner;
        let Issue {
            signatures, splits, ..
        } = issue;
        for side in &mut *splits {
            side.clear();
        }
        if let Some((input, output)) = op.splits() {
            splits[0].extend(input.iter().map(|&n| n as u64));
            splits[1].extend(output.iter().map(|&n| n as u64));
        }
        let begin = |signature: SignatureRef<'_>| {
            self.recorder.begin(&Operation {
                collective_seq_id: issue.collective_seq,
                p2p_seq_id: issue.p2p_seq,
                op_id: issue.op_id,
                is_p2p,
                peer: op.peer(),
                root: op.root(),
                reduce_op: op.reduction().map(|reduction| reduction.op),
                input_splits: &splits[0],
                output_splits: &splits[1],
                timeout,
                call_site: Some(site),
                start,
                ..Operation::new(self.handle, op.op_type(), signature)
            })
        };
        let (backend, kind) = (self.lanes[lane].backend.name(), op.op_type());
        let inputs = op.inputs().iter().map(tensor_of);
        let outputs = op.outputs().iter().map(tensor_of);
        if let Some(id) = signatures.find(backend, kind, inputs, outputs) {
            return begin(SignatureRef::Id(id));
        }
        with_signature(backend, op, |key| match self.recorder.intern(key) {
            Some(id) => {
                signatures.keep(backend, kind, key, id);
                begin(SignatureRef::Id(id))
            }
            None => begin(SignatureRef::Key(key)),
        })
    }
}

/// Records the start of a blocking operation whose turn comes late.
struct Recorded<'a> {
    recorder: &'a FlightRecorder,
    tickets: &'a Tickets,
}

impl Observer for Recorded<'_> {
    fn started(&self) {
        self.tickets.started(self.recorder);
    }

    fn ended(&self) {}
}

fn tensor_of<'b>(buffer: &'b Buffer<'_>) -> Tensor<'b> {
    Tensor {
        dtype: buffer.dtype(),
        shape: buffer.shape(),
    }
}

/// Calls `then` with the operation's signature. Allocates only for long lists.
fn with_signature<R>(backend: &str, op: &Op<'_>, then: impl FnOnce(&SignatureKey<'_>) -> R) -> R {
    const FEW: usize = 4;
    let (inputs, outputs) = (op.inputs(), op.outputs());
    let blank = Tensor {
        dtype: DType::Other,
        shape: &[],
    };
    let mut few = [[blank; FEW]; 2];
    let many: [Vec<Tensor<'_>>; 2];
    let [inputs, outputs] = if inputs.len() <= FEW && outputs.len() <= FEW {
        for (side, buffers) in few.iter_mut().zip([inputs, outputs]) {
            for (tensor, buffer) in side.iter_mut().zip(buffers) {
                *tensor = tensor_of(buffer);
            }
        }
        [&few[0][..inputs.len()], &few[1][..outputs.len()]]
    } else {
        many = [inputs, outputs].map(|side| side.iter().map(tensor_of).collect());
        [&many[0][..], &many[1][..]]
    };
    then(&SignatureKey {
        backend,
        op_name: op.op_type().name(),
        inputs,
        outputs,
    })
}
