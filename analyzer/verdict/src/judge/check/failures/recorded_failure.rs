//! E101, E135, E150 and E151 from failures that the runtime recorded, used if the waits alone show no cause.
//!
//! The survivors record that a rank is gone, even if that rank's record is lost. A rank that arrived after its peers
//! had given up has completed the operation, and only the peers' records name it. A program that aborted a group gave a
//! reason. The ranks that were named first are the cause: a rank that failed because it lost another is named later.

use super::exits::{how_they_ended, look_at_exit};
use super::timed_out::late;
use crate::align::RecordIx;
use crate::align::record::Op;
use crate::judge::check::Check;
use crate::judge::context::{Context, FindingDraft, OpRef};
use crate::judge::life::raised::{began_ns, is_exception, went_on};
use crate::judge::overcome::{continued, is_overcome};
use crate::judge::waits::wait_graph::Node;
use crate::report::format::{format_ranks, printable, time_of_day};
use crate::report::{Code, Finding, SeqKind};
use rcomm_recorder::model::{Failure, FailureKind, Rank};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

pub(crate) struct RecordedFailure;

impl Check for RecordedFailure {
    fn codes(&self) -> &'static [Code] {
        &[Code::E101, Code::E135, Code::E150, Code::E151]
    }

    fn run(&self, ctx: &Context<'_>, so_far: &[FindingDraft]) -> Vec<FindingDraft> {
        if so_far.iter().any(|draft| draft.is_root) {
            return Vec::new();
        }
        let recorded = recorded(ctx);
        let of_kind = |kind| -> Vec<Recorded<'_>> {
            let recorded = recorded.iter().copied();
            recorded
                .filter(|recorded| recorded.failure.kind == kind)
                .collect()
        };
        let given_up = given_up_ns(ctx, &recorded);
        let mut lost = of_kind(FailureKind::PeerGone);
        lost.retain(|recorded| !recorded.failure.text.contains(RUNS));
        let lost_after = lost.split_off(lost.partition_point(|recorded| recorded.at_ns < given_up));
        let mut timeouts = of_kind(FailureKind::Timeout);
        timeouts.retain(|timeout| !is_caught(ctx, timeout));
        // Ranks whose calls differ end, and their peers lose them.
        let mismatches = of_kind(FailureKind::Mismatch);
        let mismatch = mismatches.first().filter(|mismatch| {
            let mut others = lost.iter().chain(&timeouts);
            !lost.is_empty() && others.all(|other| mismatch.at_ns <= other.at_ns)
        });
        let draft = mismatch
            .map(|mismatch| mismatched(ctx, mismatch))
            .or_else(|| gone(ctx, &lost, &timeouts))
            .or_else(|| late(ctx, &timeouts))
            .or_else(|| aborted(ctx, &of_kind(FailureKind::Abort)))
            .or_else(|| gone(ctx, &lost_after, &timeouts))
            .or_else(|| errors(ctx, &of_kind(FailureKind::Backend)));
        draft.into_iter().collect()
    }
}

/// The runtime's words on a connection that broke while the process at its other end still answers. Such a failure is
/// no sign that the process is gone.
const RUNS: &str = "its process still runs";

/// A failure with the record that holds it.
#[derive(Clone, Copy)]
pub(super) struct Recorded<'a> {
    pub(super) record: usize,
    /// When the failure happened, common time, ns.
    pub(super) at_ns: i64,
    pub(super) failure: &'a Failure,
}

/// When the first rank gave up at a time-out that names others, or aborted a group, common time, ns; `i64::MAX` if none
/// did. Ranks that are lost later left because the first gave up. `recorded` is ordered by time.
fn given_up_ns(ctx: &Context<'_>, recorded: &[Recorded<'_>]) -> i64 {
    let mut found = recorded.iter();
    let first = found.find(|recorded| match recorded.failure.kind {
        FailureKind::Timeout => !recorded.failure.ranks.is_empty() && !is_caught(ctx, recorded),
        kind => kind == FailureKind::Abort,
    });
    first.map_or(i64::MAX, |recorded| recorded.at_ns)
}

/// Whether ranks gave up before this common time, ns: at a time-out that names others, or by an abort.
pub(super) fn gave_up_before(ctx: &Context<'_>, at_ns: i64) -> bool {
    given_up_ns(ctx, &recorded(ctx)) < at_ns
}

/// Whether the program of a rank that recorded a failure caught the error and continued.
fn is_caught(ctx: &Context<'_>, recorded: &Recorded<'_>) -> bool {
    continued(ctx.aligned, recorded.record, recorded.failure.time_ns) || raised_later(ctx, recorded)
}

/// Whether the process of a rank lived on after a recorded failure, which left its program by no exception then, and the
/// program of some rank ended so long after it, by an exception, that the failure is not the reason.
fn raised_later(ctx: &Context<'_>, recorded: &Recorded<'_>) -> bool {
    const LATER_NS: i64 = 1_000_000_000;
    let aligned = ctx.aligned;
    let later_ns = recorded.at_ns.saturating_add(LATER_NS);
    let raised_ns = |record: RecordIx| {
        let raised = ctx.raised(record).is_some_and(is_exception);
        began_ns(aligned, record).filter(|_| raised && !went_on(&aligned.records[record]))
    };
    let to_common = |record: RecordIx, ns: i64| ns.saturating_sub(aligned.offsets_ns[record]);
    let own = recorded.record;
    let lived_on = to_common(own, aligned.records[own].latest_ns()) >= later_ns
        && raised_ns(own).is_none_or(|at_ns| at_ns >= later_ns);
    let mut records = 0..aligned.records.len();
    lived_on
        && records.any(|record| {
            let mut failed = aligned.records[record].ops.iter().filter_map(Op::failed_ns);
            raised_ns(record).is_some_and(|at_ns| at_ns >= later_ns)
                && !failed.any(|failed_ns| to_common(record, failed_ns) >= later_ns)
        })
}

/// A sentence on the first of the [`lasting`] failures, settled or not; `None` if there are none. That a group was
/// closed is no failure.
pub(crate) fn first_recorded_failure(ctx: &Context<'_>) -> Option<String> {
    let found = lasting(ctx).into_iter();
    let first = found
        .filter(|recorded| recorded.failure.kind != FailureKind::Cancelled)
        .min_by_key(|recorded| (recorded.at_ns, ctx.aligned.records[recorded.record].rank))?;
    Some(format!(
        "rank {} recorded an error{} at {}{}; nothing that is recorded waits because of it",
        ctx.aligned.records[first.record].rank,
        inside(ctx, &first),
        time_of_day(first.at_ns),
        text(first.failure),
    ))
}

/// All recorded failures that are settled, not overcome, and do not follow from the end that the launcher or each
/// process was asked for, ordered by time.
fn recorded<'a>(ctx: &'a Context<'_>) -> Vec<Recorded<'a>> {
    let mut found = lasting(ctx);
    found.retain(|recorded| ctx.life.is_settled(recorded.at_ns));
    found.sort_by_key(|recorded| {
        (
            recorded.at_ns,
            ctx.aligned.records[recorded.record].rank,
            recorded.failure.id,
        )
    });
    found
}

/// All recorded failures that are not overcome and do not follow from the end that the launcher or each process was
/// asked for.
fn lasting<'a>(ctx: &'a Context<'_>) -> Vec<Recorded<'a>> {
    let mut found: Vec<Recorded<'a>> = Vec::new();
    // While the job continues in other groups, no rank waits because of the failure.
    let overdue_ns = i64::try_from(ctx.policy.overdue.as_nanos()).unwrap_or(i64::MAX);
    let now = ctx.life.end.is_none().then(|| ctx.as_of_ns()).flatten();
    let now = now.filter(|_| ctx.policy.snapshot);
    let recent_ns = now.map(|now| now.saturating_sub(overdue_ns));
    for (record, full_record) in ctx.aligned.records.iter().enumerate() {
        let offset = ctx.aligned.offsets_ns[record];
        let failures = full_record.failures.iter();
        let open = failures.filter(|failure| !is_overcome(ctx.aligned, record, failure, recent_ns));
        found.extend(open.map(|failure| Recorded {
            record,
            at_ns: failure.time_ns.saturating_sub(offset),
            failure,
        }));
    }
    found.retain(|recorded| !follows_from_the_end(ctx, recorded));
    found
}

/// Whether a failure follows from the signal by which the launcher or each process was asked to end. A program that
/// raises `KeyboardInterrupt` aborts its group, and its peers lose it. A time-out does not follow from it if its
/// operation was already overdue when the signal came.
fn follows_from_the_end(ctx: &Context<'_>, recorded: &Recorded<'_>) -> bool {
    if !ctx.life.is_being_ended(recorded.at_ns) {
        return false;
    }
    let operation =
        operation(ctx, recorded).filter(|_| recorded.failure.kind == FailureKind::Timeout);
    operation.is_none_or(|(_, op)| {
        let issued = ctx.aligned.created_ns(recorded.record, op);
        let age = ctx.life.asked_ns().saturating_sub(issued);
        let age = Duration::from_nanos(u64::try_from(age).unwrap_or(0));
        age < ctx
            .policy
            .overdue_after(ctx.aligned.shared.calls.get(op.call).timeout_ms)
    })
}

/// E150: peers that survivors lost. The culprits are the lost ranks that did not lose a peer themselves; if each did,
/// the ranks that the first failure names. A rank with one of these time-outs gave up because of another, and then
/// left. `None` without failures, or if all that were lost had given up.
fn gone(
    ctx: &Context<'_>,
    failures: &[Recorded<'_>],
    timeouts: &[Recorded<'_>],
) -> Option<FindingDraft> {
    let named: BTreeSet<Rank> = failures
        .iter()
        .flat_map(|recorded| &recorded.failure.ranks)
        .copied()
        .collect();
    let rank_of = |recorded: &Recorded<'_>| ctx.aligned.records[recorded.record].rank;
    let suffered: BTreeSet<Rank> = failures.iter().map(rank_of).collect();
    let lost_none: Vec<Rank> = named.difference(&suffered).copied().collect();
    // If each lost rank lost another, the first failure is closest to the cause.
    let culprits = match lost_none.is_empty() {
        true => failures.first()?.failure.ranks.clone(),
        false => lost_none,
    };
    let given_up: BTreeSet<Rank> = timeouts.iter().map(rank_of).collect();
    let culprits: Vec<Rank> = culprits
        .into_iter()
        .filter(|rank| !given_up.contains(rank))
        .collect();
    let (culprits, later) = lost_first(ctx, failures, culprits);
    let about = |recorded: &&Recorded<'_>| {
        recorded
            .failure
            .ranks
            .iter()
            .any(|rank| culprits.contains(rank))
    };
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
    if !later.is_empty() {
        draft.confidence = 0.8;
        draft.doubts.push(format!(
            "{} went later, and no record shows how: a rank that has lost another leaves too",
            format_ranks(&later)
        ));
    }
    leave_open(ctx, &mut draft);
    leave_order_open(ctx, &mut draft);
    draft
        .ruled_out
        .push("missing_dump: the survivors recorded that its process was gone".to_owned());
    Some(draft)
}

/// Losses that are recorded within this time are of one cause, ns: a process that has lost another takes longer to end.
const AT_ONCE_NS: i64 = 50_000_000;
/// Losses that end one operation are of one cause if they are recorded within this time, ns.
const IN_ONE_OPERATION_NS: i64 = 1_000_000_000;

/// Divides lost ranks into those that were lost first or whose record ends with their process, and those that may have
/// ended because they had lost another. Survivors name the latter, too; their records end before their processes do, or
/// are lost.
fn lost_first(
    ctx: &Context<'_>,
    failures: &[Recorded<'_>],
    lost: Vec<Rank>,
) -> (Vec<Rank>, Vec<Rank>) {
    let names = |recorded: &Recorded<'_>, rank: &Rank| recorded.failure.ranks.contains(rank);
    let names_one = |recorded: &&Recorded<'_>| lost.iter().any(|rank| names(recorded, rank));
    let Some(first) = failures.iter().find(names_one) else {
        return (lost, Vec::new());
    };
    let place_of = |recorded: &Recorded<'_>| {
        let (group, op) = operation(ctx, recorded)?;
        Some((group, op.seq, op.p2p_seq))
    };
    let first_place = place_of(first);
    let is_at_once = |recorded: &Recorded<'_>| {
        let after_ns = recorded.at_ns.saturating_sub(first.at_ns);
        let is_in_one = || first_place.is_some() && place_of(recorded) == first_place;
        after_ns < AT_ONCE_NS || after_ns < IN_ONE_OPERATION_NS && is_in_one()
    };
    let ends_with_process = |rank: &Rank| {
        let mut records = ctx.aligned.records_of(*rank);
        records.any(|record| ctx.aligned.records[record].died())
    };
    let is_first = |rank: &Rank| {
        let mut about = failures.iter().filter(|recorded| names(recorded, rank));
        ends_with_process(rank) || about.any(is_at_once)
    };
    lost.iter().copied().partition(is_first)
}

/// The other ranks that left no record. Empty if one of `ranks` left one.
pub(super) fn unread_besides(ctx: &Context<'_>, ranks: &[Rank]) -> Vec<Rank> {
    let is_unread = |rank: &Rank| ctx.aligned.record_of(*rank).is_none();
    if !ranks.iter().all(is_unread) {
        return Vec::new();
    }
    let known: BTreeSet<&Rank> = ranks.iter().collect();
    let expected = ctx.aligned.expected.iter().copied();
    expected
        .filter(|rank| is_unread(rank) && !known.contains(rank))
        .collect()
}

/// Blames no rank if no culprit left a record, and other ranks left none, either. A rank that loses a peer ends, so one
/// of the other ranks may have ended before the culprit.
fn leave_open(ctx: &Context<'_>, draft: &mut FindingDraft) {
    let others = unread_besides(ctx, &draft.culprits);
    if others.is_empty() {
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

/// Makes alternatives of the ranks of which one ended first; if only one rank may have, adds a doubt only. Culprits
/// that are not among these ranks are blamed no more. Of several culprits that are, none is blamed if there are
/// alternatives.
fn leave_order_open(ctx: &Context<'_>, draft: &mut FindingDraft) {
    let possible = ctx.life.possible();
    if possible.is_empty() || !draft.alternatives.is_empty() {
        return;
    }
    draft.confidence = draft.confidence.min(0.5);
    draft
        .culprits
        .retain(|rank| possible.binary_search(rank).is_ok());
    if let [only] = possible {
        draft.doubts.push(format!(
            "the records do not show that others lived on long after they had lost rank {only}: one signal may have ended \
             all processes"
        ));
        return;
    }
    draft.doubts.push(format!(
        "the records do not show which of {} ended first: one signal may have ended them all, or a launcher some \
         because of another",
        format_ranks(possible)
    ));
    draft.alternatives = possible.iter().take(16).map(|&rank| vec![rank]).collect();
    if draft.culprits.len() > 1 {
        draft.culprits.clear();
    }
}

/// E150: a rank found that its call and those of others differ, and the records do not hold both calls. Blames none of
/// them.
fn mismatched(ctx: &Context<'_>, first: &Recorded<'_>) -> FindingDraft {
    let rank = first.failure.seen_by;
    let others = first.failure.ranks.iter().copied();
    let others: Vec<Rank> = others.filter(|other| *other != rank).collect();
    let with = match others.as_slice() {
        [] => "those of other ranks".to_owned(),
        [other] => format!("that of rank {other}"),
        others => format!("those of {}", format_ranks(others)),
    };
    let sentence = format!(
        "rank {rank} recorded that its call differs from {with}{} at {}{}; which of them is wrong is not known",
        inside(ctx, first),
        time_of_day(first.at_ns),
        text(first.failure),
    );
    let mut draft = recorded_error(ctx, first, Vec::new(), sentence);
    let sides = std::iter::once(rank).chain(others).take(16);
    draft.alternatives = sides.map(|side| vec![side]).collect();
    draft.confidence = 0.5;
    draft.next = format!("compare the calls: the error in the log of rank {rank} has both");
    draft
}

/// E150: the first program that aborted its group; `None` without failures.
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

/// E150: the first error that a backend reported on a rank. If ranks were given different world sizes, the finding is
/// about the sizes. `None` without failures.
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
        let rank_count = |nth: usize| self.0.iter().rev().nth(nth).map(|(_, ranks)| ranks.len());
        let others = &self.0[..self.0.len() - 1];
        if rank_count(0) > rank_count(1) {
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

/// E150 with this sentence on the ranks whose log has the error of a failure.
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

/// The end of a sentence: the text of a failure, after a colon. Empty if the failure has no text.
pub(super) fn text(failure: &Failure) -> String {
    match failure.text.as_str() {
        "" => String::new(),
        text => format!(": {}", printable(text)),
    }
}

/// The operation that a failure ended, with its group; `None` if no record of the process holds it.
pub(super) fn operation<'a>(
    ctx: &'a Context<'_>,
    recorded: &Recorded<'_>,
) -> Option<(usize, &'a Op)> {
    let failed = recorded.failure.operation?;
    let full_record = &ctx.aligned.records[recorded.record];
    let op = full_record.operation(failed.record_id)?;
    let group = ctx.aligned.lanes[recorded.record]
        .get(usize::from(op.group))?
        .group;
    Some((group, op))
}

/// A part of a sentence, like ` in all_reduce #5 on group dp`; empty if the operation is not recorded.
fn inside(ctx: &Context<'_>, recorded: &Recorded<'_>) -> String {
    operation(ctx, recorded).map_or(String::new(), |(_, op)| {
        format!(" in {}", ctx.describe_op(recorded.record, op))
    })
}

/// Adds the targets, which are the culprits and the place of the failed operation, and makes the finding one about that
/// operation. If the operation is not recorded, adds the culprits only.
pub(super) fn complete(ctx: &Context<'_>, draft: &mut FindingDraft, witness: &Recorded<'_>) {
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
