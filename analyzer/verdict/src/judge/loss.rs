//! Lowers the confidence of findings, and adds notes, if rings may have dropped what would show the cause.
//!
//! A ring that has wrapped may have dropped the operation that its rank is in if its oldest entry has not completed, or
//! if no entry has.

use crate::align::pending::front_is_lost;
use crate::judge::channels::lost_transfers;
use crate::judge::context::{Context, FindingDraft};
use crate::report::format::format_ranks;
use crate::report::{Code, Problem};
use rcomm_recorder::model::Rank;
use std::collections::BTreeSet;

/// The highest confidence of a finding that rests on where ranks wait, if a rank may be in an operation that its ring
/// has dropped.
const AMONG_OTHERS: f64 = 0.7;
/// The highest confidence if that rank is a culprit.
const BLAMED: f64 = 0.5;

/// Ranks whose ring may have dropped the operation that they are in, ascending.
pub(crate) fn with_lost_front(ctx: &Context<'_>) -> Vec<Rank> {
    let records = ctx.aligned.records.iter();
    let with_lost_front = records.filter(|record| front_is_lost(record));
    let mut ranks: Vec<Rank> = with_lost_front.map(|record| record.rank).collect();
    ranks.dedup();
    ranks
}

/// Lowers the confidence of findings that rest on the places where ranks wait, and adds the reason to their doubts.
pub(crate) fn lower_confidence(ctx: &Context<'_>, drafts: &mut [FindingDraft]) {
    let with_lost_front = with_lost_front(ctx);
    if with_lost_front.is_empty() {
        return;
    }
    for draft in drafts {
        if !matches!(
            draft.code,
            Code::E101 | Code::E102 | Code::E103 | Code::E130 | Code::E135
        ) {
            continue;
        }
        let blamed = draft
            .culprits
            .iter()
            .any(|rank| with_lost_front.contains(rank));
        let max_confidence = if blamed { BLAMED } else { AMONG_OTHERS };
        draft.confidence = draft.confidence.min(max_confidence);
        let (ring, they) = match with_lost_front.len() {
            1 => ("ring", "it is"),
            _ => ("rings", "they are"),
        };
        draft.doubts.push(format!(
            "the {ring} of {} may have overwritten the operation that {they} in",
            format_ranks(&with_lost_front)
        ));
    }
}

/// N302 on the ranks whose ring may have dropped the operation that they are in, without those in `noted`; `None` if
/// none is left.
pub(crate) fn note(ctx: &Context<'_>, noted: &BTreeSet<Rank>) -> Option<Problem> {
    let mut with_lost_front = with_lost_front(ctx);
    with_lost_front.retain(|rank| !noted.contains(rank));
    let (ring, they) = match with_lost_front.len() {
        0 => return None,
        1 => ("ring", "it is"),
        _ => ("rings", "they are"),
    };
    let sentence = format!(
        "the oldest entry in the {ring} of {} has not completed: the operation that {they} in may have been overwritten",
        format_ranks(&with_lost_front)
    );
    Some(Problem::new(Code::N302, "", sentence))
}

/// N302 on the ranks with an unfinished operation whose rings had no room for some network transfers: one of those may
/// be the one that lags. `None` if there are none.
pub(crate) fn note_transfers(ctx: &Context<'_>) -> Option<Problem> {
    let lost = ctx.aligned.records.iter().filter_map(|record| {
        let numbers = record
            .communicators
            .iter()
            .map(|communicator| communicator.links_lost);
        let number = numbers.max().filter(|&number| number > 0)?;
        let mut ops = record.ops.iter();
        let waits = ops.any(|op| !op.retired && !op.completed());
        waits.then_some((record.rank, number))
    });
    let lost = lost_transfers(&lost.collect::<Vec<_>>())?;
    let sentence =
        format!("{lost}: which channel or peer holds up an operation there may not be recorded");
    Some(Problem::new(Code::N302, "", sentence))
}
