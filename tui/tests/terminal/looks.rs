//! What the user sees and what the keys do, from start to exit.

use crate::rings::stuck_job;
use crate::session::{BINARY, Hangup, Session, WAIT_LIMIT, run};
use std::io::Write as _;
use std::process::Command;
use std::time::{Duration, Instant};

#[test]
fn the_rank_that_never_joined_is_named_and_opened_and_the_terminal_is_restored() {
    let directory = tempfile::tempdir().expect("a temporary directory can be made");
    let _rings = stuck_job(directory.path());
    let rings = directory.path().display().to_string();
    let mut session = Session::start(
        &[
            "--ring-dir",
            &rings,
            "--overdue",
            "200ms",
            "--refresh",
            "100ms",
        ],
        directory.path(),
    );
    session.wait_text("STUCK");
    session.wait_text("rank 2 never issued all_reduce #41");
    session.press("2");
    session.wait_text("2:groups");
    session.press("/group:nothing");
    session.wait_text("no group passes the filter");
    session.press("\x15group:dp\r");
    session.wait_text("dp_0");
    session.press("\r");
    session.wait_text("matrix");
    session.wait_text("never issued by rank 2");
    session.press(":rank 2\r");
    session.wait_text("rank 2 (n001/0)");
    session.press(" ");
    session.wait_text("PAUSED");
    session.press("q");
    assert_eq!(session.end(), 0);
}

/// On a busy machine, the terminal's answer may come later than the program waits for it. The program then shows the
/// dark theme and takes no character of the answer as a key press, so the test tries again.
#[test]
fn a_light_background_gives_the_light_theme() {
    let directory = tempfile::tempdir().expect("a temporary directory can be made");
    let _rings = stuck_job(directory.path());
    let rings = directory.path().display().to_string();
    let arguments = ["--ring-dir", &rings, "--overdue", "200ms"];
    let color = |answer: &str| {
        let mut session = Session::start_asking(&arguments, directory.path());
        session.wait_bytes(b"\x1b]11;?");
        session.press(answer);
        session.wait_text("STUCK");
        let color = session.color_of("STUCK");
        session.press("q");
        assert_eq!(session.end(), 0);
        color
    };
    let dark = vt100::Color::Idx(202);
    assert_eq!(color("\x1b]11;rgb:0000/0000/0000\x1b\\\x1b[?62c"), dark);
    let deadline = Instant::now() + WAIT_LIMIT;
    while color("\x1b]11;rgb:ffff/ffff/ffff\x1b\\\x1b[?62c") != vt100::Color::Idx(130) {
        assert!(Instant::now() < deadline, "never in the light theme");
    }
}

#[test]
fn a_terminal_of_one_cell_is_drawn_on_and_left() {
    let directory = tempfile::tempdir().expect("a temporary directory can be made");
    let _rings = stuck_job(directory.path());
    let rings = directory.path().display().to_string();
    let arguments = ["--ring-dir", &rings, "--overdue", "1us"];
    let mut session = Session::start_on(Hangup::Signal, (1, 1), &arguments, directory.path());
    session.wait("the program's screen", vt100::Screen::alternate_screen);
    session.press("q");
    assert_eq!(session.end(), 0);
}

#[test]
fn a_ring_of_a_newer_version_is_reported_with_those_that_are_read() {
    let directory = tempfile::tempdir().expect("a temporary directory can be made");
    let rings = stuck_job(directory.path());
    let ring = rings[0].storage().path().expect("the ring is a file");
    let mut bytes = std::fs::read(ring).expect("the path is readable");
    bytes[8] = 9;
    std::fs::write(ring.with_file_name("7.0.ring"), bytes).expect("the path is writable");
    let ring_dir = directory.path().display().to_string();
    let arguments = ["--ring-dir", &ring_dir, "--overdue", "1us", "--once"];
    let (status, out, err) = run(&arguments, directory.path());
    assert_eq!(status, Some(1), "{out}{err}");
    assert!(out.contains("rank 2") && out.contains("N301"), "{out}");
    let arguments = [&arguments[..4], &["--json"]].concat();
    let (_, out, _) = run(&arguments, directory.path());
    assert!(out.contains("use a newer reader"), "{out}");
}

#[test]
fn a_job_that_ends_stays_on_the_screen_and_its_processes_are_shown_as_gone() {
    let directory = tempfile::tempdir().expect("a temporary directory can be made");
    let rings = stuck_job(directory.path());
    let ring_dir = directory.path().display().to_string();
    let mut session = Session::start(
        &["--ring-dir", &ring_dir, "--refresh", "100ms"],
        directory.path(),
    );
    session.wait_text("pty-job");
    // The job ends cleanly and removes its rings.
    for ring in &rings {
        ring.close().expect("the ring is open");
    }
    drop(rings);
    session.press(":rank 1\r");
    session.wait_text("process gone");
    session.press("q");
    session.end();
}

#[test]
fn the_finding_is_drawn_in_tmux() {
    let available = Command::new("tmux")
        .arg("-V")
        .output()
        .is_ok_and(|out| out.status.success());
    if !available {
        let _ = writeln!(std::io::stderr(), "skipped: tmux is not installed");
        return;
    }
    let directory = tempfile::tempdir().expect("a temporary directory can be made");
    let _rings = stuck_job(directory.path());
    let socket = directory.path().join("tmux").display().to_string();
    let tmux = |arguments: &[&str]| {
        let out = Command::new("tmux")
            .args(["-S", &socket])
            .args(arguments)
            .output();
        let out = out.expect("tmux is installed");
        String::from_utf8_lossy(&out.stdout).into_owned()
    };
    let line = format!(
        "{BINARY} --ring-dir {} --overdue 200ms",
        directory.path().display()
    );
    tmux(&[
        "-f",
        "/dev/null",
        "new-session",
        "-d",
        "-x",
        "100",
        "-y",
        "30",
        &line,
    ]);
    let deadline = Instant::now() + WAIT_LIMIT;
    let mut screen = String::new();
    while !screen.contains("rank 2 never issued") && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(50));
        screen = tmux(&["capture-pane", "-p"]);
    }
    tmux(&["kill-server"]);
    assert!(screen.contains("rank 2 never issued"), "{screen}");
}

#[test]
fn a_terminal_that_cannot_move_its_cursor_is_refused_with_advice() {
    let directory = tempfile::tempdir().expect("a temporary directory can be made");
    let arguments = ["TERM=dumb", BINARY, "demo", "stuck"];
    let mut session = Session::start_program("env", &arguments, directory.path());
    session.wait_text("use --once or --json");
    assert_eq!(session.end(), 2);
}

#[test]
fn the_screen_that_is_printed_once_has_the_whole_sentence() {
    let dumps = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../tests/fixtures/dumps/mixed-world-w4/pickle"
    );
    let directory = tempfile::tempdir().expect("a temporary directory can be made");
    let (_, text, _) = run(&["replay", dumps, "--once"], directory.path());
    let head: Vec<&str> = text
        .lines()
        .take_while(|line| !line.starts_with('─'))
        .collect();
    assert!(
        head.iter().any(|line| line.contains("(train.py:61)")),
        "{text}"
    );
    assert!(head.iter().all(|line| !line.contains('…')), "{text}");
    assert!(text.lines().all(|line| !line.is_empty()), "{text}");
}
