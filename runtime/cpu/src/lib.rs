//! The CPU backend: collectives and messages between processes, over shared memory and sockets.
//!
//! Programs use it through the crate `rcomm`, whose worlds open it first: it takes host memory, carries the
//! checks that ranks make of each other, and needs no device. A backend of the program's own may use it
//! by [`CpuFactory::open`].
//!
//! | module | holds |
//! |---|---|
//! | `address` | which address of this host is published to the other ranks |
//! | `mesh`, `handshake` | how ranks find each other, and how strangers are kept out |
//! | `host`, `layout`, `neighbours` | which ranks share memory |
//! | `processors` | whether the ranks of a host have one each |
//! | `transport` | streams of bytes between two ranks; memory shared by those of a host |
//! | `lanes` | all streams of a group, and transfers that run over them at once |
//! | `op_header` | what ranks compare before data moves |
//! | `collective`, `algorithm` | operations split into patterns, and which bytes go to which rank |
//! | `p2p` | tagged messages |
//! | `backend`, `group`, `failure_report` | the crate's public types; running an operation; reporting its failure |
//! | `executor`, `wait` | turns, threads, and how to wait |
//! | `registered` | ranks' own memory in which the others work directly |
//! | `window` | one-sided windows: memory that the others read and write |
//!
//! A blocking collective runs on its caller's thread as soon as it is its turn. Issued ones run on the
//! group's thread `rcomm/cpu/<group>`, issued sends and receives on `rcomm/p2p/<group>`; both start
//! with the first operation that needs them.

// invariant 8
#![deny(unsafe_code)]

mod address;
mod algorithm;
mod backend;
mod collective;
mod executor;
mod failure_report;
#[allow(unsafe_code)]
mod fill;
#[cfg(fuzzing)]
#[doc(hidden)]
pub mod fuzzing;
mod group;
mod handshake;
mod host;
mod lanes;
mod layout;
mod mesh;
mod neighbours;
mod op_header;
mod p2p;
mod processors;
mod registered;
#[cfg(test)]
mod tests;
mod transport;
mod wait;
mod window;

pub use backend::{CpuBackend, CpuFactory};
use group::CpuGroup;
