//! Issues an operation that is a single [`Op`]: check, issue lock, sequence number, record, backend. A blocking call
//! releases the lock before the backend runs the operation, an asynchronous one after the backend has accepted it.

use super::group::Group;
use crate::backend::{Call, Done, Observer, Pending, Progress};
use crate::group::in_flight::{InFlightOp, Tickets};
use crate::group::spare::SpareOps;
use crate::op::Op;
use crate::op::buffer::Buffer;
use crate::op::deadline::Deadline;
use crate::op::error::{Error, ErrorKind, Result};
use crate::op::hints::Hints;
use crate::op::info::OpInfo;
use crate::watch::watched::{WatchedGroup, WatchedOperation};
use rcomm_recorder::model::{DType, Frame};
use rcomm_recorder::record::{
    CallSite, FlightRecorder, Operation, SignatureCache, SignatureId, SignatureKey, SignatureRef,
    Start, Tensor, Ticket,
};
use std::panic::Location;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The options that a handle passes with each of its calls.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CallOptions<'a> {
    pub(crate) timeout: Duration,
    pub(crate) hints: &'a Hints,
    /// The call site to record; `None` for the caller's line in Rust.
    pub(crate) site: Option<CallSite>,
}

impl CallOptions<'_> {
    /// The call site: `here` unless the handle has another one.
    #[inline]
    pub(crate) fn site(&self, here: &'static Location<'static>) -> CallSite {
        self.site.unwrap_or(CallSite::Location(here))
    }
}

/// The values that the records of an operation need in addition to the operation itself.
struct IssueParams {
    lane: usize,
    is_p2p: bool,
    timeout: Duration,
    site: CallSite,
    start: Start,
}

/// An operation's sequence number, and its position in the order of its lane's collectives (0 for messages).
struct SeqIds {
    seq: u64,
    turn: u64,
}

/// An operation that has its numbers and its records.
struct Admitted {
    tickets: Tickets,
    op_info: OpInfo,
    turn: u64,
}

/// The state that the issue lock protects.
#[derive(Default)]
pub(super) struct Issue {
    // Invariant 2 of docs/ARCHITECTURE.md: no other counter gives sequence numbers.
    pub(super) collective_seq: u64,
    pub(super) p2p_seq: u64,
    pub(super) op_id: u64,
    /// The last turn that was given in each lane: the number of its collectives so far.
    pub(super) turns: Vec<u64>,
    extension: Extension,
    signatures: SignatureCache,
    /// Space for the splits of one record: input, output.
    splits: [Vec<u64>; 2],
}

/// Additional time for the next operations, until the first collective that has it has ended.
#[derive(Clone, Copy, Debug, Default)]
struct Extension {
    extra: Duration,
    /// The number of the first collective that has the additional time, counted from 1 over all lanes; 0
    /// before one was issued.
    first: u64,
}

impl Issue {
    /// The counters of a new group with this many lanes.
    pub(super) fn new(lanes: usize) -> Self {
        Self {
            turns: vec![0; lanes],
            ..Self::default()
        }
    }

    /// The numbers of the next operation.
    #[inline]
    fn next(&mut self, lane: usize, is_p2p: bool) -> SeqIds {
        if is_p2p {
            self.p2p_seq += 1;
            return SeqIds {
                seq: self.p2p_seq,
                turn: 0,
            };
        }
        self.collective_seq += 1;
        let turn = &mut self.turns[lane];
        *turn += 1;
        SeqIds {
            seq: self.collective_seq,
            turn: *turn,
        }
    }
}

impl Extension {
    /// The additional time that is left after this many collectives have ended.
    fn after(self, ended: u64) -> Self {
        if self.first != 0 && ended >= self.first {
            return Self::default();
        }
        self
    }
}

impl Group {
    /// The lane that takes this operation's buffers; the first one if it has none.
    #[inline]
    fn lane_of(&self, op: &Op<'_>) -> Result<usize> {
        let Some(first) = op.any_buffer() else {
            return Ok(0);
        };
        let device = first.device().kind();
        let lane = self.lanes.iter().position(|lane| lane.device == device);
        lane.ok_or_else(|| no_lane_for(first))
    }

    /// Copies inputs that share memory with an output, checks the arguments, and returns the operation's lane.
    #[inline]
    fn check(&self, op: &mut Op<'_>) -> Result<usize> {
        let (own_rank, size) = (self.group_rank, self.size());
        let copied = op.copy_shared_inputs(own_rank, size);
        let checked = copied.and_then(|()| op.validate(own_rank, size));
        match checked.and_then(|()| self.lane_of(op)) {
            Ok(lane) => Ok(lane),
            Err(error) => Err(error.in_group(self.label())),
        }
    }

    /// Returns how long the backend expects an operation to take. The operation is not issued.
    pub(super) fn estimate(&self, op: &Op<'_>, deadline: Deadline) -> Result<Duration> {
        let checked = op.validate(self.group_rank, self.size());
        let lane = checked.and_then(|()| self.lane_of(op));
        let lane = lane.map_err(|error| error.in_group(self.label()))?;
        self.check_open(op.op_type())?;
        let estimated = self.lanes[lane].backend.estimate(op, deadline);
        estimated.map_err(|error| error.during(op.op_type()).in_group(self.label()))
    }

    /// Runs an operation on the caller's thread.
    ///
    /// The values built here are passed by reference and not copied: a copy would read with wide loads what was just
    /// written in parts, which defeats the processor's store forwarding.
    pub(crate) fn run(
        &self,
        op: &mut Op<'_>,
        options: CallOptions<'_>,
        site: &'static Location<'static>,
    ) -> Result<Done> {
        let lane = self.check(op)?;
        let is_p2p = op.is_p2p();
        // Invariant 3 of docs/ARCHITECTURE.md: one lock is held from the number to the record. The turn
        // orders what runs after the lock was released.
        let mut issue = self.lock();
        self.check_open(op.op_type())?;
        // A message waits for no turn. A collective has its turn at once if no other of its lane is pending.
        let start = if is_p2p || self.ended_in(lane) == issue.turns[lane] {
            Start::AtOnce
        } else {
            Start::InTurn
        };
        if is_p2p {
            op.deliver_to_self(self.group_rank)?;
        }
        let Admitted {
            tickets,
            op_info,
            turn,
        } = self.admit(&mut issue, op, lane, start, options, site);
        self.note_begin(&op_info);
        let slot = self.running.enter(&op_info);
        drop(issue);
        let call = Call {
            seq: op_info.seq,
            turn,
            deadline: Deadline::In(op_info.timeout),
            hints: options.hints.clone(),
        };
        let observer = StartObserver {
            recorder: &self.recorder,
            tickets: &tickets,
            began: op_info.is_timed.then(Instant::now),
            waited: AtomicU64::new(0),
        };
        let mut result = self.lanes[lane].backend.run(op, call, &observer);
        if let (Ok(done), Some(run_time)) = (&mut result, observer.run_time()) {
            done.duration.get_or_insert(run_time);
        }
        match &mut result {
            Ok(done) => tickets.settled(&self.recorder, done.duration),
            Err(error) => {
                *error = self.settle_error(&op_info, error.clone());
                tickets.failed(&self.recorder);
                tickets.retired(&self.recorder);
            }
        }
        self.note_outcome(&op_info, result.as_ref().err());
        self.note_end(&op_info);
        self.running.leave(slot);
        result
    }

    /// Starts an operation, and returns its handle. `spare` holds ended operations, whose memory may be used.
    ///
    /// # Blocking
    /// Only as invariant 3 allows, or until the watchdog has aborted the group that a rejection by the backend ends.
    pub(crate) fn submit(
        self: &Arc<Self>,
        mut op: Op<'static>,
        options: CallOptions<'_>,
        site: &'static Location<'static>,
        spare: Option<&mut SpareOps>,
    ) -> Result<Arc<InFlightOp>> {
        let lane = self.check(&mut op)?;
        // Invariant 3 of docs/ARCHITECTURE.md: one lock is held from the number until the backend has accepted the
        // operation. No backend waits for a peer meanwhile, except in the case named there.
        let mut issue = self.lock();
        self.check_open(op.op_type())?;
        op.deliver_to_self(self.group_rank)?;
        let Admitted {
            tickets,
            op_info,
            turn,
        } = self.admit(&mut issue, &op, lane, Start::InTurn, options, site);
        self.note_begin(&op_info);
        // A backend that ends an overdue operation itself can name the ranks that it waited for. Otherwise
        // the watchdog ends the operation, after the dump, and the backend does so only if the watchdog
        // cannot.
        let grace = match self.lanes[lane].backend.ends_overdue_within() {
            Duration::ZERO => self.cleanup_time(),
            _ => Duration::ZERO,
        };
        let issued = Instant::now();
        let deadline = Deadline::In(op_info.timeout.saturating_add(grace)).started_at(issued);
        let call = Call {
            seq: op_info.seq,
            turn,
            deadline,
            hints: options.hints.clone(),
        };
        let (in_flight, former) = match spare {
            Some(spare) => spare.issued_at(issued, self, op_info, tickets),
            None => {
                let new = InFlightOp::issued_at(issued, self.clone(), op_info, tickets);
                (new, None)
            }
        };
        // Added before the call, so that a call that does not return is found overdue as well.
        self.watch.add_in_flight(in_flight.clone());
        let (backend, observer) = (&self.lanes[lane].backend, in_flight.clone());
        let pending = match former {
            Some(former) => backend.issue_again(op, call, observer, former),
            None => backend.issue(op, call, observer),
        };
        match pending {
            Ok(pending) => {
                in_flight.launched(pending);
                Ok(in_flight)
            }
            Err(error) => {
                drop(issue);
                in_flight.rejected(error.clone());
                let error = self.settle_error(&op_info, error);
                in_flight.announce_failure();
                in_flight.retire();
                Err(error)
            }
        }
    }

    /// Returns the handle of a block without operations. The block has ended, and has no number and no record, since
    /// nothing is exchanged.
    ///
    /// # Errors
    /// Those of [`check_open`](Self::check_open).
    pub(super) fn submit_nothing(
        self: &Arc<Self>,
        op: Op<'static>,
        options: CallOptions<'_>,
    ) -> Result<Arc<InFlightOp>> {
        self.check_open(op.op_type())?;
        let op_info = OpInfo {
            record_id: 0,
            op: op.op_type(),
            seq: 0,
            is_p2p: true,
            turn_lane: None,
            ends_itself: false,
            is_timed: false,
            timeout: options.timeout,
        };
        // No record has the number 0.
        let tickets = Tickets {
            members: Vec::new(),
            operation: Ticket::of_words([0; 3]),
        };
        let in_flight = InFlightOp::new(self.clone(), op_info, tickets);
        in_flight.launched(Arc::new(EndedAtOnce(Mutex::new(Some(op)))));
        Ok(in_flight)
    }

    /// Gives an operation its numbers and its time-out, and records it. The caller holds the issue lock.
    #[inline(always)]
    fn admit(
        &self,
        issue: &mut Issue,
        op: &Op<'_>,
        lane: usize,
        start: Start,
        options: CallOptions<'_>,
        site: &'static Location<'static>,
    ) -> Admitted {
        let is_p2p = op.is_p2p();
        let extension = self.extension(issue, !is_p2p);
        let params = IssueParams {
            lane,
            is_p2p,
            timeout: options.timeout.saturating_add(extension),
            site: options.site(site),
            start,
        };
        let SeqIds { seq, turn } = issue.next(lane, is_p2p);
        self.issued.store(issue.collective_seq, Ordering::Relaxed);
        let tickets = self.record_all(issue, op, &params);
        let op_info = OpInfo {
            record_id: tickets.operation.record_id(),
            op: op.op_type(),
            seq,
            is_p2p,
            turn_lane: (!is_p2p).then_some(lane),
            ends_itself: false,
            is_timed: self.is_timed() && self.lanes[lane].backend.runs_on_host(),
            timeout: params.timeout,
        };
        Admitted {
            tickets,
            op_info,
            turn,
        }
    }

    /// Records an operation, and first its members if it is a coalesced block. The caller holds the issue
    /// lock.
    #[inline(always)]
    fn record_all(&self, issue: &mut Issue, op: &Op<'_>, params: &IssueParams) -> Tickets {
        let members = if let Op::Coalesced(ops) = op {
            self.record_members(issue, ops, params)
        } else {
            Vec::new()
        };
        let operation = self.record(issue, op, params);
        Tickets { members, operation }
    }

    #[cold]
    fn record_members(
        &self,
        issue: &mut Issue,
        ops: &[Op<'_>],
        params: &IssueParams,
    ) -> Vec<Ticket> {
        let members = ops.iter().map(|op| self.record(issue, op, params));
        members.collect()
    }

    /// The additional time of the operation that is issued now; `is_collective` is true of a block of collectives, too.
    /// The extension ends once the first such operation has ended. The caller holds the issue lock.
    #[inline]
    pub(super) fn extension(&self, issue: &mut Issue, is_collective: bool) -> Duration {
        if issue.extension.extra.is_zero() {
            return Duration::ZERO;
        }
        self.use_extension(issue, is_collective)
    }

    #[cold]
    fn use_extension(&self, issue: &mut Issue, is_collective: bool) -> Duration {
        issue.extension = issue.extension.after(self.ended());
        if is_collective && issue.extension.first == 0 && !issue.extension.extra.is_zero() {
            issue.extension.first = issue.turns.iter().sum::<u64>() + 1;
        }
        issue.extension.extra
    }

    /// Adds `extra` to the time-out of operations issued from now on, until the first collective that has additional
    /// time has ended.
    pub(super) fn extend_timeout(&self, extra: Duration) {
        let mut issue = self.lock();
        let left = issue.extension.after(self.ended());
        issue.extension = Extension {
            extra: left.extra.saturating_add(extra),
            ..left
        };
    }

    /// How much longer than its time-out the next operation may take.
    pub(super) fn timeout_extension(&self) -> Duration {
        let extension = self.lock().extension;
        extension.after(self.ended()).extra
    }

    #[inline(always)]
    fn record(&self, issue: &mut Issue, op: &Op<'_>, params: &IssueParams) -> Ticket {
        issue.op_id += 1;
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
        let (backend, kind) = (self.lanes[params.lane].backend.name(), op.op_type());
        let inputs = op.inputs().iter().map(tensor_of);
        let outputs = op.outputs().iter().map(tensor_of);
        let signature = match signatures.find(backend, kind, inputs, outputs) {
            Some(id) => Some(id),
            None => self.intern(signatures, backend, op),
        };
        match signature {
            Some(id) => self.begin(issue, op, params, SignatureRef::Id(id)),
            None => self.begin_with_key(issue, op, params, backend),
        }
    }

    /// Records an operation whose signature does not fit in the recorder's table: the record itself holds it.
    #[cold]
    fn begin_with_key(
        &self,
        issue: &Issue,
        op: &Op<'_>,
        params: &IssueParams,
        backend: &'static str,
    ) -> Ticket {
        with_signature(backend, op, |key| {
            self.begin(issue, op, params, SignatureRef::Key(key))
        })
    }

    #[inline(always)]
    fn begin(
        &self,
        issue: &Issue,
        op: &Op<'_>,
        params: &IssueParams,
        signature: SignatureRef<'_>,
    ) -> Ticket {
        self.recorder.begin(&Operation {
            collective_seq_id: issue.collective_seq,
            p2p_seq_id: issue.p2p_seq,
            op_id: issue.op_id,
            is_p2p: params.is_p2p,
            peer: op.peer(),
            root: op.root(),
            reduce_op: op.reduction().map(|reduction| reduction.op),
            input_splits: &issue.splits[0],
            output_splits: &issue.splits[1],
            timeout: params.timeout,
            call_site: Some(params.site),
            start: params.start,
            ..Operation::new(self.handle, op.op_type(), signature)
        })
    }

    /// Interns a signature that the cache does not hold; `None` if the recorder's table is full.
    #[cold]
    fn intern(
        &self,
        signatures: &mut SignatureCache,
        backend: &'static str,
        op: &Op<'_>,
    ) -> Option<SignatureId> {
        with_signature(backend, op, |key| {
            let id = self.recorder.intern(key)?;
            signatures.keep(backend, op.op_type(), key, id);
            Some(id)
        })
    }
}

#[cold]
fn no_lane_for(buffer: &Buffer<'_>) -> Error {
    let device = buffer.device().kind();
    Error::new(
        ErrorKind::Unsupported,
        format!("{buffer:?}: the group has no backend for {device} memory"),
    )
}

/// The backend's handle of an operation that has ended at once, since there was nothing to do.
struct EndedAtOnce(Mutex<Option<Op<'static>>>);

impl Pending for EndedAtOnce {
    fn progress(&self) -> Progress {
        Progress::Completed(Done::default())
    }

    fn wait(&self, _: Deadline) -> Progress {
        self.progress()
    }

    fn reclaim(&self) -> Option<Op<'static>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Records the start of a blocking operation that had to wait for its turn.
struct StartObserver<'a> {
    recorder: &'a FlightRecorder,
    tickets: &'a Tickets,
    /// When the operation was passed to the backend, if the group times its operations.
    began: Option<Instant>,
    /// How long it waited for its turn from then on, in ns.
    waited: AtomicU64,
}

impl StartObserver<'_> {
    /// How long the operation has run, if the group times its operations.
    #[inline]
    fn run_time(&self) -> Option<Duration> {
        let waited = Duration::from_nanos(self.waited.load(Ordering::Relaxed));
        Some(self.began?.elapsed().saturating_sub(waited))
    }
}

impl Observer for StartObserver<'_> {
    fn started(&self) {
        if let Some(began) = self.began {
            let waited = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
            self.waited.store(waited, Ordering::Relaxed);
        }
        self.tickets.started(self.recorder);
    }

    fn ended(&self) {}

    fn call_site(&self) -> Option<Frame> {
        self.recorder.call_site(self.tickets.operation)
    }
}

#[inline]
fn tensor_of<'b>(buffer: &'b Buffer<'_>) -> Tensor<'b> {
    Tensor {
        dtype: buffer.dtype(),
        shape: buffer.shape(),
    }
}

/// Calls `then` with the operation's signature. Allocates only for more than four inputs or outputs.
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
