//! ProcessGroup over CPU and NCCL backends, with a flight recorder that is always on.
#![deny(unsafe_code)]

mod alarm;
mod answers;
#[allow(unsafe_code)]
mod arithmetic;
pub mod backend;
mod backends;
#[allow(unsafe_code)]
mod buffer;
mod coalescing;
mod collectives;
pub mod config;
pub mod data_parallel;
mod deadline;
mod dump_writer;
mod element;
#[cfg(feature = "endpoint")]
mod endpoint;
mod error;
mod float8;
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing;
mod heartbeat;
mod hints;
mod joining;
mod membership;
mod objects;
mod op;
mod p2p;
mod pipe;
mod process_group;
pub mod rendezvous;
mod roll_call;
mod secret;
mod sparse;
pub mod store;
pub mod tuning;
mod watchdog;
mod window;
mod work;
mod world;

pub use backend::cpu::CpuBackend;
pub use backend::fake::{FakeBackend, FakeFabric, FakeFault, FakeFaultKind};
pub use backend::nccl::NcclBackend;
pub use backend::wrapper::Wrapper;
pub use backend::{Backend, BackendFactory, Done, Pending, Progress, Stream};
pub use backends::Backends;
pub use buffer::{Access, Buffer, Device, DeviceKind};
pub use coalescing::Coalescer;
pub use collectives::Vecs;
pub use config::Config;
pub use deadline::Deadline;
pub use dump_writer::{DumpWriter, FileDumpWriter};
pub use element::Element;
pub use error::{Error, ErrorKind, Result};
pub use float8::{F8E4M3, F8E5M2};
pub use half::{bf16, f16};
pub use hints::{Hints, WaitHint};
pub use membership::GroupOptions;
pub use num_complex::Complex;
pub use objects::MAX_OBJECT_BYTES;
pub use op::{Op, Reduction};
pub use process_group::ProcessGroup;
pub use rcomm_recorder::model::{DType, OpType, Peer, ProcessGroupInfo, Rank, ReduceOp};
pub use rcomm_recorder::publish::{EndpointAddress, EndpointToken};
pub use rendezvous::Rendezvous;
pub use roll_call::RollCall;
pub use secret::Secret;
pub use sparse::SparseTensor;
pub use store::{FileStore, HashStore, PrefixStore, QueueStore, Store, TcpStore, TcpStoreServer};
pub use window::{RemoteMemory, Window};
pub use work::{Work, WorkStatus};

/// One process's place in a job, with the backends of this crate.
pub type World = world::World<Backends>;
/// Makes a [`World`] from parts of the caller's own.
pub type WorldBuilder = world::WorldBuilder<Backends>;
