//! Reads a ring whose words were changed arbitrarily. It must not panic, must use no index out of range, and must be
//! able to write what it has read. The input is a list of changes: an offset in the file (4 bytes) and the new content
//! there (8 bytes).
#![no_main]

use libfuzzer_sys::fuzz_target;
use rcomm_recorder::model::{DType, OpType, ProcessGroupInfo};
use rcomm_recorder::publish::{RingFollower, RingReader};
use rcomm_recorder::record::{
    FlightRecorder, Operation, Placement, RecorderConfig, SignatureKey, SignatureRef, Tensor,
};
use std::fs;
use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::Duration;

/// A small ring that holds the last 16 of 32 operations.
static RING: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let directory = PathBuf::from(format!("/dev/shm/rcomm-fuzz-{}", std::process::id()));
    let config = RecorderConfig {
        placement: Placement::Dir(directory.clone()),
        entries: 16,
        groups: 4,
        signatures: 4,
        call_sites: 4,
        ..RecorderConfig::new("job", 1, 2)
    };
    let recorder = FlightRecorder::create(&config).expect("a ring in memory");
    let info = ProcessGroupInfo {
        id: 0,
        name: "0".to_owned(),
        desc: "default_pg".to_owned(),
        ranks: [0, 1].into(),
    };
    let group = recorder.add_group(&info, Duration::from_secs(60));
    recorder.phase("train");
    for seq in 1..=32 {
        let shape = [1024, seq];
        let tensors = [Tensor {
            dtype: DType::Bf16,
            shape: &shape,
        }];
        let key = SignatureKey {
            backend: "cpu",
            op_name: "all_reduce",
            inputs: &tensors,
            outputs: &tensors,
        };
        let ticket = recorder.begin(&Operation {
            collective_seq_id: seq,
            call_site: Some(std::panic::Location::caller().into()),
            ..Operation::new(group, OpType::AllReduce, SignatureRef::Key(&key))
        });
        recorder.completed(ticket);
    }
    let path = recorder.storage().path().expect("a file").to_owned();
    let ring = fs::read(path).expect("the ring can be read");
    drop(recorder);
    fs::remove_dir_all(directory).expect("the folder is removed");
    ring
});

fuzz_target!(|changes: &[u8]| {
    let mut ring = RING.clone();
    let (words, _) = ring.as_chunks_mut::<8>();
    for change in changes.chunks_exact(12) {
        let (at, word) = change.split_at(4);
        let at = u32::from_le_bytes(at.try_into().expect("four bytes")) as usize % words.len();
        words[at].copy_from_slice(word);
    }
    let path = format!("/dev/shm/rcomm-fuzz-{}.ring", std::process::id());
    fs::write(&path, ring).expect("memory is writable");
    if let Ok(ring) = RingReader::attach(&path) {
        let _ = (
            ring.is_alive(),
            ring.is_closed(),
            ring.heartbeat_ns(),
            ring.records(),
        );
        let _ = ring.identity();
        let dump = ring.snapshot();
        let mut follower = RingFollower::new(ring, 8);
        follower.poll();
        follower.poll();
        for dump in [&dump, follower.dump()] {
            for entry in &dump.entries {
                assert!((entry.group as usize) < dump.groups.len());
                assert!((entry.signature as usize) < dump.signatures.len());
                assert!(
                    entry
                        .stack
                        .is_none_or(|at| (at as usize) < dump.stacks.len())
                );
                assert!(
                    entry
                        .thread
                        .is_none_or(|at| (at as usize) < dump.threads.len())
                );
            }
            for &frame in dump.stacks.iter().flatten() {
                assert!((frame as usize) < dump.frames.len());
            }
            let _ = dump.to_json();
        }
    }
    fs::remove_file(&path).expect("the file is removed");
});
