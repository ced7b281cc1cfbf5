//! Checks an operation's words under every order of events that loom explores, and checks that loom detects errors in
//! the memory orderings of these words.

use super::{Op, State, flag};
use crate::handle::{Exact, NoFence, NoRelease, SlotUse, Word, count_orders};
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, AtomicUsize};
use loom::thread;
use rcomm_recorder::record::Ticket;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering::Relaxed;

const fn slot(generation: u32) -> SlotUse {
    SlotUse {
        index: 0,
        generation,
    }
}

const OLD: SlotUse = slot(1);
const NEW: SlotUse = slot(3);
const COMMUNICATOR: SlotUse = slot(5);

fn op<W: Word>(flags: u8) -> Op<W> {
    let op = Op::default();
    op.set(OLD, Ticket::of_words([1, 1, 1]), COMMUNICATOR, (flags, 0));
    op
}

/// An event of the old use comes on another thread while the slot gets a new use, and only the words of the operation
/// order the two. If the event changes the state, the words that it has read are of the old use. Returns how many
/// orders of events loom visited.
fn an_old_event_meets_a_new_use<W: Word + Send + Sync + 'static>() -> usize {
    count_orders(|| {
        let op = Arc::new(op::<W>(0));
        let event = thread::spawn({
            let op = op.clone();
            move || {
                let words = op.ticket().to_words();
                if op.change_open(OLD, State::starts).is_some() {
                    assert_eq!(words, [1, 1, 1], "the ticket of another use");
                }
            }
        });
        op.change_open(OLD, |state| state.with(flag::OVER));
        op.set(NEW, Ticket::of_words([2, 2, 2]), COMMUNICATOR, (0, 0));
        event.join().expect("no panic");
        let state = op.state(NEW).expect("the new use");
        assert_eq!((state.started(), state.has(flag::OVER)), (0, false));
    })
}

#[test]
fn an_event_of_an_earlier_use_changes_nothing_and_never_gets_a_new_ticket() {
    assert!(an_old_event_meets_a_new_use::<Exact>() > 5);
}

/// An event whose handle comes without a memory ordering finds the slot as it was set up, or finds nothing. Returns how
/// many orders of events loom visited.
fn an_event_meets_a_slot_that_is_set_up<W: Word + Send + Sync + 'static>() -> usize {
    count_orders(|| {
        let op = Arc::new(op::<W>(0));
        let event = thread::spawn({
            let op = op.clone();
            move || {
                let words = op.ticket().to_words();
                if op.state(OLD).is_some() {
                    assert_eq!(words, [1, 1, 1], "half of another use");
                } else if op.state(NEW).is_some() {
                    // The state is that of the new use, so each word that is read from here on is of the new use.
                    assert_eq!(op.ticket().to_words(), [2, 2, 2], "half set up");
                }
            }
        });
        op.set(NEW, Ticket::of_words([2, 2, 2]), COMMUNICATOR, (0, 0));
        event.join().expect("no panic");
    })
}

#[test]
fn a_slot_is_seen_as_it_was_or_as_it_is_and_loom_detects_weaker_orderings() {
    assert!(an_event_meets_a_slot_that_is_set_up::<Exact>() > 2);
    let detected = [
        catch_unwind(AssertUnwindSafe(
            an_event_meets_a_slot_that_is_set_up::<NoRelease>,
        )),
        catch_unwind(AssertUnwindSafe(
            an_event_meets_a_slot_that_is_set_up::<NoFence>,
        )),
    ];
    assert!(detected.iter().all(Result::is_err));
}

#[test]
fn of_the_last_channel_and_an_abort_one_ends_an_operation() {
    let visited = count_orders(|| {
        let op = Arc::new(op::<Exact>(flag::PLANNED));
        op.change_open(OLD, |state| state.with_channels(1).starts());
        let ends = Arc::new(AtomicUsize::new(0));
        let abort = thread::spawn({
            let (op, ends) = (op.clone(), ends.clone());
            move || {
                if op
                    .change_open(OLD, |state| state.with(flag::OVER))
                    .is_some()
                {
                    ends.fetch_add(1, Relaxed);
                }
            }
        });
        let ended = op.change_open(OLD, State::finishes);
        if ended.is_some_and(|(_, after)| after.has(flag::OVER)) {
            ends.fetch_add(1, Relaxed);
        }
        abort.join().expect("no panic");
        assert_eq!(ends.load(Relaxed), 1);
    });
    assert!(visited > 1, "{visited}");
}

#[test]
fn the_first_channel_is_the_first_once_and_none_starts_after_an_abort() {
    let visited = count_orders(|| {
        let op = Arc::new(op::<Exact>(0));
        op.plan(OLD, 2, 0, false, || {});
        // One proxy thread reports the channels.
        let proxy = thread::spawn({
            let op = op.clone();
            move || [op.starts(OLD), op.starts(OLD)]
        });
        let aborted = op.change_open(OLD, |state| state.with(flag::OVER));
        assert!(aborted.is_some());
        let starts = proxy.join().expect("no panic");
        assert!([[Some(true), Some(false)], [Some(true), None], [None, None]].contains(&starts));
        assert_eq!(op.starts(OLD), None);
        // The slot's next use has a first channel again.
        op.set(NEW, Ticket::of_words([2, 2, 2]), COMMUNICATOR, (0, 0));
        op.plan(NEW, 2, 0, false, || {});
        assert_eq!([op.starts(OLD), op.starts(NEW)], [None, Some(true)]);
    });
    assert!(visited > 2, "{visited}");
}

#[test]
fn an_operation_whose_plan_comes_as_its_group_call_ends_is_watched() {
    let visited = count_orders(|| {
        let op = Arc::new(op::<Exact>(flag::IN_GROUP));
        // Whether the record states that the operation is no longer watched.
        let retired = Arc::new(AtomicBool::new(false));
        let planner = thread::spawn({
            let (op, retired) = (op.clone(), retired.clone());
            move || op.plan(OLD, 2, 0, false, || retired.store(false, Relaxed))
        });
        let left = op.leave_group(
            OLD,
            || retired.store(true, Relaxed),
            || retired.store(false, Relaxed),
        );
        assert!(left.is_some());
        let planned = planner.join().expect("no panic");
        assert!(planned.is_some());
        let state = op.state(OLD).expect("the same use");
        assert!(state.has(flag::PLANNED) && !state.has(flag::LEFT | flag::IN_GROUP));
        assert!(!retired.load(Relaxed), "planned, and not watched");
    });
    assert!(visited > 2, "{visited}");
}
