//! Tests the list of unfinished operations, on simulated jobs.

use rcomm_analyzer::format::bytes;
use rcomm_analyzer::print::{html, human};
use rcomm_analyzer::simulate::{Simulation, Situation};
use rcomm_analyzer::{InstanceReport, InstanceState, Policy, Report, SeqKind, analyze};
use rcomm_recorder::model::{Entry, EntryState};
use rcomm_recorder::publish::Dump;

/// The dumps of 16 ranks, 10 s after the beginning of the step in which rank 13 of the simulated job stops.
fn dumps() -> Vec<Dump> {
    let simulation = Simulation::new(Situation::StuckRank, 16, 0);
    simulation.dumps_at(simulation.fault_ns() + 10_000_000_000)
}

/// The index of a group in a dump.
fn index_of(dump: &Dump, name: &str) -> u32 {
    let mut groups = dump.groups.iter();
    let index = groups.position(|known| known.info.name == name);
    index.expect("the simulation has this group") as u32
}

/// Appends a collective that has been issued and not started, after the newest of the group.
fn issue_another(dump: &mut Dump, name: &str) {
    let index = index_of(dump, name);
    let newest = dump.entries.iter().rfind(|entry| entry.group == index);
    let newest = newest.expect("the rank has an operation on it");
    let entry = Entry {
        record_id: dump.entries.last().map_or(0, |last| last.record_id) + 1,
        collective_seq_id: newest.collective_seq_id + 1,
        state: EntryState::Scheduled,
        time_discovered_started_ns: 0,
        time_discovered_completed_ns: 0,
        ..newest.clone()
    };
    dump.entries.push(entry);
}

fn instances_on<'a>(report: &'a Report, name: &str) -> Vec<&'a InstanceReport> {
    let instances = report.in_flight.iter();
    instances
        .filter(|instance| instance.group.name == name)
        .collect()
}

#[test]
fn a_collective_that_a_member_has_not_started_is_queued() {
    let mut dumps = dumps();
    for rank in [2, 10] {
        issue_another(&mut dumps[rank], "dp_2");
        issue_another(&mut dumps[rank], "dp_2");
    }
    let report = analyze(&dumps, &Policy::default());
    let states: Vec<_> = instances_on(&report, "dp_2")
        .iter()
        .map(|instance| (instance.joined.len(), instance.state, instance.is_blocked()))
        .collect();
    assert_eq!(states, [(2, InstanceState::Queued, false); 2]);
}

#[test]
fn different_sizes_of_a_collective_are_both_noted() {
    let mut dumps = dumps();
    let dump = &mut dumps[3];
    let index = index_of(dump, "tp_0");
    let newest = dump.entries.iter().rposition(|entry| entry.group == index);
    let newest = newest.expect("the rank has an operation on it");
    let mut signature = dump.signatures[dump.entries[newest].signature as usize].clone();
    let passed = signature.input_bytes();
    for size in (signature.input_sizes.iter_mut()).chain(&mut signature.output_sizes) {
        size[0] += 1;
    }
    let more = signature.input_bytes();
    dump.entries[newest].signature = dump.signatures.len() as u32;
    dump.signatures.push(signature);
    let report = analyze(&dumps, &Policy::default());
    let sizes: Vec<_> = instances_on(&report, "tp_0")
        .iter()
        .map(|instance| (instance.least_bytes, instance.bytes))
        .collect();
    assert_eq!(sizes, [(Some(passed), more)]);
    let others = report.in_flight.iter();
    let others = others.filter(|instance| instance.group.name != "tp_0");
    assert!(others.map(|it| it.least_bytes).all(|least| least.is_none()));
    let both = format!("{} or {}", bytes(passed), bytes(more));
    let layout = human::Layout {
        width: 240,
        detail: human::Detail::Verbose,
    };
    let (mut text, mut page) = (Vec::new(), Vec::new());
    human::write(&report, &layout, &mut text).expect("memory takes the report");
    html::write(&report, &dumps, &mut page).expect("memory takes the page");
    for (written, cell) in [(text, both.clone()), (page, format!("<td>{both}"))] {
        let written = String::from_utf8(written).expect("the report is text");
        assert_eq!(written.matches(&cell).count(), 1, "{written}");
    }
}

#[test]
fn a_message_is_complete_with_two_ranks_and_who_is_missing_is_named() {
    let mut report = analyze(&dumps(), &Policy::default());
    let message = &mut report.in_flight[0];
    message.seq_kind = SeqKind::P2pSeqId;
    (message.joined, message.missing) = (vec![1], vec![5]);
    report.in_flight.truncate(1);
    let layout = human::Layout {
        width: 240,
        detail: human::Detail::Verbose,
    };
    let (mut text, mut page) = (Vec::new(), Vec::new());
    human::write(&report, &layout, &mut text).expect("memory takes the report");
    html::write(&report, &[], &mut page).expect("memory takes the page");
    for (written, joined, missing) in [(text, " 1/2 ", " rank 5"), (page, "<td>1/2", "<td>rank 5")]
    {
        let written = String::from_utf8(written).expect("the report is text");
        assert!(written.contains(joined), "{written}");
        assert!(written.contains(missing), "{written}");
    }
}
