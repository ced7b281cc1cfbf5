//! A process that has rcomm's plug-in for NCCL beside its own recorder.

use rcomm_recorder::model::{
    Communicator, DType, EntryState, GroupPlace, KernelProgress, LinkProgress, LinkWait, OpType,
    ProcessGroupInfo,
};
use rcomm_recorder::publish::{Dump, Recorder};
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
    FlightRecorder::create(&config).expect("memory for a ring")
}

/// Records these operations, all but the last completed.
fn issue(recorder: &FlightRecorder, group: GroupHandle, ops: &[OpType], last: EntryState) {
    for (at, &op) in ops.iter().enumerate() {
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
        let seq = at as u64 + 1;
        let ticket = recorder.begin(&Operation {
            collective_seq_id: seq,
            op_id: seq,
            ..Operation::new(group, op, SignatureRef::Key(&key))
        });
        let is_last = at + 1 == ops.len();
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
const SEEN: [OpType; 3] = [OpType::AllReduce; 3];

/// What a program that records for itself has, without a look at the device, and what the plug-in has of the same
/// process.
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
    let record_id = dump.entries.last().expect("one").record_id;
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
    };
    dump.nccl_comm_state = vec![communicator.to_facts()];
    [program.snapshot(), dump]
}

fn all(name: &str, seen: &[OpType]) -> Vec<Dump> {
    (0..2).flat_map(|rank| process(rank, name, seen)).collect()
}

#[test]
fn a_process_with_both_recorders_is_one_rank_and_has_the_channels_under_its_own_names() {
    let report = analyze(&all("default_pg", &SEEN), &Policy::default());
    assert_eq!(report.ranks.len(), 2);
    let groups: Vec<&str> = report.groups.iter().map(|it| &*it.group.name).collect();
    assert_eq!(groups, ["0"]);
    let first = report.findings.first().expect("a finding");
    assert_eq!(first.code, Code::E135, "{}", first.sentence);
    assert!(
        first.sentence.contains("channel 1 from rank 0"),
        "{}",
        first.sentence
    );
    assert!(first.sentence.contains("default_pg"), "{}", first.sentence);
}

#[test]
fn a_communicator_of_another_name_or_with_other_operations_stays_a_group_of_its_own() {
    let apart = |name: &str, seen: &[OpType]| {
        let report = analyze(&all(name, seen), &Policy::default());
        assert_eq!(report.ranks.len(), 2);
        report.groups.len()
    };
    assert_eq!(apart("default_pg", &SEEN), 1);
    assert_eq!(apart("tp", &SEEN), 2);
    assert_eq!(apart("", &SEEN), 2);
    let other = [OpType::AllReduce, OpType::Broadcast, OpType::AllReduce];
    assert_eq!(apart("default_pg", &other), 2);
}

#[test]
fn the_number_of_a_communicator_joins_it_where_it_has_no_name() {
    let mut dumps = all("", &SEEN);
    for dump in dumps.iter_mut().filter(|it| it.recorder == Recorder::Rcomm) {
        let facts = vec![("group".to_owned(), "0".to_owned())];
        dump.nccl_comm_state = vec![("0x00000000000000ab".to_owned(), facts)];
    }
    assert_eq!(analyze(&dumps, &Policy::default()).groups.len(), 1);
}

#[test]
fn records_that_lack_the_process_are_joined_by_the_communicator_s_number_only() {
    let groups = |name: &str, numbered: bool| {
        let mut dumps = all(name, &SEEN);
        for dump in dumps.iter_mut().filter(|it| it.recorder == Recorder::Rcomm) {
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
