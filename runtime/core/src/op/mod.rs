//! Operations as data: one enum, so that a backend is one function and a decorator of backends is one
//! function.
//!
//! No memory that an operation writes may be used by another of its buffers: in-place forms are those
//! with one buffer. Rust sees to that for slices and vectors; foreign memory is compared, and refused.
//!
//! An [`Op`] holds what to do and the buffers, but neither order nor deadline nor group: these
//! come with the [`Call`](crate::backend::Call). Errors in a rank's own arguments are found by
//! [`Op::validate`] before anything is sent; errors that only a comparison of ranks can show are the
//! backend's to find.

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
