//! A job under its launcher, and what is done to it from outside.

use super::RANKS;
use super::look::View;
use super::rank::{BEGUN, Deed, GO, HELD};
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
pub(super) enum Plot {
    /// Nothing.
    Watch,
    /// SIGTERM to the launcher.
    Terminate,
    /// SIGKILL to the culprit, while it is inside an operation.
    KillInside,
    /// SIGKILL to every rank, one after the other, before any can notice another's end.
    KillAll,
    /// SIGSTOP to the culprit, while it is inside an operation; SIGTERM to the launcher once the view says
    /// that the job is stuck.
    StopInside,
    /// SIGTERM to the launcher once the view says that the job is stuck.
    TerminateStuck,
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
const JOB: &str = "life";

/// How much memory the control group has: several times what the ranks of these jobs use.
const MEMORY: u64 = 384 << 20;

/// A control group with little memory, removed when dropped.
pub(super) struct MemoryGroup(PathBuf);

impl MemoryGroup {
    /// Makes a group, of whichever version of control groups this host has.
    ///
    /// # Errors
    /// The reason why no group can be made here.
    pub(super) fn make() -> Result<Self, String> {
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let name = format!("rcomm-lives-{}-{number}", std::process::id());
        let mount = Path::new("/sys/fs/cgroup");
        let limit = MEMORY.to_string();
        let (place, limits) = if mount.join("cgroup.controllers").exists() {
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
        let group = place.join(name);
        std::fs::create_dir(&group).map_err(|error| {
            format!(
                "no control group can be made in {}: {error}",
                place.display()
            )
        })?;
        let group = Self(group);
        for (name, limit) in limits {
            std::fs::write(group.0.join(name), limit)
                .map_err(|error| format!("{name} of a control group cannot be set: {error}"))?;
        }
        Ok(group)
    }
}

static MADE: AtomicU32 = AtomicU32::new(0);

impl Drop for MemoryGroup {
    fn drop(&mut self) {
        // Its processes have ended; a group that cannot be removed is empty.
        let _ = std::fs::remove_dir(&self.0);
    }
}

/// Puts this process into the control group that [`GROUP`] names, if it does.
///
/// # Errors
/// If the group takes no processes.
pub(super) fn enter_group() -> std::io::Result<()> {
    match std::env::var_os(GROUP) {
        Some(group) => std::fs::write(Path::new(&group).join("cgroup.procs"), "0"),
        None => Ok(()),
    }
}

/// A job that runs.
pub(super) struct Stage {
    launcher: Child,
    folder: tempfile::TempDir,
    // Dropped after the job has ended.
    _group: Option<MemoryGroup>,
}

impl Stage {
    /// Starts the job of a row; `program` is the one that calls [`super::part_of_a_job`].
    pub(super) fn start(program: &Path, row: &Row, transport: Transport) -> Result<Self> {
        let folder = tempfile::tempdir().context("no temporary directory")?;
        let log = std::fs::File::create(folder.path().join("log"))?;
        let group = match row.deed {
            Deed::Exhaust => Some(MemoryGroup::make().map_err(anyhow::Error::msg)?),
            _ => None,
        };
        let mut command = Command::new(program);
        command.args(["launch", "-n", &RANKS.to_string(), "--job-id", JOB]);
        // Time for the others to time out, however busy the host, and little for a stopped rank.
        command.args(["--linger", "15", "--grace", "2", "--"]);
        command.arg(program).args(["rank", row.deed.name()]);
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
            _group: group,
        })
    }

    pub(super) fn rings(&self) -> PathBuf {
        self.folder.path().join("rings")
    }

    /// The rings of the job itself, and what the launcher wrote next to them.
    pub(super) fn job_rings(&self) -> PathBuf {
        self.rings().join(JOB)
    }

    pub(super) fn dumps(&self) -> PathBuf {
        self.folder.path().join("dumps")
    }

    /// Does to the job what the row asks for, and waits for its end; returns when the fault came.
    pub(super) fn play(&mut self, plot: Plot, view: &View) -> Instant {
        let fault = self.wait_for_fault(plot);
        let begun = Instant::now();
        match plot {
            Plot::Watch => {}
            Plot::KillInside | Plot::StopInside => {
                let signal = match plot {
                    Plot::KillInside => Signal::KILL,
                    _ => Signal::STOP,
                };
                self.signal(CULPRIT, signal);
                self.mark(GO);
            }
            Plot::Terminate => self.terminate(),
            Plot::KillAll => {
                // None may end because it noticed another's end.
                (0..RANKS).for_each(|rank| self.signal(rank, Signal::STOP));
                for rank in 0..RANKS {
                    self.signal(rank, Signal::KILL);
                    // Several looks of the view between two deaths.
                    std::thread::sleep(Duration::from_millis(100));
                }
            }
            Plot::TerminateStuck | Plot::KillStuck | Plot::Resume | Plot::KillOther => {}
            Plot::ResumeLate => {
                wait_until("the end of the other ranks", || {
                    let mut others = (0..RANKS).filter(|&rank| rank != CULPRIT);
                    others.all(|rank| self.has_ended(rank)).then_some(())
                });
                self.signal(CULPRIT, Signal::CONT);
            }
        }
        if plot.waits_for_stuck() {
            wait_until("the job to be called stuck", || {
                let said = view.said();
                let stuck = |(_, answer): &(_, super::Answer)| answer.verdict == Verdict::Stuck;
                said.iter().any(stuck).then_some(())
            });
        }
        match plot {
            Plot::StopInside | Plot::TerminateStuck => self.terminate(),
            Plot::Resume => self.signal(CULPRIT, Signal::CONT),
            Plot::KillOther => self.signal(0, Signal::KILL),
            Plot::KillStuck => {
                let pids: Vec<Pid> = (0..RANKS).map(|rank| self.pid(rank)).collect();
                send(Pid::from_child(&self.launcher), Signal::KILL);
                pids.into_iter().for_each(|pid| send(pid, Signal::KILL));
            }
            _ => {}
        }
        wait_until("the end of the launcher", || {
            self.launcher.try_wait().expect("a child of this process")
        });
        fault.unwrap_or(begun)
    }

    /// Waits until the job is where the fault must find it. Returns the time of a fault that the culprit itself
    /// causes; `None` if the caller causes it.
    fn wait_for_fault(&self, plot: Plot) -> Option<Instant> {
        let here = |name: &str| self.folder.path().join(name).exists().then_some(());
        match plot {
            Plot::Terminate | Plot::KillAll => {
                wait_until("ranks at work", || {
                    let begun = |rank| {
                        self.ring(rank)
                            .is_some_and(|it| it.snapshot().entries.len() > 100)
                    };
                    (0..RANKS).all(begun).then_some(())
                });
            }
            Plot::KillInside | Plot::StopInside => {
                wait_until("the peer to be held back", || here(HELD));
                wait_until("the culprit's step", || here(BEGUN));
                wait_until("the culprit inside its operation", || {
                    let dump = self.ring(CULPRIT)?.snapshot();
                    let last = dump.entries.last()?;
                    (last.state < EntryState::Completed).then_some(())
                });
            }
            _ => {
                wait_until("the culprit's step", || here(BEGUN));
                return Some(Instant::now());
            }
        }
        None
    }

    fn mark(&self, name: &str) {
        std::fs::write(self.folder.path().join(name), "").expect("a folder of this process");
    }

    fn ring(&self, rank: u32) -> Option<RingReader> {
        RingReader::attach(self.job_rings().join(format!("{rank}.0.ring"))).ok()
    }

    fn has_ended(&self, rank: u32) -> bool {
        let launches = LaunchRecord::in_directory(&self.job_rings());
        let mut ranks = launches.iter().flat_map(|it| &it.ranks);
        ranks.any(|it| it.rank == rank && it.end.is_some())
    }

    fn pid(&self, rank: u32) -> Pid {
        let launches = LaunchRecord::in_directory(&self.job_rings());
        let mut ranks = launches.iter().flat_map(|it| &it.ranks);
        let pid = ranks.find(|it| it.rank == rank).map(|it| it.pid);
        let pid = pid.and_then(|pid| i32::try_from(pid).ok());
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

fn send(pid: Pid, signal: Signal) {
    // A process that has just ended needs no signal.
    let _ = kill_process(pid, signal);
}

impl Plot {
    const fn waits_for_stuck(self) -> bool {
        matches!(
            self,
            Self::StopInside
                | Self::TerminateStuck
                | Self::KillStuck
                | Self::Resume
                | Self::KillOther
        )
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        if self.launcher.try_wait().is_ok_and(|ended| ended.is_none()) {
            // The launcher ends its ranks.
            self.terminate();
        }
        // It has ended already, or ends within its grace.
        let _ = self.launcher.wait();
    }
}
