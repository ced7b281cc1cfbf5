//! The program on a terminal: started, looked at, quit, and the terminal left as it was.

mod common;

use portable_pty::{Child, CommandBuilder, PtySize, native_pty_system};
use rcomm_recorder::model::{OpType, ProcessGroupInfo, Rank};
use rcomm_recorder::record::{
    FlightRecorder, Operation, Placement, RecorderConfig, SignatureKey, SignatureRef,
};
use std::io::{Read, Write};
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

const BINARY: &str = env!("CARGO_BIN_EXE_rcomm-top");
const WORLD: u32 = 4;
const LATE: Rank = 2;
/// Any wait gives up after this: the test fails, and does not hang.
const PATIENCE: Duration = Duration::from_secs(60);

/// Rings of a job whose rank 2 never issues all_reduce #41.
fn stuck_job(directory: &Path) -> Vec<FlightRecorder> {
    (0..WORLD)
        .map(|rank| ring(directory, rank, if rank == LATE { 40 } else { 41 }))
        .collect()
}

fn ring(directory: &Path, rank: Rank, last: u64) -> FlightRecorder {
    let mut config = RecorderConfig::new("pty-job", rank, WORLD);
    config.placement = Placement::Dir(directory.to_owned());
    config.host = format!("n{:03}", rank / 2);
    let recorder = FlightRecorder::create(&config).expect("a ring in a fresh directory");
    let info = ProcessGroupInfo {
        id: 0,
        name: "dp_0".into(),
        desc: "dp".into(),
        ranks: (0..WORLD).collect(),
    };
    let group = recorder.add_group(&info, Duration::from_secs(600));
    let key = SignatureKey {
        backend: "cpu",
        op_name: "all_reduce",
        ..SignatureKey::default()
    };
    for seq in 1..=last {
        let operation = Operation {
            collective_seq_id: seq,
            op_id: seq,
            ..Operation::new(group, OpType::AllReduce, SignatureRef::Key(&key))
        };
        let ticket = recorder.begin(&operation);
        recorder.started(ticket);
        if seq <= 40 {
            recorder.completed(ticket);
            recorder.retired(ticket);
        }
    }
    recorder
}

/// Whether a terminal that vanishes sends SIGHUP: it does so only to the session that it controls.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Hangup {
    IsASignal,
    IsSilent,
}

/// The program on a pseudo-terminal of 100 × 30.
struct Session {
    child: Box<dyn Child + Send + Sync>,
    keys: Box<dyn Write + Send>,
    bytes: Receiver<Vec<u8>>,
    screen: vt100::Parser,
    reader: Option<JoinHandle<()>>,
}

impl Session {
    fn start(arguments: &[&str], directory: &Path) -> Self {
        Self::start_on(Hangup::IsASignal, (30, 100), arguments, directory)
    }

    /// On a terminal of so many rows and columns.
    fn start_on(
        hangup: Hangup,
        (rows, cols): (u16, u16),
        arguments: &[&str],
        directory: &Path,
    ) -> Self {
        let size = PtySize {
            rows,
            cols,
            pixel_width: 0,
            pixel_height: 0,
        };
        let pair = native_pty_system()
            .openpty(size)
            .expect("a pseudo-terminal");
        let mut command = CommandBuilder::new(BINARY);
        command.args(arguments);
        command.env("TERM", "xterm-256color");
        command.env("XDG_CONFIG_HOME", directory);
        command.env_remove("RCOMM_RING_DIR");
        command.cwd(directory);
        command.set_controlling_tty(hangup == Hangup::IsASignal);
        let child = pair
            .slave
            .spawn_command(command)
            .expect("the program starts");
        drop(pair.slave);
        let mut output = pair.master.try_clone_reader().expect("a reader");
        let keys = pair.master.take_writer().expect("a writer");
        let (sender, bytes) = channel();
        let reader = std::thread::spawn(move || {
            // The master is open as long as somebody reads from it.
            let _master = pair.master;
            let mut buffer = [0; 4096];
            while let Ok(n @ 1..) = output.read(&mut buffer) {
                if sender.send(buffer[..n].to_vec()).is_err() {
                    return;
                }
            }
        });
        Self {
            child,
            keys,
            bytes,
            screen: vt100::Parser::new(rows, cols, 0),
            reader: Some(reader),
        }
    }

    fn press(&mut self, keys: &str) {
        self.keys
            .write_all(keys.as_bytes())
            .expect("the program reads");
        self.keys.flush().expect("the program reads");
    }

    fn contents(&self) -> String {
        self.screen.screen().contents()
    }

    /// Waits until the screen is as wanted; fails with the screen when patience ends.
    fn wait(&mut self, what: &str, wanted: impl Fn(&vt100::Screen) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !wanted(self.screen.screen()) {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.bytes.recv_timeout(left) {
                Ok(bytes) => self.screen.process(&bytes),
                Err(RecvTimeoutError::Timeout) => panic!("no {what}:\n{}", self.contents()),
                Err(RecvTimeoutError::Disconnected) => {
                    assert!(
                        wanted(self.screen.screen()),
                        "ended without {what}:\n{}",
                        self.contents()
                    );
                    return;
                }
            }
        }
    }

    fn wait_text(&mut self, text: &str) {
        self.wait(text, |screen| screen.contents().contains(text));
    }

    /// Waits until the process is stopped: going on before that would be undone by the stop.
    fn wait_stopped(&self) {
        let pid = self.child.process_id().expect("it runs");
        let deadline = Instant::now() + PATIENCE;
        loop {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it runs");
            // The state stands behind the name in brackets.
            let state = stat.rsplit(')').next().unwrap_or("").trim_start();
            if state.starts_with('T') {
                return;
            }
            assert!(Instant::now() < deadline, "is not stopped: {state}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits for the end and asserts that the terminal is as it was.
    fn end(mut self) -> u32 {
        let deadline = Instant::now() + PATIENCE;
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("our child") {
                break status;
            }
            // Reading what is written keeps the program from waiting for us.
            if let Ok(bytes) = self.bytes.recv_timeout(Duration::from_millis(20)) {
                self.screen.process(&bytes);
            }
            assert!(
                Instant::now() < deadline,
                "does not end:\n{}",
                self.contents()
            );
        };
        while let Ok(bytes) = self.bytes.recv_timeout(Duration::from_secs(5)) {
            self.screen.process(&bytes);
        }
        let screen = self.screen.screen();
        assert!(!screen.alternate_screen(), "left on the alternate screen");
        assert!(!screen.hide_cursor(), "left without a cursor");
        self.reader.take().map(JoinHandle::join);
        status.exit_code()
    }

    /// Closes every file descriptor of the terminal's other end.
    fn vanish(&mut self) {
        self.keys = Box::new(std::io::sink());
        // The reader ends, and closes the last of them, at the next thing drawn that nobody takes:
        // the clock is drawn every second.
        self.bytes = channel().1;
        self.reader.take().map(JoinHandle::join);
    }

    fn wait_gone(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        while self.child.try_wait().expect("our child").is_none() {
            assert!(Instant::now() < deadline, "runs on without a terminal");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = self.child.process_id().expect("it runs");
        let pid = rustix::process::Pid::from_raw(pid as i32).expect("a pid");
        rustix::process::kill_process(pid, signal).expect("our child");
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // A test that failed leaves nothing behind, a child that nobody waited for included.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn the_late_rank_is_named_filtered_opened_and_the_terminal_restored() {
    let directory = tempfile::tempdir().expect("a directory");
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
    session.wait_text("never issued by 2");
    session.press(":rank 2\r");
    session.wait_text("rank 2 (n001/0)");
    session.press(" ");
    session.wait_text("PAUSED");
    session.press("q");
    assert_eq!(session.end(), 0);
}

#[test]
fn signals_end_it_and_leave_the_terminal_as_it_was() {
    for signal in [rustix::process::Signal::TERM, rustix::process::Signal::HUP] {
        let directory = tempfile::tempdir().expect("a directory");
        let rings = directory.path().display().to_string();
        let mut session = Session::start(&["--ring-dir", &rings], directory.path());
        session.wait_text("no ring of any job");
        session.wait_text("rcomm-top replay DIR");
        session.signal(signal);
        session.end();
    }
}

#[test]
fn a_terminal_that_vanishes_without_a_signal_ends_it() {
    let directory = tempfile::tempdir().expect("a directory");
    let _rings = stuck_job(directory.path());
    let rings = directory.path().display().to_string();
    let arguments = ["--ring-dir", &rings];
    let mut session = Session::start_on(Hangup::IsSilent, (30, 100), &arguments, directory.path());
    session.wait_text("pty-job");
    session.vanish();
    session.wait_gone();
}

#[test]
fn a_terminal_of_one_cell_is_drawn_on_and_left() {
    let directory = tempfile::tempdir().expect("a directory");
    let _rings = stuck_job(directory.path());
    let rings = directory.path().display().to_string();
    let arguments = ["--ring-dir", &rings, "--overdue", "1us"];
    let mut session = Session::start_on(Hangup::IsASignal, (1, 1), &arguments, directory.path());
    session.wait("the program's screen", vt100::Screen::alternate_screen);
    session.press("q");
    assert_eq!(session.end(), 0);
}

#[test]
fn a_ring_of_a_newer_version_is_told_beside_those_that_are_read() {
    let directory = tempfile::tempdir().expect("a directory");
    let rings = stuck_job(directory.path());
    let ring = rings[0].storage().path().expect("a file");
    let mut bytes = std::fs::read(ring).expect("readable");
    bytes[8] = 9;
    std::fs::write(ring.with_file_name("7.0.ring"), bytes).expect("writable");
    let place = directory.path().display().to_string();
    let arguments = ["--ring-dir", &place, "--overdue", "1us", "--once"];
    let (status, out, err) = run(&arguments, directory.path());
    assert_eq!(status, Some(1), "{out}{err}");
    assert!(out.contains("rank 2") && out.contains("N301"), "{out}");
    let arguments = [&arguments[..4], &["--json"]].concat();
    let (_, out, _) = run(&arguments, directory.path());
    assert!(out.contains("use a newer reader"), "{out}");
}

#[test]
fn ctrl_z_gives_the_terminal_back_and_fg_takes_it_again() {
    let directory = tempfile::tempdir().expect("a directory");
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

#[test]
fn a_source_that_dies_is_shown_and_the_screen_stays() {
    let directory = tempfile::tempdir().expect("a directory");
    let rings = stuck_job(directory.path());
    let place = directory.path().display().to_string();
    let mut session = Session::start(
        &["--ring-dir", &place, "--refresh", "100ms"],
        directory.path(),
    );
    session.wait_text("pty-job");
    // The job ends in order and takes its rings away.
    for ring in &rings {
        ring.close().expect("an open ring");
    }
    drop(rings);
    session.press(":rank 1\r");
    session.wait_text("process gone");
    session.press("q");
    session.end();
}

fn run(arguments: &[&str], directory: &Path) -> (Option<i32>, String, String) {
    let output = Command::new(BINARY)
        .args(arguments)
        .env("XDG_CONFIG_HOME", directory)
        .env_remove("RCOMM_RING_DIR")
        .output()
        .expect("the program starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (
        output.status.code(),
        text(&output.stdout),
        text(&output.stderr),
    )
}

#[test]
fn once_and_json_end_with_the_verdict() {
    let directory = tempfile::tempdir().expect("a directory");
    let _rings = stuck_job(directory.path());
    let rings = directory.path().display().to_string();
    let stuck = ["--ring-dir", &rings, "--overdue", "1us"];
    let (status, out, err) = run(&[&stuck[..], &["--once"]].concat(), directory.path());
    assert_eq!(status, Some(1), "{out}{err}");
    assert!(out.contains("STUCK") && out.contains("rank 2"), "{out}");
    assert!(out.lines().count() < 30, "{out}");
    let (status, out, _) = run(&[&stuck[..], &["--json"]].concat(), directory.path());
    assert_eq!(status, Some(1));
    let report: rcomm_analyzer::Report = serde_json::from_str(&out).expect("a report");
    assert_eq!(report.findings[0].culprit_ranks, [LATE]);
    let young = ["--ring-dir", &rings, "--overdue", "1h", "--once"];
    assert_eq!(run(&young, directory.path()).0, Some(0));
}

#[test]
fn what_cannot_be_told_ends_with_two_and_a_sentence() {
    let directory = tempfile::tempdir().expect("a directory");
    let place = directory.path().display().to_string();
    for (arguments, part) in [
        (&["--ring-dir", &place, "--once"][..], "no ring of any job"),
        (&["--ring-dir", &place, "--json"], "rcomm-top replay DIR"),
        (&["replay", "--once", "/does/not/exist"], "/does/not/exist"),
        (&["--ring-dir", &place], "--once or --json"),
        (&["--filter", "rank:x", "--once"], "not a rank"),
        (
            &["--config", "/does/not/exist", "--once"],
            "/does/not/exist",
        ),
        (&["--no-such-option"], "--no-such-option"),
    ] {
        let (status, _, err) = run(arguments, directory.path());
        assert_eq!(status, Some(2), "{arguments:?}: {err}");
        assert!(err.contains(part), "{arguments:?}: {err}");
    }
}

#[test]
fn a_recording_and_dumps_are_replayed_on_the_same_screens() {
    let directory = tempfile::tempdir().expect("a directory");
    let rings = stuck_job(directory.path());
    let place = directory.path().display().to_string();
    let recording = directory.path().join("job.rec").display().to_string();
    let arguments = [
        "--ring-dir",
        &place,
        "--overdue",
        "1us",
        "--json",
        "--record",
        &recording,
    ];
    let (status, live, err) = run(&arguments, directory.path());
    assert_eq!(status, Some(1), "{err}");
    let replay = ["replay", "--overdue", "1us", "--json", &recording];
    let (status, again, err) = run(&replay, directory.path());
    assert_eq!(status, Some(1), "{err}");
    let read = |text: &str| serde_json::from_str::<rcomm_analyzer::Report>(text).expect("a report");
    assert_eq!(read(&live).verdict, read(&again).verdict);
    assert_eq!(
        read(&live).findings[0].sentence,
        read(&again).findings[0].sentence
    );
    let dumps = directory.path().join("dumps");
    std::fs::create_dir(&dumps).expect("writable");
    for (rank, ring) in rings.iter().enumerate() {
        let path = dumps.join(format!("rank_{rank}.json"));
        std::fs::write(path, ring.snapshot().to_json()).expect("writable");
    }
    let dumps = dumps.display().to_string();
    let (status, out, err) = run(&["replay", "--once", &dumps], directory.path());
    assert_eq!(status, Some(1), "{out}{err}");
    assert!(out.contains("REPLAY") && out.contains("rank 2"), "{out}");
    let mut session = Session::start(&["replay", &recording], directory.path());
    session.wait_text("pty-job");
    session.wait_text("REPLAY");
    session.press("q");
    session.end();
}

#[test]
fn it_draws_in_tmux_too() {
    let available = Command::new("tmux")
        .arg("-V")
        .output()
        .is_ok_and(|out| out.status.success());
    if !available {
        let _ = writeln!(std::io::stderr(), "skipped: tmux is not installed");
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let _rings = stuck_job(directory.path());
    let socket = directory.path().join("tmux").display().to_string();
    let tmux = |arguments: &[&str]| {
        let out = Command::new("tmux")
            .args(["-S", &socket])
            .args(arguments)
            .output();
        let out = out.expect("tmux is there");
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
    let deadline = Instant::now() + PATIENCE;
    let mut screen = String::new();
    while !screen.contains("rank 2 never issued") && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(50));
        screen = tmux(&["capture-pane", "-p"]);
    }
    tmux(&["kill-server"]);
    assert!(screen.contains("rank 2 never issued"), "{screen}");
}
