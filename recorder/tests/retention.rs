//! Tests which rings of dead jobs are removed, and which are kept.

use rcomm_recorder::publish::{
    KeptJobs, LaunchRecord, list_rings, remove_jobs_beside, remove_jobs_beside_within,
};
use rcomm_recorder::record::{FlightRecorder, Placement, RecorderConfig};
use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::Duration;

/// Limits that keep every job.
const MAX: KeptJobs = KeptJobs {
    jobs: usize::MAX,
    bytes: u64::MAX,
};

fn ring_on(host: Option<&str>, directory: &Path, job: &str, rank: u32) -> FlightRecorder {
    let mut config = RecorderConfig::new(job, rank, 2);
    config.placement = Placement::Dir(directory.to_owned());
    if let Some(host) = host {
        config.host = host.to_owned();
    }
    FlightRecorder::create(&config).expect("a ring in a fresh directory")
}

fn ring(directory: &Path, job: &str, rank: u32) -> FlightRecorder {
    ring_on(None, directory, job, rank)
}

/// Creates the rings of a job of two ranks that have ended without removing them.
fn create_dead_job(directory: &Path, job: &str) {
    for rank in 0..2 {
        // Dropping the recorder releases the lock without removing the file, as the end of the process does.
        drop(ring(directory, job, rank));
    }
}

/// The jobs that have rings in this directory.
fn jobs(directory: &Path) -> BTreeSet<String> {
    let rings = list_rings(directory).expect("a directory").into_iter();
    rings
        .map(|listing| listing.ring.expect("a ring").identity.job)
        .collect()
}

fn names<const N: usize>(names: [&str; N]) -> BTreeSet<String> {
    names.map(str::to_owned).into()
}

#[test]
fn the_oldest_dead_jobs_beyond_the_count_are_removed_and_no_other() {
    let directory = tempfile::tempdir().expect("a directory");
    let root = directory.path();
    for job in ["a", "b", "c", "d"] {
        create_dead_job(root, job);
    }
    let alive = ring(root, "alive", 0);
    let kept = KeptJobs { jobs: 4, ..MAX };
    assert_eq!(kept.apply(root).expect("a directory").len(), 0);
    remove_jobs_beside(alive.storage(), &KeptJobs { jobs: 2, ..MAX });
    assert_eq!(jobs(root), names(["alive", "c", "d"]));
    assert!(!root.join("a").exists());
    remove_jobs_beside(alive.storage(), &KeptJobs { jobs: 0, ..MAX });
    assert_eq!(jobs(root), names(["alive"]));
}

#[test]
fn no_ring_is_removed_once_the_time_has_passed() {
    let directory = tempfile::tempdir().expect("a directory");
    let root = directory.path();
    for job in ["a", "b"] {
        create_dead_job(root, job);
    }
    let alive = ring(root, "alive", 0);
    let none = KeptJobs { jobs: 0, ..MAX };
    assert!(remove_jobs_beside_within(
        alive.storage(),
        &none,
        Duration::ZERO
    ));
    assert_eq!(jobs(root), names(["a", "alive", "b"]));
    assert!(remove_jobs_beside_within(
        alive.storage(),
        &none,
        Duration::MAX
    ));
    assert_eq!(jobs(root), names(["alive"]));
}

#[test]
fn a_rank_leaves_dead_jobs_to_a_lower_rank_that_lives() {
    let directory = tempfile::tempdir().expect("a directory");
    let root = directory.path();
    for job in ["a", "b"] {
        create_dead_job(root, job);
    }
    let none = KeptJobs { jobs: 0, ..MAX };
    let (lower, upper) = (ring(root, "alive", 0), ring(root, "alive", 1));
    assert!(!remove_jobs_beside(upper.storage(), &none));
    assert_eq!(jobs(root), names(["a", "b", "alive"]));
    assert!(remove_jobs_beside(lower.storage(), &none));
    assert_eq!(jobs(root), names(["alive"]));
    // A lower rank that is gone, or is on another host, removes nothing here.
    create_dead_job(root, "c");
    drop(lower);
    assert!(remove_jobs_beside(upper.storage(), &none));
    assert_eq!(jobs(root), names(["alive"]));
    create_dead_job(root, "d");
    let _distant = ring_on(Some("elsewhere"), root, "alive", 0);
    remove_jobs_beside(upper.storage(), &none);
    assert_eq!(jobs(root), names(["alive"]));
}

#[test]
fn dead_jobs_beyond_the_limit_of_bytes_are_removed_but_never_the_newest() {
    let directory = tempfile::tempdir().expect("a directory");
    let root = directory.path();
    for job in ["a", "b", "c"] {
        create_dead_job(root, job);
    }
    let occupied = |job: &str| -> u64 {
        let files = std::fs::read_dir(root.join(job)).expect("a directory");
        let metadata = files.map(|file| file.and_then(|file| file.metadata()).expect("a file"));
        metadata.map(|metadata| metadata.blocks() * 512).sum()
    };
    let b_and_c = occupied("b") + occupied("c");
    let bytes = |bytes| KeptJobs { bytes, ..MAX };
    bytes(b_and_c).apply(root).expect("a directory");
    assert_eq!(jobs(root), names(["b", "c"]));
    bytes(b_and_c - 1).apply(root).expect("a directory");
    assert_eq!(jobs(root), names(["c"]));
    bytes(0).apply(root).expect("a directory");
    assert_eq!(jobs(root), names(["c"]));
}

#[test]
fn a_job_that_may_live_is_kept() {
    let directory = tempfile::tempdir().expect("a directory");
    let root = directory.path();
    // A rank of `half` lives; `distant` ran on another host, whose processes are not visible here; the launcher of
    // `restarting` lives and may start its ranks again; that of `launched` has ended.
    drop(ring(root, "half", 0));
    let _half = ring(root, "half", 1);
    drop(ring_on(Some("elsewhere"), root, "distant", 0));
    create_dead_job(root, "restarting");
    create_dead_job(root, "launched");
    let host = rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned();
    let launch = |job: &str, launcher_pid: u32, ended_ns: i64| {
        let record = LaunchRecord {
            schema: LaunchRecord::SCHEMA.to_owned(),
            job: job.to_owned(),
            host: host.clone(),
            launcher_pid,
            ended_ns,
            ..LaunchRecord::default()
        };
        record.write(root).expect("a file");
    };
    launch("restarting", std::process::id(), 0);
    launch("launched", std::process::id(), 1);
    let removed = KeptJobs { jobs: 0, ..MAX }.apply(root);
    assert_eq!(removed.expect("a directory"), [root.join("launched")]);
    assert_eq!(jobs(root), names(["half", "distant", "restarting"]));
    // The launch record was removed with the rings.
    assert!(!root.join("launched").exists());
}
