//! The signature of an operation, as given by the caller and as bytes.
//!
//! A signature is the same for thousands of calls, so it is interned: stored once in the ring's tables
//! and referred to by a [`SignatureId`] in each record. The bytes are, in this order: the backend's
//! name and the operation's, each after one byte of length; the numbers of inputs and outputs, two
//! bytes each; then per tensor its type's code, its number of dimensions, and each dimension in LEB128.

pub(crate) mod cache;

use crate::model::{DType, Signature};
use crate::record::layout::NO_ROW;

/// One tensor: the properties that members can disagree on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tensor<'a> {
    /// The type of the elements.
    pub dtype: DType,
    /// The dimensions: none for a scalar; at most 255 are kept.
    pub shape: &'a [u64],
}

impl Tensor<'_> {
    fn elements(&self) -> u64 {
        let sizes = self.shape.iter();
        sizes.fold(1, |product, &size| product.saturating_mul(size))
    }
}

/// An operation's signature, borrowed from the caller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct SignatureKey<'a> {
    /// The backend that carries the operation out; at most 255 bytes are kept.
    pub backend: &'a str,
    /// The operation's name, as it appears in dumps; at most 255 bytes are kept.
    pub op_name: &'a str,
    /// Input tensors; at most 65,535 are kept.
    pub inputs: &'a [Tensor<'a>],
    /// Output tensors; at most 65,535 are kept.
    pub outputs: &'a [Tensor<'a>],
}

/// An interned signature. It is valid for the recorder that returned it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SignatureId {
    /// The row in the table of signatures; [`NO_ROW`] if it is not there.
    pub(crate) row: u32,
    pub(crate) input_elements: u64,
    pub(crate) output_elements: u64,
}

impl SignatureId {
    /// The signature of an operation of which only the code is known.
    pub const UNKNOWN: Self = Self {
        row: NO_ROW,
        input_elements: 0,
        output_elements: 0,
    };

    /// The id as plain numbers, for storage outside of Rust.
    pub const fn to_words(self) -> [u64; 3] {
        [self.row as u64, self.input_elements, self.output_elements]
    }

    /// The id with the numbers of [`to_words`](Self::to_words). Other numbers refer to another signature, or to none.
    pub const fn of_words([row, input_elements, output_elements]: [u64; 3]) -> Self {
        Self {
            row: row as u32,
            input_elements,
            output_elements,
        }
    }
}

/// Maximum size of a signature in bytes; a longer one is recorded by its element counts.
pub(crate) const MAX_BYTES: usize = 16 * 1024;

fn elements(tensors: &[Tensor<'_>]) -> u64 {
    tensors
        .iter()
        .fold(0, |sum, tensor| sum.saturating_add(tensor.elements()))
}

impl SignatureKey<'_> {
    /// A cheap hash: it uses only the length and both ends of a name. On equal hashes, a look-up compares the whole
    /// signature.
    pub(crate) fn hash_code(&self) -> u64 {
        let mut hash = Mixer(0);
        for name in [self.backend, self.op_name] {
            hash.add_name(name.as_bytes());
        }
        for side in [self.inputs, self.outputs] {
            hash.add(side.len() as u64);
            for tensor in side {
                hash.add((tensor.shape.len() as u64) << 8 | u64::from(tensor.dtype.code()));
                tensor.shape.iter().for_each(|&size| hash.add(size));
            }
        }
        hash.0
    }

    /// The id of a signature that does not fit in the table: only its numbers of elements are recorded.
    pub fn without_row(&self) -> SignatureId {
        SignatureId {
            row: NO_ROW,
            input_elements: self.input_elements(),
            output_elements: self.output_elements(),
        }
    }

    pub(crate) fn input_elements(&self) -> u64 {
        elements(self.inputs)
    }

    pub(crate) fn output_elements(&self) -> u64 {
        elements(self.outputs)
    }

    /// The number of bytes that [`encode`](Self::encode) produces.
    pub(crate) fn encoded_len(&self) -> usize {
        let mut len = 0;
        self.encode(&mut |_| len += 1);
        len
    }

    /// Passes the signature's bytes to `byte`, in order.
    pub(crate) fn encode(&self, byte: &mut dyn FnMut(u8)) {
        for name in [self.backend, self.op_name] {
            let name = cut(name, 255);
            byte(name.len() as u8);
            name.bytes().for_each(&mut *byte);
        }
        let sides = [self.inputs, self.outputs].map(|side| &side[..side.len().min(0xffff)]);
        for side in sides {
            let count = side.len() as u16;
            count.to_le_bytes().into_iter().for_each(&mut *byte);
        }
        for tensor in sides.into_iter().flatten() {
            let shape = &tensor.shape[..tensor.shape.len().min(255)];
            byte(tensor.dtype.code());
            byte(shape.len() as u8);
            for &size in shape {
                let mut rest = size;
                while rest >= 0x80 {
                    byte(rest as u8 | 0x80);
                    rest >>= 7;
                }
                byte(rest as u8);
            }
        }
    }
}

/// The hash of [`SignatureKey::hash_code`].
struct Mixer(u64);

/// 2^64 divided by the golden ratio: multiplication by it spreads the bits of a number.
const MIX: u64 = 0x9e37_79b9_7f4a_7c15;

impl Mixer {
    /// Adds a word. The products do not depend on each other, which matters more here than the quality of the hash.
    #[inline]
    fn add(&mut self, word: u64) {
        self.0 = self.0.rotate_left(11) ^ (word ^ MIX).wrapping_mul(MIX);
    }

    #[inline]
    fn add_name(&mut self, bytes: &[u8]) {
        self.add(bytes.len() as u64);
        if let (Some(head), Some(tail)) = (bytes.first_chunk(), bytes.last_chunk()) {
            self.add(u64::from_le_bytes(*head) ^ u64::from_le_bytes(*tail).rotate_left(32));
        } else {
            self.add(
                bytes
                    .iter()
                    .fold(0, |word, &byte| word << 8 | u64::from(byte)),
            );
        }
    }
}

/// The longest prefix of a text with at most `limit` bytes that splits no character.
pub(crate) fn cut(text: &str, limit: usize) -> &str {
    &text[..text.floor_char_boundary(limit)]
}

/// Reads the bytes of [`SignatureKey::encode`]; `None` if the bytes are invalid.
pub(crate) fn decode(bytes: &[u8]) -> Option<Signature> {
    let mut bytes = Bytes(bytes);
    let backend = bytes.text()?;
    let op_name = bytes.text()?;
    let inputs = bytes.count()?;
    let outputs = bytes.count()?;
    let (input_sizes, input_dtypes) = bytes.tensors(inputs)?;
    let (output_sizes, output_dtypes) = bytes.tensors(outputs)?;
    bytes.0.is_empty().then_some(Signature {
        backend,
        op_name,
        input_sizes,
        output_sizes,
        input_dtypes,
        output_dtypes,
        input_splits: Vec::new(),
        output_splits: Vec::new(),
    })
}

/// The bytes that are still to be decoded. The methods return `None` if the bytes end too early.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn take(&mut self, len: usize) -> Option<&[u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    fn byte(&mut self) -> Option<u8> {
        self.take(1).map(|byte| byte[0])
    }

    fn count(&mut self) -> Option<usize> {
        let bytes = self.take(2)?;
        Some(u16::from_le_bytes([bytes[0], bytes[1]]).into())
    }

    fn text(&mut self) -> Option<String> {
        let len = self.byte()?.into();
        let bytes = self.take(len)?;
        String::from_utf8(bytes.to_vec()).ok()
    }

    /// A dimension in LEB128.
    fn size(&mut self) -> Option<u64> {
        let mut size = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            size |= u64::from(byte & 0x7f).checked_shl(shift)?;
            if byte < 0x80 {
                return Some(size);
            }
        }
        None
    }

    /// The shapes and the names of the types of `count` tensors.
    fn tensors(&mut self, count: usize) -> Option<(Vec<Vec<u64>>, Vec<String>)> {
        let mut sizes = Vec::new();
        let mut dtypes = Vec::new();
        for _ in 0..count {
            let dtype = DType::from_code(self.byte()?).unwrap_or(DType::Other);
            let dims = self.byte()?;
            let shape = (0..dims).map(|_| self.size()).collect::<Option<_>>()?;
            sizes.push(shape);
            dtypes.push(dtype.name().to_owned());
        }
        Some((sizes, dtypes))
    }
}

/// The caller's signature, kept for comparison.
#[derive(Debug)]
pub(crate) struct OwnedKey {
    backend: Box<str>,
    op_name: Box<str>,
    inputs: Box<[OwnedTensor]>,
    outputs: Box<[OwnedTensor]>,
    pub(crate) input_elements: u64,
    pub(crate) output_elements: u64,
}

type OwnedTensor = (DType, Box<[u64]>);

impl OwnedKey {
    pub(crate) fn new(key: &SignatureKey<'_>) -> Self {
        let to_owned = |side: &[Tensor<'_>]| {
            side.iter()
                .map(|tensor| (tensor.dtype, tensor.shape.into()))
                .collect()
        };
        Self {
            backend: key.backend.into(),
            op_name: key.op_name.into(),
            inputs: to_owned(key.inputs),
            outputs: to_owned(key.outputs),
            input_elements: key.input_elements(),
            output_elements: key.output_elements(),
        }
    }

    /// Whether `key` is the signature from which this one was copied.
    pub(crate) fn matches(&self, key: &SignatureKey<'_>) -> bool {
        let same = |owned: &[OwnedTensor], side: &[Tensor<'_>]| {
            owned.len() == side.len()
                && owned.iter().zip(side).all(|((dtype, shape), tensor)| {
                    *dtype == tensor.dtype && **shape == *tensor.shape
                })
        };
        *self.backend == *key.backend
            && *self.op_name == *key.op_name
            && same(&self.inputs, key.inputs)
            && same(&self.outputs, key.outputs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: SignatureKey<'static> = SignatureKey {
        backend: "cpu",
        op_name: "all_gather",
        inputs: &[Tensor {
            dtype: DType::Bf16,
            shape: &[3, 1 << 40],
        }],
        outputs: &[
            Tensor {
                dtype: DType::Bf16,
                shape: &[],
            },
            Tensor {
                dtype: DType::F32,
                shape: &[0, u64::MAX],
            },
        ],
    };

    fn encoded(key: &SignatureKey<'_>) -> Vec<u8> {
        let mut bytes = Vec::new();
        key.encode(&mut |byte| bytes.push(byte));
        bytes
    }

    #[test]
    fn a_signature_is_decoded_from_its_bytes() {
        let bytes = encoded(&KEY);
        assert_eq!(bytes.len(), KEY.encoded_len());
        let signature = decode(&bytes).unwrap();
        assert_eq!(signature.backend, "cpu");
        assert_eq!(signature.op_name, "all_gather");
        assert_eq!(signature.input_sizes, [vec![3, 1 << 40]]);
        assert_eq!(signature.output_sizes, [vec![], vec![0, u64::MAX]]);
        assert_eq!(signature.output_dtypes, ["BFloat16", "Float"]);
    }

    #[test]
    fn truncated_or_longer_bytes_are_not_a_signature() {
        let bytes = encoded(&KEY);
        for len in 0..bytes.len() {
            assert_eq!(decode(&bytes[..len]), None, "{len} bytes");
        }
        let longer = [&bytes[..], &[0]].concat();
        assert_eq!(decode(&longer), None);
    }

    #[test]
    fn an_owned_key_matches_only_the_key_that_it_was_copied_from() {
        let owned = OwnedKey::new(&KEY);
        assert!(owned.matches(&KEY));
        let other = SignatureKey {
            inputs: KEY.outputs,
            ..KEY
        };
        assert!(!owned.matches(&other));
    }
}
