//! Decides whether ranks that are missed in an operation, and wait for nothing, may be at work in the program's own
//! code.

use crate::align::record::Op;
use crate::align::{GroupIx, RecordIx};
use crate::judge::context::Context;
use crate::judge::life::End;
use crate::judge::life::raised::has_left_groups;
use crate::judge::outdated::taken_early;
use crate::report::format::{format_ranks, format_time};
use crate::report::{EndKind, Until};
use rcomm_recorder::model::Rank;
use std::time::Duration;

/// The highest confidence if the missing ranks may still come.
const MAY_COME: f64 = 0.6;

/// The highest confidence if the missing ranks have been missed for at least half of the time after which
/// [`may_still_come`] no longer holds.
const MAY_HARDLY_COME: f64 = 0.75;

/// The highest confidence if the missing ranks paused for about as long before, while others waited for them, and then
/// continued.
const PAUSED_BEFORE: f64 = 0.5;

/// The highest confidence if the missing ranks have been missed for less than makes an operation overdue: any step of a
/// program may take that long. Records are taken that early if another failure caused them to be written.
const MISSED_BRIEFLY: f64 = 0.5;

/// Work of a program between two operations takes longer than this only rarely.
const LONG: Duration = Duration::from_secs(60);

/// Ranks that wait for nothing, and may be at work in the program's own code.
pub(super) struct AtWork {
    /// The highest confidence of a finding on them.
    pub(super) confidence: f64,
    /// The longest earlier pause of one of them, ms, in which others waited for it. `None` unless each has paused
    /// before for about as long as they are missed now.
    paused_ms: Option<f64>,
    /// Whether their processes are known to live.
    live: bool,
    /// Whether the job was cancelled while they were missed.
    is_cancelled: bool,
    /// Among their records, the one that shows the shortest wait, if it was taken much earlier than the newest record.
    early: Option<Early>,
}

/// What is known of these ranks, which are missed at a place, if they may still come. `None` if they have been missed
/// for [`LONG`], or for half of the operation's shortest time-out, if that is shorter; if it is not known for how long
/// they have been missed; if those that waited for them gave up; or if one of them has raised an exception or left its groups.
///
/// How long they are missed counts until now if they live, and until the end if the job was cancelled. Otherwise it counts until their records were taken, or until
/// the files of the records were written if no record states a time.
pub(super) fn may_still_come(ctx: &Context<'_>, place: usize, ranks: &[Rank]) -> Option<AtWork> {
    let has_raised = |rank: &Rank| {
        let mut records = ctx.aligned.records_of(*rank);
        records.any(|record| ctx.raised(record).is_some()) || has_left_groups(ctx.aligned, *rank)
    };
    let lives = |rank: &Rank| {
        let mut records = ctx.aligned.records_of(*rank);
        records.all(|record| ctx.aligned.records[record].lives())
    };
    let timeouts = ctx.ops_of(place).into_iter().map(|(record, position)| {
        let op = ctx.aligned.op(record, position);
        ctx.aligned.shared.calls.get(op.call).timeout_ms
    });
    let half_ms = timeouts
        .filter(|&ms| ms > 0)
        .min()
        .map_or(f64::INFINITY, |ms| ms as f64 / 2.0);
    let long_ms = half_ms.min(LONG.as_secs_f64() * 1e3);
    let overdue_ms = half_ms.min(ctx.policy.overdue.as_secs_f64() * 1e3);
    let live = ctx.policy.snapshot && ctx.life.lives_on() && ranks.iter().all(lives);
    // A process that is gone is not at work.
    let is_taken =
        ctx.until() == Until::Taken && !ranks.iter().any(|&rank| ctx.life.gone(rank).is_some());
    let is_cancelled = ctx.life.end.as_ref().is_some_and(was_cancelled);
    let missed_ms = if live || is_taken {
        ctx.missed_ms(place)
    } else if is_cancelled {
        ctx.waits_ms(place)
    } else {
        ctx.waited_when_written_ms(place)
    };
    let early = first_seen_missing(ctx, place, ranks);
    let early_ms = early.map(|early| early.missed_ms);
    let missed_ms = missed_ms.into_iter().chain(early_ms).reduce(f64::min)?;
    if missed_ms >= long_ms || ranks.iter().any(has_raised) {
        return None;
    }
    let pauses: Option<Vec<f64>> = ranks
        .iter()
        .map(|&rank| longest_pause_ms(ctx, rank, missed_ms / AS_LONG))
        .collect();
    let paused_ms = pauses.and_then(|pauses| pauses.into_iter().reduce(f64::max));
    Some(AtWork {
        confidence: match paused_ms {
            Some(_) => PAUSED_BEFORE,
            None if missed_ms < overdue_ms => MISSED_BRIEFLY,
            None if missed_ms * 2.0 >= long_ms => MAY_HARDLY_COME,
            None => MAY_COME,
        },
        paused_ms,
        live,
        is_cancelled,
        early,
    })
}

/// Whether a job was ended on purpose, at a known time: a rank that was missed then may have been at work.
fn was_cancelled(end: &End) -> bool {
    end.kind == EndKind::Cancelled && end.is_dated()
}

/// The record of a missing rank that was taken much earlier than the newest record.
#[derive(Clone, Copy)]
struct Early {
    rank: Rank,
    /// How long others had missed the rank by then, ms.
    missed_ms: f64,
    /// How much earlier it was taken than the newest record, ms.
    before_ms: f64,
}

/// Among the records of these ranks that were taken much earlier than the newest, the one that shows the shortest wait;
/// `None` if none was taken so early, or if it is not known how long others waited.
fn first_seen_missing(ctx: &Context<'_>, place: usize, ranks: &[Rank]) -> Option<Early> {
    if ctx.gave_up_ns(place).is_some() {
        return None;
    }
    let since_ns = ctx.waiting_since(place)?;
    let records = taken_early(ctx, ranks).into_iter();
    let early = records.map(|(rank, taken_ns, newest_ns)| Early {
        rank,
        missed_ms: taken_ns.saturating_sub(since_ns) as f64 / 1e6,
        before_ms: newest_ns.saturating_sub(taken_ns) as f64 / 1e6,
    });
    early.min_by(|one, other| one.missed_ms.total_cmp(&other.missed_ms))
}

impl AtWork {
    /// The doubt of a finding on these ranks.
    pub(super) fn doubt(&self, ranks: &[Rank]) -> String {
        let one = ranks.len() == 1;
        let (wait, process) = match (one, self.live) {
            (true, true) => ("waits", " and its process lives"),
            (false, true) => ("wait", " and their processes live"),
            _ if self.is_cancelled => ("waited", ""),
            (true, false) => ("waits", ""),
            (false, false) => ("wait", ""),
        };
        let before = match self.paused_ms {
            Some(ms) if one => format!(
                ", and it paused for {} before while others waited for it",
                format_time(ms)
            ),
            Some(ms) => format!(
                ", and each paused for about as long before while others waited for it, up to {}",
                format_time(ms)
            ),
            None => String::new(),
        };
        let early = self.early.map_or(String::new(), |early| {
            format!(
                "; the record of rank {} was taken {} before the newest one",
                early.rank,
                format_time(early.before_ms)
            )
        });
        format!(
            "{} {wait} in no operation{process}: a checkpoint or other work of the program looks the same, if it may \
             take that long{before}{early}",
            format_ranks(ranks)
        )
    }
}

/// A pause is about as long as an earlier one if it is at most this many times as long.
const AS_LONG: f64 = 1.5;

/// The longest time, ms, that this rank spent in no operation before it issued a collective, while another member
/// waited for it there; `None` if there is none of at least `least_ms`.
///
/// No pause after an operation whose end is not recorded counts: the rank may have been in that operation.
fn longest_pause_ms(ctx: &Context<'_>, rank: Rank, least_ms: f64) -> Option<f64> {
    let aligned = ctx.aligned;
    let records = aligned.records_of(rank);
    let pauses = records
        .filter(|&record| aligned.clock_known[record])
        .flat_map(|record| {
            let free_since = free_since(&aligned.records[record].ops);
            let lanes = aligned.lanes[record].iter();
            lanes.flat_map(move |lane| {
                let pause = |&position: &u32| {
                    let op = aligned.op(record, position);
                    let paused_ns = op.created_ns.saturating_sub(free_since[position as usize]?);
                    if (paused_ns as f64) < least_ms * 1e6 {
                        return None;
                    }
                    let came_ns = aligned.created_ns(record, op);
                    let awaited_ns = first_of_peers_ns(
                        ctx,
                        (record, lane.group),
                        aligned.seq(record, position),
                    )?;
                    Some(paused_ns.min(came_ns.saturating_sub(awaited_ns)) as f64 / 1e6)
                };
                let pauses: Vec<f64> = lane.collectives.iter().filter_map(pause).collect();
                pauses
            })
        });
    pauses.filter(|&pause| pause >= least_ms).reduce(f64::max)
}

/// For each operation of a record: since when the rank was in no earlier one, ns by its clock. `None` if that is not
/// recorded.
fn free_since(ops: &[Op]) -> Vec<Option<i64>> {
    let mut latest = None;
    let mut is_known = true;
    let since = ops.iter().map(|op| {
        let before = latest.filter(|_| is_known);
        let end = op.completed_ns().or_else(|| op.failed_ns());
        is_known &= end.is_some();
        latest = latest.max(end);
        before
    });
    since.collect()
}

/// When the first of the other members issued this collective, common time, ns; `None` if no other record whose clock
/// is known in relation to others' has it.
fn first_of_peers_ns(
    ctx: &Context<'_>,
    (record, group): (RecordIx, GroupIx),
    seq: u32,
) -> Option<i64> {
    let aligned = ctx.aligned;
    let own = aligned.records[record].rank;
    let members = aligned.groups[group].lanes.iter().flatten();
    let others = members
        .filter(|&&(other, _)| aligned.records[other].rank != own && aligned.clock_known[other]);
    let issued = others.filter_map(|&(other, lane)| {
        let lane = &aligned.lanes[other][lane];
        let index = aligned.find(other, lane, seq).ok()?;
        Some(aligned.created_ns(other, aligned.op(other, lane.collectives[index])))
    });
    issued.min()
}
