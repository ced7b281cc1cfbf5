//! Ranks put, get and signal in windows on device memory, without the help of their peers.

use super::communicators::backend;
use super::{Gpu, count};
use rcomm::backend::nccl::DeviceBuffer;
use rcomm::{Buffer, DType, Deadline, DeviceKind, ErrorKind, ProcessGroup, Result, Window, World};
use std::sync::Arc;
use std::time::Duration;

/// The number of elements of a window. They are more than the backend stages at once.
const LEN: usize = 1_300_000;

/// Makes a window over new device memory; returns it with the address of the memory.
pub(super) fn open(group: &ProcessGroup, len: usize) -> Result<(Window, u64)> {
    let backend = group
        .backend(DeviceKind::Cuda)
        .expect("the CUDA backend is configured");
    let memory = backend.allocate(DType::U32, len)?;
    let at = memory.as_ptr().addr() as u64;
    Ok((group.new_window(memory)?, at))
}

/// Numbers that differ between ranks, rounds and places.
fn numbers(rank: u32, round: u32, len: usize) -> Vec<u32> {
    (0..len as u32)
        .map(|index| index ^ (rank + 1) << 8 ^ round << 20)
        .collect()
}

/// Signals the next rank that all puts to it are complete, and waits for the same signal from the previous rank.
fn pass_on(window: &Window, next: u32, previous: u32) -> Result<()> {
    window.signal(next)?;
    window.wait_signal(previous)
}

/// Asserts that the beginning of a rank's part of the window has these numbers.
fn check(window: &Window, peer: u32, expected: &[u32]) -> Result<()> {
    let mut got = vec![0; expected.len()];
    window.get(peer, 0, &mut got)?;
    assert!(
        got == expected,
        "{:?}... is not {:?}...",
        &got[..4],
        &expected[..4]
    );
    Ok(())
}

/// Puts, gets and signals between neighbors, and prints which accesses are refused.
pub(super) fn windows(world: &World, gpu: &Gpu) -> Result<()> {
    let group = world.group();
    let (this_rank, size) = (group.rank(), group.size());
    let (next, previous) = ((this_rank + 1) % size, (this_rank + size - 1) % size);
    let (window, at) = open(group, LEN)?;
    // These puts are from host memory, piece by piece.
    for round in 1..=3 {
        window.put(next, 0, &numbers(this_rank, round, LEN))?;
        pass_on(&window, next, previous)?;
        check(&window, this_rank, &numbers(previous, round, LEN))?;
        // The next rank's part is read without its help.
        check(&window, next, &numbers(this_rank, round, LEN))?;
        group.barrier()?;
    }
    // This put is from device memory that is in no window, after the work that is enqueued on its stream.
    let source = gpu.buffer(&numbers(this_rank, 4, LEN))?;
    window.put_buffer(next, 0, &source.buffer()?)?;
    pass_on(&window, next, previous)?;
    let into = gpu.buffer(&vec![0u32; LEN])?;
    window.get_buffer(this_rank, 0, &mut into.buffer()?)?;
    assert!(into.to_vec::<u32>()? == numbers(previous, 4, LEN));
    group.barrier()?;
    // This put is from one rank's part of a window directly to another's.
    let (half, owner) = (LEN / 2, Arc::new(()));
    // SAFETY: this is the window's own memory, which it keeps until it is closed below.
    let inside = unsafe { DeviceBuffer::foreign(&gpu.stream, at, DType::U32, half, owner)? };
    window.put_buffer(next, half, &inside.buffer()?)?;
    pass_on(&window, next, previous)?;
    let mut got = vec![0u32; half];
    window.get(this_rank, half, &mut got)?;
    let theirs = numbers((previous + size - 1) % size, 4, LEN);
    assert!(got == theirs[..half]);
    group.barrier()?;
    // Signals are counted for each window, also while collectives run.
    let (other, _) = open(group, 8)?;
    let early = other.wait_signal_async(previous)?;
    window.signal(next)?;
    window.signal(next)?;
    assert_eq!(count(group, gpu)?, size as f32);
    window.wait_signal(previous)?;
    window.wait_signal(previous)?;
    assert!(
        !early.is_completed(),
        "a wait ended without a signal of its window"
    );
    group.barrier()?;
    other.put(next, 1, &[this_rank, 7])?;
    other.signal(next)?;
    early.wait()?;
    check(&other, this_rank, &[0, previous, 7, 0])?;
    // Invalid accesses are refused, and the window stays usable.
    // SAFETY: this is the window's own memory, which it keeps until it is closed below.
    let unaligned = unsafe {
        DeviceBuffer::foreign(&gpu.stream, at + 4, DType::U32, 8, Arc::new(()))?.buffer()?
    };
    for refused in [
        window.put(next, LEN - 1, &[1u32, 2]),
        window.put(size, 0, &[1u32]),
        window.put(next, 0, &[1.0f32]),
        window.map_remote(next).map(|_| ()),
        group
            .new_window(gpu.buffer(&[1u32; 8])?.buffer()?)
            .map(|_| ()),
        group.new_window(unaligned).map(|_| ()),
    ] {
        let error = refused.expect_err("the access is invalid");
        let kind = error.kind();
        let is_harmless = matches!(kind, ErrorKind::InvalidArgument | ErrorKind::Unsupported);
        assert!(is_harmless, "{error}");
        eprintln!("refused: {error}");
    }
    group.barrier()?;
    for window in [window, other] {
        let back = window.close()?.expect("the memory comes back");
        assert_eq!(back.dtype(), DType::U32);
    }
    // One rank closes a window again: it waits for no other.
    let backend = backend(world);
    let limit = Deadline::In(Duration::from_secs(20));
    let twice = backend.new_window(backend.allocate(DType::U32, 8)?, limit)?;
    twice.close(limit)?;
    if this_rank == 0 {
        let again = twice.close(limit).map(drop);
        let again = again.expect_err("the window is closed");
        assert_eq!(again.kind(), ErrorKind::Closed, "{again}");
    }
    assert_eq!(count(group, gpu)?, size as f32);
    eprintln!("put, got and closed");
    Ok(())
}

/// Windows are read and closed while another thread issues operations, whose launches end later.
pub(super) fn beside_launches(world: &World, gpu: &Gpu) -> Result<()> {
    let group = world.group();
    let next = (group.rank() + 1) % group.size();
    let windows = (0..3).map(|_| open(group, 8).map(|(window, _)| window));
    let windows = windows.collect::<Result<Vec<_>>>()?;
    std::thread::scope(|scope| {
        let reduced = scope.spawn(|| (0..20).try_for_each(|_| count(group, gpu).map(drop)));
        let closed = windows.into_iter().try_for_each(|window| {
            check(&window, next, &[0; 8])?;
            window.close().map(drop)
        });
        reduced.join().expect("the thread that reduces")?;
        closed
    })?;
    eprintln!("closed beside launches");
    Ok(())
}

/// What the library or the communicator does not support is refused with a sentence, and the group
/// stays usable.
pub(super) fn refusals(world: &World, gpu: &Gpu) -> Result<()> {
    let group = world.group();
    match open(group, 64) {
        Err(error) => eprintln!("no window: {error}"),
        Ok((window, _)) => {
            let next = (group.rank() + 1) % group.size();
            let mut word = [0u32];
            for (call, result) in [
                ("put", window.put(next, 0, &[1u32])),
                ("signal", window.signal(next)),
                ("wait", window.wait_signal(next)),
                (
                    "get",
                    window.get_buffer(next, 0, &mut Buffer::from_mut(&mut word)),
                ),
            ] {
                match result {
                    Ok(()) => eprintln!("{call}: done"),
                    Err(error) => eprintln!("{call}: {error}"),
                }
            }
            window.close()?;
        }
    }
    assert_eq!(count(group, gpu)?, group.size() as f32);
    Ok(())
}
