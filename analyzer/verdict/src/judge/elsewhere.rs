//! Finds ranks that have no ring here although they took part in operations: they probably run on another host.
//!
//! A view of one host reads only the rings of that host, so a ring that is missing there says nothing about a rank of
//! another host.

use crate::judge::context::Context;
use rcomm_recorder::model::Rank;
use std::collections::BTreeSet;

/// Whether each of these ranks has no record and took part in a collective: another rank completed one that no rank
/// completes without all members. False unless all records are rings and could be read; false without ranks, and if the
/// end of one of these ranks is known.
pub(crate) fn took_part(ctx: &Context<'_>, ranks: &[Rank]) -> bool {
    let aligned = ctx.aligned;
    // A ring that cannot be read may be theirs.
    let all_rings = aligned.records.iter().all(|record| record.is_ring());
    if ranks.is_empty() || !all_rings || ctx.lacks_input {
        return false;
    }
    let mut participants: BTreeSet<Rank> = BTreeSet::new();
    for (record, lanes) in aligned.lanes.iter().enumerate() {
        for lane in lanes {
            let newest_first = lane.collectives.iter().rev();
            let mut ops = newest_first.map(|&position| aligned.op(record, position));
            if ops.any(|op| op.completed() && op.kind.needs_all_members()) {
                participants.extend(aligned.groups[lane.group].ranks.iter());
            }
        }
    }
    // What is known of the end of a rank says more.
    let is_known = |rank| aligned.record_of(rank).is_some() || ctx.life.gone(rank).is_some();
    ranks
        .iter()
        .all(|&rank| participants.contains(&rank) && !is_known(rank))
}
