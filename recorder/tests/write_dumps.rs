//! Writes dumps in both encodings, and reads them back with this crate and with PyTorch.
#![allow(clippy::unwrap_used, clippy::print_stderr)]

use proptest::prelude::*;
use rcomm_recorder::model::{
    Entry, EntryState, FailedOperation, Failure, FailureKind, Frame, GroupPlace, LinkEnd, OpType,
    Peer, PeerLink, ProcessExit, ProcessGroupInfo, ProcessGroupStatus, ProcessorWait, RankStatus,
    ReduceOp, ReducerBucket, ReducerStep, ReducerSums, ReducerTimes, Signature, WaitingOperation,
};
use rcomm_recorder::publish::{
    Dump, DumpGroup, FormatVersion, Identity, Recorder, ThreadInfo, write_dump_file,
};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/dumps")
}

/// Reads a dump that has no problems.
fn read_valid(bytes: &[u8]) -> Dump {
    let (dump, problems) = Dump::read(bytes).unwrap();
    assert!(problems.is_empty(), "{problems:?}");
    dump
}

/// The entries with their indices resolved, since the order of the tables does not matter.
fn content(dump: &Dump) -> Vec<(Entry, Signature, Vec<Frame>, Option<ThreadInfo>)> {
    let resolve = |entry: &Entry| {
        let stack = entry.stack.map(|stack| &dump.stacks[stack as usize]);
        let frames = stack.into_iter().flatten();
        let frames = frames.map(|&frame| dump.frames[frame as usize].clone());
        let thread = entry.thread.map(|row| dump.threads[row as usize].clone());
        let without_indices = Entry {
            signature: 0,
            stack: None,
            thread: None,
            ..entry.clone()
        };
        let signature = dump.signatures[entry.signature as usize].clone();
        (without_indices, signature, frames.collect(), thread)
    };
    dump.entries.iter().map(resolve).collect()
}

fn assert_same(written: &Dump, read: &Dump) {
    assert_eq!(read.version, FormatVersion::WRITTEN);
    assert_eq!(read.recorder, written.recorder);
    assert_eq!(read.identity, written.identity);
    assert_eq!(read.status, written.status);
    assert_eq!(read.comm_lib_version, written.comm_lib_version);
    assert_eq!(read.groups, written.groups);
    assert_eq!(read.peers, written.peers);
    assert_eq!(read.processor_wait, written.processor_wait);
    assert_eq!(read.closed_ns, written.closed_ns);
    assert_eq!(read.nccl_comm_state, written.nccl_comm_state);
    assert_eq!(read.failures, written.failures);
    assert_eq!(read.reducer_steps, written.reducer_steps);
    assert_eq!(content(read), content(written));
}

#[test]
fn every_real_dump_is_read_back_from_both_encodings() {
    let mut dumps = 0;
    for scenario in std::fs::read_dir(fixtures()).unwrap() {
        let pickles = scenario.unwrap().path().join("pickle");
        let Ok(files) = std::fs::read_dir(pickles) else {
            continue;
        };
        for file in files {
            let path = file.unwrap().path();
            let (dump, _) = Dump::read(&std::fs::read(&path).unwrap()).unwrap();
            assert_same(&dump, &read_valid(&dump.to_json()));
            assert_same(&dump, &read_valid(&dump.to_pickle()));
            dumps += 1;
        }
    }
    assert!(dumps > 100, "only {dumps} dumps found");
}

fn text() -> impl Strategy<Value = String> {
    prop_oneof!["[a-z_]{0,8}", any::<String>()]
}

fn sizes() -> impl Strategy<Value = Vec<Vec<u64>>> {
    let extent = prop_oneof![0..10_u64, 0..=i64::MAX as u64];
    prop::collection::vec(prop::collection::vec(extent, 0..3), 0..3)
}

fn signature() -> impl Strategy<Value = (OpType, Signature)> {
    let dtypes = || prop::collection::vec(prop::sample::select(vec!["Float", "Half"]), 0..3);
    let splits = || prop::collection::vec(0..100_u64, 0..3);
    let op = prop::sample::select(OpType::ALL);
    let parts = (op, sizes(), sizes(), dtypes(), dtypes(), splits(), splits());
    parts.prop_map(
        |(op, ins, outs, in_types, out_types, in_splits, out_splits)| {
            let owned = |names: Vec<&str>| names.into_iter().map(str::to_owned).collect();
            let signature = Signature {
                backend: "cpu".to_owned(),
                op_name: op.name().to_owned(),
                input_sizes: ins,
                output_sizes: outs,
                input_dtypes: owned(in_types),
                output_dtypes: owned(out_types),
                input_splits: in_splits,
                output_splits: out_splits,
            };
            (op, signature)
        },
    )
}

fn identity() -> impl Strategy<Value = Identity> {
    let rank = prop::option::of(0..4_u32);
    let parts = (
        rank,
        prop::option::of(0..9_u32),
        text(),
        text(),
        0..3_u32,
        0..i64::MAX,
        text(),
    );
    parts.prop_map(
        |(rank, world_size, host, job, attempt, dump_time_ns, reason)| Identity {
            rank,
            world_size,
            host,
            job,
            attempt,
            pid: attempt * 1000,
            dump_time_ns,
            begun_ns: dump_time_ns / 2,
            reason,
        },
    )
}

fn groups() -> impl Strategy<Value = Vec<DumpGroup>> {
    // Names repeat: two groups of one process may share one.
    let group = (
        prop::sample::select(vec!["0", "dp", "dp (1)", ""]),
        text(),
        any::<bool>(),
        any::<bool>(),
    );
    prop::collection::vec(group, 1..4).prop_map(|groups| {
        let numbered = groups.into_iter().enumerate();
        type Drawn = (usize, (&'static str, String, bool, bool));
        let group = |(id, (name, desc, counted, placed)): Drawn| DumpGroup {
            info: ProcessGroupInfo {
                id: id as u32,
                name: name.to_owned(),
                desc,
                ranks: match placed {
                    true => [].into(),
                    false => [0, 1, 2, 3 + id as u32].into(),
                },
            },
            place: placed.then_some(GroupPlace { rank: 2, size: 4 }),
            status: counted.then_some(ProcessGroupStatus {
                last_enqueued: 7,
                last_started: -1,
                last_completed: 6,
                timeout_ms: 600_000,
            }),
        };
        numbered.map(group).collect()
    })
}

prop_compose! {
    fn entry(groups: usize, signatures: usize)(
        (group, signature) in (0..groups, 0..signatures),
        ids in any::<(u32, u32, u32, u32)>(),
        state in 0..4_u8,
        flags in any::<(bool, bool)>(),
        peer in prop_oneof![Just(Peer::None), Just(Peer::Any), (0..9_u32).prop_map(Peer::Rank)],
        root in prop::option::of(0..9_u32),
        reduce_op in prop::option::of(prop::sample::select(ReduceOp::ALL)),
        times in (0..i64::MAX, 0..i64::MAX, prop_oneof![Just(0), 0..i64::MAX]),
        duration_ms in prop::option::of(-1e6_f32..1e6),
        graph_id in prop::option::of(0..=i64::MAX as u64),
        stack in prop::option::of(0..2_u32),
        thread in prop::option::of(0..2_u32),
    ) -> Entry {
        Entry {
            record_id: ids.0.into(),
            collective_seq_id: ids.1.into(),
            p2p_seq_id: ids.2.into(),
            op_id: ids.3.into(),
            group: group as u32,
            signature: signature as u32,
            stack,
            op: OpType::Other,
            state: [
                EntryState::Scheduled,
                EntryState::Started,
                EntryState::Completed,
                EntryState::Failed,
            ][usize::from(state)],
            retired: flags.0,
            is_p2p: flags.1,
            peer,
            root,
            reduce_op,
            time_created_ns: times.0,
            time_discovered_started_ns: times.1,
            time_discovered_completed_ns: times.2,
            duration_ms,
            graph_id,
            timeout_ms: ids.0.into(),
            thread,
        }
    }
}

fn failure() -> impl Strategy<Value = Failure> {
    let operation = (
        prop::sample::select(OpType::ALL),
        any::<u32>(),
        any::<bool>(),
    );
    let operation = operation.prop_map(|(op, number, is_p2p)| FailedOperation {
        op,
        seq: number.into(),
        is_p2p,
        record_id: u64::from(number) << 1,
    });
    let parts = (
        prop::sample::select(FailureKind::ALL),
        prop::collection::vec(0..9_u32, 0..4),
        prop::option::of(0..3_u32),
        prop::option::of(operation),
        0..i64::MAX,
        0..9_u32,
        text(),
    );
    parts.prop_map(
        |(kind, ranks, group, operation, time_ns, seen_by, text)| Failure {
            id: 1 + u64::from(seen_by),
            group,
            operation,
            time_ns,
            ..Failure::new(kind, &ranks, seen_by, text)
        },
    )
}

fn dump() -> impl Strategy<Value = Dump> {
    let tables = (groups(), prop::collection::vec(signature(), 1..4));
    let entries = tables.prop_flat_map(|(groups, signatures)| {
        let entry = entry(groups.len(), signatures.len());
        let entries = prop::collection::vec(entry, 0..12);
        (Just(groups), Just(signatures), entries)
    });
    let failures = prop::collection::vec(failure(), 0..4);
    (entries, identity(), text(), any::<bool>(), failures).prop_map(
        |((groups, signatures, mut entries), identity, phase, with_status, failures)| {
            for entry in &mut entries {
                entry.op = signatures[entry.signature as usize].0;
            }
            let frame = |name: &str, line| Frame {
                name: name.to_owned(),
                filename: "/srv/train.py".to_owned(),
                line,
            };
            Dump {
                version: FormatVersion::WRITTEN,
                recorder: Recorder::Rcomm,
                identity,
                status: with_status.then_some(RankStatus {
                    phase,
                    phase_since_ns: 5,
                    step: -1,
                    heartbeat_ns: 6,
                    dropped: 7,
                    exit: Some(ProcessExit {
                        time_ns: 8,
                        code: 3,
                    }),
                }),
                comm_lib_version: "0.1".to_owned(),
                groups,
                signatures: signatures
                    .into_iter()
                    .map(|(_, signature)| signature)
                    .collect(),
                frames: vec![frame("step", 3), frame("main", 9)],
                stacks: vec![vec![0, 1], vec![1]],
                threads: vec![
                    ThreadInfo::default(),
                    ThreadInfo {
                        id: "17".to_owned(),
                        name: "main".to_owned(),
                    },
                ],
                entries,
                nccl_comm_state: vec![("c".to_owned(), vec![("k".to_owned(), "v".to_owned())])],
                failures,
                closed_ns: 0,
                peers: peers(),
                reducer_steps: reducer_steps(),
                processor_wait: with_status.then_some(ProcessorWait {
                    since_ns: 8,
                    waited_ns: u64::MAX >> 1,
                }),
            }
        },
    )
}

/// Two steps of a reducer, one without buckets.
fn reducer_steps() -> Vec<ReducerStep> {
    let empty = ReducerStep {
        id: 3,
        ..ReducerStep::default()
    };
    let bucket = |index| ReducerBucket {
        index,
        parameters: 2,
        bytes: 1 << 40,
        ready_ns: 3,
        sent_ns: 4,
        communication_ns: 5,
        exposed_ns: 6,
    };
    let with_buckets = ReducerStep {
        id: 4,
        group: 7,
        ended_ns: 1_795_000_000_000_000_001,
        times: ReducerTimes {
            step: 9,
            forward_ns: 10,
            backward_ns: 11,
            communication_ns: 12,
            exposed_ns: 13,
            bytes: 1 << 41,
            bucket_count: 40,
            sums: ReducerSums {
                steps: 14,
                forward_ns: 15,
                backward_ns: 16,
                communication_ns: 17,
                exposed_ns: 18,
            },
        },
        buckets: vec![bucket(0), bucket(5)],
    };
    vec![empty, with_buckets]
}

/// Connections to all kinds of ends.
fn peers() -> Vec<PeerLink> {
    let silent = PeerLink {
        heard_ns: 4,
        sampled_ns: 9,
        waited_since_ns: 5,
        waiting: Some(WaitingOperation {
            group: 2,
            seq: 1 << 40,
            is_p2p: true,
        }),
        received: 1 << 40,
        sent: 7,
        unacknowledged: 3,
        errno: 110,
        interval_ms: 1_000,
        ..PeerLink::to(LinkEnd::Rank(3))
    };
    let ends = [LinkEnd::Store, LinkEnd::StoreAtRank(0), LinkEnd::Rank(0)];
    std::iter::once(silent)
        .chain(ends.map(PeerLink::to))
        .collect()
}

proptest! {
    #[test]
    fn any_dump_is_read_back_from_both_encodings(dump in dump()) {
        assert_same(&dump, &read_valid(&dump.to_json()));
        assert_same(&dump, &read_valid(&dump.to_pickle()));
    }
}

/// A Python that has PyTorch, if the environment names one.
fn python() -> Option<String> {
    let python = std::env::var("RCOMM_TEST_PYTHON").ok();
    if python.is_none() {
        let _ = writeln!(
            std::io::stderr(),
            "skipped: RCOMM_TEST_PYTHON names no Python with torch"
        );
    }
    python
}

/// Runs a command that must succeed; returns its output and then its errors.
fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let utf8 = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (utf8(&output.stdout), utf8(&output.stderr));
    assert!(output.status.success(), "{command:?}\n{out}\n{err}");
    out + &err
}

/// The dump of one rank of a world of four, in which rank 2 never joins the last all_reduce.
fn stuck_rank(rank: u32) -> Dump {
    let collective = |op: OpType, size: u64| Signature {
        backend: "cpu".to_owned(),
        op_name: op.name().to_owned(),
        input_sizes: vec![vec![size]],
        output_sizes: vec![vec![size]],
        input_dtypes: vec!["Float".to_owned()],
        output_dtypes: vec!["Float".to_owned()],
        ..Signature::default()
    };
    let ops = [
        OpType::AllReduce,
        OpType::Broadcast,
        OpType::Barrier,
        OpType::AllReduceCoalesced,
    ];
    let mut signatures: Vec<_> = ops.iter().map(|&op| collective(op, 64)).collect();
    signatures[2].input_sizes.clear();
    signatures[2].output_sizes.clear();
    signatures[2].input_dtypes.clear();
    signatures[2].output_dtypes.clear();
    signatures.push(collective(OpType::AllReduce, 64));
    let issued = if rank == 2 { 4 } else { 5 };
    let entry = |index: u32| Entry {
        record_id: (index + 1).into(),
        collective_seq_id: (index + 1).into(),
        p2p_seq_id: 0,
        op_id: (index + 1).into(),
        group: 0,
        signature: index,
        stack: Some(0),
        op: if index == 4 {
            OpType::AllReduce
        } else {
            ops[index as usize]
        },
        state: if index == 4 {
            EntryState::Started
        } else {
            EntryState::Completed
        },
        retired: index != 4,
        is_p2p: false,
        peer: Peer::None,
        root: (index == 1).then_some(0),
        reduce_op: Some(ReduceOp::Sum),
        time_created_ns: 1_795_000_000_000_000_000 + i64::from(index),
        time_discovered_started_ns: 1_795_000_000_000_000_100,
        time_discovered_completed_ns: 0,
        duration_ms: None,
        graph_id: None,
        timeout_ms: 5000,
        thread: None,
    };
    Dump {
        version: FormatVersion::WRITTEN,
        recorder: Recorder::Rcomm,
        identity: Identity {
            rank: Some(rank),
            world_size: Some(4),
            ..Identity::default()
        },
        groups: vec![DumpGroup {
            info: ProcessGroupInfo {
                id: 0,
                name: "0".to_owned(),
                desc: "default_pg".to_owned(),
                ranks: [0, 1, 2, 3].into(),
            },
            place: None,
            status: Some(ProcessGroupStatus::default()),
        }],
        signatures,
        frames: vec![Frame {
            name: "main".to_owned(),
            filename: "train.rs".to_owned(),
            line: 12,
        }],
        stacks: vec![vec![0]],
        entries: (0..issued).map(entry).collect(),
        ..Dump::default()
    }
}

#[test]
fn a_pickle_has_a_backend_that_pytorch_knows_and_the_real_one_in_a_key_of_its_own() {
    let has = |bytes: &[u8], text: &str| {
        let mut windows = bytes.windows(text.len());
        windows.any(|window| window == text.as_bytes())
    };
    let dump = stuck_rank(0);
    let (pickle, json) = (dump.to_pickle(), dump.to_json());
    assert!(has(&pickle, "c10d:all_reduce") && !has(&pickle, "cpu:"));
    assert!(has(&json, "cpu:all_reduce") && !has(&json, "c10d:"));
    for bytes in [&pickle, &json] {
        let read = read_valid(bytes);
        let mut signatures = read.signatures.iter();
        assert!(signatures.all(|signature| signature.backend == "cpu"));
    }
    // A name that PyTorch knows is not changed, nor is a dump of another recorder.
    let named = |backend: &str, recorder| {
        let mut dump = stuck_rank(0);
        dump.recorder = recorder;
        for signature in &mut dump.signatures {
            signature.backend = backend.to_owned();
        }
        dump.to_pickle()
    };
    assert!(has(&named("nccl", Recorder::Rcomm), "nccl:all_reduce"));
    assert!(has(&named("own", Recorder::Hook), "own:all_reduce"));
}

#[test]
fn analyzer_of_pytorch_reads_our_pickles_and_names_the_missing_rank() {
    let Some(python) = python() else { return };
    let folder = tempfile::tempdir().unwrap();
    for rank in 0..4 {
        let path = folder.path().join(format!("rank_{rank}"));
        write_dump_file(&path, &stuck_rank(rank).to_pickle()).unwrap();
    }
    let module = "torch.distributed.flight_recorder.fr_trace";
    let printed = run(Command::new(python).args(["-m", module]).arg(folder.path()));
    assert!(
        printed.contains("Not all ranks joining collective, sequence number: 5"),
        "{printed}"
    );
    assert!(printed.contains("missing ranks: {2}"), "{printed}");
    let warning = printed.lines().find(|line| {
        let line = line.to_lowercase();
        line.contains("warning") || line.contains("unrecognized")
    });
    assert_eq!(warning, None, "{printed}");
}

#[test]
fn rewritten_dumps_of_pytorch_are_equal_in_python() {
    let Some(python) = python() else { return };
    let folder = tempfile::tempdir().unwrap();
    // The durations in the fixtures that a generator wrote have more digits than those of PyTorch's recorder, which
    // keeps 32 bits.
    let compare = r"
import pickle, sys, struct
def plain(path):
    dump = pickle.load(open(path, 'rb'))
    for entry in dump['entries']:
        if 'duration_ms' in entry:
            entry['duration_ms'] = struct.unpack('f', struct.pack('f', entry['duration_ms']))[0]
    return dump
for line in sys.stdin.read().splitlines():
    was, now = (plain(path) for path in line.split('\t'))
    for key in ('version', 'pg_status', 'comm_lib_version'):
        assert was[key] == now[key], (line, key, was[key], now[key])
    for name, group in was['pg_config'].items():
        for key, value in group.items():
            assert now['pg_config'][name][key] == value, (line, name, key)
    assert len(was['pg_config']) == len(now['pg_config']), line
    assert len(was['entries']) == len(now['entries']), line
    for old, new in zip(was['entries'], now['entries']):
        assert old == new, (line, old, new)
";
    let mut pairs = String::new();
    for scenario in std::fs::read_dir(fixtures()).unwrap() {
        let scenario = scenario.unwrap().path();
        let name = scenario.file_name().unwrap().to_string_lossy().into_owned();
        // Gloo's unnamed group gets its name when it is read, and the truncated file cannot be loaded.
        if name.contains("native") || name.contains("truncated") {
            continue;
        }
        let Ok(files) = std::fs::read_dir(scenario.join("pickle")) else {
            continue;
        };
        for file in files {
            let path = file.unwrap().path();
            let dump = read_valid(&std::fs::read(&path).unwrap());
            let rank = path.file_name().unwrap().to_string_lossy().into_owned();
            let rewritten = folder.path().join(format!("{name}-{rank}"));
            // The names contain both ends of a message only if the rank is known.
            let rank: String = rank.chars().filter(char::is_ascii_digit).collect();
            let mut dump = dump;
            dump.identity.rank = rank.parse().ok();
            std::fs::write(&rewritten, dump.to_pickle()).unwrap();
            pairs += &format!("{}\t{}\n", path.display(), rewritten.display());
        }
    }
    let list = folder.path().join("pairs");
    std::fs::write(&list, pairs).unwrap();
    run(Command::new(python)
        .args(["-c", compare])
        .stdin(std::fs::File::open(list).unwrap()));
}
