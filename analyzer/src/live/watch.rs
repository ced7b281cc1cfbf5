//! Polls each source on its own thread and judges on another one, so a thread that draws waits for neither.
//!
//! `rcomm/source/<n>` polls one source again and again or, if it is static, until it was read; `rcomm/judge` owns the
//! [`Live`] and passes each new [`Snapshot`] to a function. Dropping the [`Watch`] stops and joins all threads.

use crate::live::source::{Poll, Source, SourceError};
use crate::live::{Live, Moment, Snapshot, Urgency};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The wall time at one point of the monotonic clock. All later moments are computed from it, so a jump of the wall
/// clock changes no age.
#[derive(Clone, Copy, Debug)]
pub struct Anchor {
    start: Instant,
    wall_ns: i64,
}

impl Anchor {
    /// Reads both clocks now.
    pub fn now() -> Self {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH);
        Self {
            start: Instant::now(),
            wall_ns: wall.map_or(0, |d| i64::try_from(d.as_nanos()).unwrap_or(i64::MAX)),
        }
    }

    /// The current moment.
    pub fn moment(&self) -> Moment {
        let elapsed = self.start.elapsed();
        let ns = i64::try_from(elapsed.as_nanos()).unwrap_or(i64::MAX);
        Moment {
            elapsed,
            wall_ns: self.wall_ns.saturating_add(ns),
        }
    }
}

/// The timing of a [`Watch`].
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// The time between the beginnings of two polls of a source. If polling would take more than a fiftieth of a core,
    /// the time is longer, but at most until a pending operation may have become overdue.
    pub refresh: Duration,
    /// The longest time that one poll may take. Reading files has no limit.
    pub timeout: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            refresh: Duration::from_secs(1),
            timeout: Duration::from_secs(2),
        }
    }
}

/// Signals to the threads between two polls.
#[derive(Default)]
struct Signals {
    pending: Mutex<PendingSignals>,
    /// Notified at each change of `pending`.
    changed: Condvar,
}

#[derive(Clone, Copy, Default)]
struct PendingSignals {
    stopped: bool,
    /// When sources must be polled again before their pause is over.
    poll_due: Option<Duration>,
}

impl Signals {
    fn update(&self, change: impl FnOnce(&mut PendingSignals)) {
        change(&mut self.pending.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_all();
    }

    fn is_stopped(&self) -> bool {
        let pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        pending.stopped
    }

    /// Sleeps until `rest_until`. If a poll is due earlier, sleeps until then, but at least until `soonest`. Returns
    /// whether the thread must stop; if so, at once.
    fn rest(&self, anchor: Anchor, soonest: Duration, rest_until: Duration) -> bool {
        let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let wanted = pending.poll_due.map_or(rest_until, |due| due.max(soonest));
            let left = wanted
                .min(rest_until)
                .saturating_sub(anchor.moment().elapsed);
            if pending.stopped || left.is_zero() {
                return pending.stopped;
            }
            let woken = self.changed.wait_timeout(pending, left);
            pending = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// The number of a source, the result of its poll, and when the poll ended.
type PollResult = (usize, Result<Poll, SourceError>, Moment);

/// Threads that poll sources and judge their records; see the module.
pub struct Watch {
    signals: Arc<Signals>,
    threads: Vec<JoinHandle<()>>,
}

impl Watch {
    /// Starts the threads. `rcomm/judge` calls `sink` with every new snapshot.
    ///
    /// # Errors
    ///
    /// If a thread cannot be started.
    pub fn start(
        sources: Vec<Box<dyn Source>>,
        mut live: Live,
        pace: Pace,
        anchor: Anchor,
        mut sink: impl FnMut(Snapshot) + Send + 'static,
    ) -> std::io::Result<Self> {
        let mut watch = Self {
            signals: Arc::default(),
            threads: Vec::new(),
        };
        // Bounded: if the judge lags behind, polling slows down, and no records pile up in a queue.
        let (sender, receiver) = sync_channel::<PollResult>(sources.len().max(1));
        for (number, source) in sources.into_iter().enumerate() {
            let (signals, sender) = (watch.signals.clone(), sender.clone());
            let poll = move || poll_repeatedly(source, number, pace, anchor, &signals, &sender);
            watch.spawn(format!("rcomm/source/{number}"), poll)?;
        }
        drop(sender);
        let signals = watch.signals.clone();
        watch.spawn("rcomm/judge".into(), move || {
            judge_repeatedly(&mut live, &receiver, anchor, &signals, &mut sink);
        })?;
        Ok(watch)
    }

    fn spawn(&mut self, name: String, body: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
        let thread = std::thread::Builder::new().name(name).spawn(body)?;
        self.threads.push(thread);
        Ok(())
    }

    /// Stops and joins all threads.
    ///
    /// # Blocking
    ///
    /// Until the polls and the judgment in progress end. A poll takes at most [`Pace::timeout`], except that of files.
    pub fn stop(self) {}
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.signals.update(|pending| pending.stopped = true);
        for thread in self.threads.drain(..) {
            // A thread that panicked has reported it itself.
            let _ = thread.join();
        }
    }
}

/// Polls a source until the watch stops or, if the source is static, until it was read.
fn poll_repeatedly(
    mut source: Box<dyn Source>,
    number: usize,
    pace: Pace,
    anchor: Anchor,
    signals: &Signals,
    sender: &SyncSender<PollResult>,
) {
    loop {
        let (began, spent_before) = (anchor.moment().elapsed, time_spent());
        let poll = source.poll(Instant::now() + pace.timeout);
        let cost = time_spent().saturating_sub(spent_before);
        let is_read = poll.is_ok();
        let ended = anchor.moment();
        if sender.send((number, poll, ended)).is_err() {
            return;
        }
        // A static source has nothing new to report.
        if is_read && source.is_static() {
            return;
        }
        // Polling takes at most a fiftieth of a core, for any number of ranks, unless an operation may have become
        // overdue. Only processor time counts: ranks that answer late are polled as often as others.
        let rest_until = began + pace.refresh.max(cost * TIME_PER_COST);
        if signals.rest(anchor, began + pace.refresh, rest_until) {
            return;
        }
    }
}

/// The processor time that this thread has used.
pub(super) fn time_spent() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

/// Judges what the polls have found until the watch stops, and passes each snapshot to `sink`.
fn judge_repeatedly(
    live: &mut Live,
    receiver: &Receiver<PollResult>,
    anchor: Anchor,
    signals: &Signals,
    sink: &mut impl FnMut(Snapshot),
) {
    /// The longest wait before the next check whether to stop.
    const LONGEST_WAIT: Duration = Duration::from_millis(500);
    let mut has_sources = true;
    // When the last judgment began, and its processor time.
    let mut last: Option<(Duration, Duration)> = None;
    let mut wake = Duration::ZERO;
    loop {
        let wait = wake.saturating_sub(anchor.moment().elapsed);
        let wait = wait.min(LONGEST_WAIT);
        if has_sources {
            match receiver.recv_timeout(wait) {
                Ok((number, poll, at)) => {
                    live.observe(number, poll, at);
                    // Polls that arrived in between are judged together.
                    while let Ok((number, poll, at)) = receiver.try_recv() {
                        live.observe(number, poll, at);
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => has_sources = false,
            }
        } else {
            let until = anchor.moment().elapsed + wait;
            signals.rest(anchor, until, until);
        }
        if signals.is_stopped() {
            return;
        }
        let now = anchor.moment();
        let time_per_cost = match live.urgency(now) {
            Urgency::No => None,
            // Judging takes a fiftieth of a core, unless it is urgent: then an eighth, or as much as it needs.
            Urgency::Usual => Some(TIME_PER_COST),
            Urgency::More => Some(8),
            Urgency::First => Some(1),
        };
        let due = time_per_cost.map(|time_per_cost| {
            last.map_or(now.elapsed, |(began, cost)| {
                began + (cost * time_per_cost).min(LONGEST_REST)
            })
        });
        let spent_before = time_spent();
        if due.is_some_and(|due| due <= now.elapsed)
            && let Some(snapshot) = live.refresh(now)
        {
            // Processor time and not wall time counts: on a busy node a judgment takes longer without costing more, and
            // the view must stay current.
            last = Some((now.elapsed, time_spent().saturating_sub(spent_before)));
            sink(snapshot);
        }
        let next = due.filter(|&due| due > now.elapsed);
        wake = next
            .into_iter()
            .chain(live.due())
            .min()
            .map_or(now.elapsed + LONGEST_WAIT, |wake| {
                wake.max(now.elapsed + SHORTEST_PAUSE)
            });
        let poll_due = live.poll_due(now);
        signals.update(|pending| pending.poll_due = poll_due);
    }
}

/// Polling takes at most a fiftieth of a core, unless an operation may have become overdue. So does judging, unless it
/// is urgent or has rested for [`LONGEST_REST`]. The time from one beginning to the next is at least this many times as
/// long as the processor time.
const TIME_PER_COST: u32 = 50;

/// A judgment that is needed begins at most this long after the last one began, or as soon as that one is over.
const LONGEST_REST: Duration = Duration::from_secs(5);

/// The shortest pause between two rounds of the judge if no poll arrives.
const SHORTEST_PAUSE: Duration = Duration::from_millis(10);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::live::LiveOptions;
    use crate::live::simulate::{Simulation, Situation};
    use crate::live::source::SimulatedSource;
    use rcomm_verdict::{Input, Report, Verdict};
    use std::sync::mpsc::channel;

    fn empty(_: &[Arc<rcomm_recorder::publish::Dump>], _: &rcomm_verdict::Policy) -> Report {
        Report {
            schema: Report::SCHEMA.into(),
            verdict: Verdict::Running,
            findings: vec![],
            problems: vec![],
            end: None,
            input: Input::default(),
            groups: vec![],
            ranks: vec![],
            in_flight: vec![],
            waits: vec![],
            stacks: vec![],
            now: vec![],
        }
    }

    #[test]
    fn a_running_job_gives_snapshot_after_snapshot_and_stopping_ends_all_threads() {
        let anchor = Anchor::now();
        let start = anchor.moment().wall_ns;
        let simulation = Simulation::new(Situation::Healthy, 8, start - 60_000_000_000);
        let source = SimulatedSource::new(simulation, move || anchor.moment().wall_ns);
        let live = Live::new(LiveOptions::default(), empty, vec![source.name()]);
        let pace = Pace {
            refresh: Duration::from_millis(20),
            ..Pace::default()
        };
        let (sender, receiver) = channel();
        let watch = Watch::start(
            vec![Box::new(source)],
            live,
            pace,
            anchor,
            move |snapshot| {
                // The receiver is gone once the test is over.
                let _ = sender.send(snapshot);
            },
        )
        .expect("the threads can be started");
        let wait = Duration::from_secs(20);
        let first = receiver
            .recv_timeout(wait)
            .expect("the first poll gives a snapshot");
        let second = receiver
            .recv_timeout(wait)
            .expect("the second poll gives a snapshot");
        assert_eq!(first.ranks.len(), 8);
        assert!(second.number > first.number && second.at > first.at);
        watch.stop();
        // All senders are dropped with the threads.
        while receiver.recv_timeout(wait).is_ok() {}
        assert_eq!(
            receiver.try_recv().err(),
            Some(std::sync::mpsc::TryRecvError::Disconnected)
        );
    }

    /// A source whose polls take one second, but no processor time; it sends the time of each.
    struct Waiting(std::sync::mpsc::Sender<Instant>);

    impl Source for Waiting {
        fn name(&self) -> String {
            "a distant view".into()
        }

        fn poll(&mut self, _deadline: Instant) -> Result<Poll, SourceError> {
            std::thread::sleep(Duration::from_secs(1));
            // The receiver is gone once the test is over.
            let _ = self.0.send(Instant::now());
            Ok(Poll::default())
        }
    }

    #[test]
    fn a_source_that_waits_for_its_answers_is_polled_as_often_as_others() {
        let (sender, receiver) = channel();
        let live = Live::new(LiveOptions::default(), empty, vec!["far".into()]);
        let pace = Pace {
            refresh: Duration::from_millis(20),
            ..Pace::default()
        };
        let source = Box::new(Waiting(sender));
        let watch = Watch::start(vec![source], live, pace, Anchor::now(), |_| {})
            .expect("the threads can be started");
        // Fifty times the source's waiting time would be longer.
        let deadline = Duration::from_secs(20);
        for _ in 0..3 {
            receiver
                .recv_timeout(deadline)
                .expect("the source is polled again");
        }
        watch.stop();
    }
}
