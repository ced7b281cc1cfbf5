//! Writes the records themselves in the formats of other tools, without a judgement.

pub mod perfetto;
#[cfg(feature = "tables")]
pub mod tables;
