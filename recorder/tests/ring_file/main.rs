//! The ring as a file: what is written is read back by the owner and from outside, and files that are not rings are
//! refused.

#![allow(clippy::unwrap_used)]

mod damaged;
mod end_of_job;
mod exits;
mod follower;
#[path = "../indices/mod.rs"]
mod indices;
mod known_later;
mod refused;

use rcomm_recorder::Error;
use rcomm_recorder::model::{
    DType, EntryState, Failure, FailureKind, OpType, Peer, ProcessGroupInfo, ReduceOp,
};
use rcomm_recorder::publish::{Dump, RingFollower, RingReader, list_rings, remove_stale_rings};
use rcomm_recorder::record::{
    FlightRecorder, GroupHandle, Operation, Placement, RecorderConfig, SignatureKey, SignatureRef,
    Start, Storage, Tensor, Timestamp,
};
use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::panic::Location;
use std::path::{Path, PathBuf};
use std::time::Duration;

const MINUTE: Duration = Duration::from_secs(60);

fn config(directory: &Path, rank: u32, attempt: u32) -> RecorderConfig {
    let mut config = RecorderConfig::new("a job", rank, 4);
    config.placement = Placement::Dir(directory.to_owned());
    config.attempt = attempt;
    config.entries = 64;
    config
}

fn world(recorder: &FlightRecorder) -> GroupHandle {
    let info = ProcessGroupInfo {
        id: 0,
        name: "0".to_owned(),
        desc: "default_pg".to_owned(),
        ranks: [0, 1, 2, 3].into(),
    };
    recorder.add_group(&info, MINUTE)
}

const SUM_OF_FLOATS: SignatureKey<'static> = SignatureKey {
    backend: "cpu",
    op_name: "all_reduce",
    inputs: &[Tensor {
        dtype: DType::F32,
        shape: &[8, 128],
    }],
    outputs: &[Tensor {
        dtype: DType::F32,
        shape: &[8, 128],
    }],
};

fn all_reduce(group: GroupHandle, seq: u64) -> Operation<'static> {
    Operation {
        collective_seq_id: seq,
        op_id: seq,
        reduce_op: Some(ReduceOp::Sum),
        timeout: MINUTE,
        call_site: Some(Location::caller().into()),
        ..Operation::new(group, OpType::AllReduce, SignatureRef::Key(&SUM_OF_FLOATS))
    }
}

fn path_of(recorder: &FlightRecorder) -> PathBuf {
    recorder.storage().path().unwrap().to_owned()
}

/// The dump without the fields that depend on when, and by which process, the record is read.
fn timeless(mut dump: Dump) -> Dump {
    dump.identity.dump_time_ns = 0;
    dump.identity.reason.clear();
    dump
}

#[test]
fn combined_updates_read_like_separate_ones() {
    let directory = tempfile::tempdir().unwrap();
    let recorder = FlightRecorder::create(&config(directory.path(), 0, 0)).unwrap();
    let world = world(&recorder);
    let at_once = Operation {
        start: Start::AtOnce,
        ..all_reduce(world, 1)
    };
    let (created, seen) = (Timestamp::from_ns(5), Timestamp::from_ns(9));
    let short = recorder.begin_at(&at_once, created);
    let under_way = recorder.snapshot().entries[0].clone();
    assert_eq!(under_way.state, EntryState::Started);
    assert_eq!(
        under_way.time_discovered_started_ns,
        under_way.time_created_ns
    );
    assert_eq!(recorder.status(world).last_started, 1);
    recorder.completed_and_retired_at(short, seen, None);

    let long = recorder.begin_at(&all_reduce(world, 2), created);
    recorder.started_at(long, created);
    recorder.completed_at(long, seen, None);
    recorder.retired(long);

    let mut entries = recorder.snapshot().entries;
    assert!(entries[0].retired);
    entries[1].record_id = entries[0].record_id;
    entries[1].collective_seq_id = entries[0].collective_seq_id;
    entries[1].op_id = entries[0].op_id;
    entries[1].stack = entries[0].stack;
    assert_eq!(entries[0], entries[1]);
    let status = recorder.status(world);
    assert_eq!((status.last_started, status.last_completed), (2, 2));
}

#[test]
fn every_field_of_an_operation_is_read_back_from_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let recorder = FlightRecorder::create(&config(directory.path(), 3, 0)).unwrap();
    let world = world(&recorder);
    let ticket = recorder.begin(&all_reduce(world, 1));
    recorder.started(ticket);
    let seen = recorder.now();
    recorder.completed_at(ticket, seen, Some(Duration::from_micros(1_500)));
    recorder.retired(ticket);
    let message = Operation {
        collective_seq_id: 1,
        p2p_seq_id: 1,
        op_id: 2,
        peer: Peer::Rank(2),
        ..Operation::new(world, OpType::Send, SignatureRef::Key(&SUM_OF_FLOATS))
    };
    let failed = recorder.begin(&message);
    recorder.failed(failed);
    let exchange = Operation {
        collective_seq_id: 2,
        op_id: 3,
        input_splits: &[1, 2, 3, 4],
        output_splits: &[u64::MAX, 0, 0],
        root: Some(1),
        ..Operation::new(
            world,
            OpType::AllToAllVSingle,
            SignatureRef::Key(&SUM_OF_FLOATS),
        )
    };
    recorder.begin(&exchange);
    recorder.phase("load data");
    recorder.step(17);
    recorder.heartbeat();

    let reader = RingReader::attach(path_of(&recorder)).unwrap();
    assert!(reader.is_alive());
    let dump = reader.snapshot();
    assert_eq!(timeless(recorder.snapshot()), timeless(dump.clone()));

    assert_eq!(dump.identity.rank, Some(3));
    assert_eq!(dump.identity.world_size, Some(4));
    assert_eq!(dump.identity.job, "a job");
    assert_eq!(dump.identity.pid, std::process::id());
    assert_eq!(dump.identity.reason, RingReader::OWNER_LIVES);
    let group = &dump.groups[0];
    assert_eq!(*group.info.ranks, [0, 1, 2, 3]);
    assert_eq!(group.info.desc, "default_pg");
    let status = group.status.unwrap();
    assert_eq!(status, recorder.status(world));
    assert_eq!(status.last_enqueued, 2);
    assert_eq!(status.last_started, 1);
    assert_eq!(status.last_completed, 1);
    let rank = dump.status.as_ref().unwrap();
    assert_eq!((rank.phase.as_str(), rank.step), ("load data", 17));
    assert_eq!(rank.dropped, 0);
    assert!(rank.phase_since_ns > 0 && rank.heartbeat_ns >= rank.phase_since_ns);

    let [first, second, third] = &dump.entries[..] else {
        panic!("{} entries, not three", dump.entries.len());
    };
    assert_eq!((first.record_id, first.state), (1, EntryState::Completed));
    assert!(first.retired && !first.is_p2p);
    assert_eq!(first.reduce_op, Some(ReduceOp::Sum));
    assert_eq!(first.timeout_ms, 60_000);
    assert_eq!(first.duration_ms, Some(1.5));
    assert!(first.time_created_ns <= first.time_discovered_started_ns);
    assert!(first.time_discovered_started_ns <= first.time_discovered_completed_ns);
    let signature = &dump.signatures[first.signature as usize];
    assert_eq!(signature.backend, "cpu");
    assert_eq!(signature.input_sizes, [[8, 128]]);
    assert_eq!(signature.output_dtypes, ["Float"]);
    let frame = &dump.frames[dump.stacks[first.stack.unwrap() as usize][0] as usize];
    assert!(frame.filename.ends_with("ring_file/main.rs") && frame.line > 0);
    let thread = &dump.threads[first.thread.unwrap() as usize];
    assert!(!thread.id.is_empty());

    assert_eq!((second.peer, second.p2p_seq_id), (Peer::Rank(2), 1));
    assert_eq!((second.state, second.is_p2p), (EntryState::Failed, true));
    assert_eq!(second.time_discovered_completed_ns, 0);
    assert_eq!((second.stack, second.root), (None, None));

    let exchanged = &dump.signatures[third.signature as usize];
    assert_eq!(exchanged.input_splits, [1, 2, 3, 4]);
    assert_eq!(exchanged.output_splits, [u64::MAX, 0, 0]);
    assert_eq!(exchanged.input_sizes, [[8, 128]]);
    assert_eq!((third.root, third.state), (Some(1), EntryState::Scheduled));
}

#[test]
fn a_thread_has_a_row_of_its_own_with_every_recorder() {
    let [one, other] = [0, 1].map(|rank| {
        let mut config = RecorderConfig::new("job", rank, 4);
        config.placement = Placement::Memory;
        FlightRecorder::create(&config).unwrap()
    });
    let groups = [world(&one), world(&other)];
    // After this, the test's thread is the second one of one recorder and the first one of the other.
    std::thread::scope(|scope| {
        scope.spawn(|| one.begin(&all_reduce(groups[0], 1)));
    });
    for seq in 2..5 {
        one.begin(&all_reduce(groups[0], seq));
        other.begin(&all_reduce(groups[1], seq));
    }
    let threads = |recorder: &FlightRecorder| -> Vec<_> {
        let dump = recorder.snapshot();
        let id_of = |row: u32| dump.threads[row as usize].id.clone();
        dump.entries
            .iter()
            .map(|entry| id_of(entry.thread.unwrap()))
            .collect()
    };
    let (of_one, of_other) = (threads(&one), threads(&other));
    assert_ne!(of_one[0], of_one[1]);
    assert!(
        of_one[1..]
            .iter()
            .chain(&of_other)
            .all(|id| *id == of_other[0])
    );
}

#[test]
fn a_ring_keeps_the_newest_entries_and_drops_updates_of_older_ones() {
    let directory = tempfile::tempdir().unwrap();
    let recorder = FlightRecorder::create(&config(directory.path(), 0, 0)).unwrap();
    let world = world(&recorder);
    let first = recorder.begin(&all_reduce(world, 1));
    for seq in 2..=100 {
        recorder.begin(&all_reduce(world, seq));
    }
    recorder.completed(first);
    let dump = recorder.snapshot();
    let ids: Vec<u64> = dump.entries.iter().map(|entry| entry.record_id).collect();
    assert_eq!(ids, (37..=100).collect::<Vec<_>>());
    assert!(
        dump.entries
            .iter()
            .all(|entry| entry.state == EntryState::Scheduled)
    );
    assert_eq!(recorder.counters().updates_late, 1);
    assert_eq!(recorder.counters().records, 100);
    // The group's status counts the completion, although the entry's slot was overwritten.
    assert_eq!(recorder.status(world).last_completed, 1);
}

#[test]
fn a_state_never_moves_back() {
    let directory = tempfile::tempdir().unwrap();
    let recorder = FlightRecorder::create(&config(directory.path(), 0, 0)).unwrap();
    let world = world(&recorder);
    let ticket = recorder.begin_at(&all_reduce(world, 1), Timestamp::from_ns(1));
    recorder.completed_at(ticket, Timestamp::from_ns(2), None);
    recorder.started_at(ticket, Timestamp::from_ns(3));
    recorder.failed_at(ticket, Timestamp::from_ns(4));
    let entry = &recorder.snapshot().entries[0];
    assert_eq!(entry.state, EntryState::Completed);
    let elapsed_ns = entry.time_discovered_completed_ns - entry.time_created_ns;
    assert_eq!(elapsed_ns, 1);
}

#[test]
fn signatures_beyond_the_table_are_stored_with_their_records() {
    let directory = tempfile::tempdir().unwrap();
    let mut config = config(directory.path(), 0, 0);
    config.signatures = 2;
    let recorder = FlightRecorder::create(&config).unwrap();
    let world = world(&recorder);
    for size in 1..=10 {
        let shape = [size];
        let tensor = [Tensor {
            dtype: DType::I64,
            shape: &shape,
        }];
        let key = SignatureKey {
            inputs: &tensor,
            ..SUM_OF_FLOATS
        };
        assert_eq!(recorder.intern(&key).is_some(), size <= 2);
        let operation = Operation {
            signature: SignatureRef::Key(&key),
            ..all_reduce(world, size)
        };
        recorder.begin(&operation);
    }
    let dump = recorder.snapshot();
    for (entry, size) in dump.entries.iter().zip(1..) {
        let signature = &dump.signatures[entry.signature as usize];
        assert_eq!(signature.input_sizes, [[size]]);
        assert_eq!(signature.input_dtypes, ["Long"]);
        assert_eq!(signature.backend, "cpu");
    }
    assert_eq!(recorder.counters().shapes_lost, 0);
}

#[test]
fn a_signature_that_does_not_fit_keeps_its_element_counts() {
    let directory = tempfile::tempdir().unwrap();
    let recorder = FlightRecorder::create(&config(directory.path(), 0, 0)).unwrap();
    let world = world(&recorder);
    let tensors = vec![SUM_OF_FLOATS.inputs[0]; 60_000];
    let key = SignatureKey {
        inputs: &tensors,
        ..SUM_OF_FLOATS
    };
    recorder.begin(&Operation {
        signature: SignatureRef::Key(&key),
        ..all_reduce(world, 1)
    });
    let dump = recorder.snapshot();
    let signature = &dump.signatures[dump.entries[0].signature as usize];
    assert_eq!(signature.input_elements(), 60_000 * 8 * 128);
    assert_eq!(signature.output_elements(), 8 * 128);
    assert!(signature.input_dtypes.is_empty());
    assert_eq!(recorder.counters().shapes_lost, 1);
}

#[test]
fn overwritten_splits_are_missing_from_the_entry() {
    let directory = tempfile::tempdir().unwrap();
    let recorder = FlightRecorder::create(&config(directory.path(), 0, 0)).unwrap();
    let world = world(&recorder);
    let splits: Vec<u64> = (0..512).collect();
    for seq in 1..=60 {
        recorder.begin(&Operation {
            input_splits: &splits,
            ..all_reduce(world, seq)
        });
    }
    let dump = recorder.snapshot();
    let kept = |entry: usize| &dump.signatures[dump.entries[entry].signature as usize];
    assert!(kept(0).input_splits.is_empty());
    assert_eq!(kept(0).input_sizes, [[8, 128]]);
    assert_eq!(kept(59).input_splits, splits);
}

#[test]
fn groups_keep_thousands_of_members_in_any_order() {
    let directory = tempfile::tempdir().unwrap();
    let mut config = config(directory.path(), 0, 0);
    config.world_size = 16_384;
    let recorder = FlightRecorder::create(&config).unwrap();
    let strided: Vec<u32> = (0..2_048).map(|index| index * 8).collect();
    // Squares have no regular steps, so this list is stored as many short runs.
    let scrambled: Vec<u32> = (0..16_384_u32)
        .map(|index| index.wrapping_mul(index) % 16_384)
        .collect();
    for (id, ranks) in [&strided, &scrambled].into_iter().enumerate() {
        let info = ProcessGroupInfo {
            id: id as u32,
            name: format!("group {id}"),
            desc: "undefined".to_owned(),
            ranks: ranks.as_slice().into(),
        };
        recorder.add_group(&info, MINUTE);
    }
    let dump = recorder.snapshot();
    assert_eq!(*dump.groups[0].info.ranks, strided);
    assert_eq!(*dump.groups[1].info.ranks, scrambled);
}

#[test]
fn operations_on_groups_beyond_the_table_are_kept_and_marked() {
    let directory = tempfile::tempdir().unwrap();
    let mut config = config(directory.path(), 0, 0);
    config.groups = 1;
    let recorder = FlightRecorder::create(&config).unwrap();
    world(&recorder);
    let beyond = world(&recorder);
    let ticket = recorder.begin(&all_reduce(beyond, 1));
    recorder.completed(ticket);
    let dump = recorder.snapshot();
    let group = &dump.groups[dump.entries[0].group as usize];
    assert_eq!(group.info.name, "?");
    assert_eq!(recorder.counters().groups_lost, 1);
    assert_eq!(recorder.status(beyond).last_completed, -1);
}

#[test]
fn only_operations_in_a_graph_carry_its_id() {
    let directory = tempfile::tempdir().unwrap();
    let recorder = FlightRecorder::create(&config(directory.path(), 0, 0)).unwrap();
    let world = world(&recorder);
    let begin = |seq| recorder.begin(&all_reduce(world, seq));
    const LARGEST: u64 = (1 << 53) - 1;
    for (seq, graph) in [(1, 0), (2, 7), (3, LARGEST)] {
        recorder.captured_at(begin(seq), recorder.now(), graph);
    }
    // An id that does not fit is not stored and counts as a lost update.
    recorder.captured_at(begin(4), recorder.now(), LARGEST + 1);
    assert_eq!(recorder.counters().updates_lost, 1);
    recorder.completed_at(begin(5), recorder.now(), Some(Duration::from_millis(3)));
    begin(6);
    // The first recorded end of an operation is final.
    let ended = begin(7);
    recorder.failed(ended);
    recorder.captured_at(ended, recorder.now(), 7);

    let dump = RingReader::attach(path_of(&recorder)).unwrap().snapshot();
    let graphs: Vec<_> = dump.entries.iter().map(|entry| entry.graph_id).collect();
    let expected = [Some(0), Some(7), Some(LARGEST), None, None, None, None];
    assert_eq!(graphs, expected);
    for entry in &dump.entries[..4] {
        assert_eq!(entry.state, EntryState::Completed);
        assert_eq!(entry.duration_ms, None);
        assert!(entry.time_discovered_completed_ns >= entry.time_created_ns);
    }
    assert_eq!(dump.entries[4].duration_ms, Some(3.0));
    assert_eq!(dump.entries[6].state, EntryState::Failed);

    // In a dump, other operations do not have the key at all.
    let text = String::from_utf8(dump.to_json()).unwrap();
    assert_eq!(text.matches("\"graph_id\"").count(), 3);
    let (read, _) = Dump::read(text.as_bytes()).unwrap();
    let graphs: Vec<_> = read.entries.iter().map(|entry| entry.graph_id).collect();
    assert_eq!(graphs, expected);
}

#[test]
fn a_ring_of_the_first_version_is_read_as_before() {
    // Here and below: offsets in the file, in bytes.
    const VERSION: u64 = 8;
    let directory = tempfile::tempdir().unwrap();
    let recorder = FlightRecorder::create(&config(directory.path(), 0, 0)).unwrap();
    let world = world(&recorder);
    let ticket = recorder.begin(&all_reduce(world, 1));
    recorder.completed_at(ticket, recorder.now(), Some(MINUTE));
    let path = path_of(&recorder);
    let read = || timeless(RingReader::attach(&path).unwrap().snapshot());
    let before = read();
    let file = fs::File::options()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    let mut version = [0; 8];
    file.read_exact_at(&mut version, VERSION).unwrap();
    assert_eq!(version, [1, 0, 0, 0, 9, 0, 0, 0], "1.9");
    file.write_all_at(&[1, 0, 0, 0, 0, 0, 0, 0], VERSION)
        .unwrap();
    // A ring of 1.0 has no reserved size in its header.
    const RESERVED: u64 = 96;
    file.write_all_at(&[0; 8], RESERVED).unwrap();
    // It has no functions of call sites.
    const FUNCTIONS: u64 = 112;
    file.write_all_at(&[0; 16], FUNCTIONS).unwrap();
    // It has no failures.
    const FAILURES: u64 = 1584;
    file.write_all_at(&[0; 16], FAILURES).unwrap();
    // It has no connections.
    const CONNECTIONS: u64 = 1616;
    file.write_all_at(&[0; 16], CONNECTIONS).unwrap();
    // It has no steps of reducers.
    const REDUCERS: u64 = 1648;
    file.write_all_at(&[0; 24], REDUCERS).unwrap();
    assert_eq!(read(), before);
}

/// A dump's contents, independent of the order of its tables.
fn content(dump: &Dump) -> impl PartialEq + std::fmt::Debug + use<> {
    let entry = |entry: &rcomm_recorder::model::Entry| {
        let frames = entry.stack.map(|stack| {
            let frames = dump.stacks[stack as usize].iter();
            frames
                .map(|&frame| dump.frames[frame as usize].clone())
                .collect::<Vec<_>>()
        });
        (
            rcomm_recorder::model::Entry {
                group: 0,
                signature: 0,
                stack: None,
                ..entry.clone()
            },
            dump.groups[entry.group as usize].info.clone(),
            dump.signatures[entry.signature as usize].clone(),
            frames,
        )
    };
    let entries: Vec<_> = dump.entries.iter().map(entry).collect();
    let mut identity = dump.identity.clone();
    identity.dump_time_ns = 0;
    (identity, dump.status.clone(), dump.groups.clone(), entries)
}

#[test]
fn a_recorder_in_process_memory_records_operations() {
    let mut config = RecorderConfig::new("job", 0, 1);
    config.placement = Placement::Memory;
    let recorder = FlightRecorder::create(&config).unwrap();
    assert_eq!(*recorder.storage(), Storage::Memory { why: None });
    let world = world(&recorder);
    recorder.begin(&all_reduce(world, 1));
    assert_eq!(recorder.snapshot().entries.len(), 1);
    recorder.close().unwrap();
}
