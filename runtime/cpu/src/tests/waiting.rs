//! The processor time that a waiting rank uses.

use super::{Rig, Wiring, world};
use rcomm_core::Op;
use rustix::time::{ClockId, clock_gettime};
use std::time::Duration;

/// How long after the others the last rank arrives.
const LATE: Duration = Duration::from_secs(1);

/// Processor time that this thread has used so far.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Returns the most processor time that a rank used in a barrier that rank 0 entered [`LATE`] after the others.
fn cost_of_waiting(wiring: Wiring, size: u32) -> Duration {
    let costs = world(size, wiring, |rig: &Rig| {
        // Warm-up: connects the ranks, and loads code and memory.
        rig.run(Op::Barrier).unwrap();
        if rig.rank == 0 {
            std::thread::sleep(LATE);
        }
        let before = processor_time();
        rig.run(Op::Barrier).unwrap();
        processor_time() - before
    });
    costs.into_iter().max().unwrap()
}

#[test]
fn a_rank_that_waits_for_a_second_leaves_its_processor_to_others() {
    // Two ranks have a processor each on most machines; eight ranks outnumber the processors of many.
    for (wiring, size) in [(Wiring::Shm, 2), (Wiring::Shm, 8), (Wiring::Tcp, 2)] {
        let cost = cost_of_waiting(wiring, size);
        eprintln!("{size} ranks over {wiring:?}: {cost:?} of {LATE:?}");
        assert!(cost < LATE / 4, "{size} ranks over {wiring:?}: {cost:?}");
    }
}
