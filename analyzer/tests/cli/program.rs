//! Runs the program.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStderr, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// The longest wait for the end or for a line of a running program, far above what it needs.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// The result of a run.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// The program with these arguments, without the caller's settings in its environment and without input.
pub(crate) fn rcomm_fr(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rcomm-fr"));
    command
        .args(args)
        .env_remove("NO_COLOR")
        .env_remove("CLICOLOR_FORCE")
        .env_remove("COLUMNS")
        .env_remove("RCOMM_RING_DIR")
        .stdin(Stdio::null());
    command
}

/// Runs the program with these arguments until it ends.
pub(crate) fn run(args: &[&str]) -> Run {
    finish(rcomm_fr(args))
}

/// Runs a prepared command until it ends.
pub(crate) fn finish(mut command: Command) -> Run {
    let Output {
        status,
        stdout,
        stderr,
    } = command.output().unwrap();
    Run {
        code: status.code(),
        stdout: String::from_utf8(stdout).unwrap(),
        stderr: String::from_utf8(stderr).unwrap(),
    }
}

/// Starts the program, reads the first byte of its output and closes the pipe; returns the exit code.
pub(crate) fn run_with_reader_that_stops(args: &[&str]) -> Option<i32> {
    let mut child = rcomm_fr(args)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut byte = [0; 1];
    let mut pipe = child.stdout.take().unwrap();
    pipe.read_exact(&mut byte).unwrap();
    drop(pipe);
    wait(&mut child)
}

/// Waits for the end of the program and returns its exit code; kills the program and panics after [`DEADLINE`].
pub(crate) fn wait(child: &mut Child) -> Option<i32> {
    let deadline = Instant::now() + DEADLINE;
    loop {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        if Instant::now() > deadline {
            let _ = child.kill();
            let _ = child.wait();
            panic!("rcomm-fr did not end within {DEADLINE:?}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A folder of a scenario of the checked-in dumps.
pub(crate) fn fixture(scenario: &str, form: &str) -> String {
    let dumps = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/fixtures/dumps");
    format!("{dumps}/{scenario}/{form}")
}

/// The lines that a running program writes to standard error, read with a deadline.
pub(crate) struct Reader {
    lines: Receiver<String>,
    skipped: Vec<String>,
}

impl Reader {
    pub(crate) fn of(stderr: ChildStderr) -> Self {
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Self {
            lines,
            skipped: Vec::new(),
        }
    }

    /// The next line that holds this text; the lines before it are skipped. Panics after [`DEADLINE`].
    pub(crate) fn wait_for(&mut self, text: &str) -> String {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) if line.contains(text) => return line,
                Ok(line) => self.skipped.push(line),
                Err(_) => panic!("no line holds {text:?}: {:?}", self.skipped),
            }
        }
    }
}
