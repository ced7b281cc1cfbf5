//! The outgoing data of a window: puts, and signals, which are puts of one word. A source outside this rank's part of
//! the window is copied to a staging area first.

use super::{NcclWindow, OpenWindow, RawWindow, STAGING, WORD, keep_alive, lock, to_c};
use crate::cuda::event::Mark;
use crate::cuda::memory::stream_of;
use crate::library::sys;
use crate::queue::{IncompleteCall, RemainingWork};
use rcomm_core::Buffer;
use rcomm_core::Deadline;
use rcomm_core::{Error, Result};
use rcomm_recorder::model::OpType;
use std::ffi::{c_uint, c_void};
use std::sync::atomic::AtomicPtr;

/// The state of the puts and signals that this rank has sent through one window.
#[derive(Default)]
pub(super) struct Outgoing {
    /// The number of the window's signals that were sent to each rank.
    signals: Vec<u32>,
    /// The end of the last put or signal. The staging area is free once this event is complete.
    pub(super) last: Option<Mark>,
}

/// The arguments of one call of `ncclPutSignal`: `bytes` bytes from an address in a window of this rank go to an offset
/// in the peer's memory of the window `to`.
struct Put {
    from: u64,
    bytes: usize,
    to: RawWindow,
    offset: usize,
}

impl Outgoing {
    /// Makes the state for this many ranks, with nothing sent.
    pub(super) fn new(ranks: usize) -> Self {
        Self {
            signals: vec![0; ranks],
            ..Self::default()
        }
    }
}

impl NcclWindow {
    /// Runs `before`, which may enqueue work, and enqueues a put after it. `before` gets the number of this put among
    /// the library's signals to the peer: each put is one signal.
    ///
    /// # Safety
    /// The source of the put lies in a window of this communicator; `put.to` is registered, and the target lies in
    /// the peer's memory of it. The source, and the memory from which `before` copies, stay until the returned event,
    /// or the one of [`RemainingWork::Until`], is complete. After [`RemainingWork::Unknown`] they are never freed;
    /// after [`RemainingWork::Nothing`] this call uses nothing any more.
    unsafe fn enqueue_put(
        &self,
        outgoing: &mut Outgoing,
        peer: u32,
        put: &Put,
        deadline: Deadline,
        before: impl FnOnce(u32) -> Result<()>,
    ) -> Result<Mark, IncompleteCall> {
        let early = |error| IncompleteCall {
            error,
            left: RemainingWork::Nothing,
        };
        let Some(call) = self.queue.shared.library.table().put_signal else {
            return Err(early(self.lacks("ncclPutSignal")));
        };
        // Numbers are assigned in the order in which the puts are enqueued.
        let mut sent = lock(&self.signals.sent);
        let number = sent[peer as usize].wrapping_add(1);
        let state = self.queue.lock(deadline).map_err(early)?;
        let (from, bytes, offset) = (put.from as usize, put.bytes, put.offset);
        let window = AtomicPtr::new(put.to);
        let made = self.queue.call_on_stream(
            state,
            "ncclPutSignal",
            deadline,
            || before(number),
            move |comm, stream| {
                let from: *const c_void = std::ptr::with_exposed_provenance(from);
                // SAFETY: communicator and stream are live and lent for the call. By this function's contract the
                // window is registered, the target lies in the peer's memory of it, and the source stays until
                // the event is complete. The three zeros are the signal's index, the context and the flags.
                unsafe {
                    call(
                        from,
                        bytes,
                        sys::data_type::UINT8,
                        to_c(peer),
                        window.into_inner(),
                        offset,
                        0,
                        0,
                        0,
                        comm,
                        stream,
                    )
                }
            },
        );
        if made.is_ok() {
            sent[peer as usize] = number;
        }
        let end = match &made {
            Ok(mark)
            | Err(IncompleteCall {
                left: RemainingWork::Until(mark),
                ..
            }) => mark,
            Err(_) => return made,
        };
        outgoing.last = Some(end.clone());
        made
    }

    /// The address of the staging area.
    fn staging_at(&self, open: &OpenWindow) -> u64 {
        open.words.address() + (2 * self.parts.len() * WORD) as u64
    }

    /// Puts host memory. The memory is copied to the staging area piece by piece, so that the device does not read it
    /// after this call. The last piece may still be on its way to the peer.
    pub(super) fn put_from_host(
        &self,
        open: &OpenWindow,
        (peer, offset): (u32, usize),
        bytes: &[u8],
        deadline: Deadline,
    ) -> Result<()> {
        let mut outgoing = lock(&self.outgoing);
        let at = self.staging_at(open);
        for (nth, piece) in bytes.chunks(STAGING).enumerate() {
            self.queue.check_usable(deadline)?;
            if let Some(event) = &outgoing.last {
                self.queue.wait_for(event, deadline)?;
            }
            let device = &self.queue.shared.device;
            let status = {
                let _entered = device.enter()?;
                let copy = device.driver().table().memcpy_to_device;
                // SAFETY: the staging area is at least as large as the piece, and nothing else uses it. The bytes
                // live until the copy is done: `synchronize` waits for it below, also after an error.
                unsafe { copy(at, piece.as_ptr().cast(), piece.len(), self.copies.raw()) }
            };
            let copied = device.driver().check("cuMemcpyHtoDAsync", status);
            self.copies.synchronize()?;
            copied?;
            let put = Put {
                from: at,
                bytes: piece.len(),
                to: open.data.handle(),
                offset: offset + nth * STAGING,
            };
            // SAFETY: the staging area is part of the control window. `open` is borrowed, so `data` is registered, and
            // `put` has checked that the range lies in the peer's part. The area is written again only after the
            // event in `outgoing` is complete, and never if that is unknown: the queue is then broken, and keeps it.
            unsafe { self.enqueue_put(&mut outgoing, peer, &put, deadline, |_| Ok(()))? };
        }
        Ok(())
    }

    /// Puts device memory after the pending work of the memory's stream: directly if the memory is in this rank's part
    /// of the window, and through the staging area otherwise. Waits until the device has read the memory.
    pub(super) fn put_from_device(
        &self,
        open: &OpenWindow,
        (peer, offset): (u32, usize),
        from: &Buffer<'_>,
        deadline: Deadline,
    ) -> Result<()> {
        let held = keep_alive(from)?;
        let stream = stream_of(&held)
            .unwrap_or(&self.queue.shared.default_stream)
            .clone();
        self.refuse_capture(&stream)?;
        let (start, bytes) = (held.as_ptr().addr() as u64, held.size_bytes());
        let part = self.parts[self.group_rank as usize] as u64;
        let is_inside = start >= open.data.at && start + bytes as u64 <= open.data.at + part;
        let mut outgoing = lock(&self.outgoing);
        let piece = if is_inside { bytes } else { STAGING };
        let mut end = None;
        for done in (0..bytes).step_by(piece.max(1)) {
            let len = piece.min(bytes - done);
            let (source, staging) = (start + done as u64, self.staging_at(open));
            let put = Put {
                from: if is_inside { source } else { staging },
                bytes: len,
                to: open.data.handle(),
                offset: offset + done,
            };
            let before = |_| {
                drop(self.queue.wait_for_stream(&stream)?);
                if is_inside {
                    return Ok(());
                }
                // SAFETY: the staging area has at least `len` bytes, and its previous use comes earlier on this
                // stream; the source is held as the contract of the call below requires.
                unsafe { self.queue.stream().copy(staging, source, len) }
            };
            // SAFETY: the bytes are in this window's own memory or its staging area. `open` is borrowed, so `data` is
            // registered, and `put` has checked that the range lies in the peer's part. The source is held until the
            // last event is complete, by this call or, after an error, by the queue; it is leaked if it is unknown
            // what the device still does (`RemainingWork::Unknown`).
            let made = unsafe { self.enqueue_put(&mut outgoing, peer, &put, deadline, before) };
            end = match made {
                Ok(mark) => Some(mark),
                Err(IncompleteCall { error, left }) => {
                    self.keep_source(held, left, end);
                    return Err(error);
                }
            };
        }
        drop(outgoing);
        let Some(end) = end else {
            return Ok(());
        };
        let waited = self.queue.wait_for(&end, deadline);
        if waited.is_err() {
            self.queue.keep_until(OpType::Put, Box::new(held), end);
        }
        waited
    }

    /// Keeps the source of a failed put for as long as the device may read it; leaks it if that time is unknown.
    /// `before` is the end of the pieces that were put before the failed piece.
    fn keep_source(&self, held: Buffer<'static>, left: RemainingWork, before: Option<Mark>) {
        let end = match left {
            RemainingWork::Unknown => return self.queue.shared.leak(OpType::Put, Box::new(held)),
            RemainingWork::Until(end) => Some(end),
            RemainingWork::Nothing => before,
        };
        if let Some(end) = end {
            self.queue.keep_until(OpType::Put, Box::new(held), end);
        }
    }

    /// Signals a peer: puts a word that holds the number of the window's signals and the number of the library's
    /// signals to this peer, both including this signal.
    pub(super) fn put_word(&self, open: &OpenWindow, peer: u32, deadline: Deadline) -> Result<()> {
        let mut outgoing = lock(&self.outgoing);
        let count = outgoing.signals[peer as usize].wrapping_add(1);
        let from = open.words.address() + ((self.parts.len() + peer as usize) * WORD) as u64;
        let put = Put {
            from,
            bytes: WORD,
            to: open.control.handle(),
            offset: self.group_rank as usize * WORD,
        };
        let before = |number: c_uint| {
            let stream = self.queue.stream();
            // SAFETY: the word for this peer is in `open.words`, which the queue keeps, and the previous put of
            // this word comes earlier on this stream.
            unsafe { stream.fill_u32(from, count)? };
            // SAFETY: as above: these are the last four bytes of the same word.
            unsafe { stream.fill_u32(from + 4, number) }
        };
        // SAFETY: the word lies in the control window, which stays registered while `open` is borrowed; the target is
        // this rank's entry in the peer's table there. The window is closed only after the event in `outgoing` is
        // complete, and never if that is unknown: the queue is then broken, and keeps the memory.
        let made = unsafe { self.enqueue_put(&mut outgoing, peer, &put, deadline, before) };
        made.map_err(Error::from)?;
        outgoing.signals[peer as usize] = count;
        Ok(())
    }
}
