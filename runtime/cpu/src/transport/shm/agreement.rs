//! Agreements between the ranks of a host, each identified by a number: the first rank that calls decides.

use super::mapping::Mapping;
use rcomm_core::backend::Agreement;
use sha2::{Digest, Sha256};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Number of agreements that a segment can hold; none is ever removed.
const AGREEMENTS: usize = 1024;
/// Bytes of an entry: the number, then the hash, the length and the first bytes of the agreed value.
const AGREEMENT_LEN: usize = 64;
// Offsets of the fields in an entry; the number is at 0.
const HASH: usize = 8;
const LEN: usize = 16;
const VALUE: usize = 24;
const VALUE_LEN: usize = AGREEMENT_LEN - VALUE;
/// A number is searched in this many consecutive entries, from the one whose index is the number modulo `AGREEMENTS`.
const PROBES: usize = 32;
/// How long a rank waits until the rank that has decided has written the value.
const WRITE_TIME: Duration = Duration::from_millis(200);

/// Bytes of the table.
pub(super) const AGREEMENTS_LEN: usize = AGREEMENTS * AGREEMENT_LEN;

/// Agrees on `value` under `number`, in the table that begins at `start`, without waiting until the other ranks call:
/// the first rank that calls decides. Returns `Same` if this rank's value has the hash of the decided one, else `Other`
/// with the first [`VALUE_LEN`] bytes of the decided value, after at most about [`WRITE_TIME`]. Returns `None` if all
/// entries for this number are in use: none is ever freed, so the other ranks get `None` as well.
pub(super) fn agree(table: &Mapping, start: usize, number: u64, value: &[u8]) -> Option<Agreement> {
    let number = number.max(1);
    let first = (number % AGREEMENTS as u64) as usize;
    let entries = (first..first + PROBES).map(|index| start + index % AGREEMENTS * AGREEMENT_LEN);
    for entry in entries {
        if set_once(table.long(entry), number) != number {
            continue;
        }
        let own_hash = hash(value);
        // The first rank that replaces the zero decides, whichever rank has written the number.
        let first_hash = table.long(entry + HASH);
        return Some(
            match first_hash.compare_exchange(0, own_hash, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => {
                    write(table, entry, value);
                    Agreement::Same
                }
                Err(first_hash) if first_hash == own_hash => Agreement::Same,
                Err(_) => Agreement::Other(read(table, entry)),
            },
        );
    }
    None
}

/// Sets a word that is zero; returns the word's value afterwards.
fn set_once(word: &AtomicU64, value: u64) -> u64 {
    match word.compare_exchange(0, value, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => value,
        Err(held) => held,
    }
}

/// A hash of the value, which is never 0.
fn hash(value: &[u8]) -> u64 {
    let digest: [u8; 32] = Sha256::digest(value).into();
    let start = digest.first_chunk().copied().unwrap_or_default();
    u64::from_le_bytes(start).max(1)
}

/// Writes the first bytes of the value on which this rank has decided.
fn write(table: &Mapping, entry: usize, value: &[u8]) {
    let value = &value[..value.len().min(VALUE_LEN)];
    for (index, part) in value.chunks(8).enumerate() {
        let mut bytes = [0; 8];
        bytes[..part.len()].copy_from_slice(part);
        let word = table.long(entry + VALUE + index * 8);
        word.store(u64::from_le_bytes(bytes), Ordering::Relaxed);
    }
    // The stored number is the length plus 1, since 0 means that the value is not written yet.
    let len = value.len() as u64 + 1;
    table.long(entry + LEN).store(len, Ordering::Release);
}

/// Returns the value on which another rank has decided. That rank writes it right after its decision; if it has died
/// before, the value is empty, after [`WRITE_TIME`].
fn read(table: &Mapping, entry: usize) -> Vec<u8> {
    let since = Instant::now();
    let len = loop {
        let len = table.long(entry + LEN).load(Ordering::Acquire);
        if len > 0 || since.elapsed() > WRITE_TIME {
            break (len as usize).saturating_sub(1).min(VALUE_LEN);
        }
        std::thread::yield_now();
    };
    let words = (0..VALUE_LEN / 8).map(|index| table.long(entry + VALUE + index * 8));
    let bytes = words.flat_map(|word| word.load(Ordering::Relaxed).to_le_bytes());
    bytes.take(len).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::MemfdFlags;

    fn table() -> Mapping {
        let file = rustix::fs::memfd_create("agreements", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, (64 + AGREEMENTS_LEN) as u64).unwrap();
        Mapping::new(&file, 0, 64 + AGREEMENTS_LEN).unwrap()
    }

    #[test]
    fn the_first_value_is_kept_and_returned_to_the_others() {
        let table = table();
        let agree = |number, value: &str| agree(&table, 64, number, value.as_bytes()).unwrap();
        assert_eq!(agree(7, "cpu"), Agreement::Same);
        assert_eq!(agree(7, "cpu"), Agreement::Same);
        assert_eq!(agree(7, "fake"), Agreement::Other(b"cpu".to_vec()));
        // Another number with the same first entry.
        let colliding = 7 + AGREEMENTS as u64;
        assert_eq!(agree(colliding, "fake"), Agreement::Same);
        assert_eq!(agree(colliding, ""), Agreement::Other(b"fake".to_vec()));
        // Long values that differ only after the part that is kept.
        let long = "x".repeat(2 * VALUE_LEN);
        assert_eq!(agree(9, &long), Agreement::Same);
        let cut = Agreement::Other(vec![b'x'; VALUE_LEN]);
        assert_eq!(agree(9, &format!("{long}y")), cut);
    }

    #[test]
    fn a_number_without_a_free_entry_gets_none_on_every_rank() {
        let table = table();
        let agree = |number: usize| agree(&table, 64, (1 + number * AGREEMENTS) as u64, b"cpu");
        assert!((0..PROBES).all(|number| agree(number) == Some(Agreement::Same)));
        assert_eq!(agree(PROBES), None);
        assert_eq!(agree(PROBES), None);
        assert_eq!(agree(0), Some(Agreement::Same));
    }

    #[test]
    fn one_of_several_concurrent_ranks_decides() {
        let table = table();
        for number in 1..200 {
            let answers = std::thread::scope(|scope| {
                let ranks: Vec<_> = ["cpu", "fake", "nccl"]
                    .into_iter()
                    .map(|value| {
                        let table = &table;
                        let agree = move || agree(table, 64, number, value.as_bytes()).unwrap();
                        scope.spawn(move || (value, agree()))
                    })
                    .collect();
                ranks
                    .into_iter()
                    .map(|rank| rank.join().unwrap())
                    .collect::<Vec<_>>()
            });
            let decided: Vec<&str> = answers
                .iter()
                .filter_map(|(value, answer)| (*answer == Agreement::Same).then_some(*value))
                .collect();
            let [value] = decided[..] else {
                panic!("{answers:?}");
            };
            let is_right = |(passed, answer): &(&str, Agreement)| {
                *passed == value || *answer == Agreement::Other(value.as_bytes().to_vec())
            };
            assert!(answers.iter().all(is_right), "{answers:?}");
        }
    }
}
