//! The phase protocol of the exchange area, model-checked: every order of steps, and what each step may
//! see.
//!
//! The model is the protocol of [`shm`](super::shm) with a cell in place of a slot: a cell that is written
//! while it is read, or read without the write being visible, fails the model. Variants that omit what the
//! protocol relies on must fail; otherwise the model would prove nothing.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering};
use loom::thread;
use std::sync::atomic::AtomicUsize;

const PHASES: u32 = 3;

/// What differs between the protocol and its variants.
#[derive(Clone, Copy)]
struct ExchangeModel {
    /// How the flag is stored.
    store: Ordering,
    /// How the flag is read.
    load: Ordering,
    /// Slots used in turn.
    slots: u32,
    /// Whether the two ranks swap their slots each time that they use them again.
    swaps: bool,
}

const REAL: ExchangeModel = ExchangeModel {
    store: Ordering::Release,
    load: Ordering::Acquire,
    slots: 2,
    swaps: false,
};

const SWAPPING: ExchangeModel = ExchangeModel {
    swaps: true,
    ..REAL
};

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

fn walk(protocol: ExchangeModel, own: &Side, other: &Side) {
    for phase in 1..=PHASES {
        let parity = (phase % protocol.slots) as usize;
        let (written, read) = match protocol.swaps && phase >> 1 & 1 == 1 {
            true => (other, own),
            false => (own, other),
        };
        written.slots[parity].with_mut(|slot| {
            // SAFETY: the model must let no other thread use the cell now; loom fails the test if one does.
            unsafe { *slot = phase }
        });
        own.flags[parity].store(phase, protocol.store);
        while other.flags[parity].load(protocol.load) != phase {
            thread::yield_now();
        }
        read.slots[parity].with(|slot| {
            // SAFETY: the model must let no other thread write the cell now; loom fails the test if one
            // does.
            assert_eq!(unsafe { *slot }, phase);
        });
    }
}

/// Runs every order of steps of two ranks; returns the number of orders.
fn explore(protocol: ExchangeModel) -> usize {
    let orders = std::sync::Arc::new(AtomicUsize::new(0));
    let counted = orders.clone();
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(4);
    model.check(move || {
        counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let sides = Arc::new((Side::new(), Side::new()));
        let theirs = sides.clone();
        let other = thread::spawn(move || walk(protocol, &theirs.1, &theirs.0));
        walk(protocol, &sides.0, &sides.1);
        other.join().unwrap();
    });
    orders.load(std::sync::atomic::Ordering::Relaxed)
}

fn fails(protocol: ExchangeModel) -> bool {
    std::panic::catch_unwind(|| explore(protocol)).is_err()
}

#[test]
fn every_order_of_two_ranks_reads_what_was_written_in_its_phase() {
    for protocol in [REAL, SWAPPING] {
        let orders = explore(protocol);
        assert!(orders > 50, "only {orders} orders were explored");
    }
}

#[test]
fn a_flag_without_release_or_acquire_is_found_out() {
    for protocol in [REAL, SWAPPING] {
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
fn a_single_slot_is_found_out() {
    for protocol in [REAL, SWAPPING] {
        assert!(fails(ExchangeModel {
            slots: 1,
            ..protocol
        }));
    }
}
