//! [`Op`]: what to do, and with which buffers.
//!
//! The table of operations, [`OpType`], states for each variant what moves, how, and which ranks wait for which.
//! This module defines the fields, each with its role; the accessors of the fields are generated from the roles.

#![deny(clippy::wildcard_enum_match_arm)]

use super::Reduction;
use crate::op::buffer::Buffer;
use crate::op::error::Result;
use rcomm_recorder::model::{OpType, Peer};

/// The buffers of one side of an operation, one or a list.
trait Side<'a> {
    fn buffers(&self) -> &[Buffer<'a>];
    fn buffers_mut(&mut self) -> &mut [Buffer<'a>];
}

impl<'a> Side<'a> for Buffer<'a> {
    #[inline]
    fn buffers(&self) -> &[Buffer<'a>] {
        std::slice::from_ref(self)
    }

    #[inline]
    fn buffers_mut(&mut self) -> &mut [Buffer<'a>] {
        std::slice::from_mut(self)
    }
}

impl<'a> Side<'a> for Vec<Buffer<'a>> {
    #[inline]
    fn buffers(&self) -> &[Buffer<'a>] {
        self
    }

    #[inline]
    fn buffers_mut(&mut self) -> &mut [Buffer<'a>] {
        self
    }
}

/// A field of [`Op`] that can be copied with other buffers instead of those that it holds.
trait OpField<'a> {
    type Over<'b>;

    fn over<'b>(&self, map: &impl Fn(&Buffer<'a>) -> Result<Buffer<'b>>) -> Result<Self::Over<'b>>;
}

impl<'a> OpField<'a> for Buffer<'a> {
    type Over<'b> = Buffer<'b>;

    fn over<'b>(&self, map: &impl Fn(&Buffer<'a>) -> Result<Buffer<'b>>) -> Result<Buffer<'b>> {
        map(self)
    }
}

impl<'a> OpField<'a> for Vec<Buffer<'a>> {
    type Over<'b> = Vec<Buffer<'b>>;

    fn over<'b>(
        &self,
        map: &impl Fn(&Buffer<'a>) -> Result<Buffer<'b>>,
    ) -> Result<Vec<Buffer<'b>>> {
        self.iter().map(map).collect()
    }
}

macro_rules! fields_without_buffers {
    ($($type:ty),+) => { $(
        impl<'a> OpField<'a> for $type {
            type Over<'b> = Self;

            fn over<'b>(&self, _: &impl Fn(&Buffer<'a>) -> Result<Buffer<'b>>) -> Result<Self> {
                Ok(self.clone())
            }
        }
    )+ };
}
fields_without_buffers!(Reduction, u32, Option<u32>, Vec<usize>);

/// The inputs of an operation that are not outputs as well, its outputs, and its splits.
#[derive(Debug)]
pub struct Sides<'o, 'a> {
    /// Buffers that are only read.
    pub inputs: &'o [Buffer<'a>],
    /// Buffers that are written; where the operation works in place they hold its inputs.
    pub outputs: &'o mut [Buffer<'a>],
    /// Numbers of elements sent to and received from each rank; `None` for an operation without splits.
    pub splits: Option<(&'o [usize], &'o [usize])>,
}

/// Picks the field of a role out of a variant's fields: `pick!(role in field role field role ...)`.
macro_rules! pick {
    (inputs in) => { &[] };
    (inputs in $field:ident input $($rest:tt)*) => { $field.buffers() };
    (inputs in $field:ident both $($rest:tt)*) => { $field.buffers() };
    (inputs_only in) => { &[] };
    (inputs_only in $field:ident input $($rest:tt)*) => { $field.buffers() };
    (outputs in) => { &[] };
    (outputs in $field:ident output $($rest:tt)*) => { $field.buffers() };
    (outputs in $field:ident both $($rest:tt)*) => { $field.buffers() };
    (outputs_mut in) => { &mut [] };
    (outputs_mut in $field:ident output $($rest:tt)*) => { $field.buffers_mut() };
    (outputs_mut in $field:ident both $($rest:tt)*) => { $field.buffers_mut() };
    (root in) => { None };
    (root in $field:ident root $($rest:tt)*) => { Some(*$field) };
    (reduction in) => { None };
    (reduction in $field:ident reduction $($rest:tt)*) => { Some($field) };
    (tag in) => { None };
    (tag in $field:ident tag $($rest:tt)*) => { Some(*$field) };
    (peer in) => { Peer::None };
    (peer in $field:ident to $($rest:tt)*) => { Peer::Rank(*$field) };
    (peer in $field:ident from $($rest:tt)*) => {
        match *$field {
            Some(peer) => Peer::Rank(peer),
            None => Peer::Any,
        }
    };
    (splits in) => { None };
    (splits in $in:ident input_splits $out:ident output_splits $($rest:tt)*) => {
        Some(($in.as_slice(), $out.as_slice()))
    };
    ($wanted:ident in $field:ident $role:ident $($rest:tt)*) => { pick!($wanted in $($rest)*) };
}

/// Declares [`Op`], and its accessors from the roles of its fields: `both`, `input` or `output` for buffers,
/// `reduction`, `root`, `to` or `from` for the other end, `tag`, and `input_splits` followed by
/// `output_splits`.
macro_rules! operations {
    (
        $(#[$head:meta])*
        pub enum Op<'a> {
            $(
                $(#[$doc:meta])*
                $variant:ident $({
                    $( $(#[$field_doc:meta])* $field:ident: $type:ty as $role:ident, )+
                })?,
            )+
        }
        and
        $(#[$block_doc:meta])*
        Coalesced(Vec<Op<'a>>)
    ) => {
        $(#[$head])*
        #[derive(Debug)]
        #[non_exhaustive]
        pub enum Op<'a> {
            $(
                $(#[$doc])*
                $variant $({ $( $(#[$field_doc])* $field: $type, )+ })?,
            )+
            $(#[$block_doc])*
            Coalesced(Vec<Op<'a>>),
        }

        #[allow(unused_variables)]
        impl<'a> Op<'a> {
            /// The type of the operation.
            #[inline]
            pub const fn op_type(&self) -> OpType {
                match self {
                    $( Self::$variant { .. } => OpType::$variant, )+
                    Self::Coalesced(_) => OpType::Coalesced,
                }
            }

            /// The buffers that are inputs; none for a coalesced block. A buffer that is input and output is here and
            /// in [`outputs`](Self::outputs). Some ranks do not read theirs: all but the root of a broadcast.
            #[inline]
            pub fn inputs(&self) -> &[Buffer<'a>] {
                match self {
                    $( Self::$variant { $($($field),+)? } => pick!(inputs in $($($field $role)+)?), )+
                    Self::Coalesced(_) => &[],
                }
            }

            /// The buffers that are inputs and not outputs; none for a coalesced block.
            #[inline]
            pub(super) fn inputs_only(&self) -> &[Buffer<'a>] {
                match self {
                    $( Self::$variant { $($($field),+)? } => {
                        pick!(inputs_only in $($($field $role)+)?)
                    } )+
                    Self::Coalesced(_) => &[],
                }
            }

            /// The buffers that are outputs; none for a coalesced block. Some ranks do not write theirs: the
            /// root of a broadcast, and all ranks but the root of a reduce.
            #[inline]
            pub fn outputs(&self) -> &[Buffer<'a>] {
                match self {
                    $( Self::$variant { $($($field),+)? } => pick!(outputs in $($($field $role)+)?), )+
                    Self::Coalesced(_) => &[],
                }
            }

            /// Like [`outputs`](Self::outputs), to write to.
            #[inline]
            pub fn outputs_mut(&mut self) -> &mut [Buffer<'a>] {
                self.sides().outputs
            }

            /// The inputs that are not outputs as well, and the outputs to write to; none for a coalesced block.
            #[inline]
            pub fn sides(&mut self) -> Sides<'_, 'a> {
                match self {
                    $( Self::$variant { $($($field),+)? } => Sides {
                        inputs: pick!(inputs_only in $($($field $role)+)?),
                        outputs: pick!(outputs_mut in $($($field $role)+)?),
                        splits: pick!(splits in $($($field $role)+)?),
                    }, )+
                    Self::Coalesced(_) => Sides { inputs: &[], outputs: &mut [], splits: None },
                }
            }

            /// The root of a rooted operation; `None` for others.
            #[inline]
            pub const fn root(&self) -> Option<u32> {
                match self {
                    $( Self::$variant { $($($field),+)? } => pick!(root in $($($field $role)+)?), )+
                    Self::Coalesced(_) => None,
                }
            }

            /// The reduction of a reducing operation; `None` for others.
            #[inline]
            pub const fn reduction(&self) -> Option<&Reduction> {
                match self {
                    $( Self::$variant { $($($field),+)? } => {
                        pick!(reduction in $($($field $role)+)?)
                    } )+
                    Self::Coalesced(_) => None,
                }
            }

            /// The other end of a send or receive; [`Peer::None`] for others.
            #[inline]
            pub const fn peer(&self) -> Peer {
                match self {
                    $( Self::$variant { $($($field),+)? } => pick!(peer in $($($field $role)+)?), )+
                    Self::Coalesced(_) => Peer::None,
                }
            }

            /// The tag of a send or receive; `None` for others.
            #[inline]
            pub const fn tag(&self) -> Option<u32> {
                match self {
                    $( Self::$variant { $($($field),+)? } => pick!(tag in $($($field $role)+)?), )+
                    Self::Coalesced(_) => None,
                }
            }

            /// Numbers of elements sent to and received from each rank; `None` for an operation without splits.
            #[inline]
            pub fn splits(&self) -> Option<(&[usize], &[usize])> {
                match self {
                    $( Self::$variant { $($($field),+)? } => pick!(splits in $($($field $role)+)?), )+
                    Self::Coalesced(_) => None,
                }
            }

            /// The same operation over what `map` makes of each buffer.
            ///
            /// # Errors
            /// The first error of `map`.
            pub fn map_buffers<'b>(
                &self,
                map: &impl Fn(&Buffer<'a>) -> Result<Buffer<'b>>,
            ) -> Result<Op<'b>> {
                Ok(match self {
                    $( Self::$variant { $($($field),+)? } => Op::$variant {
                        $($($field: OpField::over($field, map)?),+)?
                    }, )+
                    Self::Coalesced(ops) => {
                        let ops = ops.iter().map(|op| op.map_buffers(map));
                        Op::Coalesced(ops.collect::<Result<_>>()?)
                    }
                })
            }
        }
    };
}

operations! {
    /// One operation of a group. Ranks in it are ranks **of the group**.
    ///
    /// Where the fields are `inputs` or `outputs`, there is one buffer for each rank of the group, unless
    /// noted otherwise. Inputs are only read, and outputs are written. The description of a field `buffer` or `buffers`
    /// says which of the two it is, or that it is both.
    pub enum Op<'a> {
        /// Every rank's `buffer` ends as the reduction of all ranks' buffers.
        AllReduce {
            /// Input, then result.
            buffer: Buffer<'a> as both,
            /// How to combine.
            op: Reduction as reduction,
        },
        /// Like `AllReduce` for each of several buffers, of any types, as one operation.
        AllReduceCoalesced {
            /// Inputs, then results: any number, which is the same on all ranks.
            buffers: Vec<Buffer<'a>> as both,
            /// How to combine.
            op: Reduction as reduction,
        },
        /// The root's `buffer` ends as the reduction of all ranks' buffers; the others' are left as they were.
        Reduce {
            /// Input; on the root, afterwards the result.
            buffer: Buffer<'a> as both,
            /// How to combine.
            op: Reduction as reduction,
            /// The rank that gets the result.
            root: u32 as root,
        },
        /// Every rank's `buffer` ends as the root's.
        Broadcast {
            /// Input on the root, output elsewhere. The root's may be read-only.
            buffer: Buffer<'a> as both,
            /// The rank whose content is sent.
            root: u32 as root,
        },
        /// No rank leaves before every rank has arrived.
        Barrier,
        /// `outputs[r]` ends as rank r's `input`; all of one size.
        AllGather {
            /// This rank's part.
            input: Buffer<'a> as input,
            /// The parts of all ranks.
            outputs: Vec<Buffer<'a>> as output,
        },
        /// `output` ends as the inputs of all ranks one after the other.
        AllGatherSingle {
            /// This rank's part.
            input: Buffer<'a> as input,
            /// The parts of all ranks: group size times as long.
            output: Buffer<'a> as output,
        },
        /// `outputs[r]` ends as rank r's `input`; sizes may differ from rank to rank.
        AllGatherV {
            /// This rank's part.
            input: Buffer<'a> as input,
            /// The parts of all ranks: `outputs[r]` has the length of rank r's input.
            outputs: Vec<Buffer<'a>> as output,
        },
        /// Like `AllGatherSingle` for each pair of an input and an output, as one operation.
        AllGatherCoalesced {
            /// This rank's parts: any number, which is the same on all ranks.
            inputs: Vec<Buffer<'a>> as input,
            /// One for each input.
            outputs: Vec<Buffer<'a>> as output,
        },
        /// `output` receives the reduction over all ranks of `inputs[own rank]`; all of one size.
        ReduceScatter {
            /// One part for each rank.
            inputs: Vec<Buffer<'a>> as input,
            /// This rank's result.
            output: Buffer<'a> as output,
            /// How to combine.
            op: Reduction as reduction,
        },
        /// Like `ReduceScatter`, with the parts one after the other in `input`.
        ReduceScatterSingle {
            /// All parts: group size times as long as `output`.
            input: Buffer<'a> as input,
            /// This rank's result.
            output: Buffer<'a> as output,
            /// How to combine.
            op: Reduction as reduction,
        },
        /// Like `ReduceScatter`; `inputs[r]` has the length of rank r's output.
        ReduceScatterV {
            /// One part for each rank.
            inputs: Vec<Buffer<'a>> as input,
            /// This rank's result.
            output: Buffer<'a> as output,
            /// How to combine.
            op: Reduction as reduction,
        },
        /// Like `ReduceScatterSingle` for each pair of an input and an output, as one operation.
        ReduceScatterCoalesced {
            /// All parts, as in `ReduceScatterSingle`: any number of buffers, which is the same on all ranks.
            inputs: Vec<Buffer<'a>> as input,
            /// One for each input.
            outputs: Vec<Buffer<'a>> as output,
            /// How to combine.
            op: Reduction as reduction,
        },
        /// `outputs[r]` ends as rank r's `inputs[own rank]`. Sizes may differ between pairs of ranks.
        AllToAll {
            /// The part for each rank.
            inputs: Vec<Buffer<'a>> as input,
            /// The part from each rank.
            outputs: Vec<Buffer<'a>> as output,
        },
        /// Like `AllToAll` with equal parts, which lie one after the other in `input` and in `output`.
        AllToAllSingle {
            /// The parts for all ranks, in order of rank.
            input: Buffer<'a> as input,
            /// The parts from all ranks, in order of rank; as long as `input`.
            output: Buffer<'a> as output,
        },
        /// Like `AllToAll`; the parts lie one after the other in `input` and in `output`.
        AllToAllVSingle {
            /// The parts for all ranks, in order of rank.
            input: Buffer<'a> as input,
            /// The parts from all ranks, in order of rank.
            output: Buffer<'a> as output,
            /// Elements to each rank; their sum is the length of `input`.
            input_splits: Vec<usize> as input_splits,
            /// Elements from each rank; their sum is the length of `output`.
            output_splits: Vec<usize> as output_splits,
        },
        /// On the root, `outputs[r]` ends as rank r's `input`; all of one size.
        Gather {
            /// This rank's part.
            input: Buffer<'a> as input,
            /// The parts of all ranks; empty on other ranks than the root.
            outputs: Vec<Buffer<'a>> as output,
            /// The rank that gets the parts.
            root: u32 as root,
        },
        /// Like `Gather`; sizes may differ from rank to rank.
        GatherV {
            /// This rank's part.
            input: Buffer<'a> as input,
            /// The parts of all ranks; empty on other ranks than the root.
            outputs: Vec<Buffer<'a>> as output,
            /// The rank that gets the parts.
            root: u32 as root,
        },
        /// `output` ends as the root's `inputs[own rank]`; all of one size.
        Scatter {
            /// One part for each rank; empty on other ranks than the root.
            inputs: Vec<Buffer<'a>> as input,
            /// This rank's part.
            output: Buffer<'a> as output,
            /// The rank whose parts are sent.
            root: u32 as root,
        },
        /// Like `Scatter`; sizes may differ from rank to rank.
        ScatterV {
            /// One part for each rank; empty on other ranks than the root.
            inputs: Vec<Buffer<'a>> as input,
            /// This rank's part.
            output: Buffer<'a> as output,
            /// The rank whose parts are sent.
            root: u32 as root,
        },
        /// `buffer` goes to `peer`. Messages of one sender, receiver and tag arrive in order of issue.
        Send {
            /// The message, which is only read.
            buffer: Buffer<'a> as input,
            /// Its receiver.
            peer: u32 as to,
            /// The receive must have the same tag.
            tag: u32 as tag,
        },
        /// `buffer` ends as the next message from `peer` with this tag, which must have the same length.
        Recv {
            /// The message is written here.
            buffer: Buffer<'a> as output,
            /// The sender; any rank if `None`, and [`Done::source`](crate::backend::Done) then says which.
            peer: Option<u32> as from,
            /// The send must have the same tag.
            tag: u32 as tag,
        },
    }
    and
    /// Several operations issued as one: all may proceed at once, none waits for another. They are all sends
    /// and receives, or all collectives, which then are the same on all ranks.
    Coalesced(Vec<Op<'a>>)
}

impl<'a> Op<'a> {
    /// Whether the operation is a send, a receive, or a coalesced block of these.
    #[inline]
    pub fn is_p2p(&self) -> bool {
        if let Self::Coalesced(ops) = self {
            ops.iter().any(Op::is_p2p)
        } else {
            self.op_type().is_p2p()
        }
    }

    /// The first buffer; `None` if there is none.
    #[inline]
    pub fn any_buffer(&self) -> Option<&Buffer<'a>> {
        if let Self::Coalesced(ops) = self {
            ops.iter().find_map(Op::any_buffer)
        } else {
            self.inputs().first().or_else(|| self.outputs().first())
        }
    }

    /// All buffers, those that are input and output twice; none for a coalesced block.
    #[inline]
    pub(super) fn buffers(&self) -> impl Iterator<Item = &Buffer<'a>> {
        self.inputs().iter().chain(self.outputs())
    }
}
