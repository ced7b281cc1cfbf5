//! The environment variables of a rank, for all programs that start ranks.

use anyhow::Result;
use rcomm::Secret;
use std::process::Command;

/// One rank's numbers in its job, and the address of the job's store.
pub(crate) struct RankEnvironment<'a> {
    pub(crate) rank: u32,
    pub(crate) world_size: u32,
    pub(crate) local_rank: u32,
    pub(crate) local_world_size: u32,
    pub(crate) master_addr: &'a str,
    pub(crate) master_port: u16,
    pub(crate) job_id: &'a str,
    pub(crate) secret: &'a str,
}

impl RankEnvironment<'_> {
    /// Sets the variables for a process that is about to be started.
    pub(crate) fn set(&self, command: &mut Command) {
        command
            .env("RANK", self.rank.to_string())
            .env("WORLD_SIZE", self.world_size.to_string())
            .env("LOCAL_RANK", self.local_rank.to_string())
            .env("LOCAL_WORLD_SIZE", self.local_world_size.to_string())
            .env("MASTER_ADDR", self.master_addr)
            .env("MASTER_PORT", self.master_port.to_string())
            .env("TORCHELASTIC_RUN_ID", self.job_id)
            .env("RCOMM_JOB_SECRET", self.secret);
    }
}

/// Generates a job's secret: 32 random bytes in hexadecimal.
///
/// # Errors
/// If the system has no random bytes.
pub(crate) fn new_secret() -> Result<String> {
    Ok(Secret::generate()?.to_hex())
}
