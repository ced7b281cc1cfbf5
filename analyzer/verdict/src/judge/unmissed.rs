//! Describes ranks that failed although no other rank waits for them yet, and that no finding names: an exception has
//! left the program, the rank recorded a failure, or its process is gone. Such a job may continue, or end, or hang
//! soon.

use crate::align::RecordIx;
use crate::judge::check::first_recorded_failure;
use crate::judge::context::Context;
use crate::judge::life::ending::format_exit;
use crate::judge::life::raised::{began_ns, went_on};
use crate::report::Verdict;
use crate::report::format::format_ranks;
use rcomm_recorder::model::Rank;

/// What is known of such ranks, in one sentence. `None` if there are none, if the verdict is neither `healthy` nor
/// `running`, or if the job is over.
pub(crate) fn of(ctx: &Context<'_>, verdict: Verdict) -> Option<String> {
    if !matches!(verdict, Verdict::Healthy | Verdict::Running) || ctx.life.end.is_some() {
        return None;
    }
    let is_healthy = verdict == Verdict::Healthy;
    raised(ctx)
        .or_else(|| gone(ctx, is_healthy))
        .or_else(|| first_recorded_failure(ctx).filter(|_| is_healthy))
}

/// The sentence on ranks whose last phase is an exception, and that have issued nothing since; `None` if there are
/// none.
fn raised(ctx: &Context<'_>) -> Option<String> {
    let records = 0..ctx.aligned.records.len();
    let mut raised: Vec<RecordIx> = records
        .filter(|&record| ctx.raised(record).is_some() && !went_on(&ctx.aligned.records[record]))
        .collect();
    // The others may have raised because of the first.
    raised.sort_by_key(|&record| (began_ns(ctx.aligned, record), record));
    raised.dedup_by_key(|record| ctx.aligned.records[*record].rank);
    let &first = raised.first()?;
    let each = raised
        .iter()
        .map(|&record| ctx.aligned.records[record].rank);
    let ranks: Vec<Rank> = each.collect();
    let phase = ctx.raised(first)?;
    let also = match ranks.len() {
        1 => String::new(),
        _ => format!("; {} ended so, too", format_ranks(&ranks[1..])),
    };
    let (them, their) = match ranks.len() {
        1 => ("it", "its log"),
        _ => ("them", "their logs"),
    };
    Some(format!(
        "{} is in phase `{phase}`, as an exception that leaves a program is recorded{also}; no rank has waited for {them} for \
         long, as far as is recorded: look at {their}",
        format_ranks(&ranks[..1])
    ))
}

/// The sentence on ranks whose processes are gone and did not end in order; `None` if there are none. If operations are
/// pending (not `is_healthy`), only ranks that have been gone for a while count: the others may be about to end as
/// well.
fn gone(ctx: &Context<'_>, is_healthy: bool) -> Option<String> {
    let expected = ctx.aligned.expected.iter().copied();
    let gone = expected.filter(|&rank| {
        let of_rank = ctx.life.gone(rank);
        of_rank.is_some_and(|gone| {
            !ctx.life.ended_in_order(rank) && (is_healthy || ctx.life.is_settled(gone.at_ns()))
        })
    });
    let gone: Vec<Rank> = gone.collect();
    let exit = gone
        .iter()
        .find_map(|&rank| Some((rank, ctx.life.gone(rank)?.exit?)));
    let exit = exit.map_or(String::new(), |(rank, exit)| {
        format!("; rank {rank} {}", format_exit(&exit))
    });
    let (processes, are, they, them) = match gone.len() {
        0 => return None,
        1 => ("process", "is", "it", "it"),
        _ => ("processes", "are", "they", "them"),
    };
    // While ends are being noted, no process may be left.
    let is_gone = |&rank: &Rank| ctx.life.gone(rank).is_some();
    let may = match ctx.aligned.expected.iter().all(is_gone) {
        true => "the job is ending",
        false => "the job may be ending, or hang at its next operation",
    };
    // A program may end by `os._exit(0)`, which closes no record.
    let is_known = |&rank: &Rank| ctx.life.gone(rank).is_some_and(|gone| gone.exit.is_some());
    let not_in_order = match gone.iter().all(is_known) {
        true => format!("{they} did not end in order"),
        false => format!("no record shows that {they} ended in order"),
    };
    Some(format!(
        "the {processes} of {} {are} gone, and {not_in_order}{exit}; no rank has waited for {them} for long, \
         as far as is recorded: {may}",
        format_ranks(&gone)
    ))
}
