//! The processors on which the ranks of a host may run, and whether each rank can have one to itself.

use super::WaitMode;
use std::sync::atomic::{AtomicU32, Ordering};

/// Number of 64-bit words of a [set](Processors): enough for 1024 processors, as in the C library's `cpu_set_t`.
pub(crate) const SET_WORDS: usize = 16;

/// A set of processors, with one bit for each.
pub(crate) type Processors = [u64; SET_WORDS];

/// The processors on which this thread may run; all if the system does not report them.
pub(crate) fn own_processors() -> Processors {
    let Ok(set) = rustix::thread::sched_getaffinity(None) else {
        return [u64::MAX; SET_WORDS];
    };
    let mut processors = [0; SET_WORDS];
    for processor in (0..rustix::thread::CpuSet::MAX_CPU.min(SET_WORDS * 64))
        .filter(|&processor| set.is_set(processor))
    {
        processors[processor / 64] |= 1 << (processor % 64);
    }
    processors
}

/// Notes on which processor this thread runs, as one more than the processor's number, and returns that. Another rank
/// compares it with its own before it polls for long.
#[cold]
pub(crate) fn note(noted: &AtomicU32) -> u32 {
    let now = rustix::thread::sched_getcpu() as u32 + 1;
    if noted.load(Ordering::Relaxed) != now {
        noted.store(now, Ordering::Relaxed);
    }
    now
}

/// Returns `CorePerRank` if each rank can have a processor to itself, else `Oversubscribed`. `sets` has the processors
/// on which each rank may run. Compares the number of ranks that are confined to a set with the set's size, for each
/// set and for all sets together, but not for other unions of sets.
pub(crate) fn wait_mode_of(sets: &[Processors]) -> WaitMode {
    let is_within = |inner: &Processors, outer: &Processors| {
        inner
            .iter()
            .zip(outer)
            .all(|(inner, outer)| inner & !outer == 0)
    };
    let union = sets.iter().fold([0; SET_WORDS], |union: Processors, set| {
        std::array::from_fn(|index| union[index] | set[index])
    });
    let is_oversubscribed = |set: &Processors| {
        let processors: u32 = set.iter().map(|word| word.count_ones()).sum();
        let ranks = sets.iter().filter(|inner| is_within(inner, set)).count();
        ranks > processors as usize
    };
    if is_oversubscribed(&union) || sets.iter().any(is_oversubscribed) {
        WaitMode::Oversubscribed
    } else {
        WaitMode::CorePerRank
    }
}

/// Formats a set as hexadecimal words with commas between them, for [`parse`].
pub(crate) fn format(set: &Processors) -> String {
    let words: Vec<String> = set.iter().map(|word| format!("{word:x}")).collect();
    words.join(",")
}

/// Reads a set in the format of [`format()`]; `None` if the text is not a set.
pub(crate) fn parse(text: &str) -> Option<Processors> {
    let words = text.split(',').map(|word| u64::from_str_radix(word, 16));
    let words: Vec<u64> = words.collect::<Result<_, _>>().ok()?;
    words.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(processors: &[usize]) -> Processors {
        let mut set = [0; SET_WORDS];
        for &processor in processors {
            set[processor / 64] |= 1 << (processor % 64);
        }
        set
    }

    #[test]
    fn ranks_outnumber_cores_if_more_ranks_than_processors_are_confined_to_a_set() {
        let oversubscribed = [
            vec![on(&[0]), on(&[0])],
            vec![on(&[0, 1]), on(&[0, 1]), on(&[0, 1])],
            vec![on(&[0]), on(&[0]), on(&[0, 1, 2, 3])],
            vec![on(&[100]), on(&[0, 100]), on(&[0, 100])],
        ];
        for sets in oversubscribed {
            assert_eq!(wait_mode_of(&sets), WaitMode::Oversubscribed, "{sets:?}");
        }
        let core_per_rank = [
            vec![on(&[0]), on(&[1])],
            vec![on(&[0, 1]), on(&[0, 1])],
            vec![on(&[0]), on(&[0, 100])],
            vec![],
        ];
        for sets in core_per_rank {
            assert_eq!(wait_mode_of(&sets), WaitMode::CorePerRank, "{sets:?}");
        }
    }

    #[test]
    fn a_set_is_parsed_as_it_was_formatted() {
        for set in [on(&[]), on(&[0, 63, 64, 1023]), [u64::MAX; SET_WORDS]] {
            assert_eq!(parse(&format(&set)), Some(set));
        }
        for words in ["", "1", "1,2", "x,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0"] {
            assert_eq!(parse(words), None, "{words:?}");
        }
    }
}
