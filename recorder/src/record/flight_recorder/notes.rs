//! Records what has happened besides the operations: failures, steps of reducers, and communicators that exist.

use super::FlightRecorder;
use crate::model::{Failure, GroupId, ReducerBucket, ReducerTimes};
use crate::record::layout::{group, header};
use crate::record::operation::GroupHandle;
use crate::record::sync::Memory;
use crate::record::{failures, reducer};
use std::sync::atomic::Ordering;

impl FlightRecorder {
    /// Sets NCCL's number of the communicator that a group has, the same on all members, once it is known. Does nothing if
    /// the ring has no row for the group.
    pub fn set_communicator(&self, of: GroupHandle, number: u64) {
        if let Some(row) = self.group_words(of.0) {
            row[group::COMM_HASH].store(number, Ordering::Relaxed);
        }
    }

    /// Records the code with which this process exits, now. Takes no lock and does not allocate.
    pub fn note_exit(&self, code: u8) {
        let words = self.map.words();
        words[header::EXIT_CODE].store(u64::from(code), Ordering::Relaxed);
        words[header::EXITED_AT].store(self.clock.now().0, Ordering::Release);
    }

    /// Records a failure, now; its `id` and `time_ns` are ignored. Takes no lock and does not allocate. The first eight
    /// and the newest eight failures are kept.
    pub fn note_failure(&self, failure: &Failure) {
        failures::write(&self.map, &self.layout, failure, self.clock.now());
    }

    /// Records a step of a reducer that ended now, with its buckets in the order of sending; `group` is the group's
    /// number in this process. Takes no lock and does not allocate. The newest steps are kept, and of each the
    /// [`MAX_BUCKETS`](crate::model::ReducerStep::MAX_BUCKETS) buckets that were under way the longest.
    pub fn note_reducer_step(
        &self,
        group: GroupId,
        times: &ReducerTimes,
        buckets: impl Iterator<Item = ReducerBucket>,
    ) {
        let now = self.clock.now();
        reducer::write(&self.map, &self.layout, group, times, buckets, now);
    }
}
