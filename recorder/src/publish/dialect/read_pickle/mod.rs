//! Reads the dialect as pickle.
//!
//! The pickle is decoded into cells, except for its entries: those are converted one by one as they are read,
//! most of them without becoming cells.

mod entry;
#[cfg(test)]
mod tests;

use super::build::{Builder, ConfigGroup};
use super::intern::Text;
use super::keys::{Field, config, failure, reducer, status, top};
use super::value::{self, FailureDraft, PeerDraft, Scalar};
use super::{Cause, ReadError, ReadProblem};
use crate::model::{EntryState, ProcessGroupStatus, RankStatus, ReducerBucket, ReducerStep};
use crate::publish::pickle::{Cell, Cursor, Fault, Pickle, Recall, Span, Taker};

/// Reads `bytes` into `builder`, using `pickle`'s memory. Returns where and why reading stopped early; `None` if it
/// reached the end.
///
/// # Errors
/// `Refused` if the pickle would construct objects, call functions or fetch something from outside; `TooLarge` if it
/// has too many values.
pub(super) fn read(
    bytes: &[u8],
    pickle: &mut Pickle,
    builder: &mut Builder,
) -> Result<Option<ReadProblem>, ReadError> {
    let mut outcome = run(bytes, pickle, builder, EntryReading::InPlace);
    if let Err(Fault::Taken { .. }) = outcome {
        let lists = std::mem::take(&mut builder.lists);
        *builder = Builder::default();
        builder.lists = lists;
        outcome = run(bytes, pickle, builder, EntryReading::Stacked);
    }
    let (at, cause) = match outcome {
        Ok(()) => return Ok(None),
        Err(Fault::Refused { opcode, at }) => return Err(ReadError::Refused { opcode, at }),
        Err(Fault::TooLarge { at }) => return Err(ReadError::TooLarge { at }),
        Err(Fault::Cut { at }) => (at, Cause::Cut),
        Err(Fault::Damaged { what, at }) => (at, Cause::Damaged(what.to_owned())),
        Err(Fault::Taken { at }) => {
            let what = "an undefined memo number";
            (at, Cause::Damaged(what.to_owned()))
        }
    };
    Ok(Some(ReadProblem::Stopped {
        at,
        of: bytes.len(),
        cause,
        entries: builder.dump.entries.len(),
    }))
}

/// How entries are read.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum EntryReading {
    /// Entries of the usual form are read in place, without the stack.
    InPlace,
    /// All entries are read from cells, which is slower and works for any file.
    Stacked,
}

/// Reads `bytes` into `builder`, as far as they can be read. Fails with [`Fault::Taken`] if the entries must be read
/// again from cells.
pub(super) fn run(
    bytes: &[u8],
    pickle: &mut Pickle,
    builder: &mut Builder,
    entries: EntryReading,
) -> Result<(), Fault> {
    let mut reader = Reader {
        bytes,
        builder,
        entries,
        lists: 0,
        walked: 0,
        plan: Vec::new(),
        state: None,
        texts: [(Span::NOTHING, Text(0)); TEXT_SLOTS],
        frames: Vec::new(),
    };
    reader.texts[0].1 = reader.builder.texts.intern("");
    let likely = bytes.len() / BYTES_OF_ENTRY;
    reader
        .builder
        .dump
        .entries
        .reserve(likely.min(MAX_RESERVED));
    let (root, fault) = pickle.read(bytes, &mut reader);
    match root {
        Some(Cell::Dict(id)) => reader.top(pickle, id),
        // Before version 2.0 a dump could be the bare list of entries.
        Some(Cell::List(id)) => reader.entries(pickle, id),
        _ => {}
    }
    if reader.lists > 1 && entries == EntryReading::InPlace {
        return Err(Fault::Taken { at: 0 });
    }
    fault.map_or(Ok(()), Err)
}

/// Least usual size of an entry in a file, in bytes: if it were more, most tables of entries would have to grow once.
const BYTES_OF_ENTRY: usize = 136;
/// Maximum number of entries for which memory is reserved in advance.
const MAX_RESERVED: usize = 1 << 14;
/// Number of slots of the cache of strings.
const TEXT_SLOTS: usize = 256;
/// Maximum number of keys per entry that are recognized by position.
const MAX_PLAN: usize = 64;
/// Maximum number of shapes, dimensions, types, splits and frames of all entries of a file that are read from cells.
const MAX_WALKED: usize = 1 << 25;
/// Marks a container from which no frame was read yet.
const NO_FRAME: u32 = u32::MAX;

/// The key at one position of the entries so far.
struct Planned {
    recall: Recall,
    key: Span,
    field: Field,
}

/// Reads the values of a pickle into a dump.
struct Reader<'a> {
    bytes: &'a [u8],
    builder: &'a mut Builder,
    entries: EntryReading,
    /// The number of lists of entries: a dict has each key once, but a file may repeat it.
    lists: usize,
    /// How many shapes, dimensions, types, splits and frames were read from cells so far.
    walked: usize,
    /// The keys of the entries so far, by position.
    plan: Vec<Planned>,
    /// The last state, as the file spells it.
    state: Option<(Span, EntryState)>,
    /// Strings by their position in the file: a direct-mapped cache in front of the table of strings.
    texts: [(Span, Text); TEXT_SLOTS],
    /// The dump's number of each frame, by the container that holds it.
    frames: Vec<u32>,
}

impl Taker for Reader<'_> {
    fn wants(&self, key: &[u8]) -> bool {
        self.entries == EntryReading::InPlace && key == top::ENTRIES.as_bytes()
    }

    fn take(&mut self, pickle: &Pickle, item: Cell) {
        self.item(pickle, item);
    }

    fn read(&mut self, pickle: &mut Pickle, input: &[u8], at: usize) -> Option<usize> {
        let end = self.entry_in_place(Cursor::new(pickle, input, at));
        let end = end.filter(|_| self.builder.draft.fields.profiling_name.is_some());
        match end {
            Some(_) => self.builder.push(),
            None => self.builder.draft.reset(),
        }
        end
    }
}

impl<'a> Reader<'a> {
    /// The bytes of a string in the file.
    fn raw(&self, span: Span) -> &'a [u8] {
        span.bytes_in(self.bytes)
    }

    /// The interned text of a string; the cache spares most look-ups by content.
    #[inline(always)]
    fn text(&mut self, span: Span) -> Text {
        let slot = (span.start().wrapping_mul(0x9e37_79b1) >> 24) as usize;
        let (known, text) = self.texts[slot];
        if known == span {
            return text;
        }
        let text = self.builder.texts.intern_bytes(self.raw(span));
        self.texts[slot] = (span, text);
        text
    }

    /// A string, or a number as its digits.
    fn text_of(&mut self, cell: Cell) -> Option<Text> {
        match cell {
            Cell::Text(span) => Some(self.text(span)),
            Cell::Int(value) => Some(self.builder.texts.intern(&value.to_string())),
            _ => None,
        }
    }

    /// The value of a cell that is not a container; `Other` for containers and for strings that are not UTF-8.
    #[inline(always)]
    fn scalar(&self, cell: Cell) -> Scalar<'a> {
        match cell {
            Cell::Unset | Cell::Taken | Cell::List(_) | Cell::Dict(_) => Scalar::Other,
            Cell::None => Scalar::None,
            Cell::True => Scalar::Bool(true),
            Cell::False => Scalar::Bool(false),
            Cell::Int(value) => Scalar::Int(value),
            Cell::Float(bits) => Scalar::Float(f64::from_bits(bits)),
            Cell::Text(span) => {
                std::str::from_utf8(self.raw(span)).map_or(Scalar::Other, Scalar::Text)
            }
        }
    }

    /// The text of a key; empty if the key is not a text.
    fn key(&self, cell: Cell) -> &'a str {
        match self.scalar(cell) {
            Scalar::Text(text) => text,
            _ => "",
        }
    }

    fn top(&mut self, pickle: &Pickle, id: u64) {
        for (key, value) in pickle.pairs(id) {
            match (self.key(key), value) {
                (top::PG_CONFIG, Cell::Dict(id)) => {
                    self.builder.looks_like_dump = true;
                    self.pg_config(pickle, id);
                }
                (top::PG_STATUS, Cell::Dict(id)) => self.pg_status(pickle, id),
                (top::ENTRIES, Cell::List(id)) => {
                    self.lists += 1;
                    self.entries(pickle, id);
                }
                (top::ENTRIES, Cell::Dict(_)) => {
                    self.builder.entries_kind_if_no_list = Some("a dict");
                }
                (top::ENTRIES, value) => {
                    self.builder.entries_kind_if_no_list = Some(self.scalar(value).kind());
                }
                (top::NCCL_COMM_STATE, Cell::Dict(id)) => self.comm_state(pickle, id),
                (top::STATUS, Cell::Dict(id)) => self.rank_status(pickle, id),
                (top::FAILURES, Cell::List(id)) => self.failures(pickle, id),
                (top::PEERS, Cell::List(id)) => self.peers(pickle, id),
                (top::REDUCER_STEPS, Cell::List(id)) => self.reducer_steps(pickle, id),
                (key, value) => value::set_top(self.builder, key, self.scalar(value)),
            }
        }
    }

    fn pg_config(&mut self, pickle: &Pickle, id: u64) {
        for (key, value) in pickle.pairs(id) {
            let Some(key) = self.text_of(key) else {
                continue;
            };
            let mut group = ConfigGroup {
                name: key,
                ..ConfigGroup::default()
            };
            match value {
                // Version 1: the ranks alone.
                Cell::List(ranks) => group.ranks = self.ranks(pickle, ranks).into(),
                Cell::Dict(id) => {
                    for (key, value) in pickle.pairs(id) {
                        match (self.key(key), value) {
                            (config::NAME, Cell::Text(span)) => group.name = self.text(span),
                            (config::DESC, Cell::Text(span)) => group.desc = self.text(span),
                            (config::RANKS, Cell::Text(span)) => {
                                group.ranks = self.builder.lists.parse(self.raw(span));
                            }
                            (config::RANKS, Cell::List(id)) => {
                                group.ranks = self.ranks(pickle, id).into();
                            }
                            (config::PG_ID, value) => group.id = self.scalar(value).int(),
                            (config::GROUP_RANK, value) => {
                                group.own_rank = self.scalar(value).int();
                            }
                            (config::GROUP_SIZE, value) => group.size = self.scalar(value).int(),
                            _ => {}
                        }
                    }
                }
                _ => continue,
            }
            self.builder.config.push(group);
        }
    }

    fn ranks(&self, pickle: &Pickle, id: u64) -> Vec<u32> {
        pickle
            .list(id)
            .filter_map(|cell| self.scalar(cell).int())
            .collect()
    }

    fn pg_status(&mut self, pickle: &Pickle, id: u64) {
        for (key, value) in pickle.pairs(id) {
            let (Some(number), Cell::Dict(id)) = (self.scalar(key).int(), value) else {
                continue;
            };
            let mut known = ProcessGroupStatus::default();
            for (key, value) in pickle.pairs(id) {
                let Some(value) = self.scalar(value).int() else {
                    continue;
                };
                match self.key(key) {
                    status::ENQUEUED => known.last_enqueued = value,
                    status::STARTED => known.last_started = value,
                    status::COMPLETED => known.last_completed = value,
                    status::TIMEOUT => known.timeout_ms = u64::try_from(value).unwrap_or(0),
                    _ => {}
                }
            }
            self.builder.group_status.push((number, known));
        }
    }

    fn comm_state(&mut self, pickle: &Pickle, id: u64) {
        for (key, value) in pickle.pairs(id) {
            let (name, Cell::Dict(id)) = (self.key(key).to_owned(), value) else {
                continue;
            };
            let facts = pickle.pairs(id).map(|(key, value)| {
                let fact = self.scalar(value).to_string();
                (self.key(key).to_owned(), fact)
            });
            let state = (name, facts.collect());
            self.builder.dump.nccl_comm_state.push(state);
        }
    }

    fn failures(&mut self, pickle: &Pickle, id: u64) {
        for item in pickle.list(id) {
            let Cell::Dict(id) = item else { continue };
            let mut draft = FailureDraft::default();
            for (key, value) in pickle.pairs(id) {
                match (self.key(key), value) {
                    (failure::RANKS, Cell::List(id)) => draft.ranks = self.ranks(pickle, id),
                    (failure::OPERATION, Cell::Dict(id)) => {
                        for (key, value) in pickle.pairs(id) {
                            draft.set_operation(self.key(key), self.scalar(value));
                        }
                    }
                    (key, value) => draft.set(key, self.scalar(value)),
                }
            }
            draft.finish(self.builder);
        }
    }

    fn peers(&mut self, pickle: &Pickle, id: u64) {
        for item in pickle.list(id) {
            let Cell::Dict(id) = item else { continue };
            let mut draft = PeerDraft::default();
            for (key, value) in pickle.pairs(id) {
                draft.set(self.key(key), self.scalar(value));
            }
            draft.finish(self.builder);
        }
    }

    fn reducer_steps(&mut self, pickle: &Pickle, id: u64) {
        for item in pickle.list(id) {
            let Cell::Dict(id) = item else { continue };
            let mut step = ReducerStep::default();
            for (key, value) in pickle.pairs(id) {
                match (self.key(key), value) {
                    (reducer::BUCKETS, Cell::List(id)) => {
                        for bucket in pickle.list(id) {
                            let Cell::Dict(id) = bucket else { continue };
                            let mut bucket = ReducerBucket::default();
                            for (key, value) in pickle.pairs(id) {
                                let (key, value) = (self.key(key), self.scalar(value));
                                value::set_reducer_bucket(&mut bucket, key, value);
                            }
                            value::add_reducer_bucket(&mut step, bucket);
                        }
                    }
                    (key, value) => value::set_reducer_step(&mut step, key, self.scalar(value)),
                }
            }
            value::add_reducer_step(self.builder, step);
        }
    }

    fn rank_status(&mut self, pickle: &Pickle, id: u64) {
        let mut known = RankStatus::default();
        for (key, value) in pickle.pairs(id) {
            value::set_rank_status(&mut known, self.key(key), self.scalar(value));
        }
        self.builder.dump.status = Some(known);
    }
}
