//! Writes values as a pickle of protocol 2.

use super::opcode as op;
use std::collections::HashMap;

/// Writes one value, instruction by instruction, in the order in which a reader executes them.
///
/// Strings are written once and referred to afterwards, as other writers do; the caller may do the
/// same with containers by [`PickleWriter::remember`].
pub(in crate::publish) struct PickleWriter {
    bytes: Vec<u8>,
    strings: HashMap<String, u32>,
    next_memo: u32,
}

impl PickleWriter {
    pub(in crate::publish) fn new() -> Self {
        Self {
            bytes: vec![op::PROTO, 2],
            strings: HashMap::new(),
            next_memo: 0,
        }
    }

    /// The finished pickle; exactly one value must have been written.
    pub(in crate::publish) fn finish(mut self) -> Vec<u8> {
        self.bytes.push(op::STOP);
        self.bytes
    }

    pub(in crate::publish) fn none(&mut self) {
        self.bytes.push(op::NONE);
    }

    pub(in crate::publish) fn bool(&mut self, value: bool) {
        self.bytes
            .push(if value { op::NEWTRUE } else { op::NEWFALSE });
    }

    /// Writes an integer in one, two or four bytes if it fits, otherwise in eight.
    pub(in crate::publish) fn int(&mut self, value: i64) {
        if let Ok(byte) = u8::try_from(value) {
            self.bytes.extend([op::BININT1, byte]);
        } else if let Ok(short) = u16::try_from(value) {
            self.bytes.push(op::BININT2);
            self.bytes.extend(short.to_le_bytes());
        } else if let Ok(int) = i32::try_from(value) {
            self.bytes.push(op::BININT);
            self.bytes.extend(int.to_le_bytes());
        } else {
            self.bytes.extend([op::LONG1, 8]);
            self.bytes.extend(value.to_le_bytes());
        }
    }

    /// Writes an integer that may need all 64 bits without a sign.
    pub(in crate::publish) fn uint(&mut self, value: u64) {
        match i64::try_from(value) {
            Ok(value) => self.int(value),
            Err(_) => {
                // A ninth byte keeps the sign positive.
                self.bytes.extend([op::LONG1, 9]);
                self.bytes.extend(value.to_le_bytes());
                self.bytes.push(0);
            }
        }
    }

    pub(in crate::publish) fn float(&mut self, value: f64) {
        self.bytes.push(op::BINFLOAT);
        self.bytes.extend(value.to_be_bytes());
    }

    /// Writes a string. The instruction's length has 32 bits, so the rest of a longer string is left out.
    pub(in crate::publish) fn text(&mut self, text: &str) {
        if let Some(&memo) = self.strings.get(text) {
            self.recall(memo);
            return;
        }
        let kept = &text[..text.floor_char_boundary(u32::MAX as usize)];
        self.bytes.push(op::BINUNICODE);
        self.bytes.extend((kept.len() as u32).to_le_bytes());
        self.bytes.extend(kept.as_bytes());
        let memo = self.remember();
        self.strings.insert(text.to_owned(), memo);
    }

    /// Gives the value just written a number, by which [`PickleWriter::recall`] repeats it.
    pub(in crate::publish) fn remember(&mut self) -> u32 {
        let memo = self.next_memo;
        self.next_memo += 1;
        match u8::try_from(memo) {
            Ok(byte) => self.bytes.extend([op::BINPUT, byte]),
            Err(_) => {
                self.bytes.push(op::LONG_BINPUT);
                self.bytes.extend(memo.to_le_bytes());
            }
        }
        memo
    }

    /// Writes the remembered value again, as the same object.
    pub(in crate::publish) fn recall(&mut self, memo: u32) {
        match u8::try_from(memo) {
            Ok(byte) => self.bytes.extend([op::BINGET, byte]),
            Err(_) => {
                self.bytes.push(op::LONG_BINGET);
                self.bytes.extend(memo.to_le_bytes());
            }
        }
    }

    /// Begins a list: the values until [`PickleWriter::close_list`] are its items.
    pub(in crate::publish) fn open_list(&mut self) {
        self.bytes.extend([op::EMPTY_LIST, op::MARK]);
    }

    pub(in crate::publish) fn close_list(&mut self) {
        self.bytes.push(op::APPENDS);
    }

    /// Begins a dict: the values until [`PickleWriter::close_dict`] are keys and values in turn.
    pub(in crate::publish) fn open_dict(&mut self) {
        self.bytes.extend([op::EMPTY_DICT, op::MARK]);
    }

    pub(in crate::publish) fn close_dict(&mut self) {
        self.bytes.push(op::SETITEMS);
    }

    /// Makes a tuple of the last two values.
    pub(in crate::publish) fn close_pair(&mut self) {
        self.bytes.push(op::TUPLE2);
    }
}
