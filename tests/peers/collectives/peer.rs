//! [`Peer`]: a job that is measured. Its ranks wait for orders.

use anyhow::{Context, Result, bail, ensure};
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long a job may take to start, and a rank to answer.
const TIME_LIMIT: Duration = Duration::from_secs(60);

/// Percentiles of an operation's times, in microseconds. Each is the largest among the ranks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Times {
    pub(crate) p50: f64,
    pub(crate) p99: f64,
}

/// A job that runs.
pub(crate) struct Peer {
    name: String,
    processes: Vec<Child>,
    /// The control connection of each rank.
    ranks: Vec<BufReader<TcpStream>>,
}

/// Where the sources of the peers are.
fn sources() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("peers")
}

/// Runs a program for its output; `None` if it is not there or fails.
fn output_of(command: &mut Command) -> Option<String> {
    let output = command.stdin(Stdio::null()).output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    output.status.success().then_some(text)
}

/// The compiler and the starter of this MPI, by the names that they have on this machine; `None` if one is missing.
fn mpi_of(name: &str) -> Option<(&'static str, &'static str)> {
    let candidates: [(&str, &str); 3] = match name {
        "openmpi" => [
            ("mpicc.openmpi", "mpirun.openmpi"),
            ("mpicc", "mpirun"),
            ("mpicc", "mpiexec"),
        ],
        _ => [
            ("mpicc.mpich", "mpirun.mpich"),
            ("mpicc.mpich", "mpiexec.hydra"),
            ("mpicc", "mpirun"),
        ],
    };
    let is_this_mpi = |starter: &str| {
        let version = output_of(Command::new(starter).arg("--version")).unwrap_or_default();
        match name {
            "openmpi" => version.contains("Open MPI"),
            _ => version.contains("HYDRA"),
        }
    };
    candidates.into_iter().find(|(compiler, starter)| {
        is_this_mpi(starter) && output_of(Command::new(compiler).arg("--version")).is_some()
    })
}

/// The modes of gloo's C++ program: sockets are polled by the caller's thread or served by gloo's own, and the
/// reduction is by recursive halving and doubling or around a ring.
const GLOO: [&str; 4] = ["gloo-busy", "gloo-busy-ring", "gloo-cpp", "gloo-cpp-ring"];

/// The file of a program that was built here; removed on drop. Processes that already run the program do not need it.
struct Program(PathBuf);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A new folder, removed with its content on drop.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Result<Self> {
        let path = format!("rcomm-peer-{name}-{}.store", std::process::id());
        let path = std::env::temp_dir().join(path);
        std::fs::create_dir(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Builds a peer's program; the error names the step that failed.
fn build(name: &str, compiler: &str, source: &str, libraries: &[&str]) -> Result<Program, String> {
    let path = std::env::temp_dir().join(format!("rcomm-peer-{name}-{}", std::process::id()));
    let built = Command::new(compiler)
        .args(["-O3", "-march=native", "-o"])
        .args([&path, &sources().join(source)])
        .args(libraries)
        .stderr(Stdio::null())
        .status();
    match built {
        Ok(status) if status.success() => Ok(Program(path)),
        Ok(_) => Err(format!("{compiler} fails on {source}")),
        Err(error) => Err(format!("cannot start {compiler}: {error}")),
    }
}

impl Peer {
    /// Starts a job of `ranks` ranks; the inner error names what is missing for it on this machine.
    pub(crate) fn start(name: &str, ranks: u32) -> Result<Result<Self, String>> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let port = listener.local_addr()?.port();
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        // Unbound ranks that outnumber the cores are spread unevenly by the system, and stay so.
        let core_of = |rank: u32| (rank as usize % cores).to_string();
        let mut commands = Vec::new();
        let mut kept_files = None;
        match name {
            ours if ours.starts_with("rcomm") => {
                let program = match ours.split_once('=') {
                    Some((_, program)) => program.into(),
                    None => std::env::current_exe()?,
                };
                for rank in 0..ranks {
                    let mut command = Command::new(&program);
                    command.args(["--control", &port.to_string(), "--name", name]);
                    if ours.starts_with("rcomm-tcp") {
                        command.env("RCOMM_TRANSPORT", "tcp");
                    }
                    commands.push((rank, command));
                }
            }
            "openmpi" | "mpich" => {
                let Some((compiler, starter)) = mpi_of(name) else {
                    return Ok(Err("its compiler or its starter is not installed".into()));
                };
                let program = match build(name, compiler, "mpi.c", &[]) {
                    Ok(program) => program,
                    Err(reason) => return Ok(Err(reason)),
                };
                let mut command = Command::new(starter);
                command.args(["-n", &ranks.to_string()]);
                let is_crowded = cores < ranks as usize;
                if name == "openmpi" {
                    // Open MPI refuses to run as the superuser unless both variables are set.
                    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1");
                    command.env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
                    if is_crowded {
                        command.args(["--oversubscribe", "--mca", "mpi_yield_when_idle", "1"]);
                        command.args(["--map-by", "core", "--bind-to", "core:overload-allowed"]);
                    } else {
                        command.args(["--bind-to", "core"]);
                    }
                } else {
                    command.args(["-bind-to", "core"]);
                }
                command
                    .arg(&program.0)
                    .args(["127.0.0.1", &port.to_string(), name]);
                let mut peer = Self::spawn(name, vec![command])?;
                peer.accept_ranks(&listener, ranks)?;
                return Ok(Ok(peer));
            }
            "gloo" => {
                let Ok(python) = std::env::var("RCOMM_TEST_PYTHON") else {
                    return Ok(Err("RCOMM_TEST_PYTHON names no Python with torch".into()));
                };
                for rank in 0..ranks {
                    let mut command = Command::new(&python);
                    command.arg(sources().join("gloo.py"));
                    command.args(["127.0.0.1", &port.to_string(), name]);
                    command
                        .env("GLOO_SOCKET_IFNAME", "lo")
                        .env("OMP_NUM_THREADS", "1");
                    commands.push((rank, command));
                }
            }
            gloo if GLOO.contains(&gloo) => {
                let program = match build(name, "c++", "gloo.cc", &["-lgloo", "-lpthread"]) {
                    Ok(program) => program,
                    Err(reason) => return Ok(Err(format!("{reason}: is libgloo-dev installed?"))),
                };
                let folder = Folder::new(name)?;
                for rank in 0..ranks {
                    let mut command = Command::new(&program.0);
                    command.args(["127.0.0.1", &port.to_string(), name]);
                    command.env("GLOO_STORE", &folder.0);
                    commands.push((rank, command));
                }
                kept_files = Some((program, folder));
            }
            other => bail!(
                "{other:?} is none of rcomm, rcomm-registered, rcomm-tcp, openmpi, mpich, gloo, {}",
                GLOO.join(", ")
            ),
        }
        let master = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?
            .local_addr()?
            .port();
        let commands = commands.into_iter().map(|(rank, mut command)| {
            for (key, value) in [
                ("RANK", rank),
                ("LOCAL_RANK", rank),
                ("WORLD_SIZE", ranks),
                ("LOCAL_WORLD_SIZE", ranks),
                ("MASTER_PORT", master.into()),
            ] {
                command.env(key, value.to_string());
            }
            command.env("MASTER_ADDR", "127.0.0.1");
            command.env(
                "TORCHELASTIC_RUN_ID",
                format!("peers-{}-{name}", std::process::id()),
            );
            command.env("PEER_CORE", core_of(rank));
            command
        });
        let mut peer = Self::spawn(name, commands.collect())?;
        peer.accept_ranks(&listener, ranks)?;
        // All ranks have loaded the program and completed their rendezvous, so the files are no longer needed.
        drop(kept_files);
        Ok(Ok(peer))
    }

    fn spawn(name: &str, commands: Vec<Command>) -> Result<Self> {
        let mut peer = Self {
            name: name.to_owned(),
            processes: Vec::new(),
            ranks: Vec::new(),
        };
        for mut command in commands {
            let process = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn();
            peer.processes
                .push(process.with_context(|| format!("cannot start {command:?}"))?);
        }
        Ok(peer)
    }

    /// Waits until every rank has connected.
    fn accept_ranks(&mut self, listener: &TcpListener, ranks: u32) -> Result<()> {
        let mut connected: Vec<Option<BufReader<TcpStream>>> = (0..ranks).map(|_| None).collect();
        let deadline = Instant::now() + TIME_LIMIT;
        listener.set_nonblocking(true)?;
        while connected.iter().any(Option::is_none) {
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    for process in &mut self.processes {
                        if let Some(status) = process.try_wait()? {
                            bail!(
                                "a rank of {} ended before it connected: {status}",
                                self.name
                            );
                        }
                    }
                    ensure!(
                        Instant::now() < deadline,
                        "{} has not started within {TIME_LIMIT:?}",
                        self.name
                    );
                    std::thread::sleep(Duration::from_millis(5));
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            stream.set_nonblocking(false)?;
            stream.set_nodelay(true)?;
            stream.set_read_timeout(Some(TIME_LIMIT))?;
            let mut stream = BufReader::new(stream);
            let mut line = String::new();
            stream.read_line(&mut line)?;
            let rank = line
                .split_whitespace()
                .nth(1)
                .and_then(|rank| rank.parse::<usize>().ok());
            let slot = rank.and_then(|rank| connected.get_mut(rank));
            *slot.with_context(|| format!("{line:?} is not a name and a rank below {ranks}"))? =
                Some(stream);
        }
        self.ranks = connected.into_iter().flatten().collect();
        Ok(())
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Runs an operation `count` times and returns its times, for `send_recv` the times of one message; `None` if this
    /// peer does not have the operation.
    pub(crate) fn run(
        &mut self,
        operation: &str,
        bytes: usize,
        count: usize,
    ) -> Result<Option<Times>> {
        let order = format!("{operation} {bytes} {count}\n");
        for rank in &mut self.ranks {
            rank.get_mut().write_all(order.as_bytes())?;
        }
        let mut slowest: Option<Times> = None;
        let active_ranks = if operation.ends_with("send_recv") {
            2
        } else {
            self.ranks.len()
        };
        for (index, rank) in self.ranks.iter_mut().enumerate() {
            let mut line = String::new();
            rank.read_line(&mut line).with_context(|| {
                format!("rank {index} of {} did not answer {order:?}", self.name)
            })?;
            let mut numbers = line.split_whitespace().map(str::parse::<f64>);
            let (Some(Ok(p50)), Some(Ok(p99))) = (numbers.next(), numbers.next()) else {
                ensure!(
                    line == "unsupported\n",
                    "rank {index} of {} answered {line:?}",
                    self.name
                );
                continue;
            };
            // A rank measures the round trip, which is two messages.
            let messages = if operation.ends_with("send_recv") {
                2.0
            } else {
                1.0
            };
            if index < active_ranks {
                let so_far = slowest.unwrap_or(Times { p50: 0.0, p99: 0.0 });
                slowest = Some(Times {
                    p50: so_far.p50.max(p50 / messages),
                    p99: so_far.p99.max(p99 / messages),
                });
            }
        }
        Ok(slowest)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // A rank ends when its control connection is closed.
        self.ranks.clear();
        let end = Instant::now() + Duration::from_secs(5);
        for process in &mut self.processes {
            while matches!(process.try_wait(), Ok(None)) && Instant::now() < end {
                std::thread::sleep(Duration::from_millis(5));
            }
            // This fails only if the process has ended already.
            let _ = process.kill();
            if let Err(error) = process.wait() {
                eprintln!("a rank of {} could not be waited for: {error}", self.name);
            }
        }
    }
}
