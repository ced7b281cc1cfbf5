//! The NCCL backend for host memory. It copies buffers to the device and back, so that tests that are written for any
//! backend also test the NCCL backend.

use rcomm::backend::nccl::{
    CudaStream, DeviceBuffer, NcclBackend, NcclFactory, NcclOptions, Priority,
};
use rcomm::backend::{AbortReason, Call, Done, GroupContext, Observer, WorldContext};
use rcomm::{
    Backend, BackendFactory, Buffer, Deadline, DeviceKind, Error, ErrorKind, Op, Pending, Progress,
    Result,
};
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Makes NCCL backends that take host memory.
pub struct StagedFactory {
    inner: Arc<NcclFactory>,
}

impl StagedFactory {
    /// The backend's name in configurations.
    pub const NAME: &'static str = "staged";

    /// Loads the libraries that the options name.
    ///
    /// # Errors
    /// Those of [`NcclFactory::open`].
    pub fn open(world: &WorldContext, options: NcclOptions) -> Result<Arc<Self>> {
        let inner = NcclFactory::open(world, options)?;
        Ok(Arc::new(Self { inner }))
    }
}

impl BackendFactory for StagedFactory {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn device(&self) -> DeviceKind {
        DeviceKind::Cpu
    }

    fn connect(&self, group: GroupContext, deadline: Deadline) -> Result<Arc<dyn Backend>> {
        Ok(Arc::new(Staged {
            inner: self.inner.connect(group, deadline)?,
            stream: CudaStream::new(self.inner.device(), Priority::Normal)?,
        }))
    }
}

/// The backend of one group.
struct Staged {
    inner: Arc<dyn Backend>,
    stream: Arc<CudaStream>,
}

impl Backend for Staged {
    fn name(&self) -> &'static str {
        NcclBackend::NAME
    }

    fn ends_process(&self) -> bool {
        self.inner.ends_process()
    }

    fn issue(
        &self,
        op: Op<'static>,
        call: Call,
        observer: Arc<dyn Observer>,
    ) -> Result<Arc<dyn Pending>> {
        let twins = RefCell::new(HashMap::new());
        let staged = op.map_buffers(&|host| {
            let twin = DeviceBuffer::zeroed(&self.stream, host.dtype(), host.len())?;
            twin.fill_from(host)?;
            let buffer = twin.buffer()?;
            twins.borrow_mut().insert(buffer.as_ptr().addr(), twin);
            Ok(buffer)
        })?;
        Ok(Arc::new(StagedPending {
            inner: self.inner.issue(staged, call, observer)?,
            host: Mutex::new(Some(op)),
            twins: twins.into_inner(),
        }))
    }

    fn run(&self, op: &mut Op<'_>, call: Call, _: &dyn Observer) -> Result<Done> {
        let deadline = call.deadline.started();
        let pending = self.issue(
            op.to_owned()?,
            Call { deadline, ..call },
            Arc::new(NoObserver),
        )?;
        match pending.wait(deadline) {
            Progress::Completed(done) => {
                let filled = pending.reclaim().expect("the operation has completed");
                op.copy_outputs_from(&filled)?;
                Ok(done)
            }
            Progress::Failed(error) => Err(error),
            Progress::Queued | Progress::Started => Err(Error::new(
                ErrorKind::Timeout,
                "the operation did not end before its deadline",
            )),
        }
    }

    fn abort(&self, reason: &AbortReason) {
        self.inner.abort(reason);
    }

    fn shutdown(&self, deadline: Deadline) -> Result<()> {
        self.inner.shutdown(deadline)
    }
}

/// An observer that does nothing, for a caller that waits for its operation.
struct NoObserver;

impl Observer for NoObserver {
    fn started(&self) {}

    fn ended(&self) {}
}

/// An operation in progress on copies of its buffers, in device memory.
struct StagedPending {
    inner: Arc<dyn Pending>,
    /// The caller's operation, until its outputs are filled.
    host: Mutex<Option<Op<'static>>>,
    /// The device memory of each buffer, by the address of that memory.
    twins: HashMap<usize, DeviceBuffer>,
}

impl StagedPending {
    fn copy_back(&self, from: &Op<'static>, into: &mut Op<'static>) -> Result<()> {
        if let (Op::Coalesced(from), Op::Coalesced(into)) = (from, &mut *into) {
            let mut pairs = from.iter().zip(into);
            return pairs.try_for_each(|(from, into)| self.copy_back(from, into));
        }
        let copy = |(from, into): (&Buffer<'_>, &mut Buffer<'_>)| {
            let twin = self.twins.get(&from.as_ptr().addr());
            twin.expect("`issue` has made device memory for each buffer")
                .copy_to(into)
        };
        from.outputs()
            .iter()
            .zip(into.outputs_mut())
            .try_for_each(copy)
    }
}

impl Pending for StagedPending {
    fn progress(&self) -> Progress {
        self.inner.progress()
    }

    fn wait(&self, deadline: Deadline) -> Progress {
        self.inner.wait(deadline)
    }

    fn reclaim(&self) -> Option<Op<'static>> {
        let staged = self.inner.reclaim()?;
        let mut host = self
            .host
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()?;
        self.copy_back(&staged, &mut host).ok()?;
        Some(host)
    }
}
