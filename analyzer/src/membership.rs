//! The groups of a job, with their members and the part that each plays.

use crate::align::{Group, GroupIx};
use crate::record::{Record, Shared};
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::Recorder;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// The groups that somebody used, with their members, and for each record the group of each lane.
pub(crate) fn resolve_groups(
    shared: &Shared,
    records: &[Record],
) -> (Vec<Group>, Vec<Vec<GroupIx>>) {
    // Groups that entries name and no record describes: their members are the ranks that name them.
    let mut nameless_world: Option<&Arc<[Rank]>> = None;
    let mut named_by: HashMap<u32, BTreeSet<Rank>> = HashMap::new();
    for record in records {
        let mut used = vec![false; record.groups.len()];
        for op in &record.ops {
            used[usize::from(op.group)] = true;
        }
        for (local, used) in record.groups.iter().zip(used) {
            let group = &shared.groups[local.group as usize];
            if group.name.is_empty() && !group.ranks.is_empty() {
                nameless_world = Some(&group.ranks);
            } else if group.ranks.is_empty() && used {
                named_by.entry(local.group).or_default().insert(record.rank);
            }
        }
    }
    let mut worlds = records
        .iter()
        .flat_map(|record| &record.groups)
        .map(|local| {
            let group = &shared.groups[local.group as usize];
            (group.desc == "default_pg" && !group.ranks.is_empty()).then_some(&group.ranks)
        });
    if let Some(world) = nameless_world.or_else(|| worlds.find_map(|world| world)) {
        add_unread_members(shared, records, world, &mut named_by);
    }
    let mut groups: Vec<Group> = Vec::new();
    let mut numbers: HashMap<u32, GroupIx> = HashMap::new();
    let mut group_of = Vec::with_capacity(records.len());
    for (at, record) in records.iter().enumerate() {
        let mut of_record = Vec::with_capacity(record.groups.len());
        for (lane, local) in record.groups.iter().enumerate() {
            let ix = *numbers.entry(local.group).or_insert_with(|| {
                let group = &shared.groups[local.group as usize];
                let told = !group.ranks.is_empty()
                    || (nameless_world.is_some() && group.desc == "default_pg");
                let ranks: Arc<[Rank]> = if !group.ranks.is_empty() {
                    group.ranks.clone()
                } else {
                    let world = nameless_world.filter(|_| group.desc == "default_pg");
                    let named = named_by.get(&local.group);
                    world.map_or_else(
                        || named.into_iter().flatten().copied().collect(),
                        Arc::clone,
                    )
                };
                groups.push(Group {
                    name: group.name.clone(),
                    desc: group.desc.clone(),
                    lanes: vec![None; ranks.len()],
                    ranks,
                    told,
                    family: 0,
                    shows_starts: false,
                });
                groups.len() - 1
            });
            let group = &mut groups[ix];
            if let Some(member) = position(&group.ranks, record.rank) {
                group.lanes[member] = Some((at, lane));
            }
            of_record.push(ix);
        }
        group_of.push(of_record);
    }
    (groups, group_of)
}

/// Gives ranks without a record to the groups that only their members' records tell of: where one group
/// of a description is smaller than the others by as many as are unread, they are its members.
fn add_unread_members(
    shared: &Shared,
    records: &[Record],
    world: &[Rank],
    named_by: &mut HashMap<u32, BTreeSet<Rank>>,
) {
    let read: BTreeSet<Rank> = records.iter().map(|record| record.rank).collect();
    let unread: Vec<Rank> = world
        .iter()
        .copied()
        .filter(|rank| !read.contains(rank))
        .collect();
    if unread.is_empty() {
        return;
    }
    let mut by_desc: BTreeMap<&str, Vec<u32>> = BTreeMap::new();
    for &group in named_by.keys() {
        let desc = shared.groups[group as usize].desc.as_str();
        if desc != "default_pg" {
            by_desc.entry(desc).or_default().push(group);
        }
    }
    for groups in by_desc.into_values() {
        let size = |group: &u32| named_by[group].len();
        let full = groups.iter().map(size).max().unwrap_or(0);
        let short: Vec<u32> = groups
            .into_iter()
            .filter(|group| size(group) < full)
            .collect();
        if let [group] = short[..]
            && size(&group) + unread.len() == full
            && let Some(members) = named_by.get_mut(&group)
        {
            members.extend(&unread);
        }
    }
}

/// Where a rank stands among the members.
pub(crate) fn position(ranks: &[Rank], rank: Rank) -> Option<usize> {
    // Members are nearly always ascending.
    if let Ok(at) = ranks.binary_search(&rank) {
        return Some(at);
    }
    ranks.iter().position(|&r| r == rank)
}

/// Numbers the families: same description and size, and, where descriptions say nothing, same stem of
/// the name and same pattern of ranks.
pub(crate) fn name_families(groups: &mut [Group], records: &[Record]) -> usize {
    let mut families: HashMap<(String, usize, Vec<Rank>), u32> = HashMap::new();
    for group in groups {
        // torchcomms describes a communicator by its backend.
        let mut lanes = group.lanes.iter().flatten();
        let by_backend = lanes.any(|&(at, _)| records[at].recorder == Recorder::Torchcomms);
        let says_nothing = group.desc.is_empty() || group.desc == "undefined" || by_backend;
        let (stem, pattern) = if says_nothing {
            let first = group.ranks.first().copied().unwrap_or(0);
            let stem = group.name.trim_end_matches(|c: char| c.is_ascii_digit());
            let ranks = group.ranks.iter();
            (stem, ranks.map(|&rank| rank.wrapping_sub(first)).collect())
        } else {
            (group.desc.as_str(), Vec::new())
        };
        let next = families.len() as u32;
        let key = (stem.to_owned(), group.ranks.len(), pattern);
        group.family = *families.entry(key).or_insert(next);
    }
    families.len()
}
