//! The state that the handles of a group share, and the end of a group: by a failure, an abort, or a
//! shutdown.

use super::issue::Issue;
use super::steps::StepSequencer;
use super::worker::Worker;
use crate::backend::{AbortReason, Backend, CommState};
use crate::config::Config;
use crate::group::hook::{HookedOperation, OperationHook};
use crate::group::maker::GroupMaker;
use crate::op::buffer::DeviceKind;
use crate::op::deadline::Deadline;
use crate::op::error::{Error, ErrorKind, Result};
use crate::op::hints::Hints;
use crate::op::info::OpInfo;
use crate::watch::running::Running;
use crate::watch::watchdog::{Fault, Watch};
use crate::watch::watched::WatchedGroup;
use rcomm_recorder::model::{FailedOperation, OpType, ProcessGroupInfo, ProcessGroupStatus, Rank};
use rcomm_recorder::record::{FlightRecorder, GroupHandle};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::time::Duration;

/// One backend of a group, and the kind of memory that it takes. The collectives of each lane have their own
/// order.
pub(crate) struct Lane {
    pub(crate) device: DeviceKind,
    pub(crate) backend: Arc<dyn Backend>,
}

/// Whether a group measures how long its operations run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Timing {
    /// It does not.
    #[default]
    Off,
    /// It does: `duration` of a [`Work`](crate::Work), and `duration_ms` in records.
    On,
}

/// The error with which a group failed or was aborted.
struct GroupFailure {
    /// The record of the operation that failed; `None` if the group was aborted for another reason.
    record_id: Option<u64>,
    error: Error,
}

/// The group itself, shared by its handles and by the operations under way.
pub(crate) struct Group {
    pub(super) info: ProcessGroupInfo,
    pub(super) group_rank: u32,
    pub(super) wire_id: u64,
    pub(super) lanes: Vec<Lane>,
    pub(super) recorder: Arc<FlightRecorder>,
    /// The group in the recorder.
    pub(super) handle: GroupHandle,
    pub(super) watch: Arc<Watch>,
    /// The world that made the group.
    maker: Weak<dyn GroupMaker>,
    config: Arc<Config>,
    /// The hints with which the group was made.
    pub(super) hints: Hints,
    timeout_ms: AtomicU64,
    /// Whether the group measures how long its operations run.
    timing: AtomicBool,
    pub(super) issue: Mutex<Issue>,
    /// The number of the last collective that was issued, for readers without the issue lock.
    pub(super) issued: AtomicU64,
    /// How many turns have ended in each lane.
    ended: Box<[AtomicU64]>,
    worker: Worker,
    sequencer: StepSequencer,
    /// The blocking calls in flight.
    pub(super) running: Running,
    /// Whether the ring holds the number of the group's communicator.
    communicator_recorded: AtomicBool,
    /// Whether the ring holds the end of the group.
    end_recorded: AtomicBool,
    /// The error that refuses later operations; set once.
    closed: OnceLock<Error>,
    failure: Mutex<Option<GroupFailure>>,
    /// Notified once `failure` is set.
    failure_set: Condvar,
    /// The program's hook, if it has set one.
    pub(crate) hook: OnceLock<Arc<dyn OperationHook>>,
    /// The number of operations with a `Work` that have not ended.
    pending: AtomicU64,
    /// How often this rank has begun to shrink the group, and to search for absent members.
    pub(crate) agreements: Agreements,
}

/// How many agreements of each kind this rank has begun in a group.
#[derive(Default)]
pub(crate) struct Agreements {
    pub(crate) shrinks: AtomicI64,
    pub(crate) searches: AtomicI64,
}

/// The parts that a group is made from.
pub(crate) struct GroupParts {
    pub(crate) info: ProcessGroupInfo,
    pub(crate) group_rank: u32,
    pub(crate) wire_id: u64,
    pub(crate) lanes: Vec<Lane>,
    pub(crate) timeout: Duration,
    pub(crate) recorder: Arc<FlightRecorder>,
    pub(crate) watch: Arc<Watch>,
    pub(crate) config: Arc<Config>,
    pub(crate) maker: Weak<dyn GroupMaker>,
    pub(crate) hints: Hints,
}

impl Group {
    pub(crate) fn new(parts: GroupParts) -> Arc<Self> {
        let handle = parts.recorder.add_group(&parts.info, parts.timeout);
        let issue = Issue::new(parts.lanes.len());
        let ended = parts.lanes.iter().map(|_| AtomicU64::new(0)).collect();
        let group = Arc::new(Self {
            handle,
            recorder: parts.recorder,
            watch: parts.watch,
            config: parts.config,
            maker: parts.maker,
            info: parts.info,
            hints: parts.hints,
            group_rank: parts.group_rank,
            wire_id: parts.wire_id,
            lanes: parts.lanes,
            timeout_ms: AtomicU64::new(0),
            timing: AtomicBool::new(false),
            issue: Mutex::new(issue),
            issued: AtomicU64::new(0),
            ended,
            worker: Worker::new("worker"),
            sequencer: StepSequencer::new(),
            running: Running::default(),
            communicator_recorded: AtomicBool::new(false),
            end_recorded: AtomicBool::new(false),
            closed: OnceLock::new(),
            failure: Mutex::new(None),
            failure_set: Condvar::new(),
            hook: OnceLock::new(),
            pending: AtomicU64::new(0),
            agreements: Agreements::default(),
        });
        group.set_timeout(parts.timeout);
        group.note_communicator();
        let watched: Weak<dyn WatchedGroup> = Arc::<Self>::downgrade(&group);
        group.watch.add_group(watched);
        group
    }

    pub(crate) fn size(&self) -> u32 {
        self.info.ranks.len() as u32
    }

    /// The backend of this name, if the group has it.
    pub(crate) fn backend(&self, name: &str) -> Option<&Arc<dyn Backend>> {
        let lane = self.lanes.iter().find(|lane| lane.backend.name() == name);
        lane.map(|lane| &lane.backend)
    }

    pub(crate) fn recorder(&self) -> &FlightRecorder {
        &self.recorder
    }

    pub(crate) fn watch(&self) -> &Watch {
        &self.watch
    }

    /// The world that made the group, to make further groups.
    ///
    /// # Errors
    /// `Closed` once the world was shut down or dropped.
    pub(crate) fn maker(&self) -> Result<Arc<dyn GroupMaker>> {
        self.maker.upgrade().ok_or_else(|| {
            let error = Error::new(ErrorKind::Closed, "the world was shut down");
            error.in_group(self.label())
        })
    }

    pub(crate) fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms.load(Ordering::Relaxed))
    }

    pub(super) fn set_timeout(&self, timeout: Duration) {
        let ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
        self.timeout_ms.store(ms.max(1), Ordering::Relaxed);
        self.recorder.set_group_timeout(self.handle, timeout);
    }

    #[inline]
    pub(crate) fn is_timed(&self) -> bool {
        self.timing.load(Ordering::Relaxed)
    }

    pub(super) fn set_timing(&self, timing: Timing) -> Result<()> {
        let is_on = timing == Timing::On;
        let untimed = self.lanes.iter().find(|lane| !lane.backend.can_be_timed());
        if let (Some(lane), true) = (untimed, is_on) {
            let name = lane.backend.name();
            let message = format!(
                "the backend {name} does not run its operations on the host's threads, so the group cannot time them"
            );
            return Err(Error::new(ErrorKind::Unsupported, message).in_group(self.label()));
        }
        for lane in &self.lanes {
            lane.backend.set_timing(is_on);
        }
        self.timing.store(is_on, Ordering::Relaxed);
        Ok(())
    }

    /// The error with which the group has failed or was aborted; `None` if neither.
    pub(crate) fn group_error(&self) -> Option<Error> {
        let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.as_ref().map(|failure| failure.error.clone())
    }

    /// The longest time that the clean-up of an operation takes after its deadline.
    pub(crate) fn cleanup_time(&self) -> Duration {
        // Time for the flag in the store, the status exchange, the dump, and a margin.
        self.config.status_wait * 2 + Duration::from_secs(20)
    }

    /// The thread that runs the group's queued jobs.
    pub(super) fn worker(&self) -> &Worker {
        &self.worker
    }

    /// The thread and the queues of the group's operations that consist of steps.
    pub(super) fn sequencer(&self) -> &StepSequencer {
        &self.sequencer
    }

    /// The number of operations with a `Work` that have not ended.
    pub(crate) fn pending(&self) -> &AtomicU64 {
        &self.pending
    }

    /// Calls the program's hook for an operation that begins.
    #[inline]
    pub(crate) fn note_begin(&self, op_info: &OpInfo) {
        if let Some(hook) = self.hook.get() {
            hook.begun(&self.hooked(op_info));
        }
    }

    /// Calls the program's hook for an operation that has ended.
    #[inline]
    pub(crate) fn note_outcome(&self, op_info: &OpInfo, error: Option<&Error>) {
        // A block without operations has no record, and did not begin.
        if let Some(hook) = self.hook.get()
            && op_info.record_id != 0
        {
            hook.ended(&self.hooked(op_info), error);
        }
    }

    #[cold]
    fn hooked(&self, op_info: &OpInfo) -> HookedOperation<'_> {
        HookedOperation {
            group: &self.info.name,
            op: op_info.op,
            seq: op_info.seq,
            is_p2p: op_info.is_p2p,
            record_id: op_info.record_id,
            timeout: op_info.timeout,
        }
    }

    /// Counts an operation that has ended, if it took a turn.
    pub(crate) fn note_end(&self, op_info: &OpInfo) {
        if let Some(lane) = op_info.turn_lane {
            self.note_turn(lane);
        }
    }

    /// Counts a turn that has ended.
    pub(super) fn note_turn(&self, lane: usize) {
        self.ended[lane].fetch_add(1, Ordering::Release);
    }

    /// How many turns of a lane have ended.
    pub(super) fn ended_in(&self, lane: usize) -> u64 {
        self.ended[lane].load(Ordering::Acquire)
    }

    /// How many turns have ended in all lanes.
    pub(super) fn ended(&self) -> u64 {
        (0..self.ended.len()).map(|lane| self.ended_in(lane)).sum()
    }

    pub(super) fn lock(&self) -> std::sync::MutexGuard<'_, Issue> {
        self.issue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses an operation once the group takes no more.
    ///
    /// # Errors
    /// `Closed` after a shutdown, `Aborted` after an abort or a failure.
    pub(super) fn check_open(&self, op: OpType) -> Result<()> {
        match self.closed.get() {
            None => Ok(()),
            Some(reason) => Err(self.refuse(op, reason)),
        }
    }

    /// The error of an operation on a group that takes no more.
    #[cold]
    fn refuse(&self, op: OpType, reason: &Error) -> Error {
        let message = match reason.kind() {
            ErrorKind::Closed => reason.to_string(),
            _ => format!("the group was aborted before: {reason}"),
        };
        let kind = match reason.kind() {
            ErrorKind::Closed => ErrorKind::Closed,
            _ => ErrorKind::Aborted,
        };
        Error::new(kind, message).in_group(self.label()).during(op)
    }

    /// Handles the error of a failed operation, and returns the error for its caller. An error that leaves the group
    /// usable is recorded if it is a failure; any other is reported to the watchdog, which aborts the group.
    ///
    /// # Blocking
    /// After an error that is reported: until the watchdog has made the dump, read the other ranks' status and aborted
    /// the group, for at most `cleanup_time`.
    pub(crate) fn settle_error(&self, op_info: &OpInfo, error: Error) -> Error {
        if error.is_recoverable() {
            self.record_failure(Some(op_info), &error);
            return self.explain(op_info, error);
        }
        self.watch.report(Fault {
            wire_id: self.wire_id,
            op_info: *op_info,
            error: error.clone(),
        });
        let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        let (failure, _) = self
            .failure_set
            .wait_timeout_while(failure, self.cleanup_time(), |failure| failure.is_none())
            .unwrap_or_else(PoisonError::into_inner);
        match &*failure {
            None => self.explain(op_info, error),
            Some(failure) if failure.record_id == Some(op_info.record_id) => failure.error.clone(),
            Some(failure) => Error::new(
                ErrorKind::Aborted,
                format!("ended because its group failed: {}", failure.error),
            )
            .with_ranks(failure.error.ranks())
            .in_group(self.label())
            .at(op_info.op, op_info.seq),
        }
    }

    /// Records an error in the ring, unless it is no failure.
    fn record_failure(&self, op_info: Option<&OpInfo>, error: &Error) {
        // These are not failures: the group was shut down or the world dropped, or an argument was refused
        // before anything was sent.
        let is_no_failure = matches!(
            error.kind(),
            ErrorKind::Closed | ErrorKind::InvalidArgument | ErrorKind::Unsupported
        );
        if is_no_failure {
            return;
        }
        let mut failure = error.failure(self.global_rank());
        failure.group = Some(self.info.id);
        failure.operation = op_info.map(|op_info| FailedOperation {
            op: op_info.op,
            seq: op_info.seq,
            is_p2p: op_info.is_p2p,
            record_id: op_info.record_id,
        });
        self.recorder.note_failure(&failure);
    }
}

impl WatchedGroup for Group {
    fn info(&self) -> &ProcessGroupInfo {
        &self.info
    }

    fn wire_id(&self) -> u64 {
        self.wire_id
    }

    fn label(&self) -> &str {
        match self.info.desc.as_str() {
            "" | "undefined" => &self.info.name,
            desc => desc,
        }
    }

    fn global_rank(&self) -> Rank {
        let rank = self.info.global_rank_of(self.group_rank);
        rank.unwrap_or(self.group_rank)
    }

    fn status(&self) -> ProcessGroupStatus {
        let mut status = self.recorder.status(self.handle);
        // The ring of a rank that has made many groups may have no row for this one.
        if let Ok(issued @ 1..) = i64::try_from(self.issued.load(Ordering::Relaxed)) {
            status.last_enqueued = status.last_enqueued.max(issued);
        }
        status
    }

    fn comm_state(&self) -> Vec<CommState> {
        let lanes = self.lanes.iter();
        lanes.flat_map(|lane| lane.backend.comm_state()).collect()
    }

    fn note_communicator(&self) {
        if self.communicator_recorded.load(Ordering::Relaxed) {
            return;
        }
        let mut lanes = self.lanes.iter();
        if let Some(number) = lanes.find_map(|lane| lane.backend.communicator()) {
            self.recorder.set_communicator(self.handle, number);
            self.communicator_recorded.store(true, Ordering::Relaxed);
        }
    }

    fn running(&self) -> &Running {
        &self.running
    }

    fn overdue_time(&self) -> Duration {
        let lanes = self.lanes.iter();
        let longest = lanes.map(|lane| lane.backend.ends_overdue_within()).max();
        longest.unwrap_or_default()
    }

    fn has_failed(&self) -> bool {
        let failure = self.failure.lock();
        failure.unwrap_or_else(PoisonError::into_inner).is_some()
    }

    fn refusal(&self) -> Option<&Error> {
        self.closed.get()
    }

    fn explain(&self, op_info: &OpInfo, error: Error) -> Error {
        if error.group().is_some() {
            return error;
        }
        error.in_group(self.label()).at(op_info.op, op_info.seq)
    }

    fn record_end(&self, op_info: Option<&OpInfo>, error: &Error) {
        if !self.end_recorded.swap(true, Ordering::Relaxed) {
            self.record_failure(op_info, error);
        }
    }

    fn close(&self, op_info: Option<&OpInfo>, error: Error) {
        self.record_end(op_info, &error);
        // Only the first reason is kept.
        let _ = self.closed.set(error.clone());
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.get_or_insert_with(|| GroupFailure {
            record_id: op_info.map(|op_info| op_info.record_id),
            error: error.clone(),
        });
        drop(failure);
        let reason = AbortReason {
            error,
            timeout: Some(self.timeout()),
        };
        for lane in &self.lanes {
            lane.backend.abort(&reason);
        }
        self.failure_set.notify_all();
        self.watch.wake();
    }

    fn failed_elsewhere(&self) {
        for lane in &self.lanes {
            lane.backend.failed_elsewhere();
        }
    }

    fn shut_down(&self, deadline: Deadline) -> Result<()> {
        let closed = Error::new(ErrorKind::Closed, "the group was shut down");
        if self.closed.set(closed).is_err() {
            return Ok(());
        }
        // Waits for a call that is issuing an operation; later calls find the group closed.
        drop(self.lock());
        let deadline = deadline.started();
        if !self.worker.drain(deadline) || !self.sequencer.drain(deadline) {
            let message = "operations on objects, sparse tensors or windows, or monitored barriers, have not ended";
            return Err(Error::new(ErrorKind::Timeout, message).in_group(self.label()));
        }
        for lane in &self.lanes {
            lane.backend
                .shutdown(deadline)
                .map_err(|error| error.in_group(self.label()))?;
        }
        Ok(())
    }

    fn ends_process(&self) -> bool {
        self.lanes.iter().any(|lane| lane.backend.ends_process())
    }

    fn release(self: Arc<Self>) {
        if let Some(group) = Arc::into_inner(self) {
            let watch = group.watch.clone();
            watch.drop_elsewhere(Box::new(group));
        }
    }
}
