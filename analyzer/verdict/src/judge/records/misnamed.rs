//! Settles the ranks of records by PyTorch's NCCL recorder whose files' names state a rank that their groups
//! contradict.

use crate::align::record::Record;
use crate::align::shared::Shared;
use crate::report::Problem;
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::Recorder;
use std::collections::BTreeSet;

/// Corrects the ranks of all records if the names of their files count from 1, and notes that (N300). Else leaves aside
/// the records whose groups contradict the name, each with a problem (N301).
pub(crate) fn settle(shared: &Shared, records: &mut Vec<Record>, problems: &mut Vec<Problem>) {
    if records.iter().all(|record| record.misnamed.is_none()) {
        return;
    }
    if count_from_one(shared, records) {
        let mut paths = Vec::new();
        for record in records.iter_mut() {
            record.rank -= 1;
            record.misnamed = None;
            paths.push(record.path.clone());
        }
        paths.retain(|path| !path.is_empty());
        paths.sort();
        let mut paths = paths.into_iter();
        let why = "the names of the files count the ranks from 1, as the groups show: rank_1 was read as rank 0";
        let mut note = Problem::stale_dump(paths.next().unwrap_or_default(), why);
        note.more_paths = paths.collect();
        problems.push(note);
        return;
    }
    records.retain_mut(|record| match record.misnamed.take() {
        None => true,
        Some(why) => {
            let sentence = format!("left aside: {why}");
            problems.push(Problem::unreadable_dump(record.path.clone(), sentence));
            false
        }
    });
}

/// Whether the groups of every record contain the rank before the one in its file's name, and some file's name states
/// the rank after the last rank of its record's groups.
fn count_from_one(shared: &Shared, records: &[Record]) -> bool {
    let fits = |record: &Record| {
        let groups = used_by(shared, record);
        let before = record.rank.checked_sub(1);
        record.recorder == Recorder::Nccl
            && !groups.is_empty()
            && before.is_some_and(|rank| groups.iter().all(|ranks| ranks.contains(&rank)))
    };
    let is_after_last = |record: &Record| {
        let last = used_by(shared, record).into_iter().flatten().max();
        record.misnamed.is_some() && last.is_some_and(|last| last + 1 == record.rank)
    };
    records.iter().all(fits) && records.iter().any(is_after_last)
}

/// The members of each group in which a record has operations, where they are known.
fn used_by<'a>(shared: &'a Shared, record: &Record) -> Vec<&'a [Rank]> {
    let groups: BTreeSet<u16> = record.ops.iter().map(|op| op.group).collect();
    let groups = groups.into_iter().map(|local| {
        let group = record.groups[usize::from(local)].group;
        &shared.groups[group as usize].ranks[..]
    });
    groups.filter(|ranks| !ranks.is_empty()).collect()
}
