//! Asks PyTorch's NCCL backend for dumps, through pipes.
//!
//! With `TORCH_NCCL_DEBUG_INFO_PIPE_FILE` in the environment, and a buffer for the record, each rank reads the pipe
//! `<value><rank>.pipe` once a second, and writes its dump if anything came. Nothing in the rank is stopped, and the
//! job continues. The dump is the file that PyTorch would write at a time-out; it may replace an older one.

use crate::live::source::{DumpAnswers, DumpRequests, JobChoice, RankProcess, SourceError};
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::DumpReader;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The variable with the beginning of the pipes' paths.
pub const PIPE_VARIABLE: &str = "TORCH_NCCL_DEBUG_INFO_PIPE_FILE";
/// The variables with the beginning of the dumps' paths: of newer versions of PyTorch, then of older ones.
const DUMP_VARIABLES: [&str; 2] = ["TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"];
/// The largest dump that is read, bytes.
const MAX_DUMP: u64 = 1 << 30;
/// The time between two polls of a dump that is expected.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The beginnings of the paths of PyTorch's dumps in a process with these variables, likeliest first: the rank follows.
pub fn dump_beginnings(variable: impl Fn(&str) -> Option<PathBuf>) -> Vec<PathBuf> {
    let mut beginnings: Vec<PathBuf> = DUMP_VARIABLES
        .iter()
        .filter_map(|name| variable(name))
        .collect();
    let cache = variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache")));
    beginnings.extend(cache.map(|cache| cache.join("torch/comm_lib_trace_rank_")));
    beginnings.push("/tmp/nccl_trace_rank_".into());
    beginnings.dedup();
    beginnings
}

/// What identifies a version of a file: its inode, its size, and the time of its last change (s and ns).
type Version = (u64, u64, i64, i64);

/// A rank's process on this node that can be asked for its dump, and the files where the dump may appear.
#[derive(Debug)]
pub struct DumpOfProcess {
    /// The rank.
    pub rank: Rank,
    pid: u32,
    /// The pipe that asks the process for a dump; `None` if the process was started without one.
    pipe: Option<PathBuf>,
    /// Where the dump may appear, with the version of an older file there.
    files: Vec<(PathBuf, Option<Version>)>,
}

impl DumpOfProcess {
    /// Notes which dumps of this process exist already, so that a newer one is recognized.
    pub fn of(process: &RankProcess) -> Self {
        let variable = |name: &str| {
            let value = process.variables.get(name)?;
            (!value.is_empty()).then(|| PathBuf::from(value))
        };
        let rank = process.launched.rank;
        let of_rank = |beginning: PathBuf, end: &str| {
            let mut path = beginning.into_os_string();
            path.push(format!("{rank}{end}"));
            as_seen_from_here(process.pid, Path::new(&path))
        };
        let files = dump_beginnings(variable).into_iter().map(|beginning| {
            let path = of_rank(beginning, "");
            let before = fs::metadata(&path).ok();
            (path, before.map(|metadata| version(&metadata)))
        });
        Self {
            rank,
            pid: process.pid,
            files: files.collect(),
            pipe: variable(PIPE_VARIABLE).map(|beginning| of_rank(beginning, ".pipe")),
        }
    }

    /// Whether the process was started with a pipe.
    pub fn has_pipe(&self) -> bool {
        self.pipe.is_some()
    }

    /// Asks through the pipe. Never blocks, even if the process is stopped.
    ///
    /// # Errors
    ///
    /// The reason, if there is no pipe, no process reads the pipe, or the pipe cannot be written.
    pub fn ask(&self) -> Result<(), String> {
        let Some(pipe) = &self.pipe else {
            return Err(format!("it was started without {PIPE_VARIABLE}"));
        };
        let nonblocking = rustix::fs::OFlags::NONBLOCK.bits() as i32;
        let written = OpenOptions::new()
            .write(true)
            .custom_flags(nonblocking)
            .open(pipe)
            .and_then(|mut file| match file.metadata()?.file_type().is_fifo() {
                true => file.write_all(b"1\n"),
                false => Err(io::Error::other("it is no pipe")),
            });
        written.map_err(|error| {
            let why = match error.raw_os_error() {
                Some(code) if code == rustix::io::Errno::NXIO.raw_os_error() => {
                    "no process reads it".to_owned()
                }
                Some(code) if code == rustix::io::Errno::NOENT.raw_os_error() => {
                    "it does not exist: PyTorch makes it with the first NCCL group, if its record has a buffer".to_owned()
                }
                _ => error.to_string(),
            };
            let path = path_inside(pipe);
            format!("its pipe {} cannot be written: {why}", path.display())
        })
    }

    /// The path and the content of the dump that was written since [`of`](Self::of); `None` if there is none yet,
    /// only a part of it, more than 1 GiB, or what is no dump. Blocks until the file is read.
    pub fn read_new(&self) -> Option<(PathBuf, Vec<u8>)> {
        self.files.iter().find_map(|(path, before)| {
            let file = File::open(path).ok()?;
            let metadata = file.metadata().ok()?;
            let read_version = version(&metadata);
            if !metadata.is_file() || metadata.len() > MAX_DUMP || Some(read_version) == *before {
                return None;
            }
            let mut content = Vec::new();
            (&file).take(MAX_DUMP).read_to_end(&mut content).ok()?;
            // A dump that is still being written ends early. If the file has not changed since, it is not being
            // written.
            let (_, problems) = DumpReader::new().read(&content).ok()?;
            let is_whole = problems.is_empty() || version(&file.metadata().ok()?) == read_version;
            is_whole.then(|| (path_inside(path), content))
        })
    }

    /// Waits for the dump and returns its path; `None` if the dump is not there at the deadline.
    fn wait(&self, deadline: Instant) -> Option<PathBuf> {
        loop {
            if let Some((path, _)) = self.read_new() {
                return Some(path);
            }
            if Instant::now() >= deadline {
                return None;
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }
}

/// A path of another process, as this process reaches it: a process in a container has another root folder.
fn as_seen_from_here(pid: u32, path: &Path) -> PathBuf {
    let folder = if path.is_absolute() { "root" } else { "cwd" };
    let inside = path.strip_prefix("/").unwrap_or(path);
    let other = PathBuf::from(format!("/proc/{pid}/{folder}"));
    let device_and_inode = |path: &Path| {
        fs::metadata(path)
            .ok()
            .map(|metadata| (metadata.dev(), metadata.ino()))
    };
    // Unlike a path in `/proc`, the path itself outlives the process.
    if path.is_absolute() && device_and_inode(&other) == device_and_inode(Path::new("/")) {
        path.to_owned()
    } else {
        other.join(inside)
    }
}

/// The path of another process's file as that process names it: without the beginning of [`as_seen_from_here`].
fn path_inside(path: &Path) -> PathBuf {
    let mut parts = path.components();
    let beginning: Vec<_> = parts
        .by_ref()
        .take(4)
        .map(|part| part.as_os_str().to_owned())
        .collect();
    let is_process = beginning.len() == 4
        && beginning[1] == "proc"
        && (beginning[3] == "root" || beginning[3] == "cwd");
    if is_process && beginning[3] == "root" {
        Path::new("/").join(parts.as_path())
    } else if is_process {
        parts.as_path().to_owned()
    } else {
        path.to_owned()
    }
}

fn version(metadata: &Metadata) -> Version {
    (
        metadata.ino(),
        metadata.len(),
        metadata.mtime(),
        metadata.mtime_nsec(),
    )
}

/// Requests dumps, through pipes, from the ranks without rings that [`LocalSource`](super::LocalSource) shows.
/// Finds no rank while rings are shown.
#[derive(Debug)]
pub struct PipeDumps(JobChoice);

impl PipeDumps {
    /// Requests dumps from the job whose processes a view with this choice shows instead of rings.
    pub fn new(choice: JobChoice) -> Self {
        Self(choice)
    }
}

impl DumpRequests for PipeDumps {
    fn ask(&self, deadline: Instant) -> Result<DumpAnswers, SourceError> {
        let processes = RankProcess::shown(&self.0);
        let ranks: Vec<DumpOfProcess> = processes.iter().map(DumpOfProcess::of).collect();
        if !ranks.iter().any(DumpOfProcess::has_pipe) {
            return Err(SourceError::Nothing {
                what: format!("no process that is shown was started with {PIPE_VARIABLE}"),
                hint: "start the job with it, or call start_debug_server() in every rank"
                    .to_owned(),
            });
        }
        let mut answers = DumpAnswers::default();
        let mut asked = Vec::new();
        for rank in ranks {
            match rank.ask() {
                Ok(()) => asked.push(rank),
                Err(reason) => answers.refused.push((rank.rank, reason)),
            }
        }
        for rank in asked {
            match rank.wait(deadline) {
                Some(path) => answers
                    .written
                    .push((rank.rank, path.display().to_string())),
                None => {
                    let reason = format!(
                        "process {} was asked through its pipe and wrote nothing in time",
                        rank.pid
                    );
                    answers.refused.push((rank.rank, reason));
                }
            }
        }
        Ok(answers)
    }
}
