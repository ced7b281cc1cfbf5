//! [`FakeBackend`]: ranks that are threads of one process, with faults on request.
//!
//! This backend is for tests of programs and of this crate. It takes any world size and needs neither sockets nor
//! shared memory. All ranks of a test share a [`FakeFabric`]; the last rank that issues a collective carries it out
//! for all, under one lock. [`FakeFault`]s make a rank stall, skip or lie at a given collective, and so produce
//! hangs and mismatches.

mod backend;
mod carry_out;
mod fabric;

pub use backend::FakeBackend;
pub use fabric::{FakeFabric, FakeFault, FakeFaultKind};
