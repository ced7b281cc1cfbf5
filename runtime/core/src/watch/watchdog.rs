//! [`Watchdog`]: watches operations in flight, including those that no caller waits for.
//!
//! In each round it stores the outcome of operations that have ended, and stops watching them. An operation is a
//! *fault* if it is overdue, or if it failed with an error after which its group is unusable. For a fault the watchdog
//! raises the alarm so that the other ranks write dumps, begins this rank's dump, and collects the others' answers.
//! Then it aborts the group with an error that contains the answers and the location of the dump. It ends the process
//! if a backend of the group requires that. The watchdog takes no lock that a stuck call could hold, and a group of
//! which it holds the last reference ends on another thread.

use crate::op::error::{Error, ErrorKind, Result};
use crate::op::info::{OpInfo, WorkStatus};
use crate::op::monitor::{Monitor, Shared};
use crate::watch::failure_broadcast::{FailureBroadcast, Incident, ResponderThread};
use crate::watch::heartbeat::HeartbeatMonitor;
use crate::watch::wait_counters::WaitCounters;
use crate::watch::watched::{Held, WatchedGroup, WatchedOperation};
use rcomm_recorder::model::text;
use std::any::Any;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

#[cfg(test)]
#[path = "watchdog_model.rs"]
mod model;

/// An operation that is overdue, or has failed so that its group is unusable.
pub(crate) struct Fault {
    pub(crate) wire_id: u64,
    pub(crate) op_info: OpInfo,
    pub(crate) error: Error,
}

/// The requests of callers to the watchdog.
#[derive(Default)]
struct Requests {
    in_flight_ops: Vec<Arc<dyn WatchedOperation>>,
    faults: Vec<Fault>,
    /// When to begin to touch the ring's pages; `None` until the world is made.
    touch_at: Option<Instant>,
    /// Whether there is a request that cannot wait for the next round.
    urgent: bool,
    stopped: bool,
}

/// Where callers leave their requests, and the watchdog waits for them.
#[derive(Default)]
struct Inbox<S = Monitor<Requests>>(S);

impl<S: Shared<Requests>> Inbox<S> {
    /// Leaves a request that the watchdog finds in its next round.
    fn leave(&self, change: impl FnOnce(&mut Requests)) {
        self.0.with(change);
    }

    /// Leaves a request, and asks for a round now.
    fn leave_urgent(&self, change: impl FnOnce(&mut Requests)) {
        self.0.with(|requests| {
            change(requests);
            requests.urgent = true;
        });
        self.0.wake_all();
    }

    /// Ends the watchdog after one more round.
    fn stop(&self) {
        self.leave_urgent(|requests| requests.stopped = true);
    }

    /// Waits for an urgent request, for at most `limit` if that is not `None`. Then passes all requests to `body`,
    /// which takes them, and returns what `body` returns.
    fn take<R>(&self, limit: Option<Duration>, body: impl FnOnce(&mut Requests) -> R) -> R {
        self.0.when(
            limit,
            |requests| requests.urgent || requests.stopped,
            |requests| {
                requests.urgent = false;
                body(requests)
            },
        )
    }
}

/// The groups and the operations that are watched. Through this, callers pass requests to the watchdog.
#[derive(Default)]
pub(crate) struct Watch {
    groups: Mutex<Vec<Weak<dyn WatchedGroup>>>,
    inbox: Inbox,
    /// How many rounds the watchdog has made; the heartbeat monitor reads this.
    rounds: AtomicU64,
    waits: Arc<WaitCounters>,
    /// The threads on which those groups end whose last reference was held by a thread that supervises the world.
    ends: Mutex<Vec<JoinHandle<()>>>,
}

impl Watch {
    pub(crate) fn new(waits: Arc<WaitCounters>) -> Self {
        Self {
            waits,
            ..Self::default()
        }
    }

    /// The counters of the world's waits.
    pub(crate) fn waits(&self) -> &Arc<WaitCounters> {
        &self.waits
    }

    pub(crate) fn add_group(&self, group: Weak<dyn WatchedGroup>) {
        let mut groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        groups.retain(|group| group.strong_count() > 0);
        groups.push(group);
    }

    /// The groups that still exist, in order of creation.
    pub(crate) fn groups(&self) -> Held<dyn WatchedGroup> {
        let groups = self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        Held::of(&groups)
    }

    pub(crate) fn add_in_flight(&self, in_flight: Arc<dyn WatchedOperation>) {
        self.inbox
            .leave(|requests| requests.in_flight_ops.push(in_flight));
    }

    /// Passes a fault to the watchdog, which handles it at once.
    pub(crate) fn report(&self, fault: Fault) {
        self.inbox
            .leave_urgent(|requests| requests.faults.push(fault));
    }

    /// Notes that the world is made, so that the watchdog soon begins to touch the ring's pages.
    ///
    /// It begins after a delay and touches the pages in small parts, since other ranks that share a core with
    /// this one may still be starting.
    pub(crate) fn world_is_made(&self) {
        const TOUCH_DELAY: Duration = Duration::from_millis(50);
        // The watchdog reads this in its next round: waking it now would lengthen this rank's start.
        let touch_at = Some(Instant::now() + TOUCH_DELAY);
        self.inbox.leave(|requests| requests.touch_at = touch_at);
    }

    /// Asks for a round now.
    pub(crate) fn wake(&self) {
        self.inbox.leave_urgent(|_| ());
    }

    pub(crate) fn rounds(&self) -> u64 {
        self.rounds.load(Ordering::Relaxed)
    }

    /// Drops a group on a thread of its own.
    pub(crate) fn drop_elsewhere(&self, group: Box<dyn Any + Send>) {
        // Invariant 10 of docs/ARCHITECTURE.md: `Watchdog::stop` joins the threads that were started before; the
        // others, which start after it, end by themselves.
        let thread = std::thread::Builder::new()
            .name("rcomm/group-end".to_owned())
            .spawn(move || drop(group));
        match thread {
            Ok(thread) => {
                let mut ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner);
                ends.retain(|end| !end.is_finished());
                ends.push(thread);
            }
            // The closure has been dropped, on this thread, and the group with it.
            Err(error) => tracing::warn!(%error, "cannot start the thread rcomm/group-end"),
        }
    }

    /// Waits for the groups that end on threads of their own.
    fn join_ends(&self) {
        let ends = self.ends.lock();
        let ends = std::mem::take(&mut *ends.unwrap_or_else(PoisonError::into_inner));
        for end in ends {
            // A panic of the thread was already reported where it happened.
            join_another(end);
        }
    }

    fn stop(&self) {
        self.inbox.stop();
    }
}

/// Joins a thread, unless it is the caller's own, which then ends by itself. Returns whether it has not panicked.
fn join_another(thread: JoinHandle<()>) -> bool {
    thread.thread().id() == std::thread::current().id() || thread.join().is_ok()
}

/// The other threads that supervise the world, in the order in which they are ended.
pub(crate) struct Helpers {
    pub(crate) heartbeat: HeartbeatMonitor,
    pub(crate) broadcast: ResponderThread,
}

/// The function that starts the helpers, once.
type StartHelpers = Box<dyn FnOnce() -> Result<Helpers> + Send>;

/// Owns the thread `rcomm/watchdog`, which makes the rounds, and the helper threads that it starts.
pub(crate) struct Watchdog {
    watch: Arc<Watch>,
    thread: Option<JoinHandle<()>>,
    helpers: Arc<Mutex<Option<Helpers>>>,
}

impl Watchdog {
    /// Starts the thread, which starts the helpers when it begins its first round. It does not begin at once, since
    /// this rank and others of its host may need every core to start.
    pub(crate) fn start(
        watch: Arc<Watch>,
        broadcast: Arc<FailureBroadcast>,
        interval: Duration,
        start_helpers: impl FnOnce() -> Result<Helpers> + Send + 'static,
    ) -> Result<Self> {
        // A first heartbeat, so that the ring has one even if the process is killed before the first round.
        broadcast.recorder().heartbeat();
        let helpers = Arc::new(Mutex::new(None));
        let rounds = Rounds {
            watch: watch.clone(),
            broadcast,
            start_helpers: Some(Box::new(start_helpers)),
            helpers: helpers.clone(),
            interval,
            touch_at: None,
            in_flight_ops: Vec::new(),
            first_seen: HashMap::new(),
            near: HashSet::new(),
            called_for: HashSet::new(),
            began: Instant::now(),
            ring_truncated: false,
        };
        // Invariant 10 of docs/ARCHITECTURE.md: `stop` joins this thread.
        let thread = std::thread::Builder::new()
            .name("rcomm/watchdog".to_owned())
            .spawn(move || rounds.run())
            .map_err(|error| Error::io("cannot start the thread rcomm/watchdog", error))?;
        Ok(Self {
            watch,
            thread: Some(thread),
            helpers,
        })
    }

    /// Makes a last round and ends the thread, the groups that it has dropped, and its helpers. The thread itself may
    /// call this, if a callback of an operation held the world. It is then not joined, and ends after its last round.
    /// The threads of groups that it drops from then on are not joined either.
    pub(crate) fn stop(&mut self) {
        self.watch.stop();
        if let Some(thread) = self.thread.take()
            && !join_another(thread)
        {
            tracing::error!("the watchdog panicked");
        }
        let helpers = self.helpers.lock();
        let mut helpers = helpers.unwrap_or_else(PoisonError::into_inner).take();
        // The monitor ends first: the end of a group may take long, and no round is made meanwhile.
        if let Some(helpers) = &mut helpers {
            helpers.heartbeat.stop();
        }
        self.watch.join_ends();
        if let Some(mut helpers) = helpers {
            helpers.broadcast.stop();
            // The responder may have held the last reference to a group, too.
            self.watch.join_ends();
        }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The state of the thread `rcomm/watchdog`.
struct Rounds {
    watch: Arc<Watch>,
    broadcast: Arc<FailureBroadcast>,
    start_helpers: Option<StartHelpers>,
    /// The helpers. They are shared, so that they outlive this thread if it panics.
    helpers: Arc<Mutex<Option<Helpers>>>,
    interval: Duration,
    /// When to touch the next part of the ring; `None` before the world is made, and once all parts are
    /// touched.
    touch_at: Option<Instant>,
    in_flight_ops: Vec<Arc<dyn WatchedOperation>>,
    /// When each blocking call was first seen in flight, by record id.
    first_seen: HashMap<u64, Instant>,
    /// The record ids of the operations that this round has so far found near their time-outs.
    near: HashSet<u64>,
    /// The record ids of the operations that the last round found near their time-outs; the roll was called for them.
    called_for: HashSet<u64>,
    /// When the last round began.
    began: Instant,
    /// Whether the ring's file is known to have been truncated.
    ring_truncated: bool,
}

impl Rounds {
    /// How long after its deadline a blocking call may still run before the watchdog ends it. The calling
    /// thread ends it earlier, unless it is stuck in the backend.
    const GRACE: Duration = Duration::from_secs(5);
    /// How many bytes of the ring are touched at a time.
    const TOUCH_BYTES: usize = 64 << 10;
    /// At most this much of the time between two rounds counts as time for which this process has run, unless the
    /// interval is longer: more shows that it was stopped, or got no core.
    const LONGEST_PAUSE: Duration = Duration::from_millis(250);
    /// The pause between two parts of the ring that are touched.
    const TOUCH_PAUSE: Duration = Duration::from_millis(1);
    /// The longest wait for the first round, which starts what others need.
    const LONGEST_FIRST_WAIT: Duration = Duration::from_millis(100);

    fn run(mut self) {
        loop {
            let (faults, stopped) = self.next();
            // The helpers start before the first fault is handled, which needs them.
            if let Some(start) = self.start_helpers.take() {
                self.start(start);
            }
            self.watch.rounds.fetch_add(1, Ordering::Relaxed);
            let now = Instant::now();
            let passed = now - std::mem::replace(&mut self.began, now);
            self.broadcast
                .ran(passed.min(Self::LONGEST_PAUSE.max(self.interval)));
            self.broadcast.recorder().heartbeat();
            self.check_ring();
            for fault in faults {
                self.handle(fault);
            }
            self.check_in_flight();
            let groups = self.watch.groups();
            groups.iter().for_each(|group| group.note_communicator());
            drop(groups);
            self.check_running_calls();
            self.call_roll();
            self.touch_ring();
            if stopped {
                return;
            }
        }
    }

    /// Starts the helpers. If this fails, the rank continues without them.
    fn start(&self, start: StartHelpers) {
        match start() {
            Ok(started) => {
                let mut helpers = self.helpers.lock().unwrap_or_else(PoisonError::into_inner);
                *helpers = Some(started);
            }
            Err(error) => tracing::error!(
                %error,
                "this rank receives no alarms of others, and its watchdog is not monitored"
            ),
        }
    }

    /// Waits until the next round is due or an urgent request arrives. Returns the reported faults, and
    /// whether this is the last round.
    fn next(&mut self) -> (Vec<Fault>, bool) {
        let longest = match self.start_helpers {
            Some(_) => self.interval.min(Self::LONGEST_FIRST_WAIT),
            None => self.interval,
        };
        let pause = self.touch_at.map_or(longest, |at| {
            at.saturating_duration_since(Instant::now()).min(longest)
        });
        let (touch_at, in_flight_ops) = (&mut self.touch_at, &mut self.in_flight_ops);
        self.watch.inbox.take(Some(pause), |requests| {
            *touch_at = requests.touch_at.take().or(*touch_at);
            in_flight_ops.append(&mut requests.in_flight_ops);
            (std::mem::take(&mut requests.faults), requests.stopped)
        })
    }

    /// Asks which ranks run if an operation has come near its time-out since the last round. The answers are there when
    /// the time-out passes.
    fn call_roll(&mut self) {
        let near = std::mem::take(&mut self.near);
        if !near.is_subset(&self.called_for) {
            self.broadcast.call_roll();
        }
        self.called_for = near;
    }

    /// Touches the next part of the ring if it is time to, so that recording causes no page fault there.
    fn touch_ring(&mut self) {
        let now = Instant::now();
        if self.touch_at.is_some_and(|at| at <= now) {
            let more = self.broadcast.recorder().touch_ahead(Self::TOUCH_BYTES);
            self.touch_at = more.then(|| now + Self::TOUCH_PAUSE);
        }
    }

    /// Reports once that the ring's file was truncated.
    fn check_ring(&mut self) {
        if !self.ring_truncated && self.broadcast.recorder().is_truncated() {
            self.ring_truncated = true;
            tracing::warn!(
                "another process has truncated this rank's ring: readers from outside no longer have its records, \
                 only its dumps and its endpoint"
            );
        }
    }

    /// Stores the outcome of issued operations that have ended, stops watching them, and handles those that are faults.
    fn check_in_flight(&mut self) {
        let now = Instant::now();
        let mut faults = Vec::new();
        let mut failed = Vec::new();
        let (near, roll_time) = (&mut self.near, self.broadcast.roll_time());
        let is_over = |in_flight: &mut Arc<dyn WatchedOperation>| match in_flight.poll_state() {
            WorkStatus::Failed if in_flight.was_rejected() => true,
            WorkStatus::Completed => {
                in_flight.retire();
                true
            }
            WorkStatus::Failed => {
                if let Some(Err(error)) = in_flight.outcome()
                    && !error.is_recoverable()
                {
                    faults.push(fault_of(&**in_flight, error.clone()));
                }
                failed.push(in_flight.clone());
                true
            }
            WorkStatus::Queued | WorkStatus::Started => {
                let op_info = in_flight.op_info();
                let left = in_flight.due().saturating_duration_since(now);
                if is_near(op_info, left, roll_time) {
                    near.insert(op_info.record_id);
                }
                let overdue_at = (!in_flight.op_info().ends_itself)
                    .then(|| in_flight.due() + in_flight.group().overdue_time());
                if overdue_at.is_some_and(|due| due <= now) && !in_flight.group().has_failed() {
                    let mut error = overdue_error(in_flight.op_info());
                    if !in_flight.is_issued() {
                        let rank = in_flight.group().global_rank();
                        let stuck = "is still inside the library's call that starts it";
                        error = error.with_more(&format!("rank {rank} {stuck}"));
                    }
                    faults.push(fault_of(&**in_flight, error));
                }
                false
            }
        };
        let over: Vec<_> = self.in_flight_ops.extract_if(.., is_over).collect();
        over.into_iter().for_each(WatchedOperation::release);
        for fault in faults {
            self.handle(fault);
        }
        for in_flight in failed {
            in_flight.announce_failure();
            in_flight.retire();
            in_flight.release();
        }
    }

    /// Handles blocking calls that have not ended by [`GRACE`](Self::GRACE) after their time-out, counted from the
    /// round that first saw them.
    fn check_running_calls(&mut self) {
        let now = Instant::now();
        let mut seen = HashMap::new();
        for group in self.watch.groups().iter() {
            for op_info in group.running().under_way() {
                let since = *self.first_seen.get(&op_info.record_id).unwrap_or(&now);
                seen.insert(op_info.record_id, since);
                let left = op_info.timeout.saturating_sub(now.duration_since(since));
                if is_near(&op_info, left, self.broadcast.roll_time()) {
                    self.near.insert(op_info.record_id);
                }
                let limit = op_info.timeout.saturating_add(Self::GRACE);
                if now.duration_since(since) > limit && !group.has_failed() {
                    self.handle(Fault {
                        wire_id: group.wire_id(),
                        op_info,
                        error: overdue_error(&op_info),
                    });
                }
            }
        }
        self.first_seen = seen;
    }

    /// Handles a fault, unless its group has already failed, in the order that the head of this file gives.
    fn handle(&self, fault: Fault) {
        for group in self.watch.groups().iter() {
            if group.wire_id() == fault.wire_id && !group.has_failed() {
                self.end_group(&**group, &fault);
            }
        }
    }

    /// Handles a fault of a group that has not failed yet.
    fn end_group(&self, group: &dyn WatchedGroup, fault: &Fault) {
        let op_info = &fault.op_info;
        let mut error = group.explain(op_info, fault.error.clone());
        // The end of the group is recorded before the dump, so that the dump shows it.
        group.record_end(Some(op_info), &error);
        let finding = error.to_string();
        if let Some(age) = self.broadcast.age_of(op_info.record_id) {
            error = error.with_more(&format!("{} after its issue", text::duration(age)));
        }
        tracing::error!(
            group = group.label(),
            seq = op_info.seq,
            op = %op_info.op,
            %error,
            "an operation failed: dumping pending operations"
        );
        let incident = Incident::new(group.info(), group.wire_id(), op_info, &finding, &error);
        let (began, until) = (Instant::now(), self.broadcast.status_until());
        self.broadcast.raise(&incident, until);
        let dump = self.broadcast.begin_fault_dump(&error.to_string());
        let dump_until = self.broadcast.dump_until(began);
        // The dump is written while the others answer.
        let error = self.broadcast.complete(error, &incident, until);
        let error = error.with_more(&dump.text(dump_until));
        let message = error.to_string();
        group.close(Some(op_info), error);
        if group.ends_process() {
            self.broadcast.finish_dumps();
            end_process(&message);
        }
    }
}

/// Ends the process by `abort`, as c10d's `TearDown` and `SkipCleanUp` do, so that the launcher notices the
/// failure and can restart the job.
#[expect(
    clippy::print_stderr,
    reason = "a process that ends must report why, even without a log"
)]
fn end_process(message: &str) -> ! {
    eprintln!("rcomm ends the process, as configured for a failure: {message}");
    std::process::abort()
}

/// Whether an operation that has `left` until its time-out is near it: at most `roll_time` is left, and at least half
/// of the time-out has passed.
fn is_near(op_info: &OpInfo, left: Duration, roll_time: Duration) -> bool {
    left <= roll_time.min(op_info.timeout / 2)
}

fn fault_of(in_flight: &dyn WatchedOperation, error: Error) -> Fault {
    Fault {
        wire_id: in_flight.group().wire_id(),
        op_info: *in_flight.op_info(),
        error,
    }
}

fn overdue_error(op_info: &OpInfo) -> Error {
    Error::new(
        ErrorKind::Timeout,
        format!("not done after {}", text::duration(op_info.timeout)),
    )
}
