//! The paths of libraries that tests load: the simulator of NCCL and the CUDA driver, and the plug-in for NCCL's
//! profiler interface.

use std::path::PathBuf;

/// The simulator, as cargo has built it in the directory of this program.
///
/// # Panics
/// If it is not there.
pub fn path() -> PathBuf {
    library("librcomm_simulator.so")
}

/// The plug-in, as cargo has built it with the tests of this package.
///
/// # Panics
/// If it is not there.
pub fn profiler_path() -> PathBuf {
    library("librcomm_nccl_profiler.so")
}

fn library(file: &str) -> PathBuf {
    let program = std::env::current_exe().expect("this program has a path");
    let near = program.ancestors().skip(1).take(2);
    let candidates = near.flat_map(|folder| [folder.join("deps").join(file), folder.join(file)]);
    let candidates: Vec<PathBuf> = candidates.collect();
    let found = candidates.iter().find(|path| path.exists());
    found
        .unwrap_or_else(|| panic!("none of {candidates:?} exists; build the workspace's tests"))
        .clone()
}
