//! The values that the plug-in gives to NCCL as handles of contexts and events. They are numbers, not addresses.
//!
//! NCCL passes a handle back unchanged, on any thread. If it carries out a network transfer on behalf of another
//! process, it also passes the handle back in a process where the handle has no meaning. So a handle holds the index of
//! its slot and the number of that slot's use, combined with a key of the process. A handle of an earlier use, or of
//! another process, finds nothing.

use std::ffi::c_void;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};

/// The key that all handles of this process are combined with, so that a handle of another process, whose transfers
/// this process may carry out, finds nothing here. Process ids would not do, because two containers may have equal
/// ones.
static KEY: AtomicU64 = AtomicU64::new(0);

/// Chooses the process's key at random, unless it has one. Handles that exist already lose their meaning.
pub(crate) fn choose_key() {
    let random = RandomState::new().hash_one(std::process::id()) | 1;
    let _ = KEY.compare_exchange(0, random, Ordering::Relaxed, Ordering::Relaxed);
}

/// What a handle refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A communicator.
    Communicator = 1,
    /// An operation, by its call.
    Call = 2,
    /// An operation, by its task in a plan.
    Task = 3,
    /// The work of one channel on an operation.
    Kernel = 4,
    /// A network transfer.
    Transfer = 5,
    /// A step of a network transfer: the slot is that of the transfer, and the channel holds the lower bits of the
    /// step's number.
    Step = 6,
    /// The outermost group call; the generation is its number among those of its thread.
    Group = 7,
    /// The call of an operation that was captured into a graph; the slot is that of its communicator.
    Captured = 8,
    /// A network transfer whose steps are not reported; the slot is its link, and the generation the number of the
    /// link's use.
    Whole = 9,
    /// A plan of operations, of which nothing is kept: up to version 4 NCCL reports operations only of a plan that has
    /// a handle.
    Plan = 10,
}

impl Kind {
    fn from_number(number: u64) -> Option<Self> {
        Some(match number {
            1 => Self::Communicator,
            2 => Self::Call,
            3 => Self::Task,
            4 => Self::Kernel,
            5 => Self::Transfer,
            6 => Self::Step,
            7 => Self::Group,
            8 => Self::Captured,
            9 => Self::Whole,
            10 => Self::Plan,
            _ => return None,
        })
    }
}

/// Kind, channel, slot and number of the use in one word: 4, 8, 20 and 32 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Handle {
    pub(crate) kind: Kind,
    pub(crate) channel: u8,
    pub(crate) at: SlotUse,
}

/// One use of one slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotUse {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

/// The largest number of slots that a handle can distinguish.
pub(crate) const MAX_SLOTS: usize = 1 << 20;

impl SlotUse {
    pub(crate) fn to_word(self) -> u64 {
        u64::from(self.index) << 32 | u64::from(self.generation)
    }

    pub(crate) fn from_word(word: u64) -> Self {
        Self {
            index: (word >> 32) as u32,
            generation: word as u32,
        }
    }

    pub(crate) fn handle(self, kind: Kind, channel: u8) -> *mut c_void {
        let word = kind as u64
            | u64::from(channel) << 4
            | u64::from(self.index) << 12
            | u64::from(self.generation) << 32;
        let word = word ^ KEY.load(Ordering::Relaxed);
        std::ptr::without_provenance_mut(word as usize)
    }
}

impl Handle {
    /// Decodes a handle; `None` if the pointer is null or decodes to no [`Kind`].
    pub(crate) fn of(pointer: *mut c_void) -> Option<Self> {
        if pointer.is_null() {
            return None;
        }
        let word = pointer.addr() as u64 ^ KEY.load(Ordering::Relaxed);
        Some(Self {
            kind: Kind::from_number(word & 0xf)?,
            channel: (word >> 4) as u8,
            at: SlotUse {
                index: (word >> 12) as u32 & (MAX_SLOTS as u32 - 1),
                generation: (word >> 32) as u32,
            },
        })
    }

    /// The use of the handle's slot; `None` if the handle is of another kind.
    pub(crate) fn slot_if(self, kind: Kind) -> Option<SlotUse> {
        (self.kind == kind).then_some(self.at)
    }
}

/// A word that threads share: [`Slot::uses`], or a word of an operation. In the plug-in it is a standard
/// atomic; under the model checker it is loom's, so that the code that is checked is the code that runs.
pub(crate) trait Word: Default {
    fn load(&self, order: Ordering) -> u64;
    fn store(&self, value: u64, order: Ordering);
    /// Replaces `current` with `new`; false if another thread was first.
    fn replace(&self, current: u64, new: u64, success: Ordering) -> bool;
    /// Orders the stores before the fence before the stores after it.
    fn fence_release();
}

impl Word for AtomicU64 {
    #[inline]
    fn load(&self, order: Ordering) -> u64 {
        self.load(order)
    }

    #[inline]
    fn store(&self, value: u64, order: Ordering) {
        self.store(value, order);
    }

    #[inline]
    fn replace(&self, current: u64, new: u64, success: Ordering) -> bool {
        self.compare_exchange(current, new, success, Ordering::Relaxed)
            .is_ok()
    }

    #[inline]
    fn fence_release() {
        fence(Ordering::Release);
    }
}

/// A fixed number of slots that are taken and returned without a lock.
#[derive(Debug)]
pub(crate) struct Pool<T, U = AtomicU64> {
    slots: Box<[Slot<T, U>]>,
    next: AtomicUsize,
    /// How often in a row no free slot was found.
    misses: AtomicU32,
}

/// A place for a value.
#[derive(Debug, Default)]
struct Slot<T, U> {
    /// Counts each time that the slot was taken or given back; the slot is in use while the count is odd.
    uses: U,
    value: T,
}

/// The number of slots that a search checks at first.
const PROBES: usize = 64;
/// While a pool is full, one in this number of searches checks all slots.
const ALL_EACH: u32 = 256;
/// How often [`Pool::taken`] looks at a slot that is being set up before it passes over it.
const SETTLES: u32 = 10_000;

impl<T: Default, U: Word> Pool<T, U> {
    /// A pool of free slots. `slots` is a power of two, and at most [`MAX_SLOTS`].
    pub(crate) fn new(slots: usize) -> Self {
        debug_assert!(slots.is_power_of_two() && slots <= MAX_SLOTS);
        Self {
            slots: (0..slots).map(|_| Slot::default()).collect(),
            next: AtomicUsize::new(0),
            misses: AtomicU32::new(0),
        }
    }

    /// Takes a slot and lets `fill` set it up before [`get`](Self::get) finds it; `None` if no slot is free. While the
    /// pool is full, most calls check only some of the slots.
    #[inline(always)]
    pub(crate) fn take(&self, fill: impl FnOnce(&T, SlotUse)) -> Option<SlotUse> {
        let slots = self.slots.len();
        let taken = (self.claim(PROBES.min(slots))).or_else(|| {
            let misses = self.misses.load(Ordering::Relaxed);
            self.misses.store(misses.wrapping_add(1), Ordering::Relaxed);
            match misses % ALL_EACH {
                0 => self.claim(slots),
                _ => None,
            }
        });
        let at = taken?;
        if self.misses.load(Ordering::Relaxed) != 0 {
            self.misses.store(0, Ordering::Relaxed);
        }
        let slot = &self.slots[at.index as usize];
        fill(&slot.value, at);
        slot.uses.store(at.generation.into(), Ordering::Release);
        Some(at)
    }

    /// Claims the first free slot among `probes` of them; no handle matches it until it is set up.
    fn claim(&self, probes: usize) -> Option<SlotUse> {
        let mask = self.slots.len() - 1;
        for _ in 0..probes {
            // `next` is only the first slot to look at. Two threads may look at one slot, and the exchange below
            // decides.
            let index = self.next.load(Ordering::Relaxed) & mask;
            self.next.store(index + 1, Ordering::Relaxed);
            let slot = &self.slots[index];
            let uses = slot.uses.load(Ordering::Relaxed);
            // An even count means that the slot is free. `SETTING` then marks that it is being set up. The exchange is
            // ordered with the end of a communicator: see `Process::forget`.
            if uses & 1 == 0
                && uses & SETTING == 0
                && slot.uses.replace(uses, uses | SETTING, Ordering::SeqCst)
            {
                return Some(SlotUse {
                    index: index as u32,
                    generation: (uses as u32).wrapping_add(1),
                });
            }
        }
        None
    }

    /// Returns the value of this use of a slot, if it is the current one.
    pub(crate) fn get(&self, at: SlotUse) -> Option<&T> {
        let slot = self.slots.get(at.index as usize)?;
        let uses = slot.uses.load(Ordering::Acquire);
        (at.generation & 1 == 1 && uses == u64::from(at.generation)).then_some(&slot.value)
    }

    /// Ends this use of a slot and returns the slot to the pool; false if the use has already ended.
    pub(crate) fn give_back(&self, at: SlotUse) -> bool {
        let Some(slot) = self.slots.get(at.index as usize) else {
            return false;
        };
        let next = u64::from(at.generation.wrapping_add(1));
        at.generation & 1 == 1 && (slot.uses).replace(at.generation.into(), next, Ordering::SeqCst)
    }

    /// Works as [`give_back`](Self::give_back) without an exchange, for the only caller that may end this use: the one
    /// that has ended the operation in the slot, and only once.
    #[inline]
    pub(crate) fn release(&self, at: SlotUse) {
        let Some(slot) = self.slots.get(at.index as usize) else {
            return;
        };
        debug_assert_eq!(
            slot.uses.load(Ordering::Relaxed),
            u64::from(at.generation),
            "a use that has ended"
        );
        let next = u64::from(at.generation.wrapping_add(1));
        slot.uses.store(next, Ordering::Release);
    }

    /// Iterates over the slots in use. Waits for a slot that is being set up, for at most [`SETTLES`] looks.
    pub(crate) fn taken(&self) -> impl Iterator<Item = (SlotUse, &T)> {
        (0..).zip(&self.slots).filter_map(|(index, slot)| {
            let mut uses = slot.uses.load(Ordering::SeqCst);
            let mut left = SETTLES;
            while uses & SETTING != 0 && left > 0 {
                std::thread::yield_now();
                left -= 1;
                uses = slot.uses.load(Ordering::SeqCst);
            }
            let at = SlotUse {
                index,
                generation: uses as u32,
            };
            (uses & 1 == 1).then_some((at, &slot.value))
        })
    }
}

/// The bit that [`Slot::uses`] has while the slot is being set up; no generation has it.
const SETTING: u64 = 1 << 63;

#[cfg(test)]
#[path = "pool_model.rs"]
mod pool_model;

#[cfg(test)]
pub(crate) use pool_model::{Exact, NoFence, NoRelease, count_orders};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_finds_its_own_use_of_a_slot_and_no_other() {
        let pool: Pool<AtomicU64> = Pool::new(2);
        let first = pool
            .take(|value, _| value.store(7, Ordering::Relaxed))
            .expect("a free slot");
        let second = pool.take(|_, _| {}).expect("a free slot");
        assert_eq!(pool.take(|_, _| {}), None);
        assert_eq!(
            pool.get(first).map(|value| value.load(Ordering::Relaxed)),
            Some(7)
        );
        assert!(pool.give_back(first));
        assert!(!pool.give_back(first));
        assert!(pool.get(first).is_none());
        let again = pool.take(|_, _| {}).expect("a free slot");
        assert_eq!(again.index, first.index);
        assert!(pool.get(first).is_none() && pool.get(again).is_some());
        assert_eq!(pool.taken().count(), 2);
        assert!(pool.get(second).is_some());
    }

    #[test]
    fn encoded_handles_are_decoded_and_a_pointer_without_a_kind_is_not() {
        choose_key();
        let at = SlotUse {
            index: MAX_SLOTS as u32 - 1,
            generation: 0xdead_beef,
        };
        let handle = Handle::of(at.handle(Kind::Kernel, 63)).expect("a handle");
        assert_eq!(
            (handle.kind, handle.channel, handle.at),
            (Kind::Kernel, 63, at)
        );
        assert_eq!(SlotUse::from_word(at.to_word()), at);
        assert_eq!(Handle::of(std::ptr::null_mut()), None);
        let no_kind = KEY.load(Ordering::Relaxed) ^ 0xf;
        let pointer = std::ptr::without_provenance_mut(no_kind as usize);
        assert_eq!(Handle::of(pointer), None);
    }

    #[test]
    fn a_handle_of_another_process_has_another_key() {
        choose_key();
        let at = SlotUse {
            index: 1,
            generation: 1,
        };
        let own = at.handle(Kind::Task, 0);
        assert_eq!(Handle::of(own).map(|handle| handle.at), Some(at));
        // A process with a key of its own encodes the same slot differently.
        let word = own.addr() as u64 ^ KEY.load(Ordering::Relaxed);
        let foreign = std::ptr::without_provenance_mut(word as usize);
        assert_ne!(Handle::of(foreign).map(|handle| handle.at), Some(at));
    }

    #[test]
    fn a_free_slot_is_found_wherever_it_is() {
        let slots = 4 * PROBES;
        let pool: Pool<AtomicU64> = Pool::new(slots);
        let taken: Vec<_> = (0..slots).filter_map(|_| pool.take(|_, _| {})).collect();
        assert_eq!(taken.len(), slots);
        assert_eq!(pool.take(|_, _| {}), None);
        // While the pool is full, one search in `ALL_EACH` checks all slots.
        let last = taken[slots - 1];
        assert!(pool.give_back(last));
        let found = (0..=ALL_EACH).find_map(|_| pool.take(|_, _| {}));
        assert_eq!(found.map(|at| at.index), Some(last.index));
        // The first search after a success checks all slots.
        assert!(pool.give_back(taken[2 * PROBES]));
        pool.next.store(2 * PROBES + 1, Ordering::Relaxed);
        let found = pool.take(|_, _| {});
        assert_eq!(found.map(|at| at.index), Some(taken[2 * PROBES].index));
    }

    #[test]
    fn two_threads_never_hold_one_slot() {
        let pool: Pool<AtomicU64> = Pool::new(8);
        std::thread::scope(|scope| {
            for thread in 1..=4u64 {
                let pool = &pool;
                scope.spawn(move || {
                    for _ in 0..20_000 {
                        let taken = pool.take(|value, _| value.store(thread, Ordering::Relaxed));
                        let Some(at) = taken else { continue };
                        let seen = pool.get(at).map(|value| value.load(Ordering::Relaxed));
                        assert_eq!(seen, Some(thread));
                        assert!(pool.give_back(at));
                    }
                });
            }
        });
        assert_eq!(pool.taken().count(), 0);
    }
}
