//! Starts the ranks on this machine: the same program again, with its rank in the environment.

use super::NAME;
use super::cli::Bind;
use crate::rank::{RankEnvironment, new_secret};
use crate::same_program;
use anyhow::{Context, bail};
use rustix::thread::CpuSet;
use std::ffi::OsString;
use std::net::TcpListener;
use std::process::{Child, ExitCode};

/// Variable in the environment of every rank started here; holds its core, or `any`.
const CHILD: &str = "RCOMM_BENCH_CHILD";
/// Variable with the number of simulated hosts. The ranks are divided among them, and share memory only within a host.
pub(crate) const HOSTS: &str = "RCOMM_BENCH_HOSTS";

/// Whether this process is a rank that [`start`] started.
pub(crate) fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// Starts `count` ranks with these arguments, which follow the program's name, and waits for them. Returns exit code 1
/// if a rank exited with 1.
///
/// # Errors
/// If a rank cannot be prepared, started or waited for, or ends in any other way than by exiting with 0 or 1: the other
/// ranks are then killed.
pub(crate) fn start(count: u32, bind: Bind, arguments: &[OsString]) -> anyhow::Result<ExitCode> {
    let port = TcpListener::bind("127.0.0.1:0")
        .and_then(|listener| listener.local_addr())
        .context("failed to find a free port")?
        .port();
    let job = format!("bench-{}", std::process::id());
    let secret = new_secret()?;
    // The cores that this process may run on: a container or taskset may leave out core 0.
    let cores: Vec<usize> = match rustix::thread::sched_getaffinity(None) {
        Ok(allowed) => (0..CpuSet::MAX_CPU)
            .filter(|&core| allowed.is_set(core))
            .collect(),
        Err(_) => Vec::new(),
    };
    let core_of = |rank: u32| match bind {
        Bind::Core if !cores.is_empty() => cores[rank as usize % cores.len()].to_string(),
        Bind::Core | Bind::None => "any".into(),
    };
    let hosts = std::env::var(HOSTS)
        .ok()
        .and_then(|hosts| hosts.parse::<u32>().ok());
    let mut ranks: Vec<Child> = Vec::new();
    for rank in 0..count {
        let mut command = same_program::command(NAME)?;
        if let Some(hosts) = hosts {
            let host = u64::from(rank) * u64::from(hosts) / u64::from(count);
            command.env("RCOMM_HOST_ID", host.to_string());
        }
        let environment = RankEnvironment {
            rank,
            world_size: count,
            local_rank: rank,
            local_world_size: count,
            master_addr: "127.0.0.1",
            master_port: port,
            job_id: &job,
            secret: &secret,
        };
        environment.set(&mut command);
        let child = command.args(arguments).env(CHILD, core_of(rank)).spawn();
        match child {
            Ok(child) => ranks.push(child),
            Err(error) => {
                stop(&mut ranks);
                return Err(error).with_context(|| format!("failed to start rank {rank}"));
            }
        }
    }
    let mut worst = 0;
    for rank in 0..ranks.len() {
        let status = ranks[rank].wait();
        match status.as_ref().ok().and_then(|status| status.code()) {
            Some(0) => {}
            Some(1) => worst = 1,
            _ => {
                stop(&mut ranks);
                let status = status.with_context(|| format!("failed to wait for rank {rank}"))?;
                bail!("rank {rank} failed: {status}");
            }
        }
    }
    Ok(ExitCode::from(worst))
}

fn stop(ranks: &mut [Child]) {
    for rank in ranks {
        // The error is that the rank has already ended.
        let _ = rank.kill();
        let _ = rank.wait();
    }
}

/// Pins this rank to the core that the environment names, if it names one.
pub(crate) fn pin_to_core() -> anyhow::Result<()> {
    let Some(core) = std::env::var(CHILD)
        .ok()
        .and_then(|core| core.parse::<usize>().ok())
    else {
        return Ok(());
    };
    let mut set = CpuSet::new();
    set.set(core);
    rustix::thread::sched_setaffinity(None, &set)
        .with_context(|| format!("failed to pin this rank to core {core}"))
}
