//! E101, E135 and E151 from time-outs that the runtime recorded: the ranks that others had waited for when they gave
//! up.

use super::recorded_failure::{Recorded, complete, operation, text, unread_besides};
use crate::align::Presence;
use crate::align::p2p::peer_of;
use crate::align::record::Op;
use crate::judge::context::{Context, FindingDraft};
use crate::report::Code;
use crate::report::format::{format_ranks, format_time, time_of_day};
use rcomm_recorder::model::{EntryState, Pattern, Rank};
use std::collections::BTreeSet;

/// The operation that a rank was waiting in when another gave up.
struct Wait<'a> {
    record: usize,
    group: usize,
    op: &'a Op,
}

/// The wait of a rank that a time-out (`witness`) names: the oldest operation, other than the one that timed out, that
/// the rank had issued and not completed when the time-out was recorded. `None` if there is none.
fn wait_of<'a>(ctx: &'a Context<'_>, rank: Rank, witness: &Recorded<'_>) -> Option<Wait<'a>> {
    let record = ctx.aligned.record_of(rank)?;
    let timed_out = operation(ctx, witness);
    let lanes = &ctx.aligned.lanes[record];
    let full_record = &ctx.aligned.records[record];
    let unaligned = full_record.unaligned.iter().map(|(_, op)| op);
    let waits = full_record.ops.iter().chain(unaligned).filter_map(|op| {
        let group = lanes.get(usize::from(op.group))?.group;
        // An access to a window has no number, and is never the same as another rank's.
        let is_own = op.kind.pattern() == Pattern::OneSided && record != witness.record;
        let is_same = |(its_group, late): (usize, &Op)| {
            its_group == group && late.is_p2p == op.is_p2p && (late.seq == op.seq || op.is_p2p)
        };
        let is_end = || !op.is_p2p || is_other_end(ctx, (record, op), group, witness);
        let other = is_own || !(timed_out.is_some_and(is_same) && is_end());
        (other && is_pending(ctx, record, op, witness.at_ns)).then_some(Wait { record, group, op })
    });
    waits.min_by_key(|wait| ctx.aligned.created_ns(wait.record, wait.op))
}

/// Whether a message of a rank may be the one that timed out at its other end: a send to the witness where that
/// received, or a receive from it where that sent.
fn is_other_end(
    ctx: &Context<'_>,
    (record, op): (usize, &Op),
    group: usize,
    witness: &Recorded<'_>,
) -> bool {
    let ranks = &ctx.aligned.groups[group].ranks;
    let rank_at = |record: usize| ctx.aligned.records[record].rank;
    let own = ranks.iter().position(|&rank| rank == rank_at(record));
    let peer = own.and_then(|own| peer_of(op, own as u32, ranks.len() as u32));
    let is_to_witness =
        peer.and_then(|peer| ranks.get(peer as usize)) == Some(&rank_at(witness.record));
    let kind = operation(ctx, witness).map(|(_, late)| late.kind);
    // A receive from any source names no peer.
    (is_to_witness || peer.is_none()) && kind != Some(op.kind)
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

/// The wait of a rank inside the collective that timed out: `None` unless the rank's record shows that the rank had
/// issued the collective, and not completed it, when the time-out was recorded. A collective passes data from rank to
/// rank, so the rank that a time-out names may itself wait for the one that is missing.
fn wait_inside<'a>(ctx: &'a Context<'_>, rank: Rank, witness: &Recorded<'_>) -> Option<Wait<'a>> {
    let record = ctx.aligned.record_of(rank)?;
    let (group, timed_out) = operation(ctx, witness).filter(|(_, op)| !op.is_p2p)?;
    let lanes = ctx.aligned.lanes[record].iter();
    let collectives = lanes
        .filter(|lane| lane.group == group)
        .flat_map(|lane| &lane.collectives);
    let mut ops = collectives.map(|&position| ctx.aligned.op(record, position));
    let op = ops.find(|op| op.seq == timed_out.seq)?;
    is_pending(ctx, record, op, witness.at_ns).then_some(Wait { record, group, op })
}

/// Whether a rank had issued an operation and not completed it at this common time, ns.
fn is_pending(ctx: &Context<'_>, record: usize, op: &Op, at_ns: i64) -> bool {
    let created = ctx.aligned.created_ns(record, op);
    let ended = created.saturating_add(i64::from(op.completed_us).saturating_mul(1_000));
    created <= at_ns && (!op.completed() || ended > at_ns)
}

/// What recorded time-outs show as the cause.
enum Cause<'f, 'a> {
    /// The last time-out on the path to the cause, the wait in which the cause was absent (`None` if the time-out
    /// itself names the cause), and the ranks that are the cause.
    Found(Recorded<'a>, Option<Wait<'f>>, Vec<Rank>),
    /// A time-out outside of operations, and the ranks that such time-outs name, ascending: one of them is the cause.
    OneOf(Recorded<'a>, Vec<Rank>),
}

/// Starts at the first time-out and follows the waits of the ranks that it names: a rank that was itself waiting for
/// others is not the cause. `None` if no time-out names a rank, or the waits in operations form a cycle.
fn first_cause<'f, 'a>(ctx: &'f Context<'_>, failures: &[Recorded<'a>]) -> Option<Cause<'f, 'a>> {
    let named = |timeout: &&Recorded<'_>| !timeout.failure.ranks.is_empty();
    let mut witness = *failures.iter().find(named)?;
    let mut culprits = witness.failure.ranks.clone();
    let mut within = None;
    let mut seen: BTreeSet<Rank> = BTreeSet::new();
    loop {
        let mut next = None;
        // If some culprits had not arrived, those that had do not matter.
        let arrived = |rank: &Rank| wait_inside(ctx, *rank, &witness).is_some();
        let all_arrived = within.is_none() && culprits.iter().all(arrived);
        for &rank in &culprits {
            let of_rank = |timeout: &&Recorded<'a>| rank_of(ctx, timeout) == rank;
            let on_others = |timeout: &&Recorded<'a>| !timeout.failure.ranks.contains(&rank);
            let mut timeouts = failures.iter().filter(named).filter(of_rank);
            // At the start and at the end of a job no operation shows that the rank waited.
            if witness.failure.operation.is_none()
                && let Some(timeout) = timeouts
                    .clone()
                    .filter(|timeout| waited_too(ctx, &witness, timeout))
                    .find(on_others)
            {
                next = Some((*timeout, None, timeout.failure.ranks.clone()));
                break;
            }
            let inside = || wait_inside(ctx, rank, &witness).filter(|_| all_arrived);
            let Some(wait) = wait_of(ctx, rank, &witness).or_else(inside) else {
                continue;
            };
            let its_timeout = timeouts.find(on_others);
            let absent = absent(ctx, &wait, witness.at_ns);
            next = match its_timeout {
                Some(timeout) => Some((*timeout, None, timeout.failure.ranks.clone())),
                None if !absent.is_empty() && !absent.contains(&rank) => {
                    Some((witness, Some(wait), absent))
                }
                // The rank waited for no member that is known.
                None => continue,
            };
            break;
        }
        let Some((after, wait, ranks)) = next else {
            // If a rank was absent elsewhere because it waits where the first gave up, the waits form a cycle.
            let is_back = |rank: &Rank| {
                *rank == rank_of(ctx, &witness) || wait_inside(ctx, *rank, &witness).is_some()
            };
            let is_cycle = within.is_some() && culprits.iter().any(is_back);
            return (!is_cycle).then_some(Cause::Found(witness, within, culprits));
        };
        if culprits.iter().any(|rank| !seen.insert(*rank)) {
            return outside_operations(ctx, failures).filter(|_| after.failure.operation.is_none());
        }
        (witness, within, culprits) = (after, wait, ranks);
    }
}

/// The rank that recorded a time-out.
fn rank_of(ctx: &Context<'_>, timeout: &Recorded<'_>) -> Rank {
    ctx.aligned.records[timeout.record].rank
}

/// Whether a rank whose time-out belongs to no operation already waited when the witness gave up: then its own time-out
/// came less than one limit later. The limit of such a wait is not recorded; it is as long as that of the rank's newest
/// operation.
fn waited_too(ctx: &Context<'_>, witness: &Recorded<'_>, other: &Recorded<'_>) -> bool {
    let newest = ctx.aligned.records[other.record].ops.last();
    let limit_ms = newest.map_or(0, |op| ctx.aligned.shared.calls.get(op.call).timeout_ms);
    let limit_ns = (limit_ms as i64).saturating_mul(1_000_000);
    let later_ns = other.at_ns.saturating_sub(witness.at_ns);
    other.failure.operation.is_none() && (limit_ns == 0 || later_ns < limit_ns)
}

/// The cause if ranks gave up outside of operations, at the start or at the end of the job, and named each other. A
/// rank that is cut off names one that waits with all others, so the cause is the one rank that all others name. If
/// there is no such rank, the cause is one of those named. `None` if no rank gave up outside of operations.
fn outside_operations<'f, 'a>(
    ctx: &Context<'_>,
    failures: &[Recorded<'a>],
) -> Option<Cause<'f, 'a>> {
    let outside: Vec<&Recorded<'a>> = failures
        .iter()
        .filter(|timeout| timeout.failure.operation.is_none() && !timeout.failure.ranks.is_empty())
        .collect();
    let witnesses: BTreeSet<Rank> = outside
        .iter()
        .map(|timeout| rank_of(ctx, timeout))
        .collect();
    let named: BTreeSet<Rank> = outside
        .iter()
        .flat_map(|timeout| &timeout.failure.ranks)
        .copied()
        .collect();
    let names = |by: Rank, rank: Rank| {
        let mut by_rank = outside.iter().filter(|timeout| rank_of(ctx, timeout) == by);
        by_rank.any(|timeout| timeout.failure.ranks.contains(&rank))
    };
    let by_all = |rank: &&Rank| {
        let mut others = witnesses.iter().filter(|by| by != rank);
        others.all(|&by| names(by, **rank))
    };
    let mut by_all = named.iter().filter(by_all);
    if let (Some(&rank), None) = (by_all.next(), by_all.next()) {
        let witness = outside
            .iter()
            .find(|timeout| timeout.failure.ranks == [rank])?;
        return Some(Cause::Found(**witness, None, vec![rank]));
    }
    Some(Cause::OneOf(
        **outside.first()?,
        named.into_iter().collect(),
    ))
}

/// E101 on ranks that had not arrived when others timed out; E151 or E135 if they had arrived ([`all_inside`]). `None`
/// if no time-out names a rank, if the waits form a cycle, or if only the culprits themselves name them.
pub(super) fn late(ctx: &Context<'_>, failures: &[Recorded<'_>]) -> Option<FindingDraft> {
    let (witness, within, culprits) = match first_cause(ctx, failures)? {
        Cause::Found(witness, within, culprits) => (witness, within, culprits),
        Cause::OneOf(witness, ranks) => return Some(each_gave_up(ctx, &witness, &ranks)),
    };
    let witness = &witness;
    if let Some(wait) = within {
        return Some(absent_elsewhere(ctx, witness, &wait, culprits));
    }
    let names_culprits = |timeout: &&Recorded<'_>| timeout.failure.ranks == culprits;
    let witnesses: BTreeSet<Rank> = failures
        .iter()
        .filter(names_culprits)
        .map(|timeout| ctx.aligned.records[timeout.record].rank)
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
    let inside = culprits.iter().map(|&rank| wait_inside(ctx, rank, witness));
    if let Some(inside) = inside.collect::<Option<Vec<_>>>() {
        return Some(all_inside(ctx, witness, &inside, culprits, &witnesses));
    }
    let came = came_after(ctx, witness, &culprits);
    let sentence = format!(
        "{} had not arrived in {} when it timed out{limit} on {}, at {}{came}",
        format_ranks(&culprits),
        ctx.describe_op(witness.record, op.1),
        format_ranks(&witnesses),
        time_of_day(witness.at_ns),
    );
    let mut draft = not_arrived(ctx, culprits, sentence, witness);
    leave_waits_open(ctx, &mut draft, witness);
    let unread = unread_besides(ctx, &draft.culprits);
    if !unread.is_empty() {
        draft.confidence = 0.5;
        draft.doubts.push(format!(
            "{} left no record, either: {} may have waited for {}",
            format_ranks(&unread),
            format_ranks(&draft.culprits),
            if unread.len() == 1 {
                "it"
            } else {
                "one of them"
            }
        ));
        draft
            .alternatives
            .extend(unread.into_iter().take(16).map(|rank| vec![rank]));
    }
    Some(draft)
}

/// A rank that ends an operation later than this after its deadline had no processor in that time, ns. The search for
/// the reason that another rank may have given takes up to two seconds.
const OVERRUN_NS: i64 = 2_500_000_000;
/// A process that runs may be inside an operation for this time after its deadline, ns: its watchdog gives a call that
/// waits five seconds to return, and then asks the other ranks.
const LONGEST_END_NS: i64 = 10_000_000_000;

/// How much longer than its time-out a rank was in an operation, ns; `None` if it ended soon after its deadline, or has
/// none. An operation that has not ended counts if the rank's process is there, since it may have gone on just now,
/// unless it noted that the operation failed: then its watchdog had the processor. `all_came`: all other members had
/// arrived, so that the rank waited for none of them.
fn overran_ns(ctx: &Context<'_>, wait: &Wait<'_>, all_came: bool) -> Option<i64> {
    let (record, op) = (&ctx.aligned.records[wait.record], wait.op);
    let is_noted = || {
        let mut failed = record
            .failures
            .iter()
            .filter_map(|it| it.operation.as_ref());
        failed.any(|failed| {
            let operation = record.operation(failed.record_id);
            operation.is_some_and(|noted| std::ptr::eq(noted, op))
        })
    };
    let limit_ms = ctx.aligned.shared.calls.get(op.call).timeout_ms;
    let limit_ns = (limit_ms as i64).saturating_mul(1_000_000);
    let ended_ns = match op.state {
        EntryState::Failed => op.failed_ns(),
        EntryState::Completed => op.completed_ns(),
        _ if is_noted() => None,
        _ => {
            let is_there = record.lives() || record.stop().is_some();
            is_there.then_some(record.identity.dump_time_ns)
        }
    };
    let least_ns = match op.has_ended() || record.stop().is_some() || all_came {
        true => OVERRUN_NS,
        false => LONGEST_END_NS,
    };
    let took_ns = ended_ns?.saturating_sub(op.created_ns);
    let over_ns = took_ns.saturating_sub(limit_ns);
    (limit_ns > 0 && over_ns >= least_ns).then_some(over_ns)
}

/// The finding on ranks that a time-out names and that had arrived in the operation: E151 if they ended it long after
/// their own deadline, and no other member did. Otherwise no rank is blamed: E135 if all members had issued it, else
/// E101.
fn all_inside(
    ctx: &Context<'_>,
    witness: &Recorded<'_>,
    inside: &[Wait<'_>],
    culprits: Vec<Rank>,
    witnesses: &[Rank],
) -> FindingDraft {
    let named = format_ranks(&culprits);
    let members = &ctx.aligned.groups[inside[0].group].ranks;
    let others = members.iter().filter(|rank| !culprits.contains(rank));
    let others: Vec<Option<Wait<'_>>> = others
        .map(|&rank| wait_inside(ctx, rank, witness))
        .collect();
    let all_came = others.iter().all(Option::is_some);
    let others_overran = others
        .iter()
        .flatten()
        .any(|wait| overran_ns(ctx, wait, all_came).is_some());
    let overran = inside.iter().map(|wait| overran_ns(ctx, wait, all_came));
    let overran = overran.collect::<Option<Vec<i64>>>();
    let overran = overran.filter(|_| !others_overran);
    let place = ctx.describe_op(inside[0].record, inside[0].op);
    let (waiting, when) = (format_ranks(witnesses), time_of_day(witness.at_ns));
    if let Some(over_ns) = overran.and_then(|overran| overran.into_iter().min()) {
        let whose = match culprits.len() {
            1 => "the process of",
            _ => "the processes of",
        };
        let was = if culprits.len() == 1 { "was" } else { "were" };
        let has_ended = inside.iter().all(|wait| wait.op.has_ended());
        let is_stopped = |wait: &Wait<'_>| ctx.aligned.records[wait.record].stop().is_some();
        let (how, ended) = match has_ended {
            true => ("stopped or without processor time", "which ended there"),
            false if inside.iter().all(is_stopped) => ("stopped", "which had not ended there"),
            false => (
                "stopped, without processor time or stuck in a call",
                "which had not ended there",
            ),
        };
        let sentence = format!(
            "{whose} {named} {was} {how} inside {place}, {ended} {} after its time-out; {waiting} waited for \
             {named} and gave up at {when}",
            format_time(over_ns as f64 / 1e6),
        );
        let mut draft = not_arrived(ctx, culprits, sentence, witness);
        draft.code = Code::E151;
        draft.confidence = 0.7;
        draft.next = format!(
            "find out whether {named} {was} stopped, and look at load, quota and memory of the host"
        );
        return draft;
    }
    let (group, seq) = (inside[0].group, inside[0].op.seq);
    let unknown: Vec<Vec<Rank>> = members
        .iter()
        .enumerate()
        .filter(|&(member, _)| {
            !matches!(
                ctx.aligned.presence(group, member, seq),
                Presence::Issued(_)
            )
        })
        .map(|(_, &rank)| vec![rank])
        .collect();
    let sentence = format!(
        "{place} timed out on {waiting}, which waited for {named}, at {when}; {named} had issued it, too, and the \
         records do not show whose part was missing",
    );
    let mut draft = not_arrived(ctx, Vec::new(), sentence, witness);
    if unknown.is_empty() {
        draft.code = Code::E135;
    }
    draft.alternatives = unknown.into_iter().take(16).collect();
    draft.confidence = 0.5;
    draft.next = "look at the network between the hosts, and at the logs of all members".to_owned();
    draft
}

/// E101 on ranks that had not arrived in an operation. The operation of the finding, and its targets, come from the
/// time-out.
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

/// The E101 if the rank that a time-out names was itself waiting for others and recorded no time-out.
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
    leave_waits_open(ctx, &mut draft, witness);
    draft.at = Some(ctx.op_ref(wait.group, wait.op.seq));
    draft
}

/// Doubts a finding on ranks that were themselves in an unfinished operation when another gave up.
fn leave_waits_open(ctx: &Context<'_>, draft: &mut FindingDraft, witness: &Recorded<'_>) {
    let waited = draft.culprits.iter().copied();
    let waited: Vec<Rank> = waited
        .filter(|&rank| wait_of(ctx, rank, witness).is_some())
        .collect();
    if waited.is_empty() {
        return;
    }
    draft.confidence = 0.5;
    if draft.culprits.len() > 1 {
        let each = draft.culprits.iter().map(|&rank| vec![rank]);
        draft.alternatives = each.take(16).collect();
    }
    draft.doubts.push(format!(
        "{} had another unfinished operation then, and the records do not show for whom it waited",
        format_ranks(&waited)
    ));
}

/// The E101 if no recorded operation timed out: the others waited for the start of the job or for its end, or the ring
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

/// E101 that blames no rank: ranks gave up at the start or at the end of the job, and named each other.
fn each_gave_up(ctx: &Context<'_>, witness: &Recorded<'_>, ranks: &[Rank]) -> FindingDraft {
    let sentence = format!(
        "rank {} gave up at {}{}; those that gave up name {}, and the records do not show which of these did not come",
        rank_of(ctx, witness),
        time_of_day(witness.at_ns),
        text(witness.failure),
        format_ranks(ranks),
    );
    let mut draft = FindingDraft::new(Code::E101, sentence);
    draft.next = format!(
        "look at the logs of {} and at the network between their hosts",
        format_ranks(ranks)
    );
    draft.alternatives = ranks.iter().take(16).map(|&rank| vec![rank]).collect();
    draft.confidence = 0.5;
    complete(ctx, &mut draft, witness);
    let nodes = ranks.iter().filter_map(|&rank| ctx.graph.node(rank));
    draft.targets.extend(nodes);
    draft
}

/// The end of a sentence: how long after the time-out the culprit issued the operation, or that its record does not
/// show the operation. Empty if the culprit issued it before, if the operation that timed out is not known, or if there
/// are several culprits or no record of the one.
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
        .map(|&position| ctx.aligned.op(record, position))
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
