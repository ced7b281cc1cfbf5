//! Effects of keys, commands and new snapshots on the state.

mod common;

use common::{START_NS, judged, options, press, recorded, showing, simulation};
use rcomm_analyzer::simulate::{Simulation, Situation};
use rcomm_analyzer::{Code, InstanceState, Problem, Report, Snapshot};
use rcomm_top::state::event::{Command, Event, ExportFormat};
use rcomm_top::state::screen::Screen;
use rcomm_top::state::screens::OverviewPane;
use rcomm_top::state::{State, update};
use rcomm_top::view::text;
use std::path::PathBuf;
use std::sync::Arc;

fn stuck() -> State {
    showing(recorded(Situation::StuckRank), (100, 30))
}

#[test]
fn enter_drills_from_the_finding_to_the_rank_and_esc_comes_back() {
    let mut state = stuck();
    press(&mut state, "<enter>");
    assert!(
        matches!(state.screen(), Screen::Finding(1)),
        "{:?}",
        state.screen()
    );
    press(&mut state, "<enter>");
    let culprit = simulation(Situation::StuckRank).culprit();
    assert_eq!(*state.screen(), Screen::Rank(culprit));
    press(&mut state, "<esc><esc>");
    assert_eq!(*state.screen(), Screen::Overview);
}

#[test]
fn e_opens_the_screen_of_the_focused_pane_whatever_the_number_of_rows() {
    let mut seen_in_flight = false;
    for rows in [20, 24, 30, 34, 50] {
        let panes = showing(recorded(Situation::StuckRank), (100, rows))
            .page
            .panes;
        for (index, pane) in panes.iter().enumerate() {
            let mut state = showing(recorded(Situation::StuckRank), (100, rows));
            press(&mut state, &"<tab>".repeat(index));
            press(&mut state, "e");
            let title = &pane.title;
            let expected = match title.split([':', ' ']).next() {
                Some("warnings") => Screen::Warnings,
                Some("groups") => Screen::Groups,
                Some("in") => Screen::InFlight,
                Some("why") => Screen::Why(None),
                Some("look" | "last") => Screen::Rank(simulation(Situation::StuckRank).culprit()),
                Some("ranks") => Screen::Ranks,
                // The trends have no screen.
                _ => Screen::Overview,
            };
            seen_in_flight |= rows < 36 && expected == Screen::InFlight;
            assert_eq!(*state.screen(), expected, "{title} of {rows} rows");
        }
    }
    assert!(
        seen_in_flight,
        "no terminal of few rows shows what is in flight"
    );
}

#[test]
fn the_focus_stays_on_its_pane_when_others_appear_above_it() {
    let mut state = showing(recorded(Situation::Healthy), (100, 24));
    let panes = state.page.panes.iter();
    let index = panes.take_while(|pane| pane.title != "groups").count();
    press(&mut state, &"<tab>".repeat(index));
    // The trends go, and what is in flight comes.
    let mut stuck = recorded(Situation::StuckRank);
    stuck.job = state.snapshot().expect("a snapshot is shown").job.clone();
    update(&mut state, Event::Observed(Arc::new(stuck)));
    assert_ne!(state.selection().pane, index);
    press(&mut state, "e");
    assert_eq!(*state.screen(), Screen::Groups);
}

#[test]
fn the_focus_and_the_selection_stay_when_an_operation_fails_or_the_suspect_changes() {
    let stuck = recorded(Situation::StuckRank);
    let snapshot_with = |change: &dyn Fn(&mut Report)| {
        let mut changed = stuck.clone();
        change(Arc::make_mut(&mut changed.report));
        Arc::new(changed)
    };
    let failed = snapshot_with(&|report| report.in_flight[0].state = InstanceState::Failed);
    let calm = snapshot_with(&|report| report.findings.clear());
    let other = snapshot_with(&|report| report.findings[0].culprit_ranks = vec![3]);
    for (view, pane, later) in [
        ("1", "in_flight", failed),
        ("4", "last_operations", calm),
        ("1", "look_further", other),
    ] {
        let mut state = showing(stuck.clone(), (200, 50));
        press(&mut state, view);
        let panes = state.page.panes.iter();
        let index = panes.take_while(|it| it.name() != pane).count();
        press(&mut state, &format!("{}<down>", "<tab>".repeat(index)));
        let before = (state.selection().row, state.page.panes[index].title.clone());
        update(&mut state, Event::Observed(later));
        let focused = &state.page.panes[state.selection().pane];
        assert_eq!(focused.name(), pane);
        assert_ne!(focused.title, before.1);
        assert_eq!(state.selection().row, before.0, "{pane}");
    }
}

#[test]
fn the_focus_stays_on_the_ranks_when_they_are_shown_by_host() {
    let mut state = showing(recorded(Situation::StuckRank), (80, 24));
    let panes = state.page.panes.iter();
    let index = panes.take_while(|pane| pane.name() != "ranks").count();
    press(&mut state, &"<tab>".repeat(index));
    let many = Simulation::new(Situation::StuckRank, 512, START_NS).with_window(24);
    let mut many = judged(&many, many.fault_ns() + 60_000_000_000);
    many.job = state.snapshot().expect("a snapshot is shown").job.clone();
    update(&mut state, Event::Observed(Arc::new(many)));
    let focused = &state.page.panes[state.selection().pane];
    assert!(
        focused.title.starts_with("ranks, by host  #=ok"),
        "{}",
        focused.title
    );
    press(&mut state, "e");
    assert_eq!(*state.screen(), Screen::Ranks);
}

#[test]
fn the_focus_stays_on_its_pane_when_the_last_operations_come_and_go_above_it() {
    let few = recorded(Situation::StuckRank);
    let mut many = few.clone();
    let mut report = Report::clone(&many.report);
    for more in 1..=20 {
        let mut instance = report.in_flight[0].clone();
        instance.seq += more;
        report.in_flight.push(instance);
    }
    many.report = Arc::new(report);
    let focused = |state: &State| state.page.panes[state.selection().pane].name();
    let mut state = showing(few.clone(), (200, 50));
    press(&mut state, "4<tab><tab><down>");
    assert_eq!((state.page.panes.len(), &*focused(&state)), (4, "timeline"));
    update(&mut state, Event::Observed(Arc::new(many.clone())));
    assert_eq!((state.page.panes.len(), &*focused(&state)), (3, "timeline"));
    // It was the same while another view was shown.
    press(&mut state, "1");
    update(&mut state, Event::Observed(Arc::new(few)));
    press(&mut state, "4");
    assert_eq!((state.page.panes.len(), &*focused(&state)), (4, "timeline"));
    assert_eq!(state.selection().row, 1);
    // A pane that is gone gives the focus to the one in its place.
    press(&mut state, &"<tab>".repeat(3));
    assert!(focused(&state).starts_with("last_operations"));
    update(&mut state, Event::Observed(Arc::new(many)));
    assert_eq!(focused(&state), "timeline");
}

#[test]
fn a_click_on_the_details_of_a_row_keeps_that_row() {
    let mut two = recorded(Situation::StuckRank);
    let mut report = Report::clone(&two.report);
    let mut other = report.findings[0].clone();
    (other.id, other.code) = (other.id + 1, Code::E112);
    report.findings.push(other);
    two.report = Arc::new(report);
    let mut state = showing(two, (100, 30));
    press(&mut state, "6");
    let screen = text::of(&state);
    let row = screen.lines().position(|line| line.contains("E112"));
    let row = u16::try_from(row.expect("the finding has a row")).expect("it is on the screen");
    update(&mut state, Event::Click(2, row));
    let details = |state: &State| state.page.panes[1].name();
    assert_eq!(details(&state), "E112");
    let screen = text::of(&state);
    let title = screen.lines().position(|line| line.starts_with("─ E112"));
    let title = u16::try_from(title.expect("the details have a title")).expect("on the screen");
    update(&mut state, Event::Click(2, title + 1));
    assert_eq!((state.selection().pane, &*details(&state)), (1, "E112"));
}

#[test]
fn panes_of_the_first_screen_stay_while_operations_come_and_go() {
    let titles = |state: &State| {
        let panes = state.page.panes.iter();
        panes.map(|pane| pane.name()).collect::<Vec<_>>()
    };
    let few = recorded(Situation::StuckRank);
    let mut many = few.clone();
    let mut report = Report::clone(&many.report);
    for more in 1..=12 {
        let mut instance = report.in_flight[0].clone();
        instance.seq += more;
        report.in_flight.push(instance);
    }
    many.report = Arc::new(report);
    let observe = |state: &mut State, snapshot: &Snapshot| {
        update(state, Event::Observed(Arc::new(snapshot.clone())));
    };
    let titles_of_few = titles(&showing(few.clone(), (100, 30)));
    let titles_of_many = titles(&showing(many.clone(), (100, 30)));
    assert!(
        titles_of_few.len() > titles_of_many.len(),
        "{titles_of_few:?} {titles_of_many:?}"
    );
    let mut state = showing(few.clone(), (100, 30));
    observe(&mut state, &many);
    assert_eq!(titles(&state), titles_of_many);
    // The rows that were needed once stay, so that nothing moves when the operations are there again.
    observe(&mut state, &few);
    assert_eq!(titles(&state), titles_of_many);
    // Another terminal is arranged anew, but nothing comes or goes while a row is selected.
    update(&mut state, Event::Resize(101, 30));
    assert_eq!(titles(&state), titles_of_few);
    press(&mut state, "<tab><down>");
    observe(&mut state, &many);
    assert_eq!(titles(&state), titles_of_few);
    press(&mut state, &"<tab>".repeat(titles_of_few.len() - 1));
    observe(&mut state, &many);
    assert_eq!(titles(&state), titles_of_many);
}

#[test]
fn a_note_has_no_screen_but_the_explanation_of_its_code() {
    let mut snapshot = recorded(Situation::Healthy);
    let mut report = Report::clone(&snapshot.report);
    report.problems.push(Problem {
        code: Code::N306,
        path: String::new(),
        sentence: "ranks take turns at being late".into(),
        more_paths: vec![],
    });
    snapshot.report = Arc::new(report);
    for key in ["!", "<enter>"] {
        let mut state = showing(snapshot.clone(), (100, 30));
        press(&mut state, &format!("6{key}"));
        assert_eq!(*state.screen(), Screen::Explained(Code::N306), "{key}");
    }
}

#[test]
fn a_filter_applies_while_it_is_typed_and_esc_restores_the_previous_one() {
    let mut state = stuck();
    press(&mut state, "2");
    let all = state.page.rows(0);
    press(&mut state, "/group:dp_5");
    assert!(state.page.rows(0) < all);
    press(&mut state, "<esc>");
    assert_eq!(state.page.rows(0), all);
    press(&mut state, "/group:dp_5<enter>");
    assert_eq!(state.filter.text(), "group:dp_5");
    // At the top, esc clears the filter.
    press(&mut state, "<esc><esc>");
    assert!(state.filter.is_empty());
}

#[test]
fn an_invalid_filter_is_explained_and_hides_nothing() {
    let mut state = stuck();
    press(&mut state, "2");
    let all = state.page.rows(0);
    press(&mut state, "/hots:n07<enter>");
    let screen = text::of(&state);
    assert!(screen.contains("unknown key `hots`"), "{screen}");
    assert_eq!(state.page.rows(0), all);
}

#[test]
fn problems_only_hides_rows_without_problems() {
    let mut state = stuck();
    press(&mut state, "2");
    let all = state.page.rows(0);
    press(&mut state, "z");
    assert!(state.page.rows(0) < all && state.page.rows(0) > 0);
}

#[test]
fn pausing_keeps_the_frame_and_stepping_goes_through_frames() {
    let mut state = showing(recorded(Situation::Healthy), (100, 30));
    let at = state.snapshot().expect("a snapshot is shown").at;
    press(&mut state, " ");
    for number in 1..=20u64 {
        let mut next = recorded(Situation::StuckRank);
        next.number += number;
        next.at.elapsed = at.elapsed + std::time::Duration::from_secs(number);
        update(&mut state, Event::Observed(Arc::new(next)));
    }
    assert!(
        text::of(&state).contains("PAUSED 1/21"),
        "{}",
        text::of(&state)
    );
    press(&mut state, ".");
    assert!(text::of(&state).contains("PAUSED 2/21"));
    press(&mut state, ">");
    assert!(text::of(&state).contains("PAUSED 12/21"));
    press(&mut state, "<,");
    assert!(text::of(&state).contains("PAUSED 1/21"));
    assert!(!text::of(&state).contains("STUCK"));
    press(&mut state, "L");
    let screen = text::of(&state);
    assert!(
        screen.contains("LIVE") && screen.contains("STUCK"),
        "{screen}"
    );
}

#[test]
fn a_muted_warning_leaves_the_first_screen_and_comes_back() {
    let mut state = showing(recorded(Situation::Straggler), (100, 30));
    assert!(text::of(&state).contains("W220"));
    press(&mut state, "a");
    assert!(state.muted.contains(&Code::W220));
    assert!(!text::of(&state).contains("W220"), "{}", text::of(&state));
    press(&mut state, ":mute W220<enter>");
    assert!(text::of(&state).contains("W220"));
}

#[test]
fn following_goes_to_the_suspect_as_soon_as_there_is_one() {
    let mut state = showing(recorded(Situation::Healthy), (100, 30));
    press(&mut state, "f");
    assert_eq!(*state.screen(), Screen::Overview);
    update(
        &mut state,
        Event::Observed(Arc::new(recorded(Situation::StuckRank))),
    );
    let culprit = simulation(Situation::StuckRank).culprit();
    assert_eq!(*state.screen(), Screen::Rank(culprit));
}

#[test]
fn sorting_goes_by_columns_and_back_to_the_default_order() {
    let mut state = stuck();
    press(&mut state, "2:sort ranks<enter>");
    let largest =
        |state: &State| state.table().expect("the screen has a table").rows[0].cells[2].value;
    assert_eq!(largest(&state), 32.0);
    press(&mut state, "S");
    assert!(largest(&state) < 32.0);
    press(&mut state, "S:sort<enter>");
    assert!(state.table().expect("the screen has a table").rows[0].problem);
    press(&mut state, ":sort nothing<enter>");
    assert!(text::of(&state).contains("no column named"));
}

#[test]
fn writing_needs_permission_and_confirmation() {
    let mut state = stuck();
    assert_eq!(press(&mut state, "d"), None);
    assert!(text::of(&state).contains("--allow-actions"));
    state.options.allow_actions = true;
    assert_eq!(press(&mut state, "d"), None);
    assert!(text::of(&state).contains("[y] yes"));
    assert_eq!(press(&mut state, "n"), None);
    assert_eq!(press(&mut state, "d"), None);
    let folder = PathBuf::from("rcomm-dumps");
    assert_eq!(press(&mut state, "y"), Some(Command::WriteRecords(folder)));
}

#[test]
fn copy_and_export_are_commands_to_the_event_loop() {
    let mut state = stuck();
    press(&mut state, "2");
    let Some(Command::Copy(line)) = press(&mut state, "y") else {
        panic!("a selected row can be copied");
    };
    assert!(line.starts_with("dp_5  4  49/48"), "{line}");
    let export = press(&mut state, "xperfetto out.json<enter>");
    let path = PathBuf::from("out.json");
    assert_eq!(export, Some(Command::Export(ExportFormat::Perfetto, path)));
}

#[test]
fn n_goes_from_problem_to_problem_and_reports_if_there_is_none() {
    let mut state = stuck();
    press(&mut state, "2Gn");
    assert!(state.table().expect("the screen has a table").rows[state.selection().row].problem);
    let mut healthy = showing(recorded(Situation::Healthy), (100, 30));
    press(&mut healthy, "2n");
    assert!(text::of(&healthy).contains("no row here shows a problem"));
}

#[test]
fn the_footer_and_the_help_show_changed_keys() {
    let changes = [("why".to_owned(), vec!["W".to_owned()])].into();
    let mut options = options();
    options.keymap = rcomm_top::keys::Keymap::with(&changes).expect("the key is free");
    let mut state = State::new(options, (120, 70), Default::default());
    update(
        &mut state,
        Event::Observed(Arc::new(recorded(Situation::StuckRank))),
    );
    assert!(text::of(&state).contains("[W]why"));
    press(&mut state, "?");
    let help = text::of(&state);
    assert!(
        help.lines()
            .any(|line| line.contains(" W ") && line.contains("causal chain"))
    );
    press(&mut state, "?");
    assert_eq!(*state.screen(), Screen::Overview);
}

#[test]
fn texts_in_records_cannot_move_the_cursor_of_the_terminal() {
    let mut snapshot = recorded(Situation::StuckRank);
    snapshot.job = "evil\x1b[2J\x07job".into();
    let state = showing(snapshot, (100, 30));
    let buffer = text::buffer(&state);
    for cell in buffer.content() {
        assert!(
            !cell.symbol().contains(char::is_control),
            "{:?}",
            cell.symbol()
        );
    }
}

#[test]
fn an_operation_of_a_graph_is_listed_with_the_graph_id() {
    let mut snapshot = recorded(Situation::Healthy);
    let dump = Arc::make_mut(&mut Arc::make_mut(&mut snapshot.ranks)[3].dumps[0]);
    let newest = dump.entries.last_mut().expect("it has operations");
    newest.graph_id = Some(7);
    let mut state = showing(snapshot, (100, 30));
    press(&mut state, ":rank 3<enter>");
    assert_eq!(*state.screen(), Screen::Rank(3));
    let screen = text::of(&state);
    assert_eq!(screen.matches("in graph 7").count(), 1, "{screen}");
    press(&mut state, "<esc>:rank 4<enter>");
    let screen = text::of(&state);
    assert!(!screen.contains("in graph"), "{screen}");
}

#[test]
fn quit_and_suspend_are_commands_to_the_event_loop() {
    let mut state = stuck();
    assert_eq!(press(&mut state, "q"), Some(Command::Quit));
    assert_eq!(press(&mut state, ":quit<enter>"), Some(Command::Quit));
    assert_eq!(update(&mut state, Event::Terminate), Some(Command::Quit));
    assert_eq!(update(&mut state, Event::Suspend), Some(Command::Suspend));
}

#[test]
fn the_manual_lists_every_key() {
    let manual = include_str!("../../docs/TOP.md");
    for binding in rcomm_top::keys::BINDINGS {
        let keys: Vec<String> = binding.keys.iter().map(|key| format!("`{key}`")).collect();
        let line = format!("| {} | {} |", keys.join(" "), binding.help);
        assert!(manual.contains(&line), "docs/TOP.md lacks: {line}");
    }
}

#[test]
fn columns_and_panes_are_those_of_the_configuration() {
    let mut state = showing(recorded(Situation::StuckRank), (120, 40));
    assert!(text::of(&state).contains("seq last/min"));
    let wanted = ["oldest", "group", "no such column"].map(str::to_owned);
    state.options.columns = [("groups".to_owned(), wanted.into())].into();
    state.options.layout = vec![OverviewPane::Groups, OverviewPane::Ranks];
    press(&mut state, "1");
    let screen = text::of(&state);
    let headings = screen
        .lines()
        .find(|line| line.contains("oldest"))
        .expect("the headings of columns are shown");
    assert_eq!(
        headings.split_whitespace().collect::<Vec<_>>(),
        ["oldest", "group"]
    );
    assert!(
        !screen.contains("warnings:") && !screen.contains("in flight"),
        "{screen}"
    );
    // The key that opens the screen of a pane follows the pane to its new position.
    press(&mut state, "e");
    assert_eq!(*state.screen(), Screen::Groups);
    press(&mut state, "2<enter>");
    assert!(
        matches!(state.screen(), Screen::Group(_)),
        "{:?}",
        state.screen()
    );
}

#[test]
fn ranks_are_asked_for_dumps_only_if_they_support_it() {
    let mut state = stuck();
    state.options.allow_actions = true;
    press(&mut state, "d");
    assert!(!text::of(&state).contains("[r]"));
    assert_eq!(press(&mut state, "r"), None);
    state.options.askable = true;
    press(&mut state, "d");
    assert!(text::of(&state).contains("[r] ask the ranks for dumps"));
    assert_eq!(press(&mut state, "r"), Some(Command::AskForDumps));
}
