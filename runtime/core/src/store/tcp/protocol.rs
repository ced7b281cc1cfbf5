//! The wire protocol of PyTorch's TCPStore (as of 2.15), for both ends.
//!
//! A request is one opcode byte and its fields; nothing frames it, and the next one follows at once. Integers are
//! little-endian, a string is its `u64` length and its bytes. Replies are sent in the order of the requests, except
//! that the reply to a WAIT or BARRIER may be sent later. The protocol has no error replies: the server closes the
//! connection of a client that breaks a rule. rcomm adds the requests HELLO and PROOF
//! ([`StoreCaller`](rcomm_recorder::publish::StoreCaller)). A client that uses them, or that should have used them, or
//! whose use of TLS is not the server's, gets the reason before its connection is closed
//! ([`STORE_REFUSAL`](rcomm_recorder::publish::STORE_REFUSAL)).
//!
//! [`Scanner`] finds the end of a request in bytes that arrive in any pieces, [`Request`] reads it, and
//! [`Encoder`](super::encoder::Encoder) writes one. None of them does I/O.

use crate::store::table::AddError;
use rcomm_recorder::publish::{STORE_TAKES_TLS, StoreOpCode};

/// The magic number that VALIDATE carries.
pub(super) const MAGIC: u32 = 0x3C85_F7CE;
/// The longest key, in bytes.
pub(super) const MAX_KEY: u64 = 8192;
/// The longest value, in bytes.
pub(super) const MAX_VALUE: u64 = 8 << 20;
/// The most keys in one CHECK, WAIT, MULTI_GET or MULTI_SET.
pub(super) const MAX_KEYS: u64 = 131_072;
/// The longest request, and the longest reply to MULTI_GET, in bytes. PyTorch has no such limit, but [`MAX_KEYS`]
/// values of [`MAX_VALUE`] bytes are a terabyte.
pub(super) const MAX_MESSAGE: usize = 256 << 20;
/// The reply to WAIT and BARRIER, and to a PROOF that is right.
pub(super) const STOP_WAITING: u8 = 0;
/// The reply to CANCEL_WAIT.
pub(super) const WAIT_CANCELED: u8 = 1;

/// The first byte of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum OpCode {
    Validate = 0x00,
    Set = 0x01,
    CompareSet = 0x02,
    Get = 0x03,
    Add = 0x04,
    Check = 0x05,
    Wait = 0x06,
    GetNumKeys = 0x07,
    DeleteKey = 0x08,
    Append = 0x09,
    MultiGet = 0x0A,
    MultiSet = 0x0B,
    CancelWait = 0x0C,
    Ping = 0x0D,
    QueuePush = 0x0E,
    QueuePop = 0x0F,
    QueueLen = 0x10,
    ListKeys = 0x11,
    Barrier = 0x12,
    Hello = StoreOpCode::Hello as u8,
    Proof = StoreOpCode::Proof as u8,
}

const OPCODES: [OpCode; 21] = [
    OpCode::Validate,
    OpCode::Set,
    OpCode::CompareSet,
    OpCode::Get,
    OpCode::Add,
    OpCode::Check,
    OpCode::Wait,
    OpCode::GetNumKeys,
    OpCode::DeleteKey,
    OpCode::Append,
    OpCode::MultiGet,
    OpCode::MultiSet,
    OpCode::CancelWait,
    OpCode::Ping,
    OpCode::QueuePush,
    OpCode::QueuePop,
    OpCode::QueueLen,
    OpCode::ListKeys,
    OpCode::Barrier,
    OpCode::Hello,
    OpCode::Proof,
];

/// One field of a request, as needed to find its end.
#[derive(Clone, Copy)]
enum Field {
    Key,
    Value,
    /// This many bytes.
    Bytes(usize),
    /// A count, then as many keys.
    Keys,
    /// A count, then as many pairs of key and value.
    Pairs,
}

impl OpCode {
    /// The opcode with this number.
    pub(super) fn of(code: u8) -> Option<Self> {
        // PyTorch's opcodes are numbered without a gap, and come first in the table.
        let candidate = OPCODES
            .get(usize::from(code))
            .filter(|op| **op as u8 == code);
        let found = candidate.or_else(|| OPCODES.iter().find(|op| **op as u8 == code));
        found.copied()
    }

    fn fields(self) -> &'static [Field] {
        use Field::{Bytes, Key, Keys, Pairs, Value};
        match self {
            OpCode::Validate | OpCode::Ping => &[Bytes(4)],
            OpCode::Hello | OpCode::Proof => &[Bytes(32)],
            OpCode::Set | OpCode::Append | OpCode::QueuePush => &[Key, Value],
            OpCode::CompareSet => &[Key, Value, Value],
            OpCode::Get | OpCode::DeleteKey | OpCode::QueuePop | OpCode::QueueLen => &[Key],
            OpCode::Add | OpCode::Barrier => &[Key, Bytes(8)],
            OpCode::Check | OpCode::Wait | OpCode::MultiGet => &[Keys],
            OpCode::MultiSet => &[Pairs],
            OpCode::GetNumKeys | OpCode::CancelWait | OpCode::ListKeys => &[],
        }
    }
}

/// Why a server closes a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Violation {
    #[error("its first request was not VALIDATE")]
    NotValidated,
    #[error("VALIDATE carried {0:#010x} instead of {MAGIC:#010x}")]
    WrongMagic(u32),
    #[error("it sent VALIDATE a second time")]
    ValidatedTwice,
    #[error("there is no opcode {0:#04x}")]
    UnknownOpCode(u8),
    #[error("a key of {0} bytes is above the limit of {MAX_KEY}")]
    KeyTooLong(u64),
    #[error("a value of {0} bytes is above the limit of {MAX_VALUE}")]
    ValueTooLong(u64),
    #[error("{0} keys in one request are above the limit of {MAX_KEYS}")]
    TooManyKeys(u64),
    #[error("a request is above the limit of {MAX_MESSAGE} bytes")]
    RequestTooLong,
    #[error("a reply would be above the limit of {MAX_MESSAGE} bytes")]
    ReplyTooLong,
    #[error("it added to a key that cannot be added to: {0}")]
    CannotAdd(AddError),
    #[error("it sent WAIT or BARRIER while another was pending")]
    WaitsTwice,
    #[error("this store takes requests only from those who prove the job's secret")]
    NotProved,
    #[error("{STORE_TAKES_TLS}")]
    NeedsTls,
    #[error("this store does not use TLS")]
    NoTlsHere,
    #[error("its proof of the job's secret is wrong")]
    WrongProof,
    #[error("this store is open: it has no secret to compare with")]
    NoSecretHere,
    #[error("it sent a proof out of turn")]
    ProofOutOfTurn,
    #[error("the system's random source cannot be read")]
    NoRandomness,
    #[error(
        "the store holds {held} bytes in keys, values and waits, and {more} more are above the limit of {limit}"
    )]
    StoreFull {
        held: usize,
        more: usize,
        limit: usize,
    },
    #[error("the store holds {0} keys, which is the limit")]
    TooManyStoredKeys(usize),
    #[error("the value would grow to {0} bytes, above the limit of {MAX_VALUE}")]
    ValueGrowsTooLong(usize),
    #[error("unfinished requests hold {0} bytes, above the limit of {1}")]
    TooManyUnfinishedBytes(usize, usize),
    #[error("{0} connections of its host have unfinished requests, which is the limit")]
    TooManyUnfinished(usize),
    #[error("replies that were not read hold {0} bytes, above the limit of {1}")]
    TooManyUnreadBytes(usize, usize),
    #[error("a request was not finished within {0} s of its first byte")]
    TooSlow(u64),
}

/// Finds where a request ends, looking at each length field once however the bytes arrive.
#[derive(Debug, Default)]
pub(super) struct Scanner {
    op: Option<OpCode>,
    /// The index of the next field.
    field: u8,
    /// Within `Keys` or `Pairs`: how many strings are left, once the count was read.
    strings: Option<u32>,
    /// The offset in the request of the next length or count to read.
    offset: usize,
}

impl Scanner {
    /// Continues in `request`: the bytes from the request's first one on, of which earlier calls may have
    /// seen a part. Returns its length once all of it is there, and is then ready for the next request.
    pub(super) fn advance(&mut self, request: &[u8]) -> Result<Option<usize>, Violation> {
        let op = match self.op {
            Some(op) => op,
            None => {
                let Some(&code) = request.first() else {
                    return Ok(None);
                };
                let op = OpCode::of(code).ok_or(Violation::UnknownOpCode(code))?;
                self.op = Some(op);
                self.offset = 1;
                op
            }
        };
        while let Some(field) = op.fields().get(usize::from(self.field)) {
            let done = match field {
                Field::Key => self.skip_key(request)?,
                Field::Value => self.skip_value(request)?,
                Field::Bytes(length) => {
                    self.offset += length;
                    true
                }
                Field::Keys => self.skip_strings(request, 1)?,
                Field::Pairs => self.skip_strings(request, 2)?,
            };
            if !done {
                return Ok(None);
            }
            self.field += 1;
        }
        if self.offset > request.len() {
            return Ok(None);
        }
        let length = self.offset;
        *self = Self::default();
        Ok(Some(length))
    }

    fn skip_key(&mut self, request: &[u8]) -> Result<bool, Violation> {
        self.skip_string(request, MAX_KEY, Violation::KeyTooLong)
    }

    fn skip_value(&mut self, request: &[u8]) -> Result<bool, Violation> {
        self.skip_string(request, MAX_VALUE, Violation::ValueTooLong)
    }

    /// Moves past a string, if its length has arrived; returns whether it had.
    fn skip_string(
        &mut self,
        request: &[u8],
        limit: u64,
        too_long: fn(u64) -> Violation,
    ) -> Result<bool, Violation> {
        let Some(length) = number(request, self.offset) else {
            return Ok(false);
        };
        if length > limit {
            return Err(too_long(length));
        }
        self.offset += 8 + length as usize;
        if self.offset > MAX_MESSAGE {
            return Err(Violation::RequestTooLong);
        }
        Ok(true)
    }

    /// Moves past a count and as many keys, or pairs if `per_key` is 2; returns whether their lengths have arrived.
    fn skip_strings(&mut self, request: &[u8], per_key: u32) -> Result<bool, Violation> {
        let mut left = match self.strings {
            Some(left) => left,
            None => {
                let Some(count) = number(request, self.offset) else {
                    return Ok(false);
                };
                if count > MAX_KEYS {
                    return Err(Violation::TooManyKeys(count));
                }
                self.offset += 8;
                count as u32 * per_key
            }
        };
        while left > 0 {
            // The next string is the key of a pair if an even number of strings is left.
            let is_value = per_key == 2 && left % 2 == 1;
            self.strings = Some(left);
            let done = match is_value {
                true => self.skip_value(request)?,
                false => self.skip_key(request)?,
            };
            if !done {
                return Ok(false);
            }
            left -= 1;
        }
        self.strings = None;
        Ok(true)
    }
}

/// The `u64` at `offset`, if its bytes are there.
fn number(bytes: &[u8], offset: usize) -> Option<u64> {
    let bytes = bytes.get(offset..)?.first_chunk()?;
    Some(u64::from_le_bytes(*bytes))
}

/// One request, read from bytes that a [`Scanner`] found complete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Request<'a> {
    Validate(u32),
    Set(&'a [u8], &'a [u8]),
    CompareSet {
        key: &'a [u8],
        expected: &'a [u8],
        desired: &'a [u8],
    },
    Get(&'a [u8]),
    Add(&'a [u8], i64),
    Check(Strings<'a>),
    Wait(Strings<'a>),
    GetNumKeys,
    DeleteKey(&'a [u8]),
    Append(&'a [u8], &'a [u8]),
    MultiGet(Strings<'a>),
    /// Keys and values in turn.
    MultiSet(Strings<'a>),
    CancelWait,
    Ping([u8; 4]),
    QueuePush(&'a [u8], &'a [u8]),
    QueuePop(&'a [u8]),
    QueueLen(&'a [u8]),
    ListKeys,
    Barrier(&'a [u8], i64),
    Hello([u8; 32]),
    Proof([u8; 32]),
}

impl<'a> Request<'a> {
    /// Reads `frame`, which is exactly one request; `None` if it is not.
    pub(super) fn decode(frame: &'a [u8]) -> Option<Self> {
        let (&code, mut rest) = frame.split_first()?;
        let rest = &mut rest;
        let request = match OpCode::of(code)? {
            OpCode::Validate => Request::Validate(u32::from_le_bytes(take(rest)?)),
            OpCode::Set => Request::Set(string(rest)?, string(rest)?),
            OpCode::CompareSet => Request::CompareSet {
                key: string(rest)?,
                expected: string(rest)?,
                desired: string(rest)?,
            },
            OpCode::Get => Request::Get(string(rest)?),
            OpCode::Add => Request::Add(string(rest)?, i64::from_le_bytes(take(rest)?)),
            OpCode::Check => Request::Check(Strings::counted(rest)?),
            OpCode::Wait => Request::Wait(Strings::counted(rest)?),
            OpCode::GetNumKeys => Request::GetNumKeys,
            OpCode::DeleteKey => Request::DeleteKey(string(rest)?),
            OpCode::Append => Request::Append(string(rest)?, string(rest)?),
            OpCode::MultiGet => Request::MultiGet(Strings::counted(rest)?),
            OpCode::MultiSet => Request::MultiSet(Strings::counted(rest)?),
            OpCode::CancelWait => Request::CancelWait,
            OpCode::Ping => Request::Ping(take(rest)?),
            OpCode::QueuePush => Request::QueuePush(string(rest)?, string(rest)?),
            OpCode::QueuePop => Request::QueuePop(string(rest)?),
            OpCode::QueueLen => Request::QueueLen(string(rest)?),
            OpCode::ListKeys => Request::ListKeys,
            OpCode::Barrier => Request::Barrier(string(rest)?, i64::from_le_bytes(take(rest)?)),
            OpCode::Hello => Request::Hello(take(rest)?),
            OpCode::Proof => Request::Proof(take(rest)?),
        };
        rest.is_empty().then_some(request)
    }
}

fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (bytes, after) = rest.split_first_chunk()?;
    *rest = after;
    Some(*bytes)
}

fn string<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let length = usize::try_from(u64::from_le_bytes(take(rest)?)).ok()?;
    let (string, after) = rest.split_at_checked(length)?;
    *rest = after;
    Some(string)
}

/// The strings of a request with a count, read one by one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Strings<'a>(&'a [u8]);

impl<'a> Strings<'a> {
    /// Takes all bytes after the count: the strings are the last field of their requests.
    fn counted(rest: &mut &'a [u8]) -> Option<Self> {
        let _: [u8; 8] = take(rest)?;
        Some(Self(std::mem::take(rest)))
    }
}

impl<'a> Iterator for Strings<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        string(&mut self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::super::encoder::Encoder;
    use super::*;
    use proptest::prelude::*;

    fn keys(names: &[&str]) -> Vec<Vec<u8>> {
        names.iter().map(|name| name.as_bytes().to_vec()).collect()
    }

    /// One request of every kind.
    fn every_request() -> Vec<Vec<u8>> {
        let encoder = Encoder::default;
        OPCODES
            .iter()
            .map(|&op| {
                let encoder = encoder().op(op);
                let encoder = match op {
                    OpCode::Validate => encoder.u32(MAGIC),
                    OpCode::Ping => encoder.u32(7),
                    OpCode::Hello | OpCode::Proof => {
                        (0..8).fold(encoder, |encoder, n| encoder.u32(n))
                    }
                    OpCode::Set | OpCode::Append | OpCode::QueuePush => {
                        encoder.string(b"/k").string(b"value")
                    }
                    OpCode::CompareSet => encoder.string(b"/k").string(b"").string(b"new"),
                    OpCode::Get | OpCode::DeleteKey | OpCode::QueuePop | OpCode::QueueLen => {
                        encoder.string(b"/key")
                    }
                    OpCode::Add | OpCode::Barrier => encoder.string(b"").i64(-3),
                    OpCode::Check | OpCode::Wait => encoder.strings(&keys(&["/a", "", "/ccc"])),
                    OpCode::MultiGet => encoder.strings(&[]),
                    OpCode::MultiSet => encoder
                        .i64(2)
                        .string(b"/a")
                        .string(b"1")
                        .string(b"/b")
                        .string(b""),
                    OpCode::GetNumKeys | OpCode::CancelWait | OpCode::ListKeys => encoder,
                };
                encoder.bytes().to_vec()
            })
            .collect()
    }

    /// Cuts `stream` into requests, with `pieces` as the lengths in which it arrives.
    fn cut(stream: &[u8], pieces: &[usize]) -> Result<Vec<Vec<u8>>, Violation> {
        let mut scanner = Scanner::default();
        let mut requests = Vec::new();
        let (mut start, mut end) = (0, 0);
        let mut pieces = pieces.iter().cycle();
        while end < stream.len() {
            end = stream.len().min(end + pieces.next().map_or(1, |n| 1 + n));
            while let Some(length) = scanner.advance(&stream[start..end])? {
                requests.push(stream[start..start + length].to_vec());
                start += length;
            }
        }
        Ok(requests)
    }

    #[test]
    fn every_request_is_found_and_read_in_any_pieces() {
        let requests = every_request();
        let stream = requests.concat();
        for piece in 0..64 {
            assert_eq!(cut(&stream, &[piece]).unwrap(), requests);
        }
        for (request, op) in requests.iter().zip(OPCODES) {
            assert!(Request::decode(request).is_some(), "{op:?}");
        }
    }

    #[test]
    fn opcode_of_finds_exactly_the_numbers_of_the_table() {
        for code in 0..=u8::MAX {
            let expected = OPCODES.iter().find(|op| **op as u8 == code);
            assert_eq!(OpCode::of(code), expected.copied());
        }
    }

    #[test]
    fn a_length_above_its_limit_is_refused_as_soon_as_it_is_read() {
        let claim = |op: OpCode, number: u64| {
            let mut request = vec![op as u8];
            request.extend_from_slice(&number.to_le_bytes());
            Scanner::default().advance(&request)
        };
        assert_eq!(claim(OpCode::Get, MAX_KEY), Ok(None));
        assert_eq!(
            claim(OpCode::Get, MAX_KEY + 1),
            Err(Violation::KeyTooLong(MAX_KEY + 1))
        );
        assert_eq!(claim(OpCode::Wait, MAX_KEYS), Ok(None));
        for op in [
            OpCode::Check,
            OpCode::Wait,
            OpCode::MultiGet,
            OpCode::MultiSet,
        ] {
            assert_eq!(claim(op, u64::MAX), Err(Violation::TooManyKeys(u64::MAX)));
        }
        let value = Encoder::default().op(OpCode::Set).string(b"k");
        let over = value.i64(MAX_VALUE as i64 + 1).bytes().to_vec();
        assert_eq!(
            Scanner::default().advance(&over),
            Err(Violation::ValueTooLong(MAX_VALUE + 1))
        );
        assert_eq!(
            Scanner::default().advance(&[0x13]),
            Err(Violation::UnknownOpCode(0x13))
        );
    }

    #[test]
    fn request_of_many_large_values_is_refused_before_it_has_arrived() {
        let pair = [
            1_u64.to_le_bytes().as_slice(),
            b"k",
            MAX_VALUE.to_le_bytes().as_slice(),
            vec![0; MAX_VALUE as usize].as_slice(),
        ]
        .concat();
        let mut request = Encoder::default()
            .op(OpCode::MultiSet)
            .i64(1000)
            .bytes()
            .to_vec();
        let mut scanner = Scanner::default();
        let refused = (0..MAX_MESSAGE / pair.len() + 1).find_map(|_| {
            request.extend_from_slice(&pair);
            scanner.advance(&request).err()
        });
        assert_eq!(refused, Some(Violation::RequestTooLong));
        assert!(request.len() <= MAX_MESSAGE + pair.len());
    }

    proptest! {
        #[test]
        fn any_bytes_are_cut_into_the_same_requests_in_any_pieces(
            stream in prop_oneof![
                proptest::collection::vec(any::<u8>(), 0..200),
                // Small numbers prevail, so that more of the bytes are valid requests.
                proptest::collection::vec(prop_oneof![4 => Just(0_u8), 2 => 0_u8..20, 1 => any::<u8>()], 0..300),
            ],
            pieces in proptest::collection::vec(0_usize..40, 1..20),
        ) {
            let whole = cut(&stream, &[stream.len()]);
            let pieced = cut(&stream, &pieces);
            prop_assert_eq!(&whole, &pieced);
            for request in whole.unwrap_or_default() {
                prop_assert!(Request::decode(&request).is_some());
            }
        }

        #[test]
        fn decode_does_not_panic_on_any_bytes(frame in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = Request::decode(&frame);
        }
    }
}
