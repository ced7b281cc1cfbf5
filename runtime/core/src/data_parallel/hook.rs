//! The averaging of a bucket's gradients over the ranks by a program's own method.

use super::gradient::Gradient;
use crate::group::process_group::ProcessGroup;
use crate::op::error::Result;
use half::{bf16, f16};
use rcomm_recorder::model::ReduceOp;
use std::sync::Arc;

/// Gradients that are sent together.
#[derive(Clone, Debug, PartialEq)]
pub struct Bucket<T = f32> {
    /// The number of the bucket; bucket 0 is sent first. The same parameters are in it on every rank, and, unless
    /// the hook [allows another order](CommHook::allows_rebuild), in every step.
    pub index: usize,
    /// How many buckets there are.
    pub count: usize,
    /// The parameters in it, in the order of `gradients`: the position in the reducer's list of parameters, and the
    /// number of elements.
    pub parameters: Arc<[(usize, usize)]>,
    /// This rank's gradients, one after the other.
    pub gradients: Vec<T>,
}

impl<T> Bucket<T> {
    /// Whether the bucket is the last one of its step.
    pub fn is_last(&self) -> bool {
        self.index + 1 == self.count
    }
}

/// The end of a bucket's averaging: waits for the operations of the [`CommHook`], and returns the averages in
/// the order of [`Bucket::gradients`]. If it returns the vector of the bucket, the next step allocates no other.
pub type Averaging<T = f32> = Box<dyn FnOnce() -> Result<Vec<T>> + Send>;

/// Averages buckets over the ranks.
///
/// A hook is called for the buckets of a step in the same order on every rank. It may keep state between
/// steps (the error of its compression, a low-rank basis). It may use several operations of the group, the
/// same on all ranks, also in the [`Averaging`] that it returns. The reducer calls the returned functions in the
/// order of the buckets, after it has passed the last bucket to the hook.
pub trait CommHook<T = f32>: Send {
    /// Starts to average a bucket. It should not wait for peers, so that the caller can continue to compute the next
    /// gradients.
    ///
    /// # Errors
    /// An error ends the step on this rank.
    fn start(&mut self, group: &ProcessGroup, bucket: Bucket<T>) -> Result<Averaging<T>>;

    /// Whether the parameters may be put into other buckets after the first step
    /// ([`ReducerOptions::rebuild_buckets`](super::ReducerOptions::rebuild_buckets)): not if the hook keeps state
    /// by bucket.
    fn allows_rebuild(&self) -> bool {
        false
    }

    /// Called by [`Reducer::regroup`](super::Reducer::regroup). What must be the same on all ranks, such as a count of
    /// steps, starts over: ranks may have joined, and the last step may have failed on some ranks only.
    ///
    /// # Errors
    /// An error ends `regroup` on this rank, before it waits for others.
    fn regrouped(&mut self) -> Result<()> {
        Ok(())
    }
}

/// Counts the steps of a reducer by the buckets that its hook is passed.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepCount {
    /// The number of the current step, from 1.
    step: u64,
    /// The number of the bucket that was passed last.
    last_bucket: usize,
}

impl Default for StepCount {
    fn default() -> Self {
        Self {
            step: 0,
            last_bucket: usize::MAX,
        }
    }
}

impl StepCount {
    /// Takes the next bucket that was passed; returns the number of its step.
    pub(super) fn count(&mut self, bucket: usize) -> u64 {
        // A bucket whose number is not higher than the previous one's begins a step. It need not be bucket 0: that may
        // be one of a sparse parameter, which is not passed to the hook.
        if bucket <= self.last_bucket {
            self.step += 1;
        }
        self.last_bucket = bucket;
        self.step
    }

    /// Whether a bucket was passed.
    pub(super) fn has_begun(&self) -> bool {
        self.step > 0
    }
}

/// Averages gradients in their own type, by one `all_reduce` for each bucket.
#[derive(Clone, Copy, Debug, Default)]
pub struct AllReduceHook;

impl<T: Gradient> CommHook<T> for AllReduceHook {
    fn start(&mut self, group: &ProcessGroup, bucket: Bucket<T>) -> Result<Averaging<T>> {
        let work = group.all_reduce_async(bucket.gradients, ReduceOp::Avg)?;
        Ok(Box::new(move || work.wait()))
    }

    fn allows_rebuild(&self) -> bool {
        true
    }
}

/// Puts this rank's share of the average of `gradients` into `narrow`. Gradients are divided before they are added,
/// so that the sum does not overflow the narrow type.
pub(super) fn compress<T: Gradient, N: Gradient>(gradients: &[T], size: u32, narrow: &mut [N]) {
    let part = 1.0 / size as f32;
    for (narrow, gradient) in narrow.iter_mut().zip(gradients) {
        *narrow = N::from_f32(gradient.to_f32() * part);
    }
}

/// Overwrites `gradients` with `sums`, the sums over the ranks of the shares that [`compress`] made.
pub(super) fn expand<T: Gradient, N: Gradient>(sums: &[N], gradients: &mut [T]) {
    for (gradient, sum) in gradients.iter_mut().zip(sums) {
        *gradient = T::from_f32(sum.to_f32());
    }
}

macro_rules! compress {
    ($(#[$doc:meta])* $name:ident: $narrow:ty) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default)]
        pub struct $name;

        impl<T: Gradient> CommHook<T> for $name {
            fn start(&mut self, group: &ProcessGroup, bucket: Bucket<T>) -> Result<Averaging<T>> {
                let mut narrow = vec![<$narrow>::default(); bucket.gradients.len()];
                compress(&bucket.gradients, group.size(), &mut narrow);
                let work = group.all_reduce_async(narrow, ReduceOp::Sum)?;
                let mut gradients = bucket.gradients;
                Ok(Box::new(move || {
                    expand(&work.wait()?, &mut gradients);
                    Ok(gradients)
                }))
            }

            fn allows_rebuild(&self) -> bool {
                true
            }
        }
    };
}

compress! {
    /// Sends gradients as `f16`, as [`Wire::F16`](super::Wire::F16) does in memory that is allocated once.
    F16CompressHook: f16
}

compress! {
    /// Sends gradients as `bf16`, as [`Wire::Bf16`](super::Wire::Bf16) does in memory that is allocated once.
    Bf16CompressHook: bf16
}
