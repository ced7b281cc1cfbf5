//! Defines the parts of a rank's program: collectives, blocks of them, and batches of messages.

use rcomm_recorder::model::{OpType, ReduceOp};

/// One call with its arguments.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Call {
    pub(super) op: OpType,
    pub(super) name: &'static str,
    /// The shape of the input; empty if there is none.
    pub(super) input: Vec<u64>,
    /// The shape of the output; empty if there is none.
    pub(super) output: Vec<u64>,
    pub(super) dtype: &'static str,
    pub(super) root: Option<u32>,
    pub(super) reduce_op: Option<ReduceOp>,
    /// The elements that an exchange sends to each member and receives from each; otherwise empty.
    pub(super) splits: [Vec<u64>; 2],
    /// Whether the call's data has the sizes that its peers expect.
    pub(super) fits: bool,
    /// The line of the program that makes the call.
    pub(super) line: u32,
}

/// How adjacent pipeline stages exchange messages in both directions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Exchange {
    /// They exchange no messages in both directions.
    #[default]
    None,
    /// Each adjacent stage has one batch, with the messages to it and from it.
    Paired,
    /// Both adjacent stages together have one batch.
    Joint,
    /// Each message is on its own. The earlier stage sends first, and the later one receives first.
    InOrder,
}

/// One message of a batch, from the rank's own point of view.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Message {
    pub(super) sends: bool,
    /// The other end's number within the group; without meaning for a receive from any rank.
    pub(super) peer: u32,
    pub(super) elements: u64,
    /// Whether the receiver takes a message from whichever rank sends first. Such a message is alone in its batch.
    pub(super) from_any: bool,
}

/// One act of a rank's program: a collective, a block of them, or a batch of messages.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Act {
    Collective {
        group: usize,
        calls: Vec<Call>,
    },
    Batch {
        group: usize,
        messages: Vec<Message>,
        line: u32,
    },
}

impl Act {
    pub(super) fn group(&self) -> usize {
        match self {
            Self::Collective { group, .. } | Self::Batch { group, .. } => *group,
        }
    }
}

/// One rank's acts, in order.
#[derive(Clone, Debug, Default)]
pub(super) struct Program {
    pub(super) acts: Vec<Act>,
    /// The acts before which the rank is late, and by how much, in ms.
    pub(super) late: Vec<(usize, u64)>,
}

/// A call without root, splits and reduction.
pub(super) fn collective(
    op: OpType,
    name: &'static str,
    input: &[u64],
    output: &[u64],
    line: u32,
) -> Call {
    Call {
        op,
        name,
        input: input.to_vec(),
        output: output.to_vec(),
        dtype: "BFloat16",
        root: None,
        reduce_op: None,
        splits: [Vec::new(), Vec::new()],
        fits: true,
        line,
    }
}
