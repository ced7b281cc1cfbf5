//! The updates of a slot's words as its operation progresses.

use super::clock::Timestamp;
use super::layout::slot;
use crate::model::EntryState;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Advances the state, which is the low byte of its word, and sets `bits`. Returns false, and changes nothing, if the
/// operation has already reached `to` or a later state.
#[inline]
fn advance(words: &[AtomicU64; slot::WORDS], to: EntryState, bits: u64) -> bool {
    let state = words[slot::STATE].load(Ordering::Relaxed);
    let advances = (state as u8) < to as u8;
    if advances {
        let state = state & !0xff | to as u64 | bits;
        words[slot::STATE].store(state, Ordering::Relaxed);
    }
    advances
}

/// Marks that an operation was seen at this time to have started.
#[inline]
pub(super) fn start(words: &[AtomicU64; slot::WORDS], time: Timestamp) {
    if words[slot::STARTED].load(Ordering::Relaxed) == 0 {
        let created = words[slot::CREATED].load(Ordering::Relaxed);
        words[slot::STARTED].store(time.0.max(created), Ordering::Relaxed);
    }
    advance(words, EntryState::Started, 0);
}

/// Marks that the operation is no longer watched.
#[inline]
pub(super) fn retire(words: &[AtomicU64; slot::WORDS]) {
    let state = words[slot::STATE].load(Ordering::Relaxed);
    words[slot::STATE].store(state | slot::RETIRED, Ordering::Relaxed);
}

/// Ends an operation with an error, unless it has ended before.
pub(super) fn fail(words: &[AtomicU64; slot::WORDS], time: Timestamp) {
    let created = words[slot::CREATED].load(Ordering::Relaxed);
    let lasted = Duration::from_nanos(time.0.saturating_sub(created));
    end(words, EntryState::Failed, time, duration_bits(Some(lasted)));
}

/// How long an operation ran, as bits of its state.
#[inline]
pub(super) fn duration_bits(duration: Option<Duration>) -> u64 {
    duration.map_or(0, |duration| {
        let ms = duration.as_secs_f32() * 1e3;
        slot::HAS_DURATION | u64::from(ms.to_bits()) << 32
    })
}

/// The graph that captured an operation, as bits of its state; `None` for an id that is too large.
#[inline]
pub(super) fn graph_bits(id: u64) -> Option<u64> {
    (id <= slot::MAX_GRAPH).then_some(slot::IN_GRAPH | id << slot::GRAPH_SHIFT)
}

/// Ends an operation in the state `to` and sets `bits`, unless the operation has ended before.
#[inline]
pub(super) fn end(words: &[AtomicU64; slot::WORDS], to: EntryState, time: Timestamp, bits: u64) {
    let state = words[slot::STATE].load(Ordering::Relaxed);
    if state as u8 >= EntryState::Completed as u8 {
        return;
    }
    advance(words, to, bits);
    // The clock may step back by a fraction of a microsecond.
    let created = words[slot::CREATED].load(Ordering::Relaxed);
    words[slot::ENDED].store(time.0.max(created), Ordering::Relaxed);
}
