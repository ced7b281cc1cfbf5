//! The prices of findings: how much less time the job would take without what they report.
//!
//! Three causes have a price. A late rank (W220) costs the time that the others wait before it arrives. Uneven
//! exchanges (W230) and small collectives (W240) cost a part of the time after the last member has arrived, and an
//! operation that is small counts for W240 only. So no moment is paid for twice within a group. Where groups overlap in
//! time, the prices of W230 and W240 are lowered until they fit into the part of the job's time that W220 leaves.
//!
//! Other causes have no price. What a pipeline's schedule leaves idle, and what a slow link costs, look in the records
//! like any other wait in a message or a collective: the records do not show how short the wait could have been.

use crate::judge::context::{Context, FindingDraft};
use crate::report::Code;
use crate::report::format::{format_lateness, format_percent};

/// Lowers the prices of W230 and W240 until they fit into the job's time, and states them in the sentences.
pub(crate) fn settle(ctx: &Context<'_>, drafts: &mut [FindingDraft]) {
    let span_ms = ctx.lateness.span_ms;
    let sum = |drafts: &[FindingDraft], is_late: bool| -> f64 {
        let selected = drafts.iter().filter(|draft| is_lateness(draft) == is_late);
        selected.filter_map(|draft| draft.price_ms).sum()
    };
    let left = (span_ms - sum(drafts, true)).max(0.0);
    let others = sum(drafts, false);
    let part = if others > left { left / others } else { 1.0 };
    for draft in drafts.iter_mut().filter(|draft| !is_lateness(draft)) {
        let Some(price_ms) = &mut draft.price_ms else {
            continue;
        };
        *price_ms *= part;
        draft.sentence += &format!(
            "; without that the job would take {} less, {} of its time",
            format_lateness(*price_ms),
            format_percent(*price_ms / span_ms)
        );
    }
}

/// Whether the finding is about a late rank (W220): its sentence states the price already, as a part of the accusation.
fn is_lateness(draft: &FindingDraft) -> bool {
    draft.code == Code::W220
}
