//! Joins what several records of one process hold: a dump that was written at a fault and a ring that was read later
//! may each have what the other lacks.
//!
//! One record is kept. It gets from the other the failures, the links to peers, and the operations that were pending
//! there and that the kept record no longer holds.

use crate::align::record::{Op, Record};
use rcomm_recorder::model::{Failure, LinkEnd, OpType, PeerLink};
use rcomm_recorder::publish::Recorder;

/// Adds to a record what only another one of the same process and attempt holds. Returns whether there was anything;
/// `false` if they are not known to be of one process.
pub(super) fn join(kept: &mut Record, other: &Record) -> bool {
    if !are_one_process(kept, other) {
        return false;
    }
    let links = join_links(kept, other);
    let failures = join_failures(kept, other);
    let operations = join_operations(kept, other);
    links || failures || operations
}

/// Whether two records are known to be of one process and by one recorder.
fn are_one_process(a: &Record, b: &Record) -> bool {
    let process = |record: &Record| {
        let identity = &record.identity;
        let (host, job) = (identity.host.clone(), identity.job.clone());
        (host, identity.pid, identity.attempt, job)
    };
    let is_known = !a.identity.host.is_empty() && a.identity.pid != 0;
    is_known
        && process(a) == process(b)
        && a.recorder == b.recorder
        // The plug-in's records have operations of groups without names, which may be several devices'.
        && a.recorder != Recorder::NcclProfiler
}

/// Adds the failures that only `other` holds; returns whether there were any.
fn join_failures(kept: &mut Record, other: &Record) -> bool {
    let key = |failure: &Failure| (failure.id, failure.time_ns, failure.kind);
    let before = kept.failures.len();
    for failure in &other.failures {
        if !kept.failures.iter().any(|known| key(known) == key(failure)) {
            kept.failures.push(failure.clone());
        }
    }
    kept.failures
        .sort_by_key(|failure| (failure.time_ns, failure.id));
    kept.failures.len() > before
}

/// Takes over the links to ranks that the kept record lacks, and those that `other` knows better ([`is_better`]);
/// returns whether there were any. If the rank recorded a failure and did not continue after that, links that were
/// silent or broken then are better: a ring drops closed connections or replaces them with new ones.
fn join_links(kept: &mut Record, other: &Record) -> bool {
    let of_both = kept.failures.iter().chain(&other.failures);
    let explains = of_both
        .into_iter()
        .any(|failure| !has_gone_on(kept, failure.time_ns) && !has_gone_on(other, failure.time_ns));
    let mut has_joined = false;
    for link in &other.peers {
        if !matches!(link.end, LinkEnd::Rank(_)) {
            continue;
        }
        match kept.peers.iter_mut().find(|known| known.end == link.end) {
            None => kept.peers.push(link.clone()),
            Some(known) if is_better(link, known, explains) => *known = link.clone(),
            Some(_) => continue,
        }
        has_joined = true;
    }
    has_joined
}

/// Whether a link is to replace a known one: it is newer, or `explains` holds and only it is silent or broken. A known
/// link that is silent or broken is not replaced by a newer one that is not, if `explains` holds.
fn is_better(link: &PeerLink, known: &PeerLink, explains: bool) -> bool {
    let is_bad = |link: &PeerLink| link.errno != 0 || link.is_silent();
    match link.sampled_ns > known.sampled_ns {
        true => !(explains && is_bad(known) && !is_bad(link)),
        false => explains && is_bad(link) && !is_bad(known),
    }
}

/// Whether the rank issued an operation after this time, by its own clock, and completed it. A send may complete
/// although its receiver never comes.
fn has_gone_on(record: &Record, since_ns: i64) -> bool {
    let newest_first = record.ops.iter().rev();
    newest_first
        .take_while(|op| op.created_ns > since_ns)
        .any(|op| op.completed() && op.kind != OpType::Send)
}

/// Adds the operations that were pending in `other` and that the kept record does not hold; returns whether there were
/// any.
fn join_operations(kept: &mut Record, other: &Record) -> bool {
    let last = kept.ops.last().map(|op| kept.record_id(op));
    let holds = |id: u64| {
        let range = kept.first_id..=last.unwrap_or(0);
        range.contains(&id) || kept.unaligned.iter().any(|(known, _)| *known == id)
    };
    // One process numbers its groups once.
    let group_of = |op: &Op| {
        let id = other.groups.get(usize::from(op.group))?.id;
        let index = kept.groups.iter().position(|group| group.id == id)?;
        u16::try_from(index).ok()
    };
    let pending = other.ops.iter().filter(|op| !op.completed() && !op.retired);
    let lost: Vec<(u64, Op)> = pending
        .map(|op| (other.record_id(op), op))
        .filter(|&(id, _)| !holds(id))
        .filter_map(|(id, op)| {
            let group = group_of(op)?;
            Some((id, Op { group, ..*op }))
        })
        .collect();
    let has_lost = !lost.is_empty();
    kept.unaligned.extend(lost);
    has_lost
}
