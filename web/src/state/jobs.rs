//! The jobs with rings in one directory: their list, and the snapshots of those that clients look at.
//!
//! The server shows one job. It begins to watch another one at the first request for that. Once no request uses such a
//! job any more, it is dropped about a minute after its last request, or earlier if another job needs its place. The
//! list is made on request. So nothing is read unless a client asks.

use super::store::SnapshotStore;
use rcomm_analyzer::source::{RingSource, Source};
use rcomm_analyzer::{Anchor, LiveOptions, NodeJob, NodeJobs, Pace, Verdict, Watch};
use rcomm_recorder::publish::list_rings;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Maximum number of jobs that are watched at a time, besides the one that the server shows.
pub(crate) const MAX_WATCHED: usize = 4;
/// Time for which a list is served again before a new one is made.
const FRESH: Duration = Duration::from_secs(3);
/// A list that is older than this is dropped, and so is a watched job that no client has requested for this long and
/// that no request uses any more.
const IDLE: Duration = Duration::from_secs(60);

/// The jobs of a node, for [`Server::jobs`](crate::Server::jobs). Clones share the same state.
#[derive(Clone)]
pub struct Jobs(Arc<Shared>);

struct Shared {
    directory: PathBuf,
    options: LiveOptions,
    pace: Pace,
    listing: Mutex<Listing>,
    watched: Mutex<BTreeMap<String, WatchEntry>>,
    /// The number of replaced jobs whose threads have not ended yet.
    ending: Arc<AtomicUsize>,
}

/// A replaced job whose threads end when it is dropped.
struct Ending {
    entry: Option<WatchEntry>,
    count: Arc<AtomicUsize>,
}

impl Ending {
    fn new(entry: WatchEntry, count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::Relaxed);
        Self {
            entry: Some(entry),
            count: count.clone(),
        }
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        // This joins the job's threads.
        drop(self.entry.take());
        self.count.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The last list, and what makes it.
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

struct WatchEntry {
    job: Arc<WatchedJob>,
    /// When a client requested the job last.
    used: Instant,
}

/// Why a job is not watched.
pub(crate) enum NotWatched {
    /// No ring in the directory belongs to the job.
    Unknown,
    /// [`MAX_WATCHED`] other jobs are in use, or the threads of as many replaced jobs have not ended yet.
    TooMany,
    /// No thread could be started.
    NoThread(std::io::Error),
}

/// One job in the list.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct JobRow {
    pub(crate) name: String,
    /// Whether the server shows this job if a request names none.
    pub(crate) shown: bool,
    /// `None` if the job was not judged; see [`NodeJob::report`].
    pub(crate) verdict: Option<Verdict>,
    /// The verdict as views write it ([`rcomm_analyzer::Report::word`]); `None` if `verdict` is.
    pub(crate) word: Option<&'static str>,
    /// What views say after that word ([`rcomm_analyzer::Report::first_line`]); empty if the job was not judged.
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
            ending: Arc::default(),
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
                word: report.map(|report| report.word()),
                sentence: report.map_or_else(String::new, |report| report.first_line()),
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
    /// Lists ring files, unless the job is watched already. If it replaces another job, that job's threads are joined
    /// on a thread of their own, or here if none can be started.
    ///
    /// # Errors
    ///
    /// [`NotWatched`] says why the job is not watched.
    pub(crate) fn watch(&self, name: &str) -> Result<Arc<WatchedJob>, NotWatched> {
        self.watch_by(name, |source| {
            let (options, pace) = (self.0.options.clone(), self.0.pace);
            SnapshotStore::watch(vec![source], options, pace)
        })
    }

    /// Works like [`watch`](Self::watch); `start` begins to watch the rings of the job.
    fn watch_by(
        &self,
        name: &str,
        start: impl FnOnce(Box<dyn Source>) -> std::io::Result<(SnapshotStore, Watch)>,
    ) -> Result<Arc<WatchedJob>, NotWatched> {
        let mut watched = lock(&self.0.watched);
        if let Some(entry) = watched.get_mut(name) {
            entry.used = Instant::now();
            return Ok(entry.job.clone());
        }
        let rings = list_rings(&self.0.directory).unwrap_or_default();
        let mut readable = rings
            .iter()
            .filter_map(|listing| listing.ring.as_ref().ok());
        if !readable.any(|ring| ring.identity.job == name) {
            return Err(NotWatched::Unknown);
        }
        let mut oldest = None;
        if watched.len() >= MAX_WATCHED {
            let unused = |(_, entry): &(&String, &WatchEntry)| Arc::strong_count(&entry.job) == 1;
            oldest = watched
                .iter()
                .filter(unused)
                .min_by_key(|(_, entry)| entry.used)
                .map(|(name, _)| name.clone());
            if oldest.is_none() || self.0.ending.load(Ordering::Relaxed) >= MAX_WATCHED {
                return Err(NotWatched::TooMany);
            }
        }
        let source = RingSource::new(self.0.directory.clone(), Some(name.to_owned()));
        let (store, watch) = start(Box::new(source)).map_err(NotWatched::NoThread)?;
        let job = Arc::new(WatchedJob {
            store,
            _watch: watch,
        });
        // Only now: if no thread could be started, the older job stays watched.
        let replaced = oldest.and_then(|oldest| watched.remove(&oldest));
        let replaced = replaced.map(|entry| Ending::new(entry, &self.0.ending));
        watched.insert(
            name.to_owned(),
            WatchEntry {
                job: job.clone(),
                used: Instant::now(),
            },
        );
        drop(watched);
        if let Some(ending) = replaced {
            // A poll of the replaced job has no limit of time, and the request is about another job.
            let thread = std::thread::Builder::new().name("rcomm-web/ending".into());
            // If no thread can be started, the job is dropped with the closure, here.
            let _ = thread.spawn(move || drop(ending));
        }
        Ok(job)
    }

    /// Drops the list if it was made a minute ago or earlier, and the watched jobs that no client has requested for a
    /// minute and that no request uses any more.
    ///
    /// # Blocking
    ///
    /// Until the read and the judgment in progress have ended, for each dropped job; neither has a limit of time.
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
        let is_idle = |_: &String, entry: &mut WatchEntry| {
            Arc::strong_count(&entry.job) == 1 && entry.used.elapsed() >= idle
        };
        let mut watched = lock(&self.0.watched);
        let old: Vec<(String, WatchEntry)> = watched.extract_if(.., is_idle).collect();
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
    use rcomm_analyzer::source::{Poll, SourceError};
    use rcomm_recorder::record::{FlightRecorder, Placement, RecorderConfig};
    use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};

    /// The jobs `job0`, `job1` and so on, each with one ring, in a directory of their own.
    struct Node {
        jobs: Jobs,
        _directory: tempfile::TempDir,
        _rings: Vec<FlightRecorder>,
    }

    impl Node {
        fn new() -> Self {
            let directory = tempfile::tempdir().expect("a temporary directory can be made");
            let rings = (0..6)
                .map(|job| {
                    let mut config = RecorderConfig::new(format!("job{job}"), 0, 1);
                    config.placement = Placement::Dir(directory.path().to_owned());
                    FlightRecorder::create(&config)
                        .expect("a ring can be made in a fresh directory")
                })
                .collect();
            let path = directory.path().to_owned();
            Self {
                jobs: Jobs::new(path, LiveOptions::default(), Pace::default()),
                _directory: directory,
                _rings: rings,
            }
        }

        fn watch(&self, job: usize) -> Arc<WatchedJob> {
            let watched = self.jobs.watch(&format!("job{job}"));
            watched.ok().expect("the job is watched")
        }

        /// The names of the watched jobs, in order.
        fn watched(&self) -> Vec<String> {
            lock(&self.jobs.0.watched).keys().cloned().collect()
        }
    }

    #[test]
    fn an_idle_job_is_forgotten_and_the_number_of_watched_jobs_is_limited() {
        let node = Node::new();
        let jobs = &node.jobs;
        assert!(matches!(jobs.watch("other"), Err(NotWatched::Unknown)));
        let mut held: Vec<_> = (0..MAX_WATCHED).map(|job| node.watch(job)).collect();
        assert!(matches!(jobs.watch("job4"), Err(NotWatched::TooMany)));
        // A job that is no longer in use is replaced.
        held.remove(0);
        held.push(node.watch(4));
        assert_eq!(node.watched(), ["job1", "job2", "job3", "job4"]);
        jobs.forget(Duration::ZERO);
        assert_eq!(node.watched().len(), MAX_WATCHED);
        held.truncate(1);
        jobs.forget(IDLE);
        assert_eq!(node.watched().len(), MAX_WATCHED);
        jobs.forget(Duration::ZERO);
        assert_eq!(node.watched(), ["job1"]);
    }

    #[test]
    fn a_job_stays_watched_if_its_replacement_cannot_start() {
        let node = Node::new();
        for job in 0..MAX_WATCHED {
            node.watch(job);
        }
        let no_thread = |_| Err(std::io::Error::other("no thread"));
        let refused = node.jobs.watch_by("job4", no_thread);
        assert!(matches!(refused, Err(NotWatched::NoThread(_))));
        assert_eq!(node.watched(), ["job0", "job1", "job2", "job3"]);
    }

    /// A source whose poll says that it has begun, and ends when the other end of `until_dropped` is dropped.
    struct BlockedSource {
        begun: SyncSender<()>,
        until_dropped: Receiver<()>,
    }

    impl Source for BlockedSource {
        fn name(&self) -> String {
            "blocked".to_owned()
        }

        fn poll(&mut self, _deadline: Instant) -> Result<Poll, SourceError> {
            // After the first poll, the test takes no more of these.
            let _ = self.begun.try_send(());
            let _ = self.until_dropped.recv();
            Ok(Poll::default())
        }
    }

    #[test]
    fn a_request_that_replaces_a_job_does_not_wait_for_the_threads_of_that_job() {
        const LIMIT: Duration = Duration::from_secs(60);
        let node = Node::new();
        let (begun, has_begun) = sync_channel(1);
        let (hold, until_dropped) = channel();
        let blocked = BlockedSource {
            begun,
            until_dropped,
        };
        let start = |_| {
            let (options, pace) = (LiveOptions::default(), Pace::default());
            SnapshotStore::watch(vec![Box::new(blocked)], options, pace)
        };
        let first = node.jobs.watch_by("job0", start);
        drop(first.ok().expect("the job is watched"));
        has_begun.recv_timeout(LIMIT).expect("the poll begins");
        for job in 1..MAX_WATCHED {
            node.watch(job);
        }
        let deadline = Instant::now() + LIMIT;
        let ending = || node.jobs.0.ending.load(Ordering::Relaxed);
        let hold = std::thread::scope(|scope| {
            let replacing = scope.spawn(|| drop(node.watch(MAX_WATCHED)));
            while !replacing.is_finished() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
            let has_answered = replacing.is_finished();
            let hold = has_answered.then_some(hold);
            assert!(
                has_answered,
                "the request waits for the poll of the replaced job"
            );
            hold
        });
        assert!(lock(&node.jobs.0.watched).contains_key("job4"));
        assert_eq!(
            ending(),
            1,
            "the threads of the replaced job ended before its poll"
        );
        node.jobs.0.ending.fetch_add(MAX_WATCHED, Ordering::Relaxed);
        assert!(matches!(node.jobs.watch("job5"), Err(NotWatched::TooMany)));
        node.jobs.0.ending.fetch_sub(MAX_WATCHED, Ordering::Relaxed);
        drop(hold);
        while ending() > 0 {
            assert!(
                Instant::now() < deadline,
                "the threads of the replaced job do not end"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
