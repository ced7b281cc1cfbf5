//! What `rcomm-run` and `rcomm-bench` are made of.

#![forbid(unsafe_code)]

pub mod bench;
pub mod launch;
mod rank;
