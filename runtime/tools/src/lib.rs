//! The programs `rcomm-run`, which starts the ranks of a job on one or several hosts, and `rcomm-bench`,
//! which measures operations.
//!
//! ```sh
//! rcomm-run -n 4 ./train
//! rcomm-run demo stuck
//! rcomm-bench all_reduce -n 2
//! ```

// All `unsafe` is in `launch/parent_death.rs`.
#![deny(unsafe_code)]

pub mod bench;
pub mod demo;
pub mod launch;
mod rank;
pub mod run;
mod same_program;
