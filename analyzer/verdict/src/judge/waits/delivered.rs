//! Leaves out waits in messages that have arrived, and that the program has not waited for.
//!
//! Gloo ends a send or a receive in the wait for it only: until then, a message that has arrived is recorded as
//! unfinished.

use crate::align::p2p::Half;
use crate::align::pending::{Pending, PendingKind};
use crate::align::{Aligned, RecordIx};
use crate::judge::waits::wait_graph::{Place, WaitGraph};
use rcomm_recorder::model::OpType;

impl WaitGraph {
    /// Leaves out the wait of a rank in messages that have arrived, if the rank also waits at a place where another is
    /// missing: such messages end as soon as the program waits for them.
    pub(super) fn leave_out_delivered(&mut self) {
        for place in 0..self.places.len() {
            let Place::Batch {
                record, pending, ..
            } = self.places[place]
            else {
                continue;
            };
            let &[node] = self.arrived[place].as_slice() else {
                continue;
            };
            let mut waits_in = self.waits_in[node].iter();
            if self.pending[record][pending].delivered
                && self.missing[place].is_empty()
                && waits_in.any(|&other| !self.missing[other].is_empty())
            {
                self.overdue[record][pending] = false;
                self.waits_in[node].retain(|&other| other != place);
            }
        }
    }
}

/// Whether a rank may wait in an unfinished operation: not in a receive that a separate thread holds open, and not in
/// sends that have been received.
pub(crate) fn is_a_wait(aligned: &Aligned<'_>, record: RecordIx, operation: &Pending) -> bool {
    let PendingKind::Batch { halves } = &operation.kind else {
        return true;
    };
    let is_send = |half: &Half| aligned.op(record, half.position).kind == OpType::Send;
    !(operation.held_open || operation.delivered && halves.iter().all(is_send))
}
