//! Runs a job under its launcher, and does something to it from outside.

use super::RANKS;
use super::look::View;
use super::rank::{BEGUN, CulpritAct, GO, HELD};
use super::table::{Row, Transport};
use crate::process::{CULPRIT, wait_until};
use anyhow::{Context, Result};
use rcomm_analyzer::Verdict;
use rcomm_recorder::model::EntryState;
use rcomm_recorder::publish::{LaunchRecord, RingReader};
use rustix::process::{Pid, Signal, kill_process};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// What is done to the job from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Intervention {
    /// Nothing.
    Watch,
    /// SIGTERM to the launcher.
    Terminate,
    /// SIGKILL to the culprit, while it is inside an operation.
    KillInside,
    /// SIGKILL to every rank, one after the other, before any can notice another's end.
    KillAll,
    /// SIGSTOP to the culprit, while it is inside an operation, and SIGTERM to the launcher once the view says that the
    /// job is stuck.
    StopInside,
    /// SIGTERM to the launcher once the view says that the job is stuck.
    TerminateStuck,
    /// SIGTERM to the launcher once the view says that the job is slow.
    TerminateSlow,
    /// SIGKILL to the launcher and all ranks, once the view says that the job is stuck.
    KillStuck,
    /// SIGCONT to the culprit, once the view says that the job is stuck.
    Resume,
    /// SIGCONT to the culprit, once the other ranks have ended.
    ResumeLate,
    /// SIGKILL to rank 0, once the view says that the job is stuck.
    KillOther,
}

/// The variable with the control group that the launcher enters before it starts its ranks.
pub(super) const GROUP: &str = "RCOMM_LIVES_GROUP";
/// The id of the job.
const JOB: &str = "life";

/// If all ranks end within this time, the analyzer takes their ends as one event.
const TOGETHER: Duration = Duration::from_millis(900);

/// The memory limit of the control group, in bytes: several times what the ranks of these jobs use.
const MEMORY_LIMIT: u64 = 384 << 20;

/// A control group with little memory, removed when dropped.
pub(super) struct MemoryGroup(PathBuf);

impl MemoryGroup {
    /// Makes a group with the version of control groups that this host has.
    ///
    /// # Errors
    /// The reason why no group can be made here.
    pub(super) fn make() -> Result<Self, String> {
        let number = GROUPS_MADE.fetch_add(1, Ordering::Relaxed);
        let name = format!("rcomm-lives-{}-{number}", std::process::id());
        let mount = Path::new("/sys/fs/cgroup");
        let limit = MEMORY_LIMIT.to_string();
        let (parent, limits) = if mount.join("cgroup.controllers").exists() {
            (
                mount.to_owned(),
                [("memory.max", &*limit), ("memory.swap.max", "0")],
            )
        } else if mount.join("memory/memory.limit_in_bytes").exists() {
            let limits = [
                ("memory.limit_in_bytes", &*limit),
                ("memory.swappiness", "0"),
            ];
            (mount.join("memory"), limits)
        } else {
            return Err("this host has no control groups with a limit of memory".into());
        };
        let group = parent.join(name);
        std::fs::create_dir(&group).map_err(|error| {
            format!(
                "no control group can be made in {}: {error}",
                parent.display()
            )
        })?;
        let group = Self(group);
        for (name, limit) in limits {
            let file = group.0.join(name);
            std::fs::write(&file, limit)
                .map_err(|error| format!("{} cannot be set to {limit}: {error}", file.display()))?;
        }
        Ok(group)
    }
}

impl MemoryGroup {
    /// How many processes of the group the kernel has killed because memory ran out; 0 if it does not tell.
    fn killed(&self) -> u64 {
        let count = |file: &str| {
            let text = std::fs::read_to_string(self.0.join(file)).ok()?;
            let mut lines = text.lines();
            let count = lines.find_map(|line| line.strip_prefix("oom_kill "))?;
            count.trim().parse().ok()
        };
        let files = ["memory.events", "memory.oom_control"];
        files.into_iter().find_map(count).unwrap_or(0)
    }
}

/// The number of groups that this process has made, part of their names.
static GROUPS_MADE: AtomicU32 = AtomicU32::new(0);

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        // The processes of the group have ended; if it cannot be removed, an empty group is left.
        let _ = std::fs::remove_dir(&self.0);
    }
}

/// Puts this process into the control group that the variable [`GROUP`] names, if it is set.
///
/// # Errors
/// If the group takes no processes; the error has the path of the group.
pub(super) fn enter_group() -> Result<()> {
    let Some(group) = std::env::var_os(GROUP) else {
        return Ok(());
    };
    let processes = Path::new(&group).join("cgroup.procs");
    std::fs::write(&processes, "0").with_context(|| processes.display().to_string())
}

/// A job that runs.
pub(super) struct Job {
    launcher: Child,
    folder: tempfile::TempDir,
    /// How long it took to kill all ranks one after the other, if that was done.
    killing: Option<Duration>,
    /// Dropped after the job has ended.
    group: Option<MemoryGroup>,
}

impl Job {
    /// Starts the job of a row. `program` is a program that calls [`super::part_of_a_job`].
    pub(super) fn start(program: &Path, row: &Row, transport: Transport) -> Result<Self> {
        let folder = tempfile::tempdir().context("no temporary directory")?;
        let log = folder.path().join("log");
        let log = std::fs::File::create(&log).with_context(|| log.display().to_string())?;
        let group = match row.act {
            CulpritAct::Exhaust => Some(MemoryGroup::make().map_err(anyhow::Error::msg)?),
            _ => None,
        };
        let mut command = Command::new(program);
        command.args(["launch", "-n", &RANKS.to_string(), "--job-id", JOB]);
        // After the first failure, the other ranks get 15 s: their time-outs pass even on a busy host. A stopped rank
        // is killed after 2 s.
        command.args(["--linger", "15", "--grace", "2", "--"]);
        command.arg(program).args(["rank", row.act.name()]);
        command.arg(folder.path());
        if let Some(group) = &group {
            command.env(GROUP, &group.0);
        }
        let launcher = command
            .env("RCOMM_TRANSPORT", transport.name())
            .env("RCOMM_TIMEOUT_MS", row.timeout_ms.to_string())
            .env("RCOMM_DUMP_DIR", folder.path().join("dumps"))
            .env("RCOMM_RING_DIR", folder.path().join("rings"))
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("the launcher cannot be started")?;
        Ok(Self {
            launcher,
            folder,
            killing: None,
            group,
        })
    }

    /// The directory that holds a directory of rings for each job.
    pub(super) fn rings(&self) -> PathBuf {
        self.folder.path().join("rings")
    }

    /// The directory of this job's rings and of the launcher's record.
    pub(super) fn job_rings(&self) -> PathBuf {
        self.rings().join(JOB)
    }

    pub(super) fn dumps(&self) -> PathBuf {
        self.folder.path().join("dumps")
    }

    /// Whether the job went as its row describes. It did not if the kernel killed a second rank before the memory of
    /// the first was free, or if the ranks were killed so far apart, on a busy host, that one noticed the end of
    /// another.
    pub(super) fn matches_its_row(&self) -> bool {
        let at_most_one_killed = self.group.as_ref().is_none_or(|group| group.killed() <= 1);
        at_most_one_killed && self.killing.is_none_or(|took| took <= TOGETHER)
    }

    /// Copies the job's folder to a new folder in `kept`.
    pub(super) fn keep(&self, kept: &Path) -> Result<()> {
        let name = self.folder.path().file_name().unwrap_or_default();
        let name = name.to_string_lossy();
        let name = name.trim_start_matches('.');
        copy(self.folder.path(), &kept.join(name)).context("what the job left cannot be kept")
    }

    /// Carries out the row's intervention, waits for the end of the job, and returns the time of the fault.
    pub(super) fn intervene(&mut self, intervention: Intervention, view: &View) -> Instant {
        let fault = self.wait_for_fault(intervention);
        let start = Instant::now();
        match intervention {
            Intervention::Watch => {}
            Intervention::KillInside | Intervention::StopInside => {
                let signal = match intervention {
                    Intervention::KillInside => Signal::KILL,
                    _ => Signal::STOP,
                };
                self.signal(CULPRIT, signal);
                self.mark(GO);
            }
            Intervention::Terminate => self.terminate(),
            Intervention::KillAll => {
                // No rank may end because it noticed the end of another.
                let first_signal = Instant::now();
                (0..RANKS).for_each(|rank| self.signal(rank, Signal::STOP));
                for rank in 0..RANKS {
                    self.signal(rank, Signal::KILL);
                    // The view polls several times between two deaths.
                    std::thread::sleep(Duration::from_millis(100));
                }
                self.killing = Some(first_signal.elapsed());
            }
            Intervention::TerminateStuck
            | Intervention::TerminateSlow
            | Intervention::KillStuck
            | Intervention::Resume
            | Intervention::KillOther => {}
            Intervention::ResumeLate => {
                wait_until("the end of the other ranks", || {
                    let mut others = (0..RANKS).filter(|&rank| rank != CULPRIT);
                    others.all(|rank| self.has_ended(rank)).then_some(())
                });
                self.signal(CULPRIT, Signal::CONT);
            }
        }
        if let Some(verdict) = intervention.waits_for() {
            wait_until(&format!("the verdict {verdict:?}"), || {
                let answers = view.answers();
                let found = |(_, answer): &(_, super::Answer)| answer.verdict == verdict;
                answers.iter().any(found).then_some(())
            });
        }
        match intervention {
            Intervention::StopInside
            | Intervention::TerminateStuck
            | Intervention::TerminateSlow => self.terminate(),
            Intervention::Resume => self.signal(CULPRIT, Signal::CONT),
            Intervention::KillOther => self.signal(0, Signal::KILL),
            Intervention::KillStuck => {
                let pids: Vec<Pid> = (0..RANKS).map(|rank| self.pid(rank)).collect();
                send(Pid::from_child(&self.launcher), Signal::KILL);
                pids.into_iter().for_each(|pid| send(pid, Signal::KILL));
            }
            _ => {}
        }
        wait_until("the end of the launcher", || {
            self.launcher
                .try_wait()
                .expect("the launcher can be waited for")
        });
        fault.unwrap_or(start)
    }

    /// Waits until the job is in the state in which the fault must happen. Returns the time of a fault that the culprit
    /// itself causes; `None` if the caller causes the fault.
    fn wait_for_fault(&self, intervention: Intervention) -> Option<Instant> {
        let marked = |name: &str| self.folder.path().join(name).exists().then_some(());
        match intervention {
            Intervention::Terminate | Intervention::KillAll => {
                wait_until("ranks at work", || {
                    let is_at_work = |rank| {
                        self.ring(rank)
                            .is_some_and(|ring| ring.snapshot().entries.len() > 100)
                    };
                    (0..RANKS).all(is_at_work).then_some(())
                });
            }
            Intervention::KillInside | Intervention::StopInside => {
                wait_until("the peer to be held back", || marked(HELD));
                wait_until("the culprit's step", || marked(BEGUN));
                wait_until("the culprit inside its operation", || {
                    let dump = self.ring(CULPRIT)?.snapshot();
                    let last = dump.entries.last()?;
                    (last.state < EntryState::Completed).then_some(())
                });
            }
            _ => {
                wait_until("the culprit's step", || marked(BEGUN));
                return Some(Instant::now());
            }
        }
        None
    }

    fn mark(&self, name: &str) {
        std::fs::write(self.folder.path().join(name), "")
            .expect("the job's folder can be written to");
    }

    fn ring(&self, rank: u32) -> Option<RingReader> {
        RingReader::attach(self.job_rings().join(format!("{rank}.0.ring"))).ok()
    }

    fn has_ended(&self, rank: u32) -> bool {
        let launches = LaunchRecord::in_directory(&self.job_rings());
        let mut processes = launches.iter().flat_map(|launch| &launch.ranks);
        processes.any(|process| process.rank == rank && process.end.is_some())
    }

    fn pid(&self, rank: u32) -> Pid {
        let launches = LaunchRecord::in_directory(&self.job_rings());
        let mut processes = launches.iter().flat_map(|launch| &launch.ranks);
        let process = processes.find(|process| process.rank == rank);
        let pid = process.and_then(|process| i32::try_from(process.pid).ok());
        pid.and_then(Pid::from_raw)
            .expect("the launcher wrote down its ranks")
    }

    fn signal(&self, rank: u32, signal: Signal) {
        send(self.pid(rank), signal);
    }

    fn terminate(&self) {
        send(Pid::from_child(&self.launcher), Signal::TERM);
    }
}

fn copy(from: &Path, to: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let (path, to) = (entry.path(), to.join(entry.file_name()));
        match entry.file_type()? {
            kind if kind.is_dir() => copy(&path, &to)?,
            kind if kind.is_file() => std::fs::copy(&path, &to).map(drop)?,
            _ => {}
        }
    }
    Ok(())
}

fn send(pid: Pid, signal: Signal) {
    // If this fails, the process has ended already.
    let _ = kill_process(pid, signal);
}

impl Intervention {
    /// The verdict that the view must give before the job ends.
    const fn waits_for(self) -> Option<Verdict> {
        match self {
            Self::StopInside
            | Self::TerminateStuck
            | Self::KillStuck
            | Self::Resume
            | Self::KillOther => Some(Verdict::Stuck),
            Self::TerminateSlow => Some(Verdict::Slow),
            Self::Watch | Self::Terminate | Self::KillInside | Self::KillAll | Self::ResumeLate => {
                None
            }
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if self.launcher.try_wait().is_ok_and(|ended| ended.is_none()) {
            // The launcher ends its ranks.
            self.terminate();
        }
        // The launcher has ended already, or ends within its grace period.
        let _ = self.launcher.wait();
    }
}
