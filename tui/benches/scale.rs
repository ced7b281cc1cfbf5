//! What a large job costs: time to take a snapshot in and to draw it, time to judge, memory.
//!
//! `cargo bench -p rcomm-top --bench scale [RANKS...]` (1,024 and 16,384 if none are given).

use rcomm_analyzer::simulate::{Simulation, Situation};
use rcomm_analyzer::source::{SimulatedSource, Source};
use rcomm_analyzer::{Live, LiveOptions, Moment, analyze};
use rcomm_top::event::Event;
use rcomm_top::keys::Keymap;
use rcomm_top::state::{Options, State, update};
use rcomm_top::text;
use rcomm_top::theme::{Depth, Theme, ThemeName};
use std::io::Write as _;
use std::sync::Arc;
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
    Ok(())
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
