//! The outermost group call of a thread: NCCL begins and ends it on the thread that makes the calls in it.

use std::cell::Cell;

/// A thread's group call.
#[derive(Clone, Copy)]
struct GroupCall {
    /// Its number among those of the thread; 0 = there was none.
    number: u32,
    is_open: bool,
    /// The use of the slot of the operation that was issued last; 0 = none.
    first: u64,
}

thread_local! {
    static NEWEST: Cell<GroupCall> = const {
        Cell::new(GroupCall { number: 0, is_open: false, first: 0 })
    };
}

/// Changes the thread's group call. A thread that ends may still make calls after its thread-local variables are gone;
/// they are then in no group call.
#[inline]
fn change<T: Default>(change: impl FnOnce(&mut GroupCall) -> T) -> T {
    let changed = NEWEST.try_with(|newest| {
        let mut group = newest.get();
        let result = change(&mut group);
        newest.set(group);
        result
    });
    changed.unwrap_or_default()
}

/// Begins a group call. Returns the list of one that was not ended, 0 if there is none, and the number of the new one.
#[inline]
pub(crate) fn begin() -> (u64, u32) {
    change(|group| {
        let left = group.first;
        *group = GroupCall {
            number: group.number.wrapping_add(1),
            is_open: true,
            first: 0,
        };
        (left, group.number)
    })
}

/// Whether the thread is in the group call of this number.
#[inline]
pub(crate) fn is_open(number: u32) -> bool {
    change(|group| group.is_open && group.number == number)
}

/// Adds an operation, by the use of its slot, to the list of the thread's group call, and returns the list so far.
#[inline]
pub(crate) fn add(operation: u64) -> u64 {
    change(|group| std::mem::replace(&mut group.first, operation))
}

/// Ends the group call of this number, and returns the list of its operations; 0 if it is empty, or the thread is not
/// in this group call.
#[inline]
pub(crate) fn end(number: u32) -> u64 {
    change(|group| {
        if !group.is_open || group.number != number {
            return 0;
        }
        group.is_open = false;
        std::mem::take(&mut group.first)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_call_belongs_to_its_thread_and_ends_once() {
        let (_, number) = begin();
        assert_eq!((add(7), add(8)), (0, 7));
        let elsewhere = std::thread::spawn(move || (is_open(number), end(number)));
        assert_eq!(elsewhere.join().expect("no panic"), (false, 0));
        assert!(is_open(number));
        assert_eq!((end(number), end(number)), (8, 0));
        assert!(!is_open(number));
        let (_, unended) = begin();
        add(9);
        let (left, next) = begin();
        assert_eq!((left, is_open(unended), is_open(next)), (9, false, true));
    }
}
