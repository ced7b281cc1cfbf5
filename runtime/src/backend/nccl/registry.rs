//! Memory that is registered with a communicator. It stays with the lane, which ends its communicator
//! before it lets go of what was registered.

use super::lane::Lane;
use crate::backend::Registration;
use crate::buffer::Buffer;
use crate::error::{Error, ErrorKind, Result};
use std::any::Any;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// What is registered, by the library's number, with what keeps it alive.
#[derive(Default)]
pub(super) struct Registry(Mutex<BTreeMap<u64, Arc<dyn Any + Send + Sync>>>);

impl Registry {
    /// Gives up what is registered with a communicator that the library keeps for ever.
    pub(super) fn leak(&self) {
        std::mem::forget(std::mem::take(&mut *self.lock()));
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<u64, Arc<dyn Any + Send + Sync>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lane {
    /// Registers memory, which stays alive until it is deregistered or the communicator is gone.
    pub(super) fn register(&self, memory: &Buffer<'static>) -> Result<Registration> {
        let refuse =
            |why: &str| Error::new(ErrorKind::InvalidArgument, format!("{memory:?}: {why}"));
        let Some(owner) = memory.owner() else {
            return Err(refuse(
                "nothing keeps the memory alive while it is registered",
            ));
        };
        if memory.is_empty() {
            return Err(refuse("there is nothing to register"));
        }
        let Some(comm) = self.comm() else {
            let message = "the communicator is not there yet: issue an operation first";
            return Err(Error::new(ErrorKind::Closed, message));
        };
        let _entered = self.shared.device.enter()?;
        let mut registered = self.registry.lock();
        // SAFETY: the buffer is device memory (the backend has checked that). Its owner is kept below until
        // the registration is undone or the lane is gone, and a lane's communicator goes first; where it
        // stays for ever the owner does, too.
        let id = unsafe { comm.register(memory.as_ptr().addr() as u64, memory.size_bytes())? };
        registered.insert(id, owner.clone());
        Ok(Registration {
            id,
            owner: owner.clone(),
        })
    }

    /// Undoes it.
    pub(super) fn deregister(&self, registration: Registration) -> Result<()> {
        if self.registry.lock().remove(&registration.id).is_none() {
            let message = format!(
                "there is no registration {:#x} in this group",
                registration.id
            );
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        }
        let Some(comm) = self.comm() else {
            return Ok(());
        };
        let _entered = self.shared.device.enter()?;
        // SAFETY: it was in the map, so it comes from this communicator and was not undone before.
        match unsafe { comm.deregister(registration.id) } {
            // The communicator has taken its registrations with it.
            Err(error) if error.kind() == ErrorKind::Closed => Ok(()),
            undone => undone,
        }
    }
}
