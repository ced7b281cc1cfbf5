//! Measures how long ranks take to find each other, and to create a group, beside PyTorch's gloo backend.
//!
//! `cargo run --release -p rcomm-tests --bin peers-startup [-- --ranks 2,8,32]`, with `RCOMM_TEST_PYTHON`
//! naming a Python that has torch; without it, only rcomm is measured and the program prints that. Every rank is a
//! process. Once all ranks are up and have loaded their libraries, they get a start signal. The program prints the time
//! from the signal until the last rank has its world, and the time to create a group of all ranks, on the slowest rank
//! (the median of 20 groups per job). Jobs of rcomm and of PyTorch alternate.

#![allow(clippy::print_stdout, clippy::print_stderr)]

use anyhow::{Context, Result, ensure};
use clap::{Parser, Subcommand};
use rcomm::{Config, GroupOptions, World};
use rcomm_tests::statistics::median;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    command: Option<Role>,
    /// Numbers of ranks.
    #[arg(long, value_delimiter = ',', default_value = "2,8,32")]
    ranks: Vec<u32>,
    /// The number of jobs for each library and number of ranks.
    #[arg(long, default_value_t = 9)]
    rounds: usize,
}

#[derive(Subcommand)]
enum Role {
    /// One rank: prints that it is up, waits for a line, and then prints when it had its world and how long each group
    /// took.
    Rank,
}

/// The number of groups that each job makes.
const GROUPS: usize = 20;

/// The program of a rank of PyTorch, which prints what a rank of rcomm does. It also makes [`GROUPS`] groups.
const PYTORCH: &str = r#"
import sys, time, datetime
import torch, torch.distributed as dist
print("up", flush=True)
sys.stdin.readline()
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
print(time.time(), flush=True)
times = []
for _ in range(20):
    dist.barrier()
    then = time.perf_counter()
    dist.new_group(list(range(dist.get_world_size())))
    times.append(time.perf_counter() - then)
print(*times, flush=True)
sys.stdin.readline()
"#;

fn now() -> f64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0.0, |now| now.as_secs_f64())
}

/// Runs a rank of rcomm.
fn rank() -> Result<()> {
    let mut line = String::new();
    println!("up");
    std::io::stdin().read_line(&mut line)?;
    let world = World::init(Config::from_environment()?)?;
    println!("{}", now());
    let ranks: Vec<u32> = (0..world.size()).collect();
    let (mut times, mut groups) = (Vec::new(), Vec::new());
    for index in 0..GROUPS {
        world.group().barrier()?;
        let options = GroupOptions::named(format!("group {index}"));
        let start = Instant::now();
        let group = world.new_group(&ranks, &options)?;
        times.push(start.elapsed().as_secs_f64().to_string());
        groups.push(group);
    }
    println!("{}", times.join(" "));
    std::io::stdin().read_line(&mut line)?;
    world.shutdown()?;
    Ok(())
}

/// A process of a job, and its standard input and output.
struct Member {
    process: Child,
    stdin: ChildStdin,
    lines: BufReader<ChildStdout>,
}

impl Member {
    fn start(mut command: Command) -> Result<Self> {
        let mut process = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {command:?}"))?;
        let stdin = process
            .stdin
            .take()
            .context("standard input is not piped")?;
        let stdout = process
            .stdout
            .take()
            .context("standard output is not piped")?;
        Ok(Self {
            process,
            stdin,
            lines: BufReader::new(stdout),
        })
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.lines.read_line(&mut line)?;
        ensure!(!line.is_empty(), "a rank ended before it was done");
        Ok(line)
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        // Nothing more can be done after an error.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Runs a job. Returns the seconds from the start signal until the last rank had its world, and for each group the
/// seconds that the slowest rank's call took.
fn run_job(ranks: u32, command: impl Fn() -> Command) -> Result<(f64, Vec<f64>)> {
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let mut members = Vec::new();
    for rank in 0..ranks {
        let mut command = command();
        command
            .env("RANK", rank.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("WORLD_SIZE", ranks.to_string())
            .env("LOCAL_WORLD_SIZE", ranks.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .env("TORCHELASTIC_RUN_ID", format!("startup-{port}"));
        members.push(Member::start(command)?);
    }
    for member in &mut members {
        member.line()?;
    }
    let started = now();
    for member in &mut members {
        member.stdin.write_all(b"go\n")?;
    }
    let mut last: f64 = 0.0;
    for member in &mut members {
        last = last.max(member.line()?.trim().parse()?);
    }
    let mut groups = vec![0.0f64; GROUPS];
    for member in &mut members {
        for (slowest, time) in groups.iter_mut().zip(member.line()?.split_whitespace()) {
            *slowest = slowest.max(time.parse()?);
        }
    }
    for member in &mut members {
        member.stdin.write_all(b"end\n")?;
    }
    for member in &mut members {
        member.process.wait()?;
    }
    Ok((last - started, groups))
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    if matches!(arguments.command, Some(Role::Rank)) {
        return rank();
    }
    let program = std::env::current_exe()?;
    let ours = || {
        let mut command = Command::new(&program);
        command.arg("rank");
        command
    };
    let python = std::env::var("RCOMM_TEST_PYTHON").ok();
    if python.is_none() {
        eprintln!("PyTorch is not measured: RCOMM_TEST_PYTHON is not set");
    }
    println!("ms: median (min, max) of {} jobs", arguments.rounds);
    println!("{:<8}{:>6}{:>30}{:>30}", "", "ranks", "init", "new_group");
    for &ranks in &arguments.ranks {
        let mut results = [
            ("rcomm", Vec::new(), Vec::new()),
            ("torch", Vec::new(), Vec::new()),
        ];
        for _ in 0..arguments.rounds {
            let (init, mut groups) = run_job(ranks, ours)?;
            results[0].1.push(init);
            results[0].2.push(median(&mut groups));
            if let Some(python) = &python {
                let theirs = || {
                    let mut command = Command::new(python);
                    // Without this variable, gloo looks up the host's name.
                    command.env("GLOO_SOCKET_IFNAME", "lo");
                    command.args(["-c", PYTORCH]).stderr(Stdio::null());
                    command
                };
                let (init, mut groups) = run_job(ranks, theirs)?;
                results[1].1.push(init);
                results[1].2.push(median(&mut groups));
            }
        }
        for (name, mut init, mut groups) in results {
            if init.is_empty() {
                continue;
            }
            let spread = |values: &mut Vec<f64>| {
                let middle = median(values) * 1e3;
                let (min, max) = (values[0] * 1e3, values[values.len() - 1] * 1e3);
                format!("{middle:.2} ({min:.2}, {max:.2})")
            };
            println!(
                "{name:<8}{ranks:>6}{:>30}{:>30}",
                spread(&mut init),
                spread(&mut groups)
            );
        }
    }
    Ok(())
}
