//! The cells that a pickle is decoded into.

/// A range of the input: a string's bytes, not yet checked to be UTF-8.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::publish) struct Span(u64);

impl Span {
    /// The empty span.
    pub(in crate::publish) const NOTHING: Self = Self(0);

    pub(super) fn new(start: u32, len: u32) -> Self {
        Self(u64::from(len) << 32 | u64::from(start))
    }

    /// Where the string begins in the input, in bytes.
    pub(in crate::publish) fn start(self) -> u32 {
        self.0 as u32
    }

    /// The bytes of the span.
    pub(in crate::publish) fn bytes_in(self, input: &[u8]) -> &[u8] {
        let len = (self.0 >> 32) as usize;
        &input[self.start() as usize..][..len]
    }
}

/// One value. A container is held by its number; cells with equal numbers refer to the same object.
///
/// Every variant holds 64 bits or nothing, so that a cell fits two registers. A cell passed through memory would be
/// written in two parts and read as one, which stalls the processor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::publish) enum Cell {
    /// An empty memo slot. It is never on the stack or in a container.
    Unset,
    /// In the memo only: an item that a [`Taker`](super::Taker) read in place, of which nothing was kept here.
    Taken,
    None,
    True,
    False,
    /// Integers beyond 64 bits are held at the nearest 64-bit value.
    Int(i64),
    /// The bits of an `f64`.
    Float(u64),
    Text(Span),
    /// A list or a tuple.
    List(u64),
    /// Keys and values in turn.
    Dict(u64),
}

/// Why reading stopped before the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::publish) enum Fault {
    /// The input ends inside an instruction, or without STOP.
    Cut { at: usize },
    /// An instruction that builds or calls objects, or fetches something from outside.
    Refused { opcode: &'static str, at: usize },
    /// Input that is not a valid pickle, or uses an instruction that dumps do not use.
    Damaged { what: &'static str, at: usize },
    /// More values than this reader accepts.
    TooLarge { at: usize },
    /// The rest of the input needs an item that was read in place and not kept: an instruction recalls it from the
    /// memo, or a second list belongs to the same taker. The input must be read again without a taker.
    Taken { at: usize },
}
