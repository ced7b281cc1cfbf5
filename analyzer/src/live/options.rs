//! Settings of a [`Live`](super::Live).

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

/// Parameters of a [`Live`](super::Live).
#[derive(Clone, Debug)]
pub struct LiveOptions {
    /// The parameters of the analysis; [`Live`](super::Live) sets the time of judgement.
    pub policy: Policy,
    /// The age of its last answer from which a rank counts as silent.
    pub silent_after: Duration,
    /// The number of operations kept in memory over all ranks. If rings hold more, the oldest finished ones are dropped
    /// and count as lost.
    pub entry_budget: usize,
    /// The largest number of operations of one record that are kept.
    pub record_budget: usize,
}

impl Default for LiveOptions {
    fn default() -> Self {
        Self {
            policy: Policy {
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
    /// For records that will not change any more: dumps are judged as written because of a hang, and no rank is
    /// expected to answer again.
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

/// The function that judges dumps: [`analyze`](rcomm_verdict::analyze), unless a test replaces it.
pub type Judge = fn(&[Arc<Dump>], &Policy) -> Report;
