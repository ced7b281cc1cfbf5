//! Operations as data: one enum, so that a backend is one function and a decorator of backends is one
//! function.
//!
//! No memory that an operation writes may be used by another of its buffers: in-place forms are those
//! with one buffer. Rust sees to that for slices and vectors; foreign memory is compared, and refused.
//!
//! An [`Op`] says what to do and holds the buffers. It says nothing of order, deadline or group: these
//! come with the [`Call`](crate::backend::Call). What a rank can see to be wrong with its own
//! arguments is refused by [`Op::validate`] before anything is sent; what only a comparison of ranks
//! can show is the backend's to find.

#[allow(unsafe_code)]
pub(crate) mod buffer;
mod copy;
pub(crate) mod deadline;
pub(crate) mod element;
pub(crate) mod error;
pub(crate) mod float8;
pub(crate) mod hints;
mod operation;
mod reduction;
mod validate;

pub use operation::{Op, Sides};
pub use reduction::Reduction;
