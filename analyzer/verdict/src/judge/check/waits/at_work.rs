//! Whether ranks that are missed in an operation, and wait for nothing, may be at work in the program's own code.

use crate::judge::context::Context;
use crate::report::Until;
use crate::report::format::{format_ranks, format_time};
use rcomm_recorder::model::Rank;
use std::time::Duration;

/// The highest confidence if the missing ranks may still come.
const MAY_COME: f64 = 0.6;

/// The same, if they are missed for at least half of the time after which they hardly come.
const MAY_HARDLY_COME: f64 = 0.75;

/// The same, if they have paused for about as long before, and went on.
const PAUSED_BEFORE: f64 = 0.5;

/// Work of a program between two operations takes longer than this only rarely.
const LONG: Duration = Duration::from_secs(60);

/// Ranks that wait for nothing, and may be at work in the program's own code.
pub(super) struct AtWork {
    /// The highest confidence of a finding on them.
    pub(super) confidence: f64,
    /// The longest pause of one of them before, ms, if each has paused for about as long as it is missed now.
    paused_ms: Option<f64>,
    /// Whether their processes are known to live.
    live: bool,
}

/// Whether these ranks are missed at a place for less than [`LONG`] and half of the operation's time-out, and either
/// live or left records that were taken, or files that were written, before; `None` if not.
pub(super) fn may_still_come(ctx: &Context<'_>, place: usize, ranks: &[Rank]) -> Option<AtWork> {
    let has_raised = |rank: &Rank| {
        let mut records = ctx.aligned.records_of(*rank);
        records.any(|record| ctx.raised(record).is_some())
    };
    let lives = |rank: &Rank| {
        let mut records = ctx.aligned.records_of(*rank);
        records.all(|record| ctx.aligned.records[record].lives())
    };
    let timeouts = ctx.arrivals(place).map(|(_, timeout_ms)| timeout_ms);
    let half_ms = timeouts
        .filter(|&ms| ms > 0)
        .min()
        .map_or(f64::INFINITY, |ms| ms as f64 / 2.0);
    let long_ms = half_ms.min(LONG.as_secs_f64() * 1e3);
    let live = ctx.policy.snapshot && ctx.life.lives_on() && ranks.iter().all(lives);
    // A process that is gone is at no work.
    let is_taken =
        ctx.until() == Until::Taken && !ranks.iter().any(|&rank| ctx.life.gone(rank).is_some());
    let missed_ms = match live || is_taken {
        true => ctx.waits_ms(place)?,
        false => ctx.waited_when_written_ms(place)?,
    };
    if missed_ms >= long_ms || ranks.iter().any(has_raised) {
        return None;
    }
    let pauses: Option<Vec<f64>> = ranks
        .iter()
        .map(|&rank| longest_pause_ms(ctx, rank))
        .collect();
    let pauses = pauses.filter(|pauses| pauses.iter().all(|pause| pause * AS_LONG >= missed_ms));
    let paused_ms = pauses.and_then(|pauses| pauses.into_iter().reduce(f64::max));
    Some(AtWork {
        confidence: match paused_ms {
            Some(_) => PAUSED_BEFORE,
            None if missed_ms * 2.0 >= long_ms => MAY_HARDLY_COME,
            None => MAY_COME,
        },
        paused_ms,
        live,
    })
}

impl AtWork {
    pub(super) fn doubt(&self, ranks: &[Rank]) -> String {
        let one = ranks.len() == 1;
        let (wait, process) = match (one, self.live) {
            (true, true) => ("waits", " and its process lives"),
            (false, true) => ("wait", " and their processes live"),
            (true, false) => ("waits", ""),
            (false, false) => ("wait", ""),
        };
        let before = match self.paused_ms {
            Some(ms) if one => format!(", and it paused for {} before", format_time(ms)),
            Some(ms) => format!(
                ", and each paused for about as long before, up to {}",
                format_time(ms)
            ),
            None => String::new(),
        };
        format!(
            "{} {wait} in no operation{process}: a checkpoint or other work of the program looks the same, if it may \
             take that long{before}",
            format_ranks(ranks)
        )
    }
}

/// A pause is about as long as an earlier one up to this many times its length.
const AS_LONG: f64 = 1.5;

/// The longest time between the end of an operation of this rank and the issue of the next, ms; `None` without two
/// operations whose ends are recorded.
fn longest_pause_ms(ctx: &Context<'_>, rank: Rank) -> Option<f64> {
    let records = ctx.aligned.records_of(rank);
    let pauses = records.flat_map(|record| {
        ctx.aligned.records[record]
            .ops
            .windows(2)
            .filter_map(|pair| {
                let end_ns = pair[0].completed_ns()?;
                Some(pair[1].created_ns.saturating_sub(end_ns) as f64 / 1e6)
            })
    });
    pauses.reduce(f64::max)
}
