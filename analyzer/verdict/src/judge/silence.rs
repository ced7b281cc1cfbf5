//! Decides whether ranks of a running job have stopped communicating: they wait in nothing that is recorded, and have
//! issued no operation for much longer than they paused before.
//!
//! Such a rank may write a checkpoint, or hang in code that records nothing, such as the call that makes a group. The
//! records do not show which.

use crate::align::{GroupIx, RecordIx, position};
use crate::judge::context::Context;
use crate::report::format::{duration_ms, format_ranks, time_of_day};
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::Recorder;
use std::collections::HashSet;
use std::time::Duration;

/// Pauses are measured in at most this many of the newest operations of a record. A live view reads only a few hundred
/// operations of a ring, and must see the same pauses as a view that reads all.
const NEWEST: usize = 128;
/// A record with fewer operations shows no pace.
const FEWEST: usize = 8;
/// A silence is at least this many times as long as any pause before.
const TIMES_LONGER: i64 = 20;

/// Ranks of a running job that have stopped communicating.
pub(crate) struct Silence {
    /// The silent ranks, ascending; empty if all ranks are silent.
    ranks: Vec<Rank>,
    /// When the last of the silent ranks issued or ended an operation, common time, ns.
    last_ns: i64,
    /// The longest time between two of the newest operations of a silent rank, ns; 0 if none had two.
    pause_ns: i64,
    /// A group that some of its members have made and others have not, one of them silent.
    unmade: Option<Unmade>,
}

/// A group that some of its members have made and others have not.
struct Unmade {
    group: GroupIx,
    /// Members that have made the group, in its order.
    makers: Vec<Rank>,
    /// Members that have not made the group, in its order.
    others: Vec<Rank>,
}

/// What the newest operations of a record show.
struct Pace {
    rank: Rank,
    /// When the rank last issued or ended an operation, common time, ns.
    last_ns: i64,
    /// The longest time between the issue of two operations, ns; 0 if there is only one.
    pause_ns: i64,
    /// Whether there are enough operations to show a pace.
    is_known: bool,
    /// Whether an operation is unfinished, not counting receives that threads of their own hold open.
    waits: bool,
}

/// The silence of ranks of a running job of several ranks. `None` for any other job, for one of which a rank has ended
/// in order, or if no rank is silent.
pub(crate) fn of(ctx: &Context<'_>) -> Option<Silence> {
    let runs = ctx.policy.snapshot && ctx.life.lives_on() && ctx.aligned.expected.len() > 1;
    // In a job that is ending, the last ranks may still write a checkpoint.
    let mut ranks = ctx.aligned.expected.iter();
    let ends = ranks.any(|&rank| ctx.life.ended_in_order(rank));
    if !runs || ends {
        return None;
    }
    let now = ctx.as_of_ns()?;
    let records = 0..ctx.aligned.records.len();
    let paces: Vec<Pace> = records.filter_map(|record| pace(ctx, record)).collect();
    of_all(ctx, &paces, now).or_else(|| of_some(ctx, &paces, now))
}

/// The pace of a record; `None` if it has no operations, or its process is gone.
fn pace(ctx: &Context<'_>, index: RecordIx) -> Option<Pace> {
    let record = &ctx.aligned.records[index];
    if ctx.life.gone(record.rank).is_some() {
        return None;
    }
    let newest = &record.ops[record.ops.len().saturating_sub(NEWEST)..];
    let ends = newest
        .iter()
        .map(|op| op.completed_ns().unwrap_or(op.created_ns));
    let pauses = newest
        .windows(2)
        .map(|pair| pair[1].created_ns.saturating_sub(pair[0].created_ns));
    Some(Pace {
        rank: record.rank,
        last_ns: ends.max()?.saturating_sub(ctx.aligned.offsets_ns[index]),
        pause_ns: pauses.max().unwrap_or(0),
        is_known: newest.len() >= FEWEST,
        waits: ctx.graph.pending[index]
            .iter()
            .any(|operation| !operation.held_open),
    })
}

/// The silence of all ranks; `None` if one is not silent, or waits in an operation.
fn of_all(ctx: &Context<'_>, paces: &[Pace], now: i64) -> Option<Silence> {
    let last_ns = paces.iter().map(|pace| pace.last_ns).max()?;
    let pause_ns = paces.iter().map(|pace| pace.pause_ns).max()?;
    let is_silent = is_unusual(now, last_ns, pause_ns, ctx.policy.shortest_silence());
    (is_silent && !paces.iter().any(|pace| pace.waits)).then_some(Silence {
        ranks: Vec::new(),
        last_ns,
        pause_ns,
        unmade: None,
    })
}

/// The silence of some ranks that wait in no operation, while others continue. A rank that is a member of a group that
/// some members have made and others have not counts sooner, and without a pace. `None` if no rank is silent.
fn of_some(ctx: &Context<'_>, paces: &[Pace], now: i64) -> Option<Silence> {
    let mut unmade = None;
    // A rank may have several records.
    let ranks_where = |holds: fn(&Pace) -> bool| -> HashSet<Rank> {
        let paces = paces.iter().filter(|pace| holds(pace));
        paces.map(|pace| pace.rank).collect()
    };
    let waiting = ranks_where(|pace| pace.waits);
    let unpaced = ranks_where(|pace| !pace.is_known);
    let mut is_silent = |pace: &&Pace| {
        let has_paused = |least| is_unusual(now, pace.last_ns, pace.pause_ns, least);
        if !is_unusual(now, pace.last_ns, 0, ctx.policy.overdue) {
            return false;
        }
        if waiting.contains(&pace.rank) {
            return false;
        }
        if let Some(found) = unmade_of(ctx, pace.rank) {
            unmade.get_or_insert(found);
            return true;
        }
        !unpaced.contains(&pace.rank) && has_paused(ctx.policy.shortest_silence())
    };
    let silent: Vec<&Pace> = paces.iter().filter(&mut is_silent).collect();
    let last_ns = silent.iter().map(|pace| pace.last_ns).max()?;
    let pause_ns = silent.iter().map(|pace| pace.pause_ns).max()?;
    let mut ranks: Vec<Rank> = silent.iter().map(|pace| pace.rank).collect();
    ranks.sort_unstable();
    ranks.dedup();
    Some(Silence {
        ranks,
        last_ns,
        pause_ns,
        unmade,
    })
}

/// Whether a rank that last communicated at `last_ns` has been silent for `least`, and for [`TIMES_LONGER`] times its
/// longest pause.
fn is_unusual(now: i64, last_ns: i64, pause_ns: i64, least: Duration) -> bool {
    let silent_ns = now.saturating_sub(last_ns);
    Duration::from_nanos(u64::try_from(silent_ns).unwrap_or(0)) >= least
        && silent_ns / TIMES_LONGER >= pause_ns
}

/// A group of this rank that some of its members have made and others have not. Only members that live and whose
/// records list all groups that they made count. `None` if there is no such group, or if the rank does not count.
fn unmade_of(ctx: &Context<'_>, rank: Rank) -> Option<Unmade> {
    let aligned = ctx.aligned;
    // Other recorders learn of a group with its first operation.
    let shows_groups = |rank: &Rank| {
        let mut records = aligned.records_of(*rank).peekable();
        let shows = |index: RecordIx| aligned.records[index].recorder == Recorder::Rcomm;
        records.peek().is_some() && records.all(shows) && ctx.life.gone(*rank).is_none()
    };
    if !shows_groups(&rank) {
        return None;
    }
    let has = |group: GroupIx, rank: Rank| {
        let mut records = aligned.records_of(rank);
        records.any(|record| aligned.lanes[record].iter().any(|lane| lane.group == group))
    };
    (0..aligned.groups.len()).find_map(|group| {
        let full_group = &aligned.groups[group];
        if !full_group.members_recorded || position(&full_group.ranks, rank).is_none() {
            return None;
        }
        let members = full_group.ranks.iter().copied().filter(shows_groups);
        let (makers, others): (Vec<Rank>, Vec<Rank>) =
            members.partition(|&member| has(group, member));
        let both = !makers.is_empty() && !others.is_empty();
        both.then_some(Unmade {
            group,
            makers,
            others,
        })
    })
}

/// The clause of [`Unmade::in_words`] on a group of this rank; `None` if there is no such group.
pub(crate) fn unmade_in_words(ctx: &Context<'_>, rank: Rank) -> Option<String> {
    unmade_of(ctx, rank).map(|unmade| unmade.in_words(ctx))
}

impl Unmade {
    /// A clause like `group tp has been made by rank 0 and not by rank 1`.
    fn in_words(&self, ctx: &Context<'_>) -> String {
        format!(
            "group {} has been made by {} and not by {}",
            ctx.group_name(self.group),
            format_ranks(&self.makers),
            format_ranks(&self.others)
        )
    }
}

impl Silence {
    /// The facts in one sentence, with the phases that ranks named.
    pub(crate) fn sentence(&self, ctx: &Context<'_>) -> String {
        let since = time_of_day(self.last_ns);
        let pause = match self.pause_ns {
            0 => String::new(),
            ns => format!(
                "; the longest pause before was {}",
                duration_ms(ns as f64 / 1e6)
            ),
        };
        let phases = phases(ctx, &self.ranks);
        if self.ranks.is_empty() {
            let held = match held_open(ctx) {
                0 => "none is pending".to_owned(),
                1 => "none is pending but a receive in a thread that does nothing else".to_owned(),
                many => {
                    format!("none is pending but {many} receives in threads that do nothing else")
                }
            };
            return format!(
                "no rank has issued an operation since {since}, and {held}{pause}{phases}: the job may hang in code \
                 that records nothing; the stacks of its ranks show where"
            );
        }
        let who = format_ranks(&self.ranks);
        let (have, wait, they, their) = match self.ranks.len() {
            1 => ("has", "waits", "it", "its stack shows"),
            _ => ("have", "wait", "they", "their stacks show"),
        };
        let silent = format!(
            "{who} {have} issued no operation since {since}, and {wait} in none that is recorded"
        );
        match &self.unmade {
            Some(unmade) => format!(
                "{}; {silent}{phases}: {they} may wait in the call that makes a group, which is not recorded; {their} where",
                unmade.in_words(ctx)
            ),
            None => format!(
                "{silent}, while others go on{pause}{phases}: {they} may hang in code that records nothing; {their} where"
            ),
        }
    }
}

/// The number of receives that threads of their own hold open.
fn held_open(ctx: &Context<'_>) -> usize {
    let operations = ctx.graph.pending.iter().flatten();
    operations.filter(|operation| operation.held_open).count()
}

/// The sentence on a job of which no rank has issued an operation yet.
pub(crate) fn before_the_first(ctx: &Context<'_>) -> String {
    let records = ctx.aligned.records.iter().enumerate();
    let begun = records
        .filter(|(_, record)| record.identity.begun_ns > 0)
        .map(|(index, record)| {
            record
                .identity
                .begun_ns
                .saturating_sub(ctx.aligned.offsets_ns[index])
        });
    let begun = begun.max().map_or(String::new(), |begun| {
        format!(", at {}", time_of_day(begun))
    });
    format!(
        "no rank has issued an operation since the last rank began to record{begun}{}: the job is starting, or hangs \
         in code that records nothing; the stacks of its ranks show where",
        phases(ctx, &[])
    )
}

/// The end of a clause: the phase of the first of the `selected` ranks that named one, with all of them that are in it.
/// If `selected` is empty, all ranks count. The text is empty if no rank named a phase.
fn phases(ctx: &Context<'_>, selected: &[Rank]) -> String {
    let records = ctx.aligned.records.iter();
    let named: Vec<(Rank, &str)> = records
        .filter_map(|record| Some((record.rank, record.status.as_ref()?.phase.as_str())))
        .filter(|(rank, phase)| {
            !phase.is_empty() && (selected.is_empty() || selected.contains(rank))
        })
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
