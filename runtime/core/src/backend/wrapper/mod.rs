//! [`Wrapper`]: before each collective, all ranks compare over a side group what they are about to do.
//!
//! The side group is a second backend with the same members. It runs one small `all_gather` for each collective. Each
//! rank sends a statement that describes its collective. Only if all statements agree, and none reports a NaN, is the
//! collective passed to the wrapped backend. So if ranks disagree, all of them get an error that names those that
//! differ and what each of them issued, whatever the wrapped backend would have done. If a rank does not arrive, the
//! error names it, and the wrapped backend has not started the collective. Ranks may issue a collective from different
//! call sites; if they do so in crossed order, a warning is logged as soon as the crossing is detected. The comparison
//! costs a round of messages for each collective: the wrapper is for finding errors, and off unless it is configured
//! ([`Config::debug`](crate::Config::debug), [`Config::nan_check`](crate::Config::nan_check)).
//!
//! Sends and receives are not compared: only two ranks issue them. `statement` defines what is compared.

mod crossing;
mod nan;
mod statement;

use super::{
    AbortReason, Backend, BackendWindow, Call, CommMemory, CommState, Done, GroupContext, Observer,
    Pending, Progress, Registration, Stream,
};
use crate::config::NanCheck;
use crate::op::Op;
use crate::op::buffer::Buffer;
use crate::op::deadline::Deadline;
use crate::op::error::{Error, ErrorKind, Result};
use crossing::Crossings;
use rcomm_recorder::model::{DType, Rank};
use statement::{STATEMENT_LEN, Statement, compare};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Compares what ranks issue, and then passes the operation to the wrapped backend.
pub struct Wrapper {
    inner: Arc<dyn Backend>,
    side: Arc<dyn Backend>,
    comparison: Arc<Comparison>,
    nan_check: NanCheck,
}

/// The members of the group, and where they issued their newest operations.
struct Comparison {
    ranks: Arc<[Rank]>,
    crossings: Mutex<Crossings>,
}

impl Wrapper {
    /// Wraps `inner`; ranks compare over `side`, which has the same members in the same order and is used for nothing
    /// else. With [`NanCheck::On`], a collective is also refused, on all ranks, if an input of any rank holds a NaN.
    pub fn new(
        inner: Arc<dyn Backend>,
        side: Arc<dyn Backend>,
        ranks: &[Rank],
        nan_check: NanCheck,
    ) -> Self {
        Self {
            inner,
            side,
            comparison: Arc::new(Comparison {
                ranks: ranks.into(),
                crossings: Mutex::default(),
            }),
            nan_check,
        }
    }

    /// What this rank says of a collective that it is about to run.
    fn statement(&self, op: &Op<'_>, call: &Call, observer: &dyn Observer) -> Statement {
        let nan = match self.nan_check {
            NanCheck::On => nan::find(op, &*self.inner),
            NanCheck::Off => None,
        };
        let site = observer.call_site().map_or_else(String::new, |frame| {
            format!("{}:{}", frame.filename, frame.line)
        });
        Statement::of(op, call.seq, nan, site)
    }
}

/// The comparison as an operation of the side group.
fn exchange(statement: &Statement, size: usize) -> Op<'static> {
    Op::AllGatherSingle {
        input: Buffer::from_vec(statement.encode().to_vec()),
        output: Buffer::from_vec(vec![0u8; size * STATEMENT_LEN]),
    }
}

impl Comparison {
    /// The result of the comparison of collective `seq`.
    fn compare_gathered(&self, seq: u64, gathered: Option<Op<'_>>) -> Result<()> {
        let Some(Op::AllGatherSingle { output, .. }) = gathered else {
            return Err(Error::new(
                ErrorKind::Backend,
                "the backend over which the ranks compare operations did not return the buffers of a comparison",
            ));
        };
        let sites = compare(output.as_bytes()?, &self.ranks)?;
        let mut crossings = self
            .crossings
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(warning) = crossings.observe(seq, sites, &self.ranks) {
            tracing::warn!("{warning}");
        }
        Ok(())
    }
}

/// An error of the side group, with the fact that it comes from a comparison.
fn while_comparing(error: Error) -> Error {
    error.with_more("found while the ranks compared what they were about to do")
}

impl Backend for Wrapper {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn ends_overdue_within(&self) -> Duration {
        self.inner.ends_overdue_within()
    }

    fn runs_on_host(&self) -> bool {
        self.inner.runs_on_host()
    }

    fn can_be_timed(&self) -> bool {
        self.inner.can_be_timed()
    }

    fn set_timing(&self, is_on: bool) {
        self.inner.set_timing(is_on);
    }

    fn issue(
        &self,
        op: Op<'static>,
        call: Call,
        observer: Arc<dyn Observer>,
    ) -> Result<Arc<dyn Pending>> {
        if op.is_p2p() {
            return self.inner.issue(op, call, observer);
        }
        let call = Call {
            deadline: call.deadline.started(),
            ..call
        };
        let comparison_op = exchange(
            &self.statement(&op, &call, &*observer),
            self.comparison.ranks.len(),
        );
        let compared_op = Arc::new(ComparedOp {
            stage: Mutex::new(CheckStage::Comparing { op, side: None }),
            stage_changed: Condvar::new(),
            inner: self.inner.clone(),
            comparison: self.comparison.clone(),
            call: call.clone(),
            observer: Mutex::new(Some(observer)),
        });
        let side = self.side.issue(comparison_op, call, compared_op.clone())?;
        if let CheckStage::Comparing { side: issued, .. } = &mut *compared_op.lock() {
            *issued = Some(side);
        }
        // The comparison may have ended before `side` was set.
        compared_op.poll();
        Ok(compared_op)
    }

    fn run(&self, op: &mut Op<'_>, call: Call, observer: &dyn Observer) -> Result<Done> {
        if op.is_p2p() {
            return self.inner.run(op, call, observer);
        }
        let call = Call {
            deadline: call.deadline.started(),
            ..call
        };
        let mut comparison_op = exchange(
            &self.statement(op, &call, observer),
            self.comparison.ranks.len(),
        );
        self.side
            .run(&mut comparison_op, call.clone(), observer)
            .map_err(while_comparing)?;
        self.comparison
            .compare_gathered(call.seq, Some(comparison_op))?;
        self.inner.run(op, call, observer)
    }

    fn abort(&self, reason: &AbortReason) {
        self.inner.abort(reason);
        self.side.abort(reason);
    }

    fn shutdown(&self, deadline: Deadline) -> Result<()> {
        let deadline = deadline.started();
        // No comparison is pending after this. An operation whose comparison just ended may still be on its way to the
        // wrapped backend.
        self.side.shutdown(deadline)?;
        self.inner.shutdown(deadline)
    }

    fn split(&self, group: &GroupContext, deadline: Deadline) -> Result<Arc<dyn Backend>> {
        self.inner.split(group, deadline)
    }

    fn decline_split(&self, deadline: Deadline) -> Result<()> {
        self.inner.decline_split(deadline)
    }

    fn find_nan(&self, memory: &Buffer<'_>) -> Result<Option<u64>> {
        self.inner.find_nan(memory)
    }

    fn failed_elsewhere(&self) {
        self.inner.failed_elsewhere();
    }

    fn ends_process(&self) -> bool {
        self.inner.ends_process()
    }

    fn comm_state(&self) -> Vec<CommState> {
        self.inner.comm_state()
    }

    fn communicator(&self) -> Option<u64> {
        self.inner.communicator()
    }

    fn shrink(&self, group: &GroupContext, deadline: Deadline) -> Result<Arc<dyn Backend>> {
        self.inner.shrink(group, deadline)
    }

    fn register(&self, memory: &Buffer<'static>) -> Result<Registration> {
        self.inner.register(memory)
    }

    fn deregister(&self, registration: Registration) -> Result<()> {
        self.inner.deregister(registration)
    }

    fn allocate(&self, dtype: DType, len: usize) -> Result<Buffer<'static>> {
        self.inner.allocate(dtype, len)
    }

    fn suspend(&self, deadline: Deadline) -> Result<()> {
        self.inner.suspend(deadline)
    }

    fn resume(&self, deadline: Deadline) -> Result<()> {
        self.inner.resume(deadline)
    }

    fn comm_memory(&self) -> Result<CommMemory> {
        self.inner.comm_memory()
    }

    fn split_count(&self) -> u64 {
        self.inner.split_count()
    }

    fn estimate(&self, op: &Op<'_>, deadline: Deadline) -> Result<Duration> {
        self.inner.estimate(op, deadline)
    }

    fn new_window(
        &self,
        memory: Buffer<'static>,
        deadline: Deadline,
    ) -> Result<Arc<dyn BackendWindow>> {
        self.inner.new_window(memory, deadline)
    }
}

/// An issued collective: first in the comparison, then in the wrapped backend.
struct ComparedOp {
    stage: Mutex<CheckStage>,
    stage_changed: Condvar,
    inner: Arc<dyn Backend>,
    comparison: Arc<Comparison>,
    call: Call,
    /// Taken when the operation is passed on or refused, since the observer holds this `ComparedOp` and the cycle
    /// would leak both.
    observer: Mutex<Option<Arc<dyn Observer>>>,
}

/// How far a [`ComparedOp`] is.
enum CheckStage {
    /// The comparison runs; `side` is `Some` once it was issued.
    Comparing {
        op: Op<'static>,
        side: Option<Arc<dyn Pending>>,
    },
    /// The operation is being passed to the wrapped backend.
    Passing,
    /// The wrapped backend has the operation.
    Passed(Arc<dyn Pending>),
    /// Refused; holds the operation until it is reclaimed.
    Refused(Error, Option<Op<'static>>),
}

impl ComparedOp {
    fn lock(&self) -> MutexGuard<'_, CheckStage> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Passes the operation on if the comparison has ended. The side group ends comparisons in the order of their turns
    /// ([`Call::turn`]), so operations are passed on in that order.
    fn poll(&self) {
        let mut stage = self.lock();
        let CheckStage::Comparing {
            side: Some(side), ..
        } = &*stage
        else {
            return;
        };
        let outcome = match side.progress() {
            Progress::Queued | Progress::Started => return,
            Progress::Completed(_) => self
                .comparison
                .compare_gathered(self.call.seq, side.reclaim()),
            Progress::Failed(error) => Err(while_comparing(error)),
        };
        let CheckStage::Comparing { op, .. } = std::mem::replace(&mut *stage, CheckStage::Passing)
        else {
            return;
        };
        // The backend may call the observer at once, and the observer takes this lock to read the progress.
        drop(stage);
        let observer = self.observer.lock();
        let Some(observer) = observer.unwrap_or_else(PoisonError::into_inner).take() else {
            return;
        };
        let next = match outcome {
            Err(error) => CheckStage::Refused(error, Some(op)),
            Ok(()) => match self.inner.issue(op, self.call.clone(), observer.clone()) {
                Ok(pending) => CheckStage::Passed(pending),
                Err(error) => CheckStage::Refused(error, None),
            },
        };
        *self.lock() = next;
        self.stage_changed.notify_all();
        // While the operation was being passed on, the observer could not see an end that the backend reported.
        if self.progress().has_ended() {
            observer.ended();
        }
    }
}

impl Observer for ComparedOp {
    fn started(&self) {}

    fn ended(&self) {
        self.poll();
    }
}

impl Pending for ComparedOp {
    fn progress(&self) -> Progress {
        self.poll();
        match &*self.lock() {
            CheckStage::Comparing { .. } | CheckStage::Passing => Progress::Queued,
            CheckStage::Passed(pending) => pending.progress(),
            CheckStage::Refused(error, _) => Progress::Failed(error.clone()),
        }
    }

    fn wait(&self, deadline: Deadline) -> Progress {
        let deadline = deadline.started();
        loop {
            let (side, pending) = match &*self.lock() {
                CheckStage::Comparing { side, .. } => (side.clone(), None),
                CheckStage::Passing => (None, None),
                CheckStage::Passed(pending) => (None, Some(pending.clone())),
                CheckStage::Refused(error, _) => return Progress::Failed(error.clone()),
            };
            if let Some(pending) = pending {
                return pending.wait(deadline);
            }
            if deadline.has_passed() {
                return Progress::Queued;
            }
            if let Some(side) = side {
                // A backend need not call its observer: only this wait is sure to end with the comparison.
                side.wait(deadline);
                self.poll();
            }
            let stage = self.lock();
            let waited =
                self.stage_changed
                    .wait_timeout_while(stage, deadline.remaining(), |stage| {
                        matches!(stage, CheckStage::Passing)
                    });
            drop(waited);
        }
    }

    /// Blocks the host until the comparison has ended, or the operation's deadline has passed (`Timeout`). A stream can
    /// wait only for an operation that the wrapped backend has, and the backend gets it after the comparison.
    fn wait_stream(&self, stream: &dyn Stream) -> Result<()> {
        loop {
            self.poll();
            match &*self.lock() {
                CheckStage::Passed(pending) => return pending.wait_stream(stream),
                CheckStage::Refused(error, _) => return Err(error.clone()),
                CheckStage::Comparing { .. } | CheckStage::Passing => {}
            }
            if self.call.deadline.has_passed() {
                let message =
                    "the ranks did not finish comparing the operation before its deadline";
                return Err(Error::new(ErrorKind::Timeout, message));
            }
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    fn reclaim(&self) -> Option<Op<'static>> {
        match &mut *self.lock() {
            CheckStage::Passed(pending) => pending.reclaim(),
            CheckStage::Refused(_, op) => op.take(),
            CheckStage::Comparing { .. } | CheckStage::Passing => None,
        }
    }
}
