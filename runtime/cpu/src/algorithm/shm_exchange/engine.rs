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
    ranks: Arc<[Rank]>,
    /// Up to this size every rank combines all inputs of an all_reduce by itself, in one phase.
    whole: usize,
    /// Operations of at least this size may ask for registered buffers.
    least_direct: usize,
    direct: Box<Direct>,
}

/// The state that a group needs to work in registered buffers.
struct Direct {
    direct_sizes: DirectSizes,
    regions: MappedRegions,
}

impl ShmEngine {
    /// Makes the engine of rank `rank` of the group, whose allocated memory is in this registry.
    pub(crate) fn new(
        shm_exchange: ShmExchange,
        rank: usize,
        ranks: Arc<[Rank]>,
        plan: &Plan,
        registry: Arc<Registry>,
    ) -> Self {
        let whole = plan.most(Pattern::AllReduce, Algorithm::Whole).min(SLOT);
        let direct_sizes = DirectSizes::new(plan);
        Self {
            whole,
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

    /// Works as [`ChannelEngine::run`](crate::algorithm::ChannelEngine::run).
    #[inline]
    pub(crate) fn run(
        &mut self,
        step: Step<'_>,
        place: Position,
        policy: &mut WaitPolicy<'_>,
    ) -> Result<(), Failure> {
        let done = self.run_phases(step, place, policy);
        if let Err(failure) = &done
            && !matches!(failure, Failure::Mismatch(..))
        {
            // After this failure the group reaches no further agreement over this exchange area.
            self.direct.regions.unmap_all();
        }
        done
    }

    #[inline]
    fn run_phases(
        &mut self,
        step: Step<'_>,
        place: Position,
        policy: &mut WaitPolicy<'_>,
    ) -> Result<(), Failure> {
        let op_header = &step.op_header;
        let mut context = PhaseContext {
            shm_exchange: &mut self.shm_exchange,
            copier: &mut self.copier,
            ranks: &self.ranks,
            place,
            op_header,
            signature: step.signature,
            whole: self.whole,
            regions: Some(&mut self.direct.regions),
            policy,
        };
        let longest = if has_lists(op_header.op) {
            context.compare_lists(&step.lists)?
        } else {
            None
        };
        let extent = extent(&step.collective, place.size);
        let is_direct = extent.is_some_and(|(pattern, bytes)| {
            bytes >= self.least_direct && self.direct.direct_sizes.have(pattern, bytes)
        });
        if !is_direct {
            return context.by_shm_exchange(step.collective, longest);
        }
        match context.run_direct(step.collective)? {
            Some(collective) => context.by_shm_exchange(collective, longest),
            None => Ok(()),
        }
    }
}

impl PhaseContext<'_, '_> {
    /// Runs the operation through lines and slots. `longest` is the length in bytes of the longest part of
    /// any rank, if the ranks have exchanged lists of counts.
    fn by_shm_exchange(
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
