//! Readers of files: dumps and archives, summaries, NCCL's RAS reports and Inspector logs, logs, stacks.

pub mod inspector;
pub mod load;
mod loaded;
pub mod log;
pub mod ras;
pub mod rsum;
pub mod stacks;
