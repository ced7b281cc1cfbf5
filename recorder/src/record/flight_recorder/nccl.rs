//! Records the data of NCCL's profiler interface other than operations: communicators, channels, network links.
//!
//! The same rules hold as for operations: no lock, no allocation, and no error to the caller. Only adding a
//! communicator takes a lock and allocates.

use super::super::layout::{NO_ROW, RingLayout, halves, header, join, kernel, link, slot};
use super::super::operation::{GroupHandle, Ticket};
use super::super::ring::{MAX_ID, Missed, SlotRing};
use super::FlightRecorder;
use crate::model::{GroupPlace, LinkWait, ProcessGroupInfo};
use crate::record::clock::Timestamp;
use crate::record::sync::Memory as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A communicator, as NCCL describes it to a profiler.
#[derive(Clone, Copy, Debug)]
pub struct CommunicatorInfo<'a> {
    /// Local number of the group.
    pub id: u32,
    /// The group's name, equal on all members and on no other group.
    pub name: &'a str,
    /// The group's purpose; empty if the program did not set it.
    pub desc: &'a str,
    /// NCCL's number for the communicator, the same on all members.
    pub hash: u64,
    /// This process's rank in the communicator, if known.
    pub rank: Option<u32>,
    /// Number of ranks of the communicator, if known.
    pub size: Option<u32>,
}

/// NCCL's choices for an operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelPlan {
    /// Number of channels; 0 if unknown.
    pub channels: u8,
    /// Number of the algorithm in [`ALGORITHMS`](crate::record::ALGORITHMS).
    pub algorithm: u8,
    /// Number of the protocol in [`PROTOCOLS`](crate::record::PROTOCOLS).
    pub protocol: u8,
}

/// The progress of a channel of the device in its part of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChannelEvent {
    /// The channel started.
    Started,
    /// The channel finished.
    Finished,
}

/// One channel to one peer, in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkPlace {
    /// The communicator.
    pub group: GroupHandle,
    /// The channel.
    pub channel: u8,
    /// The other end, as a rank of the communicator.
    pub peer: u32,
    /// Whether the link sends; otherwise it receives.
    pub is_send: bool,
}

/// A handle of a link. It is valid for the recorder that returned it, until the links of its communicator are
/// [released](FlightRecorder::release_links).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinkHandle(u32);

impl LinkHandle {
    /// The link's number among the recorder's links.
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// The link with this [number](Self::index) of the same recorder.
    pub const fn from_index(index: u32) -> Self {
        Self(index)
    }
}

/// Maximum number of rows that a search for a link visits.
const PROBES: usize = 16;
/// Key of a row that is free and was in use before, so that a search continues after it. A row that was never in use
/// has the key 0.
const VACANT: u64 = 1;
/// Key of a row that passes from one link to another.
const PASSING: u64 = 2;
/// Bit of the key of a row that is in use. The other bits of the key are those of `link::PLACE`, in which this bit
/// belongs to what the link waits for.
const TAKEN: u64 = 1 << 25;

/// The key of the link at this place; `None` if its group is not in the table.
#[inline]
fn key_of(place: LinkPlace) -> Option<u64> {
    let row = u64::from(u16::try_from(place.group.0).ok()?);
    Some(
        row | u64::from(place.channel) << link::CHANNEL_SHIFT
            | if place.is_send { link::SEND } else { 0 }
            | TAKEN
            | u64::from(place.peer) << 32,
    )
}

/// The rows of links: an open-addressing hash table with one key for each row of the ring.
#[derive(Debug)]
pub(super) struct Links {
    ring: SlotRing<{ link::WORDS }>,
    keys: Box<[AtomicU64]>,
}

impl Links {
    pub(super) fn new(layout: &RingLayout) -> Self {
        let rows = layout.links.rows;
        Self {
            ring: SlotRing::new(layout.links.word, rows.max(1)),
            keys: (0..rows).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// The row of this key, which is added if it is missing. `None` if all rows for it are in use, and `reuse` refuses
    /// each. `used` is the number of rows that readers visit; it is raised to include the row.
    #[inline(always)]
    fn row_of(
        &self,
        key: u64,
        used: &AtomicU64,
        reuse: impl FnMut(usize) -> bool,
    ) -> Option<usize> {
        let mask = self.keys.len().checked_sub(1)?;
        let spread = key.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let first = (spread >> 32) as usize;
        // Nearly all keys are in the first of the rows where they may be.
        if self.keys[first & mask].load(Ordering::Relaxed) == key {
            return Some(first & mask);
        }
        let row = self
            .search(key, first, mask)
            .or_else(|| self.replace(key, first, mask, reuse))?;
        if used.load(Ordering::Relaxed) <= row as u64 {
            used.fetch_max(row as u64 + 1, Ordering::Relaxed);
        }
        Some(row)
    }

    /// Finds the row of this key, or gives it a free one.
    #[inline(never)]
    fn search(&self, key: u64, first: usize, mask: usize) -> Option<usize> {
        let rows = (0..PROBES.min(self.keys.len())).map(|probe| (first + probe) & mask);
        let mut free = None;
        for row in rows.clone() {
            match self.keys[row].load(Ordering::Relaxed) {
                known if known == key => return Some(row),
                0 => {
                    free = free.or(Some(row));
                    break;
                }
                VACANT => free = free.or(Some(row)),
                _ => {}
            }
        }
        // Two threads that insert one key at once may take two rows. Both are then reported, each while its own
        // transfer is in progress.
        for row in free.into_iter().chain(rows) {
            let seen = self.keys[row].load(Ordering::Relaxed);
            let is_free = seen == 0 || seen == VACANT;
            if is_free
                && self.keys[row]
                    .compare_exchange(seen, key, Ordering::Relaxed, Ordering::Relaxed)
                    .is_ok()
            {
                return Some(row);
            }
        }
        None
    }

    /// Takes a row of another key that `reuse` allows.
    #[inline(never)]
    fn replace(
        &self,
        key: u64,
        first: usize,
        mask: usize,
        mut reuse: impl FnMut(usize) -> bool,
    ) -> Option<usize> {
        let mut rows = (0..PROBES.min(self.keys.len())).map(|probe| (first + probe) & mask);
        rows.find(|&row| {
            let seen = self.keys[row].load(Ordering::Relaxed);
            // The key is exchanged for `PASSING` before `reuse` looks: a thread that begins a transfer on the row looks
            // for the key afterwards ([`FlightRecorder::is_link_at`]), so one of the two sees the other.
            let claimed = seen & TAKEN != 0
                && self.keys[row]
                    .compare_exchange(seen, PASSING, Ordering::SeqCst, Ordering::Relaxed)
                    .is_ok();
            if !claimed {
                return false;
            }
            let is_free = reuse(row);
            let next = if is_free { key } else { seen };
            self.keys[row].store(next, Ordering::SeqCst);
            is_free
        })
    }
}

impl FlightRecorder {
    /// Adds an NCCL communicator as a group whose members are unknown here: readers find them by its hash in the other
    /// ranks' rings.
    pub fn add_communicator(&self, info: &CommunicatorInfo<'_>) -> GroupHandle {
        let group = ProcessGroupInfo {
            id: info.id,
            name: info.name.to_owned(),
            desc: info.desc.to_owned(),
            ranks: [].into(),
        };
        let place = match (info.rank, info.size) {
            (Some(rank), Some(size)) => Some(GroupPlace { rank, size }),
            _ => None,
        };
        // Zero means that a group is not a communicator.
        let hash = info.hash.max(1);
        let row = self
            .tables
            .add_group(&self.map, &group, place, Duration::ZERO, hash);
        GroupHandle(row.unwrap_or_else(|| {
            self.count(header::GROUPS_LOST);
            NO_ROW
        }))
    }

    /// Records that NCCL has put an operation into a plan at this time.
    #[inline(always)]
    pub fn kernel_planned_at(&self, ticket: Ticket, plan: &KernelPlan, at: Timestamp) {
        if self.layout.kernels.rows == 0 {
            return;
        }
        let fill = |words: &[AtomicU64; kernel::WORDS]| {
            let store = |word: usize, value| words[word].store(value, Ordering::Relaxed);
            let facts = u64::from(plan.channels)
                | u64::from(plan.algorithm) << 8
                | u64::from(plan.protocol) << 16;
            store(kernel::PLAN, facts);
            store(kernel::ENQUEUED, at.0);
            store(kernel::LAUNCHED, 0);
            store(kernel::STARTED, 0);
            store(kernel::FINISHED, 0);
        };
        // An operation is planned once, before anything else about it is reported.
        let written = (self.kernels).write_alone(&self.map, ticket.id & MAX_ID, fill);
        if written.is_err() {
            self.count(header::UPDATES_LOST);
        }
    }

    /// Records that the plan of an operation was launched on the device at this time.
    #[inline(always)]
    pub fn kernel_launched_at(&self, ticket: Ticket, at: Timestamp) {
        if self.layout.kernels.rows == 0 {
            return;
        }
        // Another thread may report a channel at the same time, which changes another word. An exchange would cost more
        // than the rest.
        if (self.kernels)
            .update_word(&self.map, ticket.id & MAX_ID, kernel::LAUNCHED, |_| at.0)
            .is_err()
        {
            self.count(header::UPDATES_LOST);
        }
    }

    /// Records a channel's progress in an operation that was [planned](Self::kernel_planned_at). Only one thread at a
    /// time may call this for an operation.
    #[inline(always)]
    pub fn kernel_channel(&self, ticket: Ticket, channel: u8, event: ChannelEvent) {
        let word = match event {
            ChannelEvent::Started => kernel::STARTED,
            ChannelEvent::Finished => kernel::FINISHED,
        };
        if self.layout.kernels.rows == 0 {
            return;
        }
        // An exchange would cost more than the rest.
        if (self.kernels)
            .update_word(&self.map, ticket.id & MAX_ID, word, |bits| {
                bits | 1 << (channel & 63)
            })
            .is_err()
        {
            self.count(header::UPDATES_LOST);
        }
    }

    /// Records the peer of a send or receive that was unknown at the issue.
    pub fn set_peer(&self, ticket: Ticket, peer: u32) {
        self.update(ticket, |words| {
            let (_, root) = halves(words[slot::ENDS].load(Ordering::Relaxed));
            words[slot::ENDS].store(join(peer, root), Ordering::Relaxed);
        });
    }

    /// Reverts [`retired`](Self::retired): the operation is watched again.
    pub fn watched(&self, ticket: Ticket) {
        self.update(ticket, |words| {
            let state = words[slot::STATE].load(Ordering::Relaxed);
            words[slot::STATE].store(state & !slot::RETIRED, Ordering::Relaxed);
        });
    }

    /// A handle to the link at this place, for recording its progress; `None` if there are too many links, or the group
    /// is not in the table.
    #[inline]
    pub fn link(&self, place: LinkPlace) -> Option<LinkHandle> {
        self.link_or_reuse(place, |_| false)
    }

    /// Does the same as [`link`](Self::link), but if there are too many links, takes the row of one that `reuse`
    /// allows: it must have no transfer in progress. A caller that begins a transfer on the link must first count it
    /// where `reuse` sees it, with sequentially consistent ordering, and then ask [`is_link_at`](Self::is_link_at).
    #[inline(always)]
    pub fn link_or_reuse(
        &self,
        place: LinkPlace,
        mut reuse: impl FnMut(LinkHandle) -> bool,
    ) -> Option<LinkHandle> {
        let key = key_of(place)?;
        let used = &self.map.words()[header::LINKS_USED];
        let found = (self.links).row_of(key, used, |row| reuse(LinkHandle(row as u32)));
        let Some(row) = found else {
            self.count(header::LINKS_LOST);
            return None;
        };
        Some(LinkHandle(row as u32))
    }

    /// Whether the row of this handle still belongs to the link at this place.
    #[inline(always)]
    pub fn is_link_at(&self, handle: LinkHandle, place: LinkPlace) -> bool {
        let key = self.links.keys.get(handle.index());
        key.map(|key| key.load(Ordering::SeqCst)) == key_of(place)
    }

    /// Records the progress of a link's transfer for this operation, now: the completed steps and their total, and
    /// what the transfer waits for. Does nothing for a released link. Only one thread at a time may call this for a
    /// link: the records of two could be mixed.
    #[inline]
    pub fn link_at(
        &self,
        handle: LinkHandle,
        ticket: Option<Ticket>,
        steps: (u32, u32),
        wait: LinkWait,
    ) {
        self.link_since(handle, ticket, steps, (wait, self.clock.now()));
    }

    /// Does the same as [`link_at`](Self::link_at), for a transfer that waits since this time.
    #[inline(always)]
    pub fn link_since(
        &self,
        handle: LinkHandle,
        ticket: Option<Ticket>,
        (step, steps): (u32, u32),
        (wait, since): (LinkWait, Timestamp),
    ) {
        let row = handle.0 as usize;
        let key = self
            .links
            .keys
            .get(row)
            .map_or(0, |key| key.load(Ordering::Relaxed));
        if key & TAKEN == 0 {
            return;
        }
        // Seven bits hold what the link waits for: from `WAIT_SHIFT` up to the peer in the upper half.
        let wait_bits = u64::from(wait.code()) << link::WAIT_SHIFT;
        let place = key & !(0x7f << link::WAIT_SHIFT) | wait_bits;
        self.write_link(row, place, ticket, join(step, steps), since);
    }

    /// Writes the words of a link's row.
    #[inline(always)]
    fn write_link(
        &self,
        row: usize,
        place: u64,
        ticket: Option<Ticket>,
        steps: u64,
        since: Timestamp,
    ) {
        let fill = |words: &[AtomicU64; link::WORDS]| {
            let store = |word: usize, value| words[word].store(value, Ordering::Relaxed);
            store(link::PLACE, place);
            store(link::RECORD, ticket.map_or(0, |ticket| ticket.id));
            store(link::STEPS, steps);
            store(link::SINCE, since.0);
        };
        // The id of a row is constant: its index plus the number of rows, so that none is 0.
        let id = (row + self.links.keys.len()) as u64;
        // One thread at a time writes the row: an exchange would cost more than all the rest.
        if self.links.ring.update_alone(&self.map, id, fill) == Err(Missed::Reused) {
            let _ = self.links.ring.write(&self.map, id, fill);
        }
    }

    /// Records that no transfer of a link is in progress. Does nothing for a released link. Only one thread at a time
    /// may call this for a link.
    #[inline(always)]
    pub fn link_idle(&self, handle: LinkHandle) {
        let Some(key) = self.links.keys.get(handle.index()) else {
            return;
        };
        if key.load(Ordering::Relaxed) & TAKEN == 0 {
            return;
        }
        let idle = u64::from(LinkWait::Idle.code()) << link::WAIT_SHIFT;
        let id = (handle.index() + self.links.keys.len()) as u64;
        // A row that was never written is idle.
        let _ = self
            .links
            .ring
            .update_word(&self.map, id, link::PLACE, |place| {
                place & !(0x7f << link::WAIT_SHIFT) | idle
            });
    }

    /// Releases the links of a communicator that was destroyed, and passes each to `released`. Takes time in proportion
    /// to the number of links. If a transfer is reported at the same time, the record of its link may mix the transfer
    /// and the release. The caller that reports the transfer then calls this once more, which also ends a transfer that
    /// the record of a released link shows.
    pub fn release_links(&self, group: GroupHandle, mut released: impl FnMut(LinkHandle)) {
        let used = self.map.words()[header::LINKS_USED].load(Ordering::Relaxed) as usize;
        for (row, key) in self.links.keys.iter().enumerate().take(used) {
            let seen = key.load(Ordering::Relaxed);
            if seen == VACANT {
                self.end_vacant(row, group);
            }
            if seen & TAKEN != 0 && seen & 0xffff == u64::from(group.0) {
                let idle = u64::from(LinkWait::Idle.code()) << link::WAIT_SHIFT;
                let place = seen & !(0x7f << link::WAIT_SHIFT) | idle;
                self.write_link(row, place, None, 0, self.clock.now());
                key.store(VACANT, Ordering::Relaxed);
                released(LinkHandle(row as u32));
            }
        }
    }

    /// Ends what the record of a released link of this group shows: a transfer that began as the link was released.
    fn end_vacant(&self, row: usize, group: GroupHandle) {
        let idle = u64::from(LinkWait::Idle.code()) << link::WAIT_SHIFT;
        let id = (row + self.links.keys.len()) as u64;
        // A row that was never written shows no transfer.
        let _ = (self.links.ring).update_word(&self.map, id, link::PLACE, |place| {
            match place & 0xffff == u64::from(group.0) {
                true => place & !(0x7f << link::WAIT_SHIFT) | idle,
                false => place,
            }
        });
    }

    /// The number of requests for a link that did not fit in the table.
    pub fn links_lost(&self) -> u64 {
        use crate::record::sync::Read as _;
        self.map.load(header::LINKS_LOST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{Placement, RecorderConfig, RingPart};

    fn recorder(links: u32) -> FlightRecorder {
        let config = RecorderConfig {
            placement: Placement::Memory,
            part: RingPart::NcclProfiler,
            links,
            ..RecorderConfig::new("job", 0, 2)
        };
        FlightRecorder::create(&config).expect("memory for a ring")
    }

    fn place(group: GroupHandle, channel: u8, peer: u32) -> LinkPlace {
        LinkPlace {
            group,
            channel,
            peer,
            is_send: true,
        }
    }

    fn communicator(recorder: &FlightRecorder, id: u32) -> GroupHandle {
        recorder.add_communicator(&CommunicatorInfo {
            id,
            name: &format!("nccl-{id}"),
            desc: "tp",
            hash: 0xab + u64::from(id),
            rank: Some(1),
            size: Some(2),
        })
    }

    #[test]
    fn a_link_has_one_row_and_transfers_in_progress_are_in_the_dump() {
        let recorder = recorder(64);
        let group = communicator(&recorder, 0);
        let link = recorder.link(place(group, 3, 1)).expect("a free row");
        assert_eq!(recorder.link(place(group, 3, 1)), Some(link));
        assert_ne!(recorder.link(place(group, 4, 1)), Some(link));
        recorder.link_at(link, None, (2, 16), LinkWait::Peer);
        let seen = recorder.snapshot().communicators();
        assert_eq!(seen.len(), 1);
        assert_eq!(seen[0].hash, 0xab);
        let place = recorder.snapshot().groups[0].place;
        assert_eq!(place, Some(GroupPlace { rank: 1, size: 2 }));
        let [progress] = &seen[0].links[..] else {
            panic!("not one link: {:?}", seen[0].links);
        };
        assert_eq!((progress.channel, progress.peer), (3, 1));
        assert_eq!((progress.step, progress.steps), (2, 16));
        assert_eq!((progress.wait, progress.is_send), (LinkWait::Peer, true));
        recorder.link_idle(link);
        assert_eq!(recorder.snapshot().communicators()[0].links, []);
    }

    #[test]
    fn links_beyond_the_table_are_counted_and_released_rows_are_used_again() {
        let recorder = recorder(16);
        let released = communicator(&recorder, 0);
        for channel in 0..16 {
            assert!(recorder.link(place(released, channel, 1)).is_some());
        }
        let group = communicator(&recorder, 1);
        assert_eq!(recorder.link(place(group, 0, 1)), None);
        assert_eq!(recorder.links_lost(), 1);
        let communicators = recorder.snapshot().communicators();
        assert!(
            communicators
                .iter()
                .all(|communicator| communicator.links_lost == 1)
        );
        recorder.release_links(released, |_| {});
        for channel in 0..16 {
            assert!(recorder.link(place(group, channel, 1)).is_some());
        }
    }

    #[test]
    fn a_row_without_transfers_passes_to_another_link_if_all_are_taken() {
        let recorder = recorder(16);
        let group = communicator(&recorder, 0);
        let places: Vec<LinkPlace> = (0..17).map(|channel| place(group, channel, 1)).collect();
        let links: Vec<_> = (places[..16].iter())
            .map(|&place| recorder.link(place).expect("a free row"))
            .collect();
        let idle = links[5];
        assert_eq!(recorder.link_or_reuse(places[16], |_| false), None);
        assert_eq!(recorder.links_lost(), 1);
        let reused = recorder.link_or_reuse(places[16], |link| link == idle);
        assert_eq!(reused, Some(idle));
        assert!(recorder.is_link_at(idle, places[16]) && !recorder.is_link_at(idle, places[5]));
        assert!(recorder.is_link_at(links[4], places[4]));
        assert_eq!(recorder.link(places[16]), Some(idle));
        recorder.link_at(idle, None, (1, 2), LinkWait::Send);
        let [progress] = &recorder.snapshot().communicators()[0].links[..] else {
            panic!("not one link");
        };
        assert_eq!(progress.channel, 16);
    }

    #[test]
    fn a_transfer_that_is_reported_as_its_link_is_released_is_not_under_way_afterwards() {
        let recorder = recorder(16);
        let group = communicator(&recorder, 0);
        let link = recorder.link(place(group, 3, 1)).expect("a free row");
        recorder.link_at(link, None, (2, 16), LinkWait::Peer);
        // A thread that has found the link before it was released, and writes its record after that.
        let late = recorder.links.keys[link.index()].load(Ordering::Relaxed);
        recorder.release_links(group, |_| {});
        let posted = u64::from(LinkWait::Posted.code()) << link::WAIT_SHIFT;
        let words = late & !(0x7f << link::WAIT_SHIFT) | posted;
        recorder.write_link(link.index(), words, None, 0, recorder.now());
        assert_eq!(recorder.snapshot().communicators()[0].links.len(), 1);
        recorder.release_links(group, |_| panic!("released twice"));
        assert_eq!(recorder.snapshot().communicators()[0].links, []);
    }

    #[test]
    fn a_recorder_without_links_keeps_none() {
        let recorder = recorder(0);
        let group = communicator(&recorder, 0);
        assert_eq!(recorder.link(place(group, 0, 1)), None);
        recorder.release_links(group, |_| {});
        assert_eq!(recorder.snapshot().communicators().len(), 1);
    }
}
