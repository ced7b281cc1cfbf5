//! Measures the analyzer's time and memory: makes dumps of very large jobs with a known culprit, and measures
//! `rcomm-fr` on them, and PyTorch's `torchfrtrace` if it is installed.
//!
//! ```sh
//! cargo build --release -p rcomm-analyzer -p rcomm-tests --bins
//! target/release/scale write /tmp/dumps --tp 8 --pp 8 --dp 16
//! RCOMM_TEST_PYTHON=python3 target/release/scale measure /tmp/dumps
//! ```
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a program whose result is what it prints"
)]

use anyhow::{Context, bail, ensure};
use clap::{Args, Parser, Subcommand};
use rcomm_recorder::publish::{Dump, Recorder};
use rcomm_tests::generator::{Kind, Mix, Past, Recording, Spec, Window};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

#[derive(Debug, Parser)]
#[command(about = "Measures the analyzer on large jobs")]
struct Cli {
    #[command(subcommand)]
    command: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Write the dumps of a job in which one rank stops, as PyTorch's NCCL recorder does (pickle).
    Write(WriteArgs),
    /// Run `rcomm-fr analyze` on them, and `torchfrtrace` if RCOMM_TEST_PYTHON names a Python with it.
    Measure(MeasureArgs),
}

#[derive(Debug, Args)]
struct WriteArgs {
    /// The folder for the dumps.
    out: PathBuf,
    /// Tensor-parallel size.
    #[arg(long, default_value_t = 8)]
    tp: u32,
    /// Pipeline stages.
    #[arg(long, default_value_t = 8)]
    pp: u32,
    /// Data-parallel replicas.
    #[arg(long, default_value_t = 16)]
    dp: u32,
    /// Operations in each ring.
    #[arg(long, default_value_t = 2000)]
    entries: usize,
    /// Frames in each stack.
    #[arg(long, default_value_t = 10)]
    frames: usize,
    /// The seed of the job: another number makes another job.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

#[derive(Debug, Args)]
struct MeasureArgs {
    /// The folder with the dumps.
    dir: PathBuf,
    /// Give up on a program after this many seconds.
    #[arg(long, default_value_t = 600)]
    limit: u64,
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Action::Write(args) => write(&args),
        Action::Measure(args) => measure(&args),
    }
}

fn write(args: &WriteArgs) -> anyhow::Result<()> {
    let spec = Spec {
        seed: args.seed,
        tp: args.tp,
        pp: args.pp,
        dp: args.dp,
        ep: 1,
        steps: 6,
        micro_batches: 1,
        mix: Mix::default(),
        recording: Recording {
            recorder: Recorder::Nccl,
            starts: true,
            batched: true,
            run_ahead: 12,
            window: Window::Whole,
            clock_spread_ms: 0,
            drift_ppm: 0,
            frames: true,
            splits: false,
            taken_at: None,
            second_recorder: None,
            per_host: 8,
            notice_ms: 0,
        },
        faults: vec![Kind::Stuck],
    };
    let job = spec.make();
    let culprits = job.culprits();
    let past = Past::of(&job.dumps, args.entries, args.frames);
    std::fs::create_dir_all(&args.out)
        .with_context(|| format!("cannot make {}", args.out.display()))?;
    let ranks = job.dumps.len();
    let waiting = Mutex::new(job.dumps.into_iter());
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let written: anyhow::Result<Vec<u64>> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|_| scope.spawn(|| write_on(&waiting, past, &args.out)))
            .collect();
        let ends = workers.into_iter().map(|worker| worker.join());
        ends.map(|end| end.unwrap_or_else(|_| bail!("a writing thread panicked")))
            .collect()
    });
    let bytes: u64 = written?.iter().sum();
    println!(
        "{}: {ranks} ranks, {:.1} MB, rank {culprits:?} stops",
        args.out.display(),
        bytes as f64 / 1e6
    );
    Ok(())
}

fn write_on(
    waiting: &Mutex<std::vec::IntoIter<Dump>>,
    past: Past,
    out: &Path,
) -> anyhow::Result<u64> {
    let mut bytes = 0;
    loop {
        let next = waiting.lock().map(|mut waiting| waiting.next());
        let Ok(Some(dump)) = next else {
            return Ok(bytes);
        };
        let rank = dump.identity.rank.context("a dump names no rank")?;
        let pickle = past.lengthen(dump).to_pickle();
        let path = out.join(format!("nccl_trace_rank_{rank}"));
        std::fs::write(&path, &pickle)
            .with_context(|| format!("cannot write {}", path.display()))?;
        bytes += pickle.len() as u64;
    }
}

/// The cost of a run.
struct Cost {
    took: Duration,
    /// Peak resident memory, bytes.
    peak: u64,
    code: Option<i32>,
}

fn measure(args: &MeasureArgs) -> anyhow::Result<()> {
    let mut bytes = 0;
    let mut files = 0u32;
    for item in std::fs::read_dir(&args.dir).with_context(|| args.dir.display().to_string())? {
        bytes += item?.metadata()?.len();
        files += 1;
    }
    let analyzer = std::env::current_exe()?.with_file_name("rcomm-fr");
    ensure!(
        analyzer.is_file(),
        "{} is not there; build it first: cargo build --release -p rcomm-analyzer",
        analyzer.display()
    );
    let limit = Duration::from_secs(args.limit);
    let report = tempfile::NamedTempFile::new()?;
    let mut ours = Command::new(analyzer);
    ours.args(["analyze", "--format", "json", "-o"])
        .args([report.path(), &args.dir])
        .stdout(Stdio::null());
    let first = run(&mut ours, limit)?;
    // The second run finds all files in the page cache.
    let ours = run(&mut ours, limit)?;
    ensure!(
        first.code == ours.code,
        "the two runs ended with different exit codes"
    );
    let report: rcomm_analyzer::Report = serde_json::from_slice(&std::fs::read(report.path())?)?;
    println!("{files} files, {:.1} MB", bytes as f64 / 1e6);
    if let Some(finding) = report.findings.first() {
        println!("{} {}", finding.code, finding.sentence);
    }
    println!("program        seconds   entries/s      MB/s   peak MB");
    let entries = report.input.entries;
    show("rcomm-fr", &ours, entries, bytes);
    let Some(python) = std::env::var_os("RCOMM_TEST_PYTHON") else {
        eprintln!("skipped: torchfrtrace (RCOMM_TEST_PYTHON names no Python with torch)");
        return Ok(());
    };
    let mut theirs = Command::new(python);
    theirs
        .args(["-m", "torch.distributed.flight_recorder.fr_trace"])
        .arg(&args.dir)
        .args(["-p", "nccl_trace_rank_"])
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let theirs = run(&mut theirs, limit)?;
    show("torchfrtrace", &theirs, entries, bytes);
    println!(
        "torchfrtrace takes {:.1} times as long, and {:.1} times the memory",
        theirs.took.as_secs_f64() / ours.took.as_secs_f64(),
        theirs.peak as f64 / ours.peak as f64
    );
    Ok(())
}

fn show(program: &str, cost: &Cost, entries: u64, bytes: u64) {
    let seconds = cost.took.as_secs_f64();
    println!(
        "{program:<13}{seconds:>9.2}{:>12.0}{:>10.1}{:>10.1}{}",
        entries as f64 / seconds,
        bytes as f64 / 1e6 / seconds,
        cost.peak as f64 / 1e6,
        match cost.code {
            Some(0 | 1) => String::new(),
            Some(code) => format!("  exit code {code}"),
            None => "  stopped at the limit, or killed".to_owned(),
        }
    );
}

/// Runs a program to its end, or to the limit.
fn run(command: &mut Command, limit: Duration) -> anyhow::Result<Cost> {
    let began = Instant::now();
    let mut child = command
        .spawn()
        .with_context(|| format!("cannot start {}", command.get_program().display()))?;
    let mut peak = 0;
    let code = loop {
        // The peak only grows, so the last reading misses no more than a few milliseconds.
        peak = peak.max(peak_bytes(&child));
        if let Some(status) = child.try_wait()? {
            break status.code();
        }
        if began.elapsed() > limit {
            child.kill()?;
            child.wait()?;
            break None;
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    Ok(Cost {
        took: began.elapsed(),
        peak,
        code,
    })
}

/// The highest amount of memory that the process has had resident; 0 once it is gone.
fn peak_bytes(child: &Child) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id()));
    let status = status.unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}
