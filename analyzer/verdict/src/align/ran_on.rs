//! Which operations a rank has provably completed, if its recorder notes only that an operation is over.
//!
//! Gloo's own recorder retires an operation that completed and one that failed alike. A program does not continue step
//! by step behind one that failed or timed out. But operations that it issued at once may all fail together, so the
//! pace of calls within one step proves nothing.

use crate::align::Lane;
use crate::align::record::{Op, Record};
use crate::align::shared::Shared;

/// The pace is measured on at most this many of the newest operations that are over.
const NEWEST: usize = 128;
/// With fewer operations, a record shows no pace.
const FEWEST: usize = 8;
/// In a program that issues operations one by one, an operation has provably completed only if at least this many later
/// ones are over.
const LATER: usize = 3;
/// An operation has provably completed only if the time since it exceeds this many times the longest pause between two
/// operations. In a program that issues several operations at once, this many steps must have begun after it.
const ROUNDS: usize = 3;
/// Operations that mostly follow each other sooner than this, ns, may be of one step. A pause between two steps is not
/// shorter.
const AT_ONCE_NS: i64 = 50_000_000;
/// A pause between two steps lasts for at least this many usual pauses within a step.
const APART: i64 = 4;
/// A program issues fewer operations than this in one step.
const MOST_AT_ONCE: usize = 1000;

/// The position of the newest collective that needs all members and after which the program continued for several
/// rounds at its usual pace. `None` if there is none, if too few operations are over, if no time-out is recorded, or if
/// a pause between two of the newest operations is so long that one of them may have timed out.
pub(super) fn ran_on_from(shared: &Shared, record: &Record, lane: &Lane) -> Option<u32> {
    let op = |position: &u32| -> &Op { &record.ops[*position as usize] };
    let over = &lane.collectives[..lane.pending_from];
    let run = over
        .iter()
        .rev()
        .take_while(|position| op(position).retired);
    let run = &over[over.len() - run.count()..];
    let newest = &run[run.len().saturating_sub(NEWEST)..];
    if newest.len() < FEWEST {
        return None;
    }
    let pauses_of = |run: &[u32]| -> Vec<i64> {
        let created_ns = |position: &u32| op(position).created_ns;
        let pauses = run.windows(2);
        pauses
            .map(|pair| created_ns(&pair[1]).saturating_sub(created_ns(&pair[0])))
            .collect()
    };
    let limits = newest
        .iter()
        .map(|position| shared.calls.get(op(position).call).timeout_ms);
    // 0: no time-out is recorded.
    let limit_ms = limits.min().filter(|&limit_ms| limit_ms > 0)?;
    let too_long = |pause_ns: i64| pause_ns as f64 / 1e6 >= limit_ms as f64 / 2.0;
    let mut pauses_ns = pauses_of(newest);
    let longest_ns = pauses_ns.iter().copied().max()?.max(1);
    if too_long(longest_ns) {
        return None;
    }
    let (_, &mut usual_ns, _) = pauses_ns.select_nth_unstable((newest.len() - 1) / 2);
    let mut before = if usual_ns < AT_ONCE_NS {
        let pauses_ns = pauses_of(run);
        let from = pauses_ns.iter().rposition(|&pause_ns| too_long(pause_ns));
        let from = from.map_or(0, |index| index + 1);
        let to = count_before_steps(&pauses_ns[from..], usual_ns);
        run[from..from + to].iter()
    } else {
        let last_ns = op(newest.last()?).created_ns;
        let is_long_ago = |position: &&u32| {
            last_ns.saturating_sub(op(position).created_ns)
                > longest_ns.saturating_mul(ROUNDS as i64)
        };
        let later = newest.iter().rev().skip(LATER);
        let long_ago = later.skip_while(|position| !is_long_ago(position)).count();
        newest[..long_ago].iter()
    };
    let newest_before = before.rfind(|position| op(position).kind.needs_all_members());
    newest_before.copied()
}

/// How many of the oldest operations are surely older than the newest steps, in a program that issues several
/// operations at once: those that at least [`ROUNDS`] steps or [`MOST_AT_ONCE`] operations have followed. `pauses_ns`
/// are the pauses after each operation but the last; `usual_ns` is the usual pause within a step.
fn count_before_steps(pauses_ns: &[i64], usual_ns: i64) -> usize {
    let many = pauses_ns.len().saturating_sub(MOST_AT_ONCE);
    let mut longest = pauses_ns.to_vec();
    longest.sort_unstable_by(|one, other| other.cmp(one));
    // A single pause may be longer than those between the steps, such as that for a checkpoint.
    let Some(&step_ns) = longest.get(ROUNDS - 1) else {
        return many;
    };
    if step_ns < AT_ONCE_NS.max(usual_ns.saturating_mul(APART)) {
        return many;
    }
    let is_step = |pause_ns: i64| pause_ns >= step_ns / 4 * 3;
    let indices = (0..pauses_ns.len()).rev();
    let mut steps = indices.filter(|&index| is_step(pauses_ns[index]));
    steps
        .nth(ROUNDS - 1)
        .map_or(many, |index| many.max(index + 1))
}
