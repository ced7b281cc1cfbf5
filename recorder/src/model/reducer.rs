//! The durations and sizes of a reducer's steps. A reducer averages the gradients of a data-parallel training over the
//! ranks, in buckets.

use super::GroupId;
use serde::{Deserialize, Serialize};

/// One step of a reducer on one rank. Durations are in ns.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ReducerStep {
    /// The step's number among the steps of all reducers of the process, from 1.
    pub id: u64,
    /// The number of the reducer's group in this process.
    pub group: GroupId,
    /// When the step ended, wall clock, ns since the epoch.
    pub ended_ns: i64,
    /// The step's times and sizes.
    pub times: ReducerTimes,
    /// Buckets in the order in which they were sent: all of them, or the [`MAX_BUCKETS`](Self::MAX_BUCKETS) with the
    /// longest [`communication_ns`](ReducerBucket::communication_ns). A bucket is under way from when it is sent until
    /// its averages are there.
    pub buckets: Vec<ReducerBucket>,
}

/// The times and sizes of one step of a reducer. Durations are in ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ReducerTimes {
    /// The step's number in its reducer, from 1.
    pub step: u64,
    /// From the beginning of the forward pass, or from the end of the step before if the program did not note that
    /// beginning, to the first gradient.
    pub forward_ns: u64,
    /// From the first gradient to the wait for the averages.
    pub backward_ns: u64,
    /// For how long at least one bucket was under way.
    pub communication_ns: u64,
    /// For how long the rank waited for averages: the part of communication that the backward pass did not hide.
    pub exposed_ns: u64,
    /// The size of all gradients of the step, in bytes.
    pub bytes: u64,
    /// The number of buckets.
    pub bucket_count: u32,
    /// The sums over all steps of the reducer up to and including this one.
    pub sums: ReducerSums,
}

/// Sums over the steps of a reducer, in ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ReducerSums {
    /// The number of steps.
    pub steps: u64,
    /// The sum of [`ReducerTimes::forward_ns`].
    pub forward_ns: u64,
    /// The sum of [`ReducerTimes::backward_ns`].
    pub backward_ns: u64,
    /// The sum of [`ReducerTimes::communication_ns`].
    pub communication_ns: u64,
    /// The sum of [`ReducerTimes::exposed_ns`].
    pub exposed_ns: u64,
}

/// One bucket of gradients in one step. Durations are in ns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ReducerBucket {
    /// The bucket's place in the order of sending, from 0.
    pub index: u32,
    /// The number of parameters in the bucket.
    pub parameters: u32,
    /// The size of the bucket's gradients, in bytes.
    pub bytes: u64,
    /// When the program gave the bucket's last gradient, counted from the first gradient of the step.
    pub ready_ns: u64,
    /// When the bucket was sent, counted from the first gradient of the step.
    pub sent_ns: u64,
    /// For how long the bucket was under way, not counting the time until the bucket before it had ended.
    pub communication_ns: u64,
    /// For how long the rank waited for the bucket.
    pub exposed_ns: u64,
}

impl ReducerStep {
    /// Maximum number of buckets in the record of a step.
    pub const MAX_BUCKETS: usize = 18;

    /// The bucket with the longest [`communication_ns`](ReducerBucket::communication_ns); `None` if there was no
    /// bucket.
    pub fn slowest_bucket(&self) -> Option<&ReducerBucket> {
        // Of several that took equally long, the first is returned.
        self.buckets
            .iter()
            .rev()
            .max_by_key(|bucket| bucket.communication_ns)
    }
}

impl ReducerTimes {
    /// The duration of the step: forward pass, backward pass and the wait for averages, ns.
    pub fn total_ns(&self) -> u64 {
        self.forward_ns
            .saturating_add(self.backward_ns)
            .saturating_add(self.exposed_ns)
    }

    /// For how long buckets were under way while the program computed, ns.
    pub fn hidden_ns(&self) -> u64 {
        self.communication_ns.saturating_sub(self.exposed_ns)
    }
}
