//! [`NcclFactory`], which makes the backends of a world's groups, and what they have in common.

use super::NcclBackend;
use crate::comm::bootstrap::{Meeting, Scope};
use crate::context::nan::NanFinder;
use crate::context::options::{Connecting, NcclOptions};
use crate::context::ras::Ras;
use crate::cuda::device::CudaDevice;
use crate::cuda::event::{EventPool, EventTiming};
use crate::cuda::stream::{CudaStream, Priority};
use crate::library::NcclLibrary;
use crate::queue::Lane;
use rcomm_core::Deadline;
use rcomm_core::backend::{Backend, BackendFactory, GroupContext, WorldContext};
use rcomm_core::store::PrefixStore;
use rcomm_core::{Buffer, Device, DeviceKind};
use rcomm_core::{Error, ErrorKind, Result};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// What the lanes of one backend share.
pub(crate) struct Shared {
    pub(crate) library: Arc<NcclLibrary>,
    pub(crate) device: Arc<CudaDevice>,
    pub(crate) options: Arc<NcclOptions>,
    pub(crate) host: String,
    /// Start and end of operations.
    pub(crate) marks: Arc<EventPool>,
    /// Where one stream waits for another.
    pub(crate) joints: Arc<EventPool>,
    pub(crate) default_stream: Arc<CudaStream>,
    /// For what waits for no kernel: new memory is filled with zeros here.
    pub(crate) copies: Arc<CudaStream>,
    /// Why nothing goes on; set once.
    pub(crate) aborted: OnceLock<Error>,
    /// Operations whose buffers the device never gave back.
    pub(crate) leaked: AtomicU64,
    /// How long a rank that gives up waits for the others to report their outcome.
    pub(crate) patience: Duration,
    pub(crate) nans: Arc<NanFinder>,
    pub(crate) ras: Arc<Ras>,
}

impl Shared {
    /// For the lanes of another backend of the same world.
    pub(crate) fn sibling(&self) -> Arc<Self> {
        Arc::new(Self {
            library: self.library.clone(),
            device: self.device.clone(),
            options: self.options.clone(),
            host: self.host.clone(),
            marks: EventPool::new(&self.device, self.options.event_timing()),
            joints: EventPool::new(&self.device, EventTiming::Untimed),
            default_stream: self.default_stream.clone(),
            copies: self.copies.clone(),
            aborted: OnceLock::new(),
            leaked: AtomicU64::new(0),
            patience: self.patience,
            nans: self.nans.clone(),
            ras: self.ras.clone(),
        })
    }

    /// Refuses memory that the device cannot use, or whose owner is not kept alive with the buffer.
    pub(crate) fn check_place(&self, buffer: &Buffer<'_>) -> Result<()> {
        let refuse = |why: String| {
            let message = format!("{buffer:?}: {why}");
            Err(Error::new(ErrorKind::InvalidArgument, message))
        };
        let own = self.device.place();
        if buffer.device() != own {
            let place = match buffer.device() {
                Device::Cpu => "host memory".to_owned(),
                Device::Cuda(ordinal) => format!("memory of cuda:{ordinal}"),
            };
            return refuse(format!(
                "it is {place}; on this rank the group works on {:?}",
                self.device
            ));
        }
        if buffer.owner().is_none() {
            return refuse("nothing keeps the memory alive until the device is done".to_owned());
        }
        Ok(())
    }

    /// Whether communicators were left to the library after a failure.
    pub(crate) fn is_forsaken(&self) -> bool {
        self.aborted.get().is_some() && !self.options.error_handling.cleans_up()
    }
}

/// Makes the NCCL backends of a world's groups.
///
/// # Thread safety
/// One for each world. Groups may be made from several threads.
pub struct NcclFactory {
    /// What the lanes of each backend start from.
    pattern: Arc<Shared>,
}

impl NcclFactory {
    /// Loads the CUDA driver and NCCL, and opens this rank's device.
    ///
    /// # Errors
    /// `Backend` with everything that was tried, where driver or library is not there or not right;
    /// `InvalidArgument` if there is no such device.
    pub fn open(world: &WorldContext, options: NcclOptions) -> Result<Arc<Self>> {
        let device = options.open_device(world.local_rank.unwrap_or(world.rank))?;
        let library = Arc::new(NcclLibrary::load(&options.search())?);
        tracing::info!(
            rank = world.rank,
            nccl = %library.version(),
            library = %library.path().display(),
            ?device,
            "NCCL loaded"
        );
        let system = rustix::system::uname();
        let host = system.nodename().to_string_lossy();
        // One rank asks for the job, and another one in case that the first is gone.
        let asks = world.rank == 0 || world.rank + 1 == world.world_size;
        let ras = Ras::new(options.ras.clone().filter(|_| asks), Ras::PATIENCE);
        let pattern = Shared {
            marks: EventPool::new(&device, options.event_timing()),
            joints: EventPool::new(&device, EventTiming::Untimed),
            default_stream: CudaStream::default_of(&device),
            copies: CudaStream::new(&device, Priority::Normal)?,
            library,
            device,
            options: Arc::new(options),
            host: host.into_owned(),
            aborted: OnceLock::new(),
            leaked: AtomicU64::new(0),
            patience: world.config.status_wait,
            nans: Arc::default(),
            ras: Arc::new(ras),
        };
        Ok(Arc::new(Self {
            pattern: Arc::new(pattern),
        }))
    }

    /// This rank's device: where streams and buffers for the backend are made.
    pub fn device(&self) -> &Arc<CudaDevice> {
        &self.pattern.device
    }

    /// The library in use.
    pub fn library(&self) -> &Arc<NcclLibrary> {
        &self.pattern.library
    }
}

impl BackendFactory for NcclFactory {
    fn name(&self) -> &'static str {
        NcclBackend::NAME
    }

    fn device(&self) -> DeviceKind {
        DeviceKind::Cuda
    }

    fn connect(&self, group: GroupContext, deadline: Deadline) -> Result<Arc<dyn Backend>> {
        let shared = self.pattern.sibling();
        let meeting = Meeting {
            scope: Scope::Group,
            store: Arc::new(PrefixStore::new("all", group.store.clone())),
            ranks: group.info.ranks.to_vec(),
            own: group.group_rank,
            name: group.info.name.clone(),
        };
        let main = Lane::begin(&shared, meeting)?;
        if shared.options.connecting == Connecting::Eager {
            main.join(deadline, shared.patience)?;
        }
        Ok(NcclBackend::over(group, shared, main))
    }
}
