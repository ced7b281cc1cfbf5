//! One operation on one rank.
//!
//! An entry is small and refers by index to tables of its [`Dump`](crate::publish::Dump): repeated values
//! (shapes, stacks, groups) are stored once, so that a thousand rings fit in memory.

use super::{DType, OpType, ReduceOp};
use serde::{Deserialize, Serialize};

/// The state of an operation.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum EntryState {
    /// The program has issued the operation.
    #[default]
    Scheduled = 0,
    /// The recorder has seen the operation start.
    Started = 1,
    /// The recorder has seen the operation complete.
    Completed = 2,
    /// The operation ended with an error or a time-out. Only rcomm's recorder writes this state; others mark such an
    /// entry `retired` and not `completed`.
    Failed = 3,
}

impl EntryState {
    /// The state's name, as in dumps.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Scheduled => "scheduled",
            Self::Started => "started",
            Self::Completed => "completed",
            Self::Failed => "failed",
        }
    }
}

/// The other end of a point-to-point operation, as a rank **of the group**.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Peer {
    /// Not a point-to-point operation, or the recorder does not store the peer.
    #[default]
    None,
    /// A receive from any source.
    Any,
    /// The other end's rank in the group.
    Rank(u32),
}

/// One frame of a call stack.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Frame {
    /// Function.
    pub name: String,
    /// Source file.
    pub filename: String,
    /// Line, from 1; 0 if unknown.
    pub line: u32,
}

/// A call stack, innermost frame first, as indices into the dump's frames.
pub type Stack = Vec<u32>;

/// The backend, name, tensors and splits of an operation: many operations of a rank share one signature.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Signature {
    /// Backend of the operation (`nccl`, `gloo`, `cpu`, ...); empty if unknown.
    pub backend: String,
    /// The operation as the recorder spelled it, without backend and peers (`_all_gather_base`).
    pub op_name: String,
    /// One shape per input tensor.
    pub input_sizes: Vec<Vec<u64>>,
    /// One shape per output tensor.
    pub output_sizes: Vec<Vec<u64>>,
    /// One type per input tensor, ATen's names.
    pub input_dtypes: Vec<String>,
    /// One type per output tensor, ATen's names.
    pub output_dtypes: Vec<String>,
    /// Elements sent to each rank of the group; empty if the operation or the record has no splits.
    pub input_splits: Vec<u64>,
    /// Elements received from each rank of the group; empty if the operation or the record has no splits.
    pub output_splits: Vec<u64>,
}

impl Signature {
    /// Number of elements of all input tensors.
    pub fn input_elements(&self) -> u64 {
        elements(&self.input_sizes)
    }

    /// Number of elements of all output tensors.
    pub fn output_elements(&self) -> u64 {
        elements(&self.output_sizes)
    }

    /// Size of all input tensors in bytes; elements of unknown types count as one byte.
    pub fn input_bytes(&self) -> u64 {
        bytes(&self.input_sizes, &self.input_dtypes)
    }

    /// Size of all output tensors in bytes; elements of unknown types count as one byte.
    pub fn output_bytes(&self) -> u64 {
        bytes(&self.output_sizes, &self.output_dtypes)
    }
}

fn shape_elements(shape: &[u64]) -> u64 {
    shape
        .iter()
        .fold(1, |product, &n| product.saturating_mul(n))
}

fn elements(sizes: &[Vec<u64>]) -> u64 {
    sizes
        .iter()
        .fold(0, |sum, shape| sum.saturating_add(shape_elements(shape)))
}

/// The size in bytes of tensors of these shapes and types.
fn bytes(sizes: &[Vec<u64>], dtypes: &[String]) -> u64 {
    sizes.iter().enumerate().fold(0, |sum, (index, shape)| {
        let dtype = dtypes.get(index).and_then(|name| DType::from_name(name));
        let size = dtype.and_then(DType::size).unwrap_or(1) as u64;
        sum.saturating_add(shape_elements(shape).saturating_mul(size))
    })
}

/// One operation on one rank.
///
/// Times are by the wall clock of the recording host, ns since the epoch; 0 = not seen.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// Number of the record in its process, over all groups, ascending in order of issue. Not comparable across ranks.
    pub record_id: u64,
    /// Number of the collective in its group. A P2P operation carries the number of the last collective before it.
    pub collective_seq_id: u64,
    /// Number of the P2P operation or batch of this rank in its group. The two ends of a message generally give it
    /// different numbers.
    pub p2p_seq_id: u64,
    /// Number of the logical operation in its group; operations inside a coalesced block are counted one by one.
    pub op_id: u64,
    /// Index into the dump's `groups`.
    pub group: u32,
    /// Index into the dump's `signatures`.
    pub signature: u32,
    /// Index into the dump's `stacks`, if the call site was recorded.
    pub stack: Option<u32>,
    /// The kind of operation.
    pub op: OpType,
    /// The operation's state.
    pub state: EntryState,
    /// Whether the recorder has stopped watching the operation. With recorders whose states are reliable, an entry that
    /// is retired and not completed has failed or timed out.
    pub retired: bool,
    /// Whether the recorder marked the entry as point-to-point; PyTorch's NCCL recorder also marks the closing marker
    /// of a P2P batch.
    pub is_p2p: bool,
    /// The other end of a send or receive.
    pub peer: Peer,
    /// Root of a rooted operation, as a rank of the group, where recorded.
    pub root: Option<u32>,
    /// Reduction, where recorded.
    pub reduce_op: Option<ReduceOp>,
    /// When the program issued the operation.
    pub time_created_ns: i64,
    /// When the recorder noticed the start, which happened earlier.
    pub time_discovered_started_ns: i64,
    /// When the recorder noticed the completion, which happened earlier.
    pub time_discovered_completed_ns: i64,
    /// Run time in ms, as measured by the backend.
    pub duration_ms: Option<f32>,
    /// The driver's id of the CUDA graph that captured the operation. A captured operation runs when
    /// the graph is launched, so its completion here means that it was captured.
    pub graph_id: Option<u64>,
    /// The operation's time-out, ms; 0 = unknown.
    pub timeout_ms: u64,
    /// Index into the dump's `threads`, if recorded.
    pub thread: Option<u32>,
}
