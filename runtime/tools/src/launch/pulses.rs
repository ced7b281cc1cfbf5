//! [`Pulses`]: which launchers of other hosts live, by the counters that they regularly increment in the store.

use rcomm::store::Store;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Time between two increments of a launcher's pulse.
pub(super) const PULSE: Duration = Duration::from_millis(500);
/// Of the time between two looks at a pulse, at most this much counts as silence, or twice what counted the time before
/// if that is more. This is twice the time between two looks of a launcher whose ranks run and whose store answers at
/// once. If the looks themselves are slow, because many launchers are watched or the store is busy, each pause between
/// them is about as long as the one before.
const SHORT_PAUSE: Duration = Duration::from_secs(1);

/// The last known pulses of other launchers, by id.
#[derive(Default)]
pub(super) struct Pulses(HashMap<u32, Pulse>);

/// The pulse of another launcher.
struct Pulse {
    count: i64,
    /// When it was looked at last.
    looked: Instant,
    /// How much of the time before the last look has counted.
    pause: Duration,
    /// For how long looks have found this count.
    silent: Duration,
    has_advanced: bool,
}

/// What a launcher's pulse says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Life {
    /// The pulse has been seen to advance.
    Alive,
    /// The pulse has not been seen to advance yet, and the time that is allowed without an advance is not over.
    Unknown,
    /// The pulse has not advanced for longer than is allowed.
    Silent,
}

impl Pulses {
    /// Looks at the pulse of the launcher with this id. `silence` is the longest time without an advance that is
    /// allowed.
    ///
    /// # Errors
    /// Those of the store.
    pub(super) fn look(
        &mut self,
        keys: &impl Store,
        id: u32,
        silence: Duration,
    ) -> rcomm::Result<Life> {
        let count = keys.add(&pulse_key(id), 0)?;
        Ok(self.found(id, count, silence, Instant::now()))
    }

    /// Notes that a look has found this count; returns what the count shows.
    fn found(&mut self, id: u32, count: i64, silence: Duration, now: Instant) -> Life {
        let pulse = self.0.entry(id).or_insert(Pulse {
            count,
            looked: now,
            pause: Duration::ZERO,
            silent: Duration::ZERO,
            has_advanced: false,
        });
        // If this launcher itself was stopped in that time, it does not know whether the other one was silent
        // throughout.
        let passed = (now - pulse.looked).min(SHORT_PAUSE.max(2 * pulse.pause));
        *pulse = match pulse.count == count {
            true => Pulse {
                looked: now,
                pause: passed,
                silent: pulse.silent + passed,
                ..*pulse
            },
            false => Pulse {
                count,
                looked: now,
                pause: passed,
                silent: Duration::ZERO,
                has_advanced: true,
            },
        };
        match (pulse.silent > silence, pulse.has_advanced) {
            (true, _) => Life::Silent,
            (false, true) => Life::Alive,
            (false, false) => Life::Unknown,
        }
    }
}

pub(super) fn pulse_key(id: u32) -> String {
    format!("pulse/{id}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launcher_that_was_itself_stopped_calls_no_other_silent_for_that_time() {
        let mut pulses = Pulses::default();
        let (silence, start) = (Duration::from_secs(30), Instant::now());
        let mut look = |count, seconds| {
            let now = start + Duration::from_secs(seconds);
            pulses.found(7, count, silence, now)
        };
        assert_eq!(look(1, 0), Life::Unknown);
        assert_eq!(look(2, 1), Life::Alive);
        // This launcher was stopped for an hour. The other one has not run yet since, or could not reach the store.
        assert_eq!(look(2, 3_601), Life::Alive);
        assert_eq!(look(2, 3_602), Life::Alive);
        for second in 3_603..=3_629 {
            assert_eq!(look(2, second), Life::Alive, "{second}");
        }
        assert_eq!(look(2, 3_630), Life::Silent);
        assert_eq!(look(3, 3_631), Life::Alive);
    }

    #[test]
    fn slow_looks_hardly_lengthen_the_silence_that_is_allowed() {
        let mut pulses = Pulses::default();
        let (silence, start) = (Duration::from_secs(60), Instant::now());
        let mut look = |count, seconds| {
            let now = start + Duration::from_secs(seconds);
            pulses.found(7, count, silence, now)
        };
        // Each round of looks takes 10 s.
        for round in 0..5_u64 {
            look(i64::try_from(round).unwrap(), 10 * round);
        }
        for second in [50, 60, 70, 80, 90, 100] {
            assert_eq!(look(4, second), Life::Alive, "{second}");
        }
        assert_eq!(look(4, 110), Life::Silent);
    }
}
