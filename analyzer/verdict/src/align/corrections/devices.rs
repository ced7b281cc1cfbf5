//! Splits the records of processes with several devices.
//!
//! The profiler plug-in keeps one ring for a process. A process with several devices has several ranks of a
//! communicator, so its ring lists the communicator once for each of them. Here such a record is split into one for
//! each rank. The ranks are then those of the largest communicator, not those of processes. The record does not show
//! which device a rank of another communicator belongs to, unless the process has the same ranks in both.

use crate::align::record::{LocalGroup, Op, Record};
use crate::align::shared::Shared;
use crate::report::Problem;
use crate::report::format::format_ranks;
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::Recorder;
use std::collections::{BTreeMap, BTreeSet, HashSet};

/// For each group in which a record states ranks of its own: these ranks, each with the position of its group in the
/// record.
type Places = BTreeMap<u32, BTreeMap<Rank, usize>>;

fn places_of(record: &Record) -> Places {
    let mut places = Places::new();
    for (index, local) in record.groups.iter().enumerate() {
        if let Some(place) = local.place {
            let ranks = places.entry(local.group).or_default();
            ranks.insert(place.rank, index);
        }
    }
    places
}

/// Splits the records of processes with several devices, and returns the number of ranks of the job. `None` if there is
/// no such record, or if not every record states ranks of its own in the largest communicator: then the records stay
/// those of processes. Removes the operations of communicators whose ranks cannot be distinguished, and adds that to
/// `problems`.
pub(crate) fn split(
    shared: &Shared,
    records: &mut Vec<Record>,
    problems: &mut Vec<Problem>,
) -> Option<u32> {
    let places: Vec<Places> = records.iter().map(places_of).collect();
    let has_several_ranks = |places: &Places| places.values().any(|ranks| ranks.len() > 1);
    if !places.iter().any(has_several_ranks) {
        return None;
    }
    let world = world_of(records, &places);
    let kept = kept_groups(&places, world.map(|(group, _)| group));
    note_removed(shared, records, &places, &kept, problems);
    let mut split = Vec::with_capacity(records.len());
    for (record, places) in records.drain(..).zip(&places) {
        let hides_pending = hides_pending(&record, &kept);
        let before = split.len();
        let ranks = world.and_then(|(group, size)| Some((places.get(&group)?, size)));
        match ranks {
            Some((ranks, size)) => {
                let several = ranks.len() > 1;
                let part_of = |&rank| part(&record, rank, size, &kept, several);
                split.extend(ranks.keys().map(part_of));
            }
            None => {
                let keeps =
                    |local: &LocalGroup| local.place.is_none() || kept.contains(&local.group);
                split.push(with_groups(&record, keeps));
            }
        }
        for part in &mut split[before..] {
            part.cut |= hides_pending;
        }
    }
    split.sort_by(|a, b| (a.rank, &a.path).cmp(&(b.rank, &b.path)));
    *records = split;
    world.map(|(_, size)| size)
}

/// The largest communicator and its size, if each record states ranks in it, and no two the same one.
fn world_of(records: &[Record], places: &[Places]) -> Option<(u32, u32)> {
    let sizes = records.iter().flat_map(|record| {
        let places = record.groups.iter();
        places.filter_map(|local| Some((local.place?.size, local.group)))
    });
    let (size, group) = sizes.max_by_key(|&(size, group)| (size, std::cmp::Reverse(group)))?;
    let mut seen = HashSet::new();
    let covers = records.iter().zip(places).all(|(record, places)| {
        let ranks = places.get(&group);
        record.recorder == Recorder::NcclProfiler
            && ranks.is_some_and(|ranks| ranks.keys().all(|&rank| rank < size && seen.insert(rank)))
    });
    covers.then_some((group, size))
}

/// The groups whose ranks every record distinguishes.
fn kept_groups(places: &[Places], world: Option<u32>) -> BTreeSet<u32> {
    let mut kept: BTreeSet<u32> = places
        .iter()
        .flat_map(|groups| groups.keys().copied())
        .collect();
    for of_record in places {
        let in_world = world.and_then(|world| of_record.get(&world));
        let is_distinct = |ranks: &BTreeMap<Rank, usize>| match in_world {
            Some(in_world) => in_world.len() == 1 || ranks.keys().eq(in_world.keys()),
            None => ranks.len() == 1,
        };
        for (group, ranks) in of_record {
            if !is_distinct(ranks) {
                kept.remove(group);
            }
        }
    }
    kept
}

/// Whether some of the removed operations had not ended. The record is then judged like one that was cut.
fn hides_pending(record: &Record, kept: &BTreeSet<u32>) -> bool {
    record.ops.iter().any(|op| {
        let local = &record.groups[usize::from(op.group)];
        let is_removed = local.place.is_some() && !kept.contains(&local.group);
        is_removed && !op.retired && !op.completed()
    })
}

/// Adds to `problems` that groups were removed, if some were.
fn note_removed(
    shared: &Shared,
    records: &[Record],
    places: &[Places],
    kept: &BTreeSet<u32>,
    problems: &mut Vec<Problem>,
) {
    let removed: BTreeSet<u32> = places
        .iter()
        .flat_map(|groups| groups.keys().copied())
        .filter(|group| !kept.contains(group))
        .collect();
    let Some(&first) = removed.first() else {
        return;
    };
    let several = records
        .iter()
        .zip(places)
        .filter(|(_, places)| places.values().any(|ranks| ranks.len() > 1));
    let processes: Vec<Rank> = several.map(|(record, _)| record.rank).collect();
    let more = match removed.len() - 1 {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    problems.push(Problem::unreadable_dump(
        "",
        format!(
            "operations on group {}{more} were left aside: the process{} of {} {} several devices, and the record does \
             not tell which of them is which rank of the group",
            shared.groups[first as usize].name,
            if processes.len() == 1 { "" } else { "es" },
            format_ranks(&processes),
            if processes.len() == 1 { "has" } else { "have" },
        ),
    ));
}

/// The record of one rank of a process; `several` if the process has other ranks of the job, too.
fn part(record: &Record, rank: Rank, size: u32, kept: &BTreeSet<u32>, several: bool) -> Record {
    let keeps = |local: &LocalGroup| match local.place {
        Some(place) => kept.contains(&local.group) && (!several || place.rank == rank),
        None => true,
    };
    let mut part = with_groups(record, keeps);
    part.rank = rank;
    part.identity.rank = Some(rank);
    part.identity.world_size = Some(size);
    part
}

/// A copy of a record with only the groups for which `keeps` returns true, and their operations.
fn with_groups(record: &Record, keeps: impl Fn(&LocalGroup) -> bool) -> Record {
    let mut number = 0;
    let numbers: Vec<Option<u16>> = record
        .groups
        .iter()
        .map(|local| {
            keeps(local).then(|| {
                number += 1;
                number - 1
            })
        })
        .collect();
    let mut part = record.clone();
    part.groups.retain(&keeps);
    let renumber = |op: &mut Op| {
        let number = numbers[usize::from(op.group)];
        op.group = number.unwrap_or(op.group);
        number.is_some()
    };
    part.ops.retain_mut(renumber);
    part.unaligned.retain_mut(|(_, op)| renumber(op));
    part
}
