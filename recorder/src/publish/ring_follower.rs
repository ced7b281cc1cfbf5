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

/// A ring that is followed from outside, and its record.
#[derive(Debug)]
pub struct RingFollower {
    reader: RingReader,
    keep: usize,
    record: FollowedDump,
    /// The newest record id that was given out at the last look.
    newest: u64,
    /// Records that may still change, each with the stamp of its slot when it was read last.
    open: BTreeMap<u64, u64>,
    /// Everything but the operations, and the owner, as they were at the last look.
    rest: Option<(u64, Owner)>,
    /// What the ring's times were counted from at the last look.
    anchor: Anchor,
}

/// What a look found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingPoll {
    /// Something was written since the last look, the heartbeat apart, or the owner went.
    pub changed: bool,
    /// The process that writes the ring lives.
    pub alive: bool,
    /// When the owner's watchdog last made a round, wall clock, ns since the epoch; 0 if never.
    pub heartbeat_ns: i64,
    /// What the record is as of: now by the ring's clock, or the last sign of life of a dead owner.
    pub as_of_ns: i64,
}

impl RingFollower {
    /// Follows this ring. Of its operations the newest `keep` are kept, and all from the oldest on that
    /// is not over; what is older is read once and let go.
    pub fn new(reader: RingReader, keep: usize) -> Self {
        Self {
            anchor: layout::load_anchor(reader.memory().0),
            reader,
            keep,
            record: FollowedDump::default(),
            newest: 0,
            open: BTreeMap::new(),
            rest: None,
        }
    }

    /// The ring.
    pub fn reader(&self) -> &RingReader {
        &self.reader
    }

    /// The record as of the last look; empty before the first.
    pub fn dump(&self) -> &Dump {
        self.record.dump()
    }

    /// Reads the ring's changes. Never blocks.
    pub fn poll(&mut self) -> RingPoll {
        // Taken before the ring is read, so that a concurrent write is found by the next read.
        let rest = (self.reader.stands(), self.reader.owner());
        let anchor = layout::load_anchor(self.reader.memory().0);
        if anchor != self.anchor {
            // Every time that was read is another one now.
            self.anchor = anchor;
            self.forget();
        }
        let (picked, moved) = self.pick();
        let changed = moved || self.rest != Some(rest);
        self.rest = Some(rest);
        let owner = rest.1;
        if changed {
            self.take_in(picked, owner);
        }
        RingPoll {
            changed,
            alive: owner.lives(),
            heartbeat_ns: self.reader.heartbeat_ns(),
            as_of_ns: match owner {
                Owner::Lives | Owner::Stopped | Owner::Traced => self.reader.now_ns(),
                // It has not been seen since.
                Owner::IsDead | Owner::Closed => self.dump().identity.dump_time_ns,
            },
        }
    }

    fn forget(&mut self) {
        self.record = FollowedDump::default();
        self.newest = 0;
        self.open.clear();
        self.rest = None;
    }

    /// The slots to read, and whether one of them was written to.
    fn pick(&mut self) -> (Vec<usize>, bool) {
        let (view, layout) = self.reader.memory();
        let slots = rings::slots(layout);
        let newest = self.reader.records();
        let oldest = newest.saturating_sub(slots.slots() as u64) + 1;
        self.open = self.open.split_off(&oldest);
        let first = self.newest.max(oldest - 1).saturating_add(1);
        // A stamp that no slot has: what is new is read in any case.
        self.open.extend((first..=newest).map(|id| (id, 0)));
        self.newest = newest;
        let mut moved = false;
        let mut picked = Vec::new();
        for (&id, known) in &mut self.open {
            let index = slots.index_of(id);
            let own = slots.stamp(view, index);
            let stamp = match layout.kernels.rows {
                0 => own,
                // The low bits keep whether the record is busy; the rest changes if either of both did.
                _ => own ^ rings::kernels(layout).stamp(view, index) << 32,
            };
            // The stamp is stored before its slot is read, as above. A slot whose writer died stays
            // busy and is counted every time.
            if stamp != *known || is_busy(own) {
                moved |= stamp != *known;
                *known = stamp;
                picked.push(index);
            }
        }
        (picked, moved)
    }

    fn take_in(&mut self, picked: Vec<usize>, owner: Owner) {
        let (view, layout) = self.reader.memory();
        let slots = layout.slots.rows as u64;
        let newer = decode::dump_of(view, layout, self.reader.now_ns(), picked);
        self.record.take_in(newer, Some(slots));
        if self.record.is_overgrown() {
            self.record = FollowedDump::of(decode::dump(view, layout, self.reader.now_ns()));
        }
        self.reader.finish(self.record.dump_mut(), owner);
        let entries = &self.record.dump().entries;
        self.open.retain(|&id, _| {
            let at = entries.binary_search_by_key(&id, |entry| entry.record_id);
            at.map_or(true, |at| !is_settled(&entries[at]))
        });
        // The operations that were read now are not all that are under way.
        let (view, layout) = self.reader.memory();
        nccl::put_into(self.record.dump_mut(), view, layout);
        self.record.dump_mut().keep_newest(self.keep);
    }
}

/// No writer touches the slot any more.
fn is_settled(entry: &Entry) -> bool {
    entry.retired && entry.state >= EntryState::Completed
}
