//! [`Op`]: what to do, and with which buffers.

use super::Reduction;
use crate::op::buffer::Buffer;
use rcomm_recorder::model::{OpType, Peer};

/// One operation of a group. Ranks in it are ranks **of the group**.
///
/// Where the fields are `inputs` or `outputs`, there is one buffer for each rank of the group, unless
/// said otherwise. Inputs are only read; outputs, and a lone `buffer`, are written.
#[derive(Debug)]
pub enum Op<'a> {
    /// Every rank's `buffer` ends as the reduction of all.
    AllReduce {
        /// Input, then result.
        buffer: Buffer<'a>,
        /// How to combine.
        op: Reduction,
    },
    /// As `AllReduce` for each of several buffers, of any types, as one operation.
    AllReduceCoalesced {
        /// Inputs, then results; as many as the caller likes, the same on all ranks.
        buffers: Vec<Buffer<'a>>,
        /// How to combine.
        op: Reduction,
    },
    /// The root's `buffer` ends as the reduction of all; the others' are left as they were.
    Reduce {
        /// Input; on the root, then the result.
        buffer: Buffer<'a>,
        /// How to combine.
        op: Reduction,
        /// Who gets the result.
        root: u32,
    },
    /// Every rank's `buffer` ends as the root's.
    Broadcast {
        /// Input on the root, output elsewhere. The root's may be read-only.
        buffer: Buffer<'a>,
        /// Whose content it is.
        root: u32,
    },
    /// Nobody leaves before everybody has come.
    Barrier,
    /// `outputs[r]` ends as rank r's `input`; all of one size.
    AllGather {
        /// This rank's part.
        input: Buffer<'a>,
        /// Everybody's parts.
        outputs: Vec<Buffer<'a>>,
    },
    /// `output` ends as the inputs of all ranks one after the other.
    AllGatherSingle {
        /// This rank's part.
        input: Buffer<'a>,
        /// Everybody's parts: group size times as long.
        output: Buffer<'a>,
    },
    /// `outputs[r]` ends as rank r's `input`; sizes differ from rank to rank.
    AllGatherV {
        /// This rank's part.
        input: Buffer<'a>,
        /// Everybody's parts: `outputs[r]` has the length of rank r's input.
        outputs: Vec<Buffer<'a>>,
    },
    /// As `AllGatherSingle` for each pair, as one operation.
    AllGatherCoalesced {
        /// This rank's parts; as many as the caller likes.
        inputs: Vec<Buffer<'a>>,
        /// One for each input.
        outputs: Vec<Buffer<'a>>,
    },
    /// `output` ends as the reduction of everybody's `inputs[own rank]`; all of one size.
    ReduceScatter {
        /// One part for each rank.
        inputs: Vec<Buffer<'a>>,
        /// This rank's result.
        output: Buffer<'a>,
        /// How to combine.
        op: Reduction,
    },
    /// As `ReduceScatter`, the parts one after the other in `input`.
    ReduceScatterSingle {
        /// All parts: group size times as long as `output`.
        input: Buffer<'a>,
        /// This rank's result.
        output: Buffer<'a>,
        /// How to combine.
        op: Reduction,
    },
    /// As `ReduceScatter`; `inputs[r]` has the length of rank r's output.
    ReduceScatterV {
        /// One part for each rank.
        inputs: Vec<Buffer<'a>>,
        /// This rank's result.
        output: Buffer<'a>,
        /// How to combine.
        op: Reduction,
    },
    /// As `ReduceScatterSingle` for each pair, as one operation.
    ReduceScatterCoalesced {
        /// As many as the caller likes.
        inputs: Vec<Buffer<'a>>,
        /// One for each input.
        outputs: Vec<Buffer<'a>>,
        /// How to combine.
        op: Reduction,
    },
    /// `outputs[r]` ends as rank r's `inputs[own rank]`. Sizes may differ from pair to pair.
    AllToAll {
        /// What goes to each rank.
        inputs: Vec<Buffer<'a>>,
        /// What comes from each rank.
        outputs: Vec<Buffer<'a>>,
    },
    /// As `AllToAll` with equal parts, one after the other.
    AllToAllSingle {
        /// What goes out.
        input: Buffer<'a>,
        /// What comes in; as long as `input`.
        output: Buffer<'a>,
    },
    /// As `AllToAll`, the parts one after the other.
    AllToAllVSingle {
        /// What goes out.
        input: Buffer<'a>,
        /// What comes in.
        output: Buffer<'a>,
        /// Elements to each rank; their sum is the length of `input`.
        input_splits: Vec<usize>,
        /// Elements from each rank; their sum is the length of `output`.
        output_splits: Vec<usize>,
    },
    /// On the root, `outputs[r]` ends as rank r's `input`; all of one size.
    Gather {
        /// This rank's part.
        input: Buffer<'a>,
        /// Everybody's parts; empty on other ranks than the root.
        outputs: Vec<Buffer<'a>>,
        /// Who gets them.
        root: u32,
    },
    /// As `Gather`; sizes differ from rank to rank.
    GatherV {
        /// This rank's part.
        input: Buffer<'a>,
        /// Everybody's parts; empty on other ranks than the root.
        outputs: Vec<Buffer<'a>>,
        /// Who gets them.
        root: u32,
    },
    /// `output` ends as the root's `inputs[own rank]`; all of one size.
    Scatter {
        /// One part for each rank; empty on other ranks than the root.
        inputs: Vec<Buffer<'a>>,
        /// This rank's part.
        output: Buffer<'a>,
        /// Whose parts they are.
        root: u32,
    },
    /// As `Scatter`; sizes differ from rank to rank.
    ScatterV {
        /// One part for each rank; empty on other ranks than the root.
        inputs: Vec<Buffer<'a>>,
        /// This rank's part.
        output: Buffer<'a>,
        /// Whose parts they are.
        root: u32,
    },
    /// `buffer` goes to `peer`. Messages of one sender, receiver and tag arrive in order of issue.
    Send {
        /// The message.
        buffer: Buffer<'a>,
        /// Its receiver.
        peer: u32,
        /// Which receive it meets.
        tag: u32,
    },
    /// The next message from `peer` with this tag, which must have the length of `buffer`.
    Recv {
        /// Where it goes.
        buffer: Buffer<'a>,
        /// Its sender; any if `None`. [`Done::source`](crate::backend::Done) says who it was.
        peer: Option<u32>,
        /// Which sends it meets.
        tag: u32,
    },
    /// Several operations issued as one: all may proceed at once, none waits for another. Sends and
    /// receives only, or collectives only, the same on all ranks.
    Coalesced(Vec<Op<'a>>),
}

impl<'a> Op<'a> {
    /// Which operation it is.
    #[inline]
    pub const fn op_type(&self) -> OpType {
        match self {
            Self::AllReduce { .. } => OpType::AllReduce,
            Self::AllReduceCoalesced { .. } => OpType::AllReduceCoalesced,
            Self::Reduce { .. } => OpType::Reduce,
            Self::Broadcast { .. } => OpType::Broadcast,
            Self::Barrier => OpType::Barrier,
            Self::AllGather { .. } => OpType::AllGather,
            Self::AllGatherSingle { .. } => OpType::AllGatherSingle,
            Self::AllGatherV { .. } => OpType::AllGatherV,
            Self::AllGatherCoalesced { .. } => OpType::AllGatherCoalesced,
            Self::ReduceScatter { .. } => OpType::ReduceScatter,
            Self::ReduceScatterSingle { .. } => OpType::ReduceScatterSingle,
            Self::ReduceScatterV { .. } => OpType::ReduceScatterV,
            Self::ReduceScatterCoalesced { .. } => OpType::ReduceScatterCoalesced,
            Self::AllToAll { .. } => OpType::AllToAll,
            Self::AllToAllSingle { .. } => OpType::AllToAllSingle,
            Self::AllToAllVSingle { .. } => OpType::AllToAllVSingle,
            Self::Gather { .. } => OpType::Gather,
            Self::GatherV { .. } => OpType::GatherV,
            Self::Scatter { .. } => OpType::Scatter,
            Self::ScatterV { .. } => OpType::ScatterV,
            Self::Send { .. } => OpType::Send,
            Self::Recv { .. } => OpType::Recv,
            Self::Coalesced(_) => OpType::Coalesced,
        }
    }

    /// Whether it is a send, a receive, or a coalesced block of these.
    #[inline]
    pub fn is_p2p(&self) -> bool {
        match self {
            Self::Send { .. } | Self::Recv { .. } => true,
            Self::Coalesced(ops) => ops.iter().any(Op::is_p2p),
            _ => false,
        }
    }

    /// The buffers that are read. A lone `buffer` is here and in [`outputs`](Self::outputs).
    #[inline]
    pub fn inputs(&self) -> &[Buffer<'a>] {
        use std::slice::from_ref;
        match self {
            Self::AllReduce { buffer, .. }
            | Self::Reduce { buffer, .. }
            | Self::Broadcast { buffer, .. }
            | Self::Send { buffer, .. } => from_ref(buffer),
            Self::AllReduceCoalesced { buffers, .. } => buffers,
            Self::AllGather { input, .. }
            | Self::AllGatherSingle { input, .. }
            | Self::AllGatherV { input, .. }
            | Self::ReduceScatterSingle { input, .. }
            | Self::AllToAllSingle { input, .. }
            | Self::AllToAllVSingle { input, .. }
            | Self::Gather { input, .. }
            | Self::GatherV { input, .. } => from_ref(input),
            Self::AllGatherCoalesced { inputs, .. }
            | Self::ReduceScatter { inputs, .. }
            | Self::ReduceScatterV { inputs, .. }
            | Self::ReduceScatterCoalesced { inputs, .. }
            | Self::AllToAll { inputs, .. }
            | Self::Scatter { inputs, .. }
            | Self::ScatterV { inputs, .. } => inputs,
            Self::Barrier | Self::Recv { .. } | Self::Coalesced(_) => &[],
        }
    }

    /// The buffers that are written.
    #[inline]
    pub fn outputs(&self) -> &[Buffer<'a>] {
        use std::slice::from_ref;
        match self {
            Self::AllReduce { buffer, .. }
            | Self::Reduce { buffer, .. }
            | Self::Broadcast { buffer, .. }
            | Self::Recv { buffer, .. } => from_ref(buffer),
            Self::AllReduceCoalesced { buffers, .. } => buffers,
            Self::AllGatherSingle { output, .. }
            | Self::ReduceScatter { output, .. }
            | Self::ReduceScatterSingle { output, .. }
            | Self::ReduceScatterV { output, .. }
            | Self::AllToAllSingle { output, .. }
            | Self::AllToAllVSingle { output, .. }
            | Self::Scatter { output, .. }
            | Self::ScatterV { output, .. } => from_ref(output),
            Self::AllGather { outputs, .. }
            | Self::AllGatherV { outputs, .. }
            | Self::AllGatherCoalesced { outputs, .. }
            | Self::ReduceScatterCoalesced { outputs, .. }
            | Self::AllToAll { outputs, .. }
            | Self::Gather { outputs, .. }
            | Self::GatherV { outputs, .. } => outputs,
            Self::Barrier | Self::Send { .. } | Self::Coalesced(_) => &[],
        }
    }

    /// The root of a rooted operation.
    #[inline]
    pub const fn root(&self) -> Option<u32> {
        match self {
            Self::Reduce { root, .. }
            | Self::Broadcast { root, .. }
            | Self::Gather { root, .. }
            | Self::GatherV { root, .. }
            | Self::Scatter { root, .. }
            | Self::ScatterV { root, .. } => Some(*root),
            _ => None,
        }
    }

    /// The reduction of a reducing operation.
    #[inline]
    pub const fn reduction(&self) -> Option<Reduction> {
        match self {
            Self::AllReduce { op, .. }
            | Self::AllReduceCoalesced { op, .. }
            | Self::Reduce { op, .. }
            | Self::ReduceScatter { op, .. }
            | Self::ReduceScatterSingle { op, .. }
            | Self::ReduceScatterV { op, .. }
            | Self::ReduceScatterCoalesced { op, .. } => Some(*op),
            _ => None,
        }
    }

    /// The other end of a send or receive.
    #[inline]
    pub const fn peer(&self) -> Peer {
        match self {
            Self::Send { peer, .. }
            | Self::Recv {
                peer: Some(peer), ..
            } => Peer::Rank(*peer),
            Self::Recv { peer: None, .. } => Peer::Any,
            _ => Peer::None,
        }
    }

    /// Elements sent to and received from each rank, where the caller gave them.
    #[inline]
    pub fn splits(&self) -> Option<(&[usize], &[usize])> {
        match self {
            Self::AllToAllVSingle {
                input_splits,
                output_splits,
                ..
            } => Some((input_splits, output_splits)),
            _ => None,
        }
    }
    /// The buffers that are written, to write to.
    pub fn outputs_mut(&mut self) -> &mut [Buffer<'a>] {
        use std::slice::from_mut;
        match self {
            Self::AllReduce { buffer, .. }
            | Self::Reduce { buffer, .. }
            | Self::Broadcast { buffer, .. }
            | Self::Recv { buffer, .. } => from_mut(buffer),
            Self::AllReduceCoalesced { buffers, .. } => buffers,
            Self::AllGatherSingle { output, .. }
            | Self::ReduceScatter { output, .. }
            | Self::ReduceScatterSingle { output, .. }
            | Self::ReduceScatterV { output, .. }
            | Self::AllToAllSingle { output, .. }
            | Self::AllToAllVSingle { output, .. }
            | Self::Scatter { output, .. }
            | Self::ScatterV { output, .. } => from_mut(output),
            Self::AllGather { outputs, .. }
            | Self::AllGatherV { outputs, .. }
            | Self::AllGatherCoalesced { outputs, .. }
            | Self::ReduceScatterCoalesced { outputs, .. }
            | Self::AllToAll { outputs, .. }
            | Self::Gather { outputs, .. }
            | Self::GatherV { outputs, .. } => outputs,
            Self::Barrier | Self::Send { .. } | Self::Coalesced(_) => &mut [],
        }
    }

    /// The first buffer, if there is any: all are on one kind of device.
    #[inline]
    pub fn any_buffer(&self) -> Option<&Buffer<'a>> {
        match self {
            Self::Coalesced(ops) => ops.iter().find_map(Op::any_buffer),
            _ => self.inputs().first().or_else(|| self.outputs().first()),
        }
    }

    /// All buffers; a lone one twice.
    #[inline]
    pub(super) fn buffers(&self) -> impl Iterator<Item = &Buffer<'a>> {
        self.inputs().iter().chain(self.outputs())
    }
}
