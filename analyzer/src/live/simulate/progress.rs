//! Computes how far each rank gets after the fault.

use super::{ALL_REDUCE, ProgramOp, REDUCE_SCATTER, Simulation, Situation};
use rcomm_recorder::model::Rank;
use std::collections::HashMap;

/// The progress of all ranks after the fault, by rank.
#[derive(Debug)]
pub(super) struct RankProgress {
    /// The number of operations issued from the step of the fault on.
    pub(super) issued: Vec<usize>,
    /// Whether the newest of them waits for another rank.
    pub(super) blocked: Vec<bool>,
}

impl Simulation {
    /// The progress from the step of the fault on; `None` before the fault, or if the fault stops no rank.
    pub(super) fn progress(&self, now_ns: i64) -> Option<RankProgress> {
        let stops = matches!(
            self.situation,
            Situation::StuckRank | Situation::Deadlock | Situation::Mismatch
        );
        if !stops || now_ns < self.fault_ns() {
            return None;
        }
        // The operations of each rank from the step of the fault on that are due by now. The ranks that end up waiting
        // get at most two steps further.
        let steps = Self::FAULT_STEP..Self::FAULT_STEP + 3;
        let program: Vec<Vec<ProgramOp>> = (0..self.ranks)
            .map(|rank| {
                steps
                    .clone()
                    .flat_map(|step| {
                        let slots = self.slots(rank, step);
                        slots.iter().map(move |&slot| ProgramOp { step, slot })
                    })
                    .filter(|&operation| self.arrival_ns(rank, operation) <= now_ns)
                    .take_while(|&operation| {
                        self.situation != Situation::StuckRank
                            || rank != self.culprit()
                            || operation != Self::fault_of(Situation::StuckRank)
                    })
                    .collect()
            })
            .collect();
        let mut entered: HashMap<(ProgramOp, u32), u32> = HashMap::new();
        let mut issued = vec![0usize; program.len()];
        let mut blocked = vec![false; program.len()];
        loop {
            let mut moved = false;
            for rank in 0..self.ranks {
                let operations = &program[rank as usize];
                let count = issued[rank as usize];
                let is_free = match count.checked_sub(1).map(|last| operations[last]) {
                    None => true,
                    Some(operation) => {
                        let inside =
                            entered.get(&(operation, self.group_index(rank, operation.slot)));
                        inside == Some(&self.group_size(operation.slot))
                            && !self.is_broken(rank, operation)
                    }
                };
                blocked[rank as usize] = !is_free;
                if is_free && let Some(&next) = operations.get(count) {
                    let group = self.group_index(rank, next.slot);
                    *entered.entry((next, group)).or_default() += 1;
                    issued[rank as usize] += 1;
                    moved = true;
                }
            }
            if !moved {
                return Some(RankProgress { issued, blocked });
            }
        }
    }

    /// Whether `operation` cannot end in the group of `rank` although all members arrived.
    fn is_broken(&self, rank: Rank, operation: ProgramOp) -> bool {
        self.situation == Situation::Mismatch
            && operation == Self::fault_of(Situation::Mismatch)
            && self.host_of(rank) == self.host_of(self.culprit())
    }

    /// The operation that the rank at fault misses in [`Situation::StuckRank`], or replaces in [`Situation::Mismatch`].
    pub(super) fn fault_of(situation: Situation) -> ProgramOp {
        let slot = match situation {
            Situation::StuckRank => ALL_REDUCE,
            _ => REDUCE_SCATTER,
        };
        ProgramOp {
            step: Self::FAULT_STEP,
            slot,
        }
    }
}
