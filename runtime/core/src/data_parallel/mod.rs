//! Data-parallel training: every rank has the same model and its own part of the data.
//!
//! ```no_run
//! # fn backward(layer: usize, gradient: &mut [f32]) { gradient.fill(layer as f32) }
//! # fn main() -> rcomm::Result<()> {
//! use rcomm::data_parallel::{Parameter, Reducer, ReducerOptions};
//! let world = rcomm::World::init(rcomm::Config::from_environment()?)?;
//! let mut weights = vec![vec![0.5f32; 100], vec![0.5; 10]];
//! let parameters = vec![Parameter::new("hidden", &[100]), Parameter::new("output", &[10])];
//! let mut reducer = Reducer::new(world.group(), parameters, ReducerOptions::default())?;
//! reducer.broadcast_parameters(&mut weights)?;
//! for layer in (0..weights.len()).rev() {
//!     backward(layer, reducer.gradient_mut(layer)?); // computed in the bucket's memory
//!     reducer.mark_ready(layer)?; // the bucket is sent once all its layers are ready
//! }
//! reducer.finish_in_place()?;
//! for (layer, weights) in weights.iter_mut().enumerate() {
//!     let average = reducer.average(layer).unwrap_or_default();
//!     weights.iter_mut().zip(average).for_each(|(w, g)| *w -= 0.1 * g);
//! }
//! world.shutdown()
//! # }
//! ```
//!
//! [`Reducer`] averages gradients over the ranks of a group while the backward pass still computes others.
//! Gradients are put into *buckets* ([`assign_buckets`]). A bucket is sent as soon as all of its gradients are
//! computed and all buckets before it have been sent. So every rank sends the same buckets in the same order, in
//! whatever order it computes its gradients. Each bucket is averaged by a [`CommHook`] if there
//! is one, otherwise by an `all_reduce`.
//! The method is that of PyTorch's DistributedDataParallel (Li et al., "PyTorch Distributed: Experiences on
//! Accelerating Data Parallel Training", VLDB 2020).
//!
//! No tensor library is required: gradients are slices of `f32`, `f64`, `f16` or `bf16`. A model with
//! parameters of several types has a [`MixedReducer`].

#![forbid(unsafe_code)]

mod averager;
mod bucket;
mod consistency;
mod finish;
mod gradient;
mod hook;
mod int8;
mod join;
mod memory;
mod mixed;
mod options;
mod post_local;
mod power_sgd;
mod reducer;
mod regroup;
mod statistics;
mod step;

pub use averager::{AveragingLevel, ModelAverager};
pub use bucket::{BucketSizes, assign_buckets};
pub use consistency::Parameter;
pub use gradient::Gradient;
pub use hook::{AllReduceHook, Averaging, Bf16CompressHook, Bucket, CommHook, F16CompressHook};
pub use int8::Int8CompressHook;
pub use join::Joined;
pub use mixed::{MixedOptions, MixedReducer};
pub use options::{Delayed, ReducerOptions, UnevenInputs, UnusedParameters, Wire};
pub use post_local::PostLocalSgdHook;
pub use power_sgd::{BatchedPowerSgdHook, PowerSgdHook};
pub use reducer::Reducer;
pub use statistics::{BucketStatistics, StepStatistics};
