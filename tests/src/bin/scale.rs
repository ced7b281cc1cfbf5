//! Measures the analyzer's time and memory: makes dumps of very large jobs with a known culprit, and measures
//! `rcomm-fr` on them, and PyTorch's `torchfrtrace` if it is installed; and judges simulated jobs, from summaries and
//! as a live view does.
//!
//! ```sh
//! cargo build --release -p rcomm-analyzer -p rcomm-tests --bins
//! target/release/scale write /tmp/dumps --tp 8 --pp 8 --dp 16
//! RCOMM_TEST_PYTHON=python3 target/release/scale measure /tmp/dumps
//! target/release/scale summaries 100000
//! target/release/scale live 16384
//! ```
#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a program whose result is what it prints"
)]

use anyhow::{Context, bail, ensure};
use clap::{Args, Parser, Subcommand};
use rcomm_analyzer::load::{Loaded, LoadedDump};
use rcomm_analyzer::simulate::{Simulation, Situation};
use rcomm_analyzer::source::{SimulatedSource, Source};
use rcomm_analyzer::{
    Analysis, Extent, Live, LiveOptions, Moment, Policy, Threads, analyze_on_threads, rsum,
};
use rcomm_recorder::publish::{Dump, Recorder};
use rcomm_tests::generator::{Kind, Mix, Past, Recording, Spec, Window};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

#[derive(Debug, Parser)]
#[command(about = "Measures the analyzer on large jobs")]
struct Cli {
    #[command(subcommand)]
    command: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Write the dumps of a job in which one rank hangs, as PyTorch's NCCL recorder does (pickle).
    Write(WriteArgs),
    /// Run `rcomm-fr analyze` on such dumps, and `torchfrtrace` if RCOMM_TEST_PYTHON names a Python with it.
    Measure(MeasureArgs),
    /// Summarize a simulated job host by host, read the summaries and judge them.
    Summaries(SimulatedArgs),
    /// Judge a simulated job again and again, as a live view does.
    Live(SimulatedArgs),
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
    /// Another build of `rcomm-fr` to compare with.
    #[arg(long)]
    also: Option<PathBuf>,
    /// How often each build of `rcomm-fr` runs; they take turns, and medians are shown.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
}

#[derive(Debug, Args)]
struct SimulatedArgs {
    /// The number of ranks.
    ranks: u32,
    /// How many of its newest operations each rank keeps; a simulated rank has issued about 150 when one of them hangs.
    #[arg(long, default_value_t = 64)]
    entries: usize,
}

fn main() -> anyhow::Result<()> {
    match Cli::parse().command {
        Action::Write(args) => write(&args),
        Action::Measure(args) => measure(&args),
        Action::Summaries(args) => summaries(&args),
        Action::Live(args) => live(&args),
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
    let [culprit] = job.culprits()[..] else {
        bail!("no rank of this job can hang: take another --seed");
    };
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
        "{}: {ranks} ranks, {:.1} MB, rank {culprit} hangs",
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

/// Puts the record of each rank into the summary of its host. Each summary is read at once, as an analysis reads the
/// summaries of a fleet.
fn summaries(args: &SimulatedArgs) -> anyhow::Result<()> {
    let simulation = stuck(args);
    let now = simulation.fault_ns() + 60_000_000_000;
    let workers = Arc::new(Threads::new(None));
    let mut analysis = Analysis::new(Policy::default()).with_workers(workers);
    let [mut wrote, mut read] = [Duration::ZERO; 2];
    let (mut bytes, mut hosts) = (0, 0);
    let mut dumps = simulation.each_at(now);
    loop {
        let host_dumps = dumps.by_ref().take(simulation.ranks_per_host() as usize);
        let host_dumps: Vec<LoadedDump> = host_dumps.map(loaded).collect();
        if host_dumps.is_empty() {
            break;
        }
        let began = Instant::now();
        let mut writer = rsum::Writer::new(Vec::new())?;
        host_dumps.iter().try_for_each(|dump| writer.add(dump))?;
        let summary = writer.finish(&Loaded::default())?;
        wrote += began.elapsed();
        bytes += summary.len();
        hosts += 1;
        let began = Instant::now();
        rsum::read(summary.as_slice(), |piece| {
            if let rsum::Piece::Record { dump, path, .. } = piece {
                analysis.add_from(&path, &dump, Extent::Whole);
            }
        })?;
        read += began.elapsed();
    }
    let began = Instant::now();
    let report = analysis.finish();
    let judged = began.elapsed();
    let ranks = f64::from(simulation.ranks());
    if let Some(finding) = report.findings.first() {
        println!("{} {}", finding.code, finding.sentence);
    }
    println!(
        "{ranks} ranks on {hosts} hosts, {} operations: {:.1} MB of summaries, {:.0} bytes a rank",
        report.input.entries,
        bytes as f64 / 1e6,
        bytes as f64 / ranks
    );
    println!(
        "write {:.2} ms a host; read all {:.2} s, judge {:.2} s; peak {:.0} MB",
        wrote.as_secs_f64() * 1e3 / f64::from(hosts),
        read.as_secs_f64(),
        judged.as_secs_f64(),
        peak_bytes_of("self") as f64 / 1e6
    );
    Ok(())
}

fn stuck(args: &SimulatedArgs) -> Simulation {
    Simulation::new(Situation::StuckRank, args.ranks, 0).with_window(args.entries)
}

fn loaded(dump: Dump) -> LoadedDump {
    let rank = dump.identity.rank.unwrap_or(0);
    LoadedDump {
        dump,
        path: format!("/dev/shm/rcomm/demo/rank_{rank}.ring"),
        cut: false,
        written_ns: None,
    }
}

/// Judges before the hang, when all records change between two updates, and during it, when none does.
fn live(args: &SimulatedArgs) -> anyhow::Result<()> {
    const ROUNDS: i64 = 7;
    let simulation = stuck(args);
    let mut live = Live::new(
        LiveOptions::default(),
        analyze_on_threads,
        vec!["simulated".to_owned()],
    );
    let wall_ns = Arc::new(AtomicI64::new(0));
    let clock = wall_ns.clone();
    let mut source =
        SimulatedSource::new(simulation.clone(), move || clock.load(Ordering::Relaxed));
    // An operation lasts 50 ms, and 5 s after the last judgment the ages of the pending ones are due.
    for (state, from_ms, pause_ms) in [("running", -6_000, 700), ("hung", 60_000, 6_000)] {
        let mut took = Vec::new();
        for round in 0..ROUNDS {
            let ms = from_ms + round * pause_ms;
            let at = Moment {
                elapsed: Duration::from_millis((100_000 + ms) as u64),
                wall_ns: simulation.fault_ns() + ms * 1_000_000,
            };
            wall_ns.store(at.wall_ns, Ordering::Relaxed);
            live.observe(0, source.poll(Instant::now()), at);
            let began = Instant::now();
            let snapshot = live.refresh(at);
            ensure!(snapshot.is_some(), "there was nothing to judge at {ms} ms");
            took.push(began.elapsed().as_secs_f64() * 1e3);
        }
        took.sort_by(f64::total_cmp);
        println!(
            "{} ranks, {state}: judge {:.0} ms (median of {ROUNDS}; {:.0} to {:.0})",
            simulation.ranks(),
            took[took.len() / 2],
            took[0],
            took[took.len() - 1]
        );
    }
    println!("peak {:.0} MB", peak_bytes_of("self") as f64 / 1e6);
    Ok(())
}

/// The cost of a run.
struct Cost {
    took: Duration,
    /// The processor time of all threads.
    used: Duration,
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
    let analyze = |program: &Path| {
        let mut command = Command::new(program);
        command
            .args(["analyze", "--format", "json", "-o"])
            .args([report.path(), &args.dir])
            .stdout(Stdio::null());
        run(&mut command, limit)
    };
    // Later runs find all files in the page cache.
    let first = analyze(&analyzer)?;
    let (mut ours, mut others) = (Vec::new(), Vec::new());
    for _ in 0..args.rounds.max(1) {
        if let Some(other) = &args.also {
            others.push(analyze(other)?);
        }
        ours.push(analyze(&analyzer)?);
    }
    ensure!(
        ours.iter().all(|cost| cost.code == first.code),
        "the runs ended with different exit codes"
    );
    let ours = median(ours);
    let report: rcomm_analyzer::Report = serde_json::from_slice(&std::fs::read(report.path())?)?;
    println!("{files} files, {:.1} MB", bytes as f64 / 1e6);
    if let Some(finding) = report.findings.first() {
        println!("{} {}", finding.code, finding.sentence);
    }
    println!("program        seconds  CPU seconds   entries/s      MB/s   peak MB");
    let entries = report.input.entries;
    if let Some(other) = &args.also {
        println!("{}:", other.display());
        show("", &median(others), entries, bytes);
    }
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

/// The median of each number over several runs.
fn median(runs: Vec<Cost>) -> Cost {
    fn middle<T: Ord + Copy>(values: impl Iterator<Item = T>, least: T) -> T {
        let mut values: Vec<T> = values.collect();
        values.sort_unstable();
        values.get(values.len() / 2).copied().unwrap_or(least)
    }
    Cost {
        took: middle(runs.iter().map(|cost| cost.took), Duration::ZERO),
        used: middle(runs.iter().map(|cost| cost.used), Duration::ZERO),
        peak: middle(runs.iter().map(|cost| cost.peak), 0),
        code: runs.first().and_then(|cost| cost.code),
    }
}

fn show(program: &str, cost: &Cost, entries: u64, bytes: u64) {
    let seconds = cost.took.as_secs_f64();
    println!(
        "{program:<13}{seconds:>9.2}{:>13.2}{:>12.0}{:>10.1}{:>10.1}{}",
        cost.used.as_secs_f64(),
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
    let (mut peak, mut used) = (0, Duration::ZERO);
    let code = loop {
        // Both only grow, so the last reading misses no more than a few milliseconds.
        peak = peak.max(peak_bytes_of(&child.id().to_string()));
        used = used.max(used_by(child.id()));
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
        used,
        peak,
        code,
    })
}

/// The highest amount of memory that a process, by its number or `self`, has had resident; 0 once it is gone.
fn peak_bytes_of(process: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status"));
    let status = status.unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

/// The processor time that a process has used; zero once it has been waited for.
fn used_by(process: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    // The name in brackets is followed by the state, ten fields, and user and system time.
    let after = stat.rsplit(')').next().unwrap_or_default();
    let ticks = after.split_whitespace().skip(11).take(2);
    let ticks: u64 = ticks.filter_map(|field| field.parse::<u64>().ok()).sum();
    Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second())
}
