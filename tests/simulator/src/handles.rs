//! Handles as C callers see them: numbers in a table, so that the use of a handle after its end is detected at
//! once. The real libraries would read freed memory.

use crate::callback;
use crate::stream::lock;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex};

/// All live handles of one kind.
pub(crate) struct Handles<T> {
    kind: &'static str,
    table: Mutex<Table<T>>,
}

struct Table<T> {
    last: usize,
    live: BTreeMap<usize, Arc<T>>,
}

impl<T> Handles<T> {
    pub(crate) const fn new(kind: &'static str) -> Self {
        let live = BTreeMap::new();
        Self {
            kind,
            table: Mutex::new(Table { last: 0, live }),
        }
    }

    /// Makes a handle of a value.
    pub(crate) fn insert(&self, value: Arc<T>) -> *mut c_void {
        callback::check();
        let mut table = lock(&self.table);
        table.last += 1;
        // The handle is odd, so that it is never the address of an aligned object.
        let handle = table.last << 4 | 1;
        table.live.insert(handle, value);
        std::ptr::without_provenance_mut(handle)
    }

    /// Returns the value of a handle; `None` for null. Ends the process if the handle is not live, which is an error of
    /// the caller.
    pub(crate) fn get(&self, handle: *mut c_void) -> Option<Arc<T>> {
        callback::check();
        if handle.is_null() {
            return None;
        }
        let found = lock(&self.table).live.get(&handle.addr()).cloned();
        Some(found.unwrap_or_else(|| self.refuse(handle)))
    }

    /// Works as [`get`](Self::get); the handle is not live afterwards.
    pub(crate) fn remove(&self, handle: *mut c_void) -> Option<Arc<T>> {
        callback::check();
        if handle.is_null() {
            return None;
        }
        let found = lock(&self.table).live.remove(&handle.addr());
        Some(found.unwrap_or_else(|| self.refuse(handle)))
    }

    /// Returns the values for which `predicate` holds; their handles are not live afterwards.
    pub(crate) fn take(&self, predicate: impl Fn(&T) -> bool) -> Vec<Arc<T>> {
        let mut table = lock(&self.table);
        let taken = table.live.extract_if(.., |_, value| predicate(value));
        taken.map(|(_, value)| value).collect()
    }

    /// Returns the handle of the first value for which `predicate` holds.
    pub(crate) fn find(&self, predicate: impl Fn(&T) -> bool) -> Option<*mut c_void> {
        let table = lock(&self.table);
        let (handle, _) = table.live.iter().find(|(_, value)| predicate(value))?;
        Some(std::ptr::without_provenance_mut(*handle))
    }

    /// Whether `predicate` holds for one of the live values.
    pub(crate) fn any(&self, mut predicate: impl FnMut(&T) -> bool) -> bool {
        lock(&self.table)
            .live
            .values()
            .any(|value| predicate(value))
    }

    fn refuse(&self, handle: *mut c_void) -> ! {
        end_process(&format!("{handle:p} is not a live {}", self.kind))
    }
}

/// Ends the process after a call that would corrupt the state of the real libraries.
#[allow(clippy::print_stderr, reason = "the error of the program")]
pub(crate) fn end_process(reason: &str) -> ! {
    eprintln!("simulator: {reason}");
    std::process::abort()
}
