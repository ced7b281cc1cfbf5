//! The operations of a queue that are on the device, in the order of its stream.
//!
//! Events return to their pool when someone finds that their operation has ended: a waiting thread, or the watchdog in
//! its next round. So a burst of operations would need new events, and a new event costs the issuing thread more than a
//! reused one. If the pool is empty, that thread therefore queries the end of one operation: if it has ended, all
//! operations before it on the stream have ended. With timing on, the thread makes new events instead: before events
//! are used again, their times must be read, which costs more than new events.

use super::CommQueue;
use super::pending::Ticket;
use crate::context::options::Timing;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// The number of operations whose events are released at a time.
const BATCH: usize = 32;

/// Operations in the order in which the stream runs them. This list does not keep them alive.
#[derive(Default)]
pub(super) struct OnDevice(Mutex<State<Ticket>>);

/// The list, and when it is worth a look.
struct State<T> {
    tickets: VecDeque<Weak<T>>,
    /// While the list has fewer operations, no end is queried.
    query_at: usize,
    /// While the list has fewer operations, it is not searched for dropped ones.
    tidy_at: usize,
}

impl<T> Default for State<T> {
    fn default() -> Self {
        Self {
            tickets: VecDeque::new(),
            query_at: 0,
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

    /// Returns the operations of the next batch that still exist; `None` if there are too few for a query.
    fn next_batch(&mut self) -> Option<Vec<Arc<T>>> {
        while self
            .tickets
            .front()
            .is_some_and(|it| it.strong_count() == 0)
        {
            self.tickets.pop_front();
        }
        if self.tickets.len() < self.query_at.max(2 * BATCH) {
            return None;
        }
        let batch = self.tickets.iter().take(BATCH);
        Some(batch.filter_map(Weak::upgrade).collect())
    }
}

impl OnDevice {
    pub(super) fn push(&self, ticket: &Arc<Ticket>) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.push(ticket);
    }
}

impl CommQueue {
    /// Releases the events of operations that have ended, if the pool has none left and timing is off. The
    /// context must be current.
    pub(super) fn release_ended(&self) {
        let (marks, timing) = self.shared.marks();
        if timing == Timing::On || !marks.is_exhausted() {
            return;
        }
        // The lock is held during the query, so that the list stays in order.
        let Ok(mut state) = self.on_device.0.try_lock() else {
            return;
        };
        let Some(batch) = state.next_batch() else {
            return;
        };
        // If the last one that still exists has ended, all operations before it have ended.
        let has_ended = batch.last().is_none_or(|ticket| ticket.has_passed_end());
        if has_ended {
            state.tickets.drain(..BATCH);
            state.query_at = 0;
        } else {
            state.query_at = state.tickets.len() + BATCH / 2;
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
    fn no_end_is_queried_until_there_are_two_batches() {
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
