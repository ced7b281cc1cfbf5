//! The outermost group call of a thread. NCCL begins and ends a group call on the thread that makes the calls in it.

use crate::handle::SlotUse;
use std::cell::Cell;

/// A thread's newest outermost group call, open or ended. Each field is a cell of its own: a cell of the whole struct
/// would be loaded at once, and that load waits for a store of one field soon before it.
struct GroupCall {
    /// The number of the group call among those of the thread; 0 before the first one.
    number: Cell<u32>,
    is_open: Cell<bool>,
    /// The list of the group call's operations, the newest first: the use of the slot of the operation that was added
    /// last, which leads to the one before; 0 if the list is empty.
    newest: Cell<u64>,
}

thread_local! {
    static NEWEST: GroupCall = const {
        GroupCall { number: Cell::new(0), is_open: Cell::new(false), newest: Cell::new(0) }
    };
}

impl GroupCall {
    fn is_open(&self, number: u32) -> bool {
        self.is_open.get() && self.number.get() == number
    }
}

/// Calls `then` with the thread's group call. A thread that ends may still make calls after its thread-local variables
/// are gone; they are then in no group call.
#[inline]
fn with<T: Default>(then: impl FnOnce(&GroupCall) -> T) -> T {
    NEWEST.try_with(then).unwrap_or_default()
}

/// Begins a group call. Returns the list of operations of a group call that was not ended, 0 if there is none, and the
/// number of the new group call.
#[inline]
pub(crate) fn begin() -> (u64, u32) {
    with(|group| {
        let number = group.number.get().wrapping_add(1);
        group.number.set(number);
        group.is_open.set(true);
        (group.newest.replace(0), number)
    })
}

/// Whether the thread is in the group call of this number.
#[cfg(test)]
fn is_open(number: u32) -> bool {
    with(|group| group.is_open(number))
}

/// Adds the operation whose slot `take` returns to the list of the thread's group call. If the thread is not in the
/// group call of this number, the operation is added to no list, and `take` gets `None` instead of the list so far.
#[inline(always)]
pub(crate) fn add(
    number: Option<u32>,
    take: impl FnOnce(Option<u64>) -> Option<SlotUse>,
) -> Option<SlotUse> {
    let list = with(|group| {
        let is_in = number.is_some_and(|number| group.is_open(number));
        is_in.then(|| group.newest.get())
    });
    let taken = take(list)?;
    if list.is_some() {
        with(|group| group.newest.set(taken.to_word()));
    }
    Some(taken)
}

/// Whether this operation was the last one to be added to the list of the thread's group call.
#[inline]
pub(crate) fn is_last(operation: u64) -> bool {
    with(|group| group.newest.get() == operation)
}

/// Takes the operation that was added last from the list of the thread's group call, which then is `before`.
#[inline]
pub(crate) fn remove_last(before: u64) {
    with(|group| group.newest.set(before));
}

/// Ends the group call of this number, and returns the list of its operations; 0 if it is empty, or the thread is not
/// in this group call.
#[inline]
pub(crate) fn end(number: u32) -> u64 {
    with(|group| {
        if !group.is_open(number) {
            return 0;
        }
        group.is_open.set(false);
        group.newest.replace(0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_call_belongs_to_its_thread_and_ends_once() {
        let use_of = SlotUse::from_word;
        let (_, number) = begin();
        let take = |word, expected| {
            let taken = add(Some(number), |before| {
                assert_eq!(before, expected);
                Some(use_of(word))
            });
            assert_eq!(taken, Some(use_of(word)));
        };
        take(7, Some(0));
        take(6, Some(7));
        // An operation for which there is no slot is not in the list.
        assert_eq!(add(Some(number), |_| None), None);
        assert!(is_last(6) && !is_last(7));
        remove_last(7);
        take(8, Some(7));
        assert_eq!(add(None, |before| before.map(use_of)), None);
        assert_eq!(add(Some(number + 1), |before| before.map(use_of)), None);
        let elsewhere = std::thread::spawn(move || (is_open(number), end(number)));
        assert_eq!(elsewhere.join().expect("no panic"), (false, 0));
        assert!(is_open(number));
        assert_eq!((end(number), end(number)), (8, 0));
        assert!(!is_open(number));
        let (_, unended) = begin();
        add(Some(unended), |_| Some(use_of(9)));
        let (left, next) = begin();
        assert_eq!((left, is_open(unended), is_open(next)), (9, false, true));
    }
}
