//! What is refused before anything is sent: what a rank can see to be wrong with its own arguments.

#[cfg(test)]
#[allow(unsafe_code)]
mod tests;

use super::{Op, Reduction};
use crate::op::buffer::Buffer;
use crate::op::error::{Error, ErrorKind, Result};
use rcomm_recorder::model::{DType, ReduceOp};

impl<'a> Op<'a> {
    /// Refuses what this rank can see to be wrong, for rank `own` of a group of `size` ranks.
    ///
    /// # Errors
    /// `InvalidArgument` or `Unsupported`, naming operation and argument. Nothing was sent: the group
    /// can be used on.
    #[inline]
    pub fn validate(&self, own: u32, size: u32) -> Result<()> {
        if self.is_plain(own, size) {
            return Ok(());
        }
        self.check(own, size)
            .and_then(|()| self.check_overlaps(own))
            .map_err(|wrong| self.refusal(wrong))
    }

    /// Whether nothing can be wrong with it, as far as that is seen at a glance: of what is called most
    /// often, over slices of the caller's. All else is looked at in full.
    #[inline]
    fn is_plain(&self, own: u32, size: u32) -> bool {
        // A loan is of host memory, and Rust sees to it that no other overlaps one for writing.
        let writable = |buffer: &Buffer<'_>| buffer.is_lent() && buffer.is_writable();
        let holds = |whole: &Buffer<'_>, part: &Buffer<'_>| {
            whole.dtype() == part.dtype()
                && part.len().checked_mul(size as usize) == Some(whole.len())
        };
        match self {
            Self::Barrier => true,
            Self::AllReduce { buffer, op } => {
                writable(buffer) && Reduction::allows(op.op, buffer.dtype())
            }
            Self::AllGatherSingle { input, output } => {
                input.is_lent() && writable(output) && holds(output, input)
            }
            Self::ReduceScatterSingle { input, output, op } => {
                input.is_lent()
                    && writable(output)
                    && holds(input, output)
                    && Reduction::allows(op.op, input.dtype())
            }
            Self::AllToAllSingle { input, output } => {
                input.is_lent()
                    && writable(output)
                    && input.dtype() == output.dtype()
                    && input.len() == output.len()
                    && input.len().is_multiple_of(size as usize)
            }
            Self::Send { buffer, peer, .. } => buffer.is_lent() && *peer < size && *peer != own,
            Self::Recv {
                buffer,
                peer: Some(peer),
                ..
            } => writable(buffer) && *peer < size && *peer != own,
            _ => false,
        }
    }

    #[cold]
    fn refusal(&self, wrong: Wrong) -> Error {
        let error = match wrong {
            Wrong::Argument(message) => Error::new(ErrorKind::InvalidArgument, message),
            Wrong::Reduction(op, dtype) => Error::new(
                ErrorKind::Unsupported,
                format!("{op} is not defined for elements of type {dtype}"),
            ),
        };
        error.during(self.op_type())
    }

    /// Refuses memory that is written and used once more: by another buffer of the operation. Slices
    /// and vectors cannot overlap, so only foreign memory is looked at.
    #[inline]
    fn check_overlaps(&self, own: u32) -> Result<(), Wrong> {
        if !self.has_foreign_memory() {
            return Ok(());
        }
        self.compare_uses(own)
    }

    fn compare_uses(&self, own: u32) -> Result<(), Wrong> {
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

    #[inline]
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
        // Each asked once: a call of a tenth of a microsecond has no time for more.
        let (inputs, outputs) = (self.inputs(), self.outputs());
        if let Some(first) = inputs.first().or_else(|| outputs.first()) {
            for buffer in inputs.iter().chain(outputs) {
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
            for buffer in inputs {
                if !Reduction::allows(reduction.op, buffer.dtype()) {
                    return Err(Wrong::Reduction(reduction.op, buffer.dtype()));
                }
            }
        }
        if !self.reads_only(own) {
            for output in outputs {
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

#[inline]
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
