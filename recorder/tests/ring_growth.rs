//! Tests a ring whose file is reserved while the ring is in use.
//!
//! No record is lost or read incorrectly, also if several threads need space at once, or if signals and forks occur
//! meanwhile. On a full file system, records are lost and counted, without further effects.

#![allow(clippy::unwrap_used, clippy::print_stderr)]

mod child;

use child::Child;
use rcomm_recorder::model::{OpType, ProcessGroupInfo};
use rcomm_recorder::publish::RingReader;
use rcomm_recorder::record::{
    FlightRecorder, GroupHandle, Operation, Placement, RecorderConfig, SignatureKey, SignatureRef,
    Touch,
};
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::Command;
use std::sync::Barrier;
use std::time::{Duration, Instant};

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
    group_of(recorder, 0)
}

fn group_of(recorder: &FlightRecorder, id: u32) -> GroupHandle {
    let info = ProcessGroupInfo {
        id,
        name: id.to_string(),
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

/// Where a ring's header states the number of its reserved bytes.
const RESERVED: u64 = 12 * 8;

/// Number of threads that need space at once.
const THREADS: u32 = 4;

/// Records operations on [`THREADS`] threads, `each` on every thread, which has a group of its own, while `beside` runs
/// on this thread. Returns the number of operations.
fn record_at_once(recorder: &FlightRecorder, each: u64, beside: impl FnOnce() + Send) -> u64 {
    let start = Barrier::new(THREADS as usize + 1);
    std::thread::scope(|scope| {
        for id in 0..THREADS {
            let (start, group) = (&start, group_of(recorder, id));
            scope.spawn(move || {
                start.wait();
                record(recorder, group, each);
            });
        }
        start.wait();
        beside();
    });
    u64::from(THREADS) * each
}

#[test]
fn threads_that_need_space_at_once_lose_no_record_and_no_reservation() {
    let directory = directory();
    for round in 0..40 {
        let recorder = recorder(&directory.path().join(round.to_string()));
        let early = reader(&recorder);
        let whole = recorder.size_bytes() as u64;
        // In every second round, this thread reserves ahead meanwhile, as a thread of a program does.
        let count = record_at_once(&recorder, 1_500, || {
            while round % 2 == 0 && recorder.touch_ahead(64 << 10) {}
        });
        for dump in [recorder.snapshot(), early.snapshot()] {
            let ids: Vec<u64> = dump.entries.iter().map(|entry| entry.record_id).collect();
            assert_eq!(ids, (1..=count).collect::<Vec<_>>(), "round {round}");
        }
        let counters = recorder.counters();
        assert_eq!((counters.records_lost, counters.updates_lost), (0, 0));
        if round % 2 == 0 {
            assert_eq!(reserved_bytes(&recorder), whole, "round {round}");
        }
        recorder.close().unwrap();
    }
}

#[test]
fn of_reservations_at_once_the_header_states_the_largest() {
    let directory = directory();
    for round in 0..100 {
        let recorder = FlightRecorder::create(&RecorderConfig {
            placement: Placement::Dir(directory.path().join(round.to_string())),
            touch: Touch::Ahead,
            entries: 4_096,
            ..RecorderConfig::new("a job", 0, 1)
        })
        .unwrap();
        let start = Barrier::new(THREADS as usize);
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                scope.spawn(|| {
                    start.wait();
                    while recorder.touch_ahead(16 << 10) {}
                });
            }
        });
        record(&recorder, group(&recorder), 4_096);
        let whole = recorder.size_bytes() as u64;
        let mut stated = [0; 8];
        let file = File::open(recorder.storage().path().unwrap()).unwrap();
        file.read_exact_at(&mut stated, RESERVED).unwrap();
        assert_eq!(
            (reserved_bytes(&recorder), u64::from_le_bytes(stated)),
            (whole, whole),
            "round {round}"
        );
        let seen = reader(&recorder).snapshot().entries.len();
        assert_eq!(seen, 4_096, "round {round}");
        recorder.close().unwrap();
    }
}

#[test]
fn forks_while_threads_need_space_lose_no_record() {
    let directory = directory();
    for round in 0..5 {
        let recorder = recorder(&directory.path().join(round.to_string()));
        let count = record_at_once(&recorder, 3_000, || {
            for _ in 0..5 {
                assert!(Command::new("true").status().unwrap().success());
            }
        });
        assert_eq!(recorder.snapshot().entries.len() as u64, count);
        assert_eq!(recorder.counters().records_lost, 0);
        recorder.close().unwrap();
    }
}

/// Not a test by itself: reserves rings again and again until it has been stopped often enough, and prints how many of
/// them were not reserved whole or lost a record.
#[test]
#[ignore = "the next test runs it as a separate process"]
fn reserving() {
    let Some(directory) = child::directory() else {
        return;
    };
    child::print_line("begins");
    let mut torn = 0;
    for round in 0.. {
        let recorder = recorder(&directory.join(round.to_string()));
        let group = group(&recorder);
        while recorder.touch_ahead(64 << 10) {}
        record(&recorder, group, 16);
        let is_whole = reserved_bytes(&recorder) == recorder.size_bytes() as u64;
        torn += u32::from(!is_whole || recorder.counters().records_lost > 0);
        recorder.close().unwrap();
        if directory.join("enough").exists() {
            break;
        }
    }
    child::print_line(&torn.to_string());
}

#[test]
fn signals_while_space_is_reserved_stop_no_ring_from_growing() {
    use rustix::process::Signal;
    let directory = directory();
    let mut child = Child::spawn("reserving", directory.path());
    assert_eq!(child.read_line(), "begins");
    // Stopping and continuing a process interrupts its system call (`EINTR`), whether or not it handles signals.
    let end = Instant::now() + Duration::from_secs(2);
    while Instant::now() < end {
        child.stop();
        child.signal(Signal::CONT);
    }
    File::create(directory.path().join("enough")).unwrap();
    assert_eq!(child.read_line(), "0");
    child.wait();
}

#[test]
fn records_in_a_touched_ring_cause_no_page_fault() {
    let directory = directory();
    let entries = 16_384;
    let [touched_faults, untouched_faults] = [true, false].map(|touched| {
        let recorder = recorder(&directory.path().join(touched.to_string()));
        let group = group(&recorder);
        record(&recorder, group, 8);
        // The first call may take page faults of its own.
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

/// Calls `then` with a ring and its reader, on a file system that another program's file has filled: it has space only
/// for the beginning of the ring.
fn on_a_full_file_system(then: impl FnOnce(&FlightRecorder, &RingReader)) {
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
    let early = reader(&recorder);
    // Another program takes the remaining space.
    let mut other = File::create(directory.path().join("other")).unwrap();
    while other.write_all(&[1; 4096]).is_ok() {}
    then(&recorder, &early);
    recorder.close().unwrap();
    drop((recorder, early, other));
    // A child that another test has forked keeps these files open until it executes its program.
    let end = Instant::now() + Duration::from_secs(60);
    while !mount(&["umount"]) {
        assert!(Instant::now() < end, "the file system stays in use");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn full_file_system_loses_records_and_counts_them() {
    on_a_full_file_system(|recorder, early| {
        let group = group(recorder);
        record(recorder, group, 5_000);
        while recorder.touch_ahead(64 << 10) {}
        let lost = recorder.counters().records_lost;
        assert!((1..5_000).contains(&lost), "{lost} records lost");
        for dump in [
            recorder.snapshot(),
            early.snapshot(),
            reader(recorder).snapshot(),
        ] {
            assert_eq!(dump.entries.len() as u64, 5_000 - lost);
        }
    });
}

#[test]
fn threads_that_need_space_at_once_on_a_full_file_system_count_what_they_lose() {
    on_a_full_file_system(|recorder, early| {
        let count = record_at_once(recorder, 2_000, || while recorder.touch_ahead(64 << 10) {});
        let lost = recorder.counters().records_lost;
        assert!((1..count).contains(&lost), "{lost} records lost");
        for dump in [recorder.snapshot(), early.snapshot()] {
            assert_eq!(dump.entries.len() as u64, count - lost);
        }
    });
}
