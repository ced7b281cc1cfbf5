//! Faults that the environment variable `RCOMM_SIM` requests: `key=value` pairs, separated by commas.
//!
//! | key | effect |
//! |---|---|
//! | `version=22105` | the result of `ncclGetVersion` |
//! | `comm_hash=77` | `commHash` of a communicator without a parent; a split or shrink has its parent's plus 1 |
//! | `hang_after=3` | the fourth operation that this process enqueues, and all later ones, never end |
//! | `async_error_after=3` | the fourth operation, and all later ones, fail their communicator with `ncclRemoteError` |
//! | `launch_error_after=3` | the fourth operation, and all later ones, are refused by the driver |
//! | `call_error_after=1` | the second call of an operation, and all later ones, fail with their group of calls |
//! | `init_delay_ms=500` | joining a communicator takes that much longer |
//! | `die_in_init=1` | the process ends as it joins its first communicator, without a message |
//! | `connect_hangs_after=1` | connecting to peers for the second operation, and for all later ones, never ends |
//! | `kernels_at_once=1` | a device holds one kernel of NCCL at a time |
//! | `no_estimate=1` | a simulated end of a group of calls estimates nothing |
//! | `launch_delay_ms=3000` | what is enqueued on a communicator that does not block is enqueued that much later |
//! | `put_delay_ms=3000` | a put is enqueued that much later |
//! | `abort_hangs=1` | `ncclCommAbort` never returns |
//! | `query_hangs_after=3` | no `cuEventQuery` returns once the fourth operation is enqueued |
//! | `no_memory_after=2` | the third allocation of device memory, and all later ones, fail |
//! | `no_symmetric=1` | communicators have no symmetric memory |
//! | `no_one_sided=1` | communicators have no one-sided operations |
//! | `no_reach=1` | no device reaches the memory of another rank |
//! | `local_peers=1` | the ranks share a host: the death of one is not reported, and operations that wait for it hang |
//! | `capability=8` | the devices' major compute capability |
//! | `no_device=1` | `cuInit` answers `CUDA_ERROR_NO_DEVICE` |
//!
//! The calls of a group on one communicator and stream count as one operation.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The pairs of `RCOMM_SIM`.
fn settings() -> &'static [(String, u64)] {
    static SETTINGS: OnceLock<Vec<(String, u64)>> = OnceLock::new();
    SETTINGS.get_or_init(|| {
        let text = std::env::var("RCOMM_SIM").unwrap_or_default();
        let pairs = text.split(',').filter_map(|pair| {
            let (key, value) = pair.split_once('=')?;
            Some((key.trim().to_owned(), value.trim().parse().ok()?))
        });
        pairs.collect()
    })
}

/// The value that `RCOMM_SIM` gives for `key`; `None` if it gives none.
pub(crate) fn setting(key: &str) -> Option<u64> {
    settings()
        .iter()
        .find(|(name, _)| name == key)
        .map(|(_, value)| *value)
}

/// What becomes of an operation.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Runs,
    Hangs,
    FailsCommunicator,
    IsNotLaunched,
    NeverConnects,
}

/// The number of operations that this process has enqueued.
static OPERATIONS: AtomicU64 = AtomicU64::new(0);

/// Counts one operation of this process and returns what becomes of it.
pub(crate) fn next_operation() -> Outcome {
    let number = OPERATIONS.fetch_add(1, Ordering::Relaxed);
    let is_due = |key: &str| setting(key).is_some_and(|after| number >= after);
    if is_due("hang_after") {
        Outcome::Hangs
    } else if is_due("async_error_after") {
        Outcome::FailsCommunicator
    } else if is_due("launch_error_after") {
        Outcome::IsNotLaunched
    } else if is_due("connect_hangs_after") {
        Outcome::NeverConnects
    } else {
        Outcome::Runs
    }
}

/// Counts one call of this process and returns whether it is accepted.
pub(crate) fn next_call_is_accepted() -> bool {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    setting("call_error_after").is_none_or(|after| number < after)
}

/// Counts one allocation and returns whether there is memory for it.
pub(crate) fn next_allocation_fits() -> bool {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    setting("no_memory_after").is_none_or(|after| number < after)
}

/// Ends the process if `RCOMM_SIM` has `die_in_init`.
pub(crate) fn die_in_init() {
    if setting("die_in_init").is_some() {
        std::process::abort();
    }
}

/// Does not return if `RCOMM_SIM` has `abort_hangs`.
pub(crate) fn hang_in_abort() {
    if setting("abort_hangs").is_some() {
        hang();
    }
}

/// Does not return if `query_hangs_after` says so.
pub(crate) fn hang_in_query() {
    let enqueued = OPERATIONS.load(Ordering::Relaxed);
    if setting("query_hangs_after").is_some_and(|after| enqueued > after) {
        hang();
    }
}

fn hang() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(3_600));
    }
}
