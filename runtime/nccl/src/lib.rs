//! Device memory over NCCL: [`NcclBackend`] and its parts.
//!
//! Programs use the backend through the crate `rcomm`, whose worlds open it if their configuration names it
//! (`cpu:cpu,cuda:nccl`). The options are [`NcclOptions`]. Programs use [`CudaDevice`], [`CudaStream`] and
//! [`DeviceBuffer`] for their own work on the device.
//!
//! ```no_run
//! use rcomm_core::backend::{BackendSet, OpenBackend};
//! use rcomm_core::{Config, Op, ReduceOp, World};
//! use rcomm_nccl::{CudaStream, DeviceBuffer, NcclFactory, NcclOptions, Priority};
//!
//! enum NcclOnly {}
//!
//! impl BackendSet for NcclOnly {
//!     fn backends(_: &Config) -> Vec<OpenBackend> {
//!         vec![Box::new(|world| {
//!             Ok(NcclFactory::open(world, NcclOptions::of(&world.config)?)?)
//!         })]
//!     }
//! }
//!
//! let mut config = Config::from_environment()?;
//! config.backend = "nccl".to_owned();
//! let world = World::<NcclOnly>::init(config)?;
//! let local_rank = world.place().local_rank.unwrap_or(world.rank());
//! let device = NcclOptions::of(world.config())?.open_device(local_rank)?;
//! let stream = CudaStream::new(&device, Priority::Normal)?;
//! let gradients = DeviceBuffer::copy_of(&stream, &[1.0f32; 1024])?;
//! let op = Op::AllReduce {
//!     buffer: gradients.buffer()?,
//!     op: ReduceOp::Sum.into(),
//! };
//! world.group().execute_async(op)?.wait()?;
//! world.shutdown()?;
//! # Ok::<(), rcomm_core::Error>(())
//! ```
//!
//! Handles of NCCL stay inside this crate. Of the CUDA driver's handles, a program gets streams
//! ([`CudaStream::as_raw`]) and addresses ([`DeviceBuffer::address`]).
//!
//! | module | holds |
//! |---|---|
//! | `backend` | the factory, the backend of a group, and groups derived from groups |
//! | `window` | one-sided windows |
//! | `pool` | memory that NCCL allocates, for the allocator of a framework |
//! | `queue` | a communicator with its stream, and the operations in progress on it |
//! | `launch` | an operation as calls of NCCL |
//! | `comm` | communicators: how ranks find each other over the store, creation, calls, the end |
//! | `context` | what the queues of a backend share: options, how long their ends may take, the order of launches, whether an end that the device reports is believed, the search for NaNs, the report of NCCL's RAS subsystem |
//! | `cuda` | the driver: its table of functions, device, streams, events, memory, graphs; the links between devices |
//! | `library` | NCCL: its table of functions, types, versions, configuration |
//!
//! Both libraries are loaded at run time, so that one build runs with and without a device. cudarc's NCCL
//! layer is not used: it looks for file names other than `libnccl.so.2`, panics if a symbol is missing, and
//! receives C codes in Rust enums that cannot hold every value.

mod backend;
mod comm;
mod context;
mod cuda;
mod launch;
mod library;
mod pool;
mod queue;
mod window;

pub use backend::NcclBackend;
pub use backend::factory::NcclFactory;
pub use context::options::{
    Connecting, DeviceSharing, ErrorHandling, LaunchOrder, NcclOptions, PairComms, Timing,
};
pub use cuda::CudaDriver;
pub use cuda::device::CudaDevice;
pub use cuda::memory::DeviceBuffer;
pub use cuda::nvlink::DmaConnectivity;
pub use cuda::stream::{CudaStream, Priority};
pub use library::config::{Blocking, CommOptions};
pub use library::{NcclLibrary, Search, Version};
pub use pool::{AllocatorFunctions, MemoryPool};
