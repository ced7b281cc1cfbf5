//! The first screen: verdict, age, doubts, trends, a replay, a job that ended, no job. Also the panes that other
//! screens add where they leave rows empty.

use super::common::{START_NS, judged, moment, press, recorded, showing, simulation};
use rcomm_analyzer::simulate::{Simulation, Situation};
use rcomm_analyzer::{Code, EndKind, JobEnd, Problem, Report, Snapshot, SourceStatus, Verdict};
use rcomm_recorder::publish::Dump;
use rcomm_top::state::event::Event;
use rcomm_top::state::screen::Screen;
use rcomm_top::state::screens::OverviewPane;
use rcomm_top::state::{State, update};
use rcomm_top::view::text;
use std::sync::Arc;

#[test]
fn the_first_screen_answers_stuck_who_and_since_when_without_a_key() {
    let state = showing(recorded(Situation::StuckRank), (80, 24));
    let screen = text::of(&state);
    let culprit = simulation(Situation::StuckRank).culprit();
    let answer: String = screen.lines().skip(1).take(2).collect();
    assert!(answer.contains("STUCK"), "{screen}");
    assert!(answer.contains(&format!("rank {culprit}")), "{screen}");
    assert!(answer.contains("for 102 s, since 14:03:26 UTC"), "{screen}");
    assert!(screen.contains("   next: look at what rank"), "{screen}");
}

/// The state of a replay of dumps, changed by `change`, that were read a day after they were taken.
fn replayed(change: impl Fn(&mut Dump)) -> rcomm_top::state::State {
    let mut snapshot = recorded(Situation::StuckRank);
    let mut ranks = snapshot.ranks.to_vec();
    for dump in ranks.iter_mut().flat_map(|view| &mut view.dumps) {
        change(Arc::make_mut(dump));
    }
    snapshot.ranks = ranks.into();
    snapshot.at.wall_ns += 86_400_000_000_000;
    let mut state = showing(snapshot, (120, 40));
    (state.options.still, state.options.dumps) = (true, true);
    let again = state.snapshot().cloned();
    update(
        &mut state,
        Event::Observed(again.expect("the state holds a snapshot")),
    );
    state
}

#[test]
fn a_replay_has_the_time_of_the_dumps_and_no_age_where_they_have_none() {
    let mut dated = replayed(|_| {});
    let screen = text::of(&dated);
    assert!(screen.contains("REPLAY"), "{screen}");
    let first = screen.lines().next().unwrap_or_default();
    assert!(first.ends_with("2023-11-15 14:05:08 UTC"), "{first}");
    assert!(!screen.contains("─ look further"), "{screen}");
    press(&mut dated, "2<enter>");
    let group = text::of(&dated);
    assert!(
        group.contains("3/4 joined, 102 s, never issued by rank 21"),
        "{group}"
    );
    assert!(group.contains("S  102 s"), "{group}");

    let mut undated = replayed(|dump| dump.identity.dump_time_ns = 0);
    let screen = text::of(&undated);
    let first = screen.lines().next().unwrap_or_default();
    assert!(first.contains("operations to 2023-11-15 14:0"), "{first}");
    press(&mut undated, "4");
    let flight = text::of(&undated);
    let row = flight.lines().find(|line| line.starts_with('!'));
    let age = row.and_then(|row| row.split_whitespace().nth(1));
    assert_eq!(age, Some("--"), "{flight}");
    press(&mut undated, "2<enter>");
    let group = text::of(&undated);
    assert!(
        group.contains("3/4 joined, never issued by rank 21"),
        "{group}"
    );
    assert!(!group.contains("102 s"), "{group}");
}

#[test]
fn a_replay_has_the_panes_that_the_user_chose() {
    let mut state = replayed(|_| {});
    state.options.layout = vec![OverviewPane::Warnings, OverviewPane::Look];
    press(&mut state, "1");
    let screen = text::of(&state);
    assert!(screen.contains("─ look further ─"), "{screen}");
}

#[test]
fn pending_operations_are_in_flight_at_once_and_no_rank_is_accused() {
    let simulation = simulation(Situation::StuckRank);
    let snapshot = judged(&simulation, simulation.fault_ns() + 1_000_000_000);
    let mut state = showing(snapshot, (120, 40));
    let screen = text::of(&state);
    assert!(
        screen.contains("RUNNING") && screen.contains("in flight, none overdue"),
        "{screen}"
    );
    press(&mut state, "4");
    let screen = text::of(&state);
    let culprit = simulation.culprit();
    let row = screen.lines().find(|line| line.contains("waiting"));
    let row = row.expect("a row waits");
    assert!(row.contains(&format!("{culprit} not yet")), "{screen}");
    assert!(
        row.starts_with("  850 ms "),
        "the row has a mark, or another age: {screen}"
    );
    press(&mut state, "z");
    let screen = text::of(&state);
    assert!(
        !screen.contains("not yet"),
        "an operation that is not overdue counts as a problem: {screen}"
    );
}

#[test]
fn a_job_is_not_said_to_have_no_operation_if_the_list_leaves_some_out() {
    let simulation = simulation(Situation::StuckRank);
    let mut snapshot = judged(&simulation, simulation.fault_ns() + 1_000_000_000);
    let mut report = Report::clone(&snapshot.report);
    report.in_flight.clear();
    snapshot.report = Arc::new(report.clone());
    let screen = text::of(&showing(snapshot.clone(), (120, 40)));
    assert!(screen.contains("RUNNING nothing is overdue"), "{screen}");
    for rank in &mut report.ranks {
        rank.pending = 0;
    }
    snapshot.report = Arc::new(report);
    let screen = text::of(&showing(snapshot, (120, 40)));
    assert!(screen.contains("no operation in flight"), "{screen}");
}

/// The screen after as many seconds as there are numbers, in each of which every rank made this many steps.
fn after_steps(
    situation: Situation,
    size: (u16, u16),
    steps: impl IntoIterator<Item = i64>,
) -> String {
    let mut snapshot = recorded(situation);
    let mut state = showing(snapshot.clone(), size);
    for made in steps {
        snapshot.at.wall_ns += 1_000_000_000;
        let mut report = Report::clone(&snapshot.report);
        for rank in &mut report.ranks {
            rank.step = rank.step.map(|step| step + made);
        }
        snapshot.report = Arc::new(report);
        update(&mut state, Event::Observed(Arc::new(snapshot.clone())));
    }
    text::of(&state)
}

#[test]
fn trends_are_shown_without_root_causes_and_on_terminals_with_many_rows() {
    let steps = |situation, size| {
        let screen = after_steps(situation, size, [1, 2, 3, 4]);
        let line = screen.lines().find(|line| line.contains("steps/s"));
        line.map(str::to_owned)
    };
    let healthy = steps(Situation::Healthy, (80, 24)).expect("the steps a second are shown");
    assert!(healthy.contains("4.00"), "{healthy}");
    assert!(healthy.contains("▃▄▆▇"), "{healthy}");
    assert_eq!(steps(Situation::StuckRank, (80, 24)), None);
    assert!(steps(Situation::StuckRank, (120, 40)).is_some());
}

#[test]
fn trends_get_the_rows_that_no_pane_needs() {
    let screen = after_steps(Situation::Healthy, (120, 60), [1, 2, 4, 8]);
    let rows: Vec<&str> = screen
        .lines()
        .skip_while(|line| !line.contains("─ trends"))
        .skip(1)
        .take_while(|line| !line.contains("bus GB/s"))
        .collect();
    // Only the highest bar reaches the first row.
    assert!(rows[0].contains("steps/s"), "{screen}");
    assert_eq!(
        (rows.len(), rows[0].matches('▇').count()),
        (3, 1),
        "{screen}"
    );
    assert_eq!(rows[2].matches('█').count(), 2, "{screen}");
}

#[test]
fn rows_that_no_pane_needs_have_the_newest_operations() {
    for situation in [Situation::Healthy, Situation::StuckRank] {
        let simulation = Simulation::new(situation, 8, START_NS);
        let snapshot = judged(&simulation, simulation.fault_ns() + 60_000_000_000);
        let rank = match situation {
            Situation::Healthy => 0,
            _ => simulation.culprit(),
        };
        for size in [(120, 40), (200, 50)] {
            let mut state = showing(snapshot.clone(), size);
            let screen = text::of(&state);
            let empty = screen.lines().filter(|line| line.trim().is_empty());
            assert!(empty.count() <= 2, "{screen}");
            // The panes about a hang fill the smaller one.
            if situation == Situation::StuckRank && size == (120, 40) {
                continue;
            }
            assert!(
                screen.contains(&format!("last operations, newest first, of rank {rank} ")),
                "{screen}"
            );
            // Its pane opens the rank.
            let panes = state.page.panes.iter();
            let before = panes.take_while(|pane| !pane.title.starts_with("last operations"));
            let tabs = "<tab>".repeat(before.count());
            press(&mut state, &format!("{tabs}e"));
            assert_eq!(*state.screen(), Screen::Rank(rank), "{screen}");
        }
    }
}

#[test]
fn views_that_leave_rows_empty_have_operations_a_timeline_and_trends_that_no_row_moves() {
    let few = recorded(Situation::StuckRank);
    let mut many = few.clone();
    let mut report = Report::clone(&many.report);
    for more in 1..=5 {
        let mut instance = report.in_flight[0].clone();
        instance.seq += more;
        report.in_flight.push(instance);
    }
    many.report = Arc::new(report);
    for view in ["2", "2<enter>", "3", "4", "5", "6", "8", "9", "0", "w", "t"] {
        let rows_of_added = |snapshot: &Snapshot, size| {
            let mut state = showing(snapshot.clone(), size);
            press(&mut state, view);
            let screen = text::of(&state);
            let row = |title: &str| screen.lines().position(|line| line.starts_with(title));
            ["─ last operations", "─ timeline", "─ trends"].map(row)
        };
        let added = rows_of_added(&few, (200, 50));
        assert!(added.iter().all(Option::is_some), "view {view}");
        assert!(added.is_sorted(), "view {view}");
        assert_eq!(rows_of_added(&many, (200, 50)), added, "view {view}");
        assert_eq!(rows_of_added(&few, (120, 30)), [None; 3], "view {view}");
    }
    // The timeline's own screen has no second one.
    let titles = |state: &State| -> Vec<String> {
        (state.page.panes.iter().map(|pane| pane.title.clone())).collect()
    };
    let simulation_of_8 = Simulation::new(Situation::StuckRank, 8, START_NS);
    let at_ns = simulation_of_8.fault_ns() + 60_000_000_000;
    let mut state = showing(judged(&simulation_of_8, at_ns), (200, 50));
    press(&mut state, "7");
    let shown = titles(&state);
    assert_eq!(shown.len(), 3, "{shown:?}");
    assert!(shown[1].starts_with("last operations"), "{shown:?}");
    assert_eq!((&*shown[0], &*shown[2]), ("timeline", "trends"));
    // The lanes of few ranks leave no rows empty but the one below the bars of each.
    let mut two = judged(&simulation_of_8, at_ns);
    two.ranks = two.ranks[..2].to_vec().into();
    let mut state_of_two = showing(two, (120, 40));
    press(&mut state_of_two, "7");
    let screen = text::of(&state_of_two);
    let mut lines = screen.lines();
    let below = lines
        .by_ref()
        .skip_while(|line| !line.starts_with("─ timeline"));
    let lanes = below.skip(1).take_while(|line| !line.starts_with('─'));
    let empty = lanes.filter(|line| line.trim().is_empty()).count();
    assert_eq!(empty, 2, "{screen}");
    // Rows of an added pane are not taken for rows of the warnings.
    press(&mut state, "6");
    let warnings = titles(&state);
    press(&mut state, "<tab><tab><down>");
    assert_eq!(titles(&state), warnings);
    // The other panes show the warning that was chosen.
    let mut two = few.clone();
    let mut report = Report::clone(&two.report);
    let mut other = report.findings[0].clone();
    (other.id, other.code) = (other.id + 1, Code::E112);
    report.findings.push(other);
    two.report = Arc::new(report);
    let mut state = showing(two, (200, 50));
    press(&mut state, "6");
    let warnings = titles(&state);
    press(&mut state, "<down>");
    let chosen = titles(&state);
    assert_ne!(chosen, warnings);
    press(&mut state, "<tab>");
    assert_eq!(titles(&state), chosen);
    // The timeline can be selected, and opens the rank.
    let mut state = showing(few, (200, 50));
    press(&mut state, "4<tab><tab><enter>");
    let culprit = simulation(Situation::StuckRank).culprit();
    assert_eq!(*state.screen(), Screen::Rank(culprit));
}

#[test]
fn the_age_of_a_hang_advances_with_the_clock_without_a_new_snapshot() {
    let simulation = simulation(Situation::StuckRank);
    let mut state = showing(recorded(Situation::StuckRank), (80, 24));
    let before = text::of(&state);
    let later = state.now.wall_ns + 20_000_000_000;
    update(&mut state, Event::Tick(moment(&simulation, later)));
    let after = text::of(&state);
    assert!(
        before.contains("for 10") && after.contains("for 2 min"),
        "{after}"
    );
}

#[test]
fn the_age_of_a_hang_ends_with_its_job() {
    let simulation = simulation(Situation::StuckRank);
    let mut snapshot = recorded(Situation::StuckRank);
    let mut report = Report::clone(&snapshot.report);
    report.end = Some(JobEnd {
        how: EndKind::Cancelled,
        at_ns: snapshot.at.wall_ns,
        first_ranks: Vec::new(),
        attempt: 0,
        later_attempt: None,
        sentence: "the job was terminated from outside".to_owned(),
    });
    snapshot.report = Arc::new(report);
    let mut state = showing(snapshot, (80, 24));
    let before = text::of(&state);
    let later = state.now.wall_ns + 20_000_000_000;
    update(&mut state, Event::Tick(moment(&simulation, later)));
    let after = text::of(&state);
    // The first line ends with the time of day.
    let below = |screen: &str| screen.split_once('\n').map(|(_, rest)| rest.to_owned());
    assert!(before.contains("for 10"), "{before}");
    assert_eq!(below(&before), below(&after));
}

#[test]
fn a_warning_about_a_job_that_ended_has_its_own_sentence() {
    let mut snapshot = recorded(Situation::Straggler);
    let mut report = Report::clone(&snapshot.report);
    assert!(text::of(&showing(snapshot.clone(), (80, 24))).contains("see above"));
    report.verdict = Verdict::Ended;
    report.end = Some(JobEnd {
        how: EndKind::Ended,
        at_ns: snapshot.at.wall_ns,
        first_ranks: Vec::new(),
        attempt: 0,
        later_attempt: None,
        sentence: "all 32 ranks ended in order".to_owned(),
    });
    snapshot.report = Arc::new(report);
    let screen = text::of(&showing(snapshot, (80, 24)));
    assert!(screen.contains("ENDED all 32 ranks ended"), "{screen}");
    assert!(!screen.contains("see above"), "{screen}");
    assert!(screen.contains("are repeatedly last"), "{screen}");
}

#[test]
fn a_job_that_is_over_says_what_is_left_of_its_records() {
    let mut snapshot = recorded(Situation::Healthy);
    let remains = "the job's rings were removed at its end; this view keeps what it has read";
    snapshot.sources = vec![SourceStatus {
        remains: Some(remains.into()),
        ..SourceStatus::default()
    }];
    assert!(!text::of(&showing(snapshot.clone(), (120, 40))).contains("records:"));
    let mut report = Report::clone(&snapshot.report);
    report.verdict = Verdict::Ended;
    report.end = Some(JobEnd {
        how: EndKind::Ended,
        at_ns: snapshot.at.wall_ns,
        first_ranks: Vec::new(),
        attempt: 0,
        later_attempt: None,
        sentence: "all 32 ranks ended in order, the last at 14:05:08 UTC".to_owned(),
    });
    snapshot.report = Arc::new(report);
    let screen = text::of(&showing(snapshot, (120, 40)));
    let lines: Vec<&str> = screen.lines().collect();
    assert!(lines[0].contains("  OVER  "), "{screen}");
    assert!(
        lines[1].contains("ENDED all 32 ranks ended in order, the last at 14:05:08 UTC"),
        "{screen}"
    );
    let expected = format!("   records: {remains}; [x] exports the report");
    assert_eq!(lines[2].trim_end(), expected, "{screen}");
}

#[test]
fn the_title_of_a_job_that_was_restarted_says_which_attempt_is_over() {
    for (attempt, later_attempt, title) in [
        (0, None, "  OVER  "),
        (1, None, "  ATTEMPT 1 OVER  "),
        (0, Some(1), "  ATTEMPT 1 HAS BEGUN  "),
        (1, Some(2), "  ATTEMPT 2 HAS BEGUN  "),
    ] {
        let mut snapshot = recorded(Situation::Healthy);
        let mut report = Report::clone(&snapshot.report);
        report.verdict = Verdict::Crashed;
        report.end = Some(JobEnd {
            how: EndKind::Crashed,
            at_ns: snapshot.at.wall_ns,
            first_ranks: Vec::new(),
            attempt,
            later_attempt,
            sentence: "the job was over at 14:05:08 UTC".to_owned(),
        });
        snapshot.report = Arc::new(report);
        let screen = text::of(&showing(snapshot, (80, 24)));
        let first = screen.lines().next().unwrap_or_default();
        assert!(first.contains(title), "{first}");
    }
}

#[test]
fn a_job_of_unknown_size_says_so() {
    let mut snapshot = recorded(Situation::StuckRank);
    let words = "read 32 ranks; no record states how many ranks the job has";
    assert!(!text::of(&showing(snapshot.clone(), (80, 24))).contains("no record states"));
    let mut report = Report::clone(&snapshot.report);
    report.input.may_have_more = true;
    snapshot.report = Arc::new(report);
    let screen = text::of(&showing(snapshot, (80, 24)));
    assert!(screen.contains(words), "{screen}");
}

/// A stuck job whose finding has two doubts and another possible culprit.
fn doubtful(confidence: f64) -> Snapshot {
    let mut snapshot = recorded(Situation::StuckRank);
    let mut report = Report::clone(&snapshot.report);
    let head = &mut report.findings[0];
    head.confidence = confidence;
    head.alternatives = vec![head.culprit_ranks.clone(), vec![20]];
    head.doubts = vec![
        "the records do not show when the processes ended: if they were terminated while they worked, the unfinished \
         operations had only just begun"
            .to_owned(),
        "the records of ranks 0-3 were taken earlier than the others', which have gone on since".to_owned(),
    ];
    snapshot.report = Arc::new(report);
    snapshot
}

/// A screen as one line, without the indents of wrapped lines.
fn joined(screen: &str) -> String {
    screen.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[test]
fn a_doubt_is_whole_on_the_first_screen_and_on_that_of_its_finding() {
    let confident = text::of(&showing(doubtful(0.9), (80, 24)));
    assert!(!confident.contains("or else"), "{confident}");
    let mut state = showing(doubtful(0.5), (80, 24));
    let first = text::of(&state);
    assert!(
        joined(&first).contains("or else: the records allow as well: rank 20; and 2 other doubts"),
        "{first}"
    );
    press(&mut state, "<enter>");
    let screen = text::of(&state);
    let all = joined(&screen);
    assert!(all.contains("50 % sure"), "{screen}");
    assert!(
        all.contains("or else: the records allow as well: rank 20"),
        "{screen}"
    );
    for doubt in &doubtful(0.5).report.findings[0].doubts {
        assert!(all.contains(&format!("not sure: {doubt}")), "{screen}");
    }
    insta::assert_snapshot!("a_finding_with_doubts_at_80_by_24", screen);
}

#[test]
fn doubts_that_are_too_long_for_a_screen_with_few_rows_can_be_scrolled() {
    let mut state = showing(doubtful(0.5), (60, 12));
    press(&mut state, "<enter>");
    let screen = text::of(&state);
    assert!(screen.contains("or else:"), "{screen}");
    let end = "gone on since";
    let mut seen = screen.contains(end);
    for _ in 0..20 {
        press(&mut state, "<down>");
        seen |= joined(&text::of(&state)).contains(end);
    }
    assert!(seen, "{}", text::of(&state));
}

#[test]
fn a_trend_without_values_says_why_and_a_small_value_is_not_zero() {
    let mut snapshot = recorded(Situation::Healthy);
    let mut report = Report::clone(&snapshot.report);
    for group in &mut report.groups {
        group.busbw_gbs = None;
    }
    for rank in &mut report.ranks {
        rank.lag_p50_ms = Some(0.002);
        rank.step = None;
    }
    snapshot.report = Arc::new(report);
    let screen = text::of(&showing(snapshot, (80, 24)));
    let line = |name: &str| {
        let line = screen.lines().find(|line| line.contains(name));
        line.unwrap_or_else(|| panic!("no line about {name}:\n{screen}"))
            .trim_end()
            .to_owned()
    };
    let bandwidth = line("bus GB/s");
    assert!(
        bandwidth.ends_with("--  no collective of 1 MiB or more with a measured time"),
        "{bandwidth}"
    );
    let steps = line("steps/s");
    assert!(
        steps.ends_with("--  the program reports no steps"),
        "{steps}"
    );
    let lag = line("lag ms");
    assert!(
        lag.contains(" <0.01 ") && lag.ends_with("max <0.01"),
        "{lag}"
    );
}

#[test]
fn a_simulated_job_says_when_its_fault_begins_until_it_is_found() {
    let mut state = showing(recorded(Situation::Healthy), (80, 24));
    state.options.fault_ns = Some(state.now.wall_ns + 3_500_000_000);
    let snapshot = Arc::new(recorded(Situation::Healthy));
    update(&mut state, Event::Observed(snapshot));
    let screen = text::of(&state);
    assert!(screen.contains("its fault begins in 4 s"), "{screen}");
    let mut found = showing(recorded(Situation::StuckRank), (80, 24));
    found.options.fault_ns = Some(found.now.wall_ns);
    update(
        &mut found,
        Event::Observed(Arc::new(recorded(Situation::StuckRank))),
    );
    let screen = text::of(&found);
    assert!(!screen.contains("its fault"), "{screen}");
}

#[test]
fn nothing_is_drawn_again_while_nothing_changes() {
    let mut state = showing(recorded(Situation::Healthy), (80, 24));
    state.changed = false;
    let now = state.now;
    update(&mut state, Event::Tick(now));
    assert!(!state.changed);
}

#[test]
fn a_missing_job_is_reported_with_advice() {
    let mut snapshot = Snapshot::empty(Default::default());
    snapshot.sources.push(SourceStatus {
        name: "rings in /dev/shm/rcomm-0".into(),
        error: Some("no ring of any job; start a job on this node".into()),
        ..Default::default()
    });
    let state = showing(snapshot, (80, 24));
    insta::assert_snapshot!(text::of(&state));
}

#[test]
fn a_problem_of_the_input_can_be_read_to_its_end() {
    let mut snapshot = recorded(Situation::Healthy);
    let mut report = Report::clone(&snapshot.report);
    report.problems = vec![Problem {
        code: Code::N306,
        path: String::new(),
        sentence: format!("ranks take turns: {}at last", "word ".repeat(40)),
        more_paths: vec![],
    }];
    snapshot.report = Arc::new(report);
    let mut state = showing(snapshot, (80, 24));
    press(&mut state, "6");
    let screen = text::of(&state);
    assert!(screen.contains("at last"), "{screen}");
}
