//! [`FailureBroadcast`]: when one rank fails, all ranks write dumps and exchange their status.
//!
//! All requests to the store are made on a separate thread (`rcomm/dump`), so that a slow store delays the watchdog
//! for a limited time only. Dumps are written on other threads (`rcomm/dump-file`), since disks may be slow, too.
//!
//! | key | holds | writer |
//! |---|---|---|
//! | `exception_dump`, in the root store | rank of the first to raise, as a raw `i32`: PyTorch's flag | a rank that detects a fault |
//! | `rcomm/alarm/<attempt>` | how often the alarm was raised | a rank that detects a fault |
//! | `rcomm/cause/<attempt>/<alarm>` | the cause, as text | the first to raise it, before the alarm itself |
//! | `rcomm/process/<attempt>/<rank>` | which process the rank is, as text | every rank, when its world is made |
//!
//! The ranks exchange their status through other keys ([`status_exchange`](crate::watch::status_exchange)), and so they
//! find out, before a time-out, which ranks run ([`roll_call`]). The thread `rcomm/dump` also watches the FIFOs by
//! which users request a dump.

#[cfg(test)]
mod alarm_model;
mod incident;
mod processes;
mod responder;
mod roll_call;
#[cfg(test)]
pub(crate) mod tests;

pub(crate) use incident::Incident;
use incident::IncidentProgress;
pub(crate) use processes::{NeighborProcesses, Processes};
pub(crate) use responder::ResponderThread;
pub(crate) use roll_call::RollCall;
use roll_call::RollState;

use crate::config::Propagation;
use crate::op::error::{Error, ErrorKind, Result};
use crate::store::Store;
use crate::watch::dump_writer::Dumps;
use crate::watch::status_exchange::StatusReplies;
use crate::watch::watchdog::Watch;
use rcomm_recorder::model::{LinkEnd, Rank, text};
use rcomm_recorder::record::{FlightRecorder, PeerHandle, Timestamp};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// PyTorch's flag: a rank that finds it in the root store makes a dump.
pub(crate) const FLAG: &str = "exception_dump";
/// How long a world that ends waits for dumps that are being written.
const FINISH_TIME: Duration = Duration::from_secs(10);

/// The parts of a rank that the failure broadcast uses.
pub(crate) struct FailureBroadcastParts {
    pub(crate) rank: Rank,
    pub(crate) attempt: u32,
    /// The process that serves the store; `None` if this one does.
    pub(crate) store_end: Option<LinkEnd>,
    /// The root store, which PyTorch's ranks use too.
    pub(crate) root: Arc<dyn Store>,
    pub(crate) watch: Arc<Watch>,
    pub(crate) recorder: Arc<FlightRecorder>,
    /// Which ranks of this host are stopped.
    pub(crate) processes: Arc<dyn Processes>,
    pub(crate) dumps: Arc<Dumps>,
    /// How long the handling of a fault waits for the other ranks' status.
    pub(crate) status_wait: Duration,
    /// The pause between two polls of the store.
    pub(crate) interval: Duration,
    /// What another rank's alarm does to this rank's groups.
    pub(crate) propagation: Propagation,
}

/// One rank's part in the failure broadcast, as the watchdog and its monitor use it. The thread of a
/// [`ResponderThread`] carries it out.
pub(crate) struct FailureBroadcast {
    parts: FailureBroadcastParts,
    /// Faults that the thread `rcomm/dump` has not taken yet.
    incidents: Mutex<Vec<Arc<Incident>>>,
    stopped: AtomicBool,
    /// The eventfd that wakes the thread `rcomm/dump`.
    wake_event: OwnedFd,
    /// The row of the ring in which the store's replies are recorded; `None` if this process serves the
    /// store, or there is no row left.
    store_row: Option<PeerHandle>,
    /// Since when the store has not replied to requests, on the clock of the records; 0 if it has replied to
    /// the last one.
    unanswered_since: AtomicU64,
    /// The same moment in run time, the clock of [`RollState::time`], in ns, plus one; 0 if the store has replied to
    /// the last request.
    unanswered_since_run_time: AtomicU64,
    rolls: RollState,
}

/// How long the thread `rcomm/dump` waits at most for a dump that another rank's alarm or a FIFO has requested.
const DUMP_WAIT: Duration = Duration::from_secs(1);
/// A store that has not replied for this long counts as down: a working one replies in microseconds.
const STORE_SILENT: Duration = Duration::from_secs(2);
/// How long a store that has been silent for [`STORE_SILENT`] is still waited for.
const STORE_LAST_WAIT: Duration = Duration::from_millis(250);
/// A process counts as stopped, and not only about to be continued, if a signal has stopped it for this long. The ranks
/// of a suspended job are continued one after another.
pub(crate) const STOPPED_TIME: Duration = Duration::from_millis(500);
/// The pause between two looks at a stopped process.
pub(crate) const LOOK_TIME: Duration = Duration::from_millis(50);

impl FailureBroadcast {
    pub(crate) fn new(parts: FailureBroadcastParts) -> Result<Arc<Self>> {
        let wake_event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| Error::io("cannot make an eventfd", error))?;
        let store_row = parts.store_end.and_then(|end| parts.recorder.peer(end));
        Ok(Arc::new(Self {
            store_row,
            unanswered_since: AtomicU64::new(0),
            unanswered_since_run_time: AtomicU64::new(0),
            rolls: RollState::default(),
            parts,
            incidents: Mutex::default(),
            stopped: AtomicBool::new(false),
            wake_event,
        }))
    }

    pub(crate) fn recorder(&self) -> &FlightRecorder {
        &self.parts.recorder
    }

    /// The moment until which the handling of a fault that begins now waits for the other ranks' status.
    pub(crate) fn status_until(&self) -> Instant {
        Instant::now() + self.parts.status_wait
    }

    /// The moment until which the handling of a fault waits for this rank's dump, if it began at `began` and has raised
    /// its alarm now. A disk that does not respond must not make the error late, so this is half of the time for the
    /// other ranks' status; if a store that did not reply has used that up, a quarter of it is left for the dump.
    pub(crate) fn dump_until(&self, began: Instant) -> Instant {
        let wait = self.parts.status_wait;
        (began + wait / 2).max(Instant::now() + wait / 4)
    }

    /// Adds to the time for which this process has run.
    pub(crate) fn ran(&self, time: Duration) {
        self.rolls.ran(time);
    }

    /// How long before its time-out an operation asks which ranks run.
    pub(crate) fn roll_time(&self) -> Duration {
        self.parts.status_wait
    }

    /// Asks which ranks run, since an operation comes near its time-out. Does not wait.
    pub(crate) fn call_roll(&self) {
        self.rolls.request();
        self.wake();
    }

    /// Whether the store is served by a rank whose process a signal has stopped, so that it cannot answer.
    fn store_is_stopped(&self) -> bool {
        matches!(self.parts.store_end, Some(LinkEnd::StoreAtRank(rank)) if self.parts.processes.is_stopped(rank))
    }

    /// Whether a signal has stopped the process that serves the store, and each look at the process in this incident
    /// has shown that for [`STOPPED_TIME`]: a process that was stopped only for a moment soon answers.
    fn store_stays_stopped(&self, incident: &Incident) -> bool {
        let is_stopped = self.store_is_stopped();
        let mut stays_stopped = false;
        incident.update(|progress| {
            let before = progress.store_stopped_since.filter(|_| is_stopped);
            stays_stopped = before.is_some_and(|since| since.elapsed() >= STOPPED_TIME);
            progress.store_stopped_since = before.or_else(|| is_stopped.then(Instant::now));
        });
        stays_stopped
    }

    /// Whether an alarm need not wait longer for the store's reply, after it has waited for `waited`: the store has
    /// been silent before, and continues to be.
    fn store_stays_silent(&self, waited: Duration) -> bool {
        waited >= STORE_LAST_WAIT && self.store_silence_in_run_time() >= STORE_SILENT
    }

    /// Raises the alarm and sets PyTorch's flag, so that the other ranks make their dumps.
    ///
    /// # Blocking
    /// For at most a second, and not beyond `until`: a store that does not reply must not keep this rank from its dump.
    /// The wait ends earlier once the process that serves the store has been seen stopped by a signal for
    /// [`STOPPED_TIME`], since it cannot answer. If the store has been silent for [`STORE_SILENT`], the wait ends after
    /// [`STORE_LAST_WAIT`].
    pub(crate) fn raise(&self, incident: &Arc<Incident>, until: Instant) {
        let mut incidents = self
            .incidents
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        incidents.push(incident.clone());
        drop(incidents);
        self.wake();
        let began = Instant::now();
        let until = until.min(began + Duration::from_secs(1));
        let has_ended = |progress: &IncidentProgress| progress.raise_ended;
        let ended_soon = || {
            let pause = LOOK_TIME.min(left_until(until));
            let looked = Instant::now();
            let has_ended = has_ended(&incident.wait(pause, has_ended));
            // The watchdog makes no round during this wait, which is therefore counted here.
            self.ran(looked.elapsed().min(2 * LOOK_TIME));
            has_ended
        };
        while !ended_soon() {
            let is_over = Instant::now() >= until || self.store_stays_silent(began.elapsed());
            if is_over || self.store_stays_stopped(incident) {
                break;
            }
        }
    }

    /// Begins this rank's dump on the thread `rcomm/dump-file`, unless one was made for this fault already. The dump
    /// shows what is pending now. Does not wait: a disk that does not respond must not keep this rank's callers from
    /// their error. The thread finishes the dump later; [`finish_dumps`](Self::finish_dumps) waits for it.
    pub(crate) fn begin_fault_dump(&self, reason: &str) -> BegunDump {
        self.begin_dump(reason, Dumps::make_for_fault)
    }

    /// Makes this rank's dump on the thread `rcomm/dump-file`, even if one was made recently.
    ///
    /// # Blocking
    /// Until `until` at most: the thread finishes the dump later.
    pub(crate) fn dump(&self, reason: &str, until: Instant) {
        let make = |dumps: &Dumps, reason: &str| dumps.make(reason).unwrap_or_default();
        self.begin_dump(reason, make).text(until);
    }

    /// Runs `make`, which returns what [`BegunDump::text`] returns, on the thread `rcomm/dump-file`.
    fn begin_dump(
        &self,
        reason: &str,
        make: impl FnOnce(&Dumps, &str) -> String + Send + 'static,
    ) -> BegunDump {
        let (dumps, reason) = (self.parts.dumps.clone(), reason.to_owned());
        let (done, place) = channel();
        let Some(under_way) = dumps.announce() else {
            return BegunDump(Err("no dump: earlier ones are not written yet".to_owned()));
        };
        let write = move || {
            let _under_way = under_way;
            // This fails if the caller no longer waits.
            let _ = done.send(make(&dumps, &reason));
        };
        let thread = std::thread::Builder::new().name("rcomm/dump-file".to_owned());
        BegunDump(match thread.spawn(write) {
            Ok(_) => Ok(place),
            Err(error) => Err(format!(
                "no dump: cannot start the thread rcomm/dump-file: {error}"
            )),
        })
    }

    /// Waits until this rank's dumps are written, before the process ends.
    ///
    /// # Blocking
    /// For at most [`FINISH_TIME`]: a disk that does not respond must not keep the process from ending.
    pub(crate) fn finish_dumps(&self) {
        if !self.parts.dumps.wait(FINISH_TIME) {
            tracing::warn!("a dump is not written yet, and may be missing");
        }
    }

    /// How long ago an operation was issued, if its record is still there.
    pub(crate) fn age_of(&self, record_id: u64) -> Option<Duration> {
        let dump = self.parts.recorder.snapshot();
        let entry = dump
            .entries
            .iter()
            .rfind(|entry| entry.record_id == record_id)?;
        let age = dump.identity.dump_time_ns - entry.time_created_ns;
        u64::try_from(age).ok().map(Duration::from_nanos)
    }

    /// Adds the other ranks' status to an error, and corrects the ranks that it names:
    ///
    /// - If the ranks of a time-out wait for others themselves, the error names the ranks at which these waits end.
    ///   If it names no rank, or only ranks that have arrived, it names the absent ranks. In both cases its sentence
    ///   begins with the new ranks.
    /// - If rank 0 is another process and serves the store, the error names only rank 0 if the connection to the store
    ///   was lost, unless the error names only this rank. A time-out, or an error that names rank 0 among others, also
    ///   names only rank 0 in this case: the store has left the alarm unanswered, and either it has not replied for
    ///   [`STORE_SILENT`], or each look since the alarm has shown for [`STOPPED_TIME`] that a signal has stopped rank
    ///   0.
    ///
    /// # Blocking
    /// Until the other members have answered, or until `until`.
    pub(crate) fn complete(&self, error: Error, incident: &Incident, until: Instant) -> Error {
        let answers = self.answers(incident, until);
        let mut error = error.with_more(&answers.text);
        if error.is_time_out()
            && let Some(cause) = answers.cause_of_wait(error.ranks())
        {
            if cause.ranks != error.ranks() {
                error = error.with_lead(&cause.to_text());
            }
            error = error.with_ranks(cause.ranks);
        }
        let Some(LinkEnd::StoreAtRank(_)) = self.parts.store_end else {
            return error;
        };
        // A time-out may come from a wait for rank 0, whichever ranks the error names.
        let may_be_rank_0 = error.is_time_out() || error.ranks().contains(&0);
        if may_be_rank_0 && incident.wait(Duration::ZERO, |_| true).awaits_store() {
            // Whether the rank that this one waited for works is not known here. Rank 0 does not answer.
            let why = if self.store_silence_in_run_time() >= STORE_SILENT {
                let lasted = text::duration(self.store_silence());
                Some(format!(
                    "rank 0, which serves the store, has not answered for {lasted}"
                ))
            } else {
                self.store_stays_stopped(incident)
                    .then(|| "a signal has stopped rank 0, which serves the store".to_owned())
            };
            if let Some(why) = why {
                error = error.with_ranks(&[0]).with_more(&why);
            }
        }
        // A rank whose own host breaks its connections does not know whether rank 0 works.
        let blames_itself = error.ranks() == [self.parts.rank];
        if !blames_itself && incident.wait(Duration::ZERO, |_| true).store_lost {
            let rank_0 = "the connection to the store, which rank 0 serves, was lost";
            let is_named = error.ranks() == [0] && error.kind() == ErrorKind::PeerLost;
            return match is_named {
                true => error,
                false => error.with_ranks(&[0]).with_more(rank_0),
            };
        }
        error
    }

    /// The other members' status, or the reason why it is not known.
    ///
    /// # Blocking
    /// Until the exchange has ended, or until `until`. Does not wait if the store has not yet replied to the
    /// alarm.
    fn answers(&self, incident: &Incident, until: Instant) -> StatusReplies {
        let need_not_wait =
            |progress: &IncidentProgress| !progress.raise_ended || progress.answers.is_some();
        let mut progress = incident.wait(left_until(until), need_not_wait);
        progress.answers.take().unwrap_or_else(|| {
            let reason = match progress.raise_ended {
                true => "the answers of the other ranks did not arrive in time",
                false => "the status of the other ranks is not known: the store has not answered",
            };
            StatusReplies::text(reason.to_owned())
        })
    }

    /// For how long the store has not replied to requests; zero if it has replied to the last one.
    fn store_silence(&self) -> Duration {
        match self.unanswered_since.load(Ordering::Relaxed) {
            0 => Duration::ZERO,
            since => {
                let now = self.parts.recorder.now().as_ns();
                Duration::from_nanos(now.saturating_sub(since))
            }
        }
    }

    /// For how long the store has not replied to requests, of the time for which this process has run.
    fn store_silence_in_run_time(&self) -> Duration {
        match self.unanswered_since_run_time.load(Ordering::Relaxed) {
            0 => Duration::ZERO,
            since => self
                .rolls
                .time()
                .saturating_sub(Duration::from_nanos(since - 1)),
        }
    }

    /// Notes that a request is sent to the store.
    fn store_asked(&self) {
        let since = u64::try_from(self.rolls.time().as_nanos()).unwrap_or(u64::MAX);
        // If there is an earlier request without a reply, its time is kept.
        let _ = self.unanswered_since_run_time.compare_exchange(
            0,
            since.saturating_add(1),
            Ordering::Relaxed,
            Ordering::Relaxed,
        );
        let now = self.parts.recorder.now();
        let first = self.unanswered_since.compare_exchange(
            0,
            now.as_ns(),
            Ordering::Relaxed,
            Ordering::Relaxed,
        );
        if let (Ok(_), Some(row)) = (first, self.store_row) {
            let interval = self.parts.interval;
            self.parts.recorder.update_peer(row, |facts| {
                (facts.waited_since, facts.interval) = (now, interval);
            });
        }
    }

    /// Notes the store's reply to the request, or the failure of the request.
    fn store_replied(&self, reply: &Result<()>) {
        let errno = match reply {
            Ok(()) => 0,
            Err(error) => errno_of(error),
        };
        let answered = reply.is_ok();
        if answered {
            self.unanswered_since.store(0, Ordering::Relaxed);
            self.unanswered_since_run_time.store(0, Ordering::Relaxed);
        }
        if let Some(row) = self.store_row {
            let now = self.parts.recorder.now();
            self.parts.recorder.update_peer(row, |facts| {
                (facts.sampled, facts.errno) = (now, errno);
                if answered {
                    (facts.heard, facts.waited_since) = (now, Timestamp::default());
                }
            });
        }
    }

    /// Wakes the thread `rcomm/dump`.
    fn wake(&self) {
        // The write can fail only if the counter is full, and then the thread is awake already.
        let _ = rustix::io::write(&self.wake_event, &1u64.to_ne_bytes());
    }
}

/// A dump that the thread `rcomm/dump-file` makes, or why there is none.
pub(crate) struct BegunDump(std::result::Result<Receiver<String>, String>);

impl BegunDump {
    /// Text for an error message: the location of the dump, or why there is none yet.
    ///
    /// # Blocking
    /// Until the dump is written, or until `until`.
    pub(crate) fn text(self, until: Instant) -> String {
        match self.0 {
            Ok(place) => place
                .recv_timeout(left_until(until))
                .unwrap_or_else(|_| "dump: not written yet".to_owned()),
            Err(reason) => reason,
        }
    }
}

/// The `errno` of the system call that caused an error; 0 if there is none.
fn errno_of(error: &Error) -> u32 {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        let io = error.downcast_ref::<std::io::Error>();
        if let Some(errno) = io.and_then(std::io::Error::raw_os_error) {
            return errno.unsigned_abs();
        }
        cause = error.source();
    }
    0
}

fn left_until(until: Instant) -> Duration {
    until.saturating_duration_since(Instant::now())
}
