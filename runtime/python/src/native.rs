//! The functions that `rcomm/_hooks.cpp` calls: hooks of PyTorch that run without Python's interpreter lock.
//!
//! The C++ file is compiled for one version of PyTorch (`python -m rcomm build-hooks`). It reads PyTorch's arguments;
//! everything else is done here, so that the hooks in C++ record the same as those in Python. The C++ declarations
//! repeat the types of this file; `LAYOUT` detects a library that was built for another version of these types.

use crate::hooks::{Ending, Issued, Named, RecordedGroup, UnderWay};
use crate::tensors::Side;
use pyo3::prelude::*;
use rcomm_recorder::record::{CallSiteId, Ticket};
use std::ffi::{CStr, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Counts the changes of the types and functions below.
const LAYOUT: u32 = 2;

/// A tensor as C++ passes it.
#[repr(C)]
pub(crate) struct TensorView {
    /// PyTorch's name of the element type, such as `Float`; ends with a zero byte.
    dtype: *const c_char,
    /// The tensor's extents.
    extents: *const i64,
    /// The number of extents.
    dimensions: usize,
}

/// The arguments of a pre-hook.
#[repr(C)]
pub(crate) struct IssuedView {
    /// The number in `c10d::HookOpName`.
    name: u32,
    /// Whether the tensors are in the host's memory, 0 or 1.
    on_host: u32,
    /// The root or the peer, as a rank of the group; negative if there is none.
    root: i64,
    inputs: *const TensorView,
    input_count: usize,
    outputs: *const TensorView,
    output_count: usize,
}

/// An operation under way: the recorder's words, or zeros for none.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct OperationView {
    words: [u64; 3],
    /// [`UnderWay::waits_for_all`], 0 or 1.
    waits_for_all: u32,
    /// [`UnderWay::is_deferred`], 0 or 1.
    deferred: u32,
}

impl OperationView {
    fn under_way(self) -> UnderWay {
        UnderWay {
            ticket: Ticket::of_words(self.words),
            waits_for_all: self.waits_for_all != 0,
            is_deferred: self.deferred != 0,
        }
    }
}

/// Runs a part of the recording; returns `otherwise` if that returns `None` or panics.
fn quietly<T>(otherwise: T, run: impl FnOnce() -> Option<T>) -> T {
    catch_unwind(AssertUnwindSafe(run))
        .ok()
        .flatten()
        .unwrap_or(otherwise)
}

/// Returns [`LAYOUT`].
#[unsafe(no_mangle)]
pub(crate) extern "C" fn rcomm_python_layout() -> u32 {
    LAYOUT
}

/// Records that an operation is issued, now, by the calling thread. Takes the interpreter's lock for a moment if the
/// calling thread is one of Python's, to read which line called, and before the first deferred operation, for the
/// callback of `Ring.on_first_deferred`; waits for nothing else.
///
/// # Safety
/// `group` is an address that `GroupHooks.address()` gave; `issued` points to arguments whose lists are as long
/// as their counts.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rcomm_python_before(
    group: *const RecordedGroup,
    issued: *const IssuedView,
) {
    let is_recorded = quietly(false, || {
        // SAFETY: the group is kept to the end of the process, and the caller does not change the arguments during
        // this call.
        let (group, view) = unsafe { (group.as_ref()?, issued.as_ref()?) };
        let ring = group.shared.ring.get()?;
        // SAFETY: the caller's lists are as long as their counts, and so are the extents in them.
        let (inputs, outputs) = unsafe {
            (
                side(view.inputs, view.input_count, view.on_host != 0),
                side(view.outputs, view.output_count, view.on_host != 0),
            )
        };
        let name = Named::of(view.name as usize);
        if name.is_deferred && view.on_host != 0 {
            group.shared.first_deferred.call();
        }
        let site = call_site(|py| group.shared.sites.of_caller(py, ring));
        let issued = Issued {
            name,
            timeout: None,
            root: view.root,
            inputs,
            outputs,
        };
        group.begin(&issued, site);
        Some(true)
    });
    if !is_recorded {
        // Else the post-hook would find an operation that PyTorch refused earlier.
        quietly((), || {
            // SAFETY: the group is kept to the end of the process.
            unsafe { group.as_ref()? }.refuse_open();
            Some(())
        });
    }
}

/// Returns the operation whose post-hook the calling thread calls. `has_work` is 0 where PyTorch gave no Work: then the
/// operation has completed, which is recorded, and the result is zeros, since there is nothing to watch.
///
/// # Safety
/// `group` is an address that `GroupHooks.address()` gave.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rcomm_python_after(
    group: *const RecordedGroup,
    has_work: u32,
) -> OperationView {
    let nothing = OperationView {
        words: [0; 3],
        waits_for_all: 0,
        deferred: 0,
    };
    quietly(nothing, || {
        // SAFETY: the group is kept to the end of the process.
        let group = unsafe { group.as_ref()? };
        let operation = group.issued()?.operation;
        if has_work == 0 {
            group.ended(operation, Ending::Completed);
            return None;
        }
        Some(OperationView {
            words: operation.ticket.to_words(),
            waits_for_all: operation.waits_for_all.into(),
            deferred: operation.is_deferred.into(),
        })
    })
}

/// Whether a deferred operation must still be watched: 0 once its end was seen, a later operation proved that all
/// members have issued it, or too many deferred ones came after it.
///
/// # Safety
/// `group` is an address that `GroupHooks.address()` gave.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rcomm_python_is_deferred(
    group: *const RecordedGroup,
    operation: OperationView,
) -> u32 {
    quietly(0, || {
        // SAFETY: the group is kept to the end of the process.
        let group = unsafe { group.as_ref()? };
        Some(group.is_deferred(operation.under_way().ticket).into())
    })
}

/// Records that an operation ended, now. `ending` is 0 for one that completed, 1 for one that failed, and another
/// number for one that is not watched any more.
///
/// # Safety
/// `group` is an address that `GroupHooks.address()` gave.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn rcomm_python_ended(
    group: *const RecordedGroup,
    operation: OperationView,
    ending: u32,
) {
    quietly((), || {
        // SAFETY: the group is kept to the end of the process.
        let group = unsafe { group.as_ref()? };
        let ending = match ending {
            0 => Ending::Completed,
            1 => Ending::Failed,
            _ => Ending::Unwatched,
        };
        group.ended(operation.under_way(), ending);
        Some(())
    });
}

/// The call site, if the calling thread is one of Python's and the interpreter has not begun to end.
fn call_site(find: impl FnOnce(Python<'_>) -> Option<CallSiteId>) -> Option<CallSiteId> {
    // SAFETY: the function reads a value of the calling thread, and may be called without the interpreter's lock.
    let is_python_thread = unsafe { !pyo3::ffi::PyGILState_GetThisThreadState().is_null() };
    is_python_thread
        .then(|| Python::try_attach(find))
        .flatten()
        .flatten()
}

/// The tensors of one side of an operation.
///
/// # Safety
/// `tensors` is NULL or holds `count` tensors, each with as many extents as it has dimensions.
unsafe fn side(tensors: *const TensorView, count: usize, on_host: bool) -> Side {
    let mut side = Side::on(on_host && count > 0);
    if tensors.is_null() {
        return side;
    }
    // SAFETY: the caller's list is as long as its count.
    for tensor in unsafe { std::slice::from_raw_parts(tensors, count) } {
        // SAFETY: PyTorch's names are texts that end with a zero byte and live as long as the process; the extents
        // are as many as the dimensions, and NULL only where there are none.
        let (name, extents) = unsafe {
            let extents = match tensor.dimensions {
                0 => &[],
                dimensions => std::slice::from_raw_parts(tensor.extents, dimensions),
            };
            (CStr::from_ptr(tensor.dtype), extents)
        };
        side.push(name.to_str().unwrap_or_default(), extents);
    }
    side
}
