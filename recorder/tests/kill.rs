//! A ring is readable whatever happened to its owner: killed, stopped, or stuck in its teardown.

#![allow(clippy::unwrap_used)]

mod child;

use child::Child;
use rcomm_recorder::model::{DType, EntryState, OpType, ProcessGroupInfo};
use rcomm_recorder::publish::{Dump, RingReader, list_rings, remove_stale_rings};
use rcomm_recorder::record::{
    FlightRecorder, GroupHandle, Operation, Placement, RecorderConfig, SignatureKey, SignatureRef,
    Tensor,
};
use rustix::process::Signal;
use std::path::PathBuf;
use std::sync::mpsc;
use std::time::{Duration, Instant};

const TENSOR: &[Tensor<'static>] = &[Tensor {
    dtype: DType::Bf16,
    shape: &[1024],
}];

fn recorder(directory: PathBuf) -> (FlightRecorder, GroupHandle) {
    let mut config = RecorderConfig::new("job", 1, 2);
    config.placement = Placement::Dir(directory);
    config.entries = 1_024;
    let recorder = FlightRecorder::create(&config).unwrap();
    let info = ProcessGroupInfo {
        id: 0,
        name: "0".to_owned(),
        desc: "default_pg".to_owned(),
        ranks: [0, 1].into(),
    };
    let group = recorder.add_group(&info, Duration::from_secs(60));
    (recorder, group)
}

fn record(recorder: &FlightRecorder, group: GroupHandle, seq: u64) {
    let key = SignatureKey {
        backend: "cpu",
        op_name: "all_reduce",
        inputs: TENSOR,
        outputs: TENSOR,
    };
    let ticket = recorder.begin(&Operation {
        collective_seq_id: seq,
        ..Operation::new(group, OpType::AllReduce, SignatureRef::Key(&key))
    });
    recorder.completed(ticket);
}

#[test]
#[ignore = "run by the tests below, as a process of its own"]
fn rank_that_records_forever() {
    let Some(directory) = child::directory() else {
        return;
    };
    let (recorder, group) = recorder(directory);
    recorder.phase("train");
    child::print_line(recorder.storage().path().unwrap().to_str().unwrap());
    for seq in 1.. {
        record(&recorder, group, seq);
        recorder.step(seq.cast_signed());
    }
}

/// The main thread of this rank has finished its work and joins a thread that never ends.
#[test]
#[ignore = "run by the tests below, as a process of its own"]
fn rank_that_is_stuck_in_teardown() {
    struct JoinOnDrop(Option<std::thread::JoinHandle<()>>);
    impl Drop for JoinOnDrop {
        fn drop(&mut self) {
            self.0.take().unwrap().join().unwrap();
        }
    }
    let Some(directory) = child::directory() else {
        return;
    };
    let (recorder, group) = recorder(directory);
    for seq in 1..=5 {
        record(&recorder, group, seq);
    }
    let (_never_sent, wait) = mpsc::channel::<()>();
    let stuck = std::thread::spawn(move || {
        let _ = wait.recv();
    });
    recorder.phase("shutdown");
    child::print_line(recorder.storage().path().unwrap().to_str().unwrap());
    drop(JoinOnDrop(Some(stuck)));
}

/// Waits until this holds, for at most a minute.
fn wait_until(awaited: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < deadline, "waited for a minute: {awaited}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Checks that the newest 1,024 records are there, except one that the process left incomplete when it was ended or
/// stopped.
fn check_no_gap(dump: &Dump) {
    let unreadable = dump.status.as_ref().unwrap().dropped;
    assert!(unreadable <= 1, "{unreadable} entries are unreadable");
    assert!(dump.entries.len() as u64 >= 1_024 - unreadable);
    let last = dump.entries.last().unwrap();
    for entry in &dump.entries {
        assert_eq!(entry.collective_seq_id, entry.record_id);
        if entry.record_id != last.record_id {
            assert_eq!(entry.state, EntryState::Completed, "{entry:?}");
        }
    }
    let status = dump.groups[0].status.unwrap();
    let newest = last.collective_seq_id.cast_signed();
    assert!((newest - 1..=newest + 1).contains(&status.last_enqueued));
    assert!((newest - 2..=newest).contains(&status.last_completed));
    assert_eq!(dump.status.as_ref().unwrap().phase, "train");
}

#[test]
fn ring_of_a_killed_process_is_complete_and_reported_dead() {
    for round in 0..10 {
        let directory = tempfile::tempdir().unwrap();
        let mut rank = Child::spawn("rank_that_records_forever", directory.path());
        let reader = RingReader::attach(rank.read_line()).unwrap();
        assert!(reader.is_alive());
        // Each round kills the process at a different record.
        wait_until("records", || reader.records() > 5_000 + round * 777);
        rank.signal(Signal::KILL);
        rank.wait();
        assert!(!reader.is_alive());
        let dump = reader.snapshot();
        check_no_gap(&dump);
        assert_eq!(dump.identity.reason, RingReader::OWNER_IS_DEAD);
        // A later reader gets the same result.
        let later = &list_rings(directory.path()).unwrap()[0];
        assert_eq!(RingReader::attach(&later.path).unwrap().snapshot(), dump);
        assert_eq!(remove_stale_rings(directory.path(), None).unwrap().len(), 1);
    }
}

#[test]
fn ring_of_a_stopped_process_is_readable_and_reported_alive() {
    let directory = tempfile::tempdir().unwrap();
    let mut rank = Child::spawn("rank_that_records_forever", directory.path());
    let reader = RingReader::attach(rank.read_line()).unwrap();
    wait_until("records", || reader.records() > 5_000);
    rank.signal(Signal::STOP);
    // The signal takes effect some time later: wait until no record is added any more.
    let mut before = 0;
    wait_until("a standstill", || {
        let records = reader.records();
        std::thread::sleep(Duration::from_millis(20));
        let is_unchanged = before == records;
        before = records;
        is_unchanged
    });
    let dump = reader.snapshot();
    check_no_gap(&dump);
    assert_eq!(dump.identity.reason, RingReader::OWNER_IS_STOPPED);
    assert!(reader.is_stopped());
    let (own, _) = recorder(directory.path().join("own"));
    let own_ring = RingReader::attach(own.storage().path().unwrap()).unwrap();
    assert!(own.process_mark().is_some());
    assert_eq!(own.process_mark(), own_ring.process_mark());
    assert_ne!(own.process_mark(), reader.process_mark());
    assert!(
        remove_stale_rings(directory.path(), None)
            .unwrap()
            .is_empty()
    );
    rank.signal(Signal::CONT);
    wait_until("records after the pause", || reader.records() > before);
    assert!(!reader.is_stopped());
}

#[test]
fn ring_of_a_process_stuck_in_teardown_shows_its_position() {
    let directory = tempfile::tempdir().unwrap();
    let mut rank = Child::spawn("rank_that_is_stuck_in_teardown", directory.path());
    let reader = RingReader::attach(rank.read_line()).unwrap();
    let dump = reader.snapshot();
    assert!(reader.is_alive());
    assert_eq!(dump.status.unwrap().phase, "shutdown");
    assert_eq!(dump.entries.len(), 5);
    assert_eq!(dump.groups[0].status.unwrap().last_completed, 5);
}
