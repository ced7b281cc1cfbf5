//! Loads the plug-in that cargo built, for the tests and for the bench.

use libloading::Library;
use std::ffi::c_void;
use std::path::PathBuf;

/// The library, in the folder of this program or in the one above.
pub(crate) fn path() -> PathBuf {
    let program = std::env::current_exe().expect("the path of this program");
    let deps = program.parent().expect("the program is in a folder");
    let folders = [deps, deps.parent().expect("the folder is in another")];
    let mut files = folders
        .iter()
        .map(|folder| folder.join("librcomm_nccl_profiler.so"));
    files
        .find(|file| file.is_file())
        .expect("the plug-in is built with this program")
}

pub(crate) fn load() -> Library {
    // SAFETY: loading runs the initializers of the library that cargo built, which are those of Rust's standard
    // library.
    unsafe { Library::new(path()) }.expect("the plug-in loads")
}

/// The address of the plug-in's table for a version of the interface, while the library is loaded; null if it lacks
/// that version.
pub(crate) fn table(library: &Library, version: u32) -> *const c_void {
    let name = format!("ncclProfiler_v{version}");
    // SAFETY: the symbol is taken as an address and not followed.
    unsafe {
        let symbol = library.get::<*const c_void>(name.as_bytes()).ok();
        let address = symbol.and_then(|symbol| symbol.try_as_raw_ptr());
        address.map_or(std::ptr::null(), |address| address.cast_const())
    }
}
