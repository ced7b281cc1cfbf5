//! What a large job costs: time to take a snapshot in and to draw it, time to judge, memory; and what
//! the program itself costs while somebody merely looks: time to the first screen, share of a core.
//!
//! `cargo bench -p rcomm-top --bench scale [RANKS...]` (1,024 and 16,384 if none are given).

use portable_pty::{CommandBuilder, PtySize, native_pty_system};
use rcomm_analyzer::simulate::{Simulation, Situation};
use rcomm_analyzer::source::{SimulatedSource, Source};
use rcomm_analyzer::{Live, LiveOptions, Moment, analyze};
use rcomm_recorder::model::{OpType, ProcessGroupInfo};
use rcomm_recorder::record::{
    FlightRecorder, GroupHandle, Operation, Placement, RecorderConfig, SignatureKey, SignatureRef,
};
use rcomm_top::event::Event;
use rcomm_top::keys::Keymap;
use rcomm_top::state::{Options, State, update};
use rcomm_top::text;
use rcomm_top::theme::{Depth, Theme, ThemeName};
use std::io::{Read as _, Write as _};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const SIZE: (u16, u16) = (200, 50);
const ROUNDS: usize = 15;

fn main() -> std::io::Result<()> {
    let given: Vec<u32> = std::env::args()
        .filter_map(|argument| argument.parse().ok())
        .collect();
    let sizes = if given.is_empty() {
        vec![1024, 16_384]
    } else {
        given
    };
    for ranks in sizes {
        measure(ranks)?;
    }
    let directory = tempfile::tempdir()?;
    let place = directory.path().display().to_string();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| run_job(directory.path(), &stop));
        let watched = watch("8 ranks on this node", &["--ring-dir", &place], "bench-job");
        stop.store(true, Ordering::SeqCst);
        watched
    })?;
    watch(
        "1,024 simulated ranks",
        &["demo", "healthy", "--ranks", "1024"],
        "demo-healthy",
    )
}

/// Eight ranks that each begin and complete a hundred operations a second.
fn run_job(directory: &Path, stop: &AtomicBool) {
    let members: Vec<_> = (0..8).map(|rank| member(directory, rank)).collect();
    let key = SignatureKey {
        backend: "cpu",
        op_name: "all_reduce",
        ..SignatureKey::default()
    };
    for seq in 1.. {
        if stop.load(Ordering::SeqCst) {
            return;
        }
        for (recorder, group) in &members {
            let operation = Operation {
                collective_seq_id: seq,
                op_id: seq,
                ..Operation::new(*group, OpType::AllReduce, SignatureRef::Key(&key))
            };
            let ticket = recorder.begin(&operation);
            recorder.started(ticket);
            recorder.completed(ticket);
            recorder.retired(ticket);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn member(directory: &Path, rank: u32) -> (FlightRecorder, GroupHandle) {
    let mut config = RecorderConfig::new("bench-job", rank, 8);
    config.placement = Placement::Dir(directory.to_owned());
    let recorder = FlightRecorder::create(&config).expect("a ring in a fresh directory");
    let info = ProcessGroupInfo {
        id: 0,
        name: "0".into(),
        desc: "default_pg".into(),
        ranks: (0..8).collect(),
    };
    let group = recorder.add_group(&info, Duration::from_secs(600));
    (recorder, group)
}

/// Starts the program on a terminal, waits for `word`, and then looks at what it uses.
fn watch(what: &str, arguments: &[&str], word: &str) -> std::io::Result<()> {
    let size = PtySize {
        rows: SIZE.1,
        cols: SIZE.0,
        pixel_width: 0,
        pixel_height: 0,
    };
    let pair = native_pty_system()
        .openpty(size)
        .map_err(std::io::Error::other)?;
    let mut command = CommandBuilder::new(env!("CARGO_BIN_EXE_rcomm-top"));
    command.args(arguments);
    command.env("TERM", "xterm-256color");
    command.env_remove("RCOMM_RING_DIR");
    let mut output = pair
        .master
        .try_clone_reader()
        .map_err(std::io::Error::other)?;
    let began = Instant::now();
    let child = pair.slave.spawn_command(command);
    let mut child = child.map_err(std::io::Error::other)?;
    drop(pair.slave);
    let mut screen = vt100::Parser::new(SIZE.1, SIZE.0, 0);
    let mut buffer = [0; 1 << 16];
    while !screen.screen().contents().contains(word) {
        let read = output.read(&mut buffer)?;
        screen.process(&buffer[..read]);
    }
    let first = began.elapsed();
    let pid = child.process_id().unwrap_or(0);
    let reader = std::thread::spawn(move || while output.read(&mut buffer).is_ok_and(|n| n > 0) {});
    // Past the beginning, over a few looks.
    std::thread::sleep(Duration::from_secs(2));
    let (used, since) = (cpu_seconds(pid), Instant::now());
    std::thread::sleep(Duration::from_secs(10));
    let share = (cpu_seconds(pid) - used) / since.elapsed().as_secs_f64();
    // It may have ended on its own.
    let _ = child.kill();
    child.wait()?;
    drop(pair.master);
    // It reads until the terminal is gone, and has nothing to say.
    let _ = reader.join();
    let first = first.as_secs_f64() * 1e3;
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "{what}: first screen after {first:.0} ms, then {:.2} % of a core",
        share * 100.0
    )
}

/// Processor time that a process has used.
fn cpu_seconds(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // After the name in brackets: state, then eleven fields, then user and system time.
    let after = stat.rsplit(')').next().unwrap_or_default();
    let ticks = after.split_whitespace().skip(11).take(2);
    let ticks: f64 = ticks.filter_map(|field| field.parse::<f64>().ok()).sum();
    ticks / rustix::param::clock_ticks_per_second() as f64
}

fn measure(ranks: u32) -> std::io::Result<()> {
    let simulation = Simulation::new(Situation::StuckRank, ranks, 0).with_window(64);
    let fault = simulation.fault_ns();
    let at = |ms: i64| Moment {
        elapsed: Duration::from_millis(100_000 + ms as u64),
        wall_ns: fault + ms * 1_000_000,
    };
    let mut live = Live::new(LiveOptions::default(), analyze, vec!["simulated".into()]);
    let mut judging = Vec::new();
    let mut snapshots = Vec::new();
    for round in 0..3 {
        let now = at(60_000 + round * 6_000);
        let mut source = SimulatedSource::new(simulation.clone(), move || now.wall_ns);
        live.observe(0, source.poll(Instant::now()), now);
        let began = Instant::now();
        let snapshot = live.refresh(now);
        judging.push(began.elapsed());
        snapshots.extend(snapshot.map(Arc::new));
    }
    let options = Options {
        theme: Theme::new(ThemeName::Dark, Depth::True),
        ascii: false,
        allow_actions: false,
        askable: false,
        still: false,
        history: 256 << 20,
        keymap: Keymap::default(),
        muted: Default::default(),
        columns: Default::default(),
        layout: vec![],
    };
    let mut state = State::new(options, SIZE, snapshots[0].at);
    let mut taking = Vec::new();
    let mut drawing = Vec::new();
    for round in 0..ROUNDS {
        let snapshot = snapshots[round % snapshots.len()].clone();
        let began = Instant::now();
        update(&mut state, Event::Observed(snapshot));
        taking.push(began.elapsed());
        let began = Instant::now();
        text::buffer(&state);
        drawing.push(began.elapsed());
    }
    let ms = |times: &mut Vec<Duration>| {
        times.sort_unstable();
        times[times.len() / 2].as_secs_f64() * 1e3
    };
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "{ranks:>6} ranks: update {:.1} ms, draw {:.1} ms (median of {ROUNDS}); judge {:.0} ms (median of 3); \
         peak memory {} MiB",
        ms(&mut taking),
        ms(&mut drawing),
        ms(&mut judging),
        peak_mib().map_or_else(|| "?".to_owned(), |mib| mib.to_string()),
    )
}

/// The largest resident size of this process so far.
fn peak_mib() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib / 1024)
}
