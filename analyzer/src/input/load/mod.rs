//! Loads records, reports of NCCL's RAS, logs and stacks from files.
//!
//! Paths are files, folders, globs, archives (`.tar`, `.gz`, `.zst` and their combinations), ring files, summaries,
//! reports of NCCL's RAS, logs, stacks, or `-` for standard input. The kind of a file is recognized by its content;
//! only hidden files and launch records in a folder, which are not read, and the manifest of an archive are recognized
//! by their names. Files are read in parallel and passed on one by one, so memory is bounded by the files in flight and
//! not by their total. A file that cannot be used becomes a [`Problem`]; the others are not affected.
//!
//! The analysis decides whether a dump belongs to the same job as the others, and which one counts if a rank has
//! several.

mod find;
mod follow;
mod manifest;
mod placing;
mod rank_name;
mod sums;
mod unpack;
mod walk;
mod zstd;

pub use super::loaded::{Loaded, LoadedDump};
pub use find::FindError;
pub use follow::{Change, Follower, FollowerPoll};
pub use manifest::Absence;
pub use walk::{Unsearched, walk};

use crate::input::inspector;
use crate::input::loaded::written_ns;
use crate::input::log;
use crate::input::ras::RasReport;
use crate::input::stacks::{self, RankStacks};
use find::InputFile;
use placing::{Placed, Renamed};
use rcomm_recorder::model::{Entry, Rank};
use rcomm_recorder::publish::{Dump, DumpReader, ReadError};
use rcomm_verdict::Problem;
use rcomm_verdict::logs::Log;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::thread;
use sums::Sums;

/// Options for loading.
#[derive(Clone, Copy)]
pub struct LoadOptions<'a> {
    /// The number of files read at the same time; `None` = one for each processor that this process may use.
    pub jobs: Option<NonZeroUsize>,
    /// The largest plain file, the largest content of a compressed file, the largest member of an archive and the
    /// largest standard input that are read, bytes. A log is read at any size, except from standard input.
    pub max_file_bytes: u64,
    /// All packed files together may unpack to this many bytes or, if that is more, to this many times their size.
    pub max_unpacked: (u64, u64),
    /// Called after each file, on the reading threads.
    pub progress: Option<&'a (dyn Fn(Progress) + Sync)>,
    /// Memory of dumps that are no longer needed, for the dumps that are read next.
    pub spare: Option<&'a Spare>,
}

/// Memory that passes from dumps that are no longer needed to those that are read next.
#[derive(Debug, Default)]
pub struct Spare(Mutex<Vec<Vec<Entry>>>);

/// The largest number of dumps whose memory is kept.
const SPARES: usize = 16;

impl Spare {
    /// Keeps the memory of a dump's entries, unless it has room for more than 65,536 entries, or that of 16 other dumps
    /// is kept.
    pub fn keep(&self, entries: Vec<Entry>) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.len() < SPARES && entries.capacity() <= SPARE_ENTRIES {
            kept.push(entries);
        }
    }

    fn take(&self) -> Option<Vec<Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }
}

/// Memory for more entries than this is not kept.
const SPARE_ENTRIES: usize = 1 << 16;

impl Default for LoadOptions<'_> {
    fn default() -> Self {
        Self {
            jobs: None,
            max_file_bytes: 1 << 30,
            max_unpacked: (8 << 30, 200),
            progress: None,
            spare: None,
        }
    }
}

/// The progress of loading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// The number of files done.
    pub done: usize,
    /// The number of all files; an archive is one file.
    pub files: usize,
}

/// Reads all dumps below `paths` and passes each to `take` on the caller's thread.
///
/// The order of the dumps differs from call to call. Blocks until everything is read.
///
/// # Errors
/// If no path can be accessed and no pattern has a match, or if a pattern is not valid. If only some paths cannot be
/// accessed, or some patterns have no match, they become problems. A folder may be empty.
pub fn load(
    paths: &[PathBuf],
    options: &LoadOptions<'_>,
    mut take: impl FnMut(LoadedDump),
) -> Result<Loaded, FindError> {
    let found = find::find(paths)?;
    let mut loaded = Loaded {
        problems: found.problems,
        unfound: found.unfound,
        ..Loaded::default()
    };
    let names: Vec<String> = found.inputs.iter().map(InputFile::name).collect();
    let ranks = rank_name::ranks(&names);
    let inputs: Vec<_> = found.inputs.into_iter().zip(ranks).collect();
    let mut renamed = Vec::new();
    read(&inputs, options, |output| match output {
        Output::Renamed(dump) => renamed.push(dump),
        Output::Files(files) => loaded.files += files,
        Output::Problem(problem) => loaded.problems.push(problem),
        Output::Ras(path, report) => loaded.ras.push((path, report)),
        Output::Log(log) => loaded.logs.push(log),
        Output::Stacks(stacks) => loaded.stacks.push(stacks),
        // Each archive may be of one node only, and state fewer ranks than the job has.
        Output::Manifest(world_size) => {
            loaded.has_manifest = true;
            loaded.world_size = loaded.world_size.max(world_size);
        }
        Output::Dump(dump) => {
            loaded.dumps += 1;
            take(*dump);
        }
    });
    loaded.problems.extend(placing::note(renamed));
    loaded
        .problems
        .sort_by(|a, b| (&a.path, a).cmp(&(&b.path, b)));
    loaded.ras.sort_by(|a, b| a.0.cmp(&b.0));
    loaded.logs.sort_by(|a, b| a.path.cmp(&b.path));
    loaded.stacks.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(loaded)
}

/// Reads inputs, each with the rank in its name, on several threads and passes the results to `take` on the caller's
/// thread.
fn read(
    inputs: &[(InputFile, Option<Rank>)],
    options: &LoadOptions<'_>,
    mut take: impl FnMut(Output),
) {
    let jobs = thread_count(options, inputs.len());
    let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let sums = Sums::new(options.max_unpacked);
    let (sender, receiver) = sync_channel(2 * jobs);
    thread::scope(|scope| {
        let mut started = 0;
        for _ in 0..jobs {
            let sender = sender.clone();
            let (next, done, sums) = (&next, &done, &sums);
            let work = move || {
                let mut worker = Worker {
                    reader: DumpReader::new(),
                    buffer: Vec::new(),
                    options,
                    sums,
                    sender,
                };
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some((input, rank)) = inputs.get(index) else {
                        return;
                    };
                    unpack::unpack(input, *rank, &mut worker);
                    let done = done.fetch_add(1, Ordering::Relaxed) + 1;
                    if let Some(progress) = options.progress {
                        progress(Progress {
                            done,
                            files: inputs.len(),
                        });
                    }
                }
            };
            let thread = thread::Builder::new().name("rcomm-fr/load".to_owned());
            match thread.spawn_scoped(scope, work) {
                Ok(_) => started += 1,
                // Fewer threads read the same files, only slower; without any, nothing can be read.
                Err(_) if started > 0 => break,
                Err(error) => {
                    for (input, _) in inputs {
                        take(Output::Problem(Problem::unreadable_dump(
                            input.name(),
                            format!("could not be read: no thread can be started: {error}"),
                        )));
                    }
                    break;
                }
            }
        }
        drop(sender);
        receiver.into_iter().for_each(&mut take);
    });
}

/// Reads all dumps below `paths` and returns them in order of rank and path. See [`load`].
///
/// # Errors
/// Those of [`load`].
pub fn load_all(
    paths: &[PathBuf],
    options: &LoadOptions<'_>,
) -> Result<(Vec<LoadedDump>, Loaded), FindError> {
    let mut dumps = Vec::new();
    let loaded = load(paths, options, |dump| dumps.push(dump))?;
    let key = |dump: &LoadedDump| (dump.dump.identity.rank, dump.path.clone());
    dumps.sort_by_cached_key(key);
    Ok((dumps, loaded))
}

fn thread_count(options: &LoadOptions<'_>, inputs: usize) -> usize {
    let wanted = options
        .jobs
        .or_else(|| thread::available_parallelism().ok())
        .map_or(1, NonZeroUsize::get);
    wanted.min(inputs).max(1)
}

/// A result of a reading thread.
enum Output {
    /// The number of further files: 1 for a plain file, a ring or such a member of an archive, whether or not it can be
    /// used; for a summary, the number of files from which it was made.
    Files(usize),
    Problem(Problem),
    Ras(String, RasReport),
    Log(Log),
    Stacks(RankStacks),
    /// A dump got the rank that its groups show, and that its name does not state. The dump itself is passed on, too.
    Renamed(Renamed),
    /// The number of ranks that the manifest of an archive states, if it does.
    Manifest(Option<u32>),
    Dump(Box<LoadedDump>),
}

/// The state of a reading thread.
struct Worker<'a> {
    reader: DumpReader,
    buffer: Vec<u8>,
    options: &'a LoadOptions<'a>,
    sums: &'a Sums,
    sender: SyncSender<Output>,
}

impl Worker<'_> {
    fn send(&self, output: Output) {
        // The receiver outlives the workers, unless the caller's function has panicked.
        let _ = self.sender.send(output);
    }

    fn problem(&self, problem: Problem) {
        self.send(Output::Problem(problem));
    }

    /// Reports a file that could not be read, or only in part.
    fn unreadable(&self, path: &str, reason: impl std::fmt::Display) {
        let sentence = format!("could not be read: {reason}");
        self.problem(Problem::unreadable_dump(path, sentence));
    }

    /// Reports a file that was read but cannot be used.
    fn unusable(&self, path: &str, reason: impl std::fmt::Display) {
        let sentence = format!("left aside: {reason}");
        self.problem(Problem::unreadable_dump(path, sentence));
    }

    /// Reports a file that is no record.
    fn foreign(&self, path: &str, reason: impl std::fmt::Display) {
        let sentence = format!("left aside: {reason}");
        self.problem(Problem::stale_dump(path, sentence));
    }

    /// Reads the buffer as a report of NCCL's RAS, stacks, a dump or a log, and empties it. A log of NCCL's
    /// Inspector is left aside.
    fn read_buffer(&mut self, path: &str, rank_of_name: Option<Rank>) {
        if let Some(report) = RasReport::parse(&self.buffer) {
            self.buffer.clear();
            return self.send(Output::Ras(path.to_owned(), report));
        }
        if inspector::is_log(&self.buffer) {
            self.buffer.clear();
            self.buffer.shrink_to(KEPT_BYTES);
            return self.foreign(
                path,
                "the log of NCCL's Inspector, which holds only operations that have completed; `rcomm-fr trends` reads it",
            );
        }
        if stacks::is_stacks(&self.buffer[..self.buffer.len().min(LOG_HEAD)]) {
            self.read_stacks(path, rank_of_name);
            self.buffer.clear();
            return;
        }
        if let Some(entries) = self.options.spare.and_then(Spare::take) {
            self.reader.reuse(entries);
        }
        match self.reader.read(&self.buffer) {
            Ok((dump, problems)) => {
                let cut = !problems.is_empty();
                for problem in problems {
                    self.problem(Problem::unreadable_dump(path, problem.to_string()));
                }
                self.send_dump(path, dump, cut, rank_of_name);
            }
            Err(_) if self.read_log(path, rank_of_name) => {}
            Err(error @ ReadError::NotADump { .. }) => self.foreign(path, error),
            Err(error) => self.unusable(path, error),
        }
        // Free the memory of a huge file.
        self.buffer.clear();
        self.buffer.shrink_to(KEPT_BYTES);
    }

    /// Reads the buffer as the stacks of the rank in the name of the file.
    fn read_stacks(&self, path: &str, rank_of_name: Option<Rank>) {
        let Some(rank) = log_rank(path, rank_of_name) else {
            let reason = "stacks of a rank that the file's name does not state; name the file after the rank, \
                          as in rank_3.txt";
            return self.unusable(path, reason);
        };
        let text = String::from_utf8_lossy(&self.buffer);
        self.send(Output::Stacks(RankStacks::parse(path, rank, &text)));
    }

    /// Reads the buffer as a log and sends it; `false` if it is not text or no line of it has a fact.
    fn read_log(&self, path: &str, rank_of_name: Option<Rank>) -> bool {
        if !log::may_begin(&self.buffer[..self.buffer.len().min(LOG_HEAD)]) {
            return false;
        }
        let read = log::read(path, log_rank(path, rank_of_name), self.buffer.as_slice());
        let log = read.ok().filter(|log| log.facts().next().is_some());
        let is_log = log.is_some();
        if let Some(log) = log {
            self.send(Output::Log(log));
        }
        is_log
    }

    /// Passes on a dump, with the time at which its file was written if the dump itself states no time.
    fn send_dump(&self, path: &str, dump: Dump, cut: bool, rank_of_name: Option<Rank>) {
        let written_ns = match dump.identity.dump_time_ns {
            0 => written_ns(path),
            _ => None,
        };
        self.send_dump_written(path, dump, cut, (rank_of_name, written_ns));
    }

    /// Passes on a dump; `cut` and `written_ns` as in [`LoadedDump`]. A dump that has no rank gets one from its groups
    /// or from the name of its file, or is reported as unusable.
    fn send_dump_written(
        &self,
        path: &str,
        mut dump: Dump,
        cut: bool,
        (rank_of_name, written_ns): (Option<Rank>, Option<i64>),
    ) {
        if dump.identity.rank.is_none() {
            dump.identity.rank = match placing::place(&dump, path, rank_of_name) {
                Placed::Named(rank) => rank,
                Placed::ByGroups(rank) => {
                    self.send(Output::Renamed(Renamed {
                        path: path.to_owned(),
                        named: rank_of_name,
                        rank,
                    }));
                    Some(rank)
                }
            };
        }
        if dump.identity.rank.is_none() {
            let reason = "neither the dump nor the name of the file states the rank; name the file after the rank, \
                          as in rank_3";
            self.unusable(path, reason);
            return;
        }
        self.send(Output::Dump(Box::new(LoadedDump {
            dump,
            path: path.to_owned(),
            cut,
            written_ns,
        })));
    }
}

/// The rank in the name of a file of logs or stacks; `None` if the name does not contain the word `rank`, since its
/// numbers may then be those of jobs and days.
fn log_rank(path: &str, rank_of_name: Option<Rank>) -> Option<Rank> {
    let file = path.rsplit('/').next().unwrap_or(path);
    rank_of_name.filter(|_| file.to_ascii_lowercase().contains("rank"))
}

/// The number of first bytes by which a text is recognized.
const LOG_HEAD: usize = 512;

/// Maximum memory of the file buffer that is kept from file to file, bytes.
const KEPT_BYTES: usize = 4 << 20;
