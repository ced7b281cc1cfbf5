//! A cache of recent signatures for one issuer of operations, which avoids hashing names.
//!
//! [`SignatureRef::Key`](crate::record::SignatureRef::Key) hashes and compares the whole signature at every record,
//! which costs about as much as the rest of the record. A caller that issues one operation at a time can keep a
//! [`SignatureCache`] and search it first: the operation, its number of inputs and its first dimension select a row,
//! whose numbers are then compared.

use super::{SignatureId, SignatureKey, Tensor};
use crate::model::OpType;

/// Rows; a power of two. A training step has a few dozen different operations on one group.
const ROWS: usize = 64;

/// The interned signatures that one caller used last, for one recorder.
///
/// A cache is not shared between threads: keep it with the state that orders the operations of a group. Look-ups
/// neither lock nor allocate.
#[derive(Debug)]
pub struct SignatureCache {
    rows: Box<[Option<CacheRow>]>,
}

/// A signature that was kept, and its id.
#[derive(Debug)]
struct CacheRow {
    backend: &'static str,
    op: OpType,
    inputs: usize,
    /// Per tensor: its type's code | its number of dimensions << 8, then the dimensions.
    tensors: Box<[u64]>,
    id: SignatureId,
}

impl Default for SignatureCache {
    fn default() -> Self {
        Self {
            rows: (0..ROWS).map(|_| None).collect(),
        }
    }
}

impl SignatureCache {
    /// The id that was kept for this operation over these tensors; `None` if there is none.
    #[inline]
    pub fn find<'t>(
        &self,
        backend: &'static str,
        op: OpType,
        inputs: impl ExactSizeIterator<Item = Tensor<'t>> + Clone,
        outputs: impl ExactSizeIterator<Item = Tensor<'t>> + Clone,
    ) -> Option<SignatureId> {
        let count = inputs.len();
        // One iterator after the other, not chained: a chain checks for every tensor which of the two is next.
        let first = inputs.clone().next().or_else(|| outputs.clone().next());
        let row = self.rows[row_of(op, count, first.as_ref())].as_ref()?;
        let matches = row.op == op
            && row.inputs == count
            // In most cases both are the same constant.
            && (std::ptr::eq(row.backend, backend) || row.backend == backend);
        if !matches {
            return None;
        }
        let rest = rest_after(&row.tensors, inputs)?;
        rest_after(rest, outputs)?.is_empty().then_some(row.id)
    }

    /// Keeps an id for [`find`](Self::find), and replaces an older one if necessary. The key's `op_name` must be
    /// the operation's [`name`](OpType::name), and its `backend` the one given here.
    pub fn keep(
        &mut self,
        backend: &'static str,
        op: OpType,
        key: &SignatureKey<'_>,
        id: SignatureId,
    ) {
        let tensors = || key.inputs.iter().chain(key.outputs);
        let row = row_of(op, key.inputs.len(), tensors().next());
        let words = tensors().flat_map(|tensor| {
            let dimensions = tensor.shape.iter().copied();
            std::iter::once(head_of(tensor)).chain(dimensions)
        });
        self.rows[row] = Some(CacheRow {
            backend,
            op,
            inputs: key.inputs.len(),
            tensors: words.collect(),
            id,
        });
    }
}

/// The rest of a row's words after those of these tensors; `None` if the row does not begin with them.
#[inline]
fn rest_after<'r, 't>(
    mut row: &'r [u64],
    tensors: impl Iterator<Item = Tensor<'t>>,
) -> Option<&'r [u64]> {
    for tensor in tensors {
        let (&head, others) = row.split_first()?;
        let (shape, others) = others.split_at_checked(tensor.shape.len())?;
        if head != head_of(&tensor) || !shape.iter().eq(tensor.shape) {
            return None;
        }
        row = others;
    }
    Some(row)
}

/// A tensor's first word in a [`CacheRow`].
#[inline]
fn head_of(tensor: &Tensor<'_>) -> u64 {
    u64::from(tensor.dtype.code()) | (tensor.shape.len() as u64) << 8
}

/// The row of an operation: a hash of the properties that differ most between the operations of a step.
#[inline]
fn row_of(op: OpType, inputs: usize, first: Option<&Tensor<'_>>) -> usize {
    let size = first.and_then(|tensor| tensor.shape.first()).copied();
    let properties = size.unwrap_or(0) ^ u64::from(op.code()) << 56 ^ (inputs as u64) << 40;
    // A product with 2^64 divided by the golden ratio; its upper bits depend on all bits of the number.
    let spread = properties.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (spread >> (64 - ROWS.trailing_zeros())) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::DType;

    const ID: SignatureId = SignatureId {
        row: 3,
        input_elements: 8,
        output_elements: 8,
    };

    fn tensor(dtype: DType, shape: &[u64]) -> Tensor<'_> {
        Tensor { dtype, shape }
    }

    fn find(
        cache: &SignatureCache,
        backend: &'static str,
        op: OpType,
        inputs: &[Tensor<'_>],
        outputs: &[Tensor<'_>],
    ) -> Option<SignatureId> {
        let (inputs, outputs) = (inputs.iter().copied(), outputs.iter().copied());
        cache.find(backend, op, inputs, outputs)
    }

    #[test]
    fn an_id_is_found_for_its_own_signature_and_no_other() {
        let (op, backend) = (OpType::AllGather, "cpu");
        let one = [tensor(DType::F32, &[8, 2])];
        let two = [tensor(DType::F32, &[8]), tensor(DType::F32, &[8])];
        let key = SignatureKey {
            backend,
            op_name: op.name(),
            inputs: &one,
            outputs: &two,
        };
        let mut cache = SignatureCache::default();
        assert_eq!(find(&cache, backend, op, &one, &two), None);
        cache.keep(backend, op, &key, ID);
        assert_eq!(find(&cache, backend, op, &one, &two), Some(ID));
        // Each of these signatures selects either another row, or the same row, where it must be distinguished.
        let other_type = [tensor(DType::I32, &[8, 2])];
        let other_size = [tensor(DType::F32, &[8, 3])];
        let fewer_dimensions = [tensor(DType::F32, &[8])];
        for inputs in [&other_type, &other_size, &fewer_dimensions] {
            assert_eq!(find(&cache, backend, op, inputs, &two), None);
        }
        assert_eq!(find(&cache, backend, op, &one, &two[..1]), None);
        assert_eq!(find(&cache, backend, op, &one, &[]), None);
        assert_eq!(find(&cache, backend, OpType::Gather, &one, &two), None);
        assert_eq!(find(&cache, "fake", op, &one, &two), None);
        let three = [two[0], two[1], two[0]];
        assert_eq!(find(&cache, backend, op, &one, &three), None);
    }

    #[test]
    fn a_newer_signature_takes_the_row_of_an_older_one() {
        let (op, backend) = (OpType::AllReduce, "cpu");
        let mut cache = SignatureCache::default();
        let newer = SignatureId { row: 4, ..ID };
        let shapes = [[8, 1], [8, 2]];
        for (shape, id) in shapes.iter().zip([ID, newer]) {
            let side = [tensor(DType::F32, shape)];
            let key = SignatureKey {
                backend,
                op_name: op.name(),
                inputs: &side,
                outputs: &side,
            };
            cache.keep(backend, op, &key, id);
        }
        let found = shapes.map(|shape| {
            let side = [tensor(DType::F32, &shape)];
            find(&cache, backend, op, &side, &side)
        });
        assert_eq!(found, [None, Some(newer)]);
    }
}
