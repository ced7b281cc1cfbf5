//! Sources asked on threads of their own, judged on one more: whoever draws waits for neither.
//!
//! `rcomm/source/<n>` asks one source at every interval; `rcomm/judge` owns the [`Live`] and hands
//! each new [`Snapshot`] to a function. All of them stop and are joined when the [`Watch`] is dropped.

use crate::live::{Live, Moment, Snapshot};
use crate::source::{Poll, Source, SourceError};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Wall time pinned once to the monotonic clock: a wall clock that jumps moves no age.
#[derive(Clone, Copy, Debug)]
pub struct Anchor {
    start: Instant,
    wall_ns: i64,
}

impl Anchor {
    /// Pins now.
    pub fn now() -> Self {
        let wall = SystemTime::now().duration_since(UNIX_EPOCH);
        Self {
            start: Instant::now(),
            wall_ns: wall.map_or(0, |d| i64::try_from(d.as_nanos()).unwrap_or(i64::MAX)),
        }
    }

    /// The present moment.
    pub fn moment(&self) -> Moment {
        let elapsed = self.start.elapsed();
        let ns = i64::try_from(elapsed.as_nanos()).unwrap_or(i64::MAX);
        Moment {
            elapsed,
            wall_ns: self.wall_ns.saturating_add(ns),
        }
    }
}

/// How a [`Watch`] paces itself.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Between two looks at a source, unless looking keeps a core busy for more than a fortieth of that.
    pub refresh: Duration,
    /// How long one look may take.
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

#[derive(Default)]
struct Stop {
    stopped: Mutex<bool>,
    bell: Condvar,
}

impl Stop {
    fn ring(&self) {
        *self.stopped.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.bell.notify_all();
    }

    /// Waits; true = stop.
    fn wait(&self, pause: Duration) -> bool {
        let guard = self.stopped.lock().unwrap_or_else(PoisonError::into_inner);
        let wait = self
            .bell
            .wait_timeout_while(guard, pause, |stopped| !*stopped);
        *wait.unwrap_or_else(PoisonError::into_inner).0
    }
}

type Seen = (usize, Result<Poll, SourceError>, Moment);

/// See the module.
pub struct Watch {
    stop: Arc<Stop>,
    threads: Vec<JoinHandle<()>>,
}

impl Watch {
    /// Starts the threads. `sink` is called on `rcomm/judge` with every new snapshot.
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
            stop: Arc::default(),
            threads: Vec::new(),
        };
        // Bounded: a judge that lags behind slows the looking, and no record waits in a queue.
        let (sender, receiver) = sync_channel::<Seen>(sources.len().max(1));
        for (number, source) in sources.into_iter().enumerate() {
            let (stop, sender) = (watch.stop.clone(), sender.clone());
            let look = move || look_on(source, number, pace, anchor, &stop, &sender);
            watch.spawn(format!("rcomm/source/{number}"), look)?;
        }
        drop(sender);
        let stop = watch.stop.clone();
        watch.spawn("rcomm/judge".into(), move || {
            judge_on(&mut live, &receiver, anchor, &stop, &mut sink);
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
    /// Until a look at a source that is under way is over: at most the pace's timeout.
    pub fn stop(self) {}
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop.ring();
        for thread in self.threads.drain(..) {
            // A thread that panicked has said so on its own.
            let _ = thread.join();
        }
    }
}

fn look_on(
    mut source: Box<dyn Source>,
    number: usize,
    pace: Pace,
    anchor: Anchor,
    stop: &Stop,
    sender: &SyncSender<Seen>,
) {
    loop {
        let (began, spent) = (Instant::now(), time_spent());
        let poll = source.poll(began + pace.timeout);
        let cost = time_spent().saturating_sub(spent);
        let read = poll.is_ok();
        if sender.send((number, poll, anchor.moment())).is_err() {
            return;
        }
        // A still source has said all it has to say.
        if read && source.is_still() {
            return;
        }
        // Looking may cost at most a fortieth of a core, however many ranks there are. Waiting for an
        // answer costs nothing: ranks that answer late are not to be asked more rarely.
        let pause = pace.refresh.max(cost * 40);
        if stop.wait(pause.saturating_sub(began.elapsed())) {
            return;
        }
    }
}

/// The processor's time that this thread has had.
fn time_spent() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

fn judge_on(
    live: &mut Live,
    receiver: &Receiver<Seen>,
    anchor: Anchor,
    stop: &Stop,
    sink: &mut impl FnMut(Snapshot),
) {
    /// How often silence is looked for when nothing arrives.
    const ROUND: Duration = Duration::from_millis(500);
    let mut open = true;
    let mut rested = Duration::ZERO;
    loop {
        let now = anchor.moment();
        let wait = live.due().map_or(ROUND, |due| {
            due.max(rested)
                .saturating_sub(now.elapsed)
                .clamp(Duration::from_millis(10), ROUND)
        });
        if open {
            match receiver.recv_timeout(wait) {
                Ok((number, poll, at)) => {
                    live.observe(number, poll, at);
                    // What arrived meanwhile is judged together.
                    while let Ok((number, poll, at)) = receiver.try_recv() {
                        live.observe(number, poll, at);
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => open = false,
            }
        }
        // What sources see is taken in while judging rests: left where it is, it would be old, and they
        // would wait to be rid of it.
        if anchor.moment().elapsed >= rested
            && let Some(snapshot) = live.refresh(anchor.moment())
        {
            let cost = snapshot.cost;
            sink(snapshot);
            // Judging, too, takes at most a fortieth of a core.
            rested = anchor.moment().elapsed + cost * 39;
        }
        if stop.wait(if open { Duration::ZERO } else { ROUND }) {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::live::LiveOptions;
    use crate::report::{Input, Report, Verdict};
    use crate::simulate::{Simulation, Situation};
    use crate::source::SimulatedSource;
    use std::sync::mpsc::channel;

    fn empty(_: &[Arc<rcomm_recorder::publish::Dump>], _: &crate::Policy) -> Report {
        Report {
            schema: Report::SCHEMA.into(),
            verdict: Verdict::Running,
            findings: vec![],
            problems: vec![],
            input: Input::default(),
            groups: vec![],
            ranks: vec![],
            in_flight: vec![],
            waits: vec![],
            stacks: vec![],
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
        .expect("threads start");
        let wait = Duration::from_secs(20);
        let first = receiver.recv_timeout(wait).expect("a first snapshot");
        let second = receiver.recv_timeout(wait).expect("a second snapshot");
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

    /// A source that waits for somebody, and then tells when it was asked.
    struct Waiting(std::sync::mpsc::Sender<Instant>);

    impl Source for Waiting {
        fn name(&self) -> String {
            "somebody far away".into()
        }

        fn poll(&mut self, _deadline: Instant) -> Result<Poll, SourceError> {
            std::thread::sleep(Duration::from_secs(1));
            // The receiver is gone once the test is over.
            let _ = self.0.send(Instant::now());
            Ok(Poll::default())
        }
    }

    #[test]
    fn a_source_that_waits_for_its_answers_is_asked_as_often_as_others() {
        let (sender, receiver) = channel();
        let live = Live::new(LiveOptions::default(), empty, vec!["far".into()]);
        let pace = Pace {
            refresh: Duration::from_millis(20),
            ..Pace::default()
        };
        let source = Box::new(Waiting(sender));
        let watch = Watch::start(vec![source], live, pace, Anchor::now(), |_| {}).expect("threads");
        // Forty times what it waits would be longer than this.
        let deadline = Duration::from_secs(20);
        for _ in 0..3 {
            receiver.recv_timeout(deadline).expect("it is asked again");
        }
        watch.stop();
    }
}
