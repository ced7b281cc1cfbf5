//! Data specific to one record: split sizes, and a signature that did not fit in a table.
//!
//! In the lap ring a record's words are: the numbers of input and output splits (32 bits each); the length of the
//! signature in bytes (lower half), and 1 in the upper half if a split needs 64 bits; the splits, two to a word, or one
//! if a split needs 64 bits; the signature's bytes; a hash of all words before it, seeded with the record's id.

use super::bytes::Packer;
use super::file::map::Map;
use super::layout::{halves, join};
use super::ring::LapRing;
use super::signature::{self, SignatureKey};
use super::sync::Read;
use crate::model::Signature;

/// Words before a record's splits.
const HEAD_WORDS: usize = 2;

/// The data specific to one record, as it was read.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct LapFacts {
    pub(super) input_splits: Vec<u64>,
    pub(super) output_splits: Vec<u64>,
    pub(super) signature: Option<Signature>,
}

/// Position and length in the lap ring of the data specific to one record; 0 words if there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LapRange {
    pub(super) position: u64,
    pub(super) words: u64,
}

/// The hash at the end of a record's words.
struct Hash(u64);

impl Hash {
    fn new(id: u64) -> Self {
        Self(id)
    }

    fn add(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

/// Stores the data specific to one record; `None` if it is longer than allowed.
pub(super) fn write(
    map: &Map,
    ring: &LapRing,
    id: u64,
    splits: [&[u64]; 2],
    key: Option<&SignatureKey<'_>>,
) -> Option<LapRange> {
    let [inputs, outputs] = splits;
    let count = inputs.len() + outputs.len();
    let all_splits = || inputs.iter().chain(outputs).copied();
    let is_wide = all_splits().any(|split| split > u64::from(u32::MAX));
    let split_words = if is_wide { count } else { count.div_ceil(2) };
    let bytes = key.map_or(0, SignatureKey::encoded_len);
    if bytes > signature::MAX_BYTES {
        return None;
    }
    let words = HEAD_WORDS + split_words + bytes.div_ceil(8) + 1;
    let position = ring.write(map, words, |store| {
        let mut hash = Hash::new(id);
        let mut push = |word| {
            hash.add(word);
            store(word);
        };
        push(join(inputs.len() as u32, outputs.len() as u32));
        push(join(bytes as u32, is_wide.into()));
        let mut splits = all_splits();
        while let Some(split) = splits.next() {
            push(if is_wide {
                split
            } else {
                join(split as u32, splits.next().unwrap_or(0) as u32)
            });
        }
        if let Some(key) = key {
            let mut packer = Packer::new(&mut push);
            key.encode(&mut |byte| packer.byte(byte));
            packer.finish();
        }
        store(hash.0);
    })?;
    Some(LapRange {
        position,
        words: words as u64,
    })
}

/// Reads the data specific to one record; `None` if it was overwritten or is not valid.
pub(super) fn read(
    memory: &impl Read,
    ring: &LapRing,
    id: u64,
    range: LapRange,
) -> Option<LapFacts> {
    let len = usize::try_from(range.words).ok()?;
    let words = ring.read(memory, range.position, len)?;
    let (&written, words) = words.split_last()?;
    let mut hash = Hash::new(id);
    words.iter().for_each(|&word| hash.add(word));
    if hash.0 != written || words.len() < HEAD_WORDS {
        return None;
    }
    let (inputs, outputs) = halves(words[0]);
    let (bytes, wide) = halves(words[1]);
    let (inputs, outputs, bytes) = (inputs as usize, outputs as usize, bytes as usize);
    let count = inputs.checked_add(outputs)?;
    let split_words = if wide == 0 { count.div_ceil(2) } else { count };
    let (splits, packed) = words[HEAD_WORDS..].split_at_checked(split_words)?;
    if packed.len() != bytes.div_ceil(8) {
        return None;
    }
    let mut splits: Vec<u64> = if wide == 0 {
        let pairs = splits.iter().map(|&word| halves(word));
        pairs
            .flat_map(|(first, second)| [first.into(), second.into()])
            .collect()
    } else {
        splits.to_vec()
    };
    splits.truncate(count);
    let output_splits = splits.split_off(inputs);
    let signature = if bytes == 0 {
        None
    } else {
        let mut unpacked: Vec<u8> = packed.iter().flat_map(|word| word.to_le_bytes()).collect();
        unpacked.truncate(bytes);
        Some(signature::decode(&unpacked)?)
    };
    Some(LapFacts {
        input_splits: splits,
        output_splits,
        signature,
    })
}
