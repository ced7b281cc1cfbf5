//! Memory that is registered with a group's communicator.

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
    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<u64, Arc<dyn Any + Send + Sync>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers memory, which stays alive until it is deregistered or the backend is gone.
    pub(super) fn register(&self, lane: &Lane, memory: &Buffer<'static>) -> Result<Registration> {
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
        let Some(comm) = lane.comm() else {
            let message = "the communicator is not there yet: issue an operation first";
            return Err(Error::new(ErrorKind::Closed, message));
        };
        let _entered = lane.shared.device.enter()?;
        // Held over the call: a communicator that goes has its registrations undone before.
        let mut registered = self.lock();
        // SAFETY: the buffer is device memory (the backend has checked that), and its owner is kept below
        // until the registration is undone.
        let id = unsafe { comm.register(memory.as_ptr().addr() as u64, memory.size_bytes())? };
        registered.insert(id, owner.clone());
        Ok(Registration {
            id,
            owner: owner.clone(),
        })
    }

    /// Undoes it.
    pub(super) fn deregister(&self, lane: &Lane, registration: Registration) -> Result<()> {
        if self.lock().remove(&registration.id).is_none() {
            let message = format!(
                "there is no registration {:#x} in this group",
                registration.id
            );
            return Err(Error::new(ErrorKind::InvalidArgument, message));
        }
        let Some(comm) = lane.comm() else {
            return Ok(());
        };
        let _entered = lane.shared.device.enter()?;
        // SAFETY: it was in the map, so it comes from this communicator and was not undone before.
        match unsafe { comm.deregister(registration.id) } {
            // The communicator has taken its registrations with it.
            Err(error) if error.kind() == ErrorKind::Closed => Ok(()),
            undone => undone,
        }
    }
}
