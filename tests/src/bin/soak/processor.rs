//! Tells whether a rank that ran into its time-out had the processor meanwhile, so that a test on a busy machine can
//! distinguish a hang from a rank that was not run.
//!
//! A thread that waits for a peer sleeps for at most ten milliseconds at a time and then looks again. If it got the
//! processor each time it wanted it, it has looked hundreds of times in a time-out of some seconds, and what it waits
//! for did not come: that is a hang. On a processor that others keep busy, each look may take a large part of a second,
//! and the few looks that fit in the time-out are not enough for the messages of an operation.

use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::time::Duration;

/// A thread that looked this often has given its operation enough turns: more than any operation of the tests needs.
const ENOUGH_TURNS: u64 = 100;

/// How long a thread ran, how long it wanted to run while another thread had the processor, and how often it ran.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Turns {
    /// Time on a processor.
    pub(crate) ran: Duration,
    /// Time in which the thread could have run and another had the processor.
    pub(crate) waited: Duration,
    /// How often the thread got a processor.
    pub(crate) count: u64,
}

impl Turns {
    /// Reads a line of `/proc/PID/schedstat`.
    fn parse(text: &str) -> Option<Self> {
        let mut words = text.split_whitespace().map(str::parse);
        let mut next = || words.next()?.ok();
        Some(Self {
            ran: Duration::from_nanos(next()?),
            waited: Duration::from_nanos(next()?),
            count: next()?,
        })
    }
}

/// The turns of all threads of this process up to a moment.
#[derive(Debug, Default)]
pub(crate) struct ProcessorTime(HashMap<String, Turns>);

impl ProcessorTime {
    /// The threads of this process now; none if the system does not count their turns.
    pub(crate) fn now() -> Self {
        let threads = std::fs::read_dir("/proc/self/task").into_iter().flatten();
        let turns = threads.flatten().filter_map(|thread| {
            let text = std::fs::read_to_string(thread.path().join("schedstat")).ok()?;
            let id = thread.file_name().into_string().ok()?;
            Some((id, Turns::parse(&text)?))
        });
        Self(turns.collect())
    }

    /// The turns, since this value was taken, of the thread that waited longest for the processor, among those that had
    /// a turn.
    pub(crate) fn since(&self) -> Turns {
        let since = |(id, now): (String, Turns)| {
            let then = self.0.get(&id).copied().unwrap_or_default();
            Turns {
                ran: now.ran.saturating_sub(then.ran),
                waited: now.waited.saturating_sub(then.waited),
                count: now.count.saturating_sub(then.count),
            }
        };
        let turns = Self::now().0.into_iter().map(since);
        let turns = turns.filter(|turns| turns.count > 0);
        turns.max_by_key(|turns| turns.waited).unwrap_or_default()
    }
}

/// Whether ranks that waited for each other for `time` were kept from the processor for so long that their operation
/// may just have been slow. Then one of them ran or waited for the processor in nearly every moment, one of them had
/// few turns, and none that had few turns slept for most of its wait: a rank that slept may never have been woken.
/// `ranks` has the turns of each rank, and how long the rank waited; `time` is the longest such wait. A rank without
/// turns did not count them: it had at least the turn in which it counts.
pub(crate) fn were_starved(ranks: &[(Turns, Duration)], time: Duration) -> bool {
    let turns = || ranks.iter().map(|(turns, _)| turns);
    let busy: Duration = turns().map(|turns| turns.ran + turns.waited).sum();
    let has_few = turns().any(|turns| (1..ENOUGH_TURNS).contains(&turns.count));
    // With few turns of at most ten milliseconds of sleep each, most of some seconds is left to run or to wait to run.
    // This cannot be said of a rank that began late.
    let has_slept = |(turns, own): &(Turns, Duration)| {
        let is_busy = turns.ran + turns.waited >= own.mul_f64(0.5);
        turns.count < ENOUGH_TURNS && *own >= time.mul_f64(0.5) && !is_busy
    };
    busy >= time.mul_f64(0.9) && has_few && !ranks.iter().any(has_slept)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Instant;

    const TIME: Duration = Duration::from_secs(3);

    fn turns(waited_ms: u64, count: u64) -> (Turns, Duration) {
        let turns = Turns {
            ran: Duration::from_millis(10),
            waited: Duration::from_millis(waited_ms),
            count,
        };
        (turns, TIME)
    }

    #[test]
    fn ranks_that_had_few_turns_and_waited_for_the_processor_were_starved() {
        assert!(were_starved(&[turns(2_900, 9), turns(1_600, 12)], TIME));
        assert!(were_starved(&[turns(1_700, 20); 4], TIME));
        assert!(were_starved(&[turns(2_900, 9), turns(300, 280)], TIME));
        // The other rank began shortly before the time-out.
        let (late, _) = turns(30, 12);
        let late = (late, Duration::from_millis(300));
        assert!(were_starved(&[turns(2_900, 9), late], TIME));
    }

    #[test]
    fn ranks_that_slept_or_had_many_turns_were_not_starved() {
        // A hang on a quiet machine: the threads sleep and look in turn.
        assert!(!were_starved(&[turns(15, 290); 4], TIME));
        // A hang on a busy machine: each look takes long, but there were enough of them.
        assert!(!were_starved(&[turns(1_500, 140); 4], TIME));
        // A rank was never woken, and others waited for the processor: their times add up, and are not its own.
        assert!(!were_starved(&[turns(700, 20); 4], TIME));
        assert!(!were_starved(&[turns(15, 3), turns(2_900, 12)], TIME));
        // A rank was stopped, and waited for no processor.
        assert!(!were_starved(&[turns(0, 0), turns(20, 280)], TIME));
        // Nothing was counted.
        assert!(!were_starved(&[], TIME));
        assert!(!were_starved(&[Default::default()], Duration::ZERO));
    }

    #[test]
    fn turns_are_read_and_subtracted() {
        let read = Turns::parse("981353 2991613 3\n").unwrap();
        assert_eq!(read.count, 3);
        assert_eq!(read.waited, Duration::from_nanos(2_991_613));
        assert_eq!(Turns::parse("1 2"), None);
        let before = ProcessorTime::now();
        if before.0.is_empty() {
            return;
        }
        // Some thread of this process soon has another turn.
        let until = Instant::now() + Duration::from_secs(60);
        while before.since() == Turns::default() {
            assert!(Instant::now() < until, "no thread ever ran");
            std::thread::yield_now();
        }
    }
}
