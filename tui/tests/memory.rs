//! The history stays within its memory budget, however long the program runs.

mod common;

use common::{judged, moment, showing};
use rcomm_analyzer::simulate::{Simulation, Situation};
use rcomm_analyzer::source::{SimulatedSource, Source};
use rcomm_analyzer::{Live, LiveOptions, Snapshot, analyze};
use rcomm_recorder::model::Entry;
use rcomm_top::state::event::Event;
use rcomm_top::state::history::History;
use rcomm_top::state::update;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// The history's default budget for a job of up to 16 ranks, in bytes.
const BUDGET: usize = 16 << 20;
const RANKS: u32 = 8;
/// Number of newest operations that the record of each rank holds.
const WINDOW: usize = 600;

/// Bytes of the operations in these frames; a dump that frames share counts once.
fn operation_bytes<'a>(frames: impl Iterator<Item = &'a Arc<Snapshot>>) -> usize {
    let mut records = BTreeMap::new();
    for view in frames.flat_map(|frame| frame.ranks.iter()) {
        for dump in &view.dumps {
            let bytes = dump.entries.capacity() * size_of::<Entry>();
            records.insert(Arc::as_ptr(dump).addr(), bytes);
        }
    }
    records.values().sum()
}

#[test]
fn hours_of_frames_stay_within_the_budget_and_the_newest_stay_whole() {
    let simulation = Simulation::new(Situation::Healthy, RANKS, common::START_NS);
    let simulation = simulation.with_window(WINDOW);
    let mut live = Live::new(LiveOptions::default(), analyze, vec!["simulated".into()]);
    let mut state = showing(Snapshot::empty(Default::default()), (80, 24));
    state.history = History::new(None);
    let mut max_bytes = 0;
    // Three hours, with one read every twenty seconds.
    for look in 0..540 {
        let now = simulation.fault_ns() + 60_000_000_000 + look * 20_000_000_000;
        let mut source = SimulatedSource::new(simulation.clone(), move || now);
        let at = moment(&simulation, now);
        live.observe(0, source.poll(Instant::now()), at);
        let snapshot = live.refresh(at).expect("everything changed");
        update(&mut state, Event::Observed(Arc::new(snapshot)));
        max_bytes = max_bytes.max(state.history.bytes());
    }
    assert!(max_bytes <= BUDGET, "{max_bytes}");
    let (_, count) = state.history.position();
    let mut frames = Vec::new();
    for _ in 0..count {
        frames.extend(state.history.shown().cloned());
        state.history.step(-1);
    }
    let entries = |frame: &Arc<Snapshot>| frame.entries() / RANKS as usize;
    let whole = frames.iter().take_while(|frame| entries(frame) == WINDOW);
    let whole = whole.count();
    assert!((5..=30).contains(&whole), "{whole}");
    // Older frames keep the newest 64 operations of each rank.
    assert_eq!((entries(&frames[whole]), count > 40), (64, true), "{count}");
    let operation_bytes = operation_bytes(frames.iter());
    assert!(
        operation_bytes <= state.history.bytes(),
        "{operation_bytes} {}",
        state.history.bytes()
    );
    assert!(
        operation_bytes * 3 > state.history.bytes() * 2,
        "operations are less than two thirds of what is counted"
    );
}

#[test]
fn a_large_job_has_frames_to_go_back_to_though_few_of_them_are_whole() {
    let simulation = Simulation::new(Situation::Healthy, 64, common::START_NS);
    let simulation = simulation.with_window(WINDOW);
    let mut live = Live::new(LiveOptions::default(), analyze, vec!["simulated".into()]);
    let mut state = showing(Snapshot::empty(Default::default()), (80, 24));
    let mut newest = 0;
    for look in 0..24 {
        let now = simulation.fault_ns() + 60_000_000_000 + look * 20_000_000_000;
        let mut source = SimulatedSource::new(simulation.clone(), move || now);
        let at = moment(&simulation, now);
        live.observe(0, source.poll(Instant::now()), at);
        let snapshot = live.refresh(at).expect("everything changed");
        if look == 0 {
            let mut history_of_one = History::new(Some(usize::MAX));
            history_of_one.push(Arc::new(snapshot.clone()));
            newest = history_of_one.bytes();
            // Room for four frames that are whole.
            state.history = History::new(Some(4 * newest));
        }
        update(&mut state, Event::Observed(Arc::new(snapshot)));
    }
    let (_, count) = state.history.position();
    assert!(count > 8, "{count} frames of {newest} bytes");
    let shown = state.history.shown().expect("a frame is shown");
    assert_eq!(shown.entries(), 64 * WINDOW, "the newest frame is whole");
}

#[test]
fn the_frames_of_a_large_job_outlive_a_switch_to_a_small_one() {
    let simulation = Simulation::new(Situation::Healthy, 64, common::START_NS);
    let simulation = simulation.with_window(WINDOW);
    let mut history = History::new(None);
    for look in 0..6 {
        let now = simulation.fault_ns() + 60_000_000_000 + look * 20_000_000_000;
        history.push(Arc::new(judged(&simulation, now)));
    }
    let (_, count) = history.position();
    assert!(history.bytes() > BUDGET, "{}", history.bytes());
    history.push(Arc::new(Snapshot::empty(Default::default())));
    assert_eq!(history.position().1, count + 1);
}

#[test]
fn a_long_pause_keeps_its_frame_within_the_budget() {
    let simulation = Simulation::new(Situation::Healthy, RANKS, common::START_NS);
    let simulation = simulation.with_window(WINDOW);
    let mut live = Live::new(LiveOptions::default(), analyze, vec!["simulated".into()]);
    let mut state = showing(Snapshot::empty(Default::default()), (80, 24));
    state.history = History::new(Some(BUDGET));
    let mut paused_frame = None;
    for look in 0..120 {
        let now = simulation.fault_ns() + 60_000_000_000 + look * 20_000_000_000;
        let mut source = SimulatedSource::new(simulation.clone(), move || now);
        let at = moment(&simulation, now);
        live.observe(0, source.poll(Instant::now()), at);
        let snapshot = live.refresh(at).expect("everything changed");
        update(&mut state, Event::Observed(Arc::new(snapshot)));
        if look == 3 {
            state.history.pause();
            paused_frame = state.history.shown().cloned();
        }
        assert!(state.history.bytes() <= BUDGET, "{look}");
    }
    let shown = state.history.shown().expect("a frame is shown");
    assert!(Arc::ptr_eq(
        shown,
        &paused_frame.expect("the view was paused")
    ));
}
