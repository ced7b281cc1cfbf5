//! Asks many ranks at the same time.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// At most this many ranks are asked at the same time.
const AT_ONCE: usize = 32;

/// Calls `ask` for every item, up to 32 at the same time, and returns the answers in the order of the items.
pub(in crate::live::source) fn ask_all<T: Sync, A: Send>(
    items: &[T],
    ask: impl Fn(&T) -> A + Sync,
) -> Vec<A> {
    let next = AtomicUsize::new(0);
    let answers: Mutex<Vec<(usize, A)>> = Mutex::new(Vec::with_capacity(items.len()));
    let work = || {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(index) else {
                return;
            };
            let answer = ask(item);
            let mut answers = answers.lock().unwrap_or_else(PoisonError::into_inner);
            answers.push((index, answer));
        }
    };
    std::thread::scope(|scope| {
        // This thread is one of the workers, and the only one if no thread can be started.
        for _ in 1..AT_ONCE.min(items.len()) {
            let builder = std::thread::Builder::new().name("rcomm/client".into());
            if builder.spawn_scoped(scope, work).is_err() {
                break;
            }
        }
        work();
    });
    let mut answers = answers.into_inner().unwrap_or_else(PoisonError::into_inner);
    answers.sort_unstable_by_key(|(index, _)| *index);
    answers.into_iter().map(|(_, answer)| answer).collect()
}

/// The state of a rank; `None` while an earlier request to the rank is in progress.
pub(super) fn unless_asked<T>(state: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match state.try_lock() {
        Ok(state) => Some(state),
        Err(TryLockError::Poisoned(state)) => Some(state.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// The reason that is stated for a rank that has not answered this poll.
pub(super) const NO_ANSWER_YET: &str = "it has not answered yet";

/// Polls many ranks repeatedly; a rank that does not answer does not delay the others.
///
/// Once half of the ranks have answered, the others get a quarter of the poll's time, or three times as long as the
/// first half took if this is longer, but never past the deadline. A later answer is kept for the next poll.
///
/// The thread that waits for an answer ends by the deadline of its poll. It is not joined: a program that has its
/// verdict must not keep running because of a rank that is frozen.
pub(super) struct RankPoller<A> {
    /// Answers that came after their poll was over.
    late: Arc<Mutex<Vec<A>>>,
}

/// The answers of one poll.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Answers<A> {
    /// Answers that were too late for an earlier poll, then those of this one in the order of its items.
    pub(super) answers: Vec<A>,
    /// The indices of items without an answer yet, ascending.
    pub(super) missing: Vec<usize>,
}

/// One poll, shared with its threads.
struct Round<T, A> {
    items: Vec<T>,
    next: AtomicUsize,
    progress: Mutex<RoundProgress<A>>,
    /// Notified at each answer.
    answered: Condvar,
    late: Arc<Mutex<Vec<A>>>,
}

struct RoundProgress<A> {
    answers: Vec<Option<A>>,
    answered: usize,
    is_over: bool,
}

impl<A: Send + 'static> RankPoller<A> {
    pub(super) fn new() -> Self {
        Self {
            late: Arc::default(),
        }
    }

    /// Calls `ask` for the items and waits for the answers, at most until `deadline`, by which `ask` must return. An
    /// item whose turn does not come in that time is not asked.
    pub(super) fn ask<T: Send + Sync + 'static>(
        &mut self,
        items: Vec<T>,
        deadline: Instant,
        ask: impl Fn(&T) -> A + Send + Sync + 'static,
    ) -> Answers<A> {
        let mut late = self.late.lock().unwrap_or_else(PoisonError::into_inner);
        let mut answers = std::mem::take(&mut *late);
        drop(late);
        let round = Arc::new(Round {
            progress: Mutex::new(RoundProgress {
                answers: items.iter().map(|_| None).collect(),
                answered: 0,
                is_over: false,
            }),
            items,
            next: AtomicUsize::new(0),
            answered: Condvar::new(),
            late: self.late.clone(),
        });
        let ask = Arc::new(ask);
        for number in 0..AT_ONCE.min(round.items.len()) {
            let (shared, question) = (round.clone(), ask.clone());
            let builder = std::thread::Builder::new().name("rcomm/client".into());
            match builder.spawn(move || shared.work(&*question)) {
                Ok(_) => {}
                // If no thread can be started, this one does the work.
                Err(_) if number == 0 => round.work(&*ask),
                Err(_) => break,
            }
        }
        let found = round.wait(deadline);
        let missing = (0..).zip(&found).filter(|(_, answer)| answer.is_none());
        let missing = missing.map(|(index, _)| index).collect();
        answers.extend(found.into_iter().flatten());
        Answers { answers, missing }
    }
}

impl<T, A> Round<T, A> {
    fn progress(&self) -> MutexGuard<'_, RoundProgress<A>> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks for one item after the other, until none is left or the poll is over.
    fn work(&self, ask: &impl Fn(&T) -> A) {
        while !self.progress().is_over {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = self.items.get(index) else {
                return;
            };
            let answer = ask(item);
            let mut progress = self.progress();
            if progress.is_over {
                let mut late = self.late.lock().unwrap_or_else(PoisonError::into_inner);
                late.push(answer);
                return;
            }
            progress.answers[index] = Some(answer);
            progress.answered += 1;
            self.answered.notify_all();
        }
    }

    /// Waits until all have answered or the time of the others is over, and returns the answers.
    fn wait(&self, deadline: Instant) -> Vec<Option<A>> {
        let begin = Instant::now();
        let grace = deadline.saturating_duration_since(begin) / 4;
        let mut end = deadline;
        let mut progress = self.progress();
        while progress.answered < progress.answers.len() {
            let now = Instant::now();
            if end == deadline && 2 * progress.answered >= progress.answers.len() {
                end = deadline.min(now + grace.max(3 * (now - begin)));
            }
            let left = end.saturating_duration_since(now);
            if left == Duration::ZERO {
                break;
            }
            let woken = self.answered.wait_timeout(progress, left);
            progress = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
        progress.is_over = true;
        std::mem::take(&mut progress.answers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, channel};

    #[test]
    fn answers_are_in_the_order_of_the_items() {
        let items: Vec<usize> = (0..200).collect();
        let doubled: Vec<usize> = items.iter().map(|item| item * 2).collect();
        assert_eq!(ask_all(&items, |item| item * 2), doubled);
        assert!(ask_all(&[] as &[usize], |item| *item).is_empty());
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut poller = RankPoller::new();
        let polled = poller.ask(items, deadline, |item| item * 2);
        assert_eq!(polled.answers, doubled);
        assert_eq!(polled.missing, Vec::<usize>::new());
        assert!(
            poller
                .ask(Vec::<usize>::new(), deadline, |_| 0)
                .answers
                .is_empty()
        );
    }

    #[test]
    fn a_rank_that_does_not_answer_delays_no_other_and_its_answer_is_kept() {
        let (release, held) = channel::<()>();
        let held: Arc<Mutex<Receiver<()>>> = Arc::new(Mutex::new(held));
        let begin = Instant::now();
        let limit = Duration::from_secs(3_600);
        let mut poller = RankPoller::new();
        let frozen = held.clone();
        // The poll waits a quarter of its time for this rank, so its time is short.
        let short = begin + Duration::from_secs(4);
        let polled = poller.ask(vec![0, 1, 2], short, move |&rank| {
            if rank == 1 {
                let held = frozen.lock().expect("no thread panics");
                // Rank 1 continues when it is released, or when a failed assertion drops the sender.
                let _ = held.recv_timeout(limit);
            }
            rank
        });
        assert_eq!((polled.answers, polled.missing), (vec![0, 2], vec![1]));
        release.send(()).expect("rank 1 waits for its release");
        // The answer of rank 1 arrives with a later poll.
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let polled = poller.ask(vec![0, 2], deadline, |&rank| rank);
            if polled.answers == [1, 0, 2] {
                break;
            }
            assert_eq!(polled.answers, [0, 2]);
            assert!(Instant::now() < deadline, "the late answer is lost");
        }
    }

    #[test]
    fn a_poller_whose_rank_does_not_answer_can_be_dropped() {
        let (release, held) = channel::<()>();
        let held = Mutex::new(held);
        let mut poller = RankPoller::new();
        let short = Instant::now() + Duration::from_secs(1);
        let polled = poller.ask(vec![0], short, move |rank| {
            let held = held.lock().expect("no thread panics");
            let _ = held.recv();
            *rank
        });
        assert_eq!((polled.answers, polled.missing), (vec![], vec![0]));
        let (dropped, is_dropped) = channel();
        let dropping = std::thread::spawn(move || {
            drop(poller);
            let _ = dropped.send(());
        });
        is_dropped
            .recv_timeout(Duration::from_secs(60))
            .expect("the drop waits for no answer");
        release.send(()).expect("the rank waits for its release");
        dropping.join().expect("no thread panics");
    }
}
