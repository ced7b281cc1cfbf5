//! The path of the simulator of NCCL and the CUDA driver.

use std::path::PathBuf;

const FILE: &str = "librcomm_simulator.so";

/// The shared library that cargo has built in the directory of this program.
///
/// # Panics
/// If it is not there.
pub fn path() -> PathBuf {
    let program = std::env::current_exe().expect("this program has a path");
    let near = program.ancestors().skip(1).take(2);
    let found = near.flat_map(|folder| [folder.join("deps").join(FILE), folder.join(FILE)]);
    let tried: Vec<PathBuf> = found.collect();
    let there = tried.iter().find(|path| path.exists());
    there
        .unwrap_or_else(|| panic!("the simulator is not built; looked for {tried:?}"))
        .clone()
}
