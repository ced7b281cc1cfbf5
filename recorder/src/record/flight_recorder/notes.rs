//! Records what has happened besides the operations: phases, exceptions, the exit code, failures, steps of reducers,
//! and communicators that exist.

use super::FlightRecorder;
use crate::model::{Failure, GroupId, RankStatus, ReducerBucket, ReducerTimes};
use crate::record::bytes::words_of;
use crate::record::layout::{group, header, phase};
use crate::record::operation::GroupHandle;
use crate::record::signature::cut;
use crate::record::sync::Memory;
use crate::record::{failures, reducer};
use std::sync::atomic::Ordering;

impl FlightRecorder {
    /// Sets the program's phase from now on; at most 104 bytes of the name are kept. A name that begins as the phase of
    /// an exception does ([`RankStatus::RAISED`]) is kept with a space before it. Takes no lock and does not allocate.
    pub fn phase(&self, name: &str) {
        let before = match name.starts_with(RankStatus::RAISED) {
            true => " ",
            false => "",
        };
        self.write_phase(before, name);
    }

    /// Records, as the phase from now on, that this exception (`ValueError: bad batch`) has left the program, which
    /// therefore ends; of its text, the beginning is kept. Takes no lock and does not allocate.
    pub fn note_exception(&self, exception: &str) {
        self.write_phase(RankStatus::RAISED, exception);
    }

    /// Writes a phase, whose name has two parts.
    fn write_phase(&self, before: &str, name: &str) {
        let since = self.clock.now();
        let name = cut(name, phase::MAX_BYTES - before.len());
        let mut bytes = [0; phase::MAX_BYTES];
        let len = before.len() + name.len();
        bytes[..before.len()].copy_from_slice(before.as_bytes());
        bytes[before.len()..len].copy_from_slice(name.as_bytes());
        let words = self.map.words();
        let id = words[header::LAST_PHASE].fetch_add(1, Ordering::Relaxed) + 1;
        let written = self.phases.write(&self.map, id, |words| {
            words[phase::SINCE].store(since.0, Ordering::Relaxed);
            words[phase::BYTES].store(len as u64, Ordering::Relaxed);
            for (word, value) in words[phase::TEXT..].iter().zip(words_of(&bytes[..len])) {
                word.store(value, Ordering::Relaxed);
            }
        });
        if written.is_err() {
            self.count(header::PHASES_LOST);
        }
    }

    /// Sets NCCL's number of the communicator that a group has, the same on all members, once it is known. Does nothing
    /// if the ring has no row for the group.
    pub fn set_communicator(&self, group: GroupHandle, number: u64) {
        if let Some(row) = self.group_words(group.0) {
            row[group::COMM_HASH].store(number, Ordering::Relaxed);
        }
    }

    /// Records the code with which this process exits, now. Takes no lock and does not allocate.
    pub fn note_exit(&self, code: u8) {
        let words = self.map.words();
        words[header::EXIT_CODE].store(u64::from(code), Ordering::Relaxed);
        words[header::EXITED_AT].store(self.clock.now().0, Ordering::Release);
    }

    /// Records a failure, now; its `id` and `time_ns` are ignored. Takes no lock and does not allocate. The first eight
    /// and the newest eight failures are kept.
    pub fn note_failure(&self, failure: &Failure) {
        failures::write(&self.map, &self.layout, failure, self.clock.now());
    }

    /// Records a step of a reducer that ended now, with its buckets in the order of sending; `group` is the group's
    /// number in this process. Takes no lock and does not allocate. The newest steps are kept, and of each the
    /// [`MAX_BUCKETS`](crate::model::ReducerStep::MAX_BUCKETS) buckets with the longest `communication_ns`.
    pub fn note_reducer_step(
        &self,
        group: GroupId,
        times: &ReducerTimes,
        buckets: impl Iterator<Item = ReducerBucket>,
    ) {
        let now = self.clock.now();
        reducer::write(&self.map, &self.layout, group, times, buckets, now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Placement, RecorderConfig};

    #[test]
    fn only_an_exception_is_recorded_as_one() {
        let config = RecorderConfig {
            placement: Placement::Memory,
            ..RecorderConfig::new("job", 0, 1)
        };
        let recorder = FlightRecorder::create(&config).expect("memory for a ring");
        let recorded = || recorder.snapshot().status.expect("a rank's status").phase;
        let long = format!("raised {}", "ä".repeat(60));
        for name in [
            "load data",
            "raised",
            "raised ValueError: bad batch",
            &long,
            "",
        ] {
            recorder.phase(name);
            let phase = recorded();
            assert!(!phase.starts_with(RankStatus::RAISED), "{phase}");
            assert!(name.starts_with(phase.trim_start()) && phase.len() <= phase::MAX_BYTES);
            assert!(
                phase.len() + 1 >= name.len().min(phase::MAX_BYTES),
                "{phase}"
            );
        }
        recorder.note_exception("ValueError: bad batch");
        assert_eq!(recorded(), "raised ValueError: bad batch");
        recorder.note_exception(&"ä".repeat(60));
        assert_eq!(recorded(), format!("raised {}", "ä".repeat(48)));
    }
}
