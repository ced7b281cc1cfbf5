//! Reads and writes pickles of plain data, without executing them.
//!
//! A pickle is a program for a stack machine, and some of its instructions call arbitrary functions.
//! This reader implements the instructions that build numbers, strings, lists, tuples and dicts. It refuses by name
//! those that build or call objects or fetch something from outside, and takes any other instruction for damage. It
//! does not recurse: a value is a [`Cell`], containers live in flat tables, and a memoized value is one number however
//! often it appears. Memory is therefore bounded by a small multiple of the input's length.
//!
//! One list may be long: its items are passed on as they are read ([`Taker`]), and items of the usual form
//! are read in place ([`Cursor`]), without the stack.
//!
//! The writer emits protocol 2 with the same instructions.
//!
//! The meaning of keys is defined in `dialect`.

mod cell;
mod cursor;
mod graph;
mod read;
mod take;
mod write;

pub(super) use cell::{Cell, Fault, Span};
pub(super) use cursor::{Cursor, Recall};
pub(super) use graph::Pickle;
pub(super) use take::Taker;
pub(super) use write::PickleWriter;

/// The instructions of protocols 2 to 5 that plain data needs. The values are fixed by Python's
/// `pickletools`.
mod opcode {
    pub(super) const MARK: u8 = b'(';
    pub(super) const STOP: u8 = b'.';
    pub(super) const BINFLOAT: u8 = b'G';
    pub(super) const BININT: u8 = b'J';
    pub(super) const BININT1: u8 = b'K';
    pub(super) const BININT2: u8 = b'M';
    pub(super) const NONE: u8 = b'N';
    pub(super) const BINUNICODE: u8 = b'X';
    pub(super) const EMPTY_LIST: u8 = b']';
    pub(super) const APPEND: u8 = b'a';
    pub(super) const APPENDS: u8 = b'e';
    pub(super) const BINGET: u8 = b'h';
    pub(super) const LONG_BINGET: u8 = b'j';
    pub(super) const BINPUT: u8 = b'q';
    pub(super) const LONG_BINPUT: u8 = b'r';
    pub(super) const SETITEM: u8 = b's';
    pub(super) const SETITEMS: u8 = b'u';
    pub(super) const TUPLE: u8 = b't';
    pub(super) const EMPTY_TUPLE: u8 = b')';
    pub(super) const EMPTY_DICT: u8 = b'}';
    pub(super) const PROTO: u8 = 0x80;
    pub(super) const TUPLE1: u8 = 0x85;
    pub(super) const TUPLE2: u8 = 0x86;
    pub(super) const TUPLE3: u8 = 0x87;
    pub(super) const NEWTRUE: u8 = 0x88;
    pub(super) const NEWFALSE: u8 = 0x89;
    pub(super) const LONG1: u8 = 0x8a;
    pub(super) const LONG4: u8 = 0x8b;
    pub(super) const SHORT_BINUNICODE: u8 = 0x8c;
    pub(super) const BINUNICODE8: u8 = 0x8d;
    pub(super) const MEMOIZE: u8 = 0x94;
    pub(super) const FRAME: u8 = 0x95;

    /// The name of an instruction that builds or calls objects, or fetches something from outside.
    pub(super) const fn refused(code: u8) -> Option<&'static str> {
        Some(match code {
            b'c' => "GLOBAL",
            b'R' => "REDUCE",
            b'b' => "BUILD",
            b'i' => "INST",
            b'o' => "OBJ",
            b'P' => "PERSID",
            b'Q' => "BINPERSID",
            0x81 => "NEWOBJ",
            0x82 => "EXT1",
            0x83 => "EXT2",
            0x84 => "EXT4",
            0x92 => "NEWOBJ_EX",
            0x93 => "STACK_GLOBAL",
            0x97 => "NEXT_BUFFER",
            0x98 => "READONLY_BUFFER",
            _ => return None,
        })
    }
}
