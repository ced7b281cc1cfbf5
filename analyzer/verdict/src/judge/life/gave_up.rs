//! Which processes ended because their ranks gave up: their ends are consequences.

use crate::align::Aligned;
use crate::judge::life::{BEFORE_TIMEOUT, Gone, TOGETHER_NS};
use crate::judge::overcome::{is_history, is_overcome};
use rcomm_recorder::model::{EntryState, FailureKind};

/// The signal by which a process ends itself.
const SIGABRT: i32 = 6;

/// Whether a process's rank gave up at a time-out, because it lost a peer, or by an abort, and did not continue. Its
/// end is then a consequence.
pub(super) fn gave_up(aligned: &Aligned<'_>, process: &Gone) -> bool {
    let rank = process.rank;
    let mut records = aligned.records_of(rank);
    timed_out(aligned, process)
        || records.any(|record| {
            let mut failures = aligned.records[record].failures.iter();
            failures.any(|failure| match failure.kind {
                _ if is_overcome(aligned, record, failure, None) => false,
                FailureKind::PeerGone => failure.ranks.iter().any(|other| *other != rank),
                kind => matches!(kind, FailureKind::Timeout | FailureKind::Abort),
            })
        })
}

/// Whether a process ended because an operation had reached its time-out: one that failed had lasted for
/// [`BEFORE_TIMEOUT`] of it at least, or one was unfinished when the process ended, after its deadline.
///
/// Not every recorder notes that an operation has failed, and the watchdog of NCCL's backend aborts the process while
/// the operation is still unfinished. An operation that the program left behind says nothing: the rank completed
/// others that it had issued after the deadline. Neither does any if the launcher notes that the process was killed.
pub(super) fn timed_out(aligned: &Aligned<'_>, process: &Gone) -> bool {
    if was_killed(process) {
        return false;
    }
    let ms = |ns: i64| ns as f64 / 1e6;
    aligned.records_of(process.rank).any(|record| {
        let ops = &aligned.records[record].ops;
        let completed = ops.iter().filter(|op| op.completed());
        let newest_ns = completed.map(|op| op.created_ns).max();
        ops.iter().any(|op| {
            let Some(limit_ms) = aligned.limit_ms(record, op) else {
                return false;
            };
            match op.state {
                EntryState::Failed if is_history(aligned, record, op) => false,
                EntryState::Failed => op
                    .wait_ms()
                    .is_some_and(|lasted| f64::from(lasted) >= limit_ms * BEFORE_TIMEOUT),
                EntryState::Completed => false,
                _ if op.retired => false,
                _ => {
                    let created_ns = aligned.created_ns(record, op);
                    // The last sign of life may be a little older than the end.
                    let lasted_ns = process
                        .at_ns
                        .saturating_sub(created_ns)
                        .saturating_add(TOGETHER_NS);
                    let was_left = newest_ns
                        .is_some_and(|newest| ms(newest.saturating_sub(op.created_ns)) > limit_ms);
                    ms(lasted_ns) >= limit_ms && !was_left
                }
            }
        })
    })
}

/// Whether the launcher notes a signal that it did not send, or that the kernel killed the process since memory ran
/// out. A process that gives up aborts itself.
fn was_killed(process: &Gone) -> bool {
    let exit = process
        .exit
        .filter(|_| process.is_launched && !process.was_signalled);
    exit.is_some_and(|exit| {
        let by_signal = exit.signal.is_some_and(|signal| signal != SIGABRT);
        by_signal || exit.out_of_memory == Some(true)
    })
}
