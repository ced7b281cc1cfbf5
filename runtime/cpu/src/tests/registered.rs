//! Allocated buffers: which ranks have access to them, and that their owners get them back unshared.

use super::*;
use rcomm_core::ErrorKind;
use rcomm_core::backend::Progress;
use rcomm_recorder::model::{DType, ReduceOp};
use std::time::Instant;

const COUNT: usize = 70_000;

/// A buffer that the group allocated, with this value in all elements.
fn filled(rig: &Rig, value: f32) -> Buffer<'static> {
    let mut buffer = rig.backend.allocate(DType::F32, COUNT).unwrap();
    buffer.as_mut_slice::<f32>().unwrap().fill(value);
    buffer
}

fn is_all(buffer: &Buffer<'_>, value: f32) -> bool {
    let mut elements = buffer.as_slice::<f32>().unwrap().iter();
    elements.all(|&element| element == value)
}

/// Runs the operation on these buffers themselves, not on copies.
fn run(rig: &Rig, mut op: Op<'_>, deadline: Duration) -> Result<Done> {
    let call = rig.call(&op, deadline);
    rig.backend.run(&mut op, call, &NoObserver)
}

fn sum(buffer: Buffer<'_>) -> Op<'_> {
    Op::AllReduce {
        buffer,
        op: ReduceOp::Sum.into(),
    }
}

/// The lines of this process's memory map, each split at white space.
fn maps() -> Vec<Vec<String>> {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let words = |line: &str| line.split_whitespace().map(str::to_owned).collect();
    maps.lines().map(words).collect()
}

/// The inode of the file that is mapped at this address; `None` if no file is.
fn inode_of(address: usize) -> Option<String> {
    let covers = |words: &Vec<String>| {
        let mut ends = words[0]
            .split('-')
            .map(|end| usize::from_str_radix(end, 16).unwrap());
        ends.next() <= Some(address) && Some(address) < ends.next()
    };
    let inode = maps().into_iter().find(covers)?.swap_remove(4);
    (inode != "0").then_some(inode)
}

/// How many mappings of a file this process has. All ranks of a test are in one process.
fn times_mapped(inode: &str) -> usize {
    maps().iter().filter(|words| words[4] == inode).count()
}

/// How many mappings this process has of the file at this address; 0 if no file is mapped there.
fn mappings(address: usize) -> usize {
    inode_of(address).map_or(0, |inode| times_mapped(&inode))
}

#[test]
fn every_rank_maps_a_buffer_once_and_unmaps_it_after_it_was_freed() {
    world(3, Wiring::Registered, |rig| {
        let mut buffer = filled(rig, rig.rank as f32);
        let address = buffer.as_ptr().addr();
        for expected in [3.0, 9.0] {
            run(rig, sum(buffer.lend()), LONG).unwrap();
            assert!(is_all(&buffer, expected));
            run(rig, Op::Barrier, LONG).unwrap();
            assert_eq!(
                mappings(address),
                3,
                "not mapped by exactly its owner and the two others"
            );
            run(rig, Op::Barrier, LONG).unwrap();
        }
        let inode = inode_of(address).unwrap();
        drop(buffer);
        run(rig, Op::Barrier, LONG).unwrap();
        assert_eq!(
            times_mapped(&inode),
            2,
            "not mapped by exactly the two others"
        );
        run(rig, Op::Barrier, LONG).unwrap();
        // The other ranks find the region empty when the next one is mapped.
        let mut next = filled(rig, 1.0);
        run(rig, sum(next.lend()), LONG).unwrap();
        assert!(is_all(&next, 3.0));
        run(rig, Op::Barrier, LONG).unwrap();
        assert_eq!(times_mapped(&inode), 0);
    });
}

#[test]
fn results_are_the_same_whichever_ranks_have_registered_buffers() {
    for size in [2, 3] {
        for registered in 0..1u32 << size {
            world(size, Wiring::Registered, |rig| {
                let new_buffer = |len: usize| match registered >> rig.rank & 1 {
                    1 => rig.backend.allocate(DType::F32, len).unwrap(),
                    _ => Buffer::zeroed(DType::F32, len).unwrap(),
                };
                let ranks = rig.size;
                for root in 0..ranks {
                    let mut buffer = new_buffer(COUNT);
                    buffer.as_mut_slice().unwrap().fill(rig.rank as f32 + 1.0);
                    run(rig, sum(buffer.lend()), LONG).unwrap();
                    let total = (ranks * (ranks + 1) / 2) as f32;
                    assert!(is_all(&buffer, total));
                    buffer.as_mut_slice().unwrap().fill(rig.rank as f32 + 1.0);
                    let root = root as u32;
                    let reduce = Op::Reduce {
                        buffer: buffer.lend(),
                        op: ReduceOp::Sum.into(),
                        root,
                    };
                    run(rig, reduce, LONG).unwrap();
                    let own_value = rig.rank as f32 + 1.0;
                    let expected = if rig.rank as u32 == root {
                        total
                    } else {
                        own_value
                    };
                    assert!(is_all(&buffer, expected));
                    buffer.as_mut_slice().unwrap().fill(own_value);
                    let broadcast = Op::Broadcast {
                        buffer: buffer.lend(),
                        root,
                    };
                    run(rig, broadcast, LONG).unwrap();
                    assert!(is_all(&buffer, root as f32 + 1.0));
                }
                let (mut part, mut all_parts) = (new_buffer(COUNT), new_buffer(COUNT * ranks));
                part.as_mut_slice().unwrap().fill(rig.rank as f32);
                let gather = Op::AllGatherSingle {
                    input: part.lend(),
                    output: all_parts.lend(),
                };
                run(rig, gather, LONG).unwrap();
                let expected: Vec<f32> = (0..COUNT * ranks)
                    .map(|index| (index / COUNT) as f32)
                    .collect();
                assert!(all_parts.as_slice::<f32>().unwrap() == expected);
                let scatter = Op::ReduceScatterSingle {
                    input: all_parts.lend(),
                    output: part.lend(),
                    op: ReduceOp::Max.into(),
                };
                run(rig, scatter, LONG).unwrap();
                assert!(is_all(&part, rig.rank as f32));
                let mut others = new_buffer(COUNT * ranks);
                let exchange = Op::AllToAllSingle {
                    input: all_parts.lend(),
                    output: others.lend(),
                };
                run(rig, exchange, LONG).unwrap();
                assert!(is_all(&others, rig.rank as f32));
            });
        }
    }
}

#[test]
fn after_a_rank_has_given_up_the_others_cannot_change_its_memory() {
    let errors = world(2, Wiring::Registered, |rig| {
        let mut buffer = filled(rig, rig.rank as f32 + 1.0);
        run(rig, sum(buffer.lend()), LONG).unwrap();
        assert!(is_all(&buffer, 3.0));
        let address = buffer.as_ptr().addr();
        if rig.rank == 0 {
            // The other rank arrives only after this rank has given up.
            let soon = Duration::from_millis(50);
            let error = run(rig, sum(buffer.lend()), soon).unwrap_err();
            assert_eq!(mappings(address), 0, "the memory is still shared");
            assert!(is_all(&buffer, 3.0));
            buffer.as_mut_slice::<f32>().unwrap().fill(5.0);
            rig.store.set("gave up", b"").unwrap();
            rig.store.wait(&["tried"], LONG).unwrap();
            assert!(is_all(&buffer, 5.0));
            return error;
        }
        rig.store.wait(&["gave up"], LONG).unwrap();
        // This rank sees the offer of the rank that has given up, but cannot change that rank's memory.
        let error = run(rig, sum(buffer.lend()), LONG).unwrap_err();
        assert_eq!(mappings(address), 0, "the memory is still shared");
        rig.store.set("tried", b"").unwrap();
        error
    });
    assert_eq!(errors[0].kind(), ErrorKind::Timeout);
    assert_eq!(errors[1].rank(), Some(0), "{}", errors[1]);
}

#[test]
fn memory_that_was_cut_off_works_in_later_operations() {
    let store: Arc<dyn Store> = Arc::new(HashStore::new());
    let buffers = world(2, Wiring::Registered, |rig| {
        let mut buffer = filled(rig, 1.0);
        if rig.rank == 0 {
            let soon = Duration::from_millis(20);
            run(rig, sum(buffer.lend()), soon).unwrap_err();
            store.set("gave up", b"").unwrap();
        }
        store.wait(&["gave up"], LONG).unwrap();
        std::sync::Mutex::new(Some(buffer))
    });
    world(2, Wiring::Registered, |rig| {
        let mut buffer = buffers[rig.rank].lock().unwrap().take().unwrap();
        run(rig, sum(buffer.lend()), LONG).unwrap();
        assert!(is_all(&buffer, 2.0));
    });
}

#[test]
fn ranks_that_disagree_keep_their_memory_shared() {
    world(2, Wiring::Registered, |rig| {
        let mut buffer = filled(rig, 1.0);
        let address = buffer.as_ptr().addr();
        let op = if rig.rank == 0 {
            ReduceOp::Sum
        } else {
            ReduceOp::Max
        };
        let mismatch = Op::AllReduce {
            buffer: buffer.lend(),
            op: op.into(),
        };
        let error = run(rig, mismatch, LONG).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Mismatch);
        run(rig, sum(buffer.lend()), LONG).unwrap();
        assert!(is_all(&buffer, 2.0));
        run(rig, Op::Barrier, LONG).unwrap();
        assert_eq!(mappings(address), 2);
        run(rig, Op::Barrier, LONG).unwrap();
    });
}

#[test]
fn a_buffer_that_begins_inside_a_page_is_not_mapped_by_others() {
    world(2, Wiring::Registered, |rig| {
        let mut buffer = filled(rig, 1.0);
        let address = buffer.as_ptr().addr();
        let elements = buffer.as_mut_slice::<f32>().unwrap();
        let (left, right) = elements.split_at_mut(1000);
        run(rig, sum(Buffer::from_mut(right)), LONG).unwrap();
        run(rig, Op::Barrier, LONG).unwrap();
        assert_eq!(mappings(address), 1, "not mapped by its owner alone");
        run(rig, Op::Barrier, LONG).unwrap();
        assert!(
            left.iter().all(|&element| element == 1.0)
                && right.iter().all(|&element| element == 2.0)
        );
        let (left, right) = elements.split_at_mut(1024);
        run(rig, sum(Buffer::from_mut(right)), LONG).unwrap();
        run(rig, Op::Barrier, LONG).unwrap();
        assert_eq!(mappings(address), 2);
        run(rig, Op::Barrier, LONG).unwrap();
        assert!(
            left[..1000].iter().all(|&element| element == 1.0)
                && right.iter().all(|&element| element == 4.0)
        );
    });
}

#[test]
fn an_aborted_operation_returns_its_buffer_unshared() {
    world(2, Wiring::Registered, |rig| {
        let buffer = filled(rig, 7.0);
        let address = buffer.as_ptr().addr();
        if rig.rank == 1 {
            rig.store.wait(&["aborted"], LONG).unwrap();
            return;
        }
        let pending = rig.issue(sum(buffer));
        let began = Instant::now();
        while matches!(pending.progress(), Progress::Queued) && began.elapsed() < LONG {
            std::thread::yield_now();
        }
        let error = rcomm_core::Error::new(ErrorKind::Aborted, "enough");
        rig.backend.abort(&rcomm_core::backend::AbortReason {
            error,
            timeout: None,
        });
        assert!(pending.wait(LONG.into()).has_ended());
        let Some(Op::AllReduce { buffer, .. }) = pending.reclaim() else {
            panic!("no operation was returned");
        };
        assert_eq!(buffer.as_ptr().addr(), address);
        assert!(is_all(&buffer, 7.0));
        assert!(mappings(address) <= 1);
        rig.store.set("aborted", b"").unwrap();
    });
}

#[test]
fn buffers_beyond_the_limit_of_known_regions_are_mapped_again() {
    world(2, Wiring::Registered, |rig| {
        let mut buffers: Vec<Buffer<'static>> = (0..300)
            .map(|_| rig.backend.allocate(DType::I32, 16).unwrap())
            .collect();
        for round in 0..2 {
            for buffer in &mut buffers {
                buffer
                    .as_mut_slice::<i32>()
                    .unwrap()
                    .fill(rig.rank as i32 + round);
                run(rig, sum(buffer.lend()), LONG).unwrap();
                assert_eq!(buffer.as_slice::<i32>().unwrap(), [1 + 2 * round; 16]);
            }
        }
    });
}
