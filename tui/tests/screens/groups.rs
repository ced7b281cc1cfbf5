//! The table of groups, the screen of one group, clicks on rows, and the steps of reducers.

use super::common::{press, recorded, showing, with_reducer_steps};
use rcomm_analyzer::simulate::Situation;
use rcomm_analyzer::{Report, SeqKind};
use rcomm_top::state::event::Event;
use rcomm_top::state::screen::Screen;
use rcomm_top::state::update;
use rcomm_top::view::text;
use std::fmt::Write as _;
use std::sync::Arc;

#[test]
fn pending_messages_of_a_group_are_counted() {
    let mut snapshot = recorded(Situation::StuckRank);
    let report = Arc::make_mut(&mut snapshot.report);
    report.in_flight[0].seq_kind = SeqKind::P2pSeqId;
    report.in_flight[0].joined.truncate(1);
    // The group has no collective in flight besides the message.
    let of_message = &report.in_flight[0].group;
    if let Some(row) = report
        .groups
        .iter_mut()
        .find(|row| row.group == *of_message)
    {
        row.in_flight = 0;
    }
    let screen = text::of(&showing(snapshot, (120, 40)));
    assert!(screen.contains(" 1 (1/2) "), "{screen}");
}

#[test]
fn groups_that_share_a_label_are_distinguished_by_their_ranks() {
    let mut snapshot = recorded(Situation::StuckRank);
    let mut report = Report::clone(&snapshot.report);
    let relabel = |group: &mut rcomm_analyzer::GroupRef| {
        if group.desc == "dp" {
            group.name = "dp".into();
        }
    };
    report
        .groups
        .iter_mut()
        .for_each(|it| relabel(&mut it.group));
    (report.in_flight.iter_mut()).for_each(|it| relabel(&mut it.group));
    report
        .waits
        .iter_mut()
        .for_each(|it| relabel(&mut it.group));
    let findings = report.findings.iter_mut();
    findings.for_each(|it| it.group.iter_mut().for_each(relabel));
    snapshot.report = Arc::new(report);
    let mut state = showing(snapshot, (120, 40));
    let screen = text::of(&state);
    assert!(screen.contains("! dp of 5,13,21,29 "), "{screen}");
    assert!(screen.contains("  dp                x7"), "{screen}");
    press(&mut state, "2<enter>");
    let screen = text::of(&state);
    assert!(screen.contains("dp of 5,13,21,29  4 ranks"), "{screen}");
    let trail = " 2:groups > group dp of 5,13,21,29 ";
    assert!(screen.contains(trail), "{screen}");
}

#[test]
fn a_folded_row_has_the_mark_of_its_worst_rank() {
    // All ranks have completed the same collectives, so they share a row. The ranks of one host, which is not the
    // first, are late in every step.
    let mut state = showing(recorded(Situation::Straggler), (120, 40));
    press(&mut state, "2<enter>");
    let screen = text::of(&state);
    let row = screen.lines().find(|line| line.contains(" x32 "));
    assert!(
        row.is_some_and(|row| row.starts_with("~ 0-31 ")),
        "{screen}"
    );
}

#[test]
fn a_click_selects_a_row_and_another_opens_it() {
    let mut state = showing(recorded(Situation::StuckRank), (80, 24));
    press(&mut state, "2");
    let screen = text::of(&state);
    let row = screen
        .lines()
        .position(|line| line.starts_with("! "))
        .expect("a row is marked");
    let row = u16::try_from(row).expect("the screen has few rows");
    assert!(state.hit(5, row).is_some());
    assert_eq!(state.hit(5, 0), None);
    update(&mut state, Event::Click(5, row));
    update(&mut state, Event::Click(5, row));
    assert!(
        matches!(state.screen(), Screen::Group(_)),
        "{:?}",
        state.screen()
    );
}

#[test]
fn the_newest_step_of_each_reducer_is_shown() {
    let mut all = String::new();
    for size in [(80, 24), (120, 40)] {
        let mut state = showing(with_reducer_steps(recorded(Situation::Healthy)), size);
        press(&mut state, "0");
        let _ = writeln!(all, "=== {size:?}\n{}", text::of(&state));
        press(&mut state, "/rank:0-3<enter>");
        assert_eq!(text::of(&state).matches(" of 3: ").count(), 4);
    }
    let mut state = showing(recorded(Situation::Healthy), (80, 24));
    press(&mut state, "0");
    let _ = writeln!(all, "=== none\n{}", text::of(&state));
    insta::assert_snapshot!(all);
}
