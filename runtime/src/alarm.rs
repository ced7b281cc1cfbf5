//! [`Alarm`]: when one rank fails, all ranks write down what they see, and tell each other how far
//! they are.
//!
//! Everything goes through the store, on a thread of its own (`rcomm/dump`), so that neither a slow
//! store nor a slow disk holds up the watchdog for longer than it allows.
//!
//! | key | holds | who writes |
//! |---|---|---|
//! | `exception_dump`, in the root store | rank of the first to raise, as a raw `i32`: PyTorch's flag | who sees a fault |
//! | `rcomm/alarm/<attempt>` | how often the alarm was raised | who sees a fault |
//! | `rcomm/cause/<attempt>/<alarm>` | why, in words | who raised it |
//! | `rcomm/status/<attempt>/<alarm>/<rank>` | how far this rank is, in JSON | every rank |
//!
//! The same thread watches the FIFOs that ask for a dump.

use crate::dump_writer::Dumps;
use crate::error::{Error, ErrorKind, Result};
use crate::pipe::DumpPipe;
use crate::store::Store;
use crate::watchdog::Watch;
use crate::work::Voyage;
use rcomm_recorder::model::{ProcessGroupInfo, ProcessGroupStatus, Rank};
use rcomm_recorder::record::FlightRecorder;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fd::OwnedFd;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

/// PyTorch's flag: who finds it in the root store makes a dump.
const FLAG: &str = "exception_dump";
/// The most alarms that are answered at once, if many were raised since the last look.
const MOST_ANSWERS: i64 = 16;
/// For how long another rank's alarm is taken for the reason of what happens here.
const RECENT: Duration = Duration::from_secs(60);
/// The most ranks that an error lists by number.
const MOST_RANKS: usize = 16;

/// One fault, from the flag to the answers.
pub(crate) struct Episode {
    info: ProcessGroupInfo,
    wire_id: u64,
    seq: u64,
    is_p2p: bool,
    /// What happened, in words.
    cause: String,
    /// A member that is known to be gone: nobody waits for its answer.
    gone: Option<Rank>,
    progress: Mutex<EpisodeProgress>,
    moved: Condvar,
}

#[derive(Default)]
struct EpisodeProgress {
    raised: bool,
    answers: Option<String>,
}

impl Episode {
    pub(crate) fn new(
        info: &ProcessGroupInfo,
        wire_id: u64,
        voyage: &Voyage,
        error: &Error,
    ) -> Arc<Self> {
        let lost = error.kind() == ErrorKind::PeerLost;
        Arc::new(Self {
            info: info.clone(),
            wire_id,
            cause: error.to_string(),
            gone: error.rank().filter(|_| lost),
            seq: voyage.seq,
            is_p2p: voyage.is_p2p,
            progress: Mutex::default(),
            moved: Condvar::new(),
        })
    }

    /// A fault of the rank itself and of no operation: the others write down what they see, and
    /// nobody is asked how far it is.
    pub(crate) fn of_rank(cause: &str) -> Arc<Self> {
        let info = ProcessGroupInfo {
            id: ProcessGroupInfo::UNKNOWN_ID,
            name: String::new(),
            desc: String::new(),
            ranks: Vec::new(),
        };
        Arc::new(Self {
            info,
            wire_id: 0,
            seq: 0,
            is_p2p: false,
            cause: cause.to_owned(),
            gone: None,
            progress: Mutex::default(),
            moved: Condvar::new(),
        })
    }

    fn update(&self, change: impl FnOnce(&mut EpisodeProgress)) {
        change(&mut self.progress.lock().unwrap_or_else(PoisonError::into_inner));
        self.moved.notify_all();
    }

    fn wait(
        &self,
        timeout: Duration,
        until: impl Fn(&EpisodeProgress) -> bool,
    ) -> MutexGuard<'_, EpisodeProgress> {
        let progress = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self
            .moved
            .wait_timeout_while(progress, timeout, |progress| !until(progress));
        waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

/// How far one rank is, as it tells the others.
#[derive(Debug, Default, Serialize, Deserialize)]
struct RankReport {
    /// By the group's number on the wire, in hexadecimal.
    groups: BTreeMap<String, ProcessGroupStatus>,
    phase: String,
    /// For how long it has been in that phase.
    phase_ms: u64,
    step: i64,
}

/// What the alarm needs to know of its rank.
pub(crate) struct AlarmParts {
    pub(crate) rank: Rank,
    pub(crate) attempt: u32,
    /// The store that PyTorch's ranks see too.
    pub(crate) root: Arc<dyn Store>,
    pub(crate) watch: Arc<Watch>,
    pub(crate) recorder: Arc<FlightRecorder>,
    pub(crate) dumps: Arc<Dumps>,
    pub(crate) status_wait: Duration,
    pub(crate) interval: Duration,
}

/// The side that the watchdog sees.
pub(crate) struct Alarm {
    parts: AlarmParts,
    episodes: Mutex<Vec<Arc<Episode>>>,
    stopped: AtomicBool,
    bell: OwnedFd,
}

impl Alarm {
    pub(crate) fn new(parts: AlarmParts) -> Result<Arc<Self>> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| Error::io("cannot make an eventfd", error))?;
        Ok(Arc::new(Self {
            parts,
            episodes: Mutex::default(),
            stopped: AtomicBool::new(false),
            bell,
        }))
    }

    pub(crate) fn recorder(&self) -> &FlightRecorder {
        &self.parts.recorder
    }

    /// Raises the flag, so that the others write down what they see.
    ///
    /// # Blocking
    /// For a second at most: a store that does not answer must not keep this rank from its dump.
    pub(crate) fn raise(&self, episode: &Arc<Episode>) {
        let mut episodes = self.episodes.lock().unwrap_or_else(PoisonError::into_inner);
        episodes.push(episode.clone());
        drop(episodes);
        self.ring();
        drop(episode.wait(Duration::from_secs(1), |progress| progress.raised));
    }

    /// Makes this rank's dump, unless one was made for this fault already; says where it is.
    pub(crate) fn dump_for_fault(&self, reason: &str) -> String {
        self.parts.dumps.make_for_fault(reason)
    }

    /// Makes this rank's dump, whether or not there is one of late.
    pub(crate) fn dump(&self, reason: &str) {
        self.parts.dumps.make(reason);
    }

    /// How long ago an operation was issued, if its record is still there.
    pub(crate) fn age_of(&self, record_id: u64) -> Option<Duration> {
        let dump = self.parts.recorder.snapshot();
        let entry = dump.entries.iter().rfind(|it| it.record_id == record_id)?;
        let age = dump.identity.dump_time_ns - entry.time_created_ns;
        u64::try_from(age).ok().map(Duration::from_nanos)
    }

    /// What the other members said, in words; empty if that is not known.
    ///
    /// # Blocking
    /// Until they have, or for as long as the configuration allows.
    pub(crate) fn answers(&self, episode: &Episode) -> String {
        // The thread may have another episode in hand.
        let patience = self.parts.status_wait + Duration::from_secs(1);
        let mut progress = episode.wait(patience, |progress| progress.answers.is_some());
        progress.answers.take().unwrap_or_default()
    }

    fn ring(&self) {
        // It can only fail when the counter is full, and then the thread is awake.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
    }
}

/// Owns the thread that speaks to the store and watches the FIFOs.
pub(crate) struct AlarmThread {
    alarm: Arc<Alarm>,
    thread: Option<JoinHandle<()>>,
}

impl AlarmThread {
    pub(crate) fn start(alarm: Arc<Alarm>, pipes: Vec<DumpPipe>) -> Result<Self> {
        let responder = Responder {
            alarm: alarm.clone(),
            pipes,
            answered: 0,
            heard: None,
            flag_seen: false,
            store_lost: false,
        };
        let thread = std::thread::Builder::new()
            .name("rcomm/dump".to_owned())
            .spawn(move || responder.run())
            .map_err(|error| Error::io("cannot start the thread rcomm/dump", error))?;
        Ok(Self {
            alarm,
            thread: Some(thread),
        })
    }

    pub(crate) fn stop(&mut self) {
        self.alarm.stopped.store(true, Ordering::Release);
        self.alarm.ring();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that makes dumps panicked");
        }
    }
}

impl Drop for AlarmThread {
    fn drop(&mut self) {
        self.stop();
    }
}

/// What the thread holds.
struct Responder {
    alarm: Arc<Alarm>,
    pipes: Vec<DumpPipe>,
    /// The newest alarm that this rank has answered.
    answered: i64,
    /// The last alarm of another rank: when it was heard, and its cause.
    heard: Option<(Instant, String)>,
    /// PyTorch's flag was up at the last look.
    flag_seen: bool,
    /// The store did not answer at the last look.
    store_lost: bool,
}

impl Responder {
    fn run(mut self) {
        let mut next_look = Instant::now();
        while !self.alarm.stopped.load(Ordering::Acquire) {
            self.sleep_until(next_look);
            let episodes = std::mem::take(
                &mut *self
                    .alarm
                    .episodes
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner),
            );
            for episode in episodes {
                self.respond_to_own(&episode);
            }
            for at in 0..self.pipes.len() {
                if self.pipes[at].was_written() {
                    let path = self.pipes[at].path().display().to_string();
                    self.alarm.parts.dumps.make(&format!("asked for by {path}"));
                }
            }
            if Instant::now() >= next_look {
                self.look_at_store();
                let interval = self.alarm.parts.interval;
                // A store that is gone is asked less often.
                next_look = Instant::now() + interval * if self.store_lost { 8 } else { 1 };
            }
        }
    }

    fn sleep_until(&self, wake: Instant) {
        let rest = wake.saturating_duration_since(Instant::now());
        let mut fds = vec![PollFd::new(&self.alarm.bell, PollFlags::IN)];
        let pipes = self.pipes.iter().map(|pipe| pipe.fd());
        fds.extend(pipes.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        let timeout = Timespec {
            tv_sec: i64::try_from(rest.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(rest.subsec_nanos()),
        };
        // An interrupted wait is a short one.
        let _ = poll(&mut fds, Some(&timeout));
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.alarm.bell, &mut count);
    }

    fn key(&self) -> String {
        format!("rcomm/alarm/{}", self.alarm.parts.attempt)
    }

    /// Whether another rank has raised the alarm or PyTorch's flag.
    fn look_at_store(&mut self) {
        match self.hear() {
            Ok(()) => self.store_lost = false,
            Err(error) => {
                if !self.store_lost {
                    tracing::warn!(%error, "the store does not answer: alarms of other ranks are not heard");
                }
                self.store_lost = true;
            }
        }
    }

    fn hear(&mut self) -> Result<()> {
        let parts = &self.alarm.parts;
        let raised = parts.root.add(&self.key(), 0)?;
        if raised > self.answered {
            return self.answer(raised);
        }
        let flag = parts.root.check(&[FLAG])?;
        if flag && !self.flag_seen {
            let value = parts.root.get(FLAG, Duration::from_secs(1))?;
            match <[u8; 4]>::try_from(value) {
                Ok(rank) => {
                    let rank = i32::from_ne_bytes(rank);
                    parts
                        .dumps
                        .make_for_fault(&format!("signal of rank {rank}"));
                }
                Err(value) => tracing::warn!(
                    bytes = value.len(),
                    "the key {FLAG} does not hold a rank: ignored"
                ),
            }
        }
        self.flag_seen = flag;
        Ok(())
    }

    /// Makes this rank's dump, then tells how far it is, for every alarm that was not answered yet.
    ///
    /// In this order: who raised the alarm cleans up once it has heard everybody, and a dump shall
    /// show what was pending before that.
    fn answer(&mut self, raised: i64) -> Result<()> {
        let first = (self.answered + 1).max(raised - MOST_ANSWERS);
        self.answered = raised;
        self.flag_seen = true;
        let cause = self.cause_of(raised);
        let reason = cause.as_deref().unwrap_or("signal of another rank");
        self.alarm.parts.dumps.make_for_fault(reason);
        self.heard = cause.map(|cause| (Instant::now(), cause));
        (first..=raised).try_for_each(|alarm| self.tell(alarm))
    }

    fn cause_key(&self, alarm: i64) -> String {
        format!("rcomm/cause/{}/{alarm}", self.alarm.parts.attempt)
    }

    /// Why an alarm was raised, if whoever did has said so.
    fn cause_of(&self, alarm: i64) -> Option<String> {
        let root = &self.alarm.parts.root;
        let cause = root.get(&self.cause_key(alarm), Duration::from_millis(100));
        Some(String::from_utf8_lossy(&cause.ok()?).into_owned())
    }

    fn tell(&self, alarm: i64) -> Result<()> {
        let parts = &self.alarm.parts;
        let report = serde_json::to_vec(&self.report()).unwrap_or_default();
        parts.root.set(&self.status_key(alarm, parts.rank), &report)
    }

    fn status_key(&self, alarm: i64, rank: Rank) -> String {
        format!("rcomm/status/{}/{alarm}/{rank}", self.alarm.parts.attempt)
    }

    fn report(&self) -> RankReport {
        let parts = &self.alarm.parts;
        let groups = parts.watch.groups();
        let groups = groups
            .iter()
            .map(|group| (wire_name(group.wire_id()), group.status()));
        let groups = groups.collect();
        let status = parts.recorder.snapshot().status.unwrap_or_default();
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let now_ms = now.map_or(0, |now| now.as_millis() as i64);
        RankReport {
            groups,
            phase_ms: u64::try_from(now_ms - status.phase_since_ns / 1_000_000).unwrap_or(0),
            phase: status.phase,
            step: status.step,
        }
    }

    /// This rank's own fault: raise, tell, and hear the others.
    fn respond_to_own(&mut self, episode: &Episode) {
        let answers = match self.raise(episode) {
            Ok(alarm) => {
                episode.update(|progress| progress.raised = true);
                let answers = self.collect(episode, alarm);
                match &self.heard {
                    Some((at, cause)) if at.elapsed() < RECENT => {
                        format!("{answers}; reported before by {cause}")
                    }
                    _ => answers,
                }
            }
            Err(error) => format!("the other ranks could not be asked: {error}"),
        };
        episode.update(|progress| {
            progress.raised = true;
            progress.answers = Some(answers);
        });
    }

    /// Joins an alarm that is being raised by another rank, or raises a new one.
    fn raise(&mut self, episode: &Episode) -> Result<i64> {
        let parts = &self.alarm.parts;
        let key = self.key();
        let mut alarm = parts.root.add(&key, 0)?;
        if alarm <= self.answered {
            alarm = parts.root.add(&key, 1)?;
            let cause = format!("rank {}: {}", parts.rank, episode.cause);
            parts.root.set(&self.cause_key(alarm), cause.as_bytes())?;
        } else {
            self.heard = self.cause_of(alarm).map(|cause| (Instant::now(), cause));
        }
        let rank = i32::try_from(parts.rank).unwrap_or(i32::MAX);
        parts.root.compare_set(FLAG, b"", &rank.to_ne_bytes())?;
        self.flag_seen = true;
        let first = (self.answered + 1).max(alarm - MOST_ANSWERS);
        self.answered = alarm;
        (first..=alarm).try_for_each(|alarm| self.tell(alarm))?;
        Ok(alarm)
    }

    fn collect(&self, episode: &Episode, alarm: i64) -> String {
        let parts = &self.alarm.parts;
        let until = Instant::now() + parts.status_wait;
        let mut roll = Roll::default();
        for &rank in &episode.info.ranks {
            if episode.gone == Some(rank) {
                roll.gone.push(rank);
                continue;
            }
            let key = self.status_key(alarm, rank);
            let rest = until.saturating_duration_since(Instant::now());
            let rest = rest.max(Duration::from_millis(1));
            let report = parts.root.get(&key, rest).ok();
            let report = report.and_then(|bytes| serde_json::from_slice::<RankReport>(&bytes).ok());
            roll.call(episode, rank, report);
        }
        roll.in_words(episode.is_p2p)
    }
}

fn wire_name(wire_id: u64) -> String {
    format!("{wire_id:016x}")
}

/// Who has come and who has not.
#[derive(Default)]
struct Roll {
    arrived: Vec<Rank>,
    missing: Vec<(Rank, String)>,
    silent: Vec<Rank>,
    gone: Vec<Rank>,
}

impl Roll {
    fn call(&mut self, episode: &Episode, rank: Rank, report: Option<RankReport>) {
        let Some(report) = report else {
            self.silent.push(rank);
            return;
        };
        let status = report.groups.get(&wire_name(episode.wire_id));
        let last = status.map_or(-1, |status| status.last_enqueued);
        let seq = i64::try_from(episode.seq).unwrap_or(i64::MAX);
        if !episode.is_p2p && last >= seq {
            self.arrived.push(rank);
            return;
        }
        let mut place = match (status, last) {
            (None, _) => "has not made this group".to_owned(),
            (_, ..=0) => "has called no collective here yet".to_owned(),
            (_, last) => format!("last collective here is #{last}"),
        };
        if !report.phase.is_empty() {
            let lasted = Duration::from_millis(report.phase_ms);
            let _ = write!(place, ", in phase {:?} for {lasted:.1?}", report.phase);
        }
        if report.step >= 0 {
            let _ = write!(place, ", in step {}", report.step);
        }
        self.missing.push((rank, place));
    }

    fn in_words(&self, is_p2p: bool) -> String {
        let mut parts = Vec::new();
        if !is_p2p {
            let none = self.arrived.is_empty();
            parts.push(format!(
                "arrived: {}",
                if none {
                    "nobody".to_owned()
                } else {
                    list(&self.arrived)
                }
            ));
        }
        if !self.missing.is_empty() {
            let what = if is_p2p { "members" } else { "not arrived" };
            let mut text = format!("{what}: ");
            for (at, (rank, place)) in self.missing.iter().take(MOST_RANKS).enumerate() {
                let comma = if at == 0 { "" } else { ", " };
                let _ = write!(text, "{comma}rank {rank} ({place})");
            }
            if let Some(more) = self.missing.len().checked_sub(MOST_RANKS + 1) {
                let _ = write!(text, " and {} more", more + 1);
            }
            parts.push(text);
        }
        if !self.gone.is_empty() {
            parts.push(format!("gone: {}", list(&self.gone)));
        }
        if !self.silent.is_empty() {
            parts.push(format!("no answer: {}", list(&self.silent)));
        }
        parts.join("; ")
    }
}

/// `rank 3`, `ranks 1, 2, 5`, or the first few and how many more.
fn list(ranks: &[Rank]) -> String {
    let shown: Vec<String> = ranks.iter().take(MOST_RANKS).map(Rank::to_string).collect();
    let mut text = format!(
        "rank{} {}",
        if ranks.len() == 1 { "" } else { "s" },
        shown.join(", ")
    );
    if ranks.len() > MOST_RANKS {
        let _ = write!(text, " and {} more", ranks.len() - MOST_RANKS);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcomm_recorder::model::OpType;

    fn episode(op: OpType, seq: u64) -> Arc<Episode> {
        let info = ProcessGroupInfo {
            id: 1,
            name: "dp".to_owned(),
            desc: "dp".to_owned(),
            ranks: vec![0, 1, 2, 3],
        };
        let voyage = Voyage {
            record_id: 1,
            op,
            seq,
            is_p2p: op.is_p2p(),
            timeout: Duration::from_secs(1),
        };
        let error = Error::new(ErrorKind::Timeout, "not done after 1s");
        Episode::new(&info, 7, &voyage, &error)
    }

    fn report(last: i64, phase: &str) -> Option<RankReport> {
        let status = ProcessGroupStatus {
            last_enqueued: last,
            ..ProcessGroupStatus::default()
        };
        Some(RankReport {
            groups: BTreeMap::from([(wire_name(7), status)]),
            phase: phase.to_owned(),
            phase_ms: 6_100,
            step: -1,
        })
    }

    #[test]
    fn who_came_and_who_did_not_is_said_in_one_line() {
        let episode = episode(OpType::AllReduce, 41);
        let mut roll = Roll::default();
        roll.call(&episode, 0, report(41, ""));
        roll.call(&episode, 1, report(42, "backward"));
        roll.call(&episode, 2, report(40, "load data"));
        roll.call(&episode, 3, None);
        assert_eq!(
            roll.in_words(false),
            "arrived: ranks 0, 1; not arrived: rank 2 (last collective here is #40, in phase \
             \"load data\" for 6.1s); no answer: rank 3"
        );
    }

    #[test]
    fn a_long_list_is_cut() {
        let ranks: Vec<Rank> = (0..20).collect();
        assert!(list(&ranks).ends_with("14, 15 and 4 more"));
        assert_eq!(list(&[3]), "rank 3");
    }
}
