//! Finds the call site in the program: the innermost Python frame outside of PyTorch, of this package, and of those
//! parts of the standard library through which these two are called.

use hashbrown::HashMap;
use pyo3::intern;
use pyo3::prelude::*;
use rcomm_recorder::record::{CallSiteId, FlightRecorder};
use std::sync::Mutex;

/// The most frames that are examined.
const MAX_DEPTH: usize = 64;
/// The most code objects that are cached; further ones are looked up each time.
const MAX_CODE_OBJECTS: usize = 4_096;

/// The classification of a code object.
#[derive(Clone, Copy, PartialEq)]
enum Code {
    /// The code is not the program's.
    Library,
    Program,
}

/// Finds call sites, and keeps those seen so far.
pub(crate) struct CallSites {
    /// Folders and files whose code is not the program's.
    library_code: Vec<String>,
    /// Never waited for: reading a frame can run a finalizer of the program, which may issue an operation itself.
    seen: Mutex<Seen>,
}

/// What was seen so far. Every operation looks into both maps, which have a fast hash.
#[derive(Default)]
struct Seen {
    /// The classes of code objects, by address. Each object is kept alive so that no other one gets its address.
    code: HashMap<usize, (Code, Py<PyAny>)>,
    /// Call sites by the address of the code object and the instruction. They are kept since Python finds the line of
    /// an instruction by a search from the beginning of the function.
    sites: HashMap<(usize, i32), CallSiteId>,
}

impl CallSites {
    pub(crate) fn new(library_code: Vec<String>) -> Self {
        Self {
            library_code,
            seen: Mutex::default(),
        }
    }

    /// The calling thread's call site; `None` if none of the innermost [`MAX_DEPTH`] frames runs code of the program,
    /// or if they cannot be read now.
    pub(crate) fn of_caller(&self, py: Python<'_>, ring: &FlightRecorder) -> Option<CallSiteId> {
        let mut seen = self.seen.try_lock().ok()?;
        let mut frame = innermost(py)?;
        for _ in 0..MAX_DEPTH {
            let code = code_of(&frame)?;
            let (kind, is_cached) = self.classify(&mut seen, &code)?;
            if kind == Code::Program {
                return site(&mut seen, ring, &frame, &code, is_cached);
            }
            frame = frame.getattr(intern!(py, "f_back")).ok()?;
            if frame.is_none() {
                return None;
            }
        }
        None
    }

    /// Classifies a code object; also returns whether it is in the cache now.
    fn classify(&self, seen: &mut Seen, code: &Bound<'_, PyAny>) -> Option<(Code, bool)> {
        let address = code.as_ptr().addr();
        if let Some((kind, _)) = seen.code.get(&address) {
            return Some((*kind, true));
        }
        let file = code.getattr(intern!(code.py(), "co_filename")).ok()?;
        let file = file.extract::<String>().ok()?;
        let is_library = file.starts_with("<frozen")
            || self.library_code.iter().any(|path| file.starts_with(path));
        let kind = if is_library {
            Code::Library
        } else {
            Code::Program
        };
        let has_space = seen.code.len() < MAX_CODE_OBJECTS;
        if has_space {
            seen.code.insert(address, (kind, code.clone().unbind()));
        }
        Some((kind, has_space))
    }
}

/// The call site at this line; adds it to the ring's table unless it was seen before and its code is cached.
fn site(
    seen: &mut Seen,
    ring: &FlightRecorder,
    frame: &Bound<'_, PyAny>,
    code: &Bound<'_, PyAny>,
    is_cached: bool,
) -> Option<CallSiteId> {
    let py = code.py();
    let instruction = frame.getattr(intern!(py, "f_lasti")).ok()?;
    let key = (code.as_ptr().addr(), instruction.extract::<i32>().ok()?);
    if is_cached && let Some(site) = seen.sites.get(&key) {
        return Some(*site);
    }
    let line = frame.getattr(intern!(py, "f_lineno")).ok()?;
    let line = line.extract::<u32>().unwrap_or(0);
    let text = |name| code.getattr(name).ok()?.extract::<String>().ok();
    let file = text(intern!(py, "co_filename"))?;
    let function = text(intern!(py, "co_name")).unwrap_or_default();
    let site = ring.intern_call_site(&file, &function, line);
    if is_cached {
        seen.sites.insert(key, site);
    }
    Some(site)
}

/// The code object of a frame.
fn code_of<'py>(frame: &Bound<'py, PyAny>) -> Option<Bound<'py, PyAny>> {
    // SAFETY: the object is a frame: one that `innermost` returned, or a `f_back` that is not None. The reference that
    // is returned is a new one.
    unsafe {
        let code = pyo3::ffi::PyFrame_GetCode(frame.as_ptr().cast());
        Bound::from_owned_ptr_or_opt(frame.py(), code.cast())
    }
}

/// The frame that the calling thread runs.
fn innermost(py: Python<'_>) -> Option<Bound<'_, PyAny>> {
    // SAFETY: the interpreter is held (`py`). The frame is a borrowed reference, which the thread's stack
    // keeps during this call; a new reference is taken of it unless it is NULL.
    unsafe {
        let frame = pyo3::ffi::PyEval_GetFrame();
        Bound::from_borrowed_ptr_or_opt(py, frame.cast())
    }
}
