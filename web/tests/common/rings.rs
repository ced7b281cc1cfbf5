//! Rings of jobs, written by the test itself.

use rcomm_recorder::model::{OpType, ProcessGroupInfo};
use rcomm_recorder::record::{
    FlightRecorder, GroupHandle, Operation, Placement, RecorderConfig, SignatureKey, SignatureRef,
};
use std::path::Path;
use std::time::Duration;

/// Makes the ring of one of the two ranks of a job.
pub fn ring(directory: &Path, job: &str, rank: u32) -> FlightRecorder {
    let mut config = RecorderConfig::new(job, rank, 2);
    config.placement = Placement::Dir(directory.to_owned());
    FlightRecorder::create(&config).expect("a ring can be made in a fresh directory")
}

/// Adds the group of both ranks, with a time-out of 1 ms.
pub fn add_group(ring: &FlightRecorder) -> GroupHandle {
    let info = ProcessGroupInfo {
        id: 0,
        name: "0".into(),
        desc: "default_pg".into(),
        ranks: [0, 1].into(),
    };
    ring.add_group(&info, Duration::from_millis(1))
}

/// Issues a barrier whose time-out is over at once.
pub fn issue_overdue_barrier(ring: &FlightRecorder) {
    let group = add_group(ring);
    let signature = ring.intern(&SignatureKey {
        backend: "cpu",
        op_name: "barrier",
        ..SignatureKey::default()
    });
    let signature = SignatureRef::Id(signature.expect("a fresh table has free slots"));
    ring.begin(&Operation {
        collective_seq_id: 1,
        ..Operation::new(group, OpType::Barrier, signature)
    });
}
