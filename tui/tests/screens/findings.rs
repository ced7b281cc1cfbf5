//! What screens say of findings: the explanation of their codes, their doubts, and where the programs diverge.

use super::common::{START_NS, press, recorded, showing};
use rcomm_analyzer::simulate::Situation;
use rcomm_analyzer::{NodeJob, Report, SeqKind, Snapshot, explain};
use rcomm_recorder::publish::Dump;
use rcomm_top::state::event::Event;
use rcomm_top::state::screen::Screen;
use rcomm_top::state::update;
use rcomm_top::view::text;
use std::sync::Arc;

/// A text without the line breaks and indents of a screen.
fn words(screen: &str) -> String {
    screen.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn the_explanation_of_a_code_can_be_read_on_a_terminal_with_few_rows() {
    for situation in [
        Situation::StuckRank,
        Situation::Deadlock,
        Situation::Mismatch,
        Situation::Straggler,
    ] {
        let snapshot = recorded(situation);
        let code = snapshot.report.findings[0].code;
        // From the first screen, the list of warnings and the finding, where a rank is selected.
        for keys in ["!", "6!", "6<enter>!"] {
            let mut state = showing(snapshot.clone(), (80, 24));
            press(&mut state, keys);
            assert_eq!(*state.screen(), Screen::Explained(code), "{keys}");
            let first = text::of(&state);
            assert!(first.contains(&format!("─ what {code} means ")), "{first}");
            let start: Vec<&str> = explain(code).meaning.split(' ').take(12).collect();
            assert!(words(&first).contains(&start.join(" ")), "{first}");
            press(&mut state, "G");
            let last = text::of(&state);
            let action = explain(code)
                .actions
                .last()
                .expect("there is something to do");
            assert!(words(&last).contains(action), "{last}");
        }
    }
    let mut state = showing(recorded(Situation::StuckRank), (80, 24));
    press(&mut state, "6<enter>!<esc>");
    assert!(matches!(state.screen(), Screen::Finding(_)));
}

/// A hang of which the finding is not sure.
fn unsure() -> Snapshot {
    let mut snapshot = recorded(Situation::StuckRank);
    let head = &mut Arc::make_mut(&mut snapshot.report).findings[0];
    head.confidence = 0.6;
    head.doubts = vec!["a checkpoint looks the same".into(), "so does lunch".into()];
    snapshot
}

#[test]
fn every_screen_that_names_the_rank_at_fault_has_the_doubts() {
    let waiting = unsure().report.waits[0].rank;
    // The cause of all, and from a rank that waits; the rank at fault.
    for keys in [
        "w".to_owned(),
        format!(":rank {waiting}<enter>w"),
        ":rank 21<enter>".to_owned(),
    ] {
        let mut state = showing(unsure(), (80, 24));
        press(&mut state, &keys);
        let screen = text::of(&state);
        let doubt = "not sure: a checkpoint looks the same; and 1 other doubt";
        assert!(words(&screen).contains(doubt), "{keys}\n{screen}");
        let mut state = showing(recorded(Situation::StuckRank), (80, 24));
        press(&mut state, &keys);
        let screen = text::of(&state);
        assert!(!screen.contains("not sure"), "{keys}\n{screen}");
    }
    let snapshot = unsure();
    let job = NodeJob {
        name: "other".into(),
        ranks: 32,
        alive: 32,
        created_ns: START_NS,
        report: Some(snapshot.report.clone()),
    };
    let mut state = showing(recorded(Situation::Healthy), (80, 24));
    update(&mut state, Event::Jobs([job].into()));
    press(&mut state, "9");
    let screen = text::of(&state);
    assert!(screen.contains("not sure: a checkpoint"), "{screen}");
}

#[test]
fn the_screen_of_a_rank_says_what_it_is_at_fault_for_and_what_waits_for_it() {
    let mut snapshot = recorded(Situation::StuckRank);
    let mut ranks = snapshot.ranks.to_vec();
    let view = ranks.iter_mut().find(|view| view.rank == 21);
    let view = view.expect("the job has rank 21");
    let mut dump = Dump::clone(&view.dumps[0]);
    let mut status = dump.status.clone().unwrap_or_default();
    status.phase = "load data".into();
    dump.status = Some(status);
    view.dumps[0] = Arc::new(dump);
    snapshot.ranks = ranks.into();
    let next = format!("next: {}", snapshot.report.findings[0].next);
    let mut state = showing(snapshot.clone(), (120, 40));
    press(&mut state, ":rank 21<enter>");
    let screen = text::of(&state);
    let fault = "rank 21 never issued all_reduce #49 on group dp_5";
    for part in [fault, &next, "phase `load data`"] {
        assert!(words(&screen).contains(part), "no {part:?}\n{screen}");
    }
    let waits = |screen: &str| {
        let is_one = |line: &&str| line.contains("dp_5") && line.contains("3/4");
        screen.lines().any(|line| is_one(&line))
    };
    assert!(waits(&screen), "{screen}");
    assert!(!screen.contains("nothing is in flight"), "{screen}");
    // A rank that has nothing to do with them.
    press(&mut state, ":rank 0<enter>");
    let screen = text::of(&state);
    assert!(!waits(&screen) && !screen.contains(fault), "{screen}");
    // The finding of a muted code is not shown.
    press(&mut state, ":mute E101<enter>:rank 21<enter>");
    let screen = text::of(&state);
    assert!(!screen.contains(fault), "{screen}");
}

#[test]
fn both_calls_that_differ_are_shown_where_few_rows_are_left() {
    let mut state = showing(recorded(Situation::Mismatch), (80, 24));
    press(&mut state, "6<enter>");
    let screen = text::of(&state);
    for call in [
        "- reduce_scatter_single [33554432]",
        "+ all_reduce [33554432]",
    ] {
        let mut lines = screen.lines();
        assert!(lines.any(|line| line.starts_with(call)), "{screen}");
    }
}

#[test]
fn two_operations_with_one_number_are_told_apart_in_the_chain_of_waits() {
    let mut snapshot = recorded(Situation::StuckRank);
    let mut report = Report::clone(&snapshot.report);
    let wait = report.waits.iter().find(|wait| wait.on == [21]);
    let first = wait.expect("ranks wait for rank 21").clone();
    let second = report.waits.iter().find(|wait| wait.on == [first.rank]);
    let mut second = second.unwrap_or(&first).clone();
    // A message, and a collective of the same group behind it.
    second.rank = (0..32)
        .find(|rank| ![21, first.rank].contains(rank))
        .expect("the job has more ranks");
    second.on = vec![first.rank];
    (second.group, second.seq) = (first.group.clone(), first.seq);
    (second.op, second.seq_kind) = ("recv".into(), SeqKind::P2pSeqId);
    report.waits = vec![first.clone(), second];
    snapshot.report = Arc::new(report);
    let screen = text::of(&showing(snapshot, (80, 24)));
    let name = format!("{} #{}", first.group.name, first.seq);
    let chain = format!(
        "why: rank 21 <- {} {name} (1 rank waits) <- recv {name} (1 rank waits)",
        first.op
    );
    assert!(words(&screen).contains(&chain), "no {chain:?}\n{screen}");
    // Usually the group and the number are enough.
    let screen = text::of(&showing(recorded(Situation::StuckRank), (80, 24)));
    assert!(
        words(&screen).contains("why: rank 21 <- dp_5 #49 ("),
        "{screen}"
    );
}
