//! One operation at one size: its buffers, its call, and the expected result.

use clap::ValueEnum;
use rcomm::{Buffer, Element, OpType, ProcessGroup, ReduceOp, Result};
use std::ops::{Deref, DerefMut};

/// The operations that can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub(crate) enum Operation {
    /// Every rank gets the combined values of all ranks.
    AllReduce,
    /// Every rank gets the parts of all ranks.
    AllGather,
    /// Every rank gets its part of the combined values.
    ReduceScatter,
    /// Every rank sends a part of its buffer to every rank.
    AllToAll,
    /// Every rank gets the root's buffer.
    Broadcast,
    /// The root gets the combined values of all ranks.
    Reduce,
    /// The root gets the parts of all ranks.
    Gather,
    /// Every rank gets its part of the root's buffer.
    Scatter,
    /// No rank leaves before all have arrived.
    Barrier,
    /// Rank 0 and rank 1 send a message back and forth; half of the round trip is reported.
    SendRecv,
}

impl Operation {
    /// The type that the flight recorder gives the operation.
    fn kind(self) -> OpType {
        match self {
            Self::AllReduce => OpType::AllReduce,
            Self::AllGather => OpType::AllGatherSingle,
            Self::ReduceScatter => OpType::ReduceScatterSingle,
            Self::AllToAll => OpType::AllToAllSingle,
            Self::Broadcast => OpType::Broadcast,
            Self::Reduce => OpType::Reduce,
            Self::Gather => OpType::Gather,
            Self::Scatter => OpType::Scatter,
            Self::Barrier => OpType::Barrier,
            Self::SendRecv => OpType::Send,
        }
    }

    /// The name on the command line: `send_recv` for messages, otherwise the name of the kind without `_single`.
    pub(crate) fn name(self) -> &'static str {
        let name = self.kind().name();
        if self == Self::SendRecv {
            "send_recv"
        } else {
            name.strip_suffix("_single").unwrap_or(name)
        }
    }

    /// Whether the operation combines values.
    pub(crate) fn reduces(self) -> bool {
        self.kind().pattern().reduces()
    }

    /// The ratio of busbw to algbw.
    pub(crate) fn bus_factor(self, ranks: u32) -> f64 {
        self.kind().bus().factor(ranks as usize).unwrap_or(1.0)
    }
}

/// How values are combined.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Reduction {
    /// Addition.
    Sum,
    /// The smaller value.
    Min,
    /// The larger value.
    Max,
    /// Multiplication.
    Product,
}

impl From<Reduction> for ReduceOp {
    fn from(reduction: Reduction) -> Self {
        match reduction {
            Reduction::Sum => Self::Sum,
            Reduction::Min => Self::Min,
            Reduction::Max => Self::Max,
            Reduction::Product => Self::Product,
        }
    }
}

/// An element type that represents small whole numbers exactly.
pub(crate) trait Whole: Element + PartialEq {
    /// Converts a number.
    fn whole(value: u8) -> Self;
}

macro_rules! whole {
    ($($type:ty => $from:expr;)+) => { $(
        impl Whole for $type {
            fn whole(value: u8) -> Self {
                $from(value)
            }
        }
    )+ };
}
whole! {
    f32 => f32::from;
    f64 => f64::from;
    rcomm::f16 => |value: u8| rcomm::f16::from_f32(f32::from(value));
    rcomm::bf16 => |value: u8| rcomm::bf16::from_f32(f32::from(value));
    i32 => i32::from;
    i64 => i64::from;
    u8 => |value: u8| value;
}

/// Who allocates the measured buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BufferOwner {
    /// This program.
    Caller,
    /// The group: the buffers are registered.
    Group,
}

/// A buffer that this program or the group has allocated.
enum Memory<T> {
    Caller(Vec<T>),
    Group(Buffer<'static>),
}

impl<T: Whole> Memory<T> {
    /// Allocates `len` zeros.
    fn new(group: &ProcessGroup, owner: BufferOwner, len: usize) -> Result<Self> {
        Ok(match owner {
            BufferOwner::Caller => Self::Caller(vec![T::whole(0); len]),
            BufferOwner::Group => Self::Group(group.allocate::<T>(len)?),
        })
    }
}

impl<T: Whole> Deref for Memory<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match self {
            Self::Caller(values) => values,
            Self::Group(buffer) => buffer
                .as_slice()
                .expect("host memory with this element type"),
        }
    }
}

impl<T: Whole> DerefMut for Memory<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match self {
            Self::Caller(values) => values,
            Self::Group(buffer) => buffer
                .as_mut_slice()
                .expect("host memory with this element type"),
        }
    }
}

/// One case: the buffers of one size, and the call.
pub(crate) struct Case<'a, T> {
    group: &'a ProcessGroup,
    operation: Operation,
    /// How values are combined.
    op: ReduceOp,
    root: u32,
    input: Memory<T>,
    output: Memory<T>,
    /// Number of elements in one rank's part.
    part: usize,
}

/// Returns element number `element` of the input of rank `rank`, in a job of `ranks` ranks whose values `op` combines:
/// 1 or 2, or the neutral value of `op`.
///
/// Every [`Whole`] type represents the numbers up to 255 exactly, and no sum or product is larger. If there are too
/// many ranks for that, only some ranks have a 1 or 2 at an element, and the others have the neutral value. Which ranks
/// these are changes from element to element.
fn input_value(op: ReduceOp, rank: u32, ranks: u32, element: usize) -> u8 {
    // How many ranks may have a 1 or 2: half of them have a 1, the other half a 2.
    let (limit, neutral) = match op {
        ReduceOp::Sum => (170, 0),
        ReduceOp::Product => (14, 1),
        _ => (u32::MAX, 0),
    };
    let stride = ranks.div_ceil(limit).max(1) as usize;
    let turn = rank as usize + element;
    match turn % stride {
        0 => 1 + (turn / stride % 2) as u8,
        _ => neutral,
    }
}

/// Returns element number `element` of a reduction's result.
fn reduced_value(op: ReduceOp, ranks: u32, element: usize) -> u8 {
    let inputs = (0..ranks).map(|rank| input_value(op, rank, ranks, element));
    match op {
        ReduceOp::Min => inputs.min().unwrap_or(0),
        ReduceOp::Max => inputs.max().unwrap_or(0),
        ReduceOp::Product => inputs.fold(1, u8::saturating_mul),
        _ => inputs.fold(0, u8::saturating_add),
    }
}

impl<'a, T: Whole> Case<'a, T> {
    /// Allocates the buffers of this rank, and fills its input.
    pub(crate) fn new(
        group: &'a ProcessGroup,
        operation: Operation,
        op: ReduceOp,
        root: u32,
        bytes: usize,
        owner: BufferOwner,
    ) -> Result<Self> {
        let ranks = group.size() as usize;
        let elements = (bytes / size_of::<T>()).max(1);
        let part = (elements / ranks).max(1);
        let is_root = group.rank() == root;
        let (input, output) = match operation {
            Operation::AllReduce | Operation::Broadcast | Operation::Reduce => (0, elements),
            Operation::SendRecv => (elements, elements),
            Operation::AllGather => (part, part * ranks),
            Operation::ReduceScatter => (part * ranks, part),
            Operation::AllToAll => (part * ranks, part * ranks),
            Operation::Gather => (part, if is_root { part * ranks } else { 0 }),
            Operation::Scatter => (if is_root { part * ranks } else { 0 }, part),
            Operation::Barrier => (0, 0),
        };
        let mut case = Self {
            group,
            operation,
            op,
            root,
            input: Memory::new(group, owner, input)?,
            output: Memory::new(group, owner, output)?,
            part,
        };
        case.fill_input();
        Ok(case)
    }

    /// Number of elements of the larger of this rank's two buffers.
    pub(crate) fn count(&self) -> usize {
        self.input.len().max(self.output.len())
    }

    /// Fills this rank's input.
    fn fill_input(&mut self) {
        let (rank, ranks) = (self.group.rank(), self.group.size());
        let op = self.op;
        let fill = |values: &mut [T]| {
            for (element, value) in values.iter_mut().enumerate() {
                *value = T::whole(input_value(op, rank, ranks, element));
            }
        };
        fill(&mut self.input);
        if self.input.is_empty()
            && self.operation != Operation::Gather
            && self.operation != Operation::Scatter
        {
            fill(&mut self.output);
        }
    }

    /// Sets all elements to zero, for timing, so that a sum over thousands of calls stays finite.
    pub(crate) fn clear(&mut self) {
        self.input.fill(T::whole(0));
        self.output.fill(T::whole(0));
    }

    /// Calls the operation once, and blocks until it has ended. A call of [`Operation::SendRecv`] is one round trip.
    pub(crate) fn run(&mut self) -> Result<()> {
        let (group, part) = (self.group, self.part);
        match self.operation {
            Operation::AllReduce => group.all_reduce(&mut self.output, self.op),
            Operation::Reduce => group.reduce(&mut self.output, self.op, self.root),
            Operation::Broadcast => group.broadcast(&mut self.output, self.root),
            Operation::AllGather => group.all_gather_single(&self.input, &mut self.output),
            Operation::ReduceScatter => {
                group.reduce_scatter_single(&self.input, &mut self.output, self.op)
            }
            Operation::AllToAll => group.all_to_all_single(&self.input, &mut self.output),
            Operation::Gather => {
                let mut outputs: Vec<&mut [T]> = self.output.chunks_exact_mut(part).collect();
                group.gather(&self.input, &mut outputs, self.root)
            }
            Operation::Scatter => {
                let inputs: Vec<&[T]> = self.input.chunks_exact(part).collect();
                group.scatter(&inputs, &mut self.output, self.root)
            }
            Operation::Barrier => group.barrier(),
            Operation::SendRecv => match group.rank() {
                0 => group
                    .send(&self.input, 1, 0)
                    .and_then(|()| group.recv(&mut self.output, 1, 0)),
                1 => group
                    .recv(&mut self.output, 0, 0)
                    .and_then(|()| group.send(&self.input, 0, 0)),
                _ => Ok(()),
            },
        }
    }

    /// Returns the number of wrong elements in the result. Must be called after exactly one call on new buffers.
    pub(crate) fn errors(&self) -> u64 {
        let (rank, ranks) = (self.group.rank(), self.group.size());
        let input_value = |rank: u32, element: usize| input_value(self.op, rank, ranks, element);
        let reduced = |element: usize| reduced_value(self.op, ranks, element);
        let part = self.part;
        let expected = |element: usize| match self.operation {
            Operation::AllReduce => reduced(element),
            Operation::Reduce if rank == self.root => reduced(element),
            Operation::Reduce => input_value(rank, element),
            Operation::ReduceScatter => reduced(rank as usize * part + element),
            Operation::Broadcast => input_value(self.root, element),
            Operation::AllGather | Operation::Gather => {
                input_value((element / part) as u32, element % part)
            }
            Operation::AllToAll => input_value(
                (element / part) as u32,
                rank as usize * part + element % part,
            ),
            Operation::Scatter => input_value(self.root, rank as usize * part + element),
            Operation::Barrier | Operation::SendRecv => input_value(1 - rank.min(1), element),
        };
        if self.operation == Operation::SendRecv && rank > 1 {
            return 0;
        }
        let wrong = self
            .output
            .iter()
            .enumerate()
            .filter(|(element, value)| **value != T::whole(expected(*element)));
        wrong.count() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_command_line() {
        for &operation in Operation::value_variants() {
            let on_command_line = operation.to_possible_value();
            let on_command_line = on_command_line.expect("no operation is left out");
            assert_eq!(on_command_line.get_name(), operation.name());
        }
    }

    #[test]
    fn results_of_any_number_of_ranks_are_exact_and_depend_on_every_rank() {
        for op in [ReduceOp::Sum, ReduceOp::Product] {
            for ranks in [1, 2, 14, 15, 16, 170, 171, 1_000, 4_099] {
                for element in 0..3 {
                    let inputs =
                        (0..ranks).map(|rank| u64::from(input_value(op, rank, ranks, element)));
                    let result: u64 = match op {
                        ReduceOp::Sum => inputs.sum(),
                        _ => inputs.product(),
                    };
                    // The largest number up to which bf16 represents every whole number is 256.
                    assert!(result <= 255, "{op:?} of {ranks} ranks is {result}");
                    assert_eq!(u64::from(reduced_value(op, ranks, element)), result);
                }
                let neutral = u8::from(op == ReduceOp::Product);
                for rank in 0..ranks {
                    let mut values =
                        (0..1_000).map(|element| input_value(op, rank, ranks, element));
                    assert!(values.any(|value| value != neutral), "{op:?}: {rank}");
                }
            }
        }
    }

    #[test]
    fn bus_factors_are_those_of_nccl_tests() {
        let factors = Operation::value_variants()
            .iter()
            .map(|operation| (operation.name(), operation.bus_factor(4)));
        assert_eq!(
            factors.collect::<Vec<_>>(),
            [
                ("all_reduce", 1.5),
                ("all_gather", 0.75),
                ("reduce_scatter", 0.75),
                ("all_to_all", 0.75),
                ("broadcast", 1.0),
                ("reduce", 1.0),
                ("gather", 0.75),
                ("scatter", 0.75),
                ("barrier", 1.0),
                ("send_recv", 1.0),
            ]
        );
    }
}
