//! Runs the job queue in each order of events that loom explores. Another test shows that this model detects a missing
//! wake-up.

use super::JobQueue;
use crate::op::monitor::model::{Model, WakeAll, WakeNone, WakeOne, Wakes, count_orders};

use loom::sync::atomic::{AtomicUsize, Ordering};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// One thread queues a job and ends an earlier hold, while another one waits until the queue has drained. Returns how
/// many orders loom has explored.
fn jobs_are_done_after_drain<W: Wakes + 'static>() -> usize {
    count_orders(|| {
        let queue: Arc<JobQueue<Model<super::QueueState, W>>> = Arc::new(JobQueue::default());
        let done = Arc::new(AtomicUsize::new(0));
        let worker = loom::thread::spawn({
            let queue = queue.clone();
            move || queue.work()
        });
        queue.hold();
        let caller = loom::thread::spawn({
            let (queue, done) = (queue.clone(), done.clone());
            move || {
                queue.push(Box::new(move || {
                    done.fetch_add(1, Ordering::Relaxed);
                }));
                queue.end_one();
            }
        });
        assert!(queue.drain(None));
        assert_eq!(done.load(Ordering::Relaxed), 1, "a job was not done");
        caller.join().expect("the thread panicked");
        queue.close();
        worker.join().expect("the thread panicked");
    })
}

#[test]
fn queued_jobs_are_done_once_before_drain_returns() {
    assert!(jobs_are_done_after_drain::<WakeAll>() > 20);
}

#[test]
fn a_queue_that_wakes_one_thread_or_none_fails_the_model() {
    let one = catch_unwind(AssertUnwindSafe(jobs_are_done_after_drain::<WakeOne>));
    assert!(one.is_err());
    let none = catch_unwind(AssertUnwindSafe(jobs_are_done_after_drain::<WakeNone>));
    assert!(none.is_err());
}

#[test]
fn jobs_that_are_queued_when_the_queue_is_closed_are_done() {
    let orders = count_orders(|| {
        let queue: Arc<JobQueue<Model<super::QueueState>>> = Arc::new(JobQueue::default());
        let done = Arc::new(AtomicUsize::new(0));
        let worker = loom::thread::spawn({
            let queue = queue.clone();
            move || queue.work()
        });
        for _ in 0..2 {
            let done = done.clone();
            queue.push(Box::new(move || {
                done.fetch_add(1, Ordering::Relaxed);
            }));
        }
        queue.close();
        worker.join().expect("the thread panicked");
        assert_eq!(done.load(Ordering::Relaxed), 2);
    });
    assert!(orders > 5, "{orders}");
}
