//! The memory that the ranks of a host share: its table of ranks, its directory of groups, and the table of
//! agreements.

use super::agreement::{AGREEMENTS_LEN, agree};
use super::area::{align, area_len};
use super::error::ShmExchangeError;
use super::mapping::{Mapping, wake};
use crate::wait::processors::{Processors, own_processors, wait_mode_of};
use crate::wait::{Pause, WaitMode, WaitPolicy};
use rcomm_core::backend::Agreement;
use rcomm_recorder::model::Rank;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::process::{Pid, PidfdFlags};
use rustix::thread::futex;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// `rtcsgm03` in ASCII: marks a segment of this layout.
const MAGIC: u64 = 0x3330_6d67_7363_7472;
/// The number of groups that can have an area at the same time. Further groups use sockets. An area occupies only the
/// pages that a rank has touched.
const GROUPS: usize = 4096;
/// Bytes before the table of ranks.
const HEAD: usize = 4096;
/// Bytes of a group's entry: state, number of ranks that have left the group, and key.
const GROUP_ENTRY_LEN: usize = 64;
/// Bytes of a rank's entry: state, process id, and the processors on which the rank may run.
const RANK_ENTRY_LEN: usize = 192;
/// Offset of the processors in a rank's entry.
const RANK_PROCESSORS: usize = 64;
/// Offset of the number of claims, both granted and refused.
const CLAIMS: usize = 16;
/// Offset of the number of ranks that sleep until the number of claims changes.
const SLEEPERS: usize = 20;
/// Offset of the number of ranks that have entered.
const ENTERED: usize = 24;
/// Offset of the number of refused claims.
const REFUSED: usize = 64;
/// Offset of the greatest distance of a claimed entry from the first index at which its group is searched.
const FARTHEST: usize = 96;
/// Offset of 32 bytes of a nonce, and 32 bytes by which the rank that made the segment shows that it knows the secret.
const PROOF: usize = 128;
/// How many of the latest refusals are kept. A rank whose group's refusal was overwritten does not find it, and waits
/// until its deadline, or until the group's rank 0 is gone.
const REFUSALS: usize = 8192;
const HUGE_PAGE: usize = 2 << 20;

// States of a rank's entry; 0 before the rank enters.
const PRESENT: u32 = 1;
const LEFT: u32 = 2;

// States of a group's entry; 0 while it is free.
const CLAIMED: u32 = 1;
const READY: u32 = 2;

/// All indices of the directory, from one that depends on the key, so that a search for a group does not pass the
/// entries of all other groups.
fn indices(key: u64) -> impl Iterator<Item = usize> {
    let start = (key % GROUPS as u64) as usize;
    (start..GROUPS).chain(0..start)
}

fn timespec(time: Duration) -> Timespec {
    Timespec {
        tv_sec: time.as_secs() as i64,
        tv_nsec: i64::from(time.subsec_nanos()),
    }
}

/// The memory that the ranks of this host share.
pub(crate) struct Segment {
    file: OwnedFd,
    table: Mapping,
    world_size: usize,
    /// Bytes from one area to the next.
    stride: usize,
    rank: Rank,
    /// For each rank a pidfd, which shows when its process ends; opened when it is first needed.
    processes: Vec<OnceLock<OwnedFd>>,
}

impl Segment {
    /// An empty file, in which a segment can be made.
    pub(crate) fn file_for_new() -> io::Result<OwnedFd> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        Ok(rustix::fs::memfd_create("rcomm", flags)?)
    }

    /// Makes the segment in a [new file](Self::file_for_new), which the other ranks open, or which the caller passes to
    /// them. `proof` is a nonce and the proof over it that the ranks that open it check.
    pub(crate) fn create(
        file: OwnedFd,
        rank: Rank,
        world_size: usize,
        proof: ([u8; 32], [u8; 32]),
    ) -> io::Result<Self> {
        let len = Self::table_len(world_size) + GROUPS * Self::stride(world_size);
        rustix::fs::ftruncate(&file, len as u64)?;
        // The seals keep processes from truncating the file: access to a truncated part would end the other processes.
        let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals)?;
        let segment = Self::map(file, rank, world_size)?;
        segment
            .table
            .long(8)
            .store(world_size as u64, Ordering::Relaxed);
        for (index, half) in [proof.0, proof.1].into_iter().enumerate() {
            for (word, bytes) in segment.proof_half(index).zip(half.chunks(8)) {
                let bytes = bytes.try_into().unwrap_or_default();
                word.store(u64::from_le_bytes(bytes), Ordering::Relaxed);
            }
        }
        segment.table.long(0).store(MAGIC, Ordering::Release);
        segment.enter();
        Ok(segment)
    }

    /// The words of the nonce (0) or of the proof (1).
    fn proof_half(&self, index: usize) -> impl Iterator<Item = &AtomicU64> {
        (0..4).map(move |word| self.table.long(PROOF + index * 32 + word * 8))
    }

    /// Uses the segment that another rank made, if its nonce and its proof are valid. Fails otherwise, and as
    /// [`attach`](Self::attach); it fails also if the other rank is still making it.
    pub(crate) fn attach_proved(
        file: OwnedFd,
        rank: Rank,
        world_size: usize,
        is_valid: impl FnOnce(&[u8; 32], &[u8; 32]) -> bool,
    ) -> io::Result<Self> {
        let segment = Self::check(file, rank, world_size)?;
        let half = |index| {
            let mut bytes = [0; 32];
            for (word, bytes) in segment.proof_half(index).zip(bytes.chunks_mut(8)) {
                bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
            }
            bytes
        };
        if !is_valid(&half(0), &half(1)) {
            let message = "the rank that made the shared memory does not know the job's secret";
            return Err(io::Error::other(message));
        }
        segment.enter();
        Ok(segment)
    }

    /// Uses the segment that another rank made. Fails if it is not a segment of this version for this world size.
    pub(crate) fn attach(file: OwnedFd, rank: Rank, world_size: usize) -> io::Result<Self> {
        let segment = Self::check(file, rank, world_size)?;
        segment.enter();
        Ok(segment)
    }

    /// Maps the segment that another rank made, without entering it.
    fn check(file: OwnedFd, rank: Rank, world_size: usize) -> io::Result<Self> {
        let len = Self::table_len(world_size) + GROUPS * Self::stride(world_size);
        let actual = rustix::fs::fstat(&file)?.st_size;
        let is_sealed = rustix::fs::fcntl_get_seals(&file)?.contains(SealFlags::SHRINK);
        if u64::try_from(actual).ok() != Some(len as u64) || !is_sealed {
            let is = if is_sealed { "is" } else { "is not" };
            return Err(io::Error::other(format!(
                "the shared memory has {actual} bytes and {is} sealed against shrinking, but {len} \
                 sealed bytes are expected: run the same version of rcomm, with the same world \
                 size, on all ranks"
            )));
        }
        let segment = Self::map(file, rank, world_size)?;
        let magic = segment.table.long(0).load(Ordering::Acquire);
        let size = segment.table.long(8).load(Ordering::Relaxed);
        if magic != MAGIC {
            return Err(io::Error::other(format!(
                "the shared memory begins with {magic:#x} instead of {MAGIC:#x}: run the same \
                 version of rcomm on all ranks"
            )));
        }
        if size != world_size as u64 {
            return Err(io::Error::other(format!(
                "the shared memory is that of a world of {size} ranks, not of {world_size}: start \
                 all ranks with the same world size"
            )));
        }
        Ok(segment)
    }

    fn map(file: OwnedFd, rank: Rank, world_size: usize) -> io::Result<Self> {
        let table = Mapping::new(&file, 0, Self::table_len(world_size))?;
        Ok(Self {
            file,
            table,
            world_size,
            stride: Self::stride(world_size),
            rank,
            processes: std::iter::repeat_with(OnceLock::new)
                .take(world_size)
                .collect(),
        })
    }

    fn table_len(world_size: usize) -> usize {
        align(
            Self::agreements_offset(world_size) + AGREEMENTS_LEN,
            HUGE_PAGE,
        )
    }

    /// Size in bytes of an area that is large enough for a group of any size up to `world_size`: a smaller group may
    /// need a larger area, since it has more bytes per rank.
    fn stride(world_size: usize) -> usize {
        let longest = (1..=world_size).map(area_len).max();
        align(longest.unwrap_or(0), HUGE_PAGE)
    }

    fn rank_entry(rank: Rank) -> usize {
        HEAD + rank as usize * RANK_ENTRY_LEN
    }

    fn refusals_offset(world_size: usize) -> usize {
        HEAD + world_size * RANK_ENTRY_LEN + GROUPS * GROUP_ENTRY_LEN
    }

    fn agreements_offset(world_size: usize) -> usize {
        Self::refusals_offset(world_size) + REFUSALS * 8
    }

    fn group_entry(&self, index: usize) -> usize {
        HEAD + self.world_size * RANK_ENTRY_LEN + index * GROUP_ENTRY_LEN
    }

    /// Writes this rank's entry, and counts the rank.
    fn enter(&self) {
        let entry = Self::rank_entry(self.rank);
        let pid = std::process::id();
        self.table.word(entry + 4).store(pid, Ordering::Relaxed);
        for (index, word) in own_processors().into_iter().enumerate() {
            let place = self.table.long(entry + RANK_PROCESSORS + index * 8);
            place.store(word, Ordering::Relaxed);
        }
        self.table.word(entry).store(PRESENT, Ordering::Release);
        let entered = self.table.word(ENTERED);
        if entered.fetch_add(1, Ordering::AcqRel) as usize + 1 == self.world_size {
            wake(entered);
        }
    }

    /// Sleeps until all ranks of the world have entered, at most for `time`.
    pub(crate) fn await_all(&self, time: Duration) {
        let until = Instant::now() + time;
        let entered = self.table.word(ENTERED);
        loop {
            let seen = entered.load(Ordering::Acquire);
            let rest = until.saturating_duration_since(Instant::now());
            if seen as usize >= self.world_size || rest.is_zero() {
                return;
            }
            // The ranks are counted again, whatever has ended the sleep.
            let _ = futex::wait(entered, futex::Flags::empty(), seen, Some(&timespec(rest)));
        }
    }

    /// The file, to be passed to other ranks.
    pub(crate) fn file(&self) -> &OwnedFd {
        &self.file
    }

    /// Whether `rank` has the segment, or had it.
    pub(crate) fn has_entered(&self, rank: Rank) -> bool {
        self.table
            .word(Self::rank_entry(rank))
            .load(Ordering::Acquire)
            != 0
    }

    /// Returns `CorePerRank` if each rank that now has the segment can have a processor to itself, else
    /// `Oversubscribed` ([`wait_mode_of`]).
    ///
    /// If sets of processors overlap without one containing the other, the result may wrongly be `CorePerRank`.
    pub(crate) fn wait_mode(&self) -> WaitMode {
        let sets = (0..self.world_size).filter_map(|rank| {
            let entry = HEAD + rank * RANK_ENTRY_LEN;
            let is_present = self.table.word(entry).load(Ordering::Acquire) == PRESENT;
            is_present.then(|| {
                let word = |index| self.table.long(entry + RANK_PROCESSORS + index * 8);
                std::array::from_fn(|index| word(index).load(Ordering::Relaxed))
            })
        });
        let sets: Vec<Processors> = sets.collect();
        wait_mode_of(&sets)
    }

    /// Whether `rank` has dropped its segment, or its process has ended; `false` if the rank has not entered yet, or if
    /// the system does not let this process find out.
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
                // Another thread may have been first; either pidfd is usable.
                Ok(process) => drop(slot.set(process)),
                Err(rustix::io::Errno::SRCH) => return true,
                // No pidfd is available, so only the deadline ends a wait for this rank.
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

    /// Agrees on `value` with the other ranks that call this with the same number, without waiting until they call.
    /// Returns `None` on all of them if all entries in which this number may be are in use.
    pub(crate) fn agree(&self, number: u64, value: &[u8]) -> Option<Agreement> {
        let start = Self::agreements_offset(self.world_size);
        agree(&self.table, start, number, value)
    }

    /// Returns the index of a group's area. The group's rank 0, whose global rank is `leader`, claims the area, and the
    /// others wait for its claim. Returns `None` if the claim was refused.
    ///
    /// # Errors
    /// On a rank that waits: `Gone` if rank 0 is gone and has claimed no area, or why the wait was interrupted.
    pub(super) fn area_of(
        &self,
        key: u64,
        rank: usize,
        leader: Rank,
        policy: &mut WaitPolicy<'_>,
    ) -> Result<Option<usize>, ShmExchangeError> {
        if rank == 0 {
            Ok(self.claim(key))
        } else {
            self.find(key, leader, policy)
        }
    }

    /// The offset in the file of the area with this index.
    fn area(&self, index: usize) -> usize {
        Self::table_len(self.world_size) + index * self.stride
    }

    /// Maps `len` bytes of the area with this index, from its byte `start` on. Fails if they are not all in the area.
    pub(super) fn map_area(&self, index: usize, start: usize, len: usize) -> io::Result<Mapping> {
        let end = start.checked_add(len);
        if index >= GROUPS || end.is_none_or(|end| end > self.stride) {
            return Err(io::Error::other(format!(
                "{len} bytes from byte {start} of area {index} are not in the segment, which has \
                 {GROUPS} areas of {} bytes",
                self.stride
            )));
        }
        Mapping::new(&self.file, self.area(index) + start, len)
    }

    /// Counts a rank that leaves the group of an area; returns how many have left.
    pub(super) fn leave_area(&self, index: usize) -> usize {
        let left = self.table.word(self.group_entry(index) + 4);
        left.fetch_add(1, Ordering::AcqRel) as usize + 1
    }

    /// Returns the first `len` bytes of an area's memory to the system, and frees the area for later groups.
    pub(super) fn free_area(&self, index: usize, len: usize) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let (start, len) = (self.area(index) as u64, len as u64);
        // An area that cannot be emptied stays claimed.
        if rustix::fs::fallocate(&self.file, flags, start, len).is_ok() {
            let state = self.table.word(self.group_entry(index));
            state.store(0, Ordering::Release);
        }
    }

    /// Claims a free area for the group with this key, and publishes the result; `None` if no area is free.
    fn claim(&self, key: u64) -> Option<usize> {
        let found = indices(key).zip(0_u32..).find(|&(index, _)| {
            let state = self.table.word(self.group_entry(index));
            let (new, order) = (CLAIMED, Ordering::Relaxed);
            state
                .compare_exchange(0, new, Ordering::Acquire, order)
                .is_ok()
        });
        if let Some((index, distance)) = found {
            let entry = self.group_entry(index);
            let farthest = self.table.word(FARTHEST);
            farthest.fetch_max(distance, Ordering::Relaxed);
            self.table.word(entry + 4).store(0, Ordering::Relaxed);
            self.table.long(entry + 8).store(key, Ordering::Relaxed);
            self.table.word(entry).store(READY, Ordering::Release);
        } else {
            // The refusal is published: the other ranks must not wait for an area that will never be made.
            let index =
                self.table.word(REFUSED).fetch_add(1, Ordering::Relaxed) as usize % REFUSALS;
            self.refusal(index)
                .store(key.wrapping_add(1), Ordering::Release);
        }
        let claims = self.table.word(CLAIMS);
        claims.fetch_add(1, Ordering::SeqCst);
        if self.table.word(SLEEPERS).load(Ordering::SeqCst) > 0 {
            wake(claims);
        }
        found.map(|(index, _)| index)
    }

    /// Sleeps until the number of claims is no longer `seen`, or `time` has passed.
    fn await_claim(&self, seen: u32, time: Duration) {
        let (claims, sleepers) = (self.table.word(CLAIMS), self.table.word(SLEEPERS));
        sleepers.fetch_add(1, Ordering::SeqCst);
        // The caller checks again, whatever has ended the sleep.
        let _ = futex::wait(claims, futex::Flags::empty(), seen, Some(&timespec(time)));
        sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    /// The refusal with this index: 0, or one more than the key of the group whose claim was refused.
    fn refusal(&self, index: usize) -> &AtomicU64 {
        self.table
            .long(Self::refusals_offset(self.world_size) + index * 8)
    }

    /// Returns the result of a group's claim: `Some(Some(index))` with the index of its area, or `Some(None)` for a
    /// refusal. `None` if there is no claim yet, or if the refusal is no longer kept. A claim that was counted before
    /// the call is found.
    ///
    /// Reads only the entries that may be the group's. The two tables have 320 KiB together: to read them whole, a rank
    /// that starts would have to wait for many page faults.
    fn answer_to(&self, key: u64) -> Option<Option<usize>> {
        let is_entry_of_group = |&index: &usize| {
            let entry = self.group_entry(index);
            self.table.word(entry).load(Ordering::Acquire) == READY
                && self.table.long(entry + 8).load(Ordering::Relaxed) == key
        };
        let farthest = self.table.word(FARTHEST).load(Ordering::Relaxed) as usize;
        let mut near = indices(key).take(farthest.saturating_add(1));
        if let Some(index) = near.find(is_entry_of_group) {
            return Some(Some(index));
        }
        let refusals = self.table.word(REFUSED).load(Ordering::Relaxed) as usize;
        let refused = (0..refusals.min(REFUSALS))
            .any(|index| self.refusal(index).load(Ordering::Acquire) == key.wrapping_add(1));
        refused.then_some(None)
    }

    /// Works like [`area_of`](Self::area_of) on ranks other than rank 0: waits for the result of the claim.
    fn find(
        &self,
        key: u64,
        leader: Rank,
        policy: &mut WaitPolicy<'_>,
    ) -> Result<Option<usize>, ShmExchangeError> {
        let mut is_leader_gone = false;
        let mut searched = None;
        loop {
            let claims = self.table.word(CLAIMS).load(Ordering::SeqCst);
            // The tables may be long. They are searched again only after a claim, and once more when the leader is
            // gone, since it may have ended before it counted its claim.
            let is_changed = searched.replace(claims) != Some(claims);
            if (is_changed || is_leader_gone)
                && let Some(answer) = self.answer_to(key)
            {
                return Ok(answer);
            }
            if is_leader_gone {
                return Err(ShmExchangeError::Gone(0));
            }
            match policy.pause() {
                Ok(Pause::Poll) => {}
                Ok(Pause::Sleep(time)) => {
                    // An area that the leader claimed before it ended is valid: the next iteration searches once
                    // more.
                    is_leader_gone = self.is_gone(leader);
                    if !is_leader_gone {
                        self.await_claim(claims, time);
                    }
                }
                Err(interruption) => return Err(interruption.into()),
            }
        }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        let state = self.table.word(Self::rank_entry(self.rank));
        // A rank that has not entered, since it could not use the segment, has not left either.
        let (order, failed) = (Ordering::Release, Ordering::Relaxed);
        let _ = state.compare_exchange(PRESENT, LEFT, order, failed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::shm::area::PAGE;

    fn segment(world_size: usize) -> Segment {
        let file = Segment::file_for_new().unwrap();
        Segment::create(file, 0, world_size, Default::default()).unwrap()
    }

    #[test]
    fn the_area_of_a_group_of_any_size_fits_the_stride() {
        for world_size in [1, 2, 19, 22, 23, 64, 300] {
            let segment = segment(world_size);
            for size in 1..=world_size {
                let len = area_len(size);
                assert!(len <= segment.stride, "{size} of {world_size}");
            }
            let last = segment.stride - PAGE;
            assert!(segment.map_area(GROUPS - 1, last, PAGE).is_ok());
            assert!(segment.map_area(0, last, 2 * PAGE).is_err());
            assert!(segment.map_area(GROUPS, 0, PAGE).is_err());
        }
    }

    #[test]
    fn granted_and_refused_claims_are_found_later() {
        let segment = segment(2);
        let keys = || (0..(GROUPS + REFUSALS) as u64).map(|group| group * 0x9e37_79b9);
        let given: Vec<_> = keys().map(|key| segment.claim(key)).collect();
        assert!(given[..GROUPS].iter().all(Option::is_some));
        assert!(given[GROUPS..].iter().all(Option::is_none));
        // Only some of the keys, since each search for a refusal reads all entries.
        for (key, place) in keys().zip(&given).step_by(101) {
            assert_eq!(segment.answer_to(key), Some(*place));
        }
        assert_eq!(segment.answer_to(u64::MAX / 2), None);
        // A freed area is claimed by another group, wherever the search begins.
        let freed = given[7].unwrap();
        segment.free_area(freed, PAGE);
        assert_eq!(segment.claim(1), Some(freed));
        assert_eq!(segment.answer_to(1), Some(Some(freed)));
    }

    #[test]
    fn a_search_for_a_group_goes_no_farther_than_groups_were_claimed() {
        let segment = segment(2);
        let farthest = || segment.table.word(FARTHEST).load(Ordering::Relaxed);
        assert_eq!(segment.claim(3), Some(3));
        assert_eq!((segment.answer_to(3), farthest()), (Some(Some(3)), 0));
        // Keys whose searches begin at the same entry, the last one around the end of the table.
        let size = GROUPS as u64;
        assert_eq!(segment.claim(3 + size), Some(4));
        assert_eq!(segment.claim(size - 1), Some(GROUPS - 1));
        assert_eq!(segment.claim(2 * size - 1), Some(0));
        let found = [3 + size, size - 1, 2 * size - 1].map(|key| segment.answer_to(key));
        assert_eq!(found, [4, GROUPS - 1, 0].map(|index| Some(Some(index))));
        assert_eq!(farthest(), 1);
        // An entry that is beyond is not read.
        let beyond = segment.group_entry(9);
        segment.table.long(beyond + 8).store(7, Ordering::Relaxed);
        segment.table.word(beyond).store(READY, Ordering::Relaxed);
        assert_eq!(segment.answer_to(7), None);
    }
}
