//! Resolves the groups of a job with their members and families.

use crate::align::comm_members;
use crate::align::gloo_world::GlooWorld;
use crate::align::record::{LocalGroup, MAX_WORLD, Record, position, retiring_is_all};
use crate::align::shared::Shared;
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::Recorder;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// Index of a record in [`Aligned::records`](crate::align::Aligned::records).
pub(crate) type RecordIx = usize;
/// Index of a group in [`Aligned::groups`](crate::align::Aligned::groups).
pub(crate) type GroupIx = usize;

/// One group over all its members.
#[derive(Clone, Debug)]
pub(crate) struct Group {
    pub(crate) name: String,
    pub(crate) desc: String,
    /// Global ranks in order of group rank.
    pub(crate) ranks: Arc<[Rank]>,
    /// For each member: its record, and the lane in it, which is the group's index in [`Record::groups`]. `None` if no
    /// record of the member lists the group.
    pub(crate) lanes: Vec<Option<(RecordIx, usize)>>,
    /// Groups that serve the same purpose for different ranks share a family.
    pub(crate) family: u32,
    /// Whether records state the members. If they do not, the members are guessed.
    pub(crate) members_recorded: bool,
    /// The backend, if two recorders of one process number the operations of the group separately: the group is then
    /// listed once for each backend.
    pub(crate) backend: Option<String>,
}

/// Whether a record's group without a name may be another group than the world. gloo's own recorder keeps the members
/// of the newest group only, and this record shows that its process made groups other than the world.
pub(crate) fn names_newest_only(shared: &Shared, record: &Record) -> bool {
    let is_other = |local: &LocalGroup| {
        let group = &shared.groups[local.group as usize];
        !group.name.is_empty() && group.desc != "default_pg"
    };
    retiring_is_all(record.recorder) && record.groups.iter().any(is_other)
}

/// The groups that any record lists, with their members, and for each record the group of each of its lanes.
pub(crate) fn resolve_groups(
    shared: &Shared,
    records: &[Record],
    world_size: Option<u32>,
) -> (Vec<Group>, Vec<Vec<GroupIx>>) {
    let assembled = comm_members::members(records, world_size);
    let mut nameless: Vec<&Arc<[Rank]>> = Vec::new();
    // The ranks with operations on a group, which count as its members if nothing states these.
    let mut issuers: HashMap<u32, BTreeSet<Rank>> = HashMap::new();
    let backends: Vec<Vec<Option<&str>>> =
        shared.map(records.len(), |index| backends_of(shared, &records[index]));
    for (record, its_backends) in records.iter().zip(&backends) {
        for (local, backend) in record.groups.iter().zip(its_backends) {
            let group = &shared.groups[local.group as usize];
            if group.name.is_empty() && !group.ranks.is_empty() {
                nameless.push(&group.ranks);
            } else if group.ranks.is_empty() && backend.is_some() {
                issuers.entry(local.group).or_default().insert(record.rank);
            }
        }
    }
    let newest_only = records
        .iter()
        .any(|record| names_newest_only(shared, record));
    let nameless_world = world_of(records, &nameless, newest_only, world_size);
    let is_guessed = newest_only && world_size.is_none();
    let nameless_world = nameless_world.as_ref();
    let mut worlds = records
        .iter()
        .flat_map(|record| &record.groups)
        .map(|local| {
            let group = &shared.groups[local.group as usize];
            (group.desc == "default_pg" && !group.ranks.is_empty()).then_some(&group.ranks)
        });
    if let Some(world) = nameless_world.or_else(|| worlds.find_map(|world| world)) {
        add_unread_members(shared, records, world, &mut issuers);
    }
    let parts = parts_of_groups(records, &backends);
    let gloo_world = GlooWorld::of(shared, records);
    let mut groups: Vec<Group> = Vec::new();
    let mut numbers: HashMap<(u32, usize), GroupIx> = HashMap::new();
    let mut group_of = Vec::with_capacity(records.len());
    for (index, record) in records.iter().enumerate() {
        let mut of_record = Vec::with_capacity(record.groups.len());
        for (lane, local) in record.groups.iter().enumerate() {
            let parts = parts.get(&local.group).map_or(&[][..], Vec::as_slice);
            let part = part_of(parts, record, backends[index][lane]);
            let of_gloo = gloo_world.as_ref();
            let number = of_gloo.map_or(local.group, |world| world.representative(local.group));
            let ix = *numbers.entry((number, part)).or_insert_with(|| {
                let of_gloo = of_gloo.filter(|world| world.contains(local.group));
                let group = &shared.groups[local.group as usize];
                let backend = parts.get(part).map(|part| part.backend.to_owned());
                let assembled = assembled.get(&local.group);
                let is_recorded = !group.ranks.is_empty()
                    || assembled.is_some()
                    || (nameless_world.is_some() && !is_guessed && group.desc == "default_pg");
                let members_recorded = of_gloo.map_or(is_recorded, |world| world.is_stated);
                let ranks: Arc<[Rank]> = if let Some(world) = of_gloo {
                    world.ranks.clone()
                } else if !group.ranks.is_empty() {
                    group.ranks.clone()
                } else if let Some(members) = assembled {
                    members.clone()
                } else {
                    let world = nameless_world.filter(|_| group.desc == "default_pg");
                    let issuers = issuers.get(&local.group);
                    world.map_or_else(
                        || issuers.into_iter().flatten().copied().collect(),
                        Arc::clone,
                    )
                };
                groups.push(Group {
                    name: group.name.clone(),
                    desc: match &backend {
                        Some(backend) => format!("{} ({backend})", group.desc),
                        None => group.desc.clone(),
                    },
                    lanes: vec![None; ranks.len()],
                    ranks,
                    members_recorded,
                    backend,
                    family: 0,
                });
                groups.len() - 1
            });
            let group = &mut groups[ix];
            // Another recorder of the rank may list the group without recording operations on it.
            if let Some(member) = position(&group.ranks, record.rank)
                && (group.lanes[member].is_none() || backends[index][lane].is_some())
            {
                group.lanes[member] = Some((index, lane));
            }
            of_record.push(ix);
        }
        group_of.push(of_record);
    }
    (groups, group_of)
}

/// The members of the world, from the groups without a name: gloo's own recorder keeps one group under the empty name,
/// which is the world until the program makes another group. If some program did (`newest_only`), if these groups
/// differ, or if they lack a rank that was read, all known ranks are the members. `None` without such groups.
fn world_of(
    records: &[Record],
    nameless: &[&Arc<[Rank]>],
    newest_only: bool,
    world_size: Option<u32>,
) -> Option<Arc<[Rank]>> {
    let &newest = nameless.last()?;
    let holds_all = |ranks: &Arc<[Rank]>| {
        let mut read = records.iter().map(|record| record.rank);
        read.all(|rank| position(ranks, rank).is_some())
    };
    if !newest_only && nameless.iter().all(|ranks| *ranks == newest) && holds_all(newest) {
        return Some(newest.clone());
    }
    // Some of these groups were made later: every known rank is a member of the world.
    let mut world: BTreeSet<Rank> = records.iter().map(|record| record.rank).collect();
    world.extend(nameless.iter().flat_map(|ranks| ranks.iter().copied()));
    world.extend(0..world_size.filter(|&size| size <= MAX_WORLD).unwrap_or(0));
    Some(world.into_iter().collect())
}

/// One of several recorders that number the operations of a group separately, with its backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct GroupPart<'a> {
    recorder: &'a str,
    backend: &'a str,
}

/// For each group of a record: the backend that carried out its operations; `None` if there are none.
fn backends_of<'a>(shared: &'a Shared, record: &Record) -> Vec<Option<&'a str>> {
    let mut backends = vec![None; record.groups.len()];
    for op in &record.ops {
        backends[usize::from(op.group)]
            .get_or_insert_with(|| shared.calls.get(op.call).signature.backend.as_str());
    }
    backends
}

/// For each group with operations from two recorders of one process: these recorders. `cpu:gloo,cuda:nccl`, for
/// example, is one group with two backends, each of which counts its collectives separately.
fn parts_of_groups<'a>(
    records: &[Record],
    backends: &[Vec<Option<&'a str>>],
) -> HashMap<u32, Vec<GroupPart<'a>>> {
    let parts = |index: usize| {
        let groups = records[index].groups.iter().zip(&backends[index]);
        groups.filter_map(move |(local, &backend)| {
            let recorder = records[index].recorder.name();
            Some((
                local.group,
                GroupPart {
                    recorder,
                    backend: backend?,
                },
            ))
        })
    };
    let mut apart: HashMap<u32, Vec<GroupPart<'a>>> = HashMap::new();
    for (index, pair) in records.windows(2).enumerate() {
        if pair[0].rank != pair[1].rank {
            continue;
        }
        // Both are records of one rank: compare the later with all of the rank's earlier ones.
        let of_another_rank = records[..index]
            .iter()
            .rposition(|record| record.rank != pair[0].rank);
        for earlier in of_another_rank.map_or(0, |before| before + 1)..=index {
            for (group, mine) in parts(earlier) {
                for (_, other) in parts(index + 1).filter(|&(other, _)| other == group) {
                    apart.entry(group).or_default().extend([mine, other]);
                }
            }
        }
    }
    for parts in apart.values_mut() {
        parts.sort_unstable();
        parts.dedup();
    }
    apart
}

/// The index of the part of a group that a record covers; 0 if the group has one part.
fn part_of(parts: &[GroupPart<'_>], record: &Record, backend: Option<&str>) -> usize {
    let same = |part: &GroupPart<'_>| part.recorder == record.recorder.name();
    let exact =
        |part: &GroupPart<'_>| same(part) && backend.is_none_or(|name| name == part.backend);
    let found = parts.iter().position(exact);
    found.or_else(|| parts.iter().position(same)).unwrap_or(0)
}

/// Adds the ranks without a record to a group in `issuers`, if the sizes show to which one: of those with the same
/// description, exactly one is smaller than the largest, and it lacks as many members as there are such ranks.
fn add_unread_members(
    shared: &Shared,
    records: &[Record],
    world: &[Rank],
    issuers: &mut HashMap<u32, BTreeSet<Rank>>,
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
    for &group in issuers.keys() {
        let desc = shared.groups[group as usize].desc.as_str();
        if desc != "default_pg" {
            by_desc.entry(desc).or_default().push(group);
        }
    }
    for groups in by_desc.into_values() {
        let size = |group: &u32| issuers[group].len();
        let full = groups.iter().map(size).max().unwrap_or(0);
        let short: Vec<u32> = groups
            .into_iter()
            .filter(|group| size(group) < full)
            .collect();
        if let [group] = short[..]
            && size(&group) + unread.len() == full
            && let Some(members) = issuers.get_mut(&group)
        {
            members.extend(&unread);
        }
    }
}

/// Numbers the families and returns how many there are. Groups of a family have the same description and size; without
/// descriptions, the same stem of the name and the same pattern of ranks.
pub(crate) fn number_families(groups: &mut [Group], records: &[Record]) -> usize {
    let mut families: HashMap<(String, usize, Vec<Rank>), u32> = HashMap::new();
    for group in groups {
        // torchcomms describes a communicator by its backend, which says nothing about the family.
        let mut lanes = group.lanes.iter().flatten();
        let by_backend = lanes.any(|&(record, _)| records[record].recorder == Recorder::Torchcomms);
        let has_no_desc = group.desc.is_empty() || group.desc == "undefined" || by_backend;
        let (stem, pattern) = if has_no_desc {
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
