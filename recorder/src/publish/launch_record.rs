//! A launcher's record of the processes that it started: a small JSON file in the job's directory of rings.
//!
//! A process that is killed cannot record how it ended. The launcher can: it knows the exit codes, and the signals that
//! it received and sent; and if the system counts such kills for the job, whether the kernel killed a process because
//! memory ran out.

use crate::error::{Error, Result};
use crate::model::Rank;
use crate::record::file::directory;
use crate::record::file::names::job_directory_name;
use serde::{Deserialize, Serialize};
use std::fs;
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// A launcher's record of the ranks of one job on one host. Times are by the wall clock, ns since the
/// epoch.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaunchRecord {
    /// [`Self::SCHEMA`].
    pub schema: String,
    /// The job's name, the same on all hosts.
    pub job: String,
    /// The attempt of these ranks, from 0: how often the launchers have started the ranks again, or the ranks have
    /// recreated their world.
    #[serde(default)]
    pub attempt: u32,
    /// The host of these ranks.
    #[serde(default)]
    pub host: String,
    /// Which of the job's hosts this is, from 0.
    #[serde(default)]
    pub node: u32,
    /// The number of ranks of the whole job; `ranks` has those of this host.
    pub world_size: u32,
    /// The launcher's process id.
    #[serde(default)]
    pub launcher_pid: u32,
    /// When the ranks were started.
    pub started_ns: i64,
    /// When the last rank of this host had ended; 0 = not yet, or the launcher itself was killed before.
    #[serde(default)]
    pub ended_ns: i64,
    /// The signals that the launcher received, in order: SIGTERM, SIGINT and SIGHUP ask it to end the job.
    #[serde(default)]
    pub received: Vec<LaunchSignal>,
    /// The ranks of this host, ascending.
    pub ranks: Vec<LaunchedRank>,
}

/// A signal that the launcher received or sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LaunchSignal {
    /// The signal's number.
    pub signal: i32,
    /// When the launcher received or sent the signal.
    pub time_ns: i64,
}

/// One rank in its launcher's record.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaunchedRank {
    /// Rank in the world.
    pub rank: Rank,
    /// The rank's process id on the host.
    pub pid: u32,
    /// The signals that the launcher sent to the rank, in order, including those that the launcher passed on.
    #[serde(default)]
    pub sent: Vec<LaunchSignal>,
    /// How the rank's process ended; `None` until the launcher has noted that.
    #[serde(default)]
    pub end: Option<RankEnd>,
}

/// How a rank's process ended, as the system reported it to the launcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RankEnd {
    /// When the launcher noticed the end.
    pub time_ns: i64,
    /// The exit code; `None` if a signal killed the process.
    #[serde(default)]
    pub exit_code: Option<i32>,
    /// The signal that killed the process; `None` if it exited.
    #[serde(default)]
    pub signal: Option<i32>,
    /// Whether the kernel killed the process because memory ran out; `None` if unknown.
    #[serde(default)]
    pub out_of_memory: Option<bool>,
}

impl RankEnd {
    /// Whether the process exited with 0.
    pub const fn is_success(&self) -> bool {
        matches!(self.exit_code, Some(0))
    }
}

impl LaunchRecord {
    /// Name and version of the file's format.
    pub const SCHEMA: &'static str = "rcomm.launch/1";

    /// The path of the record of one host: `launch.<node>.json` in the job's directory below `directory`.
    pub fn path(directory: &Path, job: &str, node: u32) -> PathBuf {
        let job = directory.join(job_directory_name(job));
        job.join(format!("launch.{node}.json"))
    }

    /// The records of all hosts in a job's directory of rings, by host. Unreadable files, and files beyond the first
    /// 4,096 or 256 MiB, are left out.
    pub fn in_directory(job_directory: &Path) -> Vec<Self> {
        Self::in_directory_within(job_directory, MAX_SUM)
    }

    /// Like [`in_directory`](Self::in_directory), with this limit for the size of all files together.
    fn in_directory_within(job_directory: &Path, mut bytes_left: u64) -> Vec<Self> {
        let mut paths: Vec<PathBuf> = fs::read_dir(job_directory)
            .into_iter()
            .flatten()
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| has_record_name(path))
            .take(MAX_FILES)
            .collect();
        paths.sort();
        let read = |path: &PathBuf| {
            let (record, bytes) = Self::read_within(path, MAX_BYTES.min(bytes_left)).ok()?;
            bytes_left -= bytes;
            Some(record)
        };
        let mut records: Vec<Self> = paths.iter().filter_map(read).collect();
        records.sort_by_key(|record| record.node);
        records
    }

    /// The records of a job's hosts below a directory of rings
    /// ([`default_directory`](crate::record::default_directory) unless another one is configured).
    pub fn of_job(directory: &Path, job: &str) -> Vec<Self> {
        Self::in_directory(&directory.join(job_directory_name(job)))
    }

    /// Reads one file. Never blocks, and refuses a path whose last component is a symbolic link.
    ///
    /// # Errors
    /// If the file cannot be opened, is too long, or is not a launch record.
    pub fn read(path: &Path) -> Result<Self> {
        Self::read_within(path, MAX_BYTES).map(|(record, _)| record)
    }

    /// Like [`read`](Self::read), with this limit; also returns the file's size.
    fn read_within(path: &Path, limit: u64) -> Result<(Self, u64)> {
        let io = |error| Error::io(format!("read {}", path.display()), error);
        let file: OwnedFd = directory::open(path).map_err(io)?;
        let mut bytes = Vec::new();
        let mut file = fs::File::from(file).take(limit + 1);
        file.read_to_end(&mut bytes).map_err(io)?;
        let record = Self::parse(&bytes, limit)
            .map_err(|problem| io(io::Error::new(io::ErrorKind::InvalidData, problem)))?;
        Ok((record, bytes.len() as u64))
    }

    /// Parses a record. The error is the reason why the bytes are no record that this version reads.
    fn parse(bytes: &[u8], limit: u64) -> std::result::Result<Self, String> {
        if bytes.len() as u64 > limit {
            return Err(format!("it has more than {limit} bytes"));
        }
        let record: Self = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        if record.schema != Self::SCHEMA {
            return Err(format!(
                "its schema is {:?}, not {}",
                record.schema,
                Self::SCHEMA
            ));
        }
        Ok(record)
    }

    /// Writes the record to its [`path`](Self::path) below `directory`, with mode 0600, and atomically replaces the
    /// previous record: readers see one of the two, complete.
    ///
    /// # Errors
    /// If the directory or the file cannot be written.
    pub fn write(&self, directory: &Path) -> Result<PathBuf> {
        directory::ensure_private(directory)?;
        let path = Self::path(directory, &self.job, self.node);
        let bytes = serde_json::to_vec(self)
            .map_err(|error| Error::io(format!("write {}", path.display()), error))?;
        // The last rank of the job may remove the directory between two steps.
        let mut tries = 0;
        loop {
            match replace(&path, &bytes) {
                Err(error) if error.kind() == io::ErrorKind::NotFound && tries < 10 => tries += 1,
                Err(error) => return Err(Error::io(format!("write {}", path.display()), error)),
                Ok(()) => return Ok(path),
            }
            if let Some(job) = path.parent() {
                directory::ensure_private(job)?;
            }
        }
    }

    /// Whether a file has the name of a launch record.
    pub fn has_record_name(path: &Path) -> bool {
        has_record_name(path)
    }

    /// Removes the records of ended jobs below a directory of rings, with their directories, except the
    /// newest `keep`. Jobs whose directories hold other files are not touched, and errors are ignored.
    pub fn remove_oldest(directory: &Path, keep: usize) {
        let jobs = fs::read_dir(directory).into_iter().flatten().flatten();
        let mut ended: Vec<_> = jobs
            .filter_map(|job| {
                let job = job.path();
                let files: Vec<PathBuf> = fs::read_dir(&job)
                    .ok()?
                    .map(|file| file.map(|file| file.path()))
                    .collect::<io::Result<_>>()
                    .ok()?;
                let newest = files.iter().filter_map(|file| modified(file)).max()?;
                let is_over = |file: &PathBuf| {
                    has_record_name(file) && Self::read(file).is_ok_and(|record| record.is_over())
                };
                files.iter().all(is_over).then_some((newest, job, files))
            })
            .collect();
        ended.sort();
        ended.truncate(ended.len().saturating_sub(keep));
        for (_, job, files) in ended {
            for file in files {
                let _ = fs::remove_file(file);
            }
            let _ = fs::remove_dir(job);
        }
    }

    /// Whether all ranks of the record have ended, or this host has no process with the launcher's id.
    pub(super) fn is_over(&self) -> bool {
        self.ended_ns != 0
            || !Path::new("/proc")
                .join(self.launcher_pid.to_string())
                .exists()
    }

    /// How a rank ended, if the record has it.
    pub fn end_of(&self, rank: Rank) -> Option<RankEnd> {
        self.ranks
            .iter()
            .find(|launched| launched.rank == rank)?
            .end
    }
}

/// Maximum size of a file in bytes; the record of a host is far smaller.
const MAX_BYTES: u64 = 16 << 20;
/// Maximum size of all files of a job together, in bytes.
const MAX_SUM: u64 = 256 << 20;
/// Maximum number of files read per job.
const MAX_FILES: usize = 4096;

/// When the file was last modified; `None` if that cannot be found out.
fn modified(path: &Path) -> Option<SystemTime> {
    let metadata = fs::metadata(path);
    metadata.and_then(|metadata| metadata.modified()).ok()
}

fn has_record_name(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    let node = name.and_then(|name| name.strip_prefix("launch.")?.strip_suffix(".json"));
    node.is_some_and(|node| node.parse::<u32>().is_ok())
}

/// Writes the file under another name, and then renames it, so that readers see the old or the new file, complete.
fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt as _;
    let temporary = path.with_file_name(format!(".launch.{}.new", std::process::id()));
    let _ = fs::remove_file(&temporary);
    let mut options = fs::OpenOptions::new();
    options.write(true).create_new(true).mode(0o600);
    let written = options
        .open(&temporary)
        .and_then(|mut file| file.write_all(bytes))
        .and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    fn example(node: u32) -> LaunchRecord {
        LaunchRecord {
            schema: LaunchRecord::SCHEMA.to_owned(),
            job: "a job".to_owned(),
            node,
            world_size: 2,
            started_ns: 5,
            received: vec![LaunchSignal {
                signal: 15,
                time_ns: 6,
            }],
            ranks: vec![LaunchedRank {
                rank: node,
                pid: 77,
                sent: Vec::new(),
                end: Some(RankEnd {
                    time_ns: 8,
                    exit_code: None,
                    signal: Some(9),
                    out_of_memory: Some(true),
                }),
            }],
            ..LaunchRecord::default()
        }
    }

    #[test]
    fn records_of_all_hosts_are_written_and_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let path = example(1).write(dir.path()).unwrap();
        example(1).write(dir.path()).unwrap();
        example(0).write(dir.path()).unwrap();
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        fs::write(path.with_file_name("launch.2.json"), "{\"schema\":").unwrap();
        fs::write(path.with_file_name("launch.x.json"), "{}").unwrap();
        let read = LaunchRecord::of_job(dir.path(), "a job");
        assert_eq!(read, [example(0), example(1)]);
        assert_eq!(read[1].end_of(1).unwrap().signal, Some(9));
        assert_eq!(LaunchRecord::of_job(dir.path(), "another"), []);
    }

    #[test]
    fn the_records_of_a_job_are_limited_in_sum() {
        let dir = tempfile::tempdir().unwrap();
        for node in 0..3 {
            example(node).write(dir.path()).unwrap();
        }
        let path = LaunchRecord::path(dir.path(), "a job", 2);
        let each = fs::metadata(&path).unwrap().len();
        let of_job = |limit| LaunchRecord::in_directory_within(path.parent().unwrap(), limit);
        assert_eq!(of_job(3 * each).len(), 3);
        assert_eq!(of_job(2 * each + each / 2), [example(0), example(1)]);
        assert_eq!(of_job(0), []);
    }

    #[test]
    fn old_records_of_ended_jobs_are_removed_and_others_kept() {
        let dir = tempfile::tempdir().unwrap();
        let write = |job: &str, change: &dyn Fn(&mut LaunchRecord)| {
            let mut record = example(0);
            record.job = job.to_owned();
            record.ended_ns = 9;
            change(&mut record);
            record.write(dir.path()).unwrap()
        };
        let oldest = write("oldest", &|_| {});
        let with_ring = write("with-ring", &|_| {});
        fs::write(with_ring.with_file_name("0.0.ring"), "").unwrap();
        let runs = write("runs", &|record| {
            record.ended_ns = 0;
            record.launcher_pid = std::process::id();
        });
        let newest = write("newest", &|_| {});
        let past = SystemTime::now() - std::time::Duration::from_secs(60);
        let file = fs::File::options().write(true).open(&oldest).unwrap();
        file.set_modified(past).unwrap();
        LaunchRecord::remove_oldest(dir.path(), 1);
        assert!(!oldest.parent().unwrap().exists());
        for path in [with_ring, runs, newest] {
            assert!(path.exists(), "{}", path.display());
        }
    }

    #[test]
    fn truncated_oversized_and_foreign_files_are_refused() {
        let valid = serde_json::to_vec(&example(0)).unwrap();
        for end in 0..valid.len() {
            assert!(LaunchRecord::parse(&valid[..end], MAX_BYTES).is_err());
        }
        let other = String::from_utf8(valid)
            .unwrap()
            .replace("launch/1", "launch/2");
        let problem = LaunchRecord::parse(other.as_bytes(), MAX_BYTES).unwrap_err();
        assert!(problem.contains("rcomm.launch/2"), "{problem}");
        let long = vec![b' '; MAX_BYTES as usize + 1];
        assert!(LaunchRecord::parse(&long, MAX_BYTES).is_err());
    }
}
