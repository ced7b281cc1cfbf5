//! [`ModelAverager`]: parameters averaged every few steps.

use super::gradient::Gradient;
use crate::group::maker::GroupOptions;
use crate::group::process_group::ProcessGroup;
use crate::op::error::{Error, ErrorKind, Result};
use rcomm_recorder::model::ReduceOp;

/// A level of [`ModelAverager::hierarchical`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AveragingLevel {
    /// Parameters are averaged in steps whose number is a multiple of this.
    pub period: u64,
    /// How many ranks that follow each other average among themselves.
    pub size: u32,
}

/// Averages the parameters of a model over ranks in some steps only: with
/// [`PostLocalSgdHook`](super::PostLocalSgdHook), or without a reducer for local SGD. The program calls
/// [`average`](Self::average) after the optimizer, in each step.
///
/// It follows PyTorch's `PeriodicModelAverager` and `HierarchicalModelAverager`
/// (`torch/distributed/algorithms/model_averaging`).
///
/// # Thread safety
/// One thread at a time may use it. Other collectives of its groups would mix with its own.
pub struct ModelAverager {
    /// The period of each level and its group, the shortest period first.
    levels: Vec<(u64, ProcessGroup)>,
    warm_up: u64,
    /// The number of a step from which periods are counted.
    origin: u64,
    /// How many steps were taken.
    step: u64,
}

impl ModelAverager {
    /// Averages over `group` in step `warm_up`, the first one being step 0, and in every `period`-th step from there
    /// on. `warm_up` is the number of steps at the beginning that average gradients over all ranks. All ranks of the
    /// group pass the same numbers.
    ///
    /// # Errors
    /// `InvalidArgument` if `period` is 0.
    pub fn periodic(group: &ProcessGroup, period: u64, warm_up: u64) -> Result<Self> {
        if period == 0 {
            let message = "the period is 0: give a number of steps from 1 on";
            return Err(refuse(group, message.to_owned()));
        }
        Ok(Self {
            levels: vec![(period, group.clone())],
            warm_up,
            origin: warm_up,
            step: 0,
        })
    }

    /// Averages at several levels (hierarchical SGD: Wang, Wang, Sinha and Chen, "Demystifying Why Local Aggregation
    /// Helps: Convergence Analysis of Hierarchical SGD", AAAI 2022): from step `warm_up` on, the first one being step
    /// 0, a step whose number is a multiple of a level's period averages among each `size` ranks of that level. If it
    /// is a multiple of several, that of the longest period counts.
    ///
    /// All ranks of `group` call this with the same levels. [`ProcessGroup::new_subgroups`] makes the groups; the last
    /// level uses `group` itself.
    ///
    /// # Blocking
    /// With more than one level, as [`World::new_group`](crate::World::new_group).
    ///
    /// # Errors
    /// `InvalidArgument`, before any group is made, if there is no level, a period or size is 0, periods or sizes do
    /// not ascend, a size does not divide that of the group, or the last is not that of the group. Otherwise as
    /// [`World::new_group`](crate::World::new_group).
    pub fn hierarchical(
        group: &ProcessGroup,
        levels: &[AveragingLevel],
        warm_up: u64,
    ) -> Result<Self> {
        let whole = group.size();
        if levels.last().map(|level| level.size) != Some(whole) {
            let levels = describe(levels);
            let message = format!(
                "the last level must be of all {whole} ranks, and the levels are: {levels}"
            );
            return Err(refuse(group, message));
        }
        let ascends = |pair: &[AveragingLevel]| {
            pair[0].period < pair[1].period && pair[0].size < pair[1].size
        };
        let is_possible = |level: &AveragingLevel| {
            level.period > 0 && level.size > 0 && whole.is_multiple_of(level.size)
        };
        if !levels.windows(2).all(ascends) || !levels.iter().all(is_possible) {
            return Err(refuse(
                group,
                format!(
                    "levels must have ascending periods from 1 on, and ascending sizes that divide {whole} ranks; the \
                     levels are: {}",
                    describe(levels)
                ),
            ));
        }
        let levels = levels.iter().map(|level| {
            let members = if level.size == whole {
                group.clone()
            } else {
                let name = format!("averages of {}", level.size);
                group.new_subgroups(level.size, &GroupOptions::named(name))?
            };
            Ok((level.period, members))
        });
        Ok(Self {
            levels: levels.collect::<Result<_>>()?,
            warm_up,
            origin: 0,
            step: 0,
        })
    }

    /// Ends a step: averages `values`, the parameters of the model, if it is the turn of a level. All ranks pass values
    /// of the same lengths in the same order. Returns over how many ranks they were averaged; `None` if they stay as
    /// they are.
    ///
    /// Sums of 16-bit types are rounded once. For a model with parameters of several types, see
    /// [`next_group`](Self::next_group).
    ///
    /// # Blocking
    /// Until the ranks of the level's group have called this, up to the group's time-out.
    ///
    /// # Errors
    /// Those of [`ProcessGroup::all_reduce_coalesced`].
    pub fn average<T: Gradient>(&mut self, values: &mut [&mut [T]]) -> Result<Option<u32>> {
        let Some(group) = self.next_group() else {
            return Ok(None);
        };
        group.all_reduce_coalesced(values, ReduceOp::Avg)?;
        Ok(Some(group.size()))
    }

    /// Ends a step, and returns the group over which the program itself must average the parameters now; `None` if it
    /// is no level's turn. It takes the place of [`average`](Self::average).
    pub fn next_group(&mut self) -> Option<&ProcessGroup> {
        let step = self.step;
        self.step += 1;
        let since = step.checked_sub(self.origin)?;
        if step < self.warm_up {
            return None;
        }
        let mut longest_first = self.levels.iter().rev();
        let due = longest_first.find(|(period, _)| since.is_multiple_of(*period));
        due.map(|(_, group)| group)
    }

    /// How many steps have ended. A program saves it with the model ([`set_step`](Self::set_step)).
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Sets how many steps have ended, for a model that was saved: the same number on all ranks.
    pub fn set_step(&mut self, step: u64) {
        self.step = step;
    }
}

/// The levels as an error lists them.
fn describe(levels: &[AveragingLevel]) -> String {
    if levels.is_empty() {
        return "none".to_owned();
    }
    let levels = levels.iter().map(|level| {
        let AveragingLevel { period, size } = level;
        format!("period {period} of {size} ranks")
    });
    levels.collect::<Vec<_>>().join(", ")
}

fn refuse(group: &ProcessGroup, message: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, message).in_group(group.desc())
}
