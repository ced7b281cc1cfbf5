//! Starts ranks that are processes, so that tests can kill them.

use crate::fault::Fault;
use rcomm_recorder::publish::{Dump, RingReader};
use std::collections::BTreeSet;
use std::io::Read;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The rank into which tests inject a fault.
pub const CULPRIT: u32 = 2;
/// The longest time that a test waits for something: long, for machines under load.
pub const TIME_LIMIT: Duration = Duration::from_secs(240);

/// A job of several processes. Dropping it kills the processes that still run.
pub struct Job {
    ranks: Vec<Child>,
    program: String,
    argument: String,
    name: String,
    port: JobPort,
    folder: tempfile::TempDir,
}

/// How one rank ended.
#[derive(Debug)]
pub struct Ended {
    /// The exit status of its process.
    pub status: ExitStatus,
    /// The standard error of its process.
    pub stderr: String,
}

impl Job {
    /// Starts `program` once for each rank, with the fault's name as its argument, and returns without waiting for the
    /// ranks. `change` may add to a rank's command.
    ///
    /// # Panics
    /// If a process cannot be started.
    pub fn start(
        program: &str,
        ranks: u32,
        fault: Fault,
        change: impl Fn(u32, &mut Command),
    ) -> Self {
        Self::start_as(program, ranks, fault.name(), change)
    }

    /// Works as [`start`](Self::start), with any argument.
    ///
    /// # Panics
    /// If a process cannot be started.
    pub fn start_as(
        program: &str,
        ranks: u32,
        argument: &str,
        change: impl Fn(u32, &mut Command),
    ) -> Self {
        let mut job = Self {
            ranks: Vec::new(),
            program: program.to_owned(),
            argument: argument.to_owned(),
            name: format!("test-{}-{argument}", std::process::id()),
            port: JobPort::take(),
            folder: tempfile::tempdir().expect("a temporary directory can be made"),
        };
        for rank in 0..ranks {
            let mut command = job.command(rank, ranks);
            change(rank, &mut command);
            job.ranks
                .push(command.spawn().expect("the program of a rank starts"));
        }
        job
    }

    /// Starts a process that joins the job in place of a rank whose process has ended, or as a further rank. `ranks` is
    /// the size of the world with it. `change` may add to its command.
    ///
    /// # Panics
    /// If the process cannot be started.
    pub fn join(&mut self, rank: u32, ranks: u32, change: impl Fn(&mut Command)) {
        let mut command = self.command(rank, ranks);
        command.env("RCOMM_JOIN", "1");
        change(&mut command);
        let process = command.spawn().expect("the program of a rank starts");
        match self.ranks.get_mut(rank as usize) {
            Some(ended) => *ended = process,
            None => self.ranks.push(process),
        }
    }

    fn command(&self, rank: u32, ranks: u32) -> Command {
        let mut command = Command::new(&self.program);
        command
            .arg(&self.argument)
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", ranks.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("LOCAL_WORLD_SIZE", ranks.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", self.port.0.to_string())
            .env("TORCHELASTIC_RUN_ID", &self.name)
            .env("RCOMM_TIMEOUT_MS", "2000")
            .env("RCOMM_SIGNAL_INTERVAL_MS", "100")
            .env("RCOMM_DUMP_DIR", self.folder.path().join("dumps"))
            .env("RCOMM_RING_DIR", self.folder.path().join("rings"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        command
    }

    /// The folder of the job's dumps and rings.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The process id of a rank.
    pub fn pid(&self, rank: u32) -> u32 {
        self.ranks[rank as usize].id()
    }

    /// Waits for the end of a rank.
    ///
    /// # Panics
    /// If the rank has not ended within [`TIME_LIMIT`].
    pub fn wait(&mut self, rank: u32) -> Ended {
        let child = &mut self.ranks[rank as usize];
        let status = wait_until(&format!("rank {rank} to end"), || {
            child.try_wait().expect("a rank can be waited for")
        });
        let mut stderr = String::new();
        if let Some(mut pipe) = child.stderr.take() {
            // Output that is not UTF-8 is ignored: no test reads it.
            let _ = pipe.read_to_string(&mut stderr);
        }
        Ended { status, stderr }
    }

    /// The ring file of a rank in attempt 0.
    pub fn ring_path(&self, rank: u32) -> PathBuf {
        let rings = self.folder.path().join("rings").join(&self.name);
        rings.join(format!("{rank}.0.ring"))
    }

    /// The ring of a rank in attempt 0, read from outside.
    ///
    /// # Panics
    /// If the ring file is missing or cannot be read.
    pub fn ring(&self, rank: u32) -> RingReader {
        let path = self.ring_path(rank);
        RingReader::attach(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    /// Every dump file that was written, with its path.
    ///
    /// # Panics
    /// If a dump file cannot be read, or has problems.
    pub fn dumps(&self) -> Vec<(PathBuf, Dump)> {
        let mut dumps = Vec::new();
        for run in list(&self.folder.path().join("dumps")) {
            // A file that is still being written has a name that begins with a dot.
            let is_whole = |path: &PathBuf| {
                let name = path.file_name();
                name.is_some_and(|name| !name.to_string_lossy().starts_with('.'))
            };
            for path in list(&run).into_iter().filter(is_whole) {
                let bytes = std::fs::read(&path).expect("a dump file can be read");
                let (dump, problems) = Dump::read(&bytes)
                    .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
                assert!(problems.is_empty(), "{}: {problems:?}", path.display());
                dumps.push((path, dump));
            }
        }
        dumps
    }

    /// The records for an analysis of the job: the dumps, and the ring of the culprit if it left no dump.
    ///
    /// # Panics
    /// As [`dumps`](Self::dumps), and if the culprit has left neither a dump nor a ring.
    pub fn records(&self) -> Vec<Dump> {
        let mut records: Vec<Dump> = self.dumps().into_iter().map(|(_, dump)| dump).collect();
        if !records
            .iter()
            .any(|dump| dump.identity.rank == Some(CULPRIT))
        {
            records.push(self.ring(CULPRIT).snapshot());
        }
        records
    }
}

/// Runs `program` once for each rank, as a job named `name`, waits for their ends, and returns what
/// each rank wrote to its standard output.
///
/// # Panics
/// If a rank fails, or does not end in time.
pub fn run(program: &Path, name: &str, ranks: u32) -> Vec<String> {
    let folder = tempfile::tempdir().expect("a temporary directory can be made");
    let printed = |rank: u32| folder.path().join(rank.to_string());
    let program = program.to_str().expect("the program's path is valid UTF-8");
    let mut job = Job::start_as(program, ranks, name, |rank, command| {
        let file = std::fs::File::create(printed(rank)).expect("a file for the output can be made");
        command.stdout(file).env("RCOMM_TIMEOUT_MS", "30000");
    });
    for rank in 0..ranks {
        let ended = job.wait(rank);
        assert!(ended.status.success(), "{name}, rank {rank}: {ended:?}");
    }
    (0..ranks)
        .map(|rank| {
            std::fs::read_to_string(printed(rank)).expect("the output of a rank can be read")
        })
        .collect()
}

impl Drop for Job {
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            // Errors are ignored: the process may have ended already.
            let _ = rank.kill();
            let _ = rank.wait();
        }
    }
}

/// The paths of a directory's entries; none if the directory cannot be read.
fn list(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(directory) else {
        return Vec::new();
    };
    entries.flatten().map(|entry| entry.path()).collect()
}

/// The ports of the jobs that exist. They are noted here because a job listens on its port only some time after its
/// start.
static PORTS_OF_JOBS: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());

/// A port that no other job of this process gets until this value is dropped.
struct JobPort(u16);

impl JobPort {
    fn take() -> Self {
        let mut taken = ports_of_jobs();
        let port = free_port_besides(&taken);
        taken.insert(port);
        Self(port)
    }
}

impl Drop for JobPort {
    fn drop(&mut self) {
        ports_of_jobs().remove(&self.0);
    }
}

fn ports_of_jobs() -> MutexGuard<'static, BTreeSet<u16>> {
    PORTS_OF_JOBS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A port on which no process listens and that no job of this process has. It is one of 32 candidates, which depend on
/// the process id and are below the ephemeral port range.
///
/// # Panics
/// If no candidate is free.
pub fn free_port() -> u16 {
    free_port_besides(&ports_of_jobs())
}

fn free_port_besides(taken: &BTreeSet<u16>) -> u16 {
    const CANDIDATES: u32 = 32;
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let mut candidates = (0..CANDIDATES).map(|_| {
        let nth = NEXT.fetch_add(1, Ordering::Relaxed) % CANDIDATES;
        10_000 + ((std::process::id() * CANDIDATES + nth) % 20_000) as u16
    });
    let is_free =
        |port: &u16| !taken.contains(port) && TcpListener::bind(("127.0.0.1", *port)).is_ok();
    candidates.find(is_free).expect("a port is free")
}

/// Calls `look` until it returns a value, and returns that value.
///
/// # Panics
/// If there is no value within [`TIME_LIMIT`]; the message names `awaited`.
pub fn wait_until<T>(awaited: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + TIME_LIMIT;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(
            Instant::now() < deadline,
            "waited {TIME_LIMIT:?} for {awaited}"
        );
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_that_does_not_listen_yet_keeps_its_port() {
        let first = JobPort::take();
        // The loop takes more ports than there are candidates.
        for _ in 0..100 {
            assert_ne!(JobPort::take().0, first.0);
            assert_ne!(free_port(), first.0);
        }
    }
}
