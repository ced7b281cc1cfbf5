//! E101 from time-outs that the runtime recorded: whom the ranks that gave up had waited for.

use super::recorded_failure::{Recorded, complete, operation, text};
use crate::align::Presence;
use crate::align::record::Op;
use crate::judge::context::{Context, FindingDraft};
use crate::report::Code;
use crate::report::format::{format_ranks, format_time, time_of_day};
use rcomm_recorder::model::Rank;
use std::collections::BTreeSet;

/// The operation that a rank was waiting in when another gave up.
struct Wait<'a> {
    record: usize,
    group: usize,
    op: &'a Op,
}

/// The wait of a rank that a time-out names: its oldest operation, other than the one that timed out, that it had
/// issued and not completed when the time-out was recorded. `None` if there is none.
fn wait_of<'a>(ctx: &'a Context<'_>, rank: Rank, witness: &Recorded<'_>) -> Option<Wait<'a>> {
    let record = ctx.aligned.record_of(rank)?;
    let timed_out = operation(ctx, witness).map(|(group, op)| (group, op.seq, op.is_p2p));
    let is_pending = |op: &Op| {
        let created = ctx.aligned.created_ns(record, op);
        let ended = created.saturating_add(i64::from(op.completed_us).saturating_mul(1_000));
        created <= witness.at_ns && (!op.completed() || ended > witness.at_ns)
    };
    let lanes = &ctx.aligned.lanes[record];
    let whole = &ctx.aligned.records[record];
    let also = whole.also.iter().map(|(_, op)| op);
    let waits = whole.ops.iter().chain(also).filter_map(|op| {
        let group = lanes.get(usize::from(op.group))?.group;
        let other = timed_out != Some((group, op.seq, op.is_p2p));
        (other && is_pending(op)).then_some(Wait { record, group, op })
    });
    waits.min_by_key(|wait| ctx.aligned.created_ns(wait.record, wait.op))
}

/// The members whose records show that they had not issued the collective of a wait by `at_ns`, common time; empty for
/// a message.
fn absent(ctx: &Context<'_>, wait: &Wait<'_>, at_ns: i64) -> Vec<Rank> {
    if wait.op.is_p2p {
        return Vec::new();
    }
    let ranks = &ctx.aligned.groups[wait.group].ranks;
    let is_absent = |member: usize| match ctx.aligned.presence(wait.group, member, wait.op.seq) {
        Presence::Absent => true,
        Presence::Issued(first) => {
            let lane = ctx.aligned.lane(wait.group, member);
            lane.is_some_and(|(record, lane)| {
                let op = ctx.aligned.op(record, lane.collectives[first]);
                ctx.aligned.created_ns(record, op) > at_ns
            })
        }
        Presence::Lost | Presence::Unknown(_) => false,
    };
    let members = ranks.iter().enumerate();
    members
        .filter(|&(member, _)| is_absent(member))
        .map(|(_, &rank)| rank)
        .collect()
}

/// Starts at the first time-out and follows the waits of the ranks that it names: a rank that was itself waiting for
/// others is not the cause. `None` if no time-out names a rank, or the waits form a cycle.
///
/// Returns the last time-out on this path, the wait in which the cause was absent (`None` if the time-out itself names
/// the cause), and the ranks that are the cause.
fn first_cause<'f, 'a>(
    ctx: &'f Context<'_>,
    failures: &[Recorded<'a>],
) -> Option<(Recorded<'a>, Option<Wait<'f>>, Vec<Rank>)> {
    let named = |one: &&Recorded<'_>| !one.failure.ranks.is_empty();
    let mut witness = *failures.iter().find(named)?;
    let mut culprits = witness.failure.ranks.clone();
    let mut within = None;
    let mut seen: BTreeSet<Rank> = BTreeSet::new();
    loop {
        let mut next = None;
        for &rank in &culprits {
            let Some(wait) = wait_of(ctx, rank, &witness) else {
                continue;
            };
            let its_timeout = failures
                .iter()
                .filter(named)
                .filter(|one| ctx.aligned.records[one.record].rank == rank)
                .find(|one| !one.failure.ranks.contains(&rank));
            let absent = absent(ctx, &wait, witness.at_ns);
            next = match its_timeout {
                Some(timeout) => Some((*timeout, None, timeout.failure.ranks.clone())),
                None if !absent.is_empty() && !absent.contains(&rank) => {
                    Some((witness, Some(wait), absent))
                }
                // It waited for no member that is known.
                None => continue,
            };
            break;
        }
        let Some((after, wait, ranks)) = next else {
            return Some((witness, within, culprits));
        };
        if culprits.iter().any(|rank| !seen.insert(*rank)) {
            return None;
        }
        (witness, within, culprits) = (after, wait, ranks);
    }
}

/// E101: ranks that had not arrived when the others timed out.
pub(super) fn late(ctx: &Context<'_>, failures: &[Recorded<'_>]) -> Option<FindingDraft> {
    let (witness, within, culprits) = first_cause(ctx, failures)?;
    let witness = &witness;
    if let Some(wait) = within {
        return Some(absent_elsewhere(ctx, witness, &wait, culprits));
    }
    let same = |one: &&Recorded<'_>| one.failure.ranks == culprits;
    let witnesses: BTreeSet<Rank> = failures
        .iter()
        .filter(same)
        .map(|one| ctx.aligned.records[one.record].rank)
        .collect();
    let witnesses: Vec<Rank> = witnesses
        .into_iter()
        .filter(|rank| !culprits.contains(rank))
        .collect();
    if witnesses.is_empty() {
        return None;
    }
    let Some(op) = operation(ctx, witness) else {
        return Some(never_came(ctx, witness, culprits, &witnesses));
    };
    let limit = ctx.aligned.shared.calls.get(op.1.call).timeout_ms;
    let limit = match limit {
        0 => String::new(),
        ms => format!(" after {}", format_time(ms as f64)),
    };
    let came = came_after(ctx, witness, &culprits);
    let sentence = format!(
        "{} had not arrived in {} when it timed out{limit} on {}, at {}{came}",
        format_ranks(&culprits),
        ctx.describe_op(witness.record, op.1),
        format_ranks(&witnesses),
        time_of_day(witness.at_ns),
    );
    Some(not_arrived(ctx, culprits, sentence, witness))
}

/// E101 on ranks that had not arrived in an operation; place and targets come from the time-out.
fn not_arrived(
    ctx: &Context<'_>,
    culprits: Vec<Rank>,
    sentence: String,
    witness: &Recorded<'_>,
) -> FindingDraft {
    let mut draft = FindingDraft::new(Code::E101, sentence);
    draft.culprits = culprits;
    draft.confidence = 0.9;
    draft.next = format!(
        "find out what {} did before that operation: its log, its last recorded call, whether it was stopped",
        format_ranks(&draft.culprits)
    );
    complete(ctx, &mut draft, witness);
    draft
}

/// E101 where the rank that a time-out names was itself waiting for others and recorded no time-out.
fn absent_elsewhere(
    ctx: &Context<'_>,
    witness: &Recorded<'_>,
    wait: &Wait<'_>,
    culprits: Vec<Rank>,
) -> FindingDraft {
    let sentence = format!(
        "{} had not arrived in {}, where rank {} waited when {} gave up, at {}",
        format_ranks(&culprits),
        ctx.describe_op(wait.record, wait.op),
        ctx.aligned.records[wait.record].rank,
        format_ranks(&[ctx.aligned.records[witness.record].rank]),
        time_of_day(witness.at_ns),
    );
    let mut draft = not_arrived(ctx, culprits, sentence, witness);
    draft.at = Some(ctx.op_ref(wait.group, wait.op.seq));
    draft
}

/// E101 where no recorded operation timed out: the others waited for the start of the job or for its end, or the ring
/// no longer holds the operation.
fn never_came(
    ctx: &Context<'_>,
    witness: &Recorded<'_>,
    culprits: Vec<Rank>,
    witnesses: &[Rank],
) -> FindingDraft {
    let sentence = format!(
        "{} had not arrived when {} gave up, at {}{}",
        format_ranks(&culprits),
        format_ranks(witnesses),
        time_of_day(witness.at_ns),
        text(witness.failure),
    );
    let mut draft = FindingDraft::new(Code::E101, sentence);
    draft.next = format!(
        "find out what became of {}: its log, its last recorded call, whether it was started or stopped",
        format_ranks(&culprits)
    );
    draft.culprits = culprits;
    draft.confidence = 0.9;
    complete(ctx, &mut draft, witness);
    draft
}

/// The end of a sentence: how long after the time-out the culprit issued the operation, or that its record does not
/// show it. Empty if that is unknown or there are several culprits.
fn came_after(ctx: &Context<'_>, witness: &Recorded<'_>, culprits: &[Rank]) -> String {
    let &[rank] = culprits else {
        return String::new();
    };
    let (Some(failed), Some(record)) = (witness.failure.operation, ctx.aligned.record_of(rank))
    else {
        return String::new();
    };
    let Some((group, _)) = operation(ctx, witness) else {
        return String::new();
    };
    let lane = ctx.aligned.lanes[record]
        .iter()
        .find(|lane| lane.group == group);
    let mut issued = lane
        .into_iter()
        .flat_map(|lane| &lane.collectives)
        .map(|&at| ctx.aligned.op(record, at))
        .filter(|op| !failed.is_p2p && u64::from(op.seq) == failed.seq);
    match issued.next() {
        Some(op) => {
            let later = ctx
                .aligned
                .created_ns(record, op)
                .saturating_sub(witness.at_ns);
            match later > 0 {
                true => format!("; it came {} later", format_time(later as f64 / 1e6)),
                false => String::new(),
            }
        }
        None => "; its record does not show that operation".to_owned(),
    }
}
