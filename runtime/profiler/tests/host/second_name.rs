//! Loads the plug-in by its second name, as in a wheel, which holds no links.

use crate::loader;
use libloading::Library;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

#[test]
#[allow(clippy::print_stderr, reason = "a test that is skipped says so")]
fn the_plugin_s_second_name_leads_to_the_plugin_and_leaves_it_loaded() {
    if Command::new("cc").arg("--version").output().is_err() {
        eprintln!("skipped: no C compiler");
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let first: PathBuf = folder.path().join("libnccl-profiler-rcomm.so");
    symlink(loader::path(), &first).expect("a link");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.ci/second-name");
    let output = Command::new(script).arg(folder.path()).output();
    let output = output.expect("a shell");
    assert!(output.status.success(), "{output:?}");
    let second = folder.path().join("librcomm_nccl_profiler.so");
    let size = second.metadata().expect("a library").len();
    assert!(size < 32 << 10, "{size} bytes");

    let open = |path: &Path| {
        // SAFETY: loading runs the initializers of the plug-in, which are those of Rust's standard library; the library
        // of the second name has none.
        unsafe { Library::new(path) }.expect("it loads")
    };
    let by_second = open(&second);
    let tables: Vec<_> = (1..=6)
        .map(|version| loader::table(&by_second, version))
        .collect();
    assert!(tables.iter().all(|table| !table.is_null()));
    assert!(loader::table(&by_second, 7).is_null());
    // NCCL closes the library with its last communicator; the plug-in stays where it is.
    drop(by_second);
    for path in [&first, &second] {
        let again = open(path);
        let found: Vec<_> = (1..=6)
            .map(|version| loader::table(&again, version))
            .collect();
        assert_eq!(found, tables, "{}", path.display());
    }
}
