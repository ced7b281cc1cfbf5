//! Memory that is registered with a communicator. The queue keeps the memory, and ends its communicator before it
//! releases the memory.
//!
//! The last deregistration of a range removes the mappings by which operations reach the range, even while the device
//! uses them (`regCleanup`, register/register.cc). So the queue stores the latest operation on each range, and waits
//! for the end of that operation first. Operations in graphs are not stored, because a graph has registrations of its
//! own (`ncclCommGraphRegister`), unless `NCCL_GRAPH_REGISTER=0`.

use super::{CommQueue, LatestOp, QueueState, for_each_buffer};
use crate::comm::Comm;
use rcomm_core::backend::Registration;
use rcomm_core::{Buffer, Deadline, Op};
use rcomm_core::{Error, ErrorKind, Result};
use rcomm_recorder::model::OpType;
use std::any::Any;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Registered ranges with their owners, and the memory of windows.
#[derive(Default)]
pub(crate) struct Registry {
    registered: Mutex<Registered>,
    /// The number of registered ranges. While there is none, operations do not take the lock.
    count: AtomicUsize,
    windows: Mutex<Windows>,
}

/// The registered ranges of a communicator.
#[derive(Default)]
struct Registered {
    /// The registered ranges, by the library's number.
    by_id: BTreeMap<u64, RegisteredRanges>,
    /// The ends of the ranges, by their first address and number.
    by_begin: BTreeMap<(u64, u64), u64>,
    /// The length of the longest range that there was.
    longest: u64,
}

/// Ranges with the same number in the library: a range in the pages of another gets the number of the other, and the
/// library counts the registrations (`ncclRegister`, register.cc). So all owners are kept until the last
/// registration is undone.
#[derive(Default)]
struct RegisteredRanges {
    /// The number of registrations that were not undone.
    count: usize,
    owners: Vec<Arc<dyn Any + Send + Sync>>,
    /// The first address of the first range, in which all others lie.
    begin: u64,
    last_use: Option<LastUse>,
}

/// The latest operation on registered memory.
#[derive(Clone)]
pub(super) enum LastUse {
    /// This operation, whose end is marked.
    Op(LatestOp),
    /// The launch of the operation with this type and number has failed, and it is unknown when the device is done with
    /// it.
    Unknown(OpType, u64),
}

impl LastUse {
    /// Whether the device may still use the memory. The context must be current.
    fn is_pending(&self) -> bool {
        match self {
            Self::Op(op) => op.is_pending(),
            Self::Unknown(..) => true,
        }
    }

    /// Returns the error that refuses a deregistration.
    fn refusal(&self) -> Error {
        match self {
            Self::Op(op) => Error::new(
                ErrorKind::Timeout,
                format!("the memory stays registered: its {op}, has not ended"),
            ),
            Self::Unknown(op, seq) => Error::new(
                ErrorKind::Backend,
                format!(
                    "the memory stays registered: the launch of its {op} #{seq} has failed, and it is unknown when the \
                     device is done with it"
                ),
            ),
        }
    }
}

impl Registered {
    /// Adds a registration of `memory` to which the library has given the number `id`.
    fn add(&mut self, id: u64, memory: &Buffer<'_>, owner: Arc<dyn Any + Send + Sync>) {
        let (begin, end) = pages_of(memory);
        let known = self.by_id.entry(id).or_default();
        if known.count == 0 {
            known.begin = begin;
            self.by_begin.insert((begin, id), end);
            self.longest = self.longest.max(end - begin);
        }
        known.count += 1;
        known.owners.push(owner);
    }

    /// Calls `visit` with each range that has some of these pages.
    fn for_each_over(
        &mut self,
        (begin, end): (u64, u64),
        mut visit: impl FnMut(&mut RegisteredRanges),
    ) {
        let candidates = (begin.saturating_sub(self.longest), 0)..(end, 0);
        for ((_, id), range_end) in self.by_begin.range(candidates) {
            if *range_end > begin
                && let Some(ranges) = self.by_id.get_mut(id)
            {
                visit(ranges);
            }
        }
    }
}

/// The first address of the pages of a buffer, and the one after them: the library registers whole pages. The page size
/// is the largest base page size of Linux, so that no page is missed.
fn pages_of(memory: &Buffer<'_>) -> (u64, u64) {
    const PAGE: u64 = 1 << 16;
    let begin = memory.as_ptr().addr() as u64;
    let end = begin + memory.size_bytes() as u64;
    (begin / PAGE * PAGE, end.next_multiple_of(PAGE))
}

/// The memory of windows, by its number.
#[derive(Default)]
struct Windows {
    /// The number that was given last.
    last: u64,
    memory: BTreeMap<u64, Box<dyn Send>>,
}

impl Registry {
    /// Leaks the memory that is registered with a communicator which is itself leaked to the library.
    pub(crate) fn leak(&self) {
        std::mem::forget(std::mem::take(&mut *self.lock()));
        std::mem::forget(std::mem::take(&mut *self.windows()));
    }

    /// Keeps the memory of a window until it is released, or the communicator has ended. Returns the number with
    /// which to [`release`](Self::release) it.
    pub(crate) fn keep(&self, memory: Box<dyn Send>) -> u64 {
        let mut windows = self.windows();
        windows.last += 1;
        let number = windows.last;
        windows.memory.insert(number, memory);
        number
    }

    /// Releases the memory of a window, to which the library no longer refers.
    pub(crate) fn release(&self, number: u64) {
        drop(self.windows().memory.remove(&number));
    }

    fn windows(&self) -> MutexGuard<'_, Windows> {
        self.windows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, Registered> {
        self.registered
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores an operation that was put on the device, or whose launch has failed, as the latest on the ranges that it
    /// uses.
    pub(super) fn note_use(&self, op: &Op<'_>, last_use: impl FnOnce() -> LastUse) {
        if self.count.load(Ordering::Acquire) == 0 {
            return;
        }
        let last_use = last_use();
        let mut registered = self.lock();
        for_each_buffer(op, &mut |buffer| {
            registered.for_each_over(pages_of(buffer), |ranges| {
                ranges.last_use = Some(last_use.clone());
            });
        });
    }
}

impl CommQueue {
    /// How long a deregistration waits for operations on the memory.
    const LAST_USE_TIME: Duration = Duration::from_secs(30);

    /// Registers memory, which stays alive until it is deregistered or the communicator has ended.
    ///
    /// # Errors
    /// `InvalidArgument` for memory without an owner or without bytes; `Closed` if the communicator does not exist;
    /// `Timeout` if the communicator is not free in time; the library's error.
    pub(crate) fn register(&self, memory: &Buffer<'static>) -> Result<Registration> {
        let refuse =
            |reason: &str| Error::new(ErrorKind::InvalidArgument, format!("{memory:?}: {reason}"));
        let Some(owner) = memory.owner() else {
            return Err(refuse(
                "nothing keeps the memory alive while it is registered",
            ));
        };
        if memory.is_empty() {
            return Err(refuse("the buffer has no bytes to register"));
        }
        let Some(comm) = self.comm() else {
            let message = "the communicator does not exist yet: issue an operation first";
            return Err(Error::new(ErrorKind::Closed, message));
        };
        let _alone = self.lock_idle(comm)?;
        let _entered = self.shared.device.enter()?;
        let mut registered = self.registry.lock();
        // SAFETY: the buffer is device memory (the backend has checked that). Its owner is kept below until the
        // registration is undone or the queue is dropped, and the queue ends its communicator before it drops
        // owners. If the communicator is leaked, the owner is leaked as well.
        let id = unsafe { comm.register(memory.as_ptr().addr() as u64, memory.size_bytes())? };
        registered.add(id, memory, owner.clone());
        let count = registered.by_id.len();
        self.registry.count.store(count, Ordering::Release);
        Ok(Registration {
            id,
            owner: owner.clone(),
        })
    }

    /// Undoes a registration, after the operations on the memory that were issued before.
    ///
    /// # Blocking
    /// Until these operations have ended, for at most [`LAST_USE_TIME`](Self::LAST_USE_TIME), if the range is
    /// registered once.
    ///
    /// # Errors
    /// `InvalidArgument` if there is no such registration; `Timeout` if operations have not ended or the communicator
    /// is not free in time; `Backend` if the launch of the latest operation on the memory has failed; the error of an
    /// abort or of the communicator; the library's error. After an error the memory is kept, and stays registered.
    pub(crate) fn deregister(&self, registration: Registration) -> Result<()> {
        let Registration { id, owner: _owner } = registration;
        let Some(comm) = self.comm() else {
            return self.forget(id);
        };
        let deadline = Deadline::In(Self::LAST_USE_TIME).started();
        let mut pause = Duration::from_micros(20);
        loop {
            // While the queue is locked, no further operation begins to use the memory.
            let alone = match comm.is_live() {
                true => Some(self.lock_idle(comm)?),
                false => None,
            };
            let _entered = self.shared.device.enter()?;
            let Some(last_use) = self.pending_use(id).filter(|_| alone.is_some()) else {
                return self.deregister_unused(comm, id, alone);
            };
            drop(alone);
            if let Some(error) = self.async_error() {
                return Err(error);
            }
            if deadline.has_passed() || matches!(last_use, LastUse::Unknown(..)) {
                return Err(last_use.refusal());
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
    }

    /// Returns the operation that may still use a range whose last registration is this one. The context must be
    /// current.
    fn pending_use(&self, id: u64) -> Option<LastUse> {
        let registered = self.registry.lock();
        let ranges = registered.by_id.get(&id)?;
        if ranges.count != 1 {
            return None;
        }
        ranges.last_use.clone().filter(LastUse::is_pending)
    }

    /// Undoes a registration of memory that no operation uses. The context must be current.
    fn deregister_unused(
        &self,
        comm: &Comm,
        id: u64,
        _alone: Option<MutexGuard<'_, QueueState>>,
    ) -> Result<()> {
        if !self.registry.lock().by_id.contains_key(&id) {
            return self.forget(id);
        }
        // SAFETY: the registration is in the map, so it comes from this communicator. The count ensures that
        // no more registrations are undone than were made.
        match unsafe { comm.deregister(id) } {
            // The communicator was ended, and its registrations with it.
            Err(error) if error.kind() == ErrorKind::Closed => {}
            // After an error the library may still refer to the memory, so its owner is kept.
            undone => undone?,
        }
        self.forget(id)
    }

    /// Counts a registration as undone, and releases the memory after the last one of its range.
    fn forget(&self, id: u64) -> Result<()> {
        let mut registered = self.registry.lock();
        let Some(known) = registered.by_id.get_mut(&id) else {
            let message = format!("there is no registration {id:#x} in this group");
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        };
        known.count -= 1;
        if known.count == 0 {
            let begin = known.begin;
            registered.by_begin.remove(&(begin, id));
            let released = registered.by_id.remove(&id);
            let count = registered.by_id.len();
            self.registry.count.store(count, Ordering::Release);
            drop(registered);
            drop(released);
        }
        Ok(())
    }
}
