//! Checks the ring's protocol under every order of events that loom explores, and checks that weakened memories
//! (mutants) are detected.
//!
//! The mutants show that the model detects errors. The asserted counts show that it explored enough orders: with the
//! writer in the spawned thread, for example, loom visits only one or two orders and proves nothing.

use super::ring::*;
use super::sync::{Memory, Word};
use loom::sync::Arc;
use loom::sync::atomic::AtomicU64;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Which of the requested orderings the memory honors.
#[derive(Clone, Copy, PartialEq)]
enum Honor {
    All,
    /// Fences of this order do nothing.
    NoFence(Ordering),
    /// A release store is a relaxed one.
    NoRelease,
}

struct ModelWord(AtomicU64, Honor);

impl Word for ModelWord {
    fn load(&self, order: Ordering) -> u64 {
        self.0.load(order)
    }

    fn store(&self, value: u64, order: Ordering) {
        let order = match self.1 {
            Honor::NoRelease => Ordering::Relaxed,
            _ => order,
        };
        self.0.store(value, order);
    }

    fn compare_exchange(
        &self,
        current: u64,
        new: u64,
        success: Ordering,
        failure: Ordering,
    ) -> Result<u64, u64> {
        self.0.compare_exchange(current, new, success, failure)
    }

    fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
        self.0.fetch_add(value, order)
    }
}

struct ModelMemory {
    words: Vec<ModelWord>,
    honor: Honor,
}

impl ModelMemory {
    fn new(words: usize, honor: Honor) -> Arc<Self> {
        let word = |_| ModelWord(AtomicU64::new(0), honor);
        Arc::new(Self {
            words: (0..words).map(word).collect(),
            honor,
        })
    }
}

impl Memory for ModelMemory {
    type Word = ModelWord;
    const TRIES: u32 = 2;

    fn words(&self) -> &[ModelWord] {
        &self.words
    }

    fn fence(&self, order: Ordering) {
        if self.honor != Honor::NoFence(order) {
            loom::sync::atomic::fence(order);
        }
    }
}

/// Runs every order and returns how many there were.
fn explore(run: impl Fn() + Sync + Send + 'static) -> usize {
    let orders = std::sync::Arc::new(AtomicUsize::new(0));
    let count = orders.clone();
    loom::model(move || {
        count.fetch_add(1, Ordering::Relaxed);
        run();
    });
    orders.load(Ordering::Relaxed)
}

/// Whether a run fails in one of its orders.
fn is_detected(run: impl Fn() + Sync + Send + 'static) -> bool {
    catch_unwind(AssertUnwindSafe(|| explore(run))).is_err()
}

fn slot() -> SlotRing<3> {
    SlotRing::new(0, 1)
}

fn put(memory: &ModelMemory, id: u64) {
    let _ = slot().write(memory, id, |slot| {
        slot[1].store(id, Ordering::Relaxed);
        slot[2].store(id, Ordering::Relaxed);
    });
}

fn put_alone(memory: &ModelMemory, id: u64) {
    let _ = slot().write_alone(memory, id, |slot| {
        slot[1].store(id, Ordering::Relaxed);
        slot[2].store(id, Ordering::Relaxed);
    });
}

fn add_ten_to(slot: &[ModelWord; 3]) {
    for word in &slot[1..] {
        word.store(word.load(Ordering::Relaxed) + 10, Ordering::Relaxed);
    }
}

fn add_ten(memory: &ModelMemory, id: u64) {
    let _ = slot().update(memory, id, add_ten_to);
}

fn add_ten_alone(memory: &ModelMemory, id: u64) {
    let _ = slot().update_alone(memory, id, add_ten_to);
}

/// Fails if the words are not those of one record.
fn check(found: Found<3>) {
    if let Found::Record { id, words } = found {
        assert_eq!(words[1], words[2], "torn");
        assert_eq!(words[1] % 10, id, "words of another record");
    }
}

/// Runs a reader concurrently with a writer, which writes record 1 and then does one of [`ACTIONS`].
fn one_writer(honor: Honor, action: fn(&ModelMemory)) -> impl Fn() {
    move || {
        let memory = ModelMemory::new(3, honor);
        let reader = loom::thread::spawn({
            let memory = memory.clone();
            move || check(slot().read(&*memory, 0, 1))
        });
        put(&memory, 1);
        action(&memory);
        reader.join().unwrap();
    }
}

/// The actions of a writer on a slot that contains a record.
const ACTIONS: [fn(&ModelMemory); 4] = [
    |memory| add_ten(memory, 1),
    |memory| add_ten_alone(memory, 1),
    |memory| put(memory, 2),
    |memory| put_alone(memory, 2),
];

#[test]
fn reader_never_sees_a_torn_slot() {
    for action in ACTIONS {
        let orders = explore(one_writer(Honor::All, action));
        println!("{orders} orders");
        assert!(orders > 500, "only {orders} orders were explored");
    }
}

#[test]
fn a_claim_without_a_fence_is_detected() {
    for action in ACTIONS {
        let mutant = Honor::NoFence(Ordering::Release);
        assert!(is_detected(one_writer(mutant, action)));
    }
}

#[test]
fn a_reader_without_fences_is_detected() {
    for action in ACTIONS {
        let mutant = Honor::NoFence(Ordering::Acquire);
        assert!(is_detected(one_writer(mutant, action)));
    }
}

#[test]
fn a_slot_published_without_release_is_detected() {
    for action in ACTIONS {
        assert!(is_detected(one_writer(Honor::NoRelease, action)));
    }
}

/// A late update and a newer record compete for one slot; afterwards the slot holds one whole record.
#[test]
fn two_writers_never_mix_in_one_slot() {
    let orders = explore(|| {
        let memory = ModelMemory::new(3, Honor::All);
        put(&memory, 1);
        let late = loom::thread::spawn({
            let memory = memory.clone();
            move || add_ten(&memory, 1)
        });
        put(&memory, 2);
        late.join().unwrap();
        let found = slot().read(&*memory, 0, 1);
        assert!(matches!(found, Found::Record { .. }), "{found:?}");
        check(found);
    });
    println!("{orders} orders");
    assert!(orders > 10, "only {orders} orders were explored");
}

/// A reader copies the record whose words a writer is about to overwrite.
fn lapping(honor: Honor) -> impl Fn() {
    move || {
        let ring = LapRing::new(0, 1, 16);
        let memory = ModelMemory::new(17, honor);
        let put = |memory: &ModelMemory, value| {
            ring.write(memory, 2, |push| {
                push(value);
                push(value);
            })
        };
        for value in 1..=8 {
            put(&memory, value);
        }
        let reader = loom::thread::spawn({
            let memory = memory.clone();
            move || {
                if let Some(words) = ring.read(&*memory, 0, 2) {
                    assert_eq!(words, [1, 1], "overwritten words were returned");
                }
            }
        });
        put(&memory, 9);
        reader.join().unwrap();
    }
}

#[test]
fn lapped_words_are_never_returned() {
    let orders = explore(lapping(Honor::All));
    println!("{orders} orders");
    assert!(orders > 10, "only {orders} orders were explored");
}

#[test]
fn a_lap_ring_without_either_fence_is_detected() {
    assert!(is_detected(lapping(Honor::NoFence(Ordering::Release))));
    assert!(is_detected(lapping(Honor::NoFence(Ordering::Acquire))));
}
