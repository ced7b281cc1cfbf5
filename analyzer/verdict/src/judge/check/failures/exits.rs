//! Puts into words how the processes of ranks ended, and where to look for the reason.

use super::recorded_failure::text;
use crate::judge::context::{Context, FindingDraft};
use crate::judge::life::raised::has_left_groups;
use crate::judge::life::{ending, is_of_end_signal};
use crate::report::format::format_ranks;
use rcomm_recorder::model::{Failure, FailureKind, Rank};

/// The end of a sentence, like `; it was killed by SIGKILL`; empty if it is not known how the processes ended.
pub(in crate::judge::check) fn how_they_ended(ctx: &Context<'_>, ranks: &[Rank]) -> String {
    let known = ranks.iter().find_map(|&rank| {
        let end = ctx.life.gone(rank)?.exit?;
        Some((rank, ending::format_exit(&end)))
    });
    match (known, ranks.len()) {
        (Some((_, words)), 1) => format!("; it {words}"),
        (Some((rank, words)), _) => format!("; rank {rank} {words}"),
        (None, 1) if ctx.life.ended_in_order(ranks[0]) => {
            let error = last_error(ctx, ranks[0]);
            let error = error.map(|failure| format!(" after an error{}", text(failure)));
            format!("; it ended in order{}", error.unwrap_or_default())
        }
        (None, _) => String::new(),
    }
}

/// The newest failure that a rank recorded, if it is an error of its own and names no rank, and the rank has issued no
/// operation since.
fn last_error<'a>(ctx: &'a Context<'_>, rank: Rank) -> Option<&'a Failure> {
    let mut records = ctx.aligned.records_of(rank);
    records.find_map(|record| {
        let full_record = &ctx.aligned.records[record];
        let newest = full_record.failures.last()?;
        let mut ops = full_record.ops.iter();
        let is_last = ops.all(|op| op.created_ns <= newest.time_ns);
        let is_own = newest.kind == FailureKind::Backend && newest.seen_by == rank;
        (is_own && newest.ranks.is_empty() && is_last).then_some(newest)
    })
}

/// Changes the next step to finding out why the first culprit's process ended, if that process ended in order or its
/// exit code is known, or why it left its groups.
pub(in crate::judge::check) fn look_at_exit(ctx: &Context<'_>, draft: &mut FindingDraft) {
    let Some(&rank) = draft.culprits.first() else {
        return;
    };
    let exit = ctx.life.gone(rank).and_then(|gone| gone.exit);
    let code = exit.and_then(|exit| exit.exit_code);
    let has_left = has_left_groups(ctx.aligned, rank);
    draft.next = match code {
        Some(code) if !has_left && is_of_end_signal(code) => format!(
            "find out what sent the signal to rank {rank}: an operator, a scheduler, or a limit on its memory or time"
        ),
        Some(code) if !has_left || (code != 0 && !is_of_end_signal(code)) => format!(
            "find out why rank {rank} ended by itself: its log, and what ends its program with exit code {code}"
        ),
        _ if has_left => format!(
            "find out why rank {rank} left before its peers were done: compare how many batches or steps each rank has"
        ),
        _ if ctx.life.ended_in_order(rank) => {
            format!(
                "find out why the program of rank {rank} ended before its peers were done: its log"
            )
        }
        _ => return,
    };
}

/// The highest confidence if ranks left before others were done, and these are no more than they are.
const ONE_TOO_MANY: f64 = 0.6;

/// Doubts a finding on ranks that left before others came to a place, if these are no more than they are.
pub(in crate::judge::check) fn doubt_early_end(
    ctx: &Context<'_>,
    place: usize,
    draft: &mut FindingDraft,
) {
    let has_left =
        |rank: &Rank| ctx.life.ended_in_order(*rank) || has_left_groups(ctx.aligned, *rank);
    let others = ctx.ranks(&ctx.graph.arrived[place]);
    if others.len() > draft.culprits.len() || !draft.culprits.iter().all(has_left) {
        return;
    }
    draft.confidence = draft.confidence.min(ONE_TOO_MANY);
    draft.doubts.push(format!(
        "{} may have issued one too many, and not {} one too few",
        format_ranks(&others),
        format_ranks(&draft.culprits)
    ));
    draft.alternatives = vec![draft.culprits.clone(), others];
}
