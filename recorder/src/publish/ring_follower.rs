//! Reads one ring file repeatedly; a read costs in proportion to what changed since the previous one.
//!
//! A slot is written to until its operation has ended and is no longer watched. A read therefore covers
//! the slots used since the previous read and those that could still change then.

use super::follow::FollowedDump;
use super::ring_reader::{Owner, RingReader};
use crate::model::dump::Dump;
use crate::model::{Entry, EntryState};
use crate::record::clock::Anchor;
use crate::record::ring::is_busy;
use crate::record::{decode, layout, nccl, rings};
use std::collections::BTreeMap;

/// A ring that is read repeatedly from outside, and its record.
#[derive(Debug)]
pub struct RingFollower {
    reader: RingReader,
    keep: usize,
    record: FollowedDump,
    /// The newest record id that was assigned at the last read.
    newest: u64,
    /// Records that may still change, each with the stamp of its slot when it was read last.
    unsettled: BTreeMap<u64, u64>,
    /// What can change besides the slots: the reader's fingerprint and the state of the owner at the last read.
    besides_slots: Option<(u64, Owner)>,
    /// The anchor of the ring's times at the last read.
    anchor: Anchor,
}

/// The result of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingPoll {
    /// Whether something was written since the last read, except the heartbeat and the waits for a processor, or the
    /// owner's state has changed.
    pub changed: bool,
    /// Whether the file still has its whole size. If not, nothing was read: `alive` is false and `heartbeat_ns` 0.
    pub whole: bool,
    /// Whether the process that writes the ring is alive.
    pub alive: bool,
    /// When the owner's watchdog last made a round, wall clock, ns since the epoch; 0 if never.
    pub heartbeat_ns: i64,
    /// The time of the record: now, or its newest time if the owner is dead or has closed the ring.
    pub as_of_ns: i64,
}

impl RingFollower {
    /// Follows this ring. The newest `keep` operations are kept, and all from the oldest one that has not ended; older
    /// ones are read once and dropped.
    pub fn new(reader: RingReader, keep: usize) -> Self {
        Self {
            anchor: layout::load_anchor(&reader.memory().0),
            reader,
            keep,
            record: FollowedDump::default(),
            newest: 0,
            unsettled: BTreeMap::new(),
            besides_slots: None,
        }
    }

    /// The ring.
    pub fn reader(&self) -> &RingReader {
        &self.reader
    }

    /// The record as of the last read; empty before the first.
    pub fn dump(&self) -> &Dump {
        self.record.dump()
    }

    /// Reads the ring's changes. Never blocks.
    pub fn poll(&mut self) -> RingPoll {
        if !self.reader.is_whole() {
            return RingPoll {
                changed: false,
                whole: false,
                alive: false,
                heartbeat_ns: 0,
                as_of_ns: self.dump().identity.dump_time_ns,
            };
        }
        // Fingerprint and owner are read before the ring, so that the next poll finds a concurrent write.
        let besides_slots = (self.reader.fingerprint(), self.reader.owner());
        let anchor = layout::load_anchor(&self.reader.memory().0);
        if anchor != self.anchor {
            // With the new anchor, all times that were read before are different.
            self.anchor = anchor;
            self.forget();
        }
        let (picked, is_written) = self.pick();
        let changed = is_written || self.besides_slots != Some(besides_slots);
        self.besides_slots = Some(besides_slots);
        let owner = besides_slots.1;
        if changed {
            self.take_in(picked, owner);
        }
        RingPoll {
            changed,
            whole: true,
            alive: owner.is_alive(),
            heartbeat_ns: self.reader.heartbeat_ns(),
            as_of_ns: match owner {
                Owner::Alive | Owner::Stopped | Owner::Traced => self.reader.now_ns(),
                // The owner has not written since then.
                Owner::Dead | Owner::Closed => self.dump().identity.dump_time_ns,
            },
        }
    }

    /// Drops all that was read, so that the whole ring is read again.
    fn forget(&mut self) {
        self.record = FollowedDump::default();
        self.newest = 0;
        self.unsettled.clear();
        self.besides_slots = None;
    }

    /// The slots to read, and whether one of them was written to.
    fn pick(&mut self) -> (Vec<usize>, bool) {
        let (words, layout) = self.reader.memory();
        let slots = rings::slots(layout);
        let newest = self.reader.records();
        let oldest = newest.saturating_sub(slots.slots() as u64) + 1;
        self.unsettled = self.unsettled.split_off(&oldest);
        let first = self.newest.max(oldest - 1).saturating_add(1);
        // 0 is a stamp that no slot has, so new records are read in any case.
        self.unsettled.extend((first..=newest).map(|id| (id, 0)));
        self.newest = newest;
        let mut is_written = false;
        let mut picked = Vec::new();
        for (&id, known) in &mut self.unsettled {
            let index = slots.index_of(id);
            let slot_stamp = slots.stamp(&words, index);
            let stamp = match layout.kernels.rows {
                0 => slot_stamp,
                // The record's row in the table of kernels counts too. Its stamp changes only the upper half: the low
                // bits still show whether the record is busy.
                _ => slot_stamp ^ rings::kernels(layout).stamp(&words, index) << 32,
            };
            // The stamp is noted before its slot is read, so that the next poll finds a concurrent write. A slot
            // whose writer died stays busy and is read every time.
            if stamp != *known || is_busy(slot_stamp) {
                is_written |= stamp != *known;
                *known = stamp;
                picked.push(index);
            }
        }
        (picked, is_written)
    }

    /// Reads the picked slots into the record.
    fn take_in(&mut self, picked: Vec<usize>, owner: Owner) {
        let (words, layout) = self.reader.memory();
        let slots = layout.slots.rows as u64;
        let newer = decode::dump_of(&words, layout, self.reader.now_ns(), picked);
        self.record.take_in(newer, Some(slots));
        if self.record.is_overgrown() {
            self.record = FollowedDump::of(decode::dump(&words, layout, self.reader.now_ns()));
        }
        self.reader
            .set_time_and_reason(self.record.dump_mut(), owner);
        let entries = &self.record.dump().entries;
        self.unsettled.retain(|&id, _| {
            let index = entries.binary_search_by_key(&id, |entry| entry.record_id);
            index.map_or(true, |index| !is_settled(&entries[index]))
        });
        // NCCL's state covers all operations in progress, also those whose slots this read did not cover.
        let (words, layout) = self.reader.memory();
        nccl::put_into(self.record.dump_mut(), &words, layout);
        self.record.dump_mut().keep_newest(self.keep);
    }
}

/// Whether no writer changes the slot any more.
fn is_settled(entry: &Entry) -> bool {
    entry.retired && entry.state >= EntryState::Completed
}
