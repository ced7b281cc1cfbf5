//! Measures the costs of a large job: time to process and draw a snapshot, time to analyze it, memory. Measures the
//! program while it only displays: time to the first screen, CPU time, memory. Measures the delay from the first
//! overdue operation to the displayed hang.
//!
//! `cargo bench -p rcomm-top --bench scale [judge] [watch] [hang] [RANKS...]` (all of them, with 1,024 and 16,384
//! ranks, by default). `endure MINUTES` instead watches eight ranks for that time and prints the cost every minute.
//! `remember MINUTES` instead makes as many reads of eight rings as in that time, without waiting in between, and
//! prints the memory after each minute's reads.

use portable_pty::{CommandBuilder, PtySize, native_pty_system};
use rcomm_analyzer::simulate::{Simulation, Situation};
use rcomm_analyzer::source::{RingSource, SimulatedSource, Source};
use rcomm_analyzer::{Live, LiveOptions, Moment, analyze};
use rcomm_recorder::model::{OpType, ProcessGroupInfo};
use rcomm_recorder::record::{
    FlightRecorder, GroupHandle, Operation, Placement, RecorderConfig, SignatureKey, SignatureRef,
};
use rcomm_top::keys::Keymap;
use rcomm_top::page::theme::{Depth, Theme, ThemeName};
use rcomm_top::state::event::Event;
use rcomm_top::state::{Options, State, update};
use rcomm_top::view::text;
use std::io::{Read as _, Write as _};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Columns and rows of the terminal.
const SIZE: (u16, u16) = (200, 50);
/// How many times each snapshot is processed and drawn.
const ROUNDS: usize = 3;

fn main() -> std::io::Result<()> {
    let given: Vec<u32> = std::env::args()
        .filter_map(|argument| argument.parse().ok())
        .collect();
    let words: Vec<String> = std::env::args().collect();
    if words.iter().any(|word| word == "endure") {
        return endure(given.first().copied().unwrap_or(10));
    }
    if words.iter().any(|word| word == "remember") {
        return remember(given.first().copied().unwrap_or(60));
    }
    let sizes = if given.is_empty() {
        vec![1024, 16_384]
    } else {
        given
    };
    let asked = ["judge", "watch", "hang"].map(|part| words.iter().any(|word| word == part));
    let [judge, watch, hang] = asked.map(|one| one || asked == [false; 3]);
    if judge {
        for &ranks in &sizes {
            measure(ranks)?;
        }
    }
    if watch {
        watch_small()?;
        for &ranks in &sizes {
            let text = ranks.to_string();
            let demo = ["demo", "healthy", "--ranks", &text];
            self::watch(&format!("{ranks} simulated ranks"), &demo, "demo-healthy")?;
        }
    }
    if hang {
        for &ranks in &sizes {
            show_hang(ranks)?;
        }
    }
    Ok(())
}

/// Prints the cost of watching eight ranks.
fn watch_small() -> std::io::Result<()> {
    with_a_job(|rings| watch("8 ranks on this node", &["--ring-dir", rings], "bench-job"))
}

/// Prints the cost of watching eight ranks in each of this number of minutes.
fn endure(minutes: u32) -> std::io::Result<()> {
    with_a_job(|rings| {
        let mut running = Running::start(&["--ring-dir", rings])?;
        running.wait_for("bench-job")?;
        let pid = running.pid();
        for minute in 1..=minutes {
            let used = cpu_seconds(pid);
            let since = Instant::now();
            while since.elapsed() < Duration::from_secs(60) {
                // Read the output, so that drawing never blocks.
                let _ = running.bytes.recv_timeout(Duration::from_secs(1));
            }
            let share = (cpu_seconds(pid) - used) / since.elapsed().as_secs_f64();
            let mut out = std::io::stdout().lock();
            writeln!(
                out,
                "minute {minute}: {:.2} % of a core, {} MiB",
                share * 100.0,
                resident_mib(&pid.to_string(), "VmRSS:"),
            )?;
        }
        running.end()
    })
}

/// Reads the rings of eight ranks as often as the program does in this number of minutes, at one read a second but
/// without waiting, and prints how much memory this process uses for what it keeps of them.
fn remember(minutes: u32) -> std::io::Result<()> {
    let directory = tempfile::tempdir()?;
    let members: Vec<_> = (0..8).map(|rank| member(directory.path(), rank)).collect();
    let mut seq = 0;
    (0..FIRST_STEPS).for_each(|_| step(&members, &mut seq));
    let mut source = RingSource::new(directory.path().to_owned(), None);
    let mut live = Live::new(LiveOptions::default(), analyze, vec!["rings".into()]);
    let mut state = State::new(options(), SIZE, Moment::default());
    for minute in 1..=minutes {
        for second in 0..60 {
            (0..STEPS_A_SECOND).for_each(|_| step(&members, &mut seq));
            let now = SystemTime::now().duration_since(UNIX_EPOCH);
            let at = Moment {
                elapsed: Duration::from_secs(u64::from(minute) * 60 + second),
                wall_ns: now.map_or(0, |now| now.as_nanos() as i64),
            };
            live.observe(0, source.poll(Instant::now() + READ_LIMIT), at);
            if let Some(snapshot) = live.refresh(at) {
                update(&mut state, Event::Observed(Arc::new(snapshot)));
                text::buffer(&state);
            }
        }
        let (_, frames) = state.history.position();
        let mut out = std::io::stdout().lock();
        writeln!(
            out,
            "minute {minute}: {frames} frames, counted {} MiB; the process holds {} MiB, and {} MiB of rings",
            state.history.bytes() >> 20,
            resident_mib("self", "RssAnon:"),
            resident_mib("self", "RssFile:") + resident_mib("self", "RssShmem:"),
        )?;
    }
    Ok(())
}

/// Calls `look` with the directory of the rings of eight running ranks.
fn with_a_job(look: impl FnOnce(&str) -> std::io::Result<()>) -> std::io::Result<()> {
    let directory = tempfile::tempdir()?;
    let rings = directory.path().display().to_string();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let members: Vec<_> = (0..8).map(|rank| member(directory.path(), rank)).collect();
        scope.spawn(|| run_job(members, &stop));
        let result = look(&rings);
        stop.store(true, Ordering::SeqCst);
        result
    })
}

/// Measures the delay from the first overdue operation of the simulated job to the displayed hang.
fn show_hang(ranks: u32) -> std::io::Result<()> {
    let text = ranks.to_string();
    let mut running = Running::start(&["demo", "stuck", "--ranks", &text])?;
    running.wait_for("STUCK")?;
    // The fault is 4 s after the start. The first operation that hangs is issued 0.15 s later, and is overdue after
    // five more seconds.
    let delay = running.began.elapsed().as_secs_f64() - 9.15;
    let peak = peak_mib(&running.pid().to_string());
    running.end()?;
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "{ranks:>6} ranks: hang shown {delay:.2} s after its first operation was overdue; peak memory {peak} MiB",
    )
}

/// Operations that each rank issues at first, without a pause: more than a ring holds, as in a long job.
const FIRST_STEPS: u64 = 20_000;
/// Operations per second of each rank after that.
const STEPS_A_SECOND: u32 = 100;
/// Time limit of a read, longer than any takes.
const READ_LIMIT: Duration = Duration::from_secs(60);

/// Begins and completes operations on every rank until `stop` is set: the first [`FIRST_STEPS`] without a pause, then
/// at most [`STEPS_A_SECOND`] a second.
fn run_job(members: Vec<(FlightRecorder, GroupHandle)>, stop: &AtomicBool) {
    let mut seq = 0;
    while !stop.load(Ordering::SeqCst) {
        step(&members, &mut seq);
        if seq > FIRST_STEPS {
            std::thread::sleep(Duration::from_secs(1) / STEPS_A_SECOND);
        }
    }
}

/// Begins and completes the next operation on every rank.
fn step(members: &[(FlightRecorder, GroupHandle)], seq: &mut u64) {
    let key = SignatureKey {
        backend: "cpu",
        op_name: "all_reduce",
        ..SignatureKey::default()
    };
    *seq += 1;
    for (recorder, group) in members {
        let operation = Operation {
            collective_seq_id: *seq,
            op_id: *seq,
            ..Operation::new(*group, OpType::AllReduce, SignatureRef::Key(&key))
        };
        let ticket = recorder.begin(&operation);
        recorder.started(ticket);
        recorder.completed(ticket);
        recorder.retired(ticket);
    }
}

/// The recorder of one rank of eight, with its ring in `directory`, and its group.
fn member(directory: &Path, rank: u32) -> (FlightRecorder, GroupHandle) {
    let mut config = RecorderConfig::new("bench-job", rank, 8);
    config.placement = Placement::Dir(directory.to_owned());
    let recorder =
        FlightRecorder::create(&config).expect("a ring can be made in a fresh directory");
    let info = ProcessGroupInfo {
        id: 0,
        name: "0".into(),
        desc: "default_pg".into(),
        ranks: (0..8).collect(),
    };
    let group = recorder.add_group(&info, Duration::from_secs(600));
    (recorder, group)
}

/// Starts the program on a terminal, waits until the screen shows `word`, and prints how long that took and the use of
/// CPU and memory after it.
fn watch(what: &str, arguments: &[&str], word: &str) -> std::io::Result<()> {
    let mut running = Running::start(arguments)?;
    running.wait_for(word)?;
    let first_screen_ms = running.began.elapsed().as_secs_f64() * 1e3;
    let pid = running.pid();
    // Measure after the start, over a few reads; output drawn in the meantime waits in the channel.
    std::thread::sleep(Duration::from_secs(2));
    let (used, since) = (cpu_seconds(pid), Instant::now());
    std::thread::sleep(Duration::from_secs(10));
    let share = (cpu_seconds(pid) - used) / since.elapsed().as_secs_f64();
    let peak = peak_mib(&pid.to_string());
    running.end()?;
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "{what}: first screen after {first_screen_ms:.0} ms, then {:.2} % of a core; peak memory {peak} MiB",
        share * 100.0
    )
}

/// The program on a terminal.
struct Running {
    began: Instant,
    child: Box<dyn portable_pty::Child + Send + Sync>,
    bytes: Receiver<Vec<u8>>,
    screen: vt100::Parser,
    reader: JoinHandle<()>,
}

impl Running {
    fn start(arguments: &[&str]) -> std::io::Result<Self> {
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
        let child = child.map_err(std::io::Error::other)?;
        drop(pair.slave);
        let (sender, bytes) = channel();
        let reader = std::thread::spawn(move || {
            // The master stays open while the reader has it.
            let _master = pair.master;
            let mut buffer = vec![0; 1 << 16];
            while let Ok(n @ 1..) = output.read(&mut buffer) {
                if sender.send(buffer[..n].to_vec()).is_err() {
                    return;
                }
            }
        });
        Ok(Self {
            began,
            child,
            bytes,
            screen: vt100::Parser::new(SIZE.1, SIZE.0, 0),
            reader,
        })
    }

    fn pid(&self) -> u32 {
        self.child.process_id().unwrap_or(0)
    }

    /// Waits until the screen contains this text; fails after a minute without output.
    fn wait_for(&mut self, word: &str) -> std::io::Result<()> {
        while !self.screen.screen().contents().contains(word) {
            let bytes = self.bytes.recv_timeout(Duration::from_secs(60));
            self.screen.process(&bytes.map_err(std::io::Error::other)?);
        }
        Ok(())
    }

    /// Kills the program.
    fn end(mut self) -> std::io::Result<()> {
        // The program may have ended on its own.
        let _ = self.child.kill();
        self.child.wait()?;
        drop(self.bytes);
        // The reader ends with the program. If it panicked, its output is not needed any more.
        let _ = self.reader.join();
        Ok(())
    }
}

/// CPU time in seconds that a process has used.
fn cpu_seconds(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The name in brackets is followed by the state, ten fields, and user and system time.
    let after = stat.rsplit(')').next().unwrap_or_default();
    let ticks = after.split_whitespace().skip(11).take(2);
    let ticks: f64 = ticks.filter_map(|field| field.parse::<f64>().ok()).sum();
    ticks / rustix::param::clock_ticks_per_second() as f64
}

fn options() -> Options {
    Options {
        theme: Theme::new(ThemeName::Dark, Depth::True),
        ascii: false,
        allow_actions: false,
        askable: false,
        stacks_askable: false,
        reads_process_facts: false,
        still: false,
        dumps: false,
        fault_ns: None,
        history: Some(256 << 20),
        keymap: Keymap::default(),
        muted: Default::default(),
        columns: Default::default(),
        layout: vec![],
    }
}

/// Prints the times to process, draw and analyze a snapshot of a simulated job, and the peak memory of this process.
fn measure(ranks: u32) -> std::io::Result<()> {
    let simulation = Simulation::new(Situation::StuckRank, ranks, 0).with_window(64);
    let fault = simulation.fault_ns();
    let at = |ms: i64| Moment {
        elapsed: Duration::from_millis((100_000 + ms) as u64),
        wall_ns: fault + ms * 1_000_000,
    };
    let mut live = Live::new(LiveOptions::default(), analyze, vec!["simulated".into()]);
    let mut state = State::new(options(), SIZE, Moment::default());
    let (mut judging, mut updating, mut drawing) = (vec![], vec![], vec![]);
    // Before the hang, when all records change between reads, and during it.
    for ms in [-18_000, -12_000, -6_000, 60_000, 66_000, 72_000, 78_000] {
        let now = at(ms);
        let mut source = SimulatedSource::new(simulation.clone(), move || now.wall_ns);
        live.observe(0, source.poll(Instant::now()), now);
        let began = Instant::now();
        let snapshot = live.refresh(now).map(Arc::new);
        judging.push(began.elapsed());
        let Some(snapshot) = snapshot else { continue };
        for _ in 0..ROUNDS {
            let began = Instant::now();
            update(&mut state, Event::Observed(snapshot.clone()));
            updating.push(began.elapsed());
            let began = Instant::now();
            text::buffer(&state);
            drawing.push(began.elapsed());
        }
    }
    let worst = |times: &[Duration]| times.iter().max().map_or(0.0, |t| t.as_secs_f64() * 1e3);
    let (slowest_update, slowest_draw) = (worst(&updating), worst(&drawing));
    let ms = |times: &mut Vec<Duration>| {
        times.sort_unstable();
        times[times.len() / 2].as_secs_f64() * 1e3
    };
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "{ranks:>6} ranks: update {:.1} ms (at most {slowest_update:.1}), draw {:.1} ms (at most \
         {slowest_draw:.1}), judge {:.0} ms (medians); peak memory {} MiB",
        ms(&mut updating),
        ms(&mut drawing),
        ms(&mut judging),
        peak_mib("self"),
    )
}

/// The largest resident size of a process so far, in MiB.
fn peak_mib(process: &str) -> u64 {
    resident_mib(process, "VmHWM:")
}

/// A line of `/proc/<process>/status` that counts memory, such as `VmRSS:`, in MiB; 0 if there is none.
fn resident_mib(process: &str, which: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with(which));
    let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    kib.unwrap_or(0) / 1024
}
