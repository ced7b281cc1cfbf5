//! Counts the instructions of hot paths with callgrind and compares them with stored counts. Time depends on what else
//! a machine does; the number of instructions does not, so a path that became longer shows even on a busy one.
//!
//! ```sh
//! cargo build --release -p rcomm-tests --bin instructions
//! target/release/instructions check tests/instructions.tsv
//! ```
//!
//! Each path runs twice, each time in its own process: once with a number of repetitions and once with twice as many.
//! The difference is what the repetitions cost, without start and preparation.
//!
//! Counts belong to the compiler that made the program: with another one, `check` prints them and compares nothing.
//!
//! Exit codes: 0: all counts are within the tolerance, or could not be compared; 1: a path has become longer or could
//! not be counted, or the file could not be read or written; 2: the command line is wrong.
#![expect(
    clippy::print_stdout,
    reason = "a program whose result is what it prints"
)]

use anyhow::{Context, bail, ensure};
use clap::{Parser, Subcommand};
use rcomm::config::{EndpointChoice, RingDir};
use rcomm::{Config, HashStore, ReduceOp, Rendezvous, World};
use rcomm_analyzer::simulate::{Simulation, Situation};
use rcomm_analyzer::{Policy, analyze, print};
use rcomm_recorder::model::{DType, OpType, ProcessGroupInfo};
use rcomm_recorder::publish::{Dump, DumpReader, RingReader};
use rcomm_recorder::record::{
    FlightRecorder, GroupHandle, Operation, Placement, RecorderConfig, SignatureKey, SignatureRef,
    Tensor,
};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::Duration;

#[derive(Debug, Parser)]
#[command(about = "Counts the instructions of hot paths with callgrind")]
struct Cli {
    #[command(subcommand)]
    command: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Count all paths and compare them with the stored counts.
    Check {
        /// The file of counts.
        file: PathBuf,
        /// How much longer a path may be, in percent. The C library and the processor choose the code that copies
        /// memory, so counts differ a little between machines.
        #[arg(long, default_value_t = 5.0)]
        tolerance: f64,
    },
    /// Count all paths and store the counts.
    Store {
        /// The file of counts.
        file: PathBuf,
    },
    /// Run one path; this is what callgrind counts.
    Run {
        /// The path's name.
        path: String,
        /// How often to run it.
        repetitions: u64,
    },
}

/// One repetition of a path; the closure owns what was prepared for it.
type Repeat = Box<dyn FnMut() -> anyhow::Result<()>>;

struct HotPath {
    name: &'static str,
    /// The repetitions that are counted.
    repetitions: u64,
    prepare: fn() -> anyhow::Result<Repeat>,
}

const PATHS: [HotPath; 10] = [
    HotPath {
        name: "record-an-operation",
        repetitions: 2_000,
        prepare: record,
    },
    HotPath {
        name: "record-an-operation-by-signature",
        repetitions: 2_000,
        prepare: record_by_signature,
    },
    HotPath {
        name: "all-reduce-of-one-rank",
        repetitions: 2_000,
        prepare: all_reduce,
    },
    HotPath {
        name: "read-a-ring",
        repetitions: 5,
        prepare: read_ring,
    },
    HotPath {
        name: "read-a-pickled-dump",
        repetitions: 5,
        prepare: || read_dump("nccl-slow-2x4/pickle/rank_0"),
    },
    HotPath {
        name: "read-a-json-dump",
        repetitions: 5,
        prepare: || read_dump("batch-ring-w4/json/rank_0.json"),
    },
    HotPath {
        name: "write-a-pickled-dump",
        repetitions: 5,
        prepare: write_dump,
    },
    HotPath {
        name: "write-a-json-dump",
        repetitions: 5,
        prepare: write_json,
    },
    HotPath {
        name: "align-and-judge",
        repetitions: 2,
        prepare: judge,
    },
    HotPath {
        name: "print-a-report",
        repetitions: 5,
        prepare: print_report,
    },
];

fn main() -> anyhow::Result<ExitCode> {
    match Cli::parse().command {
        Action::Run { path, repetitions } => {
            run(&path, repetitions)?;
            Ok(ExitCode::SUCCESS)
        }
        Action::Check { file, tolerance } => check(&file, tolerance),
        Action::Store { file } => {
            let mut text = format!("# {}\n", compiler()?);
            for path in &PATHS {
                let _ = writeln!(text, "{}\t{}", path.name, count(path)?);
            }
            std::fs::write(&file, &text).with_context(|| file.display().to_string())?;
            print!("{text}");
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn run(name: &str, repetitions: u64) -> anyhow::Result<()> {
    let path = PATHS.iter().find(|path| path.name == name);
    let path = path.with_context(|| format!("no path is named {name}"))?;
    let mut repeat = (path.prepare)()?;
    (0..repetitions).try_for_each(|_| repeat())
}

/// Instructions of one repetition.
fn count(path: &HotPath) -> anyhow::Result<u64> {
    let once = instructions_of_process(path.name, path.repetitions)?;
    let twice = instructions_of_process(path.name, 2 * path.repetitions)?;
    Ok(twice.saturating_sub(once) / path.repetitions)
}

/// Instructions of a process that runs the path this many times.
fn instructions_of_process(name: &str, repetitions: u64) -> anyhow::Result<u64> {
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(std::env::current_exe()?)
        .args(["run", name, &repetitions.to_string()])
        .output()
        .context("valgrind cannot be started: is it installed?")?;
    let text = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{name} failed: {text}");
    let line = text.lines().find_map(|line| line.split_once("Collected :"));
    let (_, number) = line.with_context(|| format!("no count of {name} in: {text}"))?;
    Ok(number.trim().parse()?)
}

/// The compiler's version, which is taken for that of the compiler that made this program.
fn compiler() -> anyhow::Result<String> {
    let output = Command::new("rustc").arg("--version").output();
    let output = output.context("rustc cannot be started")?;
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}

fn check(file: &Path, tolerance: f64) -> anyhow::Result<ExitCode> {
    let text = std::fs::read_to_string(file).with_context(|| file.display().to_string())?;
    let (stored_compiler, stored) = parse(&text)?;
    let compiler = compiler()?;
    let is_comparable = compiler == stored_compiler;
    if !is_comparable {
        println!(
            "the stored counts are of {stored_compiler}, not of {compiler}: nothing is compared"
        );
    }
    println!(
        "{:<34} {:>12} {:>12} {:>8}",
        "path", "stored", "counted", "ratio"
    );
    let mut longer = 0;
    for path in &PATHS {
        let counted = count(path)?;
        let Some(&before) = stored.get(path.name) else {
            bail!("{} has no count of {}", file.display(), path.name);
        };
        let ratio = counted as f64 / before as f64;
        let is_longer = is_comparable && ratio > 1.0 + tolerance / 100.0;
        longer += usize::from(is_longer);
        let remark = match is_longer {
            true => "  LONGER",
            false if is_comparable && ratio < 1.0 - tolerance / 100.0 => "  shorter: store it",
            false => "",
        };
        println!(
            "{:<34} {before:>12} {counted:>12} {ratio:>8.3}{remark}",
            path.name
        );
    }
    if longer > 0 {
        println!("paths that have become longer by more than {tolerance} %: {longer}");
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}

/// The compiler and the counts of a file.
fn parse(text: &str) -> anyhow::Result<(&str, BTreeMap<&str, u64>)> {
    let mut lines = text.lines();
    let first = lines.next().and_then(|line| line.strip_prefix("# "));
    let compiler = first.context("the first line of the file does not name a compiler")?;
    let counts = lines.map(|line| {
        let pair = line.split_once('\t');
        let (name, count) = pair.with_context(|| format!("no name and count: {line}"))?;
        Ok((name, count.parse()?))
    });
    Ok((compiler, counts.collect::<anyhow::Result<_>>()?))
}

const KEY: SignatureKey<'static> = SignatureKey {
    backend: "cpu",
    op_name: "all_reduce",
    inputs: &[Tensor {
        dtype: DType::F32,
        shape: &[4_096, 1_024],
    }],
    outputs: &[Tensor {
        dtype: DType::F32,
        shape: &[4_096, 1_024],
    }],
};

/// A ring that lies in `folder` and has wrapped.
fn ring(folder: &Path) -> anyhow::Result<(FlightRecorder, GroupHandle)> {
    let mut config = RecorderConfig::new("instructions", 0, 8);
    config.placement = Placement::Dir(folder.to_owned());
    let recorder = FlightRecorder::create(&config)?;
    let info = ProcessGroupInfo {
        id: 0,
        name: "0".to_owned(),
        desc: "default_pg".to_owned(),
        ranks: (0..8).collect(),
    };
    let group = recorder.add_group(&info, Duration::from_secs(600));
    for seq in 0..2 * recorder.entries() as u64 {
        let ticket = recorder.begin(&operation(group, SignatureRef::Key(&KEY), seq));
        recorder.completed(ticket);
    }
    Ok((recorder, group))
}

fn operation(group: GroupHandle, signature: SignatureRef<'_>, seq: u64) -> Operation<'_> {
    Operation {
        collective_seq_id: seq,
        op_id: seq,
        timeout: Duration::from_secs(600),
        ..Operation::new(group, OpType::AllReduce, signature)
    }
}

fn record() -> anyhow::Result<Repeat> {
    let folder = tempfile::tempdir()?;
    let (recorder, group) = ring(folder.path())?;
    let id = recorder
        .intern(&KEY)
        .context("the table of signatures is full")?;
    let mut seq = 0;
    Ok(Box::new(move || {
        let _folder = &folder;
        seq += 1;
        let ticket = recorder.begin(black_box(&operation(group, SignatureRef::Id(id), seq)));
        recorder.completed(black_box(ticket));
        Ok(())
    }))
}

fn record_by_signature() -> anyhow::Result<Repeat> {
    let folder = tempfile::tempdir()?;
    let (recorder, group) = ring(folder.path())?;
    let mut seq = 0;
    Ok(Box::new(move || {
        let _folder = &folder;
        seq += 1;
        let key = SignatureRef::Key(black_box(&KEY));
        let ticket = recorder.begin(black_box(&operation(group, key, seq)));
        recorder.completed(black_box(ticket));
        Ok(())
    }))
}

fn all_reduce() -> anyhow::Result<Repeat> {
    let config = Config {
        rendezvous: Some(Rendezvous::explicit(0, 1, "127.0.0.1", 1)?),
        ring_dir: RingDir::Memory,
        endpoint: EndpointChoice::Off,
        ..Config::default()
    };
    let store = Arc::new(HashStore::new());
    let world = World::builder(config).store(store).init()?;
    let mut values = [0.0_f32; 2];
    Ok(Box::new(move || {
        Ok(world
            .group()
            .all_reduce(black_box(&mut values), ReduceOp::Sum)?)
    }))
}

fn read_ring() -> anyhow::Result<Repeat> {
    let folder = tempfile::tempdir()?;
    let (recorder, _) = ring(folder.path())?;
    let found = rcomm_recorder::publish::list_rings(folder.path())?;
    let listing = found.first().context("the ring is not in its folder")?;
    let reader = RingReader::attach(&listing.path)?;
    Ok(Box::new(move || {
        let _kept = (&folder, &recorder);
        black_box(reader.read()?);
        Ok(())
    }))
}

fn fixture(name: &str) -> anyhow::Result<Vec<u8>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("fixtures/dumps")
        .join(name);
    std::fs::read(&path).with_context(|| path.display().to_string())
}

fn read_dump(name: &str) -> anyhow::Result<Repeat> {
    let bytes = fixture(name)?;
    let mut reader = DumpReader::new();
    Ok(Box::new(move || {
        black_box(reader.read(black_box(&bytes))?);
        Ok(())
    }))
}

fn write_dump() -> anyhow::Result<Repeat> {
    let (dump, _) = Dump::read(&fixture("nccl-slow-2x4/pickle/rank_0")?)?;
    Ok(Box::new(move || {
        black_box(black_box(&dump).to_pickle());
        Ok(())
    }))
}

fn write_json() -> anyhow::Result<Repeat> {
    let (dump, _) = Dump::read(&fixture("nccl-slow-2x4/pickle/rank_0")?)?;
    Ok(Box::new(move || {
        black_box(black_box(&dump).to_json());
        Ok(())
    }))
}

/// The dumps of a job of 64 ranks, one of which is stuck.
fn stuck_job() -> Vec<Dump> {
    let simulation = Simulation::new(Situation::StuckRank, 64, 0).with_window(200);
    simulation.dumps_at(simulation.fault_ns() + 60_000_000_000)
}

fn judge() -> anyhow::Result<Repeat> {
    let dumps = stuck_job();
    let policy = Policy::default();
    Ok(Box::new(move || {
        black_box(analyze(black_box(&dumps), &policy));
        Ok(())
    }))
}

fn print_report() -> anyhow::Result<Repeat> {
    let report = analyze(&stuck_job(), &Policy::default());
    Ok(Box::new(move || {
        print::json::write(black_box(&report), &mut std::io::sink())?;
        Ok(())
    }))
}
