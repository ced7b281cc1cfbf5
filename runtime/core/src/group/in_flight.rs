//! [`InFlightOp`]: an operation under way, for the backend and the watchdog.
//!
//! The first party that sees an operation end (its backend, a waiting caller, the watchdog on its rounds) settles it,
//! that is, stores the outcome. Without an error, the same party also records the end, wakes waiters and runs
//! callbacks. With an error, the watchdog does this. For an error that makes the group unusable it first makes the
//! dump, which then shows what was pending and not the state after the clean-up. Callers that wait see any other error
//! at once. An operation that the backend rejects is ended by the thread that issued it.

use crate::backend::{Done, Observer, Pending, Progress};
use crate::group::process_group::Group;
use crate::op::Op;
use crate::op::deadline::Deadline;
use crate::op::error::{Error, ErrorKind, Result};
use crate::op::info::{OpInfo, WorkStatus};
use crate::watch::wait_counters::{RuntimeWait, Waiting};
use crate::watch::watched::{WatchedGroup, WatchedOperation};
use rcomm_recorder::model::Frame;
use rcomm_recorder::record::{FlightRecorder, Ticket};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::task::Waker;
use std::time::{Duration, Instant};

/// The records of one operation: if it is a coalesced block, those of the operations in it; then its own.
pub(crate) struct Tickets {
    pub(crate) members: Vec<Ticket>,
    pub(crate) operation: Ticket,
}

impl Tickets {
    #[inline]
    fn for_each(&self, mut note: impl FnMut(Ticket)) {
        self.members.iter().for_each(|&member| note(member));
        note(self.operation);
    }

    pub(crate) fn started(&self, recorder: &FlightRecorder) {
        self.for_each(|ticket| recorder.started(ticket));
    }

    pub(crate) fn completed(&self, recorder: &FlightRecorder, done: Done) {
        let now = recorder.now();
        self.for_each(|ticket| match done.graph_id {
            None => recorder.completed_at(ticket, now, done.duration),
            Some(graph) => recorder.captured_at(ticket, now, graph),
        });
    }

    /// Records completion and the end of watching in one step. For operations outside of graphs only.
    #[inline]
    pub(crate) fn settled(&self, recorder: &FlightRecorder, duration: Option<Duration>) {
        let now = recorder.now();
        self.for_each(|ticket| recorder.completed_and_retired_at(ticket, now, duration));
    }

    pub(crate) fn failed(&self, recorder: &FlightRecorder) {
        self.for_each(|ticket| recorder.failed(ticket));
    }

    pub(crate) fn retired(&self, recorder: &FlightRecorder) {
        self.for_each(|ticket| recorder.retired(ticket));
    }
}

type Callback = Box<dyn FnOnce(&Result<Done>) + Send>;

/// Wakers and callbacks to run on completion.
#[derive(Default)]
pub(super) struct Waiters {
    pub(super) wakers: Vec<Waker>,
    pub(super) callbacks: Vec<Callback>,
}

/// An issued operation, shared by its caller, the backend and the watchdog.
pub(crate) struct InFlightOp {
    pub(crate) group: Arc<Group>,
    pub(crate) op_info: OpInfo,
    issued: Instant,
    tickets: Tickets,
    pub(super) pending: OnceLock<Arc<dyn Pending>>,
    started: AtomicBool,
    /// If the group times the operation: the time from the issue to the start plus one, in ns; 0 before.
    started_after: AtomicU64,
    outcome: OnceLock<Result<Done>>,
    /// The time from the issue until the end was first seen, in ns; 0 before.
    pub(super) elapsed: AtomicU64,
    waiters: Mutex<Waiters>,
}

impl InFlightOp {
    pub(crate) fn new(group: Arc<Group>, op_info: OpInfo, tickets: Tickets) -> Arc<Self> {
        Self::issued_at(Instant::now(), group, op_info, tickets)
    }

    /// Like [`new`](Self::new), for a caller that has read the clock.
    pub(crate) fn issued_at(
        issued: Instant,
        group: Arc<Group>,
        op_info: OpInfo,
        tickets: Tickets,
    ) -> Arc<Self> {
        group.pending().fetch_add(1, Ordering::Relaxed);
        Arc::new(Self {
            group,
            op_info,
            issued,
            tickets,
            pending: OnceLock::new(),
            started: AtomicBool::new(false),
            started_after: AtomicU64::new(0),
            outcome: OnceLock::new(),
            elapsed: AtomicU64::new(0),
            waiters: Mutex::new(Waiters::default()),
        })
    }

    /// Makes this the next operation of the same group. The caller has the only reference, and this operation has
    /// ended. Returns the backend's handle on the operation that has ended.
    pub(super) fn renew(
        &mut self,
        issued: Instant,
        op_info: OpInfo,
        tickets: Tickets,
    ) -> Option<Arc<dyn Pending>> {
        self.group.pending().fetch_add(1, Ordering::Relaxed);
        let former = self.pending.take();
        self.op_info = op_info;
        self.issued = issued;
        self.tickets = tickets;
        self.started = AtomicBool::new(false);
        self.started_after = AtomicU64::new(0);
        self.outcome = OnceLock::new();
        self.elapsed = AtomicU64::new(0);
        self.waiters = Mutex::default();
        former
    }

    /// Stores the backend's handle on the operation, which may have ended already.
    pub(crate) fn launched(&self, pending: Arc<dyn Pending>) {
        // Set once, by the issuing thread.
        let _ = self.pending.set(pending);
        self.poll_state();
    }

    /// Stores the error with which the backend has rejected the operation. The issuing thread handles it.
    pub(crate) fn rejected(&self, error: Error) {
        // Without a `Pending`, no other party can have settled it.
        if self.outcome.set(Err(error)).is_ok() {
            self.note_no_longer_pending();
        }
    }

    /// Records the start of the operation, once.
    fn note_start(&self) {
        if self.started.swap(true, Ordering::Relaxed) {
            return;
        }
        if self.op_info.is_timed {
            let after = nanoseconds(self.issued.elapsed());
            self.started_after
                .store(after.saturating_add(1), Ordering::Relaxed);
        }
        self.tickets.started(self.group.recorder());
    }

    /// Stores the outcome, unless another party has stored one; returns the state.
    fn settle(&self, mut outcome: Result<Done>) -> WorkStatus {
        let status = status_of(&outcome);
        let elapsed = nanoseconds(self.issued.elapsed());
        if let (Ok(done), after @ 1..) = (&mut outcome, self.started_after.load(Ordering::Relaxed))
        {
            let ran = Duration::from_nanos(elapsed.saturating_sub(after - 1));
            done.duration.get_or_insert(ran);
        }
        // Only the first party that sees the end sets this.
        let _ =
            self.elapsed
                .compare_exchange(0, elapsed.max(1), Ordering::Relaxed, Ordering::Relaxed);
        if self.outcome.set(outcome).is_err() {
            return self.outcome.get().map_or(status, status_of);
        }
        self.note_no_longer_pending();
        if let Some(Ok(done)) = self.outcome.get() {
            self.tickets.completed(self.group.recorder(), *done);
            self.group.note_outcome(&self.op_info, None);
            self.group.note_end(&self.op_info);
            self.notify_waiters();
        } else {
            self.group.watch().wake();
        }
        status
    }

    fn note_no_longer_pending(&self) {
        self.group.pending().fetch_sub(1, Ordering::Release);
    }

    /// Whether waiters may see the outcome. They see an error that makes the group unusable only once the
    /// group's error is decided.
    pub(super) fn is_announced(&self) -> bool {
        match self.outcome.get() {
            None => false,
            Some(Ok(_)) => true,
            Some(Err(error)) => error.is_recoverable() || self.group.has_failed(),
        }
    }

    /// Wakes the waiters and runs the callbacks, if the operation has ended. Each is called once.
    pub(super) fn notify_waiters(&self) {
        let Some(outcome) = self.outcome.get() else {
            return;
        };
        let explained;
        let outcome = match outcome {
            Ok(_) => outcome,
            Err(error) => {
                explained = Err(self.group.explain(&self.op_info, error.clone()));
                &explained
            }
        };
        let waiters = std::mem::take(&mut *self.waiters());
        for waker in waiters.wakers {
            waker.wake();
        }
        for callback in waiters.callbacks {
            callback(outcome);
        }
    }

    pub(super) fn waiters(&self) -> std::sync::MutexGuard<'_, Waiters> {
        self.waiters.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the operation with its buffers back from the backend, after it has ended without an error.
    pub(super) fn reclaim(&self) -> Result<Op<'static>> {
        let op = self.pending.get().and_then(|pending| pending.reclaim());
        op.ok_or_else(|| {
            let kept = Error::new(
                ErrorKind::Backend,
                "the backend kept the buffers of a completed operation",
            );
            self.group.explain(&self.op_info, kept)
        })
    }

    /// Counts a wait for the end until the returned value is dropped; `None` if the end was already seen.
    pub(super) fn begin_wait(&self) -> Option<Waiting<'_>> {
        let waits = self.group.watch().waits();
        let has_ended = self.outcome.get().is_some();
        (!has_ended).then(|| waits.begin(RuntimeWait::Work))
    }

    /// Waits for the end in the backend, until the deadline; returns the state.
    pub(super) fn wait(&self, deadline: Deadline) -> WorkStatus {
        if let Some(pending) = self.pending.get() {
            pending.wait(deadline);
        }
        self.poll_state()
    }
}

impl WatchedOperation for InFlightOp {
    fn op_info(&self) -> &OpInfo {
        &self.op_info
    }

    fn group(&self) -> &dyn WatchedGroup {
        &*self.group
    }

    fn poll_state(&self) -> WorkStatus {
        if let Some(outcome) = self.outcome.get() {
            return status_of(outcome);
        }
        match self.pending.get().map(|pending| pending.progress()) {
            None | Some(Progress::Queued) => WorkStatus::Queued,
            Some(Progress::Started) => {
                self.note_start();
                WorkStatus::Started
            }
            Some(Progress::Completed(done)) => self.settle(Ok(done)),
            Some(Progress::Failed(error)) => self.settle(Err(error)),
        }
    }

    fn outcome(&self) -> Option<&Result<Done>> {
        self.outcome.get()
    }

    fn due(&self) -> Instant {
        let due = self.issued.checked_add(self.op_info.timeout);
        due.unwrap_or_else(|| Deadline::In(self.op_info.timeout).start())
    }

    fn is_issued(&self) -> bool {
        self.pending.get().is_some() || self.outcome.get().is_some()
    }

    fn was_rejected(&self) -> bool {
        self.outcome.get().is_some() && self.pending.get().is_none()
    }

    fn announce_failure(&self) {
        self.tickets.failed(self.group.recorder());
        if let Some(Err(error)) = self.outcome.get() {
            self.group.note_outcome(&self.op_info, Some(error));
        }
        self.notify_waiters();
        self.group.note_end(&self.op_info);
    }

    fn retire(&self) {
        self.tickets.retired(self.group.recorder());
    }

    fn release(self: Arc<Self>) {
        let group = self.group.clone();
        drop(self);
        group.release();
    }
}

impl Observer for InFlightOp {
    fn started(&self) {
        // The operation runs on this thread, which belongs to the backend or has issued it. The recorder counts how
        // long such threads wait for a processor.
        self.group.recorder().note_thread();
        self.note_start();
    }

    fn ended(&self) {
        self.poll_state();
    }

    fn call_site(&self) -> Option<Frame> {
        self.group.recorder().call_site(self.tickets.operation)
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn status_of(outcome: &Result<Done>) -> WorkStatus {
    match outcome {
        Ok(_) => WorkStatus::Completed,
        Err(_) => WorkStatus::Failed,
    }
}
