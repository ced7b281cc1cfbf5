//! The sections of a report besides its findings: every group, rank, unfinished operation and wait.

use crate::align::pending::{Arrival, Pending, PendingKind};
use crate::align::{GroupIx, Presence, RecordIx};
use crate::judge::bandwidth;
use crate::judge::check::gone_members;
use crate::judge::context::{Context, OpRef};
use crate::judge::waits::wait_graph::{Missing, Node, Place};
use crate::report::{
    GroupReport, InstanceReport, InstanceState, RankReport, SeqKind, StackNode, Wait,
};
use rcomm_recorder::model::{EntryState, OpType, Rank};
use std::collections::{BTreeMap, HashMap, HashSet};

/// The unfinished operations of a record, each with whether it is overdue.
fn pending<'a>(
    ctx: &'a Context<'_>,
    record: RecordIx,
) -> impl Iterator<Item = (&'a Pending, bool)> {
    let operations = ctx.graph.pending[record].iter().enumerate();
    operations.map(move |(index, operation)| (operation, ctx.graph.is_overdue(record, index)))
}

/// When an unfinished operation was seen, common time, ns.
#[derive(Clone, Copy)]
struct Seen {
    /// When the first rank issued it.
    since_ns: i64,
    /// When the last dump of the ranks that are in it was taken; `None` if ages do not end then.
    until_ns: Option<i64>,
}

impl Seen {
    fn of(ctx: &Context<'_>, record: RecordIx, operation: &Pending) -> Self {
        let op = ctx.aligned.op(record, operation.position);
        Self {
            since_ns: ctx.aligned.created_ns(record, op),
            until_ns: ctx.taken_until_ns(record),
        }
    }

    /// Adds how another rank's record shows the same operation.
    fn add(&mut self, other: Self) {
        self.since_ns = self.since_ns.min(other.since_ns);
        let until_ns = self.until_ns.zip(other.until_ns);
        self.until_ns = until_ns.map(|(one, other)| one.max(other));
    }

    /// The age when it was seen last, at `now` at the latest, ms; `None` if `now` is unknown.
    fn age_ms(self, now: Option<i64>) -> Option<f64> {
        let until_ns = now?.min(self.until_ns.unwrap_or(i64::MAX));
        Some(until_ns.saturating_sub(self.since_ns).max(0) as f64 / 1e6)
    }
}

/// Every group that a record lists, the largest first, then by name.
pub(crate) fn groups(ctx: &Context<'_>) -> Vec<GroupReport> {
    let aligned = ctx.aligned;
    let now = ctx.as_of_ns();
    let of_group = |group: GroupIx| {
        let lanes: Vec<_> = aligned.groups[group].lanes.iter().flatten().collect();
        let newest = |&&(record, lane): &&(RecordIx, usize)| {
            aligned.lanes[record][lane]
                .collectives
                .last()
                .map(|&position| aligned.seq(record, position))
        };
        let newest_op = lanes.iter().find_map(|&&(record, lane)| {
            let lane = &aligned.lanes[record][lane];
            lane.collectives
                .last()
                .or(lane.messages.last())
                .map(|&position| aligned.op(record, position))
        });
        let call = newest_op.map(|op| aligned.shared.calls.get(op.call));
        // By number of a collective: since when and until when it was seen, how many ranks are in it, and on how many
        // it failed.
        let mut in_flight: BTreeMap<u32, (Seen, usize, usize)> = BTreeMap::new();
        for &&(record, _) in &lanes {
            let gone = ctx.life.gone(aligned.records[record].rank).is_some();
            for (operation, _) in pending(ctx, record) {
                if operation.group == group
                    && let PendingKind::Collective { seq } = operation.kind
                {
                    let seen = Seen::of(ctx, record, operation);
                    let known = in_flight.entry(seq).or_insert((seen, 0, 0));
                    let failed = ctx.has_failed(record, operation);
                    known.0.add(seen);
                    known.1 += usize::from(!failed && !gone);
                    known.2 += usize::from(failed);
                }
            }
        }
        in_flight.retain(|_, &mut (_, inside, failed)| inside > 0 || failed == 0);
        let ages = in_flight.values().filter_map(|(seen, ..)| seen.age_ms(now));
        let numbers = || lanes.iter().filter_map(newest);
        GroupReport {
            group: ctx.group_ref(group),
            backend: call
                .map(|call| call.signature.backend.clone())
                .unwrap_or_default(),
            last_seq: numbers().max().map(u64::from),
            min_seq: numbers().min().map(u64::from),
            ranks_read: lanes.len(),
            in_flight: in_flight.len(),
            oldest_ms: ages.reduce(f64::max),
            lag_p50_ms: ctx.lateness.group_lag_ms(group, 0.5),
            lag_p99_ms: ctx.lateness.group_lag_ms(group, 0.99),
            busbw_gbs: bandwidth::busbw_gbs(aligned, group),
            timeout_ms: call.map_or(0, |call| call.timeout_ms),
        }
    };
    let mut reports = aligned.shared.map(aligned.groups.len(), of_group);
    reports.retain(|report| report.ranks_read > 0);
    reports.sort_by(|a, b| (b.group.ranks.len(), &a.group).cmp(&(a.group.ranks.len(), &b.group)));
    reports
}

/// Every expected rank, ascending. The cost of lateness is left out if an error was found (`has_errors`).
pub(crate) fn ranks(ctx: &Context<'_>, has_errors: bool) -> Vec<RankReport> {
    let aligned = ctx.aligned;
    aligned.shared.map(aligned.expected.len(), |index| {
        let rank = aligned.expected[index];
        let record = aligned.record_of(rank);
        let full_record = record.map(|record| &aligned.records[record]);
        // Each of several recorders of one process holds a part.
        let records = || aligned.records_of(rank);
        let status = full_record.and_then(|full_record| full_record.status.as_ref());
        RankReport {
            rank,
            host: full_record
                .map(|full_record| full_record.identity.host.clone())
                .unwrap_or_default(),
            pid: full_record.map_or(0, |full_record| full_record.identity.pid),
            read: record.is_some(),
            phase: status
                .filter(|status| !status.phase.is_empty())
                .map(|status| status.phase.clone()),
            step: status
                .filter(|status| status.step >= 0)
                .map(|status| status.step),
            pending: records()
                .flat_map(|record| {
                    pending(ctx, record).map(move |(operation, _)| (record, operation))
                })
                .filter(|&(record, operation)| !ctx.has_failed(record, operation))
                .count(),
            failure: record.and_then(|record| ctx.failure_of(record)),
            lost: records().map(|record| aligned.records[record].lost()).sum(),
            last_call: record
                .and_then(|record| Some(ctx.describe_op(record, ctx.last_op(record)?))),
            lag_p50_ms: record.and_then(|record| ctx.lateness.ranks[record].lag_p50_ms()),
            lag_share: record
                .filter(|_| !has_errors)
                .and_then(|_| ctx.lateness.share(aligned, rank)),
        }
    })
}

/// How far a collective got, over all members that are in it.
#[derive(Clone, Copy, Default)]
struct Progress {
    /// Whether it is overdue on a member.
    overdue: bool,
    /// Whether a member has not started it.
    queued: bool,
}

/// Whether a rank that lives has issued an operation, and neither its record nor the order of its operations shows that
/// the operation has started.
fn is_queued(ctx: &Context<'_>, record: RecordIx, operation: &Pending) -> bool {
    operation.arrival != Arrival::Arrived
        && ctx.aligned.op(record, operation.position).state == EntryState::Scheduled
        && ctx.life.gone(ctx.aligned.records[record].rank).is_none()
}

/// Operations that at least one member has issued and not all have completed, oldest first. Messages that the device of
/// their rank has not reached are left out.
pub(crate) fn in_flight(ctx: &Context<'_>) -> Vec<InstanceReport> {
    let aligned = ctx.aligned;
    let now = ctx.as_of_ns();
    let mut instances: BTreeMap<(GroupIx, u32), (Seen, Progress)> = BTreeMap::new();
    let mut reports: Vec<(Seen, InstanceReport)> = Vec::new();
    let places = ctx.graph.places.iter();
    let in_graph: HashSet<(RecordIx, usize)> = places
        .filter_map(|place| match *place {
            Place::Batch {
                record, pending, ..
            } => Some((record, pending)),
            Place::Collective { .. } => None,
        })
        .collect();
    for record in 0..aligned.records.len() {
        for (index, (operation, overdue)) in pending(ctx, record).enumerate() {
            let seen = Seen::of(ctx, record, operation);
            match operation.kind {
                PendingKind::Collective { seq } => {
                    let known = instances.entry((operation.group, seq));
                    let (known, progress) = known.or_insert((seen, Progress::default()));
                    known.add(seen);
                    progress.overdue |= overdue;
                    progress.queued |= is_queued(ctx, record, operation);
                }
                // Batches in the graph are added below.
                PendingKind::Batch { .. }
                    if !overdue
                        && operation.arrival == Arrival::Arrived
                        && !in_graph.contains(&(record, index)) =>
                {
                    let missing =
                        ctx.graph
                            .missing_from_batch(aligned, ctx.messages, record, operation);
                    reports.push((seen, message(ctx, record, operation, &missing, overdue)));
                }
                PendingKind::Batch { .. } => {}
            }
        }
    }
    for (place, missing) in ctx.graph.places.iter().zip(&ctx.graph.missing) {
        if let Place::Batch {
            record, pending, ..
        } = *place
        {
            let operation = &ctx.graph.pending[record][pending];
            let overdue = ctx.graph.is_overdue(record, pending);
            let seen = Seen::of(ctx, record, operation);
            reports.push((seen, message(ctx, record, operation, missing, overdue)));
        }
    }
    for ((group, seq), (seen, progress)) in instances {
        reports.push((seen, collective(ctx, group, seq, progress)));
    }
    for (seen, report) in &mut reports {
        report.age_ms = seen.age_ms(now);
    }
    reports.sort_by(|a, b| {
        let key =
            |report: &InstanceReport| (report.group.clone(), report.seq, report.joined.clone());
        a.0.since_ns
            .cmp(&b.0.since_ns)
            .then_with(|| key(&a.1).cmp(&key(&b.1)))
    });
    reports.into_iter().map(|(_, report)| report).collect()
}

/// The missing ranks of which it is unknown whether they arrived, if `unknown`; else the others.
fn nodes(missing: &[(Node, Missing)], unknown: bool) -> Vec<Node> {
    missing
        .iter()
        .filter(|(_, why)| matches!(why, Missing::Unknown(_)) == unknown)
        .map(|&(node, _)| node)
        .collect()
}

/// The report on a batch of messages, without its age.
fn message(
    ctx: &Context<'_>,
    record: RecordIx,
    batch: &Pending,
    missing: &[(Node, Missing)],
    overdue: bool,
) -> InstanceReport {
    let aligned = ctx.aligned;
    let op_ref = ctx.op_ref_of_message(record, batch.group, batch.position);
    let op = aligned.op(record, batch.position);
    let failed = ctx.has_failed(record, batch);
    InstanceReport {
        group: ctx.group_ref(batch.group),
        seq: op_ref.seq,
        seq_kind: op_ref.kind,
        op: op_ref.op,
        bytes: aligned.shared.calls.get(op.call).bytes(),
        least_bytes: None,
        joined: vec![aligned.records[record].rank],
        missing: ctx.ranks(&nodes(missing, false)),
        unknown: ctx.ranks(&nodes(missing, true)),
        state: if failed {
            InstanceState::Failed
        } else if missing.is_empty() {
            InstanceState::Running
        } else {
            InstanceState::HalfOpen
        },
        error: Some(ctx.error_of(record, op).to_owned()).filter(|text| failed && !text.is_empty()),
        age_ms: None,
        overdue,
    }
}

/// The report on a collective, without its age.
fn collective(ctx: &Context<'_>, group: GroupIx, seq: u32, progress: Progress) -> InstanceReport {
    let aligned = ctx.aligned;
    let (mut joined, mut missing, mut unknown) = (Vec::new(), Vec::new(), Vec::new());
    let mut sizes: Option<(u64, u64)> = None;
    let (mut inside, mut failed) = (0, 0);
    let mut error = None;
    for (member, &rank) in aligned.groups[group].ranks.iter().enumerate() {
        match aligned.presence(group, member, seq) {
            Presence::Issued(index) => {
                if let Some((record, lane)) = aligned.lane(group, member) {
                    let op = aligned.op(record, lane.collectives[index]);
                    let bytes = aligned.shared.calls.get(op.call).signature.input_bytes();
                    let (least, most) = sizes.unwrap_or((bytes, bytes));
                    sizes = Some((least.min(bytes), most.max(bytes)));
                    let status_op = aligned.status_op(record, lane, index);
                    if status_op.state == EntryState::Failed {
                        failed += 1;
                        let text = ctx.error_of(record, status_op);
                        error = error.or((!text.is_empty()).then(|| text.to_owned()));
                    } else if !status_op.completed() && ctx.life.gone(rank).is_none() {
                        inside += 1;
                    }
                }
                joined.push(rank);
            }
            Presence::Lost => joined.push(rank),
            Presence::Absent => missing.push(rank),
            Presence::Unknown(_) => unknown.push(rank),
        }
    }
    let differs = ctx
        .disagreements
        .iter()
        .any(|disagreement| disagreement.group == group && disagreement.seq == seq);
    let state = if failed > 0 && inside == 0 {
        InstanceState::Failed
    } else if differs {
        InstanceState::Mismatch
    } else if !missing.is_empty() || !unknown.is_empty() {
        InstanceState::Waiting
    } else if progress.queued {
        InstanceState::Queued
    } else {
        InstanceState::Running
    };
    let (least, most) = sizes.unwrap_or_default();
    let op_ref = ctx.op_ref(group, seq);
    for ranks in [&mut joined, &mut missing, &mut unknown] {
        ranks.sort_unstable();
    }
    InstanceReport {
        group: ctx.group_ref(group),
        seq: op_ref.seq,
        seq_kind: SeqKind::CollectiveSeqId,
        op: op_ref.op,
        bytes: most,
        least_bytes: Some(least).filter(|&least| differs && least != most),
        joined,
        missing,
        unknown,
        state,
        error: error.filter(|_| state == InstanceState::Failed),
        age_ms: None,
        overdue: progress.overdue,
    }
}

/// At most this many ranks are listed in all waits together, those of their groups included: in the largest jobs every
/// rank may wait for all others.
const LISTED: usize = 1 << 22;

/// The waits of the graph by rank, at places where a rank is missing; cut at [`LISTED`].
pub(crate) fn waits(ctx: &Context<'_>) -> Vec<Wait> {
    let mut waits = Vec::new();
    let mut listed = 0;
    // Many ranks wait at one place.
    let mut places: HashMap<usize, Option<(Vec<Rank>, OpRef)>> = HashMap::new();
    for (node, waits_in) in ctx.graph.waits_in.iter().enumerate() {
        for &place in waits_in {
            let known = places.entry(place).or_insert_with(|| {
                let missing = ctx.graph.missing[place].iter();
                let missing = missing.map(|&(node, _)| node);
                // If none is missing, the others wait for members whose processes are gone.
                let mut awaited =
                    ctx.ranks(&missing.chain(gone_members(ctx, place)).collect::<Vec<_>>());
                awaited.sort_unstable();
                (!awaited.is_empty()).then(|| (awaited, ctx.op_ref_of_place(place)))
            });
            let Some((awaited, op_ref)) = known else {
                continue;
            };
            let rank = ctx.rank(node);
            // A process that is gone does not wait for itself.
            if awaited.contains(&rank) {
                continue;
            }
            listed += awaited.len() + ctx.aligned.groups[op_ref.group].ranks.len();
            if listed > LISTED {
                return waits;
            }
            waits.push(Wait {
                rank,
                on: awaited.clone(),
                group: ctx.group_ref(op_ref.group),
                op: op_ref.op.clone(),
                seq: op_ref.seq,
                seq_kind: op_ref.kind,
            });
        }
    }
    waits
}

/// The stacks of all ranks' newest calls, merged from the outermost frame inward.
pub(crate) fn stacks(ctx: &Context<'_>) -> Vec<StackNode> {
    let mut by_stack: BTreeMap<u32, Vec<Rank>> = BTreeMap::new();
    for (index, record) in ctx.aligned.records.iter().enumerate() {
        // Only the newest record of a rank counts.
        if ctx.aligned.record_of(record.rank) != Some(index) {
            continue;
        }
        let newest = record
            .ops
            .iter()
            .rev()
            .find(|op| op.kind != OpType::Coalesced || op.stack != crate::align::record::NONE);
        if let Some(op) = newest
            && (op.stack as usize) < ctx.aligned.shared.stacks.len()
        {
            by_stack.entry(op.stack).or_default().push(record.rank);
        }
    }
    let shared = &ctx.aligned.shared;
    StackNode::merge(by_stack.into_iter().map(|(stack, ranks)| {
        let frames = shared.stacks[stack as usize].iter().rev();
        (frames.map(|&frame| &shared.frames[frame as usize]), ranks)
    }))
}
