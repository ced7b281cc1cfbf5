//! Streams and events. A stream is a queue of work with a thread; an event is a flag that work sets.
//!
//! Follows the CUDA programming guide ("Streams", "Events"): work on one stream runs in order of
//! enqueueing; an event is complete when everything enqueued before its last record is; a wait on an event
//! holds up only what is enqueued on that stream afterwards, and refers to the record that was newest at the call of
//! the wait. What capturing changes is in `capture`.

use crate::capture::{Capture, Member, Seen};
use std::collections::VecDeque;
use std::ffi::{c_int, c_uint};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Work on a stream. It runs once, or as often as its graph is launched.
pub(crate) type Work = Arc<dyn Fn() + Send + Sync>;

/// Locks the mutex, even if a thread has panicked while it held the lock.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Default)]
struct Queue {
    work: VecDeque<Work>,
    /// Number of calls of [`Stream::push`] whose work has not ended.
    pending: usize,
    closed: bool,
    capture: Option<Member>,
}

/// One stream.
#[derive(Default)]
pub struct Stream {
    /// The device of the stream's context, from 1; 0 for the default stream, which belongs to every context.
    pub(crate) device: i32,
    /// The priority with which the stream was made.
    pub(crate) priority: c_int,
    /// The flags with which the stream was made.
    pub(crate) flags: c_uint,
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl Stream {
    pub(crate) fn new(device: i32, priority: c_int, flags: c_uint) -> Arc<Self> {
        let stream = Arc::new(Self {
            device,
            priority,
            flags,
            ..Self::default()
        });
        let worker = Arc::clone(&stream);
        let thread = std::thread::Builder::new().name("sim/stream".into());
        // The thread ends when the stream is destroyed and its queue is empty.
        drop(
            thread
                .spawn(move || worker.run_queue())
                .expect("a thread can be started"),
        );
        stream
    }

    /// A key that is unique among live streams.
    pub(crate) fn key(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// Runs the work in order, until the stream is closed and its queue is empty.
    fn run_queue(&self) {
        let mut queue = lock(&self.queue);
        loop {
            if let Some(work) = queue.work.pop_front() {
                drop(queue);
                work();
                // What the work holds is dropped before waiters see that it has ended.
                drop(work);
                queue = lock(&self.queue);
                queue.pending -= 1;
                self.changed.notify_all();
            } else if queue.closed {
                return;
            } else {
                queue = self
                    .changed
                    .wait(queue)
                    .unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    /// Enqueues work, or adds it to the graph into which the stream is being captured.
    pub(crate) fn push(&self, work: Work) {
        let mut queue = lock(&self.queue);
        if let Some(member) = &mut queue.capture {
            member.push(self.key(), work);
            return;
        }
        queue.work.push_back(work);
        queue.pending += 1;
        self.changed.notify_all();
    }

    /// Waits until the enqueued work has ended.
    pub(crate) fn synchronize(&self) {
        let mut queue = lock(&self.queue);
        while queue.pending > 0 {
            queue = self
                .changed
                .wait(queue)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub(crate) fn is_idle(&self) -> bool {
        lock(&self.queue).pending == 0
    }

    /// Ends the stream's thread once the queue is empty.
    pub(crate) fn close(&self) {
        lock(&self.queue).closed = true;
        self.changed.notify_all();
    }

    /// The capture that the stream belongs to, if any.
    pub(crate) fn capture(&self) -> Option<Arc<Capture>> {
        let queue = lock(&self.queue);
        queue.capture.as_ref().map(|member| member.capture.clone())
    }

    /// The stream's `CUstreamCaptureStatus`.
    pub(crate) fn capture_status(&self) -> c_int {
        self.capture().map_or(0, |capture| capture.status())
    }

    /// The stream's capture, and how much of the capture precedes the stream's next work.
    pub(crate) fn seen(&self) -> Option<(Arc<Capture>, Seen)> {
        let queue = lock(&self.queue);
        let member = queue.capture.as_ref()?;
        Some((member.capture.clone(), member.seen.clone()))
    }

    /// Makes the stream part of a capture; the work in `seen` precedes its next work.
    pub(crate) fn join(self: &Arc<Self>, capture: &Arc<Capture>, seen: &Seen) {
        let mut queue = lock(&self.queue);
        let member = queue.capture.get_or_insert_with(|| {
            capture.admit(self);
            Member {
                capture: capture.clone(),
                seen: Seen::new(),
            }
        });
        for (&stream, &count) in seen {
            let known = member.seen.entry(stream).or_default();
            *known = (*known).max(count);
        }
    }

    pub(crate) fn leave_capture(&self) {
        lock(&self.queue).capture = None;
    }
}

#[derive(Default)]
struct Marks {
    /// The number of records so far, outside of captures.
    recorded: u64,
    /// The number of the newest record that is complete.
    completed: u64,
    /// When a record last completed; `None` if none has.
    completed_at: Option<Instant>,
    /// The capture in which the newest record was made, and what its stream had seen by then; `None` outside a capture.
    captured: Option<(Arc<Capture>, Seen)>,
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

    /// Records the event on a stream. In a capture, this only marks a position in the graph.
    pub(crate) fn record(self: &Arc<Self>, stream: &Stream) {
        let captured = stream.seen();
        let number = {
            let mut marks = lock(&self.marks);
            marks.captured = captured;
            if marks.captured.is_some() {
                return;
            }
            marks.recorded += 1;
            marks.recorded
        };
        let event = Arc::clone(self);
        stream.push(Arc::new(move || {
            let mut marks = lock(&event.marks);
            marks.completed = marks.completed.max(number);
            marks.completed_at = Some(Instant::now());
            event.set.notify_all();
        }));
    }

    /// The capture that the event's newest record belongs to, with what the stream had seen by then.
    pub(crate) fn captured(&self) -> Option<(Arc<Capture>, Seen)> {
        lock(&self.marks).captured.clone()
    }

    /// Whether the event was ever recorded outside a capture.
    pub(crate) fn was_recorded(&self) -> bool {
        lock(&self.marks).recorded > 0
    }

    /// Makes work that is enqueued on `stream` from now on wait until the newest record is complete.
    pub(crate) fn hold(self: &Arc<Self>, stream: &Stream) {
        let number = lock(&self.marks).recorded;
        let event = Arc::clone(self);
        stream.push(Arc::new(move || event.wait_for(number)));
    }

    fn wait_for(&self, number: u64) {
        let mut marks = lock(&self.marks);
        while marks.completed < number {
            marks = self.set.wait(marks).unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub(crate) fn synchronize(&self) {
        let number = lock(&self.marks).recorded;
        self.wait_for(number);
    }

    /// Whether the event's newest record is complete; true for an event that was never recorded (`cuEventQuery`).
    pub(crate) fn is_complete(&self) -> bool {
        let marks = lock(&self.marks);
        marks.completed >= marks.recorded
    }

    /// When a record of the event last completed; `None` if none has.
    pub(crate) fn completed_at(&self) -> Option<Instant> {
        lock(&self.marks).completed_at
    }
}
