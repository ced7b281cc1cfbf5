//! Tests groups whose members are set later, call sites given as text, and a ring of version 1.2, which has no names of
//! functions.

use super::*;
use rcomm_recorder::model::{Frame, GroupPlace};
use rcomm_recorder::publish::DumpGroup;
use rcomm_recorder::record::CallSite;

fn without_members(name: &str) -> ProcessGroupInfo {
    ProcessGroupInfo {
        id: 1,
        name: name.to_owned(),
        desc: "tensor parallel".to_owned(),
        ranks: [].into(),
    }
}

fn read(recorder: &FlightRecorder) -> Dump {
    RingReader::attach(path_of(recorder)).unwrap().snapshot()
}

fn first_group(dump: &Dump) -> &DumpGroup {
    &dump.groups[0]
}

#[test]
fn members_are_absent_until_they_are_set_once() {
    let directory = tempfile::tempdir().unwrap();
    let recorder = FlightRecorder::create(&config(directory.path(), 3, 0)).unwrap();
    let place = GroupPlace { rank: 1, size: 2 };
    let group = recorder.add_group_by_place(&without_members("0xf00d"), place, MINUTE);
    recorder.begin(&all_reduce(group, 1));
    let before = read(&recorder);
    assert_eq!(first_group(&before).place, Some(place));
    assert!(first_group(&before).info.ranks.is_empty());
    assert_eq!(first_group(&before).info.desc, "tensor parallel");

    assert!(
        !recorder.set_group_members(group, &[1, 2, 3]),
        "members were set although their number differs from the group's size"
    );
    assert!(!recorder.set_group_members(group, &[]));
    assert!(recorder.set_group_members(group, &[1, 3]));
    assert!(
        !recorder.set_group_members(group, &[0, 3]),
        "members were set a second time"
    );
    let after = read(&recorder);
    assert_eq!(first_group(&after).info.ranks[..], [1, 3]);
    assert_eq!(first_group(&after).place, None);
    assert_eq!(after.entries, before.entries);
}

#[test]
fn group_without_members_or_place_takes_any_number_of_members() {
    let directory = tempfile::tempdir().unwrap();
    let recorder = FlightRecorder::create(&config(directory.path(), 0, 0)).unwrap();
    let group = recorder.add_group(&without_members("tp"), MINUTE);
    assert_eq!(first_group(&read(&recorder)).place, None);
    assert!(recorder.set_group_members(group, &[0, 2, 1]));
    assert_eq!(first_group(&read(&recorder)).info.ranks[..], [0, 2, 1]);
    let named = world(&recorder);
    assert!(
        !recorder.set_group_members(named, &[0, 1, 2, 3]),
        "members were set although the group was added with its members"
    );
    assert!(
        !recorder.set_group_members(GroupHandle::of_row(9_999), &[0]),
        "members of a group that does not exist were set"
    );
}

#[test]
fn number_of_a_communicator_is_read_with_its_group_once_it_is_set() {
    let directory = tempfile::tempdir().unwrap();
    let recorder = FlightRecorder::create(&config(directory.path(), 0, 0)).unwrap();
    let group = recorder.add_group(&without_members("tp"), MINUTE);
    world(&recorder);
    assert!(read(&recorder).nccl_comm_state.is_empty());
    recorder.set_communicator(group, 0xab);
    recorder.set_communicator(GroupHandle::of_row(9_999), 0xcd);
    let dump = read(&recorder);
    let facts = vec![("group".to_owned(), "tp".to_owned())];
    let section = ("0x00000000000000ab".to_owned(), facts);
    assert_eq!(dump.nccl_comm_state, [section]);
    // The plug-in for NCCL alone records the progress of channels and links.
    assert!(dump.communicators().is_empty());
}

/// The first frame of the operation that was recorded last.
fn last_frame(dump: &Dump) -> Option<&Frame> {
    let stack = dump.entries.last()?.stack?;
    dump.frames
        .get(*dump.stacks[stack as usize].first()? as usize)
}

#[test]
fn call_site_given_as_text_is_kept_once_and_read_back() {
    let directory = tempfile::tempdir().unwrap();
    let recorder = FlightRecorder::create(&config(directory.path(), 0, 0)).unwrap();
    let world = world(&recorder);
    let site = recorder.intern_call_site("train.py", "train_step", 64);
    assert_eq!(
        recorder.intern_call_site("train.py", "train_step", 64),
        site
    );
    assert_ne!(
        recorder.intern_call_site("train.py", "train_step", 65),
        site
    );
    assert_ne!(recorder.intern_call_site("train.py", "evaluate", 64), site);
    let from_python = Operation {
        call_site: Some(CallSite::Id(site)),
        ..all_reduce(world, 1)
    };
    recorder.begin(&from_python);
    let frame = Frame {
        name: "train_step".to_owned(),
        filename: "train.py".to_owned(),
        line: 64,
    };
    assert_eq!(last_frame(&read(&recorder)), Some(&frame));
    recorder.begin(&all_reduce(world, 2));
    let dump = read(&recorder);
    let in_rust = last_frame(&dump).unwrap();
    assert!(
        in_rust.filename.ends_with("main.rs") && in_rust.name.is_empty(),
        "{in_rust:?}"
    );
}

#[test]
fn ring_of_version_1_2_has_no_names_of_functions_and_is_read() {
    let directory = tempfile::tempdir().unwrap();
    let recorder = FlightRecorder::create(&config(directory.path(), 0, 0)).unwrap();
    let world = world(&recorder);
    let site = recorder.intern_call_site("train.py", "train_step", 64);
    let operation = Operation {
        call_site: Some(CallSite::Id(site)),
        ..all_reduce(world, 1)
    };
    recorder.begin(&operation);
    let mut bytes = fs::read(path_of(&recorder)).unwrap();
    // In a ring of 1.2, the header's words for the functions of call sites are zero.
    bytes[12..16].copy_from_slice(&2_u32.to_le_bytes());
    bytes[14 * 8..16 * 8].fill(0);
    let path = directory.path().join("older.ring");
    fs::write(&path, bytes).unwrap();
    let dump = RingReader::attach(&path).unwrap().snapshot();
    let frame = last_frame(&dump).unwrap();
    assert_eq!(
        (frame.filename.as_str(), frame.name.as_str(), frame.line),
        ("train.py", "", 64)
    );
    assert_eq!(first_group(&dump).info.ranks[..], [0, 1, 2, 3]);
}
