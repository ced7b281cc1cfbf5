//! ProcessGroup over CPU and NCCL backends, with a flight recorder that is always on.
//!
//! Each process of a job makes a [`World`], which finds the other ranks, and issues collectives on its
//! [`ProcessGroup`]s. Every operation is recorded; if an operation does not end in time, it fails with an error that
//! names the ranks that did not arrive, and every rank writes a dump that the program `rcomm-fr` reads.
//!
//! ```no_run
//! use rcomm::{Config, ReduceOp, World};
//!
//! let world = World::init(Config::from_environment()?)?;
//! let mut gradients = vec![1.0f32; 1024];
//! world.group().all_reduce(&mut gradients, ReduceOp::Sum)?;
//! world.shutdown()?;
//! # Ok::<(), rcomm::Error>(())
//! ```
//!
//! | where | what |
//! |---|---|
//! | [`World`], [`Config`], [`Rendezvous`] | one process's membership in a job |
//! | [`ProcessGroup`], [`Work`], [`Window`] | groups of ranks, and operations in flight |
//! | [`Op`], [`Buffer`], [`Reduction`] | operations as data |
//! | [`store`] | key-value stores, one of which speaks the protocol of PyTorch's TCPStore |
//! | [`backend`] | the CPU and NCCL backends, and the traits for writing another |
//! | [`data_parallel`] | averages gradients over the ranks, in buckets |
//!
//! Everything except the CPU and NCCL backends is in the crate `rcomm-core`; only this crate depends on
//! these backends.
#![deny(unsafe_code)]

mod backends;
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing;

pub use backends::Backends;
pub use half::{bf16, f16};
pub use num_complex::Complex;
#[cfg(feature = "endpoint")]
pub use rcomm_core::HandlerParameters;
pub use rcomm_core::{
    Access, Backend, BackendFactory, Buffer, Bus, Coalescer, Config, DType, Deadline, Device,
    DeviceKind, DeviceMesh, Done, DumpHandle, DumpWriter, Element, EndpointAddress, EndpointToken,
    Error, ErrorKind, F8E4M3, F8E5M2, FakeBackend, FakeFabric, FakeFault, FakeFaultKind,
    FileDumpWriter, FileStore, GroupOptions, HashStore, Hints, HookedOperation, Layout,
    MAX_OBJECT_BYTES, MissingRanks, Op, OpType, OperationHook, OwnedWaiting, Parts, Pattern, Peer,
    Pending, PrefixStore, ProcessGroup, ProcessGroupInfo, Progress, QueueStore, Rank, ReduceOp,
    Reduction, RemoteMemory, Rendezvous, Result, Secret, Sides, SparseTensor, Store, Stream,
    SymmetricMemory, TcpStore, TcpStoreServer, Timing, Tls, TlsFiles, Vecs, WaitCounter, WaitHint,
    WaitStatistics, Waiting, WaitsFor, Window, Work, WorkStatus, Wrapper, newest_attempt,
};
pub use rcomm_core::{config, data_parallel, rendezvous, store};
pub use rcomm_cpu::CpuBackend;
pub use rcomm_nccl::NcclBackend;

/// One process's membership in a job, with the backends of this crate.
pub type World = rcomm_core::World<Backends>;
/// Builds a [`World`] with a store, backends or a dump writer that the program supplies.
pub type WorldBuilder = rcomm_core::WorldBuilder<Backends>;

/// The backends, and the traits for writing another.
///
/// [`Config::backend`] names the backends of a world: `cpu`, which is the default, or `cpu:cpu,cuda:nccl`.
/// The effect of each field of [`Hints`] on each backend (— means none):
///
/// | hint | [`cpu`](backend::cpu) | [`nccl`](backend::nccl) | [`fake`](backend::fake) |
/// |---|---|---|---|
/// | `wait` | selects how a blocking call, or the thread that runs issued collectives, waits | — | — |
/// | `own`, which is for other backends | — | — | — |
pub mod backend {
    pub use rcomm_core::backend::{
        AbortReason, Agreement, Backend, BackendFactory, BackendSet, BackendWindow, Call,
        CommMemory, CommState, Done, GroupContext, Later, Observer, OpenBackend, Pending, Progress,
        Registration, Stream, WorldContext, fake, wrapper,
    };
    pub use rcomm_cpu as cpu;
    pub use rcomm_nccl as nccl;
}

/// The table from which the CPU backend takes the algorithm of each collective.
pub mod tuning {
    pub use rcomm_core::tuning::{Algorithm, Choice, MAX_STREAMS, Pattern, Topology, Tuning};
}
