//! The table of groups, the screen of one group, operations in flight and the last ones, clicks on rows, and the steps
//! of reducers.

use super::common::{press, recorded, showing, with_reducer_steps};
use rcomm_analyzer::simulate::Situation;
use rcomm_analyzer::{Code, InstanceState, Report, SeqKind};
use rcomm_top::state::event::Event;
use rcomm_top::state::screen::Screen;
use rcomm_top::state::{State, update};
use rcomm_top::view::text;
use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

#[test]
fn pending_messages_of_a_group_are_counted() {
    let mut snapshot = recorded(Situation::StuckRank);
    let report = Arc::make_mut(&mut snapshot.report);
    report.in_flight[0].seq_kind = SeqKind::P2pSeqId;
    report.in_flight[0].joined.truncate(1);
    // The group has no collective in flight besides the message.
    let group_of_message = &report.in_flight[0].group;
    if let Some(row) = report
        .groups
        .iter_mut()
        .find(|row| row.group == *group_of_message)
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
fn groups_in_which_a_rank_is_late_are_marked_and_first() {
    // The ranks 16 to 23 of one host are late in every step.
    let mut state = showing(recorded(Situation::Straggler), (120, 40));
    press(&mut state, "2");
    let screen = text::of(&state);
    let rows = |start: &str| {
        let rows = screen.lines().filter(|line| line.starts_with(start));
        rows.count()
    };
    let first = screen.lines().position(|line| line.starts_with("~ "));
    let others = screen.lines().position(|line| line.starts_with("  tp"));
    assert!(first < others && first.is_some(), "{screen}");
    // A group of late ranks only waits for none of them.
    assert_eq!(rows("~ tp"), 0, "{screen}");
}

#[test]
fn ranks_that_are_late_do_not_share_a_row_with_others() {
    // All ranks have completed the same, and those of one host, not the first, are late in every step.
    let mut state = showing(recorded(Situation::Straggler), (120, 40));
    press(&mut state, "2<enter>");
    let screen = text::of(&state);
    let late = screen.lines().find(|line| line.starts_with("~ "));
    assert!(late.is_some_and(|row| row.contains(" x8 ")), "{screen}");
    let others = screen.lines().find(|line| line.contains(" x24 "));
    assert!(
        others.is_some_and(|row| row.starts_with("  0-15,24-31 ")),
        "{screen}"
    );
}

#[test]
fn heads_of_columns_are_whole_and_include_the_oldest_pending_operation() {
    let mut snapshot = recorded(Situation::StuckRank);
    let report = Arc::make_mut(&mut snapshot.report);
    // As if a collective 20 before the newest were pending.
    let index = report.in_flight.iter().position(|it| it.group.desc == "dp");
    let index = index.expect("the accused group waits");
    report.in_flight[index].seq -= 20;
    let (seq, group) = {
        let instance = &report.in_flight[index];
        (instance.seq, instance.group.clone())
    };
    report
        .in_flight
        .retain(|it| it.group != group || it.seq == seq);
    let mut state = showing(snapshot, (80, 24));
    press(&mut state, "2");
    press(&mut state, "<enter>");
    let screen = text::of(&state);
    let head = screen
        .lines()
        .find(|line| line.contains(" rank ") && line.contains(" host"));
    let head = head.expect("the matrix has headings");
    for seq in seq - 2..=seq {
        let is_whole = |word: &str| word == seq.to_string();
        assert!(head.split_whitespace().any(is_whole), "{seq}: {screen}");
    }
    assert!(screen.contains(&format!(" of {}", seq + 20)), "{screen}");
}

#[test]
fn a_collective_that_is_not_overdue_is_not_yet_issued() {
    let mut snapshot = recorded(Situation::StuckRank);
    let report = Arc::make_mut(&mut snapshot.report);
    for instance in &mut report.in_flight {
        instance.overdue = false;
    }
    let mut state = showing(snapshot, (80, 24));
    press(&mut state, "2<enter>");
    let screen = text::of(&state);
    assert!(screen.contains("- not yet issued"), "{screen}");
}

#[test]
fn only_overdue_operations_age_between_two_looks() {
    for (overdue, grows) in [(false, false), (true, true)] {
        let mut snapshot = recorded(Situation::StuckRank);
        let report = Arc::make_mut(&mut snapshot.report);
        for instance in &mut report.in_flight {
            instance.overdue = overdue;
            instance.age_ms = Some(104.0);
        }
        for group in &mut report.groups {
            group.oldest_ms = group.oldest_ms.map(|_| 104.0);
        }
        for keys in ["2", "4"] {
            let mut state = showing(snapshot.clone(), (120, 40));
            press(&mut state, keys);
            let screen = text::of(&state);
            assert!(screen.contains("104 ms"), "{keys}: {screen}");
            let mut later = state.now;
            later.elapsed += Duration::from_secs(2);
            later.wall_ns += 2_000_000_000;
            update(&mut state, Event::Tick(later));
            let screen = text::of(&state);
            assert_eq!(screen.contains("104 ms"), !grows, "{keys}: {screen}");
            assert_eq!(screen.contains("2.1 s"), grows, "{keys}: {screen}");
        }
    }
}

#[test]
fn a_collective_does_not_age_because_a_message_of_its_group_is_overdue() {
    let mut snapshot = recorded(Situation::StuckRank);
    let report = Arc::make_mut(&mut snapshot.report);
    for instance in &mut report.in_flight {
        (instance.overdue, instance.age_ms) = (false, Some(104.0));
    }
    for group in &mut report.groups {
        group.oldest_ms = group.oldest_ms.map(|_| 104.0);
    }
    let mut message = report.in_flight[0].clone();
    (message.seq_kind, message.overdue, message.age_ms) = (SeqKind::P2pSeqId, true, Some(9e3));
    report.in_flight.insert(0, message);
    for keys in ["2", "2<enter>"] {
        let mut state = showing(snapshot.clone(), (120, 40));
        press(&mut state, keys);
        let ages = |state: &State| -> Vec<String> {
            let table = state.table().expect("a table is shown");
            let (rows, columns) = (table.rows.iter(), table.columns.iter());
            let is_age = |name: &str| name == "age" || name == "oldest";
            let index = columns.clone().position(|column| is_age(&column.name));
            let index = index.expect("the table has ages");
            rows.map(|row| row.cells[index].text.clone()).collect()
        };
        let before = ages(&state);
        assert!(
            before.iter().any(|age| age != "--" && !age.is_empty()),
            "{before:?}"
        );
        let mut later = state.now;
        later.elapsed += Duration::from_secs(20);
        later.wall_ns += 20_000_000_000;
        update(&mut state, Event::Tick(later));
        assert_eq!(ages(&state), before, "{keys}");
    }
}

#[test]
fn missing_ranks_that_the_table_cuts_are_listed_in_full() {
    let mut snapshot = recorded(Situation::StuckRank);
    let mut state = showing(snapshot.clone(), (80, 24));
    press(&mut state, "4");
    // One rank fits.
    let screen = text::of(&state);
    assert!(
        screen.contains("waiting  rank 21 \n") || screen.contains("waiting  rank 21\n"),
        "{screen}"
    );
    assert_eq!(state.page.panes.len(), 1, "{screen}");
    let report = Arc::make_mut(&mut snapshot.report);
    report.in_flight[0].missing = vec![10, 12, 16, 17, 18, 19, 20, 22];
    let mut state = showing(snapshot, (80, 24));
    press(&mut state, "4");
    let screen = text::of(&state);
    assert!(screen.contains("waiting  ranks 10,12,16"), "{screen}");
    assert!(screen.contains("\nranks 10,12,16-20,22"), "{screen}");
}

#[test]
fn an_error_and_sizes_that_differ_can_be_read_in_full() {
    let mut snapshot = recorded(Situation::StuckRank);
    let report = Arc::make_mut(&mut snapshot.report);
    let first = &mut report.in_flight[0];
    first.state = InstanceState::Failed;
    first.error = Some("rank 2 is gone: its connection was closed while it was inside".into());
    (first.least_bytes, first.bytes) = (Some(128 << 10), 256 << 10);
    let mut state = showing(snapshot, (80, 24));
    press(&mut state, "4o");
    let screen = text::of(&state);
    assert!(screen.contains("closed while it was inside"), "{screen}");
    let mut state = showing(
        state.snapshot().expect("one is shown").as_ref().clone(),
        (120, 40),
    );
    press(&mut state, "4o");
    let screen = text::of(&state);
    assert!(screen.contains("128K or 256K"), "{screen}");
}

#[test]
fn the_last_operations_and_the_command_are_those_of_the_late_rank() {
    let snapshot = recorded(Situation::Straggler);
    let findings = snapshot.report.findings.iter();
    let mut late = findings.filter(|finding| finding.code == Code::W220);
    let rank = late.find_map(|it| it.culprit_ranks.first().copied());
    let rank = rank.expect("a rank is late");
    let dump = snapshot.rank(rank).and_then(|view| view.first_dump());
    let pid = dump.expect("it was read").identity.pid;
    let mut state = showing(snapshot, (200, 50));
    let screen = text::of(&state);
    let look = screen.lines().find(|line| line.contains("look: "));
    assert!(
        look.is_some_and(|it| it.contains(&pid.to_string())),
        "{screen}"
    );
    press(&mut state, "4");
    let screen = text::of(&state);
    assert!(
        screen.contains(&format!("last operations, newest first, of rank {rank} ")),
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

#[test]
fn a_message_says_who_posted_which_end() {
    let mut snapshot = recorded(Situation::StuckRank);
    let group = snapshot
        .report
        .groups
        .iter()
        .find(|it| it.last_seq.is_some());
    let group = group.expect("a group has operations").group.clone();
    let report = Arc::make_mut(&mut snapshot.report);
    report.in_flight.truncate(1);
    let message = &mut report.in_flight[0];
    (message.group, message.seq) = (group.clone(), 81);
    (message.op, message.seq_kind) = ("recv".into(), SeqKind::P2pSeqId);
    (message.joined, message.missing) = (vec![group.ranks[1]], vec![group.ranks[0]]);
    for (overdue, words) in [(true, "never posted"), (false, "has not yet posted")] {
        let mut snapshot = snapshot.clone();
        Arc::make_mut(&mut snapshot.report).in_flight[0].overdue = overdue;
        let mut state = showing(snapshot, (120, 40));
        press(&mut state, &format!(":group {}<enter>", group.name));
        let screen = text::of(&state);
        let posted = format!("oldest: recv #81 of rank {}, 102 s", group.ranks[1]);
        let missing = format!("; rank {} {words} its send; messages", group.ranks[0]);
        assert!(
            screen.contains(&posted) && screen.contains(&missing),
            "{screen}"
        );
    }
}
