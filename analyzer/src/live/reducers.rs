//! Finds the newest step of each reducer. A reducer averages the gradients of a data-parallel training in buckets.

use super::snapshot::Snapshot;
use rcomm_recorder::model::{GroupId, Rank, ReducerStep};
use rcomm_recorder::publish::Dump;
use rcomm_verdict::GroupRef;
use std::collections::BTreeMap;

/// The newest step of a reducer on one rank.
#[derive(Clone, Debug)]
pub struct ReducerView<'a> {
    /// The rank.
    pub rank: Rank,
    /// The rank's record.
    pub dump: &'a Dump,
    /// The reducer's group. Its name is empty if the record does not hold the group.
    pub group: GroupRef,
    /// The newest step.
    pub step: &'a ReducerStep,
}

impl Snapshot {
    /// The newest step of each reducer on each rank, by rank and group; empty if no record has one.
    pub fn reducers(&self) -> Vec<ReducerView<'_>> {
        let mut views = Vec::new();
        for (rank, dump) in self.counted() {
            // The steps are in ascending order, so the last one of a group is the newest.
            let newest: BTreeMap<GroupId, &ReducerStep> = (dump.reducer_steps.iter())
                .map(|step| (step.group, step))
                .collect();
            for (id, step) in newest {
                let known = dump.groups.iter().find(|group| group.info.id == id);
                let group = known.map_or_else(
                    || GroupRef {
                        name: String::new(),
                        desc: String::new(),
                        ranks: [].into(),
                    },
                    |group| GroupRef {
                        name: group.info.name.clone(),
                        desc: group.info.desc.clone(),
                        ranks: group.info.ranks.clone(),
                    },
                );
                views.push(ReducerView {
                    rank,
                    dump,
                    group,
                    step,
                });
            }
        }
        views
    }
}
