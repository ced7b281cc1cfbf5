//! Decides when to poll a socket before sleeping.

use std::time::Duration;

/// Decides between polling and sleeping, for one thread that waits for one peer or for many.
///
/// Waking a sleeping thread costs its peer some 50 µs. So where messages arrive in quick succession, a thread polls
/// for as long as a wake-up takes before it sleeps. It begins to poll only after several short sleeps in a row, and
/// after one poll without a message it does not poll for many sleeps. So an idle thread uses no processor time for
/// polling, and a thread whose messages arrive at intervals just above the limit uses little.
///
/// A thread that polls yields its processor between two reads of the socket. Where another program keeps the processor
/// busy, the thread gets it back only after some milliseconds, although its message has been there. Such a poll counts
/// as one without a message.
pub(super) struct Spin {
    /// How many short sleeps there were in a row.
    short_sleeps: u32,
    /// How many of the next sleeps are not counted.
    pause: u32,
}

impl Spin {
    /// How long to poll: about what a wake-up costs.
    pub(super) const LONGEST: Duration = Duration::from_micros(50);
    /// A sleep up to this long counts as short; it includes the wake-up.
    const SHORT_SLEEP: Duration = Duration::from_micros(150);
    /// After this many short sleeps in a row, the thread polls.
    const ENOUGH: u32 = 4;
    /// After a poll without a message, this many sleeps are not counted.
    const PAUSE: u32 = 64;

    /// A thread that polls only after several messages have arrived in quick succession.
    pub(super) fn initially_sleeping() -> Self {
        Self {
            short_sleeps: 0,
            pause: 0,
        }
    }

    /// A thread that polls from the first message on.
    pub(super) fn initially_polling() -> Self {
        Self {
            short_sleeps: Self::ENOUGH,
            pause: 0,
        }
    }

    /// Whether to poll before the next sleep.
    pub(super) fn should_poll(&self) -> bool {
        self.short_sleeps >= Self::ENOUGH
    }

    /// Notes that no message arrived while polling.
    pub(super) fn poll_failed(&mut self) {
        self.short_sleeps = 0;
        self.pause = Self::PAUSE;
    }

    /// Notes that a message ended a poll of `time`.
    pub(super) fn polled(&mut self, time: Duration) {
        if time > Self::LONGEST + Self::SHORT_SLEEP {
            self.poll_failed();
        }
    }

    /// Notes that a message ended a sleep of `time`.
    pub(super) fn slept(&mut self, time: Duration) {
        if self.pause > 0 {
            self.pause -= 1;
        } else if time > Self::SHORT_SLEEP {
            self.short_sleeps = 0;
        } else {
            self.short_sleeps = self.short_sleeps.saturating_add(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_a_poll_without_a_message_polling_pauses() {
        let mut spin = Spin::initially_sleeping();
        assert!(!spin.should_poll());
        let short = Duration::from_micros(60);
        (0..Spin::ENOUGH).for_each(|_| spin.slept(short));
        assert!(spin.should_poll());
        spin.poll_failed();
        for _ in 0..Spin::PAUSE + Spin::ENOUGH - 1 {
            spin.slept(short);
            assert!(!spin.should_poll());
        }
        spin.slept(short);
        assert!(spin.should_poll());
    }

    #[test]
    fn a_poll_that_takes_much_longer_than_it_should_ends_polling() {
        let mut spin = Spin::initially_polling();
        spin.polled(Spin::LONGEST);
        assert!(spin.should_poll());
        spin.polled(Duration::from_millis(3));
        for _ in 0..Spin::PAUSE {
            assert!(!spin.should_poll());
            spin.slept(Duration::from_micros(60));
        }
    }

    #[test]
    fn long_sleep_ends_polling() {
        let mut spin = Spin::initially_polling();
        assert!(spin.should_poll());
        spin.slept(Duration::from_secs(1));
        assert!(!spin.should_poll());
    }
}
