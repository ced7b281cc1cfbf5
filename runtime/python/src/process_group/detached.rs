//! [`Detached`]: a value that is dropped without the interpreter's lock.

use pyo3::prelude::*;
use rcomm::ProcessGroup;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::Arc;

/// A group that Python objects share. Only the last of them to go lets go of the interpreter's lock: programs drop
/// `world.group` after each operation.
pub(crate) type SharedGroup = Arc<Detached<ProcessGroup>>;

/// The group as Python objects share it.
pub(crate) fn shared(group: ProcessGroup) -> SharedGroup {
    Arc::new(Detached::new(group))
}

/// A world or group of a Python object. The interpreter frees objects under its lock, and the end of a world or group
/// waits for threads and other ranks: meanwhile the program's other threads are to run. A thread on which such an end
/// waits may also be freeing an array whose library takes that lock to do so.
pub(crate) struct Detached<T: Send>(ManuallyDrop<T>);

impl<T: Send> Detached<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(ManuallyDrop::new(value))
    }
}

impl<T: Send> Deref for Detached<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: Send> Drop for Detached<T> {
    fn drop(&mut self) {
        // SAFETY: the value is taken here alone, once, and `self` is not used afterwards.
        let mut value = Some(unsafe { ManuallyDrop::take(&mut self.0) });
        // A thread that cannot have the lock, since the interpreter has ended, drops the value below.
        let _ = Python::try_attach(|py| py.detach(|| drop(value.take())));
    }
}
