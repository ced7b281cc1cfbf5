//! Operations that are not a single [`Op`] of a backend: they consist of several, access a window, or go
//! through the store. They are numbered and recorded like all others.
//!
//! A *lane* is one backend of a group. A *turn* is a position, counted from 1, in the order of a lane's
//! collectives: the backend runs them in this order, which is the same on every rank.
//!
//! An operation that consists of collectives reserves its turns when it is issued, so the collectives of
//! operations that are issued later run later on every rank. Such an operation runs on the caller's thread
//! ([`run_recorded`](ProcessGroup::run_recorded)) or on the group's thread `rcomm/worker/<group>`
//! ([`run_on_worker`](ProcessGroup::run_on_worker)). An operation that consists of messages takes no turn,
//! and waits for no collective ([`issue_in_steps`](ProcessGroup::issue_in_steps)).

use super::group::Group;
use super::handle::ProcessGroup;
use super::issue::CallOptions;
use super::steps::{Next, QueueKey, Steps};
use super::worker::PendingJob;
use crate::backend::{Call, Done, Observer, Pending};
use crate::group::in_flight::{InFlightOp, Tickets};
use crate::group::work::Work;
use crate::op::Op;
use crate::op::buffer::DeviceKind;
use crate::op::deadline::Deadline;
use crate::op::error::{Error, ErrorKind, Result};
use crate::op::hints::Hints;
use crate::op::info::OpInfo;
use crate::watch::watched::WatchedGroup;
use rcomm_recorder::model::{OpType, Peer};
use rcomm_recorder::record::{Operation, SignatureKey, SignatureRef, Tensor};
use std::panic::Location;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// An operation that is not a single [`Op`] of a backend, as it is recorded.
pub(crate) struct OpRecord<'a> {
    pub(crate) op: OpType,
    /// The backend or service that carries it out.
    pub(crate) backend: &'a str,
    /// The rank at the other end; `Peer::None` for an operation of all members.
    pub(crate) peer: Peer,
    pub(crate) tensor: Option<Tensor<'a>>,
    pub(crate) parts: OpParts,
    pub(crate) end: End,
}

/// The [`Op`]s that an operation consists of. Their buffers are in host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OpParts {
    /// None: the operation uses a window or the store.
    None,
    /// Sends or receives.
    Messages,
    /// This many collectives.
    Collectives(u64),
}

/// The part of this process that ends an operation whose deadline has passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The watchdog, which aborts the whole group.
    Watched,
    /// The operation itself: it checks its deadline and whether its group was aborted. The watchdog never
    /// treats it as overdue.
    Own,
}

/// The access of one operation to its lane: it may run as many collectives as turns were reserved for it, or
/// issue messages.
pub(crate) struct Share {
    group: Arc<Group>,
    /// Index in the group's lanes.
    lane: usize,
    /// The turn of this operation's next collective.
    next: u64,
    /// The turn after the last one that was reserved: it belongs to another operation.
    end: u64,
    seq: u64,
    timeout: Duration,
    due: Instant,
    deadline: Deadline,
    hints: Hints,
}

impl Share {
    /// The deadline for the backend that carries out the operation.
    pub(crate) fn deadline(&self) -> Deadline {
        self.deadline
    }

    /// The operation's sequence number in its group.
    pub(crate) fn seq(&self) -> u64 {
        self.seq
    }

    /// The operation's time-out, extensions included.
    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// The moment at which the time-out has passed since the operation was issued.
    pub(crate) fn due(&self) -> Instant {
        self.due
    }

    /// The error with which the group has failed or was aborted; `None` if neither.
    pub(crate) fn group_error(&self) -> Option<Error> {
        self.group.group_error()
    }

    pub(super) fn group(&self) -> &Group {
        &self.group
    }

    /// Starts a send, a receive, or a coalesced block of them. Returns the backend's handle on it; `observer`
    /// is notified of its start and end.
    pub(super) fn issue(
        &self,
        op: Op<'static>,
        observer: Arc<dyn Observer>,
    ) -> Result<Arc<dyn Pending>> {
        op.validate(self.group.group_rank, self.group.size())?;
        let call = Call {
            seq: self.seq,
            // Messages have no turn.
            turn: 0,
            deadline: self.deadline,
            hints: self.hints.clone(),
        };
        // Backends require that operations are issued one at a time.
        let _issue = self.group.lock();
        self.group.lanes[self.lane]
            .backend
            .issue(op, call, observer)
    }

    /// Runs a collective in the next reserved turn.
    ///
    /// # Errors
    /// `Backend` if no reserved turn is left; otherwise those of the collective.
    pub(crate) fn run(&mut self, op: &mut Op<'_>) -> Result<Done> {
        if self.next == self.end {
            return Err(Error::new(
                ErrorKind::Backend,
                format!("no turn was reserved for {}", op.op_type()),
            ));
        }
        op.validate(self.group.group_rank, self.group.size())?;
        let call = Call {
            seq: self.seq,
            turn: self.next,
            deadline: self.deadline,
            hints: self.hints.clone(),
        };
        self.next += 1;
        let result = self.group.lanes[self.lane]
            .backend
            .run(op, call, &NoObserver);
        self.group.note_turn(self.lane);
        result
    }

    /// Runs `body`. Unless it fails with an error after which the group is unusable, uses the turns that it
    /// has left over for barriers: operations with later turns wait for them.
    fn run_body<R>(mut self, body: impl FnOnce(&mut Self) -> Result<R>) -> Result<R> {
        let result = body(&mut self);
        match &result {
            Err(error) if !error.is_recoverable() => return result,
            _ => {}
        }
        while self.next < self.end {
            self.run(&mut Op::Barrier)?;
        }
        result
    }
}

/// The observer of the collectives that a recorded operation consists of: they have no records themselves.
struct NoObserver;

impl Observer for NoObserver {
    fn started(&self) {}

    fn ended(&self) {}
}

impl Group {
    /// Gives the operation a sequence number and a record, and reserves the turns of its collectives.
    ///
    /// # Errors
    /// `Unsupported` if the group has no backend for the operation's memory; otherwise the reason why the
    /// group takes no more operations.
    pub(crate) fn begin_op(
        self: &Arc<Self>,
        op_record: &OpRecord<'_>,
        options: CallOptions<'_>,
        site: &'static Location<'static>,
    ) -> Result<(OpInfo, Tickets, Share)> {
        let lane = match op_record.parts {
            // The lane is not used.
            OpParts::None => Some(0),
            OpParts::Messages | OpParts::Collectives(_) => {
                let mut lanes = self.lanes.iter();
                lanes.position(|lane| lane.device == DeviceKind::Cpu)
            }
        };
        let collectives = match op_record.parts {
            OpParts::None | OpParts::Messages => 0,
            OpParts::Collectives(count) => count,
        };
        let lane = lane.ok_or_else(|| {
            let message = "the group has no backend for cpu memory";
            let error = Error::new(ErrorKind::Unsupported, message);
            error.in_group(self.label()).during(op_record.op)
        })?;
        let mut issue = self.lock();
        self.check_open(op_record.op)?;
        let extension = self.extension(&mut issue, collectives > 0);
        let timeout = options.timeout.saturating_add(extension);
        let is_p2p = op_record.peer != Peer::None;
        let seq = if is_p2p {
            issue.p2p_seq += 1;
            issue.p2p_seq
        } else {
            issue.collective_seq += 1;
            issue.collective_seq
        };
        self.issued.store(issue.collective_seq, Ordering::Relaxed);
        issue.op_id += 1;
        let next = issue.turns[lane] + 1;
        issue.turns[lane] += collectives;
        let key = SignatureKey {
            backend: op_record.backend,
            op_name: op_record.op.name(),
            inputs: op_record.tensor.as_slice(),
            ..SignatureKey::default()
        };
        let operation = self.recorder.begin(&Operation {
            collective_seq_id: issue.collective_seq,
            p2p_seq_id: issue.p2p_seq,
            op_id: issue.op_id,
            is_p2p,
            peer: op_record.peer,
            timeout,
            call_site: Some(options.site(site)),
            ..Operation::new(self.handle, op_record.op, SignatureRef::Key(&key))
        });
        let op_info = OpInfo {
            record_id: operation.record_id(),
            op: op_record.op,
            seq,
            is_p2p,
            // `Share::run` counts the turns of the operation's collectives.
            turn_lane: None,
            ends_itself: op_record.end == End::Own,
            is_timed: self.is_timed(),
            timeout,
        };
        self.note_begin(&op_info);
        drop(issue);
        let due = Deadline::In(timeout).start();
        let share = Share {
            group: self.clone(),
            lane,
            next,
            end: next + collectives,
            seq,
            timeout,
            due,
            deadline: Deadline::At(due),
            hints: options.hints.clone(),
        };
        let members = Vec::new();
        Ok((op_info, Tickets { members, operation }, share))
    }
}

impl ProcessGroup {
    /// Numbers and records `body` as an operation, and runs it on the caller's thread.
    pub(crate) fn run_recorded<R>(
        &self,
        op_record: &OpRecord<'_>,
        site: &'static Location<'static>,
        body: impl FnOnce(&mut Share) -> Result<R>,
    ) -> Result<R> {
        let group = &self.group;
        let (op_info, tickets, share) = group.begin_op(op_record, self.options(), site)?;
        tickets.started(group.recorder());
        let result = match share.run_body(body) {
            Ok(value) => {
                tickets.completed(group.recorder(), Done::default());
                group.note_outcome(&op_info, None);
                Ok(value)
            }
            Err(error) => {
                let error = group.settle_error(&op_info, error);
                tickets.failed(group.recorder());
                group.note_outcome(&op_info, Some(&error));
                Err(error)
            }
        };
        tickets.retired(group.recorder());
        result
    }

    /// Numbers and records an operation that polling `pending` carries out, and adds it to the watchdog's
    /// list. Returns at once.
    pub(crate) fn watch_pending(
        &self,
        op_record: &OpRecord<'_>,
        site: &'static Location<'static>,
        pending: Arc<dyn Pending>,
    ) -> Result<Work<()>> {
        let group = &self.group;
        let (op_info, tickets, _) = group.begin_op(op_record, self.options(), site)?;
        let in_flight = InFlightOp::new(group.clone(), op_info, tickets);
        in_flight.launched(pending);
        group.watch().add_in_flight(in_flight.clone());
        Ok(Work::with_result(in_flight, || Some(())))
    }

    /// Like [`run_recorded`](Self::run_recorded), but returns at once: `body` runs on the group's thread
    /// `rcomm/worker/<group>`, after the operations that were queued there before it.
    pub(crate) fn run_on_worker<R: Send + 'static>(
        &self,
        op_record: &OpRecord<'_>,
        site: &'static Location<'static>,
        body: impl FnOnce(&mut Share) -> Result<R> + Send + 'static,
    ) -> Result<Work<R>> {
        let group = &self.group;
        group.worker().start(group.label())?;
        let (op_info, tickets, mut share) = group.begin_op(op_record, self.options(), site)?;
        // As for any issued operation: the watchdog ends it, and the deadline only if the watchdog cannot.
        share.deadline = Deadline::At(share.due + group.cleanup_time());
        let in_flight = InFlightOp::new(group.clone(), op_info, tickets);
        let result = Arc::new(Mutex::new(None));
        let pending = PendingJob::new(in_flight.clone());
        let (result_slot, pending_job) = (result.clone(), pending.clone());
        group.worker().push(Box::new(move || {
            pending_job.run(|| {
                let value = share.run_body(body)?;
                *result_slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(value);
                Ok(())
            });
        }));
        in_flight.launched(pending);
        group.watch().add_in_flight(in_flight.clone());
        Ok(Work::with_result(in_flight, move || {
            result.lock().unwrap_or_else(PoisonError::into_inner).take()
        }))
    }

    /// Starts an operation that consists of messages, and returns at once. The steps are `first`, then the
    /// one that `then` returns after each has ended, until `then` returns [`Next::Done`]. If a `queue` is
    /// given, the operation begins once those that entered the queue before it have ended.
    pub(crate) fn issue_in_steps<R: Send + 'static>(
        &self,
        op_record: &OpRecord<'_>,
        site: &'static Location<'static>,
        queue: Option<QueueKey>,
        first: Op<'static>,
        then: impl FnMut(Op<'static>) -> Result<Next<R>> + Send + 'static,
    ) -> Result<Work<R>> {
        let group = &self.group;
        group.sequencer().start(group.label())?;
        let (op_info, tickets, mut share) = group.begin_op(op_record, self.options(), site)?;
        // As in `run_on_worker`: the watchdog ends the operation, and the deadline only if the watchdog
        // cannot.
        share.deadline = Deadline::At(share.due + group.cleanup_time());
        let in_flight = InFlightOp::new(group.clone(), op_info, tickets);
        let steps = Steps::new(share, &in_flight, queue, first, then);
        in_flight.launched(steps.clone());
        group.watch().add_in_flight(in_flight.clone());
        steps.enter();
        Ok(Work::with_result(in_flight, move || steps.take()))
    }
}
