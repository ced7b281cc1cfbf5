//! Detects which process made an object: a process's worlds and groups do not work in a forked child.

use pyo3::prelude::*;
use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::sync::atomic::{AtomicU32, Ordering};

/// The number of forks between the process that loaded this module and this one.
static FORKS: AtomicU32 = AtomicU32::new(0);

/// Called in each forked child, right after the fork.
#[pyfunction]
pub(crate) fn note_fork() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// A value that a forked child must neither use nor drop: the threads on which the value depends run in the parent
/// only.
pub(crate) struct OfProcess<T> {
    value: ManuallyDrop<T>,
    forks: u32,
}

impl<T> OfProcess<T> {
    pub(crate) fn new(value: T) -> Self {
        Self {
            value: ManuallyDrop::new(value),
            forks: FORKS.load(Ordering::Relaxed),
        }
    }

    /// Whether this process made the value.
    pub(crate) fn is_own(&self) -> bool {
        self.forks == FORKS.load(Ordering::Relaxed)
    }
}

impl<T> Deref for OfProcess<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> Drop for OfProcess<T> {
    fn drop(&mut self) {
        if self.is_own() {
            // SAFETY: the value is dropped here alone, once, and not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.value) }
        }
    }
}
