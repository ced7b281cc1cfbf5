//! Sums of sparse tensors. Each rank may store values at different indices.
//!
//! Ranks exchange how many index tuples each of them stores (nnz), then the indices, then the values, as gloo's
//! sparse all-reduce does. Each rank adds up the values of one index tuple in the order of ranks, so that the sums
//! are equal on all ranks, to the bit.

use crate::arithmetic;
use crate::group::process_group::{End, OpParts, OpRecord, ProcessGroup, Share};
use crate::group::work::Work;
use crate::op::buffer::Buffer;
use crate::op::element::Element;
use crate::op::error::{Error, ErrorKind, Result};
use crate::op::{Op, Reduction};
use rcomm_recorder::model::{OpType, Peer, Rank, ReduceOp};
use rcomm_recorder::record::Tensor;
use std::collections::BTreeMap;
use std::panic::Location;

/// The most dimensions of a sparse tensor: ranks exchange the shape in a message of fixed length.
const MAX_DIMENSIONS: usize = 16;

/// A tensor of which only some elements are stored (COO format).
///
/// The first `sparse_dims` dimensions are sparse: an *index tuple* is one index in each of them. For each index
/// tuple that is stored there is a block of the remaining, dense, dimensions (one value if there are none).
#[derive(Clone, Debug, PartialEq)]
pub struct SparseTensor<T> {
    shape: Vec<u64>,
    sparse_dims: usize,
    indices: Vec<i64>,
    values: Vec<T>,
}

impl<T: Element> SparseTensor<T> {
    /// A tensor of this shape. `indices` holds a row for each sparse dimension, one after the other, each with one
    /// index per index tuple; `values` holds one block per index tuple. An index tuple may occur more than once:
    /// its blocks add up.
    ///
    /// # Errors
    /// `InvalidArgument` if there is no sparse dimension, if there are more sparse dimensions than dimensions
    /// or more than 16 dimensions, if lengths do not fit the shape, or if an index is not in its dimension.
    pub fn new(
        shape: Vec<u64>,
        sparse_dims: usize,
        indices: Vec<i64>,
        values: Vec<T>,
    ) -> Result<Self> {
        let refuse = |message: String| Err(Error::new(ErrorKind::InvalidArgument, message));
        if sparse_dims == 0 || sparse_dims > shape.len() || shape.len() > MAX_DIMENSIONS {
            return refuse(format!(
                "a tensor of shape {shape:?} cannot have {sparse_dims} sparse dimensions: it may have 1 to \
                 {MAX_DIMENSIONS} dimensions, of which at least one is sparse"
            ));
        }
        let tensor = Self {
            shape,
            sparse_dims,
            indices,
            values,
        };
        let nnz = tensor.places();
        if tensor.indices.len() != nnz * sparse_dims {
            return refuse(format!(
                "{} indices do not make rows for {sparse_dims} sparse dimensions",
                tensor.indices.len()
            ));
        }
        let Some(block) = tensor.block() else {
            return refuse(format!(
                "a tensor of shape {:?} does not fit in memory",
                tensor.shape
            ));
        };
        if Some(tensor.values.len()) != nnz.checked_mul(block) {
            return refuse(format!(
                "there are {} values for {nnz} index tuples with {block} values each",
                tensor.values.len()
            ));
        }
        for (dim, row) in tensor.indices.chunks(nnz.max(1)).enumerate() {
            let size = tensor.shape[dim];
            let outside = row
                .iter()
                .find(|&&index| u64::try_from(index).map_or(true, |index| index >= size));
            if let Some(index) = outside {
                return refuse(format!(
                    "index {index} is not in dimension {dim} of size {size}"
                ));
            }
        }
        Ok(tensor)
    }

    /// Size of each dimension.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// How many dimensions are sparse: the first ones.
    pub fn sparse_dims(&self) -> usize {
        self.sparse_dims
    }

    /// One row of indices for each sparse dimension, one after the other.
    pub fn indices(&self) -> &[i64] {
        &self.indices
    }

    /// One block of values for each index tuple, one after the other.
    pub fn values(&self) -> &[T] {
        &self.values
    }

    /// The number of index tuples that are stored (nnz), repeated ones included.
    pub fn places(&self) -> usize {
        self.indices.len() / self.sparse_dims
    }

    /// Replaces each value with what `change` returns for it.
    pub(crate) fn map(mut self, change: impl Fn(T) -> T) -> Self {
        self.values
            .iter_mut()
            .for_each(|value| *value = change(*value));
        self
    }

    /// The number of values of one index tuple; `None` if it overflows.
    fn block(&self) -> Option<usize> {
        let dims = self.shape[self.sparse_dims..].iter();
        let block = dims.copied().try_fold(1u64, u64::checked_mul)?;
        usize::try_from(block).ok()
    }

    /// What ranks exchange first: the properties that must be equal on all ranks (element type, number of sparse
    /// dimensions, number of dimensions, shape padded with zeros), then the number of this rank's index tuples.
    fn head(&self) -> [u64; MAX_DIMENSIONS + 4] {
        let mut head = [0; MAX_DIMENSIONS + 4];
        head[0] = T::DTYPE.code().into();
        head[1] = self.sparse_dims as u64;
        head[2] = self.shape.len() as u64;
        head[3..3 + self.shape.len()].copy_from_slice(&self.shape);
        head[MAX_DIMENSIONS + 3] = self.places() as u64;
        head
    }
}

/// The number of collectives in a sum: an `all_gather` of the heads, of the indices, and of the values.
const GATHERS: u64 = 3;

impl ProcessGroup {
    /// The sum of the sparse tensors of all ranks. The result is coalesced: each index tuple occurs once, in
    /// ascending order. It is the same on all ranks, to the bit.
    ///
    /// # Errors
    /// `Unsupported` for a reduction other than the sum; `Mismatch`, on all ranks, if shapes, numbers of sparse
    /// dimensions or element types differ, or if a rank stores more index tuples than fit in memory.
    #[track_caller]
    pub fn all_reduce_sparse<T: Element>(
        &self,
        tensor: &SparseTensor<T>,
        op: ReduceOp,
    ) -> Result<SparseTensor<T>> {
        self.check_sparse::<T>(op)?;
        let ranks = self.ranks();
        self.run_recorded(
            &op_record::<T>(&tensor.shape),
            Location::caller(),
            |share| gather_and_add(tensor, ranks, share),
        )
    }

    /// Like [`all_reduce_sparse`](Self::all_reduce_sparse), but returns at once. Some ranks may call the blocking form
    /// and others this one.
    #[track_caller]
    pub fn all_reduce_sparse_async<T: Element>(
        &self,
        tensor: SparseTensor<T>,
        op: ReduceOp,
    ) -> Result<Work<SparseTensor<T>>> {
        self.check_sparse::<T>(op)?;
        let ranks = self.ranks().to_vec();
        let site = Location::caller();
        let shape = tensor.shape.clone();
        self.run_on_worker(&op_record::<T>(&shape), site, move |share| {
            gather_and_add(&tensor, &ranks, share)
        })
    }

    fn check_sparse<T: Element>(&self, op: ReduceOp) -> Result<()> {
        if op == ReduceOp::Sum && Reduction::allows(op, T::DTYPE) {
            return Ok(());
        }
        let message = format!(
            "{op} is not defined for sparse tensors of type {}",
            T::DTYPE
        );
        let error = Error::new(ErrorKind::Unsupported, message);
        Err(error.in_group(self.desc()).during(OpType::AllReduceSparse))
    }
}

fn op_record<T: Element>(shape: &[u64]) -> OpRecord<'_> {
    OpRecord {
        op: OpType::AllReduceSparse,
        backend: "gathers",
        peer: Peer::None,
        tensor: Some(Tensor {
            dtype: T::DTYPE,
            shape,
        }),
        parts: OpParts::Collectives(GATHERS),
        end: End::Watched,
    }
}

fn all_gather_v<T: Element>(share: &mut Share, input: &[T], parts: &mut [Vec<T>]) -> Result<()> {
    let parts = parts.iter_mut().map(|part| Buffer::from_mut(part));
    let mut op = Op::AllGatherV {
        input: Buffer::from_slice(input),
        outputs: parts.collect(),
    };
    share.run(&mut op)?;
    Ok(())
}

/// Carries out the sum: gathers the heads, the indices and the values, then adds up the values of each index tuple.
fn gather_and_add<T: Element>(
    tensor: &SparseTensor<T>,
    ranks: &[Rank],
    share: &mut Share,
) -> Result<SparseTensor<T>> {
    const HEAD: usize = MAX_DIMENSIONS + 4;
    let mut heads = vec![0u64; HEAD * ranks.len()];
    share.run(&mut Op::AllGatherSingle {
        input: Buffer::from_slice(&tensor.head()),
        output: Buffer::from_mut(&mut heads),
    })?;
    let (heads, _) = heads.as_chunks::<HEAD>();
    for (head, &rank) in heads.iter().zip(ranks) {
        if head[..HEAD - 1] != heads[0][..HEAD - 1] {
            let message = format!(
                "rank {rank} and rank {} gave sparse tensors of different shapes or types",
                ranks[0]
            );
            return Err(Error::new(ErrorKind::Mismatch, message).with_rank(rank));
        }
    }
    let block = tensor.block().unwrap_or(0);
    let dims = tensor.sparse_dims;
    let mut counts = Vec::with_capacity(ranks.len());
    for (head, &rank) in heads.iter().zip(ranks) {
        let count = head[HEAD - 1];
        // No element has more than 16 bytes, and an index has 8.
        let element = 16u64.checked_mul(block.max(dims) as u64);
        let bytes = element.and_then(|element| count.checked_mul(element));
        if bytes.is_none_or(|bytes| isize::try_from(bytes).is_err()) {
            let message = format!(
                "rank {rank} has {count} index tuples of a sparse tensor, more than fit in memory"
            );
            return Err(Error::new(ErrorKind::Mismatch, message).with_rank(rank));
        }
        counts.push(count as usize);
    }
    let mut indices: Vec<Vec<i64>> = counts.iter().map(|&count| vec![0; count * dims]).collect();
    all_gather_v(share, &tensor.indices, &mut indices)?;
    let zeros = |&count: &usize| vec![T::default(); count * block];
    let mut values: Vec<Vec<T>> = counts.iter().map(zeros).collect();
    all_gather_v(share, &tensor.values, &mut values)?;

    // For each index tuple, in the order of ranks: a rank, and the position of the tuple on that rank.
    let mut by_tuple: BTreeMap<Vec<i64>, Vec<(usize, usize)>> = BTreeMap::new();
    for (rank, row) in indices.iter().enumerate() {
        for tuple_index in 0..counts[rank] {
            let tuple = (0..dims)
                .map(|dim| row[dim * counts[rank] + tuple_index])
                .collect();
            by_tuple.entry(tuple).or_default().push((rank, tuple_index));
        }
    }
    let count = by_tuple.len();
    let mut sum = SparseTensor {
        shape: tensor.shape.clone(),
        sparse_dims: dims,
        indices: vec![0; count * dims],
        values: vec![T::default(); count * block],
    };
    for (position, (tuple, parts)) in by_tuple.iter().enumerate() {
        for (dim, &index) in tuple.iter().enumerate() {
            sum.indices[dim * count + position] = index;
        }
        let out = &mut sum.values[position * block..(position + 1) * block];
        let part = |&(rank, tuple_index): &(usize, usize)| {
            &values[rank][tuple_index * block..(tuple_index + 1) * block]
        };
        add(&parts.iter().map(part).collect::<Vec<_>>(), out)?;
    }
    Ok(sum)
}

/// Writes the sum of blocks of equal length to `out`. The order of addition is that of `parts`.
fn add<T: Element>(parts: &[&[T]], out: &mut [T]) -> Result<()> {
    if let [only] = parts {
        out.copy_from_slice(only);
        return Ok(());
    }
    let parts: Vec<Buffer<'_>> = parts.iter().map(|part| Buffer::from_slice(part)).collect();
    let bytes = parts
        .iter()
        .map(Buffer::as_bytes)
        .collect::<Result<Vec<_>>>()?;
    let mut out = Buffer::from_mut(out);
    arithmetic::combine(ReduceOp::Sum, T::DTYPE, &bytes, out.as_bytes_mut()?, None);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_and_indices_that_do_not_fit_the_shape_are_refused() {
        let make = |dims, indices: &[i64], values: &[f32]| {
            SparseTensor::new(vec![3, 4, 2], dims, indices.to_vec(), values.to_vec())
        };
        let tensor = make(2, &[0, 2, 1, 3], &[1.0; 4]).unwrap();
        assert_eq!((tensor.places(), tensor.block()), (2, Some(2)));
        let refusal = |result: Result<SparseTensor<f32>>| result.unwrap_err().to_string();
        let text = refusal(make(2, &[0, 3, 1, 3], &[1.0; 4]));
        assert_eq!(text, "index 3 is not in dimension 0 of size 3");
        let text = refusal(make(2, &[0, 2, 1, -1], &[1.0; 4]));
        assert_eq!(text, "index -1 is not in dimension 1 of size 4");
        assert!(refusal(make(2, &[0, 2, 1], &[])).contains("do not make rows"));
        assert!(
            refusal(make(2, &[0, 2], &[1.0; 3]))
                .contains("3 values for 1 index tuples with 2 values each")
        );
        assert!(refusal(make(0, &[], &[])).contains("at least one is sparse"));
        assert!(refusal(make(4, &[], &[])).contains("shape [3, 4, 2]"));
        let huge = SparseTensor::<f32>::new(vec![1, u64::MAX, 2], 1, vec![0], vec![]);
        assert!(refusal(huge).contains("does not fit in memory"));
    }
}
