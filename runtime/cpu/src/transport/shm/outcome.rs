//! Whether a phase of an exchange area has failed: the same answer on every rank, even if ranks are late or frozen.
//!
//! A phase is complete for a rank that has seen the flags of all ranks and then finds neither a proposal nor a
//! decision. A rank that gives up a phase (its deadline passed, a peer is gone, its group was stopped) may find a
//! moment later that the missing rank has arrived and that others have continued. So it first *proposes* that the phase
//! has failed, in one word of the area; then the flags are checked once more. If all ranks have published the phase,
//! the proposal is withdrawn, and the rank that made it continues as well. Otherwise the phase has *failed*,
//! permanently. Every rank that finds a proposal decides it in the same way, so a rank that is frozen in between delays
//! no other rank, and the first decision is final.
//!
//! The answer is the same on all ranks. If the check after the proposal did not see a rank's flag, that
//! rank publishes the phase after the proposal, so every rank that sees its flag finds the proposal or the
//! decision, and does not treat the phase as complete. If a rank treats the phase as complete without having
//! found a proposal, all flags were stored before the proposal, so the check finds them. The check must
//! see what was stored before it, including stores that are not yet visible outside another processor:
//! [`make_stores_visible`] makes every processor complete its stores. In a phase without a proposal, all this costs
//! a rank one load of a word that does not change.

use rustix::thread::{MembarrierCommand, membarrier};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The word: 0 while there is no proposal and no decision, else phase | state << 32 | rank << 34.
pub(super) struct Outcome<'a>(pub(super) &'a AtomicU64);

const OPEN: u64 = 0;
const PROPOSED: u64 = 1 << 32;
const FAILED: u64 = 2 << 32;
const STATE: u64 = 3 << 32;
const RANK_SHIFT: u32 = 34;

/// Whether a rank that calls [`decide`](Outcome::decide) gives up its phase.
#[derive(Clone, Copy, Debug)]
pub(super) enum Vote {
    /// The rank makes no proposal, but decides one that it finds.
    Ask,
    /// This rank of the group proposes that its phase has failed.
    GiveUp(usize),
}

impl Outcome<'_> {
    /// Whether there is neither a proposal nor a decision.
    #[inline]
    pub(super) fn is_open(&self) -> bool {
        self.0.load(Ordering::Acquire) == OPEN
    }

    /// Whether it is decided that this phase, and no earlier one, has failed.
    pub(super) fn has_failed_in(&self, phase: u32) -> bool {
        let word = self.0.load(Ordering::Acquire);
        word & STATE == FAILED && word as u32 == phase
    }

    /// Makes a proposal if `vote` is `GiveUp` and not all ranks have published the phase, and decides a proposal that
    /// it finds. `all_published` returns whether all ranks have published a phase. Returns the rank that gave up this
    /// phase or an earlier one; `None` if the phase has not failed.
    pub(super) fn decide(
        &self,
        phase: u32,
        vote: Vote,
        all_published: impl Fn(u32) -> bool,
    ) -> Option<usize> {
        loop {
            let word = self.0.load(Ordering::Acquire);
            match (word & STATE, vote) {
                (OPEN, Vote::Ask) => return None,
                // This rank's proposal may have been withdrawn: then all ranks have published the phase.
                (OPEN, Vote::GiveUp(_)) if all_published(phase) => return None,
                (OPEN, Vote::GiveUp(rank)) => {
                    let proposal = u64::from(phase) | PROPOSED | (rank as u64) << RANK_SHIFT;
                    self.exchange(word, proposal);
                }
                (PROPOSED, _) => {
                    make_stores_visible();
                    let decision = match all_published(word as u32) {
                        true => OPEN,
                        false => word & !STATE | FAILED,
                    };
                    self.exchange(word, decision);
                }
                _ => {
                    let failed_later = (word as u32).wrapping_sub(phase).cast_signed() > 0;
                    let rank = usize::try_from(word >> RANK_SHIFT).unwrap_or(usize::MAX);
                    // The rank that gave up a later phase had completed this phase.
                    return (!failed_later).then_some(rank);
                }
            }
        }
    }

    /// Replaces the word if it still is `old`.
    fn exchange(&self, old: u64, new: u64) {
        // If the exchange fails, another rank was first; the caller reads the word again.
        let _ = self
            .0
            .compare_exchange(old, new, Ordering::SeqCst, Ordering::SeqCst);
    }
}

/// Makes the stores that other processors have executed visible to this one.
fn make_stores_visible() {
    if membarrier(MembarrierCommand::Global).is_err() {
        // Without this system call a pause suffices: a store becomes visible within about a microsecond.
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU32;
    use std::time::Instant;

    /// Publishes phase 1 after `late`, waits for the other ranks for `time_out`, and returns whether the phase is
    /// complete.
    fn take_part(
        rank: usize,
        flags: &[AtomicU32],
        outcome: &AtomicU64,
        [late, time_out]: [Duration; 2],
    ) -> bool {
        std::thread::sleep(late);
        flags[rank].store(1, Ordering::Release);
        let all_published = |_| flags.iter().all(|flag| flag.load(Ordering::Acquire) == 1);
        let until = Instant::now() + time_out;
        let mut vote = Vote::GiveUp(rank);
        while Instant::now() < until {
            if all_published(1) {
                vote = Vote::Ask;
                break;
            }
            std::thread::yield_now();
        }
        let outcome = Outcome(outcome);
        if matches!(vote, Vote::Ask) && outcome.is_open() {
            return true;
        }
        outcome.decide(1, vote, all_published).is_none()
    }

    #[test]
    fn all_ranks_find_the_same_outcome_whoever_is_late() {
        let mut seen = [0; 2];
        let began = Instant::now();
        for round in 0.. {
            let flags: Vec<AtomicU32> = (0..3).map(|_| AtomicU32::new(0)).collect();
            let outcome = AtomicU64::new(OPEN);
            // The times are spread up to this many microseconds, so that the orders of arriving and giving
            // up vary. The spread grows, since the duration of a decision depends on the machine.
            let spread = 1_000 << (round / 8).min(10);
            let times = |rank: u64| {
                let mixed = (round * 3 + rank).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
                [mixed % spread, (mixed >> 20) % spread].map(Duration::from_micros)
            };
            let ends: Vec<bool> = std::thread::scope(|scope| {
                let (flags, outcome) = (&flags, &outcome);
                let ranks = (0..3).map(|rank| {
                    scope.spawn(move || take_part(rank, flags, outcome, times(rank as u64)))
                });
                let ranks: Vec<_> = ranks.collect();
                ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
            });
            assert!(ends.iter().all(|&end| end == ends[0]), "{round}: {ends:?}");
            seen[usize::from(ends[0])] += 1;
            if round >= 40 && seen.iter().all(|&count| count > 0) {
                break;
            }
            assert!(
                began.elapsed() < Duration::from_secs(180),
                "only one outcome: {seen:?}"
            );
        }
    }

    #[test]
    fn a_later_phase_fails_as_well_and_an_earlier_phase_stays_complete() {
        let word = AtomicU64::new(OPEN);
        let outcome = Outcome(&word);
        assert_eq!(outcome.decide(7, Vote::GiveUp(2), |_| false), Some(2));
        assert!(!outcome.is_open());
        for phase in [7, 8, 100] {
            assert_eq!(outcome.decide(phase, Vote::Ask, |_| true), Some(2));
        }
        assert_eq!(outcome.decide(6, Vote::GiveUp(1), |_| true), None);
    }

    #[test]
    fn a_phase_that_all_have_published_cannot_be_given_up() {
        let word = AtomicU64::new(OPEN);
        let outcome = Outcome(&word);
        assert_eq!(outcome.decide(7, Vote::GiveUp(2), |_| true), None);
        assert!(outcome.is_open());
        // Another rank is frozen after it has proposed that the phase has failed.
        word.store(7 | PROPOSED | 1 << RANK_SHIFT, Ordering::SeqCst);
        assert_eq!(outcome.decide(7, Vote::Ask, |_| true), None);
        assert!(outcome.is_open());
        word.store(7 | PROPOSED | 1 << RANK_SHIFT, Ordering::SeqCst);
        assert_eq!(outcome.decide(7, Vote::Ask, |_| false), Some(1));
    }
}
