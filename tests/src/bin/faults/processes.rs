//! Sends signals to processes, and looks at their states.

use crate::scenario::Act;
use anyhow::Context;
use rustix::process::{Pid, Signal, kill_process};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The limit of a wait for one process.
const TIME_LIMIT: Duration = Duration::from_secs(40);
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(10);

/// The path of `rcomm-run` next to this program, whether or not it is built.
pub(crate) fn launcher() -> anyhow::Result<PathBuf> {
    Ok(std::env::current_exe()?.with_file_name("rcomm-run"))
}

pub(crate) fn signal_of(act: Act) -> Signal {
    match act {
        Act::Freeze => Signal::STOP,
        Act::Terminate => Signal::TERM,
        Act::Interrupt => Signal::INT,
        _ => Signal::KILL,
    }
}

pub(crate) fn send(pid: u32, signal: Signal) -> anyhow::Result<()> {
    let checked = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let checked = checked.with_context(|| format!("process id {pid} is out of range"))?;
    kill_process(checked, signal)?;
    Ok(())
}

/// The letter of a process's state in `/proc` (`Z`: ended, but not reaped); `None` if there is no such process.
pub(crate) fn state_of(pid: u32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit(')').next()?.trim().chars().next()
}

pub(crate) fn is_alive(pid: u32) -> bool {
    state_of(pid).is_some_and(|state| state != 'Z')
}

/// Waits until the process is stopped by a signal or has ended, up to [`TIME_LIMIT`].
pub(crate) fn wait_until_stopped_or_gone(pid: u32) {
    let until = Instant::now() + TIME_LIMIT;
    while state_of(pid).is_some_and(|state| !matches!(state, 'T' | 'Z')) && Instant::now() < until {
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// The processes whose arguments contain this path, without those that have ended.
pub(crate) fn processes_of(folder: &Path) -> Vec<u32> {
    let folder = folder.as_os_str().as_encoded_bytes();
    let has_folder = |pid: &u32| {
        let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        line.windows(folder.len()).any(|part| part == folder)
    };
    let files = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = files.filter_map(|file| file.file_name().to_str()?.parse().ok());
    pids.filter(has_folder)
        .filter(|&pid| is_alive(pid))
        .collect()
}

/// A process that is stopped most of the time, until this value is dropped.
pub(crate) struct DutyCycle {
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl DutyCycle {
    /// Stops the process nine tenths of the time.
    pub(crate) fn of(pid: u32) -> Self {
        let is_over = Arc::new(AtomicBool::new(false));
        let must_end = Arc::clone(&is_over);
        let stop_and_continue = move || {
            // The process may have ended.
            let mut sent = send(pid, Signal::STOP);
            while sent.is_ok() && !must_end.load(Ordering::Relaxed) {
                std::thread::sleep(Duration::from_millis(90));
                sent = send(pid, Signal::CONT);
                std::thread::sleep(Duration::from_millis(10));
                sent = sent.and_then(|()| send(pid, Signal::STOP));
            }
            let _ = send(pid, Signal::CONT);
        };
        Self {
            is_over,
            thread: Some(std::thread::spawn(stop_and_continue)),
        }
    }
}

impl Drop for DutyCycle {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        let thread = self.thread.take().map(JoinHandle::join);
        // The thread does not panic.
        drop(thread);
    }
}
