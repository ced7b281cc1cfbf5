//! Whether a running job has stopped communicating: nothing is pending, and no rank has issued an operation for much
//! longer than it ever paused before.
//!
//! Such a job may write a checkpoint, or hang in code that records nothing. The records do not tell which.

use crate::align::record::Record;
use crate::judge::context::Context;
use crate::report::format::{duration_ms, format_ranks};
use rcomm_recorder::model::Rank;
use std::time::Duration;

/// The newest operations of a record in which pauses are measured. A live view reads only a few hundred operations of a
/// ring, and must see the same pauses as a view that reads all.
const NEWEST: usize = 128;
/// With fewer operations, a record shows no pace.
const FEWEST: usize = 8;
/// A silence is at least this many times as long as any pause before.
const TIMES_LONGER: i64 = 20;

/// The time since the last operation of a running job.
pub(crate) struct Silence {
    silent_ns: i64,
    /// The longest time between two operations of a rank among its newest ones, ns.
    pause_ns: i64,
}

/// The silence of a job that runs; `None` if an operation is pending, or a pause of this length is not unusual for it.
pub(crate) fn of(ctx: &Context<'_>) -> Option<Silence> {
    let runs = ctx.policy.snapshot && ctx.life.lives_on() && ctx.aligned.expected.len() > 1;
    // In a job that is ending, the last ranks may still write a checkpoint.
    let ends = ctx.aligned.records.iter().any(Record::closed);
    if !runs || ends || ctx.graph.pending.iter().any(|pending| !pending.is_empty()) {
        return None;
    }
    let now = ctx.as_of_ns()?;
    let mut last_ns = i64::MIN;
    let mut pause_ns = 0;
    let mut shows_pace = false;
    for (at, record) in ctx.aligned.records.iter().enumerate() {
        let newest = &record.ops[record.ops.len().saturating_sub(NEWEST)..];
        let offset = ctx.aligned.offsets_ns[at];
        let ends = newest
            .iter()
            .map(|op| op.completed_ns().unwrap_or(op.created_ns));
        last_ns = ends.fold(last_ns, |last, end| last.max(end.saturating_sub(offset)));
        let pauses = newest
            .windows(2)
            .map(|pair| pair[1].created_ns.saturating_sub(pair[0].created_ns));
        pause_ns = pauses.fold(pause_ns, i64::max);
        shows_pace |= newest.len() >= FEWEST;
    }
    let silent_ns = now.saturating_sub(last_ns);
    let least = ctx.policy.shortest_silence();
    let is_unusual = Duration::from_nanos(u64::try_from(silent_ns).unwrap_or(0)) >= least
        && silent_ns / TIMES_LONGER >= pause_ns;
    (shows_pace && is_unusual).then_some(Silence {
        silent_ns,
        pause_ns,
    })
}

impl Silence {
    /// The facts in one sentence, with the phases that ranks named.
    pub(crate) fn sentence(&self, ctx: &Context<'_>) -> String {
        let ms = |ns: i64| duration_ms(ns as f64 / 1e6);
        format!(
            "no rank has issued an operation for {}, and none is pending; the longest pause before was {}{}: the job may \
             hang in code that records nothing; the stacks of its ranks show where",
            ms(self.silent_ns),
            ms(self.pause_ns),
            phases(ctx)
        )
    }
}

/// The sentence on a job of which no rank has issued an operation yet.
pub(crate) fn before_the_first(ctx: &Context<'_>) -> String {
    let records = ctx.aligned.records.iter().enumerate();
    let begun = records
        .filter(|(_, record)| record.identity.begun_ns > 0)
        .map(|(at, record)| {
            record
                .identity
                .begun_ns
                .saturating_sub(ctx.aligned.offsets_ns[at])
        });
    let age_ns = begun.max().zip(ctx.as_of_ns());
    let age = age_ns.map_or(String::new(), |(begun, now)| {
        let ms = now.saturating_sub(begun).max(0) as f64 / 1e6;
        format!(", {} ago", duration_ms(ms))
    });
    format!(
        "no rank has issued an operation since the last of their records was begun{age}{}: the job starts, or hangs in code that \
         records nothing; the stacks of its ranks show where",
        phases(ctx)
    )
}

/// The end of a clause: the phase that ranks are in, of those that named one; empty if none did.
fn phases(ctx: &Context<'_>) -> String {
    let records = ctx.aligned.records.iter();
    let named: Vec<(Rank, &str)> = records
        .filter_map(|record| Some((record.rank, record.status.as_ref()?.phase.as_str())))
        .filter(|(_, phase)| !phase.is_empty())
        .collect();
    let Some(&(_, phase)) = named.first() else {
        return String::new();
    };
    let same = named.iter().filter(|(_, other)| *other == phase);
    let mut ranks: Vec<Rank> = same.map(|(rank, _)| *rank).collect();
    ranks.dedup();
    let verb = if ranks.len() == 1 { "is" } else { "are" };
    format!("; {} {verb} in phase `{phase}`", format_ranks(&ranks))
}
