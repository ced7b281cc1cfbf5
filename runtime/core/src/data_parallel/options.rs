//! [`ReducerOptions`]: how a reducer forms and averages buckets.

use super::bucket::BucketSizes;
use super::hook::CommHook;

/// How parameters that get no gradient in a step are handled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UnusedParameters {
    /// The step fails with an error that names up to eight of them: most often the model has a mistake.
    #[default]
    Refuse,
    /// A rank without a gradient counts as one with a gradient of zero. A parameter that no rank has used
    /// gets `None`. Costs one more small operation in each step (with
    /// [`static_graph`](ReducerOptions::static_graph) in the first step only).
    Find,
}

/// Whether some ranks may run out of input before others ([`Reducer::join`](super::Reducer::join)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UnevenInputs {
    /// All ranks make the same number of steps.
    #[default]
    No,
    /// A rank without input counts as one with gradients of zero. Costs one more small operation in each step.
    DivideBySize,
    /// Gradients are divided by the number of ranks that had input in the step. Costs one more small operation
    /// in each step.
    DivideByActive,
}

/// The element type in which gradients are sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wire {
    /// The type of the gradients.
    #[default]
    Own,
    /// `f16`: half the bytes of `f32`. The CPU backend adds in `f32` and rounds the sum once.
    F16,
    /// `bf16`: half the bytes of `f32`. The CPU backend adds in `f32` and rounds the sum once.
    Bf16,
}

/// How a [`Reducer`](super::Reducer) forms and averages buckets. All ranks pass the same options.
pub struct ReducerOptions<T = f32> {
    /// The sizes of buckets.
    pub buckets: BucketSizes,
    /// Whether buckets are formed anew after the first step, in the order in which rank 0 of the group had its
    /// gradients then. This happens only if every parameter must have a gradient or the graph is static, and if the
    /// [`hook`](Self::hook) allows it where there is one.
    pub rebuild_buckets: bool,
    /// How parameters without a gradient are handled.
    pub unused: UnusedParameters,
    /// Whether each rank uses the same parameters in each step. The search for unused ones is then made in the
    /// first step only, and no bucket waits for them in later steps.
    pub static_graph: bool,
    /// Whether some ranks may run out of input before others.
    pub uneven: UnevenInputs,
    /// The parameters, by position, whose gradients are sparse
    /// ([`ready_sparse`](super::Reducer::ready_sparse)).
    pub sparse: Vec<usize>,
    /// The element type in which gradients are sent, without a hook.
    pub wire: Wire,
    /// How buckets are averaged; if `None`, by one `all_reduce` for each, in the type of [`wire`](Self::wire).
    pub hook: Option<Box<dyn CommHook<T>>>,
}

impl<T> Default for ReducerOptions<T> {
    fn default() -> Self {
        Self {
            buckets: BucketSizes::default(),
            rebuild_buckets: true,
            unused: UnusedParameters::default(),
            static_graph: false,
            uneven: UnevenInputs::default(),
            sparse: Vec::new(),
            wire: Wire::default(),
            hook: None,
        }
    }
}
