//! [`Reducer::join`]: the steps of a rank that has no input left.

use super::gradient::Gradient;
use super::options::UnevenInputs;
use super::reducer::Reducer;
use crate::op::error::Result;
use rcomm_recorder::model::ReduceOp;

/// How training with uneven inputs has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Joined {
    /// How many steps this rank took part in without input.
    pub shadowed: u64,
    /// A rank of the group that had input in every step, the same on all ranks: its parameters are up to date
    /// ([`Reducer::broadcast_parameters_from`] copies them to the others).
    pub last: u32,
}

impl<T: Gradient> Reducer<T> {
    /// Takes part in the steps of the others, with gradients of zero, until all ranks have called this: for a rank
    /// that has no input left, like `join` of PyTorch's DistributedDataParallel. Every rank calls it once at the end.
    ///
    /// # Blocking
    /// Until all ranks have called this; each wait for a step has the group's time-out.
    ///
    /// # Errors
    /// `InvalidArgument` without [`ReducerOptions::uneven`](super::ReducerOptions::uneven), or in the middle of a step.
    /// Otherwise the error of the hook or the group.
    pub fn join(&mut self) -> Result<Joined> {
        self.check_join()?;
        let mut shadowed = 0;
        loop {
            let vote = self.start_vote(0)?;
            if self.count(vote)? == 0 {
                break;
            }
            self.shadow()?;
            shadowed += 1;
        }
        let mut last = [if shadowed == 0 { self.group.rank() } else { 0 }];
        self.group.all_reduce(&mut last, ReduceOp::Max)?;
        Ok(Joined {
            shadowed,
            last: last[0],
        })
    }

    /// Refuses to join without the option for it, and in the middle of a step.
    pub(super) fn check_join(&self) -> Result<()> {
        if self.options.uneven == UnevenInputs::No {
            let message = "join needs the option `uneven`, on all ranks";
            return Err(self.refuse(message.to_owned()));
        }
        if self.step.backward_has_begun {
            let message = "join in the middle of a step: finish it first";
            return Err(self.refuse(message.to_owned()));
        }
        Ok(())
    }

    /// Takes part, without input, in a step whose vote has ended.
    pub(super) fn shadow(&mut self) -> Result<()> {
        self.begin_backward();
        self.step.takes_part = true;
        self.complete(false, &mut |_, _| {})?;
        self.has_averages = false;
        Ok(())
    }
}
