//! Memory that all ranks of a host share: how they come to have it, and the board that a group has in it.
//!
//! One *segment* for all ranks of a job on a host: a sealed memfd without a name, so nothing is left
//! behind whatever happens to the ranks. It starts with a table of ranks and a directory of groups; then
//! come the areas of the groups, all of one length and empty until used. An area is a [`Board`].
//!
//! A *board* has, for each rank of the group, two *lines* and two *slots*, used in turn, and all ranks
//! go through the same *phases* 1, 2, 3, ... In phase p a rank writes line and slot p % 2 of its own,
//! then stores p into the line's flag; it waits until every line p % 2 of the others shows p, and then
//! reads those lines and slots. That is all the synchronisation there is. It is enough: a rank overwrites
//! what it wrote in phase p when it enters phase p + 2, which it does only after it has seen everybody's
//! flag p + 1, which they stored after they had read everything of phase p.
//!
//! A waiter that has looked long enough sleeps on the flag (a futex). The writer wakes it if it has seen
//! the waiter's mark. There is deliberately no fence between its flag and that look: the mark can be
//! missed in the nanoseconds that a store takes to become visible, and the waiter then finds the flag
//! at the end of its sleep, a few milliseconds later at most.

use super::super::wait::{Interrupted, Patience, Pause};
use rcomm_recorder::model::Rank;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};
use rustix::process::{Pid, PidfdFlags};
use rustix::thread::futex;
use std::io;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

const MAGIC: u64 = 0x3130_6d67_7363_7472;
/// Groups that have a board at the same time. Further ones use sockets.
const GROUPS: usize = 256;
const HEAD: usize = 4096;
const ENTRY: usize = 64;
/// Where the keys of the last groups that found no place stand, and how many of them.
const REFUSED: usize = 64;
const REFUSALS: usize = 64;
/// Bytes between the control words of two ranks.
const CONTROL: usize = 512;
/// Bytes between a rank's two lines; two cache lines, since they are fetched in pairs.
const LINE: usize = 128;
const PAGE: usize = 4096;
const HUGE_PAGE: usize = 2 << 20;

/// Bytes that a line carries beside its flag and signature.
pub(crate) const INLINE: usize = 48;
/// Bytes of one slot. Two slots of each of two ranks stay in a second-level cache of 1 MiB.
pub(crate) const SLOT: usize = 192 << 10;

const PRESENT: u32 = 1;
const LEFT: u32 = 2;

const CLAIMED: u32 = 1;
const READY: u32 = 2;

/// A range of the segment mapped into this process.
struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is memory of the process; it may be used from any thread, under the rules of those
// who hand out references into it.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(file: &OwnedFd, offset: usize, len: usize) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                protection,
                MapFlags::SHARED,
                file,
                offset as u64,
            )?
        };
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, len })
    }

    fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "inside the mapping"
        );
        // SAFETY: inside the mapping, as just checked.
        unsafe { self.start.as_ptr().add(offset) }
    }

    fn word(&self, offset: usize) -> &AtomicU32 {
        assert_eq!(offset % 4, 0, "words are aligned");
        // SAFETY: four aligned bytes inside the mapping, which lives as long as `self`; everybody
        // uses them as an atomic word only.
        unsafe { AtomicU32::from_ptr(self.at(offset, 4).cast()) }
    }

    fn long(&self, offset: usize) -> &AtomicU64 {
        assert_eq!(offset % 8, 0, "words are aligned");
        // SAFETY: as for `word`, eight bytes.
        unsafe { AtomicU64::from_ptr(self.at(offset, 8).cast()) }
    }

    fn advise(&self, advice: Advice) -> io::Result<()> {
        // SAFETY: the range is this whole mapping. The advice given here (huge pages, or dropping the
        // pages when nobody uses the area any more) leaves every address valid.
        unsafe { rustix::mm::madvise(self.start.as_ptr().cast(), self.len, advice)? };
        Ok(())
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: nobody holds a reference into it any more: they borrow from `self`.
        let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "a mapping is unmapped once");
    }
}

fn align(len: usize, to: usize) -> usize {
    len.div_ceil(to) * to
}

fn area_len(ranks: usize) -> usize {
    align(ranks * CONTROL, PAGE) + ranks * 2 * SLOT
}

/// The memory that the ranks of this host share.
pub(crate) struct Segment {
    file: OwnedFd,
    table: Mapping,
    world_size: usize,
    rank: Rank,
    /// Tells when a process ends; opened when first asked.
    processes: Vec<OnceLock<OwnedFd>>,
}

impl Segment {
    /// Makes the segment. The caller hands its file to the others.
    pub(crate) fn create(rank: Rank, world_size: usize) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = rustix::fs::memfd_create("rcomm", flags)?;
        let len = Self::table_len(world_size) + GROUPS * Self::stride(world_size);
        rustix::fs::ftruncate(&file, len as u64)?;
        // Nobody can cut it and make the others fault.
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals)?;
        let segment = Self::map(file, rank, world_size)?;
        segment
            .table
            .long(8)
            .store(world_size as u64, Ordering::Relaxed);
        segment.table.long(0).store(MAGIC, Ordering::Release);
        segment.enter();
        Ok(segment)
    }

    /// Uses the segment that another rank made.
    pub(crate) fn attach(file: OwnedFd, rank: Rank, world_size: usize) -> io::Result<Self> {
        let len = Self::table_len(world_size) + GROUPS * Self::stride(world_size);
        let actual = rustix::fs::fstat(&file)?.st_size;
        let sealed = rustix::fs::fcntl_get_seals(&file)?;
        if u64::try_from(actual).ok() != Some(len as u64) || !sealed.contains(SealFlags::SHRINK) {
            return Err(io::Error::other(
                "the memory that was handed over is none of this version",
            ));
        }
        let segment = Self::map(file, rank, world_size)?;
        let magic = segment.table.long(0).load(Ordering::Acquire);
        let size = segment.table.long(8).load(Ordering::Relaxed);
        if magic != MAGIC || size != world_size as u64 {
            return Err(io::Error::other(
                "the memory that was handed over is of another job",
            ));
        }
        segment.enter();
        Ok(segment)
    }

    fn map(file: OwnedFd, rank: Rank, world_size: usize) -> io::Result<Self> {
        let table = Mapping::new(&file, 0, Self::table_len(world_size))?;
        Ok(Self {
            file,
            table,
            world_size,
            rank,
            processes: std::iter::repeat_with(OnceLock::new)
                .take(world_size)
                .collect(),
        })
    }

    fn table_len(world_size: usize) -> usize {
        align(HEAD + world_size * ENTRY + GROUPS * ENTRY, HUGE_PAGE)
    }

    fn stride(world_size: usize) -> usize {
        align(area_len(world_size), HUGE_PAGE)
    }

    fn rank_entry(rank: Rank) -> usize {
        HEAD + rank as usize * ENTRY
    }

    fn group_entry(&self, at: usize) -> usize {
        HEAD + (self.world_size + at) * ENTRY
    }

    fn enter(&self) {
        let entry = Self::rank_entry(self.rank);
        let pid = std::process::id();
        self.table.word(entry + 4).store(pid, Ordering::Relaxed);
        self.table.word(entry).store(PRESENT, Ordering::Release);
    }

    /// The file, to be handed to other ranks.
    pub(crate) fn file(&self) -> &OwnedFd {
        &self.file
    }

    /// Whether this rank has the segment, or had it.
    pub(crate) fn has_entered(&self, rank: Rank) -> bool {
        self.table
            .word(Self::rank_entry(rank))
            .load(Ordering::Acquire)
            != 0
    }

    /// Whether this rank has left, or its process has ended.
    pub(crate) fn is_gone(&self, rank: Rank) -> bool {
        let entry = Self::rank_entry(rank);
        match self.table.word(entry).load(Ordering::Acquire) {
            PRESENT => {}
            state => return state == LEFT,
        }
        let pid = self.table.word(entry + 4).load(Ordering::Relaxed);
        if pid == std::process::id() {
            return false;
        }
        let slot = &self.processes[rank as usize];
        if slot.get().is_none() {
            let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else {
                return true;
            };
            match rustix::process::pidfd_open(pid, PidfdFlags::empty()) {
                // Another thread may have been first; either handle will do.
                Ok(process) => drop(slot.set(process)),
                Err(rustix::io::Errno::SRCH) => return true,
                // No handle to be had: the deadline will have to do.
                Err(_) => return false,
            }
        }
        let Some(process) = slot.get() else {
            return false;
        };
        let mut poll = [PollFd::new(process, PollFlags::IN)];
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        matches!(rustix::event::poll(&mut poll, Some(&now)), Ok(1))
    }

    /// Finds or makes the board of a group; its rank 0 makes it. `None` if there are too many groups.
    pub(crate) fn board(
        self: &Arc<Self>,
        key: u64,
        rank: usize,
        ranks: Arc<[Rank]>,
        patience: &mut Patience<'_>,
    ) -> Result<Option<Board>, BoardError> {
        let at = if rank == 0 {
            self.claim(key)
        } else {
            self.find(key, ranks[0], patience)?
        };
        let Some(at) = at else { return Ok(None) };
        let offset = Self::table_len(self.world_size) + at * Self::stride(self.world_size);
        let area = Mapping::new(&self.file, offset, area_len(ranks.len()))?;
        // Without huge pages it works as well, only slower; most systems do not give them here.
        let _ = area.advise(Advice::LinuxHugepage);
        Ok(Some(Board {
            segment: self.clone(),
            area,
            entry: self.group_entry(at),
            rank,
            ranks,
            phase: 0,
            complete: true,
        }))
    }

    fn claim(&self, key: u64) -> Option<usize> {
        let found = (0..GROUPS).find(|&at| {
            let state = self.table.word(self.group_entry(at));
            let (new, order) = (CLAIMED, Ordering::Relaxed);
            state
                .compare_exchange(0, new, Ordering::Acquire, order)
                .is_ok()
        });
        if let Some(at) = found {
            let entry = self.group_entry(at);
            self.table.word(entry + 4).store(0, Ordering::Relaxed);
            self.table.long(entry + 8).store(key, Ordering::Relaxed);
            self.table.word(entry).store(READY, Ordering::Release);
        } else {
            // The others must not wait for what will not come.
            let at = self.table.word(REFUSED).fetch_add(1, Ordering::Relaxed) as usize % REFUSALS;
            let place = self.table.long(REFUSED + 8 + at * 8);
            place.store(key.wrapping_add(1), Ordering::Release);
        }
        found
    }

    fn find(
        &self,
        key: u64,
        leader: Rank,
        patience: &mut Patience<'_>,
    ) -> Result<Option<usize>, BoardError> {
        loop {
            for at in 0..GROUPS {
                let entry = self.group_entry(at);
                if self.table.word(entry).load(Ordering::Acquire) == READY
                    && self.table.long(entry + 8).load(Ordering::Relaxed) == key
                {
                    return Ok(Some(at));
                }
            }
            let refused = |at| {
                self.table
                    .long(REFUSED + 8 + at * 8)
                    .load(Ordering::Acquire)
            };
            if (0..REFUSALS).any(|at| refused(at) == key.wrapping_add(1)) {
                return Ok(None);
            }
            match patience.pause() {
                Ok(Pause::Look) => {}
                Ok(Pause::Sleep(time)) => {
                    if self.is_gone(leader) {
                        return Err(BoardError::Gone(0));
                    }
                    std::thread::sleep(time);
                }
                Err(why) => return Err(why.into()),
            }
        }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        let state = self.table.word(Self::rank_entry(self.rank));
        state.store(LEFT, Ordering::Release);
    }
}

/// Why a rank on the board did not answer.
#[derive(Debug)]
pub(crate) enum BoardError {
    /// The wait was ended.
    Interrupted(Interrupted),
    /// The deadline passed while this rank of the group was missing.
    Late(usize),
    /// This rank of the group has left it, or its process has ended.
    Gone(usize),
    /// The system refused.
    Io(io::Error),
}

impl From<Interrupted> for BoardError {
    fn from(why: Interrupted) -> Self {
        Self::Interrupted(why)
    }
}

impl From<io::Error> for BoardError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// What a group writes on and reads from together. See the head of this module.
pub(crate) struct Board {
    segment: Arc<Segment>,
    area: Mapping,
    /// Where the group stands in the directory.
    entry: usize,
    rank: usize,
    ranks: Arc<[Rank]>,
    /// The phase that this rank has published last.
    phase: u32,
    /// Whether it has seen everybody's flag of that phase.
    complete: bool,
}

impl Board {
    fn line(&self, rank: usize, phase: u32) -> usize {
        rank * CONTROL + (phase & 1) as usize * LINE
    }

    fn sleepers(&self, rank: usize) -> &AtomicU32 {
        self.area.word(rank * CONTROL + 2 * LINE)
    }

    fn left(&self, rank: usize) -> &AtomicU32 {
        self.area.word(rank * CONTROL + 3 * LINE)
    }

    fn slot_at(&self, rank: usize, phase: u32) -> usize {
        let control = align(self.ranks.len() * CONTROL, PAGE);
        control + (rank * 2 + (phase & 1) as usize) * SLOT
    }

    /// This rank's slot of the phase to come, to be filled before [`turn`](Self::turn).
    #[inline]
    pub(crate) fn next_slot(&mut self) -> &mut [u8] {
        self.slots_and_next().1
    }

    /// The slots of this phase, and this rank's slot of the next one.
    #[inline]
    pub(crate) fn slots_and_next(&mut self) -> (Slots<'_>, &mut [u8]) {
        assert!(self.complete, "a board that was given up is not used on");
        let start = self.slot_at(self.rank, self.phase.wrapping_add(1));
        // SAFETY: this rank alone writes its slots, through `&mut self` alone. The others read this one
        // in phases of its parity only, and have finished with the last of these, since this rank has
        // seen all their flags of the phase after it (`complete`; see the head of this module). The
        // slots of this phase, which `Slots` reads, are others. Any bytes are valid.
        let next = unsafe { std::slice::from_raw_parts_mut(self.area.at(start, SLOT), SLOT) };
        (Slots { board: self }, next)
    }

    /// What `rank` has in its slot in this phase.
    #[inline]
    pub(crate) fn slot(&self, rank: usize) -> &[u8] {
        assert!(self.complete, "slots are read when all have published");
        let start = self.slot_at(rank, self.phase);
        // SAFETY: its writer stored the flag of this phase after writing, which this rank has seen
        // (`complete`), and will not write here before this rank publishes the next phase, which takes
        // `&mut self`.
        unsafe { std::slice::from_raw_parts(self.area.at(start, SLOT), SLOT) }
    }

    /// The bytes in `rank`'s line of this phase.
    #[inline]
    pub(crate) fn inline(&self, rank: usize, len: usize) -> &[u8] {
        assert!(self.complete, "lines are read when all have published");
        assert!(len <= INLINE, "inline bytes fit into the line");
        let start = self.line(rank, self.phase) + 16;
        // SAFETY: as for `slot`.
        unsafe { std::slice::from_raw_parts(self.area.at(start, INLINE), len) }
    }

    /// One phase: shows the others `signature`, up to [`INLINE`] bytes and what is in the slot, and
    /// waits until all have done the same. Says whether all signatures are equal.
    ///
    /// # Errors
    /// After any, the board is of no more use.
    #[inline]
    pub(crate) fn turn(
        &mut self,
        signature: u64,
        inline: &[u8],
        patience: &mut Patience<'_>,
    ) -> Result<bool, BoardError> {
        assert!(self.complete, "a board that was given up is not used on");
        self.complete = false;
        self.publish(signature, inline);
        let mut equal = true;
        for rank in 0..self.ranks.len() {
            if rank != self.rank {
                equal &= self.wait_for(rank, patience)? == signature;
            }
        }
        self.complete = true;
        Ok(equal)
    }

    #[inline]
    fn publish(&mut self, signature: u64, inline: &[u8]) {
        assert!(inline.len() <= INLINE, "inline bytes fit into the line");
        self.phase = self.phase.wrapping_add(1);
        let line = self.line(self.rank, self.phase);
        self.area.long(line + 8).store(signature, Ordering::Relaxed);
        let to = self.area.at(line + 16, INLINE);
        // SAFETY: this rank alone writes its lines, and nobody reads this one now, as in `next_slot`.
        unsafe { std::ptr::copy_nonoverlapping(inline.as_ptr(), to, inline.len()) };
        let flag = self.area.word(line);
        flag.store(self.phase, Ordering::Release);
        if self.sleepers(self.rank).load(Ordering::Relaxed) > 0 {
            wake(flag);
        }
    }

    /// Waits until `rank` has published this phase; gives its signature.
    #[inline]
    fn wait_for(&self, rank: usize, patience: &mut Patience<'_>) -> Result<u64, BoardError> {
        let line = self.line(rank, self.phase);
        let flag = self.area.word(line);
        loop {
            let seen = flag.load(Ordering::Acquire);
            if seen == self.phase {
                patience.refresh();
                return Ok(self.area.long(line + 8).load(Ordering::Relaxed));
            }
            match patience.pause() {
                Ok(Pause::Look) => {}
                Ok(Pause::Sleep(time)) => self.sleep(rank, flag, seen, time)?,
                Err(Interrupted::TimedOut) => return Err(BoardError::Late(rank)),
                Err(why) => return Err(why.into()),
            }
        }
    }

    #[cold]
    fn sleep(
        &self,
        rank: usize,
        flag: &AtomicU32,
        seen: u32,
        time: Duration,
    ) -> Result<(), BoardError> {
        let has_left = self.left(rank).load(Ordering::Acquire) != 0;
        if has_left || self.segment.is_gone(self.ranks[rank]) {
            // What it did before it went still counts.
            return if flag.load(Ordering::Acquire) == self.phase {
                Ok(())
            } else {
                Err(BoardError::Gone(rank))
            };
        }
        let sleepers = self.sleepers(rank);
        sleepers.fetch_add(1, Ordering::SeqCst);
        if flag.load(Ordering::SeqCst) == seen {
            let time = Timespec {
                tv_sec: time.as_secs() as i64,
                tv_nsec: i64::from(time.subsec_nanos()),
            };
            // Whatever ends the sleep, the caller looks again.
            let _ = futex::wait(flag, futex::Flags::empty(), seen, Some(&time));
        }
        sleepers.fetch_sub(1, Ordering::SeqCst);
        Ok(())
    }

    /// A handle by which another thread can tell the group that this rank leaves it.
    pub(crate) fn farewell(&self) -> io::Result<Farewell> {
        let len = align(self.ranks.len() * CONTROL, PAGE);
        let offset = {
            let at = (self.entry - self.segment.group_entry(0)) / ENTRY;
            let stride = Segment::stride(self.segment.world_size);
            Segment::table_len(self.segment.world_size) + at * stride
        };
        Ok(Farewell {
            control: Mapping::new(&self.segment.file, offset, len)?,
            rank: self.rank,
        })
    }
}

/// The slots that all ranks have published in this phase.
#[derive(Clone, Copy)]
pub(crate) struct Slots<'a> {
    board: &'a Board,
}

impl<'a> Slots<'a> {
    /// As [`Board::slot`].
    #[inline]
    pub(crate) fn of(self, rank: usize) -> &'a [u8] {
        self.board.slot(rank)
    }
}

impl Drop for Board {
    fn drop(&mut self) {
        self.left(self.rank).store(1, Ordering::Release);
        for parity in 0..2 {
            wake(self.area.word(self.line(self.rank, parity)));
        }
        // The last to leave empties the area for the next group. Where a rank died it stays claimed.
        let table = &self.segment.table;
        let leavers = table.word(self.entry + 4).fetch_add(1, Ordering::AcqRel) + 1;
        if leavers as usize == self.ranks.len() && self.area.advise(Advice::LinuxRemove).is_ok() {
            table.word(self.entry).store(0, Ordering::Release);
        }
    }
}

/// Tells the others on a board that this rank leaves it, while its own thread may be waiting there.
pub(crate) struct Farewell {
    control: Mapping,
    rank: usize,
}

impl Farewell {
    /// Whoever waits for this rank need not any more.
    pub(crate) fn leave(&self) {
        let control = self.rank * CONTROL;
        let left = self.control.word(control + 3 * LINE);
        left.store(1, Ordering::Release);
        for parity in 0..2 {
            wake(self.control.word(control + parity * LINE));
        }
    }
}

fn wake(flag: &AtomicU32) {
    // There may be no sleeper any more; that is no error.
    let _ = futex::wake(flag, futex::Flags::empty(), i32::MAX as u32);
}
