//! The times of a reducer's steps.

use rcomm_recorder::model::{GroupId, ReducerBucket, ReducerSums, ReducerTimes};
use rcomm_recorder::record::FlightRecorder;
use std::time::{Duration, Instant};

/// The times of one step on this rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StepStatistics {
    /// The number of the step, counted from 1; 0 before the first one has ended.
    pub step: u64,
    /// From [`Reducer::begin_forward`](super::Reducer::begin_forward), or else from the end of the step before, to
    /// the first gradient. Without `begin_forward` it includes the optimizer and the loading of data.
    pub forward: Duration,
    /// From the first gradient to the call of `finish`.
    pub backward: Duration,
    /// For how long at least one bucket was under way.
    pub communication: Duration,
    /// For how long `finish` waited: the part of communication that the backward pass did not hide. The calls that
    /// [`Reducer::finish_each`](super::Reducer::finish_each) makes count, too.
    pub exposed: Duration,
    /// The buckets in the order in which they were sent.
    pub buckets: Vec<BucketStatistics>,
}

impl StepStatistics {
    /// For how long buckets were under way while the program computed.
    pub fn hidden(&self) -> Duration {
        self.communication.saturating_sub(self.exposed)
    }

    /// From the beginning of the forward pass to the last average.
    pub fn total(&self) -> Duration {
        self.forward + self.backward + self.exposed
    }

    /// How many bytes of gradients this rank had, over all buckets.
    pub fn bytes(&self) -> usize {
        self.buckets.iter().map(|bucket| bucket.bytes).sum()
    }
}

/// The times of one bucket in one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct BucketStatistics {
    /// How many parameters it has.
    pub parameters: usize,
    /// The size of its gradients in their own type, in bytes; of a sparse gradient, only that of its values.
    pub bytes: usize,
    /// The time from the first gradient of the step until the bucket's last gradient was given.
    pub ready: Duration,
    /// The time from the first gradient of the step until the bucket was sent, after all buckets before it.
    pub sent: Duration,
    /// For how long the bucket was under way, not counting the time until the bucket before it had ended. With a hook:
    /// until `finish` saw its end.
    pub communication: Duration,
    /// For how long `finish` waited for it.
    pub exposed: Duration,
}

/// Measures the steps of a reducer. Allocates in the first steps only.
pub(super) struct Meter {
    current: StepStatistics,
    last: StepStatistics,
    /// The end of the step before, or the beginning of the forward pass.
    since: Instant,
    /// When the first gradient of the step was given.
    backward: Option<Instant>,
    /// By bucket, when its last gradient was given.
    ready: Vec<Instant>,
    /// By bucket, when it was sent.
    sent: Vec<Instant>,
    /// The end of the bucket before.
    ended: Option<Instant>,
    sums: ReducerSums,
}

impl Meter {
    pub(super) fn new() -> Self {
        Self {
            current: StepStatistics::default(),
            last: StepStatistics::default(),
            since: Instant::now(),
            backward: None,
            ready: Vec::new(),
            sent: Vec::new(),
            ended: None,
            sums: ReducerSums::default(),
        }
    }

    /// The last step that has ended.
    pub(super) fn last(&self) -> &StepStatistics {
        &self.last
    }

    pub(super) fn begin_forward(&mut self) {
        self.since = Instant::now();
    }

    /// Notes the first gradient of a step.
    pub(super) fn begin_backward(&mut self) {
        let now = Instant::now();
        self.current.forward = now.duration_since(self.since);
        self.backward = Some(now);
        self.current.buckets.clear();
        self.sent.clear();
        self.ended = None;
        self.current.communication = Duration::ZERO;
    }

    /// Notes that a bucket has all of its gradients.
    pub(super) fn ready(&mut self, bucket: usize) {
        let now = Instant::now();
        if self.ready.len() <= bucket {
            self.ready.resize(bucket + 1, now);
        }
        self.ready[bucket] = now;
    }

    /// Notes that the next bucket was sent.
    pub(super) fn sent(&mut self, parameters: usize, bytes: usize) {
        let now = Instant::now();
        let ready = self.ready.get(self.sent.len()).copied().unwrap_or(now);
        let begin = self.backward.unwrap_or(now);
        self.sent.push(now);
        self.current.buckets.push(BucketStatistics {
            parameters,
            bytes,
            ready: ready.saturating_duration_since(begin),
            sent: now.duration_since(begin),
            ..BucketStatistics::default()
        });
    }

    /// Notes that the backward pass has ended.
    pub(super) fn begin_finish(&mut self) {
        let backward = self.backward.map(|since| since.elapsed());
        self.current.backward = backward.unwrap_or_default();
    }

    /// Notes that a bucket has ended, for which `finish` has waited since `wait_began`. `elapsed` is how long the
    /// bucket was under way; `None` if unknown, and now counts as its end.
    pub(super) fn ended(&mut self, bucket: usize, wait_began: Instant, elapsed: Option<Duration>) {
        let now = Instant::now();
        let (Some(&sent), Some(statistics)) =
            (self.sent.get(bucket), self.current.buckets.get_mut(bucket))
        else {
            return;
        };
        let end = elapsed.map_or(now, |elapsed| sent + elapsed).min(now);
        let begin = self.ended.map_or(sent, |ended| ended.max(sent));
        statistics.communication = end.saturating_duration_since(begin);
        statistics.exposed = now.duration_since(wait_began);
        self.current.communication += statistics.communication;
        self.ended = Some(end.max(begin));
    }

    /// Ends the step, whose waiting began at `wait_began`.
    pub(super) fn finish(&mut self, step: u64, wait_began: Instant) {
        let now = Instant::now();
        self.current.exposed = now.duration_since(wait_began);
        self.current.step = step;
        self.since = now;
        self.backward = None;
        std::mem::swap(&mut self.current, &mut self.last);
        let (last, sums) = (&self.last, &mut self.sums);
        sums.steps += 1;
        for (sum, time) in [
            (&mut sums.forward_ns, last.forward),
            (&mut sums.backward_ns, last.backward),
            (&mut sums.communication_ns, last.communication),
            (&mut sums.exposed_ns, last.exposed),
        ] {
            *sum = sum.saturating_add(ns(time));
        }
    }

    /// Records the last step, of a reducer in this group. Allocates nothing.
    // Invariant 4 of docs/ARCHITECTURE.md: recording never blocks and never fails.
    pub(super) fn record(&self, recorder: &FlightRecorder, group: GroupId) {
        let last = &self.last;
        let times = ReducerTimes {
            step: last.step,
            forward_ns: ns(last.forward),
            backward_ns: ns(last.backward),
            communication_ns: ns(last.communication),
            exposed_ns: ns(last.exposed),
            bytes: last.bytes() as u64,
            bucket_count: count(last.buckets.len()),
            sums: self.sums,
        };
        let buckets = last.buckets.iter().zip(0..);
        let buckets = buckets.map(|(bucket, index)| ReducerBucket {
            index,
            parameters: count(bucket.parameters),
            bytes: bucket.bytes as u64,
            ready_ns: ns(bucket.ready),
            sent_ns: ns(bucket.sent),
            communication_ns: ns(bucket.communication),
            exposed_ns: ns(bucket.exposed),
        });
        recorder.note_reducer_step(group, &times, buckets);
    }
}

fn ns(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn count(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_that_overlap_are_counted_once() {
        let mut meter = Meter::new();
        meter.begin_backward();
        meter.sent(2, 80);
        meter.sent(1, 40);
        meter.begin_finish();
        let wait_began = Instant::now();
        // As if the two had been sent at once, 4 ms before: the first took 1 ms, and the second 2 ms more.
        let ms = Duration::from_millis;
        meter.sent = vec![wait_began - ms(4); 2];
        meter.ended(0, wait_began, Some(ms(1)));
        meter.ended(1, wait_began, Some(ms(3)));
        meter.finish(1, wait_began);
        let step = meter.last();
        assert_eq!((step.step, step.bytes(), step.buckets.len()), (1, 120, 2));
        assert_eq!(step.buckets[0].communication, ms(1));
        assert_eq!(step.buckets[1].communication, ms(2));
        assert_eq!(step.communication, ms(3));
        assert_eq!(step.hidden(), ms(3).saturating_sub(step.exposed));
    }
}
