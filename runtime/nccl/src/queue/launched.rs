//! The operations of a queue that are on the device, in the order of its stream.
//!
//! A burst of operations would make new events for each of them, since the events of those that have ended return only
//! once someone asks: a waiting thread, or the watchdog in its next round. A new event costs the thread that issues more
//! than an old one. So where the pool has none left, that thread asks about one operation of the burst: if it has
//! ended, all before it on the stream have. With timing on, it makes new events: those of an operation must be asked for
//! the time before they are used again, and that costs more.

use super::CommQueue;
use super::pending::Ticket;
use crate::context::options::Timing;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// How many operations are released at a time.
const BATCH: usize = 32;

/// Operations in the order in which the stream runs them. The queue does not keep them alive.
#[derive(Default)]
pub(super) struct Launched(Mutex<State<Ticket>>);

struct State<T> {
    tickets: VecDeque<Weak<T>>,
    /// The question is not worth a call of the driver while there are fewer operations.
    ask_at: usize,
    /// The list is not searched for dropped operations while it is shorter.
    tidy_at: usize,
}

impl<T> Default for State<T> {
    fn default() -> Self {
        Self {
            tickets: VecDeque::new(),
            ask_at: 0,
            tidy_at: BATCH,
        }
    }
}

impl<T> State<T> {
    /// Adds an operation. A program may keep some operations for long: the others are forgotten when they are dropped,
    /// so that the list does not grow.
    fn push(&mut self, ticket: &Arc<T>) {
        if self.tickets.len() >= self.tidy_at {
            self.tickets.retain(|it| it.strong_count() > 0);
            // So each operation is looked at twice on average, however many are kept.
            self.tidy_at = BATCH.max(2 * self.tickets.len());
        }
        self.tickets.push_back(Arc::downgrade(ticket));
    }

    /// Returns the operations of the next batch that still exist; `None` if there are too few for a question.
    fn next_batch(&mut self) -> Option<Vec<Arc<T>>> {
        while self
            .tickets
            .front()
            .is_some_and(|it| it.strong_count() == 0)
        {
            self.tickets.pop_front();
        }
        if self.tickets.len() < self.ask_at.max(2 * BATCH) {
            return None;
        }
        let batch = self.tickets.iter().take(BATCH);
        Some(batch.filter_map(Weak::upgrade).collect())
    }
}

impl Launched {
    pub(super) fn push(&self, ticket: &Arc<Ticket>) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.push(ticket);
    }
}

impl CommQueue {
    /// Releases the events of operations that have ended, if the pool has none left and no time is read of them. The
    /// context must be current.
    pub(super) fn release_ended(&self) {
        if self.shared.options.timing == Timing::On || !self.shared.marks.is_exhausted() {
            return;
        }
        // The lock is held during the question, so that the list stays in order.
        let Ok(mut state) = self.on_device.0.try_lock() else {
            return;
        };
        let Some(batch) = state.next_batch() else {
            return;
        };
        // The last one that still exists answers for those before it.
        let has_ended = batch.last().is_none_or(|ticket| ticket.has_passed_end());
        if has_ended {
            state.tickets.drain(..BATCH);
            state.ask_at = 0;
        } else {
            state.ask_at = state.tickets.len() + BATCH / 2;
        }
        drop(state);
        if has_ended {
            batch.iter().for_each(|ticket| ticket.note_passed_end());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropped_operations_are_forgotten_though_an_earlier_one_is_kept() {
        let mut state = State::default();
        let kept: Vec<Arc<u32>> = (0..3).map(Arc::new).collect();
        kept.iter().for_each(|ticket| state.push(ticket));
        for number in 0..10_000 {
            state.push(&Arc::new(number));
            assert!(state.tickets.len() <= BATCH, "{number}");
        }
        let left = state.tickets.iter().filter_map(Weak::upgrade);
        assert!(left.eq(kept));
    }

    #[test]
    fn a_question_waits_until_there_are_two_batches() {
        let mut state = State::default();
        let kept: Vec<Arc<usize>> = (0..3 * BATCH).map(Arc::new).collect();
        let (early, late) = kept.split_at(2 * BATCH - 1);
        early.iter().for_each(|ticket| state.push(ticket));
        assert!(state.next_batch().is_none());
        late.iter().for_each(|ticket| state.push(ticket));
        assert!(
            state
                .next_batch()
                .is_some_and(|it| it.iter().eq(&kept[..BATCH]))
        );
    }
}
