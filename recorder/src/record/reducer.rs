//! Steps of reducers in a ring: a fixed number of slots, which keep the newest steps of the process.

use super::clock::{Anchor, Timestamp};
use super::layout::{RingLayout, halves, header, join, reducer};
use super::ring::{Found, Missed};
use super::rings;
use super::sync::{Memory, Read, Word};
use crate::model::{GroupId, ReducerBucket, ReducerStep, ReducerSums, ReducerTimes};
use std::sync::atomic::Ordering;

/// How often a slot is read at most while it changes.
const TRIES: u32 = 1_000;
/// Maximum number of slots that are read.
const MAX_ROWS: usize = 256;

/// Stores a step that ended at this time. Takes no lock and allocates nothing. A step without a slot shows as a gap in
/// the numbers.
pub(super) fn write<M: Memory>(
    memory: &M,
    layout: &RingLayout,
    group: GroupId,
    times: &ReducerTimes,
    buckets: impl Iterator<Item = ReducerBucket>,
    time: Timestamp,
) {
    if layout.reducer.rows == 0 {
        return;
    }
    let Some(last_id) = memory.words().get(header::LAST_REDUCER_STEP) else {
        return;
    };
    let id = last_id.fetch_add(1, Ordering::Relaxed) + 1;
    let (kept, count) = longest(buckets);
    let written: Result<(), Missed> = rings::reducer(layout).write(memory, id, |words| {
        fill(words, group, times, &kept[..count], time);
    });
    let _ = written;
}

/// The buckets with the longest `communication_ns`, in their order, and how many they are.
fn longest(
    buckets: impl Iterator<Item = ReducerBucket>,
) -> ([ReducerBucket; ReducerStep::MAX_BUCKETS], usize) {
    let mut kept = [ReducerBucket::default(); ReducerStep::MAX_BUCKETS];
    let mut count = 0;
    for bucket in buckets {
        if count < kept.len() {
            kept[count] = bucket;
            count += 1;
            continue;
        }
        // The order of the others stays: those behind the shortest move one place to the front.
        let shortest = (0..count).min_by_key(|&index| kept[index].communication_ns);
        if let Some(shortest) = shortest
            && kept[shortest].communication_ns < bucket.communication_ns
        {
            kept[shortest..].rotate_left(1);
            kept[count - 1] = bucket;
        }
    }
    (kept, count)
}

fn fill<W: Word>(
    words: &[W; reducer::WORDS],
    group: GroupId,
    times: &ReducerTimes,
    buckets: &[ReducerBucket],
    time: Timestamp,
) {
    let store = |word: usize, value| words[word].store(value, Ordering::Relaxed);
    store(reducer::ENDED, time.as_ns());
    store(reducer::STEP, times.step);
    store(reducer::GROUP, join(group, times.bucket_count));
    store(reducer::KEPT, buckets.len() as u64);
    let durations = [
        times.forward_ns,
        times.backward_ns,
        times.communication_ns,
        times.exposed_ns,
    ];
    for (value, word) in durations.into_iter().zip(reducer::TIMES..) {
        store(word, value);
    }
    store(reducer::BYTES, times.bytes);
    let sums = &times.sums;
    let sums = [
        sums.steps,
        sums.forward_ns,
        sums.backward_ns,
        sums.communication_ns,
        sums.exposed_ns,
    ];
    for (value, word) in sums.into_iter().zip(reducer::SUMS..) {
        store(word, value);
    }
    for (bucket, row) in buckets.iter().zip(0..) {
        let values = [
            join(bucket.index, bucket.parameters),
            bucket.bytes,
            bucket.ready_ns,
            bucket.sent_ns,
            bucket.communication_ns,
            bucket.exposed_ns,
        ];
        let first = reducer::BUCKETS + row * reducer::BUCKET_WORDS;
        for (value, word) in values.into_iter().zip(first..) {
            store(word, value);
        }
    }
}

/// The steps that a ring holds, by number. Those whose slot cannot be read are left out.
pub(super) fn read(memory: &impl Read, layout: &RingLayout, anchor: Anchor) -> Vec<ReducerStep> {
    let ring = rings::reducer(layout);
    let rows = layout.reducer.rows.min(MAX_ROWS);
    let mut steps: Vec<ReducerStep> = (0..rows)
        .filter_map(|index| match ring.read(memory, index, TRIES) {
            Found::Record { id, words } if ring.index_of(id) == index => {
                Some(step_of(id, &words, anchor))
            }
            Found::Record { .. } | Found::Empty | Found::Unreadable { .. } => None,
        })
        .collect();
    steps.sort_unstable_by_key(|step| step.id);
    steps
}

fn step_of(id: u64, words: &[u64; reducer::WORDS], anchor: Anchor) -> ReducerStep {
    let (group, bucket_count) = halves(words[reducer::GROUP]);
    let kept = words[reducer::KEPT].min(ReducerStep::MAX_BUCKETS as u64) as usize;
    let rows = words[reducer::BUCKETS..].chunks_exact(reducer::BUCKET_WORDS);
    let buckets = rows.take(kept).map(|row| {
        let (index, parameters) = halves(row[0]);
        ReducerBucket {
            index,
            parameters,
            bytes: row[1],
            ready_ns: row[2],
            sent_ns: row[3],
            communication_ns: row[4],
            exposed_ns: row[5],
        }
    });
    ReducerStep {
        id,
        group,
        ended_ns: anchor.wall_of(words[reducer::ENDED]),
        times: ReducerTimes {
            step: words[reducer::STEP],
            forward_ns: words[reducer::TIMES],
            backward_ns: words[reducer::TIMES + 1],
            communication_ns: words[reducer::TIMES + 2],
            exposed_ns: words[reducer::TIMES + 3],
            bytes: words[reducer::BYTES],
            bucket_count,
            sums: ReducerSums {
                steps: words[reducer::SUMS],
                forward_ns: words[reducer::SUMS + 1],
                backward_ns: words[reducer::SUMS + 2],
                communication_ns: words[reducer::SUMS + 3],
                exposed_ns: words[reducer::SUMS + 4],
            },
        },
        buckets: buckets.collect(),
    }
}

/// A number that changes when a step is written; 0 in a ring without steps.
pub(crate) fn fingerprint(memory: &impl Read, layout: &RingLayout) -> u64 {
    // The number of the newest step cannot serve: it is given before the step is written.
    rings::reducer(layout).hash_stamps(memory, layout.reducer.rows.min(MAX_ROWS), 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{FlightRecorder, Placement, RecorderConfig};

    fn recorder() -> FlightRecorder {
        let config = RecorderConfig {
            placement: Placement::Memory,
            entries: 16,
            ..RecorderConfig::new("job", 0, 2)
        };
        FlightRecorder::create(&config).unwrap()
    }

    fn bucket(index: u32, communication_ns: u64) -> ReducerBucket {
        ReducerBucket {
            index,
            parameters: 3,
            bytes: 1 << 40,
            ready_ns: 5,
            sent_ns: 6,
            communication_ns,
            exposed_ns: 2,
        }
    }

    fn times(step: u64) -> ReducerTimes {
        ReducerTimes {
            step,
            forward_ns: 10,
            backward_ns: 20,
            communication_ns: 15,
            exposed_ns: 4,
            bytes: 1 << 41,
            bucket_count: 2,
            sums: ReducerSums {
                steps: step,
                forward_ns: 10 * step,
                backward_ns: 20 * step,
                communication_ns: 15 * step,
                exposed_ns: 4 * step,
            },
        }
    }

    #[test]
    fn the_newest_steps_are_read_back_with_their_buckets() {
        let recorder = recorder();
        let last_step = reducer::ROWS as u64 + 3;
        for step in 1..=last_step {
            let buckets = [bucket(0, 7), bucket(1, 8)].into_iter();
            recorder.note_reducer_step(4, &times(step), buckets);
        }
        let steps = recorder.snapshot().reducer_steps;
        let numbers: Vec<u64> = steps.iter().map(|step| step.id).collect();
        assert_eq!(numbers, (4..=last_step).collect::<Vec<_>>());
        let last = steps.last().unwrap();
        assert_eq!((last.group, last.times), (4, times(last_step)));
        assert_eq!(last.buckets, [bucket(0, 7), bucket(1, 8)]);
        assert_eq!(last.slowest_bucket(), Some(&bucket(1, 8)));
        assert!(last.ended_ns > 0);
        assert_eq!((last.times.total_ns(), last.times.hidden_ns()), (34, 11));
    }

    #[test]
    fn of_many_buckets_the_slowest_are_kept_in_order() {
        let recorder = recorder();
        let max = ReducerStep::MAX_BUCKETS as u32;
        let is_fast = |index: u32| index.is_multiple_of(3);
        let buckets = (0..2 * max).map(|index| bucket(index, if is_fast(index) { 1 } else { 100 }));
        let slow = buckets.clone().filter(|bucket| !is_fast(bucket.index));
        let slow: Vec<ReducerBucket> = slow.take(max as usize).collect();
        recorder.note_reducer_step(0, &times(1), buckets);
        let steps = recorder.snapshot().reducer_steps;
        assert_eq!(steps[0].buckets, slow);
    }
}
