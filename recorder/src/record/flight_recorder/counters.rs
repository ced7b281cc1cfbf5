//! [`Counters`]: what a recorder wrote, and what it could not keep.

use super::FlightRecorder;
use crate::record::layout::header;
use crate::record::sync::Read;

/// Counts of a recorder since it was made: its operations, and the data that it could not keep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Operations begun.
    pub records: u64,
    /// Records not written: another writer held the slot or had reused it, or the system had no space for the slot.
    pub records_lost: u64,
    /// Updates not written: another writer held the slot, the slot has no space, or the id of a graph was too large.
    /// Updates of channels and of connections that were not written count here, whatever the reason.
    pub updates_lost: u64,
    /// Updates whose record was not in its slot: a newer record had reused the slot, or the record was lost.
    pub updates_late: u64,
    /// Groups that did not fit in the table.
    pub groups_lost: u64,
    /// Records whose shapes or splits did not fit: their element counts were kept.
    pub shapes_lost: u64,
    /// Call sites that did not fit in the table: one for each record that gave its location, and one for each call of
    /// [`intern_call_site`](FlightRecorder::intern_call_site).
    pub call_sites_lost: u64,
    /// Records whose thread did not fit in the table.
    pub threads_lost: u64,
    /// Phases not written, since another thread was setting one.
    pub phases_lost: u64,
}

impl FlightRecorder {
    /// The counts so far.
    pub fn counters(&self) -> Counters {
        let load = |word| self.map.load(word);
        Counters {
            records: load(header::LAST_ID),
            records_lost: load(header::RECORDS_LOST),
            updates_lost: load(header::UPDATES_LOST),
            updates_late: load(header::UPDATES_LATE),
            groups_lost: load(header::GROUPS_LOST),
            shapes_lost: load(header::SHAPES_LOST),
            call_sites_lost: load(header::CALL_SITES_LOST),
            threads_lost: load(header::THREADS_LOST),
            phases_lost: load(header::PHASES_LOST),
        }
    }
}
