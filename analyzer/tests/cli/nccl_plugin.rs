//! `rcomm-fr nccl-plugin` from a release, a wheel and cargo's target folder.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

/// Runs `rcomm-fr nccl-plugin` by a link to the program in this folder; makes the link if there is none.
fn run_in(folder: &Path) -> Output {
    let program = folder.join("rcomm-fr");
    if !program.exists() {
        fs::hard_link(env!("CARGO_BIN_EXE_rcomm-fr"), &program).unwrap();
    }
    Command::new(program).arg("nccl-plugin").output().unwrap()
}

#[test]
fn the_path_of_the_plug_in_is_found_next_to_the_program_in_each_layout() {
    let beside = Path::new(env!("CARGO_BIN_EXE_rcomm-fr")).parent().unwrap();
    for plugin in [
        "lib/libnccl-profiler-rcomm.so",
        "bin/libnccl-profiler-rcomm.so",
        "bin/librcomm_nccl_profiler.so",
    ] {
        // A hard link needs the same file system.
        let root = tempfile::tempdir_in(beside).unwrap();
        let root = root.path().canonicalize().unwrap();
        let bin = root.join("bin");
        fs::create_dir_all(&bin).unwrap();
        fs::create_dir_all(root.join("lib")).unwrap();
        let absent = run_in(&bin);
        assert_eq!(absent.status.code(), Some(2), "{absent:?}");
        let error = String::from_utf8_lossy(&absent.stderr);
        assert!(
            error.contains("is not installed next to this program"),
            "{error}"
        );
        assert!(error.contains("libnccl-profiler-rcomm.so"), "{error}");
        fs::write(root.join(plugin), "").unwrap();
        let found = run_in(&bin);
        assert!(found.status.success(), "{found:?}");
        // Only the path is printed, so that a shell can put it into a variable.
        let printed = String::from_utf8_lossy(&found.stdout).into_owned();
        assert_eq!(printed, format!("{}\n", root.join(plugin).display()));
    }
}
