//! Worlds of ranks, for the tests beside: on threads ([`world`]) and as processes that can die
//! ([`process`]), with faults by name ([`fault`]).
#![forbid(unsafe_code)]

pub mod fault;
pub mod process;
pub mod world;
