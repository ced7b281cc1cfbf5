//! Leaves aside the records by PyTorch's recorders that an earlier run has left.
//!
//! These recorders state no job and no process, so the files of a later run replace those of an earlier one where both
//! wrote one, and lie beside the others. An earlier run has written its files before a later one issues anything, and
//! the rings of the later one begin with its first operation. That alone proves nothing: the clock of a host may be
//! wrong, and a rank may come late. So the records of the earlier time must also show what no rank of one run can do.

use super::of_one_rank::states_no_process;
use super::{
    CLOCKS_AGREE_NS, CONTRADICTING_SHARE, CONTRADICTIONS, LeftAside, MAX_CLOCK_ERROR_NS,
    ONE_RUN_NS, contradicts,
};
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

/// Leaves aside the records of each time that cannot be of one run with those of the times after it.
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
        let Some(sign) = two_runs(shared, &of(&time), &of(&later), pause_ns) else {
            later.extend(time);
            continue;
        };
        let why = match (sign, time.len()) {
            (Sign::Contradiction, _) => {
                ", which contradict them: of an earlier run; to judge that run, pass only its files"
            }
            (Sign::Time, 1) => ": it is of an earlier run, or the clock of its host is wrong",
            (Sign::Time, _) => {
                ": they are of an earlier run, or the clocks of their hosts are wrong"
            }
        };
        let before = format!(
            "and the files of that time were written {} s before the first operation of the others{why}",
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
    let is_judged =
        |record: &Record| states_no_process(record.recorder) && !retiring_is_all(record.recorder);
    let life_of = |(index, record): (usize, &Record)| {
        let created = record.ops.iter().map(|op| op.created_ns);
        let from_ns = created.min().filter(|&from_ns| from_ns > 0)?;
        let newest_ns = record.newest_ns();
        let taken_ns = Some(record.identity.dump_time_ns).filter(|&taken_ns| taken_ns > 0);
        let written_ns = own_written_ns(record).or(taken_ns);
        // The clock of a record that is newer than its file is ahead of that of the file's server.
        let ahead_ns = record
            .written_ns
            .map_or(0, |ns| newest_ns.saturating_sub(ns));
        Some(Life {
            from_ns: from_ns.saturating_sub(ahead_ns.max(0)),
            until_ns: written_ns.map_or(i64::MAX, |written_ns| written_ns.max(newest_ns)),
            record: index,
        })
    };
    let judged = records
        .iter()
        .enumerate()
        .filter(|(_, record)| is_judged(record));
    let mut lives: Vec<Life> = judged.filter_map(life_of).collect();
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

/// What shows that records are of two runs.
#[derive(Clone, Copy)]
enum Sign {
    /// They contradict each other.
    Contradiction,
    /// Only that they lie further apart than the clocks of hosts should.
    Time,
}

/// What shows that no single run has left these records, between which lies a pause; `None` if one may have.
fn two_runs(
    shared: &Shared,
    earlier: &[&Record],
    later: &[&Record],
    pause_ns: i64,
) -> Option<Sign> {
    let begun = later.iter().copied().filter(|record| shows_start(record));
    let begun: Vec<&Record> = begun.collect();
    if starts_again(earlier, &begun) {
        return Some(Sign::Contradiction);
    }
    let by_clock = differ_by_a_clock(earlier, &begun);
    if wait_together(earlier, later) || by_clock == Some(true) {
        return None;
    }
    let (against, compared) = count_other_calls(shared, earlier, &begun);
    let share = against as f64 / compared.max(1) as f64;
    if against >= CONTRADICTIONS && share >= CONTRADICTING_SHARE {
        return Some(Sign::Contradiction);
    }
    // A rank has completed with others what it issued only later. Over a short pause, its clock may be wrong.
    let is_sure = by_clock.is_some() || pause_ns > CLOCKS_AGREE_NS;
    let falls_back = begins_late(shared, earlier, &begun)?;
    if is_sure && (falls_back || against > 0) || list_other_members(shared, earlier, later) {
        return Some(Sign::Contradiction);
    }
    // If few records are later than all others, their clocks may be ahead.
    match by_clock {
        _ if pause_ns <= MAX_CLOCK_ERROR_NS => None,
        Some(_) => Some(Sign::Contradiction),
        None => (earlier.len() < later.len()).then_some(Sign::Time),
    }
}

fn is_whole(record: &Record) -> bool {
    !record.wrapped() && !record.cut && !record.only_active
}

/// Whether a record shows all that its process has issued, from the first operation of each group on. A program may
/// empty the ring while it runs: its numbers then begin anew, those of the groups do not.
fn shows_start(record: &Record) -> bool {
    let mut first: HashMap<(u16, bool), u32> = HashMap::new();
    for op in &record.ops {
        let number = if op.is_p2p { op.p2p_seq } else { op.seq };
        let first = first.entry((op.group, op.is_p2p)).or_insert(number);
        *first = number.min(*first);
    }
    is_whole(record) && first.values().all(|&number| number <= 1)
}

/// The index of the group of an operation among the groups that all records share.
fn group_of(record: &Record, op: &Op) -> u32 {
    record.groups[usize::from(op.group)].group
}

/// Whether a rank has an earlier record with operations in a group that begins anew in a later one, whose ring shows all
/// that its process has issued in it. The ring of another group may begin after the program emptied it.
fn starts_again(earlier: &[&Record], begun: &[&Record]) -> bool {
    let groups_of = |record: &Record| -> BTreeSet<(u32, bool)> {
        let ops = record.ops.iter();
        ops.map(|op| (group_of(record, op), op.is_p2p)).collect()
    };
    let mut known: HashMap<(Rank, Recorder), BTreeSet<(u32, bool)>> = HashMap::new();
    for record in earlier {
        let known = known.entry((record.rank, record.recorder)).or_default();
        known.extend(groups_of(record));
    }
    begun.iter().any(|record| {
        let known = known.get(&(record.rank, record.recorder));
        known.is_some_and(|known| !known.is_disjoint(&groups_of(record)))
    })
}

/// Whether a wrong clock may be all that lies between two of the records: common collectives ended in them at times that
/// differ by always the same. `None` if no two records have enough in common.
fn differ_by_a_clock(earlier: &[&Record], begun: &[&Record]) -> Option<bool> {
    let mut after: HashMap<(Recorder, u32, u32), (usize, i64)> = HashMap::new();
    for (index, record) in begun.iter().enumerate() {
        for (number, ended_ns) in ends_on_all(record) {
            after.entry(number).or_insert((index, ended_ns));
        }
    }
    let mut by_clock = None;
    for record in earlier {
        // By later record: the number of common collectives, and the least and the greatest time between their ends.
        let mut apart: HashMap<usize, (usize, i64, i64)> = HashMap::new();
        for (number, ended_ns) in ends_on_all(record) {
            if let Some(&(other, later_ns)) = after.get(&number) {
                let ns = later_ns.saturating_sub(ended_ns);
                let (common, least, greatest) = apart.entry(other).or_insert((0, ns, ns));
                (*common, *least, *greatest) = (*common + 1, ns.min(*least), ns.max(*greatest));
            }
        }
        let enough = apart
            .into_values()
            .filter(|&(common, ..)| common >= CONTRADICTIONS);
        let is_one = enough.map(|(_, least, greatest)| greatest.saturating_sub(least) < ONE_RUN_NS);
        by_clock = by_clock.max(is_one.max());
    }
    by_clock
}

/// The collectives of a record that have ended on all members, and when, ns by its clock.
fn ends_on_all(record: &Record) -> impl Iterator<Item = ((Recorder, u32, u32), i64)> {
    let ended = record.ops.iter().filter(|op| has_ended_on_all(op));
    ended.filter_map(move |op| {
        let number = (record.recorder, group_of(record, op), op.seq);
        Some((number, op.completed_ns()?))
    })
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
fn count_other_calls(shared: &Shared, earlier: &[&Record], begun: &[&Record]) -> (usize, usize) {
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
    let after = calls_of(&mut begun.iter());
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
fn begins_late(shared: &Shared, earlier: &[&Record], begun: &[&Record]) -> Option<bool> {
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
    for record in begun {
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
            // A ring that was emptied need not show any operation of a group.
            let Some(issued) = issued.max() else {
                continue;
            };
            let falls_back = newest.is_some_and(|newest| issued < newest);
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
