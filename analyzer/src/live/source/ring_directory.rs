//! Where readers look for the rings of this node.

use rcomm_recorder::record::default_directory;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};

/// The directory in which to look for rings: the one that a command line names by an option whose default is
/// `RCOMM_RING_DIR`, else the user's default one. The variable's value `memory` is not a directory: it keeps the rings
/// of the jobs started with it out of reach, and those of other jobs are in the default one.
pub fn ring_directory(named: Option<&Path>) -> PathBuf {
    let variable = std::env::var_os("RCOMM_RING_DIR");
    among(named, variable.as_deref()).map_or_else(default_directory, Path::to_owned)
}

/// The named directory, unless it is only the value `memory` of the variable.
fn among<'a>(named: Option<&'a Path>, variable: Option<&OsStr>) -> Option<&'a Path> {
    named.filter(|&named| named != "memory" || variable != Some(named.as_os_str()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_in_memory_are_no_directory_of_this_name() {
        let (memory, folder) = (Path::new("memory"), Path::new("/dev/shm/run7"));
        assert_eq!(among(Some(memory), Some(memory.as_os_str())), None);
        // The user names a directory of this name.
        assert_eq!(among(Some(memory), None), Some(memory));
        let variable = Some(folder.as_os_str());
        assert_eq!(among(Some(memory), variable), Some(memory));
        assert_eq!(among(Some(folder), variable), Some(folder));
        assert_eq!(among(None, None), None);
    }
}
