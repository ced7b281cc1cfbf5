//! W250: operations that succeeded came close to their time-out.
//!
//! The next operation that is a little slower will be ended as a hang. The check compares the time of each completed
//! operation, from issue to completion, with the time-out that it was issued with.

use crate::align::record::Op;
use crate::judge::check::Check;
use crate::judge::context::{Context, FindingDraft};
use crate::report::format::format_time;
use crate::report::{Code, Severity};

pub(crate) struct TimeoutTooClose;

/// An operation that took at least this share of its time-out is reported.
const NEAR: f64 = 0.7;

impl Check for TimeoutTooClose {
    fn codes(&self) -> &'static [Code] {
        &[Code::W250]
    }

    fn run(&self, ctx: &Context<'_>, so_far: &[FindingDraft]) -> Vec<FindingDraft> {
        // In a job that hangs, only the hang matters.
        let is_error = |draft: &FindingDraft| draft.code.severity() == Severity::Error;
        if so_far.iter().any(is_error) {
            return Vec::new();
        }
        let calls = &ctx.aligned.shared.calls;
        let share = |op: &Op| {
            let limit = calls.get(op.call).timeout_ms;
            let took = op.completed().then(|| op.wait_ms())??;
            (limit > 0).then(|| f64::from(took) / limit as f64)
        };
        let records = &ctx.aligned.records;
        // Of each record: the number of such operations, and the one that came closest.
        let near = ctx.aligned.shared.map(records.len(), |record| {
            let mut near = (0, None);
            for (position, op) in (0u32..).zip(&records[record].ops) {
                // An operation that completed after its time-out shows that no watchdog enforces the time-out.
                if let Some(share) = share(op).filter(|share| (NEAR..=1.0).contains(share)) {
                    near.0 += 1;
                    near.1 = closest(near.1, Some((share, record, position)));
                }
            }
            near
        });
        let near_count = near.iter().map(|(count, _)| count).sum();
        let worst = near.into_iter().map(|(_, worst)| worst);
        let worst = worst.fold(None, closest);
        let late = so_far.iter().any(|draft| draft.code == Code::W220);
        let draft = worst.map(|(share, record, position)| {
            let mut draft = draft(ctx, near_count, share, record, position);
            // If a rank is late, its lateness is the cause.
            draft.is_root = !late;
            draft
        });
        draft.into_iter().collect()
    }
}

/// The share of its time-out that an operation took, its record, and its position there.
type Near = (f64, usize, u32);

/// The one of two operations that took the larger share; of equal ones the first.
fn closest(one: Option<Near>, other: Option<Near>) -> Option<Near> {
    match (one, other) {
        (Some(first), Some(second)) if second.0 > first.0 => other,
        (None, _) => other,
        _ => one,
    }
}

/// The finding on `near_count` operations that came close to their time-outs. The one at this position of a record came
/// closest; it took this share of its time-out.
fn draft(
    ctx: &Context<'_>,
    near_count: usize,
    share: f64,
    record: usize,
    position: u32,
) -> FindingDraft {
    let op = ctx.aligned.op(record, position);
    let lane = &ctx.aligned.lanes[record][usize::from(op.group)];
    let limit = ctx.aligned.shared.calls.get(op.call).timeout_ms as f64;
    let mut draft = FindingDraft::new(
        Code::W250,
        format!(
            "{} on rank {} took {} of its time-out of {}; {near_count} operation{} took at least {} % of {} time-out",
            ctx.describe_op(record, op),
            ctx.aligned.records[record].rank,
            format_time(share * limit),
            format_time(limit),
            if near_count == 1 { "" } else { "s" },
            NEAR * 100.0,
            if near_count == 1 { "its" } else { "their" },
        ),
    );
    draft.confidence = 0.9;
    let mut evidence = ctx.evidence(record, position, lane.group);
    evidence.group = Some(ctx.group_ref(lane.group));
    draft.evidence.push(evidence);
    draft.frames = ctx.frames_of(record, op, "last_seen");
    draft.next = format!(
        "raise the time-out of group {} to several times {}, or shorten what comes before the operation",
        ctx.group_name(lane.group),
        format_time(share * limit)
    );
    draft
}
