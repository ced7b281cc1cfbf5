//! Finds ranks of which one thread has stopped while another continues.
//!
//! The thread that continues is nearly always inside some operation. In the graph, such an operation seems to keep its
//! rank from what the others wait for, although it has only just begun. The root of the waits is then an operation that
//! all members have issued, or a cycle, and not the rank that others wait for.

use crate::align::RecordIx;
use crate::align::pending::PendingKind;
use crate::align::record::NONE;
use crate::judge::context::Context;
use crate::judge::policy::written_ns;
use crate::judge::waits::wait_graph::{Missing, Node, Place};
use crate::judge::waits::wait_root::WaitRoot;

/// An operation that is younger than this share of a wait did not cause that wait.
const SHARE: f64 = 0.25;

/// A thread continues if it has completed at least this many operations that it issued since others began to wait.
const MIN_LATER: usize = 3;

/// The roots of the graph. A full place or a cycle with busy ranks ([`is_busy`]) is replaced by these ranks.
pub(crate) fn find(ctx: &Context<'_>) -> Vec<WaitRoot> {
    let mut found: Vec<WaitRoot> = Vec::new();
    for wait_root in &ctx.wait_roots {
        let (ranks, places): (&[Node], &[usize]) = match wait_root {
            WaitRoot::Full(place) => (&ctx.graph.arrived[*place], std::slice::from_ref(place)),
            WaitRoot::Cycle { ranks, places } => (ranks, places),
            WaitRoot::Idle(_) | WaitRoot::Unread(_) => (&[], &[]),
        };
        let busy = ranks.iter().filter(|&&node| is_busy(ctx, node, places));
        let busy: Vec<WaitRoot> = busy.map(|&node| WaitRoot::Idle(node)).collect();
        let roots = match busy.is_empty() {
            true => vec![wait_root.clone()],
            false => busy,
        };
        for one in roots {
            if !found.contains(&one) {
                found.push(one);
            }
        }
    }
    found
}

/// Whether others wait for this rank in a collective, and its operations in `places` did not cause that wait: another
/// thread issued them, that thread has continued since, and they are much younger.
fn is_busy(ctx: &Context<'_>, node: Node, places: &[usize]) -> bool {
    let now_ns = ctx
        .as_of_ns()
        .or_else(|| written_ns(ctx.aligned, ctx.policy));
    let absent = |&(_, why): &(usize, Missing)| why == Missing::Absent;
    let mut missed = ctx.missed_at(node).into_iter().filter(absent);
    missed.any(|(place, _)| {
        let Place::Collective { group, .. } = ctx.graph.places[place] else {
            return false;
        };
        let own = ctx.graph.waits_in[node].iter();
        let mut own = own.filter(|own| places.contains(own)).peekable();
        let (Some(now), Some(since_ns), Some(record)) =
            (now_ns, ctx.waiting_since(place), ctx.record_at(place, node))
        else {
            return false;
        };
        let Some(thread) = ctx.thread_of(record, group) else {
            return false;
        };
        let waited = now.saturating_sub(since_ns) as f64;
        own.peek().is_some()
            && own.all(|&own| {
                let here = issued_at(ctx, own, node);
                here.is_some_and(|(other, position)| {
                    let op = ctx.aligned.op(other, position);
                    let age = now.saturating_sub(ctx.aligned.created_ns(other, op)) as f64;
                    let is_young = age <= waited * SHARE;
                    let apart = other == record && op.thread != NONE && op.thread != thread;
                    apart && is_young && went_on(ctx, record, op.thread, since_ns)
                })
            })
    })
}

/// The record and the position of the operation in which a rank waits at a place; `None` if no record shows it.
fn issued_at(ctx: &Context<'_>, place: usize, node: Node) -> Option<(RecordIx, u32)> {
    let record = ctx.record_at(place, node)?;
    let mut pending = ctx.graph.pending[record].iter().enumerate();
    let (_, operation) =
        pending.find(
            |(index, operation)| match (&ctx.graph.places[place], &operation.kind) {
                (Place::Collective { group, seq }, PendingKind::Collective { seq: own }) => {
                    operation.group == *group && own == seq
                }
                (Place::Batch { pending, .. }, PendingKind::Batch { .. }) => pending == index,
                _ => false,
            },
        )?;
    Some((record, operation.position))
}

/// Whether a thread of a rank has completed [`MIN_LATER`] operations that it issued after this common time, ns.
fn went_on(ctx: &Context<'_>, record: RecordIx, thread: u32, since_ns: i64) -> bool {
    let newest_first = ctx.aligned.records[record].ops.iter().rev();
    newest_first
        .take_while(|op| ctx.aligned.created_ns(record, op) > since_ns)
        .filter(|op| op.thread == thread && (op.completed() || op.retired))
        .take(MIN_LATER)
        .count()
        == MIN_LATER
}
