//! Readers of input files: dumps, rings, archives, summaries (`.rsum`), NCCL's RAS reports, NCCL's Inspector logs, job
//! logs and stacks. `rsum` also writes summaries; `threads` has the threads that judge large jobs.

pub mod inspector;
pub mod load;
mod loaded;
pub mod log;
pub mod ras;
pub mod rsum;
pub mod stacks;
pub(crate) mod threads;
