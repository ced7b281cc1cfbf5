//! Past snapshots, compressed, bounded in bytes and in number.

use crate::state::snapshot::Point;
use flate2::Compression;
use flate2::read::DeflateDecoder;
use flate2::write::DeflateEncoder;
use std::collections::VecDeque;
use std::io::{Read, Write};

/// Maximum size of the compressed snapshots, in bytes; the oldest are dropped first, the newest is kept.
const MAX_BYTES: usize = 48 << 20;
/// Maximum number of snapshots, however small: two hours with one per second.
const MAX_SNAPSHOTS: usize = 7200;

struct KeptSnapshot {
    point: Point,
    deflated: Box<[u8]>,
}

/// The kept snapshots.
pub(crate) struct History {
    /// Oldest first.
    kept: VecDeque<KeptSnapshot>,
    /// Size of the compressed snapshots.
    bytes: usize,
    /// [`MAX_BYTES`], or less in tests.
    max_bytes: usize,
}

impl Default for History {
    fn default() -> Self {
        Self {
            kept: VecDeque::new(),
            bytes: 0,
            max_bytes: MAX_BYTES,
        }
    }
}

impl History {
    /// Adds the JSON form of a snapshot.
    pub(crate) fn add(&mut self, point: Point, text: &str) {
        let mut encoder = DeflateEncoder::new(Vec::new(), Compression::fast());
        // Writing to memory cannot fail; if it did, only this snapshot would be missing.
        let Ok(deflated) = encoder
            .write_all(text.as_bytes())
            .and_then(|()| encoder.finish())
        else {
            return;
        };
        self.bytes += deflated.len();
        self.kept.push_back(KeptSnapshot {
            point,
            deflated: deflated.into(),
        });
        while self.kept.len() > MAX_SNAPSHOTS
            || (self.bytes > self.max_bytes && self.kept.len() > 1)
        {
            if let Some(gone) = self.kept.pop_front() {
                self.bytes -= gone.deflated.len();
            }
        }
    }

    /// One point for each snapshot, oldest first.
    pub(crate) fn points(&self) -> Vec<Point> {
        self.kept.iter().map(|kept| kept.point.clone()).collect()
    }

    /// The compressed JSON form of a snapshot; `None` if it is not kept.
    pub(crate) fn deflated(&self, number: u64) -> Option<Vec<u8>> {
        let index = self
            .kept
            .binary_search_by_key(&number, |kept| kept.point.number)
            .ok()?;
        Some(self.kept[index].deflated.to_vec())
    }
}

/// Decompresses a result of [`History::deflated`].
pub(crate) fn inflate(deflated: &[u8]) -> std::io::Result<String> {
    let mut text = String::new();
    DeflateDecoder::new(deflated).read_to_string(&mut text)?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcomm_analyzer::Verdict;

    fn point(number: u64) -> Point {
        Point {
            number,
            at_ns: 0,
            verdict: Verdict::Running,
            in_flight: 0,
            oldest_ms: 0.0,
            errors: 0,
            warnings: 0,
        }
    }

    #[test]
    fn snapshots_are_restored_unchanged_and_the_oldest_dropped_first() {
        let mut history = History::default();
        for number in 1..=MAX_SNAPSHOTS as u64 + 3 {
            history.add(point(number), &format!("snapshot {number}"));
        }
        assert_eq!(history.points().len(), MAX_SNAPSHOTS);
        assert!(history.deflated(3).is_none());
        let kept = history.deflated(4).expect("snapshot 4 is kept");
        assert_eq!(
            inflate(&kept).expect("it was compressed here"),
            "snapshot 4"
        );
        assert!(history.deflated(u64::MAX).is_none());
    }

    #[test]
    fn memory_is_bounded_even_for_incompressible_snapshots() {
        let mut history = History {
            max_bytes: 1 << 20,
            ..History::default()
        };
        let mut state = 1_u64;
        let noise: String = (0..128 << 10)
            .map(|_| {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                char::from(b' ' + (state >> 58) as u8)
            })
            .collect();
        for number in 1..40 {
            history.add(point(number), &noise);
        }
        assert!(history.bytes <= history.max_bytes && history.kept.len() > 3);
        assert_eq!(
            history.kept.iter().map(|k| k.deflated.len()).sum::<usize>(),
            history.bytes
        );
    }
}
