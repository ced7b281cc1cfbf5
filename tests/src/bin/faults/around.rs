//! Applies faults around a job: to its file systems, its files and its clock. Also contains the observers that read its
//! records.

use crate::rank::events_folder;
use anyhow::{Context, ensure};
use rcomm_recorder::publish::{
    Endpoint, EndpointAddress, EndpointClient, Listen, RingReader, list_rings,
};
use rcomm_recorder::record::{FlightRecorder, Placement, RecorderConfig};
use rustix::process::{Pid, Signal, kill_process_group};
use std::io::Write;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The offset of the anchor's wall-clock time in a ring's header, in bytes: word 11 (docs/FORMAT.md).
const ANCHOR_WALL: u64 = 11 * 8;
/// Maximum number of incomplete requests that an observer keeps open.
const HALF_REQUESTS: usize = 64;

/// Reads all rings of a folder and asks their endpoints for dumps, again and again; each time, leaves an incomplete
/// request open at each endpoint.
pub(crate) fn observe(folder: &Path) -> ! {
    let mut held = Vec::new();
    loop {
        for ring in list_rings(folder).unwrap_or_default() {
            if let Ok(ring) = RingReader::attach(&ring.path) {
                std::hint::black_box(ring.snapshot());
            }
            let socket = ring.path.with_extension("sock");
            if let Ok(mut half) = UnixStream::connect(&socket) {
                // The endpoint may have closed this connection in favor of a later one.
                let _ = half.write_all(b"GET /v1/dump HTTP/1.1\r\n");
                held.push(half);
                held.drain(..held.len().saturating_sub(HALF_REQUESTS));
            }
            let endpoint = EndpointClient::new(EndpointAddress::Unix(socket), None);
            let answer = endpoint.dump(None, Instant::now() + Duration::from_secs(1));
            // The rank may have ended meanwhile.
            std::hint::black_box(answer.is_ok());
        }
    }
}

/// Serves an endpoint once, before descriptors are counted. If another crate uses tokio's signals, a program keeps two
/// descriptors from its first endpoint on, which are no leak of a world.
pub(crate) fn serve_once(folder: &Path) -> anyhow::Result<()> {
    let mut config = RecorderConfig::new("once", 0, 1);
    (config.placement, config.entries) = (Placement::Memory, 16);
    let recorder = Arc::new(FlightRecorder::create(&config)?);
    let socket = events_folder(folder).join(format!("{}.sock", std::process::id()));
    let endpoint = Endpoint::serve(recorder, Listen::Unix(socket))?;
    let client = EndpointClient::new(endpoint.address().clone(), None);
    client.status(Instant::now() + Duration::from_secs(60))?;
    Ok(())
}

/// Whether a rank's ring shows that the rank waits for the others in its init.
pub(crate) fn is_connecting(ring: &Path) -> bool {
    let status = RingReader::attach(ring).map(|ring| ring.snapshot().status);
    status.is_ok_and(|status| {
        let connects = |phase: &str| ["connect", "wait for all ranks"].contains(&phase);
        status.is_some_and(|status| connects(status.phase.as_str()))
    })
}

/// Changes the anchor in a ring's header, as if the wall clock of the ring's host had been wrong by `seconds` when the
/// ring was made.
pub(crate) fn move_clock(ring: &Path, seconds: i64) -> anyhow::Result<()> {
    let file = std::fs::File::options().read(true).write(true).open(ring)?;
    let mut word = [0; 8];
    file.read_exact_at(&mut word, ANCHOR_WALL)?;
    let moved = i64::from_ne_bytes(word) + seconds * 1_000_000_000;
    Ok(file.write_all_at(&moved.to_ne_bytes(), ANCHOR_WALL)?)
}

/// Writes to a FIFO every 50 ms, for `time`.
pub(crate) fn flood(pipe: &Path, time: Duration) -> anyhow::Result<()> {
    let opened = std::fs::File::options()
        .write(true)
        .custom_flags(rustix::fs::OFlags::NONBLOCK.bits().cast_signed())
        .open(pipe);
    let mut file = opened.with_context(|| format!("cannot open {}", pipe.display()))?;
    let until = Instant::now() + time;
    while Instant::now() < until {
        // A FIFO that is full asks for a dump already.
        let _ = file.write_all(&[b'x'; 4096]);
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// Makes a disk in a file of `folder`, and mounts its file system at `at`.
///
/// # Errors
/// The reason why this system cannot: no loop device, or a missing program.
pub(crate) fn mount_disk(folder: &Path, at: &Path) -> anyhow::Result<()> {
    let image = folder.join("disk");
    std::fs::File::create(&image)?.set_len(32 << 20)?;
    run(Command::new("mkfs.ext4").arg("-q").arg(&image))?;
    std::fs::create_dir_all(at)?;
    run(Command::new("mount")
        .args(["-o", "loop"])
        .arg(&image)
        .arg(at))
}

/// A file system on which every write waits, until this value is dropped.
pub(crate) struct Stalled {
    at: PathBuf,
    /// Ends the stall after a minute, also if this program is killed: a process that waits for the file system cannot
    /// be killed.
    thaw: Child,
}

impl Stalled {
    /// Stalls the file system that is mounted here.
    pub(crate) fn begin(at: &Path) -> anyhow::Result<Self> {
        let mut thaw = Command::new("sh");
        thaw.args(["-c", "sleep 60; exec fsfreeze -u \"$0\""])
            .arg(at)
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let stalled = Self {
            at: at.to_owned(),
            thaw: thaw.spawn()?,
        };
        run(Command::new("fsfreeze").arg("-f").arg(at))?;
        Ok(stalled)
    }

    /// Ends the stall.
    pub(crate) fn end(self) -> anyhow::Result<()> {
        run(Command::new("fsfreeze").arg("-u").arg(&self.at))
    }
}

impl Drop for Stalled {
    fn drop(&mut self) {
        // This fails if the stall has ended.
        let _ = Command::new("fsfreeze").arg("-u").arg(&self.at).output();
        if let Ok(group) = i32::try_from(self.thaw.id()) {
            let _ = Pid::from_raw(group).map(|group| kill_process_group(group, Signal::KILL));
        }
        let _ = self.thaw.wait();
    }
}

/// Mounts a file system in memory (tmpfs) at this folder, with these options.
pub(crate) fn mount(options: &str, at: &Path) -> anyhow::Result<()> {
    let mut command = Command::new("mount");
    command
        .args(["-t", "tmpfs", "-o", options, "tmpfs"])
        .arg(at);
    run(&mut command)
}

fn run(command: &mut Command) -> anyhow::Result<()> {
    let done = command.output();
    let done = done.with_context(|| format!("cannot run {:?}", command.get_program()))?;
    let error = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.success(), "{command:?}: {}", error.trim());
    Ok(())
}

/// Overwrites every third block of 4 KiB with arbitrary bytes, from 64 KiB on: the header is kept.
pub(crate) fn overwrite(ring: &Path) -> anyhow::Result<()> {
    let file = std::fs::File::options().write(true).open(ring)?;
    let length = file.metadata()?.len();
    let noise: Vec<u8> = (0..4096_u32)
        .map(|index| (index * 97 % 251) as u8)
        .collect();
    for offset in (64 << 10..length.saturating_sub(4096)).step_by(4096 * 3) {
        file.write_all_at(&noise, offset)?;
    }
    Ok(())
}
