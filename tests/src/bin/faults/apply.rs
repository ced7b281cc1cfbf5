//! Applies faults to a running job from outside.

use crate::around;
use crate::job::{Job, SLACK, TIME_LIMIT, TIMEOUT};
use crate::processes::{DutyCycle, POLL_INTERVAL, send, signal_of, wait_until_stopped_or_gone};
use crate::rank::{Event, EventKind, go_file, group_file, now_ms};
use crate::scenario::{Act, Cut, Damage, Fault, Hit};
use crate::stranger;
use anyhow::{Context, ensure};
use rustix::process::Signal;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

impl Job<'_> {
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
                        // The launcher is stopped for longer than an operation may take: no operation needs the
                        // launcher.
                        std::thread::sleep(TIMEOUT + SLACK);
                        send(launcher, Signal::CONT)?;
                    }
                    return Ok(now);
                };
                let now = now_ms();
                send(self.pid_of(culprit)?, signal_of(then))?;
                return Ok(now);
            }
            Fault::SlowStore => {
                self.launcher_slowdown = Some(DutyCycle::of(self.children[0].id()));
                let now = now_ms();
                send(self.pid_of(culprit)?, Signal::STOP)?;
                return Ok(now);
            }
            Fault::Pause(ms) => {
                let pids = self.scenario.culprits.iter();
                let pids: Vec<u32> = pids
                    .map(|&rank| self.pid_of(rank))
                    .collect::<Result<_, _>>()?;
                for &pid in &pids {
                    send(pid, Signal::STOP)?;
                }
                std::thread::sleep(Duration::from_millis(ms));
                for &pid in &pids {
                    send(pid, Signal::CONT)?;
                }
            }
            Fault::Network(cut) => self.hit(culprit, Hit::Network(cut))?,
            Fault::InInit(hit) => {
                let until = Instant::now() + TIME_LIMIT;
                while !around::is_connecting(&self.ring(culprit)) {
                    ensure!(Instant::now() < until, "the rank has not begun its init");
                    std::thread::sleep(POLL_INTERVAL);
                }
                self.hit(culprit, hit)?;
                let now = now_ms();
                std::fs::write(go_file(&self.folder), "")?;
                return Ok(now);
            }
            Fault::InShutdown(hit) => {
                let is_held = |events: &[Event]| {
                    let mut events = events.iter();
                    events.any(|event| event.rank == culprit && event.kind == EventKind::Held)
                };
                ensure!(
                    self.wait(TIME_LIMIT, is_held),
                    "the rank has not ended its work: {}",
                    self.output().trim()
                );
                self.hit(culprit, hit)?;
                let now = now_ms();
                std::fs::write(go_file(&self.folder), "")?;
                return Ok(now);
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
                    let failed = |event: &&Event| matches!(event.kind, EventKind::Failed { .. });
                    events.iter().filter(failed).count() + 1 >= self.scenario.ranks as usize
                });
                stalled.end()?;
            }
            Fault::OtherUser => {
                let pids: Vec<u32> = (0..self.scenario.ranks)
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
                let mut intruder = self.spawn(culprit, self.scenario.ranks, &name, &[])?;
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

    /// Applies `hit` to the rank's process, or to the network of its host.
    fn hit(&self, rank: u32, hit: Hit) -> anyhow::Result<()> {
        let cut = match hit {
            Hit::Process(act) => return send(self.pid_of(rank)?, signal_of(act)),
            Hit::Network(cut) => cut,
        };
        let hosts = self.hosts.as_ref();
        let hosts = hosts.context("a network fault needs a scenario with Start::Hosts")?;
        hosts.apply(rank as usize, cut, TIMEOUT)?;
        if cut == Cut::Vanished {
            send(self.pid_of(rank)?, Signal::KILL)?;
        }
        Ok(())
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
}
