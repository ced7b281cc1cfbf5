//! Issued operations: their order, the threads that run them, and their handles.

use super::group::CpuGroup;
use crate::mesh::links::LONG_WAIT;
use crate::p2p::{self, Request};
use crate::wait::{Failure, Interrupted, Pause, WaitPolicy};
use rcomm_core::Deadline;
use rcomm_core::Op;
use rcomm_core::backend::{Call, Done, Observer, Pending, Progress};
use rcomm_core::{Error, ErrorKind, Result};
use rustix::event::EventfdFlags;
use std::any::Any;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The state of an issued operation, which its thread and the caller's handle share.
pub(crate) struct Issued {
    state: Mutex<State>,
    ended: Condvar,
    /// The observer is dropped when the operation ends, since it holds a reference to this operation.
    observer: Mutex<Option<Arc<dyn Observer>>>,
}

struct State {
    progress: Progress,
    /// The operation with its buffers, from its end until it is reclaimed.
    op: Option<Op<'static>>,
    /// Number of threads that sleep until the operation ends. Without any, the wake-up, a system call, is skipped.
    sleepers: usize,
}

impl Issued {
    fn new(observer: Arc<dyn Observer>) -> Self {
        Self {
            state: Mutex::new(State {
                progress: Progress::Queued,
                op: None,
                sleepers: 0,
            }),
            ended: Condvar::new(),
            observer: Mutex::new(Some(observer)),
        }
    }

    /// A new operation. It uses the memory of `former` if nothing else refers to that memory.
    fn reusing(former: Option<Arc<Self>>, observer: Arc<dyn Observer>) -> Arc<Self> {
        let new = Self::new(observer);
        if let Some(mut former) = former
            && let Some(memory) = Arc::get_mut(&mut former)
        {
            *memory = new;
            return former;
        }
        Arc::new(new)
    }

    fn start(&self) {
        lock(&self.state).progress = Progress::Started;
        let observer = lock(&self.observer).clone();
        if let Some(observer) = observer {
            observer.started();
        }
    }

    fn end(&self, op: Op<'static>, result: Result<Done>) {
        let mut state = lock(&self.state);
        state.progress = match result {
            Ok(done) => Progress::Completed(done),
            Err(error) => Progress::Failed(error),
        };
        state.op = Some(op);
        let is_awaited = state.sleepers > 0;
        drop(state);
        if is_awaited {
            self.ended.notify_all();
        }
        let observer = lock(&self.observer).take();
        if let Some(observer) = observer {
            observer.ended();
        }
    }
}

impl Pending for Issued {
    fn progress(&self) -> Progress {
        lock(&self.state).progress.clone()
    }

    fn wait(&self, deadline: Deadline) -> Progress {
        let deadline = deadline.started();
        let mut state = lock(&self.state);
        loop {
            let left = deadline.remaining();
            if state.progress.has_ended() || left.is_zero() {
                return state.progress.clone();
            }
            state.sleepers += 1;
            let waited = self.ended.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            state.sleepers -= 1;
        }
    }

    fn reclaim(&self) -> Option<Op<'static>> {
        lock(&self.state).op.take()
    }

    fn into_any(self: Arc<Self>) -> Option<Arc<dyn Any + Send + Sync>> {
        Some(self)
    }
}

/// One issued operation that has not ended.
struct Task {
    op: Op<'static>,
    call: Call,
    /// The messages of sends and receives; empty for a collective.
    requests: Vec<Request>,
    issued: Arc<Issued>,
    /// When the task was issued, see [`CpuGroup::begin_message`].
    began: u64,
}

/// A thread of a group and the queue of its operations. The thread starts with the first operation that is issued.
pub(crate) struct Executor {
    kind: ExecutorKind,
    shared: Arc<ExecutorState>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// The kind of operations that a thread runs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExecutorKind {
    /// Collectives, one after the other.
    Collective,
    /// Sends and receives, all at the same time.
    P2p,
}

/// What an executor's thread shares with the threads that issue operations.
struct ExecutorState {
    queue: Mutex<Queue>,
    /// Number of operations that were issued, plus the number of calls of [`Executor::close`]. A polling thread watches
    /// this number.
    issued: AtomicU64,
    /// Notified for the thread that waits for tasks.
    task_queued: Condvar,
    /// Notified when all tasks have ended.
    drained: Condvar,
    /// An eventfd that wakes the thread of sends and receives while it sleeps on sockets; set before that thread
    /// starts.
    wake: OnceLock<OwnedFd>,
}

#[derive(Default)]
struct Queue {
    /// The operations that the thread has not taken yet.
    tasks: VecDeque<Task>,
    /// Number of operations that were issued and have not ended.
    open: usize,
    is_closed: bool,
    /// Number of threads that wait until no operation is open.
    draining: usize,
    /// How the thread sleeps; `None` if it is awake, so that the system call of a wake-up is saved.
    asleep: Option<Sleep>,
}

/// What wakes a sleeping thread.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Sleep {
    /// The condition variable `task_queued`.
    Condvar,
    /// Sockets, and the eventfd `wake`.
    Sockets,
}

impl Executor {
    /// Makes the queue; the thread starts later.
    pub(crate) fn new(kind: ExecutorKind) -> Self {
        Self {
            kind,
            shared: Arc::new(ExecutorState {
                queue: Mutex::default(),
                issued: AtomicU64::new(0),
                task_queued: Condvar::new(),
                drained: Condvar::new(),
                wake: OnceLock::new(),
            }),
            thread: Mutex::new(None),
        }
    }

    /// Queues an operation for the thread, which is started if it does not run yet. `former` is an operation that has
    /// ended; its memory is used if nothing else refers to that memory.
    ///
    /// # Errors
    /// `Closed` after [`close`](Self::close); `Io` if the thread cannot be started, or if it needs an eventfd and the
    /// process has no free file descriptors; for a message also those of [`CpuGroup::refuse_late_message`].
    pub(crate) fn issue(
        &self,
        group: &Arc<CpuGroup>,
        op: Op<'static>,
        call: Call,
        observer: Arc<dyn Observer>,
        former: Option<Arc<Issued>>,
    ) -> Result<Arc<dyn Pending>> {
        self.start(group)?;
        if self.kind == ExecutorKind::P2p {
            group.refuse_late_message(&op)?;
        }
        let mut requests = Vec::new();
        let mut queue = lock(&self.shared.queue);
        if queue.is_closed {
            return Err(closed());
        }
        if self.kind == ExecutorKind::P2p {
            group.p2p.post(&op, &mut requests);
        }
        let issued = Issued::reusing(former, observer);
        queue.open += 1;
        queue.tasks.push_back(Task {
            op,
            call: Call {
                deadline: call.deadline.started(),
                ..call
            },
            requests,
            issued: issued.clone(),
            began: group.begin_message(),
        });
        self.shared.issued.fetch_add(1, Ordering::Release);
        self.shared.wake(queue);
        Ok(issued)
    }

    /// Starts the thread, unless it was started before.
    fn start(&self, group: &Arc<CpuGroup>) -> Result<()> {
        let mut thread = lock(&self.thread);
        if thread.is_some() {
            return Ok(());
        }
        if lock(&self.shared.queue).is_closed {
            return Err(closed());
        }
        let (shared, kind) = (self.shared.clone(), self.kind);
        if kind == ExecutorKind::P2p && shared.wake.get().is_none() {
            let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
            let wake = rustix::event::eventfd(0, flags)
                .map_err(|error| Error::io("cannot prepare a group's thread", error))?;
            // The lock on `thread` is held, so nothing else sets it.
            let _ = shared.wake.set(wake);
        }
        let group = group.clone();
        let name = match kind {
            ExecutorKind::Collective => format!("rcomm/cpu/{}", group.name),
            ExecutorKind::P2p => format!("rcomm/p2p/{}", group.name),
        };
        let started = std::thread::Builder::new()
            .name(name)
            .spawn(move || match kind {
                ExecutorKind::Collective => run_collectives(&shared, &group),
                ExecutorKind::P2p => run_p2p(&shared, &group),
            });
        let started = started.map_err(|error| Error::io("cannot start a group's thread", error));
        *thread = Some(started?);
        Ok(())
    }

    /// Waits until all issued operations have ended; returns whether they have ended before the deadline.
    pub(crate) fn drain(&self, deadline: Deadline) -> bool {
        let deadline = deadline.started();
        let mut queue = lock(&self.shared.queue);
        while queue.open > 0 {
            let left = deadline.remaining();
            if left.is_zero() {
                return false;
            }
            queue.draining += 1;
            let waited = self.shared.drained.wait_timeout(queue, left);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
            queue.draining -= 1;
        }
        true
    }

    /// Refuses further operations, and joins the thread, which ends once all issued operations have ended. The thread
    /// itself may call this, since it may drop the last reference to the group: then it is not joined.
    pub(crate) fn close(&self) {
        let mut queue = lock(&self.shared.queue);
        queue.is_closed = true;
        self.shared.issued.fetch_add(1, Ordering::Release);
        self.shared.wake(queue);
        let thread = lock(&self.thread).take();
        if let Some(thread) =
            thread.filter(|handle| handle.thread().id() != std::thread::current().id())
        {
            // A panic in the thread was already reported where it happened.
            let _ = thread.join();
        }
    }
}

impl ExecutorState {
    /// Ends an operation, and notifies the threads that wait until none is open.
    fn end(&self, task: Task, result: Result<Done>) {
        task.issued.end(task.op, result);
        let mut queue = lock(&self.queue);
        queue.open -= 1;
        if queue.open == 0 && queue.draining > 0 {
            self.drained.notify_all();
        }
    }

    /// Wakes the thread if it sleeps.
    fn wake(&self, mut queue: MutexGuard<'_, Queue>) {
        let asleep = queue.asleep.take();
        drop(queue);
        match asleep {
            None => {}
            Some(Sleep::Condvar) => self.task_queued.notify_all(),
            Some(Sleep::Sockets) => {
                // Only a full counter refuses the write, and then the thread is already awake.
                if let Some(wake) = self.wake.get() {
                    let _ = rustix::io::write(wake, &1u64.to_ne_bytes());
                }
            }
        }
    }

    /// Waits until there is a task, or the queue is closed. A caller that has just issued a task is likely
    /// to issue another, so the thread polls for a while before it sleeps.
    fn wait_for_tasks(&self, policy: &mut WaitPolicy<'_>) -> MutexGuard<'_, Queue> {
        policy.refresh();
        loop {
            let before = self.issued.load(Ordering::Acquire);
            let mut queue = lock(&self.queue);
            if !queue.tasks.is_empty() || queue.is_closed {
                return queue;
            }
            drop(queue);
            while self.issued.load(Ordering::Acquire) == before {
                // A stop ends the tasks, but not this thread: only `close` ends it.
                if matches!(policy.pause(), Ok(Pause::Poll)) {
                    continue;
                }
                queue = lock(&self.queue);
                while queue.tasks.is_empty() && !queue.is_closed {
                    queue.asleep = Some(Sleep::Condvar);
                    let woken = self.task_queued.wait(queue);
                    queue = woken.unwrap_or_else(PoisonError::into_inner);
                }
                queue.asleep = None;
                return queue;
            }
        }
    }
}

/// The error of an operation that is issued after [`Executor::close`].
fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the group was shut down")
}

/// Runs the queued collectives, one after the other, until the executor is closed and its queue is empty.
fn run_collectives(shared: &ExecutorState, group: &CpuGroup) {
    let mut policy = group.idle_policy();
    loop {
        let mut queue = shared.wait_for_tasks(&mut policy);
        let Some(mut task) = queue.tasks.pop_front() else {
            return;
        };
        drop(queue);
        let issued = task.issued.clone();
        let result = group.run_collective(&mut task.op, task.call.clone(), |_| issued.start());
        shared.end(task, result);
    }
}

/// Runs the queued sends and receives, all at the same time, until the executor is closed and all have ended.
fn run_p2p(shared: &ExecutorState, group: &CpuGroup) {
    let mut active: Vec<Task> = Vec::new();
    let mut idle = group.idle_policy();
    // The ranks for which a wait is recorded.
    let mut noted = Vec::new();
    let mut policy = WaitPolicy::new(&group.stop, Deadline::In(Duration::MAX), group.wait_mode);
    loop {
        let mut queue = if active.is_empty() {
            shared.wait_for_tasks(&mut idle)
        } else {
            lock(&shared.queue)
        };
        if active.is_empty() && queue.tasks.is_empty() {
            return;
        }
        for task in queue.tasks.drain(..) {
            task.issued.start();
            active.push(task);
        }
        drop(queue);

        let (mut has_advanced, mut has_failed) = (false, false);
        let mut index = 0;
        while index < active.len() {
            let task = &mut active[index];
            let mut policy = WaitPolicy::new(&group.stop, task.call.deadline, group.wait_mode);
            let mut requests = task.requests.iter_mut();
            let advanced = group.p2p.advance(&mut task.op, &mut requests, &mut policy);
            let outcome = match advanced {
                Ok(advanced_now) => {
                    has_advanced |= advanced_now;
                    p2p::outcome(&mut task.requests)
                }
                Err(failure) => Some(Err(failure)),
            };
            let outcome = match (outcome, policy.check()) {
                (Some(outcome), _) => outcome,
                (None, Ok(())) => {
                    index += 1;
                    continue;
                }
                (None, Err(Interrupted::TimedOut)) => {
                    Err(Failure::Late(group.p2p.missing(&task.requests)))
                }
                (None, Err(stopped)) => Err(stopped.into()),
            };
            // After a failure, the record keeps the ranks that this rank waited for.
            has_failed |= outcome.is_err();
            let task = active.remove(index);
            let result = group.finish_p2p(&task.requests, task.began, outcome);
            shared.end(task, result);
            has_advanced = true;
        }
        if has_advanced || active.is_empty() {
            if !noted.is_empty() && !has_failed {
                group.mesh.links().end_wait(&noted);
                noted.clear();
            }
            policy.refresh();
            continue;
        }
        // An interruption of this policy is ignored: the check above detects a stop and each task's deadline.
        if let Ok(Pause::Sleep(time)) = policy.pause() {
            let wake = shared.wake.get();
            if let Some(wake) = wake {
                let _ = rustix::io::read(wake, &mut [0; 8]);
            }
            let mut queue = lock(&shared.queue);
            if !queue.tasks.is_empty() {
                continue;
            }
            queue.asleep = Some(Sleep::Sockets);
            drop(queue);
            let requests = active.iter().flat_map(|task| &task.requests);
            if let Err(failure) = group.p2p.sleep(requests, wake, time) {
                tracing::warn!(?failure, "cannot sleep on sockets");
                std::thread::sleep(time);
            }
            lock(&shared.queue).asleep = None;
            let idle_time = policy.idle();
            if let Some(oldest) = active.first().filter(|_| idle_time >= LONG_WAIT) {
                noted = group.p2p.missing(&oldest.requests);
                let waiting = group.waiting(&oldest.call);
                let links = group.mesh.links();
                links.note_wait(&noted, idle_time, Some(waiting));
            }
            // Finding out whether a peer is gone costs system calls, so it is done only in longer waits.
            for task in &active {
                let mut policy = WaitPolicy::new(&group.stop, task.call.deadline, group.wait_mode);
                if idle_time > Duration::from_millis(50)
                    && let Err(Failure::Gone(rank, _)) =
                        group.p2p.check_peers_now(&task.requests, &mut policy)
                {
                    group.fail(Failure::Gone(rank, None));
                }
            }
        }
    }
}
