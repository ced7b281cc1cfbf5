//! Runs one ignored test of this test program in a process of its own.

#![allow(dead_code, clippy::unwrap_used)]

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Stdio};

/// The environment variable that tells a child the directory for its files.
const DIRECTORY: &str = "RCOMM_TEST_CHILD_DIRECTORY";
/// Prefix of lines from `print_line`, since the test harness prints as well.
const MARK: &str = "child prints: ";

/// In the child: the directory for its files. `None` in the parent.
pub(crate) fn directory() -> Option<PathBuf> {
    std::env::var_os(DIRECTORY).map(PathBuf::from)
}

/// In the child: prints one line for the parent.
pub(crate) fn print_line(line: &str) {
    let mut out = std::io::stdout();
    writeln!(out, "\n{MARK}{line}").unwrap();
    out.flush().unwrap();
}

/// The child, killed when dropped.
pub(crate) struct Child {
    process: std::process::Child,
    output: BufReader<ChildStdout>,
}

impl Child {
    /// Runs the ignored test of this name.
    pub(crate) fn spawn(test: &str, directory: &Path) -> Self {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--ignored", "--nocapture"])
            .env(DIRECTORY, directory)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(process.stdout.take().unwrap());
        Self { process, output }
    }

    /// Waits for the next line that the child wrote with `print_line`, and skips all other output. Panics if the output
    /// ends first.
    pub(crate) fn read_line(&mut self) -> String {
        loop {
            let mut line = String::new();
            let read = self.output.read_line(&mut line).unwrap();
            assert!(
                read > 0,
                "the output of the child ended before its next line"
            );
            if let Some(text) = line.trim_end().strip_prefix(MARK) {
                return text.to_owned();
            }
        }
    }

    /// Sends the child a signal.
    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_child(&self.process);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Stops the child by a signal, and waits until it has stopped.
    pub(crate) fn stop(&self) {
        use rustix::process::{Pid, Signal, WaitOptions, waitpid};
        self.signal(Signal::STOP);
        let pid = Pid::from_child(&self.process);
        // This call does not reap a child that has stopped.
        let stopped = waitpid(Some(pid), WaitOptions::UNTRACED).unwrap();
        assert!(stopped.is_some_and(|(_, status)| status.stopped()));
    }

    /// Waits for the end of the child.
    pub(crate) fn wait(&mut self) {
        self.process.wait().unwrap();
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
