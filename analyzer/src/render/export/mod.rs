//! The records themselves in the forms of other tools. A report judges; an export only retells.

pub mod perfetto;
#[cfg(feature = "tables")]
pub mod tables;
