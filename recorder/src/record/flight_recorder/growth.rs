//! Grows the ring's file: slots and the lap ring are reserved when they are first needed, or slightly ahead.

use super::FlightRecorder;
use crate::record::file::space::reserve;
use crate::record::layout::{header, slot};
use crate::record::ring::Missed;
use crate::record::sync::Memory;
use rustix::io::Errno;
use std::sync::atomic::{AtomicU64, Ordering};

/// Number of bytes of a ring file that are reserved at a time.
pub(super) const GROWTH: usize = 64 << 10;

impl FlightRecorder {
    /// Reserves this many more bytes of the ring and takes their page faults, in the order in which records need them.
    /// Returns whether more remain; false also if the system has no space. A background thread calls it for a ring that
    /// was created with [`Touch::Ahead`](crate::record::Touch::Ahead).
    pub fn touch_ahead(&self, bytes: usize) -> bool {
        let total = self.layout.bytes / 8;
        let count = bytes / 8;
        let before = self.touched.fetch_add(count, Ordering::Relaxed);
        if before >= total {
            return false;
        }
        let from = (self.layout.slots.word + before) % total;
        let end = from + count.min(total - before);
        if !self.reserve_to(end.min(total)) {
            return false;
        }
        self.map.touch(from..end.min(total));
        self.map.touch(0..end.saturating_sub(total));
        before + count < total
    }

    /// Writes a slot for which no space is reserved yet.
    #[cold]
    pub(super) fn write_beyond(
        &self,
        id: u64,
        fill: &dyn Fn(&[AtomicU64; slot::WORDS]),
    ) -> std::result::Result<(), Missed> {
        if !self.reserve_to(self.slots.end_of(id)) {
            return Err(Missed::Beyond);
        }
        self.slots.write(&self.map, id, fill)
    }

    /// Reserves the ring file up to this word if needed; returns whether it is reserved now.
    ///
    /// A recording thread calls this if the background thread has not reserved the space yet: once in 512 records, just
    /// after start-up. It then waits for the system to provide some pages. Takes no lock: if several threads need space
    /// at once, each asks the system for it, which does not change what is reserved already.
    pub(super) fn reserve_to(&self, end: usize) -> bool {
        let reserved = self.map.words().len();
        if end <= reserved {
            return true;
        }
        let is_stopped = self.growth_stopped.load(Ordering::Relaxed);
        let Some(file) = self.file.as_ref().filter(|_| !is_stopped) else {
            return false;
        };
        let bytes = (end * 8).next_multiple_of(GROWTH).min(self.layout.bytes);
        if let Err(error) = reserve(file, reserved * 8, bytes) {
            // A record that does not fit is counted as lost, and the rest of the ring is still used. If only signals
            // have kept the system from reserving, the next record that needs space asks again.
            let is_stopped = error != Errno::INTR;
            self.growth_stopped.fetch_or(is_stopped, Ordering::Relaxed);
            return false;
        }
        self.map.admit(bytes / 8);
        self.map.words()[header::RESERVED].fetch_max(bytes as u64, Ordering::Release);
        true
    }
}
