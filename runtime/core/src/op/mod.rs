//! [`Op`]: one operation of a group as data. All operations are one enum, so that a backend, or a wrapper of
//! a backend, handles them in one function.
//!
//! Memory that an operation writes must not be part of another of its buffers. An operation works in place
//! only where one buffer is its input and its output. Slices and vectors cannot overlap in Rust;
//! [`Op::validate`] refuses foreign memory that overlaps. All-gathers and reduce-scatters whose input and output share
//! this rank's part, as NCCL allows it, first copy their input, if it is in the host's memory.
//!
//! An [`Op`] holds what to do and the buffers, but neither order nor deadline nor group: these come with the
//! [`Call`](crate::backend::Call). Errors in a rank's own arguments are found by [`Op::validate`] before
//! anything is sent; errors that only a comparison of ranks can show are found by the backend.

#[allow(unsafe_code)]
pub(crate) mod buffer;
mod copy;
pub(crate) mod deadline;
pub(crate) mod element;
pub(crate) mod error;
mod failure;
pub(crate) mod float8;
pub(crate) mod hints;
mod in_place;
pub(crate) mod info;
pub(crate) mod monitor;
mod operation;
mod reduction;
mod validate;

pub use operation::{Op, Sides};
pub use reduction::Reduction;
