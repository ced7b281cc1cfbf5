//! Removes the files of old jobs that have died.
//!
//! Ring files are in memory, and a job that died leaves its rings for readers. Soon after the lowest rank of a job on a
//! host has made its ring, the dead jobs below its directory are counted from the newest to the oldest, and those
//! beyond the limits are removed with their rings and launch records. A job is dead if all its rings belong to
//! processes of this host that are gone, and none of its launchers is alive. The newest dead job is kept however large
//! it is, unless no jobs are to be kept.

use crate::error::Result;
use crate::publish::ring_reader::{RingListing, files_in};
use crate::publish::{LaunchRecord, RingSummary};
use crate::record::Storage;
use crate::record::file::directory;
use crate::record::file::names::RingName;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Limits on the dead jobs whose files are kept below a directory of rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptJobs {
    /// Maximum number of dead jobs.
    pub jobs: usize,
    /// Maximum memory of their rings together, in bytes; the newest dead job may exceed it.
    pub bytes: u64,
}

impl Default for KeptJobs {
    /// 32 jobs, 1 GiB.
    fn default() -> Self {
        Self {
            jobs: 32,
            bytes: 1 << 30,
        }
    }
}

/// A job of which no process is left.
struct DeadJob {
    /// The last sign of life of its processes, wall clock, ns since the epoch.
    last_ns: i64,
    directory: PathBuf,
    rings: Vec<PathBuf>,
    /// Memory that the rings occupy.
    bytes: u64,
}

impl KeptJobs {
    /// Whether these jobs would exceed the limits if all were dead. Opens no ring: the sizes of the files suffice.
    fn may_be_exceeded(&self, jobs: &BTreeMap<String, Vec<(RingName, PathBuf)>>) -> bool {
        let files = jobs.values().flatten();
        let bytes =
            files.map(|(_, path)| fs::symlink_metadata(path).map_or(0, |file| bytes_of(&file)));
        jobs.len() > self.jobs || bytes.fold(0, u64::saturating_add) > self.bytes
    }

    /// Removes the dead jobs below `directory` that are beyond these limits. Returns the directories of these jobs, the
    /// newest first, also where some files could not be removed.
    ///
    /// # Blocking
    ///
    /// Reads the head of every ring below the directory, unless all its jobs together are within the limits.
    ///
    /// # Errors
    ///
    /// If the directory cannot be listed. Files that cannot be removed stay.
    pub fn apply(&self, directory: &Path) -> Result<Vec<PathBuf>> {
        self.apply_beside(directory, None, None)
    }

    /// Like [`apply`](Self::apply); the job whose directory has the name `own` lives. Reads and removes no further
    /// rings once `until` has passed. A job that was not read by then is not counted: that can only leave more of the
    /// others in place.
    fn apply_beside(
        &self,
        directory: &Path,
        own: Option<&OsStr>,
        until: Option<Instant>,
    ) -> Result<Vec<PathBuf>> {
        let mut jobs: BTreeMap<String, Vec<(RingName, PathBuf)>> = BTreeMap::new();
        for (job, name, path) in files_in(directory)? {
            if own != Some(OsStr::new(&job)) {
                jobs.entry(job).or_default().push((name, path));
            }
        }
        if !self.may_be_exceeded(&jobs) {
            return Ok(Vec::new());
        }
        let mut dead = dead_jobs(directory, jobs, until);
        dead.sort_by(|a, b| (b.last_ns, &b.directory).cmp(&(a.last_ns, &a.directory)));
        let mut bytes = 0_u64;
        let mut is_kept = |index: usize, job: &DeadJob| {
            bytes = bytes.saturating_add(job.bytes);
            index < self.jobs && (index == 0 || bytes <= self.bytes)
        };
        let kept = dead.iter().enumerate();
        let kept = kept.take_while(|(index, job)| is_kept(*index, job)).count();
        let mut old = dead.split_off(kept);
        if let Some(left) = old.iter().position(|job| {
            let is_late = has_passed(until);
            if !is_late {
                remove(job);
            }
            is_late
        }) {
            old.truncate(left);
        }
        Ok(old.into_iter().map(|job| job.directory).collect())
    }
}

/// Removes the dead jobs beyond `kept` from the directory in which the job of this ring has its directory. Returns
/// `false`, and removes nothing, if a lower rank of the job lives on this host: that rank removes them, and a caller
/// that learns later that ranks have ended calls this again. Does nothing for a ring in memory. Errors are ignored: a
/// job starts even if old rings cannot be removed.
pub fn remove_jobs_beside(own: &Storage, kept: &KeptJobs) -> bool {
    remove_beside(own, kept, None)
}

/// Like [`remove_jobs_beside`], but begins to read or remove no further ring once `limit` has passed, for a process to
/// which the files of other jobs must not matter. What is left is removed by the next job that looks.
pub fn remove_jobs_beside_within(own: &Storage, kept: &KeptJobs, limit: Duration) -> bool {
    remove_beside(own, kept, Instant::now().checked_add(limit))
}

fn remove_beside(own: &Storage, kept: &KeptJobs, until: Option<Instant>) -> bool {
    let ring = own.path();
    let Some((job, directory)) = ring.and_then(|ring| {
        let job = ring.parent()?;
        Some((job, job.parent()?))
    }) else {
        return true;
    };
    if has_lower_rank(job, ring) {
        return false;
    }
    let _ = kept.apply_beside(directory, job.file_name(), until);
    true
}

/// Whether the lowest ranks of this attempt in a job's directory include one below the rank of `own` that lives on this
/// host.
///
/// The head of every ring of every job is read to find the dead jobs. If each rank did that, the start of a job would
/// take time in proportion to the number of its ranks on the host, multiplied by the number of all rings there.
fn has_lower_rank(job: &Path, own: Option<&Path>) -> bool {
    let own = own.and_then(|own| RingName::parse(own.file_name()?.to_str()?));
    let Some(own) = own else {
        return false;
    };
    let is_lower =
        |name: &RingName| name.attempt == own.attempt && name.rank < own.rank && name.is_newest;
    let lower = directory::ring_files(job).filter(|(name, _)| is_lower(name));
    let mut lower: Vec<(RingName, PathBuf)> = lower.collect();
    lower.sort_unstable();
    let host = host_name();
    let lives = |(name, path): (RingName, PathBuf)| {
        let ring = RingListing::of(name.part, path).ring;
        ring.is_ok_and(|ring| ring.alive && ring.identity.host == host)
    };
    lower.into_iter().take(LOOKED_AT).any(lives)
}

/// At most this many rings of lower ranks are looked at.
const LOOKED_AT: usize = 4;

fn host_name() -> String {
    let system = rustix::system::uname();
    system.nodename().to_string_lossy().into_owned()
}

/// The dead jobs of those that are looked at before `until`.
fn dead_jobs(
    directory: &Path,
    jobs: BTreeMap<String, Vec<(RingName, PathBuf)>>,
    until: Option<Instant>,
) -> Vec<DeadJob> {
    let host = host_name();
    let dead = |(job, rings)| dead_job(directory.join(job), rings, &host);
    let looked_at = jobs.into_iter().take_while(|_| !has_passed(until));
    looked_at.filter_map(dead).collect()
}

fn has_passed(until: Option<Instant>) -> bool {
    until.is_some_and(|until| Instant::now() >= until)
}

/// The memory that a file occupies. The system counts blocks of 512 bytes, whatever the block size of the file system
/// is.
fn bytes_of(file: &fs::Metadata) -> u64 {
    file.blocks().saturating_mul(512)
}

/// The job of a directory; `None` unless it is dead. A ring that cannot be read may have a newer layout, and a ring of
/// another host does not show whether its process is alive: in both cases the job does not count as dead.
fn dead_job(directory: PathBuf, rings: Vec<(RingName, PathBuf)>, host: &str) -> Option<DeadJob> {
    let launches = LaunchRecord::in_directory(&directory);
    if !launches
        .iter()
        .all(|launch| launch.host == host && launch.is_over())
    {
        return None;
    }
    let mut job = DeadJob {
        last_ns: 0,
        directory,
        rings: Vec::new(),
        bytes: 0,
    };
    for (name, path) in rings {
        let metadata = fs::symlink_metadata(&path).ok()?;
        let RingListing { path, ring } = RingListing::of(name.part, path);
        let RingSummary {
            identity,
            alive,
            created_ns,
            heartbeat_ns,
            ..
        } = ring.ok()?;
        if alive || identity.host != host {
            return None;
        }
        job.last_ns = job.last_ns.max(created_ns).max(heartbeat_ns);
        job.bytes = job.bytes.saturating_add(bytes_of(&metadata));
        job.rings.push(path);
    }
    Some(job)
}

/// Removes the job's rings, launch records and directory. Stops at a ring that cannot be removed, since a new process
/// may have begun to use it.
fn remove(job: &DeadJob) {
    for ring in &job.rings {
        if !matches!(directory::remove_if_dead(ring), Ok(true)) {
            return;
        }
    }
    let files = fs::read_dir(&job.directory).into_iter().flatten().flatten();
    for file in files.map(|entry| entry.path()) {
        if LaunchRecord::has_record_name(&file) {
            let _ = fs::remove_file(file);
        }
    }
    // This fails, and must, if a new process has put a file there.
    let _ = fs::remove_dir(&job.directory);
}
