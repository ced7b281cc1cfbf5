//! Reads dumps: real ones, both complete and with bytes cut off or changed, and small ones written by hand.
#![allow(clippy::unwrap_used)]

mod indices;

use indices::check_indices;
use rcomm_recorder::model::{EntryState, OpType, Peer};
use rcomm_recorder::publish::{Cause, Dump, ReadError, ReadProblem, Recorder};
use std::path::{Path, PathBuf};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/dumps")
}

fn bytes(path: &str) -> Vec<u8> {
    let path = fixtures().join(path);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn files_below(folder: &Path, found: &mut Vec<PathBuf>) {
    for item in std::fs::read_dir(folder).unwrap() {
        let path = item.unwrap().path();
        if path.is_dir() {
            files_below(&path, found);
        } else if path.extension().is_none_or(|ext| ext != "md") {
            found.push(path);
        }
    }
}

/// Returns the dump without stacks, which the JSON form omits, and with its groups sorted, since the two forms list
/// them in different orders.
fn comparable(mut dump: Dump) -> Dump {
    dump.frames.clear();
    dump.stacks.clear();
    for entry in &mut dump.entries {
        entry.stack = None;
    }
    let mut order: Vec<u32> = (0..dump.groups.len() as u32).collect();
    order.sort_by_key(|&index| {
        let info = &dump.groups[index as usize].info;
        (info.name.clone(), info.id)
    });
    let groups = &dump.groups;
    dump.groups = order
        .iter()
        .map(|&index| groups[index as usize].clone())
        .collect();
    for entry in &mut dump.entries {
        let index = order.iter().position(|&old| old == entry.group).unwrap();
        entry.group = index as u32;
    }
    dump
}

#[test]
fn every_real_dump_is_read_and_every_truth_file_is_refused() {
    let mut files = Vec::new();
    files_below(&fixtures(), &mut files);
    let mut dumps = 0;
    for path in files {
        let name = path.display().to_string();
        let read = Dump::read(&std::fs::read(&path).unwrap());
        if name.ends_with("truth.json") {
            assert!(
                matches!(read, Err(ReadError::NotADump { .. })),
                "{name}: {read:?}"
            );
            continue;
        }
        let (dump, problems) = read.unwrap_or_else(|error| panic!("{name}: {error}"));
        dumps += 1;
        if name.contains("truncated-dump-w4") && name.contains("rank_1") {
            assert!(matches!(
                problems[..],
                [ReadProblem::Stopped { cause: Cause::Cut, entries, .. }] if entries == dump.entries.len()
            ));
        } else {
            assert!(problems.is_empty(), "{name}: {problems:?}");
            let known = ["2.7", "2.9", "2.10"].map(String::from);
            assert!(known.contains(&dump.version.to_string()), "{name}");
        }
        // A dump of the active calls only has no entries where none is, and nothing else tells its recorder.
        if dump.entries.is_empty() {
            assert!(name.contains("-active-"), "{name}");
            assert_eq!(dump.recorder, Recorder::Unknown, "{name}");
            continue;
        }
        let recorder = if name.contains("native") {
            Recorder::NativeGloo
        } else if name.contains("nccl-") {
            Recorder::Nccl
        } else {
            Recorder::Hook
        };
        assert_eq!(dump.recorder, recorder, "{name}");
        for entry in &dump.entries {
            let group = &dump.groups[entry.group as usize];
            assert!(!group.info.name.is_empty(), "{name}");
            // A truncated file may have lost the data after its entries.
            if problems.is_empty() && group.info.desc == "default_pg" {
                assert!(!group.info.ranks.is_empty(), "{name}");
            }
            assert_ne!(entry.op, OpType::Other, "{name}");
            let signature = &dump.signatures[entry.signature as usize];
            assert_eq!(
                signature.input_sizes.len(),
                signature.input_dtypes.len(),
                "{name}"
            );
            if entry.op.is_p2p() {
                assert!(matches!(entry.peer, Peer::Rank(_)), "{name}");
            }
            let stack = entry.stack.map(|stack| &dump.stacks[stack as usize]);
            for &frame in stack.into_iter().flatten() {
                assert!(!dump.frames[frame as usize].filename.is_empty(), "{name}");
            }
        }
    }
    assert!(dumps > 100, "only {dumps} dumps found");
}

#[test]
fn pickle_and_json_of_one_moment_are_the_same_dump() {
    for scenario in [
        "batch-ring-w4",
        "never-join-native-w4",
        "nccl-notiming-stuck-2x2x2",
    ] {
        for rank in 0..4 {
            let (pickle, _) =
                Dump::read(&bytes(&format!("{scenario}/pickle/rank_{rank}"))).unwrap();
            let (json, _) =
                Dump::read(&bytes(&format!("{scenario}/json/rank_{rank}.json"))).unwrap();
            assert!(pickle.entries.iter().all(|entry| entry.stack.is_some()));
            assert_eq!(
                comparable(pickle),
                comparable(json),
                "{scenario} rank {rank}"
            );
        }
    }
}

#[test]
fn an_entry_is_read_field_by_field() {
    let (dump, _) = Dump::read(&bytes("batch-ring-w4/json/rank_1.json")).unwrap();
    let entry = &dump.entries[0];
    let signature = &dump.signatures[entry.signature as usize];
    assert_eq!(entry.record_id, 0);
    assert_eq!(entry.collective_seq_id, 1);
    assert_eq!(entry.op, OpType::AllGatherSingle);
    assert_eq!(entry.state, EntryState::Completed);
    assert!(entry.retired && !entry.is_p2p);
    assert_eq!(entry.time_created_ns, 1_795_239_773_871_775_588);
    assert_eq!(
        entry.time_discovered_completed_ns,
        1_795_239_773_880_463_950
    );
    assert_eq!(entry.duration_ms, Some(8.383_277));
    assert_eq!(entry.timeout_ms, 4000);
    assert_eq!(signature.backend, "frgloo");
    assert_eq!(signature.op_name, "_all_gather_base");
    assert_eq!(signature.input_sizes, [[32]]);
    assert_eq!(signature.output_sizes, [[128]]);
    assert_eq!(signature.input_dtypes, ["Float"]);
    let thread = &dump.threads[entry.thread.unwrap() as usize];
    assert_eq!((&*thread.id, &*thread.name), ("140043335297920", "python"));
    let group = &dump.groups[0];
    assert_eq!((&*group.info.name, &*group.info.desc), ("0", "default_pg"));
    assert_eq!(*group.info.ranks, [0, 1, 2, 3]);
    let status = group.status.unwrap();
    assert_eq!((status.last_enqueued, status.last_started), (13, -1));
}

#[test]
fn unnamed_group_of_gloo_is_the_world() {
    let (dump, _) = Dump::read(&bytes("never-join-native-w4/pickle/rank_0")).unwrap();
    assert_eq!(dump.recorder, Recorder::NativeGloo);
    assert_eq!(dump.groups.len(), 1);
    assert_eq!(dump.groups[0].info.desc, "default_pg");
    assert_eq!(*dump.groups[0].info.ranks, [0, 1, 2, 3]);
}

#[test]
fn every_prefix_of_a_dump_gives_its_complete_entries_or_an_error() {
    for path in [
        "batch-ring-w4/pickle/rank_1",
        "batch-ring-w4/json/rank_1.json",
    ] {
        let complete = bytes(path);
        let (full, _) = Dump::read(&complete).unwrap();
        let mut most_entries = 0;
        for len in 0..complete.len() {
            match Dump::read(&complete[..len]) {
                Ok((dump, problems)) => {
                    assert_eq!(problems.len(), 1, "{path} cut at {len}");
                    assert!(dump.entries.len() >= most_entries, "{path} cut at {len}");
                    most_entries = dump.entries.len();
                    for (entry, expected) in dump.entries.iter().zip(&full.entries) {
                        assert_eq!(entry.record_id, expected.record_id);
                        assert_eq!(entry.time_created_ns, expected.time_created_ns);
                        assert_eq!(
                            dump.signatures[entry.signature as usize],
                            full.signatures[expected.signature as usize]
                        );
                    }
                }
                Err(ReadError::Empty) => assert_eq!(len, 0),
                Err(ReadError::Lost { of, .. }) => assert_eq!((of, most_entries), (len, 0)),
                Err(other) => panic!("{path} cut at {len}: {other}"),
            }
        }
        assert_eq!(most_entries, full.entries.len(), "{path}");
    }
}

#[test]
fn a_changed_byte_anywhere_causes_no_panic_and_no_invalid_index() {
    for path in [
        "batch-ring-w4/pickle/rank_1",
        "batch-ring-w4/json/rank_1.json",
    ] {
        let valid = bytes(path);
        let mut random = 1_u32;
        for index in 0..valid.len() {
            let mut damaged = valid.clone();
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            damaged[index] ^= ((random >> 24) as u8).max(1);
            if let Ok((dump, _)) = Dump::read(&damaged) {
                check_indices(&dump);
            }
        }
    }
}

#[test]
fn a_newer_major_version_is_refused_and_a_newer_minor_one_is_read() {
    let read_version = |version: &str| {
        let text = format!(r#"{{"version":"{version}","pg_config":{{}},"news":[1,{{"a":[]}}]}}"#);
        Dump::read(text.as_bytes())
    };
    assert!(matches!(read_version("3.0"), Err(ReadError::Version(_))));
    assert_eq!(read_version("2.99").unwrap().0.version.minor, 99);
}

#[test]
fn version_one_is_read_by_the_keys_it_has() {
    let text = br#"{"entries":[{"record_id":5,"pg_id":1,"seq_id":7,"op_id":9,
        "profiling_name":"nccl:all_reduce","time_created_ns":1,"input_sizes":[[3,4]],
        "output_sizes":[[3,4]],"state":"started","time_discovered_started_ns":2,
        "time_discovered_completed_ns":null,"retired":false,
        "frames":[{"name":"f","filename":"a.py","line":3},{"name":"main","filename":"a.py","line":9}]}],
        "version":"1.4","pg_config":{"1":[0,2]}}"#;
    let (dump, problems) = Dump::read(text).unwrap();
    assert!(problems.is_empty());
    let entry = &dump.entries[0];
    assert_eq!(entry.collective_seq_id, 7);
    assert_eq!(entry.time_discovered_completed_ns, 0);
    assert_eq!(dump.groups[0].info.name, "1");
    assert_eq!(*dump.groups[0].info.ranks, [0, 2]);
    assert_eq!(dump.stacks[entry.stack.unwrap() as usize].len(), 2);
}

#[test]
fn a_bare_list_of_entries_is_a_dump() {
    let text = br#"[{"profiling_name":"nccl:all_reduce","seq_id":1,"pg_id":0}]"#;
    let (dump, problems) = Dump::read(text).unwrap();
    assert!(problems.is_empty());
    assert_eq!(dump.entries.len(), 1);
}

#[test]
fn torchcomms_is_recognized_by_its_groups() {
    let text = br#"{"version":"2.10","pg_config":{"main_comm":{"name":"main_comm","desc":"nccl","ranks":"[0,1]"}},
        "pg_status":{},"entries":[{"record_id":3,"pg_id":0,"process_group":["main_comm","nccl"],
        "collective_seq_id":3,"p2p_seq_id":0,"op_id":3,"profiling_name":"nccl:all_gather_single",
        "input_sizes":[[1024]],"input_dtypes":["Float"],"output_sizes":[[2048]],
        "output_dtypes":["Float"],"state":"completed","retired":true,"is_p2p":false}]}"#;
    let (dump, _) = Dump::read(text).unwrap();
    assert_eq!(dump.recorder, Recorder::Torchcomms);
    assert_eq!(*dump.groups[0].info.ranks, [0, 1]);
}

#[test]
fn groups_without_entries_get_the_numbers_that_are_left() {
    let text = br#"{"version":"2.10","pg_config":{"10":{"name":"10","desc":"b","ranks":"[1]"},
        "9":{"name":"9","desc":"a","ranks":"[0, 1]"}},
        "pg_status":{"0":{"last_enqueued_collective":"5"},"3":{"last_enqueued_collective":"7"}}}"#;
    let (dump, _) = Dump::read(text).unwrap();
    let mut groups: Vec<_> = dump
        .groups
        .iter()
        .map(|group| {
            (
                &*group.info.name,
                group.info.id,
                group.status.unwrap().last_enqueued,
            )
        })
        .collect();
    groups.sort_unstable();
    assert_eq!(groups, [("10", 3, 7), ("9", 0, 5)]);
}

#[test]
fn an_invalid_entry_is_skipped_and_reported() {
    let text = br#"{"version":"2.10","entries":[{"profiling_name":"nccl:barrier"},
        {"profiling_name":"nccl:barrier","state":"flying"},17,
        {"profiling_name":"nccl:barrier","input_sizes":[[-4]]},{"profiling_name":"nccl:barrier"}]}"#;
    let (dump, problems) = Dump::read(text).unwrap();
    assert_eq!(dump.entries.len(), 2);
    assert_eq!(
        problems,
        [ReadProblem::Rejected {
            count: 3,
            first: 1,
            key: "state"
        }]
    );
}

#[test]
fn entries_that_are_not_a_list_are_reported() {
    for (value, found) in [
        ("null", "None"),
        ("17", "a number"),
        ("2.5", "a number"),
        ("true", "a bool"),
        ("\"none\"", "a string"),
        ("{\"0\":{}}", "a dict"),
    ] {
        let text = format!("{{\"pg_config\":{{}},\"entries\":{value}}}");
        let (dump, problems) = Dump::read(text.as_bytes()).unwrap();
        assert!(dump.entries.is_empty());
        assert_eq!(problems, [ReadProblem::NoList { found }], "{value}");
    }
    for (value, found) in [
        (&b"N"[..], "None"),
        (b"K\x11", "a number"),
        (b"\x88", "a bool"),
        (b"X\x04\0\0\0none", "a string"),
        (b"}", "a dict"),
    ] {
        let body = [b"}(X\x09\0\0\0pg_config}X\x07\0\0\0entries", value, b"u"];
        let (dump, problems) = Dump::read(&pickle(&body.concat())).unwrap();
        assert!(dump.entries.is_empty());
        assert_eq!(problems, [ReadProblem::NoList { found }], "{value:?}");
    }
    let (_, problems) = Dump::read(b"{\"pg_config\":{}}").unwrap();
    assert_eq!(problems, []);
}

/// A pickle of protocol 2 with this body.
fn pickle(body: &[u8]) -> Vec<u8> {
    [b"\x80\x02", body, b"."].concat()
}

#[test]
fn instructions_that_construct_objects_are_refused_by_name() {
    let cases: [(&[u8], &str); 9] = [
        (b"cposix\nsystem\nX\x02\0\0\0id\x85R", "GLOBAL"),
        (b"}R", "REDUCE"),
        (b"}}b", "BUILD"),
        (b"(iposix\nsystem\n", "INST"),
        (b"(o", "OBJ"),
        (b"}}\x81", "NEWOBJ"),
        (b"X\x02\0\0\0osX\x06\0\0\0system\x93", "STACK_GLOBAL"),
        (b"\x82\x01", "EXT1"),
        (b"Pid\n", "PERSID"),
    ];
    for (body, name) in cases {
        match Dump::read(&pickle(body)) {
            Err(ReadError::Refused { opcode, .. }) => assert_eq!(opcode, name),
            other => panic!("{name}: {other:?}"),
        }
    }
}

#[test]
fn lengths_beyond_the_file_are_truncation() {
    for body in [
        &b"X\xff\xff\xff\xff"[..],
        b"\x8d\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x8b\xff\xff\xff\x7f",
        b"\x8a\xff",
    ] {
        assert!(matches!(
            Dump::read(&pickle(body)),
            Err(ReadError::Lost {
                cause: Cause::Cut,
                ..
            })
        ));
    }
}

#[test]
fn invalid_memo_numbers_lengths_and_missing_operands_are_damage() {
    for body in [
        &b"}r\xff\xff\xff\xff"[..],
        b"}j\xff\xff\xff\xff",
        b"h\x07",
        b"\x8b\xff\xff\xff\xff",
        b"u",
        b"e",
        b"a",
        b"\x86",
    ] {
        assert!(matches!(
            Dump::read(&pickle(body)),
            Err(ReadError::Lost {
                cause: Cause::Damaged(_),
                ..
            })
        ));
    }
}

#[test]
fn five_million_nested_lists_do_not_overflow_the_stack() {
    let mut body = b"]".repeat(5_000_000);
    body.extend(b"a".repeat(4_999_999));
    let read = Dump::read(&pickle(&body));
    assert!(matches!(read, Err(ReadError::NotADump { .. })), "{read:?}");
    let text = "[".repeat(5_000_000);
    let read = Dump::read(text.as_bytes());
    assert!(matches!(read, Err(ReadError::Lost { .. })), "{read:?}");
    let text = format!(
        r#"{{"version":"2.10","pg_config":{{}},"x":{}"#,
        "[".repeat(5_000_000)
    );
    let (_, problems) = Dump::read(text.as_bytes()).unwrap();
    assert_eq!(problems.len(), 1);
}

#[test]
fn a_memo_bomb_is_never_expanded() {
    // Each list contains the previous one twice: 2^60 leaves when expanded. The last one is used as the members of a
    // group, as the frames of one entry, as the shapes of a second, and as the group of a third.
    let mut body = b"}(N]q\x00".to_vec();
    for level in 0..60_u8 {
        body.extend([
            b'N',
            b']',
            b'q',
            level + 1,
            b'(',
            b'h',
            level,
            b'h',
            level,
            b'e',
        ]);
    }
    body.extend(b"X\x09\0\0\0pg_config}(X\x01\0\0\x000h<u");
    body.extend(b"X\x07\0\0\0entries](");
    for key in ["frames", "input_sizes", "process_group"] {
        body.extend(b"}(X");
        body.extend((key.len() as u32).to_le_bytes());
        body.extend(key.as_bytes());
        body.extend(b"h<u");
    }
    body.extend(b"eu");
    let (dump, problems) = Dump::read(&pickle(&body)).unwrap();
    assert!(dump.entries.is_empty());
    assert!(
        matches!(problems[..], [ReadProblem::Rejected { count: 3, .. }]),
        "{problems:?}"
    );
}

#[test]
fn a_list_that_contains_itself_is_read_in_finite_time() {
    let body = b"}(X\x09\0\0\0pg_config}X\x07\0\0\0entries]q\x00(h\x00h\x00eu";
    let (dump, problems) = Dump::read(&pickle(body)).unwrap();
    assert!(dump.entries.is_empty());
    assert!(matches!(
        problems[..],
        [ReadProblem::Rejected { count: 2, .. }]
    ));
}

#[test]
fn empty_input_and_input_that_is_no_dump_are_refused() {
    assert_eq!(Dump::read(b""), Err(ReadError::Empty));
    for garbage in [&b"hello"[..], b"\x1f\x8b\x08\0", b"\0\0\0\0", b" \n\t"] {
        assert!(matches!(
            Dump::read(garbage),
            Err(ReadError::NotADump { .. })
        ));
    }
    // An empty list of entries alone does not identify a dump, in either encoding.
    let empty_pickle = pickle(b"}X\x07\x00\x00\x00entries]s");
    for empty in [&br#"{"entries": []}"#[..], &empty_pickle] {
        let read = Dump::read(empty);
        assert!(matches!(read, Err(ReadError::NotADump { .. })), "{read:?}");
    }
}

#[test]
fn text_after_a_dump_is_a_problem() {
    let (_, problems) = Dump::read(br#"{"version":"2.10","pg_config":{}} and more"#).unwrap();
    assert_eq!(problems.len(), 1);
}
