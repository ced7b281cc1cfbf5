//! Model checking, by loom, of the phases of an exchange area: every order of steps with at most four preemptions, with
//! every value that a load may return.
//!
//! The model is the protocol of [`shm`](super::shm) with a cell in place of a slot. A cell that is read while it is
//! written, or before the write is visible, fails the model. Variants without a step on which the protocol relies
//! must fail: otherwise the model would prove nothing.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;
use std::sync::atomic::AtomicUsize;

/// The last phase. In the third one the ranks that swap slots write where they have read.
const LAST_PHASE: u32 = 3;

/// The protocol, or a variant of it.
#[derive(Clone, Copy)]
struct ExchangeModel {
    /// The ordering with which a flag is stored.
    store: Ordering,
    /// The ordering with which a flag is loaded.
    load: Ordering,
    /// Number of slots of a rank, and of flags, which are used in turn.
    slots: u32,
    /// Whether the two ranks swap their slots when both slots have been used.
    swaps: bool,
}

/// Ranks that write their own slots in every phase.
const KEEPING: ExchangeModel = ExchangeModel {
    store: Ordering::Release,
    load: Ordering::Acquire,
    slots: 2,
    swaps: false,
};

/// The two ranks of a group that swap their slots, as with `Traffic::Exchange`.
const SWAPPING: ExchangeModel = ExchangeModel {
    swaps: true,
    ..KEEPING
};

/// The flags and slots of one rank.
struct Side {
    flags: [AtomicU32; 2],
    slots: [UnsafeCell<u32>; 2],
}

impl Side {
    fn new() -> Self {
        Self {
            flags: [AtomicU32::new(0), AtomicU32::new(0)],
            slots: [UnsafeCell::new(0), UnsafeCell::new(0)],
        }
    }
}

/// Runs all phases of one rank: in each it writes a slot, waits for the other rank's flag, and checks what it reads.
fn run_phases(protocol: ExchangeModel, own_side: &Side, other_side: &Side) {
    for phase in 1..=LAST_PHASE {
        let flag = (phase % protocol.slots) as usize;
        // Phases count from 1, and swaps from 0 (`ShmExchange::next_swap`).
        let swap = phase - 1;
        let (position, is_swapped) = match protocol.swaps {
            true => ((swap % protocol.slots) as usize, swap >> 1 & 1 == 1),
            false => (flag, false),
        };
        let (written, read) = match is_swapped {
            true => (other_side, own_side),
            false => (own_side, other_side),
        };
        written.slots[position].with_mut(|slot| {
            // SAFETY: the model must let no other thread use the cell now; loom fails the test if one does.
            unsafe { *slot = phase }
        });
        own_side.flags[flag].store(phase, protocol.store);
        while other_side.flags[flag].load(protocol.load) != phase {
            thread::yield_now();
        }
        read.slots[position].with(|slot| {
            // SAFETY: the model must let no other thread write the cell now; loom fails the test if one
            // does.
            assert_eq!(unsafe { *slot }, phase);
        });
    }
}

/// Runs every order of steps of two ranks with at most four preemptions; returns the number of orders.
fn explore(protocol: ExchangeModel) -> usize {
    let orders = std::sync::Arc::new(AtomicUsize::new(0));
    let counted = orders.clone();
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(4);
    model.check(move || {
        counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let sides = Arc::new((Side::new(), Side::new()));
        let theirs = sides.clone();
        let other = thread::spawn(move || run_phases(protocol, &theirs.1, &theirs.0));
        run_phases(protocol, &sides.0, &sides.1);
        other.join().unwrap();
    });
    orders.load(std::sync::atomic::Ordering::Relaxed)
}

/// Whether some order of steps fails the model.
fn fails(protocol: ExchangeModel) -> bool {
    std::panic::catch_unwind(|| explore(protocol)).is_err()
}

#[test]
fn in_every_order_ranks_read_what_was_written_in_their_phase() {
    for protocol in [KEEPING, SWAPPING] {
        let orders = explore(protocol);
        assert!(orders > 50, "only {orders} orders were explored");
    }
}

#[test]
fn a_flag_without_release_or_acquire_fails_the_model() {
    for protocol in [KEEPING, SWAPPING] {
        assert!(fails(ExchangeModel {
            store: Ordering::Relaxed,
            ..protocol
        }));
        assert!(fails(ExchangeModel {
            load: Ordering::Relaxed,
            ..protocol
        }));
    }
}

#[test]
fn a_single_slot_fails_the_model() {
    for protocol in [KEEPING, SWAPPING] {
        assert!(fails(ExchangeModel {
            slots: 1,
            ..protocol
        }));
    }
}
