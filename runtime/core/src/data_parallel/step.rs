//! The progress of a step, and the averaging of its buckets.

use super::bucket::BucketLayout;
use super::gradient::Gradient;
use super::hook::{Averaging, compress, expand};
use super::memory::BucketMemory;
use super::options::Wire;
use crate::group::process_group::ProcessGroup;
use crate::group::spare::SpareOps;
use crate::group::sparse::SparseTensor;
use crate::group::work::Work;
use crate::op::error::Result;
use half::{bf16, f16};
use rcomm_recorder::model::ReduceOp;

/// The state of a parameter's gradient on this rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum GradientState {
    #[default]
    Absent,
    /// A gradient was given, and more may be added to it.
    Partial,
    /// The gradient is complete, and may have been sent.
    Ready,
}

/// A bucket under way.
pub(super) enum UnderWay<T> {
    Plain(Work<BucketMemory<T>>),
    F16(Work<BucketMemory<f16>>),
    Bf16(Work<BucketMemory<bf16>>),
    Sparse(Work<SparseTensor<T>>),
    Hook(Averaging<T>),
}

/// The progress of a step.
pub(super) struct Step<T> {
    /// The gradient of each parameter.
    pub(super) states: Vec<GradientState>,
    /// For each parameter that is ready, whether this rank has used it.
    pub(super) used: Vec<u8>,
    /// The parameters in the order in which they were ready.
    pub(super) order: Vec<usize>,
    /// How many parameters each bucket still waits for.
    pub(super) missing: Vec<usize>,
    /// The buckets that were sent, in order.
    pub(super) under_way: Vec<UnderWay<T>>,
    /// The all-reduce that counts the ranks that have input.
    pub(super) vote: Option<Work<Vec<u32>>>,
    /// Whether the step's backward pass has begun (`Reducer::begin_backward`).
    pub(super) backward_has_begun: bool,
    /// Whether this rank takes part in the step.
    pub(super) takes_part: bool,
    /// Whether the step has failed on this rank, in a `MixedReducer` for any of the types: it cannot be finished.
    pub(super) has_failed: bool,
}

impl<T> Default for Step<T> {
    fn default() -> Self {
        Self {
            states: Vec::new(),
            used: Vec::new(),
            order: Vec::new(),
            missing: Vec::new(),
            under_way: Vec::new(),
            vote: None,
            backward_has_begun: false,
            takes_part: false,
            has_failed: false,
        }
    }
}

impl<T> Step<T> {
    /// Resets the state for the next step; allocates nothing if the last step had the same layout.
    pub(super) fn reset(&mut self, layout: &BucketLayout) {
        let parameters = layout.places.len();
        self.states.clear();
        self.states.resize(parameters, GradientState::Absent);
        self.used.clear();
        self.used.resize(parameters, 0);
        self.order.clear();
        self.order.reserve(parameters);
        self.missing.clear();
        self.missing.extend(layout.buckets.iter().map(Vec::len));
        self.under_way.clear();
        self.under_way.reserve(layout.buckets.len());
        self.vote = None;
        self.backward_has_begun = false;
        self.takes_part = false;
        self.has_failed = false;
    }
}

/// Memory for the buckets in the narrower type in which they are sent; allocated once for each layout.
pub(super) enum Narrow {
    None,
    F16(Vec<BucketMemory<f16>>),
    Bf16(Vec<BucketMemory<bf16>>),
}

impl Narrow {
    pub(super) fn new(wire: Wire) -> Self {
        match wire {
            Wire::Own => Self::None,
            Wire::F16 => Self::F16(Vec::new()),
            Wire::Bf16 => Self::Bf16(Vec::new()),
        }
    }

    /// Allocates memory for buckets of these lengths.
    pub(super) fn allocate(&mut self, group: &ProcessGroup, lens: &[usize]) {
        fn allocate_each<N: Gradient>(
            memory: &mut Vec<BucketMemory<N>>,
            group: &ProcessGroup,
            lens: &[usize],
        ) {
            memory.clear();
            memory.extend(lens.iter().map(|&len| BucketMemory::allocated(group, len)));
        }
        match self {
            Self::None => {}
            Self::F16(memory) => allocate_each(memory, group, lens),
            Self::Bf16(memory) => allocate_each(memory, group, lens),
        }
    }

    /// Sends a bucket in the narrower type; `None` if it is sent in the type of the gradients.
    pub(super) fn send<T: Gradient>(
        &mut self,
        bucket: usize,
        gradients: &[T],
        group: &ProcessGroup,
        spare: &mut SpareOps,
    ) -> Option<Result<UnderWay<T>>> {
        fn start_sum<T: Gradient, N: Gradient>(
            memory: &mut BucketMemory<N>,
            gradients: &[T],
            group: &ProcessGroup,
            spare: &mut SpareOps,
        ) -> Result<Work<BucketMemory<N>>> {
            let mut narrow = std::mem::take(memory);
            compress(gradients, group.size(), &mut narrow);
            narrow.all_reduce(group, ReduceOp::Sum, spare)
        }
        match self {
            Self::None => None,
            Self::F16(memory) => {
                Some(start_sum(&mut memory[bucket], gradients, group, spare).map(UnderWay::F16))
            }
            Self::Bf16(memory) => {
                Some(start_sum(&mut memory[bucket], gradients, group, spare).map(UnderWay::Bf16))
            }
        }
    }

    /// Writes a bucket's averages, the sums of what [`send`](Self::send) sent, to `into`, and keeps their memory.
    pub(super) fn take_f16<T: Gradient>(
        &mut self,
        bucket: usize,
        sums: BucketMemory<f16>,
        into: &mut [T],
    ) {
        expand(&sums, into);
        if let Self::F16(memory) = self {
            memory[bucket] = sums;
        }
    }

    /// Like [`take_f16`](Self::take_f16), for `bf16`.
    pub(super) fn take_bf16<T: Gradient>(
        &mut self,
        bucket: usize,
        sums: BucketMemory<bf16>,
        into: &mut [T],
    ) {
        expand(&sums, into);
        if let Self::Bf16(memory) = self {
            memory[bucket] = sums;
        }
    }
}
