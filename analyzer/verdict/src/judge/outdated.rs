//! N300 on records that were taken earlier than those of other ranks.

use crate::align::UnknownReason;
use crate::judge::context::Context;
use crate::judge::waits::wait_graph::Missing;
use crate::report::Problem;
use crate::report::format::format_ranks;
use rcomm_recorder::model::Rank;
use std::collections::BTreeSet;

/// The note on the ranks whose records do not show what they do now, since others went on; `None` if there are none.
pub(crate) fn note(ctx: &Context<'_>) -> Option<Problem> {
    let missed = ctx.graph.missing.iter().flatten();
    let missed = missed
        .filter(|&&(_, why)| why == Missing::Unknown(UnknownReason::Outdated))
        .map(|&(node, _)| ctx.rank(node));
    let early = ctx.aligned.early_and_vague();
    let early = early.map(|record| ctx.aligned.records[record].rank);
    let outdated: BTreeSet<Rank> = missed.chain(early).collect();
    let ranks: Vec<Rank> = outdated.into_iter().collect();
    let (records, they_wait) = match ranks.len() {
        0 => return None,
        1 => (
            format!("record of {} was", format_ranks(&ranks)),
            "it waits",
        ),
        _ => (
            format!("records of {} were", format_ranks(&ranks)),
            "they wait",
        ),
    };
    Some(Problem::stale_dump(
        "",
        format!(
            "the {records} taken earlier than the others', which have gone on since; what {they_wait} in now is not \
             known: take the records of all ranks at one moment"
        ),
    ))
}
