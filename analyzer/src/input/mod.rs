//! Everything that is read from files: dumps and archives, their summaries, NCCL's RAS reports, logs.

pub mod load;
mod loaded;
pub mod log;
pub mod ras;
pub mod rsum;
