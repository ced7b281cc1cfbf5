//! The memory to which the ranks of a group write, and from which they read, in phases. See the documentation of
//! [`shm`](super).

use super::area::{
    CONTROL, FETCHED, INLINE, LINE, PAGE, SLOT, SMALL, align, area_len, pair_of, ring_len,
    rings_len, round_offset, shm_exchange_len, slots_len,
};
use super::close_guard::{CloseGuard, MAX_AWAITED};
use super::error::ShmExchangeError;
use super::mapping::{Mapping, wake};
use super::outcome::{Outcome, Vote};
use super::segment::Segment;
use super::stream::ShmStream;
use crate::wait::{Interrupted, Pause, WaitMode, WaitPolicy, processors};
use rcomm_recorder::model::Rank;
use rustix::event::Timespec;
use rustix::thread::futex;
use std::io;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Offset of the group's decision on a phase that is given up. It is among the control words of the first rank, on a
/// cache line of its own.
const OUTCOME: usize = 3 * LINE + 64;
const _: () = assert!(3 * LINE + 4 * (3 + MAX_AWAITED) <= OUTCOME);

/// Which ranks write slots in the phases of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Traffic {
    /// Each rank writes its slots at its own positions, as where some ranks write slots and the others only read.
    OneWay,
    /// All ranks write slots in every phase, and read those of the others. In a group of two, the ranks swap the
    /// positions of their slots: each writes where it has read, to cache lines that its core already has. Writing is
    /// slow if it has to invalidate copies in the other core's caches.
    Exchange,
}

/// The positions of all ranks' slots in a phase.
#[derive(Clone, Copy)]
struct SlotLayout {
    start: usize,
    /// Whether the two ranks use each other's positions.
    is_swapped: bool,
}

/// One rank's end of a group's exchange area. See the documentation of [`shm`](super).
pub(crate) struct ShmExchange {
    segment: Arc<Segment>,
    area: Mapping,
    /// Index of the area in the segment.
    place: usize,
    rank: usize,
    ranks: Arc<[Rank]>,
    /// The last phase that this rank has published.
    phase: u32,
    traffic: Traffic,
    /// The positions of the slots of phase `phase`.
    slot: SlotLayout,
    /// Number of bytes that are shown of each slot of phase `phase`.
    shown: usize,
    /// The offset of the next slot in the round.
    next_slot: usize,
    /// The number of the next phase in which the two ranks swap slots. Phases without slots are not counted, so that
    /// each rank writes where it has read, whichever phases are between.
    next_swap: u32,
    /// Whether this rank has seen the flags of all ranks for phase `phase`.
    is_complete: bool,
    /// Whether huge pages could be requested; `None` once this was read.
    huge_pages: Option<io::Result<()>>,
}

impl ShmExchange {
    /// Returns the exchange area of a group, after the group's rank 0 has claimed it; `None` if there are too many
    /// groups.
    ///
    /// # Errors
    /// `Gone` if rank 0 is gone and has claimed no area; why the wait for the claim was interrupted; those of mapping
    /// the memory.
    pub(crate) fn of_group(
        segment: &Arc<Segment>,
        key: u64,
        rank: usize,
        ranks: Arc<[Rank]>,
        policy: &mut WaitPolicy<'_>,
    ) -> Result<Option<Self>, ShmExchangeError> {
        let Some(place) = segment.area_of(key, rank, ranks[0], policy)? else {
            return Ok(None);
        };
        Ok(Some(Self::new(segment.clone(), place, rank, ranks)?))
    }

    /// Makes the end of `rank` of the group, for the area with the index `place` in the segment.
    fn new(
        segment: Arc<Segment>,
        place: usize,
        rank: usize,
        ranks: Arc<[Rank]>,
    ) -> io::Result<Self> {
        let area = segment.map_area(place, 0, shm_exchange_len(ranks.len()))?;
        let huge_pages = Some(area.request_huge_pages());
        let next_slot = round_offset(ranks.len());
        Ok(Self {
            segment,
            area,
            place,
            rank,
            ranks,
            phase: 0,
            traffic: Traffic::OneWay,
            slot: SlotLayout {
                start: 0,
                is_swapped: false,
            },
            shown: 0,
            next_slot,
            next_swap: 0,
            is_complete: true,
            huge_pages,
        })
    }

    /// Returns whether huge pages could be requested; only the first call returns the error. Without huge pages the
    /// area works, but is slower. Success does not mean that the area has huge pages: most systems provide none for it.
    pub(crate) fn huge_pages(&mut self) -> io::Result<()> {
        self.huge_pages.take().unwrap_or(Ok(()))
    }

    /// Offset of a rank's line for a phase. In the line, the flag is at 0, the signature at 8, and the inline bytes
    /// begin at 16.
    fn line(&self, rank: usize, phase: u32) -> usize {
        rank * CONTROL + (phase & 1) as usize * LINE
    }

    /// Number of threads that sleep on a flag of `rank`.
    fn sleepers(&self, rank: usize) -> &AtomicU32 {
        self.area.word(rank * CONTROL + 2 * LINE)
    }

    /// One more than the number of the processor on which `rank` ran when it last waited for long or woke a sleeper;
    /// zero if it has done neither. It may have moved since, which costs its peer a sleep at most.
    fn processor(&self, rank: usize) -> &AtomicU32 {
        self.area.word(rank * CONTROL + 2 * LINE + 4)
    }

    /// Notes the processor on which this thread runs; returns it as [`processor`](Self::processor) has it.
    fn note_processor(&self) -> u32 {
        processors::note(self.processor(self.rank))
    }

    /// Not zero once `rank` has left the group. The words after it are those of [`CloseGuard`].
    fn left(&self, rank: usize) -> &AtomicU32 {
        self.area.word(rank * CONTROL + 3 * LINE)
    }

    /// The group's decision on a phase that a rank gives up.
    #[inline]
    fn outcome(&self) -> Outcome<'_> {
        Outcome(self.area.long(OUTCOME))
    }

    /// Whether `rank` has published a phase. The rank is at most one phase behind or ahead of this rank.
    fn has_published(&self, rank: usize, phase: u32) -> bool {
        let flag = self.area.word(self.line(rank, phase));
        flag.load(Ordering::Acquire)
            .wrapping_sub(phase)
            .cast_signed()
            >= 0
    }

    /// Decides with the other ranks whether this phase has failed. With a reason, this rank proposes that it has. After
    /// `Ok`, all ranks continue, or have continued, as if no rank had given up.
    #[cold]
    fn decide(&self, reason: Option<ShmExchangeError>) -> Result<(), ShmExchangeError> {
        let all_published =
            |phase| (0..self.ranks.len()).all(|rank| self.has_published(rank, phase));
        let vote = match reason {
            Some(_) => Vote::GiveUp(self.rank),
            None => Vote::Ask,
        };
        match self.outcome().decide(self.phase, vote, all_published) {
            None => Ok(()),
            Some(first) => Err(reason.unwrap_or_else(|| self.given_up(first))),
        }
    }

    /// The error of a phase that `first` has given up.
    fn given_up(&self, first: usize) -> ShmExchangeError {
        let absent = match self.outcome().has_failed_in(self.phase) {
            true => (0..self.ranks.len())
                .filter(|&rank| !self.has_published(rank, self.phase))
                .collect(),
            false => Vec::new(),
        };
        ShmExchangeError::GivenUp { first, absent }
    }

    /// The offset of a rank's slot in the area.
    #[inline]
    fn slot_offset(&self, rank: usize, layout: SlotLayout) -> usize {
        let size = self.ranks.len();
        let rank = rank ^ usize::from(layout.is_swapped);
        align(size * CONTROL, PAGE) + rank * slots_len(size) + layout.start
    }

    /// Sets the traffic of the next phases; all ranks set the same value.
    #[inline]
    pub(crate) fn expect(&mut self, traffic: Traffic) {
        self.traffic = traffic;
    }

    /// Restarts the slots at their first position. All ranks do so after a phase in which they disagreed on the slots'
    /// lengths, and whose slots they therefore do not read.
    pub(crate) fn restart_slots(&mut self) {
        // The next slot may begin where this phase's slot is.
        self.shown = 0;
        self.traffic = Traffic::OneWay;
        self.next_slot = round_offset(self.ranks.len());
        self.next_swap = 0;
    }

    /// Whether the two ranks of this group swap slots.
    #[inline]
    fn swaps_slots(&self) -> bool {
        self.traffic == Traffic::Exchange && self.ranks.len() == 2
    }

    /// Returns the positions of the slots in a phase in which `used` bytes are shown.
    #[inline]
    fn slot_layout(&self, phase: u32, used: usize) -> SlotLayout {
        let parity = (phase & 1) as usize;
        if self.swaps_slots() {
            return SlotLayout {
                start: 2 * SMALL + (self.next_swap & 1) as usize * SLOT,
                is_swapped: self.next_swap >> 1 & 1 == 1,
            };
        }
        let start = if used <= SMALL {
            parity * SMALL
        } else {
            self.next_slot
        };
        SlotLayout {
            start,
            is_swapped: false,
        }
    }

    /// Returns the first `used` bytes of this rank's slot of the next phase, for the caller to fill before
    /// [`run_phase`](Self::run_phase).
    #[inline]
    pub(crate) fn next_slot(&mut self, used: usize) -> &mut [u8] {
        self.slots_and_next(used).1
    }

    /// Returns the slots of this phase, and the first `used` bytes of this rank's slot of the next phase.
    #[inline]
    pub(crate) fn slots_and_next(&mut self, used: usize) -> (Slots<'_>, &mut [u8]) {
        assert!(self.is_complete, "an exchange area was used after an error");
        assert!(used <= SLOT, "more bytes than a slot holds");
        let start = self.slot_offset(
            self.rank,
            self.slot_layout(self.phase.wrapping_add(1), used),
        );
        // SAFETY: this rank alone writes its slot of the next phase, and only through `&mut self`. That slot does not
        // overlap the slots of this phase (`run_phase`), which `Slots` and the other ranks read. The other ranks have
        // finished with all earlier slots, since this rank has seen all flags of this phase (`is_complete`; see the
        // documentation of `shm`). Any bytes are valid.
        let next = unsafe { std::slice::from_raw_parts_mut(self.area.address(start, used), used) };
        (Slots { shm_exchange: self }, next)
    }

    /// Returns the bytes that `rank` shows in its slot in this phase.
    #[inline]
    pub(crate) fn slot(&self, rank: usize) -> &[u8] {
        assert!(
            self.is_complete,
            "a slot is read before all ranks have published"
        );
        let start = self.slot_offset(rank, self.slot);
        // SAFETY: `rank` stored the flag of this phase, which this rank has seen (`is_complete`), after it had written
        // the slot. It writes there again only after this rank has published the next phase, which takes `&mut self`.
        unsafe { std::slice::from_raw_parts(self.area.address(start, self.shown), self.shown) }
    }

    /// Returns the first `len` inline bytes in `rank`'s line of this phase.
    #[inline]
    pub(crate) fn inline(&self, rank: usize, len: usize) -> &[u8] {
        assert!(
            self.is_complete,
            "a line is read before all ranks have published"
        );
        assert!(len <= INLINE, "more inline bytes than a line holds");
        let start = self.line(rank, self.phase) + 16;
        // SAFETY: `rank` stored the flag of this phase, which this rank has seen (`is_complete`), after it had written
        // its line. It writes this line again only after this rank has published the next phase, which takes
        // `&mut self`. `len` is at most `INLINE` (checked), and `address` checks that so many bytes are inside the
        // area.
        unsafe { std::slice::from_raw_parts(self.area.address(start, INLINE), len) }
    }

    /// Runs one phase: shows the others `signature`, up to [`INLINE`] bytes and the first `used` bytes of
    /// the slot, and waits until all ranks have done the same. Returns whether all signatures are equal.
    ///
    /// Ranks with the same signature must have the same `used`, since the next slot begins after these bytes.
    ///
    /// # Errors
    /// After any error, the exchange area cannot be used any more.
    #[inline]
    pub(crate) fn run_phase(
        &mut self,
        signature: u64,
        inline: &[u8],
        used: usize,
        policy: &mut WaitPolicy<'_>,
    ) -> Result<bool, ShmExchangeError> {
        assert!(self.is_complete, "an exchange area was used after an error");
        assert!(used <= SLOT, "more bytes than a slot holds");
        self.is_complete = false;
        self.slot = self.slot_layout(self.phase.wrapping_add(1), used);
        self.shown = used;
        let size = self.ranks.len();
        if self.swaps_slots() {
            self.next_swap = self.next_swap.wrapping_add(u32::from(used > 0));
        } else if self.slot.start == self.next_slot {
            self.next_slot += align(used, LINE);
            // A slot of any size fits either here or at the beginning of the round, where it does not overlap the last
            // slot, since a round is at least three slots long.
            if self.next_slot + SLOT > slots_len(size) {
                self.next_slot = round_offset(size);
            }
        }
        self.publish(signature, inline);
        if used > 0 && self.slot.start < 2 * SMALL {
            self.fetch_small(used);
        }
        let are_equal = match self.wait_for_all(signature, policy) {
            Ok(are_equal) if self.outcome().is_open() => are_equal,
            Ok(are_equal) => {
                self.decide(None)?;
                are_equal
            }
            Err(reason) => {
                self.decide(Some(reason))?;
                // All ranks have published the phase after all, so this waits for none of them.
                self.wait_for_all(signature, policy)?
            }
        };
        self.is_complete = true;
        // The other ranks' caches have this rank's line of the previous phase, which is written next. Fetching it now
        // costs no time; later it would take half as long as the load of another rank's flag.
        self.fetch(self.line(self.rank, self.phase.wrapping_add(1)), 64);
        Ok(are_equal)
    }

    /// Prefetches the first cache lines of the next small slot for writing: the others' caches have them, and fetching
    /// them costs no time while this rank waits. The slot of the next phase is likely to have the same size. Fetching
    /// more lines would delay the processor's loads of the flags.
    #[inline]
    fn fetch_small(&self, used: usize) {
        let next = self.slot_layout(self.phase.wrapping_add(1), used);
        let start = self.slot_offset(self.rank, next);
        self.fetch(start, used.min(FETCHED));
    }

    /// Prefetches cache lines that this rank will write to; does nothing on processors other than x86-64.
    #[inline]
    fn fetch(&self, start: usize, len: usize) {
        let lines = self.area.address(start, len);
        #[cfg(target_arch = "x86_64")]
        for offset in (0..len).step_by(64) {
            // Assembly, since the intrinsic becomes a fetch for reading if the build's target may lack `prefetchw`.
            // All 64-bit processors accept the instruction; on some it has no effect.
            // SAFETY: the instruction is a hint and changes no memory; the address is inside the mapping.
            unsafe {
                std::arch::asm!(
                    "prefetchw [{line}]",
                    line = in(reg) lines.add(offset),
                    options(nostack, preserves_flags, readonly)
                );
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = lines;
    }

    /// Writes this rank's line of the next phase, and stores the phase into its flag.
    #[inline]
    fn publish(&mut self, signature: u64, inline: &[u8]) {
        assert!(
            inline.len() <= INLINE,
            "more inline bytes than a line holds"
        );
        self.phase = self.phase.wrapping_add(1);
        let line = self.line(self.rank, self.phase);
        self.area.long(line + 8).store(signature, Ordering::Relaxed);
        let to = self.area.address(line + 16, INLINE);
        // SAFETY: this rank alone writes its lines, and no rank reads this line now, for the same reason as the slot in
        // `slots_and_next`.
        unsafe { std::ptr::copy_nonoverlapping(inline.as_ptr(), to, inline.len()) };
        let flag = self.area.word(line);
        flag.store(self.phase, Ordering::Release);
        if self.sleepers(self.rank).load(Ordering::Relaxed) > 0 {
            self.note_processor();
            wake(flag);
        }
    }

    /// Waits until all ranks have published this phase; returns whether all have this signature.
    #[inline]
    fn wait_for_all(
        &self,
        signature: u64,
        policy: &mut WaitPolicy<'_>,
    ) -> Result<bool, ShmExchangeError> {
        let mut are_equal = true;
        for rank in 0..self.ranks.len() {
            if rank != self.rank {
                are_equal &= self.wait_for(rank, policy)? == signature;
            }
        }
        Ok(are_equal)
    }

    /// Waits until `rank` has published this phase; returns the rank's signature.
    #[inline]
    fn wait_for(&self, rank: usize, policy: &mut WaitPolicy<'_>) -> Result<u64, ShmExchangeError> {
        let line = self.line(rank, self.phase);
        let flag = self.area.word(line);
        loop {
            let seen = flag.load(Ordering::Acquire);
            if seen == self.phase {
                policy.refresh();
                return Ok(self.area.long(line + 8).load(Ordering::Relaxed));
            }
            let is_here = || self.note_processor() == self.processor(rank).load(Ordering::Relaxed);
            match policy.pause_beside(is_here) {
                Ok(Pause::Poll) => {}
                Ok(Pause::Sleep(time)) => self.sleep(rank, flag, seen, time)?,
                Err(Interrupted::TimedOut) => return Err(ShmExchangeError::Late(rank)),
                Err(interruption) => return Err(interruption.into()),
            }
        }
    }

    /// Sleeps until `flag`, the flag of `rank`, is no longer `seen`, or `time` has passed. Fails if `rank` is gone or
    /// the phase was given up.
    #[cold]
    fn sleep(
        &self,
        rank: usize,
        flag: &AtomicU32,
        seen: u32,
        time: Duration,
    ) -> Result<(), ShmExchangeError> {
        let has_left = self.left(rank).load(Ordering::Acquire) != 0;
        if has_left || self.segment.is_gone(self.ranks[rank]) {
            // A phase that the rank has published before it left is valid.
            return if flag.load(Ordering::Acquire) == self.phase {
                Ok(())
            } else {
                Err(ShmExchangeError::Gone(rank))
            };
        }
        if !self.outcome().is_open() {
            self.decide(None)?;
        }
        let sleepers = self.sleepers(rank);
        sleepers.fetch_add(1, Ordering::SeqCst);
        if flag.load(Ordering::SeqCst) == seen {
            let time = Timespec {
                tv_sec: time.as_secs() as i64,
                tv_nsec: i64::from(time.subsec_nanos()),
            };
            // The caller checks again, whatever has ended the sleep.
            let _ = futex::wait(flag, futex::Flags::empty(), seen, Some(&time));
        }
        sleepers.fetch_sub(1, Ordering::SeqCst);
        Ok(())
    }

    /// Returns `CorePerRank` if each rank of this host can have a processor to itself ([`Segment::wait_mode`]).
    pub(crate) fn wait_mode(&self) -> WaitMode {
        self.segment.wait_mode()
    }

    /// The streams over which the ranks of this group send messages to each other.
    pub(crate) fn streams(&self) -> Streams {
        Streams {
            segment: self.segment.clone(),
            place: self.place,
            rank: self.rank,
            size: self.ranks.len(),
        }
    }

    /// Returns a handle with which another thread can announce that this rank leaves the group.
    pub(crate) fn close_guard(&self) -> io::Result<CloseGuard> {
        let len = align(self.ranks.len() * CONTROL, PAGE);
        Ok(CloseGuard {
            control: self.segment.map_area(self.place, 0, len)?,
            rank: self.rank,
            ranks: self.ranks.clone(),
        })
    }
}

/// The streams between the pairs of ranks of a group. No stream may be used once the group's exchange area is
/// dropped.
pub(crate) struct Streams {
    segment: Arc<Segment>,
    place: usize,
    rank: usize,
    size: usize,
}

impl Streams {
    /// Opens this rank's end of the stream to `peer`; may be called once. `socket` connects both ends.
    pub(crate) fn open(&self, peer: usize, socket: TcpStream) -> io::Result<ShmStream> {
        let len = rings_len(self.size);
        let start = shm_exchange_len(self.size) + pair_of(self.rank, peer) * len;
        let rings = self.segment.map_area(self.place, start, len)?;
        ShmStream::new(rings, ring_len(self.size), self.rank < peer, socket)
    }
}

/// The slots that all ranks have published in this phase.
#[derive(Clone, Copy)]
pub(crate) struct Slots<'a> {
    shm_exchange: &'a ShmExchange,
}

impl<'a> Slots<'a> {
    /// Works like [`ShmExchange::slot`].
    #[inline]
    pub(crate) fn slot(self, rank: usize) -> &'a [u8] {
        self.shm_exchange.slot(rank)
    }
}

impl Drop for ShmExchange {
    fn drop(&mut self) {
        self.left(self.rank).store(1, Ordering::Release);
        for parity in 0..2 {
            wake(self.area.word(self.line(self.rank, parity)));
        }
        // The last rank that leaves frees the area for another group. If a rank has died, the area stays claimed.
        let leavers = self.segment.leave_area(self.place);
        if leavers == self.ranks.len() {
            self.segment
                .free_area(self.place, area_len(self.ranks.len()));
        }
    }
}
