//! [`BatchedPowerSgdHook`]: each bucket compressed as one matrix.

use super::super::gradient::Gradient;
use super::super::hook::{Averaging, Bucket, CommHook, StepCount};
use super::low_rank::LowRank;
use super::{check_rank, is_worth_it};
use crate::group::process_group::ProcessGroup;
use crate::op::error::Result;
use rcomm_recorder::model::ReduceOp;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Sends each bucket as two thin matrices of `side` by rank elements, as [`PowerSgdHook`](super::PowerSgdHook) does
/// with each parameter. The gradients of the bucket, one after the other and padded with zeros, form a square matrix,
/// whose `side` is the square root of their number, rounded up. A bucket that this would not make half as large is
/// averaged as it is.
///
/// This takes two operations for each bucket whatever the parameters' shapes, and compresses vectors, too. But the rows
/// of the matrix are not those of the parameters, so that its rank is higher: with the same rank more is lost. It is
/// PyTorch's `batched_powerSGD_hook` (`torch/distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py`), with error
/// feedback and warm start. Matrices are computed in `f32`. The hook keeps one `f32` for each element of a bucket that
/// is compressed, and the two factors.
///
/// A hook belongs to one reducer. The [`Averaging`] of a bucket runs the operation on Q when the reducer calls it at
/// the end of the step. After [`Reducer::regroup`](super::super::Reducer::regroup) the hook starts over, and what was
/// lost so far is not sent.
pub struct BatchedPowerSgdHook {
    /// The rank of the matrices, not of the process.
    rank: usize,
    /// How many steps are averaged without compression.
    plain_steps: u64,
    steps: StepCount,
    /// The state of each bucket that was compressed so far.
    states: HashMap<usize, Arc<Mutex<LowRank>>>,
}

impl BatchedPowerSgdHook {
    /// Compresses buckets to the matrix rank `rank` (1 in most uses) after `start` steps, in which gradients are
    /// averaged as they are. With a `start` of 0 the parameters stay in the buckets of the first step
    /// ([`ReducerOptions::rebuild_buckets`](super::super::ReducerOptions::rebuild_buckets)), since what the hook keeps
    /// is kept by bucket.
    ///
    /// # Errors
    /// `InvalidArgument` if `rank` is 0.
    pub fn new(rank: usize, start: u64) -> Result<Self> {
        check_rank(rank)?;
        Ok(Self {
            rank,
            plain_steps: start,
            steps: StepCount::default(),
            states: HashMap::new(),
        })
    }
}

/// The side of the smallest square of at least `len` elements.
fn side_of(len: usize) -> usize {
    let side = len.isqrt();
    side + usize::from(side * side < len)
}

impl<T: Gradient> CommHook<T> for BatchedPowerSgdHook {
    fn start(&mut self, group: &ProcessGroup, bucket: Bucket<T>) -> Result<Averaging<T>> {
        let is_plain = self.steps.count(bucket.index) <= self.plain_steps;
        let Bucket {
            index,
            mut gradients,
            ..
        } = bucket;
        let (side, rank) = (side_of(gradients.len()), self.rank);
        if is_plain || !is_worth_it(side, side, rank, gradients.len()) {
            let work = group.all_reduce_async(gradients, ReduceOp::Avg)?;
            return Ok(Box::new(move || work.wait()));
        }
        let new = || Arc::new(Mutex::new(LowRank::new(index, side, side, rank)));
        let state = Arc::clone(self.states.entry(index).or_insert_with(new));
        let mut low_rank = state.lock().unwrap_or_else(PoisonError::into_inner);
        low_rank.project(&gradients, rank);
        let work = group.all_reduce_async(low_rank.p.clone(), ReduceOp::Avg)?;
        drop(low_rank);
        let group = group.clone();
        Ok(Box::new(move || {
            let p = work.wait()?;
            let mut low_rank = state.lock().unwrap_or_else(PoisonError::into_inner);
            low_rank.project_back(&p, rank);
            let mut q = low_rank.q.clone();
            group.all_reduce(&mut q, ReduceOp::Avg)?;
            low_rank.restore(&q, &mut gradients, rank);
            Ok(gradients)
        }))
    }

    fn allows_rebuild(&self) -> bool {
        // Buckets are rebuilt after the first step: nothing is kept by bucket then.
        self.plain_steps > 0
    }

    fn regrouped(&mut self) -> Result<()> {
        self.steps = StepCount::default();
        self.states.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_square_has_room_for_all_elements_and_no_smaller_one_has() {
        for len in 0..2_000 {
            let side = side_of(len);
            assert!(side * side >= len);
            assert!(side == 0 || (side - 1) * (side - 1) < len);
        }
    }
}
