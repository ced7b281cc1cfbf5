//! Starts the ranks on this machine: the same program again, with its rank in the environment.

use super::NAME;
use super::cli::Bind;
use crate::rank::{RankEnvironment, new_secret};
use crate::same_program;
use anyhow::{Context, bail};
use rustix::thread::CpuSet;
use std::ffi::OsString;
use std::net::TcpListener;
use std::process::{Child, Command, ExitCode};

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
    let prepare = |rank: u32| {
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
        command.args(arguments).env(CHILD, core_of(rank));
        Ok(command)
    };
    Ranks::start(count, prepare)?.wait()
}

/// The processes of the ranks. Those that are left are killed when the value is dropped, so no return leaves one
/// behind.
struct Ranks(Vec<Child>);

impl Ranks {
    /// Starts the commands that `prepare` makes for the ranks.
    ///
    /// # Errors
    /// If a rank cannot be prepared or started: the ranks that were started before it are then killed.
    fn start(
        count: u32,
        mut prepare: impl FnMut(u32) -> anyhow::Result<Command>,
    ) -> anyhow::Result<Self> {
        let mut ranks = Self(Vec::new());
        for rank in 0..count {
            let child = prepare(rank)?.spawn();
            let child = child.with_context(|| format!("failed to start rank {rank}"))?;
            ranks.0.push(child);
        }
        Ok(ranks)
    }

    /// Waits for all ranks; returns exit code 1 if one exited with 1.
    ///
    /// # Errors
    /// If a rank cannot be waited for, or ends in any other way than by exiting with 0 or 1: the other ranks are then
    /// killed.
    fn wait(mut self) -> anyhow::Result<ExitCode> {
        let mut worst = 0;
        for (rank, child) in self.0.iter_mut().enumerate() {
            let status = child.wait();
            let status = status.with_context(|| format!("failed to wait for rank {rank}"))?;
            match status.code() {
                Some(0) => {}
                Some(1) => worst = 1,
                _ => bail!("rank {rank} failed: {status}"),
            }
        }
        Ok(ExitCode::from(worst))
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for rank in &mut self.0 {
            // The error is that the rank has already ended.
            let _ = rank.kill();
            let _ = rank.wait();
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::unix::net::UnixStream;
    use std::process::Stdio;

    #[test]
    fn no_rank_is_left_if_a_later_one_cannot_be_prepared_or_started() {
        let later: [fn() -> anyhow::Result<Command>; 2] = [
            || bail!("no memory"),
            || Ok(Command::new("/nonexistent/program")),
        ];
        for prepare_later in later {
            // The first rank holds one end, so the other end is over once the rank has ended.
            let (mut here, there) = UnixStream::pair().unwrap();
            here.set_read_timeout(Some(std::time::Duration::from_secs(60)))
                .unwrap();
            let mut there = Some(there);
            let started = Ranks::start(2, |rank| match rank {
                0 => {
                    let mut command = Command::new("sleep");
                    let there = there.take().unwrap();
                    command
                        .arg("300")
                        .stdin(Stdio::from(std::os::fd::OwnedFd::from(there)));
                    Ok(command)
                }
                _ => prepare_later(),
            });
            assert!(started.is_err());
            assert_eq!(here.read(&mut [0]).unwrap(), 0);
        }
    }
}
