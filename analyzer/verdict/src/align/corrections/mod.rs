//! Repairs what some recorders leave out or record differently.
//!
//! [`comm_counter`] numbers the collectives of recorders that have one counter for all operations, [`same_process`]
//! joins two records of one process, [`devices`] splits the records of processes with several devices, and `retired`
//! reopens operations that a recorder retired but that cannot have completed.

pub(crate) mod comm_counter;
pub(crate) mod devices;
mod retired;
pub(crate) mod same_process;
