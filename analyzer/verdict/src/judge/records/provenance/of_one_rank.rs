//! Decides which of several records of one rank are kept.

use super::{LeftAside, joined};
use crate::align::record::{NONE, Record};
use crate::align::shared::Shared;
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::Recorder;
use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap, HashSet};

/// Keeps the best of several records of a rank (one that was not cut, then the newest), and those of other recorders of
/// the same process: each may hold the operations of another backend. What only another record of the same process
/// holds is joined to the best. Leaves aside all records of a rank by recorders that state no process if they are of
/// several processes that ran at one time.
pub(super) fn keep_newest_of_each_recorder(
    shared: &Shared,
    records: &mut Vec<Record>,
    aside: &mut LeftAside,
) {
    // The records are sorted by rank.
    if records.windows(2).all(|pair| pair[0].rank != pair[1].rank) {
        return;
    }
    // Of two records of one moment, the one with call sites is better.
    let with_stack = |record: &Record| record.ops.iter().filter(|op| op.stack != NONE).count();
    let quality = |record: &Record| {
        let taken = record.identity.dump_time_ns;
        let is_complete = !record.cut;
        (
            is_complete,
            record.newest_ns(),
            record.ops.len(),
            taken,
            with_stack(record),
        )
    };
    records.sort_by_cached_key(|record| (record.rank, Reverse(quality(record))));
    let mut kept: Vec<Record> = Vec::with_capacity(records.len());
    // Ranks that the names of files of several processes state.
    let mut ambiguous: BTreeSet<Rank> = BTreeSet::new();
    for record in records.drain(..) {
        let of_rank = kept
            .iter_mut()
            .rev()
            .take_while(|other| other.rank == record.rank);
        let rival = of_rank
            .filter(|other| !are_side_by_side(shared, other, &record))
            .last();
        let Some(rival) = rival else {
            kept.push(record);
            continue;
        };
        if are_two_processes(rival, &record) {
            ambiguous.insert(record.rank);
            kept.push(record);
            continue;
        }
        let joined_text = match joined::join(rival, &record) {
            true => "; it has what only this one held",
            false => "",
        };
        let why = match rival.path.as_str() {
            "" => format!("another record of this rank is newer or more complete{joined_text}"),
            path => {
                format!(
                    "{path} is of the same rank, and as new, newer or more complete{joined_text}"
                )
            }
        };
        aside.add_clause(&record, why);
    }
    kept.retain(|record| {
        let keep = !states_no_process(record.recorder) || !ambiguous.contains(&record.rank);
        if !keep {
            let why = "several processes ran under this rank at one time, so the names of the files do not state the \
                       ranks of one job; name each file after its rank in the job, as rank_12";
            aside.add_clause(record, why.to_owned());
        }
        keep
    });
    *records = kept;
}

/// Whether records by this recorder do not state their process.
pub(super) fn states_no_process(recorder: Recorder) -> bool {
    match recorder {
        Recorder::Nccl | Recorder::Hook | Recorder::NativeGloo => true,
        Recorder::Rcomm | Recorder::NcclProfiler | Recorder::Torchcomms | Recorder::Unknown => {
            false
        }
    }
}

/// Whether one of PyTorch's recorders wrote the two records of one rank in two processes that ran at one time: they
/// issued operations of one number in one group at different times, and neither ended before the other began.
fn are_two_processes(one: &Record, other: &Record) -> bool {
    if one.recorder != other.recorder || !states_no_process(one.recorder) {
        return false;
    }
    let (Some(first), Some(second)) = (one.ops.first(), other.ops.first()) else {
        return false;
    };
    if first.created_ns > other.newest_ns() || second.created_ns > one.newest_ns() {
        return false;
    }
    let numbers = |record: &Record| -> HashMap<(u32, u32, u32), i64> {
        let ops = record.ops.iter().map(|op| {
            let group = record.groups[usize::from(op.group)].group;
            ((group, op.seq, op.p2p_seq), op.created_ns)
        });
        ops.collect()
    };
    let (ours, theirs) = (numbers(one), numbers(other));
    let mut common = ours
        .iter()
        .filter_map(|(number, at_ns)| Some((at_ns, theirs.get(number)?)))
        .peekable();
    common.peek().is_some() && common.all(|(one, other)| one != other)
}

/// Whether two records of one rank come from two recorders in one process: they are not known to be of different
/// processes, overlap in time, and hold operations of different groups or backends.
fn are_side_by_side(shared: &Shared, one: &Record, other: &Record) -> bool {
    let (a, b) = (&one.identity, &other.identity);
    let apart = |a: &str, b: &str| !a.is_empty() && !b.is_empty() && a != b;
    if apart(&a.host, &b.host) || (a.pid != 0 && b.pid != 0 && a.pid != b.pid) {
        return false;
    }
    let from = |record: &Record| record.ops.iter().map(|op| op.created_ns).min();
    let (Some(one_from), Some(other_from)) = (from(one), from(other)) else {
        return false;
    };
    if one_from > other.latest_ns() || other_from > one.latest_ns() {
        return false;
    }
    let (ours, theirs) = (used_by(shared, one), used_by(shared, other));
    let one_backend = |a: &Use<'_>, b: &Use<'_>| are_one_backend(a.1, b.1);
    if meet(&ours, &theirs, |a, b| a.0 == b.0 && one_backend(a, b)) {
        return false;
    }
    // A recorder lists all groups that it knows, so two snapshots of one ring list common groups.
    let lists =
        |record: &Record, group: u32| record.groups.iter().any(|local| local.group == group);
    one.recorder != other.recorder
        || !meet(&ours, &theirs, one_backend)
        || !one.groups.iter().any(|local| lists(other, local.group))
}

/// A group and a backend that carried out operations of it.
type Use<'a> = (u32, &'a str);

/// Whether `test` holds for some use of `ours` and some use of `theirs`.
fn meet<'a>(
    ours: &BTreeSet<Use<'a>>,
    theirs: &BTreeSet<Use<'a>>,
    test: impl Fn(&Use<'a>, &Use<'a>) -> bool,
) -> bool {
    ours.iter().any(|a| theirs.iter().any(|b| test(a, b)))
}

/// Whether two names mean one backend: a recorder that wraps a backend may add a prefix to its name.
fn are_one_backend(a: &str, b: &str) -> bool {
    a.ends_with(b) || b.ends_with(a)
}

/// The groups that a record has operations of, with the backends that carried them out.
fn used_by<'a>(shared: &'a Shared, record: &Record) -> BTreeSet<Use<'a>> {
    let mut seen: HashSet<(u16, u32)> = HashSet::new();
    let mut used = BTreeSet::new();
    for op in &record.ops {
        if seen.insert((op.group, op.call)) {
            let group = record.groups[usize::from(op.group)].group;
            used.insert((group, shared.calls.get(op.call).signature.backend.as_str()));
        }
    }
    used
}
