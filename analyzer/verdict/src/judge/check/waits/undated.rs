//! The doubt of an E101 whose ranks left undated dumps by gloo's own recorder.

use crate::align::{RecordIx, retiring_is_all};
use crate::judge::context::Context;
use crate::judge::policy::own_written_ns;
use crate::judge::waits::wait_graph::{Missing, Node};
use crate::report::format::format_ranks;

/// The highest confidence if ranks may be missing only because their records are older than the others'.
pub(super) const HIGHEST: f64 = 0.5;

/// The doubt on ranks that are missing at a place. `None` if the time of a missing rank's record or the time of
/// judgment is known, or if a missing rank's record is by another recorder. In dumps of a running job, the ranks whose
/// dumps were taken first look like missing ones.
pub(super) fn doubt(ctx: &Context<'_>, place: usize, nodes: &[(Node, Missing)]) -> Option<String> {
    let is_undated = |record: RecordIx| {
        let record = &ctx.aligned.records[record];
        retiring_is_all(record.recorder)
            && record.identity.dump_time_ns == 0
            && own_written_ns(record).is_none()
    };
    let mut missing = nodes.iter();
    let all_undated = missing.all(|&(node, _)| ctx.record_at(place, node).is_some_and(is_undated));
    if ctx.policy.now_ns.is_some() || !all_undated {
        return None;
    }
    let ranks: Vec<_> = nodes.iter().map(|&(node, _)| ctx.rank(node)).collect();
    let (dumps_of, they) = match ranks.len() {
        1 => ("that", "it"),
        _ => ("those", "they"),
    };
    let ranks = format_ranks(&ranks);
    Some(format!(
        "gloo's dumps do not say when they were taken: if the others' are newer than {dumps_of} of {ranks}, {they} may have \
         gone on since"
    ))
}
