//! Writes the dumps of ranks into a summary.

use super::read::MAX_MORE_PATHS;
use super::wire::{BETWEEN_PATHS, End, Part, Record, Rows, WireTables, captured, runs};
use super::{MAGIC, MAX_PART, VERSION};
use crate::input::loaded::{Loaded, LoadedDump};
use flate2::Compression;
use flate2::write::GzEncoder;
use rcomm_recorder::model::{Frame, Rank, Signature};
use rcomm_recorder::publish::Dump;
use std::collections::HashMap;
use std::hash::Hash;
use std::io::{self, Write};
use std::sync::Arc;

/// Why a summary could not be written.
#[derive(Debug, thiserror::Error)]
pub enum SummarizeError {
    /// The destination could not be written to, or a part could not be encoded.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// A part of a dump, a problem or a RAS report is longer than 32 MiB.
    #[error("a part of {path} is longer than 32 MiB, the most that a summary holds in one part")]
    TooLarge {
        /// The path of the dump or report, or that of the problem.
        path: String,
    },
    /// The problems name more files than a summary holds.
    #[error("the problems name more than {MAX_MORE_PATHS} files, the most that a summary holds")]
    TooManyPaths,
}

/// Writes a summary dump by dump. Memory holds the tables that ranks share and one dump.
pub struct Writer<W: Write> {
    out: GzEncoder<W>,
    known: Known,
    records: u64,
}

/// The indices of the values that the shared tables of the summary hold so far.
#[derive(Default)]
struct Known {
    signatures: HashMap<Signature, u32>,
    frames: HashMap<Frame, u32>,
    stacks: HashMap<Vec<u32>, u32>,
    members: HashMap<Arc<[Rank]>, u32>,
}

impl<W: Write> Writer<W> {
    /// Begins a summary: writes its head to `out`.
    ///
    /// # Errors
    /// If `out` cannot be written to.
    pub fn new(mut out: W) -> Result<Self, SummarizeError> {
        out.write_all(MAGIC)?;
        out.write_all(&VERSION.to_le_bytes())?;
        Ok(Self {
            out: GzEncoder::new(out, Compression::fast()),
            known: Known::default(),
            records: 0,
        })
    }

    /// Adds a dump. It is compressed, and may reach the destination only with [`finish`](Self::finish).
    ///
    /// # Errors
    /// If the destination cannot be written to, or a part of the dump (its operations, its tables) cannot be encoded or
    /// is longer than 32 MiB.
    pub fn add(&mut self, loaded: &LoadedDump) -> Result<(), SummarizeError> {
        let LoadedDump {
            dump,
            path,
            cut,
            written_ns,
        } = loaded;
        let (mut tables, rows) = self.known.rows(dump);
        let members = std::mem::take(&mut tables.members);
        if !members.is_empty() {
            let members = members.iter().map(|ranks| runs(ranks)).collect();
            self.part(&Part::Members(members), path)?;
        }
        if !tables.is_empty() {
            self.part(&Part::WireTables(tables), path)?;
        }
        if !dump.failures.is_empty() || dump.closed_ns != 0 {
            let ended = Part::Ended(dump.failures.clone(), dump.closed_ns);
            self.part(&ended, path)?;
        }
        if !dump.peers.is_empty() {
            self.part(&Part::Peers(dump.peers.clone()), path)?;
        }
        if let Some(wait) = dump.processor_wait {
            self.part(&Part::ProcessorWait(wait), path)?;
        }
        let exit = dump.status.as_ref().and_then(|status| status.exit);
        if exit.is_some() || dump.identity.begun_ns != 0 {
            self.part(&Part::Process(dump.identity.begun_ns, exit), path)?;
        }
        let places = (0..).zip(&dump.groups);
        let places = places.filter_map(|(index, group)| Some((index, group.place?)));
        let places: Vec<_> = places.collect();
        if !places.is_empty() {
            self.part(&Part::Places(places), path)?;
        }
        if let Some(written_ns) = written_ns {
            self.part(&Part::Written(*written_ns), path)?;
        }
        let record = Box::new(Record::new(path, *cut, dump, rows));
        self.records += 1;
        let captured = captured(dump);
        let part = match captured.is_empty() {
            true => Part::Record(record),
            false => Part::Captured(record, captured),
        };
        self.part(&part, path)
    }

    /// Ends the summary with the problems and the RAS reports of the input, and returns the destination.
    ///
    /// # Errors
    /// If the destination cannot be written to, if a problem or a report cannot be encoded or is longer than 32 MiB, or
    /// if the problems have more than 262,144 paths beyond the first of each.
    pub fn finish(mut self, loaded: &Loaded) -> Result<W, SummarizeError> {
        let more_paths = loaded.problems.iter();
        if more_paths
            .map(|problem| problem.more_paths.len())
            .sum::<usize>()
            > MAX_MORE_PATHS
        {
            return Err(SummarizeError::TooManyPaths);
        }
        for problem in &loaded.problems {
            let mut paths = problem.path.clone();
            for path in &problem.more_paths {
                paths.push(BETWEEN_PATHS);
                paths.push_str(path);
            }
            let (code, sentence) = (problem.code.id().to_owned(), problem.sentence.clone());
            self.part(&Part::Problem(code, paths, sentence), &problem.path)?;
        }
        for (path, report) in &loaded.ras {
            self.part(&Part::Ras(path.clone(), report.clone()), path)?;
        }
        let end = End {
            records: self.records,
            files: loaded.files as u64,
        };
        self.part(&Part::End(end), "")?;
        let mut out = self.out.finish()?;
        out.flush()?;
        Ok(out)
    }

    /// Writes a part after its length. `path` is only for the error.
    fn part(&mut self, part: &Part, path: &str) -> Result<(), SummarizeError> {
        let bytes = postcard::to_allocvec(part).map_err(io::Error::other)?;
        let len = u32::try_from(bytes.len()).ok();
        let Some(len) = len.filter(|&len| len as usize <= MAX_PART) else {
            let path = path.to_owned();
            return Err(SummarizeError::TooLarge { path });
        };
        self.out.write_all(&len.to_le_bytes())?;
        self.out.write_all(&bytes)?;
        Ok(())
    }
}

impl Known {
    /// Enters the values of a dump in the shared tables. Returns those that are new, and the indices of all of the
    /// dump's values.
    fn rows(&mut self, dump: &Dump) -> (WireTables, Rows) {
        let mut new = WireTables::default();
        let signatures = dump.signatures.iter();
        let signatures = signatures
            .map(|signature| {
                let signature = signature.clone();
                row(&mut self.signatures, signature, &mut new.signatures)
            })
            .collect();
        let frames = dump.frames.iter();
        let frames: Vec<u32> = frames
            .map(|frame| row(&mut self.frames, frame.clone(), &mut new.frames))
            .collect();
        let stacks = dump.stacks.iter();
        let stacks = stacks
            .map(|stack| {
                let stack = stack.iter().map(|&frame| frames[frame as usize]).collect();
                row(&mut self.stacks, stack, &mut new.stacks)
            })
            .collect();
        let groups = dump.groups.iter();
        let members = groups
            .map(|group| {
                row(
                    &mut self.members,
                    group.info.ranks.clone(),
                    &mut new.members,
                )
            })
            .collect();
        let rows = Rows {
            signatures,
            frames,
            stacks,
            members,
        };
        (new, rows)
    }
}

/// The index of `value` in a shared table; a new value is entered in `known` and appended to `new`.
fn row<T: Clone + Eq + Hash>(known: &mut HashMap<T, u32>, value: T, new: &mut Vec<T>) -> u32 {
    if let Some(&row) = known.get(&value) {
        return row;
    }
    let row = u32::try_from(known.len()).expect("fewer than 2^32 rows fit in memory");
    new.push(value.clone());
    known.insert(value, row);
    row
}
