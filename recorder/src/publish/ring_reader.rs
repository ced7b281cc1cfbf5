//! Reads a ring file from outside: its owner, whether the owner is alive, and the records.
//!
//! The owner need not cooperate: it may be running, stopped or dead. The file's contents are untrusted, and it may be
//! truncated while it is read (see `record/file/view.rs`).

use super::{Dump, Identity};
use crate::error::{Error, Result};
use crate::record::failures;
use crate::record::file::directory;
use crate::record::file::names::{RingName, job_directory_name};
use crate::record::file::view::{View, Words};
use crate::record::layout::{self, RingLayout, halves, header};
use crate::record::nccl;
use crate::record::peers;
use crate::record::process::{ProcessIdentity, ProcessState};
use crate::record::reducer;
use crate::record::sync::Read;
use crate::record::{RingPart, decode, rings};
use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// Maximum size of a ring file, in bytes.
const MAX_BYTES: u64 = 1 << 30;

/// A ring file, attached for reading.
#[derive(Debug)]
pub struct RingReader {
    path: PathBuf,
    view: View,
    layout: RingLayout,
    owner: ProcessIdentity,
    /// Whether the owner's monotonic clock is that of this process.
    shares_clock: bool,
}

impl RingReader {
    /// The reason in a snapshot of a ring whose owner is alive.
    pub const OWNER_LIVES: &'static str = "ring of a live process";
    /// The reason in a snapshot of a ring whose owner a signal has stopped.
    pub const OWNER_IS_STOPPED: &'static str = "ring of a stopped process";
    /// The reason in a snapshot of a ring whose owner a debugger holds.
    pub const OWNER_IS_TRACED: &'static str = "ring of a process that a debugger holds";
    /// The reason in a snapshot of a ring whose owner ended without closing it. The analysis compares this
    /// text exactly to detect the death of the rank.
    pub const OWNER_IS_DEAD: &'static str = "ring of a dead process";
    /// The reason in a snapshot of a ring that its owner closed cleanly.
    pub const CLOSED: &'static str = "ring closed in order";

    /// Whether a file that begins with these bytes is, or claims to be, a ring.
    pub fn begins(bytes: &[u8]) -> bool {
        bytes.starts_with(&layout::MAGIC.to_le_bytes())
    }

    /// Attaches to a ring file. Never blocks, and refuses a path whose last component is a symbolic link.
    ///
    /// # Errors
    /// If the file cannot be opened, is not a ring, is truncated, or has a layout that this reader does not know.
    pub fn attach(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref().to_owned();
        let file = directory::open(&path)
            .map_err(|error| Error::io(format!("open ring {}", path.display()), error))?;
        Self::of_file(file, path)
    }

    /// Like [`attach`](Self::attach), to a file that is open for reading and may have no name; `path` is for messages.
    ///
    /// # Errors
    /// Those of [`attach`](Self::attach).
    pub fn of_file(file: impl Into<OwnedFd>, path: PathBuf) -> Result<Self> {
        let file = file.into();
        let not_a_ring = |why: String| Error::NotARing {
            path: path.clone(),
            why,
        };
        let metadata = rustix::fs::fstat(&file)
            .map_err(|error| Error::io(format!("stat ring {}", path.display()), error))?;
        if !rustix::fs::FileType::from_raw_mode(metadata.st_mode).is_file() {
            return Err(not_a_ring("it is not a regular file".to_owned()));
        }
        let bytes = u64::try_from(metadata.st_size).unwrap_or(0);
        if bytes < layout::HEADER_BYTES as u64 {
            return Err(not_a_ring(format!(
                "it has {bytes} bytes, less than a ring's header"
            )));
        }
        if bytes > MAX_BYTES {
            return Err(not_a_ring(format!(
                "it has {bytes} bytes, more than a ring can have"
            )));
        }
        let view = View::new(file, bytes as usize);
        let words = view.words();
        if words.load(header::MAGIC) != layout::MAGIC {
            return Err(not_a_ring(
                "it does not start with a ring's magic number".to_owned(),
            ));
        }
        let (major, _) = halves(words.load(header::VERSION));
        if major != layout::MAJOR {
            return Err(Error::UnknownLayout {
                path,
                found: major,
                known: layout::MAJOR,
            });
        }
        let layout = RingLayout::load(&words).map_err(not_a_ring)?;
        let owner = ProcessIdentity::of_ring(&words);
        Ok(Self {
            path,
            view,
            layout,
            shares_clock: owner.shares_clock(),
            owner,
        })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The size of the ring with its tables, in bytes.
    pub fn size_bytes(&self) -> usize {
        self.layout.bytes
    }

    /// The rank and process of the ring. `dump_time_ns` is now, `reason` empty.
    pub fn identity(&self) -> Identity {
        decode::identity(&self.view.words(), self.now_ns())
    }

    /// Whether the process that writes the ring is alive: running, waiting or stopped. False once it has closed the
    /// ring.
    ///
    /// The process holds a lock on the file while it is alive. Since a forked child keeps that lock, the process is
    /// also looked up by number and start time, if it is visible from here.
    pub fn is_alive(&self) -> bool {
        !self.is_closed() && directory::owner_is_alive(self.view.file(), &self.owner)
    }

    /// The id of the process that writes the ring; `None` if it has ended, or is a process of another host or
    /// container, whose id means nothing here.
    pub fn process(&self) -> Option<u32> {
        let exists = self.owner.exists() == Some(true);
        exists.then_some(self.owner.pid)
    }

    /// The [`process_mark`](crate::record::FlightRecorder::process_mark) of the process that writes the ring.
    pub fn process_mark(&self) -> Option<String> {
        self.owner.mark()
    }

    /// Whether a signal has stopped the process that writes the ring, and nothing has continued it since; false if that
    /// cannot be seen from here.
    pub fn is_stopped(&self) -> bool {
        self.owner.state() == Some(ProcessState::Stopped)
    }

    /// The current time, ns since the epoch: by the ring's own clock if this process shares it, so that a jump of the
    /// wall clock since the ring was made does not change ages; else by the wall clock.
    pub(super) fn now_ns(&self) -> i64 {
        match self.shares_clock {
            true => layout::load_anchor(&self.view.words()).now_ns(),
            false => wall_now(),
        }
    }

    /// Whether the owner closed the ring cleanly. The file may have been removed since.
    pub fn is_closed(&self) -> bool {
        self.view.words().load(header::STATE) == layout::STATE_CLOSED
    }

    /// When the owner's watchdog last made a round, wall clock, ns since the epoch; 0 if never.
    pub fn heartbeat_ns(&self) -> i64 {
        let words = self.view.words();
        layout::load_anchor(&words).wall_of(words.load(header::HEARTBEAT))
    }

    /// Number of operations issued so far.
    pub fn records(&self) -> u64 {
        self.view.words().load(header::LAST_ID)
    }

    /// A hash of the number of groups, the members, the time-out, the communicator and the progress of each, the
    /// phases, the step, the exit, the lost records, NCCL's links, the failures, the connections and the steps of
    /// reducers. It depends neither on the operations nor on the heartbeat nor on the waits for a processor.
    pub(super) fn fingerprint(&self) -> u64 {
        let words = &self.view.words();
        let phases = rings::phases(&self.layout);
        let groups = self.layout.groups;
        let phase_stamps = (0..phases.slots()).map(|index| phases.stamp(words, index));
        let used = words.load(header::GROUPS_USED).min(groups.rows as u64) as usize;
        let progress_words = layout::group::RANKS..=layout::group::LAST_COMPLETED;
        let progress = (0..used).flat_map(|row| {
            let start = groups.row(row, layout::group::WORDS);
            progress_words
                .clone()
                .map(move |word| words.load(start + word))
        });
        let rest = [
            header::STEP,
            header::RECORDS_LOST,
            header::LINKS_LOST,
            header::EXITED_AT,
        ];
        let rest = rest.map(|word| words.load(word));
        phase_stamps
            .chain(progress)
            .chain(rest)
            .chain([
                used as u64,
                nccl::fingerprint(words, &self.layout),
                failures::fingerprint(words, &self.layout),
                peers::fingerprint(words, &self.layout),
                reducer::fingerprint(words, &self.layout),
            ])
            .fold(0, |hash: u64, word| {
                (hash.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15)
            })
    }

    /// The ring's words, read again from the file, and their layout.
    pub(super) fn memory(&self) -> (Words<'_>, &RingLayout) {
        (self.view.words(), &self.layout)
    }

    /// Whether the file still has its whole size. If not, parts of what was read may be empty.
    pub fn is_whole(&self) -> bool {
        self.view.is_whole()
    }

    /// Like [`snapshot`](Self::snapshot), for a file that others may truncate.
    ///
    /// # Errors
    /// If the file was truncated since it was attached.
    pub fn read(&self) -> Result<Dump> {
        let dump = self.snapshot();
        match self.is_whole() {
            true => Ok(dump),
            false => Err(Error::NotARing {
                path: self.path.clone(),
                why: "it was truncated while it was read".to_owned(),
            }),
        }
    }

    /// The state of the process that writes the ring.
    pub(super) fn owner(&self) -> Owner {
        if self.is_closed() {
            Owner::Closed
        } else if !self.is_alive() {
            Owner::Dead
        } else {
            match self.owner.state() {
                Some(ProcessState::Stopped) => Owner::Stopped,
                Some(ProcessState::Traced) => Owner::Traced,
                Some(ProcessState::Runs | ProcessState::Gone) | None => Owner::Alive,
            }
        }
    }

    /// The ring's current contents, empty where the file was truncated. Entries that change during the read are read
    /// again; entries that stay unreadable (half-written by a process that was killed) are counted in
    /// [`RankStatus::dropped`](crate::model::RankStatus::dropped).
    ///
    /// The dump's time is now if the owner is alive. Otherwise it is the newest among the times of its ring's creation,
    /// its heartbeat, its phase, its exit and its operations, so that operations pending when the process died do not
    /// age.
    pub fn snapshot(&self) -> Dump {
        let owner = self.owner();
        let mut dump = decode::dump(&self.view.words(), &self.layout, self.now_ns());
        self.set_time_and_reason(&mut dump, owner);
        dump
    }

    /// Sets a dump's time and reason from the state of the owner.
    pub(super) fn set_time_and_reason(&self, dump: &mut Dump, owner: Owner) {
        let reason = match owner {
            Owner::Alive => Self::OWNER_LIVES,
            Owner::Stopped => Self::OWNER_IS_STOPPED,
            Owner::Traced => Self::OWNER_IS_TRACED,
            Owner::Dead => Self::OWNER_IS_DEAD,
            Owner::Closed => Self::CLOSED,
        };
        reason.clone_into(&mut dump.identity.reason);
        if owner.is_alive() {
            return;
        }
        let anchor = layout::load_anchor(&self.view.words());
        let status = dump.status.iter();
        let reported = status.flat_map(|status| {
            let exit_ns = status.exit.map_or(0, |exit| exit.time_ns);
            [status.heartbeat_ns, status.phase_since_ns, exit_ns]
        });
        let recorded = dump.entries.iter().flat_map(|entry| {
            [
                entry.time_created_ns,
                entry.time_discovered_started_ns,
                entry.time_discovered_completed_ns,
            ]
        });
        let last = reported.chain(recorded).max().unwrap_or(0);
        dump.identity.dump_time_ns = last.max(anchor.wall_ns);
    }
}

/// The state of the process that writes a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owner {
    /// Alive: running or waiting, or in a state that cannot be read from here.
    Alive,
    /// Alive, and stopped by a signal.
    Stopped,
    /// Alive, and held by a debugger.
    Traced,
    /// Dead, without having closed its ring.
    Dead,
    /// The process closed its ring cleanly.
    Closed,
}

impl Owner {
    /// Whether the process lives and has not closed its ring.
    pub(super) const fn is_alive(self) -> bool {
        matches!(self, Self::Alive | Self::Stopped | Self::Traced)
    }
}

fn wall_now() -> i64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| {
            i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
        })
}

/// One ring in a listing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RingSummary {
    /// The rank and process of the ring.
    pub identity: Identity,
    /// Which of the process's rings this is.
    pub part: RingPart,
    /// Whether the ring's owner is alive.
    pub alive: bool,
    /// When the ring was made, wall clock, ns since the epoch.
    pub created_ns: i64,
    /// When the owner's watchdog last made a round, wall clock, ns since the epoch; 0 if never.
    pub heartbeat_ns: i64,
    /// Number of operations begun.
    pub records: u64,
    /// Size in bytes.
    pub size_bytes: u64,
}

/// A file with the name of a ring, and the result of reading it.
#[derive(Debug)]
pub struct RingListing {
    /// The file.
    pub path: PathBuf,
    /// A summary of the ring, or why it cannot be read.
    pub ring: Result<RingSummary>,
}

impl RingListing {
    /// Reads the ring at this path for a listing.
    pub(super) fn of(part: RingPart, path: PathBuf) -> Self {
        let ring = RingReader::attach(&path).map(|reader| RingSummary {
            identity: reader.identity(),
            part,
            alive: reader.is_alive(),
            created_ns: layout::load_anchor(&reader.view.words()).wall_ns,
            heartbeat_ns: reader.heartbeat_ns(),
            records: reader.records(),
            size_bytes: reader.size_bytes() as u64,
        });
        Self { path, ring }
    }
}

/// Every ring of every job below this directory
/// ([`default_directory`](crate::record::default_directory) unless another one is configured), by job, rank
/// and attempt. A directory that does not exist has none.
///
/// # Errors
/// If the directory cannot be listed.
pub fn list_rings(directory: &Path) -> Result<Vec<RingListing>> {
    let files = files_in(directory)?;
    Ok(files
        .into_iter()
        .map(|(_, name, path)| RingListing::of(name.part, path))
        .collect())
}

/// Removes the rings below this directory whose owners are dead or have closed them, of one job or of all, and returns
/// their paths.
///
/// # Errors
/// If the directory cannot be listed or a ring cannot be removed.
pub fn remove_stale_rings(directory: &Path, job: Option<&str>) -> Result<Vec<PathBuf>> {
    let job = job.map(job_directory_name);
    let mut removed = Vec::new();
    for (in_job, _, path) in files_in(directory)? {
        if job.as_ref().is_some_and(|job| *job != in_job) {
            continue;
        }
        // Skip files that are not rings, and rings that were removed in between.
        let Ok(reader) = RingReader::attach(&path) else {
            continue;
        };
        if reader.is_alive() {
            continue;
        }
        let is_removed = directory::remove_if_dead(&path)
            .map_err(|error| Error::io(format!("remove {}", path.display()), error))?;
        if is_removed {
            removed.push(path);
        }
    }
    Ok(removed)
}

/// The job's directory, the parsed name and the path of every file with a ring's name.
pub(super) fn files_in(directory: &Path) -> Result<Vec<(String, RingName, PathBuf)>> {
    let jobs = match fs::read_dir(directory) {
        Ok(jobs) => jobs,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => {
            let action = format!("list rings in {}", directory.display());
            return Err(Error::io(action, error));
        }
    };
    let mut files: Vec<_> = jobs
        .flatten()
        .flat_map(|job| {
            let name = job.file_name().to_string_lossy().into_owned();
            directory::ring_files(&job.path()).map(move |(ring, path)| (name.clone(), ring, path))
        })
        .collect();
    files.sort();
    Ok(files)
}
