//! Runs one group's collectives through the phases of its exchange area.

use super::direct::{DirectSizes, extent};
use super::phase::PhaseContext;
use crate::collective::{Collective, Position, Step, has_lists};
use crate::registered::{MappedRegions, Registry};
use crate::transport::shm::{SLOT, ShmExchange};
use crate::wait::{Failure, WaitPolicy};
use rcomm_core::arithmetic::AdaptiveCopy;
use rcomm_core::tuning::{Algorithm, Pattern, Plan};
use rcomm_recorder::model::Rank;
use std::sync::Arc;

/// One group's collectives over shared memory.
pub(crate) struct ShmEngine {
    shm_exchange: ShmExchange,
    copier: AdaptiveCopy,
    /// The members by their ranks in the world.
    ranks: Arc<[Rank]>,
    /// The maximum size in bytes of an all_reduce in which every rank combines all inputs, in one phase.
    max_whole: usize,
    /// The minimum size in bytes of an operation for which the ranks may check for registered buffers.
    least_direct: usize,
    direct: Box<Direct>,
}

/// A group's state for operations in registered buffers.
struct Direct {
    direct_sizes: DirectSizes,
    regions: MappedRegions,
}

impl ShmEngine {
    /// Makes the engine of the rank `rank` of the group. `registry` has the memory that this rank has allocated.
    pub(crate) fn new(
        shm_exchange: ShmExchange,
        rank: usize,
        ranks: Arc<[Rank]>,
        plan: &Plan,
        registry: Arc<Registry>,
    ) -> Self {
        let max_whole = plan.most(Pattern::AllReduce, Algorithm::Whole).min(SLOT);
        let direct_sizes = DirectSizes::new(plan);
        Self {
            max_whole,
            least_direct: direct_sizes.least(),
            direct: Box::new(Direct {
                direct_sizes,
                regions: MappedRegions::new(rank, ranks.len(), registry),
            }),
            shm_exchange,
            copier: AdaptiveCopy::default(),
            ranks,
        }
    }

    /// Works like [`ChannelEngine::run`](crate::algorithm::ChannelEngine::run).
    #[inline]
    pub(crate) fn run(
        &mut self,
        step: Step<'_>,
        position: Position,
        policy: &mut WaitPolicy<'_>,
    ) -> Result<(), Failure> {
        let result = self.run_phases(step, position, policy);
        if let Err(failure) = &result
            && !matches!(failure, Failure::Mismatch(..))
        {
            // After this failure the group's ranks reach no agreement over this exchange area any more.
            self.direct.regions.unmap_all();
        }
        result
    }

    /// Compares lists of counts if there are any, then runs the collective in registered buffers or in slots.
    #[inline]
    fn run_phases(
        &mut self,
        step: Step<'_>,
        position: Position,
        policy: &mut WaitPolicy<'_>,
    ) -> Result<(), Failure> {
        let op_header = &step.op_header;
        let mut context = PhaseContext {
            shm_exchange: &mut self.shm_exchange,
            copier: &mut self.copier,
            ranks: &self.ranks,
            position,
            op_header,
            signature: step.signature,
            max_whole: self.max_whole,
            regions: Some(&mut self.direct.regions),
            policy,
        };
        let longest = if has_lists(op_header.op) {
            Some(context.exchange_lists(&step.lists)?)
        } else {
            None
        };
        let extent = extent(&step.collective, position.size);
        let is_direct = extent.is_some_and(|(pattern, bytes)| {
            bytes >= self.least_direct && self.direct.direct_sizes.contains(pattern, bytes)
        });
        if !is_direct {
            return context.run_in_slots(step.collective, longest);
        }
        match context.run_direct(step.collective)? {
            Some(collective) => context.run_in_slots(collective, longest),
            None => Ok(()),
        }
    }
}

impl PhaseContext<'_, '_> {
    /// Runs the operation through lines and slots. `longest` is the length in bytes of the longest part of
    /// any rank, if the ranks have exchanged lists of counts.
    fn run_in_slots(
        &mut self,
        collective: Collective<'_>,
        longest: Option<usize>,
    ) -> Result<(), Failure> {
        match collective {
            Collective::Barrier => self.run_inline_phase(&[]),
            Collective::AllReduce { data, by } => self.all_reduce(data, by),
            Collective::Reduce { data, by, root } => self.reduce(data, by, root),
            Collective::Broadcast { data, root } => self.broadcast(data, root),
            Collective::AllGather { input, outputs } => self.all_gather(input, outputs),
            Collective::ReduceScatter { inputs, output, by } => {
                self.reduce_scatter(&inputs, output, by)
            }
            Collective::AllToAll { inputs, outputs } => {
                let longest = longest.unwrap_or_else(|| inputs.part(0).len());
                self.all_to_all(&inputs, outputs, longest)
            }
            Collective::Gather {
                input,
                outputs,
                root,
            } => self.gather(input, outputs, root, longest.unwrap_or(input.len())),
            Collective::Scatter {
                inputs,
                output,
                root,
            } => {
                let longest = longest.unwrap_or(output.len());
                self.scatter(inputs.as_ref(), output, root, longest)
            }
        }
    }
}
