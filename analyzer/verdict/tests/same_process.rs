//! Tests processes that have rcomm's plug-in for NCCL in addition to their own recorder.

use rcomm_recorder::model::{
    Communicator, DType, EntryState, GroupPlace, KernelProgress, LinkProgress, LinkWait, OpType,
    ProcessGroupInfo,
};
use rcomm_recorder::publish::{Dump, DumpReader, Recorder};
use rcomm_recorder::record::{
    CommunicatorInfo, FlightRecorder, GroupHandle, Operation, Placement, RecorderConfig,
    SignatureKey, SignatureRef, Tensor,
};
use rcomm_verdict::{Code, Policy, analyze};
use std::time::Duration;

fn recorder(rank: u32) -> FlightRecorder {
    let config = RecorderConfig {
        placement: Placement::Memory,
        links: 16,
        ..RecorderConfig::new("job", rank, 2)
    };
    FlightRecorder::create(&config).expect("the memory suffices for a ring")
}

/// Records these operations. All but the last are completed; the last one is only issued if `last` is
/// [`EntryState::Scheduled`], else it is started.
fn issue(recorder: &FlightRecorder, group: GroupHandle, ops: &[OpType], last: EntryState) {
    for (index, &op) in ops.iter().enumerate() {
        let shape = [8];
        let tensors = [Tensor {
            dtype: DType::F32,
            shape: &shape,
        }];
        let key = SignatureKey {
            backend: "nccl",
            op_name: op.name(),
            inputs: &tensors,
            outputs: &tensors,
        };
        let seq = index as u64 + 1;
        let ticket = recorder.begin(&Operation {
            collective_seq_id: seq,
            op_id: seq,
            ..Operation::new(group, op, SignatureRef::Key(&key))
        });
        let is_last = index + 1 == ops.len();
        if is_last && last == EntryState::Scheduled {
            continue;
        }
        recorder.started(ticket);
        if !is_last {
            recorder.completed_and_retired_at(ticket, recorder.now(), None);
        }
    }
}

const OPS: [OpType; 3] = [OpType::AllReduce, OpType::Barrier, OpType::AllReduce];
/// The same operations in the plug-in's record: NCCL runs a barrier as an all-reduce.
const SEEN: [OpType; 3] = [OpType::AllReduce; 3];

/// The record of a program's own recorder, which does not see the device, and the plug-in's record of the same process.
/// `seen` are the operations as NCCL runs them, on a communicator with this name.
fn process(rank: u32, name: &str, seen: &[OpType]) -> [Dump; 2] {
    let [program, plugin] = [recorder(rank), recorder(rank)];
    let info = ProcessGroupInfo {
        id: 0,
        name: "0".to_owned(),
        desc: "default_pg".to_owned(),
        ranks: [0, 1].into(),
    };
    let group = program.add_group(&info, Duration::ZERO);
    issue(&program, group, &OPS, EntryState::Scheduled);
    let group = plugin.add_communicator(&CommunicatorInfo {
        id: 0,
        name: "nccl-00000000000000ab",
        desc: name,
        hash: 0xab,
        rank: Some(rank),
        size: Some(2),
    });
    issue(&plugin, group, seen, EntryState::Started);
    let mut dump = plugin.snapshot();
    dump.recorder = Recorder::NcclProfiler;
    assert_eq!(dump.groups[0].place, Some(GroupPlace { rank, size: 2 }));
    let record_id = dump
        .entries
        .last()
        .expect("the dump has an entry")
        .record_id;
    let communicator = Communicator {
        group: dump.groups[0].info.name.clone(),
        hash: 0xab,
        kernels: vec![KernelProgress {
            record_id,
            channels: 2,
            started: 0b11,
            ..KernelProgress::default()
        }],
        links: vec![LinkProgress {
            channel: 1,
            peer: 1 - rank,
            is_send: true,
            record_id,
            step: 3,
            steps: 16,
            wait: if rank == 0 {
                LinkWait::Send
            } else {
                LinkWait::Device
            },
            since_ns: 1,
        }],
        links_lost: 0,
    };
    dump.nccl_comm_state = vec![communicator.to_facts()];
    [program.snapshot(), dump].map(|dump| later(dump, Duration::from_secs(60)))
}

/// The dump as if it had been taken this much later.
fn later(mut dump: Dump, by: Duration) -> Dump {
    dump.identity.dump_time_ns += by.as_nanos() as i64;
    dump
}

/// The dumps of a job of two such processes.
fn job(name: &str, seen: &[OpType]) -> Vec<Dump> {
    (0..2).flat_map(|rank| process(rank, name, seen)).collect()
}

#[test]
fn a_process_with_both_recorders_is_one_rank_and_has_the_channels_under_its_own_names() {
    let report = analyze(&job("default_pg", &SEEN), &Policy::default());
    assert_eq!(report.ranks.len(), 2);
    let groups: Vec<&str> = report
        .groups
        .iter()
        .map(|known| &*known.group.name)
        .collect();
    assert_eq!(groups, ["0"]);
    let first = report.findings.first().expect("the report has a finding");
    assert_eq!(first.code, Code::E135, "{}", first.sentence);
    assert!(
        first.sentence.contains("channel 1 from rank 0"),
        "{}",
        first.sentence
    );
    assert!(first.sentence.contains("default_pg"), "{}", first.sentence);
}

#[test]
fn no_transfer_is_named_from_rings_that_had_no_room_for_some() {
    let mut dumps = job("default_pg", &SEEN);
    for dump in &mut dumps {
        let mut communicators = dump.communicators();
        for communicator in &mut communicators {
            communicator.links_lost = 3;
        }
        dump.nccl_comm_state = communicators.iter().map(Communicator::to_facts).collect();
    }
    let report = analyze(&dumps, &Policy::default());
    let first = report.findings.first().expect("the report has a finding");
    assert_eq!(first.code, Code::E135, "{}", first.sentence);
    assert!(!first.sentence.contains("channel 1"), "{}", first.sentence);
    let lost = "the rings of ranks 0 and 1 had no room for 6 transfers";
    let doubts = &first.doubts;
    assert!(
        doubts.iter().any(|doubt| doubt.starts_with(lost)),
        "{doubts:?}"
    );
    let mut notes = report.problems.iter();
    let note = notes.find(|note| note.code == Code::N302).expect("a note");
    assert!(note.sentence.starts_with(lost), "{}", note.sentence);
}

#[test]
fn a_communicator_of_another_name_or_with_other_operations_stays_a_group_of_its_own() {
    let group_count = |name: &str, seen: &[OpType]| {
        let report = analyze(&job(name, seen), &Policy::default());
        assert_eq!(report.ranks.len(), 2);
        report.groups.len()
    };
    assert_eq!(group_count("default_pg", &SEEN), 1);
    assert_eq!(group_count("tp", &SEEN), 2);
    let other = [OpType::AllReduce, OpType::Broadcast, OpType::AllReduce];
    assert_eq!(group_count("default_pg", &other), 2);
}

#[test]
fn the_number_of_a_communicator_joins_it_where_it_has_no_name() {
    let mut dumps = job("", &SEEN);
    for dump in dumps
        .iter_mut()
        .filter(|dump| dump.recorder == Recorder::Rcomm)
    {
        let facts = vec![("group".to_owned(), "0".to_owned())];
        dump.nccl_comm_state = vec![("0x00000000000000ab".to_owned(), facts)];
    }
    assert_eq!(analyze(&dumps, &Policy::default()).groups.len(), 1);
}

#[test]
fn few_operations_of_records_that_lack_the_process_are_joined_by_the_communicator_s_number_only() {
    let groups = |name: &str, numbered: bool| {
        let mut dumps = job(name, &SEEN);
        for dump in dumps
            .iter_mut()
            .filter(|dump| dump.recorder == Recorder::Rcomm)
        {
            dump.identity.pid = 0;
            if numbered {
                let facts = vec![("group".to_owned(), "0".to_owned())];
                dump.nccl_comm_state = vec![("0x00000000000000ab".to_owned(), facts)];
            }
        }
        analyze(&dumps, &Policy::default()).groups.len()
    };
    assert_eq!(groups("default_pg", false), 2);
    assert_eq!(groups("default_pg", true), 1);
}

#[test]
fn a_communicator_without_a_name_is_the_one_group_whose_calls_were_recorded_at_the_same_times() {
    let groups = |later_ns: i64, has_second_group: bool| {
        let mut dumps = job("", &SEEN);
        for dump in &mut dumps {
            // The ranks issue one call each second.
            for (ago, entry) in dump.entries.iter_mut().rev().enumerate() {
                entry.time_created_ns -= ago as i64 * 1_000_000_000;
            }
            match dump.recorder {
                Recorder::NcclProfiler => {
                    for entry in &mut dump.entries {
                        entry.time_created_ns += later_ns;
                    }
                }
                _ if has_second_group => {
                    let mut second = dump.groups[0].clone();
                    (second.info.id, second.info.name) = (1, "1".to_owned());
                    dump.groups.push(second);
                    let mut calls = dump.entries.clone();
                    for (number, call) in (100..).zip(&mut calls) {
                        (call.group, call.record_id) = (1, number);
                    }
                    dump.entries.extend(calls);
                }
                _ => {}
            }
        }
        let report = analyze(&dumps, &Policy::default());
        let named = report
            .groups
            .iter()
            .map(|known| known.group.name.to_string());
        named.collect::<Vec<_>>()
    };
    assert_eq!(groups(0, false), ["0"]);
    // The plug-in recorded the same calls at other times.
    assert_eq!(groups(200_000_000, false), ["0", "nccl-00000000000000ab"]);
    // The communicator may be either of two groups with the same ranks and the same calls.
    assert_eq!(groups(0, true), ["0", "1", "nccl-00000000000000ab"]);
}

/// The dumps that PyTorch's recorder left of a job that hangs, in order of rank.
fn torch_dumps() -> Vec<Dump> {
    macro_rules! rank {
        ($rank:literal) => {
            include_bytes!(concat!(
                "../../../tests/fixtures/dumps/nccl-stuck-2x2x2/pickle/rank_",
                $rank
            ))
        };
    }
    let files: [&[u8]; 8] = [
        rank!(0),
        rank!(1),
        rank!(2),
        rank!(3),
        rank!(4),
        rank!(5),
        rank!(6),
        rank!(7),
    ];
    let read = |(rank, bytes)| {
        let (mut dump, _) = DumpReader::new().read(bytes).expect("the bytes are a dump");
        dump.identity.rank = Some(rank);
        dump
    };
    (0..).zip(files).map(read).collect()
}

/// What the plug-in records in the process of this dump: its collectives, each `later_ns` after the program's recorder
/// noted it. The communicators have no names, as PyTorch gives them none, or those of PyTorch's groups, if
/// `are_named`.
fn plugin_of(torch: &Dump, later_ns: i64, are_named: bool) -> Dump {
    let rank = torch.identity.rank.expect("`torch_dumps` set the rank");
    let mut dump = torch.clone();
    dump.recorder = Recorder::NcclProfiler;
    dump.identity.host = "n0".to_owned();
    dump.identity.pid = 100 + rank;
    dump.entries.retain(|entry| !entry.is_p2p);
    for (number, entry) in (1_000..).zip(&mut dump.entries) {
        entry.record_id = number;
        entry.stack = None;
        entry.collective_seq_id += 1;
        entry.time_created_ns += later_ns;
    }
    for group in &mut dump.groups {
        let members = std::mem::take(&mut group.info.ranks);
        let place = members.iter().position(|&member| member == rank);
        group.place = Some(GroupPlace {
            rank: place.expect("the rank is a member") as u32,
            size: members.len() as u32,
        });
        let hash = 0xab00
            + group
                .info
                .name
                .parse::<u64>()
                .expect("the group's name is a number");
        group.info.name = format!("nccl-{hash:016x}");
        if !are_named {
            group.info.desc.clear();
        }
        group.status = None;
        let communicator = Communicator {
            group: group.info.name.clone(),
            hash,
            kernels: Vec::new(),
            links: Vec::new(),
            links_lost: 0,
        };
        dump.nccl_comm_state.push(communicator.to_facts());
    }
    dump
}

#[test]
fn pytorch_s_dumps_are_joined_by_order_and_time_with_and_without_names() {
    let torch = torch_dumps();
    assert!(torch.iter().all(|dump| dump.identity.pid == 0));
    let without_rings = analyze(&torch, &Policy::default());
    let judge_with_plugin = |later_ns: i64, are_named: bool| {
        let rings = torch
            .iter()
            .map(|dump| plugin_of(dump, later_ns, are_named));
        analyze(
            &torch.iter().cloned().chain(rings).collect::<Vec<_>>(),
            &Policy::default(),
        )
    };
    // Counts communicators with operations: without any, nothing shows which group a communicator is.
    let communicators = |report: &rcomm_verdict::Report| {
        let groups = report.groups.iter();
        groups
            .filter(|known| known.group.name.starts_with("nccl-") && known.last_seq.is_some())
            .count()
    };
    let named = |report: &rcomm_verdict::Report| {
        let first = &report.findings[0];
        (
            first.code,
            first.culprit_ranks.clone(),
            first.sentence.clone(),
        )
    };
    // On each rank, a thread lost its processor between the two records of one call.
    let paused = torch.iter().map(|dump| {
        let mut ring = plugin_of(dump, 20_000, false);
        let longest = (0..ring.groups.len() as u32)
            .max_by_key(|&group| ring.entries.iter().filter(|it| it.group == group).count());
        let mut calls = ring
            .entries
            .iter_mut()
            .filter(|it| Some(it.group) == longest);
        let call = calls.nth(3).expect("a call");
        call.time_created_ns += 300_000_000;
        ring
    });
    let paused: Vec<Dump> = torch.iter().cloned().chain(paused).collect();
    assert_eq!(communicators(&analyze(&paused, &Policy::default())), 0);
    for are_named in [true, false] {
        let joined = judge_with_plugin(20_000, are_named);
        assert_eq!(joined.ranks.len(), 8);
        assert_eq!(communicators(&joined), 0, "{are_named}");
        assert_eq!(named(&joined), named(&without_rings));
        // The rings are of another run of the same program: they hold the same calls in the same order, at other times.
        let apart = judge_with_plugin(3_000_000_000, are_named);
        assert!(communicators(&apart) > 4, "{are_named}");
    }
}
