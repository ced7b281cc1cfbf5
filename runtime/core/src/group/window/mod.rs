//! [`Window`]: one-sided reads and writes of other ranks' memory.
//!
//! The public interface over a backend's windows adds element types, records and the group's time-outs; the
//! backend moves the bytes.

mod outstanding;
mod signal;
pub(crate) mod symmetric;

use crate::backend::memory::RemoteMemory;
use crate::backend::{self, Progress};
use crate::group::collectives::vec_of;
use crate::group::process_group::{End, OpParts, OpRecord, ProcessGroup};
use crate::group::work::Work;
use crate::op::buffer::{Buffer, DeviceKind, element_size};
use crate::op::deadline::Deadline;
use crate::op::element::Element;
use crate::op::error::{Error, ErrorKind, Result};
use outstanding::OutstandingCalls;
use rcomm_recorder::model::{DType, OpType, Peer};
use rcomm_recorder::record::Tensor;
use signal::SignalWait;
use std::fmt;
use std::panic::Location;
use std::sync::{Arc, Mutex};

/// Memory of all members of a group, which each member reads and writes one-sidedly.
///
/// Offsets and lengths are in elements; a peer is a rank of the group, or the caller itself. A get that
/// overlaps a put of the same elements may return a mix of old and new ones. A [`signal`](Self::signal)
/// arrives only after everything that was put before it:
///
/// ```no_run
/// # fn step(group: &rcomm::ProcessGroup, next: u32, previous: u32) -> rcomm::Result<()> {
/// let window = group.new_window(group.allocate::<f32>(1024)?)?;
/// window.put(next, 0, &[1.0f32; 1024])?;
/// window.signal(next)?;
/// window.wait_signal(previous)?;
/// let mut got = [0f32; 1024];
/// window.get(group.rank(), 0, &mut got)?;
/// window.close()?;
/// # Ok(()) }
/// ```
///
/// A window over host memory that is dropped without [`close`](Self::close) ends at once, and peers' later
/// accesses to it fail. With device memory, later accesses may still succeed.
///
/// # Errors
/// Puts, gets and signals fail with `InvalidArgument` for a peer, range or element type that does not fit;
/// the call then had no effect. After an error that is not [recoverable](Error::is_recoverable), the group is
/// aborted, as after the error of any operation.
///
/// # Thread safety
/// May be used by several threads at once.
pub struct Window {
    group: ProcessGroup,
    inner: Arc<dyn backend::BackendWindow>,
    dtype: DType,
    /// This rank's asynchronous puts, gets and signals that have not ended.
    outstanding: Arc<OutstandingCalls>,
}

impl ProcessGroup {
    /// Allocates zeroed memory of the kind that other members reach fastest, for a window or for collectives: host
    /// memory if the group has a backend for it, otherwise device memory. Host memory is shared memory, which other
    /// processes of the host can map.
    ///
    /// If all ranks of a group share memory and all call a long collective with such buffers, it works in the
    /// buffers, without intermediate copies. Parts of a buffer qualify if they begin at a page and end at
    /// one, or with the buffer. Results are the same whichever ranks use such buffers:
    ///
    /// ```no_run
    /// # fn step(group: &rcomm::ProcessGroup) -> rcomm::Result<()> {
    /// let mut gradients = group.allocate::<f32>(1 << 20)?;
    /// if let Some(gradients) = gradients.as_mut_slice::<f32>() {
    ///     group.all_reduce(gradients, rcomm::ReduceOp::Sum)?;
    /// }
    /// # Ok(()) }
    /// ```
    ///
    /// Each call takes a file descriptor and whole pages of memory, which return to the system as soon as the
    /// buffer is dropped. If a rank aborts in the middle of an operation, the others no longer access its
    /// buffer, whose contents stay as they are. Where the system does not let a process make shared memory,
    /// this is ordinary memory, and a warning is logged once. A child that this process forks shares the
    /// memory: the parent sees what the child writes there.
    ///
    /// Device memory is also freed at once when the last buffer over it is dropped. Operations of the group
    /// keep their buffers until they are done. The program's kernels and copies are not waited for: keep the
    /// buffer until the program has synchronized the streams that they run on.
    ///
    /// # Errors
    /// `Unsupported` if the backend has no windows; `Io` if there is no more memory.
    pub fn allocate<T: Element>(&self, len: usize) -> Result<Buffer<'static>> {
        self.allocate_of(T::DTYPE, len)
    }

    /// Like [`allocate`](Self::allocate), for an element type that is chosen at run time.
    ///
    /// # Errors
    /// Those of [`allocate`](Self::allocate); `InvalidArgument` for [`DType::Other`], which has no size.
    pub fn allocate_of(&self, dtype: DType, len: usize) -> Result<Buffer<'static>> {
        let with_group = |error: Error| error.in_group(self.desc());
        if dtype.size().is_none() {
            let message = "elements of an unknown type have no size";
            return Err(with_group(Error::new(ErrorKind::InvalidArgument, message)));
        }
        let device = self.device_of_windows().map_err(with_group)?;
        let backend = self.backend(device).ok_or_else(|| no_backend(device));
        backend
            .and_then(|backend| backend.allocate(dtype, len))
            .map_err(with_group)
    }

    /// Makes `memory` readable and writable by the other members. All members call this, each with its part
    /// of the window; parts may differ in length (and may be empty), not in element type.
    ///
    /// Any writable memory is accepted. Memory from [`allocate`](Self::allocate) is fastest, and only such
    /// memory can be [mapped](Window::map_remote).
    ///
    /// # Blocking
    /// Until all members have called it, and until this rank's earlier asynchronous operations on objects, sparse
    /// tensors and windows, and its earlier monitored barriers, have ended; or the time-out has passed.
    ///
    /// # Errors
    /// `Unsupported` if the backend has no windows, or the group no backend for this kind of memory;
    /// `InvalidArgument` if `memory` may only be read; `Mismatch`, on all ranks, if element types differ.
    #[track_caller]
    pub fn new_window(&self, memory: Buffer<'static>) -> Result<Window> {
        self.new_window_async(memory)?.wait()
    }

    /// Like [`new_window`](Self::new_window), but returns at once; the window comes with the [`Work`]. Some ranks may
    /// call the blocking form and others this one: windows are made in the order of the calls.
    #[track_caller]
    pub fn new_window_async(&self, memory: Buffer<'static>) -> Result<Work<Window>> {
        let with_context = |error: Error| error.in_group(self.desc()).during(OpType::NewWindow);
        let device = memory.device().kind();
        let backend = self.backend(device).ok_or_else(|| no_backend(device));
        let backend = backend.map_err(with_context)?.clone();
        if !memory.is_writable() {
            let message = format!("{memory:?} may only be read");
            return Err(with_context(Error::new(
                ErrorKind::InvalidArgument,
                message,
            )));
        }
        let dtype = memory.dtype();
        let shape = [memory.len() as u64];
        let carrier = backend.clone();
        let op_record = OpRecord {
            op: OpType::NewWindow,
            backend: carrier.name(),
            peer: Peer::None,
            tensor: Some(tensor(dtype, &shape)),
            parts: OpParts::None,
            end: End::Watched,
        };
        let group = self.clone();
        // The blocking form runs on the group's thread too: a backend numbers its windows in the order of
        // these calls, which must be the same on all ranks.
        self.run_on_worker(&op_record, Location::caller(), move |share| {
            let inner = backend.new_window(memory, share.deadline())?;
            Ok(Window {
                group,
                inner,
                dtype,
                outstanding: Arc::default(),
            })
        })
    }

    fn device_of_windows(&self) -> Result<DeviceKind> {
        [DeviceKind::Cpu, DeviceKind::Cuda]
            .into_iter()
            .find(|&device| self.backend(device).is_some())
            .ok_or_else(|| no_backend(DeviceKind::Cpu))
    }
}

impl Window {
    /// The number of elements in the part of `peer`.
    pub fn len_of(&self, peer: u32) -> usize {
        match self.dtype.size() {
            Some(size) => self.inner.size_bytes(peer) / size,
            None => 0,
        }
    }

    /// The element type, the same in all parts.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Writes `from` into the part of `peer`, from element `offset` on. Returns when `from` may be used
    /// again; send a [`signal`](Self::signal) to notify the peer that the data has arrived.
    #[track_caller]
    pub fn put<T: Element>(&self, peer: u32, offset: usize, from: &[T]) -> Result<()> {
        self.put_buffer(peer, offset, &Buffer::from_slice(from))
    }

    /// Like [`put`](Self::put), from memory of any kind.
    #[track_caller]
    pub fn put_buffer(&self, peer: u32, offset: usize, from: &Buffer<'_>) -> Result<()> {
        let offset = self.offset_in_bytes(OpType::Put, from, offset)?;
        let op_record = op_record(OpType::Put, peer, Some(tensor_of(from)));
        self.group
            .run_recorded(&op_record, Location::caller(), |share| {
                self.inner.put(peer, offset, from, share.deadline())
            })
    }

    /// Like [`put`](Self::put), but returns at once; the vector comes back with the [`Work`].
    ///
    /// One rank's asynchronous puts, gets and signals happen in the order of its calls.
    #[track_caller]
    pub fn put_async<T: Element>(
        &self,
        peer: u32,
        offset: usize,
        from: Vec<T>,
    ) -> Result<Work<Vec<T>>> {
        let work = self.put_buffer_async(peer, offset, Buffer::from_vec(from))?;
        Ok(work.and_then(vec_of))
    }

    /// Like [`put_async`](Self::put_async), from memory of any kind.
    #[track_caller]
    pub fn put_buffer_async(
        &self,
        peer: u32,
        offset: usize,
        from: Buffer<'static>,
    ) -> Result<Work<Buffer<'static>>> {
        let offset = self.offset_in_bytes(OpType::Put, &from, offset)?;
        let shape = from.shape().to_vec();
        let op_record = op_record(OpType::Put, peer, Some(tensor(from.dtype(), &shape)));
        let (inner, outstanding_call) = (self.inner.clone(), self.outstanding.begin());
        self.group
            .run_on_worker(&op_record, Location::caller(), move |share| {
                let _outstanding = outstanding_call;
                inner.put(peer, offset, &from, share.deadline())?;
                Ok(from)
            })
    }

    /// Fills `into` from the part of `peer`, from element `offset` on. Returns when the data is there.
    #[track_caller]
    pub fn get<T: Element>(&self, peer: u32, offset: usize, into: &mut [T]) -> Result<()> {
        self.get_buffer(peer, offset, &mut Buffer::from_mut(into))
    }

    /// Like [`get`](Self::get), into memory of any kind.
    #[track_caller]
    pub fn get_buffer(&self, peer: u32, offset: usize, into: &mut Buffer<'_>) -> Result<()> {
        let offset = self.offset_in_bytes(OpType::Get, into, offset)?;
        let shape = into.shape().to_vec();
        let op_record = op_record(OpType::Get, peer, Some(tensor(into.dtype(), &shape)));
        self.group
            .run_recorded(&op_record, Location::caller(), |share| {
                self.inner.get(peer, offset, into, share.deadline())
            })
    }

    /// Like [`get`](Self::get), but returns at once; the vector comes back, filled, with the [`Work`].
    #[track_caller]
    pub fn get_async<T: Element>(
        &self,
        peer: u32,
        offset: usize,
        into: Vec<T>,
    ) -> Result<Work<Vec<T>>> {
        let work = self.get_buffer_async(peer, offset, Buffer::from_vec(into))?;
        Ok(work.and_then(vec_of))
    }

    /// Like [`get_async`](Self::get_async), into memory of any kind.
    #[track_caller]
    pub fn get_buffer_async(
        &self,
        peer: u32,
        offset: usize,
        mut into: Buffer<'static>,
    ) -> Result<Work<Buffer<'static>>> {
        let offset = self.offset_in_bytes(OpType::Get, &into, offset)?;
        let shape = into.shape().to_vec();
        let op_record = op_record(OpType::Get, peer, Some(tensor(into.dtype(), &shape)));
        let (inner, outstanding_call) = (self.inner.clone(), self.outstanding.begin());
        self.group
            .run_on_worker(&op_record, Location::caller(), move |share| {
                let _outstanding = outstanding_call;
                inner.get(peer, offset, &mut into, share.deadline())?;
                Ok(into)
            })
    }

    /// Signals to `peer` that everything that this rank put there before has arrived. Signals are counted.
    #[track_caller]
    pub fn signal(&self, peer: u32) -> Result<()> {
        let op_record = op_record(OpType::Signal, peer, None);
        self.group
            .run_recorded(&op_record, Location::caller(), |share| {
                self.inner.signal(peer, share.deadline())
            })
    }

    /// Like [`signal`](Self::signal), but returns at once. The signal arrives after everything that was put before,
    /// also by [`put_async`](Self::put_async).
    #[track_caller]
    pub fn signal_async(&self, peer: u32) -> Result<Work<()>> {
        let op_record = op_record(OpType::Signal, peer, None);
        let (inner, outstanding_call) = (self.inner.clone(), self.outstanding.begin());
        self.group
            .run_on_worker(&op_record, Location::caller(), move |share| {
                let _outstanding = outstanding_call;
                inner.signal(peer, share.deadline())
            })
    }

    /// Consumes one signal from `peer`.
    ///
    /// # Blocking
    /// Until there is a signal, or the time-out has passed.
    #[track_caller]
    pub fn wait_signal(&self, peer: u32) -> Result<()> {
        let op_record = op_record(OpType::WaitSignal, peer, None);
        self.group
            .run_recorded(&op_record, Location::caller(), |share| {
                self.inner.wait_signal(peer, share.deadline())
            })
    }

    /// Like [`wait_signal`](Self::wait_signal), but returns at once. It waits for no other call of this rank, so it may
    /// be issued before the call that causes the peer to signal.
    #[track_caller]
    pub fn wait_signal_async(&self, peer: u32) -> Result<Work<()>> {
        let op_record = op_record(OpType::WaitSignal, peer, None);
        let wait = SignalWait {
            window: self.inner.clone(),
            peer,
            progress: Mutex::new(Progress::Started),
        };
        let site = Location::caller();
        self.group.watch_pending(&op_record, site, Arc::new(wait))
    }

    /// The part of `peer`, mapped into this process's address space: for atomic operations in place, and for
    /// copies without a record.
    ///
    /// # Errors
    /// `Unsupported` if the part cannot be mapped: it is on another host, or is not memory that
    /// [`allocate`](ProcessGroup::allocate) returned. `put` and `get` still reach it.
    pub fn map_remote(&self, peer: u32) -> Result<RemoteMemory> {
        let mapped = self.inner.map_remote(peer);
        mapped.map_err(|error| error.in_group(self.group.desc()))
    }

    /// Ends the window, once all members have called this and this rank's asynchronous puts, gets and signals
    /// are done. Returns this rank's memory, unless a member still has it mapped by
    /// [`map_remote`](Self::map_remote).
    ///
    /// # Blocking
    /// Until all members have called this, or the time-out has passed.
    ///
    /// # Errors
    /// `Timeout` if an asynchronous call has not ended, or a member has not called this; otherwise those of
    /// the backend.
    pub fn close(self) -> Result<Option<Buffer<'static>>> {
        let deadline = Deadline::In(self.group.timeout()).started();
        let closed = if self.outstanding.wait(deadline) {
            self.inner.close(deadline)
        } else {
            let message = "asynchronous puts, gets or signals have not ended";
            Err(Error::new(ErrorKind::Timeout, message))
        };
        closed.map_err(|error| error.in_group(self.group.desc()))
    }

    /// Converts `offset` from elements to bytes.
    ///
    /// # Errors
    /// `InvalidArgument` if the buffer has another element type than the window, or the offset overflows.
    fn offset_in_bytes(&self, op: OpType, buffer: &Buffer<'_>, offset: usize) -> Result<usize> {
        let refuse = |message: String| {
            let error = Error::new(ErrorKind::InvalidArgument, message);
            error.in_group(self.group.desc()).during(op)
        };
        if buffer.dtype() != self.dtype {
            let message = format!(
                "the buffer has elements of type {}, the window of {}",
                buffer.dtype(),
                self.dtype
            );
            return Err(refuse(message));
        }
        let bytes = offset.checked_mul(element_size(self.dtype));
        bytes.ok_or_else(|| refuse(format!("offset {offset} overflows in bytes")))
    }
}

fn tensor(dtype: DType, shape: &[u64]) -> Tensor<'_> {
    Tensor { dtype, shape }
}

fn tensor_of<'b>(buffer: &'b Buffer<'_>) -> Tensor<'b> {
    tensor(buffer.dtype(), buffer.shape())
}

fn op_record(op: OpType, peer: u32, tensor: Option<Tensor<'_>>) -> OpRecord<'_> {
    OpRecord {
        op,
        backend: "window",
        peer: Peer::Rank(peer),
        tensor,
        parts: OpParts::None,
        end: End::Watched,
    }
}

fn no_backend(device: DeviceKind) -> Error {
    Error::new(
        ErrorKind::Unsupported,
        format!("the group has no backend for {device} memory"),
    )
}

impl Drop for Window {
    fn drop(&mut self) {
        // Operations under way also hold the backend's window, so dropping this reference would not end it.
        self.inner.give_up();
    }
}

impl fmt::Debug for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Window")
            .field("group", &self.group.desc())
            .field("dtype", &self.dtype)
            .finish()
    }
}
