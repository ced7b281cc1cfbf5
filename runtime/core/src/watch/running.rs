//! [`Running`]: the blocking calls in flight of a group.

use crate::op::info::OpInfo;
use rcomm_recorder::model::OpType;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Duration;

/// Blocking calls in flight in one group, readable without a lock.
///
/// There are eight slots. The watchdog does not see further calls: only the backend ends them at their deadline.
#[derive(Default)]
pub(crate) struct Running {
    slots: [RunningSlot; 8],
}

#[derive(Default)]
struct RunningSlot {
    /// The number of the operation's record; 0 if the slot is free.
    record_id: AtomicU64,
    seq: AtomicU64,
    /// The operation in bits 0 to 7, whether it is point-to-point in bit 8, the time-out in ms from bit 16
    /// on.
    packed: AtomicU64,
}

impl Running {
    /// Takes a slot for a call and returns it; `None` if all are taken. The caller holds the issue lock.
    pub(crate) fn enter(&self, op_info: &OpInfo) -> Option<usize> {
        let free = |slot: &RunningSlot| slot.record_id.load(Ordering::Relaxed) == 0;
        let index = self.slots.iter().position(free)?;
        let slot = &self.slots[index];
        // A reader that loads values stored after this fence sees, after its own fence, that the slot was
        // free. So it cannot attribute them to the previous call.
        fence(Ordering::Release);
        let timeout_ms = u64::try_from(op_info.timeout.as_millis()).unwrap_or(u64::MAX);
        let packed = u64::from(op_info.op.code())
            | u64::from(op_info.is_p2p) << 8
            | timeout_ms.min(u64::MAX >> 16) << 16;
        slot.seq.store(op_info.seq, Ordering::Relaxed);
        slot.packed.store(packed, Ordering::Relaxed);
        slot.record_id.store(op_info.record_id, Ordering::Release);
        Some(index)
    }

    /// Frees the slot that [`enter`](Self::enter) returned, if any.
    pub(crate) fn leave(&self, slot: Option<usize>) {
        if let Some(slot) = slot.and_then(|index| self.slots.get(index)) {
            slot.record_id.store(0, Ordering::Release);
        }
    }

    /// The calls in the slots. A slot that changes while it is read is left out.
    pub(crate) fn under_way(&self) -> impl Iterator<Item = OpInfo> {
        self.slots.iter().filter_map(|slot| {
            let record_id = slot.record_id.load(Ordering::Acquire);
            let seq = slot.seq.load(Ordering::Relaxed);
            let packed = slot.packed.load(Ordering::Relaxed);
            // If a value belongs to a later call, this fence synchronizes with the one in `enter`, and the slot no
            // longer holds the record id that was read first. The next round will see the later call.
            fence(Ordering::Acquire);
            if record_id == 0 || slot.record_id.load(Ordering::Relaxed) != record_id {
                return None;
            }
            Some(OpInfo {
                record_id,
                op: OpType::from_code(packed as u8)?,
                seq,
                is_p2p: packed >> 8 & 1 == 1,
                // Only the thread that runs the operation counts its turn.
                turn_lane: None,
                ends_itself: false,
                is_timed: false,
                timeout: Duration::from_millis(packed >> 16),
            })
        })
    }
}
