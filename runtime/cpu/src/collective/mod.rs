//! Splits an operation into the few kinds of collectives that the algorithms ([`algorithm`](crate::algorithm))
//! implement.
//!
//! There are many operations, but few kinds: those of [`Collective`]. Each [`Op`](rcomm_core::Op) is one
//! `Collective`, or several if it is coalesced or has several buffers. Before each `Collective` runs, all ranks
//! compare its [`OpHeader`].

mod lists;
pub(crate) mod op_header;
mod part;
mod steps;

use op_header::OpHeader;
use rcomm_recorder::model::{DType, ReduceOp};

pub(super) use lists::{compare_lists, has_lists};
pub(super) use part::part_of;
pub(super) use steps::for_each_step;

/// How elements are combined: a type, and a reduction that is defined for the type.
#[derive(Clone, Copy)]
pub(super) struct Combination {
    pub(super) dtype: DType,
    pub(super) op: ReduceOp,
}

impl Combination {
    /// Size of an element in bytes.
    pub(super) fn element(self) -> usize {
        self.dtype.size().unwrap_or(1)
    }
}

/// One part for each rank, to be read.
pub(super) enum Inputs<'a> {
    /// Equal parts, one for each rank, one after the other. The second field is the number of ranks.
    Even(&'a [u8], usize),
    /// Parts of any sizes.
    List(Vec<&'a [u8]>),
}

impl Inputs<'_> {
    /// The part for `rank`.
    pub(super) fn part(&self, rank: usize) -> &[u8] {
        match self {
            Self::Even(bytes, size) => {
                let each = bytes.len() / size;
                &bytes[rank * each..(rank + 1) * each]
            }
            Self::List(parts) => parts[rank],
        }
    }
}

/// One part for each rank, to be written.
pub(super) enum Outputs<'a> {
    /// Equal parts, one for each rank, one after the other. The second field is the number of ranks.
    Even(&'a mut [u8], usize),
    /// Parts of any sizes.
    List(Vec<&'a mut [u8]>),
}

impl Outputs<'_> {
    /// The part from `rank`.
    pub(super) fn part_mut(&mut self, rank: usize) -> &mut [u8] {
        match self {
            Self::Even(bytes, size) => {
                let each = bytes.len() / *size;
                &mut bytes[rank * each..(rank + 1) * each]
            }
            Self::List(parts) => parts[rank],
        }
    }

    /// Size of `rank`'s part in bytes.
    pub(super) fn len(&self, rank: usize) -> usize {
        match self {
            Self::Even(bytes, size) => bytes.len() / size,
            Self::List(parts) => parts[rank].len(),
        }
    }

    /// The parts from all `size` ranks, in order of ranks.
    pub(super) fn parts(&mut self, size: usize) -> Vec<&mut [u8]> {
        match self {
            Self::Even([], _) => std::iter::repeat_with(<&mut [u8]>::default)
                .take(size)
                .collect(),
            Self::Even(bytes, _) => {
                let each = bytes.len() / size;
                bytes.chunks_exact_mut(each).collect()
            }
            Self::List(parts) => parts.iter_mut().map(|part| &mut **part).collect(),
        }
    }
}

/// Bytes that some ranks write and others only read.
pub(super) enum Data<'a> {
    Read(&'a [u8]),
    Write(&'a mut [u8]),
}

impl Data<'_> {
    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Self::Read(bytes) => bytes,
            Self::Write(bytes) => bytes,
        }
    }
}

/// One collective, as the engines run it. Ranks are ranks of the group.
pub(super) enum Collective<'a> {
    Barrier,
    AllReduce {
        data: &'a mut [u8],
        by: Combination,
    },
    /// The root's data is `Write`, the others' `Read`.
    Reduce {
        data: Data<'a>,
        by: Combination,
        root: usize,
    },
    /// The root's data is `Read`, the others' `Write`.
    Broadcast {
        data: Data<'a>,
        root: usize,
    },
    AllGather {
        input: &'a [u8],
        outputs: Outputs<'a>,
    },
    ReduceScatter {
        inputs: Inputs<'a>,
        output: &'a mut [u8],
        by: Combination,
    },
    AllToAll {
        inputs: Inputs<'a>,
        outputs: Outputs<'a>,
    },
    /// `outputs` on the root alone.
    Gather {
        input: &'a [u8],
        outputs: Option<Outputs<'a>>,
        root: usize,
    },
    /// `inputs` on the root alone.
    Scatter {
        inputs: Option<Inputs<'a>>,
        output: &'a mut [u8],
        root: usize,
    },
}

/// A collective, the header that describes it to the other ranks, and the lists of counts that go
/// with the header.
pub(super) struct Step<'a> {
    pub(super) op_header: OpHeader,
    /// The signature of the header, computed while its fields are in registers: reading them back from
    /// memory directly after they were written one by one would stall the processor.
    pub(super) signature: u64,
    /// Counts for each pair or rank, if only their comparison can show whether the ranks agree; otherwise empty.
    pub(super) lists: Vec<u64>,
    pub(super) collective: Collective<'a>,
}

impl<'a> Step<'a> {
    #[inline]
    fn new(op_header: OpHeader, lists: Vec<u64>, collective: Collective<'a>) -> Self {
        Self {
            signature: op_header.signature(),
            op_header,
            lists,
            collective,
        }
    }
}

/// This rank's position in an operation: its rank in the group, the group's size, and the operation's
/// `collective_seq_id`.
#[derive(Clone, Copy)]
pub(super) struct Position {
    pub(super) rank: usize,
    pub(super) size: usize,
    pub(super) seq: u64,
}
