//! Finds NCCL at run time, and turns the codes of its calls into errors.
//!
//! The library is loaded, not linked, so that one build runs with and without NCCL. It is searched for as
//! `libnccl.so.2`, the only file name that every distribution of NCCL has.

pub(crate) mod config;
pub(crate) mod datatype;
pub(crate) mod foreign_call;
pub(crate) mod hash;
mod simulated;
pub(crate) mod sys;

use libloading::Library;
use rcomm_core::{Error, ErrorKind, Result};
use std::collections::BTreeSet;
use std::ffi::{CStr, CString, c_char, c_int};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use sys::{NcclComm, NcclResult, NcclTable, UniqueId, result};

const SONAME: &str = "libnccl.so.2";
/// The oldest release that rcomm accepts.
const OLDEST: Version = Version(21_800);

/// A version of NCCL, as the number `NCCL_VERSION_CODE`: 23007 is 2.30.7.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub i32);

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let code = self.0;
        write!(f, "{}.{}.{}", code / 10_000, code / 100 % 100, code % 100)
    }
}

/// Where the library is searched for.
#[derive(Clone, Debug, Default)]
pub struct Search {
    /// The only file to try; `None` = search for the library.
    pub explicit: Option<PathBuf>,
    /// Root of an active Python environment; its `nvidia-nccl` package is tried last.
    pub python_prefix: Option<PathBuf>,
}

impl Search {
    /// Returns the paths to try, in order.
    fn candidates(&self) -> Vec<PathBuf> {
        if let Some(path) = &self.explicit {
            return vec![path.clone()];
        }
        let mut paths = vec![PathBuf::from(SONAME)];
        if let Some(prefix) = &self.python_prefix {
            paths.extend(wheel_libraries(prefix));
        }
        paths
    }
}

/// Returns the files `<prefix>/lib/python3*/site-packages/nvidia/nccl/lib/libnccl.so.2` that exist, sorted by path.
fn wheel_libraries(prefix: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(prefix.join("lib")) else {
        return Vec::new();
    };
    let mut found: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            path.file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with("python3"))
        })
        .map(|path| path.join("site-packages/nvidia/nccl/lib").join(SONAME))
        .filter(|path| path.exists())
        .collect();
    found.sort();
    found
}

/// A loaded NCCL.
///
/// # Thread safety
/// Any thread may use it. NCCL's groups (`ncclGroupStart`) are per thread: a group must be closed on
/// the thread that opened it.
pub struct NcclLibrary {
    table: NcclTable,
    version: Version,
    path: PathBuf,
    /// The names of communicators and algorithms that were given to the library, which are never freed.
    names: Mutex<BTreeSet<&'static CStr>>,
    // The library is never unloaded, because NCCL leaves threads and atexit handlers behind.
    _library: Option<ManuallyDrop<Library>>,
}

impl NcclLibrary {
    /// Loads the first usable library.
    ///
    /// # Errors
    /// [`ErrorKind::Backend`], with every path tried and why it could not be used.
    pub fn load(search: &Search) -> Result<Self> {
        let mut tried = Vec::new();
        for path in search.candidates() {
            match Self::load_one(&path) {
                Ok(library) => return Ok(library),
                Err(reason) => tried.push(format!("{} ({reason})", path.display())),
            }
        }
        Err(Error::new(
            ErrorKind::Backend,
            format!(
                "no usable NCCL was found; tried {}; set RCOMM_NCCL_LIB to the path of {SONAME}",
                tried.join(", ")
            ),
        ))
    }

    /// Loads the library at this path. The error is the reason why it cannot be used.
    fn load_one(path: &Path) -> Result<Self, String> {
        // SAFETY: loading runs the library's initializers. The file is NCCL by its name, or the user named it
        // as NCCL.
        let library = unsafe { Library::new(path) }.map_err(|error| error.to_string())?;
        let library = ManuallyDrop::new(library);
        // SAFETY: the names and signatures are those of nccl.h; the library is never unloaded.
        let table =
            unsafe { NcclTable::find(&library) }.map_err(|name| format!("no symbol {name}"))?;
        let mut loaded = Self::from_table(table).map_err(|error| error.to_string())?;
        path.clone_into(&mut loaded.path);
        loaded._library = Some(library);
        Ok(loaded)
    }

    /// Makes a library from these functions.
    ///
    /// # Errors
    /// [`ErrorKind::Backend`] if they report a version before 2.18, or none.
    fn from_table(table: NcclTable) -> Result<Self> {
        let mut code: c_int = 0;
        // SAFETY: the call writes one int to a local that outlives it.
        let status = unsafe { (table.get_version)(&mut code) };
        let version = Version(code);
        if status != result::SUCCESS {
            return Err(Error::new(
                ErrorKind::Backend,
                format!("ncclGetVersion failed with code {status}"),
            ));
        }
        if version < OLDEST {
            return Err(Error::new(
                ErrorKind::Backend,
                format!("NCCL {version} is older than {OLDEST}, the oldest that is supported"),
            ));
        }
        Ok(Self {
            table,
            version,
            path: PathBuf::new(),
            names: Mutex::default(),
            _library: None,
        })
    }

    /// The version that the library reports.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The path that was passed to the dynamic loader, which finds a bare file name in the system's search path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The table of functions.
    pub(crate) fn table(&self) -> &NcclTable {
        &self.table
    }

    /// Returns the name of a communicator, or a selection of algorithms, as a string that is never freed. The library
    /// keeps the pointer to a name (`parseCommConfig`, init.cc) and passes it to a profiler plug-in, which may read the
    /// name for as long as the plug-in is loaded. Each distinct name is allocated once.
    ///
    /// # Errors
    /// `InvalidArgument` for a text with a NUL byte.
    pub(crate) fn static_name(&self, name: &str) -> Result<&'static CStr> {
        let name = CString::new(name).map_err(|_| {
            let message = "a name or a selection of algorithms for NCCL holds a NUL byte";
            Error::new(ErrorKind::InvalidArgument, message)
        })?;
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = names.get(name.as_c_str()) {
            return Ok(known);
        }
        let name: &'static CStr = Box::leak(name.into_boxed_c_str());
        names.insert(name);
        Ok(name)
    }

    /// Returns an id for making one communicator, to be passed to all its ranks.
    ///
    /// # Errors
    /// [`ErrorKind::Backend`] with NCCL's own message (for example, no usable network interface).
    pub(crate) fn unique_id(&self) -> Result<UniqueId> {
        let mut id = UniqueId {
            internal: [0; UniqueId::BYTES],
        };
        // SAFETY: the call fills one id in a local that outlives it.
        let status = unsafe { (self.table.get_unique_id)(&mut id) };
        self.check("ncclGetUniqueId", status)?;
        Ok(id)
    }

    /// Checks the result of a call without a communicator, as [`NcclLibrary::check_on`] does.
    pub(crate) fn check(&self, call: &str, status: NcclResult) -> Result<()> {
        // SAFETY: `check_on` takes null for no communicator.
        unsafe { self.check_on(std::ptr::null_mut(), call, status) }
    }

    /// Turns a code into an error with the call's name, the library's message for the code, and the text of the
    /// library's last error. The error has the code as well, since the library has no message for codes that it does
    /// not know.
    ///
    /// # Errors
    /// Unless `status` is `ncclSuccess`: [`ErrorKind::PeerLost`] for `ncclRemoteError`,
    /// [`ErrorKind::Timeout`] for `ncclTimeout`, else [`ErrorKind::Backend`].
    ///
    /// # Safety
    /// `comm` is null or a live communicator of this library.
    pub(crate) unsafe fn check_on(
        &self,
        comm: NcclComm,
        call: &str,
        status: NcclResult,
    ) -> Result<()> {
        if status == result::SUCCESS {
            return Ok(());
        }
        // SAFETY: the function takes any code, and returns constant strings.
        let name = unsafe { text((self.table.get_error_string)(status)) };
        // SAFETY: the caller's `comm` is null or live. The text is in a static array of the library, whose last
        // byte is 0.
        let last = unsafe { text((self.table.get_last_error)(comm)) };
        let mut message = format!(
            "{call} failed: {} (code {status})",
            name.as_deref().unwrap_or("unknown result")
        );
        if let Some(last) = last.filter(|last| !last.is_empty()) {
            message.push_str(": ");
            message.push_str(last.trim_end());
        }
        let kind = match status {
            result::REMOTE_ERROR => ErrorKind::PeerLost,
            result::TIMEOUT => ErrorKind::Timeout,
            _ => ErrorKind::Backend,
        };
        Err(Error::new(kind, message))
    }

    /// Works as [`check_on`](Self::check_on), but accepts a call that is still in progress when it returns.
    ///
    /// # Errors
    /// As `check_on`.
    ///
    /// # Safety
    /// As for `check_on`.
    pub(crate) unsafe fn check_begun(
        &self,
        comm: NcclComm,
        call: &str,
        status: NcclResult,
    ) -> Result<()> {
        if status == result::IN_PROGRESS {
            return Ok(());
        }
        // SAFETY: the caller's `comm` is null or live.
        unsafe { self.check_on(comm, call, status) }
    }

    /// Returns the error for an operation that needs a function which this library does not have.
    pub(crate) fn lacks(&self, feature: &str, function: &str) -> Error {
        let since = NcclTable::OPTIONAL
            .iter()
            .find(|(name, _)| *name == function)
            .map_or("a later release", |(_, since)| *since);
        Error::new(
            ErrorKind::Unsupported,
            format!(
                "{feature} needs {function} (NCCL {since}); this library is {}",
                self.version
            ),
        )
    }

    /// Opens a group of calls on this thread.
    ///
    /// # Errors
    /// [`ErrorKind::Backend`] with the library's message.
    pub(crate) fn group(&self) -> Result<Group<'_>> {
        // SAFETY: the function takes no argument. Groups nest and are per thread, and `Group` stays on this
        // one.
        let status = unsafe { (self.table.group_start)() };
        self.check("ncclGroupStart", status)?;
        Ok(Group {
            library: self,
            open: true,
            _thread: std::marker::PhantomData,
        })
    }
}

/// Copies a text of the library. The text of the last error is shared by all threads, and another thread may be
/// writing to it at this moment (`ncclLastError`, debug.cc), so no reference to the text is made.
///
/// # Safety
/// `at` is null, or the address of memory that is never freed and always contains a NUL byte.
unsafe fn text(at: *const c_char) -> Option<String> {
    if at.is_null() {
        return None;
    }
    // SAFETY: the caller guarantees that a NUL byte follows, and none of the bytes before this one was NUL.
    let character = |nth| unsafe { at.add(nth).read_volatile() };
    let bytes = (0..).flat_map(|nth| character(nth).to_ne_bytes());
    let bytes: Vec<u8> = bytes.take_while(|&byte| byte != 0).collect();
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// An open `ncclGroupStart`. Not `Send`: NCCL's groups belong to the thread that opened them.
///
/// A value that is dropped without [`Group::end`] closes the group and ignores the result.
pub(crate) struct Group<'a> {
    library: &'a NcclLibrary,
    open: bool,
    _thread: std::marker::PhantomData<*const ()>,
}

impl Group<'_> {
    /// Launches the calls of the group, and returns the library's status.
    pub(crate) fn end(mut self) -> NcclResult {
        self.open = false;
        // SAFETY: this thread opened the group (`Group` is not `Send`), which is ended once: `open` is
        // false from here on.
        unsafe { (self.library.table.group_end)() }
    }
}

impl Drop for Group<'_> {
    fn drop(&mut self) {
        if self.open {
            // The result is ignored: only a caller that already returns an error drops an open group.
            // SAFETY: this thread opened the group (`Group` is not `Send`), and `end` has not ended it.
            let _: sys::NcclResult = unsafe { (self.library.table.group_end)() };
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Loads the library that `RCOMM_TEST_NCCL_LIB` names, or the system's own; `None` if there is none.
    pub(crate) fn real_library() -> Option<NcclLibrary> {
        let explicit = std::env::var_os("RCOMM_TEST_NCCL_LIB").map(PathBuf::from);
        let is_named = explicit.is_some();
        let search = Search {
            explicit,
            python_prefix: std::env::var_os("VIRTUAL_ENV").map(PathBuf::from),
        };
        match NcclLibrary::load(&search) {
            Ok(library) => Some(library),
            Err(error) if is_named => panic!("RCOMM_TEST_NCCL_LIB cannot be loaded: {error}"),
            Err(error) => skip(&error.to_string()),
        }
    }

    #[allow(clippy::print_stderr, reason = "a skipped test is reported")]
    pub(crate) fn skip<T>(reason: &str) -> Option<T> {
        eprintln!("skipped: {reason}");
        None
    }

    #[test]
    fn the_real_library_reports_its_version_and_makes_distinct_ids() {
        let Some(library) = real_library() else {
            return;
        };
        assert!(library.version() >= OLDEST, "{}", library.version());
        let first = library.unique_id().unwrap();
        let second = library.unique_id().unwrap();
        assert!(first != second);
    }
}
