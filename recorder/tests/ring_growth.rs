//! Tests a ring whose file is reserved while it is used: no record is lost or read incorrectly; on a full file system,
//! records are lost and counted, without further effects.

#![allow(clippy::unwrap_used)]

use rcomm_recorder::model::{OpType, ProcessGroupInfo};
use rcomm_recorder::publish::RingReader;
use rcomm_recorder::record::{
    FlightRecorder, GroupHandle, Operation, Placement, RecorderConfig, SignatureKey, SignatureRef,
    Touch,
};
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// A folder on a memory-backed file system, as rings use.
fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap()
}

fn recorder(directory: &Path) -> FlightRecorder {
    FlightRecorder::create(&RecorderConfig {
        placement: Placement::Dir(directory.to_owned()),
        touch: Touch::Ahead,
        ..RecorderConfig::new("a job", 0, 1)
    })
    .unwrap()
}

fn group(recorder: &FlightRecorder) -> GroupHandle {
    let info = ProcessGroupInfo {
        id: 0,
        name: "0".to_owned(),
        desc: "default_pg".to_owned(),
        ranks: [0].into(),
    };
    recorder.add_group(&info, Duration::from_secs(60))
}

const BARRIER: SignatureKey<'static> = SignatureKey {
    backend: "cpu",
    op_name: "barrier",
    inputs: &[],
    outputs: &[],
};

/// Records this many operations, each to its end.
fn record(recorder: &FlightRecorder, group: GroupHandle, count: u64) {
    for seq in 0..count {
        let operation = Operation {
            collective_seq_id: seq,
            ..Operation::new(group, OpType::Barrier, SignatureRef::Key(&BARRIER))
        };
        let ticket = recorder.begin(&operation);
        recorder.completed(ticket);
    }
}

fn reader(recorder: &FlightRecorder) -> RingReader {
    RingReader::attach(recorder.storage().path().unwrap()).unwrap()
}

/// Number of bytes of the ring's file that are reserved.
fn reserved_bytes(recorder: &FlightRecorder) -> u64 {
    let metadata = recorder.storage().path().unwrap().metadata().unwrap();
    metadata.blocks() * 512
}

/// Number of page faults of this thread without disk access.
fn minor_faults() -> u64 {
    let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
    let after_name = stat.rsplit(')').next().unwrap();
    // Field 10 of the file; the split has removed the first two.
    after_name
        .split_whitespace()
        .nth(7)
        .unwrap()
        .parse()
        .unwrap()
}

#[test]
fn ring_grows_as_it_is_written_and_readers_see_all_records() {
    let directory = directory();
    let recorder = recorder(directory.path());
    let group = group(&recorder);
    let early = reader(&recorder);
    let size = recorder.size_bytes() as u64;
    assert!(
        reserved_bytes(&recorder) < size / 2,
        "too much of the file is reserved at the start"
    );
    assert_eq!(early.snapshot().entries.len(), 0);
    // Reading unreserved parts does not reserve them.
    assert!(reserved_bytes(&recorder) < size / 2);

    record(&recorder, group, 5_000);
    for dump in [
        recorder.snapshot(),
        early.snapshot(),
        reader(&recorder).snapshot(),
    ] {
        let ids: Vec<u64> = dump.entries.iter().map(|entry| entry.record_id).collect();
        assert_eq!(ids, (1..=5_000).collect::<Vec<_>>());
    }
    assert!(
        reserved_bytes(&recorder) < size,
        "the whole file is reserved, though part of it was never written"
    );

    // Splits are stored after the slots.
    let splits = Operation {
        input_splits: &[3, 4],
        output_splits: &[5, 6],
        ..Operation::new(group, OpType::AllToAll, SignatureRef::Key(&BARRIER))
    };
    recorder.begin(&splits);
    for dump in [recorder.snapshot(), early.snapshot()] {
        let last = dump.entries.last().unwrap();
        let signature = &dump.signatures[last.signature as usize];
        assert_eq!(signature.input_splits, [3, 4]);
    }
    assert_eq!(reserved_bytes(&recorder), size);
    let counters = recorder.counters();
    assert_eq!((counters.records_lost, counters.updates_lost), (0, 0));
    recorder.close().unwrap();
}

#[test]
fn records_in_a_touched_ring_cause_no_page_fault() {
    let directory = directory();
    let entries = 16_384;
    let [touched_faults, untouched_faults] = [true, false].map(|touched| {
        let recorder = recorder(&directory.path().join(touched.to_string()));
        let group = group(&recorder);
        record(&recorder, group, 8);
        minor_faults();
        while touched && recorder.touch_ahead(64 << 10) {}
        let before = minor_faults();
        record(&recorder, group, entries);
        minor_faults() - before
    });
    assert!(touched_faults < 16, "{touched_faults} faults");
    // A page holds 32 records.
    assert!(
        untouched_faults >= entries / 32 - 16,
        "{untouched_faults} faults"
    );
}

#[test]
fn full_file_system_loses_records_and_counts_them() {
    let directory = tempfile::tempdir().unwrap();
    let mount = |arguments: &[&str]| {
        let status = Command::new(arguments[0])
            .args(&arguments[1..])
            .arg(directory.path())
            .status();
        status.is_ok_and(|status| status.success())
    };
    let mounted = rustix::process::geteuid().is_root()
        && mount(&["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs"]);
    if !mounted {
        eprintln!("skipped: no file system can be mounted here");
        return;
    }
    let recorder = recorder(directory.path());
    let group = group(&recorder);
    let early = reader(&recorder);
    // Another program takes the remaining space.
    let mut other = File::create(directory.path().join("other")).unwrap();
    while other.write_all(&[1; 4096]).is_ok() {}

    record(&recorder, group, 5_000);
    while recorder.touch_ahead(64 << 10) {}
    let lost = recorder.counters().records_lost;
    assert!((1..5_000).contains(&lost), "{lost} records lost");
    for dump in [
        recorder.snapshot(),
        early.snapshot(),
        reader(&recorder).snapshot(),
    ] {
        assert_eq!(dump.entries.len() as u64, 5_000 - lost);
    }
    recorder.close().unwrap();
    drop((recorder, early, other));
    assert!(mount(&["umount"]));
}
