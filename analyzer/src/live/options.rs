//! The types that a caller passes to a [`Live`](super::Live): options, times, and the function that judges.

use crate::live::source::NEWEST;
use rcomm_recorder::publish::Dump;
use rcomm_verdict::{Policy, Report};
use std::sync::Arc;
use std::time::Duration;

/// A point in time on both clocks: the monotonic one for ages, the wall clock for time stamps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment {
    /// Monotonic time since a fixed beginning.
    pub elapsed: Duration,
    /// Wall clock, ns since the epoch.
    pub wall_ns: i64,
}

/// The policy, the time limit and the memory budgets of a [`Live`](super::Live).
#[derive(Clone, Debug)]
pub struct LiveOptions {
    /// The parameters of the analysis. [`Live`](super::Live) itself sets what it learns from its sources, such as the
    /// time of judgment and the silent ranks.
    pub policy: Policy,
    /// A rank counts as silent if its last answer is older than this.
    pub silent_after: Duration,
    /// The target for the number of operations kept in memory over all ranks. Each record may keep an equal part of
    /// this number, but at least 64 operations, and all from its oldest pending one on. Older operations are dropped
    /// and count as lost.
    pub entry_budget: usize,
    /// The largest number of operations kept of one record, even if `entry_budget` allows more or this is less than 64.
    /// The operations since the record's oldest pending one are kept in any case.
    pub record_budget: usize,
}

impl Default for LiveOptions {
    fn default() -> Self {
        Self {
            policy: Policy {
                // The job runs, so a pending operation is no hang before it is overdue.
                snapshot: true,
                ..Policy::default()
            },
            silent_after: Duration::from_secs(5),
            entry_budget: 1_000_000,
            record_budget: NEWEST,
        }
    }
}

impl LiveOptions {
    /// Options for records that will not change any more: an operation that is pending in them counts as a hang, no
    /// rank falls silent, and all operations are kept.
    pub fn post_mortem() -> Self {
        let mut options = Self {
            silent_after: Duration::MAX,
            entry_budget: usize::MAX,
            record_budget: usize::MAX,
            ..Self::default()
        };
        options.policy.snapshot = false;
        options
    }
}

/// The function that judges dumps: [`analyze_on_threads`](crate::analyze_on_threads), or
/// [`analyze`](rcomm_verdict::analyze) where one thread is enough.
pub type Judge = fn(&[Arc<Dump>], &Policy) -> Report;
