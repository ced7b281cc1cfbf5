//! The doubt of an E101 whose ranks left dumps that nothing dates.

use crate::align::record::Record;
use crate::align::{Presence, RecordIx, UnknownReason, retiring_is_all};
use crate::judge::context::Context;
use crate::judge::policy::own_written_ns;
use crate::judge::waits::wait_graph::{Missing, Node, Place};
use crate::report::format::format_ranks;
use rcomm_recorder::model::Rank;

/// The highest confidence if ranks may be missing only because their records are older than the others'.
pub(super) const HIGHEST: f64 = 0.5;

/// The doubt on ranks that are missing at a place. `None` if the time of a missing rank's record or the time of
/// judgment is known, or if neither of these holds: all missing ranks' records are by gloo's own recorder, or another
/// rank's record was provably taken before the rest. In dumps of a running job, the ranks whose dumps were taken first
/// look like missing ones.
pub(super) fn doubt(ctx: &Context<'_>, place: usize, nodes: &[(Node, Missing)]) -> Option<String> {
    let record_at = |node: Node| ctx.record_at(place, node);
    let record_of = |record: RecordIx| &ctx.aligned.records[record];
    let mut missing = nodes.iter();
    let all_undated = missing
        .all(|&(node, _)| record_at(node).is_some_and(|record| is_undated(record_of(record))));
    if ctx.policy.now_ns.is_some() || !all_undated {
        return None;
    }
    let by_gloo = |record| retiring_is_all(record_of(record).recorder);
    let mut missing = nodes.iter();
    let all_by_gloo = missing.all(|&(node, _)| record_at(node).is_some_and(by_gloo));
    let ranks: Vec<Rank> = nodes.iter().map(|&(node, _)| ctx.rank(node)).collect();
    let (dumps_of, they) = match ranks.len() {
        1 => ("that", "it"),
        _ => ("those", "they"),
    };
    let ranks = format_ranks(&ranks);
    let early = of_unknown_presence(ctx, place, |why| why == UnknownReason::Outdated);
    if all_by_gloo {
        Some(format!(
            "gloo's dumps do not say when they were taken: if the others' are newer than {dumps_of} of {ranks}, {they} may \
             have gone on since"
        ))
    } else if !early.is_empty() {
        Some(format!(
            "nothing says when the dumps were taken, and {} earlier than others: {ranks} may have gone on since, too",
            match early.len() {
                1 => format!("that of {} was taken", format_ranks(&early)),
                _ => format!("those of {} were taken", format_ranks(&early)),
            }
        ))
    } else {
        None
    }
}

/// Whether a record is a dump of which nothing says when it was taken. What a ring or the last record of a process
/// lacks did not happen.
fn is_undated(record: &Record) -> bool {
    record.identity.dump_time_ns == 0
        && own_written_ns(record).is_none()
        && !record.is_ring()
        && record.closed_ns == 0
        && record.failures.is_empty()
}

/// The members of the group of a place whose records do not show whether they issued the operation, for a reason for
/// which `is_meant` holds, ascending.
pub(super) fn of_unknown_presence(
    ctx: &Context<'_>,
    place: usize,
    is_meant: impl Fn(UnknownReason) -> bool,
) -> Vec<Rank> {
    let Place::Collective { group, seq } = ctx.graph.places[place] else {
        return Vec::new();
    };
    let members = ctx.aligned.groups[group].ranks.iter().enumerate();
    let unknown = members.filter(|&(member, _)| {
        let presence = ctx.aligned.presence(group, member, seq);
        matches!(presence, Presence::Unknown(why) if is_meant(why))
    });
    let mut unknown: Vec<Rank> = unknown.map(|(_, &rank)| rank).collect();
    unknown.sort_unstable();
    unknown
}
