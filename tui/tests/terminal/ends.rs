//! The ends of the program, each of which restores the terminal, and what it shows once the job has ended.

use crate::rings::{WORLD, ring, ring_of, stuck_job};
use crate::session::{Hangup, Session};
use ratatui::Frame;
use rcomm_analyzer::simulate::{Simulation, Situation};
use rcomm_analyzer::source::{Poll, SimulatedSource, Source, SourceError};
use rcomm_analyzer::{Anchor, Live, LiveOptions, Pace, Watch, analyze};
use rcomm_top::app::terminal::Mouse;
use rcomm_top::app::{self, Inbox};
use rcomm_top::keys::Keymap;
use rcomm_top::page::theme::{Depth, Theme, ThemeName};
use rcomm_top::state::event::Event;
use rcomm_top::state::{Options, State};
use rcomm_top::view;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[test]
fn sigterm_and_sighup_end_the_program_and_restore_the_terminal() {
    for signal in [rustix::process::Signal::TERM, rustix::process::Signal::HUP] {
        let directory = tempfile::tempdir().expect("a temporary directory can be made");
        let rings = directory.path().display().to_string();
        let mut session = Session::start(&["--ring-dir", &rings], directory.path());
        session.wait_text("no ring of any job");
        session.wait_text("rcomm-top replay DIR");
        session.signal(signal);
        session.end();
    }
}

/// Waits until the screen calls the job running or, if its last operation is older than ten seconds, healthy.
fn wait_for_calm(session: &mut Session) {
    session.wait("a job that is well", |screen| {
        let text = screen.contents();
        text.contains("RUNNING") || text.contains("HEALTHY")
    });
}

#[test]
fn a_job_that_ends_while_it_is_watched_is_over_and_its_rings_are_named() {
    let directory = tempfile::tempdir().expect("a temporary directory can be made");
    let rings: Vec<_> = (0..WORLD)
        .map(|rank| ring(directory.path(), rank, 40))
        .collect();
    let folder = directory.path().display().to_string();
    let mut session = Session::start(&["--ring-dir", &folder], directory.path());
    wait_for_calm(&mut session);
    drop(rings);
    session.wait("the end of the job", |screen| {
        let text = screen.contents();
        text.contains("OVER") && text.contains("all 4 ranks' processes are gone")
    });
    // The rings were not closed in order, so their files stay.
    session.wait_text("records: the job's rings are still in");
    session.wait_text("[x] exports the report");
    session.press("q");
    session.end();
}

#[test]
fn processes_of_the_next_attempt_are_named_by_the_title_and_by_the_sentence() {
    let directory = tempfile::tempdir().expect("a temporary directory can be made");
    // Processes are searched for on the whole node, so the job's name is that of no other test.
    let job = format!("next-attempt-{}", std::process::id());
    let rings: Vec<_> = (0..WORLD)
        .map(|rank| ring_of(&job, directory.path(), rank, 40))
        .collect();
    let folder = directory.path().display().to_string();
    let mut session = Session::start(&["--ring-dir", &folder], directory.path());
    wait_for_calm(&mut session);
    drop(rings);
    session.wait_text("OVER");
    let mut next = Command::new("sleep")
        .arg("600")
        .envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "1")])
        .envs([
            ("RANK", "1"),
            ("WORLD_SIZE", "4"),
            ("TORCHELASTIC_RESTART_COUNT", "1"),
        ])
        .env("TORCHELASTIC_RUN_ID", &job)
        .spawn()
        .expect("sleep starts");
    session.wait("the next attempt", |screen| {
        let text = screen.contents();
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        words.contains("ATTEMPT 1 HAS BEGUN")
            && words
                .contains("attempt 1 has begun, and rank 1 runs and has no ring yet; of attempt 0:")
    });
    next.kill().expect("sleep runs");
    next.wait().expect("sleep ends");
    session.wait("the end of the next attempt", |screen| {
        let text = screen.contents();
        !text.contains("HAS BEGUN") && text.contains("OVER")
    });
    session.press("q");
    session.end();
}

#[test]
fn a_terminal_that_vanishes_without_a_signal_ends_the_program() {
    let directory = tempfile::tempdir().expect("a temporary directory can be made");
    let _rings = stuck_job(directory.path());
    let rings = directory.path().display().to_string();
    let arguments = ["--ring-dir", &rings];
    let mut session = Session::start_on(Hangup::Silent, (30, 100), &arguments, directory.path());
    session.wait_text("pty-job");
    session.vanish();
    session.wait_gone();
}

#[test]
fn ctrl_z_gives_the_terminal_back_and_fg_takes_it_again() {
    let directory = tempfile::tempdir().expect("a temporary directory can be made");
    let _rings = stuck_job(directory.path());
    let rings = directory.path().display().to_string();
    let mut session = Session::start(&["--ring-dir", &rings], directory.path());
    session.wait_text("pty-job");
    session.press("\x1a");
    session.wait("the shell's screen", |screen| !screen.alternate_screen());
    session.wait_stopped();
    session.signal(rustix::process::Signal::CONT);
    session.wait("the program's screen", |screen| {
        screen.alternate_screen() && screen.contents().contains("pty-job")
    });
    session.press("q");
    session.end();
}

/// A source that panics at its tenth poll, late enough for its screen to be seen on a slow machine.
struct PanickingSource {
    inner: SimulatedSource,
    polls: u32,
}

impl Source for PanickingSource {
    fn name(&self) -> String {
        self.inner.name()
    }

    fn poll(&mut self, deadline: Instant) -> Result<Poll, SourceError> {
        self.polls += 1;
        assert!(self.polls < 10, "this source breaks at its tenth poll");
        self.inner.poll(deadline)
    }
}

/// A simulated job without a fault.
fn healthy(anchor: Anchor) -> SimulatedSource {
    let start = anchor.moment().wall_ns - 60_000_000_000;
    let simulation = Simulation::new(Situation::Healthy, 8, start);
    SimulatedSource::new(simulation, move || anchor.moment().wall_ns)
}

/// Runs the view with this source, drawn by `draw`, until it ends. An error is that with which it ended.
fn run_view(
    anchor: Anchor,
    source: Box<dyn Source>,
    draw: impl FnMut(&State, &mut Frame<'_>),
) -> anyhow::Result<()> {
    let live = Live::new(LiveOptions::default(), analyze, vec![source.name()]);
    let options = Options {
        theme: Theme::new(ThemeName::Dark, Depth::None),
        ascii: false,
        allow_actions: false,
        askable: false,
        stacks_askable: false,
        reads_process_facts: false,
        still: false,
        dumps: false,
        fault_ns: None,
        history: Some(1 << 20),
        keymap: Keymap::default(),
        muted: Default::default(),
        columns: Default::default(),
        layout: vec![],
    };
    let state = State::new(options, (100, 30), anchor.moment());
    let inbox = Inbox::default();
    let sender = inbox.sender();
    let pace = Pace {
        refresh: Duration::from_millis(300),
        ..Pace::default()
    };
    let watch = Watch::start(vec![source], live, pace, anchor, move |snapshot| {
        // This fails once the program has ended.
        let _ = sender.send(Event::Observed(Arc::new(snapshot)));
    });
    let _watch = watch.expect("the threads start");
    app::run_drawing(state, &inbox, anchor, Mouse::Off, &Default::default(), draw)
}

/// Runs the program with a source that panics while its screen is shown.
#[test]
#[ignore = "a test below runs it on a terminal"]
fn a_program_that_panics() {
    let anchor = Anchor::now();
    let inner = healthy(anchor);
    let ended = run_view(
        anchor,
        Box::new(PanickingSource { inner, polls: 0 }),
        view::draw,
    );
    println!(
        "it ended with {:?}",
        ended.expect_err("a thread panicked").to_string()
    );
}

/// Runs the program with a drawing function that panics at the third frame that shows a snapshot.
#[test]
#[ignore = "a test below runs it on a terminal"]
fn a_program_that_panics_while_it_draws() {
    let anchor = Anchor::now();
    let mut frames = 0;
    let draw = |state: &State, frame: &mut Frame<'_>| {
        frames += usize::from(state.snapshot().is_some());
        assert!(frames < 3, "the third frame cannot be drawn");
        view::draw(state, frame);
    };
    let ended = run_view(anchor, Box::new(healthy(anchor)), draw);
    println!("it went on: {ended:?}");
}

/// Runs one of this program's tests on a terminal.
fn run_test(name: &str, directory: &Path) -> Session {
    let program = std::env::current_exe().expect("the path of this test is known");
    let arguments = ["--exact", name, "--ignored", "--nocapture"];
    let program = program.to_str().expect("the path is UTF-8");
    Session::start_program(program, &arguments, directory)
}

#[test]
fn a_panic_while_drawing_restores_the_terminal_and_the_status_says_so() {
    let directory = tempfile::tempdir().expect("a temporary directory can be made");
    let mut session = run_test(
        "ends::a_program_that_panics_while_it_draws",
        directory.path(),
    );
    session.wait("the shell's screen, with the reason", |screen| {
        !screen.alternate_screen()
            && screen
                .contents()
                .contains("the third frame cannot be drawn")
    });
    // A test program in which a test has panicked exits with this status.
    assert_eq!(session.end(), 101);
}

#[test]
fn a_panic_restores_the_terminal_before_it_is_reported_and_ends_the_program() {
    let directory = tempfile::tempdir().expect("a temporary directory can be made");
    let mut session = run_test("ends::a_program_that_panics", directory.path());
    session.wait("the program's screen", |screen| {
        screen.alternate_screen() && screen.contents().contains("demo-healthy")
    });
    session.wait("the shell's screen, with the reason", |screen| {
        !screen.alternate_screen()
            && screen
                .contents()
                .contains("this source breaks at its tenth poll")
    });
    session.wait_text("it ended with");
    assert_eq!(session.end(), 0);
}
