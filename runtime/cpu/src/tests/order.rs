//! When operations begin and end: barriers, waits, and the order of operations and groups.

use super::collectives::{SIZES, on_all};
use super::*;
use rcomm_core::backend::Progress;
use rcomm_recorder::model::ReduceOp;
use rustix::time::{ClockId, clock_gettime};
use std::time::Instant;

#[test]
fn no_rank_leaves_a_barrier_before_all_have_entered_it() {
    use std::sync::atomic::AtomicUsize;
    for &wiring in WIRINGS {
        for &size in SIZES {
            let entered = AtomicUsize::new(0);
            world(size, wiring, |rig| {
                for round in 1..=20 {
                    entered.fetch_add(1, Ordering::SeqCst);
                    rig.run(Op::Barrier).unwrap();
                    assert!(entered.load(Ordering::SeqCst) >= round * rig.size);
                    rig.run(Op::Barrier).unwrap();
                }
            });
        }
    }
}

#[test]
fn a_rank_that_waits_a_second_uses_less_than_a_quarter_of_a_core() {
    const LATE: Duration = Duration::from_secs(1);
    for &wiring in WIRINGS {
        world(2, wiring, |rig| {
            rig.run(Op::Barrier).unwrap();
            if rig.rank == 1 {
                std::thread::sleep(LATE);
            }
            let used = || Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap();
            let (began, before) = (Instant::now(), used());
            rig.run(Op::Barrier).unwrap();
            let (waited, used) = (began.elapsed(), used() - before);
            if rig.rank == 0 {
                eprintln!("{wiring:?}: waited for {waited:?} on {used:?} of a core");
                // A thread that sleeps uses the core mostly while it polls before its first sleep. A thread that
                // spins uses it for the whole wait.
                assert!(used < LATE / 4, "{used:?}");
            }
        });
    }
}

#[test]
fn issued_and_blocking_operations_run_in_order_of_issue() {
    on_all(|rig| {
        let mut pending = Vec::new();
        for round in 0..10 {
            pending.push(rig.issue(Op::AllReduce {
                buffer: Buffer::from_vec(vec![round as f32 + rig.rank as f32; 1000]),
                op: ReduceOp::Max.into(),
            }));
            let mut now = [rig.rank as i32 + round];
            rig.run(Op::AllReduce {
                buffer: Buffer::from_mut(&mut now),
                op: ReduceOp::Min.into(),
            })
            .unwrap();
            assert_eq!(now, [round]);
        }
        for (round, pending) in pending.into_iter().enumerate() {
            let end = pending.wait(LONG.into());
            assert!(matches!(end, Progress::Completed(_)), "{end:?}");
            let Some(Op::AllReduce { buffer, .. }) = pending.reclaim() else {
                panic!("the buffer was not returned");
            };
            let expected = (round + rig.size - 1) as f32;
            assert_eq!(buffer.into_vec::<f32>().unwrap(), [expected; 1000]);
        }
        rig.backend.shutdown(LONG.into()).unwrap();
    });
}

#[test]
fn groups_of_one_world_do_not_disturb_each_other() {
    for &wiring in WIRINGS {
        world(4, wiring, |rig| {
            let is_mine = |rank: &Rank| *rank as usize % 2 == rig.rank % 2;
            let mine: Vec<Rank> = (0..4).filter(is_mine).collect();
            let name = format!("half{}", rig.rank % 2);
            let context = group_context(
                &rig.store,
                &name,
                10 + rig.rank as u64 % 2,
                &mine,
                rig.rank as u32,
            );
            let half = rig.factory.connect(context, LONG.into()).unwrap();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    for turn in 1..=50 {
                        let mut data = vec![rig.rank as i32; 3000];
                        let mut op = Op::AllReduce {
                            buffer: Buffer::from_mut(&mut data),
                            op: ReduceOp::Sum.into(),
                        };
                        let deadline = LONG.into();
                        half.run(
                            &mut op,
                            Call {
                                seq: turn,
                                turn,
                                deadline,
                                hints: Hints::NONE,
                            },
                            &NoObserver,
                        )
                        .unwrap();
                        drop(op);
                        assert_eq!(data, vec![mine.iter().sum::<u32>() as i32; 3000]);
                    }
                });
                for _ in 0..50 {
                    let mut data = vec![rig.rank as i32; 5000];
                    rig.run(Op::AllReduce {
                        buffer: Buffer::from_mut(&mut data),
                        op: ReduceOp::Sum.into(),
                    })
                    .unwrap();
                    assert_eq!(data, vec![6; 5000]);
                }
            });
        });
    }
}
