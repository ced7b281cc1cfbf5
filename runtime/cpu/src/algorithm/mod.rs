//! Algorithms of collectives: which bytes go to which rank, and in which order.
//!
//! A group whose ranks all share memory uses [`shm_exchange`]. For a group on several hosts, at least one of
//! which has several of its ranks, [`hosts`] divides the work between each host and the network. All other
//! groups use channels, and so do groups for which the shared memory of a host has no space:
//!
//! | pattern | algorithm | bytes that a rank sends: n ranks, s bytes of data, or p bytes in each part |
//! |---|---|---|
//! | headers and small data | [`agree`]: doubling | p (n-1) in ⌈log2 n⌉ messages |
//! | all_reduce of two ranks | [`swap`]: each sends all, and both combine | s |
//! | all_reduce | [`exchange`]: direct reduce-scatter, then all-gather | 2 s (n-1)/n |
//! | reduce | [`exchange`]: direct reduce-scatter, then gather at the root | s |
//! | reduce_scatter, all_gather, all_to_all | [`exchange`]: direct | p (n-1) |
//! | gather, scatter | [`exchange`]: direct | p from each rank but the root; p (n-1) from the root |
//! | broadcast | [`chain`]: pipeline | s |
//!
//! Reductions combine in order of ranks, so that all algorithms, including those over shared memory, give the
//! same bits.

mod agree;
mod chain;
mod exchange;
mod hosts;
mod shm_exchange;
mod swap;

use crate::channels::Channels;
use crate::collective::{Collective, Data, Position, Step, compare_lists, has_lists, op_header};
use crate::wait::{Failure, WaitPolicy};
use agree::{Agreement, Participants};
pub(super) use hosts::{HostsEngine, ShmExchanges};
use rcomm_core::arithmetic;
use rcomm_core::tuning::{Algorithm, MAX_NOTICED, Pattern, Plan};
pub(super) use shm_exchange::ShmEngine;

/// One group's collectives over channels.
pub(super) struct ChannelEngine {
    channels: Channels,
    agreement: Agreement,
    members: Vec<usize>,
    scratch: Vec<u8>,
    plan: Plan,
}

impl ChannelEngine {
    pub(super) fn new(channels: Channels, plan: Plan) -> Self {
        Self {
            plan,
            members: (0..channels.size()).collect(),
            channels,
            agreement: Agreement::default(),
            scratch: Vec::new(),
        }
    }

    /// Agrees with the other ranks on `step`, then runs it.
    ///
    /// # Errors
    /// After `Mismatch` the ranks can use the channels again; after any other failure they cannot.
    pub(super) fn run(
        &mut self,
        step: Step<'_>,
        position: Position,
        policy: &mut WaitPolicy<'_>,
    ) -> Result<(), Failure> {
        let Step {
            mut op_header,
            lists,
            mut collective,
            ..
        } = step;
        if position.size == 1 && run_alone(&mut collective) {
            return Ok(());
        }
        let listed: Vec<u8>;
        let choice = choose(&self.plan, &collective, position, |algorithm| {
            algorithm != Algorithm::Nested
        });
        let is_inline = choice == Algorithm::Notice;
        if choice == Algorithm::Swap
            && let Collective::AllReduce { data, by } = collective
        {
            return self.swap(op_header, data, by, position.rank, policy);
        }
        let inline: &[u8] = if lists.is_empty() {
            small_input(&collective, position)
                .filter(|_| is_inline)
                .unwrap_or(&[])
        } else {
            listed = lists.iter().flat_map(|count| count.to_le_bytes()).collect();
            &listed
        };
        op_header.inline = u32::try_from(inline.len()).unwrap_or(0);
        let participants = Participants {
            members: &self.members,
            index: position.rank,
        };
        let agreement = &mut self.agreement;
        agreement.exchange(&mut self.channels, participants, op_header, inline, policy)?;
        let mut compared = op_header::compare(agreement.op_headers());
        if compared.is_ok() && has_lists(op_header.op) {
            let counts: Vec<Vec<u64>> = (0..position.size)
                .map(|rank| agreement.counts(rank))
                .collect();
            compared = compare_lists(agreement.op_headers(), &counts);
        }
        compared
            .map_err(|found| Failure::Mismatch(self.channels.global(found.rank), found.message))?;
        if is_inline {
            let inline = |rank| agreement.inline(rank);
            return finish_small(&mut collective, position, inline, &self.channels);
        }
        self.run_agreed(collective, position, policy)
    }

    /// Runs the collective that the ranks have agreed on.
    fn run_agreed(
        &mut self,
        collective: Collective<'_>,
        position: Position,
        policy: &mut WaitPolicy<'_>,
    ) -> Result<(), Failure> {
        let (channels, scratch) = (&mut self.channels, &mut self.scratch);
        match collective {
            Collective::Barrier => Ok(()),
            Collective::AllReduce { data, by } => {
                exchange::all_reduce(channels, position, data, by, scratch, policy)
            }
            Collective::Reduce { data, by, root } => {
                exchange::reduce(channels, position, data, by, root, scratch, policy)
            }
            Collective::Broadcast { data, root } => {
                chain::broadcast(channels, position, data, root, policy)
            }
            Collective::AllGather { input, outputs } => {
                exchange::all_gather(channels, position, input, outputs, policy)
            }
            Collective::ReduceScatter { inputs, output, by } => {
                exchange::reduce_scatter(channels, position, &inputs, output, by, scratch, policy)
            }
            Collective::AllToAll { inputs, outputs } => {
                exchange::all_to_all(channels, position, &inputs, outputs, policy)
            }
            Collective::Gather {
                input,
                outputs,
                root,
            } => exchange::gather(channels, position, input, outputs, root, policy),
            Collective::Scatter {
                inputs,
                output,
                root,
            } => exchange::scatter(channels, position, inputs.as_ref(), output, root, policy),
        }
    }
}

/// Runs a collective of a group of one rank if that needs neither channels nor space; returns whether it did.
fn run_alone(collective: &mut Collective<'_>) -> bool {
    match collective {
        Collective::Barrier => true,
        Collective::AllReduce { data, by } => {
            // The result may differ from the input: any nonzero byte of a bool counts as true.
            arithmetic::combine_in_place(by.op, by.dtype, data, 0, &[], None);
            true
        }
        _ => false,
    }
}

/// Returns the plan's choice for this operation: `Notice` only for data that is small enough to be sent with the
/// headers, any other algorithm only if `allows` permits it.
///
/// The choice depends only on the plan and on what the headers hold, so ranks whose headers agree choose the same.
fn choose(
    plan: &Plan,
    collective: &Collective<'_>,
    position: Position,
    allows: impl Fn(Algorithm) -> bool,
) -> Algorithm {
    let is_small = small_input(collective, position).is_some();
    let is_inline = is_small && small_inputs_len(collective, position) <= MAX_NOTICED;
    let (pattern, bytes) = extent(collective, position);
    plan.choose(pattern, bytes, |algorithm| match algorithm {
        Algorithm::Notice => is_inline,
        other => allows(other),
    })
}

/// Returns the collective's pattern, and its size in bytes as [`Plan::choose`] expects it.
fn extent(collective: &Collective<'_>, position: Position) -> (Pattern, usize) {
    let size = position.size;
    match collective {
        Collective::Barrier => (Pattern::Barrier, 0),
        Collective::AllReduce { data, .. } => (Pattern::AllReduce, data.len()),
        Collective::Reduce { data, .. } => (Pattern::Reduce, data.bytes().len()),
        Collective::Broadcast { data, .. } => (Pattern::Broadcast, data.bytes().len()),
        Collective::AllGather { outputs, .. } => {
            let bytes = (0..size).map(|rank| outputs.len(rank)).sum();
            (Pattern::AllGather, bytes)
        }
        Collective::ReduceScatter { inputs, .. } => {
            let bytes = (0..size).map(|rank| inputs.part(rank).len()).sum();
            (Pattern::ReduceScatter, bytes)
        }
        // If parts differ, a rank knows only the sizes of its own. The size does not matter then: over channels, each
        // of these patterns has one algorithm for all sizes.
        Collective::AllToAll { inputs, .. } => {
            let each = inputs.part(position.rank).len();
            (Pattern::AllToAll, each.saturating_mul(size))
        }
        Collective::Gather { input, .. } => (Pattern::Gather, input.len().saturating_mul(size)),
        Collective::Scatter { output, .. } => (Pattern::Scatter, output.len().saturating_mul(size)),
    }
}

/// Returns this rank's input if the collective is of a kind whose inputs can be sent with the headers. The caller
/// checks their size.
fn small_input<'a>(collective: &'a Collective<'_>, position: Position) -> Option<&'a [u8]> {
    match collective {
        Collective::Barrier => Some(&[]),
        Collective::AllReduce { data, .. } => Some(data),
        Collective::Broadcast { data, root } if *root == position.rank => Some(data.bytes()),
        Collective::Broadcast { .. } => Some(&[]),
        Collective::AllGather {
            input,
            outputs: crate::collective::Outputs::Even(..),
        } => Some(input),
        _ => None,
    }
}

/// Returns the sum of the sizes of the inputs that [`small_input`] returns on all ranks.
fn small_inputs_len(collective: &Collective<'_>, position: Position) -> usize {
    match collective {
        Collective::AllReduce { data, .. } => data.len().saturating_mul(position.size),
        Collective::Broadcast { data, .. } => data.bytes().len(),
        Collective::AllGather { input, .. } => input.len().saturating_mul(position.size),
        _ => 0,
    }
}

/// Completes a collective whose data was sent with the headers; `inline` returns the data of a rank.
fn finish_small<'a>(
    collective: &mut Collective<'_>,
    position: Position,
    inline: impl Fn(usize) -> &'a [u8],
    channels: &Channels,
) -> Result<(), Failure> {
    let expect = |rank: usize, len: usize| {
        let bytes = inline(rank);
        if bytes.len() == len {
            return Ok(bytes);
        }
        Err(Failure::Garbled(
            channels.global(rank),
            format!("{} bytes with its op header instead of {len}", bytes.len()),
        ))
    };
    match collective {
        Collective::AllReduce { data, by } => {
            let inputs = (0..position.size)
                .map(|rank| expect(rank, data.len()))
                .collect::<Result<Vec<_>, _>>()?;
            arithmetic::combine(by.op, by.dtype, &inputs, data, None);
        }
        Collective::Broadcast {
            data: Data::Write(data),
            root,
        } => data.copy_from_slice(expect(*root, data.len())?),
        Collective::AllGather { outputs, .. } => {
            for rank in 0..position.size {
                let part = outputs.part_mut(rank);
                part.copy_from_slice(expect(rank, part.len())?);
            }
        }
        _ => {}
    }
    Ok(())
}
