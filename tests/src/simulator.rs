//! Finds the libraries that tests load: the simulator of NCCL and the CUDA driver, and the plug-in for NCCL's profiler
//! interface.

use std::path::PathBuf;

/// The path of the simulator that cargo has built in the directory of this program.
///
/// # Panics
/// If cargo has not built it.
pub fn path() -> PathBuf {
    library("librcomm_simulator.so")
}

/// The path of the plug-in that cargo has built with the tests of this package.
///
/// # Panics
/// If cargo has not built it.
pub fn profiler_path() -> PathBuf {
    library("librcomm_nccl_profiler.so")
}

fn library(file: &str) -> PathBuf {
    let program = std::env::current_exe().expect("this program has a path");
    let folders = program.ancestors().skip(1).take(2);
    let candidates = folders.flat_map(|folder| [folder.join("deps").join(file), folder.join(file)]);
    let candidates: Vec<PathBuf> = candidates.collect();
    let found = candidates.iter().find(|path| path.exists());
    found
        .unwrap_or_else(|| panic!("none of {candidates:?} exists; build the workspace's tests"))
        .clone()
}
