//! The jobs of a node: which one is shown, and how the others do.

use crate::live::source::{JobChoice, RingSource, Source, SourceError};
use crate::live::watch::time_spent;
use crate::live::{Anchor, Live, LiveOptions};
use rcomm_recorder::publish::{RingListing, list_rings};
use rcomm_verdict::{Report, Severity, analyze};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Jobs that are judged for the list, the newest ones; the others are listed without a verdict.
const MOST_JUDGED: usize = 16;
/// How many operations of one job are kept for its verdict.
const ENTRIES: usize = 50_000;
/// Between two looks, unless a look keeps a core busy for more than a fiftieth of that.
const ROUND: Duration = Duration::from_secs(3);
/// Looks and judgements together take one part of a core in so many.
const SHARE: u32 = 50;
/// How long a look at one job may take.
const PATIENCE: Duration = Duration::from_secs(2);

/// One job that has rings on this node.
#[derive(Clone, Debug)]
pub struct NodeJob {
    /// Its name.
    pub name: String,
    /// Ranks that have a ring on this node.
    pub ranks: usize,
    /// Of them, how many processes live.
    pub alive: usize,
    /// When its newest ring was made, wall clock, ns since the epoch.
    pub created_ns: i64,
    /// The verdict of what is on this node; `None` if it was not judged yet, or is one of too many.
    pub report: Option<Arc<Report>>,
}

impl NodeJob {
    /// How much it needs a look, the most first: an error, a warning, whatever else lives, the dead.
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

/// All jobs with rings below one directory, judged one after the other.
pub struct NodeJobs {
    directory: PathBuf,
    judged: BTreeMap<String, JudgedJob>,
}

/// One job's records and its last report.
struct JudgedJob {
    source: RingSource,
    live: Live,
    report: Option<Arc<Report>>,
}

impl NodeJobs {
    /// The jobs below `directory`. Reads nothing yet.
    pub fn new(directory: PathBuf) -> Self {
        Self {
            directory,
            judged: BTreeMap::new(),
        }
    }

    /// Lists all jobs and judges the newest, trouble first.
    ///
    /// # Blocking
    ///
    /// Reads ring files, for at most two seconds a job; asks no process.
    ///
    /// # Errors
    ///
    /// If the directory cannot be read.
    pub fn poll(&mut self, anchor: Anchor) -> Result<Vec<NodeJob>, SourceError> {
        let listing = list_rings(&self.directory).map_err(|error| SourceError::Unusable {
            place: self.directory.display().to_string(),
            reason: error.to_string(),
        })?;
        let mut jobs = by_name(listing);
        jobs.sort_by_key(|job| Reverse((job.alive > 0, job.created_ns)));
        let judged: BTreeSet<&str> = jobs.iter().take(MOST_JUDGED).map(|j| &*j.name).collect();
        self.judged.retain(|name, _| judged.contains(&**name));
        for job in jobs.iter_mut().take(MOST_JUDGED) {
            job.report = self.judge(&job.name, anchor);
        }
        jobs.sort_by(|a, b| {
            let age = |job: &NodeJob| Reverse(job.created_ns);
            (a.urgency(), age(a), &a.name).cmp(&(b.urgency(), age(b), &b.name))
        });
        Ok(jobs)
    }

    fn judge(&mut self, name: &str, anchor: Anchor) -> Option<Arc<Report>> {
        let known = self.judged.entry(name.to_owned()).or_insert_with(|| {
            let choice = JobChoice::of(Some(name.to_owned()));
            let source = RingSource::showing(self.directory.clone(), choice);
            let options = LiveOptions {
                entry_budget: ENTRIES,
                ..LiveOptions::default()
            };
            let live = Live::new(options, analyze, vec![source.name()]);
            JudgedJob {
                source,
                live,
                report: None,
            }
        });
        let poll = known.source.poll(Instant::now() + PATIENCE);
        let at = anchor.moment();
        known.live.observe(0, poll, at);
        if let Some(snapshot) = known.live.refresh(at) {
            known.report = Some(snapshot.report);
        }
        known.report.clone()
    }
}

fn by_name(listing: Vec<RingListing>) -> Vec<NodeJob> {
    let mut found: BTreeMap<String, (BTreeMap<u32, bool>, i64)> = BTreeMap::new();
    for RingListing { ring, .. } in listing {
        // A file that is no ring belongs to no job.
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

/// Keeps a list of a node's jobs fresh on a thread of its own, until dropped.
///
/// # Blocking
///
/// Dropping it waits for the look that is under way ([`NodeJobs::poll`]).
pub struct JobsWatch {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl JobsWatch {
    /// Starts the thread. `sink` is called on it with every list; a directory that cannot be read gives
    /// an empty one.
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
        let builder = std::thread::Builder::new().name("rcomm/jobs".into());
        let thread = builder.spawn(move || {
            let mut jobs = NodeJobs::new(directory);
            loop {
                let spent = time_spent();
                sink(jobs.poll(anchor).unwrap_or_default());
                let cost = time_spent().saturating_sub(spent);
                match stopped.recv_timeout(ROUND.max(cost * SHARE)) {
                    Err(RecvTimeoutError::Timeout) => {}
                    Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
                }
            }
        })?;
        Ok(Self {
            stop: Some(stop),
            thread: Some(thread),
        })
    }
}

impl Drop for JobsWatch {
    fn drop(&mut self) {
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
    use std::path::Path;

    fn recorder(directory: &Path, job: &str, rank: u32) -> FlightRecorder {
        let mut config = RecorderConfig::new(job, rank, 2);
        config.placement = Placement::Dir(directory.to_owned());
        FlightRecorder::create(&config).expect("a ring in a fresh directory")
    }

    /// Issues an operation whose time-out is over as soon as it is looked at.
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
        let signature = SignatureRef::Id(signature.expect("room in a fresh table"));
        let operation = Operation {
            collective_seq_id: 1,
            ..Operation::new(group, OpType::Barrier, signature)
        };
        recorder.begin(&operation);
    }

    #[test]
    fn the_job_in_trouble_is_listed_before_a_newer_one() {
        let directory = tempfile::tempdir().expect("a directory");
        let stuck = [0, 1].map(|rank| recorder(directory.path(), "stuck", rank));
        issue(&stuck[0]);
        let _newer = recorder(directory.path(), "newer", 0);
        drop(recorder(directory.path(), "ended", 0));
        let mut jobs = NodeJobs::new(directory.path().to_owned());
        let anchor = Anchor::now();
        let limit = Instant::now() + Duration::from_secs(60);
        loop {
            let found = jobs.poll(anchor).expect("a directory");
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
}
