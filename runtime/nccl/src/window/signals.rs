//! The signals of a window, each of which is counted in a word that the host reads. The library's own signals, which it
//! counts for all windows of a communicator together, show when the data that were put before have arrived.

use super::{Incoming, NcclWindow, OpenWindow, WORD, lock, to_c};
use crate::cuda::event::Mark;
use crate::library::sys::WaitSignalDesc;
use crate::queue::QueueState;
use rcomm_core::Deadline;
use rcomm_core::Result;
use rcomm_core::backend::GroupContext;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

/// The counts of the library's signals on one communicator. All windows of the communicator share them.
pub(crate) struct Signals {
    /// The number of the library's signals to each rank that were enqueued: one for each put or signal.
    pub(super) sent: Mutex<Vec<u32>>,
    /// The number of signals from each rank for which a wait was enqueued.
    taken: Mutex<Vec<u32>>,
}

impl Signals {
    pub(crate) fn of(group: &GroupContext) -> Self {
        let zeros = vec![0; group.size() as usize];
        Self {
            sent: Mutex::new(zeros.clone()),
            taken: Mutex::new(zeros),
        }
    }
}

impl NcclWindow {
    /// Makes this rank signal itself. All ranks call this, because the library connects all ranks of a communicator at
    /// its first one-sided operation (`ncclRmaCeInit`), and would wait for ranks that have issued none yet.
    ///
    /// # Blocking
    /// Until the signal has arrived, or the deadline.
    pub(super) fn connect(&self, deadline: Deadline) -> Result<()> {
        let Some(signal) = self.queue.shared.library.table().signal else {
            return Err(self.queue.shared.library.lacks("a window", "ncclSignal"));
        };
        let this_rank = self.group_rank;
        {
            let mut sent = lock(&self.signals.sent);
            let state = self.queue.lock(deadline)?;
            self.queue.call_on_stream(
                state,
                "ncclSignal",
                deadline,
                || Ok(()),
                move |comm, stream| {
                    // SAFETY: communicator and stream are live and lent for the call, which gets no other
                    // pointer. The three zeros are the signal's index, the context and the flags.
                    unsafe { signal(to_c(this_rank), 0, 0, 0, comm, stream) }
                },
            )?;
            sent[this_rank as usize] = sent[this_rank as usize].wrapping_add(1);
        }
        let until = lock(&self.signals.sent)[this_rank as usize];
        let state = self.queue.lock(deadline)?;
        match self.take_signals(state, this_rank, until, deadline)? {
            Some(mark) => self.queue.wait_for(&mark, deadline),
            None => Ok(()),
        }
    }

    /// Enqueues a wait for the library's signals from `peer` up to number `until`, which are sent already or enqueued
    /// before on this stream. Returns `None` if a wait for them was enqueued before.
    fn take_signals(
        &self,
        state: MutexGuard<'_, QueueState>,
        peer: u32,
        until: u32,
        deadline: Deadline,
    ) -> Result<Option<Mark>> {
        let Some(wait) = self.queue.shared.library.table().wait_signal else {
            return Err(self.lacks("ncclWaitSignal"));
        };
        let mut taken = lock(&self.signals.taken);
        let taken = &mut taken[peer as usize];
        let count = until.wrapping_sub(*taken).cast_signed();
        if count <= 0 {
            return Ok(None);
        }
        let mut wanted = WaitSignalDesc {
            op_cnt: count,
            peer: to_c(peer),
            sig_idx: 0,
            ctx: 0,
        };
        let mark = self.queue.call_on_stream(
            state,
            "ncclWaitSignal",
            deadline,
            || Ok(()),
            // SAFETY: communicator and stream are live and lent for the call, which copies the one
            // description.
            move |comm, stream| unsafe { wait(1, &mut wanted, comm, stream) },
        )?;
        *taken = until;
        Ok(Some(mark))
    }

    /// Returns the two counts in the latest word from `peer`: the window's signals, and the library's signals.
    fn word_of(&self, open: &OpenWindow, peer: u32) -> Result<(u32, u32)> {
        let device = &self.queue.shared.device;
        let mut word = 0u64;
        let status = {
            let _entered = device.enter()?;
            let copy = device.driver().table().memcpy_to_host;
            let from = open.words.address() + (peer as usize * WORD) as u64;
            // SAFETY: the copy reads one word of the table, and writes a local that lives until the copy is done:
            // `synchronize` waits for it below, also after an error.
            unsafe { copy((&raw mut word).cast(), from, WORD, self.copies.raw()) }
        };
        let copied = device.driver().check("cuMemcpyDtoHAsync", status);
        self.copies.synchronize()?;
        copied?;
        // The count of the window's signals is at the lower address, which is the low half in little-endian order.
        Ok((word as u32, (word >> 32) as u32))
    }

    /// Whether another signal from `peer` has arrived, with the data that was put before it. May return false while
    /// another thread uses the queue. Waits for a copy from the device, but never for a peer.
    pub(super) fn poll_signals(
        &self,
        open: &OpenWindow,
        peer: u32,
        incoming: &mut Incoming,
    ) -> Result<bool> {
        /// The time limit of a call that waits for no peer.
        const CALL: Deadline = Deadline::In(Duration::from_secs(10));
        loop {
            if incoming.available != incoming.taken {
                return Ok(true);
            }
            if let Some((available, mark)) = &incoming.awaited {
                let _entered = self.queue.shared.device.enter()?;
                if !mark.is_done()? {
                    return Ok(false);
                }
                incoming.available = *available;
                incoming.awaited = None;
                continue;
            }
            let (count, until) = self.word_of(open, peer)?;
            if count == incoming.available {
                return Ok(false);
            }
            let Some(state) = self.queue.try_lock() else {
                return Ok(false);
            };
            match self.take_signals(state, peer, until, CALL)? {
                Some(mark) => incoming.awaited = Some((count, mark)),
                None => incoming.available = count,
            }
        }
    }
}
