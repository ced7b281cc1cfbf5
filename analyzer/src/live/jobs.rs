//! Lists the jobs of a node with their verdicts.

use crate::live::source::{JobChoice, RingSource, Source, SourceError};
use crate::live::watch::time_spent;
use crate::live::{Anchor, Live, LiveOptions};
use rcomm_recorder::publish::{RingListing, list_rings};
use rcomm_verdict::{Report, Severity, analyze};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// At most this many jobs are judged: those that are alive first, then the newest. The others are listed without a
/// verdict.
const MOST_JUDGED: usize = 16;
/// The [`entry_budget`](LiveOptions::entry_budget) of one job.
const ENTRY_BUDGET: usize = 50_000;
/// The shortest pause between two polls. The pause is longer if [`PAUSE_PER_COST`] demands it.
const SHORTEST_PAUSE: Duration = Duration::from_secs(3);
/// The pause after a poll is at least this many times as long as the processor time of the poll and its judgments,
/// so that both together take at most a fiftieth of a core.
const PAUSE_PER_COST: u32 = 50;
/// The longest time that a poll of one job may take.
const POLL_TIMEOUT: Duration = Duration::from_secs(2);

/// A job that has rings on this node.
#[derive(Clone, Debug)]
pub struct NodeJob {
    /// The name of the job.
    pub name: String,
    /// The number of ranks with a ring on this node.
    pub ranks: usize,
    /// The number of those ranks whose process is alive.
    pub alive: usize,
    /// When the job's newest ring was created, wall clock, ns since the epoch.
    pub created_ns: i64,
    /// The report on the ranks of this node; `None` if the job has not been judged yet, or is not among the 16 that are
    /// judged (those that are alive first, then the newest).
    pub report: Option<Arc<Report>>,
}

impl NodeJob {
    /// The urgency by which jobs are listed: 0 with an error, 1 with a warning, 2 for others that are alive, 3 for
    /// others that are over.
    pub fn urgency(&self) -> u8 {
        let worst = self.report.iter().flat_map(|report| &report.findings);
        match worst.map(|finding| finding.severity).min() {
            Some(Severity::Error) => 0,
            Some(Severity::Warning) => 1,
            Some(Severity::Note) | None if self.alive > 0 => 2,
            Some(Severity::Note) | None => 3,
        }
    }
}

/// Lists and judges all jobs with rings in one directory.
pub struct NodeJobs {
    directory: PathBuf,
    judged: BTreeMap<String, JudgedJob>,
}

/// The records of one job and its last report.
struct JudgedJob {
    source: RingSource,
    live: Live,
    report: Option<Arc<Report>>,
}

impl NodeJobs {
    /// Prepares the list of the jobs with rings in `directory`; nothing is read before the first [`poll`](Self::poll).
    pub fn new(directory: PathBuf) -> Self {
        Self {
            directory,
            judged: BTreeMap::new(),
        }
    }

    /// Begins a view without a chosen job. If several jobs are alive and the records of one of them show an error, the
    /// view shows the newest such job, not the newest of all. Changes nothing if a job is chosen, or if the directory
    /// cannot be read: the view's source reports that.
    ///
    /// # Blocking
    ///
    /// For as long as [`poll`](Self::poll) if several jobs are alive, else for one listing of the directory.
    pub fn begin(directory: PathBuf, choice: &JobChoice, anchor: Anchor) {
        if choice.shown().is_some() {
            return;
        }
        let jobs = Self::poll_several(directory, anchor);
        let has_error = |job: &&NodeJob| job.alive > 0 && job.urgency() == 0;
        if let Some(job) = jobs.iter().find(has_error) {
            choice.show_unchosen(&job.name, true);
        }
    }

    /// The jobs with rings in `directory`, as [`poll`](Self::poll) lists them, if several are alive. Empty if at most one
    /// is, or if the directory cannot be read.
    ///
    /// # Blocking
    ///
    /// For as long as [`poll`](Self::poll) if several jobs are alive, else for one listing of the directory.
    pub fn poll_several(directory: PathBuf, anchor: Anchor) -> Vec<NodeJob> {
        let listed = by_name(list_rings(&directory).unwrap_or_default());
        if listed.iter().filter(|job| job.alive > 0).count() < 2 {
            return Vec::new();
        }
        Self::new(directory).poll(anchor).unwrap_or_default()
    }

    /// Lists all jobs, ordered by [`NodeJob::urgency`] and then the newest first, and judges at most 16 of them: those
    /// that are alive first, then the newest.
    ///
    /// # Blocking
    ///
    /// Reads the ring files of the judged jobs, for at most two seconds a job (32 seconds in all); no process has to
    /// answer. Listing the directory and analyzing the records have no limit of time.
    ///
    /// # Errors
    ///
    /// If the directory cannot be read.
    pub fn poll(&mut self, anchor: Anchor) -> Result<Vec<NodeJob>, SourceError> {
        self.poll_while(anchor, || true)
    }

    /// Does what [`poll`](Self::poll) does, but judges no further job once `go_on` returns false: the jobs that are
    /// left are listed without a report.
    fn poll_while(
        &mut self,
        anchor: Anchor,
        go_on: impl Fn() -> bool,
    ) -> Result<Vec<NodeJob>, SourceError> {
        let listing = list_rings(&self.directory).map_err(|error| SourceError::Unusable {
            place: self.directory.display().to_string(),
            reason: error.to_string(),
        })?;
        let mut jobs = by_name(listing);
        jobs.sort_by_key(|job| Reverse((job.alive > 0, job.created_ns)));
        let judged: BTreeSet<&str> = jobs.iter().take(MOST_JUDGED).map(|j| &*j.name).collect();
        self.judged.retain(|name, _| judged.contains(&**name));
        for job in jobs.iter_mut().take(MOST_JUDGED) {
            if !go_on() {
                break;
            }
            job.report = self.judge(&job.name, anchor);
        }
        jobs.sort_by(|a, b| {
            let age = |job: &NodeJob| Reverse(job.created_ns);
            (a.urgency(), age(a), &a.name).cmp(&(b.urgency(), age(b), &b.name))
        });
        Ok(jobs)
    }

    /// Polls the rings of a job, and returns the newest report on the job.
    fn judge(&mut self, name: &str, anchor: Anchor) -> Option<Arc<Report>> {
        let known = self.judged.entry(name.to_owned()).or_insert_with(|| {
            let choice = JobChoice::of(Some(name.to_owned()));
            let source = RingSource::showing(self.directory.clone(), choice);
            let options = LiveOptions {
                entry_budget: ENTRY_BUDGET,
                ..LiveOptions::default()
            };
            let live = Live::new(options, analyze, vec![source.name()]);
            JudgedJob {
                source,
                live,
                report: None,
            }
        });
        let poll = known.source.poll(Instant::now() + POLL_TIMEOUT);
        let now = anchor.moment();
        known.live.observe(0, poll, now);
        if let Some(snapshot) = known.live.refresh(now) {
            known.report = Some(snapshot.report);
        }
        known.report.clone()
    }
}

/// The jobs of these rings, ordered by name and without a report.
fn by_name(listing: Vec<RingListing>) -> Vec<NodeJob> {
    let mut found: BTreeMap<String, (BTreeMap<u32, bool>, i64)> = BTreeMap::new();
    for RingListing { ring, .. } in listing {
        // A file that cannot be read as a ring belongs to no job.
        let Ok(summary) = ring else { continue };
        let Some(rank) = summary.identity.rank else {
            continue;
        };
        let (ranks, created_ns) = found.entry(summary.identity.job).or_default();
        *ranks.entry(rank).or_default() |= summary.alive;
        *created_ns = summary.created_ns.max(*created_ns);
    }
    let job = |(name, (ranks, created_ns)): (String, (BTreeMap<u32, bool>, i64))| NodeJob {
        name,
        ranks: ranks.len(),
        alive: ranks.values().filter(|alive| **alive).count(),
        created_ns,
        report: None,
    };
    found.into_iter().map(job).collect()
}

/// Keeps the list of a node's jobs current on its own thread, until it is dropped.
///
/// # Blocking
///
/// Dropping it waits until what is under way has ended: the listing of the directory, the reading and the judgment of
/// one job, or the call of the sink. Reading takes at most two seconds; the remaining jobs are skipped.
pub struct JobsWatch {
    stop: Option<Sender<()>>,
    stopping: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl JobsWatch {
    /// Starts the thread, which calls `sink` with every list. If the directory cannot be read, the list is empty, as it
    /// is without jobs.
    ///
    /// # Errors
    ///
    /// If the thread cannot be started.
    pub fn start(
        directory: PathBuf,
        anchor: Anchor,
        mut sink: impl FnMut(Vec<NodeJob>) + Send + 'static,
    ) -> std::io::Result<Self> {
        let (stop, stopped) = channel::<()>();
        let stopping = Arc::<AtomicBool>::default();
        let thread_stopping = stopping.clone();
        let builder = std::thread::Builder::new().name("rcomm/jobs".into());
        let thread = builder.spawn(move || {
            let mut jobs = NodeJobs::new(directory);
            loop {
                let spent_before = time_spent();
                let found = jobs.poll_while(anchor, || !thread_stopping.load(Ordering::Relaxed));
                if thread_stopping.load(Ordering::Relaxed) {
                    return;
                }
                sink(found.unwrap_or_default());
                let cost = time_spent().saturating_sub(spent_before);
                match stopped.recv_timeout(SHORTEST_PAUSE.max(cost * PAUSE_PER_COST)) {
                    Err(RecvTimeoutError::Timeout) => {}
                    Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
                }
            }
        })?;
        Ok(Self {
            stop: Some(stop),
            stopping,
            thread: Some(thread),
        })
    }
}

impl Drop for JobsWatch {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Relaxed);
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has reported it itself.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcomm_recorder::model::{OpType, ProcessGroupInfo};
    use rcomm_recorder::record::{
        FlightRecorder, Operation, Placement, RecorderConfig, SignatureKey, SignatureRef,
    };
    use std::cell::Cell;
    use std::path::Path;

    fn recorder(directory: &Path, job: &str, rank: u32) -> FlightRecorder {
        let mut config = RecorderConfig::new(job, rank, 2);
        config.placement = Placement::Dir(directory.to_owned());
        FlightRecorder::create(&config).expect("a ring can be made in a fresh directory")
    }

    /// Issues an operation whose time-out is over after a millisecond.
    fn issue(recorder: &FlightRecorder) {
        let info = ProcessGroupInfo {
            id: 0,
            name: "0".into(),
            desc: "default_pg".into(),
            ranks: [0, 1].into(),
        };
        let group = recorder.add_group(&info, Duration::from_millis(1));
        let signature = recorder.intern(&SignatureKey {
            backend: "cpu",
            op_name: "barrier",
            ..SignatureKey::default()
        });
        let signature = SignatureRef::Id(signature.expect("a fresh table has free slots"));
        let operation = Operation {
            collective_seq_id: 1,
            ..Operation::new(group, OpType::Barrier, signature)
        };
        recorder.begin(&operation);
    }

    #[test]
    fn the_job_in_trouble_is_listed_before_a_newer_one() {
        let directory = tempfile::tempdir().expect("a temporary directory can be made");
        let stuck = [0, 1].map(|rank| recorder(directory.path(), "stuck", rank));
        issue(&stuck[0]);
        let _newer = recorder(directory.path(), "newer", 0);
        drop(recorder(directory.path(), "ended", 0));
        let mut jobs = NodeJobs::new(directory.path().to_owned());
        let anchor = Anchor::now();
        let limit = Instant::now() + Duration::from_secs(60);
        loop {
            let found = jobs.poll(anchor).expect("the directory can be read");
            let names: Vec<&str> = found.iter().map(|job| &*job.name).collect();
            if found[0].urgency() == 0 {
                assert_eq!(names[..2], ["stuck", "newer"]);
                assert_eq!((found[0].alive, found[0].ranks), (2, 2));
                return;
            }
            assert!(
                Instant::now() < limit,
                "the stuck job is not in trouble: {names:?}"
            );
        }
    }

    #[test]
    fn a_view_begins_with_the_job_in_trouble_unless_another_was_chosen() {
        let directory = tempfile::tempdir().expect("a temporary directory can be made");
        let stuck = [0, 1].map(|rank| recorder(directory.path(), "stuck", rank));
        issue(&stuck[0]);
        let _newer = recorder(directory.path(), "newer", 0);
        let begin = |choice: &JobChoice| {
            NodeJobs::begin(directory.path().to_owned(), choice, Anchor::now());
            choice.shown()
        };
        let chosen = JobChoice::of(Some("newer".into()));
        let limit = Instant::now() + Duration::from_secs(60);
        loop {
            let shown = begin(&JobChoice::default());
            if shown.is_some() {
                assert_eq!(shown, Some(("stuck".into(), false)));
                assert_eq!(begin(&chosen), Some(("newer".into(), true)));
                return;
            }
            assert!(Instant::now() < limit, "no job is in trouble");
        }
    }

    #[test]
    fn a_poll_that_must_stop_judges_no_further_job() {
        let directory = tempfile::tempdir().expect("a temporary directory can be made");
        let _rings = ["one", "two", "three"].map(|job| recorder(directory.path(), job, 0));
        let mut jobs = NodeJobs::new(directory.path().to_owned());
        let mut judged = |max: usize| {
            let calls = Cell::new(0);
            let go_on = || calls.replace(calls.get() + 1) < max;
            let found = jobs
                .poll_while(Anchor::now(), go_on)
                .expect("the directory can be read");
            let judged = found.iter().filter(|job| job.report.is_some()).count();
            (found.len(), judged)
        };
        assert_eq!(judged(0), (3, 0));
        assert_eq!(judged(1), (3, 1));
        assert_eq!(judged(3), (3, 3));
    }
}
