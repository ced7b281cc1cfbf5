//! A custom backend, which the configuration selects. It counts the operations and passes them to the CPU backend.
//!
//! ```text
//! rcomm-run -n 2 target/release/examples/custom_backend
//! ```
#![allow(clippy::print_stdout)]

use rcomm::backend::cpu::CpuFactory;
use rcomm::backend::{AbortReason, Call, GroupContext, Observer, WorldContext};
use rcomm::{
    Backend, BackendFactory, Config, Deadline, DeviceKind, Done, Op, Pending, ReduceOp, Result,
    World,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The number of issued operations, and the bytes of their inputs.
#[derive(Default)]
struct Counts {
    operations: AtomicU64,
    bytes: AtomicU64,
}

/// Makes a counting backend for each group of a world.
struct CountingFactory {
    cpu: CpuFactory,
    counts: Arc<Counts>,
}

impl CountingFactory {
    fn open(world: &WorldContext, counts: Arc<Counts>) -> Result<Self> {
        Ok(Self {
            cpu: CpuFactory::open(world)?,
            counts,
        })
    }
}

impl BackendFactory for CountingFactory {
    fn name(&self) -> &'static str {
        "counting"
    }

    fn device(&self) -> DeviceKind {
        DeviceKind::Cpu
    }

    fn connect(&self, group: GroupContext, deadline: Deadline) -> Result<Arc<dyn Backend>> {
        Ok(Arc::new(Counting {
            inner: self.cpu.connect(group, deadline)?,
            counts: self.counts.clone(),
        }))
    }
}

/// Counts each operation and passes it to the CPU backend.
struct Counting {
    inner: Arc<dyn Backend>,
    counts: Arc<Counts>,
}

impl Counting {
    fn count(&self, op: &Op<'_>) {
        let bytes: usize = op.inputs().iter().map(|input| input.size_bytes()).sum();
        self.counts.operations.fetch_add(1, Ordering::Relaxed);
        self.counts.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

impl Backend for Counting {
    fn name(&self) -> &'static str {
        "counting"
    }

    fn issue(
        &self,
        op: Op<'static>,
        call: Call,
        observer: Arc<dyn Observer>,
    ) -> Result<Arc<dyn Pending>> {
        self.count(&op);
        self.inner.issue(op, call, observer)
    }

    fn run(&self, op: &mut Op<'_>, call: Call, observer: &dyn Observer) -> Result<Done> {
        self.count(op);
        self.inner.run(op, call, observer)
    }

    fn abort(&self, reason: &AbortReason) {
        self.inner.abort(reason);
    }

    fn shutdown(&self, deadline: Deadline) -> Result<()> {
        self.inner.shutdown(deadline)
    }
}

fn main() -> Result<()> {
    let mut config = Config::from_environment()?;
    config.backend = "cpu:counting".to_owned();
    let counts = Arc::new(Counts::default());
    let factory_counts = counts.clone();
    let world = World::builder(config)
        .backend(move |world| Ok(Arc::new(CountingFactory::open(world, factory_counts)?)))
        .init()?;

    let mut numbers = vec![1.0f64; 1000];
    world.group().all_reduce(&mut numbers, ReduceOp::Sum)?;
    world.group().barrier()?;
    assert_eq!(numbers[0], f64::from(world.size()));

    let operations = counts.operations.load(Ordering::Relaxed);
    let bytes = counts.bytes.load(Ordering::Relaxed);
    assert_eq!((operations, bytes), (2, 8000));
    println!(
        "rank {}: {operations} operations, {bytes} bytes",
        world.rank()
    );
    world.shutdown()
}
