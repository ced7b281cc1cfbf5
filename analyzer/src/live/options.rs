//! Settings of a [`Live`](super::Live).

use crate::live::source::NEWEST;
use rcomm_recorder::publish::Dump;
use rcomm_verdict::{Policy, Report};
use std::sync::Arc;
use std::time::Duration;

/// A point in time on both clocks: ages are monotonic, stamps are wall clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment {
    /// Since some fixed beginning; never runs backwards.
    pub elapsed: Duration,
    /// Wall clock, ns since the epoch.
    pub wall_ns: i64,
}

/// Parameters of a [`Live`](super::Live).
#[derive(Clone, Debug)]
pub struct LiveOptions {
    /// What the analysis takes for granted; its time of judgement is set by
    /// [`Live`](super::Live).
    pub policy: Policy,
    /// From which age of its last answer on a rank counts as silent.
    pub silent_after: Duration,
    /// How many operations are kept in memory over all ranks. Where rings hold more, the oldest
    /// finished ones are let go, and show as lost.
    pub entry_budget: usize,
    /// How many operations of one record are kept at most.
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
    /// For records that will not change any more: dumps are judged as made because something hung,
    /// and no rank is expected to answer again.
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

/// How dumps are judged: [`analyze`](rcomm_verdict::analyze), unless a test replaces it.
pub type Judge = fn(&[Arc<Dump>], &Policy) -> Report;
