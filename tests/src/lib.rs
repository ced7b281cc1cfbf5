//! Worlds of ranks for the tests of this crate: on threads ([`world`]) and as processes that can
//! die ([`process`]), with faults by name ([`fault`]); and jobs that exist only as records
//! ([`generator`]). How jobs live and end is a matrix of jobs of real processes ([`lives`]).
#![forbid(unsafe_code)]

pub mod fault;
pub mod generator;
pub mod lives;
pub mod process;
pub mod registered;
pub mod simulator;
pub mod staged;
pub mod statistics;
pub mod usage;
pub mod world;
