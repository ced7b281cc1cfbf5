//! Finds the slots of a ring that changed since an earlier read.
//!
//! Writers need no extra work: every write changes a slot's stamp, so comparing stamps finds the changes.
//! Each read (a "poll" here) has a number, and for each slot the number of the poll that first found its stamp is
//! stored.

use super::layout::RingLayout;
use super::sync::Read;
use super::{decode, rings};
use crate::model::dump::Dump;

/// A slot's stamp, and the number of the poll that first found it.
#[derive(Clone, Copy, Debug, Default)]
struct SlotSeen {
    stamp: u64,
    poll: u64,
}

/// The stamps of one ring, as last seen.
#[derive(Debug)]
pub(crate) struct Changes {
    slots: Vec<SlotSeen>,
    /// The number before the first poll's. No number of an earlier process of this rank is above it, so
    /// [`knows`](Self::knows) distinguishes them from those of this process.
    before_first: u64,
    /// The number of the newest poll.
    poll: u64,
}

impl Changes {
    /// The first poll gets the number after `before_first`, which must not be below any number of an earlier process of
    /// this rank.
    pub(crate) fn numbered_after(before_first: u64, layout: &RingLayout) -> Self {
        Self {
            slots: vec![SlotSeen::default(); layout.slots.rows],
            before_first,
            poll: before_first,
        }
    }

    /// Whether this number was given to a poll.
    pub(crate) fn knows(&self, poll: u64) -> bool {
        (self.before_first + 1..=self.poll).contains(&poll)
    }

    /// Polls the ring: returns a dump with the entries that changed after poll number `since`, and the number of this
    /// poll. With `since` 0, all entries count as changed.
    pub(crate) fn since(
        &mut self,
        memory: &impl Read,
        layout: &RingLayout,
        since: u64,
        dump_time_ns: i64,
    ) -> (Dump, u64) {
        self.poll += 1;
        let poll = self.poll;
        let ring = rings::slots(layout);
        let slots = self.slots.iter_mut().enumerate();
        // The stamp is noted before its slot is read: a record that is written in between is found by the next poll,
        // possibly for the second time.
        let changed = slots.filter_map(|(index, seen)| {
            let stamp = ring.stamp(memory, index);
            if seen.stamp != stamp {
                *seen = SlotSeen { stamp, poll };
            }
            (seen.poll > since).then_some(index)
        });
        let dump = decode::dump_of(memory, layout, dump_time_ns, changed);
        (dump, poll)
    }
}
