//! Selects the records of one job and leaves aside those of other jobs and runs.
//!
//! Folders of dumps collect leftovers: files of an older run, of another attempt, of a job of another size. Clocks
//! alone do not decide (hosts disagree, jobs restart within seconds), so content decides first: job, attempt, shape of
//! the world, and then contradictions that no single run can produce, such as two ranks that completed different
//! operations under one number.

mod apart;
mod aside;
mod earlier_runs;
mod joined;
mod of_one_rank;

pub(crate) use aside::LeftAside;
pub(crate) use earlier_runs::leave_earlier_runs_aside;

use crate::align::record::Record;
use crate::align::shared::Shared;
use crate::align::signature::{CallDifference, Calls};
use crate::align::{
    Aligned, Alignment, GlooWorld, Number, Numbers, RecordIx, UnknownReason, clocks,
    names_newest_only, retiring_is_all,
};
use crate::judge::policy::{Policy, own_written_ns};
use of_one_rank::keep_newest_of_each_recorder;
use rcomm_recorder::model::Rank;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// The clocks of one job differ by less than this, ns; a record that differs by more and has no pending collective in
/// common with a peer is from another time.
const CLOCKS_AGREE_NS: i64 = 60_000_000_000;
/// Records of two jobs or worlds that were left within this time, ns, were left equally late, or copied then.
const AS_LATE_NS: i64 = 10_000_000_000;
/// The ranks of a running job that are asked for dumps write them within this time, ns.
const LEFT_TOGETHER_NS: i64 = 5_000_000_000;
/// The clock offsets or newest times of two runs of a job differ by more than this, ns.
const ONE_RUN_NS: i64 = 1_000_000_000;
/// No host's clock is wrong by more than this, ns; a record that differs by more was left earlier.
const MAX_CLOCK_ERROR_NS: i64 = 600_000_000_000;
/// A record is of another run if at least this many of its operations, and at least [`CONTRADICTING_SHARE`] of those
/// compared, contradict the majority's.
const CONTRADICTIONS: usize = 3;
/// The smallest share of contradicting operations, 0..1; see [`CONTRADICTIONS`].
const CONTRADICTING_SHARE: f64 = 0.25;

/// Keeps the records of one job, ordered by rank: one for each rank, or one for each recorder that its process ran side
/// by side, uncut ones first and then the newest. The others are left aside (N300). If the kept records were aligned
/// and do not contradict each other, their alignment and the offsets of their clocks are returned, too.
pub(crate) fn select(
    shared: &Shared,
    mut records: Vec<Record>,
    policy: &Policy,
    aside: &mut LeftAside,
) -> (Vec<Record>, Option<AlignmentAndClocks>) {
    records.sort_by(|a, b| (a.rank, &a.path).cmp(&(b.rank, &b.path)));
    keep_one_job(&mut records, aside);
    if !policy.snapshot {
        apart::leave_earlier_times_aside(shared, &mut records, aside);
    }
    keep_one_world(shared, &mut records, aside);
    keep_newest_of_each_recorder(shared, &mut records, aside);
    let mut aligned = None;
    if !policy.snapshot {
        // Leaving one record aside may reveal the next: two files of one older run support each other.
        for _ in 0..3 {
            aligned = leave_contradicting(shared, &mut records, aside);
            if aligned.is_some() {
                break;
            }
        }
    }
    (records, aligned)
}

/// The alignment of records that do not contradict each other, and the offsets of their clocks.
pub(crate) type AlignmentAndClocks = (Alignment, Vec<Option<clocks::Offset>>);

/// Keeps the records of the newest attempt of one job. A job with living processes comes before all others, unless it
/// is left over: one process of it lives on beside a later job. Then comes a job whose last record was left about as
/// late as any other, if more than half of its ranks left one; then the one with the most records; then the one with
/// the newest record. Only rcomm's records state jobs and attempts; a record that states no job is kept.
fn keep_one_job(records: &mut Vec<Record>, aside: &mut LeftAside) {
    #[derive(Default)]
    struct Job {
        records: usize,
        members: BTreeSet<Rank>,
        ranks: u32,
        left_ns: i64,
        newest_ns: i64,
        begun_ns: i64,
        lives: bool,
    }
    let mut jobs: BTreeMap<String, Job> = BTreeMap::new();
    for record in records
        .iter()
        .filter(|record| !record.identity.job.is_empty())
    {
        let job = jobs.entry(record.identity.job.clone()).or_default();
        job.records += 1;
        job.members.insert(record.rank);
        job.ranks = job.ranks.max(record.identity.world_size.unwrap_or(0));
        let left_ns = own_written_ns(record).unwrap_or(record.latest_ns());
        job.left_ns = job.left_ns.max(left_ns);
        job.newest_ns = job.newest_ns.max(record.latest_ns());
        job.begun_ns = job.begun_ns.max(record.identity.begun_ns);
        job.lives |= record.lives();
    }
    let last_ns = jobs.values().map(|job| job.left_ns).max().unwrap_or(0);
    // A rank that has died leaves no dump, so the job that hangs may have fewer.
    let is_whole = |job: &Job| job.ranks > 0 && job.members.len() * 2 > job.ranks as usize;
    // A process may be left over of a job after which another began. A smaller one may have run beside it: it does not
    // show that the other hosts of the larger one are free.
    let is_left_over = |job: &Job| {
        let is_later = |other: &Job| {
            is_whole(other) && other.begun_ns > job.begun_ns && other.ranks >= job.ranks
        };
        let is_one = job.members.len() == 1 && !is_whole(job) && job.begun_ns > 0;
        is_one && jobs.values().any(is_later)
    };
    let precedence = |job: &Job| {
        let is_left_last = last_ns.saturating_sub(job.left_ns) < AS_LATE_NS;
        (
            job.lives && !is_left_over(job),
            is_left_last && is_whole(job),
            job.records,
            job.newest_ns,
        )
    };
    if jobs.len() > 1
        && let Some((job, _)) = jobs.iter().max_by_key(|&(_, job)| precedence(job))
    {
        records.retain(|record| {
            let keep = record.identity.job.is_empty() || record.identity.job == *job;
            if !keep {
                let other = &record.identity.job;
                aside.add_state(
                    record,
                    format!("of job {other}, the records judged are of job {job}"),
                );
            }
            keep
        });
    }
    let newest = records
        .iter()
        .map(|record| record.identity.attempt)
        .max()
        .unwrap_or(0);
    records.retain(|record| {
        let keep = record.identity.job.is_empty() || record.identity.attempt == newest;
        if !keep {
            let other = record.identity.attempt;
            aside.add_state(
                record,
                format!("of attempt {other}, the newest is {newest}"),
            );
        }
        keep
    });
}

/// The members of the world according to a record; `None` if it does not state them.
fn world_of<'a>(shared: &'a Shared, record: &Record) -> Option<&'a [Rank]> {
    if names_newest_only(shared, record) {
        return None;
    }
    let groups = record
        .groups
        .iter()
        .map(|local| &shared.groups[local.group as usize]);
    groups
        .filter(|group| !group.ranks.is_empty())
        .find(|group| group.desc == "default_pg" || group.name.is_empty())
        .map(|group| &*group.ranks)
}

/// Keeps the records of one world. A world with living processes comes before all others; then one whose last record is
/// about as new as that of any world, if more than half of its ranks have a record; then the most complete; then the
/// newest. A record that states no world stays, and so does one of a world that shares no rank with the kept one:
/// worlds of other ranks may be parts of one job. So do the records of a world whose members gloo's own recorder does
/// not know ([`GlooWorld`]).
fn keep_one_world(shared: &Shared, records: &mut Vec<Record>, aside: &mut LeftAside) {
    let of_gloo = GlooWorld::of(shared, records);
    let world_of = |record: &Record| {
        let is_unknown = of_gloo.is_some() && retiring_is_all(record.recorder);
        world_of(shared, record).filter(|_| !is_unknown)
    };
    struct World {
        present: BTreeSet<Rank>,
        newest_ns: i64,
        /// When its last record was left, as far as that is known.
        left_ns: i64,
        lives: bool,
    }
    // In nearly all jobs the records share one list. To compare its members for each record would take long.
    let mut stated = records.iter().filter_map(world_of);
    let first = stated.next();
    if stated.all(|ranks| first.is_some_and(|first| std::ptr::eq(first, ranks))) {
        return;
    }
    let mut worlds: BTreeMap<&[Rank], World> = BTreeMap::new();
    for record in records.iter() {
        if let Some(ranks) = world_of(record) {
            let world = worlds.entry(ranks).or_insert(World {
                present: BTreeSet::new(),
                newest_ns: 0,
                left_ns: 0,
                lives: false,
            });
            world.present.insert(record.rank);
            world.newest_ns = world.newest_ns.max(record.newest_ns());
            let left_ns = own_written_ns(record).unwrap_or(record.latest_ns());
            world.left_ns = world.left_ns.max(left_ns);
            world.lives |= record.lives();
        }
    }
    if worlds.len() < 2 {
        return;
    }
    // Rings of dead processes next to those of living ones were left by an earlier run.
    let last_ns = worlds.values().map(|world| world.left_ns).max();
    let best = worlds.iter().max_by_key(|(ranks, world)| {
        // A world whose ranks hang has the older operations, and leaves its files later. Copies are written together.
        let is_left_last =
            last_ns.is_some_and(|last| last.saturating_sub(world.left_ns) < AS_LATE_NS);
        (
            world.lives,
            // A rank that has died leaves no record.
            is_left_last && world.present.len() * 2 > ranks.len(),
            world.present.len() * 1_000_000 / ranks.len(),
            world.newest_ns,
            Reverse(ranks.len()),
        )
    });
    let Some((&chosen, _)) = best else { return };
    records.retain(|record| {
        let is_apart = |ranks: &[Rank]| !ranks.iter().any(|rank| chosen.contains(rank));
        let keep = world_of(record).is_none_or(|ranks| ranks == chosen || is_apart(ranks));
        if !keep {
            let size = world_of(record).map_or(0, <[Rank]>::len);
            let number = chosen.len();
            aside.add_state(
                record,
                format!("of a world of {size} ranks, that of the job has {number}"),
            );
        }
        keep
    });
}

/// How a record compares with those of the other ranks.
#[derive(Clone, Default)]
struct Comparison {
    /// The number of completed operations that were compared.
    compared: usize,
    /// The number of operations that contradict what at least half of the members completed under the same number.
    against: usize,
    /// The number of groups in which the record completed a collective that needs all members and that at least half of
    /// them never issued.
    beyond: usize,
    /// The number of groups that list the record's rank, while the record uses another group of that name.
    misplaced: usize,
    /// Whether the record has a pending collective that is also pending on a peer.
    in_step: bool,
}

/// Leaves aside the records that are of another time or contradict the others. Returns the alignment of the records and
/// the offsets of their clocks if there were none; `None` if some were left aside.
fn leave_contradicting(
    shared: &Shared,
    records: &mut Vec<Record>,
    aside: &mut LeftAside,
) -> Option<AlignmentAndClocks> {
    let aligned = Aligned::as_recorded(shared, records, None);
    let comparisons = compare(&aligned);
    let clocks = clocks::offsets(&aligned);
    let outdated = Some(UnknownReason::Outdated);
    let ends_early: Vec<bool> = (0..records.len())
        .map(|index| aligned.lacks_newest(index) == outdated)
        .collect();
    let alignment = aligned.into_alignment();
    let foreign = foreign(records, &comparisons, &clocks, &ends_early);
    if foreign.is_empty() {
        return Some((alignment, clocks));
    }
    let mut why: HashMap<RecordIx, String> = foreign.into_iter().collect();
    let mut index = 0;
    records.retain(|record| {
        let foreign = why.remove(&index);
        index += 1;
        if let Some(why) = &foreign {
            aside.add_clause(record, why.clone());
        }
        foreign.is_none()
    });
    None
}

/// The records that are of another time or contradict the others, each with the reason: never the newest record if they
/// are more than half of all, and none if they are the newer half. `ends_early`: whether each was taken too early.
fn foreign(
    records: &[Record],
    comparisons: &[Comparison],
    clocks: &[Option<clocks::Offset>],
    ends_early: &[bool],
) -> Vec<(RecordIx, String)> {
    let mut newest: Vec<i64> = records.iter().map(Record::newest_ns).collect();
    newest.sort_unstable();
    let typical_newest = newest.get(newest.len() / 2).copied().unwrap_or(0);
    let near = |&&time: &&i64| typical_newest.abs_diff(time) < MAX_CLOCK_ERROR_NS.unsigned_abs();
    let most_agree = newest.iter().filter(near).count() * 2 > newest.len();
    // In common time, if collectives relate the record's clock to the others'.
    let in_common =
        |index: RecordIx| Some(records[index].newest_ns().saturating_sub(clocks[index]?.ns));
    let mut in_common_time: Vec<i64> = (0..records.len()).filter_map(in_common).collect();
    in_common_time.sort_unstable();
    let typical_common = in_common_time.get(in_common_time.len() / 2).copied();
    // The job may have run on while its ranks left their records one after the other, on hosts whose clocks differ.
    let is_merely_last = |index: RecordIx| {
        let ahead = in_common(index).zip(typical_common);
        ahead
            .is_some_and(|(mine, typical)| mine.abs_diff(typical) < LEFT_TOGETHER_NS.unsigned_abs())
    };
    let mut known: Vec<i64> = clocks.iter().flatten().map(|clock| clock.ns).collect();
    known.sort_unstable();
    let typical_offset = known.get(known.len() / 2).copied().unwrap_or(0);
    let mut foreign: Vec<(RecordIx, String)> = Vec::new();
    // Records of another time are left aside first: they may be the ones that contradict a record that is kept.
    let mut another_time: Vec<(RecordIx, String)> = Vec::new();
    for (index, comparison) in comparisons.iter().enumerate() {
        let older = records[index].newest_ns() < typical_newest;
        let share = comparison.against as f64 / comparison.compared.max(1) as f64;
        let apart = clocks[index].map_or(0, |clock| clock.ns.saturating_sub(typical_offset));
        // No common collective connects the clocks: then only a large difference counts.
        let apart = if clocks[index].is_none() && most_agree && records[index].newest_ns() > 0 {
            let behind = records[index].newest_ns().saturating_sub(typical_newest);
            if behind < -MAX_CLOCK_ERROR_NS {
                behind
            } else {
                apart
            }
        } else {
            apart
        };
        // Two records of an older run may wait in the same operation, which the others have completed.
        let in_step = comparison.in_step && !ends_early[index];
        if apart < -CLOCKS_AGREE_NS && !in_step && older {
            let seconds = -apart / 1_000_000_000;
            another_time.push((
                index,
                format!(
                    "it is {seconds} s older than its peers' records: it is of an older run, or the clock of its host is \
                     wrong"
                ),
            ));
            continue;
        }
        let why = if comparison.against >= CONTRADICTIONS && share >= CONTRADICTING_SHARE {
            format!(
                "{} of its {} completed operations are not those that its peers completed under the same \
                 numbers; it belongs to another run",
                comparison.against, comparison.compared
            )
        } else if older && comparison.beyond > 0 && !is_merely_last(index) {
            "it has completed operations that its peers, whose records are newer, have not issued yet; it is \
             of an older run"
                .to_owned()
        } else if older
            && comparison.misplaced > 0
            && !is_of_this_run(records, comparisons, clocks, index)
        {
            "it names other groups than its peers do, and is older; it belongs to an older run"
                .to_owned()
        } else {
            continue;
        };
        foreign.push((index, why));
    }
    if !another_time.is_empty() && another_time.len() * 2 < records.len() {
        foreign = another_time;
    } else {
        foreign.extend(another_time);
    }
    if foreign.len() * 2 > records.len() || foreign.len() == records.len() {
        // If more than half are to be left aside, the newest record belongs to the job and is kept.
        let Some(newest) =
            (0..records.len()).max_by_key(|&index| (records[index].newest_ns(), Reverse(index)))
        else {
            return Vec::new();
        };
        foreign.retain(|&(index, _)| index != newest);
    } else if foreign.len() * 2 == records.len() {
        // Half of the records contradict the other half: the older half is left aside. If the suspects are the newer
        // half, none is.
        let newest_of = |is_in: &dyn Fn(RecordIx) -> bool| {
            (0..records.len())
                .filter(|&index| is_in(index))
                .map(|index| records[index].newest_ns())
                .max()
        };
        let suspects: BTreeSet<RecordIx> = foreign.iter().map(|&(index, _)| index).collect();
        if newest_of(&|index| suspects.contains(&index))
            > newest_of(&|index| !suspects.contains(&index))
        {
            return Vec::new();
        }
    }
    foreign
}

/// Whether a record that lists other groups than its peers is nevertheless of the same run: it completed what its peers
/// completed, at the same time as a record whose groups agree. Such a rank made other groups (E105). If too few
/// collectives completed to relate the clocks, the newest times are compared as they are: ranks of one host share a
/// clock.
fn is_of_this_run(
    records: &[Record],
    comparisons: &[Comparison],
    clocks: &[Option<clocks::Offset>],
    index: RecordIx,
) -> bool {
    let comparison = &comparisons[index];
    let apart_ns = |other: RecordIx| match (clocks[index], clocks[other]) {
        (Some(clock), Some(other)) => clock.ns.abs_diff(other.ns),
        _ => records[index]
            .newest_ns()
            .abs_diff(records[other].newest_ns()),
    };
    comparison.against == 0
        && comparison.beyond == 0
        && (0..records.len()).any(|other| {
            comparisons[other].misplaced == 0 && apart_ns(other) < ONE_RUN_NS.unsigned_abs()
        })
}

/// Compares each record with those of the other ranks.
fn compare(aligned: &Aligned<'_>) -> Vec<Comparison> {
    let mut comparisons = vec![Comparison::default(); aligned.records.len()];
    let mut row: Vec<(RecordIx, u32)> = Vec::new();
    let numbers = aligned.shared.map(aligned.groups.len(), |group| {
        // Numbers that span more than the number of entries contain a damaged one.
        let numbers = Numbers::of(aligned, group)?;
        let compared = numbers.count_done(aligned, group, |number| number.done > 1);
        let is_odd =
            |number: &&Number| number.pending > 1 || number.done > 1 && !number.is_done_alike;
        let odd: Vec<Number> = numbers.all.iter().filter(is_odd).copied().collect();
        Some((odd, compared))
    });
    for (group, numbers) in numbers.into_iter().enumerate() {
        let Some((odd, compared)) = numbers else {
            continue;
        };
        for number in &odd {
            if number.pending > 1 {
                mark_in_step(aligned, group, number.seq, &mut comparisons);
            }
            if number.done > 1 && !number.is_done_alike {
                row.clear();
                for &(record, lane) in aligned.groups[group].lanes.iter().flatten() {
                    let lane = &aligned.lanes[record][lane];
                    if let Ok(index) = aligned.find(record, lane, number.seq)
                        && index < lane.pending_from
                    {
                        row.push((record, aligned.op(record, lane.collectives[index]).call));
                    }
                }
                count_against(aligned, &row, &mut comparisons);
            }
        }
        for (record, compared) in compared {
            comparisons[record].compared += compared;
        }
        count_beyond(aligned, group, &mut comparisons);
    }
    count_misplaced(aligned, &mut comparisons);
    comparisons
}

/// Marks the records in which this collective is pending.
fn mark_in_step(aligned: &Aligned<'_>, group: usize, seq: u32, comparisons: &mut [Comparison]) {
    for member in 0..aligned.groups[group].ranks.len() {
        if let Some((record, lane)) = aligned.lane(group, member)
            && let Ok(index) = aligned.find(record, lane, seq)
            && index >= lane.pending_from
        {
            comparisons[record].in_step = true;
        }
    }
}

/// Counts one operation against each record whose call differs from what at least half of the row issued. `row`: the
/// records that completed one collective, each with its call.
fn count_against(aligned: &Aligned<'_>, row: &[(RecordIx, u32)], comparisons: &mut [Comparison]) {
    let calls = &aligned.shared.calls;
    let mut issued: BTreeMap<u32, usize> = BTreeMap::new();
    for &(_, call) in row {
        *issued.entry(call).or_default() += 1;
    }
    let against = |call: u32| -> usize {
        let others = issued
            .iter()
            .filter(|&(&other, _)| contradicts(calls, call, other));
        others.map(|(_, members)| members).sum()
    };
    let against: BTreeMap<u32, usize> = issued.keys().map(|&call| (call, against(call))).collect();
    for &(record, call) in row {
        if against[&call] * 2 >= row.len() {
            comparisons[record].against += 1;
        }
    }
}

/// Whether one collective cannot have been issued with both of these calls.
fn contradicts(calls: &Calls, a: u32, b: u32) -> bool {
    matches!(
        calls.difference(a, b),
        Some(CallDifference::Op | CallDifference::Dtype | CallDifference::Size)
    )
}

/// Counts the groups in which a record completed a collective that needs all members although at least half of the
/// members have not issued it.
fn count_beyond(aligned: &Aligned<'_>, group: usize, comparisons: &mut [Comparison]) {
    let mut newest: Vec<(RecordIx, u32)> = Vec::new();
    for member in 0..aligned.groups[group].ranks.len() {
        let Some((record, lane)) = aligned.lane(group, member) else {
            continue;
        };
        let full_record = &aligned.records[record];
        if !full_record.cut
            && !full_record.only_active
            && let Some(&last) = lane.collectives.last()
        {
            newest.push((record, aligned.seq(record, last)));
        }
    }
    if newest.len() < 2 {
        return;
    }
    let mut sorted: Vec<u32> = newest.iter().map(|&(_, seq)| seq).collect();
    sorted.sort_unstable();
    for member in 0..aligned.groups[group].ranks.len() {
        let Some((record, lane)) = aligned.lane(group, member) else {
            continue;
        };
        let done = lane.collectives[..lane.pending_from].iter().rev();
        let Some(&last) = done
            .clone()
            .find(|&&position| aligned.op(record, position).kind.needs_all_members())
        else {
            continue;
        };
        let reached = aligned.seq(record, last);
        if sorted.partition_point(|&seq| seq < reached) * 2 < newest.len() {
            continue;
        }
        let op = aligned.op(record, last);
        let ended_ns = op.completed_ns().unwrap_or(op.created_ns);
        let was_taken_before = |other: RecordIx| {
            let taken_ns = aligned.records[other].identity.dump_time_ns;
            taken_ns > 0 && taken_ns < ended_ns
                || aligned.ends_before_its_peers(other, Some(record))
        };
        let behind = newest
            .iter()
            .filter(|&&(other, seq)| other != record && seq < reached)
            // A record that was taken before what it completed with others contradicts no newer one.
            .filter(|&&(other, _)| !was_taken_before(other))
            .count();
        if behind * 2 >= newest.len() {
            comparisons[record].beyond += 1;
        }
    }
}

/// Counts, for each record, the groups that list the record's rank while the record uses another group of that name.
/// Only groups count that more than half of their members have recorded.
fn count_misplaced(aligned: &Aligned<'_>, comparisons: &mut [Comparison]) {
    for group in &aligned.groups {
        let known = group.lanes.iter().flatten().count();
        if known < 2 || known * 2 <= group.ranks.len() {
            continue;
        }
        for (member, &rank) in group.ranks.iter().enumerate() {
            if group.lanes[member].is_some() {
                continue;
            }
            for record in aligned.records_of(rank) {
                // Operations of another backend in a group of this name do not contradict.
                let elsewhere = aligned.lanes[record].iter().any(|lane| {
                    let other = &aligned.groups[lane.group];
                    other.name == group.name
                        && other.backend == group.backend
                        && !lane.collectives.is_empty()
                });
                comparisons[record].misplaced += usize::from(elsewhere);
            }
        }
    }
}
