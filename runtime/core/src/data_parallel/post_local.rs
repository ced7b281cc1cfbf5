//! [`PostLocalSgdHook`]: gradients averaged over all ranks at first, and among few ranks later.

use super::gradient::Gradient;
use super::hook::{Averaging, Bucket, CommHook, StepCount};
use crate::group::maker::GroupOptions;
use crate::group::process_group::ProcessGroup;
use crate::op::error::{Error, ErrorKind, Result};
use rcomm_recorder::model::ReduceOp;

/// The ranks among which gradients are averaged in later steps.
enum Local {
    /// This rank alone.
    Alone,
    /// `size` ranks that follow each other in the reducer's group; `group` is made when it is first used.
    Adjacent {
        size: u32,
        group: Option<ProcessGroup>,
    },
    /// The program's own group.
    Given(ProcessGroup),
}

/// Averages gradients over all ranks of the reducer's group in the first steps, and then only among the ranks of a
/// *local group*, such as those of a host. The models of different local groups then drift apart: a
/// [`ModelAverager`](super::ModelAverager) averages their parameters every few steps, after the optimizer. Its
/// `warm_up` is this hook's `start`. So ranks of different local groups communicate in some steps only.
///
/// The method is post-local SGD (Lin, Stich, Patel and Jaggi, "Don't Use Large Mini-Batches, Use Local SGD", ICLR
/// 2020), as in PyTorch's `post_localSGD_hook` (`torch/distributed/algorithms/ddp_comm_hooks/post_localSGD_hook.py`).
///
/// Each bucket is averaged by one `all_reduce` in the type of the gradients.
/// [`UnusedParameters::Find`](super::UnusedParameters::Find) and [`UnevenInputs`](super::UnevenInputs) still cost
/// their operation over all ranks in each step, and
/// [`UnevenInputs::DivideByActive`](super::UnevenInputs::DivideByActive) counts the active ranks of the reducer's
/// group, not those of the local one.
///
/// A hook belongs to one reducer. After [`Reducer::regroup`](super::Reducer::regroup) it counts steps from the start.
pub struct PostLocalSgdHook {
    local: Local,
    /// How many steps are averaged over all ranks.
    global_steps: u64,
    steps: StepCount,
}

impl PostLocalSgdHook {
    /// After `start` steps, averages among the ranks of `local`, a group of this rank that is not the reducer's own.
    pub fn new(local: &ProcessGroup, start: u64) -> Self {
        Self::with(Local::Given(local.clone()), start)
    }

    /// After `start` steps, averages among each `size` ranks that follow each other in the reducer's group. The first
    /// such step calls [`ProcessGroup::new_subgroups`], in which ranks wait for each other. The number of ranks on each
    /// host gives a group for each host, if ranks are numbered host by host.
    ///
    /// The first step is refused with `InvalidArgument` if `size` does not divide the size of the reducer's group.
    pub fn adjacent(size: u32, start: u64) -> Self {
        Self::with(Local::Adjacent { size, group: None }, start)
    }

    /// After `start` steps, averages no gradients: each rank continues with its own.
    pub fn alone(start: u64) -> Self {
        Self::with(Local::Alone, start)
    }

    fn with(local: Local, global_steps: u64) -> Self {
        Self {
            local,
            global_steps,
            steps: StepCount::default(),
        }
    }
}

impl<T: Gradient> CommHook<T> for PostLocalSgdHook {
    fn start(&mut self, group: &ProcessGroup, bucket: Bucket<T>) -> Result<Averaging<T>> {
        let is_global = self.steps.count(bucket.index) <= self.global_steps;
        let local = match &mut self.local {
            &mut Local::Adjacent { size, .. }
                if size == 0 || !group.size().is_multiple_of(size) =>
            {
                let message = format!("{} ranks do not divide into groups of {size}", group.size());
                let error = Error::new(ErrorKind::InvalidArgument, message);
                return Err(error.in_group(group.desc()));
            }
            _ if is_global => Some(group),
            Local::Alone => None,
            Local::Given(local) => Some(&*local),
            Local::Adjacent { size, group: made } => {
                if made.is_none() {
                    let options = GroupOptions::named("local SGD");
                    *made = Some(group.new_subgroups(*size, &options)?);
                }
                made.as_ref()
            }
        };
        let gradients = bucket.gradients;
        match local {
            Some(group) => {
                let work = group.all_reduce_async(gradients, ReduceOp::Avg)?;
                Ok(Box::new(move || work.wait()))
            }
            None => Ok(Box::new(move || Ok(gradients))),
        }
    }

    fn allows_rebuild(&self) -> bool {
        true
    }

    fn regrouped(&mut self) -> Result<()> {
        match &mut self.local {
            Local::Given(local) if self.steps.has_begun() => {
                let message = format!(
                    "the local group {} was made before ranks were lost or have joined: first set a hook with another \
                     local group (Reducer::set_hook)",
                    local.desc()
                );
                return Err(Error::new(ErrorKind::InvalidArgument, message));
            }
            Local::Adjacent { group, .. } => *group = None,
            Local::Given(_) | Local::Alone => {}
        }
        self.steps = StepCount::default();
        Ok(())
    }
}
