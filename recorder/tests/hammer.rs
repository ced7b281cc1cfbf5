//! A writer at full speed in one process, a reader in another: no entry is ever torn.
//!
//! The writer derives every field of an entry from one number, so the reader can check that all of them belong
//! together. The ring is small, so slots are reused all the time. A normal run takes at least three seconds and reads
//! at least 250,000 entries, or two million in a `--release` build; `RCOMM_HAMMER_SECONDS` sets another time.

#![allow(clippy::unwrap_used)]

mod child;

use child::Child;
use rcomm_recorder::model::{DType, Entry, EntryState, OpType, Peer, ProcessGroupInfo, ReduceOp};
use rcomm_recorder::publish::{Dump, RingReader};
use rcomm_recorder::record::{
    FlightRecorder, GroupHandle, Operation, Placement, RecorderConfig, SignatureKey, SignatureRef,
    Tensor, Timestamp,
};
use std::time::{Duration, Instant};

/// Number of threads that record.
const WRITERS: u64 = 2;
/// Minimum number of entries to read: a few seconds' work in both kinds of builds.
const MIN_READS: usize = if cfg!(debug_assertions) {
    250_000
} else {
    2_000_000
};

/// Calls `then` with the operation of this number.
fn with_operation<T>(group: GroupHandle, number: u64, then: impl FnOnce(&Operation<'_>) -> T) -> T {
    // More shapes than fit in the table: some are stored in the lap ring.
    let shape = [number % 50, 3];
    let tensor = [Tensor {
        dtype: DType::ALL[number as usize % DType::ALL.len()],
        shape: &shape,
    }];
    let key = SignatureKey {
        backend: "hammer",
        op_name: "all_to_all",
        inputs: &tensor,
        outputs: &[],
    };
    let splits = [number, number + 1, number + 2];
    then(&Operation {
        collective_seq_id: number,
        p2p_seq_id: number * 3,
        op_id: number * 5,
        is_p2p: number.is_multiple_of(2),
        peer: Peer::Rank((number % 1_000) as u32),
        root: Some((number % 1_001) as u32),
        reduce_op: ReduceOp::from_code((number % 9) as u8),
        input_splits: &splits[..(number % 4) as usize],
        timeout: Duration::from_millis(number % 100_000),
        ..Operation::new(group, OpType::AllToAll, SignatureRef::Key(&key))
    })
}

fn world() -> ProcessGroupInfo {
    ProcessGroupInfo {
        id: 0,
        name: "0".to_owned(),
        desc: "default_pg".to_owned(),
        ranks: [0].into(),
    }
}

/// Panics unless all fields of this entry are those of one operation.
fn check(dump: &Dump, entry: &Entry) {
    let number = entry.collective_seq_id;
    assert_eq!(entry.p2p_seq_id, number * 3, "{entry:?}");
    assert_eq!(entry.op_id, number * 5, "{entry:?}");
    assert_eq!(entry.is_p2p, number.is_multiple_of(2), "{entry:?}");
    assert_eq!(entry.peer, Peer::Rank((number % 1_000) as u32), "{entry:?}");
    assert_eq!(entry.root, Some((number % 1_001) as u32), "{entry:?}");
    assert_eq!(
        entry.reduce_op,
        ReduceOp::from_code((number % 9) as u8),
        "{entry:?}"
    );
    assert_eq!(entry.timeout_ms, number % 100_000, "{entry:?}");
    let signature = &dump.signatures[entry.signature as usize];
    // Sizes without types mean that the record's own data was overwritten before it was read.
    if !signature.input_dtypes.is_empty() {
        assert_eq!(signature.input_sizes, [[number % 50, 3]], "{entry:?}");
        let dtype = DType::ALL[number as usize % DType::ALL.len()];
        assert_eq!(signature.input_dtypes, [dtype.name()], "{entry:?}");
    }
    let splits = [number, number + 1, number + 2];
    let written = &splits[..(number % 4) as usize];
    let read = &signature.input_splits[..];
    assert!(read.is_empty() || read == written, "{entry:?}: {read:?}");
    let created = entry.time_created_ns;
    let started = entry.time_discovered_started_ns;
    let completed = entry.time_discovered_completed_ns;
    let (has_started, has_completed) = match entry.state {
        EntryState::Scheduled => (false, false),
        EntryState::Started => (true, false),
        _ => (true, true),
    };
    assert_eq!(
        started,
        if has_started { created + 7 } else { 0 },
        "{entry:?}"
    );
    assert_eq!(
        completed,
        if has_completed { created + 11 } else { 0 },
        "{entry:?}"
    );
    assert_eq!(entry.duration_ms.is_some(), has_completed, "{entry:?}");
}

#[test]
#[ignore = "run by the test below, as a process of its own"]
fn writer() {
    let Some(directory) = child::directory() else {
        return;
    };
    let mut config = RecorderConfig::new("hammer", 0, 1);
    config.placement = Placement::Dir(directory);
    config.entries = 256;
    config.signatures = 16;
    config.groups = 1;
    let recorder = FlightRecorder::create(&config).unwrap();
    let group = recorder.add_group(&world(), Duration::ZERO);
    let base = recorder.now().as_ns();
    child::print_line(recorder.storage().path().unwrap().to_str().unwrap());
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let recorder = &recorder;
            scope.spawn(move || {
                for number in (1 + writer..).step_by(WRITERS as usize) {
                    let time = |after: u64| Timestamp::from_ns(base + number * 100 + after);
                    let ticket = with_operation(group, number, |operation| {
                        recorder.begin_at(operation, time(0))
                    });
                    recorder.started_at(ticket, time(7));
                    recorder.completed_at(ticket, time(11), Some(Duration::from_nanos(4)));
                    recorder.retired(ticket);
                    recorder.step(number.cast_signed());
                }
            });
        }
    });
}

#[test]
fn reader_in_another_process_sees_no_torn_entry() {
    let directory = tempfile::tempdir().unwrap();
    let mut writer = Child::spawn("writer", directory.path());
    let reader = RingReader::attach(writer.read_line()).unwrap();
    let seconds = std::env::var("RCOMM_HAMMER_SECONDS").ok();
    let seconds = Duration::from_secs(seconds.map_or(3, |seconds| seconds.parse().unwrap()));
    let start = Instant::now();
    let (mut reads, mut snapshots, mut with_splits, mut newest) = (0, 0_u64, 0_usize, 0);
    while reads < MIN_READS || start.elapsed() < seconds {
        let dump = reader.snapshot();
        for entry in &dump.entries {
            check(&dump, entry);
            let signature = &dump.signatures[entry.signature as usize];
            with_splits += usize::from(!signature.input_splits.is_empty());
        }
        let ids: Vec<u64> = dump.entries.iter().map(|entry| entry.record_id).collect();
        assert!(ids.is_sorted_by(|one, next| one < next), "{ids:?}");
        newest = dump.entries.last().map_or(newest, |last| last.record_id);
        reads += dump.entries.len();
        snapshots += 1;
        assert!(
            start.elapsed() < seconds + Duration::from_secs(120),
            "only {reads} of {MIN_READS} entries were read in time"
        );
    }
    println!("{reads} entries in {snapshots} snapshots while {newest} were written");
    assert!(
        newest > 100_000,
        "only {newest} records were written during the test"
    );
    assert!(
        with_splits > reads / 10,
        "only {with_splits} entries had their splits"
    );
}
