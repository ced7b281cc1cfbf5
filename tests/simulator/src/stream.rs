//! Streams and events: a queue of work with a thread, and flags that work sets.
//!
//! Follows the CUDA programming guide: work on one stream runs in order of enqueueing; an event is
//! complete when everything enqueued before its last record is; a wait on an event holds up only what
//! is enqueued on that stream afterwards, and refers to the record that was newest when it was called.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Work on a stream. Runs once, or as often as its graph is launched.
pub(crate) type Work = Arc<dyn Fn() + Send + Sync>;

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a capture has gathered, in order of issue: an order that every stream in it allows.
pub(crate) struct Capture {
    pub(crate) id: u64,
    pub(crate) work: Mutex<Vec<Work>>,
}

impl Capture {
    fn new() -> Arc<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Arc::new(Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            work: Mutex::default(),
        })
    }
}

#[derive(Default)]
struct Queue {
    work: VecDeque<Work>,
    /// Enqueued and not finished.
    pending: usize,
    closed: bool,
    capture: Option<Arc<Capture>>,
}

/// One stream.
#[derive(Default)]
pub struct Stream {
    /// The device of its context, from 1; 0 for the default stream, which is every context's.
    pub(crate) device: i32,
    queue: Mutex<Queue>,
    moved: Condvar,
}

impl Stream {
    pub(crate) fn new(device: i32) -> Arc<Self> {
        let stream = Arc::new(Self {
            device,
            ..Self::default()
        });
        let worker = Arc::clone(&stream);
        let thread = std::thread::Builder::new().name("sim/stream".into());
        // The thread ends when the stream is destroyed and its queue is empty.
        drop(
            thread
                .spawn(move || worker.work())
                .expect("a thread can be started"),
        );
        stream
    }

    fn work(&self) {
        let mut queue = lock(&self.queue);
        loop {
            if let Some(work) = queue.work.pop_front() {
                drop(queue);
                work();
                queue = lock(&self.queue);
                queue.pending -= 1;
                self.moved.notify_all();
            } else if queue.closed {
                return;
            } else {
                queue = self
                    .moved
                    .wait(queue)
                    .unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Enqueues, or adds to the graph that the stream is being captured into.
    pub(crate) fn push(&self, work: Work) {
        let mut queue = lock(&self.queue);
        if let Some(capture) = &queue.capture {
            lock(&capture.work).push(work);
            return;
        }
        queue.work.push_back(work);
        queue.pending += 1;
        self.moved.notify_all();
    }

    pub(crate) fn synchronize(&self) {
        let mut queue = lock(&self.queue);
        while queue.pending > 0 {
            queue = self
                .moved
                .wait(queue)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub(crate) fn close(&self) {
        lock(&self.queue).closed = true;
        self.moved.notify_all();
    }

    pub(crate) fn begin_capture(&self) -> bool {
        let mut queue = lock(&self.queue);
        if queue.capture.is_some() {
            return false;
        }
        queue.capture = Some(Capture::new());
        true
    }

    pub(crate) fn end_capture(&self) -> Option<Arc<Capture>> {
        lock(&self.queue).capture.take()
    }

    pub(crate) fn capture(&self) -> Option<Arc<Capture>> {
        lock(&self.queue).capture.clone()
    }

    /// A wait on an event that was recorded in a capture draws this stream into it.
    pub(crate) fn join_capture(&self, capture: &Arc<Capture>) {
        lock(&self.queue).capture = Some(Arc::clone(capture));
    }
}

#[derive(Default)]
struct Marks {
    recorded: u64,
    completed: u64,
    at: Option<Instant>,
    capture: Option<Arc<Capture>>,
}

/// One event.
#[derive(Default)]
pub struct Event {
    marks: Mutex<Marks>,
    set: Condvar,
    pub(crate) timed: bool,
}

impl Event {
    pub(crate) fn new(timed: bool) -> Arc<Self> {
        Arc::new(Self {
            timed,
            ..Self::default()
        })
    }

    pub(crate) fn record(self: &Arc<Self>, stream: &Stream) {
        let number = {
            let mut marks = lock(&self.marks);
            marks.capture = stream.capture();
            marks.recorded += 1;
            marks.recorded
        };
        let event = Arc::clone(self);
        stream.push(Arc::new(move || {
            let mut marks = lock(&event.marks);
            marks.completed = marks.completed.max(number);
            marks.at = Some(Instant::now());
            event.set.notify_all();
        }));
    }

    /// Holds `stream` up until the newest record is complete.
    pub(crate) fn hold(self: &Arc<Self>, stream: &Stream) {
        let (number, capture) = {
            let marks = lock(&self.marks);
            (marks.recorded, marks.capture.clone())
        };
        if let Some(capture) = capture {
            // Within one graph the order of issue already is the order of running.
            stream.join_capture(&capture);
            return;
        }
        let event = Arc::clone(self);
        stream.push(Arc::new(move || event.wait_for(number)));
    }

    fn wait_for(&self, number: u64) {
        let mut marks = lock(&self.marks);
        while marks.completed < number {
            marks = self.set.wait(marks).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// An event that was never recorded counts as complete (`cuEventQuery`).
    pub(crate) fn is_complete(&self) -> bool {
        let marks = lock(&self.marks);
        marks.completed >= marks.recorded
    }

    /// When it completed.
    pub(crate) fn at(&self) -> Option<Instant> {
        lock(&self.marks).at
    }
}
