//! Decodes bytes into a flat graph of cells.

use super::cell::{Cell, Fault, Span};
use super::opcode as op;
use super::take::{CELLS_OF_TAKEN, Taker};

/// A run of items in one container.
#[derive(Clone, Copy)]
struct Chunk {
    start: u32,
    len: u32,
    /// Index into `chunks`, or [`END`].
    next: u32,
}

/// Containers are mostly filled in one go: their first run lies in place.
#[derive(Clone, Copy)]
pub(super) struct Container {
    first: Chunk,
    /// The newest of the further runs, or [`END`].
    last: u32,
}

const END: u32 = u32::MAX;

/// Values and containers of 16 bytes each that one file may need together: half a GiB.
///
/// An entry of a dump with ten frames needs about 80, so this is 400,000 entries of one rank.
pub(super) const MAX_CELLS: usize = 1 << 25;

/// No height of the stack.
const NOWHERE: u32 = u32::MAX;

/// A pickle taken apart. Reusable: reading the next one keeps the memory of the last.
#[derive(Default)]
pub(in crate::publish) struct Pickle {
    pub(super) stack: Vec<Cell>,
    /// Heights of the stack at each open MARK.
    pub(super) marks: Vec<u32>,
    pub(super) memo: Vec<Cell>,
    pub(super) containers: Vec<Container>,
    chunks: Vec<Chunk>,
    pub(super) items: Vec<Cell>,
    /// How many items were read in place.
    pub(super) taken: usize,
    /// A memo number was given twice. Then the same instruction need not mean the same value, which
    /// reading in place goes by.
    pub(super) renumbered: bool,
    /// Ascending.
    incomplete: Vec<u64>,
}

impl Pickle {
    /// Takes `input` apart and returns its value.
    ///
    /// On a fault the value holds whatever had been closed by then; containers that were still open
    /// are listed by [`Pickle::is_incomplete`]. `None` if there is nothing to return.
    /// Items that `taker` took are no longer in their list.
    pub(in crate::publish) fn read(
        &mut self,
        input: &[u8],
        taker: &mut impl Taker,
    ) -> (Option<Cell>, Option<Fault>) {
        self.stack.clear();
        self.marks.clear();
        self.memo.clear();
        self.containers.clear();
        self.chunks.clear();
        self.items.clear();
        self.incomplete.clear();
        self.taken = 0;
        self.renumbered = false;
        match self.run(input, taker) {
            Ok(root) => (Some(root), None),
            Err(fault) => (self.close_what_is_open(), Some(fault)),
        }
    }

    /// Frees memory beyond `cells` values of each table.
    pub(in crate::publish) fn shrink_to(&mut self, cells: usize) {
        self.stack.clear();
        self.items.clear();
        self.memo.clear();
        self.containers.clear();
        self.stack.shrink_to(cells);
        self.items.shrink_to(cells);
        self.memo.shrink_to(cells);
        self.containers.shrink_to(cells);
    }

    /// How many containers are kept: their numbers run from 0.
    pub(in crate::publish) fn container_count(&self) -> usize {
        self.containers.len()
    }

    /// The contents of a list, tuple or dict, in order.
    pub(in crate::publish) fn items(&self, container: u64) -> Items<'_> {
        Items {
            pickle: self,
            next: self.containers.get(container as usize).map(|it| it.first),
        }
    }

    /// The contents of a list or tuple.
    pub(in crate::publish) fn list(&self, container: u64) -> impl Iterator<Item = Cell> + use<'_> {
        self.items(container).flatten().copied()
    }

    /// Keys and values of a dict.
    pub(in crate::publish) fn pairs(
        &self,
        container: u64,
    ) -> impl Iterator<Item = (Cell, Cell)> + use<'_> {
        let runs = self.items(container);
        runs.flat_map(|run| run.chunks_exact(2).map(|pair| (pair[0], pair[1])))
    }

    /// Whether nothing was put into this container yet.
    pub(super) fn is_empty(&self, container: u64) -> bool {
        self.containers[container as usize].first.len == 0
    }

    /// Whether the input ended while this container was being filled.
    pub(in crate::publish) fn is_incomplete(&self, container: u64) -> bool {
        self.incomplete.binary_search(&container).is_ok()
    }

    fn run(&mut self, input: &[u8], taker: &mut impl Taker) -> Result<Cell, Fault> {
        let mut at = 0;
        // Where on the stack the taker's items lie.
        let mut wanted = NOWHERE;
        loop {
            let here = at;
            let cut = Fault::Cut { at: input.len() };
            let &code = input.get(at).ok_or(cut)?;
            at += 1;
            match code {
                op::BINGET => {
                    let &slot = input.get(at).ok_or(cut)?;
                    at += 1;
                    self.recall(slot as usize, here)?;
                }
                op::LONG_BINGET => {
                    let slot = u32::from_le_bytes(take(input, &mut at)?);
                    self.recall(slot as usize, here)?;
                }
                op::BINPUT => {
                    let &slot = input.get(at).ok_or(cut)?;
                    at += 1;
                    self.remember(slot as usize, here)?;
                }
                op::LONG_BINPUT => {
                    let slot = u32::from_le_bytes(take(input, &mut at)?);
                    self.remember(slot as usize, here)?;
                }
                op::MEMOIZE => self.remember(self.memo.len(), here)?,
                op::MARK => {
                    if self.marks.len() == self.marks.capacity() {
                        self.check_size(here)?;
                    }
                    let height = self.stack.len() as u32;
                    let begins = self.marks.len() == 1 && self.is_wanted(input, taker);
                    self.marks.push(height);
                    if begins {
                        wanted = height;
                        at = self.hand_over(input, at, taker);
                    }
                }
                op::BININT1 => {
                    let &byte = input.get(at).ok_or(cut)?;
                    at += 1;
                    self.push(Cell::Int(byte.into()), here)?;
                }
                op::BININT2 => {
                    let value = u16::from_le_bytes(take(input, &mut at)?);
                    self.push(Cell::Int(value.into()), here)?;
                }
                op::BININT => {
                    let value = i32::from_le_bytes(take(input, &mut at)?);
                    self.push(Cell::Int(value.into()), here)?;
                }
                op::LONG1 => {
                    let &len = input.get(at).ok_or(cut)?;
                    at += 1;
                    let bytes = take_slice(input, &mut at, len.into())?;
                    self.push(Cell::Int(long(bytes)), here)?;
                }
                op::LONG4 => {
                    let len = i32::from_le_bytes(take(input, &mut at)?);
                    let len = usize::try_from(len).map_err(|_| Fault::Damaged {
                        what: "an integer of negative length",
                        at: here,
                    })?;
                    let bytes = take_slice(input, &mut at, len)?;
                    self.push(Cell::Int(long(bytes)), here)?;
                }
                op::BINFLOAT => {
                    let value = f64::from_be_bytes(take(input, &mut at)?);
                    self.push(Cell::Float(value.to_bits()), here)?;
                }
                op::NONE => self.push(Cell::None, here)?,
                op::NEWTRUE => self.push(Cell::True, here)?,
                op::NEWFALSE => self.push(Cell::False, here)?,
                op::BINUNICODE => {
                    let len = u32::from_le_bytes(take(input, &mut at)?);
                    self.text(input, &mut at, len as usize)?;
                }
                op::SHORT_BINUNICODE => {
                    let &len = input.get(at).ok_or(cut)?;
                    at += 1;
                    self.text(input, &mut at, len.into())?;
                }
                op::BINUNICODE8 => {
                    let len = u64::from_le_bytes(take(input, &mut at)?);
                    let len = usize::try_from(len).map_err(|_| cut)?;
                    self.text(input, &mut at, len)?;
                }
                op::EMPTY_LIST | op::EMPTY_TUPLE => {
                    let list = Cell::List(self.container(0, here)?);
                    self.push(list, here)?;
                }
                op::EMPTY_DICT => {
                    let dict = Cell::Dict(self.container(0, here)?);
                    self.push(dict, here)?;
                }
                op::APPENDS => {
                    let from = self.marked(here)?;
                    if self.marks.len() == 1 && from == wanted as usize {
                        wanted = NOWHERE;
                    }
                    self.extend(from, Filling::List, here)?;
                }
                op::SETITEMS => {
                    let from = self.marked(here)?;
                    self.extend(from, Filling::Dict, here)?;
                    // Otherwise more may follow that belongs to this dict.
                    if self.marks == [1, wanted]
                        && matches!(input.get(at), Some(&(op::EMPTY_DICT | op::APPENDS)))
                    {
                        at = self.hand_over(input, at, taker);
                    }
                }
                op::APPEND => {
                    let from = self.below(1, here)?;
                    self.extend(from, Filling::List, here)?;
                }
                op::SETITEM => {
                    let from = self.below(2, here)?;
                    self.extend(from, Filling::Dict, here)?;
                }
                op::TUPLE => {
                    let from = self.marked(here)?;
                    self.tuple(from, here)?;
                }
                op::TUPLE1 => {
                    let from = self.below(1, here)?;
                    self.tuple(from, here)?;
                }
                op::TUPLE2 => {
                    let from = self.below(2, here)?;
                    self.tuple(from, here)?;
                }
                op::TUPLE3 => {
                    let from = self.below(3, here)?;
                    self.tuple(from, here)?;
                }
                op::PROTO => {
                    let &version = input.get(at).ok_or(cut)?;
                    at += 1;
                    if version > 5 {
                        return Err(Fault::Damaged {
                            what: "a protocol newer than 5",
                            at: here,
                        });
                    }
                }
                // FRAME only helps streaming readers to prefetch.
                op::FRAME => {
                    take::<8>(input, &mut at)?;
                }
                op::STOP => match (&self.stack[..], &self.marks[..]) {
                    (&[root], []) => return Ok(root),
                    _ => {
                        return Err(Fault::Damaged {
                            what: "the end, with unused values left",
                            at: here,
                        });
                    }
                },
                other => {
                    return Err(match op::refused(other) {
                        Some(opcode) => Fault::Refused { opcode, at: here },
                        None => Fault::Damaged {
                            what: "an instruction that dumps do not use",
                            at: here,
                        },
                    });
                }
            }
        }
    }

    #[inline]
    pub(super) fn push(&mut self, cell: Cell, at: usize) -> Result<(), Fault> {
        if self.stack.len() == self.stack.capacity() {
            self.check_size(at)?;
        }
        self.stack.push(cell);
        Ok(())
    }

    /// Called before a table grows, which is seldom: each growth doubles it.
    #[cold]
    fn check_size(&self, at: usize) -> Result<(), Fault> {
        let cells = self.stack.len() + self.items.len() + self.memo.len() + self.marks.len();
        let cells = cells + self.taken * CELLS_OF_TAKEN;
        if cells + self.containers.len() + self.chunks.len() > MAX_CELLS {
            return Err(Fault::TooLarge { at });
        }
        Ok(())
    }

    fn text(&mut self, input: &[u8], at: &mut usize, len: usize) -> Result<(), Fault> {
        let start = *at;
        take_slice(input, at, len)?;
        // The caller admits no input of 4 GiB or more, so both fit.
        let span = Span::new(start as u32, len as u32);
        self.push(Cell::Text(span), start)
    }

    fn recall(&mut self, slot: usize, at: usize) -> Result<(), Fault> {
        match self.memo.get(slot) {
            Some(Cell::Taken) => Err(Fault::Taken { at }),
            Some(&cell) if !matches!(cell, Cell::Unset) => self.push(cell, at),
            _ => Err(Fault::Damaged {
                what: "an undefined memo number",
                at,
            }),
        }
    }

    fn remember(&mut self, slot: usize, at: usize) -> Result<(), Fault> {
        let &cell = self.stack.last().ok_or(Fault::Damaged {
            what: "no value to memoize",
            at,
        })?;
        self.note(slot, cell, at)
    }

    #[inline]
    pub(super) fn note(&mut self, slot: usize, cell: Cell, at: usize) -> Result<(), Fault> {
        if slot == self.memo.len() {
            if slot == self.memo.capacity() {
                self.check_size(at)?;
            }
            self.memo.push(cell);
            return Ok(());
        }
        // Every number costs at least two bytes of input, so an honest one is below the position.
        if slot > at {
            return Err(Fault::Damaged {
                what: "a memo number out of range",
                at,
            });
        }
        if slot > self.memo.len() {
            self.check_size(at)?;
            self.memo.resize(slot + 1, Cell::Unset);
        }
        self.renumbered |= self.memo[slot] != Cell::Unset;
        self.memo[slot] = cell;
        Ok(())
    }

    /// The height of the stack at the last MARK, which is thereby closed.
    fn marked(&mut self, at: usize) -> Result<usize, Fault> {
        let from = self.marks.pop().ok_or(Fault::Damaged {
            what: "the end of a list that was never started",
            at,
        })?;
        Ok(from as usize)
    }

    /// The height of the stack `count` values down; values below an open MARK are out of reach.
    fn below(&mut self, count: usize, at: usize) -> Result<usize, Fault> {
        let floor = self.marks.last().map_or(0, |&mark| mark as usize);
        match self.stack.len().checked_sub(count) {
            Some(from) if from >= floor => Ok(from),
            _ => Err(Fault::Damaged {
                what: "too few values for an instruction",
                at,
            }),
        }
    }

    /// A new container, holding the last `len` items.
    pub(super) fn container(&mut self, len: usize, at: usize) -> Result<u64, Fault> {
        if self.containers.len() == self.containers.capacity() {
            self.check_size(at)?;
        }
        let id = self.containers.len() as u64;
        self.containers.push(Container {
            first: Chunk {
                start: (self.items.len() - len) as u32,
                len: len as u32,
                next: END,
            },
            last: END,
        });
        Ok(id)
    }

    fn tuple(&mut self, from: usize, at: usize) -> Result<(), Fault> {
        let len = self.stack.len() - from;
        if self.items.len() + len > self.items.capacity() {
            self.check_size(at)?;
        }
        self.items.extend_from_slice(&self.stack[from..]);
        self.stack.truncate(from);
        let tuple = Cell::List(self.container(len, at)?);
        self.push(tuple, at)
    }

    /// Moves the values from `from` on into the container below them.
    fn extend(&mut self, from: usize, filling: Filling, at: usize) -> Result<(), Fault> {
        let len = self.stack.len() - from;
        let floor = self.marks.last().map_or(0, |&mark| mark as usize);
        let target = (from > floor).then(|| self.stack[from - 1]);
        let id = match (target, filling) {
            (Some(Cell::List(id)), Filling::List) => id,
            (Some(Cell::Dict(id)), Filling::Dict) if len.is_multiple_of(2) => id,
            _ => {
                return Err(Fault::Damaged {
                    what: "values without a container",
                    at,
                });
            }
        };
        self.fill(id, from, at)
    }

    /// Moves the values from `from` on into this container.
    pub(super) fn fill(&mut self, id: u64, from: usize, at: usize) -> Result<(), Fault> {
        let len = self.stack.len() - from;
        if self.items.len() + len > self.items.capacity() {
            self.check_size(at)?;
        }
        self.append(id, from, len);
        self.stack.truncate(from);
        Ok(())
    }

    fn append(&mut self, id: u64, from: usize, len: usize) {
        if len == 0 {
            return;
        }
        let start = self.items.len() as u32;
        self.items.extend_from_slice(&self.stack[from..from + len]);
        let len = len as u32;
        let chunk = self.chunks.len() as u32;
        let container = &mut self.containers[id as usize];
        let first = &mut container.first;
        if first.len == 0 {
            (first.start, first.len) = (start, len);
            return;
        }
        if first.next == END && first.start + first.len == start {
            first.len += len;
            return;
        }
        match self.chunks.get_mut(container.last as usize) {
            Some(last) => last.next = chunk,
            None => first.next = chunk,
        }
        container.last = chunk;
        self.chunks.push(Chunk {
            start,
            len,
            next: END,
        });
    }

    /// After a fault: ends every list and dict that is open, innermost first.
    fn close_what_is_open(&mut self) -> Option<Cell> {
        if let Some(&(Cell::List(id) | Cell::Dict(id))) = self.stack.last() {
            // An empty container may be complete or truncated; treat it as truncated.
            if self.is_empty(id) {
                self.incomplete.push(id);
            }
        }
        while let Some(mark) = self.marks.pop() {
            let mark = mark as usize;
            let len = self.stack.len().saturating_sub(mark);
            match mark.checked_sub(1).map(|below| self.stack[below]) {
                Some(Cell::List(id)) => {
                    self.incomplete.push(id);
                    self.append(id, mark, len);
                }
                Some(Cell::Dict(id)) => {
                    self.incomplete.push(id);
                    self.append(id, mark, len & !1);
                }
                _ => {}
            }
            self.stack.truncate(mark);
        }
        self.incomplete.sort_unstable();
        self.stack.first().copied()
    }
}

#[derive(Clone, Copy)]
enum Filling {
    List,
    Dict,
}

fn take<const N: usize>(input: &[u8], at: &mut usize) -> Result<[u8; N], Fault> {
    let rest = input.get(*at..).unwrap_or_default();
    let bytes = rest
        .first_chunk::<N>()
        .ok_or(Fault::Cut { at: input.len() })?;
    *at += N;
    Ok(*bytes)
}

fn take_slice<'a>(input: &'a [u8], at: &mut usize, len: usize) -> Result<&'a [u8], Fault> {
    let bytes = input
        .get(*at..)
        .and_then(|rest| rest.get(..len))
        .ok_or(Fault::Cut { at: input.len() })?;
    *at += len;
    Ok(bytes)
}

/// Little-endian two's complement of any length.
fn long(bytes: &[u8]) -> i64 {
    let Some(&last) = bytes.last() else { return 0 };
    let negative = last & 0x80 != 0;
    let fill = if negative { 0xff } else { 0 };
    let mut low = [fill; 8];
    let kept = bytes.len().min(8);
    low[..kept].copy_from_slice(&bytes[..kept]);
    let value = i64::from_le_bytes(low);
    let fits = bytes[kept..].iter().all(|&byte| byte == fill) && (value < 0) == negative;
    match (fits, negative) {
        (true, _) => value,
        (false, true) => i64::MIN,
        (false, false) => i64::MAX,
    }
}

/// The contents of one container, piece by piece: a piece is a run of cells.
pub(in crate::publish) struct Items<'a> {
    pickle: &'a Pickle,
    next: Option<Chunk>,
}

impl<'a> Iterator for Items<'a> {
    type Item = &'a [Cell];

    fn next(&mut self) -> Option<Self::Item> {
        let chunk = self.next?;
        self.next = self.pickle.chunks.get(chunk.next as usize).copied();
        let start = chunk.start as usize;
        Some(&self.pickle.items[start..start + chunk.len as usize])
    }
}
