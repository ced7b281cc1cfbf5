//! The counts and marks of a stream, model-checked: every order of steps of a writer and a reader.
//!
//! The model is one direction of a [stream](super::shm) with room for one value. It fails on a cell that is
//! written while it is read, on a value that is not the next one, and on a sleeper that is never woken.
//! Variants that omit what the protocol relies on must fail; otherwise the model would prove nothing.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering, fence};
use loom::thread;
use std::sync::atomic::AtomicUsize;

const VALUES: u32 = 2;

/// What differs between the protocol and its variants.
#[derive(Clone, Copy)]
struct StreamModel {
    /// How counts are stored.
    store: Ordering,
    /// Whether there is a fence between a count and the load of a mark, and between a mark and the load of
    /// a count.
    fenced: bool,
    /// Whether a sleeper checks once more after it has set its mark.
    looks_again: bool,
}

const REAL: StreamModel = StreamModel {
    store: Ordering::Release,
    fenced: true,
    looks_again: true,
};

/// Runs every order of steps; returns the number of orders.
fn explore(run: impl Fn() + Send + Sync + 'static) -> usize {
    let orders = std::sync::Arc::new(AtomicUsize::new(0));
    let counted = orders.clone();
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(4);
    model.check(move || {
        counted.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        run();
    });
    orders.load(std::sync::atomic::Ordering::Relaxed)
}

fn fails(run: impl Fn() + Send + Sync + 'static + std::panic::UnwindSafe) -> bool {
    std::panic::catch_unwind(|| explore(run)).is_err()
}

struct Ring {
    written: AtomicU32,
    read: AtomicU32,
    cell: UnsafeCell<u32>,
}

fn wait_for(count: &AtomicU32, wanted: u32) {
    while count.load(Ordering::Acquire) != wanted {
        thread::yield_now();
    }
}

/// A writer and a reader that hand over values.
fn hand_over(protocol: StreamModel) {
    let ring = Arc::new(Ring {
        written: AtomicU32::new(0),
        read: AtomicU32::new(0),
        cell: UnsafeCell::new(0),
    });
    let theirs = ring.clone();
    let reader = thread::spawn(move || {
        for value in 1..=VALUES {
            wait_for(&theirs.written, value);
            // SAFETY: the model must let no other thread write the cell now; loom fails the test if one
            // does.
            theirs.cell.with(|cell| assert_eq!(unsafe { *cell }, value));
            theirs.read.store(value, protocol.store);
        }
    });
    for value in 1..=VALUES {
        wait_for(&ring.read, value - 1);
        // SAFETY: the model must let no other thread use the cell now; loom fails the test if one does.
        ring.cell.with_mut(|cell| unsafe { *cell = value });
        ring.written.store(value, protocol.store);
    }
    reader.join().unwrap();
}

/// One end goes to sleep while the other moves its count: either the first end sees the count, or the other
/// wakes it.
fn sleep_and_wake(protocol: StreamModel) {
    let count = Arc::new(AtomicU32::new(0));
    let mark = Arc::new(AtomicU32::new(0));
    let (their_count, their_mark) = (count.clone(), mark.clone());
    let fence = move || {
        if protocol.fenced {
            fence(Ordering::SeqCst);
        }
    };
    let mover = thread::spawn(move || {
        their_count.store(1, protocol.store);
        fence();
        their_mark.load(Ordering::Relaxed) != 0 && their_mark.swap(0, Ordering::Relaxed) != 0
    });
    mark.store(1, Ordering::Relaxed);
    fence();
    let stays_awake = protocol.looks_again && count.load(Ordering::Acquire) == 1;
    let is_woken = mover.join().unwrap();
    assert!(stays_awake || is_woken, "it sleeps, and is never woken");
}

/// What a reader takes: a value of the ring, or that of the cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Taken {
    Ring(u32),
    Cell,
}

/// Which word a reader loads first.
#[derive(Clone, Copy)]
enum First {
    Count,
    Cell,
}

/// A writer uses the ring, then the cell, whose position is after one value of the ring, and then the ring
/// again.
fn keep_order(first: First) {
    let written = Arc::new(AtomicU32::new(0));
    let number = Arc::new(AtomicU32::new(0));
    let (their_written, their_number) = (written.clone(), number.clone());
    let writer = thread::spawn(move || {
        their_written.store(1, Ordering::Release);
        their_number.store(1, Ordering::Release);
        their_written.store(2, Ordering::Release);
    });
    let (mut read, mut taken) = (0, Vec::new());
    while taken.len() < 3 {
        let count = || written.load(Ordering::Acquire);
        let cell = || number.load(Ordering::Acquire) == 1;
        let (count, is_there) = match first {
            First::Count => (count(), cell()),
            First::Cell => {
                let is_there = cell();
                (count(), is_there)
            }
        };
        let cell_is_next = is_there && !taken.contains(&Taken::Cell);
        let end = if cell_is_next { read.max(1) } else { count };
        if cell_is_next && read == end {
            taken.push(Taken::Cell);
        } else if read < end {
            taken.extend((read..end).map(Taken::Ring));
            read = end;
        } else {
            thread::yield_now();
        }
    }
    writer.join().unwrap();
    assert_eq!(taken, [Taken::Ring(0), Taken::Cell, Taken::Ring(1)]);
}

#[test]
fn every_order_reads_ring_and_cells_as_they_were_written() {
    let orders = explore(|| keep_order(First::Count));
    assert!(orders > 3, "only {orders} orders were explored");
}

#[test]
fn a_reader_that_looks_at_the_cell_first_is_found_out() {
    assert!(fails(|| keep_order(First::Cell)));
}

#[test]
fn every_order_of_a_writer_and_a_reader_hands_over_what_was_written() {
    let orders = explore(|| hand_over(REAL));
    assert!(orders > 10, "only {orders} orders were explored");
}

#[test]
fn no_order_leaves_a_sleeper_asleep() {
    let orders = explore(|| sleep_and_wake(REAL));
    assert!(orders > 3, "only {orders} orders were explored");
}

#[test]
fn counts_without_release_are_found_out() {
    assert!(fails(|| hand_over(StreamModel {
        store: Ordering::Relaxed,
        ..REAL
    })));
}

#[test]
fn a_missing_fence_is_found_out() {
    assert!(fails(|| sleep_and_wake(StreamModel {
        fenced: false,
        ..REAL
    })));
}

#[test]
fn a_sleeper_that_does_not_look_again_is_found_out() {
    assert!(fails(|| sleep_and_wake(StreamModel {
        looks_again: false,
        ..REAL
    })));
}
