//! [`SpareOps`]: operations that have ended, whose memory later operations of the group use.

use super::in_flight::{InFlightOp, Tickets};
use crate::backend::Pending;
use crate::group::process_group::Group;
use crate::op::info::OpInfo;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

/// The most operations that are kept. The watchdog refers to an operation until its next round, so there may be many
/// more than run at the same time.
const MAX_KEPT: usize = 1024;

/// Operations that have ended, oldest first. A caller that repeats its operations keeps them here, and then allocates
/// nothing for the next ones.
#[derive(Default)]
pub(crate) struct SpareOps(VecDeque<Arc<InFlightOp>>);

impl SpareOps {
    /// Keeps an operation that has ended without an error, and whose result was taken.
    pub(super) fn keep(&mut self, op: Arc<InFlightOp>) {
        if self.0.len() < MAX_KEPT {
            self.0.push_back(op);
        }
    }

    /// Works like [`InFlightOp::issued_at`], but in the memory of the oldest operation if that is one of this group,
    /// and nothing else refers to it any more. Then also returns the backend's handle of the oldest operation, if it
    /// had one.
    pub(super) fn issued_at(
        &mut self,
        issued: Instant,
        group: &Arc<Group>,
        op_info: OpInfo,
        tickets: Tickets,
    ) -> (Arc<InFlightOp>, Option<Arc<dyn Pending>>) {
        if let Some(mut oldest) = self.0.pop_front() {
            match Arc::get_mut(&mut oldest) {
                Some(op) if Arc::ptr_eq(&op.group, group) => {
                    let former = op.renew(issued, op_info, tickets);
                    return (oldest, former);
                }
                // An operation of another group is dropped.
                Some(_) => {}
                None => self.0.push_front(oldest),
            }
        }
        let new = InFlightOp::issued_at(issued, group.clone(), op_info, tickets);
        (new, None)
    }

    /// Forgets all operations.
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }
}
