//! [`NcclFactory`] makes the backends of a world's groups.

use super::NcclBackend;
use crate::comm::members::{BootstrapGroup, Scope};
use crate::context::Shared;
use crate::context::launch_order;
use crate::context::options::{Connecting, NcclOptions};
use crate::cuda::device::CudaDevice;
use crate::library::NcclLibrary;
use crate::queue::CommQueue;
use rcomm_core::Deadline;
use rcomm_core::DeviceKind;
use rcomm_core::Result;
use rcomm_core::backend::{Backend, BackendFactory, GroupContext, WorldContext};
use rcomm_core::store::PrefixStore;
use std::sync::Arc;

/// Makes the NCCL backends of a world's groups.
///
/// # Thread safety
/// Groups may be made from several threads. Each world has its own factory.
pub struct NcclFactory {
    /// The state that the queues of each backend share, as a template.
    template: Arc<Shared>,
}

impl NcclFactory {
    /// Loads the CUDA driver and NCCL, and opens this rank's device.
    ///
    /// # Errors
    /// `Backend`, with every path that was tried, if the driver or the library is missing or unsuitable;
    /// `InvalidArgument` if there is no such device, or if the environment does not order launches as the options ask;
    /// `Unsupported` if the library is too old for the options.
    pub fn open(world: &WorldContext, options: NcclOptions) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            template: Arc::new(Shared::open(world, options)?),
        }))
    }

    /// Sets the variables that NCCL reads only from the process's environment, if the options ask for it
    /// ([`LaunchOrder::Implicit`](crate::LaunchOrder::Implicit)).
    /// [`BackendSet::prepare`](rcomm_core::backend::BackendSet::prepare) calls this before the library is loaded and
    /// the process has a second thread.
    ///
    /// # Errors
    /// `InvalidArgument` if the environment has other values for these variables; `Unsupported` if the process has
    /// several threads.
    pub fn prepare(options: &NcclOptions) -> Result<()> {
        launch_order::prepare(options)
    }

    /// This rank's device, on which streams and buffers for the backend are made.
    pub fn device(&self) -> &Arc<CudaDevice> {
        &self.template.device
    }

    /// The loaded NCCL library.
    pub fn library(&self) -> &Arc<NcclLibrary> {
        &self.template.library
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
        let shared = self.template.sibling();
        let members = BootstrapGroup {
            scope: Scope::Group,
            store: Arc::new(PrefixStore::new("all", group.store.clone())),
            ranks: group.info.ranks.to_vec(),
            own_index: group.group_rank,
            name: group.info.name.clone(),
        };
        let main = CommQueue::begin(&shared, members)?;
        if shared.options.connecting == Connecting::Eager {
            main.join(deadline, shared.report_time)?;
        }
        Ok(NcclBackend::new(group, shared, main))
    }
}
