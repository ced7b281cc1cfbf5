//! The jobs of the node.

use super::common::{START_NS, press, recorded, showing};
use rcomm_analyzer::NodeJob;
use rcomm_analyzer::simulate::Situation;
use rcomm_top::state::event::{Command, Event};
use rcomm_top::state::screen::Screen;
use rcomm_top::state::update;
use rcomm_top::view::text;

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
    update(&mut state, Event::Jobs(jobs.clone().into()));
    let screen = text::of(&state);
    assert!(
        screen.contains("2 other jobs on this node, 1 STUCK"),
        "{screen}"
    );
    // A job that is over no longer hangs.
    let mut over = job("fourth", Situation::StuckRank);
    over.alive = 0;
    let with_over: Vec<NodeJob> = jobs.iter().cloned().chain([over]).collect();
    update(&mut state, Event::Jobs(with_over.into()));
    let screen = text::of(&state);
    assert!(
        screen.contains("3 other jobs on this node, 1 STUCK, 1 over"),
        "{screen}"
    );
    // With one other job, there is nothing to count.
    update(&mut state, Event::Jobs(jobs[..2].to_vec().into()));
    let screen = text::of(&state);
    assert!(
        screen.contains("1 other job on this node: STUCK"),
        "{screen}"
    );
    // Other views have it in their first line.
    press(&mut state, "2");
    let screen = text::of(&state);
    let first = screen.lines().next().expect("the screen has lines");
    assert!(first.contains("other jobs: 1 STUCK [9]"), "{screen}");
    // On a narrow terminal it takes room from the name of the job.
    update(&mut state, Event::Resize(80, 24));
    let screen = text::of(&state);
    let first = screen.lines().next().expect("the screen has lines");
    assert!(first.contains(" LIVE  other jobs: 1 STUCK [9]"), "{screen}");
    update(&mut state, Event::Resize(100, 30));
    update(&mut state, Event::Jobs(jobs.into()));
    press(&mut state, "9");
    let screen = text::of(&state);
    assert!(!screen.contains("other jobs: "), "{screen}");
    assert!(screen.contains("since: 14:03:"), "{screen}");
    assert!(screen.contains("next: "), "{screen}");
    insta::assert_snapshot!(screen);
    // What is added on a tall terminal is about the job on display, whichever row is selected.
    update(&mut state, Event::Resize(200, 50));
    let screen = text::of(&state);
    for title in ["timeline", "trends"] {
        assert!(
            screen.contains(&format!("─ {title}: job demo-healthy ─")),
            "{screen}"
        );
    }
    assert!(
        screen.contains("of rank 0 (n000/0): job demo-healthy ─"),
        "{screen}"
    );
    let command = press(&mut state, "<enter>");
    assert_eq!(command, Some(Command::ShowJob("other".into())));
    assert_eq!(*state.screen(), Screen::Overview);
}

#[test]
fn a_muted_warning_puts_no_job_of_the_node_in_trouble() {
    let shown = recorded(Situation::Healthy);
    let over = NodeJob {
        alive: 0,
        ..job("over", Situation::SilentRank)
    };
    let newer = NodeJob {
        created_ns: START_NS + 1,
        ..job("newer", Situation::Healthy)
    };
    let jobs = [
        job("warned", Situation::SilentRank),
        over,
        newer,
        job(&shown.job, Situation::Healthy),
    ];
    let mut state = showing(shown, (100, 30));
    update(&mut state, Event::Jobs(jobs.into()));
    let screen = text::of(&state);
    assert!(
        screen.contains("3 other jobs on this node, 1 WARNING, 1 over"),
        "{screen}"
    );
    let warning = "rank 21 has not answered";
    // The rows of the job with the warning and of a newer one without.
    let order = |screen: &str| {
        let row_of = |name: &str| {
            screen.lines().position(|line| {
                let job = line.get(2..);
                job.is_some_and(|job| job.starts_with(name))
            })
        };
        (row_of("warned"), row_of("newer"))
    };
    press(&mut state, "9");
    let screen = text::of(&state);
    assert!(screen.contains("WARNING"), "{screen}");
    assert!(screen.contains(warning), "{screen}");
    let (warned, newer) = order(&screen);
    assert!(warned < newer, "{screen}");
    press(&mut state, ":mute W150<enter>");
    let screen = text::of(&state);
    let (warned, newer) = order(&screen);
    assert!(warned > newer, "{screen}");
    assert!(!screen.contains("WARNING"), "{screen}");
    assert!(!screen.contains(warning), "{screen}");
    let calm = "nothing recorded is pending or wrong";
    // In the row of each job, and once more in what is shown of the selected one.
    assert_eq!(screen.matches(calm).count(), 4 + 1, "{screen}");
    press(&mut state, "1");
    let screen = text::of(&state);
    assert!(screen.contains(&format!("HEALTHY {calm}")), "{screen}");
    assert!(
        screen.contains("2 other jobs on this node  [9]"),
        "{screen}"
    );
}

#[test]
fn a_verdict_whose_finding_is_muted_says_that_it_is_not_shown() {
    let shown = recorded(Situation::Straggler);
    let jobs = [job(&shown.job, Situation::Straggler)];
    let mut state = showing(shown, (100, 30));
    update(&mut state, Event::Jobs(jobs.into()));
    press(&mut state, ":mute W220<enter>");
    let not_shown = "the finding that says so is not shown";
    let screen = text::of(&state);
    assert!(screen.contains(&format!("SLOW {not_shown}")), "{screen}");
    press(&mut state, "9");
    let screen = text::of(&state);
    assert!(screen.contains(not_shown), "{screen}");
}
