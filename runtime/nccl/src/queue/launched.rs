//! The operations of a queue that are on the device, in the order of its stream.
//!
//! A burst of operations would make new events for each of them, since the events of those that have ended return only
//! once someone asks: a waiting thread, or the watchdog in its next round. A new event costs the thread that issues more
//! than an old one. So where the pool has none left, that thread asks about one operation of the burst: if it has
//! ended, all before it on the stream have.

use super::CommQueue;
use super::pending::Ticket;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// How many operations are released at a time.
const BATCH: usize = 32;

/// Operations in the order in which the stream runs them. The queue does not keep them alive.
#[derive(Default)]
pub(super) struct Launched(Mutex<State>);

#[derive(Default)]
struct State {
    tickets: VecDeque<Weak<Ticket>>,
    /// The question is not worth a call of the driver while there are fewer operations.
    ask_at: usize,
}

impl State {
    /// Forgets the first operations, as far as they have been dropped.
    fn forget_dropped(&mut self) {
        while self
            .tickets
            .front()
            .is_some_and(|it| it.strong_count() == 0)
        {
            self.tickets.pop_front();
        }
    }

    /// Returns the operations of the next batch that still exist; `None` if there are too few for a question.
    fn next_batch(&mut self) -> Option<Vec<Arc<Ticket>>> {
        self.forget_dropped();
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
        // So the list does not grow while each operation ends before the next is issued.
        if state.tickets.len() >= BATCH {
            state.forget_dropped();
        }
        state.tickets.push_back(Arc::downgrade(ticket));
    }
}

impl CommQueue {
    /// Releases the events of operations that have ended, if the pool has none left. The context must be current.
    pub(super) fn release_ended(&self) {
        if !self.shared.marks.is_exhausted() {
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
