//! The ranks of a host use each other's symmetric memory in place.

use super::{failing, run};
use rcomm::config::TransportChoice;
use rcomm::{ErrorKind, FakeFabric, GroupOptions, OpType, ReduceOp, SymmetricMemory};
use rcomm_analyzer::{Policy, Verdict, analyze};
use rcomm_tests::world::{Carrier, on_threads};
use std::sync::Barrier;
use std::sync::atomic::Ordering;
use std::time::Duration;

#[test]
fn symmetric_memory_is_used_in_place_and_ordered_by_signals_and_barriers() {
    run(3, |world| {
        let group = world.group();
        let (own, size) = (group.rank(), group.size());
        let (next, before) = ((own + 1) % size, (own + size - 1) % size);
        // The size is not a multiple of a word.
        let memory = group.symmetric_memory(1_000_003).unwrap();
        assert_eq!(memory.size_bytes(), 1_000_003);
        let (mine, theirs) = (memory.buffer(own).unwrap(), memory.buffer(next).unwrap());
        for round in 0..25_u8 {
            let bytes = vec![10 * round + own as u8; 1_000_000];
            theirs.write(3, &bytes).unwrap();
            // Signals of one channel do not end waits on another.
            memory.put_signal(next, 7).unwrap();
            memory.put_signal(next, 0).unwrap();
            memory.wait_signal(before, 0).unwrap();
            memory.wait_signal(before, 7).unwrap();
            let mut got = vec![0; 1_000_000];
            mine.read(3, &mut got).unwrap();
            assert!(got.iter().all(|&byte| byte == 10 * round + before as u8));
            // After the barrier, all ranks have read their bytes, and the next round may overwrite them.
            memory.barrier(63).unwrap();
        }
        memory.fill(1, own + 5, 3).unwrap();
        memory.barrier(1).unwrap();
        let words = [1, 3].map(|at| theirs.word(4 * at).unwrap().load(Ordering::Relaxed));
        assert_eq!(words, [next + 5; 2]);
        // All signals were taken.
        let mut pad = vec![1; memory.signal_pad(own).unwrap().len()];
        memory.signal_pad(own).unwrap().read(0, &mut pad).unwrap();
        assert!(pad.iter().all(|&byte| byte == 0));
        memory.close().unwrap();
        // The record has the memory's calls.
        let dump = world.snapshot();
        let newest = dump.entries.last().unwrap();
        assert_eq!(newest.op.to_string(), OpType::WaitSignal.to_string());
        world.shutdown().unwrap();
    });
}

#[test]
fn what_symmetric_memory_cannot_do_is_refused_by_name_and_the_group_stays_usable() {
    run(2, |world| {
        let group = world.group();
        let error = group
            .symmetric_memory(8 * group.rank() as usize)
            .unwrap_err();
        assert_eq!(
            (error.kind(), error.ranks()),
            (ErrorKind::Mismatch, &[1][..])
        );
        let text = error.to_string();
        assert!(
            text.contains("rank 0 asks for 0 bytes, rank 1 for another size"),
            "{text}"
        );
        let error = group.symmetric_memory(usize::MAX).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        let memory = group.symmetric_memory(8).unwrap();
        assert!(!memory.has_multicast());
        let error = memory.multicast().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("has no multicast"), "{error}");
        let refused = [
            memory.put_signal(2, 0),
            memory.put_signal(0, SymmetricMemory::CHANNELS),
            memory.buffer(2).map(drop),
            memory.fill(1, 0, 2),
            memory.fill(usize::MAX, 0, 1),
        ];
        for refused in refused {
            let error = refused.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
        }
        memory.barrier(0).unwrap();
        memory.close().unwrap();
        world.shutdown().unwrap();
    });
    let apart = |config: &mut rcomm::Config| {
        failing(config);
        config.transport = TransportChoice::Tcp;
    };
    on_threads(2, &Carrier::Cpu, apart, |world| {
        let error = world.group().symmetric_memory(8).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        let text = error.to_string();
        let expected = "ranks 0, 1 cannot map the memory of all others";
        assert!(text.contains(expected), "{text}");
        let mut sum = [1];
        world.group().all_reduce(&mut sum, ReduceOp::Sum).unwrap();
        assert_eq!(sum, [2]);
        world.shutdown().unwrap();
    });
    on_threads(1, &Carrier::Fake(FakeFabric::new()), failing, |world| {
        let error = world.group().symmetric_memory(8).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        world.shutdown().unwrap();
    });
}

/// With four ranks, some are still making their windows when another one knows all sizes. Over sockets, that rank must
/// not end its own window yet.
#[test]
fn ranks_that_ask_for_different_sizes_all_get_the_mismatch() {
    for transport in [TransportChoice::Tcp, TransportChoice::Auto] {
        let carried = |config: &mut rcomm::Config| {
            failing(config);
            config.transport = transport;
        };
        on_threads(4, &Carrier::Cpu, carried, |world| {
            let group = world.group();
            // Memory of `usize::MAX` bytes cannot be allocated: the others must not wait for rank 2 then.
            for other in [8, usize::MAX].repeat(5) {
                let bytes = if group.rank() == 2 { other } else { 16 };
                let error = group.symmetric_memory(bytes).unwrap_err();
                assert_eq!(
                    (error.kind(), error.ranks()),
                    (ErrorKind::Mismatch, &[2][..]),
                    "{error}"
                );
            }
            let mut sum = [1];
            group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
            assert_eq!(sum, [4]);
            world.shutdown().unwrap();
        });
    }
}

#[test]
fn a_signal_that_does_not_come_or_is_not_taken_names_its_rank_and_channel() {
    for waits_for_signal in [true, false] {
        let end = Barrier::new(2);
        let dumps = on_threads(2, &Carrier::Cpu, failing, |world| {
            let options = GroupOptions {
                timeout: Some(Duration::from_secs(20)),
                ..GroupOptions::named("symmetric")
            };
            let group = world.new_group(&[0, 1], &options).unwrap();
            let memory = group.symmetric_memory(8).unwrap();
            group.set_timeout(Duration::from_millis(300));
            if world.rank() == 0 {
                let (failed, expected) = match waits_for_signal {
                    true => (
                        memory.wait_signal(1, 5),
                        "rank 1 did not send a signal on channel 5 before the deadline",
                    ),
                    false => {
                        memory.put_signal(1, 5).unwrap();
                        (
                            memory.put_signal(1, 5),
                            "rank 1 did not take the earlier signal on channel 5 before the deadline",
                        )
                    }
                };
                let error = failed.unwrap_err();
                assert_eq!(
                    (error.kind(), error.ranks()),
                    (ErrorKind::Timeout, &[1][..])
                );
                assert!(error.to_string().contains(expected), "{error}");
            }
            // Rank 1 comes here at once, and does nothing else.
            end.wait();
            world.snapshot()
        });
        let report = analyze(&dumps, &Policy::default());
        assert_eq!(report.verdict, Verdict::Stuck, "{report:?}");
        assert_eq!(report.findings[0].culprit_ranks, [1], "{report:?}");
    }
}
