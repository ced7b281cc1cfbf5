//! Six recorded situations: the dumps come from the simulated job, the reports from `tests/fixtures`, so that a screen
//! test fails only if the screens change, and not if the analysis words a sentence differently. Also functions that
//! make a state and press keys.

#![allow(dead_code, reason = "each test program uses its part")]

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use rcomm_analyzer::simulate::{Simulation, Situation};
use rcomm_analyzer::source::{SimulatedSource, SourceError};
use rcomm_analyzer::{Live, LiveOptions, Moment, Report, Snapshot, Source};
use rcomm_recorder::model::{ReducerBucket, ReducerStep, ReducerTimes};
use rcomm_recorder::publish::Dump;
use rcomm_top::keys::Keymap;
use rcomm_top::page::theme::{Depth, Theme, ThemeName};
use rcomm_top::state::event::{Command, Event};
use rcomm_top::state::{Options, State, update};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// When the simulated jobs begin, ns since the epoch: 14:03:17 UTC on some day.
pub(crate) const START_NS: i64 = 1_700_056_997_000_000_000;

/// Time from the fault to the displayed snapshot, in seconds.
pub(crate) const LATER_S: i64 = 102;

/// The simulated job of a situation, with 32 ranks.
pub(crate) fn simulation(situation: Situation) -> Simulation {
    Simulation::new(situation, 32, START_NS).with_window(96)
}

/// The moment at this wall clock time. When the fault happens, the program has run for an hour.
pub(crate) fn moment(simulation: &Simulation, wall_ns: i64) -> Moment {
    Moment {
        elapsed: Duration::from_nanos((wall_ns - simulation.fault_ns() + 3_600_000_000_000) as u64),
        wall_ns,
    }
}

/// The job at `wall_ns`, as the current analysis reports it.
pub(crate) fn judged(simulation: &Simulation, wall_ns: i64) -> Snapshot {
    let mut live = Live::new(
        LiveOptions::default(),
        rcomm_analyzer::analyze,
        vec!["simulated".into()],
    );
    let mut last = None;
    // One read before the fault and one at `wall_ns`: a rank counts as silent only if it has answered before.
    for wall_ns in [simulation.fault_ns() - 1, wall_ns] {
        let mut source = SimulatedSource::new(simulation.clone(), move || wall_ns);
        let poll: Result<_, SourceError> = source.poll(Instant::now());
        let at = moment(simulation, wall_ns);
        live.observe(0, poll, at);
        last = live.refresh(at).or(last);
    }
    let mut snapshot = last.expect("the first read gives a snapshot");
    snapshot.cost = Duration::from_micros(4200);
    snapshot
}

/// The path of the recorded report of a situation.
pub(crate) fn fixture(situation: Situation) -> PathBuf {
    let name = format!("{}.json", situation.name());
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(name)
}

/// A recorded situation; each is built once per test program.
pub(crate) fn recorded(situation: Situation) -> Snapshot {
    static MADE: Mutex<Vec<(Situation, Snapshot)>> = Mutex::new(Vec::new());
    let mut made = MADE.lock().expect("no test panics while it holds this");
    if let Some((_, known)) = made.iter().find(|(known, _)| *known == situation) {
        return known.clone();
    }
    let snapshot = record(situation);
    made.push((situation, snapshot.clone()));
    snapshot
}

fn record(situation: Situation) -> Snapshot {
    let simulation = simulation(situation);
    let now = simulation.fault_ns() + LATER_S * 1_000_000_000;
    let mut snapshot = judged(&simulation, now);
    let text = std::fs::read_to_string(fixture(situation)).expect("fixtures are checked in");
    let report: Report = serde_json::from_str(&text).expect("fixtures are reports");
    snapshot.report = Arc::new(report);
    snapshot
}

/// The options of a live view with the dark theme and all colors.
pub(crate) fn options() -> Options {
    Options {
        theme: Theme::new(ThemeName::Dark, Depth::True),
        ascii: false,
        allow_actions: false,
        askable: false,
        stacks_askable: false,
        reads_process_facts: true,
        still: false,
        dumps: false,
        fault_ns: None,
        history: None,
        keymap: Keymap::default(),
        muted: Default::default(),
        columns: Default::default(),
        layout: vec![],
    }
}

/// The snapshot with two steps of a reducer on each rank.
pub(crate) fn with_reducer_steps(mut snapshot: Snapshot) -> Snapshot {
    let mut ranks = snapshot.ranks.to_vec();
    for view in &mut ranks {
        let slow = u64::from(view.rank % 4) * 3_000_000;
        let bucket = |index: u32| ReducerBucket {
            index,
            parameters: 12,
            bytes: 25 << 20,
            ready_ns: 20_000_000 * u64::from(index + 1),
            sent_ns: 20_000_000 * u64::from(index + 1),
            communication_ns: 9_000_000 + slow * u64::from(index),
            exposed_ns: if index == 2 { 9_000_000 + slow } else { 0 },
        };
        let step = |number| ReducerStep {
            id: number,
            group: 2,
            ended_ns: START_NS,
            times: ReducerTimes {
                step: number,
                forward_ns: 31_400_000,
                backward_ns: 61_000_000 + slow,
                communication_ns: 27_000_000 + 3 * slow,
                exposed_ns: 9_000_000 + slow,
                bytes: 75 << 20,
                bucket_count: 3,
                ..ReducerTimes::default()
            },
            buckets: (0..3).map(bucket).collect(),
        };
        for dump in &mut view.dumps {
            let mut changed = Dump::clone(dump);
            changed.reducer_steps = vec![step(557), step(558)];
            *dump = Arc::new(changed);
        }
    }
    snapshot.ranks = ranks.into();
    snapshot
}

/// A state that shows `snapshot` on a terminal of `size`.
pub(crate) fn showing(snapshot: Snapshot, size: (u16, u16)) -> State {
    let mut state = State::new(options(), size, snapshot.at);
    update(&mut state, Event::Observed(Arc::new(snapshot)));
    state
}

/// Presses keys: characters as they are; `<enter>`, `<esc>`, `<tab>`, `<down>` and `<backspace>` by name. Returns the
/// command of the last key, if it gave one.
pub(crate) fn press(state: &mut State, keys: &str) -> Option<Command> {
    let mut last = None;
    let mut rest = keys;
    while let Some(c) = rest.chars().next() {
        let named = [
            ("<enter>", KeyCode::Enter),
            ("<esc>", KeyCode::Esc),
            ("<tab>", KeyCode::Tab),
            ("<down>", KeyCode::Down),
            ("<backspace>", KeyCode::Backspace),
        ];
        let (code, length) = named
            .iter()
            .find(|(name, _)| rest.starts_with(name))
            .map_or((KeyCode::Char(c), c.len_utf8()), |(name, code)| {
                (*code, name.len())
            });
        rest = &rest[length..];
        last = update(state, Event::Key(KeyEvent::new(code, KeyModifiers::NONE)));
    }
    last
}
