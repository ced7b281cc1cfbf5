//! What is refused before anything is sent: what a rank can see to be wrong with its own arguments.

use super::{Op, Reduction};
use crate::buffer::Buffer;
use crate::error::{Error, ErrorKind, Result};
use rcomm_recorder::model::{DType, ReduceOp};

impl<'a> Op<'a> {
    /// Refuses what this rank can see to be wrong, for rank `own` of a group of `size` ranks.
    ///
    /// # Errors
    /// `InvalidArgument` or `Unsupported`, naming operation and argument. Nothing was sent: the group
    /// can be used on.
    pub fn validate(&self, own: u32, size: u32) -> Result<()> {
        self.check(own, size)
            .and_then(|()| self.check_overlaps(own))
            .map_err(|message| match message {
                Wrong::Argument(message) => Error::new(ErrorKind::InvalidArgument, message),
                Wrong::Reduction(op, dtype) => Error::new(
                    ErrorKind::Unsupported,
                    format!("{op} is not defined for elements of type {dtype}"),
                ),
            })
            .map_err(|error| error.during(self.op_type()))
    }

    /// Refuses memory that is written and used once more: by another buffer of the operation. Slices
    /// and vectors cannot overlap, so only foreign memory is looked at.
    fn check_overlaps(&self, own: u32) -> Result<(), Wrong> {
        if !self.has_foreign_memory() {
            return Ok(());
        }
        let mut uses = Vec::new();
        self.collect_uses(own, &mut uses);
        uses.sort_by_key(|it| it.start);
        // The use that reaches furthest, of all and of those that write.
        let mut furthest: [Option<&Use<'_, '_>>; 2] = [None, None];
        for next in &uses {
            let before = furthest[usize::from(!next.writes)];
            if let Some(before) = before.filter(|before| before.end > next.start) {
                return Err(Wrong::Argument(format!(
                    "{:?} and {:?} overlap by {} bytes, and one is written",
                    before.buffer,
                    next.buffer,
                    before.end.min(next.end) - next.start
                )));
            }
            let places = if next.writes { 0..2 } else { 0..1 };
            for place in &mut furthest[places] {
                if place.is_none_or(|it| it.end < next.end) {
                    *place = Some(next);
                }
            }
        }
        Ok(())
    }

    fn has_foreign_memory(&self) -> bool {
        match self {
            Self::Coalesced(ops) => ops.iter().any(Op::has_foreign_memory),
            _ => self.buffers().any(|buffer| buffer.owner().is_some()),
        }
    }

    fn collect_uses<'b>(&'b self, own: u32, uses: &mut Vec<Use<'b, 'a>>) {
        if let Self::Coalesced(ops) = self {
            ops.iter().for_each(|op| op.collect_uses(own, uses));
            return;
        }
        let mut add = |buffer: &'b Buffer<'a>, writes: bool| {
            let start = buffer.as_ptr().addr();
            if !buffer.is_empty() {
                uses.push(Use {
                    start,
                    end: start.saturating_add(buffer.size_bytes()),
                    writes,
                    buffer,
                });
            }
        };
        let is_in_place = matches!(
            self,
            Self::AllReduce { .. }
                | Self::AllReduceCoalesced { .. }
                | Self::Reduce { .. }
                | Self::Broadcast { .. }
        );
        let writes = !self.reads_only(own);
        self.outputs().iter().for_each(|buffer| add(buffer, writes));
        if !is_in_place {
            self.inputs().iter().for_each(|buffer| add(buffer, false));
        }
    }

    /// Whether this rank's lone buffer is only read.
    fn reads_only(&self, own: u32) -> bool {
        matches!(self, Self::Broadcast { root, .. } if *root == own)
            || matches!(self, Self::Reduce { root, .. } if *root != own)
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
        if !self.reads_only(own) {
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

/// Bytes of host memory that an operation uses.
struct Use<'b, 'a> {
    start: usize,
    end: usize,
    writes: bool,
    buffer: &'b Buffer<'a>,
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
#[allow(unsafe_code)]
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
    fn memory_that_is_written_is_used_once() {
        use crate::buffer::{Access, Device};
        use std::ptr::NonNull;
        use std::sync::Arc;
        let memory = Arc::new([0u64; 8]);
        let part = |at: usize, len: usize, access| {
            let start = NonNull::from(&memory[at]).cast();
            // SAFETY: inside the array, which `memory` keeps; only validated, never accessed.
            let part = unsafe {
                Buffer::from_raw(start, len, DType::U64, Device::Cpu, access, memory.clone())
            };
            part.unwrap()
        };
        let gather = |at: usize| Op::AllGatherSingle {
            input: part(at, 2, Access::Read),
            output: part(0, 4, Access::Write),
        };
        assert!(gather(4).validate(0, 2).is_ok());
        let text = refusal(gather(3));
        assert!(
            text.contains("UInt64[4] and UInt64[2] overlap by 8 bytes, and one is written"),
            "{text}"
        );
        // Read twice is fine, written twice is not, nor across the members of a block.
        let swap = |second: usize| Op::AllToAll {
            inputs: vec![part(0, 2, Access::Read), part(1, 2, Access::Read)],
            outputs: vec![part(4, 2, Access::Write), part(second, 2, Access::Write)],
        };
        assert!(swap(6).validate(0, 2).is_ok());
        assert!(refusal(swap(5)).contains("overlap by 8 bytes"));
        let sum = |at: usize| Op::AllReduce {
            buffer: part(at, 2, Access::Write),
            op: ReduceOp::Sum.into(),
        };
        assert!(Op::Coalesced(vec![sum(0), sum(2)]).validate(0, 2).is_ok());
        assert!(refusal(Op::Coalesced(vec![sum(0), sum(1)])).contains("overlap"));
        assert!(
            Op::Coalesced(vec![sum(0), sum(8 - 2)])
                .validate(0, 2)
                .is_ok()
        );
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
