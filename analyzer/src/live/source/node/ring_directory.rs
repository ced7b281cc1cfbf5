//! Chooses the directory in which readers look for the rings of this node.

use rcomm_recorder::record::default_directory;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// The directory in which to look for rings: `named`, or else the user's default one. `named` is the value of an option
/// whose default is the variable `RCOMM_RING_DIR`. The variable's value `memory` names no directory: the rings of jobs
/// that were started with it are in no file, and those of other jobs are in the default directory.
pub fn ring_directory(named: Option<&Path>) -> PathBuf {
    let variable = std::env::var_os("RCOMM_RING_DIR");
    without_memory(named, variable.as_deref()).map_or_else(default_directory, Path::to_owned)
}

/// The named directory, unless it is only the value `memory` of the variable.
fn without_memory<'a>(named: Option<&'a Path>, variable: Option<&OsStr>) -> Option<&'a Path> {
    named.filter(|&named| named != "memory" || variable != Some(named.as_os_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_value_memory_of_the_variable_names_no_directory() {
        let (memory, folder) = (Path::new("memory"), Path::new("/dev/shm/run7"));
        assert_eq!(without_memory(Some(memory), Some(memory.as_os_str())), None);
        // Here the user names a directory that is called `memory`.
        assert_eq!(without_memory(Some(memory), None), Some(memory));
        let variable = Some(folder.as_os_str());
        assert_eq!(without_memory(Some(memory), variable), Some(memory));
        assert_eq!(without_memory(Some(folder), variable), Some(folder));
        assert_eq!(without_memory(None, None), None);
    }
}
