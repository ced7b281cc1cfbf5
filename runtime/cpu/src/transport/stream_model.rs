//! Model checking of the counts and marks of a stream, by loom: every order of steps of a writer and a reader with at
//! most four preemptions.
//!
//! The model is one direction of a [stream](super::shm) that holds one value. It fails if a cell is written while it
//! is read, if a value is not the next one, if ring and cells are not read in the order in which they were written, or
//! if a sleeper is never woken. Variants without a step on which the
//! protocol relies must fail: otherwise the model would prove nothing.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU32, Ordering, fence};
use loom::thread;
use std::sync::atomic::AtomicUsize;

/// Number of values that the writer passes to the reader.
const VALUES: u32 = 2;

/// The protocol, or a variant of it.
#[derive(Clone, Copy)]
struct StreamModel {
    /// The ordering with which counts are stored.
    store: Ordering,
    /// Whether there is a fence between a count and the load of a mark, and between a mark and the load of
    /// a count.
    has_fences: bool,
    /// Whether a sleeper checks once more after it has set its mark.
    checks_again: bool,
}

const REAL: StreamModel = StreamModel {
    store: Ordering::Release,
    has_fences: true,
    checks_again: true,
};

/// Runs every order of steps with at most four preemptions; returns the number of orders.
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

/// Whether some order of steps fails the model.
fn fails(run: impl Fn() + Send + Sync + 'static + std::panic::UnwindSafe) -> bool {
    std::panic::catch_unwind(|| explore(run)).is_err()
}

/// A ring with space for one value.
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

/// A writer passes values to a reader.
fn pass_values(protocol: StreamModel) {
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

/// One end goes to sleep while the other increases its count: either the first end sees the count, or the other end
/// wakes it.
fn sleep_and_wake(protocol: StreamModel) {
    let count = Arc::new(AtomicU32::new(0));
    let mark = Arc::new(AtomicU32::new(0));
    let (their_count, their_mark) = (count.clone(), mark.clone());
    let fence = move || {
        if protocol.has_fences {
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
    let stays_awake = protocol.checks_again && count.load(Ordering::Acquire) == 1;
    let is_woken = mover.join().unwrap();
    assert!(stays_awake || is_woken, "the sleeper is never woken");
}

/// A value that the reader takes: from the ring, or from the cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Taken {
    Ring(u32),
    Cell,
}

/// The word that a reader loads first.
#[derive(Clone, Copy)]
enum First {
    Count,
    Cell,
}

/// A writer writes to the ring, then to the cell, whose position is after one value of the ring, and then to the ring
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
fn in_every_order_ring_and_cells_are_read_as_they_were_written() {
    let orders = explore(|| keep_order(First::Count));
    assert!(orders > 3, "only {orders} orders were explored");
}

#[test]
fn a_reader_that_checks_the_cell_first_fails_the_model() {
    assert!(fails(|| keep_order(First::Cell)));
}

#[test]
fn in_every_order_the_reader_gets_the_values_of_the_writer() {
    let orders = explore(|| pass_values(REAL));
    assert!(orders > 10, "only {orders} orders were explored");
}

#[test]
fn in_every_order_a_sleeper_is_woken() {
    let orders = explore(|| sleep_and_wake(REAL));
    assert!(orders > 3, "only {orders} orders were explored");
}

#[test]
fn counts_without_release_fail_the_model() {
    assert!(fails(|| pass_values(StreamModel {
        store: Ordering::Relaxed,
        ..REAL
    })));
}

#[test]
fn a_missing_fence_fails_the_model() {
    assert!(fails(|| sleep_and_wake(StreamModel {
        has_fences: false,
        ..REAL
    })));
}

#[test]
fn a_sleeper_that_does_not_check_again_fails_the_model() {
    assert!(fails(|| sleep_and_wake(StreamModel {
        checks_again: false,
        ..REAL
    })));
}
