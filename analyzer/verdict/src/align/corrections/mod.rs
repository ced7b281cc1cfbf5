//! Repairs what some recorders leave out or record differently.
//!
//! [`comm_counter`] numbers the operations of recorders that have one counter for all, [`same_process`] joins two
//! records of one process, [`devices`] splits the records of processes with several devices, and `retired` reopens
//! operations that a recorder closed too early.

pub(crate) mod comm_counter;
pub(crate) mod devices;
mod retired;
pub(crate) mod same_process;
