//! Everything that is read from files: dumps and archives, their summaries, NCCL's RAS reports.

pub mod load;
pub mod ras;
pub mod rsum;
