//! The order in which the device carries out the plans of a communicator.
//!
//! NCCL's kernels on one communicator run one after another, also if their calls name several streams: before each
//! launch NCCL makes the stream wait for the communicator's last kernel (`ncclLaunchPrepare`, enqueue.cc:1418 of
//! 2.26.2, 1485 of 2.28.3 and 1674 of 2.30.7). So once an operation of a later plan has completed, those of earlier
//! plans have, too. On a device that four processes shared, NCCL 2.30.7 reported neither the start nor the end of one
//! channel of two operations in some 650; without this rule they would be in progress until the process ends.
//!
//! The operations of one plan run side by side, so one that has completed shows nothing about the others. What graphs
//! replay is left out: CUDA orders it.

use crate::handle::SlotUse;
use crate::operation::{Op, flag};
use crate::process::Process;
use rcomm_recorder::record::Timestamp;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counts a communicator's operations in plans of which NCCL reports the channels.
///
/// The thread that launches counts those in plans, and the proxy thread those that have ended. If several threads do
/// nevertheless, a count may be too low. That of the ended ones costs a search, which corrects it. With too low a count
/// of those in plans, an operation whose end NCCL does not report may stay in progress until a later search.
#[derive(Debug, Default)]
pub(crate) struct Order {
    /// Those in plans.
    planned: AtomicU64,
    /// Those in plans before the newest one.
    before: AtomicU64,
    /// Those that have ended.
    ended: AtomicU64,
}

impl Order {
    pub(crate) fn reset(&self) {
        for count in [&self.planned, &self.before, &self.ended] {
            count.store(0, Relaxed);
        }
    }

    /// Begins a plan.
    pub(crate) fn begins_plan(&self) {
        self.before.store(self.planned.load(Relaxed), Relaxed);
    }

    /// Counts an operation in the newest plan and returns its place: one more than the number of operations in earlier
    /// plans.
    pub(crate) fn adds(&self) -> u64 {
        self.planned.store(self.planned.load(Relaxed) + 1, Relaxed);
        self.before.load(Relaxed) + 1
    }
}

impl Process {
    /// Counts an operation that has ended, and ends those of earlier plans that are still in progress: they have
    /// completed, and NCCL has not reported it.
    #[inline(always)]
    pub(crate) fn end_in_order(&self, at: SlotUse, op: &Op, now: Timestamp) {
        let (place, communicator_at) = (op.place.load(Relaxed), op.communicator());
        // If the slot has another use by now, the words above may be those of that use.
        if place == 0 || op.state(at).is_none() {
            return;
        }
        let Some(communicator) = self.communicators.get(communicator_at) else {
            return;
        };
        let order = &communicator.order;
        let before = place - 1;
        let mut ended = order.ended.load(Relaxed);
        if ended < before {
            self.end_earlier(communicator_at, place, now);
            ended = before;
        }
        order.ended.store(ended + 1, Relaxed);
    }

    /// Ends the operations in progress of plans before that of an operation with this place.
    #[cold]
    fn end_earlier(&self, communicator: SlotUse, place: u64, now: Timestamp) {
        for (at, op) in self.operations.taken() {
            let its_place = op.place.load(Relaxed);
            let is_earlier = its_place > 0 && its_place < place;
            if !is_earlier || op.communicator() != communicator {
                continue;
            }
            let ticket = op.ticket();
            let ended = op.change_open(at, |state| state.with(flag::OVER));
            // When it ended is not known: only that it is over now.
            if let Some((_, after)) = ended {
                self.recorder.completed_and_retired_at(ticket, now, None);
                if !after.has(flag::IN_GROUP) {
                    self.operations.release(at);
                }
            }
        }
    }
}
