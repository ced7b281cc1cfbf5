//! The views in several sizes, what holds on every screen (no panic, ASCII screens are ASCII, problems show without
//! colors), and details of single screens.

use super::VIEWS;
use super::common::{START_NS, judged, press, recorded, showing};
use rcomm_analyzer::simulate::{Simulation, Situation};
use rcomm_analyzer::{Code, Report};
use rcomm_recorder::model::EntryState;
use rcomm_top::page::theme::{Depth, Theme, ThemeName, Tone};
use rcomm_top::view::text;
use std::fmt::Write as _;
use std::sync::Arc;

fn all_views(situation: Situation, size: (u16, u16)) -> String {
    let mut all = String::new();
    for (name, keys) in VIEWS {
        let mut state = showing(recorded(situation), size);
        // Fold and metric persist between the views of one state, so each view gets a new state.
        press(&mut state, keys);
        let _ = writeln!(all, "=== {name}\n{}", text::of(&state));
    }
    all
}

macro_rules! views {
    ($($test:ident $situation:ident $columns:literal $rows:literal;)+) => {
        $(
            #[test]
            fn $test() {
                insta::assert_snapshot!(all_views(Situation::$situation, ($columns, $rows)));
            }
        )+
    };
}

views! {
    healthy_at_80_by_24 Healthy 80 24;
    healthy_at_120_by_40 Healthy 120 40;
    healthy_at_200_by_50 Healthy 200 50;
    stuck_rank_at_80_by_24 StuckRank 80 24;
    stuck_rank_at_120_by_40 StuckRank 120 40;
    stuck_rank_at_200_by_50 StuckRank 200 50;
    deadlock_at_80_by_24 Deadlock 80 24;
    deadlock_at_120_by_40 Deadlock 120 40;
    deadlock_at_200_by_50 Deadlock 200 50;
    mismatch_at_80_by_24 Mismatch 80 24;
    mismatch_at_120_by_40 Mismatch 120 40;
    mismatch_at_200_by_50 Mismatch 200 50;
    straggler_at_80_by_24 Straggler 80 24;
    straggler_at_120_by_40 Straggler 120 40;
    straggler_at_200_by_50 Straggler 200 50;
    silent_rank_at_80_by_24 SilentRank 80 24;
    silent_rank_at_120_by_40 SilentRank 120 40;
    silent_rank_at_200_by_50 SilentRank 200 50;
}

#[test]
fn no_view_panics_at_tiny_sizes_and_the_verdict_is_dropped_last() {
    for &(situation, _) in Situation::ALL {
        for (columns, rows) in [
            (0, 0),
            (1, 1),
            (2, 2),
            (5, 3),
            (20, 4),
            (40, 1),
            (1, 40),
            (300, 2),
        ] {
            for (_, keys) in VIEWS {
                let mut state = showing(recorded(situation), (columns, rows));
                press(&mut state, keys);
                text::of(&state);
            }
        }
    }
    let state = showing(recorded(Situation::StuckRank), (60, 1));
    assert!(text::of(&state).contains("STUCK"));
}

#[test]
fn the_first_screen_shows_every_rank_from_80_by_24_on() {
    for situation in [Situation::StuckRank, Situation::Deadlock] {
        for size in [(80, 24), (100, 36), (120, 38), (120, 40), (200, 50)] {
            let screen = text::of(&showing(recorded(situation), size));
            let (_, below) = screen.split_once("#=ok").expect("the legend is shown");
            let glyphs = |line: &str| line.chars().filter(|c| ".!#".contains(*c)).count();
            let lines = below.lines().skip(1).filter(|line| !line.contains('['));
            let shown: usize = lines.map(glyphs).sum();
            assert_eq!(shown, 32, "{size:?}\n{screen}");
        }
    }
}

#[test]
fn thousands_of_ranks_do_not_make_a_longer_first_screen() {
    let simulation = Simulation::new(Situation::StuckRank, 2048, START_NS).with_window(24);
    let snapshot = judged(&simulation, simulation.fault_ns() + 60_000_000_000);
    let state = showing(snapshot, (80, 24));
    assert!(text::of(&state).lines().count() <= 24);
    let rows: usize = (0..2).map(|pane| state.page.rows(pane)).sum();
    assert!(rows < 40, "{rows} rows at the top level");
}

#[test]
fn stragglers_that_the_filter_hides_are_not_called_absent() {
    let mut state = showing(recorded(Situation::Straggler), (80, 24));
    press(&mut state, "5/rank:0<enter>");
    let screen = text::of(&state);
    assert!(
        screen.contains("no straggler passes the filter"),
        "{screen}"
    );
}

#[test]
fn a_host_is_not_late_if_the_warning_names_one_of_its_ranks() {
    let mut snapshot = recorded(Situation::Straggler);
    let mut report = Report::clone(&snapshot.report);
    let warning = report.findings.iter_mut().find(|f| f.code == Code::W220);
    warning.expect("it is slow").culprit_ranks = vec![17];
    snapshot.report = Arc::new(report);
    let mut state = showing(snapshot, (80, 24));
    press(&mut state, "5");
    let screen = text::of(&state);
    assert!(!screen.contains("HOST LATE"), "{screen}");
    let row = screen.lines().find(|line| line.contains("RANK LATE"));
    assert!(
        row.is_some_and(|row| row.starts_with("~ 17 ") && row.contains("1/8")),
        "{screen}"
    );
}

#[test]
fn what_was_ruled_out_is_not_cut() {
    let mut snapshot = recorded(Situation::Straggler);
    let mut report = Report::clone(&snapshot.report);
    report.findings[0].ruled_out = vec![format!("chance: {}at last", "word ".repeat(40))];
    snapshot.report = Arc::new(report);
    let mut state = showing(snapshot, (120, 40));
    press(&mut state, "6<enter>");
    let screen = text::of(&state);
    assert!(screen.contains("at last"), "{screen}");
}

#[test]
fn an_operation_that_ended_at_an_unknown_time_is_not_said_to_have_taken_none() {
    let mut snapshot = recorded(Situation::Healthy);
    let mut ranks = snapshot.ranks.to_vec();
    for view in &mut ranks {
        for dump in &mut view.dumps {
            for entry in &mut Arc::make_mut(dump).entries {
                entry.state = EntryState::Scheduled;
                entry.retired = true;
                entry.time_discovered_completed_ns = 0;
            }
        }
    }
    snapshot.ranks = ranks.into();
    let mut state = showing(snapshot, (120, 40));
    press(&mut state, "7");
    let screen = text::of(&state);
    assert!(
        screen.contains("ended at a time that is not recorded"),
        "{screen}"
    );
}

#[test]
fn what_hides_rows_is_named_on_a_narrow_terminal() {
    let mut state = showing(recorded(Situation::StuckRank), (80, 24));
    press(&mut state, "2z");
    let screen = text::of(&state);
    let first = screen.lines().next().unwrap_or_default();
    assert!(first.contains("problems only"), "{first}");
}

#[test]
fn the_footer_always_ends_with_the_key_to_quit() {
    for &(situation, _) in Situation::ALL {
        for columns in [40, 80, 120, 200] {
            let screen = text::of(&showing(recorded(situation), (columns, 24)));
            let footer = screen
                .lines()
                .last()
                .expect("the screen has lines")
                .trim_end();
            assert!(footer.ends_with("[q]quit"), "{screen}");
        }
    }
}

#[test]
fn whether_the_job_is_live_is_never_cut() {
    for (name, keys) in VIEWS {
        let mut snapshot = recorded(Situation::StuckRank);
        snapshot.job = "pretraining-with-a-long-name-1234567".into();
        let mut state = showing(snapshot, (80, 24));
        press(&mut state, keys);
        let screen = text::of(&state);
        let first = screen.lines().next().unwrap_or_default();
        let is_whole = first.contains(" LIVE") || first.contains("PAUSED 1/1");
        assert!(
            is_whole && first.contains(" job pretrain"),
            "{name}: {first}"
        );
    }
}

#[test]
fn a_selected_row_has_one_color_from_edge_to_edge() {
    let mut state = showing(recorded(Situation::StuckRank), (100, 30));
    press(&mut state, "6");
    let buffer = text::buffer(&state);
    let selected = |y: &u16| {
        let modifier = buffer[(0, *y)].modifier;
        modifier.contains(ratatui::style::Modifier::REVERSED)
    };
    let row = (0..buffer.area.height)
        .find(selected)
        .expect("a row is selected");
    let bad = state.options.theme.style(Tone::Bad).fg;
    for x in 0..buffer.area.width {
        let cell = &buffer[(x, row)];
        assert_eq!(Some(cell.fg), bad, "column {x}");
        assert!(cell.modifier.contains(ratatui::style::Modifier::REVERSED));
        assert!(!cell.modifier.contains(ratatui::style::Modifier::DIM));
    }
}

#[test]
fn ascii_screens_hold_nothing_but_ascii() {
    for &(situation, _) in Situation::ALL {
        for (name, keys) in VIEWS {
            let mut state = showing(recorded(situation), (100, 30));
            state.options.ascii = true;
            press(&mut state, keys);
            let screen = text::of(&state);
            assert!(screen.is_ascii(), "{situation:?} {name}\n{screen}");
        }
    }
}

#[test]
fn a_problem_has_a_color_and_a_glyph_and_without_colors_only_the_glyph() {
    let mut state = showing(recorded(Situation::StuckRank), (100, 30));
    press(&mut state, "2");
    let find = |state: &rcomm_top::state::State| {
        let buffer = text::buffer(state);
        let mut marked = None;
        for y in 0..buffer.area.height {
            if buffer[(0, y)].symbol() == "!" {
                marked = Some((y, buffer[(0, y)].fg, buffer[(0, y)].modifier));
            }
        }
        marked.expect("a row is marked")
    };
    let (row, color, _) = find(&state);
    assert_eq!(Some(color), state.options.theme.style(Tone::Bad).fg);
    state.options.theme = Theme::new(ThemeName::Dark, Depth::None);
    let (same, color, _) = find(&state);
    assert_eq!((same, color), (row, ratatui::style::Color::Reset));
}

#[test]
fn the_age_of_an_answer_is_not_called_the_time_of_a_reply() {
    let mut snapshot = recorded(Situation::StuckRank);
    snapshot.sources[0].silence = Some(std::time::Duration::from_millis(902));
    let mut state = showing(snapshot, (80, 24));
    press(&mut state, "8");
    let screen = text::of(&state);
    assert!(
        screen.contains("last answer") && screen.contains("902 ms ago"),
        "{screen}"
    );
    // Dumps were read once.
    state.options.dumps = true;
    press(&mut state, "18");
    let screen = text::of(&state);
    assert!(
        screen.contains("was read") && !screen.contains(" ago"),
        "{screen}"
    );
}

#[test]
fn the_left_column_has_the_operations_also_where_more_are_in_flight_than_fit() {
    let mut snapshot = recorded(Situation::StuckRank);
    let report = Arc::make_mut(&mut snapshot.report);
    let first = report.in_flight[0].clone();
    for seq in 0..60 {
        let mut more = first.clone();
        more.seq = 1_000 + seq;
        report.in_flight.push(more);
    }
    let state = showing(snapshot, (200, 50));
    let screen = text::of(&state);
    let title = "last operations, newest first, of rank 21";
    let row = screen.lines().find(|line| line.contains(title));
    let row = row.unwrap_or_else(|| panic!("no operations\n{screen}"));
    assert!(
        row.find(title).is_some_and(|column| column < 20),
        "{screen}"
    );
    // It fills the column.
    let left = |line: &str| line.chars().take(99).all(char::is_whitespace);
    let empty = screen.lines().filter(|line| left(line));
    assert!(empty.count() <= 2, "{screen}");
}
