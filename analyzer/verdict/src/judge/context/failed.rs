//! Operations that have failed: a rank is not in them any more.

use super::Context;
use crate::align::RecordIx;
use crate::align::pending::{Pending, PendingKind};
use crate::align::record::Op;
use crate::judge::waits::wait_graph::Node;
use rcomm_recorder::model::{EntryState, Failure};

impl Context<'_> {
    /// Whether an unfinished operation of a record has failed, so that the rank is not in it any more.
    pub(crate) fn has_failed(&self, record: RecordIx, operation: &Pending) -> bool {
        let of_collective = |seq: u32| {
            let mut lanes = self.aligned.lanes[record].iter();
            let lane = lanes.find(|lane| lane.group == operation.group)?;
            let index = self.aligned.find(record, lane, seq).ok()?;
            Some(self.aligned.status_op(record, lane, index))
        };
        let status_op = match &operation.kind {
            PendingKind::Collective { seq } => of_collective(*seq),
            PendingKind::Batch { halves } => {
                let first = halves.first();
                first.map(|half| self.aligned.op(record, half.status_op))
            }
        };
        let status_op = status_op.unwrap_or_else(|| self.aligned.op(record, operation.position));
        status_op.state == EntryState::Failed
    }

    /// The failure that the rank recorded of this operation of its record; `None` if it recorded none.
    pub(crate) fn failure_in(&self, record: RecordIx, op: &Op) -> Option<&Failure> {
        let full_record = &self.aligned.records[record];
        let id = full_record.record_id(op);
        let is_of_operation = |failure: &&Failure| {
            failure
                .operation
                .is_some_and(|failed| failed.record_id == id)
        };
        full_record.failures.iter().find(is_of_operation)
    }

    /// The error with which an operation of a record failed; empty if it is not recorded.
    pub(crate) fn error_of(&self, record: RecordIx, op: &Op) -> &str {
        let failure = self.failure_in(record, op);
        failure.map_or("", |failure| failure.text.as_str())
    }

    /// The error of the newest operation of a record, if that operation and all unfinished ones have failed; empty if
    /// the error is not recorded. `None` for other records.
    pub(crate) fn failure_of(&self, record: RecordIx) -> Option<String> {
        let mut pending = self.graph.pending[record].iter();
        let newest = self.last_op(record)?;
        let failed = newest.state == EntryState::Failed
            && pending.all(|operation| self.has_failed(record, operation));
        failed.then(|| self.error_of(record, newest).to_owned())
    }

    /// `waited` if all unfinished operations of these ranks have failed; else, or without ranks, `wait`.
    pub(crate) fn wait_or_waited(&self, nodes: &[Node]) -> &'static str {
        let failed = |&node: &Node| {
            let mut records = self.aligned.records_of(self.rank(node));
            records.all(|record| {
                let mut pending = self.graph.pending[record].iter();
                pending.all(|operation| self.has_failed(record, operation))
            })
        };
        match !nodes.is_empty() && nodes.iter().all(failed) {
            true => "waited",
            false => "wait",
        }
    }
}
