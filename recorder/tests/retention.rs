//! How long the rings of dead jobs are kept.

use rcomm_recorder::publish::{KeptJobs, LaunchRecord, list_rings, remove_jobs_beside};
use rcomm_recorder::record::{FlightRecorder, Placement, RecorderConfig};
use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

const ALL: KeptJobs = KeptJobs {
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

/// A job of two ranks whose rings were left behind.
fn dead(directory: &Path, job: &str) {
    for rank in 0..2 {
        // Dropping it releases the lock without removing the file, as the end of the process does.
        drop(ring(directory, job, rank));
    }
}

fn jobs(directory: &Path) -> BTreeSet<String> {
    let rings = list_rings(directory).expect("a directory").into_iter();
    rings
        .map(|it| it.ring.expect("a ring").identity.job)
        .collect()
}

fn names<const N: usize>(names: [&str; N]) -> BTreeSet<String> {
    names.map(str::to_owned).into()
}

#[test]
fn the_oldest_dead_jobs_beyond_the_count_are_removed_and_no_other() {
    let directory = tempfile::tempdir().expect("a directory");
    let place = directory.path();
    for job in ["a", "b", "c", "d"] {
        dead(place, job);
    }
    let alive = ring(place, "alive", 0);
    let kept = KeptJobs { jobs: 4, ..ALL };
    assert_eq!(kept.apply(place).expect("a directory").len(), 0);
    remove_jobs_beside(&alive, &KeptJobs { jobs: 2, ..ALL });
    assert_eq!(jobs(place), names(["alive", "c", "d"]));
    assert!(!place.join("a").exists());
    remove_jobs_beside(&alive, &KeptJobs { jobs: 0, ..ALL });
    assert_eq!(jobs(place), names(["alive"]));
}

#[test]
fn dead_jobs_beyond_the_bytes_are_removed_but_never_the_newest() {
    let directory = tempfile::tempdir().expect("a directory");
    let place = directory.path();
    for job in ["a", "b", "c"] {
        dead(place, job);
    }
    let occupied = |job: &str| -> u64 {
        let files = std::fs::read_dir(place.join(job)).expect("a directory");
        let about = files.map(|file| file.and_then(|file| file.metadata()).expect("a file"));
        about.map(|about| about.blocks() * 512).sum()
    };
    let two = occupied("b") + occupied("c");
    let bytes = |bytes| KeptJobs { bytes, ..ALL };
    bytes(two).apply(place).expect("a directory");
    assert_eq!(jobs(place), names(["b", "c"]));
    bytes(two - 1).apply(place).expect("a directory");
    assert_eq!(jobs(place), names(["c"]));
    bytes(0).apply(place).expect("a directory");
    assert_eq!(jobs(place), names(["c"]));
}

#[test]
fn a_job_that_may_live_is_kept() {
    let directory = tempfile::tempdir().expect("a directory");
    let place = directory.path();
    // One rank of it lives; one is of another host, whose processes are not seen from here; one's launcher lives,
    // and may start its ranks again.
    drop(ring(place, "half", 0));
    let _half = ring(place, "half", 1);
    drop(ring_on(Some("elsewhere"), place, "distant", 0));
    dead(place, "restarting");
    dead(place, "launched");
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
        record.write(place).expect("a file");
    };
    launch("restarting", std::process::id(), 0);
    launch("launched", std::process::id(), 1);
    let removed = KeptJobs { jobs: 0, ..ALL }.apply(place);
    assert_eq!(removed.expect("a directory"), [place.join("launched")]);
    assert_eq!(jobs(place), names(["half", "distant", "restarting"]));
    // Its launcher's account has gone with it.
    assert!(!place.join("launched").exists());
}
