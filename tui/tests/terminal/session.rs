//! Runs a program on a pseudo-terminal, and interprets its output as a terminal does.

use portable_pty::{Child, CommandBuilder, PtySize, native_pty_system};
use std::io::{Read, Write};
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

pub(crate) const BINARY: &str = env!("CARGO_BIN_EXE_rcomm-top");
/// Time limit of every wait: a test fails instead of hanging.
pub(crate) const WAIT_LIMIT: Duration = Duration::from_secs(60);

/// Whether the program gets SIGHUP when its terminal vanishes: only if the terminal controls the program's session.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hangup {
    Signal,
    Silent,
}

/// A program on a pseudo-terminal.
pub(crate) struct Session {
    child: Box<dyn Child + Send + Sync>,
    /// What is written here, the program reads as typed.
    keys: Box<dyn Write + Send>,
    /// What the program has written, from the thread `reader`.
    bytes: Receiver<Vec<u8>>,
    /// The screen after those of the bytes that were received here.
    screen: vt100::Parser,
    reader: Option<JoinHandle<()>>,
}

impl Session {
    /// Starts the program on a terminal of 100 × 30, with `directory` as its working and configuration directory.
    pub(crate) fn start(arguments: &[&str], directory: &Path) -> Self {
        Self::start_on(Hangup::Signal, (30, 100), arguments, directory)
    }

    /// Starts the program on a terminal of this size (rows, columns).
    pub(crate) fn start_on(
        hangup: Hangup,
        (rows, cols): (u16, u16),
        arguments: &[&str],
        directory: &Path,
    ) -> Self {
        Self::start_command(
            hangup,
            (rows, cols),
            Some("dark"),
            BINARY,
            arguments,
            directory,
        )
    }

    /// Starts the program without a theme, so that it asks the terminal for its background.
    pub(crate) fn start_asking(arguments: &[&str], directory: &Path) -> Self {
        Self::start_command(
            Hangup::Signal,
            (30, 100),
            None,
            BINARY,
            arguments,
            directory,
        )
    }

    /// Starts any program on a terminal of 100 × 30.
    pub(crate) fn start_program(program: &str, arguments: &[&str], directory: &Path) -> Self {
        Self::start_command(
            Hangup::Signal,
            (30, 100),
            Some("dark"),
            program,
            arguments,
            directory,
        )
    }

    /// Starts a program on a terminal of this size (rows, columns). Without a `theme`, `rcomm-top` asks the terminal
    /// for its background.
    fn start_command(
        hangup: Hangup,
        (rows, cols): (u16, u16),
        theme: Option<&str>,
        program: &str,
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
            .expect("the system has a free pseudo-terminal");
        let mut command = CommandBuilder::new(program);
        command.args(arguments);
        command.env("TERM", "xterm-256color");
        command.env("XDG_CONFIG_HOME", directory);
        command.env_remove("RCOMM_RING_DIR");
        command.env_remove("COLORTERM");
        command.env_remove("NO_COLOR");
        command.env_remove("COLORFGBG");
        match theme {
            Some(theme) => command.env("RCOMM_TOP_THEME", theme),
            None => command.env_remove("RCOMM_TOP_THEME"),
        }
        command.cwd(directory);
        command.set_controlling_tty(hangup == Hangup::Signal);
        let child = pair
            .slave
            .spawn_command(command)
            .expect("the program starts");
        drop(pair.slave);
        let mut output = pair
            .master
            .try_clone_reader()
            .expect("the terminal can be read");
        let keys = pair
            .master
            .take_writer()
            .expect("the terminal can be written to");
        let (sender, bytes) = channel();
        let reader = std::thread::spawn(move || {
            // The master stays open while a reader has it.
            let _master = pair.master;
            // Read small pieces, so that the screen is examined often and no short-lived screen is missed.
            let mut buffer = [0; 128];
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

    /// Types these characters.
    pub(crate) fn press(&mut self, keys: &str) {
        self.keys
            .write_all(keys.as_bytes())
            .expect("the program reads");
        self.keys.flush().expect("the program reads");
    }

    /// The text on the screen after the last wait.
    pub(crate) fn contents(&self) -> String {
        self.screen.screen().contents()
    }

    /// Waits until `wanted` holds for the screen; fails at the time limit with the screen and the words `expected`.
    pub(crate) fn wait(&mut self, expected: &str, wanted: impl Fn(&vt100::Screen) -> bool) {
        let deadline = Instant::now() + WAIT_LIMIT;
        while !wanted(self.screen.screen()) {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.bytes.recv_timeout(left) {
                Ok(bytes) => self.screen.process(&bytes),
                Err(RecvTimeoutError::Timeout) => panic!("no {expected}:\n{}", self.contents()),
                Err(RecvTimeoutError::Disconnected) => {
                    assert!(
                        wanted(self.screen.screen()),
                        "ended without {expected}:\n{}",
                        self.contents()
                    );
                    return;
                }
            }
        }
    }

    /// Waits until the program has written these bytes, which need not be text.
    pub(crate) fn wait_bytes(&mut self, wanted: &[u8]) {
        let deadline = Instant::now() + WAIT_LIMIT;
        let mut written = Vec::new();
        while !written.windows(wanted.len()).any(|part| part == wanted) {
            let left = deadline.saturating_duration_since(Instant::now());
            let bytes = self.bytes.recv_timeout(left);
            let bytes = bytes.unwrap_or_else(|error| panic!("{error} before {wanted:?}"));
            self.screen.process(&bytes);
            written.extend(bytes);
        }
    }

    /// The color of the first character of `text` on the screen.
    pub(crate) fn color_of(&self, text: &str) -> vt100::Color {
        let screen = self.screen.screen();
        let mut rows = screen.rows(0, screen.size().1).enumerate();
        let place = rows.find_map(|(row, line)| Some((row, line.find(text)?)));
        let (row, byte) = place.unwrap_or_else(|| panic!("no {text}:\n{}", self.contents()));
        let line = screen.rows(0, screen.size().1).nth(row).unwrap_or_default();
        let column = line[..byte].chars().count();
        let cell = screen
            .cell(row as u16, column as u16)
            .expect("the cell is on the screen");
        cell.fgcolor()
    }

    /// Waits until the screen contains this text.
    pub(crate) fn wait_text(&mut self, text: &str) {
        self.wait(text, |screen| screen.contents().contains(text));
    }

    /// Waits until the process is stopped: a SIGCONT that comes before the stop has no effect.
    pub(crate) fn wait_stopped(&self) {
        let pid = self.child.process_id().expect("the program runs");
        let deadline = Instant::now() + WAIT_LIMIT;
        loop {
            let stat =
                std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("the program runs");
            // The state follows the name in brackets.
            let state = stat.rsplit(')').next().unwrap_or("").trim_start();
            if state.starts_with('T') {
                return;
            }
            assert!(Instant::now() < deadline, "is not stopped: {state}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Waits for the end and asserts that the program has left the alternate screen and shows the cursor; returns the
    /// exit code.
    pub(crate) fn end(mut self) -> u32 {
        let deadline = Instant::now() + WAIT_LIMIT;
        let status = loop {
            if let Some(status) = self
                .child
                .try_wait()
                .expect("the process is a child of this one")
            {
                break status;
            }
            // Read the output, so that the program does not block on it.
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

    /// Closes every file descriptor of the terminal's end that is not the program's.
    pub(crate) fn vanish(&mut self) {
        self.keys = Box::new(std::io::sink());
        // The reader ends, and closes the last descriptor, at the next output that is not received: the clock is drawn
        // every second.
        self.bytes = channel().1;
        self.reader.take().map(JoinHandle::join);
    }

    /// Waits until the program has ended, whatever its screen shows.
    pub(crate) fn wait_gone(&mut self) {
        let deadline = Instant::now() + WAIT_LIMIT;
        while self
            .child
            .try_wait()
            .expect("the process is a child of this one")
            .is_none()
        {
            assert!(Instant::now() < deadline, "runs on without a terminal");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Sends a signal to the program.
    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        let pid = self.child.process_id().expect("the program runs");
        let pid = rustix::process::Pid::from_raw(pid as i32).expect("the process id is valid");
        rustix::process::kill_process(pid, signal).expect("the process is a child of this one");
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // A failed test leaves no process behind, not even an unreaped one.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs the program without a terminal, with its configuration in `directory`; returns its exit code, its standard
/// output and its standard error.
pub(crate) fn run(arguments: &[&str], directory: &Path) -> (Option<i32>, String, String) {
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
