//! [`Tickets`]: the records of one operation in the ring.

use crate::backend::Done;
use rcomm_recorder::record::{FlightRecorder, Ticket};
use std::time::Duration;

/// The records of one operation: if it is a coalesced block, those of the operations in it; then its own.
pub(crate) struct Tickets {
    pub(crate) members: Vec<Ticket>,
    pub(crate) operation: Ticket,
}

impl Tickets {
    #[inline]
    fn for_each(&self, mut note: impl FnMut(Ticket)) {
        self.members.iter().for_each(|&member| note(member));
        note(self.operation);
    }

    pub(crate) fn started(&self, recorder: &FlightRecorder) {
        self.for_each(|ticket| recorder.started(ticket));
    }

    pub(crate) fn completed(&self, recorder: &FlightRecorder, done: Done) {
        let now = recorder.now();
        self.for_each(|ticket| match done.graph_id {
            None => recorder.completed_at(ticket, now, done.duration),
            Some(graph) => recorder.captured_at(ticket, now, graph),
        });
    }

    /// Records completion and the end of watching in one step. For operations outside of graphs only.
    #[inline]
    pub(crate) fn settled(&self, recorder: &FlightRecorder, duration: Option<Duration>) {
        let now = recorder.now();
        self.for_each(|ticket| recorder.completed_and_retired_at(ticket, now, duration));
    }

    pub(crate) fn failed(&self, recorder: &FlightRecorder) {
        self.for_each(|ticket| recorder.failed(ticket));
    }

    pub(crate) fn retired(&self, recorder: &FlightRecorder) {
        self.for_each(|ticket| recorder.retired(ticket));
    }
}
