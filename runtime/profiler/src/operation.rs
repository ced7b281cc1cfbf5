//! An operation in progress. One word holds its state, with the number of the use of its slot.
//!
//! An abort of the communicator may end an operation at any time, on another thread than the operation's events. The
//! slot may then belong to another operation. So each change of the word also compares the number of the use, and an
//! event of an earlier use changes nothing.

use crate::handle::{SlotUse, Word};
use rcomm_recorder::record::Ticket;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::time::Duration;

/// Flags of an operation.
pub(crate) mod flag {
    /// The operation is in a plan.
    pub(crate) const PLANNED: u8 = 1;
    /// The group call in which the operation was issued has not ended. The operation's slot stays in use until then,
    /// because the slots of a group call's operations form a list.
    pub(crate) const IN_GROUP: u8 = 2;
    /// The operation has ended, or is no longer watched.
    pub(crate) const OVER: u8 = 4;
    /// The group call ended before the operation was in a plan.
    pub(crate) const LEFT: u8 = 8;
    /// The operation's transfers are those of CollNet, whose end NCCL does not report.
    pub(crate) const COLLNET: u8 = 16;
    /// NCCL will not report the operation's channels.
    pub(crate) const NO_CHANNELS: u8 = 32;
}

/// What happened to an operation so far. From the lowest bits: flags, number of channels (0 = unknown), channels that
/// have started, channels that have finished (8 bits each), and the number of the use of the slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct State(u64);

impl State {
    fn of(at: SlotUse, flags: u8) -> Self {
        Self(u64::from(at.generation) << 32 | u64::from(flags))
    }

    fn byte(self, at: u32) -> u8 {
        (self.0 >> (8 * at)) as u8
    }

    fn with_byte(self, at: u32, value: u8) -> Self {
        Self(self.0 & !(0xff << (8 * at)) | u64::from(value) << (8 * at))
    }

    /// Whether the operation has one of these flags.
    pub(crate) fn has(self, flags: u8) -> bool {
        self.byte(0) & flags != 0
    }

    pub(crate) fn with(self, flags: u8) -> Self {
        self.with_byte(0, self.byte(0) | flags)
    }

    pub(crate) fn without(self, flags: u8) -> Self {
        self.with_byte(0, self.byte(0) & !flags)
    }

    pub(crate) fn with_channels(self, channels: u8) -> Self {
        self.with_byte(1, channels)
    }

    /// Whether the number of the operation's channels is known.
    fn knows_channels(self) -> bool {
        self.byte(1) > 0
    }

    /// The number of channels that have started, if the number of all channels is not known.
    pub(crate) fn started(self) -> u8 {
        self.byte(2)
    }

    /// The state with one more channel that has started.
    pub(crate) fn starts(self) -> Self {
        self.with_byte(2, self.started().saturating_add(1))
    }

    /// The state with one more channel that has finished. If it is the last one, the operation is over.
    pub(crate) fn finishes(self) -> Self {
        let finished = self.byte(3).saturating_add(1);
        let all = match self.knows_channels() {
            true => self.byte(1),
            // The number of channels is unknown. All channels start almost at once, so those that have started count as
            // all.
            false => self.started(),
        };
        let after = self.with_byte(3, finished);
        if finished >= all {
            after.with(flag::OVER)
        } else {
            after
        }
    }
}

/// An operation in progress.
#[derive(Debug, Default)]
pub(crate) struct Op<W = AtomicU64> {
    ticket: [W; 3],
    /// The use of its communicator's slot.
    communicator: W,
    /// The use of the slot of the next operation in the list of the group call; 0 = none.
    pub(crate) next: W,
    state: W,
    /// The number of the use of the slot in which a channel has started, if the number of channels is known; else the
    /// state counts those that have.
    begun: W,
    /// When the first channel started and the last one ended, by the device's clock: [tagged](tag) times; 0 = unknown.
    first_start: W,
    last_end: W,
    /// When it was reported to be in a plan, by the clock of the records, ns.
    pub(crate) planned: W,
    /// Its place in the order of its communicator's plans: see [`order`](crate::order). 0 = it has none.
    pub(crate) place: W,
}

/// The number of bits that are kept of a time in nanoseconds, so that times repeat after 78 hours.
const TIME_BITS: u32 = 48;
const TIME: u64 = (1 << TIME_BITS) - 1;

/// A time of the device's clock with the lower bits of the use of the slot, so that the time of an earlier use is known
/// as such.
fn tag(at: SlotUse, time: u64) -> u64 {
    u64::from(at.generation) << TIME_BITS | time & TIME
}

fn is_tagged(at: SlotUse, time: u64) -> bool {
    time >> TIME_BITS == u64::from(at.generation & 0xffff)
}

/// Whether one time is after another. Both are of one operation, so they are less than half of the range of the kept
/// bits apart.
fn is_after(time: u64, other: u64) -> bool {
    let ahead = time.wrapping_sub(other) & TIME;
    ahead != 0 && ahead < TIME / 2
}

impl<W: Word> Op<W> {
    /// Sets the slot up for this use; `next` is the list of its group call so far.
    pub(crate) fn set(
        &self,
        at: SlotUse,
        ticket: Ticket,
        communicator: SlotUse,
        (flags, next): (u8, u64),
    ) {
        // A reader that sees a word of this use must not find the state of the one before.
        self.state.store(0, Relaxed);
        W::fence_release();
        for (word, value) in self.ticket.iter().zip(ticket.to_words()) {
            word.store(value, Relaxed);
        }
        self.communicator.store(communicator.to_word(), Relaxed);
        self.next.store(next, Relaxed);
        for word in [
            &self.first_start,
            &self.last_end,
            &self.planned,
            &self.place,
        ] {
            word.store(0, Relaxed);
        }
        self.state.store(State::of(at, flags).0, Release);
    }

    /// The record of the operation. The slot may get another use during the call: the result belongs to a certain use
    /// only if [`state`](Self::state) or [`change`](Self::change), called for this use after this function, returns
    /// `Some`.
    #[inline(always)]
    pub(crate) fn ticket(&self) -> Ticket {
        // Not by `map`: its array would be in memory, and copied before its stores are done.
        let [id, sequence, group] = &self.ticket;
        Ticket::of_words([
            id.load(Acquire),
            sequence.load(Acquire),
            group.load(Acquire),
        ])
    }

    /// The use of the communicator's slot, which is valid on the same condition as the [ticket](Self::ticket).
    pub(crate) fn communicator(&self) -> SlotUse {
        SlotUse::from_word(self.communicator.load(Acquire))
    }

    /// The state now; `None` if the slot has another use.
    pub(crate) fn state(&self, at: SlotUse) -> Option<State> {
        let state = self.state.load(Acquire);
        (state >> 32 == u64::from(at.generation)).then_some(State(state))
    }

    /// Changes the state of this use of the slot, and returns the state before and the new one. `None` if the slot has
    /// another use, or `change` returns `None`.
    #[inline]
    pub(crate) fn change(
        &self,
        at: SlotUse,
        change: impl Fn(State) -> Option<State>,
    ) -> Option<(State, State)> {
        let mut before = self.state(at)?;
        loop {
            let after = change(before)?;
            if self.state.replace(before.0, after.0, AcqRel) {
                return Some((before, after));
            }
            before = self.state(at)?;
        }
    }

    /// Changes the state of an operation that is not over; `None` if it is over, or the slot has another use.
    #[inline]
    pub(crate) fn change_open(
        &self,
        at: SlotUse,
        change: impl Fn(State) -> State,
    ) -> Option<(State, State)> {
        self.change(at, |state| (!state.has(flag::OVER)).then(|| change(state)))
    }

    /// Puts an operation that is not over into a plan with this number of channels, and sets `flags`; `leaves` = it is
    /// no longer in the list of its group call. Calls `watch` if the operation was not watched, because its group call
    /// had ended before. `None` if it is over, or the slot has another use.
    pub(crate) fn plan(
        &self,
        at: SlotUse,
        channels: u8,
        flags: u8,
        leaves: bool,
        watch: impl FnOnce(),
    ) -> Option<State> {
        let gone = flag::LEFT | if leaves { flag::IN_GROUP } else { 0 };
        let (before, after) = self.change_open(at, |state| {
            let state = state.without(gone).with_channels(channels);
            state.with(flag::PLANNED | flags)
        })?;
        if before.has(flag::LEFT) {
            watch();
        }
        Some(after)
    }

    /// Ends the group call of an operation. One that is in no plan is then no longer watched: `retire` marks that, and
    /// `watch` reverts it, if its plan comes at this moment. `None` if the slot has another use.
    pub(crate) fn leave_group(
        &self,
        at: SlotUse,
        retire: impl FnOnce(),
        watch: impl FnOnce(),
    ) -> Option<State> {
        let waits = |state: State| !state.has(flag::PLANNED | flag::OVER);
        let is_left = self.state(at).is_some_and(waits);
        if is_left {
            retire();
        }
        let (_, after) = self.change(at, |state| {
            let state = state.without(flag::IN_GROUP);
            match waits(state) {
                true => Some(state.with(flag::LEFT)),
                false => Some(state),
            }
        })?;
        if is_left && after.has(flag::PLANNED) && !after.has(flag::OVER) {
            watch();
        }
        Some(after)
    }

    // One proxy thread reports the channels of an operation, so loads and stores suffice for what only its events
    // change: they cost less than exchanges. If an event of an earlier use stores its time between them, the tag makes
    // the time unknown; if it stores its use, a later channel counts as the first once more, which changes nothing in
    // the record.

    /// Notes that a channel starts, and returns whether it is the first. `None` if the operation is over, or the slot
    /// has another use.
    #[inline]
    pub(crate) fn starts(&self, at: SlotUse) -> Option<bool> {
        let state = self.state(at).filter(|state| !state.has(flag::OVER))?;
        if !state.knows_channels() {
            let (before, _) = self.change_open(at, State::starts)?;
            return Some(before.started() == 0);
        }
        let is_first = self.begun.load(Relaxed) != u64::from(at.generation);
        if is_first {
            self.begun.store(at.generation.into(), Relaxed);
        }
        Some(is_first)
    }

    /// Notes that a channel started at this time of the device's clock, ns; 0 = unknown.
    pub(crate) fn notes_start(&self, at: SlotUse, time: u64) {
        let known = self.first_start.load(Relaxed);
        if time > 0 && (known == 0 || is_tagged(at, known) && is_after(known, time)) {
            self.first_start.store(tag(at, time), Relaxed);
        }
    }

    /// Notes that a channel ended at this time of the device's clock, ns; 0 = unknown.
    pub(crate) fn notes_end(&self, at: SlotUse, time: u64) {
        let known = self.last_end.load(Relaxed);
        if time > 0 && (known == 0 || is_tagged(at, known) && is_after(time, known)) {
            self.last_end.store(tag(at, time), Relaxed);
        }
    }

    /// The time from the first start of a channel to the last end, if both are known.
    pub(crate) fn duration(&self, at: SlotUse) -> Option<Duration> {
        let (start, end) = (self.first_start.load(Relaxed), self.last_end.load(Relaxed));
        let known = start > 0 && end > 0 && is_tagged(at, start) && is_tagged(at, end);
        (known && !is_after(start, end)).then(|| {
            let ns = end.wrapping_sub(start) & TIME;
            Duration::from_nanos(ns)
        })
    }
}

#[cfg(test)]
#[path = "operation_model.rs"]
mod operation_model;

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(generation: u32) -> SlotUse {
        SlotUse {
            index: 0,
            generation,
        }
    }

    fn op(at: SlotUse, flags: u8) -> Op {
        let op = Op::default();
        op.set(at, Ticket::of_words([1, 2, 3]), slot(1), (flags, 0));
        op
    }

    #[test]
    fn events_of_an_earlier_use_of_a_slot_change_nothing() {
        let (old, new) = (slot(3), slot(5));
        let op = op(old, 0);
        op.notes_start(old, 100);
        op.set(
            new,
            Ticket::of_words([4, 5, 6]),
            slot(1),
            (flag::PLANNED, 0),
        );
        let before = op.state(new);
        assert_eq!(op.change_open(old, State::starts), None);
        assert_eq!(op.change_open(old, State::finishes), None);
        assert_eq!(op.change_open(old, |state| state.with(flag::LEFT)), None);
        assert_eq!((op.state(new), op.state(old)), (before, None));
        op.notes_start(new, 1_000);
        op.notes_end(new, 1_500);
        op.notes_end(old, 9_000);
        assert_eq!(op.duration(new), Some(Duration::from_nanos(500)));
        // If an earlier use stores its time nevertheless, the time is unknown, but never wrong.
        op.last_end.store(tag(old, 9_000), Relaxed);
        op.notes_end(new, 2_000);
        assert_eq!(op.duration(new), None);
    }

    #[test]
    fn an_operation_is_over_with_the_last_of_its_channels_and_only_once() {
        let at = slot(7);
        let exact = op(at, 0);
        exact.change_open(at, |state| state.with_channels(2));
        let over = |op: &Op| {
            op.change_open(at, State::finishes)
                .is_some_and(|(_, after)| after.has(flag::OVER))
        };
        exact.change_open(at, State::starts);
        assert!(!over(&exact));
        exact.change_open(at, State::starts);
        assert!(over(&exact) && !over(&exact));
        // The number of channels is unknown: all that have started have finished.
        let unknown = op(at, 0);
        unknown.change_open(at, State::starts);
        assert!(over(&unknown));
    }

    #[test]
    fn the_first_channel_of_each_use_is_known_as_such() {
        let op = op(slot(3), 0);
        for (at, channels) in [(slot(3), 2), (slot(5), 2), (slot(7), 0)] {
            op.set(at, Ticket::of_words([1, 2, 3]), slot(1), (0, 0));
            op.plan(at, channels, 0, false, || {});
            assert_eq!([op.starts(at), op.starts(at)], [Some(true), Some(false)]);
            op.change_open(at, |state| state.with(flag::OVER));
            assert_eq!(op.starts(at), None);
        }
        assert_eq!(op.starts(slot(3)), None);
    }

    #[test]
    fn times_across_the_end_of_the_clock_s_kept_bits_have_the_right_distance() {
        let at = slot(9);
        let op = op(at, 0);
        op.notes_start(at, TIME - 10);
        op.notes_start(at, TIME - 5);
        op.notes_end(at, TIME + 20);
        op.notes_end(at, TIME + 10);
        assert_eq!(op.duration(at), Some(Duration::from_nanos(30)));
    }
}
