//! E150: a rank failed by itself: its process is gone, or one of its operations ended with an error.
//!
//! A process that is gone left its ring behind, and others wait for operations that it will never issue. An operation
//! that fails at its time-out belongs to a victim, and when one rank dies, its peers' operations fail soon after. So a
//! recorded error counts against its rank only if it came long before the time-out and before every other rank's, and
//! nothing else explains why the others wait.

use super::exits::{doubt_early_end, how_they_ended, look_at_exit};
use super::hidden_sizes;
use super::recorded_failure::gave_up_before;
use crate::align::record::Op;
use crate::judge::check::Check;
use crate::judge::context::{Context, FindingDraft};
use crate::judge::life::harm::suffered_ns;
use crate::judge::life::{BEFORE_TIMEOUT, End, ending};
use crate::judge::policy::now_ns;
use crate::judge::waits::missed::first_missed;
use crate::judge::waits::wait_graph::{Missing, Node, Place};
use crate::judge::waits::wait_root::WaitRoot;
use crate::report::format::{count_ranks, format_ranks, format_time};
use crate::report::{Code, Finding};
use rcomm_recorder::model::{EntryState, Rank};
use std::collections::BTreeMap;

/// Reports ranks whose processes are gone and for which others wait: at a place that these ranks never reached, or
/// inside an operation that all members have reached.
pub(crate) struct ProcessGone;

impl Check for ProcessGone {
    fn codes(&self) -> &'static [Code] {
        &[Code::E150]
    }

    fn run(&self, ctx: &Context<'_>, so_far: &[FindingDraft]) -> Vec<FindingDraft> {
        let explained = |node: Node| so_far.iter().any(|draft| draft.targets.contains(&node));
        let mut drafts = Vec::new();
        // Ranks that are missed at one place, such as those of a host, share a finding.
        let mut missed: BTreeMap<usize, Vec<Node>> = BTreeMap::new();
        for wait_root in &ctx.wait_roots {
            match *wait_root {
                WaitRoot::Idle(node) if !explained(node) && gone_record(ctx, node).is_some() => {
                    if let Some((place, _)) = first_missed(ctx, node) {
                        missed.entry(place).or_default().push(node);
                    }
                }
                WaitRoot::Full(place) if !explained(place + ctx.graph.ranks) => {
                    drafts.extend(gone_inside(ctx, place));
                }
                _ => {}
            }
        }
        drafts.extend(
            missed
                .iter()
                .map(|(place, nodes)| gone_draft(ctx, *place, nodes)),
        );
        drafts
    }
}

/// The members whose processes ended first, at a place that all members have reached: without them no member finishes.
/// Empty if they are more than half of the members: these were killed together, because of the hang.
pub(crate) fn gone_members(ctx: &Context<'_>, place: usize) -> Vec<Node> {
    if !ctx.graph.missing[place].is_empty() {
        return Vec::new();
    }
    let inside = &ctx.graph.arrived[place];
    let is_gone = |&node: &Node| {
        let record = ctx.record_at(place, node);
        record.is_some_and(|record| ctx.went_first(record))
    };
    let gone: Vec<Node> = inside.iter().copied().filter(is_gone).collect();
    match gone.len() * 2 > inside.len() {
        true => Vec::new(),
        false => gone,
    }
}

/// The finding on the [members that are gone](gone_members) from a place that all members have reached. `None` if there
/// are none.
fn gone_inside(ctx: &Context<'_>, place: usize) -> Option<FindingDraft> {
    let inside = &ctx.graph.arrived[place];
    let record = |node: Node| ctx.record_at(place, node);
    let gone = gone_members(ctx, place);
    if gone.is_empty() {
        return None;
    }
    let op_ref = ctx.op_ref_of_place(place);
    let others: Vec<Node> = inside
        .iter()
        .copied()
        .filter(|node| !gone.contains(node))
        .collect();
    let culprits = ctx.ranks(&gone);
    let (one, several) =
        match ctx.life.end.is_some() || others.iter().any(|&other| has_left(ctx, other)) {
            true => ("was inside, too", "were inside, too"),
            false => ("is still there", "are still there"),
        };
    let targets = [&gone[..], &[place + ctx.graph.ranks]].concat();
    let detail = format!(
        ": {} ended inside {} #{} on group {}{}; {}{}",
        if culprits.len() == 1 { "it" } else { "they" },
        op_ref.op,
        op_ref.seq,
        ctx.group_name(op_ref.group),
        how_they_ended(ctx, &culprits),
        count_ranks(others.len(), one, several),
        ctx.waiting_in_all(&targets, others.len()),
    );
    let mut draft = FindingDraft::from(Finding::process_gone(culprits, &detail));
    look_at_exit(ctx, &mut draft);
    draft.evidence = gone
        .iter()
        .take(3)
        .filter_map(|&node| match ctx.graph.places[place] {
            Place::Collective { group, seq } => ctx.evidence_of(node, group, seq),
            Place::Batch { .. } => None,
        })
        .collect();
    for index in gone.iter().filter_map(|&node| record(node)).take(3) {
        if let Some(op) = ctx.last_op(index) {
            draft.frames.extend(ctx.frames_of(index, op, "last_seen"));
        }
    }
    draft
        .ruled_out
        .push("all_arrived_stuck: not every process that came is still there".to_owned());
    draft.targets = gone;
    draft.targets.push(place + ctx.graph.ranks);
    draft.at = Some(op_ref);
    if let Place::Collective { group, seq } = ctx.graph.places[place] {
        hidden_sizes::leave_end_open(ctx, group, seq, &mut draft);
    }
    Some(draft)
}

/// Whether every unfinished operation of a rank has failed, if it has any: the rank is in none of them any more.
fn has_left(ctx: &Context<'_>, node: Node) -> bool {
    ctx.wait_or_waited(&[node]) == "waited"
}

/// The record of a rank whose process ended first ([`Context::went_first`]); `None` for other ranks.
fn gone_record(ctx: &Context<'_>, node: Node) -> Option<usize> {
    let mut records = ctx.aligned.records_of(ctx.rank(node));
    records.find(|&record| ctx.went_first(record))
}

/// A wait is stated with its time if it lasted at least this long, ms.
const MIN_STATED_MS: f64 = 100.0;

/// The finding on ranks whose processes are gone, and that others miss at this place.
fn gone_draft(ctx: &Context<'_>, place: usize, nodes: &[Node]) -> FindingDraft {
    let mut culprits = ctx.ranks(nodes);
    culprits.sort_unstable();
    let records = nodes.iter().filter_map(|&node| gone_record(ctx, node));
    let records: Vec<usize> = records.collect();
    let op_ref = ctx.op_ref_of_place(place);
    let arrived = ctx.graph.arrived[place].len();
    // A shorter wait shows nothing: that the rank is missing is known from the end of its process.
    let waited = ctx.waited_ms(place).filter(|&ms| ms >= MIN_STATED_MS);
    let waited = waited.map(format_time);
    let waiting = match (&ctx.life.end, waited) {
        (Some(_), Some(time)) => count_ranks(
            arrived,
            &format!("waited for {time}"),
            &format!("waited for {time}"),
        ),
        (Some(_), None) => count_ranks(arrived, "waited", "waited"),
        (None, None) if ctx.gave_up_ns(place).is_some() => {
            count_ranks(arrived, "waited until it failed", "waited until it failed")
        }
        (None, None) => count_ranks(arrived, "waits", "wait"),
        (None, Some(_)) => count_ranks(
            arrived,
            &ctx.waiting(place, false),
            &ctx.waiting(place, true),
        ),
    };
    let verb = match ctx.graph.places[place] {
        Place::Collective { .. } => "never issued",
        Place::Batch { .. } => "never answered",
    };
    let last_seen = match records.as_slice() {
        [record] => format!("; {}", ctx.last_seen(*record)),
        _ => String::new(),
    };
    let detail = format!(
        "{}: {} {verb} {} #{} on group {}, where {waiting}{last_seen}{}",
        ctx.whole_host(&records),
        if culprits.len() == 1 { "it" } else { "they" },
        op_ref.op,
        op_ref.seq,
        ctx.group_name(op_ref.group),
        how_they_ended(ctx, &culprits),
    );
    let mut draft = FindingDraft::from(Finding::process_gone(culprits, &detail));
    look_at_exit(ctx, &mut draft);
    draft.age_ms = ctx.waits_ms(place);
    draft.confidence = 0.97;
    doubt_early_end(ctx, place, &mut draft);
    draft.evidence = ctx.evidence_of_place(place, 2);
    for &record in records.iter().take(3) {
        draft
            .evidence
            .extend(ctx.evidence_of_newest(record, op_ref.group));
        if let Some(op) = ctx.last_op(record) {
            draft.frames.extend(ctx.frames_of(record, op, "last_seen"));
        }
    }
    draft
        .ruled_out
        .push("not_joined: a dead process cannot come late".to_owned());
    draft.targets = nodes.to_vec();
    draft.at = Some(op_ref);
    draft
}

/// Reports processes that are gone although no other rank waits for them ([`is_noticed`]).
pub(crate) struct UnmissedProcessGone;

impl Check for UnmissedProcessGone {
    fn codes(&self) -> &'static [Code] {
        &[Code::E150]
    }

    fn run(&self, ctx: &Context<'_>, so_far: &[FindingDraft]) -> Vec<FindingDraft> {
        let explained = so_far.iter().any(|draft| draft.is_root);
        // If the job was stuck before it ended, or ranks ended after they had given up, the cause is in the finding on
        // the hang.
        let after = |end: &End| {
            explained
                || gave_up_before(ctx, end.first_ns)
                // No rank is at fault for what ended the program on all.
                || ending::common_exception(ctx).is_some()
                || ending::all_ended_themselves(ctx)
        };
        if ctx.life.end.as_ref().is_some_and(after) {
            return Vec::new();
        }
        let accused = |rank: Rank| so_far.iter().any(|draft| draft.culprits.contains(&rank));
        let mut gone: Vec<(Rank, usize)> = Vec::new();
        for (index, record) in ctx.aligned.records.iter().enumerate() {
            let known = gone.iter().any(|&(rank, _)| rank == record.rank);
            if !known && !accused(record.rank) && is_noticed(ctx, index) {
                gone.push((record.rank, index));
            }
        }
        if gone.is_empty() {
            return Vec::new();
        }
        gone.sort_unstable();
        // A process that ended because its operation failed had waited in it for the rank that is missing there.
        let waited = |node: Node| {
            let mut places = 0..ctx.graph.places.len();
            places.any(|place| {
                ctx.graph.arrived[place].contains(&node) && !ctx.graph.missing[place].is_empty()
            })
        };
        let waits = |&(rank, _): &(Rank, usize)| {
            let node = ctx.graph.node(rank);
            node.is_some_and(|node| ctx.graph.waits(node) || waited(node))
        };
        let mut draft = unmissed_draft(ctx, &gone);
        draft.is_root = !(explained && gone.iter().all(waits));
        vec![draft]
    }
}

/// Whether the end of a record's process is worth a finding although no rank waits for it. The process ended first, and
/// it exited with an error or by a signal, the job is over, or the process was in an operation. Otherwise others must
/// have lived on for the threshold for overdue operations, since a job that is ending normally looks the same at first.
fn is_noticed(ctx: &Context<'_>, record: usize) -> bool {
    let full_record = &ctx.aligned.records[record];
    if !ctx.went_first(record) {
        return false;
    }
    let exit = ctx.life.gone(full_record.rank).and_then(|gone| gone.exit);
    let failed = exit.is_some_and(|exit| !exit.is_success());
    if failed || ctx.life.end.is_some() || unfinished(ctx, record).is_some() {
        return true;
    }
    let others_live = ctx.aligned.records.iter().any(|other| !other.died());
    let ended = full_record
        .latest_ns()
        .saturating_sub(ctx.aligned.offsets_ns[record]);
    let since = now_ns(ctx.aligned, ctx.policy).map(|now| now.saturating_sub(ended));
    let overdue = ctx.policy.overdue.as_nanos();
    others_live
        && since.is_some_and(|since| u128::try_from(since).is_ok_and(|since| since >= overdue))
}

/// The newest operation that a process was in when it ended; `None` if every operation had ended.
fn unfinished<'a>(ctx: &'a Context<'_>, record: usize) -> Option<&'a Op> {
    let mut ops = ctx.aligned.records[record].ops.iter().rev();
    ops.find(|op| !op.retired && op.state < EntryState::Completed)
}

/// The highest confidence on ranks that may have ended because of another: one of their operations failed.
const SUFFERED: f64 = 0.5;

/// The finding on processes that are gone and that no rank waits for: each a rank and its record.
fn unmissed_draft(ctx: &Context<'_>, gone: &[(Rank, usize)]) -> FindingDraft {
    let culprits: Vec<Rank> = gone.iter().map(|&(rank, _)| rank).collect();
    let inside = gone
        .iter()
        .find_map(|&(rank, record)| Some((rank, record, unfinished(ctx, record)?)));
    let detail = match (inside, culprits.len()) {
        (Some((_, record, op)), 1) => format!(": it was inside {}", ctx.describe_op(record, op)),
        (Some((rank, record, op)), _) => {
            format!("; rank {rank} was inside {}", ctx.describe_op(record, op))
        }
        (None, 1) if ctx.life.end.is_some() => {
            let phase = ctx.phase(gone[0].1);
            let phase = phase.map_or(String::new(), |phase| {
                format!(": it was in phase `{phase}`")
            });
            format!("{phase}; no operation of it was unfinished")
        }
        (None, _) if ctx.life.end.is_some() => "; no operation of theirs was unfinished".to_owned(),
        (None, _) if others_go_on(ctx, gone) => ", and the others go on".to_owned(),
        (None, _) => ", and the others have issued no operation since".to_owned(),
    };
    let detail = detail + &how_they_ended(ctx, &culprits);
    let mut draft = FindingDraft::from(Finding::process_gone(culprits, &detail));
    look_at_exit(ctx, &mut draft);
    draft.confidence = 0.95;
    let suffered = draft.culprits.iter().copied();
    let suffered: Vec<Rank> = suffered
        .filter(|&rank| suffered_ns(ctx.aligned, rank).is_some())
        .collect();
    if !suffered.is_empty() {
        draft.confidence = SUFFERED;
        draft.doubts.push(format!(
            "an operation of {} had failed before, and what made it fail may be the cause",
            format_ranks(&suffered)
        ));
    }
    if let Some((_, record, op)) = inside {
        draft.frames = ctx.frames_of(record, op, "last_seen");
    }
    let nodes = gone.iter().filter_map(|&(rank, _)| ctx.graph.node(rank));
    draft.targets = nodes.collect();
    if let Some((_, record, op)) = inside.filter(|(.., op)| !op.is_p2p) {
        let lane = &ctx.aligned.lanes[record][usize::from(op.group)];
        hidden_sizes::leave_end_open(ctx, lane.group, op.seq, &mut draft);
    }
    draft
}

/// Whether another rank has issued an operation since the last of these processes gave its last sign of life.
fn others_go_on(ctx: &Context<'_>, gone: &[(Rank, usize)]) -> bool {
    let aligned = ctx.aligned;
    let last_ns = gone
        .iter()
        .map(|&(_, record)| {
            let latest_ns = aligned.records[record].latest_ns();
            latest_ns.saturating_sub(aligned.offsets_ns[record])
        })
        .max();
    let is_gone = |rank: Rank| gone.iter().any(|&(other, _)| other == rank);
    (0..aligned.records.len()).any(|record| {
        let full_record = &aligned.records[record];
        let newest = full_record.ops.last();
        let issued_ns = newest.map(|op| aligned.created_ns(record, op));
        !is_gone(full_record.rank) && issued_ns.is_some_and(|at_ns| Some(at_ns) > last_ns)
    })
}

/// Reports the first operation that ended with an error long before its time-out, if no other finding is a root.
pub(crate) struct OperationFailed;

/// An error that follows the first by at most this, ns, may also be its cause: clocks and delays hide the order.
const TOGETHER_NS: i64 = 50_000_000;

/// One failed operation.
pub(crate) struct Failure {
    record: usize,
    position: u32,
    /// When it failed, common time, ns.
    at_ns: i64,
}

impl Check for OperationFailed {
    fn codes(&self) -> &'static [Code] {
        &[Code::E150]
    }

    fn run(&self, ctx: &Context<'_>, so_far: &[FindingDraft]) -> Vec<FindingDraft> {
        if so_far.iter().any(|draft| draft.is_root) {
            return Vec::new();
        }
        let mut failures: Vec<Failure> = (0..ctx.aligned.records.len())
            .filter_map(|record| first_failure(ctx, record))
            .filter(|failure| ctx.life.is_settled(failure.at_ns))
            .filter(|failure| !ctx.life.is_being_ended(failure.at_ns))
            .filter(|failure| !waited_for_a_rank(ctx, failure))
            .collect();
        failures.sort_by_key(|failure| (failure.at_ns, ctx.aligned.records[failure.record].rank));
        let Some(first) = failures.first() else {
            return Vec::new();
        };
        let together = failures
            .iter()
            .take_while(|other| other.at_ns - first.at_ns <= TOGETHER_NS);
        let ranks: Vec<Rank> = together
            .map(|failure| ctx.aligned.records[failure.record].rank)
            .collect();
        vec![failed_draft(ctx, first, &ranks, failures.len())]
    }
}

/// Whether a collective failed after a wait for a rank that is missing there: such a failure has its cause elsewhere.
/// False for a message.
fn waited_for_a_rank(ctx: &Context<'_>, failure: &Failure) -> bool {
    let rank = ctx.aligned.records[failure.record].rank;
    let op = ctx.aligned.op(failure.record, failure.position);
    let group = ctx.aligned.lanes[failure.record][usize::from(op.group)].group;
    let Some(place) = ctx.graph.collective(group, op.seq).filter(|_| !op.is_p2p) else {
        return false;
    };
    let absent = |&(_, why): &(Node, Missing)| why == Missing::Absent;
    let mut arrived = ctx.graph.arrived[place].iter();
    arrived.any(|&node| ctx.rank(node) == rank)
        && ctx.graph.missing[place].iter().any(absent)
        && !ctx.failed_at_once(place)
}

/// Of a record's unfinished operations that are overdue, the one that failed first. One that failed at or near its
/// time-out does not count; one without a time-out does. `None` if there is none.
pub(crate) fn first_failure(ctx: &Context<'_>, record: usize) -> Option<Failure> {
    let pending = ctx.graph.pending[record].iter().enumerate();
    pending
        .filter(|&(index, _)| ctx.graph.is_overdue(record, index))
        .map(|(_, pending)| {
            let position = pending.position;
            (position, ctx.aligned.op(record, position))
        })
        .filter(|(_, op)| op.state == EntryState::Failed)
        .filter_map(|(position, op)| {
            let limit_ms = ctx.aligned.limit_ms(record, op)?;
            let took = f64::from(op.wait_ms()?);
            let early = took < limit_ms * BEFORE_TIMEOUT;
            early.then(|| Failure {
                record,
                position,
                at_ns: ended_ns(ctx, record, op),
            })
        })
        .min_by_key(|failure| failure.at_ns)
}

/// When an operation ended, or, if that is not recorded, when it was issued; common time, ns.
fn ended_ns(ctx: &Context<'_>, record: usize, op: &Op) -> i64 {
    let by_host = op.completed_ns().unwrap_or(op.created_ns);
    by_host.saturating_sub(ctx.aligned.offsets_ns[record])
}

/// The finding on the first operation that failed. `together`: the ranks whose operations failed at about this time;
/// `failure_count`: the number of ranks whose operations failed at any time.
fn failed_draft(
    ctx: &Context<'_>,
    first: &Failure,
    together: &[Rank],
    failure_count: usize,
) -> FindingDraft {
    let op = ctx.aligned.op(first.record, first.position);
    let rank = ctx.aligned.records[first.record].rank;
    let lane = &ctx.aligned.lanes[first.record][usize::from(op.group)];
    let took = op.wait_ms().map_or(String::new(), |ms| {
        format!(" after {}", format_time(f64::from(ms)))
    });
    let op_ref = if op.kind.is_p2p() {
        ctx.op_ref_of_message(first.record, lane.group, first.position)
    } else {
        ctx.op_ref(lane.group, op.seq)
    };
    let who = match together {
        [_] => format!("rank {rank}"),
        many => format!("one of {}", format_ranks(many)),
    };
    let before = match ctx.aligned.shared.calls.get(op.call).timeout_ms {
        0 => "",
        _ => ", long before its time-out",
    };
    let is_place_of_failure = |place: &Place| match *place {
        Place::Collective { group, seq } => {
            !op.kind.is_p2p() && (group, seq) == (lane.group, op.seq)
        }
        Place::Batch {
            record, pending, ..
        } => {
            let mut halves = ctx.halves(record, pending).iter();
            record == first.record && halves.any(|half| half.position == first.position)
        }
    };
    let place = ctx.graph.places.iter().position(is_place_of_failure);
    let missing = place.map_or(&[][..], |place| &ctx.graph.missing[place]);
    let missing: Vec<Node> = missing.iter().map(|&(node, _)| node).collect();
    let who_came = match missing.as_slice() {
        [] => ", and no member was missing there".to_owned(),
        missing => format!(
            "; {} had not come there yet",
            format_ranks(&ctx.ranks(missing))
        ),
    };
    // A rank that recorded which others made its operation fail need not be at fault itself.
    let failure = ctx.failure_in(first.record, op);
    let mut named: Vec<Rank> = failure.map_or_else(Vec::new, |failure| failure.ranks.clone());
    named.retain(|other| !together.contains(other));
    let recorded = match named.as_slice() {
        [] => String::new(),
        named => format!(
            "; the error that rank {rank} recorded names {}",
            format_ranks(named)
        ),
    };
    let sentence = format!(
        "{} failed on {who}{took}{before}{who_came}{recorded}",
        ctx.describe_op(first.record, op)
    );
    let culprits = match (together, named.is_empty()) {
        ([only], true) => vec![*only],
        _ => Vec::new(),
    };
    let is_named = !culprits.is_empty();
    let mut draft = FindingDraft::from(Finding::rank_failed(culprits, sentence));
    if is_named {
        draft.confidence = if failure_count == 1 { 0.8 } else { 0.6 };
    } else {
        // However many failed together, some of the named ranks are among the alternatives.
        let failed = together.iter().take(16 - named.len().min(8));
        let possible = failed.chain(&named).take(16);
        draft.alternatives = possible.map(|&rank| vec![rank]).collect();
        draft.confidence = 0.4;
    }
    draft
        .evidence
        .push(ctx.evidence(first.record, first.position, lane.group));
    draft.frames = ctx.frames_of(first.record, op, "last_seen");
    draft.ruled_out.push(match !missing.is_empty() {
        true => "not_joined: the wait was too short to show that a rank was late".to_owned(),
        false => "not_joined, missing_dump: every member that is waited for was there".to_owned(),
    });
    draft.next = format!("read the log of rank {rank} at that moment: the error is there");
    draft.targets.extend(ctx.graph.node(rank));
    if let Some(place) = place {
        draft.targets.push(place + ctx.graph.ranks);
    }
    draft.at = Some(op_ref);
    if !op.is_p2p {
        hidden_sizes::leave_open(ctx, lane.group, op.seq, &mut draft);
    }
    draft
}
