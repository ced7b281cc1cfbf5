//! Reads values in place, without the stack machine.
//!
//! A cursor handles only the forms in which picklers write plain data; on anything else it returns
//! `None` and the machine reads the item. It must yield the same values as the machine and write the
//! same memo entries.
//!
//! Nearly all of it is inlined into its one caller. The functions that are not take the position and
//! return the next one, which keeps the position in a register.

use super::cell::{Cell, Span};
use super::graph::Pickle;
use super::opcode as op;

/// A position between two values of one item.
pub(in crate::publish) struct Cursor<'p, 'a> {
    pickle: &'p mut Pickle,
    input: &'a [u8],
    at: usize,
}

/// The two bytes of the instruction that reads a value with a small number from the memo, as one word. They
/// always denote the same value: nothing is read in place once a number was assigned twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::publish) struct Recall(u16);

impl Recall {
    /// No instruction.
    pub(in crate::publish) const NEVER: Self = Self(0);
}

/// A list that is being read.
pub(in crate::publish) struct List {
    /// Its number, if the memo holds it: then its items are kept.
    kept: Option<u64>,
    /// The stack height at which the kept items begin.
    from: usize,
    form: Form,
}

/// The instructions that build a list.
#[derive(Clone, Copy)]
enum Form {
    /// MARK, items, APPENDS.
    Marked,
    /// One item and APPEND, or none.
    Single,
    /// The only item, if there is one, was read.
    Ended,
}

/// Methods return `None` where the machine must read the item.
impl<'p, 'a> Cursor<'p, 'a> {
    pub(in crate::publish) fn new(pickle: &'p mut Pickle, input: &'a [u8], at: usize) -> Self {
        Self { pickle, input, at }
    }

    /// The state of the stack machine.
    #[inline(always)]
    pub(in crate::publish) fn pickle(&self) -> &Pickle {
        self.pickle
    }

    /// The position of the next instruction, in bytes.
    pub(in crate::publish) fn at(self) -> usize {
        self.at
    }

    /// The code of the next instruction.
    #[inline(always)]
    fn peek(&self) -> Option<u8> {
        self.input.get(self.at).copied()
    }

    /// The next `N` bytes, which the cursor then leaves behind.
    #[inline(always)]
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let bytes = self.input.get(self.at..)?.first_chunk::<N>()?;
        self.at += N;
        Some(*bytes)
    }

    /// Skips this instruction; returns whether it was next.
    #[inline(always)]
    fn skip(&mut self, code: u8) -> bool {
        if self.peek() != Some(code) {
            return false;
        }
        self.at += 1;
        true
    }

    /// The beginning of a dict with items.
    #[inline(always)]
    pub(in crate::publish) fn open_dict(&mut self) -> Option<()> {
        if !self.skip(op::EMPTY_DICT) {
            return None;
        }
        self.remember(Cell::Taken)?;
        self.skip(op::MARK).then_some(())
    }

    /// Skips this key; returns whether it was next.
    #[inline(always)]
    pub(in crate::publish) fn skip_key(&mut self, key: Recall) -> bool {
        let next = self.input.get(self.at..).and_then(<[u8]>::first_chunk);
        let found = next.is_some_and(|&next| u16::from_le_bytes(next) == key.0);
        if found {
            self.at += 2;
        }
        found
    }

    /// The next key of the item, which is a dict, and the bytes to skip where the same key occurs again;
    /// `Some(None)` at the end.
    #[inline(always)]
    pub(in crate::publish) fn key(&mut self) -> Option<Option<(Span, Recall)>> {
        if self.skip(op::SETITEMS) {
            // Anything else could still change the dict.
            let ended = matches!(self.peek(), Some(op::EMPTY_DICT | op::APPENDS));
            return ended.then_some(None);
        }
        let here = self.at;
        let Cell::Text(span) = self.value()? else {
            return None;
        };
        let recall = match self.input[here..self.at] {
            [op::BINGET, slot] => Recall(u16::from_le_bytes([op::BINGET, slot])),
            _ => Recall::NEVER,
        };
        Some(Some((span, recall)))
    }

    /// Whether a list begins here.
    #[inline(always)]
    pub(in crate::publish) fn is_at_list(&self) -> bool {
        self.peek() == Some(op::EMPTY_LIST)
    }

    /// The next value, if it is not a container or is recalled from the memo.
    #[inline(always)]
    pub(in crate::publish) fn value(&mut self) -> Option<Cell> {
        let [code] = self.take()?;
        Some(match code {
            op::BINGET => {
                let [slot] = self.take()?;
                return self.recall(slot.into());
            }
            op::LONG_BINGET => {
                let slot = u32::from_le_bytes(self.take()?);
                return self.recall(slot as usize);
            }
            op::BININT1 => {
                let [value] = self.take()?;
                Cell::Int(value.into())
            }
            op::BININT2 => Cell::Int(u16::from_le_bytes(self.take()?).into()),
            op::BININT => Cell::Int(i32::from_le_bytes(self.take()?).into()),
            // The value is a time; numbers of other lengths are rare.
            op::LONG1 => {
                let [8, value @ ..] = self.take::<9>()? else {
                    return None;
                };
                Cell::Int(i64::from_le_bytes(value))
            }
            op::BINFLOAT => Cell::Float(u64::from_be_bytes(self.take()?)),
            op::NONE => Cell::None,
            op::NEWTRUE => Cell::True,
            op::NEWFALSE => Cell::False,
            op::BINUNICODE => {
                let span = self.span()?;
                self.remember(Cell::Text(span))?;
                Cell::Text(span)
            }
            _ => return None,
        })
    }

    /// The value in this slot of the memo; `None` if there is none or it was not kept.
    #[inline(always)]
    fn recall(&self, slot: usize) -> Option<Cell> {
        match self.pickle.memo.get(slot) {
            None | Some(Cell::Unset | Cell::Taken) => None,
            Some(&cell) => Some(cell),
        }
    }

    /// A string that begins with its length in four bytes.
    #[inline(always)]
    fn span(&mut self) -> Option<Span> {
        let len = u32::from_le_bytes(self.take()?);
        let start = self.at as u32;
        self.input.get(self.at..)?.get(..len as usize)?;
        self.at += len as usize;
        Some(Span::new(start, len))
    }

    /// Memoizes `cell` if the next instruction does; returns whether it does.
    #[inline(always)]
    fn remember(&mut self, cell: Cell) -> Option<bool> {
        match self.peek() {
            Some(op::BINPUT | op::LONG_BINPUT | op::MEMOIZE) => {
                self.at = remember(self.pickle, self.input, self.at, cell)?;
                Some(true)
            }
            _ => Some(false),
        }
    }

    /// Two values as a tuple.
    #[inline(always)]
    pub(in crate::publish) fn pair(&mut self) -> Option<[Cell; 2]> {
        let pair = [self.value()?, self.value()?];
        if !self.skip(op::TUPLE2) {
            return None;
        }
        let id = self.pickle.containers.len() as u64;
        if self.remember(Cell::List(id))? {
            self.pickle.items.extend_from_slice(&pair);
            self.pickle.container(pair.len(), self.at).ok()?;
        }
        Some(pair)
    }

    /// The beginning of a list.
    #[inline(always)]
    pub(in crate::publish) fn open_list(&mut self) -> Option<List> {
        if !self.skip(op::EMPTY_LIST) {
            return None;
        }
        let id = self.pickle.containers.len() as u64;
        let kept = self.remember(Cell::List(id))?;
        if kept {
            self.pickle.container(0, self.at).ok()?;
        }
        Some(List {
            kept: kept.then_some(id),
            from: self.pickle.stack.len(),
            form: if self.skip(op::MARK) {
                Form::Marked
            } else {
                Form::Single
            },
        })
    }

    /// The next item of the list that was opened last, unless the item is itself a list; `Some(None)` at the end
    /// of the list.
    #[inline(always)]
    pub(in crate::publish) fn item(&mut self, list: &mut List) -> Option<Option<Cell>> {
        let cell = match list.form {
            Form::Marked if self.skip(op::APPENDS) => None,
            Form::Marked => Some(self.value()?),
            Form::Single => {
                list.form = Form::Ended;
                self.single_item()
            }
            Form::Ended => None,
        };
        if let Some(id) = list.kept {
            match cell {
                Some(cell) => self.pickle.push(cell, self.at).ok()?,
                None => self.pickle.fill(id, list.from, self.at).ok()?,
            }
        }
        Some(cell)
    }

    /// A value that APPEND follows is the only item of its list. Without APPEND the list is empty, and the value is not
    /// an item of it.
    #[inline(always)]
    fn single_item(&mut self) -> Option<Cell> {
        let (at, memo) = (self.at, self.pickle.memo.len());
        match self.value() {
            Some(cell) if self.skip(op::APPEND) => Some(cell),
            _ => {
                self.at = at;
                self.pickle.memo.truncate(memo);
                None
            }
        }
    }

    /// Opens a list that is the next item of `list`.
    #[inline(always)]
    pub(in crate::publish) fn open_item(&mut self, list: &List) -> Option<List> {
        match list.form {
            Form::Marked | Form::Single => self.open_list(),
            Form::Ended => None,
        }
    }

    /// Ends `inner`, of which the last item was read, as an item of `list`.
    #[inline(always)]
    pub(in crate::publish) fn close_item(&mut self, list: &mut List, inner: &List) -> Option<()> {
        if let Form::Single = list.form {
            list.form = Form::Ended;
            if !self.skip(op::APPEND) {
                return None;
            }
        }
        if list.kept.is_some() {
            // A list that is not kept would be missing from the list that the memo holds.
            let inner = Cell::List(inner.kept?);
            self.pickle.push(inner, self.at).ok()?;
        }
        Some(())
    }
}

/// Executes the memoizing instruction at `at` for `cell` and returns the next position. Picklers number memo slots
/// from 0 without gaps; `None` for any other number.
fn remember(pickle: &mut Pickle, input: &[u8], at: usize, cell: Cell) -> Option<usize> {
    let mut cursor = Cursor::new(pickle, input, at);
    let slot = match cursor.take()? {
        [op::BINPUT] => {
            let [slot] = cursor.take()?;
            slot.into()
        }
        [op::LONG_BINPUT] => u32::from_le_bytes(cursor.take()?) as usize,
        _ => cursor.pickle.memo.len(),
    };
    if slot != cursor.pickle.memo.len() {
        return None;
    }
    cursor.pickle.note(slot, cell, at).ok()?;
    Some(cursor.at)
}
