//! Ends operations that no event will end.

use super::FlightRecorder;
use crate::record::layout::slot;
use crate::record::operation::Ticket;
use crate::record::progress::{fail, retire};
use crate::record::ring::{MAX_ID, Missed};
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// How often a thread tries at most while another one writes to the record, and the pause after each try.
const TRIES: u32 = 1_000;
const PAUSE: Duration = Duration::from_micros(100);

impl FlightRecorder {
    /// Records that an operation ended, now, with an error, and that the operation is no longer watched. No event ends
    /// the operation afterwards. So this method, unlike the others, waits while another thread writes to the record,
    /// also if that thread has no processor: for at most a thousand pauses of 100 µs. Do not call it where operations
    /// are issued.
    pub fn failed_and_retired(&self, ticket: Ticket) {
        let at = self.clock.now();
        let change = |words: &[AtomicU64; slot::WORDS]| {
            fail(words, at);
            retire(words);
        };
        let id = ticket.id & MAX_ID;
        for _ in 0..TRIES {
            if self.slots.update(&self.map, id, change) != Err(Missed::Held) {
                return;
            }
            std::thread::sleep(PAUSE);
        }
        self.update(ticket, change);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{EntryState, OpType};
    use crate::record::{
        GroupHandle, Operation, Placement, RecorderConfig, SignatureId, SignatureRef,
    };
    use std::sync::Barrier;

    #[test]
    fn an_abandoned_operation_ends_also_while_another_thread_writes_to_its_record() {
        let config = RecorderConfig {
            placement: Placement::Memory,
            entries: 64,
            ..RecorderConfig::new("job", 0, 2)
        };
        let recorder = FlightRecorder::create(&config).expect("memory for a ring");
        let unknown = SignatureRef::Id(SignatureId::UNKNOWN);
        let operation = Operation::new(GroupHandle::of_row(0), OpType::AllReduce, unknown);
        let ticket = recorder.begin(&operation);
        let is_written = Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let written = recorder.slots.update(&recorder.map, 1, |_| {
                    is_written.wait();
                    // Longer than other updates try, and shorter than this one waits.
                    std::thread::sleep(PAUSE * 200);
                });
                assert_eq!(written, Ok(()));
            });
            is_written.wait();
            recorder.failed_and_retired(ticket);
        });
        let entries = recorder.snapshot().entries;
        assert_eq!(
            (entries[0].state, entries[0].retired),
            (EntryState::Failed, true)
        );
        let counters = recorder.counters();
        assert_eq!((counters.updates_lost, counters.updates_late), (0, 0));
    }
}
