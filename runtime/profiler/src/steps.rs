//! Records the progress of network transfers by their steps.
//!
//! NCCL has up to eight steps of a transfer under way (`NCCL_STEPS`), which end in their order (`sendProxyProgress` and
//! `recvProxyProgress`, transport/net.cc:1304 and 1467 of NCCL 2.30.7). The wait of the oldest step is recorded,
//! because the oldest step holds up the transfer: if the network holds up a send, later steps still wait for the
//! device. While the peer gives no permission to send, NCCL reports that state again and again.

use crate::handle::{Handle, Kind, SlotUse};
use crate::process::{Process, Transfer};
use rcomm_recorder::model::LinkWait;
use rcomm_recorder::record::{LinkHandle, Ticket};
use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering::Relaxed;

/// How far the first steps of a transfer are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// The last of these steps waits for this.
    Waiting(LinkWait),
    /// These steps are done.
    Done,
}

/// The largest number of steps under way.
const UNDER_WAY: u32 = 8;

/// The waits of the steps under way: a byte for each step, by the step's number modulo eight; 0 = not reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Waits(u64);

impl Waits {
    fn shift(step: u32) -> u32 {
        step % UNDER_WAY * 8
    }

    fn of(self, step: u32) -> Option<LinkWait> {
        let code = (self.0 >> Self::shift(step)) as u8;
        LinkWait::from_code(code).filter(|&wait| wait != LinkWait::Idle)
    }

    /// These waits with a new wait of a step; [`LinkWait::Idle`] = not reported.
    fn with(self, step: u32, wait: LinkWait) -> Self {
        let shift = Self::shift(step);
        Self(self.0 & !(0xff << shift) | u64::from(wait.code()) << shift)
    }
}

impl Process {
    /// Handles the beginning of a step of a transfer. NCCL repeats it until the step is posted.
    pub(crate) fn step_starts(&self, parent: *mut c_void, step: c_int) -> *mut c_void {
        let transfer = Handle::of(parent).and_then(|parent| parent.slot_if(Kind::Transfer));
        let known = transfer.filter(|&at| self.transfers.get(at).is_some());
        known.map_or(std::ptr::null_mut(), |at| at.handle(Kind::Step, step as u8))
    }

    /// Records what the step with this handle waits for.
    pub(crate) fn step_waits(&self, handle: *mut c_void, wait: LinkWait) {
        if let Some(Handle {
            kind: Kind::Step,
            channel,
            at,
        }) = Handle::of(handle)
            && let Some(transfer) = self.transfers.get(at)
        {
            let done = transfer.done.load(Relaxed);
            let ahead = channel.wrapping_sub(done as u8);
            self.note_wait(transfer, done + u32::from(ahead), wait);
        }
    }

    /// Handles the end of a step, whose number has these lower bits.
    pub(crate) fn step_stops(&self, at: SlotUse, step: u8) {
        if let Some(transfer) = self.transfers.get(at) {
            let done = transfer.done.load(Relaxed);
            if step == done as u8 {
                self.note_done(transfer, done + 1);
            }
        }
    }

    /// Records how far the first `steps` steps of the transfer with this handle are.
    pub(crate) fn transfer_progresses(&self, handle: *mut c_void, progress: Progress, steps: u32) {
        let at = Handle::of(handle).and_then(|handle| handle.slot_if(Kind::Transfer));
        let Some(transfer) = at.and_then(|at| self.transfers.get(at)) else {
            return;
        };
        match progress {
            Progress::Done => self.note_done(transfer, steps),
            Progress::Waiting(wait) => {
                if let Some(step) = steps.checked_sub(1) {
                    self.note_wait(transfer, step, wait);
                }
            }
        }
    }

    // One proxy thread reports the steps of a transfer, so loads and stores suffice.

    /// Notes what a step waits for, and records it if the step is the oldest under way.
    fn note_wait(&self, transfer: &Transfer, step: u32, wait: LinkWait) {
        let done = transfer.done.load(Relaxed);
        if !(done..done.saturating_add(UNDER_WAY)).contains(&step) {
            return;
        }
        let waits = Waits(transfer.waits.load(Relaxed));
        if waits.of(step) == Some(wait) {
            return;
        }
        transfer.waits.store(waits.with(step, wait).0, Relaxed);
        if step == done {
            self.report(transfer, done, wait);
        }
    }

    /// Notes that the first `done` steps are done, and records what the next step waits for.
    fn note_done(&self, transfer: &Transfer, done: u32) {
        let before = transfer.done.load(Relaxed);
        if done <= before {
            return;
        }
        let waits = Waits(transfer.waits.load(Relaxed));
        let ended = before..done.min(before.saturating_add(UNDER_WAY));
        let waits = ended.fold(waits, |waits, step| waits.with(step, LinkWait::Idle));
        transfer.waits.store(waits.0, Relaxed);
        transfer.done.store(done, Relaxed);
        self.report(transfer, done, waits.of(done).unwrap_or(LinkWait::Posted));
    }

    /// Records that `done` steps are done, and what the next one waits for.
    fn report(&self, transfer: &Transfer, done: u32, wait: LinkWait) {
        let words = [0, 1, 2].map(|word| transfer.operation[word].load(Relaxed));
        let steps = (done, transfer.steps.load(Relaxed));
        let link = LinkHandle::from_index(transfer.link.load(Relaxed));
        (self.recorder).link_at(link, Some(Ticket::of_words(words)), steps, wait);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_step_under_way_has_its_own_wait() {
        let waits = (0..UNDER_WAY).fold(Waits(0), |waits, step| waits.with(step, LinkWait::Device));
        let waits = waits.with(3, LinkWait::Send).with(12, LinkWait::Idle);
        assert_eq!(waits.of(3), Some(LinkWait::Send));
        assert_eq!(waits.of(11), Some(LinkWait::Send));
        assert_eq!((waits.of(4), waits.of(5)), (None, Some(LinkWait::Device)));
    }
}
