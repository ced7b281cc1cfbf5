//! Windows on device memory: [`BackendWindow`] implemented by NCCL's symmetric windows (2.27) and one-sided
//! operations (2.29).
//!
//! The library differs in four points from what a window promises. They are handled as follows:
//!
//! - *A put always signals* (`ncclPutSignal`), and signals are counted for each pair of ranks of a communicator, not
//!   for each window. So a signal of a window is a put of one 64-bit word into a table in which the receiver has an
//!   entry for each sender. The word holds two counts: the window's signals to this receiver, and the library's signals
//!   to this receiver so far. Puts to one peer arrive in order. So a receiver that reads the word waits for that many
//!   of the library's signals, which were all sent already. Then all data that were put before the signal have arrived.
//! - *A wait blocks the stream.* No wait for an unsent signal is enqueued: the host polls the word. So a wait
//!   for a signal that is never sent ends at its deadline and delays no other work.
//! - *A put's source lies in a window.* Other sources are staged in an area that lies in a window.
//! - *There is no get.* This rank's own part, and a peer's part that this device can reach
//!   (`ncclGetPeerDevicePointer`), are read by a copy; otherwise the get is refused.
//!
//! Puts and signals run on the stream of the group's communicator, after the work that was enqueued there before.
//! Source: `nccl.h`, `src/rma/rma_ce.cc` and `src/dev_runtime.cc` of NCCL 2.30.7; "One-sided communication"
//! and "Window Registration" in its user guide.

mod open;
mod put;
mod signals;

pub(crate) use open::WindowGroup;
pub(crate) use signals::Signals;

use crate::comm::store_exchange::StoreExchange;
use crate::cuda::event::Mark;
use crate::cuda::memory::{DeviceBuffer, stream_of};
use crate::cuda::stream::CudaStream;
use crate::library::sys::RawWindow;
use crate::queue::CommQueue;
use put::Outgoing;
use rcomm_core::Deadline;
use rcomm_core::RemoteMemory;
use rcomm_core::backend::BackendWindow;
use rcomm_core::{Buffer, DeviceKind};
use rcomm_core::{Error, ErrorKind, Result};
use rcomm_recorder::model::OpType;
use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, TryLockError};
use std::time::Duration;

/// The size in bytes of the staging area for puts whose source is not in a window.
const STAGING: usize = 4 << 20;
/// The size in bytes of a signal word.
const WORD: usize = size_of::<u64>();

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Memory that is a window of the communicator. The queue keeps it until it is deregistered.
struct WindowMemory {
    /// The library's handle of the window.
    handle: AtomicPtr<c_void>,
    /// The address on this rank's device.
    at: u64,
}

impl WindowMemory {
    fn handle(&self) -> RawWindow {
        self.handle.load(Ordering::Acquire)
    }
}

/// The state of a window while it is open.
struct OpenWindow {
    data: WindowMemory,
    control: WindowMemory,
    /// The caller's memory, which is the window `data`.
    memory: Buffer<'static>,
    /// rcomm's own memory, which is the window `control`: signal words from all ranks, signal words to all ranks,
    /// and the staging area.
    words: DeviceBuffer,
    /// The number under which the queue keeps `memory` and `words`.
    kept: u64,
}

/// Counts of the window's signals from one sender. The counts start at 0 when the window is made, and wrap.
#[derive(Default)]
struct Incoming {
    /// The number of signals that the program has waited for.
    taken: u32,
    /// The number of signals that have arrived, together with the data that were put before them.
    available: u32,
    /// An event, and the number of signals that will have arrived, with their data, once it is complete.
    awaited: Option<(u32, Mark)>,
}

/// The NCCL backend's [`BackendWindow`]. The memory of a window that is dropped without `close` stays registered and
/// kept until the communicator is ended.
pub(crate) struct NcclWindow {
    queue: Arc<CommQueue>,
    signals: Arc<Signals>,
    /// This rank in the group.
    group_rank: u32,
    /// The sizes in bytes of all ranks' parts.
    parts: Vec<usize>,
    exchange: StoreExchange,
    /// Whether all ranks have published that they close the window.
    all_have_closed: Mutex<bool>,
    /// The stream for copies to and from the host. Nothing on it waits for a peer.
    copies: Arc<CudaStream>,
    open: RwLock<Option<OpenWindow>>,
    outgoing: Mutex<Outgoing>,
    incoming: Vec<Mutex<Incoming>>,
}

/// Returns a buffer over the same memory that keeps the memory alive.
///
/// # Errors
/// `InvalidArgument` for memory without an owner.
fn keep_alive(memory: &Buffer<'_>) -> Result<Buffer<'static>> {
    memory.share_owner().ok_or_else(|| {
        let message =
            format!("{memory:?}: nothing keeps the memory alive until the device is done");
        Error::new(ErrorKind::InvalidArgument, message)
    })
}

fn to_c(rank: u32) -> c_int {
    // The ranks of a communicator were passed to the library as ints.
    c_int::try_from(rank).unwrap_or(c_int::MAX)
}

impl CommQueue {
    /// Blocks the host until an event is complete.
    ///
    /// # Errors
    /// `Timeout` at the deadline; the error of an abort, of the communicator or of the device; the reason why the queue
    /// is unusable.
    fn wait_for(&self, mark: &Mark, deadline: Deadline) -> Result<()> {
        let mut pause = Duration::from_micros(10);
        loop {
            {
                let _entered = self.shared.device.enter()?;
                if mark.is_done()? {
                    return Ok(());
                }
            }
            if let Some(error) = self.async_error() {
                return Err(error);
            }
            if deadline.has_passed() {
                let message = "the device did not finish the operation before the deadline";
                return Err(Error::new(ErrorKind::Timeout, message));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
    }
}

impl NcclWindow {
    /// Returns the state of the open window, which cannot be closed during this time.
    ///
    /// # Errors
    /// `Closed`.
    fn open(&self) -> Result<RwLockReadGuard<'_, Option<OpenWindow>>> {
        let open = self.open.read().unwrap_or_else(PoisonError::into_inner);
        match open.is_some() {
            true => Ok(open),
            false => Err(closed()),
        }
    }

    /// Refuses a peer that is not in the group, and a range that is not within the peer's part.
    fn check_range(&self, peer: u32, offset: usize, bytes: usize) -> Result<()> {
        let Some(&part) = self.parts.get(peer as usize) else {
            let message = format!(
                "peer {peer} is not in a group of {} ranks",
                self.parts.len()
            );
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        };
        if offset.checked_add(bytes).is_some_and(|end| end <= part) {
            return Ok(());
        }
        let message =
            format!("{bytes} bytes at offset {offset} reach beyond a window of {part} bytes");
        Err(Error::new(ErrorKind::InvalidArgument, message))
    }

    fn lacks(&self, function: &str) -> Error {
        let feature = "a one-sided operation on device memory";
        self.queue.shared.library.lacks(feature, function)
    }

    /// Refuses operations that would become part of a graph.
    fn refuse_capture(&self, stream: &CudaStream) -> Result<()> {
        let _entered = self.queue.shared.device.enter()?;
        match stream.graph()? {
            None => Ok(()),
            Some(_) => Err(Error::new(
                ErrorKind::Unsupported,
                "the stream of the buffer is being captured: puts and gets are not supported during a capture",
            )),
        }
    }

    /// Returns the address at which this device reaches the byte at `offset` in the part of a peer.
    fn address_of(&self, open: &OpenWindow, peer: u32, offset: usize) -> Result<u64> {
        if peer == self.group_rank {
            return Ok(open.data.at + offset as u64);
        }
        let library = &self.queue.shared.library;
        let (Some(comm), Some(get_pointer)) =
            (self.queue.comm(), library.table().get_peer_device_pointer)
        else {
            let feature = "a get from a window on device memory";
            return Err(library.lacks(feature, "ncclGetPeerDevicePointer"));
        };
        let _alone = self.queue.lock_idle(comm)?;
        let mut at: *mut c_void = std::ptr::null_mut();
        comm.with(|library, raw| {
            // SAFETY: the window stays registered while it is open, and `open` is borrowed; the call writes
            // one pointer through a reference.
            let status = unsafe { get_pointer(open.data.handle(), offset, to_c(peer), &mut at) };
            // SAFETY: `with` lends a live communicator, locked during the call.
            unsafe { library.check_on(raw, "ncclGetPeerDevicePointer", status) }
        })??;
        if at.is_null() {
            let message = format!(
                "this device does not reach the memory of rank {peer} of the group, and NCCL has no get: \
                 let that rank put it"
            );
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        Ok(at.expose_provenance() as u64)
    }
}

fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the window was closed")
}

impl BackendWindow for NcclWindow {
    fn size_bytes(&self, group_rank: u32) -> usize {
        self.parts.get(group_rank as usize).copied().unwrap_or(0)
    }

    fn put(&self, peer: u32, offset: usize, from: &Buffer<'_>, deadline: Deadline) -> Result<()> {
        let deadline = deadline.started();
        self.check_range(peer, offset, from.size_bytes())?;
        let open = self.open()?;
        let Some(open) = open.as_ref().filter(|_| !from.is_empty()) else {
            return Ok(());
        };
        if self.queue.shared.library.table().put_signal.is_none() {
            return Err(self.lacks("ncclPutSignal"));
        }
        match from.device().kind() {
            DeviceKind::Cpu => self.put_from_host(open, (peer, offset), from.as_bytes()?, deadline),
            DeviceKind::Cuda => {
                self.queue.shared.check_place(from)?;
                self.put_from_device(open, (peer, offset), from, deadline)
            }
        }
    }

    fn get(
        &self,
        peer: u32,
        offset: usize,
        into: &mut Buffer<'_>,
        deadline: Deadline,
    ) -> Result<()> {
        let deadline = deadline.started();
        let bytes = into.size_bytes();
        self.check_range(peer, offset, bytes)?;
        let open = self.open()?;
        let Some(open) = open.as_ref().filter(|_| bytes > 0) else {
            return Ok(());
        };
        let at = self.address_of(open, peer, offset)?;
        let device = &self.queue.shared.device;
        if into.device().kind() == DeviceKind::Cpu {
            return into.fill(|bytes| {
                let status = {
                    let _entered = device.enter()?;
                    let copy = device.driver().table().memcpy_to_host;
                    // SAFETY: the range lies in the peer's part, which stays registered while the window is open.
                    // The target is borrowed until the copy is done: `synchronize` waits for it below, also
                    // after an error.
                    unsafe {
                        copy(
                            bytes.as_mut_ptr().cast(),
                            at,
                            bytes.len(),
                            self.copies.raw(),
                        )
                    }
                };
                let copied = device.driver().check("cuMemcpyDtoHAsync", status);
                self.copies.synchronize()?;
                copied
            });
        }
        self.queue.shared.check_place(into)?;
        let held = keep_alive(into)?;
        let stream = stream_of(&held)
            .unwrap_or(&self.queue.shared.default_stream)
            .clone();
        self.refuse_capture(&stream)?;
        let marked = {
            let _entered = device.enter()?;
            let to = held.as_ptr().addr() as u64;
            // SAFETY: the copy reads `bytes` bytes of the peer's part, which stays registered while the window is
            // open. It writes as many bytes of the target, which `held` keeps until the event is complete; without
            // an event, `held` is leaked.
            unsafe { stream.copy(to, at, bytes)? };
            self.queue.shared.sync_events.mark(&stream)
        };
        let mark = match marked {
            Ok(mark) => mark,
            Err(error) => {
                // The copy is in progress, and no event follows it.
                self.queue.shared.leak(OpType::Get, Box::new(held));
                return Err(error);
            }
        };
        let waited = self.queue.wait_for(&mark, deadline);
        if waited.is_err() {
            self.queue.keep_until(OpType::Get, Box::new(held), mark);
        }
        waited
    }

    fn signal(&self, peer: u32, deadline: Deadline) -> Result<()> {
        let deadline = deadline.started();
        self.check_range(peer, 0, 0)?;
        let open = self.open()?;
        let Some(open) = open.as_ref() else {
            return Err(closed());
        };
        self.put_word(open, peer, deadline)
    }

    fn wait_signal(&self, peer: u32, deadline: Deadline) -> Result<()> {
        let deadline = deadline.started();
        let mut pause = Duration::from_micros(10);
        while !self.take_signal(peer)? {
            if deadline.has_passed() {
                let message =
                    format!("rank {peer} of the group sent no signal before the deadline");
                return Err(Error::new(ErrorKind::Timeout, message));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
        Ok(())
    }

    fn take_signal(&self, peer: u32) -> Result<bool> {
        self.check_range(peer, 0, 0)?;
        if self.queue.shared.library.table().wait_signal.is_none() {
            return Err(self.lacks("ncclWaitSignal"));
        }
        if let Some(error) = self.queue.async_error() {
            return Err(error);
        }
        let open = match self.open.try_read() {
            Ok(open) => open,
            Err(TryLockError::Poisoned(open)) => open.into_inner(),
            // The window is being closed.
            Err(TryLockError::WouldBlock) => return Ok(false),
        };
        let open = open.as_ref().ok_or_else(closed)?;
        let mut incoming = lock(&self.incoming[peer as usize]);
        let has_arrived = self.poll_signals(open, peer, &mut incoming)?;
        if has_arrived {
            incoming.taken = incoming.taken.wrapping_add(1);
        }
        Ok(has_arrived)
    }

    fn map_remote(&self, peer: u32) -> Result<RemoteMemory> {
        let message = format!(
            "the part of rank {peer} of the group is device memory, which the host cannot address"
        );
        Err(Error::new(ErrorKind::Unsupported, message))
    }

    fn close(&self, deadline: Deadline) -> Result<Option<Buffer<'static>>> {
        let deadline = deadline.started();
        let last = lock(&self.outgoing).last.clone();
        if let Some(last) = last {
            self.queue.wait_for(&last, deadline)?;
        }
        // If the library may still make a put, the window stays open: a peer could free the memory that the put
        // writes to.
        self.queue.check_usable(deadline)?;
        // Once all ranks have published that they close, no rank writes to this window. The published values are
        // removed after that.
        let mut all_have_closed = lock(&self.all_have_closed);
        if !*all_have_closed {
            self.exchange.publish("closed", b"1", deadline)?;
            self.exchange.gather("closed", deadline)?;
            *all_have_closed = true;
        }
        drop(all_have_closed);
        let mut open = self.open.write().unwrap_or_else(PoisonError::into_inner);
        let Some(open) = open.take() else {
            return Err(closed());
        };
        self.queue.deregister_window(&open.data)?;
        self.queue.deregister_window(&open.control)?;
        self.queue.registry.release(open.kept);
        Ok(Some(open.memory))
    }
}
