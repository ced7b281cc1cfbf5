//! Rings of a job whose ranks are all in the test process.

use rcomm_recorder::model::{OpType, ProcessGroupInfo, Rank};
use rcomm_recorder::record::{
    FlightRecorder, Operation, Placement, RecorderConfig, SignatureKey, SignatureRef,
};
use std::path::Path;
use std::time::Duration;

/// Number of ranks of the job.
pub(crate) const WORLD: u32 = 4;
/// The rank that never issues the last operation of [`stuck_job`].
pub(crate) const MISSING: Rank = 2;

/// Rings of a job whose rank 2 never issues all_reduce #41.
pub(crate) fn stuck_job(directory: &Path) -> Vec<FlightRecorder> {
    (0..WORLD)
        .map(|rank| ring(directory, rank, if rank == MISSING { 40 } else { 41 }))
        .collect()
}

/// The ring of one rank that has issued all_reduce #1 to #`last`, and completed those up to #40.
pub(crate) fn ring(directory: &Path, rank: Rank, last: u64) -> FlightRecorder {
    ring_of("pty-job", directory, rank, last)
}

/// As [`ring`], of the job with this name.
pub(crate) fn ring_of(job: &str, directory: &Path, rank: Rank, last: u64) -> FlightRecorder {
    let mut config = RecorderConfig::new(job, rank, WORLD);
    config.placement = Placement::Dir(directory.to_owned());
    config.host = format!("n{:03}", rank / 2);
    let recorder =
        FlightRecorder::create(&config).expect("a ring can be made in a fresh directory");
    let info = ProcessGroupInfo {
        id: 0,
        name: "dp_0".into(),
        desc: "dp".into(),
        ranks: (0..WORLD).collect(),
    };
    let group = recorder.add_group(&info, Duration::from_secs(600));
    let key = SignatureKey {
        backend: "cpu",
        op_name: "all_reduce",
        ..SignatureKey::default()
    };
    for seq in 1..=last {
        let operation = Operation {
            collective_seq_id: seq,
            op_id: seq,
            ..Operation::new(group, OpType::AllReduce, SignatureRef::Key(&key))
        };
        let ticket = recorder.begin(&operation);
        recorder.started(ticket);
        if seq <= 40 {
            recorder.completed(ticket);
            recorder.retired(ticket);
        }
    }
    recorder
}
