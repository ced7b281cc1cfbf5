//! What helps a user to get from the rank at fault to the cause: the command that inspects its process, facts about the
//! process, and the cursor of the timeline.

mod common;

use common::{options, press, recorded, showing};
use rcomm_analyzer::simulate::Situation;
use rcomm_analyzer::source::{Fact, Liveness, ProcessFacts, TakenStacks};
use rcomm_analyzer::{Code, Finding, Report};
use rcomm_top::state::event::{Command, Event};
use rcomm_top::state::{State, update};
use rcomm_top::view::text;
use std::sync::Arc;
use std::time::Duration;

fn stuck(size: (u16, u16)) -> State {
    showing(recorded(Situation::StuckRank), size)
}

fn fact(about: &'static str, text: &str, notable: bool) -> Fact {
    Fact {
        about,
        text: text.to_owned(),
        notable,
    }
}

#[test]
fn the_first_screen_has_the_command_to_look_further_and_y_copies_it() {
    let mut state = stuck((120, 30));
    let screen = text::of(&state);
    let line = screen
        .lines()
        .find_map(|line| line.trim().strip_prefix("look: "));
    let shown = line.unwrap_or_else(|| panic!("no command in\n{screen}"));
    let command = shown.strip_suffix("  [y] copies").expect("the key follows");
    assert!(
        command.contains(" --pid ") || command.contains("gdb -p "),
        "{command}"
    );
    assert_eq!(
        press(&mut state, "y"),
        Some(Command::Copy(command.to_owned()))
    );
    assert!(!command.starts_with("ssh "), "{command}");
    // A view that does not read the rings of this node, as one of a collector, shows processes of other nodes: on this
    // node, the same process id belongs to another process.
    state.options.reads_process_facts = false;
    match press(&mut state, "y") {
        Some(Command::Copy(elsewhere)) => assert!(elsewhere.starts_with("ssh "), "{elsewhere}"),
        other => panic!("not copied: {other:?}"),
    }
    // A terminal with few rows keeps them for the groups.
    assert!(!text::of(&stuck((80, 20))).contains("look: "));
    // No rank is at fault in a healthy job.
    let healthy = showing(recorded(Situation::Healthy), (120, 30));
    assert!(!text::of(&healthy).contains("look: "));
}

/// The command on a line of the screen that begins with this.
fn command_after(state: &State, begin: &str) -> String {
    let screen = text::of(state);
    let line = screen
        .lines()
        .find_map(|line| line.trim().strip_prefix(begin));
    let command = line
        .unwrap_or_else(|| panic!("no command in\n{screen}"))
        .trim();
    command.trim_end_matches("  [y] copies").to_owned()
}

#[test]
fn y_copies_the_command_that_is_shown_for_a_late_rank_and_on_the_screen_of_any_rank() {
    let snapshot = recorded(Situation::Straggler);
    let late = snapshot.report.findings[0].culprit_ranks[0];
    let mut state = showing(snapshot.clone(), (120, 30));
    let command = command_after(&state, "look: ");
    let copied = Some(Command::Copy(command.clone()));
    assert_eq!(press(&mut state, "y"), copied);
    // Also where there is no row to select.
    press(&mut state, "<tab><tab><tab>");
    let focused = &state.page.panes[state.selection().pane];
    assert_eq!(focused.name(), "ranks");
    assert_eq!(press(&mut state, "y"), copied);
    // A cell of the heat map, and the screens of two ranks.
    let mut state = showing(snapshot, (120, 40));
    let column = late as usize / 8;
    press(&mut state, &format!("3{}", "l".repeat(column)));
    assert_eq!(press(&mut state, "y"), copied, "{}", text::of(&state));
    for rank in [late, 0] {
        press(&mut state, &format!(":rank {rank}<enter>"));
        let command = command_after(&state, "command ");
        assert_eq!(press(&mut state, "y"), Some(Command::Copy(command)));
    }
}

#[test]
fn the_key_to_quit_is_shown_again_once_stacks_are_taken() {
    let mut snapshot = recorded(Situation::StuckRank);
    let mut ranks = snapshot.ranks.to_vec();
    ranks[1].liveness = Liveness::Dead;
    snapshot.ranks = ranks.into();
    let at = snapshot.at;
    let mut state = showing(snapshot, (80, 24));
    state.options.stacks_askable = true;
    assert_eq!(press(&mut state, "t"), Some(Command::TakeStacks));
    let screen = text::of(&state);
    assert!(screen.contains("taking call stacks ..."), "{screen}");
    let taken = TakenStacks {
        taken: vec![0],
        refused: vec![(1, "its process is gone, or is elsewhere".into())],
        ..TakenStacks::default()
    };
    update(&mut state, Event::Stacks(Arc::new(taken), at));
    let screen = text::of(&state);
    let last = screen.lines().last().expect("the screen has lines");
    assert!(last.contains("[q]quit"), "{screen}");
    assert!(
        screen.contains("of 1 of 2 ranks; [t] takes them again"),
        "{screen}"
    );
    // The ring of a rank shows that its process is gone.
    let gone = "rank 1: no stack: its process is gone";
    assert!(
        screen.lines().any(|line| line.trim_end() == gone),
        "{screen}"
    );
}

#[test]
fn the_command_looks_where_the_finding_leads() {
    let command_of = |situation, code| {
        let mut snapshot = recorded(situation);
        let mut report = Report::clone(&snapshot.report);
        // Another finding about the rank may come first.
        let first = report.findings[0].clone();
        report.findings.insert(1, Finding { code, ..first });
        let culprit = report.findings[0].culprit_ranks[0];
        snapshot.report = Arc::new(report);
        let mut state = showing(snapshot, (120, 40));
        press(&mut state, &format!(":rank {culprit}<enter>"));
        command_after(&state, "command ")
    };
    let stuck = command_of(Situation::StuckRank, Code::E101);
    assert!(
        stuck.contains(" dump --pid ") || stuck.starts_with("gdb "),
        "{stuck}"
    );
    let stopped = command_of(Situation::StuckRank, Code::E151);
    assert!(stopped.starts_with("ps -o pid,ppid,stat,"), "{stopped}");
    let late = command_of(Situation::Straggler, Code::W220);
    assert!(late.contains(" record "), "{late}");
}

#[test]
fn no_screen_has_a_command_for_a_call_that_has_returned_with_a_mismatch() {
    let mut snapshot = recorded(Situation::Mismatch);
    for returned in [false, true] {
        if returned {
            let report = Arc::make_mut(&mut snapshot.report);
            let mut rows = report.ranks.iter_mut();
            let row = rows.find(|row| row.rank == 21).expect("rank 21 was read");
            (row.pending, row.failure) = (0, Some("the calls do not match".into()));
        }
        for keys in ["", "6<enter>", ":rank 21<enter>"] {
            let mut state = showing(snapshot.clone(), (120, 30));
            press(&mut state, keys);
            let screen = text::of(&state);
            let shown = screen.contains("--pid") || screen.contains("gdb -p");
            assert_eq!(shown, !returned, "{keys}\n{screen}");
        }
        let mut state = showing(snapshot.clone(), (120, 30));
        match press(&mut state, "y") {
            Some(Command::Copy(copied)) => {
                let is_command = copied.contains("--pid") || copied.contains("gdb -p");
                assert_eq!(is_command, !returned, "{copied}");
            }
            other => panic!("not copied: {other:?}"),
        }
    }
}

#[test]
fn facts_about_the_rank_at_fault_are_read_every_ten_seconds_and_shown() {
    let snapshot = recorded(Situation::StuckRank);
    let at = snapshot.at;
    let mut state = State::new(options(), (120, 40), at);
    state.options.reads_process_facts = true;
    assert_eq!(
        state.due_process_facts(),
        None,
        "asked before a job is known"
    );
    update(&mut state, Event::Observed(Arc::new(snapshot)));
    let rank = state.roots()[0];
    assert_eq!(
        state.due_process_facts(),
        Some(Command::ReadProcessFacts(vec![rank]))
    );
    assert_eq!(
        state.due_process_facts(),
        None,
        "asked again while they are read"
    );
    let facts = ProcessFacts {
        rank,
        facts: vec![
            fact("process", "41 is stopped in do_signal_stop", true),
            fact("memory", "3 GiB of 24 GiB available", false),
        ],
        log: vec!["epoch 3, loss 0.31".to_owned()],
    };
    update(&mut state, Event::ProcessFacts(vec![facts]));
    let later = |seconds| rcomm_analyzer::Moment {
        elapsed: at.elapsed + Duration::from_secs(seconds),
        wall_ns: at.wall_ns + seconds as i64 * 1_000_000_000,
    };
    update(&mut state, Event::Tick(later(5)));
    assert_eq!(
        state.due_process_facts(),
        None,
        "asked again after five seconds"
    );
    for keys in [
        String::new(),
        format!(":rank {rank}<enter>"),
        "16<enter>".to_owned(),
    ] {
        press(&mut state, &keys);
        let shown = text::of(&state);
        let has_line = |text: &str| shown.lines().any(|line| line.starts_with(text));
        assert!(
            has_line("~ process  41 is stopped in do_signal_stop"),
            "{keys}\n{shown}"
        );
        assert!(
            has_line("  memory   3 GiB of 24 GiB available"),
            "{keys}\n{shown}"
        );
        assert!(has_line("  log      epoch 3, loss 0.31"), "{keys}\n{shown}");
    }
    update(&mut state, Event::Tick(later(10)));
    assert_eq!(
        state.due_process_facts(),
        Some(Command::ReadProcessFacts(vec![rank]))
    );
    // If facts about processes cannot be read, as in a replay, they are not requested.
    let mut replay = stuck((120, 40));
    replay.options.reads_process_facts = false;
    assert_eq!(replay.due_process_facts(), None);
}

/// The line of the screen that describes the operation at the cursor.
fn readout(state: &State) -> String {
    let shown = text::of(state);
    let line = shown.lines().find(|line| line.starts_with("rank "));
    line.unwrap_or_else(|| panic!("nothing is described:\n{shown}"))
        .to_owned()
}

fn number(readout: &str) -> u64 {
    let (_, rest) = readout.split_once('#').expect("an operation has a number");
    rest.split(' ')
        .next()
        .and_then(|n| n.parse().ok())
        .expect("the number has digits")
}

#[test]
fn the_cursor_of_the_timeline_goes_from_operation_to_operation() {
    let mut state = stuck((160, 40));
    // Without a cursor, the line describes the newest operation of the first rank, which is the one at fault.
    press(&mut state, "7");
    let rank = state.roots()[0];
    let newest = readout(&state);
    assert!(newest.starts_with(&format!("rank {rank}: ")), "{newest}");
    assert!(
        newest.contains("ended after") && newest.contains(" on "),
        "{newest}"
    );
    press(&mut state, "(");
    assert_eq!(
        readout(&state),
        newest,
        "the cursor does not begin at the newest operation"
    );
    press(&mut state, "((((");
    let earlier = readout(&state);
    assert_ne!(earlier, newest);
    press(&mut state, ")");
    assert_ne!(readout(&state), earlier);
    press(&mut state, "(");
    assert_eq!(readout(&state), earlier);
    // Zooming keeps the cursor at the operation.
    press(&mut state, "++");
    assert_eq!(readout(&state), earlier);
    // Another rank is described when it is selected, here one that waits.
    press(&mut state, "j)))))))))");
    let waits = readout(&state);
    assert!(waits.contains("pending for"), "{waits}");
    assert!(number(&waits) > 0);
    press(&mut state, ")");
    assert!(text::of(&state).contains("no further operation is recorded"));
}

#[test]
fn only_an_overdue_operation_is_pending_for_longer_between_two_looks() {
    for overdue in [true, false] {
        let mut snapshot = recorded(Situation::StuckRank);
        for instance in &mut Arc::make_mut(&mut snapshot.report).in_flight {
            instance.overdue = overdue;
        }
        let mut state = showing(snapshot, (160, 40));
        press(&mut state, "7j");
        let before = readout(&state);
        assert!(before.contains("pending for"), "{before}");
        let mut later = state.now;
        later.elapsed += Duration::from_secs(20);
        later.wall_ns += 20_000_000_000;
        update(&mut state, Event::Tick(later));
        assert_eq!(readout(&state) != before, overdue, "{before}");
    }
}

#[test]
fn a_wide_terminal_has_two_columns_and_a_narrow_one_has_one() {
    let title = |state: &State, name: &str| {
        let shown = text::of(state);
        let mut lines = shown.lines().enumerate();
        lines.find_map(|(row, line)| Some((row, line.find(&format!(" {name}"))?)))
    };
    let wide = stuck((200, 50));
    let (warnings, groups) = (title(&wide, "warnings:"), title(&wide, "groups ─"));
    let ((warnings, _), (groups, _)) = (
        warnings.expect("the pane is shown"),
        groups.expect("the pane is shown"),
    );
    assert_eq!(warnings, groups, "the panes are not in one row");
    let narrow = stuck((120, 50));
    let (warnings, groups) = (title(&narrow, "warnings:"), title(&narrow, "groups ─"));
    assert!(warnings.expect("the pane is shown").0 < groups.expect("the pane is shown").0);
    // A click in the right column gives the pane there the focus.
    let mut wide = wide;
    let row = groups_row(&wide) + 2;
    update(&mut wide, Event::Click(150, row));
    assert_eq!(wide.page.panes[wide.selection().pane].title, "groups");
}

fn groups_row(state: &State) -> u16 {
    let shown = text::of(state);
    let row = shown.lines().position(|line| line.contains(" groups ─"));
    u16::try_from(row.expect("the pane of groups is shown")).expect("the screen has few rows")
}
