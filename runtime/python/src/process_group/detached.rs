//! [`Detached`]: a value that is dropped without the interpreter's lock; [`SharedWork`]: an operation whose group does
//! not end under that lock.

use pyo3::prelude::*;
use rcomm::{Done, Op, ProcessGroup};
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::Arc;

/// A group that Python objects share. Only the drop of the last reference releases the interpreter's
/// lock, since programs drop `world.group` after each operation.
pub(crate) type SharedGroup = Arc<Detached<ProcessGroup>>;

/// The group as Python objects share it.
pub(crate) fn shared(group: ProcessGroup) -> SharedGroup {
    Arc::new(Detached::new(group))
}

/// A world or group of a Python object. The interpreter frees objects under its lock, and the end of a world or group
/// waits for threads and other ranks: during that wait the program's other threads must be able to run. A thread on
/// which such an end waits may also be freeing an array whose library takes that lock to do so.
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

pub(crate) type CoreWork = rcomm::Work<(Op<'static>, Done)>;

/// An operation of a Python object, which is mostly dropped under the interpreter's lock. The operation's group may
/// have no other handle left: then it ends on a thread of its own. Unlike [`Detached`], this costs nothing where it
/// does not end.
#[derive(Clone)]
pub(crate) struct SharedWork(ManuallyDrop<Arc<CoreWork>>);

impl SharedWork {
    pub(crate) fn new(work: CoreWork) -> Self {
        Self(ManuallyDrop::new(Arc::new(work)))
    }
}

impl Deref for SharedWork {
    type Target = CoreWork;

    fn deref(&self) -> &CoreWork {
        &self.0
    }
}

impl Drop for SharedWork {
    fn drop(&mut self) {
        // SAFETY: the value is taken here alone, once, and `self` is not used afterwards.
        let work = unsafe { ManuallyDrop::take(&mut self.0) };
        if let Some(work) = Arc::into_inner(work) {
            work.release();
        }
    }
}
