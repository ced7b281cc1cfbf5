//! A job under test: its processes, and the faults that are applied to them.

use crate::around;
use crate::certificates::Ca;
use crate::network::Hosts;
use crate::rank::{Event, What, events_folder, group_file, now_ms, stop_file};
use crate::scenario::{Act, At, Damage, Fault, RANKS, Scenario, Shm, Start};
use crate::stranger;
use anyhow::{Context, ensure};
use rcomm_recorder::publish::{TlsFiles, remove_stale_rings};
use rcomm_recorder::record::{default_directory, fallback_directory};
use rustix::process::{Pid, Signal, kill_process};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The time-out of operations.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(3);
/// The time-out of the start.
pub(crate) const INIT_TIMEOUT: Duration = Duration::from_secs(6);
/// An error that is reported later than this after its time-out is late.
pub(crate) const SLACK: Duration = Duration::from_secs(2);
/// Limit of each wait of the driver: until all ranks are ready, until the survivors have left, until the job has
/// ended.
pub(crate) const TIME_LIMIT: Duration = Duration::from_secs(40);
/// How long a launcher may need to end the ranks of a job that has failed: `--linger`, `--grace` and slack.
pub(crate) const LAUNCHER_ENDS: Duration = Duration::from_secs(15);
const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The processes of one job, with its folder. They are killed when the value is dropped.
pub(crate) struct Job<'a> {
    scenario: &'a Scenario,
    folder: PathBuf,
    name: String,
    port: u16,
    hosts: Option<Hosts>,
    /// The identity of each rank, in a scenario with TLS.
    identities: Vec<TlsFiles>,
    children: Vec<Child>,
    observers: Vec<Child>,
}

impl<'a> Job<'a> {
    pub(crate) fn new(scenario: &'a Scenario, folder: &Path, port: u16) -> anyhow::Result<Self> {
        let hosts = match scenario.start {
            Start::Hosts => Some(Hosts::make(RANKS)?),
            _ => None,
        };
        for inner in ["events", "tmp", "out"] {
            std::fs::create_dir_all(folder.join(inner))?;
        }
        let identities = if scenario.tls {
            let ca = Ca::new();
            let issue = |rank| ca.issue(folder, &format!("rank-{rank}"));
            (0..RANKS).map(issue).collect()
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
        })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
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

    fn uses_default_directory(&self) -> bool {
        matches!(self.scenario.fault, Fault::Memory(_) | Fault::RingFolder)
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
            let child = self.spawn_launcher()?;
            self.children.push(child);
            return Ok(());
        }
        for rank in 0..RANKS {
            let is_culprit = self.scenario.culprits.contains(&rank);
            match self.scenario.fault {
                Fault::Absent if is_culprit => continue,
                Fault::Late(ms) if is_culprit => std::thread::sleep(Duration::from_millis(ms)),
                _ => {}
            }
            let size = match self.scenario.fault {
                Fault::WorldSize if is_culprit => RANKS + 1,
                _ => RANKS,
            };
            let name = self.name.clone();
            let child = self.spawn(rank, size, &name, &self.self_fault_arguments())?;
            self.children.push(child);
        }
        Ok(())
    }

    /// Starts a healthy job of the same name at the same port, and waits for its end; returns whether every
    /// rank has shut down cleanly.
    pub(crate) fn restart(&mut self) -> anyhow::Result<bool> {
        self.end();
        self.hosts = None;
        let _ = std::fs::remove_dir_all(events_folder(&self.folder));
        std::fs::create_dir_all(events_folder(&self.folder))?;
        std::fs::write(stop_file(&self.folder), "")?;
        let name = self.name.clone();
        for rank in 0..RANKS {
            let child = self.spawn(rank, RANKS, &name, &[])?;
            self.children.push(child);
        }
        self.wait_for_end(TIME_LIMIT);
        let events = self.events();
        let ended = events.iter().filter(|event| event.what == What::Ended);
        Ok(ended.count() == RANKS as usize)
    }

    /// The arguments by which the culprits apply the fault to themselves.
    fn self_fault_arguments(&self) -> Vec<String> {
        if self.scenario.culprits.is_empty() {
            return Vec::new();
        }
        let ranks: Vec<String> = self.scenario.culprits.iter().map(u32::to_string).collect();
        let mut arguments = vec!["--ranks".to_owned(), ranks.join(",")];
        let mut add = |act: Act, at: At| {
            arguments.extend(["--act".to_owned(), format!("{act:?}")]);
            arguments.extend(["--at".to_owned(), format!("{at:?}")]);
        };
        match self.scenario.fault {
            Fault::Itself(act, at) => add(act, at),
            Fault::Memory(_) | Fault::RingFolder => add(Act::Kill, At::Between),
            Fault::DumpFolder | Fault::DiskStalls => add(Act::Freeze, At::Between),
            Fault::Descriptors(limit) => {
                arguments.extend(["--descriptors".to_owned(), limit.to_string()]);
            }
            _ => {}
        }
        arguments
    }

    fn spawn(
        &self,
        rank: u32,
        size: u32,
        name: &str,
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
        let local = if self.hosts.is_some() { 1 } else { size };
        command
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", size.to_string())
            .env("LOCAL_RANK", (rank % local).to_string())
            .env("LOCAL_WORLD_SIZE", local.to_string())
            .env("MASTER_ADDR", address)
            .env("MASTER_PORT", self.port.to_string())
            .env("TORCHELASTIC_RUN_ID", name);
        if let Some(files) = self.identities.get(rank as usize) {
            command
                .env("RCOMM_TLS_CERT", &files.certificate)
                .env("RCOMM_TLS_KEY", &files.key)
                .env("RCOMM_TLS_CA", &files.ca);
        }
        self.spawn_with(command, arguments, &rank.to_string())
    }

    fn spawn_launcher(&self) -> anyhow::Result<Child> {
        let program = std::env::current_exe()?;
        let mut command = Command::new(launcher()?);
        command.args(["-n", &RANKS.to_string(), "--grace", "1"]);
        command.args([
            "--job-id",
            &self.name,
            "--master-port",
            &self.port.to_string(),
        ]);
        command.arg("--").arg(program);
        self.spawn_with(command, &self.self_fault_arguments(), "launcher")
    }

    /// Adds what all ranks of the job are given, and starts the command; `what` names the file of its output.
    fn spawn_with(
        &self,
        mut command: Command,
        arguments: &[String],
        what: &str,
    ) -> anyhow::Result<Child> {
        let nth = std::fs::read_dir(self.folder.join("out"))?.count();
        let out = std::fs::File::create(self.folder.join("out").join(format!("{what}.{nth}")))?;
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
        if self.scenario.start == Start::Tcp {
            command.env("RCOMM_TRANSPORT", "tcp");
        }
        Ok(command.spawn()?)
    }

    /// Prepares faults of file systems (a full, read-only or stalled mount, a file in place of a folder) before the job
    /// starts.
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
            _ => Ok(()),
        }
    }

    /// Waits until every rank has logged `Ready`. Returns false at the time limit, or if all processes ended before.
    pub(crate) fn wait_until_ready(&mut self) -> bool {
        self.wait(TIME_LIMIT, |events| {
            let ready = events.iter().filter(|event| event.what == What::Ready);
            ready.count() >= RANKS as usize
        })
    }

    /// Waits until the events satisfy `is_so`. Returns false at the limit, or if all processes have ended before.
    fn wait(&mut self, limit: Duration, is_so: impl Fn(&[Event]) -> bool) -> bool {
        let until = Instant::now() + limit;
        loop {
            let over = self.has_ended() || Instant::now() >= until;
            if is_so(&self.events()) {
                return true;
            }
            if over {
                return false;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    fn has_ended(&mut self) -> bool {
        let ended = |child: &mut Child| !matches!(child.try_wait(), Ok(None));
        self.children.iter_mut().all(ended)
    }

    /// Applies the fault. Returns when it was applied, in ms since 1970; for a fault that the job causes itself, the
    /// time of the call.
    pub(crate) fn apply_fault(&mut self) -> anyhow::Result<u64> {
        let culprit = self.scenario.culprits.first().copied().unwrap_or(0);
        let now = now_ms();
        match self.scenario.fault {
            Fault::Store => {
                let launcher = self.children[0].id();
                send(launcher, Signal::STOP)?;
                // The launcher must be stopped before the ranks ask its store.
                wait_until_stopped_or_gone(launcher);
                std::fs::write(group_file(&self.folder), "")?;
            }
            Fault::Launcher(act, then) => {
                let launcher = self.children[0].id();
                send(launcher, signal_of(act))?;
                // The launcher must be stopped or gone before the rank is signalled.
                wait_until_stopped_or_gone(launcher);
                let Some(then) = then else {
                    if act == Act::Freeze {
                        // Longer than operations may take: none of them needs the launcher.
                        std::thread::sleep(TIMEOUT + SLACK);
                        send(launcher, Signal::CONT)?;
                    }
                    return Ok(now);
                };
                let now = now_ms();
                send(self.pid_of(culprit)?, signal_of(then))?;
                return Ok(now);
            }
            Fault::Network(cut) => {
                let hosts = self.hosts.as_ref();
                let hosts = hosts.context("a network fault needs a scenario with Start::Hosts")?;
                hosts.apply(culprit as usize, cut, TIMEOUT)?;
                if cut == crate::scenario::Cut::Vanished {
                    send(self.pid_of(culprit)?, Signal::KILL)?;
                }
            }
            Fault::Clock(seconds) => {
                around::move_clock(&self.ring(culprit), seconds)?;
                // Gives the rank time to record after the jump; it is not certain that it does.
                std::thread::sleep(Duration::from_millis(300));
                let now = now_ms();
                send(self.pid_of(culprit)?, Signal::KILL)?;
                return Ok(now);
            }
            Fault::DiskStalls => {
                let stalled = around::Stalled::begin(&self.dump_folder())?;
                self.wait(TIMEOUT + 3 * SLACK, |events| {
                    let failed = |event: &&Event| matches!(event.what, What::Failed { .. });
                    events.iter().filter(failed).count() + 1 >= RANKS as usize
                });
                stalled.end()?;
            }
            Fault::OtherUser => {
                let pids: Vec<u32> = (0..RANKS)
                    .map(|rank| self.pid_of(rank))
                    .collect::<Result<_, _>>()?;
                stranger::attack(&self.folder, &self.name, self.port, &pids)?;
            }
            Fault::Pipe => {
                let pipe = self.folder.join(format!("pipe_{culprit}.pipe"));
                around::flood(&pipe, TIMEOUT / 2)?;
                ensure!(self.dump_folder().exists(), "no dump was written");
            }
            Fault::Ring(damage) => {
                let ring = self.ring(culprit);
                match damage {
                    Damage::Deleted => std::fs::remove_file(ring)?,
                    Damage::Truncated => {
                        std::fs::File::options()
                            .write(true)
                            .open(ring)?
                            .set_len(4096)?;
                    }
                    Damage::Scribbled => around::overwrite(&ring)?,
                }
                // Gives the rank time to use the damaged ring; it is not certain that it does.
                std::thread::sleep(Duration::from_millis(300));
                let now = now_ms();
                // The damage may have ended the process.
                let _ = send(self.pid_of(culprit)?, Signal::KILL);
                return Ok(now);
            }
            Fault::Duplicate | Fault::Foreign => {
                let name = match self.scenario.fault {
                    Fault::Foreign => "another-job".to_owned(),
                    _ => self.name.clone(),
                };
                let mut intruder = self.spawn(culprit, RANKS, &name, &[])?;
                let until = Instant::now() + TIME_LIMIT;
                while matches!(intruder.try_wait(), Ok(None)) && Instant::now() < until {
                    std::thread::sleep(POLL_INTERVAL);
                }
                let has_ended = !matches!(intruder.try_wait(), Ok(None));
                let _ = intruder.kill();
                let status = intruder.wait()?;
                ensure!(
                    has_ended,
                    "a process that does not belong to the job was not refused within {TIME_LIMIT:?}"
                );
                ensure!(
                    !status.success(),
                    "a process that does not belong to the job joined it"
                );
            }
            Fault::Observers(act) => self.observe(act)?,
            _ => {}
        }
        Ok(now)
    }

    fn ring(&self, rank: u32) -> PathBuf {
        let rings = self.folder.join("rings").join(&self.name);
        rings.join(format!("{rank}.0.ring"))
    }

    /// Starts two observers, and applies the act to them, if there is one.
    fn observe(&mut self, act: Option<Act>) -> anyhow::Result<()> {
        for _ in 0..2 {
            let mut command = Command::new(std::env::current_exe()?);
            command.arg("observe").arg(self.folder.join("rings"));
            self.observers.push(command.stdin(Stdio::null()).spawn()?);
        }
        std::thread::sleep(Duration::from_millis(500));
        for observer in &mut self.observers {
            if let Some(act) = act {
                send(observer.id(), signal_of(act))?;
            }
        }
        Ok(())
    }

    /// The process id that a rank logged when it began.
    fn pid_of(&self, rank: u32) -> anyhow::Result<u32> {
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
            (0..RANKS)
                .filter(|rank| !without.contains(rank))
                .all(|rank| {
                    let mut of_rank = events.iter().filter(|event| event.rank == rank);
                    of_rank.any(|event| matches!(event.what, What::Left { .. }))
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

    /// The ranks whose processes still run.
    pub(crate) fn running(&self) -> Vec<u32> {
        let events = self.events();
        let began = events.iter().filter(|event| event.what == What::Began);
        let alive = began.filter(|event| is_alive(event.pid));
        alive.map(|event| event.rank).collect()
    }

    /// Ends the remaining processes.
    pub(crate) fn end(&mut self) {
        let ranks: Vec<u32> = self.events().iter().map(|event| event.pid).collect();
        for pid in ranks.into_iter().filter(|&pid| is_alive(pid)) {
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
        if matches!(self.scenario.fault, Fault::DumpFolder | Fault::DiskStalls) {
            let _ = Command::new("umount").arg(self.dump_folder()).output();
        }
    }
}

/// The path of `rcomm-run` next to this program, whether or not it is built.
pub(crate) fn launcher() -> anyhow::Result<PathBuf> {
    Ok(std::env::current_exe()?.with_file_name("rcomm-run"))
}

fn signal_of(act: Act) -> Signal {
    match act {
        Act::Freeze => Signal::STOP,
        Act::Terminate => Signal::TERM,
        _ => Signal::KILL,
    }
}

fn send(pid: u32, signal: Signal) -> anyhow::Result<()> {
    let checked = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let checked = checked.with_context(|| format!("process id {pid} is out of range"))?;
    kill_process(checked, signal)?;
    Ok(())
}

/// The letter of a process's state in `/proc` (`Z`: ended, but not reaped); `None` if there is no such process.
fn state_of(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit(')').next()?.trim().chars().next()
}

fn is_alive(pid: u32) -> bool {
    state_of(pid).is_some_and(|state| state != 'Z')
}

/// Waits until the process is stopped by a signal or has ended, up to [`TIME_LIMIT`].
fn wait_until_stopped_or_gone(pid: u32) {
    let until = Instant::now() + TIME_LIMIT;
    while state_of(pid).is_some_and(|state| !matches!(state, 'T' | 'Z')) && Instant::now() < until {
        std::thread::sleep(POLL_INTERVAL);
    }
}
