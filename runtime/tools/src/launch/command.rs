//! The command that starts one rank: the program with the variables of torchrun and of rcomm.

use super::nodes::Job;
use super::options::Options;
use crate::rank::RankEnvironment;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

/// Returns the command of this host's rank `local_rank`. The rank's output goes through pipes, and its process leads a
/// process group.
pub(super) fn command_of(options: &Options, job: &Job, secret: &str, local_rank: u32) -> Command {
    let mut command = Command::new(&options.program[0]);
    if let Some(name) = options.program_name {
        command.arg0(name);
    }
    let environment = RankEnvironment {
        rank: job.first_rank + local_rank,
        world_size: job.world_size,
        local_rank,
        local_world_size: options.nproc,
        master_addr: &options.master_addr,
        master_port: job.master_port,
        job_id: &job.id,
        secret,
    };
    environment.set(&mut command);
    command
        .args(&options.program[1..])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .env("GROUP_RANK", job.node.to_string())
        .env("GROUP_WORLD_SIZE", job.nnodes.to_string())
        .env("ROLE_NAME", "default")
        .env("ROLE_RANK", environment.rank.to_string())
        .env("ROLE_WORLD_SIZE", environment.world_size.to_string())
        .env(
            "TORCHELASTIC_MAX_RESTARTS",
            options.max_restarts.to_string(),
        )
        .env("TORCHELASTIC_USE_AGENT_STORE", "True")
        .env(
            "RCOMM_STORE",
            if options.open_store { "open" } else { "secret" },
        );
    if let Some(files) = options.tls_files() {
        command
            .env("RCOMM_TLS_CERT", files.certificate)
            .env("RCOMM_TLS_KEY", files.key)
            .env("RCOMM_TLS_CA", files.ca);
    }
    command
}
