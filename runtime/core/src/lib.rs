//! The core of rcomm: [`World`], [`ProcessGroup`], stores, the watchdog and the records, over backends that
//! it uses only through traits.
//!
//! Programs depend on the crate `rcomm`, which combines this crate with the backends and re-exports what
//! programs use. A backend implements [`BackendFactory`], [`Backend`] and
//! [`Pending`], and [`Stream`] and [`BackendWindow`](backend::BackendWindow) where its device has these.
//!
//! | module | holds |
//! |---|---|
//! | `op` | an operation as data: [`Op`], [`Buffer`], [`Deadline`], hints, [`Error`] |
//! | [`arithmetic`] | element-wise reductions of host memory |
//! | [`store`] | stores, through which ranks find each other and agree: [`HashStore`], [`TcpStore`] |
//! | [`config`] | [`Config`], and which rank this process is: [`Rendezvous`] |
//! | `world` | one process's place in a job: [`World`], the job's [`Secret`], the making of groups |
//! | `group` | [`ProcessGroup`] and its operations, [`Work`], [`Window`] |
//! | `watch` | watchdog, failure propagation, dumps, heartbeat, endpoint |
//! | [`backend`] | the traits, a fake backend, and a wrapper that compares what ranks issue |
//! | [`tuning`] | which algorithm carries out which collective, by size and number of ranks |
//! | [`data_parallel`] | gradients, averaged in buckets |
//!
//! Items that only backends use are public here and not re-exported by `rcomm`: [`arithmetic`],
//! [`backend::support`], and [`tuning::Plan`].
//!
//! ```
//! use rcomm_core::{HashStore, PrefixStore, Store};
//! use std::sync::Arc;
//! use std::time::Duration;
//!
//! // Two users of one store that do not see each other's keys.
//! let root: Arc<dyn Store> = Arc::new(HashStore::new());
//! let first = PrefixStore::new("first", root.clone());
//! let second = PrefixStore::new("second", root);
//! first.set("ranks", b"4")?;
//! assert_eq!(first.get("ranks", Duration::from_secs(1))?, b"4");
//! assert!(!second.check(&["ranks"])?);
//! # Ok::<(), rcomm_core::Error>(())
//! ```
// Invariant 8 of docs/ARCHITECTURE.md: `unsafe` only in the modules that it lists.
#![deny(unsafe_code)]

#[allow(unsafe_code)]
pub mod arithmetic;
pub mod backend;
pub mod config;
pub mod data_parallel;
mod group;
mod op;
pub mod store;
pub mod tuning;
mod watch;
mod world;

pub use backend::fake::{FakeBackend, FakeFabric, FakeFault, FakeFaultKind};
pub use backend::memory::RemoteMemory;
pub use backend::wrapper::Wrapper;
pub use backend::{Backend, BackendFactory, Done, Pending, Progress, Stream};
pub use config::Config;
pub use config::rendezvous;
pub use config::rendezvous::Rendezvous;
pub use group::coalescing::Coalescer;
pub use group::collectives::Vecs;
pub use group::hook::{HookedOperation, OperationHook};
pub use group::maker::GroupOptions;
pub use group::monitored_barrier::MissingRanks;
pub use group::objects::MAX_OBJECT_BYTES;
pub use group::process_group::{ProcessGroup, Timing};
pub use group::sparse::SparseTensor;
pub use group::window::Window;
pub use group::window::symmetric::SymmetricMemory;
pub use group::work::Work;
pub use op::buffer::{Access, Buffer, Device, DeviceKind};
pub use op::deadline::Deadline;
pub use op::element::Element;
pub use op::error::{Error, ErrorKind, Result};
pub use op::float8::{F8E4M3, F8E5M2};
pub use op::hints::{Hints, WaitHint};
pub use op::info::WorkStatus;
pub use op::{Op, Reduction, Sides};
pub use rcomm_recorder::model::{
    Bus, DType, Layout, OpType, Parts, Pattern, Peer, ProcessGroupInfo, Rank, ReduceOp, WaitsFor,
};
#[cfg(feature = "endpoint")]
pub use rcomm_recorder::publish::HandlerParameters;
pub use rcomm_recorder::publish::{
    EndpointAddress, EndpointToken, Secret, Tls, TlsFiles, WaitStatistics,
};
pub use store::{FileStore, HashStore, PrefixStore, QueueStore, Store, TcpStore, TcpStoreServer};
pub use watch::dump_writer::{DumpHandle, DumpWriter, FileDumpWriter};
pub use watch::wait_counters::{OwnedWaiting, WaitCounter, Waiting};
pub use world::{DeviceMesh, World, WorldBuilder, newest_attempt};
