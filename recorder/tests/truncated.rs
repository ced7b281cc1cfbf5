//! Rings that another program truncates while they are in use: neither their owners nor their readers crash.

#![allow(clippy::unwrap_used)]

use rcomm_recorder::model::{OpType, ProcessGroupInfo};
use rcomm_recorder::publish::{RingFollower, RingReader};
use rcomm_recorder::record::{
    FlightRecorder, GroupHandle, Operation, Placement, RecorderConfig, SignatureKey, SignatureRef,
};
use std::fs::File;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Environment variable that is set in the child process of a test.
const CHILD: &str = "RCOMM_TEST_TRUNCATED";

fn recorder(directory: &Path) -> (FlightRecorder, GroupHandle, PathBuf) {
    let mut config = RecorderConfig::new("truncated", 0, 1);
    config.placement = Placement::Dir(directory.to_owned());
    config.entries = 1_024;
    let recorder = FlightRecorder::create(&config).unwrap();
    let info = ProcessGroupInfo {
        id: 0,
        name: "0".to_owned(),
        desc: "default_pg".to_owned(),
        ranks: [0].into(),
    };
    let group = recorder.add_group(&info, Duration::from_secs(60));
    let path = recorder.storage().path().unwrap().to_owned();
    (recorder, group, path)
}

fn record(recorder: &FlightRecorder, group: GroupHandle, seq: u64) {
    let key = SignatureKey {
        backend: "cpu",
        op_name: "barrier",
        ..SignatureKey::default()
    };
    let ticket = recorder.begin(&Operation {
        collective_seq_id: seq,
        ..Operation::new(group, OpType::Barrier, SignatureRef::Key(&key))
    });
    recorder.completed(ticket);
}

fn truncate(ring: &Path, bytes: u64) {
    let file = File::options().write(true).open(ring).unwrap();
    file.set_len(bytes).unwrap();
}

#[test]
fn the_owner_of_a_truncated_ring_continues_to_record_in_its_own_memory() {
    let directory = tempfile::tempdir().unwrap();
    let (recorder, group, path) = recorder(directory.path());
    record(&recorder, group, 1);
    assert!(!recorder.is_truncated());
    let reader = RingReader::attach(&path).unwrap();
    let mut follower = RingFollower::new(RingReader::attach(&path).unwrap(), 16);
    assert!(follower.poll().whole);
    for bytes in [4_096, 0] {
        truncate(&path, bytes);
        // More than the ring holds, so that every page of its slots is written to.
        for seq in 2..=3_000 {
            record(&recorder, group, seq);
        }
        recorder.phase("train");
        recorder.heartbeat();
    }
    assert!(recorder.is_truncated());
    let dump = recorder.snapshot();
    let last = dump.entries.last().unwrap();
    assert_eq!(last.collective_seq_id, 3_000);
    // Readers that were attached before report the truncation, so the rank does not seem to be idle.
    let error = reader.read().unwrap_err().to_string();
    assert!(error.contains("truncated"), "{error}");
    assert!(!follower.poll().whole);
    assert_eq!(follower.dump().entries.len(), 1);
    let error = RingReader::attach(&path).unwrap_err().to_string();
    assert!(error.contains("less than a ring's header"), "{error}");
    recorder.close().unwrap();
}

#[test]
fn readers_survive_a_ring_that_changes_its_size_under_them() {
    let directory = tempfile::tempdir().unwrap();
    let (recorder, group, path) = recorder(directory.path());
    for seq in 1..=1_024 {
        record(&recorder, group, seq);
    }
    let size = std::fs::metadata(&path).unwrap().len();
    let reader = RingReader::attach(&path).unwrap();
    assert_eq!(reader.read().unwrap().entries.len(), 1_024);
    let mut follower = RingFollower::new(RingReader::attach(&path).unwrap(), 2_048);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                truncate(&path, 4_096);
                truncate(&path, size);
            }
        });
        for _ in 0..300 {
            let _ = reader.read();
            let _ = follower.poll();
            let _ = RingReader::attach(&path).map(|reader| reader.snapshot());
        }
        stop.store(true, Ordering::Relaxed);
    });
    record(&recorder, group, 1_025);
}

#[test]
fn other_bus_errors_end_the_process() {
    if let Some(path) = std::env::var_os(CHILD) {
        access_beyond_the_end(Path::new(&path));
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "other_bus_errors_end_the_process"])
        .env(CHILD, directory.path())
        .output()
        .unwrap();
    let bus_error = rustix::process::Signal::BUS.as_raw();
    assert_eq!(child.status.signal(), Some(bus_error), "{child:?}");
}

/// Accesses a page of a mapped file that the file no longer has, while a ring of this process is guarded.
fn access_beyond_the_end(directory: &Path) {
    use rustix::mm::{MapFlags, ProtFlags, mmap};
    let (_recorder, ..) = recorder(directory);
    let file = tempfile::tempfile().unwrap();
    file.set_len(4_096).unwrap();
    // SAFETY: the kernel chooses a fresh range, and the one access to it is meant to fail.
    let byte = unsafe {
        let start = mmap(
            std::ptr::null_mut(),
            4_096,
            ProtFlags::READ,
            MapFlags::SHARED,
            &file,
            0,
        );
        file.set_len(0).unwrap();
        start.unwrap().cast::<u8>().read_volatile()
    };
    panic!("read {byte} beyond the end of the file");
}
