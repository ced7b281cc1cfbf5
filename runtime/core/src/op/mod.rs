//! Operations as data. They are one enum, so that a backend needs one function for all of them, and a wrapper
//! of backends too.
//!
//! No memory that an operation writes may be used by another of its buffers: in-place forms are those with
//! one buffer. Rust ensures that for slices and vectors; overlaps of foreign memory are checked for and
//! refused.
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
pub(crate) mod info;
mod operation;
mod reduction;
mod validate;

pub use operation::{Op, Sides};
pub use reduction::Reduction;
