//! Registers and deregisters memory while operations are on their way.

use super::communicators::backend;
use super::stuck::Gate;
use super::{Gpu, all_reduce, count};
use rcomm::{DType, Result, World};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Memory is registered and deregistered while operations are launched.
pub(super) fn register_during_launches(world: &World, gpu: &Gpu) -> Result<()> {
    let group = world.group();
    let backend = backend(world);
    let memory = backend.allocate(DType::F32, 4096)?;
    count(group, gpu)?;
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let registering = scope.spawn(|| -> Result<u32> {
            let mut rounds = 0;
            while !is_over.load(Ordering::Acquire) {
                let registration = backend.register(&memory)?;
                backend.deregister(registration)?;
                rounds += 1;
            }
            Ok(rounds)
        });
        let reduced = (0..20).try_for_each(|_| count(group, gpu).map(drop));
        is_over.store(true, Ordering::Release);
        let rounds = registering
            .join()
            .expect("the registering thread does not panic");
        reduced?;
        eprintln!("registered {} times", rounds?);
        Ok(())
    })
}

/// Memory is deregistered while an operation on it waits for the program's stream.
pub(super) fn deregister_used(world: &World, gpu: &Gpu) -> Result<()> {
    let (group, backend) = (world.group(), backend(world));
    count(group, gpu)?;
    let (used, idle) = (gpu.buffer(&[1i64; 4096])?, gpu.buffer(&[1i64; 1 << 16])?);
    let registrations = [
        backend.register(&used.buffer()?)?,
        backend.register(&used.buffer()?)?,
        backend.register(&idle.buffer()?)?,
    ];
    let gate = Gate::shut(world, gpu)?;
    let work = group.execute_async(all_reduce(&used)?)?;
    let [first, last, third] = registrations;
    // Neither call waits for the operation: it does not use `idle`, and `used` is still registered once.
    backend.deregister(third)?;
    backend.deregister(first)?;
    let is_shut = AtomicBool::new(true);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            // A deregistration that does not wait is over by then. One that waits may take any time.
            std::thread::sleep(Duration::from_millis(200));
            is_shut.store(false, Ordering::Release);
            gate.open();
        });
        backend.deregister(last)
    })?;
    assert!(
        !is_shut.load(Ordering::Acquire),
        "the operation cannot have ended"
    );
    work.wait()?;
    eprintln!("deregistered after the operation");
    Ok(())
}

/// An operation on registered memory hangs and is aborted; the memory stays registered.
pub(super) fn deregister_hung(world: World, gpu: &Gpu) -> Result<()> {
    let (group, backend) = (world.group(), backend(&world));
    count(group, gpu)?;
    let used = gpu.buffer(&[1i64; 4096])?;
    let registration = backend.register(&used.buffer()?)?;
    let work = group.execute_async(all_reduce(&used)?)?;
    let refused = backend.deregister(registration);
    eprintln!("refused: {}", refused.expect_err("the operation hangs"));
    let error = work.wait().map(drop).expect_err("the operation hangs");
    eprintln!("lost: {error}");
    Ok(())
}
