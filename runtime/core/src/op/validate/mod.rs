//! Checks of a rank's own arguments, before anything is sent.

#![deny(clippy::wildcard_enum_match_arm)]

#[cfg(test)]
#[allow(unsafe_code)]
mod tests;

use super::{Op, Reduction};
use crate::op::buffer::{Buffer, Device};
use crate::op::error::{Error, ErrorKind, Result};
use rcomm_recorder::model::{DType, Layout, Parts, Pattern, Peer, ReduceOp};

impl<'a> Op<'a> {
    /// Refuses arguments that rank `own_rank` of a group of `size` ranks can see to be wrong.
    ///
    /// # Errors
    /// `InvalidArgument` or `Unsupported`, naming operation and argument. Nothing was sent: the group
    /// is still usable.
    #[inline]
    pub fn validate(&self, own_rank: u32, size: u32) -> Result<()> {
        if self.is_plain(own_rank, size) {
            return Ok(());
        }
        self.check(own_rank, size)
            .and_then(|()| self.check_overlaps(own_rank))
            .map_err(|wrong| self.refusal(wrong))
    }

    /// A cheap check that accepts barriers, the most frequent operations over the caller's slices, and an all-reduce
    /// of one buffer in any memory. All others are checked in full.
    #[inline]
    fn is_plain(&self, own_rank: u32, size: u32) -> bool {
        // Lent memory is host memory, and Rust ensures that no other loan overlaps one for writing.
        let writable = |buffer: &Buffer<'_>| buffer.is_lent() && buffer.is_writable();
        let holds = |whole: &Buffer<'_>, part: &Buffer<'_>| {
            whole.dtype() == part.dtype()
                && part.len().checked_mul(size as usize) == Some(whole.len())
        };
        let kind = self.op_type();
        let is_single = kind.layout() == Layout::Single && !kind.has_splits();
        let (inputs, outputs) = (self.inputs(), self.outputs());
        match kind.pattern() {
            Pattern::Barrier => true,
            Pattern::AllReduce => match (self.reduction(), outputs) {
                // There is no second buffer, which could be on another device or overlap this one.
                (Some(reduction), [buffer]) => {
                    buffer.is_writable()
                        && reduction.scale.is_none()
                        && Reduction::allows(reduction.op, buffer.dtype())
                }
                _ => false,
            },
            Pattern::AllGather => match (inputs, outputs) {
                ([input], [output]) if is_single => {
                    input.is_lent() && writable(output) && holds(output, input)
                }
                _ => false,
            },
            Pattern::ReduceScatter => match (self.reduction(), inputs, outputs) {
                (Some(reduction), [input], [output]) if is_single => {
                    input.is_lent()
                        && writable(output)
                        && holds(input, output)
                        && reduction.scale.is_none()
                        && Reduction::allows(reduction.op, input.dtype())
                }
                _ => false,
            },
            Pattern::AllToAll => match (inputs, outputs) {
                ([input], [output]) if is_single => {
                    input.is_lent()
                        && writable(output)
                        && input.dtype() == output.dtype()
                        && input.len() == output.len()
                        && input.len().is_multiple_of(size as usize)
                }
                _ => false,
            },
            Pattern::Send | Pattern::Recv => {
                let Peer::Rank(peer) = self.peer() else {
                    return false;
                };
                inputs.iter().all(Buffer::is_lent)
                    && outputs.iter().all(writable)
                    && peer < size
                    && peer != own_rank
            }
            Pattern::Reduce
            | Pattern::Broadcast
            | Pattern::Gather
            | Pattern::Scatter
            | Pattern::Block
            | Pattern::Agreement
            | Pattern::OneSided
            | Pattern::Unknown => false,
        }
    }

    #[cold]
    fn refusal(&self, wrong: Refusal) -> Error {
        let error = match wrong {
            Refusal::Argument(message) => Error::new(ErrorKind::InvalidArgument, message),
            Refusal::Reduction(op, dtype) => Error::new(
                ErrorKind::Unsupported,
                format!("{op} is not defined for elements of type {dtype}"),
            ),
        };
        error.during(self.op_type())
    }

    /// Refuses memory that one buffer of the operation writes and another one uses. Slices and vectors cannot
    /// overlap, so only foreign memory is checked.
    #[inline]
    fn check_overlaps(&self, own_rank: u32) -> Result<(), Refusal> {
        if !self.has_foreign_memory() {
            return Ok(());
        }
        self.compare_uses(own_rank)
    }

    /// Whether the operation uses at most one buffer, so that no two can overlap.
    fn has_at_most_one_buffer(&self) -> bool {
        let scale = self.reduction().and_then(|by| by.scale.as_deref());
        let is_block = matches!(self, Self::Coalesced(_));
        !is_block && scale.is_none() && self.outputs().len() + self.inputs_only().len() <= 1
    }

    /// Refuses two uses of the same memory of which one writes.
    fn compare_uses(&self, own_rank: u32) -> Result<(), Refusal> {
        if self.has_at_most_one_buffer() {
            return Ok(());
        }
        let mut uses = Vec::new();
        self.collect_uses(own_rank, &mut uses);
        uses.sort_by_key(|buffer_use| buffer_use.start);
        // The use with the highest end address so far: of all uses, and of those that write.
        let mut furthest: [Option<&Use<'_, '_>>; 2] = [None, None];
        for next in &uses {
            let before = furthest[usize::from(!next.writes)];
            if let Some(before) = before.filter(|before| before.end > next.start) {
                return Err(Refusal::Argument(format!(
                    "{:?} and {:?} overlap by {} bytes, and one is written",
                    before.buffer,
                    next.buffer,
                    before.end.min(next.end) - next.start
                )));
            }
            let slots = if next.writes { 0..2 } else { 0..1 };
            for slot in &mut furthest[slots] {
                if slot.is_none_or(|furthest| furthest.end < next.end) {
                    *slot = Some(next);
                }
            }
        }
        Ok(())
    }

    #[inline]
    fn has_foreign_memory(&self) -> bool {
        if let Self::Coalesced(ops) = self {
            ops.iter().any(Op::has_foreign_memory)
        } else {
            self.buffers().any(|buffer| buffer.owner().is_some())
        }
    }

    /// Adds the memory that the operation uses on this rank to `uses`.
    fn collect_uses<'b>(&'b self, own_rank: u32, uses: &mut Vec<Use<'b, 'a>>) {
        if let Self::Coalesced(ops) = self {
            ops.iter().for_each(|op| op.collect_uses(own_rank, uses));
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
        let writes = !self.reads_only(own_rank);
        self.outputs().iter().for_each(|buffer| add(buffer, writes));
        let inputs = self.inputs_only().iter();
        inputs.for_each(|buffer| add(buffer, false));
        if let Some(scale) = self
            .reduction()
            .and_then(|reduction| reduction.scale.as_deref())
        {
            add(scale, false);
        }
    }

    /// Whether this rank only reads the operation's one buffer, although it is an output on other ranks.
    fn reads_only(&self, own_rank: u32) -> bool {
        let (pattern, is_root) = (self.op_type().pattern(), self.root() == Some(own_rank));
        (pattern == Pattern::Broadcast && is_root) || (pattern == Pattern::Reduce && !is_root)
    }

    /// Checks everything but overlaps of memory.
    fn check(&self, own_rank: u32, size: u32) -> Result<(), Refusal> {
        // Each accessor is called once, to save time: a short call takes a tenth of a microsecond.
        let (inputs, outputs) = (self.inputs(), self.outputs());
        if let Some(first) = inputs.first().or_else(|| outputs.first()) {
            for buffer in inputs.iter().chain(outputs) {
                check(buffer.device() == first.device(), || {
                    let (device, other) = (buffer.device(), first.device());
                    format!(
                        "{buffer:?} and {first:?} are on different devices, {device} and {other}"
                    )
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
                    return Err(Refusal::Reduction(reduction.op, buffer.dtype()));
                }
            }
            if reduction.op == ReduceOp::PremulSum
                && let Some(scale) = &reduction.scale
            {
                check_scale(scale, inputs)?;
            }
        }
        if !self.reads_only(own_rank) {
            for output in outputs {
                check(output.is_writable(), || {
                    format!("the output {output:?} may only be read")
                })?;
            }
        }
        let pattern = self.op_type().pattern();
        match pattern {
            Pattern::AllReduce
            | Pattern::Reduce
            | Pattern::Broadcast
            | Pattern::Barrier
            | Pattern::Agreement
            | Pattern::OneSided
            | Pattern::Unknown => Ok(()),
            Pattern::AllGather => self.check_parts("output", inputs, outputs, own_rank, size),
            Pattern::ReduceScatter => self.check_parts("input", outputs, inputs, own_rank, size),
            // The parts are listed on the root alone.
            Pattern::Gather | Pattern::Scatter => {
                let listed = if self.root() == Some(own_rank) {
                    size
                } else {
                    0
                };
                if pattern == Pattern::Gather {
                    self.check_parts("output", inputs, outputs, own_rank, listed)
                } else {
                    self.check_parts("input", outputs, inputs, own_rank, listed)
                }
            }
            Pattern::AllToAll => self.check_exchange(inputs, outputs, own_rank, size),
            Pattern::Send | Pattern::Recv => match self.peer() {
                Peer::Rank(peer) => {
                    check(peer < size, || {
                        format!("peer {peer} is not in a group of {size} ranks")
                    })?;
                    check(peer != own_rank, || {
                        format!(
                            "peer {peer} is this rank itself: such a message needs its send and its receive in \
                             one batch"
                        )
                    })
                }
                Peer::Any | Peer::None => check(size > 1, || {
                    "the group has no other rank to receive from".to_owned()
                }),
            },
            Pattern::Block => self.check_block(own_rank, size),
        }
    }

    /// Checks `own_parts`, the parts of this rank, against `wholes`, the buffers for the parts of `size` ranks. If
    /// `wholes` is a list, it has one buffer for each rank; otherwise it has a buffer for each of `own_parts`, which
    /// holds that part of all ranks.
    fn check_parts(
        &self,
        side: &str,
        own_parts: &[Buffer<'_>],
        wholes: &[Buffer<'_>],
        own_rank: u32,
        size: u32,
    ) -> Result<(), Refusal> {
        let kind = self.op_type();
        match (kind.layout(), own_parts) {
            (Layout::List, [own_part]) => {
                check_list(side, wholes, size)?;
                match kind.parts() {
                    Parts::Equal => check_even(own_part, wholes),
                    Parts::PerRank | Parts::PerPair => check_own(own_part, wholes, own_rank),
                }
            }
            (Layout::Several, _) => {
                check_pairs(self.inputs(), self.outputs())?;
                let mut pairs = own_parts.iter().zip(wholes);
                pairs.try_for_each(|(own_part, whole)| check_holds(own_part, whole, size, side))
            }
            (Layout::Single, _) => {
                let mut pairs = own_parts.iter().zip(wholes);
                pairs.try_for_each(|(own_part, whole)| check_holds(own_part, whole, size, side))
            }
            (Layout::List | Layout::Absent | Layout::InPlace | Layout::Sparse, _) => Ok(()),
        }
    }

    /// Checks the parts that an all-to-all sends and receives.
    fn check_exchange(
        &self,
        inputs: &[Buffer<'_>],
        outputs: &[Buffer<'_>],
        own_rank: u32,
        size: u32,
    ) -> Result<(), Refusal> {
        if self.op_type().layout() == Layout::List {
            check_list("input", inputs, size)?;
            check_list("output", outputs, size)?;
            check_types(self.buffers())?;
            let (out, back) = (&inputs[own_rank as usize], &outputs[own_rank as usize]);
            return check(out.len() == back.len(), || {
                format!("the part for this rank itself is {out:?} as input, {back:?} as output")
            });
        }
        check_types(self.buffers())?;
        let ([input], [output]) = (inputs, outputs) else {
            return Ok(());
        };
        let Some((input_splits, output_splits)) = self.splits() else {
            check(input.len() == output.len(), || {
                format!("input {input:?} and output {output:?} differ in length")
            })?;
            return check(input.len().is_multiple_of(size as usize), || {
                format!("input {input:?} does not divide into {size} equal parts")
            });
        };
        check_splits("input", input, input_splits, size)?;
        check_splits("output", output, output_splits, size)?;
        let (out, back) = (
            input_splits[own_rank as usize],
            output_splits[own_rank as usize],
        );
        check(out == back, || {
            format!("the split for this rank itself is {out} as input, {back} as output")
        })
    }

    /// Checks a coalesced block and the operations in it.
    fn check_block(&self, own_rank: u32, size: u32) -> Result<(), Refusal> {
        let Self::Coalesced(ops) = self else {
            return Ok(());
        };
        let p2p = ops.iter().filter(|op| op.is_p2p()).count();
        check(p2p == 0 || p2p == ops.len(), || {
            "a coalesced block holds both collectives and point-to-point operations".to_owned()
        })?;
        check(!ops.iter().any(|op| matches!(op, Op::Coalesced(_))), || {
            "a coalesced block holds another".to_owned()
        })?;
        messages_to_self(ops, own_rank)?;
        // No group has a rank of this number, so a message of this rank to itself passes the check of its peer.
        let no_rank = u32::MAX;
        ops.iter().try_for_each(|op| {
            let is_to_self = op.is_p2p() && op.peer() == Peer::Rank(own_rank);
            op.check(if is_to_self { no_rank } else { own_rank }, size)
        })
    }

    /// Copies the messages of a block from this rank to itself, in host memory. A backend for devices sends them
    /// itself. The block has passed [`validate`](Self::validate).
    ///
    /// # Errors
    /// `InvalidArgument` if a message does not fit, which `validate` refuses.
    #[cold]
    pub(crate) fn deliver_to_self(&mut self, own_rank: u32) -> Result<()> {
        let Self::Coalesced(ops) = self else {
            return Ok(());
        };
        let pairs = messages_to_self(ops, own_rank).unwrap_or_default();
        for (send, recv) in pairs {
            let both = ops.get_disjoint_mut([send, recv]);
            if let Ok(
                [
                    Self::Send { buffer: from, .. },
                    Self::Recv { buffer: to, .. },
                ],
            ) = both
                && from.device() == Device::Cpu
            {
                to.copy_from(from)?;
            }
        }
        Ok(())
    }
}

/// Checks the buffer that holds the factor by which a `PremulSum` multiplies `inputs`.
fn check_scale(scale: &Buffer<'_>, inputs: &[Buffer<'_>]) -> Result<(), Refusal> {
    check(scale.len() == 1, || {
        format!("the factor {scale:?} is not one element")
    })?;
    for input in inputs {
        check(scale.dtype() == input.dtype(), || {
            format!(
                "the factor {scale:?} is of another type than {input:?}: multiply by a number of the same type"
            )
        })?;
        let is_near = scale.device() == Device::Cpu || scale.device() == input.device();
        check(is_near, || {
            let (device, other) = (scale.device(), input.device());
            format!(
                "the factor {scale:?} is on another device than {input:?}: {device}, not {other}"
            )
        })?;
    }
    Ok(())
}

/// The sends of a block to this rank itself, each with the receive that gets it: the first send under a tag goes to
/// the first receive under it, and so on. Refuses a send or a receive without the other, and a pair that differs in
/// type, length or device.
fn messages_to_self(ops: &[Op<'_>], own_rank: u32) -> Result<Vec<(usize, usize)>, Refusal> {
    let mut pairs = Vec::new();
    let mut taken = Vec::new();
    let is_with_self = |op: &Op<'_>| op.is_p2p() && op.peer() == Peer::Rank(own_rank);
    for (index, op) in ops.iter().enumerate().filter(|(_, op)| is_with_self(op)) {
        let Op::Send { buffer, tag, .. } = op else {
            continue;
        };
        let fits = |other: &Op<'_>| {
            matches!(other, Op::Recv { .. }) && is_with_self(other) && other.tag() == Some(*tag)
        };
        let mut receives = ops.iter().enumerate().filter(|(_, other)| fits(other));
        let receive = receives.find(|(index, _)| !taken.contains(index));
        let Some((recv, Op::Recv { buffer: into, .. })) = receive else {
            return Err(Refusal::Argument(format!(
                "the batch sends {buffer:?} under tag {tag} to this rank itself, rank {own_rank}, and does not receive it"
            )));
        };
        check(
            buffer.dtype() == into.dtype()
                && buffer.len() == into.len()
                && buffer.device() == into.device(),
            || format!("the batch sends {buffer:?} to this rank itself and receives {into:?}"),
        )?;
        taken.push(recv);
        pairs.push((index, recv));
    }
    let receives = ops.iter().enumerate();
    let mut receives = receives.filter(|(_, op)| matches!(op, Op::Recv { .. }) && is_with_self(op));
    match receives.find(|(index, _)| !taken.contains(index)) {
        None => Ok(pairs),
        Some((_, op)) => Err(Refusal::Argument(format!(
            "the batch receives under tag {} from this rank itself, rank {own_rank}, and does not send to it",
            op.tag().unwrap_or(0)
        ))),
    }
}

/// The addresses of a buffer, and whether the operation writes there.
struct Use<'b, 'a> {
    start: usize,
    end: usize,
    writes: bool,
    buffer: &'b Buffer<'a>,
}

/// Why an operation is refused.
enum Refusal {
    /// An argument is wrong, as this sentence says.
    Argument(String),
    /// The reduction is not defined for elements of this type.
    Reduction(ReduceOp, DType),
}

#[inline]
fn check(is_right: bool, message: impl FnOnce() -> String) -> Result<(), Refusal> {
    if is_right {
        return Ok(());
    }
    Err(Refusal::Argument(message()))
}

/// Checks that there are `expected` buffers, one for each rank that has a part in the list.
fn check_list(side: &str, buffers: &[Buffer<'_>], expected: u32) -> Result<(), Refusal> {
    check(buffers.len() == expected as usize, || {
        format!(
            "there are {} {side}s, but {expected} are needed",
            buffers.len()
        )
    })
}

/// Checks that all buffers have the same element type.
fn check_types<'b, 'a: 'b>(
    mut buffers: impl Iterator<Item = &'b Buffer<'a>>,
) -> Result<(), Refusal> {
    let Some(first) = buffers.next() else {
        return Ok(());
    };
    for buffer in buffers {
        check(buffer.dtype() == first.dtype(), || {
            format!("{buffer:?} and {first:?} differ in their element type")
        })?;
    }
    Ok(())
}

/// Checks that every part has the type and length of `own_part`.
fn check_even(own_part: &Buffer<'_>, parts: &[Buffer<'_>]) -> Result<(), Refusal> {
    for part in parts {
        check(
            part.dtype() == own_part.dtype() && part.len() == own_part.len(),
            || format!("{part:?} and {own_part:?} must be equal in type and length"),
        )?;
    }
    Ok(())
}

/// Checks that every part has the type of `own_part`, and that this rank's part has its length.
fn check_own(own_part: &Buffer<'_>, parts: &[Buffer<'_>], own_rank: u32) -> Result<(), Refusal> {
    for part in parts {
        check(part.dtype() == own_part.dtype(), || {
            format!("{part:?} and {own_part:?} differ in their element type")
        })?;
    }
    match parts.get(own_rank as usize) {
        Some(part) => check(part.len() == own_part.len(), || {
            format!(
                "the part of this rank is {part:?} in the list but {own_part:?} as the single buffer"
            )
        }),
        None => Ok(()),
    }
}

/// Checks that `whole` holds one part like `part` for each rank; `side` names `whole` in the message.
fn check_holds(
    part: &Buffer<'_>,
    whole: &Buffer<'_>,
    size: u32,
    side: &str,
) -> Result<(), Refusal> {
    check(
        part.dtype() == whole.dtype() && part.len().checked_mul(size as usize) == Some(whole.len()),
        || {
            format!(
                "the {side} {whole:?} does not hold {size} parts like {part:?}, one for each rank"
            )
        },
    )
}

/// Checks that there are as many inputs as outputs.
fn check_pairs(inputs: &[Buffer<'_>], outputs: &[Buffer<'_>]) -> Result<(), Refusal> {
    check(inputs.len() == outputs.len(), || {
        format!(
            "{} inputs but {} outputs; their numbers must be equal",
            inputs.len(),
            outputs.len()
        )
    })
}

/// Checks that there is one split for each rank, and that together they make up `whole`.
fn check_splits(
    side: &str,
    whole: &Buffer<'_>,
    splits: &[usize],
    size: u32,
) -> Result<(), Refusal> {
    check(splits.len() == size as usize, || {
        format!("there are {} {side} splits, but {size} ranks", splits.len())
    })?;
    let sum = splits.iter().try_fold(0usize, |sum, &n| sum.checked_add(n));
    check(sum == Some(whole.len()), || {
        format!("{side} splits {splits:?} do not add up to {whole:?}")
    })
}
