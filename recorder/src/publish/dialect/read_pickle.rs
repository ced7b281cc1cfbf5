//! The dialect as pickle.
//!
//! The pickle is first taken apart into cells; entries are then converted one by one. Keys are
//! recognised by place: nearly all entries have the same keys in the same order, and a memoised key
//! is the same piece of the file.

use super::build::{Builder, ConfigGroup};
use super::intern::Text;
use super::keys::{Field, config, frame, status, top};
use super::value::{self, Scalar};
use super::{Cause, ReadError, ReadProblem};
use crate::model::{ProcessGroupStatus, RankStatus};
use crate::publish::pickle::{Cell, Fault, Pickle, Span};

/// Reads `bytes` into `builder`, using `pickle`'s memory.
pub(super) fn read(
    bytes: &[u8],
    pickle: &mut Pickle,
    builder: &mut Builder,
) -> Result<Option<ReadProblem>, ReadError> {
    let (root, fault) = pickle.read(bytes);
    let problem = match fault {
        None => None,
        Some(Fault::Refused { opcode, at }) => return Err(ReadError::Refused { opcode, at }),
        Some(Fault::TooLarge { at }) => return Err(ReadError::TooLarge { at }),
        Some(Fault::Cut { at }) => Some((at, Cause::Cut)),
        Some(Fault::Damaged { what, at }) => Some((at, Cause::Damaged(what.to_owned()))),
    };
    let mut reader = Reader {
        bytes,
        pickle,
        builder,
        faulty: problem.is_some(),
        plan: Vec::new(),
        texts: [(Span { start: 0, len: 0 }, Text(0)); TEXT_SLOTS],
        frames: Vec::new(),
    };
    reader.texts[0].1 = reader.builder.texts.intern("");
    match root {
        Some(Cell::Dict(id)) => reader.top(id),
        // Before version 2.0 a dump could be the bare list of entries.
        Some(Cell::List(id)) => reader.entries(id),
        _ => {}
    }
    Ok(problem.map(|(at, cause)| ReadProblem::Stopped {
        at,
        of: bytes.len(),
        cause,
        entries: builder.dump.entries.len(),
    }))
}

const TEXT_SLOTS: usize = 256;
/// Keys of an entry that are recognised by place.
const MAX_PLAN: usize = 64;
const NO_FRAME: u32 = u32::MAX;

struct Reader<'a> {
    bytes: &'a [u8],
    pickle: &'a Pickle,
    builder: &'a mut Builder,
    faulty: bool,
    /// What the n-th key of an entry was last time.
    plan: Vec<(Span, Field)>,
    /// Strings by their place in the file: a direct-mapped cache in front of the table of strings.
    texts: [(Span, Text); TEXT_SLOTS],
    /// Our number of each frame, by the container that holds it.
    frames: Vec<u32>,
}

impl<'a> Reader<'a> {
    fn raw(&self, span: Span) -> &'a [u8] {
        let start = span.start as usize;
        &self.bytes[start..start + span.len as usize]
    }

    fn text(&mut self, span: Span) -> Text {
        let slot = (span.start.wrapping_mul(0x9e37_79b1) >> 24) as usize;
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

    fn scalar(&self, cell: Cell) -> Scalar<'a> {
        match cell {
            Cell::Unset | Cell::List(_) | Cell::Dict(_) => Scalar::Other,
            Cell::None => Scalar::None,
            Cell::Bool(value) => Scalar::Bool(value),
            Cell::Int(value) => Scalar::Int(value),
            Cell::Float(value) => Scalar::Float(value),
            Cell::Text(span) => {
                std::str::from_utf8(self.raw(span)).map_or(Scalar::Other, Scalar::Text)
            }
        }
    }

    /// Keys and values of a dict.
    fn pairs(&self, id: u32) -> impl Iterator<Item = (Cell, Cell)> + use<'a> {
        let runs = self.pickle.items(id);
        runs.flat_map(|run| run.chunks_exact(2).map(|pair| (pair[0], pair[1])))
    }

    fn list(&self, id: u32) -> impl Iterator<Item = Cell> + use<'a> {
        self.pickle.items(id).flatten().copied()
    }

    fn key(&self, cell: Cell) -> &'a str {
        match self.scalar(cell) {
            Scalar::Text(text) => text,
            _ => "",
        }
    }

    fn top(&mut self, id: u32) {
        for (key, value) in self.pairs(id) {
            match (self.key(key), value) {
                (top::PG_CONFIG, Cell::Dict(id)) => {
                    self.builder.looks_like_dump = true;
                    self.pg_config(id);
                }
                (top::PG_STATUS, Cell::Dict(id)) => self.pg_status(id),
                (top::ENTRIES, Cell::List(id)) => {
                    self.builder.looks_like_dump = true;
                    self.entries(id);
                }
                (top::ENTRIES, Cell::Dict(_)) => self.builder.no_list = Some("a dict"),
                (top::ENTRIES, value) => self.builder.no_list = Some(self.scalar(value).kind()),
                (top::NCCL_COMM_STATE, Cell::Dict(id)) => self.comm_state(id),
                (top::STATUS, Cell::Dict(id)) => self.rank_status(id),
                (key, value) => value::set_top(self.builder, key, self.scalar(value)),
            }
        }
    }

    fn pg_config(&mut self, id: u32) {
        for (key, value) in self.pairs(id) {
            let Some(key) = self.text_of(key) else {
                continue;
            };
            let mut group = ConfigGroup {
                name: key,
                ..ConfigGroup::default()
            };
            match value {
                // Version 1: the ranks alone.
                Cell::List(ranks) => group.ranks = self.ranks(ranks),
                Cell::Dict(id) => {
                    for (key, value) in self.pairs(id) {
                        match (self.key(key), value) {
                            (config::NAME, Cell::Text(span)) => group.name = self.text(span),
                            (config::DESC, Cell::Text(span)) => group.desc = self.text(span),
                            (config::RANKS, Cell::Text(span)) => {
                                group.ranks =
                                    value::ranks(&String::from_utf8_lossy(self.raw(span)));
                            }
                            (config::RANKS, Cell::List(id)) => group.ranks = self.ranks(id),
                            (config::PG_ID, value) => group.id = self.scalar(value).int(),
                            _ => {}
                        }
                    }
                }
                _ => continue,
            }
            self.builder.config.push(group);
        }
    }

    fn ranks(&self, id: u32) -> Vec<u32> {
        self.list(id)
            .filter_map(|cell| self.scalar(cell).int())
            .collect()
    }

    fn pg_status(&mut self, id: u32) {
        for (key, value) in self.pairs(id) {
            let (Some(number), Cell::Dict(id)) = (self.scalar(key).int(), value) else {
                continue;
            };
            let mut known = ProcessGroupStatus::default();
            for (key, value) in self.pairs(id) {
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

    fn comm_state(&mut self, id: u32) {
        for (key, value) in self.pairs(id) {
            let (name, Cell::Dict(id)) = (self.key(key).to_owned(), value) else {
                continue;
            };
            let facts = self.pairs(id).map(|(key, value)| {
                let fact = self.scalar(value).to_string();
                (self.key(key).to_owned(), fact)
            });
            let state = (name, facts.collect());
            self.builder.dump.nccl_comm_state.push(state);
        }
    }

    fn rank_status(&mut self, id: u32) {
        let mut known = RankStatus::default();
        for (key, value) in self.pairs(id) {
            value::set_rank_status(&mut known, self.key(key), self.scalar(value));
        }
        self.builder.dump.status = Some(known);
    }

    fn entries(&mut self, id: u32) {
        for cell in self.list(id) {
            let Cell::Dict(entry) = cell else {
                self.builder.reject_entry("(not a dict)");
                continue;
            };
            if self.faulty && self.pickle.is_incomplete(entry) {
                continue;
            }
            self.entry(entry);
            self.builder.push();
            self.builder.looks_like_dump |= !self.builder.dump.entries.is_empty();
        }
    }

    fn entry(&mut self, id: u32) {
        let mut at = 0;
        for run in self.pickle.items(id) {
            for pair in run.chunks_exact(2) {
                if let &[Cell::Text(key), value] = pair {
                    let field = self.field_of(at, key);
                    if self.field(field, value).is_none() {
                        self.builder.draft.reject(field);
                    }
                }
                at += 1;
            }
        }
    }

    /// What the `at`-th key of an entry means.
    fn field_of(&mut self, at: usize, key: Span) -> Field {
        if let Some(&(known, field)) = self.plan.get(at)
            && known == key
        {
            return field;
        }
        let field = Field::of(self.raw(key));
        if let Some(planned) = self.plan.get_mut(at) {
            *planned = (key, field);
        } else if at == self.plan.len() && at < MAX_PLAN {
            self.plan.push((key, field));
        }
        field
    }

    /// Puts one field into the draft; `None` if its value makes no sense.
    fn field(&mut self, field: Field, value: Cell) -> Option<()> {
        match field {
            Field::ProfilingName => {
                let Cell::Text(span) = value else { return None };
                self.builder.draft.profiling_name = Some(self.text(span));
            }
            Field::ProcessGroup => self.builder.draft.group = Some(self.process_group(value)?),
            Field::State => {
                let Cell::Text(span) = value else { return None };
                self.builder.draft.state = value::state(self.raw(span))?;
            }
            Field::InputSizes | Field::OutputSizes => self.sizes(field, value)?,
            Field::InputDtypes | Field::OutputDtypes => self.dtypes(field, value)?,
            Field::InputSplits | Field::OutputSplits => self.splits(field, value)?,
            Field::Frames => {
                let Cell::List(id) = value else { return None };
                self.stack(id)?;
            }
            Field::ThreadId => self.builder.draft.thread_id = self.text_of(value),
            Field::ThreadName => self.builder.draft.thread_name = self.text_of(value),
            Field::OpName => self.builder.draft.op_name = self.text_of(value),
            Field::Unknown => {}
            _ => {
                let value = self.scalar(value);
                value::set_scalar(&mut self.builder.draft, field, value)?;
            }
        }
        Some(())
    }

    fn process_group(&mut self, value: Cell) -> Option<(Text, Text)> {
        let Cell::List(id) = value else { return None };
        let mut parts = self.list(id);
        let name = self.text_of(parts.next()?)?;
        let desc = match parts.next() {
            Some(desc) => self.text_of(desc)?,
            None => self.builder.texts.intern(""),
        };
        Some((name, desc))
    }

    fn sizes(&mut self, field: Field, value: Cell) -> Option<()> {
        let Cell::List(id) = value else { return None };
        let pickle = self.pickle;
        let sizes = match field {
            Field::InputSizes => &mut self.builder.draft.input_sizes,
            _ => &mut self.builder.draft.output_sizes,
        };
        for shape in pickle.items(id).flatten() {
            let &Cell::List(id) = shape else { return None };
            let at = sizes.len();
            sizes.push(0);
            for run in pickle.items(id) {
                for &extent in run {
                    let Cell::Int(extent) = extent else {
                        return None;
                    };
                    sizes.push(u64::try_from(extent).ok()?);
                }
            }
            sizes[at] = (sizes.len() - at - 1) as u64;
        }
        Some(())
    }

    fn dtypes(&mut self, field: Field, value: Cell) -> Option<()> {
        let Cell::List(id) = value else { return None };
        for cell in self.pickle.items(id).flatten() {
            let &Cell::Text(span) = cell else { return None };
            let id = u64::from(self.text(span).0);
            let draft = &mut self.builder.draft;
            match field {
                Field::InputDtypes => draft.input_dtypes.push(id),
                _ => draft.output_dtypes.push(id),
            }
        }
        Some(())
    }

    fn splits(&mut self, field: Field, value: Cell) -> Option<()> {
        if value == Cell::None {
            return Some(());
        }
        let Cell::List(id) = value else { return None };
        let draft = &mut self.builder.draft;
        let splits = match field {
            Field::InputSplits => &mut draft.input_splits,
            _ => &mut draft.output_splits,
        };
        for cell in self.pickle.items(id).flatten() {
            let &Cell::Int(elements) = cell else {
                return None;
            };
            splits.push(u64::try_from(elements).ok()?);
        }
        Some(())
    }

    fn stack(&mut self, id: u32) -> Option<()> {
        self.builder.frames_of_stack.clear();
        if self.frames.is_empty() {
            self.frames = vec![NO_FRAME; self.pickle.container_count()];
        }
        for cell in self.pickle.items(id).flatten() {
            let &Cell::Dict(id) = cell else { return None };
            let mut number = self.frames[id as usize];
            if number == NO_FRAME {
                number = self.frame(id);
                self.frames[id as usize] = number;
            }
            self.builder.frames_of_stack.push(number);
        }
        if !self.builder.frames_of_stack.is_empty() {
            self.builder.draft.stack = Some(self.builder.stack());
        }
        Some(())
    }

    fn frame(&mut self, id: u32) -> u32 {
        let empty = self.builder.texts.intern("");
        let (mut name, mut filename, mut line) = (empty, empty, 0);
        for (key, value) in self.pairs(id) {
            match (self.key(key), value) {
                (frame::NAME, Cell::Text(span)) => name = self.text(span),
                (frame::FILENAME, Cell::Text(span)) => filename = self.text(span),
                (frame::LINE, value) => line = self.scalar(value).int().unwrap_or(0),
                _ => {}
            }
        }
        self.builder.frame(name, filename, line)
    }
}
