//! Memory that is registered with a communicator. The queue keeps it, and ends its communicator before it
//! releases what was registered.

use super::CommQueue;
use rcomm_core::Buffer;
use rcomm_core::backend::Registration;
use rcomm_core::{Error, ErrorKind, Result};
use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Registered ranges, with their owners; and the memory of windows.
#[derive(Default)]
pub(crate) struct Registry {
    /// The ranges, by the library's number.
    registered: Mutex<BTreeMap<u64, RegisteredRanges>>,
    windows: Mutex<Windows>,
}

/// Ranges with the same number in the library: a range in the pages of another range gets that range's number,
/// and the library counts the registrations (`ncclRegister`, register.cc). So all owners are kept until the last
/// registration is undone.
#[derive(Default)]
struct RegisteredRanges {
    count: usize,
    owners: Vec<Arc<dyn Any + Send + Sync>>,
}

#[derive(Default)]
struct Windows {
    last: u64,
    memory: BTreeMap<u64, Box<dyn Send>>,
}

impl Registry {
    /// Leaks what is registered with a communicator that is itself leaked to the library.
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

    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, RegisteredRanges>> {
        self.registered
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl CommQueue {
    /// Registers memory, which stays alive until it is deregistered or the communicator has ended.
    ///
    /// # Errors
    /// `InvalidArgument` for memory without an owner or without bytes; `Closed` if the communicator does not exist;
    /// `Timeout` if it is not free in time; the library's error.
    pub(crate) fn register(&self, memory: &Buffer<'static>) -> Result<Registration> {
        let refuse =
            |why: &str| Error::new(ErrorKind::InvalidArgument, format!("{memory:?}: {why}"));
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
        let known = registered.entry(id).or_default();
        known.count += 1;
        known.owners.push(owner.clone());
        Ok(Registration {
            id,
            owner: owner.clone(),
        })
    }

    /// Undoes a registration.
    ///
    /// # Errors
    /// `InvalidArgument` if there is no such registration; `Timeout` if the communicator is not free in time; the
    /// library's error, after which the memory is kept.
    pub(crate) fn deregister(&self, registration: Registration) -> Result<()> {
        let _alone = match self.comm() {
            Some(comm) if comm.is_live() => Some(self.lock_idle(comm)?),
            _ => None,
        };
        let mut registered = self.registry.lock();
        let Some(known) = registered.get_mut(&registration.id) else {
            let message = format!(
                "there is no registration {:#x} in this group",
                registration.id
            );
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        };
        if let Some(comm) = self.comm() {
            let _entered = self.shared.device.enter()?;
            // SAFETY: the registration is in the map, so it comes from this communicator. The count ensures that
            // no more registrations are undone than were made.
            match unsafe { comm.deregister(registration.id) } {
                // The communicator was ended, and its registrations with it.
                Err(error) if error.kind() == ErrorKind::Closed => {}
                // After an error the library may still refer to the memory, so its owner is kept.
                undone => undone?,
            }
        }
        known.count -= 1;
        if known.count == 0 {
            registered.remove(&registration.id);
        }
        Ok(())
    }
}
