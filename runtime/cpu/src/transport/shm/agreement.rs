//! Agreements between the ranks of a host, each identified by a number: the first rank to call decides.

use super::mapping::Mapping;
use rcomm_core::backend::Agreement;
use sha2::{Digest, Sha256};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How many agreements a segment has room for in its lifetime.
const AGREEMENTS: usize = 1024;
/// Bytes of one agreement: its number, the hash of what was agreed on, its length, and its first bytes.
const AGREEMENT_LEN: usize = 64;
// Offsets of the fields in an agreement; the number is at 0.
const HASH: usize = 8;
const LEN: usize = 16;
const TEXT: usize = 24;
const TEXT_LEN: usize = AGREEMENT_LEN - TEXT;
/// A number is looked up in this many consecutive places, from the place at the number modulo `AGREEMENTS`.
const PROBES: usize = 32;
/// How long a rank waits for the bytes of the rank that has decided.
const WRITE_TIME: Duration = Duration::from_millis(200);

/// Bytes of the table.
pub(super) const AGREEMENTS_LEN: usize = AGREEMENTS * AGREEMENT_LEN;

/// Agrees on `words` under `number`, in the table that begins at `start`. Does not wait for the other ranks
/// to call. `None` if there is no place for it: since places are never freed, the other ranks find none
/// either.
pub(super) fn agree(table: &Mapping, start: usize, number: u64, words: &[u8]) -> Option<Agreement> {
    let number = number.max(1);
    let first = (number % AGREEMENTS as u64) as usize;
    let places = (first..first + PROBES).map(|at| start + at % AGREEMENTS * AGREEMENT_LEN);
    for place in places {
        if set_once(table.long(place), number) != number {
            continue;
        }
        let own = hash(words);
        // The first rank to replace the zero decides, whichever rank took the place.
        let first_hash = table.long(place + HASH);
        return Some(
            match first_hash.compare_exchange(0, own, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => {
                    write(table, place, words);
                    Agreement::Same
                }
                Err(first_hash) if first_hash == own => Agreement::Same,
                Err(_) => Agreement::Other(read(table, place)),
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

fn hash(words: &[u8]) -> u64 {
    let digest: [u8; 32] = Sha256::digest(words).into();
    let start = digest.first_chunk().copied().unwrap_or_default();
    u64::from_le_bytes(start).max(1)
}

fn write(table: &Mapping, place: usize, words: &[u8]) {
    let words = &words[..words.len().min(TEXT_LEN)];
    for (at, part) in words.chunks(8).enumerate() {
        let mut bytes = [0; 8];
        bytes[..part.len()].copy_from_slice(part);
        let word = table.long(place + TEXT + at * 8);
        word.store(u64::from_le_bytes(bytes), Ordering::Relaxed);
    }
    // The stored length is one more than the length, since zero means that none is written yet.
    let len = words.len() as u64 + 1;
    table.long(place + LEN).store(len, Ordering::Release);
}

/// Returns the bytes at a place where another rank has decided. That rank writes them immediately; if it has
/// died before it did, returns none after [`WRITE_TIME`].
fn read(table: &Mapping, place: usize) -> Vec<u8> {
    let since = Instant::now();
    let len = loop {
        let len = table.long(place + LEN).load(Ordering::Acquire);
        if len > 0 || since.elapsed() > WRITE_TIME {
            break (len as usize).saturating_sub(1).min(TEXT_LEN);
        }
        std::thread::yield_now();
    };
    let words = (0..TEXT_LEN / 8).map(|at| table.long(place + TEXT + at * 8));
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
        let agree = |number, words: &str| agree(&table, 64, number, words.as_bytes()).unwrap();
        assert_eq!(agree(7, "cpu"), Agreement::Same);
        assert_eq!(agree(7, "cpu"), Agreement::Same);
        assert_eq!(agree(7, "fake"), Agreement::Other(b"cpu".to_vec()));
        // Another number at the same place.
        let beside = 7 + AGREEMENTS as u64;
        assert_eq!(agree(beside, "fake"), Agreement::Same);
        assert_eq!(agree(beside, ""), Agreement::Other(b"fake".to_vec()));
        // Long texts that differ only after the part that is kept.
        let long = "x".repeat(2 * TEXT_LEN);
        assert_eq!(agree(9, &long), Agreement::Same);
        let cut = Agreement::Other(vec![b'x'; TEXT_LEN]);
        assert_eq!(agree(9, &format!("{long}y")), cut);
    }

    #[test]
    fn a_number_without_room_has_none_on_any_rank() {
        let table = table();
        let agree = |number: usize| agree(&table, 64, (1 + number * AGREEMENTS) as u64, b"cpu");
        assert!((0..PROBES).all(|number| agree(number) == Some(Agreement::Same)));
        assert_eq!(agree(PROBES), None);
        assert_eq!(agree(PROBES), None);
        assert_eq!(agree(0), Some(Agreement::Same));
    }

    #[test]
    fn of_ranks_that_come_at_once_one_decides() {
        let table = table();
        for number in 1..200 {
            let told = std::thread::scope(|scope| {
                let ranks: Vec<_> = ["cpu", "fake", "nccl"]
                    .into_iter()
                    .map(|words| {
                        let table = &table;
                        let agree = move || agree(table, 64, number, words.as_bytes()).unwrap();
                        scope.spawn(move || (words, agree()))
                    })
                    .collect();
                ranks
                    .into_iter()
                    .map(|rank| rank.join().unwrap())
                    .collect::<Vec<_>>()
            });
            let decided: Vec<&str> = told
                .iter()
                .filter_map(|(words, came)| (*came == Agreement::Same).then_some(*words))
                .collect();
            let [words] = decided[..] else {
                panic!("{told:?}");
            };
            let heard = |(own, came): &(&str, Agreement)| {
                *own == words || *came == Agreement::Other(words.as_bytes().to_vec())
            };
            assert!(told.iter().all(heard), "{told:?}");
        }
    }
}
