//! Operations as data: one enum, so that a backend is one function and a decorator of backends is one
//! function.
//!
//! An [`Op`] says what to do and holds the buffers. It says nothing of order, deadline or group: these
//! come with the [`Call`](crate::backend::Call). What a rank can see to be wrong with its own
//! arguments is refused by [`Op::validate`] before anything is sent; what only a comparison of ranks
//! can show is the backend's to find.

use crate::buffer::Buffer;
use crate::error::{Error, ErrorKind, Result};
use rcomm_recorder::model::{DType, OpType, Peer, ReduceOp};

/// A reduction with its parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Reduction {
    /// How values are combined.
    pub op: ReduceOp,
    /// What this rank's input is multiplied by first; 1 unless `op` is `PremulSum`.
    pub factor: f64,
}

impl Reduction {
    /// The sum of all inputs, each multiplied by its own rank's `factor` first.
    pub const fn premul_sum(factor: f64) -> Self {
        Self {
            op: ReduceOp::PremulSum,
            factor,
        }
    }

    /// Whether elements of this type can be combined so.
    ///
    /// | reduction | types |
    /// |---|---|
    /// | sum, product | all; `bool`: or, and |
    /// | avg | all but `bool`; integers: the sum, divided towards zero |
    /// | min, max | all but complex; `bool`: and, or |
    /// | band, bor, bxor | integers, `bool` |
    /// | premul_sum | floats of 16 to 64 bits |
    pub const fn allows(op: ReduceOp, dtype: DType) -> bool {
        use DType::{
            Bf16, Bool, Complex64, Complex128, F8E4M3, F8E5M2, F16, F32, F64, I8, I16, I32, I64,
            U8, U16, U32, U64,
        };
        let integer = matches!(dtype, I8 | U8 | I16 | U16 | I32 | U32 | I64 | U64);
        let float = matches!(dtype, F16 | Bf16 | F32 | F64);
        let float8 = matches!(dtype, F8E4M3 | F8E5M2);
        let complex = matches!(dtype, Complex64 | Complex128);
        let boolean = matches!(dtype, Bool);
        match op {
            ReduceOp::Sum | ReduceOp::Product => integer || float || float8 || complex || boolean,
            ReduceOp::Avg => integer || float || float8 || complex,
            ReduceOp::Min | ReduceOp::Max => integer || float || float8 || boolean,
            ReduceOp::BitAnd | ReduceOp::BitOr | ReduceOp::BitXor => integer || boolean,
            ReduceOp::PremulSum => float,
        }
    }
}

impl From<ReduceOp> for Reduction {
    fn from(op: ReduceOp) -> Self {
        Self { op, factor: 1.0 }
    }
}

/// One operation of a group. Ranks in it are ranks **of the group**.
///
/// Where the fields are `inputs` or `outputs`, there is one buffer for each rank of the group, unless
/// said otherwise. Inputs are only read; outputs, and a lone `buffer`, are written.
#[derive(Debug)]
#[non_exhaustive]
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
    pub fn is_p2p(&self) -> bool {
        match self {
            Self::Send { .. } | Self::Recv { .. } => true,
            Self::Coalesced(ops) => ops.iter().any(Op::is_p2p),
            _ => false,
        }
    }

    /// The buffers that are read. A lone `buffer` is here and in [`outputs`](Self::outputs).
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

    /// The same operation over copies of the buffers.
    ///
    /// # Errors
    /// `InvalidArgument` if a buffer is not in host memory.
    pub fn to_owned(&self) -> Result<Op<'static>> {
        let one = |buffer: &Buffer<'_>| buffer.to_owned();
        let all = |buffers: &[Buffer<'_>]| buffers.iter().map(one).collect::<Result<Vec<_>>>();
        Ok(match self {
            Self::AllReduce { buffer, op } => Op::AllReduce {
                buffer: one(buffer)?,
                op: *op,
            },
            Self::AllReduceCoalesced { buffers, op } => Op::AllReduceCoalesced {
                buffers: all(buffers)?,
                op: *op,
            },
            Self::Reduce { buffer, op, root } => Op::Reduce {
                buffer: one(buffer)?,
                op: *op,
                root: *root,
            },
            Self::Broadcast { buffer, root } => Op::Broadcast {
                buffer: one(buffer)?,
                root: *root,
            },
            Self::Barrier => Op::Barrier,
            Self::AllGather { input, outputs } => Op::AllGather {
                input: one(input)?,
                outputs: all(outputs)?,
            },
            Self::AllGatherSingle { input, output } => Op::AllGatherSingle {
                input: one(input)?,
                output: one(output)?,
            },
            Self::AllGatherV { input, outputs } => Op::AllGatherV {
                input: one(input)?,
                outputs: all(outputs)?,
            },
            Self::AllGatherCoalesced { inputs, outputs } => Op::AllGatherCoalesced {
                inputs: all(inputs)?,
                outputs: all(outputs)?,
            },
            Self::ReduceScatter { inputs, output, op } => Op::ReduceScatter {
                inputs: all(inputs)?,
                output: one(output)?,
                op: *op,
            },
            Self::ReduceScatterSingle { input, output, op } => Op::ReduceScatterSingle {
                input: one(input)?,
                output: one(output)?,
                op: *op,
            },
            Self::ReduceScatterV { inputs, output, op } => Op::ReduceScatterV {
                inputs: all(inputs)?,
                output: one(output)?,
                op: *op,
            },
            Self::ReduceScatterCoalesced {
                inputs,
                outputs,
                op,
            } => Op::ReduceScatterCoalesced {
                inputs: all(inputs)?,
                outputs: all(outputs)?,
                op: *op,
            },
            Self::AllToAll { inputs, outputs } => Op::AllToAll {
                inputs: all(inputs)?,
                outputs: all(outputs)?,
            },
            Self::AllToAllSingle { input, output } => Op::AllToAllSingle {
                input: one(input)?,
                output: one(output)?,
            },
            Self::AllToAllVSingle {
                input,
                output,
                input_splits,
                output_splits,
            } => Op::AllToAllVSingle {
                input: one(input)?,
                output: one(output)?,
                input_splits: input_splits.clone(),
                output_splits: output_splits.clone(),
            },
            Self::Gather {
                input,
                outputs,
                root,
            } => Op::Gather {
                input: one(input)?,
                outputs: all(outputs)?,
                root: *root,
            },
            Self::GatherV {
                input,
                outputs,
                root,
            } => Op::GatherV {
                input: one(input)?,
                outputs: all(outputs)?,
                root: *root,
            },
            Self::Scatter {
                inputs,
                output,
                root,
            } => Op::Scatter {
                inputs: all(inputs)?,
                output: one(output)?,
                root: *root,
            },
            Self::ScatterV {
                inputs,
                output,
                root,
            } => Op::ScatterV {
                inputs: all(inputs)?,
                output: one(output)?,
                root: *root,
            },
            Self::Send { buffer, peer, tag } => Op::Send {
                buffer: one(buffer)?,
                peer: *peer,
                tag: *tag,
            },
            Self::Recv { buffer, peer, tag } => Op::Recv {
                buffer: one(buffer)?,
                peer: *peer,
                tag: *tag,
            },
            Self::Coalesced(ops) => {
                Op::Coalesced(ops.iter().map(Op::to_owned).collect::<Result<_>>()?)
            }
        })
    }

    /// Copies what `filled`, an owned twin of this operation, has written into this one's outputs.
    ///
    /// # Errors
    /// `InvalidArgument` if it is no twin.
    pub fn copy_outputs_from(&mut self, filled: &Op<'_>) -> Result<()> {
        if let (Self::Coalesced(ops), Op::Coalesced(filled)) = (&mut *self, filled) {
            let mut pairs = ops.iter_mut().zip(filled);
            return pairs.try_for_each(|(op, filled)| op.copy_outputs_from(filled));
        }
        let outputs = self.outputs_mut().iter_mut();
        for (output, filled) in outputs.zip(filled.outputs()) {
            // A broadcast's root, and what a reduce leaves alone, may be read-only.
            if output.is_writable() {
                output.copy_from(filled)?;
            }
        }
        Ok(())
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
    pub fn any_buffer(&self) -> Option<&Buffer<'a>> {
        match self {
            Self::Coalesced(ops) => ops.iter().find_map(Op::any_buffer),
            _ => self.inputs().first().or_else(|| self.outputs().first()),
        }
    }

    /// All buffers; a lone one twice.
    fn buffers(&self) -> impl Iterator<Item = &Buffer<'a>> {
        self.inputs().iter().chain(self.outputs())
    }

    /// Refuses what this rank can see to be wrong, for rank `own` of a group of `size` ranks.
    ///
    /// # Errors
    /// `InvalidArgument` or `Unsupported`, naming operation and argument. Nothing was sent: the group
    /// can be used on.
    pub fn validate(&self, own: u32, size: u32) -> Result<()> {
        self.check(own, size)
            .map_err(|message| match message {
                Wrong::Argument(message) => Error::new(ErrorKind::InvalidArgument, message),
                Wrong::Reduction(op, dtype) => Error::new(
                    ErrorKind::Unsupported,
                    format!("{op} is not defined for elements of type {dtype}"),
                ),
            })
            .map_err(|error| error.during(self.op_type()))
    }

    fn check(&self, own: u32, size: u32) -> Result<(), Wrong> {
        if let Some(first) = self.any_buffer() {
            for buffer in self.buffers() {
                check(buffer.device() == first.device(), || {
                    format!("{buffer:?} beside {first:?}: devices differ")
                })?;
            }
        }
        if let Some(root) = self.root() {
            check(root < size, || {
                format!("root {root} is not in a group of {size} ranks")
            })?;
        }
        if let Some(reduction) = self.reduction() {
            for buffer in self.inputs() {
                if !Reduction::allows(reduction.op, buffer.dtype()) {
                    return Err(Wrong::Reduction(reduction.op, buffer.dtype()));
                }
            }
        }
        let reads_only = matches!(self, Self::Broadcast { root, .. } if *root == own)
            || matches!(self, Self::Reduce { root, .. } if *root != own);
        if !reads_only {
            for output in self.outputs() {
                check(output.is_writable(), || {
                    format!("the output {output:?} may only be read")
                })?;
            }
        }
        match self {
            Self::AllReduce { .. }
            | Self::Reduce { .. }
            | Self::Broadcast { .. }
            | Self::AllReduceCoalesced { .. }
            | Self::Barrier => Ok(()),
            Self::AllGather { input, outputs } => {
                check_list("output", outputs, size)?;
                check_even(input, outputs)
            }
            Self::AllGatherV { input, outputs } => {
                check_list("output", outputs, size)?;
                check_own(input, outputs, own)
            }
            Self::AllGatherSingle { input, output } => check_parts(input, output, size, "output"),
            Self::AllGatherCoalesced { inputs, outputs } => {
                check_pairs(inputs, outputs)?;
                let mut pairs = inputs.iter().zip(outputs);
                pairs.try_for_each(|(input, output)| check_parts(input, output, size, "output"))
            }
            Self::ReduceScatter { inputs, output, .. } => {
                check_list("input", inputs, size)?;
                check_even(output, inputs)
            }
            Self::ReduceScatterV { inputs, output, .. } => {
                check_list("input", inputs, size)?;
                check_own(output, inputs, own)
            }
            Self::ReduceScatterSingle { input, output, .. } => {
                check_parts(output, input, size, "input")
            }
            Self::ReduceScatterCoalesced {
                inputs, outputs, ..
            } => {
                check_pairs(inputs, outputs)?;
                let mut pairs = inputs.iter().zip(outputs);
                pairs.try_for_each(|(input, output)| check_parts(output, input, size, "input"))
            }
            Self::AllToAll { inputs, outputs } => {
                check_list("input", inputs, size)?;
                check_list("output", outputs, size)?;
                check_types(self.buffers())?;
                let (out, back) = (&inputs[own as usize], &outputs[own as usize]);
                check(out.len() == back.len(), || {
                    format!("the part for this rank itself is {out:?} as input, {back:?} as output")
                })
            }
            Self::AllToAllSingle { input, output } => {
                check_types(self.buffers())?;
                check(input.len() == output.len(), || {
                    format!("input {input:?} and output {output:?} differ in length")
                })?;
                check(input.len().is_multiple_of(size as usize), || {
                    format!("input {input:?} does not divide into {size} equal parts")
                })
            }
            Self::AllToAllVSingle {
                input,
                output,
                input_splits,
                output_splits,
            } => {
                check_types(self.buffers())?;
                check_splits("input", input, input_splits, size)?;
                check_splits("output", output, output_splits, size)?;
                let (out, back) = (input_splits[own as usize], output_splits[own as usize]);
                check(out == back, || {
                    format!("the split for this rank itself is {out} as input, {back} as output")
                })
            }
            Self::Gather {
                input,
                outputs,
                root,
            } => {
                check_list("output", outputs, if *root == own { size } else { 0 })?;
                check_even(input, outputs)
            }
            Self::GatherV {
                input,
                outputs,
                root,
            } => {
                check_list("output", outputs, if *root == own { size } else { 0 })?;
                check_own(input, outputs, own)
            }
            Self::Scatter {
                inputs,
                output,
                root,
            } => {
                check_list("input", inputs, if *root == own { size } else { 0 })?;
                check_even(output, inputs)
            }
            Self::ScatterV {
                inputs,
                output,
                root,
            } => {
                check_list("input", inputs, if *root == own { size } else { 0 })?;
                check_own(output, inputs, own)
            }
            Self::Send { peer, .. }
            | Self::Recv {
                peer: Some(peer), ..
            } => {
                check(*peer < size, || {
                    format!("peer {peer} is not in a group of {size} ranks")
                })?;
                check(*peer != own, || format!("peer {peer} is this rank itself"))
            }
            Self::Recv { peer: None, .. } => check(size > 1, || {
                "nobody else is in the group to receive from".to_owned()
            }),
            Self::Coalesced(ops) => {
                let p2p = ops.iter().filter(|op| op.is_p2p()).count();
                check(p2p == 0 || p2p == ops.len(), || {
                    "a coalesced block holds both collectives and point-to-point operations"
                        .to_owned()
                })?;
                check(!ops.iter().any(|op| matches!(op, Op::Coalesced(_))), || {
                    "a coalesced block holds another".to_owned()
                })?;
                ops.iter().try_for_each(|op| op.check(own, size))
            }
        }
    }
}

/// Why an operation is refused.
enum Wrong {
    Argument(String),
    Reduction(ReduceOp, DType),
}

fn check(right: bool, message: impl FnOnce() -> String) -> Result<(), Wrong> {
    if right {
        return Ok(());
    }
    Err(Wrong::Argument(message()))
}

fn check_list(what: &str, buffers: &[Buffer<'_>], expected: u32) -> Result<(), Wrong> {
    check(buffers.len() == expected as usize, || {
        format!("{} {what}s where {expected} are needed", buffers.len())
    })
}

fn check_types<'b, 'a: 'b>(mut buffers: impl Iterator<Item = &'b Buffer<'a>>) -> Result<(), Wrong> {
    let Some(first) = buffers.next() else {
        return Ok(());
    };
    for buffer in buffers {
        check(buffer.dtype() == first.dtype(), || {
            format!("{buffer:?} beside {first:?}: element types differ")
        })?;
    }
    Ok(())
}

/// Every part has the type and length of `one`.
fn check_even(one: &Buffer<'_>, parts: &[Buffer<'_>]) -> Result<(), Wrong> {
    for part in parts {
        check(
            part.dtype() == one.dtype() && part.len() == one.len(),
            || format!("{part:?} beside {one:?}: types and lengths must be equal"),
        )?;
    }
    Ok(())
}

/// Every part has the type of `one`, and the own part its length.
fn check_own(one: &Buffer<'_>, parts: &[Buffer<'_>], own: u32) -> Result<(), Wrong> {
    for part in parts {
        check(part.dtype() == one.dtype(), || {
            format!("{part:?} beside {one:?}: element types differ")
        })?;
    }
    match parts.get(own as usize) {
        Some(part) => check(part.len() == one.len(), || {
            format!("the part of this rank is {part:?} in the list and {one:?} beside it")
        }),
        None => Ok(()),
    }
}

/// `whole` holds one part for each rank.
fn check_parts(part: &Buffer<'_>, whole: &Buffer<'_>, size: u32, what: &str) -> Result<(), Wrong> {
    check(
        part.dtype() == whole.dtype() && part.len().checked_mul(size as usize) == Some(whole.len()),
        || {
            format!(
                "the {what} {whole:?} does not hold {size} parts like {part:?}, one for each rank"
            )
        },
    )
}

fn check_pairs(inputs: &[Buffer<'_>], outputs: &[Buffer<'_>]) -> Result<(), Wrong> {
    check(inputs.len() == outputs.len(), || {
        format!("{} inputs and {} outputs", inputs.len(), outputs.len())
    })
}

fn check_splits(what: &str, whole: &Buffer<'_>, splits: &[usize], size: u32) -> Result<(), Wrong> {
    check(splits.len() == size as usize, || {
        format!("{} {what} splits for {size} ranks", splits.len())
    })?;
    let sum = splits.iter().try_fold(0usize, |sum, &n| sum.checked_add(n));
    check(sum == Some(whole.len()), || {
        format!("{what} splits {splits:?} do not add up to {whole:?}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn floats(len: usize) -> Buffer<'static> {
        Buffer::from_vec(vec![0f32; len])
    }

    fn refusal(op: Op<'_>) -> String {
        op.validate(0, 2).unwrap_err().to_string()
    }

    #[test]
    fn the_refusal_names_operation_and_argument() {
        let op = Op::Broadcast {
            buffer: floats(1),
            root: 2,
        };
        assert_eq!(
            refusal(op),
            "broadcast: root 2 is not in a group of 2 ranks"
        );
        let op = Op::AllReduce {
            buffer: floats(1),
            op: ReduceOp::BitAnd.into(),
        };
        let error = op.validate(0, 2).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert_eq!(
            error.to_string(),
            "all_reduce: band is not defined for elements of type Float"
        );
    }

    #[test]
    fn parts_must_fit_the_whole() {
        let gather = |input, output| Op::AllGatherSingle {
            input: floats(input),
            output: floats(output),
        };
        assert!(gather(3, 6).validate(0, 2).is_ok());
        assert!(gather(0, 0).validate(0, 2).is_ok());
        assert!(refusal(gather(3, 7)).contains("Float[7] does not hold 2 parts like Float[3]"));
    }

    #[test]
    fn an_output_that_may_only_be_read_is_refused() {
        let numbers = [1f32];
        let op = |root| Op::Broadcast {
            buffer: Buffer::from_slice(&numbers),
            root,
        };
        assert!(op(0).validate(0, 2).is_ok());
        assert!(op(1).validate(0, 2).is_err());
    }

    #[test]
    fn splits_must_add_up() {
        let op = |input_splits: &[usize], output_splits: &[usize]| Op::AllToAllVSingle {
            input: floats(3),
            output: floats(4),
            input_splits: input_splits.to_vec(),
            output_splits: output_splits.to_vec(),
        };
        assert!(op(&[1, 2], &[1, 3]).validate(0, 2).is_ok());
        assert!(op(&[1, 1], &[1, 3]).validate(0, 2).is_err());
        assert!(op(&[3], &[1, 3]).validate(0, 2).is_err());
        assert!(op(&[usize::MAX, 4], &[1, 3]).validate(0, 2).is_err());
        assert!(refusal(op(&[2, 1], &[1, 3])).contains("2 as input, 1 as output"));
    }

    #[test]
    fn a_message_needs_another_rank() {
        let op = |peer| Op::Send {
            buffer: floats(1),
            peer,
            tag: 0,
        };
        assert!(op(1).validate(0, 2).is_ok());
        assert!(refusal(op(0)).contains("this rank itself"));
        assert!(refusal(op(2)).contains("not in a group of 2 ranks"));
    }

    #[test]
    fn a_coalesced_block_is_of_one_kind() {
        let send = || Op::Send {
            buffer: floats(1),
            peer: 1,
            tag: 0,
        };
        assert!(Op::Coalesced(vec![send(), send()]).validate(0, 2).is_ok());
        assert!(refusal(Op::Coalesced(vec![send(), Op::Barrier])).contains("both"));
        assert!(refusal(Op::Coalesced(vec![Op::Coalesced(vec![])])).contains("another"));
    }
}
