//! The views in six situations and several sizes, as text; colors where they matter.

mod common;

use common::{START_NS, judged, moment, press, recorded, showing, simulation, with_reducer_steps};
use rcomm_analyzer::simulate::Situation;
use rcomm_analyzer::{Code, EndKind, JobEnd, NodeJob, Report, SeqKind, Snapshot, Verdict};
use rcomm_recorder::publish::Dump;
use rcomm_top::page::theme::Tone;
use rcomm_top::state::event::{Command, Event};
use rcomm_top::state::screen::Screen;
use rcomm_top::state::update;
use rcomm_top::view::text;
use std::fmt::Write as _;
use std::sync::Arc;

/// The views that any job has, with the keys that open them from the first screen.
const VIEWS: &[(&str, &str)] = &[
    ("overview", ""),
    ("groups", "2"),
    ("groups unfolded", "2o"),
    ("group", "2<enter>"),
    ("ranks", "3"),
    ("ranks by lag", "3c"),
    ("in flight", "4"),
    ("stragglers", "5"),
    ("warnings", "6"),
    ("finding", "6<enter>"),
    ("timeline", "7"),
    ("sources", "8"),
    ("jobs", "9"),
    ("rank", ":rank 21<enter>"),
    ("why", "w"),
    ("stacks", "t"),
    ("compare", ":mark 5<enter>:mark 21<enter>M"),
    ("help", "?"),
    ("filter being typed", "/rank:0-7 op:"),
    ("problems only", "2z"),
    ("paused", " "),
];

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

/// A job of this node with the report of a recorded situation.
fn job(name: &str, situation: Situation) -> NodeJob {
    NodeJob {
        name: name.into(),
        ranks: 32,
        alive: 32,
        created_ns: START_NS,
        report: Some(recorded(situation).report),
    }
}

#[test]
fn other_jobs_of_the_node_are_counted_listed_and_shown_on_demand() {
    let shown = recorded(Situation::Healthy);
    let jobs = [
        job("other", Situation::StuckRank),
        job(&shown.job, Situation::Healthy),
        job("third", Situation::Healthy),
    ];
    let mut state = showing(shown, (100, 30));
    assert!(!text::of(&state).contains("on this node"));
    update(&mut state, Event::Jobs(jobs.into()));
    let screen = text::of(&state);
    assert!(
        screen.contains("2 other jobs on this node, 1 STUCK"),
        "{screen}"
    );
    press(&mut state, "9");
    insta::assert_snapshot!(text::of(&state));
    let command = press(&mut state, "<enter>");
    assert_eq!(command, Some(Command::ShowJob("other".into())));
    assert_eq!(*state.screen(), Screen::Overview);
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
fn the_first_screen_shows_every_rank_in_every_size() {
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
fn pending_messages_of_a_group_are_counted() {
    let mut snapshot = recorded(Situation::StuckRank);
    let report = Arc::make_mut(&mut snapshot.report);
    report.in_flight[0].seq_kind = SeqKind::P2pSeqId;
    for it in &mut report.groups {
        it.in_flight *= usize::from(it.group != report.in_flight[0].group);
    }
    let screen = text::of(&showing(snapshot, (120, 40)));
    assert!(screen.contains(" 1 (3/4) "), "{screen}");
}

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
    press(&mut dated, "2<enter>");
    let group = text::of(&dated);
    assert!(
        group.contains("3/4 joined, 102 s, never issued by 21"),
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
    assert!(group.contains("3/4 joined, never issued by 21"), "{group}");
    assert!(!group.contains("102s"), "{group}");
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
fn trends_are_shown_without_root_causes_and_on_high_terminals() {
    let steps = |situation, size| {
        let mut snapshot = recorded(situation);
        let mut state = showing(snapshot.clone(), size);
        for second in 1..5 {
            snapshot.at.wall_ns += 1_000_000_000;
            let mut report = Report::clone(&snapshot.report);
            for rank in &mut report.ranks {
                rank.step = rank.step.map(|step| step + second);
            }
            snapshot.report = Arc::new(report);
            update(&mut state, Event::Observed(Arc::new(snapshot.clone())));
        }
        let screen = text::of(&state);
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
    let mut snapshot = recorded(Situation::Healthy);
    let mut state = showing(snapshot.clone(), (120, 60));
    for second in [1, 2, 4, 8] {
        snapshot.at.wall_ns += 1_000_000_000;
        let mut report = Report::clone(&snapshot.report);
        for rank in &mut report.ranks {
            rank.step = rank.step.map(|step| step + second);
        }
        snapshot.report = Arc::new(report);
        update(&mut state, Event::Observed(Arc::new(snapshot.clone())));
    }
    let screen = text::of(&state);
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
    state.options.theme = rcomm_top::page::theme::Theme::new(
        rcomm_top::page::theme::ThemeName::Dark,
        rcomm_top::page::theme::Depth::None,
    );
    let (same, color, _) = find(&state);
    assert_eq!((same, color), (row, ratatui::style::Color::Reset));
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
fn every_situation_gets_its_verdict() {
    for &(situation, name) in Situation::ALL {
        let simulation = simulation(situation);
        let snapshot = judged(&simulation, simulation.fault_ns() + 30_000_000_000);
        let report = &snapshot.report;
        let codes: Vec<Code> = report.findings.iter().map(|f| f.code).collect();
        let (verdict, code): (&[Verdict], Option<Code>) = match situation {
            Situation::Healthy => (&[Verdict::Healthy, Verdict::Running], None),
            Situation::StuckRank => (&[Verdict::Stuck], Some(Code::E101)),
            Situation::Deadlock => (&[Verdict::Stuck], None),
            Situation::Mismatch => (&[Verdict::Mismatch], Some(Code::E110)),
            Situation::Straggler => (&[Verdict::Slow], Some(Code::W220)),
            Situation::SilentRank => (&[Verdict::Healthy, Verdict::Running], Some(Code::W150)),
        };
        assert!(
            verdict.contains(&report.verdict),
            "{name}: {:?} {codes:?}",
            report.verdict
        );
        if situation == Situation::Healthy {
            assert!(codes.is_empty(), "{codes:?}");
        }
        if let Some(code) = code {
            assert_eq!(codes.first(), Some(&code), "{name}: {codes:?}");
            let culprits = &report.findings[0].culprit_ranks;
            assert!(
                culprits.contains(&simulation.culprit()),
                "{name}: {culprits:?}"
            );
        }
        if situation == Situation::Deadlock {
            let named = report.findings.iter().any(|f| {
                f.culprit_ranks.contains(&simulation.culprit())
                    || f.cycle.contains(&simulation.culprit())
            });
            assert!(named, "{:#?}", report.findings);
        }
    }
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
        sentence: "all 32 ranks ended in order".to_owned(),
    });
    snapshot.report = Arc::new(report);
    let screen = text::of(&showing(snapshot, (80, 24)));
    assert!(screen.contains("ENDED all 32 ranks ended"), "{screen}");
    assert!(!screen.contains("see above"), "{screen}");
    assert!(screen.contains("are repeatedly last"), "{screen}");
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
    snapshot.sources.push(rcomm_analyzer::SourceStatus {
        name: "rings of the newest job in /dev/shm/rcomm-0".into(),
        error: Some("no ring of any job; start a job on this node".into()),
        ..Default::default()
    });
    let state = showing(snapshot, (80, 24));
    insta::assert_snapshot!(text::of(&state));
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
fn thousands_of_ranks_do_not_make_a_longer_first_screen() {
    let simulation =
        rcomm_analyzer::simulate::Simulation::new(Situation::StuckRank, 2048, common::START_NS)
            .with_window(24);
    let snapshot = judged(&simulation, simulation.fault_ns() + 60_000_000_000);
    let state = showing(snapshot, (80, 24));
    assert!(text::of(&state).lines().count() <= 24);
    let rows: usize = (0..2).map(|pane| state.page.rows(pane)).sum();
    assert!(rows < 40, "{rows} rows at the top level");
}

#[test]
#[ignore = "writes the recorded reports anew"]
fn rewrite_the_recorded_situations() {
    for &(situation, _) in Situation::ALL {
        let simulation = simulation(situation);
        let now = simulation.fault_ns() + common::LATER_S * 1_000_000_000;
        let report: Arc<_> = judged(&simulation, now).report;
        let text = serde_json::to_string_pretty(report.as_ref())
            .expect("the report can be written as JSON");
        std::fs::write(common::fixture(situation), text + "\n").expect("the fixture is writable");
    }
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
fn groups_that_share_a_label_are_distinguished_by_their_ranks() {
    let mut snapshot = recorded(Situation::StuckRank);
    let mut report = Report::clone(&snapshot.report);
    let same = |group: &mut rcomm_analyzer::GroupRef| {
        if group.desc == "dp" {
            group.name = "dp".into();
        }
    };
    report.groups.iter_mut().for_each(|it| same(&mut it.group));
    (report.in_flight.iter_mut()).for_each(|it| same(&mut it.group));
    report.waits.iter_mut().for_each(|it| same(&mut it.group));
    let findings = report.findings.iter_mut();
    findings.for_each(|it| it.group.iter_mut().for_each(same));
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

/// The page that shows why the second finding is as it is.
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
