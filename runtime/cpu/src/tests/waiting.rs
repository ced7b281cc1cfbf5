//! The processor time that a waiting rank uses.

use super::messages::{receive, send};
use super::{Rig, Wiring, world};
use crate::wait::counted::LONG_POLLS;
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

/// How often the ranks wait for each other on one processor.
const EXCHANGES: u32 = 400;

/// Two ranks repeat `exchange` on one processor, and none may poll as if the other had a processor of its own.
fn sleep_on_one_processor(exchange: impl Fn(&Rig) + Sync) {
    let allowed = rustix::thread::sched_getaffinity(None).unwrap();
    let first = (0..rustix::thread::CpuSet::MAX_CPU).find(|&number| allowed.is_set(number));
    let polls = world(2, Wiring::Shm, |rig: &Rig| {
        // The ranks count a processor for each of them first, as where the system moves them to one later.
        exchange(rig);
        let mut one = rustix::thread::CpuSet::new();
        one.set(first.unwrap());
        rustix::thread::sched_setaffinity(None, &one).unwrap();
        // Each rank learns where the other runs now.
        exchange(rig);
        exchange(rig);
        let before = LONG_POLLS.get();
        for _ in 0..EXCHANGES {
            exchange(rig);
        }
        LONG_POLLS.get() - before
    });
    // Ranks that did not notice would poll in every second exchange at least.
    assert_eq!(polls, [0, 0]);
}

#[test]
fn ranks_on_one_processor_do_not_poll_while_the_other_needs_it() {
    sleep_on_one_processor(|rig| {
        rig.run(Op::Barrier).unwrap();
    });
}

#[test]
fn ranks_on_one_processor_do_not_poll_for_messages_while_the_other_needs_it() {
    sleep_on_one_processor(|rig| {
        let (peer, mut got) = (1 - rig.rank, [0]);
        for sender in [0, 1] {
            match rig.rank == sender {
                true => rig.run(send(peer, 0, &[1])).unwrap(),
                false => rig.run(receive(Some(peer), 0, &mut got)).unwrap(),
            };
        }
    });
}
