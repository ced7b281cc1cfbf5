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
use crate::align::record::{Op, Record, position};
use crate::align::retiring_is_all;
use crate::align::shared::Shared;
use crate::judge::policy::own_written_ns;
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::Recorder;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

/// A run has ended at least this long before the next one issues an operation, ns: longer than the clocks of hosts
/// usually differ.
const APART_NS: i64 = 15_000_000_000;

/// A clock that was set to the time of another zone is ahead by less than this, ns.
const MOST_AHEAD_NS: i64 = 86_400_000_000_000;

/// The time that a record spans: from its first operation until it was written, ns.
struct Span {
    from_ns: i64,
    until_ns: i64,
    record: usize,
}

/// The maximum number of times that are compared with later ones; older files count as one. This bounds the cost.
const MOST_TIMES: usize = 8;

/// Leaves aside the records of each time that cannot be of one run with those of the times after it.
pub(super) fn leave_earlier_times_aside(
    shared: &Shared,
    records: &mut Vec<Record>,
    aside: &mut LeftAside,
) {
    let mut times = times(shared, records);
    if times.len() < 2 {
        return;
    }
    if times.len() > MOST_TIMES {
        let oldest = times.drain(..=times.len() - MOST_TIMES);
        let oldest: Vec<Span> = oldest.flatten().collect();
        times.insert(0, oldest);
    }
    let shows_start = shared.map(records.len(), |record| shows_start(&records[record]));
    let mut later = Later::default();
    let mut earlier: BTreeMap<usize, String> = BTreeMap::new();
    for (nth, time) in times.iter().rev().enumerate() {
        let of_time: Vec<&Record> = time.iter().map(|span| &records[span.record]).collect();
        let until_ns = time.iter().map(|span| span.until_ns).max();
        let pause_ns = later.from_ns.saturating_sub(until_ns.unwrap_or(0));
        let sign = (nth > 0).then(|| two_runs(shared, &of_time, &later, pause_ns));
        let Some(sign) = sign.flatten() else {
            for span in time {
                let shows_start = shows_start[span.record];
                later.add(shared, span, &records[span.record], shows_start);
            }
            continue;
        };
        let why = match (sign, time.len()) {
            (Sign::Contradiction, _) => {
                ", which contradict them: of an earlier run; to judge that run, pass only its files"
            }
            (Sign::Time, 1) => ": it is of an earlier run, or the clock of its host is wrong",
            (Sign::Time, _) => ": they are of an earlier run, or clocks of hosts are wrong",
        };
        let before = format!(
            "and the files of that time were written {} s before the first operation of the others{why}",
            pause_ns / 1_000_000_000
        );
        earlier.extend(time.iter().map(|span| (span.record, before.clone())));
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
fn times(shared: &Shared, records: &[Record]) -> Vec<Vec<Span>> {
    let span_of = |index: usize| {
        let record = &records[index];
        if !states_no_process(record.recorder) || retiring_is_all(record.recorder) {
            return None;
        }
        let created = record.ops.iter().map(|op| op.created_ns);
        let from_ns = created.min().filter(|&from_ns| from_ns > 0)?;
        let newest_ns = record.newest_ns();
        let taken_ns = Some(record.identity.dump_time_ns).filter(|&taken_ns| taken_ns > 0);
        let written_ns = own_written_ns(record).or(taken_ns);
        // The clock of a record that is newer than its file is ahead of that of the file's server.
        let ahead_ns = record
            .written_ns
            .map_or(0, |ns| newest_ns.saturating_sub(ns));
        Some(Span {
            from_ns: from_ns.saturating_sub(ahead_ns.max(0)),
            until_ns: written_ns.map_or(i64::MAX, |written_ns| written_ns.max(newest_ns)),
            record: index,
        })
    };
    let spans = shared.map(records.len(), span_of).into_iter();
    let mut spans: Vec<Span> = spans.flatten().collect();
    spans.sort_unstable_by_key(|span| (span.from_ns, span.record));
    let mut times: Vec<Vec<Span>> = Vec::new();
    let mut until_ns = i64::MIN;
    for span in spans {
        let is_next = span.from_ns.saturating_sub(until_ns) > APART_NS;
        until_ns = until_ns.max(span.until_ns);
        match times.last_mut() {
            Some(time) if !is_next => time.push(span),
            _ => times.push(vec![span]),
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

/// What the records of the later times show.
struct Later<'a> {
    records: usize,
    /// When the first of them begins, ns.
    from_ns: i64,
    /// The groups of each name, whatever their members.
    groups: HashMap<(Recorder, &'a str), BTreeSet<u32>>,
    /// The operations that are pending: the group, and the numbers among its collectives and its messages.
    pending: HashSet<(u32, u32, u32)>,
    // Of the records that show all that their processes have issued:
    /// The groups in which a rank has collectives or messages.
    used: HashMap<(Recorder, Rank), BTreeSet<(u32, bool)>>,
    /// The newest collective in the record of the member that has come least far.
    reached: HashMap<(Recorder, u32), u32>,
    /// The groups that the records of a rank list.
    listed: HashMap<(Recorder, Rank), BTreeSet<u32>>,
    /// The calls of each collective that has ended on all members.
    calls: HashMap<(Recorder, u32, u32), BTreeSet<u32>>,
    /// A record that shows the end of such a collective, and when that was, ns by its clock.
    ended: HashMap<(Recorder, u32, u32), (usize, i64)>,
}

impl Default for Later<'_> {
    fn default() -> Self {
        Self {
            records: 0,
            from_ns: i64::MAX,
            groups: HashMap::new(),
            pending: HashSet::new(),
            used: HashMap::new(),
            reached: HashMap::new(),
            listed: HashMap::new(),
            calls: HashMap::new(),
            ended: HashMap::new(),
        }
    }
}

impl<'a> Later<'a> {
    fn add(&mut self, shared: &'a Shared, span: &Span, record: &Record, shows_start: bool) {
        self.records += 1;
        self.from_ns = self.from_ns.min(span.from_ns);
        for local in &record.groups {
            let name = shared.groups[local.group as usize].name.as_str();
            let groups = self.groups.entry((record.recorder, name)).or_default();
            groups.insert(local.group);
        }
        self.pending.extend(pending(record));
        if !shows_start {
            return;
        }
        let listed = self.listed.entry((record.recorder, record.rank));
        let groups = record.groups.iter().map(|local| local.group);
        listed.or_default().extend(groups);
        let used = self.used.entry((record.recorder, record.rank));
        used.or_default().extend(used_groups(record));
        let mut newest: BTreeMap<u32, u32> = BTreeMap::new();
        for op in record.ops.iter().filter(|op| !op.is_p2p) {
            let newest = newest.entry(group_of(record, op)).or_default();
            *newest = op.seq.max(*newest);
        }
        for (group, newest) in newest {
            if position(&shared.groups[group as usize].ranks, record.rank).is_some() {
                let reached = self.reached.entry((record.recorder, group));
                let reached = reached.or_insert(newest);
                *reached = newest.min(*reached);
            }
        }
        add_calls(&mut self.calls, record);
        for (number, ended_ns) in ends_on_all(record) {
            let ended = self.ended.entry(number);
            ended.or_insert((span.record, ended_ns));
        }
    }
}

/// What shows that no single run has left these records, between which lies a pause; `None` if one may have.
fn two_runs(
    shared: &Shared,
    earlier: &[&Record],
    later: &Later<'_>,
    pause_ns: i64,
) -> Option<Sign> {
    if starts_again(earlier, later) {
        return Some(Sign::Contradiction);
    }
    let by_clock = differ_by_a_clock(earlier, later);
    if wait_together(earlier, later) || by_clock == Some(true) {
        return None;
    }
    let (against, compared) = count_other_calls(shared, earlier, later);
    let share = against as f64 / compared.max(1) as f64;
    if against >= CONTRADICTIONS && share >= CONTRADICTING_SHARE {
        return Some(Sign::Contradiction);
    }
    // A rank has completed with others what it issued only later. Over a short pause, its clock may be wrong.
    let is_clock_right = by_clock.is_some() || pause_ns > CLOCKS_AGREE_NS;
    let falls_back = begins_late(shared, earlier, later)?;
    if is_clock_right && (falls_back || against > 0) || list_other_members(shared, earlier, later) {
        return Some(Sign::Contradiction);
    }
    // If few records are later than all others, but not by a day, their clocks may be ahead.
    match by_clock {
        _ if pause_ns <= MAX_CLOCK_ERROR_NS => None,
        Some(_) => Some(Sign::Contradiction),
        None => {
            let is_shown = earlier.len() < later.records || pause_ns > MOST_AHEAD_NS;
            is_shown.then_some(Sign::Time)
        }
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

/// The groups in which a record has collectives or messages.
fn used_groups(record: &Record) -> BTreeSet<(u32, bool)> {
    let ops = record.ops.iter();
    ops.map(|op| (group_of(record, op), op.is_p2p)).collect()
}

/// Whether a rank has an earlier record with operations in a group that begins anew in a later one, whose ring shows
/// all that its process has issued in it. The ring of another group may begin after the program emptied it.
fn starts_again(earlier: &[&Record], later: &Later<'_>) -> bool {
    earlier.iter().any(|record| {
        let used = later.used.get(&(record.recorder, record.rank));
        used.is_some_and(|used| !used.is_disjoint(&used_groups(record)))
    })
}

/// Whether a wrong clock may be all that lies between two of the records: common collectives ended in them at times
/// that differ by always the same. `None` if no two records have enough in common.
fn differ_by_a_clock(earlier: &[&Record], later: &Later<'_>) -> Option<bool> {
    let mut by_clock = None;
    for record in earlier {
        // By later record: the number of common collectives, and the least and the greatest time between their ends.
        let mut apart: HashMap<usize, (usize, i64, i64)> = HashMap::new();
        for (number, ended_ns) in ends_on_all(record) {
            if let Some(&(other, later_ns)) = later.ended.get(&number) {
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

/// The operations of a record that are pending.
fn pending(record: &Record) -> impl Iterator<Item = (u32, u32, u32)> {
    let pending = record.ops.iter().filter(|op| !op.has_ended());
    pending.map(|op| (group_of(record, op), op.seq, op.p2p_seq))
}

/// Whether one operation is pending in an earlier and in a later record.
fn wait_together(earlier: &[&Record], later: &Later<'_>) -> bool {
    let mut waits = earlier.iter().flat_map(|record| pending(record));
    waits.any(|operation| later.pending.contains(&operation))
}

/// Adds the calls of the collectives of a record that have ended on all members.
fn add_calls(calls: &mut HashMap<(Recorder, u32, u32), BTreeSet<u32>>, record: &Record) {
    for op in record.ops.iter().filter(|op| has_ended_on_all(op)) {
        let number = (record.recorder, group_of(record, op), op.seq);
        calls.entry(number).or_default().insert(op.call);
    }
}

/// The number of collectives of which all earlier records show one call and all later records another, and the number
/// of those that both show.
fn count_other_calls(shared: &Shared, earlier: &[&Record], later: &Later<'_>) -> (usize, usize) {
    // The numbers of a group that was made twice begin anew, and a ring that has wrapped does not show how often it
    // was.
    let mut before = HashMap::new();
    for record in earlier.iter().filter(|record| is_whole(record)) {
        add_calls(&mut before, record);
    }
    let (mut against, mut compared) = (0, 0);
    for (number, others) in &before {
        if let Some(calls) = later.calls.get(number) {
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

/// Whether a process began only after a collective that cannot have ended without it: an earlier record shows the
/// collective as completed, although the later record of a member shows that its process issued its first collective of
/// the group only afterwards, or never made the group. `None` if no group shows that; else whether the member has not
/// even reached the number of the collective, or never made the group, as far as earlier records that are whole show
/// it. A ring without collectives of a group that it lists does not count: the program may have emptied it.
fn begins_late(shared: &Shared, earlier: &[&Record], later: &Later<'_>) -> Option<bool> {
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
    let falls_back = completed.iter().filter_map(|(&(recorder, group), newest)| {
        let lists_no_such = |&rank: &Rank| {
            let listed = later.listed.get(&(recorder, rank));
            listed.is_some_and(|listed| !listed.contains(&group))
        };
        if shared.groups[group as usize]
            .ranks
            .iter()
            .any(lists_no_such)
        {
            return Some(newest.is_some());
        }
        let reached = later.reached.get(&(recorder, group))?;
        Some(newest.is_some_and(|newest| *reached < newest))
    });
    falls_back.max()
}

/// Whether a group has other members in an earlier record than in a later one, and one of them is in both.
fn list_other_members(shared: &Shared, earlier: &[&Record], later: &Later<'_>) -> bool {
    let groups_of = |record: &&Record| -> Vec<(Recorder, u32)> {
        let groups = record.groups.iter();
        groups.map(|local| (record.recorder, local.group)).collect()
    };
    let before: HashSet<(Recorder, u32)> = earlier.iter().flat_map(groups_of).collect();
    before.iter().any(|&(recorder, group)| {
        let group = &shared.groups[group as usize];
        let of_name = later.groups.get(&(recorder, group.name.as_str()));
        of_name.into_iter().flatten().any(|&other| {
            let other = &shared.groups[other as usize].ranks;
            let in_both = |&rank: &Rank| position(other, rank).is_some();
            group.ranks != *other && group.ranks.iter().any(in_both)
        })
    })
}

/// Whether an operation is a collective that has ended, and that ends on no rank before all have issued it.
fn has_ended_on_all(op: &Op) -> bool {
    !op.is_p2p && op.completed() && op.kind.needs_all_members()
}
