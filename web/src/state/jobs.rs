//! The jobs with rings in one directory: their list, and the snapshots of those that clients look at.
//!
//! The server shows one job. Another job is watched from the first request for it on. Once no request uses it any more,
//! it is dropped a minute after its last request, or earlier if another job needs its place. The list is made on
//! request. So jobs that no client looks at cost nothing.

use super::store::SnapshotStore;
use rcomm_analyzer::print::human::one_line;
use rcomm_analyzer::source::RingSource;
use rcomm_analyzer::{Anchor, LiveOptions, NodeJob, NodeJobs, Pace, Verdict, Watch};
use rcomm_recorder::publish::list_rings;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Maximum number of jobs that are watched at a time, besides the one that the server shows.
pub(crate) const MAX_WATCHED: usize = 4;
/// Time for which a list is served again before a new one is made.
const FRESH: Duration = Duration::from_secs(3);
/// A list that no client has requested for this long is dropped, and so is a watched job that no request uses any more.
const IDLE: Duration = Duration::from_secs(60);

/// The jobs of a node, for [`Server::jobs`](crate::Server::jobs). Clones share the same state.
#[derive(Clone)]
pub struct Jobs(Arc<Shared>);

struct Shared {
    directory: PathBuf,
    options: LiveOptions,
    pace: Pace,
    listing: Mutex<Listing>,
    watched: Mutex<BTreeMap<String, Watched>>,
}

struct Listing {
    jobs: NodeJobs,
    anchor: Anchor,
    /// The jobs of the last list, those in trouble first.
    found: Vec<NodeJob>,
    /// When the last list was made; `None` if there is none.
    taken: Option<Instant>,
}

/// A job that clients look at.
pub(crate) struct WatchedJob {
    pub(crate) store: SnapshotStore,
    _watch: Watch,
}

struct Watched {
    job: Arc<WatchedJob>,
    /// When a client requested the job last.
    used: Instant,
}

/// Why a job is not watched.
pub(crate) enum NotWatched {
    /// No ring in the directory belongs to the job.
    Unknown,
    /// [`MAX_WATCHED`] other jobs are in use.
    TooMany,
    /// No thread could be started.
    Failed(std::io::Error),
}

/// One job in the list.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct JobRow {
    pub(crate) name: String,
    /// Whether the server shows this job if a request names none.
    pub(crate) shown: bool,
    /// `None` if the job was not judged; see [`NodeJob::report`].
    pub(crate) verdict: Option<Verdict>,
    /// The first sentence of the report; empty if there is none.
    pub(crate) sentence: String,
    /// Whether the report of the listing has an error or a warning.
    pub(crate) in_trouble: bool,
    /// Number of ranks with a ring on this node.
    pub(crate) ranks: usize,
    /// Number of these ranks whose process is alive.
    pub(crate) alive: usize,
    /// When the job's newest ring was created, wall clock, ns since the epoch.
    pub(crate) created_ns: i64,
}

impl Jobs {
    /// The jobs with rings below `directory`; `options` and `pace` apply to those that are watched. Reads nothing
    /// yet.
    pub fn new(directory: PathBuf, options: LiveOptions, pace: Pace) -> Self {
        Self(Arc::new(Shared {
            listing: Mutex::new(Listing {
                jobs: NodeJobs::new(directory.clone()),
                anchor: Anchor::now(),
                found: Vec::new(),
                taken: None,
            }),
            watched: Mutex::default(),
            directory,
            options,
            pace,
        }))
    }

    /// All jobs, those in trouble first. The verdict and the sentence of the job that `shown` shows are those of its
    /// newest snapshot. Empty if the directory cannot be read.
    ///
    /// # Blocking
    ///
    /// Reads ring files, unless the last list is younger than three seconds.
    pub(crate) fn list(&self, shown: &SnapshotStore) -> Vec<JobRow> {
        let found = {
            let mut listing = lock(&self.0.listing);
            if listing.taken.is_none_or(|taken| taken.elapsed() >= FRESH) {
                let anchor = listing.anchor;
                listing.found = listing.jobs.poll(anchor).unwrap_or_default();
                listing.taken = Some(Instant::now());
            }
            listing.found.clone()
        };
        let shown = shown.newest();
        let row = |job: NodeJob| {
            let shown_snapshot = shown.as_ref().filter(|snapshot| *snapshot.job == *job.name);
            let report = shown_snapshot
                .map(|snapshot| &snapshot.report)
                .or(job.report.as_ref());
            JobRow {
                shown: shown_snapshot.is_some(),
                verdict: report.map(|report| report.verdict),
                sentence: report.map_or_else(String::new, |report| {
                    let line = one_line(report);
                    match line.split_once("  ") {
                        Some((_, sentence)) => sentence.to_owned(),
                        None => line,
                    }
                }),
                in_trouble: job.urgency() < 2,
                ranks: job.ranks,
                alive: job.alive,
                created_ns: job.created_ns,
                name: job.name,
            }
        };
        found.into_iter().map(row).collect()
    }

    /// The job `name`, watched from now on.
    ///
    /// # Blocking
    ///
    /// Lists ring files, unless the job is watched already. If it replaces another job, joins that job's threads.
    ///
    /// # Errors
    ///
    /// [`NotWatched`] says why the job is not watched.
    pub(crate) fn watch(&self, name: &str) -> Result<Arc<WatchedJob>, NotWatched> {
        let mut watched = lock(&self.0.watched);
        if let Some(known) = watched.get_mut(name) {
            known.used = Instant::now();
            return Ok(known.job.clone());
        }
        let rings = list_rings(&self.0.directory).unwrap_or_default();
        let mut known = rings
            .iter()
            .filter_map(|listing| listing.ring.as_ref().ok());
        if !known.any(|ring| ring.identity.job == name) {
            return Err(NotWatched::Unknown);
        }
        if watched.len() >= MAX_WATCHED {
            let unused = |(_, known): &(&String, &Watched)| Arc::strong_count(&known.job) == 1;
            let oldest = watched
                .iter()
                .filter(unused)
                .min_by_key(|(_, known)| known.used);
            let oldest = oldest.map(|(name, _)| name.clone());
            let oldest = oldest.ok_or(NotWatched::TooMany)?;
            watched.remove(&oldest);
        }
        let source = RingSource::new(self.0.directory.clone(), Some(name.to_owned()));
        let (store, watch) =
            SnapshotStore::watch(vec![Box::new(source)], self.0.options.clone(), self.0.pace)
                .map_err(NotWatched::Failed)?;
        let job = Arc::new(WatchedJob {
            store,
            _watch: watch,
        });
        let used = Instant::now();
        watched.insert(
            name.to_owned(),
            Watched {
                job: job.clone(),
                used,
            },
        );
        Ok(job)
    }

    /// Drops the list if it was made a minute ago or earlier, and the watched jobs that no client has requested for a
    /// minute and no request uses any more.
    ///
    /// # Blocking
    ///
    /// Until a read of the records that is in progress has ended: for each dropped job, at most the time-out of the
    /// pace.
    pub(crate) fn forget_idle(&self) {
        self.forget(IDLE);
    }

    fn forget(&self, idle: Duration) {
        let mut listing = lock(&self.0.listing);
        if listing.taken.is_some_and(|taken| taken.elapsed() >= idle) {
            listing.jobs = NodeJobs::new(self.0.directory.clone());
            listing.found.clear();
            listing.taken = None;
        }
        drop(listing);
        let is_idle = |_: &String, known: &mut Watched| {
            Arc::strong_count(&known.job) == 1 && known.used.elapsed() >= idle
        };
        let mut watched = lock(&self.0.watched);
        let old: Vec<(String, Watched)> = watched.extract_if(.., is_idle).collect();
        drop(watched);
        // Dropping a watched job joins its threads, so the lock is released first.
        drop(old);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcomm_recorder::record::{FlightRecorder, Placement, RecorderConfig};

    #[test]
    fn an_idle_job_is_forgotten_and_the_number_of_watched_jobs_is_limited() {
        let directory = tempfile::tempdir().expect("a temporary directory can be made");
        let _rings: Vec<FlightRecorder> = (0..6)
            .map(|job| {
                let mut config = RecorderConfig::new(format!("job{job}"), 0, 1);
                config.placement = Placement::Dir(directory.path().to_owned());
                FlightRecorder::create(&config).expect("a ring can be made in a fresh directory")
            })
            .collect();
        let directory = directory.path().to_owned();
        let jobs = Jobs::new(directory, LiveOptions::default(), Pace::default());
        let watched = || lock(&jobs.0.watched).keys().cloned().collect::<Vec<_>>();
        assert!(matches!(jobs.watch("other"), Err(NotWatched::Unknown)));
        let mut held: Vec<_> = (0..MAX_WATCHED)
            .map(|job| {
                jobs.watch(&format!("job{job}"))
                    .ok()
                    .expect("it has a ring")
            })
            .collect();
        assert!(matches!(jobs.watch("job4"), Err(NotWatched::TooMany)));
        // A job that is no longer in use is replaced.
        held.remove(0);
        held.push(jobs.watch("job4").ok().expect("an unused job is replaced"));
        assert_eq!(watched(), ["job1", "job2", "job3", "job4"]);
        jobs.forget(Duration::ZERO);
        assert_eq!(watched().len(), MAX_WATCHED);
        held.truncate(1);
        jobs.forget(IDLE);
        assert_eq!(watched().len(), MAX_WATCHED);
        jobs.forget(Duration::ZERO);
        assert_eq!(watched(), ["job1"]);
    }
}
