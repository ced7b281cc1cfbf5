//! The averaging of a bucket's gradients over the ranks.

use super::gradient::Gradient;
use crate::group::process_group::ProcessGroup;
use crate::op::error::Result;
use half::{bf16, f16};
use rcomm_recorder::model::ReduceOp;

/// Gradients that are sent together.
#[derive(Clone, Debug, PartialEq)]
pub struct Bucket<T = f32> {
    /// The number of the bucket; bucket 0 is sent first. The same parameters are in it on every rank, in
    /// every step.
    pub index: usize,
    /// How many buckets there are.
    pub count: usize,
    /// The position and the number of elements of each parameter in it, in the order of `gradients`.
    pub parameters: Vec<(usize, usize)>,
    /// This rank's gradients, one after the other.
    pub gradients: Vec<T>,
}

/// The end of a bucket's averaging: waits for the operations of the [`CommHook`], and returns the averages in
/// the order of [`Bucket::gradients`].
pub type Averaging<T = f32> = Box<dyn FnOnce() -> Result<Vec<T>> + Send>;

/// Averages buckets over the ranks.
///
/// A hook is called for the buckets of a step in the same order on every rank. It may keep state between
/// steps (the error of its compression, a low-rank basis). It may use several operations of the group, the
/// same on all ranks, also in the [`Averaging`] that it returns: these are called in the order of the
/// buckets, after the last bucket was passed to the hook.
pub trait CommHook<T = f32>: Send {
    /// Starts to average a bucket. It should not wait for peers, so that the caller can go on to compute the
    /// next gradients.
    ///
    /// # Errors
    /// An error ends the step on this rank.
    fn start(&mut self, group: &ProcessGroup, bucket: Bucket<T>) -> Result<Averaging<T>>;
}

/// Averages gradients in their own type, by one `all_reduce` for each bucket.
#[derive(Clone, Copy, Debug, Default)]
pub struct AllReduceHook;

impl<T: Gradient> CommHook<T> for AllReduceHook {
    fn start(&mut self, group: &ProcessGroup, bucket: Bucket<T>) -> Result<Averaging<T>> {
        let work = group.all_reduce_async(bucket.gradients, ReduceOp::Avg)?;
        Ok(Box::new(move || work.wait()))
    }
}

macro_rules! compress {
    ($(#[$doc:meta])* $name:ident: $narrow:ty) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default)]
        pub struct $name;

        impl<T: Gradient> CommHook<T> for $name {
            fn start(&mut self, group: &ProcessGroup, bucket: Bucket<T>) -> Result<Averaging<T>> {
                // Gradients are divided before they are added, so that the sum does not overflow the narrow
                // type.
                let part = 1.0 / group.size() as f32;
                let narrow = |&gradient: &T| <$narrow>::from_f32(gradient.to_f32() * part);
                let narrow: Vec<$narrow> = bucket.gradients.iter().map(narrow).collect();
                let work = group.all_reduce_async(narrow, ReduceOp::Sum)?;
                Ok(Box::new(move || {
                    let sum = work.wait()?;
                    Ok(sum.into_iter().map(|sum| T::from_f32(sum.to_f32())).collect())
                }))
            }
        }
    };
}

compress! {
    /// Sends gradients as `f16`, half the bytes of `f32`. The CPU backend adds them in `f32` and rounds the
    /// sum once.
    F16CompressHook: f16
}

compress! {
    /// Sends gradients as `bf16`, half the bytes of `f32`. The CPU backend adds them in `f32` and rounds the
    /// sum once.
    Bf16CompressHook: bf16
}
