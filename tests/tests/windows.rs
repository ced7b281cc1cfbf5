//! One-sided windows work over shared memory, and by messages where ranks share none.
#![allow(clippy::unwrap_used)]

use rcomm::config::TransportChoice;
use rcomm::{Buffer, Config, ErrorKind, FakeFabric, OpType, ProcessGroup, WorkStatus, World};
use rcomm_tests::world::{Carrier, on_threads};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// How the data of a window move between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DataPath {
    /// The group allocated the window's memory, and all ranks map it.
    Mapped,
    /// The window is the caller's own memory, accessed by messages.
    Own,
    /// The ranks share no memory.
    Apart,
}

fn run(path: DataPath, size: u32, body: impl Fn(World, DataPath) + Sync) {
    let change = |config: &mut Config| {
        if path == DataPath::Apart {
            config.transport = TransportChoice::Tcp;
        }
        config.dump_dir = std::env::temp_dir().join("rcomm-tests-windows");
        config.status_wait = Duration::from_millis(200);
    };
    on_threads(size, &Carrier::Cpu, change, |world| body(world, path));
}

/// The memory of a window of `len` zeros.
fn memory(group: &ProcessGroup, path: DataPath, len: usize) -> Buffer<'static> {
    match path {
        DataPath::Mapped | DataPath::Apart => group.allocate::<u32>(len).unwrap(),
        DataPath::Own => Buffer::from_vec(vec![0u32; len]),
    }
}

const DATA_PATHS: [DataPath; 3] = [DataPath::Mapped, DataPath::Own, DataPath::Apart];

#[test]
fn data_put_before_a_signal_is_visible_after_it() {
    for path in DATA_PATHS {
        run(path, 3, |world, path| {
            let group = world.group();
            let (this_rank, size) = (group.rank(), group.size());
            let (next, before) = ((this_rank + 1) % size, (this_rank + size - 1) % size);
            // The put is longer than one request may be.
            let len = 1_300_000;
            let window = group.new_window(memory(group, path, len + 3)).unwrap();
            assert_eq!(window.len_of(next), len + 3);
            for round in 1..4 {
                let numbers: Vec<u32> = (0..len as u32).map(|at| at ^ this_rank << round).collect();
                window.put(next, 3, &numbers).unwrap();
                window.signal(next).unwrap();
                window.wait_signal(before).unwrap();
                let mut got = vec![0; len];
                window.get(this_rank, 3, &mut got).unwrap();
                assert!((0..len as u32).all(|at| got[at as usize] == at ^ before << round));
                // After the barrier, all ranks have checked their data, and the next round may overwrite them.
                group.barrier().unwrap();
            }
            // A rank reads its neighbor's part without the neighbor's help.
            let mut theirs = [0u32; 4];
            window.get(next, 2, &mut theirs).unwrap();
            assert_eq!(
                theirs,
                [0, this_rank << 3, 1 ^ this_rank << 3, 2 ^ this_rank << 3]
            );
            let back = window.close().unwrap().expect("the memory comes back");
            assert_eq!(back.as_slice::<u32>().unwrap()[4], 1 ^ before << 3);
            world.shutdown().unwrap();
        });
    }
}

#[test]
fn data_of_an_issued_put_is_visible_after_the_signal_issued_after_it() {
    for path in DATA_PATHS {
        run(path, 3, |world, path| {
            let group = world.group();
            let (this_rank, size) = (group.rank(), group.size());
            let (next, before) = ((this_rank + 1) % size, (this_rank + size - 1) % size);
            let len = 300_000;
            let window = group.new_window(memory(group, path, len)).unwrap();
            for round in 1..4 {
                // The wait is issued before the put that makes the peer signal.
                let signal = window.wait_signal_async(before).unwrap();
                let numbers: Vec<u32> = (0..len as u32).map(|at| at ^ this_rank << round).collect();
                let address = numbers.as_ptr();
                let put = window.put_async(next, 0, numbers).unwrap();
                let signaled = window.signal_async(next).unwrap();
                signal.wait().unwrap();
                let got = window.get_async(this_rank, 0, vec![0u32; len]).unwrap();
                let got = got.wait().unwrap();
                assert!((0..len as u32).all(|at| got[at as usize] == at ^ before << round));
                let back = put.wait().unwrap();
                assert_eq!(back.as_ptr(), address);
                signaled.wait().unwrap();
                group.barrier().unwrap();
            }
            let refused = window.put_async(next, len, vec![1u32]).unwrap();
            let error = refused.wait().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
            window.close().unwrap();
            let dump = world.snapshot();
            let count = |op| dump.entries.iter().filter(|entry| entry.op == op).count();
            let ops = [OpType::Put, OpType::Signal, OpType::WaitSignal, OpType::Get];
            assert_eq!(ops.map(count), [4, 3, 3, 3]);
            world.shutdown().unwrap();
        });
    }
}

#[test]
fn an_issued_wait_for_a_signal_completes_without_a_waiter() {
    run(DataPath::Mapped, 2, |world, path| {
        let group = world.group();
        let window = group.new_window(memory(group, path, 1)).unwrap();
        let other = 1 - group.rank();
        let signal = window.wait_signal_async(other).unwrap();
        let (sender, receiver) = std::sync::mpsc::channel();
        signal.on_completion(move |end| sender.send(end.is_ok()).unwrap());
        window.signal(other).unwrap();
        assert_eq!(receiver.recv_timeout(Duration::from_secs(30)), Ok(true));
        assert!(signal.is_success());
        world.shutdown().unwrap();
    });
}

#[test]
fn an_abort_ends_an_issued_wait_for_a_signal() {
    run(DataPath::Own, 2, |world, path| {
        let group = world.group();
        let window = group.new_window(memory(group, path, 1)).unwrap();
        let signal = window.wait_signal_async(1 - group.rank()).unwrap();
        group.barrier().unwrap();
        group.abort("enough");
        let error = signal.wait().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Aborted, "{error}");
        assert!(window.put_async(0, 0, vec![1u32]).is_err());
    });
}

#[test]
fn a_window_may_have_parts_of_different_lengths_and_empty_ones() {
    for path in DATA_PATHS {
        run(path, 2, |world, path| {
            let group = world.group();
            let len = if group.rank() == 0 { 0 } else { 5 };
            let window = group.new_window(memory(group, path, len)).unwrap();
            assert_eq!((window.len_of(0), window.len_of(1)), (0, 5));
            if group.rank() == 0 {
                window.put(1, 2, &[7u32, 8, 9]).unwrap();
                let mut all = [0u32; 5];
                window.get(1, 0, &mut all).unwrap();
                assert_eq!(all, [0, 0, 7, 8, 9]);
            }
            window.close().unwrap();
            world.shutdown().unwrap();
        });
    }
}

#[test]
fn an_access_that_does_not_fit_is_refused_and_the_window_stays_usable() {
    for path in DATA_PATHS {
        run(path, 2, |world, path| {
            let group = world.group();
            let window = group.new_window(memory(group, path, 4)).unwrap();
            let refusal = |result: rcomm::Result<()>| {
                let error = result.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::InvalidArgument);
                error.to_string()
            };
            let text = refusal(window.put(1, 3, &[1u32, 2]));
            assert!(
                text.contains("8 bytes at 12 reach beyond the 16 bytes"),
                "{text}"
            );
            let text = refusal(window.put(0, 0, &[1u64]));
            assert!(
                text.contains("elements of type UInt64, the window of UInt32"),
                "{text}"
            );
            refusal(window.get(0, usize::MAX, &mut [0u32]));
            let text = refusal(window.signal(2));
            assert!(text.contains("peer 2 is not in a group of 2"), "{text}");
            window.put(1, 0, &[5u32]).unwrap();
            window.close().unwrap();
            world.shutdown().unwrap();
        });
    }
}

#[test]
fn all_ranks_add_to_one_counter_in_mapped_memory() {
    run(DataPath::Mapped, 4, |world, _| {
        let group = world.group();
        let window = group.new_window(group.allocate::<u64>(1).unwrap()).unwrap();
        let counter = window.map_remote(0).unwrap();
        for _ in 0..1000 {
            counter.long(0).unwrap().fetch_add(1, Ordering::Relaxed);
        }
        group.barrier().unwrap();
        let mut count = [0u64];
        window.get(0, 0, &mut count).unwrap();
        assert_eq!(count, [4000]);
        let back = window.close().unwrap();
        // All ranks still have the part of rank 0 mapped.
        assert_eq!(back.is_none(), group.rank() == 0);
        world.shutdown().unwrap();
    });
    run(DataPath::Apart, 2, |world, _| {
        let group = world.group();
        let window = group.new_window(group.allocate::<u8>(1).unwrap()).unwrap();
        let other = 1 - group.rank();
        let error = window.map_remote(other).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("use put and get"), "{error}");
        window.close().unwrap();
        world.shutdown().unwrap();
    });
}

#[test]
fn memory_that_another_rank_still_has_mapped_is_not_returned() {
    run(DataPath::Mapped, 2, |world, path| {
        let group = world.group();
        let this_rank = group.rank();
        for is_kept in [true, false] {
            let window = group.new_window(memory(group, path, 4)).unwrap();
            let theirs = window.map_remote(1 - this_rank).unwrap();
            theirs.write(0, &[this_rank as u8 + 1]).unwrap();
            let kept = Some(theirs).filter(|_| is_kept && this_rank == 1);
            let back = window.close().unwrap();
            assert_eq!(back.is_none(), is_kept && this_rank == 0);
            if let Some(back) = back {
                assert_eq!(back.as_slice::<u32>().unwrap()[0], 2 - this_rank);
            }
            // The rank that keeps the memory mapped may continue to write.
            if let Some(kept) = kept {
                kept.write(0, &[9]).unwrap();
            }
        }
        world.shutdown().unwrap();
    });
}

#[test]
fn data_of_issued_puts_is_visible_when_the_window_has_closed() {
    for path in DATA_PATHS {
        run(path, 3, |world, path| {
            let group = world.group();
            let (this_rank, size) = (group.rank(), group.size());
            let len = 300_000;
            let window = group.new_window(memory(group, path, len)).unwrap();
            let puts: Vec<_> = (0..size)
                .filter(|&peer| peer != this_rank)
                .map(|peer| {
                    let part = vec![this_rank + 1; len / size as usize];
                    window.put_async(peer, this_rank as usize * part.len(), part)
                })
                .collect();
            let back = window.close().unwrap().expect("the memory comes back");
            let got = back.as_slice::<u32>().unwrap();
            for (peer, part) in (0..size).zip(got.chunks_exact(len / size as usize)) {
                let expected = if peer == this_rank { 0 } else { peer + 1 };
                assert!(part.iter().all(|&number| number == expected));
            }
            puts.into_iter()
                .for_each(|put| drop(put.unwrap().wait().unwrap()));
            world.shutdown().unwrap();
        });
    }
}

#[test]
fn a_window_that_is_dropped_ends_its_pending_calls() {
    for path in DATA_PATHS {
        run(path, 2, |world, path| {
            let group = world.group();
            let window = group.new_window(memory(group, path, 4)).unwrap();
            group.barrier().unwrap();
            let signal = window.wait_signal_async(1 - group.rank()).unwrap();
            drop(window);
            let status = signal.wait_timeout(Duration::from_secs(30));
            assert_eq!(status, WorkStatus::Failed);
        });
    }
}

#[test]
fn types_that_differ_are_an_error_on_all_ranks() {
    run(DataPath::Own, 2, |world, _| {
        let memory = if world.rank() == 0 {
            Buffer::from_vec(vec![0f32])
        } else {
            Buffer::from_vec(vec![0f64])
        };
        let error = world.group().new_window(memory).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        assert!(error.to_string().contains("rank 1 of Double"), "{error}");
    });
}

#[test]
fn windows_are_made_in_the_order_of_the_calls_whether_issued_or_not() {
    for path in DATA_PATHS {
        run(path, 3, |world, path| {
            let group = world.group();
            let this_rank = group.rank();
            let issue = |len| group.new_window_async(memory(group, path, len)).unwrap();
            // Rank 1 makes the second window by a blocking call, while other operations are in flight.
            let first = issue(1);
            let second = if this_rank == 1 {
                group.new_window(memory(group, path, 2)).unwrap()
            } else {
                let second = issue(2);
                let from_rank_2 = group.broadcast_object_async(this_rank, 2).unwrap();
                assert_eq!(from_rank_2.wait().unwrap(), 2);
                second.wait().unwrap()
            };
            if this_rank == 1 {
                let from_rank_2 = group.broadcast_object_async(this_rank, 2).unwrap();
                assert_eq!(from_rank_2.wait().unwrap(), 2);
            }
            let first = first.wait().unwrap();
            assert_eq!((first.len_of(0), second.len_of(0)), (1, 2));
            let next = (this_rank + 1) % 3;
            for (window, mark) in [(&first, 10), (&second, 20)] {
                window.put(next, 0, &[mark + this_rank]).unwrap();
                window.signal(next).unwrap();
                window.wait_signal((this_rank + 2) % 3).unwrap();
                let mut got = [0u32];
                window.get(this_rank, 0, &mut got).unwrap();
                assert_eq!(got, [mark + (this_rank + 2) % 3]);
            }
            first.close().unwrap();
            second.close().unwrap();
            world.shutdown().unwrap();
        });
    }
}

#[test]
fn an_abort_ends_the_creation_of_a_window() {
    for path in [DataPath::Mapped, DataPath::Apart] {
        run(path, 2, |world, path| {
            let group = world.group();
            if world.rank() == 1 {
                // This wait ends before the time-out of rank 0's call: if that were not aborted, the test would fail.
                let done = world.store().wait(&["test/done"], Duration::from_secs(15));
                return done.unwrap();
            }
            let work = group.new_window_async(memory(group, path, 1)).unwrap();
            rcomm_tests::process::wait_until("the creation to start", || {
                (work.status() == WorkStatus::Started).then_some(())
            });
            group.abort("enough");
            let error = work.wait().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Aborted, "{error}");
            assert!(error.to_string().contains("enough"), "{error}");
            world.store().set("test/done", b"1").unwrap();
        });
    }
}

#[test]
fn a_wait_for_a_rank_that_left_ends_with_an_error() {
    for path in DATA_PATHS {
        run(path, 2, |world, path| {
            let group = world.group().clone();
            let window = group.new_window(memory(&group, path, 4)).unwrap();
            group.barrier().unwrap();
            if world.rank() == 1 {
                return;
            }
            let error = window.wait_signal(1).unwrap_err();
            assert!(!error.is_recoverable(), "{error}");
            assert_ne!(error.kind(), ErrorKind::Timeout, "{error}");
            assert!(window.put(1, 0, &[1u32]).is_err());
        });
    }
}

#[test]
fn an_abort_ends_a_blocking_wait_for_a_signal() {
    run(DataPath::Mapped, 2, |world, path| {
        let group = world.group().clone();
        let window = group.new_window(memory(&group, path, 1)).unwrap();
        group.barrier().unwrap();
        let same_group = group.clone();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let error = window.wait_signal(1 - group.rank()).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Aborted, "{error}");
                assert!(error.to_string().contains("enough"), "{error}");
            });
            same_group.abort("enough");
        });
    });
}

#[test]
fn a_signal_that_does_not_arrive_is_a_time_out_that_names_its_rank() {
    run(DataPath::Own, 2, |world, path| {
        let group = world.group();
        let window = group.new_window(memory(group, path, 1)).unwrap();
        if world.rank() == 0 {
            group.set_timeout(Duration::from_millis(100));
            let error = window.wait_signal(1).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
            assert_eq!(
                (error.rank(), error.op()),
                (Some(1), Some(OpType::WaitSignal))
            );
            world.store().set("test/done", b"1").unwrap();
        } else {
            let done = world.store().wait(&["test/done"], Duration::from_secs(30));
            done.unwrap();
        }
    });
}

#[test]
fn every_one_sided_operation_is_recorded_with_its_peer() {
    run(DataPath::Mapped, 2, |world, path| {
        let group = world.group();
        let window = group.new_window(memory(group, path, 4)).unwrap();
        let other = 1 - group.rank();
        window.put(other, 1, &[1u32, 2]).unwrap();
        window.signal(other).unwrap();
        window.wait_signal(other).unwrap();
        window.close().unwrap();
        let dump = world.snapshot();
        let seen: Vec<_> = dump
            .entries
            .iter()
            .map(|entry| (entry.op, entry.peer))
            .collect();
        let ops: Vec<OpType> = seen.iter().map(|(op, _)| *op).collect();
        assert_eq!(
            ops,
            [
                OpType::NewWindow,
                OpType::Put,
                OpType::Signal,
                OpType::WaitSignal
            ]
        );
        assert!(
            seen[1..]
                .iter()
                .all(|(_, peer)| *peer == rcomm::Peer::Rank(other)),
            "{seen:?}"
        );
        world.shutdown().unwrap();
    });
}

#[test]
fn a_backend_without_windows_refuses_them_by_name() {
    let fake = Carrier::Fake(FakeFabric::new());
    on_threads(
        1,
        &fake,
        |_| {},
        |world| {
            let group = world.group();
            let error = group.new_window(Buffer::from_vec(vec![0u8])).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported);
            assert!(
                error
                    .to_string()
                    .contains("backend fake does not offer new_window"),
                "{error}"
            );
            world.shutdown().unwrap();
        },
    );
}
