//! Writes the records themselves in the formats of other tools.

pub mod columns;
pub mod perfetto;
#[cfg(feature = "tables")]
pub mod tables;
