//! The rings of jobs that have died: the first communicator of a process removes the oldest.

use crate::library::Plugin;
use crate::life::run_part;
use rcomm_recorder::record::{FlightRecorder, Placement, RecorderConfig};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The default limit of docs/CONFIGURATION.md.
const KEPT: usize = 32;

fn ring_directory() -> PathBuf {
    std::env::var_os("RCOMM_RING_DIR")
        .expect("the test sets it")
        .into()
}

fn jobs(directory: &Path) -> usize {
    std::fs::read_dir(directory).expect("a folder").count()
}

#[test]
fn the_first_communicator_removes_the_oldest_rings_of_dead_jobs() {
    let directory = tempfile::tempdir().expect("a folder");
    for part in ["dead", "tidy"] {
        let output = run_part(part, directory.path(), |_| {});
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{part}: {errors}");
        assert!(!errors.contains("panicked"), "{part}: {errors}");
    }
}

/// Leaves the rings of more jobs than are kept.
pub(crate) fn dead() {
    for job in 0..KEPT + 8 {
        let config = RecorderConfig {
            placement: Placement::Dir(ring_directory()),
            entries: 64,
            ..RecorderConfig::new(format!("dead{job}"), 0, 1)
        };
        std::mem::forget(FlightRecorder::create(&config).expect("a ring"));
    }
    assert_eq!(jobs(&ring_directory()), KEPT + 8);
}

/// Makes a communicator, which does not wait for the removal, and waits until no more rings are left than are kept.
pub(crate) fn tidy(plugin: &Plugin) {
    plugin.init(Some("w"), 7, 0, 2).expect("a communicator");
    let deadline = Instant::now() + Duration::from_secs(60);
    // The job of this process is kept too.
    while jobs(&ring_directory()) != KEPT + 1 {
        assert!(Instant::now() < deadline, "{}", jobs(&ring_directory()));
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(ring_directory().join("tidy").exists());
}
