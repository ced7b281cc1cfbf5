//! Starts and ends the observers.

use anyhow::{Context, ensure};
use portable_pty::{CommandBuilder, PtySize, native_pty_system};
use rcomm_recorder::publish::{EndpointAddress, EndpointClient};
use rcomm_tests::process::free_port;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The longest time that an observer may take to begin, and that one of its reads may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// The pause between two polls of `rcomm-web`.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// What observes the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Nothing,
    /// Nothing once more, which shows the noise of the machine.
    Again,
    /// `rcomm-top` on a terminal.
    Top,
    /// `rcomm-web`, whose metrics are read about ten times a second.
    Web,
    /// A client that reads rank 0's dump from its endpoint without pause.
    Endpoint,
}

impl Kind {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::Again => "nothing again",
            Self::Top => "rcomm-top",
            Self::Web => "rcomm-web, polled",
            Self::Endpoint => "endpoint without pause",
        }
    }

    fn program(self) -> anyhow::Result<Option<PathBuf>> {
        let name = match self {
            Self::Top => "rcomm-top",
            Self::Web => "rcomm-web",
            _ => return Ok(None),
        };
        Ok(Some(std::env::current_exe()?.with_file_name(name)))
    }

    /// The program of this observer, if it is not in the folder of this program.
    pub(crate) fn missing_program(self) -> anyhow::Result<Option<PathBuf>> {
        Ok(self.program()?.filter(|program| !program.exists()))
    }
}

pub(crate) fn rings(folder: &Path) -> PathBuf {
    folder.join("rings")
}

/// An observer at work.
pub(crate) struct Watching {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<anyhow::Result<()>>>,
    program: Option<Child>,
    terminal: Option<Box<dyn portable_pty::Child + Send + Sync>>,
}

impl Watching {
    /// Starts the observer, and returns when it has read the job's records for the first time.
    pub(crate) fn begin(kind: Kind, folder: &Path) -> anyhow::Result<Self> {
        let mut watching = Self {
            stop: Arc::default(),
            thread: None,
            program: None,
            terminal: None,
        };
        let reads = Arc::new(AtomicU64::new(0));
        let counter = reads.clone();
        match (kind, kind.program()?) {
            (Kind::Top, Some(program)) => watching.open_terminal(&program, folder, counter)?,
            (Kind::Web, Some(program)) => {
                let port = free_port();
                let mut command = Command::new(program);
                command.args(["--no-token", "--listen", &format!("127.0.0.1:{port}")]);
                command.arg("--ring-dir").arg(rings(folder));
                let program = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
                watching.program = Some(program?);
                watching.repeat(move || {
                    // The server may not listen yet.
                    if read_metrics(port).is_ok_and(|page| page.contains("rcomm_")) {
                        counter.fetch_add(1, Ordering::Relaxed);
                    }
                    std::thread::sleep(POLL_INTERVAL);
                    Ok(())
                });
            }
            (Kind::Endpoint, _) => {
                let socket = rings(folder).join("observers").join("0.0.sock");
                let client = EndpointClient::new(EndpointAddress::Unix(socket), None);
                watching.repeat(move || {
                    client.dump(None, Instant::now() + PATIENCE)?;
                    counter.fetch_add(1, Ordering::Relaxed);
                    Ok(())
                });
            }
            _ => {
                reads.store(1, Ordering::Relaxed);
            }
        }
        let until = Instant::now() + PATIENCE;
        while reads.load(Ordering::Relaxed) == 0 {
            ensure!(Instant::now() < until, "{} sees no job", kind.name());
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(watching)
    }

    /// Calls `read` on a separate thread, again and again, until it fails or the observer is stopped.
    fn repeat(&mut self, mut read: impl FnMut() -> anyhow::Result<()> + Send + 'static) {
        let stop = self.stop.clone();
        self.thread = Some(std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                read()?;
            }
            Ok(())
        }));
    }

    fn open_terminal(
        &mut self,
        program: &Path,
        folder: &Path,
        reads: Arc<AtomicU64>,
    ) -> anyhow::Result<()> {
        let size = PtySize {
            rows: 50,
            cols: 160,
            pixel_width: 0,
            pixel_height: 0,
        };
        let pair = native_pty_system().openpty(size)?;
        let mut command = CommandBuilder::new(program);
        command.arg("--ring-dir");
        command.arg(rings(folder));
        command.env("TERM", "xterm-256color");
        command.env("XDG_CONFIG_HOME", folder);
        self.terminal = Some(pair.slave.spawn_command(command)?);
        drop(pair.slave);
        let mut output = pair.master.try_clone_reader()?;
        self.thread = Some(std::thread::spawn(move || {
            // The master stays open while there is a reader.
            let _master = pair.master;
            let (mut buffer, mut seen) = ([0; 4096], Vec::new());
            // The read fails when the program has ended.
            while let Ok(length @ 1..) = output.read(&mut buffer) {
                if reads.load(Ordering::Relaxed) == 0 {
                    seen.extend_from_slice(&buffer[..length]);
                    let is_shown = seen.windows(9).any(|text| text == b"observers");
                    reads.store(u64::from(is_shown), Ordering::Relaxed);
                }
            }
            Ok(())
        }));
        Ok(())
    }

    /// Ends the observer.
    ///
    /// # Errors
    /// If it has failed, or `rcomm-web` has ended by itself.
    pub(crate) fn end(mut self) -> anyhow::Result<()> {
        if let Some(program) = &mut self.program {
            let ended = program.try_wait()?;
            ensure!(ended.is_none(), "rcomm-web ended by itself: {ended:?}");
        }
        self.stop()
    }

    fn stop(&mut self) -> anyhow::Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(mut terminal) = self.terminal.take() {
            let _ = terminal.kill();
            terminal.wait()?;
        }
        let thread = self.thread.take().map(JoinHandle::join);
        if let Some(mut program) = self.program.take() {
            let _ = program.kill();
            program.wait()?;
        }
        match thread {
            Some(Ok(ended)) => ended,
            Some(Err(_)) => anyhow::bail!("the observer's thread panicked"),
            None => Ok(()),
        }
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        // This does something only after an error, which the caller already has.
        let _ = self.stop();
    }
}

fn read_metrics(port: u16) -> anyhow::Result<String> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let request =
        format!("GET /metrics HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes())?;
    let mut page = String::new();
    stream
        .read_to_string(&mut page)
        .context("cannot read the metrics")?;
    Ok(page)
}
