//! Dumps that were asked for in a running job: they look like a hang if they are of different moments.

use crate::align::Aligned;
use crate::align::p2p::Messages;
use crate::align::pending::{active_ns, pending_of};
use crate::align::record::Record;
use crate::judge::context::Context;
use crate::judge::life::Life;
use crate::judge::policy::{Policy, age_when_written, taken_ns};
use crate::judge::waits::delivered::is_a_wait;
use crate::report::format::duration_ms;
use rcomm_recorder::model::EntryState;
use std::time::Duration;

/// What the reason of a dump that a program, a view or a user asked for begins with.
const REQUESTED: &str = "requested";

/// The policy for dumps that were asked for, state their time, and hold pending operations, none of which was overdue:
/// that of a snapshot. `None` for all others, and if a process is gone or a rank has recorded a failure. A record that
/// was cut may lack its time.
///
/// Dumps that a fault has caused say so in their reason. Those that are asked for because a job hangs hold operations
/// that are overdue.
pub(crate) fn of_young_dumps(
    aligned: &Aligned<'_>,
    messages: &Messages,
    policy: &Policy,
    life: &Life,
) -> Option<Policy> {
    let is_dated = policy.snapshot || policy.now_ns.is_some();
    let any_gone = || (aligned.expected.iter()).any(|&rank| life.gone(rank).is_some());
    let all_asked_for = || {
        let mut records = aligned.records.iter().enumerate();
        records.all(|(index, record)| {
            lacks_its_end(record)
                || was_asked_for(record) && taken_ns(aligned, policy, index).is_some()
        })
    };
    let all_cut = || aligned.records.iter().all(lacks_its_end);
    if is_dated || any_gone() || !all_asked_for() || all_cut() {
        return None;
    }
    let mut has_pending = false;
    for (index, record) in aligned.records.iter().enumerate() {
        let pending = pending_of(aligned, messages, index);
        let active_ns = active_ns(aligned, index, &pending, false);
        let taken_ns = (record.identity.dump_time_ns).saturating_sub(aligned.offsets_ns[index]);
        for (operation, active_ns) in pending.iter().zip(active_ns) {
            has_pending = true;
            let op = aligned.op(index, operation.position);
            let timeout_ms = aligned.shared.calls.get(op.call).timeout_ms;
            let age_ns = u64::try_from(taken_ns.saturating_sub(active_ns)).unwrap_or(0);
            let is_old = Duration::from_nanos(age_ns) >= policy.overdue_after(timeout_ms);
            let has_failed = op.state == EntryState::Failed;
            if has_failed || is_old && is_a_wait(aligned, index, operation) {
                return None;
            }
        }
    }
    has_pending.then(|| Policy {
        snapshot: true,
        ..policy.clone()
    })
}

/// Whether a record was cut before it states when it was taken, and why.
fn lacks_its_end(record: &Record) -> bool {
    record.cut && record.identity.dump_time_ns == 0
}

/// Whether a record is a dump that states its time and that no fault has caused.
fn was_asked_for(record: &Record) -> bool {
    let reason = &record.identity.reason;
    record.identity.dump_time_ns > 0 && (reason.is_empty() || reason.starts_with(REQUESTED))
}

/// A sentence on how long the oldest pending operation had waited when the records were taken, or when their files were
/// written. `None` unless the records are judged as young files or dumps, or if nothing is pending.
pub(crate) fn oldest_when_taken(ctx: &Context<'_>) -> Option<String> {
    if !ctx.young_files && !ctx.young_dumps {
        return None;
    }
    let newest_ns = ctx.as_of_ns()?;
    let pending = ctx.graph.pending.iter().enumerate();
    let ages = pending.flat_map(|(index, pending)| {
        pending.iter().map(move |operation| {
            let op = ctx.aligned.op(index, operation.position);
            match ctx.aligned.records[index].identity.dump_time_ns {
                0 => age_when_written(ctx.aligned, index, op, newest_ns),
                taken_ns => {
                    let age_ns = taken_ns.saturating_sub(op.created_ns);
                    Duration::from_nanos(u64::try_from(age_ns).unwrap_or(0))
                }
            }
        })
    });
    let age = duration_ms(ages.max()?.as_secs_f64() * 1e3);
    let when = match ctx.young_files {
        true => "when the files were written, by their times",
        false => "when its record was taken, and no rank recorded a failure",
    };
    Some(format!(
        "operations were pending, the oldest for {age} {when}: the job may have run on, or hung since then"
    ))
}
