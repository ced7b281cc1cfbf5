//! A job under test: its processes, and the faults that are applied to them.

use crate::around;
use crate::certificates::Ca;
use crate::network::Hosts;
use crate::processes::{DutyCycle, POLL_INTERVAL, is_alive, launcher, send};
use crate::rank::{Event, EventKind, events_folder, stop_file};
use crate::scenario::{Act, At, Fault, Scenario, Shm, Start};
use anyhow::Context;
use rcomm_recorder::publish::{TlsFiles, remove_stale_rings};
use rcomm_recorder::record::{default_directory, fallback_directory};
use rustix::process::Signal;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The time-out of operations.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(3);
/// The time-out of making the world (`RCOMM_INIT_TIMEOUT_MS`).
pub(crate) const INIT_TIMEOUT: Duration = Duration::from_secs(6);
/// An error that is reported later than this after its time-out is late, unless `--slack` sets another limit.
pub(crate) const SLACK: Duration = Duration::from_secs(2);
/// Limit of a wait of this program for a job, where no shorter one is named: until all ranks are ready, until the
/// survivors have left, until the job has ended.
pub(crate) const TIME_LIMIT: Duration = Duration::from_secs(40);
/// How long a launcher may need to end the ranks of a job that has failed: `--linger`, `--grace` and slack.
pub(crate) const LAUNCHER_END_LIMIT: Duration = Duration::from_secs(15);

/// The processes of one job, with its folder. They are killed when the value is dropped.
pub(crate) struct Job<'a> {
    pub(crate) scenario: &'a Scenario,
    pub(crate) folder: PathBuf,
    pub(crate) name: String,
    pub(crate) port: u16,
    pub(crate) hosts: Option<Hosts>,
    /// The identity of each rank, in a scenario with TLS.
    identities: Vec<TlsFiles>,
    pub(crate) children: Vec<Child>,
    pub(crate) observers: Vec<Child>,
    /// Slows the launcher down while this value exists.
    pub(crate) launcher_slowdown: Option<DutyCycle>,
}

impl<'a> Job<'a> {
    pub(crate) fn new(scenario: &'a Scenario, folder: &Path, port: u16) -> anyhow::Result<Self> {
        let hosts = match scenario.start {
            Start::Hosts => Some(Hosts::make(scenario.ranks)?),
            _ => None,
        };
        for inner in ["events", "tmp", "out"] {
            std::fs::create_dir_all(folder.join(inner))?;
        }
        let identities = if scenario.tls {
            let ca = Ca::new();
            let issue = |rank| ca.issue(folder, &format!("rank-{rank}"));
            (0..scenario.ranks).map(issue).collect()
        } else {
            Vec::new()
        };
        Ok(Self {
            scenario,
            folder: folder.to_owned(),
            name: format!("faults-{port}-{}", scenario.name),
            port,
            hosts,
            identities,
            children: Vec::new(),
            observers: Vec::new(),
            launcher_slowdown: None,
        })
    }

    /// The folders that may hold the job's rings, in no order.
    pub(crate) fn ring_folders(&self) -> Vec<PathBuf> {
        let name = fallback_directory();
        let name = name.file_name().unwrap_or_default();
        let tmp = self.folder.join("tmp").join(name);
        let mut folders = vec![self.folder.join("rings"), tmp];
        if self.uses_default_directory() {
            folders.push(default_directory());
        }
        folders
    }

    /// Whether the rings may be in the default directory: `RCOMM_RING_DIR` is not set, or cannot be used.
    fn uses_default_directory(&self) -> bool {
        matches!(
            self.scenario.fault,
            Fault::Memory(_) | Fault::RingFolder | Fault::ReadOnlyRings
        )
    }

    pub(crate) fn dump_folder(&self) -> PathBuf {
        self.folder.join("dumps")
    }

    /// The events that the processes logged, in order of time. A file with an incomplete line counts as empty.
    pub(crate) fn events(&self) -> Vec<Event> {
        let files = std::fs::read_dir(events_folder(&self.folder));
        let files = files.into_iter().flatten().flatten();
        let mut events: Vec<Event> = files
            .filter_map(|file| std::fs::read_to_string(file.path()).ok())
            .flat_map(|text| {
                let lines = text.lines().map(serde_json::from_str);
                lines.collect::<Result<Vec<_>, _>>().unwrap_or_default()
            })
            .collect();
        events.sort_by_key(|event: &Event| event.at_ms);
        events
    }

    /// Standard output and standard error of the processes, file by file.
    pub(crate) fn output(&self) -> String {
        let files = std::fs::read_dir(self.folder.join("out"))
            .into_iter()
            .flatten();
        let texts = files
            .flatten()
            .filter_map(|file| std::fs::read_to_string(file.path()).ok());
        texts.collect::<Vec<_>>().join("\n")
    }

    /// Starts the job with its fault prepared.
    pub(crate) fn start(&mut self) -> anyhow::Result<()> {
        self.prepare()?;
        if self.scenario.start == Start::Launcher {
            let child = self.spawn_launcher(&self.fault_arguments())?;
            self.children.push(child);
            return Ok(());
        }
        for rank in 0..self.scenario.ranks {
            let is_culprit = self.scenario.culprits.contains(&rank);
            match self.scenario.fault {
                Fault::Absent if is_culprit => continue,
                Fault::Late(ms) if is_culprit => std::thread::sleep(Duration::from_millis(ms)),
                _ => {}
            }
            let size = match self.scenario.fault {
                Fault::WorldSize if is_culprit => self.scenario.ranks + 1,
                _ => self.scenario.ranks,
            };
            let name = self.name.clone();
            let child = self.spawn(rank, size, &name, &self.fault_arguments())?;
            self.children.push(child);
        }
        Ok(())
    }

    /// Starts a healthy job of the same name at the same port in the same way, and waits for its end; returns whether
    /// every rank has shut down cleanly. Processes that are left of the job are ended before the start, unless the
    /// scenario keeps them (`with_orphans`).
    pub(crate) fn restart(&mut self) -> anyhow::Result<bool> {
        let orphans = match self.scenario.with_orphans {
            true => std::mem::take(&mut self.children),
            false => {
                self.end();
                Vec::new()
            }
        };
        if let Some(hosts) = &self.hosts {
            hosts.join_again()?;
        }
        std::fs::rename(
            events_folder(&self.folder),
            self.folder.join("events-before"),
        )?;
        std::fs::create_dir_all(events_folder(&self.folder))?;
        std::fs::write(stop_file(&self.folder), "")?;
        if self.scenario.start == Start::Launcher {
            let child = self.spawn_launcher(&[])?;
            self.children.push(child);
        } else {
            let name = self.name.clone();
            for rank in 0..self.scenario.ranks {
                let child = self.spawn(rank, self.scenario.ranks, &name, &[])?;
                self.children.push(child);
            }
        }
        self.wait_for_end(TIME_LIMIT);
        for mut orphan in orphans {
            // The process may already have ended.
            let _ = orphan.kill();
            let _ = orphan.wait();
        }
        let events = self.events();
        let ended = events.iter().filter(|event| event.kind == EventKind::Ended);
        Ok(ended.count() == self.scenario.ranks as usize)
    }

    /// The arguments of all ranks: what they call besides their collectives, where they are held, and what the culprits
    /// do to themselves.
    fn fault_arguments(&self) -> Vec<String> {
        let mut arguments = Vec::new();
        if let Some(extra) = self.scenario.extra {
            arguments.extend(["--call".to_owned(), format!("{extra:?}")]);
        }
        match self.scenario.fault {
            Fault::InInit(_) => {
                let last = self.scenario.ranks - 1;
                arguments.extend(["--held-before-init".to_owned(), last.to_string()]);
            }
            Fault::InShutdown(_) => arguments.push("--held-before-shutdown".to_owned()),
            _ => {}
        }
        if self.scenario.culprits.is_empty() {
            return arguments;
        }
        let ranks: Vec<String> = self.scenario.culprits.iter().map(u32::to_string).collect();
        arguments.extend(["--ranks".to_owned(), ranks.join(",")]);
        let mut add = |act: Act, at: At| {
            arguments.extend(["--act".to_owned(), format!("{act:?}")]);
            arguments.extend(["--at".to_owned(), format!("{at:?}")]);
        };
        match self.scenario.fault {
            Fault::Itself(act, at) => add(act, at),
            Fault::Memory(_) | Fault::RingFolder | Fault::ReadOnlyRings => {
                add(Act::Kill, At::Between);
            }
            Fault::DumpFolder | Fault::DiskStalls => add(Act::Freeze, At::Between),
            Fault::Descriptors(limit) => {
                arguments.extend(["--descriptors".to_owned(), limit.to_string()]);
            }
            _ => {}
        }
        arguments
    }

    /// Starts the process of one rank of job `job`, in a world of `size` ranks.
    pub(crate) fn spawn(
        &self,
        rank: u32,
        size: u32,
        job: &str,
        arguments: &[String],
    ) -> anyhow::Result<Child> {
        let program = std::env::current_exe()?;
        let program = program
            .to_str()
            .context("the path of this program is not valid UTF-8")?;
        let (mut command, address) = match &self.hosts {
            None => (Command::new(program), "127.0.0.1".to_owned()),
            Some(hosts) => {
                let mut command = hosts.command(rank as usize, program);
                command.env("RCOMM_HOST_ID", format!("host-{rank}"));
                (command, Hosts::address(0))
            }
        };
        if self.scenario.fault == Fault::Secret {
            // Without arguments (`restart`) the rank is healthy.
            let is_culprit = self.scenario.culprits.contains(&rank) && !arguments.is_empty();
            let secret = if is_culprit { "theirs" } else { "ours" };
            command.env("RCOMM_JOB_SECRET", secret.repeat(8));
        }
        let local = if self.hosts.is_some() { 1 } else { size };
        command
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", size.to_string())
            .env("LOCAL_RANK", (rank % local).to_string())
            .env("LOCAL_WORLD_SIZE", local.to_string())
            .env("MASTER_ADDR", address)
            .env("MASTER_PORT", self.port.to_string())
            .env("TORCHELASTIC_RUN_ID", job);
        if let Some(files) = self.identities.get(rank as usize) {
            command
                .env("RCOMM_TLS_CERT", &files.certificate)
                .env("RCOMM_TLS_KEY", &files.key)
                .env("RCOMM_TLS_CA", &files.ca);
        }
        self.spawn_with(command, arguments, &rank.to_string())
    }

    fn spawn_launcher(&self, arguments: &[String]) -> anyhow::Result<Child> {
        let program = std::env::current_exe()?;
        let mut command = Command::new(launcher()?);
        command.args(["-n", &self.scenario.ranks.to_string(), "--grace", "1"]);
        command.args([
            "--job-id",
            &self.name,
            "--master-port",
            &self.port.to_string(),
        ]);
        command.arg("--").arg(program);
        self.spawn_with(command, arguments, "launcher")
    }

    /// Adds what all ranks of the job are given, and starts the command; its output goes to a file whose name begins
    /// with `process`.
    fn spawn_with(
        &self,
        mut command: Command,
        arguments: &[String],
        process: &str,
    ) -> anyhow::Result<Child> {
        let nth = std::fs::read_dir(self.folder.join("out"))?.count();
        let out = std::fs::File::create(self.folder.join("out").join(format!("{process}.{nth}")))?;
        let ms = |duration: Duration| duration.as_millis().to_string();
        command
            .arg("rank")
            .arg(&self.folder)
            .args(arguments)
            .env("RCOMM_TIMEOUT_MS", ms(TIMEOUT))
            .env("RCOMM_INIT_TIMEOUT_MS", ms(INIT_TIMEOUT))
            .env("RCOMM_SIGNAL_INTERVAL_MS", "100")
            .env("RCOMM_DUMP_DIR", self.dump_folder())
            .env("RCOMM_RING_DIR", self.folder.join("rings"))
            .env("TMPDIR", self.folder.join("tmp"))
            .env_remove("XDG_RUNTIME_DIR")
            .stdin(Stdio::null())
            .stdout(out.try_clone()?)
            .stderr(out);
        if let Fault::Memory(_) = self.scenario.fault {
            command.env_remove("RCOMM_RING_DIR");
        }
        if self.scenario.fault == Fault::Pipe {
            command.env("RCOMM_DUMP_PIPE", self.folder.join("pipe_"));
        }
        // In shared memory the ranks agree on new groups without the store, until the memory for that is full.
        if self.scenario.start == Start::Tcp || self.scenario.fault == Fault::Store {
            command.env("RCOMM_TRANSPORT", "tcp");
        }
        Ok(command.spawn()?)
    }

    /// Prepares what faults of file systems need before the job starts: a mount that is small, read-only or can be
    /// stalled, a folder of another user, or a file in place of a folder.
    fn prepare(&self) -> anyhow::Result<()> {
        match self.scenario.fault {
            // This program runs in a separate mount namespace.
            Fault::Memory(shm) => {
                let options = match shm {
                    Shm::Full => "size=4k,mode=1777",
                    Shm::Tiny => "size=512k,mode=1777",
                    Shm::ReadOnly => "ro,size=64m",
                    Shm::Squatted => "size=64m,mode=1777",
                };
                around::mount(options, Path::new("/dev/shm"))?;
                if shm == Shm::Squatted {
                    let folder = default_directory();
                    std::fs::create_dir(&folder)?;
                    std::os::unix::fs::chown(&folder, Some(65_534), Some(65_534))?;
                }
                Ok(())
            }
            Fault::DumpFolder => {
                std::fs::create_dir_all(self.dump_folder())?;
                around::mount("size=4k", &self.dump_folder())
            }
            Fault::DiskStalls => around::mount_disk(&self.folder, &self.dump_folder()),
            Fault::RingFolder => Ok(std::fs::write(self.folder.join("rings"), "")?),
            Fault::ReadOnlyRings => {
                std::fs::create_dir_all(self.folder.join("rings"))?;
                around::mount("ro,size=4k", &self.folder.join("rings"))
            }
            _ => Ok(()),
        }
    }

    /// Waits until every rank has logged `Ready`. Returns false at the time limit, or if all processes ended before.
    pub(crate) fn wait_until_ready(&mut self) -> bool {
        self.wait(TIME_LIMIT, |events| {
            let ready = events.iter().filter(|event| event.kind == EventKind::Ready);
            ready.count() >= self.scenario.ranks as usize
        })
    }

    /// Waits until the events satisfy `condition`. Returns false at the limit, or if all processes have ended before.
    pub(crate) fn wait(&mut self, limit: Duration, condition: impl Fn(&[Event]) -> bool) -> bool {
        let until = Instant::now() + limit;
        loop {
            let is_over = self.has_ended() || Instant::now() >= until;
            if condition(&self.events()) {
                return true;
            }
            if is_over {
                return false;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    fn has_ended(&mut self) -> bool {
        let ended = |child: &mut Child| !matches!(child.try_wait(), Ok(None));
        self.children.iter_mut().all(ended)
    }

    pub(crate) fn ring(&self, rank: u32) -> PathBuf {
        let rings = self.folder.join("rings").join(&self.name);
        rings.join(format!("{rank}.0.ring"))
    }

    /// The process id that a rank logged when it began.
    pub(crate) fn pid_of(&self, rank: u32) -> anyhow::Result<u32> {
        let events = self.events();
        let first = events.iter().find(|event| event.rank == rank);
        Ok(first
            .with_context(|| format!("rank {rank} has not begun"))?
            .pid)
    }

    /// Asks the ranks to shut down cleanly.
    pub(crate) fn ask_to_stop(&self) -> anyhow::Result<()> {
        Ok(std::fs::write(stop_file(&self.folder), "")?)
    }

    /// Waits until every rank except those in `without` has dropped its world. Returns false at the time limit, or if
    /// all processes have ended before.
    pub(crate) fn wait_for_survivors(&mut self, without: &[u32]) -> bool {
        self.wait(TIME_LIMIT, |events| {
            (0..self.scenario.ranks)
                .filter(|rank| !without.contains(rank))
                .all(|rank| {
                    let mut its_events = events.iter().filter(|event| event.rank == rank);
                    its_events.any(|event| matches!(event.kind, EventKind::Left { .. }))
                })
        })
    }

    /// Waits until the children (the ranks, or the launcher; not the observers) have ended, up to the limit. Returns
    /// whether they have.
    pub(crate) fn wait_for_end(&mut self, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        while !self.has_ended() && Instant::now() < until {
            std::thread::sleep(POLL_INTERVAL);
        }
        self.has_ended()
    }

    /// Ends the remaining processes.
    pub(crate) fn end(&mut self) {
        self.launcher_slowdown = None;
        let pids: Vec<u32> = self.events().iter().map(|event| event.pid).collect();
        for pid in pids.into_iter().filter(|&pid| is_alive(pid)) {
            let _ = send(pid, Signal::KILL);
        }
        for mut child in self.children.drain(..).chain(self.observers.drain(..)) {
            // The process may already have ended.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Drop for Job<'_> {
    fn drop(&mut self) {
        self.end();
        if self.uses_default_directory() {
            let _ = remove_stale_rings(&default_directory(), Some(&self.name));
        }
        let mounted = match self.scenario.fault {
            Fault::DumpFolder | Fault::DiskStalls => self.dump_folder(),
            Fault::ReadOnlyRings => self.folder.join("rings"),
            _ => return,
        };
        let _ = Command::new("umount").arg(mounted).output();
    }
}
