//! [`ReducerOptions`]: how a reducer forms and averages buckets.

use super::bucket::BucketSizes;
use super::hook::CommHook;
use crate::op::error::{Error, ErrorKind, Result};

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

/// Parameters whose gradients are sent late, all in one bucket of any size, like `delay_all_reduce_named_params` of
/// PyTorch's DistributedDataParallel: for example, to leave the network to other operations first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Delayed {
    /// The parameters, by position.
    pub parameters: Vec<usize>,
    /// The bucket is sent after that of this parameter (`param_to_hook_all_reduce`), or after all others if `None`:
    /// once those before it were sent and its own gradients are ready.
    pub until: Option<usize>,
}

/// How a [`Reducer`](super::Reducer) forms and averages buckets. All ranks pass the same options.
pub struct ReducerOptions<T = f32> {
    /// The sizes of buckets.
    pub buckets: BucketSizes,
    /// Whether buckets are rebuilt after the first step, in the order in which rank 0 of the group had its gradients
    /// then. This happens only if every parameter must have a gradient or the graph is static, and if the
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
    /// The parameters that are sent late.
    pub delayed: Delayed,
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
            delayed: Delayed::default(),
            wire: Wire::default(),
            hook: None,
        }
    }
}

impl<T> ReducerOptions<T> {
    /// Checks the options for a model with this many parameters. Returns for each parameter whether it is sparse.
    ///
    /// # Errors
    /// `InvalidArgument` names the option that does not fit the model or another option.
    pub(super) fn check(&self, parameters: usize) -> Result<Vec<bool>> {
        let check_known = |parameter: usize, what: &str| {
            if parameter < parameters {
                return Ok(());
            }
            Err(refuse(format!(
                "parameter {parameter} cannot be {what}: there are {parameters} parameters, numbered from 0"
            )))
        };
        let mut is_sparse = vec![false; parameters];
        for &parameter in &self.sparse {
            check_known(parameter, "sparse")?;
            is_sparse[parameter] = true;
        }
        for &parameter in &self.delayed.parameters {
            check_known(parameter, "delayed")?;
            if is_sparse[parameter] {
                let message = format!("parameter {parameter} cannot be both sparse and delayed");
                return Err(refuse(message));
            }
        }
        if let Some(until) = self.delayed.until {
            check_known(until, "one that others are delayed until")?;
            if self.delayed.parameters.contains(&until) {
                let message = format!("parameter {until} cannot be delayed until itself");
                return Err(refuse(message));
            }
        }
        if self.hook.is_some() && self.wire != Wire::Own {
            return Err(wire_with_hook(self.wire));
        }
        Ok(is_sparse)
    }
}

/// The error for a hook together with a wire of another type.
pub(super) fn wire_with_hook(wire: Wire) -> Error {
    let wire = match wire {
        Wire::Own => "the gradients' own type",
        Wire::F16 => "f16",
        Wire::Bf16 => "bf16",
    };
    refuse(format!(
        "a hook chooses itself what it sends: remove it, or the option to send gradients as {wire}"
    ))
}

fn refuse(message: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, message)
}
