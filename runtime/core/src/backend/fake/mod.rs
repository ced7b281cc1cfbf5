//! [`FakeBackend`]: ranks that are threads of one process, and misbehave on request.
//!
//! For tests of programs and of this crate: any world size, no sockets, no shared memory. All ranks of
//! a test share a [`FakeFabric`]; the last rank to come to an operation carries it out for all, under
//! one lock. [`FakeFault`]s make a rank stall, skip or lie at a given operation, which is how hangs and
//! mismatches are produced on request.

mod backend;
mod carry_out;
mod fabric;

pub use backend::FakeBackend;
pub use fabric::{FakeFabric, FakeFault, FakeFaultKind};
