//! The view that shows why a finding was made (`w`).

use super::common::{press, recorded, showing};
use rcomm_analyzer::simulate::Situation;
use rcomm_analyzer::{Code, InstanceState, Report, Snapshot};
use rcomm_recorder::publish::Dump;
use rcomm_top::state::event::Event;
use rcomm_top::state::screen::Screen;
use rcomm_top::state::update;
use rcomm_top::view::text;
use std::sync::Arc;

/// A recorded hang with one more finding, which accuses these ranks.
fn with_another_finding(culprits: &[u32]) -> Snapshot {
    let mut snapshot = recorded(Situation::StuckRank);
    let mut report = Report::clone(&snapshot.report);
    let mut other = report.findings[0].clone();
    other.id = 99;
    other.code = Code::E151;
    other.sentence = "another thing is wrong".into();
    other.culprit_ranks = culprits.to_vec();
    other.caused_by = None;
    report.findings.insert(1, other);
    snapshot.report = Arc::new(report);
    snapshot
}

/// The text of that view for the second finding.
fn why_of_the_second_finding(snapshot: Snapshot) -> String {
    let mut state = showing(snapshot, (200, 50));
    press(&mut state, "6jw");
    assert!(
        matches!(state.screen(), Screen::Why(Some(_))),
        "{:?}",
        state.screen()
    );
    text::of(&state)
}

#[test]
fn why_of_a_finding_says_what_that_finding_says() {
    let screen = why_of_the_second_finding(with_another_finding(&[5]));
    let lines: Vec<&str> = screen.lines().collect();
    let root = lines.iter().position(|line| line.contains("root: rank 5"));
    let root = root.unwrap_or_else(|| panic!("no root:\n{screen}"));
    assert!(
        lines[root + 1].contains("another thing is wrong"),
        "{screen}"
    );
}

#[test]
fn why_counts_the_root_causes_that_it_has_no_row_for() {
    let culprits: Vec<u32> = (0..12).collect();
    let screen = why_of_the_second_finding(with_another_finding(&culprits));
    assert!(
        screen.contains("4 more ranks") && screen.contains("8-11"),
        "{screen}"
    );
}

#[test]
fn why_shows_the_place_of_the_last_call_and_of_no_other() {
    let mut snapshot = recorded(Situation::StuckRank);
    let mut report = Report::clone(&snapshot.report);
    let mut elsewhere = report.findings[0].frames[0].clone();
    elsewhere.rank = 21;
    elsewhere.filename = "elsewhere.py".into();
    report.findings[0].frames.insert(0, elsewhere);
    snapshot.report = Arc::new(report);
    let mut state = showing(snapshot.clone(), (200, 50));
    press(&mut state, "w");
    let screen = text::of(&state);
    let root = screen.lines().find(|line| line.contains("last recorded"));
    let root = root.unwrap_or_else(|| panic!("no root:\n{screen}"));
    assert!(
        root.contains("barrier #7") && root.contains("train.py:97"),
        "{root}"
    );

    // A second recorder in the process has the newer call.
    let mut ranks = snapshot.ranks.to_vec();
    let view = ranks.iter_mut().find(|view| view.rank == 21);
    let view = view.expect("the job has rank 21");
    let mut newer = Dump::clone(&view.dumps[0]);
    let last = newer.entries.last_mut().expect("the rank issued");
    last.collective_seq_id = 8;
    last.time_created_ns += 1_000;
    last.stack = None;
    view.dumps.push(Arc::new(newer));
    snapshot.ranks = ranks.into();
    let mut state = showing(snapshot, (200, 50));
    press(&mut state, "w");
    let screen = text::of(&state);
    let root = screen.lines().find(|line| line.contains("last recorded"));
    let root = root.unwrap_or_else(|| panic!("no root:\n{screen}"));
    assert!(
        root.contains("barrier #8") && !root.contains("train.py"),
        "{root}"
    );
}

#[test]
fn a_rank_that_is_late_is_called_late_and_not_at_fault() {
    let mut state = showing(recorded(Situation::Straggler), (120, 40));
    press(&mut state, "w");
    let screen = text::of(&state);
    assert!(screen.contains("late: rank"), "{screen}");
    assert!(screen.contains("~ late "), "{screen}");
    assert!(!screen.contains("root"), "{screen}");
    press(&mut state, "6<enter>");
    let screen = text::of(&state);
    assert!(screen.contains("  late"), "{screen}");
    assert!(!screen.contains("at fault"), "{screen}");
}

#[test]
fn why_of_a_mismatch_shows_the_ranks_that_failed_and_the_next_step() {
    let mut snapshot = recorded(Situation::Mismatch);
    let mut report = Report::clone(&snapshot.report);
    // The same job once its operations have failed.
    report.waits.clear();
    for instance in &mut report.in_flight {
        instance.state = InstanceState::Failed;
        instance.error = Some("the calls do not match".into());
    }
    let mut rows = report.ranks.to_vec();
    for row in &mut rows {
        row.pending = 0;
        row.failure = Some("the calls do not match".into());
    }
    report.ranks = rows;
    let finding = &report.findings[0];
    let (group, culprits) = (finding.group.clone(), finding.culprit_ranks.clone());
    let members = group.expect("the finding is about a group").ranks.len();
    assert_eq!(culprits, [21]);
    let next = format!("next: {}", finding.next);
    snapshot.report = Arc::new(report);
    let mut state = showing(snapshot, (200, 50));
    press(&mut state, "w");
    let screen = text::of(&state);
    let root = format!("root: rank 21; {} ranks failed because of it", members - 1);
    for part in [&root, &next, "7 ranks: 16-20,22,23  failed in"] {
        assert!(screen.contains(part), "no {part:?}:\n{screen}");
    }
    // Its line on the first screen.
    update(&mut state, Event::Resize(100, 24));
    press(&mut state, "1");
    let screen = text::of(&state);
    assert!(screen.contains("(7 ranks failed)"), "{screen}");
}
