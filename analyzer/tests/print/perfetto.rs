//! Tests that the timeline keeps to the rules of the trace format.

use crate::sample;
use rcomm_analyzer::export::perfetto;
use rcomm_analyzer::load::{LoadOptions, load_all};
use rcomm_analyzer::simulate::{Simulation, Situation};
use rcomm_analyzer::{Policy, analyze};
use rcomm_recorder::model::OpType;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// The trace of a simulated job, 10 s after its fault.
fn trace(situation: Situation, ranks: u32) -> Value {
    let simulation = Simulation::new(situation, ranks, 0);
    let dumps = simulation.dumps_at(simulation.fault_ns() + 10_000_000_000);
    let mut out = Vec::new();
    perfetto::write(&dumps, &sample::stuck(), &mut out).unwrap();
    serde_json::from_slice(&out).unwrap()
}

/// The events of one phase, which is what the trace format calls the kind of an event.
fn events<'a>(trace: &'a Value, phase: &'a str) -> impl Iterator<Item = &'a Value> {
    let events = trace["traceEvents"].as_array().unwrap();
    events.iter().filter(move |event| event["ph"] == phase)
}

/// The process and the thread of an event.
fn track(event: &Value) -> (u64, u64) {
    (
        event["pid"].as_u64().unwrap(),
        event["tid"].as_u64().unwrap(),
    )
}

/// The start and the end of a slice, µs.
fn span(event: &Value) -> (f64, f64) {
    let start = event["ts"].as_f64().unwrap();
    (start, start + event["dur"].as_f64().unwrap())
}

#[test]
fn slices_of_one_track_never_overlap() {
    let trace = trace(Situation::StuckRank, 16);
    let mut tracks: BTreeMap<(u64, u64), Vec<(f64, f64)>> = BTreeMap::new();
    for slice in events(&trace, "X") {
        tracks.entry(track(slice)).or_default().push(span(slice));
    }
    assert!(tracks.len() >= 32, "only {} tracks", tracks.len());
    for (track, mut slices) in tracks {
        slices.sort_by(|a, b| a.0.total_cmp(&b.0));
        for pair in slices.windows(2) {
            // Decimal µs are precise to a tenth of a ns.
            assert!(pair[0].1 <= pair[1].0 + 1e-4, "{track:?}: {pair:?}");
        }
    }
}

#[test]
fn every_track_and_process_has_a_name() {
    let trace = trace(Situation::StuckRank, 16);
    let used: BTreeSet<_> = events(&trace, "X").map(track).collect();
    let named: BTreeSet<_> = events(&trace, "M")
        .filter(|event| event["name"] == "thread_name")
        .map(track)
        .collect();
    assert!(used.is_subset(&named));
    let processes: BTreeSet<u64> = events(&trace, "M")
        .filter(|event| event["name"] == "process_name")
        .map(|event| event["pid"].as_u64().unwrap())
        .collect();
    assert_eq!(processes, (0..16).collect());
}

#[test]
fn each_arrow_leads_from_the_last_to_arrive_into_a_waiting_slice() {
    let trace = trace(Situation::Straggler, 16);
    let starts: BTreeMap<u64, &Value> = events(&trace, "s")
        .map(|event| (event["id"].as_u64().unwrap(), event))
        .collect();
    let ends: Vec<&Value> = events(&trace, "f").collect();
    assert!(!ends.is_empty());
    assert_eq!(
        starts.len(),
        ends.len(),
        "an arrow has one start and one end"
    );
    let slices: Vec<((u64, u64), (f64, f64))> = events(&trace, "X")
        .map(|slice| (track(slice), span(slice)))
        .collect();
    let is_in_slice = |event: &Value| {
        let (event_track, time) = (track(event), event["ts"].as_f64().unwrap());
        slices
            .iter()
            .any(|&(track, (start, end))| track == event_track && start <= time && time <= end)
    };
    for end in ends {
        let start = starts[&end["id"].as_u64().unwrap()];
        assert_eq!(end["bp"], "e");
        assert_ne!(start["pid"], end["pid"]);
        assert!(is_in_slice(start), "{start}");
        assert!(is_in_slice(end), "{end}");
    }
}

#[test]
fn a_send_and_the_end_of_a_batch_have_their_number_among_messages() {
    for (op, is_p2p) in [(OpType::Send, false), (OpType::Coalesced, true)] {
        let simulation = Simulation::new(Situation::Healthy, 4, 0);
        let mut dumps = simulation.dumps_at(3_000_000_000);
        let newest = dumps[2].entries.last_mut().unwrap();
        (newest.op, newest.is_p2p, newest.p2p_seq_id) = (op, is_p2p, 1000);
        let mut out = Vec::new();
        perfetto::write(&dumps, &sample::stuck(), &mut out).unwrap();
        let trace: Value = serde_json::from_slice(&out).unwrap();
        let mut numbers = events(&trace, "X").filter_map(|slice| slice["args"].get("p2p_seq_id"));
        assert!(numbers.any(|number| *number == 1000), "{op:?}");
    }
}

#[test]
fn pending_operations_reach_to_the_end_and_say_so() {
    let trace = trace(Situation::StuckRank, 16);
    let ends = events(&trace, "X").map(|slice| span(slice).1);
    let last_end = ends.fold(0.0, f64::max);
    let pending: Vec<&Value> = events(&trace, "X")
        .filter(|slice| slice["name"].as_str().unwrap().ends_with("(pending)"))
        .collect();
    assert!(!pending.is_empty());
    for slice in pending {
        assert!((span(slice).1 - last_end).abs() < 1e-3, "{slice}");
    }
}

#[test]
fn operations_that_the_gloo_recorder_retired_are_neither_failed_nor_pending() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/worker_servers");
    let (loaded, _) = load_all(&[folder.into()], &LoadOptions::default()).unwrap();
    let dumps: Vec<_> = loaded.into_iter().map(|loaded| loaded.dump).collect();
    let mut out = Vec::new();
    perfetto::write(&dumps, &sample::stuck(), &mut out).unwrap();
    let trace: Value = serde_json::from_slice(&out).unwrap();
    let mut slices: BTreeMap<&str, usize> = BTreeMap::new();
    for slice in events(&trace, "X") {
        let name = slice["name"].as_str().unwrap();
        *slices.entry(name).or_default() += 1;
        let has_no_length = slice["dur"].as_f64().unwrap() == 0.0;
        assert!(has_no_length || name.ends_with("(pending)"), "{slice}");
    }
    let expected = [
        ("all_reduce #1", 4),
        ("all_reduce #2", 4),
        ("all_reduce #3", 4),
        ("all_reduce #4", 4),
        ("all_reduce #5", 4),
        ("all_reduce #6 (pending)", 3),
    ];
    assert_eq!(slices, BTreeMap::from(expected));
}

#[test]
fn root_findings_are_marked_on_the_ranks_at_fault() {
    let trace = trace(Situation::StuckRank, 16);
    // For each mark, the code of the finding and the rank.
    let marks: Vec<(&str, u64)> = events(&trace, "i")
        .map(|mark| {
            let name = mark["name"].as_str().unwrap();
            (&name[..4], mark["pid"].as_u64().unwrap())
        })
        .collect();
    assert_eq!(marks, [("E101", 6)]);
}

#[test]
fn a_job_without_records_is_a_trace_without_events() {
    let mut out = Vec::new();
    perfetto::write(&[], &sample::inconclusive(), &mut out).unwrap();
    let trace: Value = serde_json::from_slice(&out).unwrap();
    assert_eq!(trace["traceEvents"], Value::Array(vec![]));
}

#[test]
fn every_message_is_an_arrow_from_its_send_to_its_receive() {
    let folder = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../tests/fixtures/dumps/cascade-2x2x2/pickle"
    );
    let (loaded, _) = load_all(&[folder.into()], &LoadOptions::default()).unwrap();
    let dumps: Vec<_> = loaded.into_iter().map(|loaded| loaded.dump).collect();
    let report = analyze(&dumps, &Policy::default());
    let mut out = Vec::new();
    perfetto::write(&dumps, &report, &mut out).unwrap();
    let trace: Value = serde_json::from_slice(&out).unwrap();
    let tracks = |phase| {
        let arrows = events(&trace, phase).filter(|event| event["cat"] == "message");
        arrows.map(track).collect::<Vec<_>>()
    };
    let has_slice = |on: (u64, u64), name: &str| {
        events(&trace, "X")
            .any(|slice| track(slice) == on && slice["name"].as_str().unwrap().starts_with(name))
    };
    let (sources, targets) = (tracks("s"), tracks("f"));
    assert!(!sources.is_empty() && sources.len() == targets.len());
    assert!(sources.iter().all(|&source| has_slice(source, "send")));
    assert!(targets.iter().all(|&target| has_slice(target, "recv")));
    let mut arrows = sources.iter().zip(&targets);
    assert!(arrows.all(|(source, target)| source.0 != target.0));
}
