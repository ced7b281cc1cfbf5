//! The CPU backend: collectives and messages between processes, over shared memory and sockets.
//!
//! Programs use it through the crate `rcomm`, whose worlds open this backend first: it works on host memory and needs
//! no device. The ranks compare their operations over it. A program's own backend may open it with
//! [`CpuFactory::open`], and so may a world that needs no other backend:
//!
//! ```no_run
//! use rcomm_core::backend::{BackendSet, OpenBackend};
//! use rcomm_core::{Config, ReduceOp, World};
//! use rcomm_cpu::CpuFactory;
//! use std::sync::Arc;
//!
//! enum CpuOnly {}
//!
//! impl BackendSet for CpuOnly {
//!     fn backends(_: &Config) -> Vec<OpenBackend> {
//!         vec![Box::new(|world| Ok(Arc::new(CpuFactory::open(world)?)))]
//!     }
//! }
//!
//! let world = World::<CpuOnly>::init(Config::from_environment()?)?;
//! let mut gradients = vec![1.0f32; 1024];
//! world.group().all_reduce(&mut gradients, ReduceOp::Sum)?;
//! world.shutdown()?;
//! # Ok::<(), rcomm_core::Error>(())
//! ```
//!
//! | module | holds |
//! |---|---|
//! | `backend` | the public types; running the operations of a group, in order; reporting a failure |
//! | `window` | one-sided windows: memory that the others read and write |
//! | `p2p` | tagged messages |
//! | `algorithm` | which bytes go to which rank |
//! | `channels` | all channels of one group and kind, and transfers that run over several of them at the same time |
//! | `mesh` | how ranks find each other, which of them share memory, and how connections without the job's secret are refused |
//! | `registered` | memory that a rank has allocated and that other ranks of its host access directly |
//! | `collective` | an operation as one or more `Collective`s, the few kinds that the algorithms implement; what ranks compare before data moves |
//! | `transport` | streams of bytes between two ranks; memory shared by the ranks of a host |
//! | `wait` | how a thread waits, whether each rank can have a processor to itself, and why a wait fails |
//!
//! A blocking operation runs on its caller's thread; a collective first waits there until the group's
//! earlier collectives have ended. Issued collectives run on the group's thread `rcomm/cpu/<group>`, issued
//! sends and receives on `rcomm/p2p/<group>`; both threads start with the first operation that needs them.

// Invariant 8 of docs/ARCHITECTURE.md: `unsafe` only where that document lists it.
#![deny(unsafe_code)]

mod algorithm;
mod backend;
mod channels;
mod collective;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
mod mesh;
mod p2p;
mod registered;
#[cfg(test)]
mod tests;
mod transport;
mod wait;
mod window;

pub use backend::{CpuBackend, CpuFactory};
