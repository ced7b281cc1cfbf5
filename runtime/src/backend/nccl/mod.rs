//! Device memory over NCCL: [`NcclBackend`] and what it stands on.
//!
//! Nothing outside this folder sees a pointer of NCCL's or of the CUDA driver's. `sys` has the types
//! and the tables of functions, `library` and `cuda` load them and turn codes into errors, `device`,
//! `memory` and `comm` are owned values over them, `rally` brings ranks together over the store, `birth`
//! makes communicators and `derive` groups from groups, `lane` and `launch` put operations on a stream or
//! into a `graph`, `pending` looks how they fare. `window` has the one-sided operations.
//!
//! Both libraries are loaded at run time: one build runs with and without a device. cudarc's NCCL layer
//! is not used: it looks for other file names than `libnccl.so.2`, panics where a symbol is missing, and
//! receives C codes in Rust enums that cannot hold every value.

mod backend;
mod birth;
mod comm;
mod cuda;
#[cfg(feature = "cudarc")]
mod cudarc;
mod datatype;
mod derive;
mod device;
mod graph;
mod lane;
mod launch;
mod library;
mod memory;
mod nan;
mod notes;
mod options;
mod pending;
mod rally;
mod ras;
mod registry;
mod sys;
mod turns;
mod window;

use backend::Shared;
pub use backend::{NcclBackend, NcclFactory};
pub use comm::{Blocking, CommOptions};
pub use cuda::CudaDriver;
pub use device::{CudaDevice, CudaStream, Priority};
pub use library::{NcclLibrary, Search, Version};
pub use memory::DeviceBuffer;
pub use options::{Connecting, DeviceSharing, ErrorHandling, NcclOptions, Propagation, Timing};
