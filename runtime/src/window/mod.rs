//! [`Window`]: memory of all members of a group that each reads and writes without the others' help.
//!
//! The public face over a backend's windows: typed, recorded, with the group's time-outs. What carries
//! the bytes is the backend's.

#[allow(unsafe_code)]
mod memory;

pub use memory::RemoteMemory;

use crate::backend;
use crate::buffer::{Buffer, DeviceKind};
use crate::deadline::Deadline;
use crate::element::Element;
use crate::error::{Error, ErrorKind, Result};
use crate::process_group::{Noted, ProcessGroup};
use rcomm_recorder::model::{DType, OpType, Peer};
use rcomm_recorder::record::Tensor;
use std::fmt;
use std::panic::Location;
use std::sync::Arc;

/// Memory of all members of a group that each reads and writes without the others' help.
///
/// Offsets and lengths are in elements, peers are ranks of the group (the caller's own too). What one
/// rank puts while another gets the same elements is seen by halves; a [`signal`](Self::signal) says
/// that everything put before it is there:
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
/// Dropped without [`close`](Self::close) it ends at once, and what peers still want of it fails.
///
/// # Errors
/// `InvalidArgument` for a peer, range or element type that does not fit; nothing happened then. Any
/// other error aborts the group, as an operation's does.
///
/// # Thread safety
/// May be used by several threads at once.
pub struct Window {
    group: ProcessGroup,
    inner: Arc<dyn backend::Window>,
    dtype: DType,
}

impl ProcessGroup {
    /// Memory for a window, all zero, of the kind that other members reach fastest: on the CPU backend,
    /// memory that the processes of this host share.
    ///
    /// # Errors
    /// `Unsupported` if the backend has no windows; `Io` if there is no more memory.
    pub fn allocate<T: Element>(&self, len: usize) -> Result<Buffer<'static>> {
        let named = |error: Error| error.in_group(self.desc());
        let device = self.device_of_windows().map_err(named)?;
        let backend = self.backend(device).ok_or_else(|| no_backend(device));
        backend
            .and_then(|backend| backend.allocate(T::DTYPE, len))
            .map_err(named)
    }

    /// Makes `memory` readable and writable by the other members. All members call it, each with its
    /// own part; parts may differ in length (none at all will do), not in element type.
    ///
    /// Any memory that the caller gives up will do; what [`allocate`](Self::allocate) returns is
    /// fastest, and all that can be [mapped](Window::map_remote).
    ///
    /// # Blocking
    /// Until all members have come.
    ///
    /// # Errors
    /// `Unsupported` if the backend has no windows; `Mismatch` if element types differ, on all ranks.
    #[track_caller]
    pub fn new_window(&self, memory: Buffer<'static>) -> Result<Window> {
        let site = Location::caller();
        let named = |error: Error| error.in_group(self.desc()).during(OpType::NewWindow);
        let device = memory.device().kind();
        let backend = self.backend(device).ok_or_else(|| no_backend(device));
        let backend = backend.map_err(named)?.clone();
        if !memory.is_writable() {
            let message = format!("{memory:?} may only be read");
            return Err(named(Error::new(ErrorKind::InvalidArgument, message)));
        }
        let dtype = memory.dtype();
        let shape = [memory.len() as u64];
        let noted = Noted {
            op: OpType::NewWindow,
            backend: backend.name(),
            peer: Peer::None,
            tensor: Some(Tensor {
                dtype,
                shape: &shape,
            }),
        };
        let inner = self.carry_out(&noted, site, |deadline| {
            backend.new_window(memory, deadline)
        })?;
        Ok(Window {
            group: self.clone(),
            inner,
            dtype,
        })
    }

    fn device_of_windows(&self) -> Result<DeviceKind> {
        [DeviceKind::Cpu, DeviceKind::Cuda]
            .into_iter()
            .find(|&device| self.backend(device).is_some())
            .ok_or_else(|| no_backend(DeviceKind::Cpu))
    }

    /// Numbers and records what `body` does, and settles its error as an operation's.
    pub(crate) fn carry_out<R>(
        &self,
        noted: &Noted<'_>,
        site: &'static Location<'static>,
        body: impl FnOnce(Deadline) -> Result<R>,
    ) -> Result<R> {
        let group = &self.group;
        let (voyage, tickets) = group.note(noted, self.timeout(), site)?;
        let result = body(Deadline::In(voyage.timeout).started());
        let result = match result {
            Ok(value) => {
                tickets.completed(group.recorder(), backend::Done::default());
                Ok(value)
            }
            Err(error) => {
                let error = group.settle_error(&voyage, error);
                tickets.failed(group.recorder());
                Err(error)
            }
        };
        tickets.retired(group.recorder());
        result
    }
}

impl Window {
    /// Elements in the part of this rank of the group.
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
    /// again; the peer knows that it is there by a [`signal`](Self::signal).
    #[track_caller]
    pub fn put<T: Element>(&self, peer: u32, offset: usize, from: &[T]) -> Result<()> {
        let offset = self.bytes::<T>(OpType::Put, offset)?;
        let shape = [from.len() as u64];
        let tensor = Tensor {
            dtype: T::DTYPE,
            shape: &shape,
        };
        let buffer = Buffer::from_slice(from);
        self.carry_out(OpType::Put, peer, Some(tensor), |deadline| {
            self.inner.put(peer, offset, &buffer, deadline)
        })
    }

    /// Reads from the part of `peer`, from element `offset` on.
    #[track_caller]
    pub fn get<T: Element>(&self, peer: u32, offset: usize, into: &mut [T]) -> Result<()> {
        let offset = self.bytes::<T>(OpType::Get, offset)?;
        let shape = [into.len() as u64];
        let tensor = Tensor {
            dtype: T::DTYPE,
            shape: &shape,
        };
        let mut buffer = Buffer::from_mut(into);
        self.carry_out(OpType::Get, peer, Some(tensor), |deadline| {
            self.inner.get(peer, offset, &mut buffer, deadline)
        })
    }

    /// Tells `peer` that everything put there before has arrived. Signals are counted.
    #[track_caller]
    pub fn signal(&self, peer: u32) -> Result<()> {
        self.carry_out(OpType::Signal, peer, None, |deadline| {
            self.inner.signal(peer, deadline)
        })
    }

    /// Takes one signal of `peer`.
    ///
    /// # Blocking
    /// Until there is one, or the time-out.
    #[track_caller]
    pub fn wait_signal(&self, peer: u32) -> Result<()> {
        self.carry_out(OpType::WaitSignal, peer, None, |deadline| {
            self.inner.wait_signal(peer, deadline)
        })
    }

    /// The part of `peer` in this process's own address space: for atomic operations in place, and
    /// copies without a record.
    ///
    /// # Errors
    /// `Unsupported` where it cannot be mapped: on another host, or if it is not of memory that
    /// [`allocate`](ProcessGroup::allocate) returned. `put` and `get` reach it all the same.
    pub fn map_remote(&self, peer: u32) -> Result<RemoteMemory> {
        let mapped = self.inner.map_remote(peer);
        mapped.map_err(|error| error.in_group(self.group.desc()))
    }

    /// Ends the window, once all members have called this. Gives this rank's memory back, unless it is
    /// still mapped by [`map_remote`](Self::map_remote).
    ///
    /// # Blocking
    /// Until all members have come, or the time-out.
    pub fn close(self) -> Result<Option<Buffer<'static>>> {
        let deadline = Deadline::In(self.group.timeout()).started();
        let closed = self.inner.close(deadline);
        closed.map_err(|error| error.in_group(self.group.desc()))
    }

    fn bytes<T: Element>(&self, op: OpType, offset: usize) -> Result<usize> {
        let refuse = |message: String| {
            let error = Error::new(ErrorKind::InvalidArgument, message);
            error.in_group(self.group.desc()).during(op)
        };
        if T::DTYPE != self.dtype {
            let message = format!("{} for a window of {}", T::DTYPE, self.dtype);
            return Err(refuse(message));
        }
        let bytes = offset.checked_mul(size_of::<T>());
        bytes.ok_or_else(|| refuse(format!("offset {offset} is beyond all memory")))
    }

    #[track_caller]
    fn carry_out<R>(
        &self,
        op: OpType,
        peer: u32,
        tensor: Option<Tensor<'_>>,
        body: impl FnOnce(Deadline) -> Result<R>,
    ) -> Result<R> {
        let site = Location::caller();
        let noted = Noted {
            op,
            backend: "window",
            peer: Peer::Rank(peer),
            tensor,
        };
        self.group.carry_out(&noted, site, body)
    }
}

fn no_backend(device: DeviceKind) -> Error {
    Error::new(
        ErrorKind::Unsupported,
        format!("the group has no backend for {device} memory"),
    )
}

impl fmt::Debug for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Window")
            .field("group", &self.group.desc())
            .field("dtype", &self.dtype)
            .finish()
    }
}
