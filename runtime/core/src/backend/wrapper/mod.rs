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

mod compared;
mod crossing;
mod nan;
mod statement;

use super::{
    AbortReason, Backend, BackendWindow, Call, CommMemory, CommState, Done, GroupContext, Observer,
    Pending, Registration,
};
use crate::config::NanCheck;
use crate::op::Op;
use crate::op::buffer::Buffer;
use crate::op::deadline::Deadline;
use crate::op::error::Result;
use compared::{Comparison, while_comparing};
use rcomm_recorder::model::{DType, Rank};
use statement::{STATEMENT_LEN, Statement};
use std::sync::Arc;
use std::time::Duration;

/// Compares what ranks issue, and then passes the operation to the wrapped backend.
pub struct Wrapper {
    inner: Arc<dyn Backend>,
    side: Arc<dyn Backend>,
    comparison: Arc<Comparison>,
    nan_check: NanCheck,
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
            comparison: Arc::new(Comparison::new(ranks)),
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
            self.comparison.size(),
        );
        let compared_op = self
            .comparison
            .begin(op, call.clone(), observer, &self.inner);
        match self.side.issue(comparison_op, call, compared_op.clone()) {
            Ok(side) => compared_op.compared_by(side),
            Err(error) => {
                self.comparison.withdraw(&compared_op);
                return Err(error);
            }
        }
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
        let mut comparison_op =
            exchange(&self.statement(op, &call, observer), self.comparison.size());
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
