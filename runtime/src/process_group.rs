//! [`ProcessGroup`]: ranks that do things together, and the one place where an operation gets its
//! number.
//!
//! `submit` and `run` are the road of every operation: check, take the issue lock, give the sequence
//! number, record, hand to the backend, release the lock. What the operations are called is next door
//! (`collectives.rs`, `p2p.rs`); who looks after them when nobody waits is the watchdog.

use crate::backend::{AbortReason, Backend, Call, Done, Observer};
use crate::buffer::{Buffer, DeviceKind};
use crate::config::Config;
use crate::deadline::Deadline;
use crate::error::{Error, ErrorKind, Result};
use crate::op::Op;
use crate::watchdog::{Fault, Running, Watch};
use crate::work::{Flight, Tickets, Voyage, Work};
use crate::world::WorldShared;
use rcomm_recorder::model::{DType, OpType, Peer, ProcessGroupInfo, ProcessGroupStatus, Rank};
use rcomm_recorder::record::{
    FlightRecorder, GroupHandle, Operation, SignatureCache, SignatureKey, SignatureRef, Start,
    Tensor, Ticket,
};
use std::fmt;
use std::panic::Location;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::time::Duration;

/// Ranks that do things together.
///
/// A cheap handle: clones are the same group. All members must issue the same collectives in the same
/// order. Ranks in arguments are ranks of the group.
///
/// # Blocking
/// Methods named after an operation return when its result is there, or with an error at its time-out
/// at the latest. Methods ending in `_async` return at once with a [`Work`].
///
/// # Errors
/// An error that [`is_recoverable`](Error::is_recoverable) was found before anything was sent. Any
/// other has aborted the group on this rank: pending and later operations fail, and say why.
///
/// # Thread safety
/// Any thread may issue. Operations of one group happen in the order of issue, so threads that issue
/// collectives must agree on one on all ranks.
#[derive(Clone)]
pub struct ProcessGroup {
    pub(crate) group: Arc<Group>,
    /// What this handle's calls use in place of the group's time-out.
    timeout: Option<Duration>,
}

/// One backend of a group.
pub(crate) struct Lane {
    pub(crate) device: DeviceKind,
    pub(crate) backend: Arc<dyn Backend>,
}

/// How an operation is issued.
#[derive(Clone, Copy)]
struct Manner {
    lane: usize,
    timeout: Duration,
    site: &'static Location<'static>,
    start: Start,
}

/// What is counted under the issue lock.
#[derive(Default)]
struct Issue {
    collective_seq: u64,
    p2p_seq: u64,
    op_id: u64,
    /// One for each lane.
    turns: Vec<u64>,
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

impl Extension {
    /// What is left of it after this many collectives have ended.
    fn after(self, ended: u64) -> Self {
        if self.first != 0 && ended >= self.first {
            return Self::default();
        }
        self
    }
}

/// An operation that goes another way than [`Op`]s do, as it is recorded.
pub(crate) struct Noted<'a> {
    pub(crate) op: OpType,
    /// What carries it.
    pub(crate) backend: &'a str,
    /// The other end; `Peer::None` of what all members do together.
    pub(crate) peer: Peer,
    pub(crate) tensor: Option<Tensor<'a>>,
}

/// Which operation a group failed in, and with what.
struct Verdict {
    record_id: Option<u64>,
    error: Error,
}

/// The group itself, shared by its handles and by the operations under way.
pub(crate) struct Group {
    info: ProcessGroupInfo,
    group_rank: u32,
    wire_id: u64,
    lanes: Vec<Lane>,
    recorder: Arc<FlightRecorder>,
    handle: GroupHandle,
    watch: Arc<Watch>,
    world: Weak<WorldShared>,
    config: Arc<Config>,
    timeout_ms: AtomicU64,
    issue: Mutex<Issue>,
    /// Collectives that have ended.
    ended: AtomicU64,
    running: Running,
    /// Why it takes nothing more; set once.
    closed: OnceLock<Error>,
    verdict: Mutex<Option<Verdict>>,
    judged: Condvar,
}

/// What a group is made from.
pub(crate) struct GroupParts {
    pub(crate) info: ProcessGroupInfo,
    pub(crate) group_rank: u32,
    pub(crate) wire_id: u64,
    pub(crate) lanes: Vec<Lane>,
    pub(crate) timeout: Duration,
    pub(crate) world: Arc<WorldShared>,
}

impl Group {
    pub(crate) fn new(parts: GroupParts) -> Arc<Self> {
        let world = &parts.world;
        let handle = world.recorder.add_group(&parts.info, parts.timeout);
        let turns = vec![0; parts.lanes.len()];
        let group = Arc::new(Self {
            handle,
            recorder: world.recorder.clone(),
            watch: world.watch.clone(),
            config: world.config.clone(),
            world: Arc::downgrade(world),
            info: parts.info,
            group_rank: parts.group_rank,
            wire_id: parts.wire_id,
            lanes: parts.lanes,
            timeout_ms: AtomicU64::new(0),
            issue: Mutex::new(Issue {
                turns,
                ..Issue::default()
            }),
            ended: AtomicU64::new(0),
            running: Running::default(),
            closed: OnceLock::new(),
            verdict: Mutex::new(None),
            judged: Condvar::new(),
        });
        group.set_timeout(parts.timeout);
        group.watch.add_group(&group);
        group
    }

    pub(crate) fn info(&self) -> &ProcessGroupInfo {
        &self.info
    }

    pub(crate) fn size(&self) -> u32 {
        self.info.ranks.len() as u32
    }

    /// The backend of this name, if the group has it.
    pub(crate) fn backend(&self, name: &str) -> Option<&Arc<dyn Backend>> {
        let lane = self.lanes.iter().find(|lane| lane.backend.name() == name);
        lane.map(|lane| &lane.backend)
    }

    pub(crate) fn wire_id(&self) -> u64 {
        self.wire_id
    }

    pub(crate) fn recorder(&self) -> &FlightRecorder {
        &self.recorder
    }

    pub(crate) fn watch(&self) -> &Watch {
        &self.watch
    }

    pub(crate) fn running(&self) -> &Running {
        &self.running
    }

    pub(crate) fn world(&self) -> Result<Arc<WorldShared>> {
        self.world.upgrade().ok_or_else(|| {
            let gone = Error::new(ErrorKind::Closed, "the world was shut down");
            gone.in_group(self.label())
        })
    }

    pub(crate) fn status(&self) -> ProcessGroupStatus {
        self.recorder.status(self.handle)
    }

    pub(crate) fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms.load(Ordering::Relaxed))
    }

    fn set_timeout(&self, timeout: Duration) {
        let ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        self.timeout_ms.store(ms.max(1), Ordering::Relaxed);
    }

    /// What errors and logs call the group.
    pub(crate) fn label(&self) -> &str {
        match self.info.desc.as_str() {
            "" | "undefined" => &self.info.name,
            desc => desc,
        }
    }

    /// Why the group takes nothing more, if so.
    pub(crate) fn refusal(&self) -> Option<&Error> {
        self.closed.get()
    }

    /// Whether it has failed or was aborted, and everybody has been told why.
    pub(crate) fn is_judged(&self) -> bool {
        let verdict = self.verdict.lock();
        verdict.unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// How long after its deadline an operation may still be in clean-up.
    pub(crate) fn patience(&self) -> Duration {
        // The flag in the store, the others' answers, the dump, and then some.
        self.config.status_wait * 2 + Duration::from_secs(20)
    }

    /// A collective has ended.
    pub(crate) fn note_end(&self, is_p2p: bool) {
        if !is_p2p {
            self.ended.fetch_add(1, Ordering::Release);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Issue> {
        self.issue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check_open(&self, op: OpType) -> Result<()> {
        match self.closed.get() {
            None => Ok(()),
            Some(why) => Err(self.refuse(op, why)),
        }
    }

    #[cold]
    fn refuse(&self, op: OpType, why: &Error) -> Error {
        let message = match why.kind() {
            ErrorKind::Closed => why.to_string(),
            _ => format!("the group was aborted before: {why}"),
        };
        let kind = match why.kind() {
            ErrorKind::Closed => ErrorKind::Closed,
            _ => ErrorKind::Aborted,
        };
        Error::new(kind, message).in_group(self.label()).during(op)
    }

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
        timeout: Duration,
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
                timeout,
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
        self.note_end(voyage.is_p2p);
        self.running.leave(slot);
        result
    }

    /// Starts an operation.
    pub(crate) fn submit(
        self: &Arc<Self>,
        op: Op<'static>,
        timeout: Duration,
        site: &'static Location<'static>,
    ) -> Result<Arc<Flight>> {
        let lane = self.check(&op)?;
        let mut issue = self.lock();
        self.check_open(op.op_type())?;
        let manner = Manner {
            lane,
            timeout,
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
                self.note_end(voyage.is_p2p);
                Err(error)
            }
        }
    }

    /// Gives an operation its numbers and its record. Under the issue lock.
    fn number(&self, issue: &mut Issue, op: &Op<'_>, manner: Manner) -> (Call, Voyage, Tickets) {
        let is_p2p = op.is_p2p();
        let timeout = manner
            .timeout
            .saturating_add(self.extension(issue, !is_p2p));
        let manner = Manner { timeout, ..manner };
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
            timeout,
        };
        let call = Call {
            seq,
            turn,
            deadline: Deadline::In(timeout),
        };
        (call, voyage, Tickets { members, own })
    }

    /// How much more time the operation that is issued now has; one that `counts` is a collective of a
    /// backend. Under the issue lock.
    fn extension(&self, issue: &mut Issue, counts: bool) -> Duration {
        if issue.extension.extra.is_zero() {
            return Duration::ZERO;
        }
        issue.extension = issue.extension.after(self.ended.load(Ordering::Acquire));
        if counts && issue.extension.first == 0 && !issue.extension.extra.is_zero() {
            issue.extension.first = issue.turns.iter().sum::<u64>() + 1;
        }
        issue.extension.extra
    }

    fn record(&self, issue: &mut Issue, op: &Op<'_>, is_p2p: bool, manner: Manner) -> Ticket {
        let Manner {
            lane,
            timeout,
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

    /// Gives a number and a record to an operation that goes another way than [`Op`]s do.
    pub(crate) fn note(
        &self,
        noted: &Noted<'_>,
        timeout: Duration,
        site: &'static Location<'static>,
    ) -> Result<(Voyage, Tickets)> {
        let mut issue = self.lock();
        self.check_open(noted.op)?;
        let timeout = timeout.saturating_add(self.extension(&mut issue, false));
        let is_p2p = noted.peer != Peer::None;
        let seq = if is_p2p {
            issue.p2p_seq += 1;
            issue.p2p_seq
        } else {
            issue.collective_seq += 1;
            issue.collective_seq
        };
        issue.op_id += 1;
        let key = SignatureKey {
            backend: noted.backend,
            op_name: noted.op.name(),
            inputs: noted.tensor.as_slice(),
            ..SignatureKey::default()
        };
        let own = self.recorder.begin(&Operation {
            collective_seq_id: issue.collective_seq,
            p2p_seq_id: issue.p2p_seq,
            op_id: issue.op_id,
            is_p2p,
            peer: noted.peer,
            timeout,
            call_site: Some(site),
            ..Operation::new(self.handle, noted.op, SignatureRef::Key(&key))
        });
        drop(issue);
        self.recorder.started(own);
        let voyage = Voyage {
            record_id: own.record_id(),
            op: noted.op,
            seq,
            is_p2p,
            timeout,
        };
        let members = Vec::new();
        Ok((voyage, Tickets { members, own }))
    }

    /// Names group, operation and number in an error that does not yet.
    pub(crate) fn explain(&self, voyage: &Voyage, error: Error) -> Error {
        if error.group().is_some() {
            return error;
        }
        error.in_group(self.label()).at(voyage.op, voyage.seq)
    }

    /// The error that a failed operation's caller gets, after the group has been cleaned up.
    ///
    /// # Blocking
    /// Waits for the watchdog to make the dump, ask the others and abort; for `patience` at most.
    pub(crate) fn settle_error(&self, voyage: &Voyage, error: Error) -> Error {
        if error.is_recoverable() {
            return self.explain(voyage, error);
        }
        self.watch.report(Fault {
            wire_id: self.wire_id,
            voyage: *voyage,
            error: error.clone(),
        });
        let verdict = self.verdict.lock().unwrap_or_else(PoisonError::into_inner);
        let (verdict, _) = self
            .judged
            .wait_timeout_while(verdict, self.patience(), |verdict| verdict.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        match &*verdict {
            None => self.explain(voyage, error),
            Some(verdict) if verdict.record_id == Some(voyage.record_id) => verdict.error.clone(),
            Some(verdict) => Error::new(
                ErrorKind::Aborted,
                format!("given up with its group: {}", verdict.error),
            )
            .in_group(self.label())
            .at(voyage.op, voyage.seq),
        }
    }

    /// Ends everything pending and refuses everything later, with this error.
    pub(crate) fn close(&self, voyage: Option<&Voyage>, error: Error) {
        // The first reason is the one that counts.
        let _ = self.closed.set(error.clone());
        let mut verdict = self.verdict.lock().unwrap_or_else(PoisonError::into_inner);
        verdict.get_or_insert_with(|| Verdict {
            record_id: voyage.map(|voyage| voyage.record_id),
            error: error.clone(),
        });
        drop(verdict);
        let reason = AbortReason { error };
        for lane in &self.lanes {
            lane.backend.abort(&reason);
        }
        self.judged.notify_all();
        self.watch.wake();
    }

    /// Refuses what comes from now on, waits for what is pending, and closes the backends.
    pub(crate) fn shut_down(&self, deadline: Deadline) -> Result<()> {
        let closed = Error::new(ErrorKind::Closed, "the group was shut down");
        if self.closed.set(closed).is_err() {
            return Ok(());
        }
        // Whoever issues now has seen that it is closed, or is before us in the lock.
        drop(self.lock());
        for lane in &self.lanes {
            lane.backend
                .shutdown(deadline)
                .map_err(|error| error.in_group(self.label()))?;
        }
        Ok(())
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

impl ProcessGroup {
    pub(crate) fn over(group: Arc<Group>) -> Self {
        Self {
            group,
            timeout: None,
        }
    }

    /// The name, equal on all members.
    pub fn name(&self) -> &str {
        &self.group.info.name
    }

    /// What the group is for.
    pub fn desc(&self) -> &str {
        &self.group.info.desc
    }

    /// This process's rank in the group.
    pub fn rank(&self) -> u32 {
        self.group.group_rank
    }

    /// Ranks in the group.
    pub fn size(&self) -> u32 {
        self.group.size()
    }

    /// The members' ranks in the world, in the order of their ranks in the group.
    pub fn ranks(&self) -> &[Rank] {
        &self.group.info.ranks
    }

    /// A member's rank in the world, by its rank in the group.
    pub fn global_rank(&self, group_rank: u32) -> Option<Rank> {
        self.group.info.global_rank_of(group_rank)
    }

    /// A member's rank in the group, by its rank in the world.
    pub fn group_rank(&self, rank: Rank) -> Option<u32> {
        self.group.info.group_rank_of(rank)
    }

    /// The backend for this kind of device, if the group has one.
    pub fn backend(&self, device: DeviceKind) -> Option<&Arc<dyn Backend>> {
        let lane = self.group.lanes.iter().find(|lane| lane.device == device);
        lane.map(|lane| &lane.backend)
    }

    /// How far the group has come on this rank. Takes no lock.
    pub fn status(&self) -> ProcessGroupStatus {
        self.group.status()
    }

    /// How long an operation of this handle may take.
    pub fn timeout(&self) -> Duration {
        self.timeout.unwrap_or_else(|| self.group.timeout())
    }

    /// Sets the group's time-out for operations issued from now on, on this rank.
    pub fn set_timeout(&self, timeout: Duration) {
        self.group.set_timeout(timeout);
    }

    /// Gives the operations issued from now on this much more time, until the first collective among
    /// them has ended: for a step that is known to be slow, such as the first one. Adds up. Counts
    /// beside the time-out of the group or call, on this rank.
    pub fn extend_timeout(&self, extra: Duration) {
        let mut issue = self.group.lock();
        let left = issue
            .extension
            .after(self.group.ended.load(Ordering::Acquire));
        issue.extension = Extension {
            extra: left.extra.saturating_add(extra),
            ..left
        };
    }

    /// How much more time than its time-out the next operation has, by
    /// [`extend_timeout`](Self::extend_timeout).
    pub fn timeout_extension(&self) -> Duration {
        let extension = self.group.lock().extension;
        let ended = self.group.ended.load(Ordering::Acquire);
        extension.after(ended).extra
    }

    /// The same group with another time-out for what is called through the handle returned:
    /// `group.within(Duration::from_secs(5)).barrier()`.
    #[must_use]
    pub fn within(&self, timeout: Duration) -> Self {
        Self {
            group: self.group.clone(),
            timeout: Some(timeout),
        }
    }

    /// Why the group takes no more operations, if so.
    pub fn refusal(&self) -> Option<&Error> {
        self.group.refusal()
    }

    /// Makes everything pending fail soon, and everything later at once, with this reason.
    ///
    /// May be called from any thread, while others are stuck in the group. The other members notice
    /// by lost connections or their own time-outs.
    pub fn abort(&self, reason: &str) {
        let error = Error::new(
            ErrorKind::Aborted,
            format!("aborted by the program: {reason}"),
        );
        tracing::warn!(group = self.group.label(), reason, "group aborted");
        self.group.close(None, error.in_group(self.group.label()));
    }

    /// Waits for what is pending, then frees the group's connections. Later operations are refused.
    ///
    /// # Errors
    /// `Timeout` if something is still pending after the group's time-out; it can still be aborted.
    pub fn destroy(self) -> Result<()> {
        let timeout = self.timeout();
        self.group.shut_down(Deadline::In(timeout).started())
    }

    #[track_caller]
    pub(crate) fn run(&self, mut op: Op<'_>) -> Result<Done> {
        let site = Location::caller();
        self.group.run(&mut op, self.timeout(), site)
    }

    #[track_caller]
    pub(crate) fn submit<T>(
        &self,
        op: Op<'static>,
        unpack: impl FnOnce(Op<'static>, Done) -> Result<T> + Send + 'static,
    ) -> Result<Work<T>> {
        let site = Location::caller();
        let flight = self.group.submit(op, self.timeout(), site)?;
        Ok(Work::new(flight, unpack))
    }
}

impl fmt::Debug for ProcessGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessGroup")
            .field("name", &self.name())
            .field("desc", &self.desc())
            .field("rank", &self.rank())
            .field("ranks", &self.ranks())
            .finish()
    }
}
