//! Reads the records of a summary.

use super::wire::{BETWEEN_PATHS, Part, Record, Run, WireTables, ranks, ranks_in};
use super::{MAGIC, MAX_PART, OLDEST, VERSION};
use crate::input::ras::RasReport;
use flate2::read::GzDecoder;
use rcomm_recorder::model::{Failure, GroupPlace, PeerLink, ProcessExit, ProcessorWait, Rank};
use rcomm_recorder::publish::Dump;
use rcomm_verdict::{Code, Problem};
use std::io::{self, Read};

/// Why a summary could not be read to its end. What was read before the error is used.
#[derive(Debug, thiserror::Error)]
pub enum RsumError {
    /// The version of the summary is newer than this build reads.
    #[error(
        "summary version {found} is newer than this build reads (up to {VERSION}); use a newer build"
    )]
    Version {
        /// The version of the file.
        found: u16,
    },
    /// The file ends too early.
    #[error("the summary is cut short after {records} records")]
    Cut {
        /// The number of records that were read.
        records: u64,
    },
    /// The content is not valid.
    #[error("the summary is damaged ({what}) after {records} records")]
    Damaged {
        /// A description of the damage.
        what: String,
        /// The number of records that were read.
        records: u64,
    },
}

/// A piece of a summary.
#[derive(Debug)]
pub enum Piece {
    /// One rank's record.
    Record {
        /// The record.
        dump: Box<Dump>,
        /// The path of the record's file when the summary was made.
        path: String,
        /// Whether operations may be missing.
        cut: bool,
        /// When its file was written, ns since the epoch; `None` if the record states a time itself, or if that is
        /// unknown.
        written_ns: Option<i64>,
    },
    /// A problem of an input.
    Problem(Problem),
    /// The name of a file and the report of NCCL's RAS in it.
    Ras(String, RasReport),
    /// The number of files that were read when the summary was made.
    Files(u64),
}

/// Whether a file with these first bytes is a summary.
pub fn begins(head: &[u8]) -> bool {
    head.starts_with(MAGIC)
}

/// The largest number of rows of all tables of one file.
const MAX_ROWS: usize = 1 << 22;
/// The largest size of all parts with tables of one file, bytes after unpacking.
const MAX_TABLE_BYTES: usize = 256 << 20;
/// The largest number of failures of one record.
const MAX_FAILURES: usize = 64;
/// The largest number of connections of one record.
const MAX_PEERS: usize = 1024;

/// The largest number of paths of all problems of one file beyond the first path of each.
pub(super) const MAX_MORE_PATHS: usize = 1 << 18;

/// Reads a summary and passes each piece to `take`. Blocks until it is read.
///
/// # Errors
/// If it is cut, damaged or of a newer version, or if `reader` fails, which counts as damage. The pieces before the
/// error have been passed on.
pub fn read(reader: impl Read, take: impl FnMut(Piece)) -> Result<(), RsumError> {
    read_within(reader, &mut |_| Ok(()), take)
}

/// Works like [`read`], and passes to `count` how many bytes each part unpacks to; an error of `count` ends the
/// reading.
pub(crate) fn read_within(
    reader: impl Read,
    count: Count<'_>,
    mut take: impl FnMut(Piece),
) -> Result<(), RsumError> {
    let mut records = 0;
    let result = PartReader::new(reader, count).and_then(|mut reader| {
        while let Some(part) = reader.part()? {
            if let Some(piece) = reader.piece(part, records)? {
                records += u64::from(matches!(piece, Piece::Record { .. }));
                let last = matches!(piece, Piece::Files(_));
                take(piece);
                if last {
                    return reader.end();
                }
            }
        }
        Err(Stop::Cut)
    });
    result.map_err(|stop| match stop {
        Stop::Version(found) => RsumError::Version { found },
        Stop::Cut => RsumError::Cut { records },
        Stop::Damaged(what) => RsumError::Damaged { what, records },
    })
}

/// Why reading stops before the end of a summary.
enum Stop {
    Version(u16),
    Cut,
    Damaged(String),
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => Self::Cut,
            _ => Self::Damaged(error.to_string()),
        }
    }
}

fn damaged(what: impl ToString) -> Stop {
    Stop::Damaged(what.to_string())
}

/// Counts bytes; an error means that no more may be read.
type Count<'a> = &'a mut dyn FnMut(u64) -> io::Result<()>;

/// Reads the parts of a summary, and keeps those that belong to the next record.
struct PartReader<'a, R> {
    input: GzDecoder<R>,
    count: Count<'a>,
    /// The rows of all parts so far.
    tables: WireTables,
    /// The size of all parts with tables so far, bytes after unpacking.
    table_bytes: usize,
    /// The failures of the next record, and when its process closed its ring (ns since the epoch; 0 if unknown).
    ended: (Vec<Failure>, i64),
    /// The connections of the next record.
    peers: Vec<PeerLink>,
    /// How long the threads of the next record waited for a processor.
    processor_wait: Option<ProcessorWait>,
    /// When the next record was begun, and how its process exited.
    process: (i64, Option<ProcessExit>),
    /// The places of the next record's rank in its groups, by index of the group.
    places: Vec<(u32, GroupPlace)>,
    /// When the file of the next record was written.
    written_ns: Option<i64>,
    /// The number of paths of all problems so far beyond the first path of each.
    more_paths: usize,
    buffer: Vec<u8>,
}

impl<'a, R: Read> PartReader<'a, R> {
    fn new(mut input: R, count: Count<'a>) -> Result<Self, Stop> {
        let mut head = [0; MAGIC.len() + 2];
        input.read_exact(&mut head)?;
        if !begins(&head) {
            return Err(damaged("it does not begin as a summary does"));
        }
        let version = u16::from_le_bytes([head[MAGIC.len()], head[MAGIC.len() + 1]]);
        if version > VERSION {
            return Err(Stop::Version(version));
        }
        if version < OLDEST {
            return Err(damaged(format!("there is no version {version}")));
        }
        Ok(Self {
            input: GzDecoder::new(input),
            count,
            tables: WireTables::default(),
            table_bytes: 0,
            ended: (Vec::new(), 0),
            peers: Vec::new(),
            processor_wait: None,
            process: (0, None),
            places: Vec::new(),
            written_ns: None,
            more_paths: 0,
            buffer: Vec::new(),
        })
    }

    /// The next part; `None` at the end of the stream.
    fn part(&mut self) -> Result<Option<Part>, Stop> {
        let mut len = [0; 4];
        if self.input.read(&mut len[..1])? == 0 {
            return Ok(None);
        }
        self.input.read_exact(&mut len[1..])?;
        let len = u32::from_le_bytes(len) as usize;
        if len > MAX_PART {
            return Err(damaged(format!(
                "a part of {len} bytes; at most {MAX_PART} are read"
            )));
        }
        (self.count)(len as u64)?;
        // The buffer grows with the data and not with the stated length.
        self.buffer.clear();
        let read = (&mut self.input)
            .take(len as u64)
            .read_to_end(&mut self.buffer)?;
        if read < len {
            return Err(Stop::Cut);
        }
        match postcard::take_from_bytes(&self.buffer) {
            Ok((part, [])) => Ok(Some(part)),
            Ok(_) => Err(damaged("a part that is longer than what it holds")),
            Err(error) => Err(damaged(error)),
        }
    }

    /// Checks that nothing but the right checksum follows the last part.
    fn end(&mut self) -> Result<(), Stop> {
        match self.input.read(&mut [0])? {
            0 => Ok(()),
            _ => Err(damaged("something follows its end")),
        }
    }

    /// The piece in a part; `None` if the part belongs to a later piece. `records` is the number of records before the
    /// part.
    fn piece(&mut self, part: Part, records: u64) -> Result<Option<Piece>, Stop> {
        Ok(Some(match part {
            Part::WireTables(tables) => {
                self.extend(tables)?;
                return Ok(None);
            }
            Part::Members(lists) => {
                self.extend_members(&lists)?;
                return Ok(None);
            }
            Part::Ended(failures, closed_ns) => {
                if failures.len() > MAX_FAILURES {
                    return Err(damaged("more failures than a record can have"));
                }
                self.ended = (failures, closed_ns);
                return Ok(None);
            }
            Part::Peers(peers) => {
                if peers.len() > MAX_PEERS {
                    return Err(damaged("more connections than a record can have"));
                }
                self.peers = peers;
                return Ok(None);
            }
            Part::ProcessorWait(wait) => {
                self.processor_wait = Some(wait);
                return Ok(None);
            }
            Part::Process(begun_ns, exit) => {
                self.process = (begun_ns, exit);
                return Ok(None);
            }
            Part::Places(places) => {
                self.places = places;
                return Ok(None);
            }
            Part::Written(written_ns) => {
                self.written_ns = Some(written_ns);
                return Ok(None);
            }
            Part::Record(record) => self.record(*record, &[])?,
            Part::Captured(record, captured) => self.record(*record, &captured)?,
            Part::Problem(code, paths, sentence) => {
                let code = Code::parse(&code).ok_or_else(|| damaged("an unknown code"))?;
                // The paths are counted before they are split: a path takes far more memory than its separator.
                self.more_paths += paths.matches(BETWEEN_PATHS).count();
                if self.more_paths > MAX_MORE_PATHS {
                    return Err(damaged(format!(
                        "more paths than its problems can have; at most {MAX_MORE_PATHS} are read"
                    )));
                }
                let mut paths = paths.split(BETWEEN_PATHS).map(str::to_owned);
                Piece::Problem(Problem {
                    code,
                    path: paths.next().unwrap_or_default(),
                    sentence,
                    more_paths: paths.collect(),
                })
            }
            Part::Ras(path, report) => Piece::Ras(path, report),
            Part::End(end) if end.records == records => Piece::Files(end.files),
            Part::End(end) => {
                return Err(damaged(format!("it should hold {} records", end.records)));
            }
        }))
    }

    /// Restores a record from its part and from the parts for it that came before.
    fn record(&mut self, record: Record, captured: &[(u32, u64)]) -> Result<Piece, Stop> {
        let (path, cut) = (record.path.clone(), record.cut);
        let mut dump = record.into_dump(captured, &self.tables).map_err(damaged)?;
        (dump.failures, dump.closed_ns) = std::mem::take(&mut self.ended);
        dump.peers = std::mem::take(&mut self.peers);
        dump.processor_wait = self.processor_wait.take();
        let (begun_ns, exit) = std::mem::take(&mut self.process);
        dump.identity.begun_ns = begun_ns;
        if let Some(status) = &mut dump.status {
            status.exit = exit;
        }
        for (index, place) in std::mem::take(&mut self.places) {
            let group = dump.groups.get_mut(index as usize);
            let group =
                group.ok_or_else(|| damaged("a place in a group that the record does not have"))?;
            group.place = Some(place);
        }
        let dump = Box::new(dump);
        Ok(Piece::Record {
            dump,
            path,
            cut,
            written_ns: self.written_ns.take(),
        })
    }

    /// Appends lists of members, which are stated as runs, to the tables.
    fn extend_members(&mut self, lists: &[Vec<Run>]) -> Result<(), Stop> {
        let members: u64 = lists.iter().map(|runs| ranks_in(runs)).sum();
        let bytes = members.saturating_mul(size_of::<Rank>() as u64);
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        self.check_tables(bytes)?;
        let lists = lists.iter().map(|runs| ranks(runs));
        let members: Option<Vec<_>> = lists.collect();
        self.extend(WireTables {
            members: members.ok_or_else(|| damaged("a rank that is negative or beyond 2^32"))?,
            ..WireTables::default()
        })
    }

    /// Counts the bytes of a part with tables; an error if all of them together exceed [`MAX_TABLE_BYTES`].
    fn check_tables(&mut self, bytes: usize) -> Result<(), Stop> {
        self.table_bytes = self.table_bytes.saturating_add(bytes);
        match self.table_bytes > MAX_TABLE_BYTES {
            true => Err(damaged("larger tables than a job can have")),
            false => Ok(()),
        }
    }

    /// Appends rows to the tables; an error if the tables exceed their limits.
    fn extend(&mut self, new: WireTables) -> Result<(), Stop> {
        self.check_tables(self.buffer.len())?;
        let tables = &mut self.tables;
        tables.signatures.extend(new.signatures);
        tables.frames.extend(new.frames);
        tables.stacks.extend(new.stacks);
        tables.members.extend(new.members);
        let rows = tables.signatures.len() + tables.frames.len();
        let rows = rows + tables.stacks.len() + tables.members.len();
        if rows > MAX_ROWS {
            return Err(damaged("more rows than a job can have"));
        }
        Ok(())
    }
}
