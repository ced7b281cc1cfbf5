//! What a reducer keeps, and what it starts from scratch, with another group or another hook.

use super::consistency::check_parameters;
use super::gradient::Gradient;
use super::hook::CommHook;
use super::options::{Wire, wire_with_hook};
use super::reducer::Reducer;
use super::statistics::Meter;
use super::step::Narrow;
use crate::group::process_group::ProcessGroup;
use crate::op::error::Result;

impl<T: Gradient> Reducer<T> {
    /// Continues in another group, after ranks were lost or have joined. Operations under way and the unfinished step
    /// are given up, and the buckets are as at the start. All ranks of `group` call this, but for ranks that have
    /// joined: these call [`new`](Self::new) at the same time. The hook is kept ([`CommHook::regrouped`] says what
    /// starts over in it).
    ///
    /// # Blocking
    /// See [`new`](Self::new).
    ///
    /// # Errors
    /// Those of [`new`](Self::new), and before them that of the hook.
    pub fn regroup(&mut self, group: &ProcessGroup) -> Result<()> {
        if let Some(hook) = &mut self.options.hook {
            hook.regrouped()?;
        }
        check_parameters(group, &self.parameters, &self.is_sparse)?;
        self.group = group.clone();
        self.spare.clear();
        // A step may have ended on some ranks only, and with it the buckets may have been rebuilt.
        let order: Vec<usize> = (0..self.lens.len()).rev().collect();
        self.lay_out(&order);
        self.memory.clear();
        self.narrow = Narrow::new(self.options.wire);
        self.has_averages = false;
        self.used_anywhere = vec![1; self.parameters.len()];
        self.used_in_first_step.clear();
        self.steps = 0;
        self.meter = Meter::new();
        self.allocate();
        Ok(())
    }

    /// Averages buckets by this hook from the next step on, or without a hook by one `all_reduce` each. All ranks call
    /// this between the same steps. Before [`regroup`](Self::regroup) it may also be called in a step that has failed.
    ///
    /// # Errors
    /// `InvalidArgument` in the middle of a step, unless that has failed or the group takes no more operations; or if
    /// gradients are sent in another type ([`ReducerOptions::wire`](super::ReducerOptions::wire)).
    pub fn set_hook(&mut self, hook: Option<Box<dyn CommHook<T>>>) -> Result<()> {
        if hook.is_some() && self.options.wire != Wire::Own {
            return Err(wire_with_hook(self.options.wire).in_group(self.group.desc()));
        }
        // The error may be that of another group, as the local one of post-local SGD, while this one is still open.
        if self.step.backward_has_begun && !self.step.has_failed && self.group.refusal().is_none() {
            let message = "a hook is set between steps: finish the step first";
            return Err(self.refuse(message.to_owned()));
        }
        self.options.hook = hook;
        Ok(())
    }
}
