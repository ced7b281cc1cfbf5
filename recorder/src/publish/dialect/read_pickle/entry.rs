//! Reads one entry, either from the cells of the pickle machine or in place from the input.
//!
//! Keys are recognized by position: nearly all entries have the same keys in the same order, and a
//! memoized key is the same span of the file.

use super::{MAX_PLAN, MAX_WALKED, NO_FRAME, Planned, Reader};
use crate::model::EntryState;
use crate::publish::dialect::NOT_A_DICT;
use crate::publish::dialect::intern::Text;
use crate::publish::dialect::keys::{Field, frame};
use crate::publish::dialect::value;
use crate::publish::pickle::{Cell, Cursor, Pickle, Recall, Span};

impl Reader<'_> {
    /// Reads a whole list of entries from its cells.
    pub(super) fn entries(&mut self, pickle: &Pickle, id: u64) {
        for item in pickle.list(id) {
            self.item(pickle, item);
        }
    }

    /// Adds an item of the list of entries to the dump, or counts it as rejected; an entry that the end of the file
    /// cuts off is ignored.
    pub(super) fn item(&mut self, pickle: &Pickle, item: Cell) {
        let Cell::Dict(id) = item else {
            self.builder.reject_entry(NOT_A_DICT);
            return;
        };
        if pickle.is_incomplete(id) {
            return;
        }
        self.entry(pickle, id);
        self.builder.push();
        self.builder.looks_like_dump |= !self.builder.dump.entries.is_empty();
    }

    /// Reads an entry from its cells into the draft.
    fn entry(&mut self, pickle: &Pickle, id: u64) {
        let mut position = 0;
        for run in pickle.items(id) {
            for pair in run.chunks_exact(2) {
                if let &[Cell::Text(key), value] = pair {
                    let field = self.field_of(position, key, Recall::NEVER);
                    if self.field(pickle, field, value).is_none() {
                        self.builder.draft.reject(field);
                    }
                }
                position += 1;
            }
        }
    }

    /// Reads the entry at the cursor into the draft, and keeps only those of its lists as cells that the memo holds.
    /// Returns the position after the entry; `None` if the entry does not have the usual form or holds an invalid
    /// value.
    pub(super) fn entry_in_place(&mut self, mut cursor: Cursor<'_, '_>) -> Option<usize> {
        cursor.open_dict()?;
        let mut position = 0;
        loop {
            let field = match self.plan.get(position) {
                Some(planned) if cursor.skip_key(planned.recall) => planned.field,
                _ => match cursor.key()? {
                    Some((key, recall)) => self.field_of(position, key, recall),
                    None => return Some(cursor.at()),
                },
            };
            match field {
                Field::Frames if cursor.is_at_list() => {
                    self.begin_stack();
                    let mut list = cursor.open_list()?;
                    while let Some(cell) = cursor.item(&mut list)? {
                        self.push_frame(cursor.pickle(), cell)?;
                    }
                    self.end_stack();
                }
                Field::InputSizes | Field::OutputSizes if cursor.is_at_list() => {
                    self.sizes_in_place(field, &mut cursor)?;
                }
                Field::InputDtypes | Field::OutputDtypes if cursor.is_at_list() => {
                    let mut list = cursor.open_list()?;
                    while let Some(cell) = cursor.item(&mut list)? {
                        self.push_dtype(field, cell)?;
                    }
                }
                Field::InputSplits | Field::OutputSplits if cursor.is_at_list() => {
                    let mut list = cursor.open_list()?;
                    while let Some(cell) = cursor.item(&mut list)? {
                        self.builder.draft.splits(field).push(extent(cell)?);
                    }
                }
                Field::ProcessGroup => {
                    self.builder.draft.fields.group = Some(self.names(cursor.pair()?)?);
                }
                _ => {
                    let value = cursor.value()?;
                    self.field(cursor.pickle(), field, value)?;
                }
            }
            position += 1;
        }
    }

    /// Like [`sizes`](Self::sizes), straight from the file.
    #[inline(always)]
    fn sizes_in_place(&mut self, field: Field, cursor: &mut Cursor<'_, '_>) -> Option<()> {
        let mut shapes = cursor.open_list()?;
        loop {
            if cursor.is_at_list() {
                let sizes = self.builder.draft.sizes(field);
                let start = sizes.len();
                sizes.push(0);
                let mut shape = cursor.open_item(&shapes)?;
                while let Some(cell) = cursor.item(&mut shape)? {
                    sizes.push(extent(cell)?);
                }
                sizes[start] = (sizes.len() - start - 1) as u64;
                cursor.close_item(&mut shapes, &shape)?;
            } else if let Some(cell) = cursor.item(&mut shapes)? {
                self.push_shape(cursor.pickle(), field, cell)?;
            } else {
                return Some(());
            }
        }
    }

    /// The field of the key at this position of an entry, from 0. Notes `recall`, which reads the same key from the
    /// memo, so that the key is recognized by position in the next entry.
    fn field_of(&mut self, position: usize, key: Span, recall: Recall) -> Field {
        if let Some(planned) = self.plan.get_mut(position)
            && planned.key == key
        {
            planned.recall = recall;
            return planned.field;
        }
        let field = Field::from_key(self.raw(key));
        let planned = Planned { recall, key, field };
        if let Some(old) = self.plan.get_mut(position) {
            *old = planned;
        } else if position == self.plan.len() && position < MAX_PLAN {
            self.plan.push(planned);
        }
        field
    }

    /// Puts one field into the draft; `None` if its value is invalid.
    #[inline(always)]
    fn field(&mut self, pickle: &Pickle, field: Field, value: Cell) -> Option<()> {
        match field {
            Field::ProfilingName => {
                let Cell::Text(span) = value else { return None };
                self.builder.draft.fields.profiling_name = Some(self.text(span));
            }
            Field::ProcessGroup => {
                self.builder.draft.fields.group = Some(self.process_group(pickle, value)?)
            }
            Field::State => {
                let Cell::Text(span) = value else { return None };
                self.builder.draft.fields.state = self.state(span)?;
            }
            Field::InputSizes | Field::OutputSizes => self.sizes(pickle, field, value)?,
            Field::InputDtypes | Field::OutputDtypes => self.dtypes(pickle, field, value)?,
            Field::InputSplits | Field::OutputSplits => self.splits(pickle, field, value)?,
            Field::Frames => {
                let Cell::List(id) = value else { return None };
                self.stack(pickle, id)?;
            }
            Field::ThreadId => self.builder.draft.fields.thread_id = self.text_of(value),
            Field::ThreadName => self.builder.draft.fields.thread_name = self.text_of(value),
            Field::OpName => self.builder.draft.fields.op_name = self.text_of(value),
            Field::Backend => self.builder.draft.fields.backend = self.text_of(value),
            Field::Unknown => {}
            _ => {
                let value = self.scalar(value);
                value::set_scalar(&mut self.builder.draft.fields, field, value)?;
            }
        }
        Some(())
    }

    /// Counts cells of an entry's lists; `None` once there were too many. Entries may share one list from the memo, so
    /// a small file can have far more of them than it has bytes.
    #[inline]
    fn walk(&mut self, cells: usize) -> Option<()> {
        self.walked += cells;
        (self.walked <= MAX_WALKED).then_some(())
    }

    /// The state that the file names; `None` if there is no such state.
    #[inline]
    fn state(&mut self, span: Span) -> Option<EntryState> {
        match self.state {
            Some((known, state)) if known == span => Some(state),
            _ => {
                let state = value::state(self.raw(span))?;
                self.state = Some((span, state));
                Some(state)
            }
        }
    }

    /// Name and description of an entry's group: a list of both, or of the name alone.
    fn process_group(&mut self, pickle: &Pickle, value: Cell) -> Option<(Text, Text)> {
        let Cell::List(id) = value else { return None };
        let mut parts = pickle.list(id);
        let name = parts.next()?;
        match parts.next() {
            Some(desc) => self.names([name, desc]),
            None => Some((self.text_of(name)?, self.builder.texts.intern(""))),
        }
    }

    #[inline]
    fn names(&mut self, [name, desc]: [Cell; 2]) -> Option<(Text, Text)> {
        Some((self.text_of(name)?, self.text_of(desc)?))
    }

    /// Puts a list of shapes into the draft.
    fn sizes(&mut self, pickle: &Pickle, field: Field, value: Cell) -> Option<()> {
        let Cell::List(id) = value else { return None };
        let mut shapes = pickle.list(id);
        shapes.try_for_each(|shape| {
            self.walk(1)?;
            self.push_shape(pickle, field, shape)
        })
    }

    /// Puts one shape into the draft: the number of its dimensions, then the elements along each.
    fn push_shape(&mut self, pickle: &Pickle, field: Field, shape: Cell) -> Option<()> {
        let Cell::List(id) = shape else { return None };
        let sizes = self.builder.draft.sizes(field);
        let start = sizes.len();
        sizes.push(0);
        for cell in pickle.list(id) {
            sizes.push(extent(cell)?);
        }
        let dimensions = sizes.len() - start - 1;
        sizes[start] = dimensions as u64;
        self.walk(dimensions)
    }

    /// Puts a list of element types into the draft.
    fn dtypes(&mut self, pickle: &Pickle, field: Field, value: Cell) -> Option<()> {
        let Cell::List(id) = value else { return None };
        let mut dtypes = pickle.list(id);
        dtypes.try_for_each(|dtype| {
            self.walk(1)?;
            self.push_dtype(field, dtype)
        })
    }

    #[inline]
    fn push_dtype(&mut self, field: Field, dtype: Cell) -> Option<()> {
        let Cell::Text(span) = dtype else { return None };
        let id = u64::from(self.text(span).0);
        self.builder.draft.dtypes(field).push(id);
        Some(())
    }

    /// Puts the numbers of elements for each rank into the draft; `None` in the file means that there are none.
    fn splits(&mut self, pickle: &Pickle, field: Field, value: Cell) -> Option<()> {
        if value == Cell::None {
            return Some(());
        }
        let Cell::List(id) = value else { return None };
        let splits = self.builder.draft.splits(field);
        for cell in pickle.list(id) {
            splits.push(extent(cell)?);
        }
        let splits = splits.len();
        self.walk(splits)
    }

    /// Reads a list of frames as the draft's stack.
    fn stack(&mut self, pickle: &Pickle, id: u64) -> Option<()> {
        self.begin_stack();
        let mut frames = pickle.list(id);
        frames.try_for_each(|frame| {
            self.walk(1)?;
            self.push_frame(pickle, frame)
        })?;
        self.end_stack();
        Some(())
    }

    fn begin_stack(&mut self) {
        self.builder.frames_of_stack.clear();
    }

    /// Adds a frame to the stack being read. A frame that entries share through the memo is read only once.
    #[inline(always)]
    fn push_frame(&mut self, pickle: &Pickle, frame: Cell) -> Option<()> {
        let Cell::Dict(id) = frame else { return None };
        let known = self.frames.get(id as usize).copied();
        let number = match known.filter(|&number| number != NO_FRAME) {
            Some(number) => number,
            None => self.new_frame(pickle, id),
        };
        self.builder.frames_of_stack.push(number);
        Some(())
    }

    /// Gives the frames since [`begin_stack`](Self::begin_stack) to the draft, unless there are none.
    fn end_stack(&mut self) {
        if !self.builder.frames_of_stack.is_empty() {
            self.builder.draft.fields.stack = Some(self.builder.stack());
        }
    }

    /// Reads a frame and notes its number for the entries that share its container.
    fn new_frame(&mut self, pickle: &Pickle, id: u64) -> u32 {
        let number = self.frame(pickle, id);
        if self.frames.len() <= id as usize {
            self.frames.resize(pickle.container_count(), NO_FRAME);
        }
        self.frames[id as usize] = number;
        number
    }

    /// Reads a frame; returns its number in the dump.
    fn frame(&mut self, pickle: &Pickle, id: u64) -> u32 {
        let empty = self.builder.texts.intern("");
        let (mut name, mut filename, mut line) = (empty, empty, 0);
        for (key, value) in pickle.pairs(id) {
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

/// Elements along one dimension, or for one rank; `None` if the cell is not a non-negative integer.
fn extent(cell: Cell) -> Option<u64> {
    match cell {
        Cell::Int(elements) => u64::try_from(elements).ok(),
        _ => None,
    }
}
