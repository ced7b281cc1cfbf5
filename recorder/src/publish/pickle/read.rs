//! Runs the instructions of a pickle that build plain data.

use super::cell::{Cell, Fault, Span};
use super::graph::{Filling, Pickle};
use super::opcode as op;
use super::take::Taker;

/// A value that is never a height of the stack.
const NOWHERE: u32 = u32::MAX;

impl Pickle {
    /// Decodes `input` and returns its value.
    ///
    /// On a fault the value holds what was read by then; [`Pickle::is_incomplete`] marks the containers that were
    /// still open. `None` if there is no value. Items that `taker` took are no longer in their list.
    pub(in crate::publish) fn read(
        &mut self,
        input: &[u8],
        taker: &mut impl Taker,
    ) -> (Option<Cell>, Option<Fault>) {
        self.clear();
        match self.run(input, taker) {
            Ok(root) => (Some(root), None),
            Err(fault) => (self.close_open_containers(), Some(fault)),
        }
    }

    /// Executes the instructions up to STOP and returns the value.
    fn run(&mut self, input: &[u8], taker: &mut impl Taker) -> Result<Cell, Fault> {
        let mut at = 0;
        // The stack height at which the taker's items begin.
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
                    // Any other instruction could still add to this dict.
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
                            what: "an end at which not exactly one value is left",
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

    /// Puts a string of `len` bytes on the stack, and moves `at` past it.
    fn text(&mut self, input: &[u8], at: &mut usize, len: usize) -> Result<(), Fault> {
        let start = *at;
        take_slice(input, at, len)?;
        // The caller admits no input of 4 GiB or more, so both fit.
        let span = Span::new(start as u32, len as u32);
        self.push(Cell::Text(span), start)
    }

    /// Puts the value in this slot of the memo on the stack.
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

    /// Stores the top of the stack in this slot of the memo.
    fn remember(&mut self, slot: usize, at: usize) -> Result<(), Fault> {
        let &cell = self.stack.last().ok_or(Fault::Damaged {
            what: "no value to memoize",
            at,
        })?;
        self.note(slot, cell, at)
    }

    /// The height of the stack at the last MARK; closes that MARK.
    fn marked(&mut self, at: usize) -> Result<usize, Fault> {
        let from = self.marks.pop().ok_or(Fault::Damaged {
            what: "the end of a list, tuple or dict that was never started",
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
}

/// The next `N` bytes; moves `at` past them.
fn take<const N: usize>(input: &[u8], at: &mut usize) -> Result<[u8; N], Fault> {
    let rest = input.get(*at..).unwrap_or_default();
    let bytes = rest
        .first_chunk::<N>()
        .ok_or(Fault::Cut { at: input.len() })?;
    *at += N;
    Ok(*bytes)
}

/// The next `len` bytes; moves `at` past them.
fn take_slice<'a>(input: &'a [u8], at: &mut usize, len: usize) -> Result<&'a [u8], Fault> {
    let bytes = input
        .get(*at..)
        .and_then(|rest| rest.get(..len))
        .ok_or(Fault::Cut { at: input.len() })?;
    *at += len;
    Ok(bytes)
}

/// Little-endian two's complement of any length; the nearest 64-bit value if it does not fit.
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
