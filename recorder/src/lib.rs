//! What a collective is called, where it is written down, and how others read it.
//!
//! Three floors: [`model`] holds the words, [`record`] the ring that a job writes while it runs,
//! [`publish`] the ways in which both leave the process.

#![deny(unsafe_code)]

mod error;
pub mod model;
pub mod publish;
pub mod record;

pub use error::{Error, Result};
