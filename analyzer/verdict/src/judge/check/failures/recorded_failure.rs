//! E101 and E150 from failures that the runtime recorded, used if the waits alone show no cause.
//!
//! The survivors record that a rank is gone, even if its own record is lost. A rank that arrived after its peers had
//! given up has completed its operation, and only their records name it. A program that aborted a group gave a reason.
//! The ranks that were named first are the cause: a rank that failed because it lost another is named by its own peers
//! later.

use super::rank_failed::{how_they_ended, look_at_exit};
use crate::align::Presence;
use crate::align::record::Op;
use crate::judge::check::Check;
use crate::judge::context::{Context, FindingDraft, OpRef};
use crate::judge::overcome::is_overcome;
use crate::judge::waits::wait_graph::Node;
use crate::report::format::{format_ranks, format_time, printable, time_of_day};
use crate::report::{Code, Finding, SeqKind};
use rcomm_recorder::model::{Failure, FailureKind, Rank};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

pub(crate) struct RecordedFailure;

impl Check for RecordedFailure {
    fn codes(&self) -> &'static [Code] {
        &[Code::E101, Code::E150]
    }

    fn run(&self, ctx: &Context<'_>, so_far: &[FindingDraft]) -> Vec<FindingDraft> {
        if so_far.iter().any(|draft| draft.is_root) {
            return Vec::new();
        }
        let recorded = recorded(ctx);
        let of = |kind| -> Vec<Recorded<'_>> {
            let some = recorded.iter().copied();
            some.filter(|one| one.failure.kind == kind).collect()
        };
        let given_up = given_up_ns(&recorded);
        let mut lost = of(FailureKind::PeerGone);
        let after = lost.split_off(lost.partition_point(|one| one.at_ns < given_up));
        let draft = gone(ctx, &lost)
            .or_else(|| late(ctx, &of(FailureKind::Timeout)))
            .or_else(|| aborted(ctx, &of(FailureKind::Abort)))
            .or_else(|| gone(ctx, &after))
            .or_else(|| errors(ctx, &of(FailureKind::Backend)));
        draft.into_iter().collect()
    }
}

/// A failure with the record that holds it.
#[derive(Clone, Copy)]
struct Recorded<'a> {
    record: usize,
    /// When it happened, common time, ns.
    at_ns: i64,
    failure: &'a Failure,
}

/// When the first rank gave up at a time-out or aborted a group, common time, ns; `i64::MAX` if none did. Ranks that
/// are lost later left because the first gave up.
fn given_up_ns(recorded: &[Recorded<'_>]) -> i64 {
    let mut all = recorded.iter();
    let first = all.find(|one| match one.failure.kind {
        FailureKind::Timeout => !one.failure.ranks.is_empty(),
        kind => kind == FailureKind::Abort,
    });
    first.map_or(i64::MAX, |one| one.at_ns)
}

/// Whether ranks gave up before this common time, ns: at a time-out that names others, or by an abort.
pub(super) fn gave_up_before(ctx: &Context<'_>, at_ns: i64) -> bool {
    given_up_ns(&recorded(ctx)) < at_ns
}

/// The first failure that a rank recorded and has not overcome, in one sentence, whether it is settled or not. That a
/// group was closed is no failure.
pub(crate) fn first_recorded_failure(ctx: &Context<'_>) -> Option<String> {
    let all = lasting(ctx).into_iter();
    let first = all
        .filter(|one| one.failure.kind != FailureKind::Cancelled)
        .min_by_key(|one| (one.at_ns, ctx.aligned.records[one.record].rank))?;
    Some(format!(
        "rank {} recorded an error{} at {}{}; nothing that is recorded waits because of it",
        ctx.aligned.records[first.record].rank,
        inside(ctx, &first),
        time_of_day(first.at_ns),
        text(first.failure),
    ))
}

/// All recorded failures that are settled, not overcome, and do not follow from the end that the launcher was asked
/// for, ordered by time.
fn recorded<'a>(ctx: &'a Context<'_>) -> Vec<Recorded<'a>> {
    let mut all = lasting(ctx);
    all.retain(|one| ctx.life.is_settled(one.at_ns));
    all.sort_by_key(|one| {
        (
            one.at_ns,
            ctx.aligned.records[one.record].rank,
            one.failure.id,
        )
    });
    all
}

/// All recorded failures that are not overcome and do not follow from the end that the launcher was asked for.
fn lasting<'a>(ctx: &'a Context<'_>) -> Vec<Recorded<'a>> {
    let mut all: Vec<Recorded<'a>> = Vec::new();
    // While the job goes on in other groups, no rank waits because of the failure.
    let overdue_ns = i64::try_from(ctx.policy.overdue.as_nanos()).unwrap_or(i64::MAX);
    let now = ctx.life.end.is_none().then(|| ctx.as_of_ns()).flatten();
    let now = now.filter(|_| ctx.policy.snapshot);
    let recent_ns = now.map(|now| now.saturating_sub(overdue_ns));
    for (record, whole) in ctx.aligned.records.iter().enumerate() {
        let offset = ctx.aligned.offsets_ns[record];
        let failures = whole.failures.iter();
        let open = failures.filter(|failure| !is_overcome(ctx.aligned, record, failure, recent_ns));
        all.extend(open.map(|failure| Recorded {
            record,
            at_ns: failure.time_ns.saturating_sub(offset),
            failure,
        }));
    }
    all.retain(|one| !follows_from_the_end(ctx, one));
    all
}

/// Whether a failure follows from the signal by which the launcher was asked to end the job: a program that raises
/// `KeyboardInterrupt` aborts its group, and its peers lose it. A time-out does not follow from it if its operation was
/// already overdue when the signal came.
fn follows_from_the_end(ctx: &Context<'_>, one: &Recorded<'_>) -> bool {
    if !ctx.life.is_being_ended(one.at_ns) {
        return false;
    }
    let operation = operation(ctx, one).filter(|_| one.failure.kind == FailureKind::Timeout);
    operation.is_none_or(|(_, op)| {
        let issued = ctx.aligned.created_ns(one.record, op);
        let age = ctx.life.asked_ns().saturating_sub(issued);
        let age = Duration::from_nanos(u64::try_from(age).unwrap_or(0));
        age < ctx
            .policy
            .overdue_after(ctx.aligned.shared.calls.get(op.call).timeout_ms)
    })
}

/// E150: peers that survivors lost. The culprits are the lost ranks that did not lose a peer themselves.
fn gone(ctx: &Context<'_>, failures: &[Recorded<'_>]) -> Option<FindingDraft> {
    let named: BTreeSet<Rank> = failures
        .iter()
        .flat_map(|one| &one.failure.ranks)
        .copied()
        .collect();
    let rank_of = |one: &Recorded<'_>| ctx.aligned.records[one.record].rank;
    let suffered: BTreeSet<Rank> = failures.iter().map(rank_of).collect();
    let lost_none: Vec<Rank> = named.difference(&suffered).copied().collect();
    // If each of them lost another, the first report is closest to the cause.
    let culprits = match lost_none.is_empty() {
        true => failures.first()?.failure.ranks.clone(),
        false => lost_none,
    };
    let about = |one: &&Recorded<'_>| one.failure.ranks.iter().any(|rank| culprits.contains(rank));
    let witnesses: BTreeSet<Rank> = failures.iter().filter(about).map(rank_of).collect();
    let witness = failures.iter().find(about)?;
    let witnesses: Vec<Rank> = witnesses.into_iter().collect();
    let detail = format!(
        ": {} lost {}{} at {}{}",
        format_ranks(&witnesses),
        if culprits.len() == 1 { "it" } else { "them" },
        inside(ctx, witness),
        time_of_day(witness.at_ns),
        how_they_ended(ctx, &culprits),
    );
    let mut draft = FindingDraft::from(Finding::process_gone(culprits, &detail));
    look_at_exit(ctx, &mut draft);
    draft.confidence = if suffered.len() > 1 { 0.9 } else { 0.8 };
    complete(ctx, &mut draft, witness);
    leave_open(ctx, &mut draft);
    draft
        .ruled_out
        .push("missing_dump: the survivors recorded that its process was gone".to_owned());
    Some(draft)
}

/// Blames no rank if all culprits left no record and other ranks did not either: a rank that loses a peer ends, so one
/// of the others may have gone before.
fn leave_open(ctx: &Context<'_>, draft: &mut FindingDraft) {
    let is_unread = |rank: &Rank| ctx.aligned.record_of(*rank).is_none();
    let expected = ctx.aligned.expected.iter().copied();
    let others: Vec<Rank> = expected
        .filter(|rank| is_unread(rank) && !draft.culprits.contains(rank))
        .collect();
    if others.is_empty() || !draft.culprits.iter().all(is_unread) {
        return;
    }
    draft.doubts.push(format!(
        "{} left no record, either: one of them may have gone before",
        format_ranks(&others)
    ));
    let lost = std::mem::take(&mut draft.culprits);
    let others = others.into_iter().take(16).map(|rank| vec![rank]);
    draft.alternatives = std::iter::once(lost).chain(others).collect();
    draft.confidence = 0.5;
}

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
fn late(ctx: &Context<'_>, failures: &[Recorded<'_>]) -> Option<FindingDraft> {
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

/// E150: a program that aborted the group.
fn aborted(ctx: &Context<'_>, failures: &[Recorded<'_>]) -> Option<FindingDraft> {
    let first = failures.first()?;
    let culprits = match first.failure.ranks.is_empty() {
        true => vec![first.failure.seen_by],
        false => first.failure.ranks.clone(),
    };
    let sentence = format!(
        "the program of {} aborted its group at {}{}",
        format_ranks(&culprits),
        time_of_day(first.at_ns),
        text(first.failure),
    );
    Some(recorded_error(ctx, first, culprits, sentence))
}

/// E150: an error that the backend reported on a rank.
fn errors(ctx: &Context<'_>, failures: &[Recorded<'_>]) -> Option<FindingDraft> {
    let first = failures.first()?;
    if let Some(sizes) = differing_sizes(ctx) {
        return Some(sizes.blame(ctx, first));
    }
    let rank = first.failure.seen_by;
    let sentence = format!(
        "rank {rank} recorded an error{} at {}{}",
        inside(ctx, first),
        time_of_day(first.at_ns),
        text(first.failure),
    );
    Some(recorded_error(ctx, first, vec![rank], sentence))
}

/// The ranks by the world size that they were given, the size of most ranks last.
struct WorldSizes(Vec<(u32, Vec<Rank>)>);

/// The world sizes of a job whose ranks were given different ones; `None` if they agree.
fn differing_sizes(ctx: &Context<'_>) -> Option<WorldSizes> {
    let mut sizes: BTreeMap<u32, BTreeSet<Rank>> = BTreeMap::new();
    for record in ctx.aligned.records {
        if let Some(size) = record.identity.world_size {
            sizes.entry(size).or_default().insert(record.rank);
        }
    }
    let mut sizes: Vec<(u32, Vec<Rank>)> = sizes
        .into_iter()
        .map(|(size, ranks)| (size, ranks.into_iter().collect()))
        .collect();
    sizes.sort_by_key(|(_, ranks)| ranks.len());
    (sizes.len() > 1).then_some(WorldSizes(sizes))
}

impl WorldSizes {
    /// E150: blames the ranks whose size is not that of most; no rank if no size is that of most.
    fn blame(&self, ctx: &Context<'_>, first: &Recorded<'_>) -> FindingDraft {
        let each = self.0.iter();
        let given: Vec<String> = each
            .map(|(size, ranks)| format!("{} a world size of {size}", format_ranks(ranks)))
            .collect();
        let sentence = format!(
            "the ranks were given different world sizes: {}",
            given.join(", ")
        );
        let number = |at: usize| self.0.iter().rev().nth(at).map(|(_, ranks)| ranks.len());
        let others = &self.0[..self.0.len() - 1];
        if number(0) > number(1) {
            let culprits = others.iter().flat_map(|(_, ranks)| ranks.clone());
            return recorded_error(ctx, first, culprits.collect(), sentence);
        }
        let mut draft = recorded_error(ctx, first, Vec::new(), sentence);
        draft.alternatives = self.0.iter().map(|(_, ranks)| ranks.clone()).collect();
        draft.next = "compare the world sizes that the launchers were given".to_owned();
        draft.confidence = 0.5;
        draft
    }
}

fn recorded_error(
    ctx: &Context<'_>,
    first: &Recorded<'_>,
    culprits: Vec<Rank>,
    sentence: String,
) -> FindingDraft {
    let mut draft = FindingDraft::from(Finding::rank_failed(culprits, sentence));
    draft.confidence = 0.9;
    draft.next = format!("read the log of {}", format_ranks(&draft.culprits));
    complete(ctx, &mut draft, first);
    draft
}

fn text(failure: &Failure) -> String {
    match failure.text.as_str() {
        "" => String::new(),
        text => format!(": {}", printable(text)),
    }
}

/// The operation that a failure ended, with its group; `None` if no record of the process holds it.
fn operation<'a>(ctx: &'a Context<'_>, one: &Recorded<'_>) -> Option<(usize, &'a Op)> {
    let failed = one.failure.operation?;
    let whole = &ctx.aligned.records[one.record];
    let op = whole.operation(failed.record_id)?;
    let group = ctx.aligned.lanes[one.record]
        .get(usize::from(op.group))?
        .group;
    Some((group, op))
}

/// A part of a sentence, like ` in all_reduce #5 on group dp`; empty if the operation is not recorded.
fn inside(ctx: &Context<'_>, one: &Recorded<'_>) -> String {
    operation(ctx, one).map_or(String::new(), |(_, op)| {
        format!(" in {}", ctx.describe_op(one.record, op))
    })
}

/// Adds the place of the failed operation, and the nodes whose waits are consequences.
fn complete(ctx: &Context<'_>, draft: &mut FindingDraft, witness: &Recorded<'_>) {
    let nodes: Vec<Node> = draft
        .culprits
        .iter()
        .filter_map(|&rank| ctx.graph.node(rank))
        .collect();
    draft.targets.extend(nodes);
    let Some((group, op)) = operation(ctx, witness) else {
        return;
    };
    let place = ctx.graph.collective(group, op.seq).filter(|_| !op.is_p2p);
    draft
        .targets
        .extend(place.map(|place| place + ctx.graph.ranks));
    let calls = &ctx.aligned.shared.calls;
    draft.at = Some(match op.is_p2p {
        true => OpRef {
            group,
            seq: u64::from(op.p2p_seq),
            kind: SeqKind::P2pSeqId,
            op: calls.get(op.call).op_name().to_owned(),
        },
        false => ctx.op_ref(group, op.seq),
    });
}
