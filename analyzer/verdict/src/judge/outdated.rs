//! N300 on records that were taken earlier than those of other ranks, or seem to be.

use crate::align::{Aligned, EARLY, GroupIx, RecordIx, UnknownReason};
use crate::judge::context::Context;
use crate::judge::policy::{NAMING, each_written_ns, taken_ns};
use crate::judge::waits::wait_graph::Missing;
use crate::report::Problem;
use crate::report::format::{duration_ms, format_ranks};
use rcomm_recorder::model::Rank;
use std::collections::{BTreeSet, HashMap};

/// The note (N300) on the ranks whose records do not show what they do now, since others' were taken later; `None` if
/// there are none.
pub(crate) fn note(ctx: &Context<'_>) -> Option<Problem> {
    // `note_still_inside` says what is known of a rank that may still be inside an operation.
    let inside = ctx.still_inside.iter();
    let inside: BTreeSet<Rank> = inside.map(|inside| inside.rank(ctx.aligned)).collect();
    let missed = ctx.graph.missing.iter().flatten();
    let missed = missed
        .filter(|&&(_, why)| why == Missing::Unknown(UnknownReason::Outdated))
        .map(|&(node, _)| ctx.rank(node))
        .filter(|rank| !inside.contains(rank));
    let outdated: BTreeSet<Rank> = missed.chain(early(ctx)).collect();
    let ranks: Vec<Rank> = outdated.into_iter().collect();
    let aligned = ctx.aligned;
    // By the record's own clock, its time is no proof.
    let is_guessed = |record: RecordIx| {
        let is_dated = || taken_ns(aligned, ctx.policy, record).is_some();
        !aligned.clock_known[record] && is_dated()
    };
    let guessed = ranks
        .iter()
        .any(|&rank| aligned.records_of(rank).any(is_guessed));
    let (records, were, they_wait) = match (ranks.len(), guessed) {
        (0, _) => return None,
        (1, false) => ("record", "was", "it waits"),
        (1, true) => ("record", "seems to have been", "it waits"),
        (_, false) => ("records", "were", "they wait"),
        (_, true) => ("records", "seem to have been", "they wait"),
    };
    let of_ranks = format_ranks(&ranks);
    Some(Problem::stale_dump(
        "",
        format!(
            "the {records} of {of_ranks} {were} taken earlier than the others'; what {they_wait} in now is not known: take the records of \
             all ranks at one moment"
        ),
    ))
}

/// The ranks whose records were taken too early and may hide a hang. In some records only `retired` shows that an
/// operation is over: peers may have timed out in such an operation. The files of others are older than the newest file
/// by more than [`NAMING`]: the peers may have nothing pending because these ranks hang.
pub(crate) fn early<'a>(ctx: &'a Context<'_>) -> impl Iterator<Item = Rank> + 'a {
    let aligned = ctx.aligned;
    let written = each_written_ns(aligned);
    let newest_ns = written.iter().flatten().max().copied();
    let is_apart = move |&record: &RecordIx| {
        let is_outdated = aligned.lacks_newest(record) == Some(UnknownReason::Outdated);
        let apart = newest_ns.zip(written[record]);
        let apart = apart.map(|(newest, own)| newest.saturating_sub(own));
        is_outdated && apart.is_some_and(|apart| apart > NAMING.as_nanos() as i64)
    };
    let by_files = (0..aligned.records.len()).filter(is_apart);
    let records = aligned.early_and_vague().chain(by_files);
    records.map(|record| aligned.records[record].rank)
}

/// An operation that is unfinished in the record of one rank, and complete in those of others.
pub(crate) struct StillInside {
    record: RecordIx,
    position: u32,
    /// How long after the first other member had completed the operation the file of this record was written, ms.
    after_ms: f64,
}

impl StillInside {
    fn rank(&self, aligned: &Aligned<'_>) -> Rank {
        aligned.records[self.record].rank
    }
}

/// The collectives that are unfinished in a record and that others completed long before its file was written: either
/// the record was taken before that, or the operation does not end on that rank. At most one for each record.
pub(crate) fn still_inside(aligned: &Aligned<'_>) -> Vec<StillInside> {
    // Thousands of ranks may be unfinished in one collective, so each is looked up once.
    let mut first_ends: HashMap<(GroupIx, u32), Option<i64>> = HashMap::new();
    let mut inside = Vec::new();
    for (record, written_ns) in each_written_ns(aligned).into_iter().enumerate() {
        let Some(written_ns) = written_ns else {
            continue;
        };
        let mut unfinished = aligned.lanes[record].iter().filter_map(|lane| {
            let first = *lane.collectives.get(lane.pending_from)?;
            let seq = aligned.op(record, first).seq;
            let is_over = aligned.is_over_since(record, lane.group, seq);
            is_over.then_some((lane.group, seq, first))
        });
        let Some((group, seq, position)) = unfinished.next() else {
            continue;
        };
        let first_end = first_ends
            .entry((group, seq))
            .or_insert_with(|| first_end_ns(aligned, group, seq));
        let after_ns = first_end.map(|first_ns| written_ns.saturating_sub(first_ns));
        let Some(after_ns) = after_ns.filter(|&ns| ns > NAMING.as_nanos() as i64) else {
            continue;
        };
        inside.push(StillInside {
            record,
            position,
            after_ms: after_ns as f64 / 1e6,
        });
    }
    inside
}

/// When the first member completed a collective, common time, ns; `None` if no record shows it.
fn first_end_ns(aligned: &Aligned<'_>, group: GroupIx, seq: u32) -> Option<i64> {
    let members = aligned.groups[group].lanes.iter().flatten();
    let ends = members.filter_map(|&(record, lane)| {
        let lane = &aligned.lanes[record][lane];
        let index = aligned.find(record, lane, seq).ok()?;
        let end_ns = aligned.status_op(record, lane, index).completed_ns()?;
        Some(end_ns.saturating_sub(aligned.offsets_ns[record]))
    });
    ends.min()
}

/// The note (N300) on the first collective that is [`still_inside`]; it names the ranks of the others. `None` if there
/// are none.
pub(crate) fn note_still_inside(ctx: &Context<'_>) -> Option<Problem> {
    let inside = &ctx.still_inside;
    let first = inside.first()?;
    let rank = |inside: &StillInside| inside.rank(ctx.aligned);
    let op = ctx.aligned.op(first.record, first.position);
    let also = match &inside[1..] {
        [] => String::new(),
        others => {
            let others: Vec<Rank> = others.iter().map(rank).collect();
            format!(" (so are others in those of {})", format_ranks(&others))
        }
    };
    Some(Problem::stale_dump(
        "",
        format!(
            "{} is unfinished in the record of rank {}{also}, and others completed it {} before that file was written: \
             the record was taken before, or the operation does not end on that rank",
            ctx.describe_op(first.record, op),
            rank(first),
            duration_ms(first.after_ms)
        ),
    ))
}

/// Those of these ranks whose records were taken much earlier than the newest record, each with the time at which it
/// was taken, common time, ns, and the time of the newest. Ranks that no longer answer are left out.
pub(crate) fn taken_early(ctx: &Context<'_>, ranks: &[Rank]) -> Vec<(Rank, i64, i64)> {
    let aligned = ctx.aligned;
    let Some(newest_ns) = ctx.newest_taken_ns else {
        return Vec::new();
    };
    let answers = |rank: &&Rank| !ctx.policy.silent.contains(rank);
    let early = ranks.iter().filter(answers).filter_map(|&rank| {
        let of_rank = aligned.records_of(rank);
        let taken: Option<Vec<i64>> = of_rank
            .map(|record| taken_ns(aligned, ctx.policy, record))
            .collect();
        let taken_ns = taken?.into_iter().max()?;
        let is_early = newest_ns.saturating_sub(taken_ns) >= EARLY.as_nanos() as i64;
        is_early.then_some((rank, taken_ns, newest_ns))
    });
    early.collect()
}
