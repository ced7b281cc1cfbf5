//! Device memory over NCCL: [`NcclBackend`] and what it is made of.
//!
//! Programs use it through the crate `rcomm`, whose worlds open it where their configuration names it
//! (`cpu:cpu,cuda:nccl`). Its options are [`NcclOptions`]; [`CudaDevice`], [`CudaStream`] and [`DeviceBuffer`]
//! are what a program works on its device with.
//!
//! Nothing outside this crate sees a pointer of NCCL's or of the CUDA driver's. `sys` has the types and the
//! tables of functions, `library` and `cuda` load them and turn codes into errors. `device`, `stream`, `event`,
//! `memory` and `comm` are owned values over them; `config` is what a communicator is made with, and `place`
//! where its handle appears. `cards` and `rally` bring ranks together over the store, `birth` makes communicators,
//! whose number is in `hash`, and `derive` groups from groups, `lane` and `launch` put operations on a stream or into
//! a `graph`, `pending` looks how they fare. `window` has the one-sided operations. `factory` makes the `backend` of each group.
//!
//! Both libraries are loaded at run time: one build runs with and without a device. cudarc's NCCL layer
//! is not used: it looks for other file names than `libnccl.so.2`, panics where a symbol is missing, and
//! receives C codes in Rust enums that cannot hold every value.

mod backend;
mod birth;
mod cards;
mod comm;
mod config;
mod cuda;
#[cfg(feature = "cudarc")]
mod cudarc;
mod datatype;
mod derive;
mod device;
mod event;
mod factory;
mod graph;
mod hash;
mod lane;
mod launch;
mod library;
mod memory;
mod nan;
mod notes;
mod options;
mod pending;
mod place;
mod rally;
mod ras;
mod registry;
mod stream;
mod sys;
mod turns;
mod window;

pub use backend::NcclBackend;
pub use config::{Blocking, CommOptions};
pub use cuda::CudaDriver;
pub use device::CudaDevice;
pub use factory::NcclFactory;
use factory::Shared;
pub use library::{NcclLibrary, Search, Version};
pub use memory::DeviceBuffer;
pub use options::{Connecting, DeviceSharing, ErrorHandling, NcclOptions, Timing};
pub use stream::{CudaStream, Priority};
