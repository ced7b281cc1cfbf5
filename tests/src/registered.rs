//! The CPU backend on memory that its groups allocated. It copies buffers there and back, so that tests that are
//! written for any backend also test ranks that work in each other's buffers.

use rcomm::backend::cpu::CpuFactory;
use rcomm::backend::{
    AbortReason, BackendWindow, Call, Done, GroupContext, Observer, Registration, WorldContext,
};
use rcomm::tuning::{Algorithm, Pattern, Topology, Tuning};
use rcomm::{
    Backend, BackendFactory, Buffer, DType, Deadline, DeviceKind, Op, Pending, Progress, Result,
};
use std::sync::{Arc, Mutex, PoisonError};

/// Makes CPU backends that copy buffers to memory that their groups allocated.
pub struct RegisteredFactory {
    inner: CpuFactory,
}

impl RegisteredFactory {
    /// The backend's name in configurations.
    pub const NAME: &'static str = "registered";

    /// Works as [`CpuFactory::open`].
    ///
    /// # Errors
    /// Those of [`CpuFactory::open`].
    pub fn open(world: &WorldContext) -> Result<Self> {
        let inner = CpuFactory::open(world)?;
        Ok(Self { inner })
    }

    /// Adds lines that make ranks that share memory work in each other's buffers, whatever the size.
    ///
    /// # Errors
    /// None, since the added lines are valid.
    pub fn tune(tuning: &mut Tuning) -> Result<()> {
        let direct = Pattern::ALL.iter().filter(|&&pattern| {
            Algorithm::of(pattern, Topology::Memory).contains(&Algorithm::Direct)
        });
        for pattern in direct {
            tuning.prepend(&format!("{pattern} memory any any direct"))?;
        }
        Ok(())
    }
}

impl BackendFactory for RegisteredFactory {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn device(&self) -> DeviceKind {
        DeviceKind::Cpu
    }

    fn connect(&self, group: GroupContext, deadline: Deadline) -> Result<Arc<dyn Backend>> {
        let inner = self.inner.connect(group, deadline)?;
        Ok(Arc::new(Registered { inner }))
    }
}

/// The backend of one group.
struct Registered {
    inner: Arc<dyn Backend>,
}

impl Registered {
    /// The same operation on copies of its buffers, in memory that the group allocates.
    fn twin(&self, op: &Op<'_>) -> Result<Op<'static>> {
        op.map_buffers(&|buffer| {
            let mut twin = self.inner.allocate(buffer.dtype(), buffer.len())?;
            twin.copy_from(buffer)?;
            twin.with_shape(buffer.shape())
        })
    }
}

impl Backend for Registered {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn issue(
        &self,
        op: Op<'static>,
        call: Call,
        observer: Arc<dyn Observer>,
    ) -> Result<Arc<dyn Pending>> {
        let inner = self.inner.issue(self.twin(&op)?, call, observer)?;
        let original = Mutex::new(Some(op));
        Ok(Arc::new(TwinPending { inner, original }))
    }

    fn run(&self, op: &mut Op<'_>, call: Call, observer: &dyn Observer) -> Result<Done> {
        let mut twin = self.twin(op)?;
        let done = self.inner.run(&mut twin, call, observer)?;
        op.copy_outputs_from(&twin)?;
        Ok(done)
    }

    fn abort(&self, reason: &AbortReason) {
        self.inner.abort(reason);
    }

    fn shutdown(&self, deadline: Deadline) -> Result<()> {
        self.inner.shutdown(deadline)
    }

    fn register(&self, memory: &Buffer<'static>) -> Result<Registration> {
        self.inner.register(memory)
    }

    fn deregister(&self, registration: Registration) -> Result<()> {
        self.inner.deregister(registration)
    }

    fn allocate(&self, dtype: DType, len: usize) -> Result<Buffer<'static>> {
        self.inner.allocate(dtype, len)
    }

    fn new_window(
        &self,
        memory: Buffer<'static>,
        deadline: Deadline,
    ) -> Result<Arc<dyn BackendWindow>> {
        self.inner.new_window(memory, deadline)
    }
}

/// An operation in progress on copies of its buffers, in memory of the group.
struct TwinPending {
    inner: Arc<dyn Pending>,
    /// The caller's operation, until its outputs are filled.
    original: Mutex<Option<Op<'static>>>,
}

impl Pending for TwinPending {
    fn progress(&self) -> Progress {
        self.inner.progress()
    }

    fn wait(&self, deadline: Deadline) -> Progress {
        self.inner.wait(deadline)
    }

    fn reclaim(&self) -> Option<Op<'static>> {
        let filled = self.inner.reclaim()?;
        let mut original = self.original.lock().unwrap_or_else(PoisonError::into_inner);
        let mut op = original.take()?;
        op.copy_outputs_from(&filled).ok()?;
        Some(op)
    }
}
