//! The description of an operation that each rank sends before data moves, and its comparison.
//!
//! Every collective begins with an exchange of [`OpHeader`]s, or of their signatures, between all ranks. So all
//! ranks detect a disagreement before data is sent that a peer could misread, report it with the same message,
//! and can use the streams between them afterwards.

use rcomm_recorder::model::{DType, OpType, Pattern, ReduceOp};

/// Bytes of a header on the wire.
pub(crate) const OP_HEADER_LEN: usize = 64;
/// Marks a header of this layout. Like all numbers it is little-endian on the wire: the bytes `1ncr`.
const MAGIC: u32 = 0x7263_6e31;
/// The code for no root.
const NONE: u32 = u32::MAX;

/// One rank's view of one collective. Counts are in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OpHeader {
    /// `collective_seq_id`.
    pub(crate) seq: u64,
    pub(crate) op: OpType,
    pub(crate) dtype: DType,
    pub(crate) reduce: Option<ReduceOp>,
    pub(crate) root: Option<u32>,
    /// Index of this buffer in an operation with several buffers, and the number of buffers.
    pub(crate) part: (u32, u32),
    /// The count on which all ranks must agree.
    pub(crate) count: u64,
    /// Count of this rank's own part, if parts differ.
    pub(crate) own_count: u64,
    /// A hash of the lists of counts on which all ranks must agree.
    pub(crate) lists: u64,
    /// Number of bytes that directly follow this header: data, or a list of counts.
    pub(crate) inline: u32,
}

impl OpHeader {
    /// A header of an operation without elements.
    pub(crate) fn new(op: OpType, seq: u64) -> Self {
        Self {
            seq,
            op,
            dtype: DType::U8,
            reduce: None,
            root: None,
            part: (0, 1),
            count: 0,
            own_count: 0,
            lists: 0,
            inline: 0,
        }
    }

    pub(crate) fn encode(&self) -> [u8; OP_HEADER_LEN] {
        let mut bytes = [0; OP_HEADER_LEN];
        bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.inline.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.seq.to_le_bytes());
        bytes[16] = self.op.code();
        bytes[17] = self.dtype.code();
        bytes[18] = self.reduce.map_or(u8::MAX, ReduceOp::code);
        bytes[20..24].copy_from_slice(&self.root.unwrap_or(NONE).to_le_bytes());
        bytes[24..28].copy_from_slice(&self.part.0.to_le_bytes());
        bytes[28..32].copy_from_slice(&self.part.1.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.count.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.own_count.to_le_bytes());
        bytes[48..56].copy_from_slice(&self.lists.to_le_bytes());
        bytes
    }

    /// Reads a header; `None` if the bytes are not a valid header.
    pub(crate) fn decode(bytes: &[u8; OP_HEADER_LEN]) -> Option<Self> {
        let word = |offset: usize| {
            u32::from_le_bytes([
                bytes[offset],
                bytes[offset + 1],
                bytes[offset + 2],
                bytes[offset + 3],
            ])
        };
        let long = |offset: usize| u64::from(word(offset)) | u64::from(word(offset + 4)) << 32;
        if word(0) != MAGIC {
            return None;
        }
        Some(Self {
            inline: word(4),
            seq: long(8),
            op: OpType::from_code(bytes[16])?,
            dtype: DType::from_code(bytes[17])?,
            reduce: match bytes[18] {
                u8::MAX => None,
                code => Some(ReduceOp::from_code(code)?),
            },
            root: Some(word(20)).filter(|&root| root != NONE),
            part: (word(24), word(28)),
            count: long(32),
            own_count: long(40),
            lists: long(48),
        })
    }

    /// Returns a hash of the fields on which ranks must agree. Ranks that agree have the same signature; others have
    /// different signatures with high probability.
    ///
    /// Ranks that share memory exchange signatures, and compare headers only if two signatures differ. Over channels
    /// ranks always exchange and compare headers.
    #[inline]
    pub(crate) fn signature(&self) -> u64 {
        // The multiplier, 2^64 divided by the golden ratio, spreads every bit; the salt makes equal values of
        // different fields differ.
        let word = |value: u64, salt: u64| {
            (value ^ salt)
                .wrapping_mul(0x9e37_79b9_7f4a_7c15)
                .rotate_left(29)
        };
        let codes = u64::from(self.op.code())
            | u64::from(self.dtype.code()) << 8
            | u64::from(self.reduce.map_or(u8::MAX, ReduceOp::code)) << 16
            | u64::from(self.root.unwrap_or(NONE)) << 32;
        let parts = u64::from(self.part.0) | u64::from(self.part.1) << 32;
        let mixed =
            word(codes, 1) ^ word(parts, word(self.seq, 2)) ^ word(self.count, word(self.lists, 3));
        word(mixed, 5) ^ mixed >> 32
    }

    fn agrees_with(&self, other: &Self) -> bool {
        (self.seq, self.op, self.dtype, self.reduce, self.root)
            == (other.seq, other.op, other.dtype, other.reduce, other.root)
            && (self.part, self.count, self.lists) == (other.part, other.count, other.lists)
    }
}

impl std::fmt::Display for OpHeader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} #{}", self.op, self.seq)?;
        if let Some(reduce) = self.reduce {
            write!(f, " ({reduce})")?;
        }
        if self.part.1 > 1 {
            let number = u64::from(self.part.0) + 1;
            write!(f, ", buffer {number} of {}", self.part.1)?;
        }
        if self.op.pattern() != Pattern::Barrier {
            write!(f, " of {} {}", self.count.max(self.own_count), self.dtype)?;
        }
        if let Some(root) = self.root {
            write!(f, " with root {root}")?;
        }
        Ok(())
    }
}

/// A disagreement between the ranks of a group, for the error of the operation.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Disagreement {
    /// The first rank of the group whose header differs from that of most ranks, or whose counts do not match.
    pub(crate) rank: usize,
    /// A sentence with the headers or counts that differ.
    pub(crate) message: String,
}

/// Compares the headers of all ranks. All ranks get the same result.
pub(crate) fn compare(op_headers: &[OpHeader]) -> Result<(), Disagreement> {
    let Some(first) = op_headers.first() else {
        return Ok(());
    };
    if op_headers
        .iter()
        .all(|op_header| op_header.agrees_with(first))
    {
        return Ok(());
    }
    // The header that most ranks sent; on a tie, that of the lowest rank.
    let votes = |op_header: &OpHeader| {
        op_headers
            .iter()
            .filter(|other| other.agrees_with(op_header))
            .count()
    };
    let most_votes = op_headers.iter().map(votes).max().unwrap_or(0);
    let majority = (0..op_headers.len())
        .find(|&rank| votes(&op_headers[rank]) == most_votes)
        .unwrap_or(0);
    let differing = (0..op_headers.len())
        .find(|&rank| !op_headers[rank].agrees_with(&op_headers[majority]))
        .unwrap_or(0);
    let (called, expected) = (&op_headers[differing], &op_headers[majority]);
    let mut message = format!(
        "in the group, rank {differing} called {called}, but rank {majority} called {expected}"
    );
    if called.to_string() == expected.to_string() {
        message.push_str(" with a different list of counts");
    }
    Err(Disagreement {
        rank: differing,
        message,
    })
}

/// A hash of counts, for [`OpHeader::lists`]. It starts from the offset basis of FNV, so that leading zeros change it.
pub(crate) fn hash_counts(counts: impl Iterator<Item = u64>) -> u64 {
    counts.fold(0xcbf2_9ce4_8422_2325, |hash: u64, count| {
        (hash ^ count)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(31)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all_reduce(count: u64) -> OpHeader {
        OpHeader {
            dtype: DType::F32,
            reduce: Some(ReduceOp::Sum),
            count,
            ..OpHeader::new(OpType::AllReduce, 41)
        }
    }

    #[test]
    fn a_header_is_decoded_as_it_was_encoded() {
        let op_header = OpHeader {
            root: Some(3),
            part: (1, 4),
            own_count: 9,
            lists: 77,
            inline: 5,
            ..all_reduce(1 << 40)
        };
        assert_eq!(OpHeader::decode(&op_header.encode()), Some(op_header));
    }

    proptest! {
        #[test]
        fn any_bytes_decode_to_none_or_to_a_comparable_header(bytes: [[u8; 8]; OP_HEADER_LEN / 8], has_magic: bool) {
            let mut bytes: [u8; OP_HEADER_LEN] = bytes.concat().try_into().unwrap();
            if has_magic {
                bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
            }
            if let Some(op_header) = OpHeader::decode(&bytes) {
                prop_assert_eq!(OpHeader::decode(&op_header.encode()), Some(op_header));
                // Whatever the fields hold, the comparison detects that the ranks disagree.
                let other = all_reduce(8);
                prop_assert!(compare(&[other, op_header, other]).is_err() || op_header.agrees_with(&other));
            }
        }
    }

    #[test]
    fn the_error_names_the_first_rank_of_the_minority_with_both_headers() {
        let op_headers = [all_reduce(8), all_reduce(8), all_reduce(4), all_reduce(8)];
        let found = compare(&op_headers).unwrap_err();
        assert_eq!(found.rank, 2);
        assert_eq!(
            found.message,
            "in the group, rank 2 called all_reduce #41 (sum) of 4 Float, \
             but rank 0 called all_reduce #41 (sum) of 8 Float"
        );
        assert_eq!(compare(&op_headers[..2]), Ok(()));
    }

    #[test]
    fn every_field_that_must_agree_changes_the_signature() {
        let op_header = all_reduce(8);
        let others = [
            OpHeader {
                seq: 42,
                ..op_header
            },
            OpHeader {
                op: OpType::Broadcast,
                ..op_header
            },
            OpHeader {
                dtype: DType::I32,
                ..op_header
            },
            OpHeader {
                reduce: Some(ReduceOp::Max),
                ..op_header
            },
            OpHeader {
                root: Some(0),
                ..op_header
            },
            OpHeader {
                part: (1, 1),
                ..op_header
            },
            OpHeader {
                count: 9,
                ..op_header
            },
            OpHeader {
                lists: 1,
                ..op_header
            },
        ];
        for other in others {
            assert_ne!(other.signature(), op_header.signature(), "{other:?}");
            assert!(compare(&[op_header, other]).is_err(), "{other:?}");
        }
        let other_own_count = OpHeader {
            own_count: 3,
            ..op_header
        };
        assert_eq!(other_own_count.signature(), op_header.signature());
    }

    #[test]
    fn the_largest_part_index_is_formatted_without_overflow() {
        let last = OpHeader {
            part: (u32::MAX, 2),
            ..all_reduce(8)
        };
        let found = compare(&[all_reduce(8), last, all_reduce(8)]).unwrap_err();
        assert!(
            found.message.contains("buffer 4294967296 of 2"),
            "{}",
            found.message
        );
    }
}
