//! Failures in a ring: a fixed number of slots, of which half keep the first failures and half the newest.
//!
//! The first ones show how a chain of failures began; the newest are relevant for a program that continues
//! after failures.

use super::bytes::words_of;
use super::clock::{Anchor, Timestamp};
use super::layout::{self, RingLayout, failure, halves, header, join};
use super::ring::{Found, Missed, SlotRing};
use super::signature::cut;
use super::sync::{Memory, Read, Word};
use crate::model::{FailedOperation, Failure, FailureKind, OpType, ProcessGroupInfo};
use std::sync::atomic::Ordering;

/// How often a slot is read at most while it changes.
const TRIES: u32 = 1_000;

type Slots = SlotRing<{ failure::WORDS }>;

/// The slots of the first failures, and those of the newest; `None` in a ring without them.
fn rings(layout: &RingLayout) -> Option<[Slots; 2]> {
    let section = layout.failures;
    let each = section.rows / 2;
    (each > 0)
        .then(|| [0, each].map(|first| SlotRing::new(section.row(first, failure::WORDS), each)))
}

/// Stores a failure that was seen at this time. Takes no lock and allocates nothing. A failure without a slot shows as
/// a gap in the numbers.
pub(super) fn write<M: Memory>(memory: &M, layout: &RingLayout, failure: &Failure, at: Timestamp) {
    let Some([first, newest]) = rings(layout) else {
        return;
    };
    let Some(last_id) = memory.words().get(header::LAST_FAILURE) else {
        return;
    };
    let id = last_id.fetch_add(1, Ordering::Relaxed) + 1;
    let ring = if id <= first.slots() as u64 {
        first
    } else {
        newest
    };
    let written: Result<(), Missed> = ring.write(memory, id, |words| fill(words, failure, at));
    let _ = written;
}

fn fill<W: Word>(words: &[W; failure::WORDS], recorded: &Failure, at: Timestamp) {
    let store = |word: usize, value| words[word].store(value, Ordering::Relaxed);
    let operation = recorded.operation.as_ref();
    // The bytes of `failure::WHAT`: the kind, whether there is an operation, whether it is P2P, and its code; the upper
    // half is `seen_by`.
    let flags = operation.map_or(0, |op| {
        1 << 8 | u64::from(op.is_p2p) << 16 | u64::from(op.op.code()) << 24
    });
    let ranks = &recorded.ranks[..recorded.ranks.len().min(Failure::MAX_RANKS)];
    let text = cut(&recorded.text, Failure::MAX_TEXT).as_bytes();
    store(failure::WHEN, at.as_ns());
    let kind = u64::from(recorded.kind.code());
    let seen_by = u64::from(recorded.seen_by);
    store(failure::WHAT, kind | flags | seen_by << 32);
    let group = recorded.group.unwrap_or(ProcessGroupInfo::UNKNOWN_ID);
    store(failure::GROUP, join(group, recorded.rank_count));
    store(failure::SEQ, operation.map_or(0, |op| op.seq));
    store(failure::RECORD, operation.map_or(0, |op| op.record_id));
    store(
        failure::LENGTHS,
        join(ranks.len() as u32, text.len() as u32),
    );
    for (pair, word) in ranks.chunks(2).zip(failure::RANKS..) {
        store(word, join(pair[0], pair.get(1).copied().unwrap_or(0)));
    }
    for (value, word) in words_of(text).zip(failure::TEXT..) {
        store(word, value);
    }
}

/// The failures that a ring holds, by number. Those whose slot cannot be read are left out.
pub(super) fn read(memory: &impl Read, layout: &RingLayout, anchor: Anchor) -> Vec<Failure> {
    let rings = rings(layout).into_iter().flatten();
    let slots = rings.flat_map(|ring| (0..ring.slots()).map(move |index| (ring, index)));
    let mut failures: Vec<Failure> = slots
        .filter_map(|(ring, index)| match ring.read(memory, index, TRIES) {
            Found::Record { id, words } if ring.index_of(id) == index => {
                failure_of(id, &words, anchor)
            }
            Found::Record { .. } | Found::Empty | Found::Unreadable { .. } => None,
        })
        .collect();
    failures.sort_unstable_by_key(|failure| failure.id);
    failures.truncate(2 * failure::EACH);
    failures
}

/// Decodes the words of a slot; `None` if the kind of failure is unknown.
fn failure_of(id: u64, words: &[u64; failure::WORDS], anchor: Anchor) -> Option<Failure> {
    let facts = words[failure::WHAT];
    let [kind, has_operation, is_p2p, op, ..] = facts.to_le_bytes();
    let (group, rank_count) = halves(words[failure::GROUP]);
    let (ranks, bytes) = halves(words[failure::LENGTHS]);
    let rank_words = words[failure::RANKS..failure::TEXT].iter();
    let pairs = rank_words.flat_map(|&word| <[u32; 2]>::from(halves(word)));
    let text: Vec<u8> = words[failure::TEXT..]
        .iter()
        .flat_map(|word| word.to_le_bytes())
        .take((bytes as usize).min(Failure::MAX_TEXT))
        .collect();
    let mut failure = Failure {
        id,
        kind: FailureKind::from_code(kind)?,
        ranks: pairs.take(ranks as usize).collect(),
        rank_count,
        group: (group != ProcessGroupInfo::UNKNOWN_ID).then_some(group),
        operation: (has_operation != 0).then(|| FailedOperation {
            op: OpType::from_code(op).unwrap_or(OpType::Other),
            seq: words[failure::SEQ],
            is_p2p: is_p2p != 0,
            record_id: words[failure::RECORD],
        }),
        time_ns: anchor.wall_of(words[failure::WHEN]),
        seen_by: halves(facts).1,
        text: String::from_utf8_lossy(&text).into_owned(),
    };
    failure.limit();
    Some(failure)
}

/// When the owner closed the ring, wall clock, ns since the epoch; 0 if it did not.
pub(super) fn closed_ns(memory: &impl Read, anchor: Anchor) -> i64 {
    match memory.load(header::STATE) {
        layout::STATE_CLOSED => anchor.wall_of(memory.load(header::CLOSED_AT)),
        _ => 0,
    }
}

/// A number that changes when a failure is written.
pub(crate) fn fingerprint(memory: &impl Read, layout: &RingLayout) -> u64 {
    let rings = rings(layout).into_iter().flatten();
    rings.fold(0, |hash, ring| ring.hash_stamps(memory, ring.slots(), hash))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::dump::Dump;
    use crate::record::{FlightRecorder, Placement, RecorderConfig};

    fn recorder() -> FlightRecorder {
        let config = RecorderConfig {
            placement: Placement::Memory,
            entries: 16,
            ..RecorderConfig::new("job", 3, 128)
        };
        FlightRecorder::create(&config).unwrap()
    }

    fn example(ranks: &[u32]) -> Failure {
        Failure {
            group: Some(4),
            operation: Some(FailedOperation {
                op: OpType::AllReduce,
                seq: 1 << 40,
                is_p2p: true,
                record_id: 77,
            }),
            ..Failure::new(FailureKind::PeerGone, ranks, 9, "rank 1 is gone: ä")
        }
    }

    #[test]
    fn failures_are_read_back_as_written() {
        let recorder = recorder();
        let all_ranks: Vec<u32> = (0..100).collect();
        for ranks in [&[][..], &[5], &[5, 8, 100], &all_ranks] {
            recorder.note_failure(&example(ranks));
        }
        let read = recorder.snapshot().failures;
        assert_eq!(read.len(), 4);
        for (read, ranks) in read.iter().zip([&[][..], &[5], &[5, 8, 100], &all_ranks]) {
            let written = Failure {
                id: read.id,
                time_ns: read.time_ns,
                ..example(ranks)
            };
            assert_eq!(*read, written);
            assert!(read.time_ns > 0);
        }
        assert_eq!(read[3].rank_count, 100);
        let ids: Vec<u64> = read.iter().map(|failure| failure.id).collect();
        assert_eq!(ids, [1, 2, 3, 4]);
    }

    #[test]
    fn the_first_and_the_newest_are_kept() {
        let recorder = recorder();
        for _ in 0..100 {
            recorder.note_failure(&example(&[1]));
        }
        let failures = recorder.snapshot().failures;
        let ids: Vec<u64> = failures.iter().map(|failure| failure.id).collect();
        let expected: Vec<u64> = (1..=8).chain(93..=100).collect();
        assert_eq!(ids, expected);
    }

    #[test]
    fn invalid_words_give_no_failure_or_a_limited_one() {
        let anchor = Anchor {
            monotonic_ns: 0,
            wall_ns: 0,
        };
        assert_eq!(failure_of(1, &[0; failure::WORDS], anchor), None);
        let mut words = [u64::MAX; failure::WORDS];
        assert_eq!(failure_of(1, &words, anchor), None);
        words[failure::WHAT] = 1 | 0xffff_ff00;
        let read = failure_of(1, &words, anchor).unwrap();
        assert!(read.ranks.len() <= Failure::MAX_RANKS);
        assert!(read.text.len() <= Failure::MAX_TEXT);
        let operation = read.operation.map(|operation| operation.op);
        assert_eq!(operation, Some(OpType::Other));
    }

    #[test]
    fn failures_are_read_back_from_both_encodings() {
        let recorder = recorder();
        recorder.note_failure(&example(&[1, 2]));
        recorder.note_failure(&Failure::new(FailureKind::Abort, &[], 0, "\"by\" hand\n"));
        let dump = recorder.snapshot();
        for bytes in [dump.to_json(), dump.to_pickle()] {
            let (read, problems) = Dump::read(&bytes).unwrap();
            assert!(problems.is_empty(), "{problems:?}");
            assert_eq!(read.failures, dump.failures);
        }
    }
}
