//! The world of a job with records by gloo's own recorder.
//!
//! That recorder keeps the members of a process's newest group only. If a record shows no other group than the world,
//! these members are read as the world's. But they are those of a smaller group if the process has made one and not
//! used it yet, so the ranks of one run may seem to be of worlds with different members.

use crate::align::record::{Record, retiring_is_all};
use crate::align::shared::Shared;
use rcomm_recorder::model::Rank;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Records of one run have their newest operations within this time, ns.
const ONE_RUN_NS: u64 = 60_000_000_000;

/// A world of which records by gloo's own recorder name different members.
#[derive(Debug)]
pub(crate) struct GlooWorld {
    /// The groups that the records list as the world, as indices into [`Shared::groups`].
    groups: BTreeSet<u32>,
    /// All ranks that these records name, and those that left them, ascending.
    pub(crate) ranks: Arc<[Rank]>,
    /// Whether a record names all of them.
    pub(crate) is_stated: bool,
}

impl GlooWorld {
    /// The world of these records. `None` if they agree on its members, or may be of several runs: a rank left two,
    /// their worlds have different names, their newest operations are far apart, or one ended before another began.
    pub(crate) fn of(shared: &Shared, records: &[Record]) -> Option<Self> {
        let mut groups = BTreeSet::new();
        let mut ranks = BTreeSet::new();
        let mut times: Option<(i64, i64)> = None;
        let mut newest_first_ns = 0;
        let by_gloo = records
            .iter()
            .filter(|record| retiring_is_all(record.recorder));
        for record in by_gloo {
            if !ranks.insert(record.rank) {
                return None;
            }
            let listed = record.groups.iter().map(|local| local.group);
            groups.extend(listed.filter(|&group| is_world(shared, group)));
            let first_ns = record.ops.first().map_or(0, |op| op.created_ns);
            newest_first_ns = newest_first_ns.max(first_ns);
            let newest_ns = record.newest_ns();
            if newest_ns > 0 {
                times = Some(times.map_or((newest_ns, newest_ns), |(from, to)| {
                    (from.min(newest_ns), to.max(newest_ns))
                }));
            }
        }
        let group = |index: &u32| &shared.groups[*index as usize];
        let first = group(groups.first()?);
        let have_one_name = groups.iter().all(|index| group(index).name == first.name);
        // A record that ended before another one began is of an earlier run.
        let are_of_one_run = times
            .is_none_or(|(from, to)| from.abs_diff(to) < ONE_RUN_NS && from >= newest_first_ns);
        if groups.len() < 2 || !have_one_name || !are_of_one_run {
            return None;
        }
        for index in &groups {
            ranks.extend(group(index).ranks.iter().copied());
        }
        let number = ranks.len();
        let is_stated = groups
            .iter()
            .any(|index| group(index).ranks.len() == number);
        Some(Self {
            groups,
            ranks: ranks.into_iter().collect(),
            is_stated,
        })
    }

    /// The one of the world's groups that represents them all, if this group is one of them; else the group itself.
    pub(crate) fn representative(&self, group: u32) -> u32 {
        let first = self.groups.first().filter(|_| self.contains(group));
        first.copied().unwrap_or(group)
    }

    /// Whether records list this group as the world.
    pub(crate) fn contains(&self, group: u32) -> bool {
        self.groups.contains(&group)
    }
}

/// Whether this is the default group.
fn is_world(shared: &Shared, group: u32) -> bool {
    shared.groups[group as usize].desc == "default_pg"
}
