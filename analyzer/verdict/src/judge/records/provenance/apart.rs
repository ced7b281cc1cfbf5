//! Leaves aside the records by PyTorch's recorders that an earlier run has left.
//!
//! These recorders state no job and no process, so the files of a later run replace those of an earlier one where both
//! wrote one, and lie beside the others. An earlier run has written its files before a later one issues anything, and
//! the rings of the later one begin with its first operation. That alone proves nothing: the clock of a host may be
//! wrong, and a rank may come late. So the records of the earlier time must also show what no rank of one run can do.

use super::of_one_rank::states_no_process;
use super::{CONTRADICTING_SHARE, CONTRADICTIONS, LeftAside, MAX_CLOCK_ERROR_NS, contradicts};
use crate::align::record::{Op, Record};
use crate::align::retiring_is_all;
use crate::align::shared::Shared;
use crate::judge::policy::own_written_ns;
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::Recorder;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// A run has ended at least this long before the next one issues an operation, ns: longer than the clocks of hosts
/// usually differ.
const APART_NS: i64 = 15_000_000_000;

/// A record, from its first operation until it was written, ns.
struct Life {
    from_ns: i64,
    until_ns: i64,
    record: usize,
}

/// Leaves aside the records of each time that contradict those of the times after it.
pub(super) fn leave_earlier_times_aside(
    shared: &Shared,
    records: &mut Vec<Record>,
    aside: &mut LeftAside,
) {
    let mut times = times(records).into_iter().rev();
    let Some(mut later) = times.next() else {
        return;
    };
    let mut earlier: BTreeMap<usize, String> = BTreeMap::new();
    for time in times {
        let from_ns = later.iter().map(|life| life.from_ns).min();
        let until_ns = time.iter().map(|life| life.until_ns).max();
        let pause_ns = from_ns.unwrap_or(0).saturating_sub(until_ns.unwrap_or(0));
        let of = |lives: &[Life]| -> Vec<&Record> {
            lives.iter().map(|life| &records[life.record]).collect()
        };
        if !are_two_runs(shared, &of(&time), &of(&later), pause_ns) {
            later.extend(time);
            continue;
        }
        let before = format!(
            "and the files of that time were written {} s before the first operation of the others, which contradict \
             them: of an earlier run; to judge that run, pass only its files",
            pause_ns / 1_000_000_000
        );
        earlier.extend(time.iter().map(|life| (life.record, before.clone())));
    }
    let mut index = 0;
    records.retain(|record| {
        let before = earlier.remove(&index);
        index += 1;
        let is_kept = before.is_none();
        if let Some(before) = before {
            aside.add_ended(record, before);
        }
        is_kept
    });
}

/// The records by recorders that state no process, divided where nothing is recorded or written for [`APART_NS`], in
/// order of time. A record without a known time of writing may have been written at any later time.
fn times(records: &[Record]) -> Vec<Vec<Life>> {
    let mut lives: Vec<Life> = Vec::new();
    for (index, record) in records.iter().enumerate() {
        let is_judged = states_no_process(record.recorder) && !retiring_is_all(record.recorder);
        let from_ns = record.ops.iter().map(|op| op.created_ns).min();
        if let Some(from_ns) = from_ns.filter(|&from_ns| is_judged && from_ns > 0) {
            let newest_ns = record.newest_ns();
            let taken_ns = Some(record.identity.dump_time_ns).filter(|&taken_ns| taken_ns > 0);
            let written_ns = own_written_ns(record).or(taken_ns);
            lives.push(Life {
                // The clock of a record that is newer than its file is ahead.
                from_ns: from_ns.saturating_sub(
                    newest_ns
                        .saturating_sub(written_ns.unwrap_or(newest_ns))
                        .max(0),
                ),
                until_ns: written_ns.map_or(i64::MAX, |written_ns| written_ns.max(newest_ns)),
                record: index,
            });
        }
    }
    lives.sort_unstable_by_key(|life| (life.from_ns, life.record));
    let mut times: Vec<Vec<Life>> = Vec::new();
    let mut until_ns = i64::MIN;
    for life in lives {
        let is_next = life.from_ns.saturating_sub(until_ns) > APART_NS;
        until_ns = until_ns.max(life.until_ns);
        match times.last_mut() {
            Some(time) if !is_next => time.push(life),
            _ => times.push(vec![life]),
        }
    }
    times
}

/// Whether no single run can have left these records, between which lies a pause.
fn are_two_runs(shared: &Shared, earlier: &[&Record], later: &[&Record], pause_ns: i64) -> bool {
    // The ring of a process shows all that it has issued, from the first operation on.
    let whole: Vec<&Record> = later
        .iter()
        .copied()
        .filter(|record| is_whole(record))
        .collect();
    if starts_again(earlier, &whole) {
        return true;
    }
    if wait_together(earlier, later) {
        return false;
    }
    let (against, compared) = count_other_calls(shared, earlier, &whole);
    let share = against as f64 / compared.max(1) as f64;
    if against >= CONTRADICTIONS && share >= CONTRADICTING_SHARE {
        return true;
    }
    // A rank has completed with others what it issued only later. That may be due to its clock.
    let begins_late = begins_late(shared, earlier, &whole);
    begins_late.is_some_and(|falls_back| {
        falls_back
            || against > 0
            || pause_ns > MAX_CLOCK_ERROR_NS
            || list_other_members(shared, earlier, later)
    })
}

fn is_whole(record: &Record) -> bool {
    !record.wrapped() && !record.cut && !record.only_active
}

/// The index of the group of an operation among the groups that all records share.
fn group_of(record: &Record, op: &Op) -> u32 {
    record.groups[usize::from(op.group)].group
}

/// Whether a rank has an earlier record although the ring of a later one shows all that its process has issued.
fn starts_again(earlier: &[&Record], whole: &[&Record]) -> bool {
    let key = |record: &Record| (record.rank, record.recorder as u8);
    let known: HashSet<_> = earlier.iter().map(|record| key(record)).collect();
    whole.iter().any(|record| known.contains(&key(record)))
}

/// Whether one operation is pending in an earlier and in a later record.
fn wait_together(earlier: &[&Record], later: &[&Record]) -> bool {
    let waits = |records: &[&Record]| -> HashSet<(u32, u32, u32)> {
        let of = |record: &&Record| -> Vec<(u32, u32, u32)> {
            let pending = record.ops.iter().filter(|op| !op.has_ended());
            pending
                .map(|op| (group_of(record, op), op.seq, op.p2p_seq))
                .collect()
        };
        records.iter().flat_map(of).collect()
    };
    !waits(earlier).is_disjoint(&waits(later))
}

/// The number of collectives of which all earlier records show one call and all later records another, and the number
/// of those that both show.
fn count_other_calls(shared: &Shared, earlier: &[&Record], whole: &[&Record]) -> (usize, usize) {
    // The numbers of a group that was made twice begin anew, and a ring that has wrapped does not show how often it was.
    let calls_of = |records: &mut dyn Iterator<Item = &&Record>| {
        let mut calls: HashMap<(Recorder, u32, u32), BTreeSet<u32>> = HashMap::new();
        for record in records {
            for op in record.ops.iter().filter(|op| has_ended_on_all(op)) {
                let number = (record.recorder, group_of(record, op), op.seq);
                calls.entry(number).or_default().insert(op.call);
            }
        }
        calls
    };
    let before = calls_of(&mut earlier.iter().filter(|record| is_whole(record)));
    let after = calls_of(&mut whole.iter());
    let (mut against, mut compared) = (0, 0);
    for (number, calls) in &after {
        if let Some(others) = before.get(number) {
            compared += 1;
            let differ = |&call: &u32| {
                others
                    .iter()
                    .all(|&other| contradicts(&shared.calls, call, other))
            };
            against += usize::from(calls.iter().all(differ));
        }
    }
    (against, compared)
}

/// Whether an earlier record shows a collective as completed that needs all members, although the ring of a later one,
/// of a member, begins after that; and then, whether that ring does not even reach the number of the collective.
fn begins_late(shared: &Shared, earlier: &[&Record], whole: &[&Record]) -> Option<bool> {
    let mut completed: HashMap<(Recorder, u32), Option<u32>> = HashMap::new();
    for record in earlier {
        for op in record.ops.iter().filter(|op| has_ended_on_all(op)) {
            let newest = completed
                .entry((record.recorder, group_of(record, op)))
                .or_default();
            // See `count_other_calls`.
            if is_whole(record) {
                *newest = (*newest).max(Some(op.seq));
            }
        }
    }
    let mut of_rank: HashMap<(Recorder, Rank), Vec<&Record>> = HashMap::new();
    for record in whole {
        let of_rank = of_rank.entry((record.recorder, record.rank));
        of_rank.or_default().push(record);
    }
    let mut begins_late = None;
    for (&(recorder, group), &newest) in &completed {
        let members = shared.groups[group as usize].ranks.iter();
        let records = members.filter_map(|&rank| of_rank.get(&(recorder, rank)));
        for record in records.flatten() {
            let of_group = |op: &&Op| !op.is_p2p && group_of(record, op) == group;
            let issued = record.ops.iter().filter(of_group).map(|op| op.seq);
            let falls_back = newest.is_some() && issued.max() < newest;
            begins_late = begins_late.max(Some(falls_back));
        }
    }
    begins_late
}

/// Whether a group has other members in an earlier record than in a later one, and one of them is in both.
fn list_other_members(shared: &Shared, earlier: &[&Record], later: &[&Record]) -> bool {
    let groups_of = |records: &[&Record]| -> BTreeSet<(u8, u32)> {
        let of = |record: &&Record| -> Vec<(u8, u32)> {
            let groups = record.groups.iter();
            groups
                .map(|local| (record.recorder as u8, local.group))
                .collect()
        };
        records.iter().flat_map(of).collect()
    };
    let (before, after) = (groups_of(earlier), groups_of(later));
    let contradict = |&(recorder, group): &(u8, u32), &(other_recorder, other): &(u8, u32)| {
        let (group, other) = (
            &shared.groups[group as usize],
            &shared.groups[other as usize],
        );
        recorder == other_recorder
            && group.name == other.name
            && group.ranks != other.ranks
            && group.ranks.iter().any(|rank| other.ranks.contains(rank))
    };
    before
        .iter()
        .any(|group| after.iter().any(|other| contradict(group, other)))
}

/// Whether an operation is a collective that has ended, and that ends on no rank before all have issued it.
fn has_ended_on_all(op: &Op) -> bool {
    !op.is_p2p && op.completed() && op.kind.needs_all_members()
}
