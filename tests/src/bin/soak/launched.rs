//! Rounds whose ranks `rcomm-run` starts. `rcomm-run` is killed or asked to end, and no rank may be left.

use crate::draw::Plan;
use crate::{ENDING, Limits};
use anyhow::{Context, ensure};
use rcomm_tests::process::free_port;
use std::fs::{File, TryLockError};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The name of the file that each rank keeps locked until its process ends.
pub(crate) const ALIVE: &str = "alive";
/// How long a launcher lets its ranks end by themselves, in seconds.
const GRACE: u64 = 1;

/// The launcher beside this program; `None` if it was not built.
pub(crate) fn launcher() -> Option<PathBuf> {
    let own = std::env::current_exe().ok()?;
    Some(own.with_file_name("rcomm-run")).filter(|path| path.exists())
}

/// Makes a round. The launcher must end, and then all ranks.
///
/// # Errors
/// What was wrong.
pub(crate) fn try_round(plan: &Plan, limits: &Limits) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let alive = File::create(folder.path().join(ALIVE))?;
    let port = free_port().to_string();
    let ms = |time: Duration| time.as_millis().to_string();
    let mut command = Command::new(launcher().context("rcomm-run is not built")?);
    command
        .args(["-n", &plan.ranks.to_string(), "--grace", &GRACE.to_string()])
        .args([
            "--job-id",
            &format!("soak-{port}"),
            "--master-port",
            &port,
            "--",
        ])
        .arg(std::env::current_exe()?)
        .args(["rank", &plan.seed.to_string(), &plan.round.to_string()])
        .env("RCOMM_TRANSPORT", plan.transport)
        .env("RCOMM_TIMEOUT_MS", ms(limits.timeout))
        .env("RCOMM_INIT_TIMEOUT_MS", "60000")
        .env("RCOMM_RING_DIR", folder.path().join("rings"))
        .env("RCOMM_DUMP_DIR", folder.path().join("dumps"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let mut launcher = Launcher(command.spawn()?);
    let until = Instant::now() + ENDING;
    let status = loop {
        if let Some(status) = launcher.0.try_wait()? {
            break status;
        }
        ensure!(Instant::now() < until, "the launcher does not end");
        std::thread::sleep(Duration::from_millis(5));
    };
    ensure!(
        !status.success(),
        "the launcher succeeded, although it should have been killed or asked to end"
    );
    let until = Instant::now() + Duration::from_secs(GRACE) + limits.slack;
    loop {
        match alive.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) => return Err(error.into()),
        }
        ensure!(
            Instant::now() < until,
            "a rank is left without its launcher"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Kills the launcher when it is dropped.
struct Launcher(Child);

impl Drop for Launcher {
    fn drop(&mut self) {
        // The launcher may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
