//! Finds collectives that hang by the status of their group, and that the rings have dropped: a program that does not
//! wait for a collective continues, and later operations overwrite the entry.
//!
//! PyTorch's NCCL recorder writes the number of the newest operation that each group issued and completed. A dump shows
//! these also where the ring no longer holds the operation itself.

use crate::align::{Aligned, GroupIx};
use crate::judge::policy::Policy;
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::Recorder;

/// A collective that is in no ring, with its members' progress by the status of the group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Unkept {
    pub(crate) group: GroupIx,
    pub(crate) seq: u32,
    /// Members that issued the collective and have not completed it, ascending.
    pub(crate) waiting: Vec<Rank>,
    /// Members that have not issued the collective, ascending.
    pub(crate) absent: Vec<Rank>,
}

/// For each group, the first collective that hangs and that no ring holds. Empty in a snapshot: the status may be noted
/// a while after an operation ends.
pub(crate) fn find(aligned: &Aligned<'_>, policy: &Policy) -> Vec<Unkept> {
    if policy.snapshot {
        return Vec::new();
    }
    (0..aligned.groups.len())
        .filter_map(|group| first_of(aligned, group))
        .collect()
}

/// The groups with members by whose status an operation was issued and has not completed, although their rings hold no
/// pending one; each with these members, ascending. The status may be behind, or another member may have completed the
/// operation, so the result accuses no rank. Empty in a snapshot.
pub(crate) fn open_by_status(aligned: &Aligned<'_>, policy: &Policy) -> Vec<(GroupIx, Vec<Rank>)> {
    if policy.snapshot {
        return Vec::new();
    }
    let is_open = |&(record, lane_index): &(usize, usize)| {
        let (full_record, lane) = (&aligned.records[record], &aligned.lanes[record][lane_index]);
        let statuses = full_record.groups.iter().filter_map(|local| local.status);
        let notes_ends = statuses.map(|status| status.last_completed).max() > Some(0);
        let Some(status) = full_record.groups[lane_index].status else {
            return false;
        };
        let done = status.last_completed.max(0);
        let is_later = |number: u32| i64::from(number) > done;
        let newest = lane.collectives.last();
        let held = newest.is_some_and(|&position| is_later(aligned.seq(record, position)));
        let newest = lane.messages.last();
        let held =
            held || newest.is_some_and(|&position| is_later(aligned.op(record, position).p2p_seq));
        full_record.recorder == Recorder::Nccl
            && notes_ends
            && full_record.wrapped()
            && !full_record.only_active
            && status.last_enqueued > done
            && !held
            && aligned.lacks_newest(record).is_none()
    };
    let of_group = |group: GroupIx| {
        let lanes = aligned.groups[group].lanes.iter().flatten();
        let open = lanes.filter(|lane| is_open(lane));
        let mut ranks: Vec<Rank> = open
            .map(|&(record, _)| aligned.records[record].rank)
            .collect();
        ranks.sort_unstable();
        (!ranks.is_empty()).then_some((group, ranks))
    };
    (0..aligned.groups.len()).filter_map(of_group).collect()
}

/// The first collective of a group that hangs by the group's status and that no ring holds. `None` if there is none, if
/// another member has completed it, or if a member's lane has messages or is by another recorder.
fn first_of(aligned: &Aligned<'_>, group: GroupIx) -> Option<Unkept> {
    let lanes = aligned.groups[group].lanes.iter().flatten();
    let mut issued: Vec<(Rank, i64)> = Vec::new();
    let mut open: Vec<(Rank, i64)> = Vec::new();
    let mut newest_done = -1;
    for &(record, lane_index) in lanes {
        let (full_record, lane) = (&aligned.records[record], &aligned.lanes[record][lane_index]);
        // In a group with messages, the numbers may be those of messages.
        if full_record.recorder != Recorder::Nccl || !lane.messages.is_empty() {
            return None;
        }
        let status = full_record.groups[lane_index].status;
        let is_complete = !full_record.wrapped() && !full_record.only_active;
        let (enqueued, completed) = match status {
            Some(status) => (status.last_enqueued.max(0), status.last_completed.max(0)),
            None if is_complete && lane.collectives.is_empty() => (0, 0),
            None => continue,
        };
        // If the process notes no completions in any group, the numbers say nothing.
        let known = full_record.groups.iter().filter_map(|local| local.status);
        let notes_ends = known.map(|status| status.last_completed).max() > Some(0);
        if !notes_ends || aligned.lacks_newest(record).is_some() {
            continue;
        }
        newest_done = newest_done.max(completed);
        issued.push((full_record.rank, enqueued));
        let newest = lane.collectives.last();
        let held =
            newest.is_some_and(|&position| i64::from(aligned.seq(record, position)) > completed);
        if enqueued > completed && full_record.wrapped() && !full_record.only_active && !held {
            open.push((full_record.rank, completed + 1));
        }
    }
    let seq = open.iter().map(|&(_, seq)| seq).min()?;
    // If one member has completed the collective, the others will, or their status is behind.
    if newest_done >= seq {
        return None;
    }
    let ranks = |numbers: &[(Rank, i64)], holds: &dyn Fn(i64) -> bool| {
        let ranks = numbers.iter().filter(|(_, number)| holds(*number));
        ranks.map(|&(rank, _)| rank).collect::<Vec<Rank>>()
    };
    let mut found = Unkept {
        group,
        seq: u32::try_from(seq).ok()?,
        waiting: ranks(&open, &|number| number == seq),
        absent: ranks(&issued, &|enqueued| enqueued < seq),
    };
    found.waiting.sort_unstable();
    found.absent.sort_unstable();
    Some(found)
}
