//! Which operations a rank has provably completed by a recorder that notes only that an operation is over.
//!
//! Gloo's own recorder retires an operation that completed and one that failed alike. A program does not go on at its
//! usual pace behind one that failed or timed out, and a burst of operations that fail together is short.

use crate::align::Lane;
use crate::align::record::{Op, Record, Shared};

/// The pace is that of this many of the newest operations that are over.
const NEWEST: usize = 128;
/// With fewer operations, a record shows no pace.
const FEWEST: usize = 8;
/// At least this many later operations are over.
const LATER: usize = 3;
/// The later operations lasted for more than this many of the longest pauses between two operations: a step of a
/// program that issues several operations at once has one long pause.
const ROUNDS: i64 = 3;

/// The position of the newest collective of a lane after which the program went on for several rounds at its usual pace.
/// `None` if there is none, or if a pause between two operations is so long that one of them may have timed out.
pub(super) fn ran_on_from(shared: &Shared, record: &Record, lane: &Lane) -> Option<u32> {
    let op = |position: &u32| -> &Op { &record.ops[*position as usize] };
    let over = &lane.collectives[..lane.pending_from];
    let run = over
        .iter()
        .rev()
        .take_while(|position| op(position).retired);
    let run = &over[over.len() - run.take(NEWEST).count()..];
    if run.len() < FEWEST {
        return None;
    }
    let pauses = run.windows(2).map(|pair| {
        op(&pair[1])
            .created_ns
            .saturating_sub(op(&pair[0]).created_ns)
    });
    let longest_ns = pauses.max()?.max(1);
    let limits = run
        .iter()
        .map(|position| shared.calls.get(op(position).call).timeout_ms);
    // A time-out of 0 is unknown.
    let limit_ms = limits.min().filter(|&limit_ms| limit_ms > 0)?;
    if longest_ns as f64 / 1e6 >= limit_ms as f64 / 2.0 {
        return None;
    }
    let last_ns = op(run.last()?).created_ns;
    let mut before = run[..run.len() - LATER].iter().rev().copied();
    before.find(|position| {
        let op = op(position);
        op.kind.needs_all_members()
            && last_ns.saturating_sub(op.created_ns) > longest_ns.saturating_mul(ROUNDS)
    })
}
