//! What the heat map of ranks says about the conspicuous ones, and how many marked ranks are compared.

use super::common::{press, recorded, showing};
use rcomm_analyzer::simulate::Situation;
use rcomm_analyzer::{RankView, Snapshot};
use rcomm_top::state::event::Event;
use rcomm_top::state::screen::Screen;
use rcomm_top::state::update;
use rcomm_top::view::text;

/// The line with the pattern of ranks with a high arrival lag, after `change` to each rank.
fn pattern(change: impl Fn(&mut RankView)) -> String {
    let mut snapshot: Snapshot = recorded(Situation::Straggler);
    let mut ranks = snapshot.ranks.to_vec();
    ranks.iter_mut().for_each(change);
    snapshot.ranks = ranks.into();
    let mut state = showing(snapshot, (120, 40));
    press(&mut state, "3c");
    let screen = text::of(&state);
    let line = screen.lines().find(|line| line.starts_with("pattern: "));
    line.unwrap_or_else(|| panic!("no pattern:\n{screen}"))
        .trim_end()
        .to_owned()
}

#[test]
fn a_click_selects_a_cell_of_the_heat_map_and_another_opens_its_rank() {
    let snapshot = recorded(Situation::StuckRank);
    let ranks = snapshot.ranks.clone();
    let mut state = showing(snapshot, (120, 40));
    press(&mut state, "3");
    let screen = text::of(&state);
    // The columns are hosts, the rows local ranks.
    let line_of = |local_rank: u32| {
        let mut lines = screen.lines();
        let start = format!(" {local_rank} ");
        let line = lines.position(|line| line.starts_with(&start));
        let line = line.unwrap_or_else(|| panic!("no row {local_rank}:\n{screen}"));
        u16::try_from(line).expect("the screen has few rows")
    };
    // The headings of the columns are no row.
    assert_eq!(state.hit(9, line_of(0) - 1), None);
    for (local_rank, column, host) in [(0, 1, "n001"), (3, 2, "n002")] {
        let line = line_of(local_rank);
        let x = (0..120)
            .find(|&x| {
                state
                    .hit(x, line)
                    .is_some_and(|hit| hit.column == Some(column))
            })
            .expect("the cell is on the screen");
        update(&mut state, Event::Click(x, line));
        assert!(
            matches!(state.screen(), Screen::Ranks),
            "{:?}",
            state.screen()
        );
        update(&mut state, Event::Click(x, line));
        let Screen::Rank(rank) = *state.screen() else {
            panic!("{:?}", state.screen());
        };
        let view = ranks
            .iter()
            .find(|view| view.rank == rank)
            .expect("the rank is known");
        assert_eq!((&*view.host, view.local_rank), (host, local_rank));
        press(&mut state, "<esc>");
    }
}

#[test]
fn a_pattern_names_hosts_and_local_ranks_only_where_they_say_something() {
    assert_eq!(
        pattern(|_| {}),
        "pattern: all 8 ranks of host n002: look at the host"
    );
    assert_eq!(
        pattern(|view| view.host = "".into()),
        "pattern: 8 ranks, whose hosts are unknown"
    );
    let one_per_host = |view: &mut RankView| {
        view.host = format!("n{}", view.rank).into();
        view.local_rank = 0;
    };
    assert_eq!(
        pattern(one_per_host),
        "pattern: 8 ranks on 8 hosts, no pattern"
    );
}

#[test]
fn a_comparison_says_that_it_leaves_out_marked_ranks() {
    let mut state = showing(recorded(Situation::StuckRank), (120, 40));
    let shows_note = |state: &_| text::of(state).contains("marked ranks are compared");
    let mark = |rank: u32| format!(":mark {rank}<enter>");
    press(&mut state, &(0..8).map(mark).collect::<String>());
    press(&mut state, "M");
    assert!(!shows_note(&state), "{}", text::of(&state));
    press(&mut state, &(mark(8) + &mark(9)));
    let screen = text::of(&state);
    let note = "only the first 8 of the 10 marked ranks are compared";
    assert!(screen.contains(note), "{screen}");
}
