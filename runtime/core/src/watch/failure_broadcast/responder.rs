//! [`ResponderThread`]: the thread `rcomm/dump`. Through the store, it raises this rank's alarm and answers those of
//! other ranks. It also watches the FIFOs by which dumps are requested.

use super::roll_call::RollAnswers;
use super::{DUMP_WAIT, FLAG, FailureBroadcast, Incident};
use crate::config::Propagation;
use crate::op::error::{Error, ErrorKind, Result};
use crate::watch::pipe::DumpPipe;
use crate::watch::status_exchange::{RankReport, StatusExchange, StatusReplies};
use rcomm_recorder::model::LinkEnd;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// A fault of this rank belongs to another rank's alarm if this rank read that alarm at most this long before: the
/// members of a group time out at about the same time, and one of them may poll the store in between.
const SAME_FAULT: Duration = Duration::from_secs(2);
/// If many alarms were raised since the last poll, how many are answered besides the newest.
const MAX_ANSWERS: i64 = 16;
/// The longest time for which a rank reads the answers that have arrived.
const READ_TIME: Duration = Duration::from_millis(500);
/// How long a world that ends waits for the thread that uses the store.
const STOP_WAIT: Duration = Duration::from_millis(500);
/// For how long after another rank's alarm the errors of this rank's faults mention that alarm.
const RECENT_ALARM: Duration = Duration::from_secs(60);

/// Owns the thread `rcomm/dump`, which uses the store and watches the FIFOs.
pub(crate) struct ResponderThread {
    broadcast: Arc<FailureBroadcast>,
    thread: Option<JoinHandle<()>>,
    /// The thread holds the other end, so this is disconnected when the thread is about to end.
    end_signal: Receiver<()>,
}

impl ResponderThread {
    pub(crate) fn start(broadcast: Arc<FailureBroadcast>, pipes: Vec<DumpPipe>) -> Result<Self> {
        let responder = Responder::new(broadcast.clone(), pipes);
        let (working, end_signal) = channel();
        let run = move || {
            let _working: Sender<()> = working;
            responder.run();
        };
        let thread = std::thread::Builder::new()
            .name("rcomm/dump".to_owned())
            .spawn(run)
            .map_err(|error| Error::io("cannot start the thread rcomm/dump", error))?;
        Ok(Self {
            broadcast,
            thread: Some(thread),
            end_signal,
        })
    }

    /// Ends the thread, and waits for this rank's dumps. If the thread still waits for the store after
    /// [`STOP_WAIT`], it is not joined; it ends when the store replies or the request times out.
    ///
    /// # Blocking
    /// For at most [`STOP_WAIT`], and while a dump is being written, for ten seconds more.
    pub(crate) fn stop(&mut self) {
        self.broadcast.stopped.store(true, Ordering::Release);
        self.broadcast.wake();
        let Some(thread) = self.thread.take() else {
            return;
        };
        if self.end_signal.recv_timeout(STOP_WAIT) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!(
                "the thread rcomm/dump ends when the store answers or its time-out passes"
            );
        } else if thread.join().is_err() {
            tracing::error!("the thread rcomm/dump panicked");
        }
        self.broadcast.finish_dumps();
    }
}

impl Drop for ResponderThread {
    fn drop(&mut self) {
        self.stop();
    }
}

/// The state of the thread `rcomm/dump`.
pub(super) struct Responder {
    broadcast: Arc<FailureBroadcast>,
    pipes: Vec<DumpPipe>,
    /// The number of the newest alarm that this rank has answered; 0 if none.
    answered: i64,
    /// The number of the newest alarm for which this rank has published its status; 0 if none.
    published: i64,
    roll: RollAnswers,
    /// The last alarm of another rank: when this rank read it, and its cause.
    pub(super) announced: Option<(Instant, String)>,
    /// Whether PyTorch's flag was set when this rank last read it, or has set it itself since.
    flag_seen: bool,
    /// Whether the store failed to reply at the last poll.
    store_lost: bool,
}

impl Responder {
    pub(super) fn new(broadcast: Arc<FailureBroadcast>, pipes: Vec<DumpPipe>) -> Self {
        let parts = &broadcast.parts;
        Self {
            roll: RollAnswers::new(parts.attempt, parts.rank),
            broadcast,
            pipes,
            answered: 0,
            published: 0,
            announced: None,
            flag_seen: false,
            store_lost: false,
        }
    }

    fn run(mut self) {
        // The first poll is made after an interval: other ranks may still be starting, and the poll needs another
        // connection to the store.
        let mut next_poll = Instant::now() + self.broadcast.parts.interval;
        while !self.broadcast.stopped.load(Ordering::Acquire) {
            self.sleep_until(next_poll);
            let incidents = std::mem::take(
                &mut *self
                    .broadcast
                    .incidents
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner),
            );
            for incident in incidents {
                self.respond_to_own_fault(&incident);
            }
            if self.broadcast.rolls.take_request() {
                self.call_roll();
            }
            for pipe in &self.pipes {
                if pipe.was_written() {
                    let path = pipe.path().display().to_string();
                    let until = Instant::now() + DUMP_WAIT;
                    self.broadcast.dump(&format!("requested by {path}"), until);
                }
            }
            if Instant::now() >= next_poll {
                self.poll_store();
                let interval = self.broadcast.parts.interval;
                // A store that does not reply is polled less often.
                next_poll = Instant::now() + interval * if self.store_lost { 8 } else { 1 };
            }
        }
    }

    /// Sleeps until `wake`, or until the thread is woken or a FIFO is written to.
    fn sleep_until(&self, wake: Instant) {
        let rest = wake.saturating_duration_since(Instant::now());
        let mut fds = vec![PollFd::new(&self.broadcast.wake_event, PollFlags::IN)];
        let pipes = self.pipes.iter().map(|pipe| pipe.fd());
        fds.extend(pipes.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        let timeout = Timespec {
            tv_sec: i64::try_from(rest.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(rest.subsec_nanos()),
        };
        // If the wait is interrupted, it ends early, which does no harm.
        let _ = poll(&mut fds, Some(&timeout));
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.broadcast.wake_event, &mut count);
    }

    /// The key of the number of alarms.
    fn alarm_key(&self) -> String {
        format!("rcomm/alarm/{}", self.broadcast.parts.attempt)
    }

    /// Calls the roll. If the store does not reply, the next poll reports it.
    fn call_roll(&mut self) {
        let broadcast = &self.broadcast;
        broadcast.store_asked();
        let now = || broadcast.rolls.time();
        let called = self.roll.call(&*broadcast.parts.root, &now);
        if let Ok(called) = called {
            broadcast.rolls.keep(called);
        }
        broadcast.store_replied(&called.map(drop));
    }

    /// Polls the store for alarms of other ranks and for PyTorch's flag, and responds to them. Notes whether
    /// the store replied.
    fn poll_store(&mut self) {
        self.broadcast.store_asked();
        let reply = self.read_store();
        self.broadcast.store_replied(&reply);
        match reply {
            Ok(()) => self.store_lost = false,
            Err(error) => {
                if !self.store_lost {
                    tracing::warn!(%error, "the store does not answer: alarms of other ranks are not received");
                }
                self.store_lost = true;
            }
        }
    }

    /// Answers the newest roll call and new alarms; if there is no new alarm, makes a dump if PyTorch's flag is newly
    /// set.
    pub(super) fn read_store(&mut self) -> Result<()> {
        let parts = &self.broadcast.parts;
        let now = || self.broadcast.rolls.time();
        let roll_answered = self.roll.answer(&*parts.root, &now);
        // A store that refuses this answer may still hold alarms; one that does not reply is not asked again.
        if matches!(&roll_answered, Err(error) if error.kind() == ErrorKind::Timeout) {
            return roll_answered;
        }
        // A rank of rcomm sets the flag after it has raised the alarm. If the alarm were read first, one that is raised
        // between the two reads would look like a failure of a PyTorch rank, whose cause is not known.
        let flag = parts.root.check(&[FLAG])?;
        let raised = parts.root.add(&self.alarm_key(), 0)?;
        if let Some(LinkEnd::StoreAtRank(rank)) = parts.store_end {
            // Once that rank is stopped, nothing can be learned.
            parts.processes.learn(rank);
        }
        if raised > self.answered {
            return self.answer(raised);
        }
        if flag && !self.flag_seen {
            let value = parts.root.get(FLAG, Duration::from_secs(1))?;
            match <[u8; 4]>::try_from(value) {
                Ok(rank) => {
                    let rank = i32::from_ne_bytes(rank);
                    let reason = format!("signal of rank {rank}");
                    self.dump_for_fault(&reason);
                }
                Err(value) => tracing::warn!(
                    bytes = value.len(),
                    "the key {FLAG} does not hold a rank: ignored"
                ),
            }
        }
        self.flag_seen = flag;
        roll_answered
    }

    /// Makes this rank's dump for another rank's fault. It delays this rank's status for a limited time only: a disk
    /// that does not respond must not make this rank look silent.
    fn dump_for_fault(&self, reason: &str) {
        let limit = DUMP_WAIT.min(self.broadcast.parts.status_wait / 4);
        let dump = self.broadcast.begin_fault_dump(reason);
        dump.text(Instant::now() + limit);
    }

    /// Makes this rank's dump, then publishes its status for the alarms up to number `raised` that it has not
    /// yet answered. Aborts this rank's groups if that is configured.
    ///
    /// The dump comes first: the rank that raised the alarm cleans up once it has all answers, and the dump
    /// must show what was pending before the clean-up.
    fn answer(&mut self, raised: i64) -> Result<()> {
        self.answered = raised;
        self.flag_seen = true;
        let cause = self.cause_of(raised);
        self.warn_groups(cause.as_deref());
        let reason = cause.as_deref().unwrap_or("signal of another rank");
        self.dump_for_fault(reason);
        let published = self.publish_up_to(raised);
        if self.broadcast.parts.propagation == Propagation::Abort {
            self.abort_groups(cause.as_deref());
        }
        self.announced = cause.map(|cause| (Instant::now(), cause));
        published
    }

    /// Reports another rank's alarm to the groups that its cause names; to all groups if the cause is not known.
    fn warn_groups(&self, cause: Option<&str>) {
        for group in self.broadcast.parts.watch.groups().iter() {
            // Errors name their group in this way. Another group of the same name is warned as well, and is only more
            // careful then.
            let name = format!("group {}: ", group.label());
            if cause.is_none_or(|cause| cause.contains(&name)) {
                group.failed_elsewhere();
            }
        }
    }

    /// Aborts all groups of this rank, since another rank has failed. Called after the dump and the answer,
    /// which must show what was pending.
    fn abort_groups(&self, cause: Option<&str>) {
        let error = match cause.and_then(|cause| cause.split_once(": ")) {
            Some((failed_rank, reason)) => {
                let message = format!("cancelled: {failed_rank} failed: {reason}");
                let error = Error::new(ErrorKind::Aborted, message);
                match failed_rank
                    .strip_prefix("rank ")
                    .and_then(|rank| rank.parse().ok())
                {
                    Some(rank) => error.with_rank(rank),
                    None => error,
                }
            }
            None => Error::new(ErrorKind::Aborted, "cancelled: another rank failed"),
        };
        for group in self.broadcast.parts.watch.groups().iter() {
            if !group.has_failed() {
                group.close(None, error.clone());
            }
        }
    }

    fn cause_key(&self, alarm: i64) -> String {
        format!("rcomm/cause/{}/{alarm}", self.broadcast.parts.attempt)
    }

    /// Writes the cause of an alarm, unless another rank already has; returns the cause that is stored.
    fn publish_cause(&self, alarm: i64, cause: &str) -> Result<String> {
        let root = &self.broadcast.parts.root;
        let stored = root.compare_set(&self.cause_key(alarm), b"", cause.as_bytes())?;
        Ok(String::from_utf8_lossy(&stored).into_owned())
    }

    /// The cause of an alarm; `None` if the store does not hold it or does not reply.
    fn cause_of(&self, alarm: i64) -> Option<String> {
        let root = &self.broadcast.parts.root;
        let cause = root.get(&self.cause_key(alarm), Duration::from_millis(100));
        Some(String::from_utf8_lossy(&cause.ok()?).into_owned())
    }

    /// Publishes this rank's status for the alarms up to `alarm` for which the store does not have it yet.
    fn publish_up_to(&mut self, alarm: i64) -> Result<()> {
        let first = (self.published + 1).max(alarm - MAX_ANSWERS);
        (first..=alarm).try_for_each(|alarm| {
            self.publish(alarm)?;
            self.published = alarm;
            Ok(())
        })
    }

    /// Publishes this rank's status for an alarm.
    fn publish(&self, alarm: i64) -> Result<()> {
        let report = self.report();
        self.exchange(alarm)
            .publish(&*self.broadcast.parts.root, &report)
    }

    /// This rank's part in the exchange of status for an alarm.
    fn exchange(&self, alarm: i64) -> StatusExchange {
        let parts = &self.broadcast.parts;
        StatusExchange {
            rank: parts.rank,
            attempt: parts.attempt,
            alarm,
            // Waiting, reading and the store's reply must together fit in the time for which a fault waits
            // for the answers.
            wait_time: parts.status_wait * 3 / 4,
            read_time: READ_TIME.min(parts.status_wait / 8),
        }
    }

    /// This rank's status now.
    fn report(&self) -> RankReport {
        let parts = &self.broadcast.parts;
        let groups = parts.watch.groups();
        let wire_ids = groups
            .iter()
            .map(|group| (group.info().id, group.wire_id()));
        let wire_ids = wire_ids.collect();
        let progress = groups.iter().map(|group| (group.wire_id(), group.status()));
        RankReport::of(progress, &parts.recorder.snapshot(), &wire_ids)
    }

    /// Responds to a fault of this rank: raises the alarm, publishes this rank's status, and reads the status
    /// of the others.
    fn respond_to_own_fault(&mut self, incident: &Incident) {
        let (mut store_lost, mut raise_unanswered) = (false, false);
        let answers = match self.raise(incident) {
            Ok(alarm) => {
                incident.update(|progress| progress.raise_ended = true);
                let exchange = self.exchange(alarm);
                let processes = &self.broadcast.parts.processes;
                processes.learn_stopped(incident.members());
                // The waits may lead to ranks that are no members.
                let is_stopped = |rank| {
                    processes.learn_stopped(&[rank]);
                    processes.is_stopped(rank)
                };
                let query = incident.query(&is_stopped, self.broadcast.rolls.newest());
                let mut answers = exchange.collect(&*self.broadcast.parts.root, &query);
                if let Some((at, cause)) = &self.announced
                    && at.elapsed() < RECENT_ALARM
                {
                    answers.text.push_str("; ");
                    let before = reported_before(cause, &incident.finding);
                    answers.text.push_str(&before);
                }
                answers
            }
            Err(error) => {
                // A store that refuses a request, such as a full one, still answers others.
                let answers_others = || self.broadcast.parts.root.check(&["rcomm/alive"]).is_ok();
                store_lost = error.kind() == ErrorKind::Store && !answers_others();
                raise_unanswered = error.kind() == ErrorKind::Timeout;
                StatusReplies::text(format!(
                    "the status of the other ranks is not known: {error}"
                ))
            }
        };
        incident.update(|progress| {
            progress.raise_ended = true;
            progress.raise_unanswered = raise_unanswered;
            progress.store_lost = store_lost;
            progress.answers = Some(answers);
        });
    }

    /// Whether another rank's alarm is so recent that a fault of this rank belongs to it.
    fn had_recent_alarm(&self) -> bool {
        let announced = self.announced.as_ref();
        announced.is_some_and(|(at, _)| at.elapsed() < SAME_FAULT)
    }

    /// Joins an alarm that another rank has raised just before, or raises a new one; sets PyTorch's flag and
    /// publishes this rank's status. Returns the number of the alarm.
    pub(super) fn raise(&mut self, incident: &Incident) -> Result<i64> {
        let parts = &self.broadcast.parts;
        let key = self.alarm_key();
        let mut alarm = parts.root.add(&key, 0)?;
        if alarm > self.answered {
            let cause = self.cause_of(alarm);
            self.warn_groups(cause.as_deref());
            self.announced = cause.map(|cause| (Instant::now(), cause));
        } else if !self.had_recent_alarm() {
            let next = alarm + 1;
            // The cause is written before the alarm: a rank that reads the number must find its cause.
            let own_cause = format!("rank {}: {}", parts.rank, incident.cause);
            let mut stored_cause = self.publish_cause(next, &own_cause)?;
            // All members raise the alarm at about the same time after a time-out: the compare-and-set makes
            // it one alarm.
            let held = parts.root.compare_set(
                &key,
                alarm.to_string().as_bytes(),
                next.to_string().as_bytes(),
            )?;
            let held = std::str::from_utf8(&held)
                .ok()
                .and_then(|text| text.parse().ok());
            alarm = held.ok_or_else(|| {
                Error::new(ErrorKind::Store, format!("the key {key} holds no number"))
            })?;
            if alarm != next {
                // More than one alarm was raised since the count was read.
                stored_cause = self.publish_cause(alarm, &own_cause)?;
            }
            if stored_cause != own_cause {
                self.announced = Some((Instant::now(), stored_cause));
            }
        }
        let rank = i32::try_from(parts.rank).unwrap_or(i32::MAX);
        parts.root.compare_set(FLAG, b"", &rank.to_ne_bytes())?;
        self.flag_seen = true;
        self.answered = alarm;
        self.publish_up_to(alarm)?;
        Ok(alarm)
    }
}

/// Text that refers to an earlier alarm of another rank. The text does not repeat the alarm's cause if that is the same
/// finding as this rank's.
pub(super) fn reported_before(cause: &str, finding: &str) -> String {
    match cause.split_once(": ") {
        Some((rank, theirs)) if theirs.starts_with(finding) => format!("found before by {rank}"),
        _ => format!("reported before by {cause}"),
    }
}
