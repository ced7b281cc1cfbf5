//! Reads the rings of one job on this node as a source, also those of frozen and dead processes.

mod later;
mod remains;

use crate::live::source::{
    JobChoice, Liveness, NEWEST, Observation, Poll, RankProcess, Seen, Source, SourceError,
};
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::{LaunchRecord, RingFollower, RingListing, RingReader, list_rings};
use rcomm_recorder::record::RingPart;
use rcomm_verdict::{LaterAttempt, Problem};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The time between two searches for new rings, of ranks that join and attempts that start.
const LIST_INTERVAL: Duration = Duration::from_secs(2);
/// The time between two searches while the job starts: a rank whose ring is not read yet must not count as a rank
/// without a record.
const LIST_INTERVAL_AT_START: Duration = Duration::from_millis(200);
/// A job counts as starting for this time after a new ring was found.
const START_DURATION: Duration = Duration::from_secs(10);

/// Maximum number of jobs that an error names.
const MOST_NAMED: usize = 8;

/// A job that lived while it was shown stays for this time after its last process ended.
pub(super) const KEPT_AFTER_END: Duration = Duration::from_secs(300);

/// The rings of one job as a source; see the module.
pub struct RingSource {
    directory: PathBuf,
    choice: JobChoice,
    /// The job whose rings are attached.
    job: Option<String>,
    /// When all processes of that job were first found dead; `None` while one is alive.
    ended: Option<Instant>,
    rings: BTreeMap<(Rank, RingPart), Ring>,
    /// When the directory was last searched for rings.
    listed: Option<Instant>,
    /// A later attempt of the job than that of the rings, whose processes were seen at the last search.
    later_attempt: Option<LaterAttempt>,
    /// When a ring was last attached.
    last_new_ring: Option<Instant>,
    problems: Vec<Problem>,
}

/// A ring file that was found.
struct Candidate {
    path: PathBuf,
    key: (Rank, RingPart),
    attempt: u32,
    /// When the ring was created, ns since the epoch.
    created_ns: i64,
    host: String,
    alive: bool,
}

/// One ring of a rank, which may have one for each [`RingPart`].
struct Ring {
    follower: RingFollower,
    attempt: u32,
    created_ns: i64,
}

impl RingSource {
    /// Reads the rings in `directory` of `job`, or of the newest job.
    pub fn new(directory: PathBuf, job: Option<String>) -> Self {
        Self::showing(directory, JobChoice::of(job))
    }

    /// Reads the rings in `directory` of the job that is chosen at the time of each poll.
    ///
    /// Without a choice, the first poll takes the newest job, preferring one that is alive. That job remains even if
    /// others start. The newest living job replaces it at once if no process of it has lived since it was first shown,
    /// else five minutes after all were found to have ended.
    pub fn showing(directory: PathBuf, choice: JobChoice) -> Self {
        Self {
            directory,
            choice,
            job: None,
            ended: None,
            rings: BTreeMap::new(),
            listed: None,
            later_attempt: None,
            last_new_ring: None,
            problems: vec![],
        }
    }

    /// Searches for rings. Returns whether rings that were shown no longer count: those of another job, an earlier
    /// attempt or an earlier run.
    fn list(&mut self) -> Result<bool, SourceError> {
        let listing = list_rings(&self.directory).map_err(|error| SourceError::Unusable {
            place: self.directory.display().to_string(),
            reason: error.to_string(),
        })?;
        self.listed = Some(Instant::now());
        self.problems.clear();
        let mut found: BTreeMap<String, Vec<Candidate>> = BTreeMap::new();
        // The newest job is the one with the newest ring of a living process; rings of dead processes count only if no
        // process is alive.
        let mut newest: Option<(bool, i64, String)> = None;
        for RingListing { path, ring } in listing {
            let summary = match ring {
                Ok(summary) => summary,
                Err(error) => {
                    self.problems.push(unreadable(&path, &error));
                    continue;
                }
            };
            let job = summary.identity.job.clone();
            let Some(rank) = summary.identity.rank else {
                continue;
            };
            let precedence = (summary.alive, summary.created_ns, job.clone());
            newest = newest.max(Some(precedence));
            let key = (rank, summary.part);
            let ring = Candidate {
                path,
                key,
                attempt: summary.identity.attempt,
                created_ns: summary.created_ns,
                host: summary.identity.host,
                alive: summary.alive,
            };
            found.entry(job).or_default().push(ring);
        }
        let Some(job) = self.pick(newest).filter(|job| found.contains_key(job)) else {
            // A job whose rings were removed at its end is still shown.
            if self.rings.is_empty() {
                return Err(self.no_ring(&found.into_keys().collect::<Vec<_>>()));
            }
            return Ok(false);
        };
        let job_changed = self.job.as_ref().is_some_and(|known| *known != job);
        if job_changed {
            self.rings.clear();
            self.ended = None;
        }
        let mut of_job = found.remove(&job).unwrap_or_default();
        let earlier_were_dropped = self.drop_earlier_runs(&job, &mut of_job);
        // A process that ended in an earlier attempt is no rank of this one.
        let newest_attempt = of_job.iter().map(|found| found.attempt).max();
        let known = self.rings.len();
        self.rings
            .retain(|_, ring| newest_attempt.is_none_or(|newest| ring.attempt >= newest));
        let attempt_changed = self.rings.len() < known;
        let of_attempt = |candidate: &Candidate| Some(candidate.attempt) >= newest_attempt;
        for found in of_job.into_iter().filter(of_attempt) {
            let order = (found.attempt, found.created_ns);
            let is_older = |ring: &Ring| (ring.attempt, ring.created_ns) < order;
            if self.rings.get(&found.key).is_none_or(is_older) {
                self.attach(found);
            }
        }
        self.job = Some(job);
        Ok(job_changed || attempt_changed || earlier_were_dropped)
    }

    /// Drops the rings of dead processes that were created before the newest launcher on their host started its ranks:
    /// they are of an earlier run of the same name. Returns whether one of them was shown. If no other ring is left,
    /// all stay: the report leaves them aside and states how the newest run ended.
    fn drop_earlier_runs(&mut self, job: &str, of_job: &mut Vec<Candidate>) -> bool {
        let launches = LaunchRecord::of_job(&self.directory, job);
        let is_earlier = |found: &Candidate| {
            let mut launches = launches.iter().filter(|launch| launch.job == job);
            let is_older = |launch: &LaunchRecord| found.created_ns < launch.started_ns;
            let is_on_its_host = |launch: &LaunchRecord| launch.host == found.host;
            !found.alive && launches.any(|launch| is_on_its_host(launch) && is_older(launch))
        };
        let earlier: Vec<Candidate> = of_job.extract_if(.., |found| is_earlier(found)).collect();
        let is_shown_earlier = |key: &(Rank, RingPart), ring: &Ring| {
            let created_ns = ring.created_ns;
            let mut earlier = earlier.iter();
            earlier.any(|found| found.key == *key && found.created_ns == created_ns)
        };
        let mut shown = self.rings.iter();
        if of_job.is_empty() && shown.all(|(key, ring)| is_shown_earlier(key, ring)) {
            *of_job = earlier;
            return false;
        }
        let known = self.rings.len();
        self.rings.retain(|key, ring| !is_shown_earlier(key, ring));
        self.rings.len() < known
    }

    /// Notes whether a process of the shown job is alive, and returns the job to show. If the user chose none, the
    /// choice gets that job. `newest` is whether the newest job is alive, its creation time, and its name.
    fn pick(&mut self, newest: Option<(bool, i64, String)>) -> Option<String> {
        let has_living_process = self
            .rings
            .values()
            .any(|ring| ring.follower.reader().is_alive());
        if has_living_process {
            self.ended = None;
            self.choice.note_alive();
        } else {
            self.ended = self.ended.or_else(|| Some(Instant::now()));
        }
        let ended_long_ago = |ended: Instant| ended.elapsed() >= KEPT_AFTER_END;
        let never_lived = !self.rings.is_empty() && !self.choice.was_alive();
        let may_be_replaced = never_lived || self.ended.is_some_and(ended_long_ago);
        match (self.choice.shown(), newest) {
            (Some((job, true)), _) => Some(job),
            (Some((job, false)), Some((true, _, newer))) if newer != job && may_be_replaced => {
                self.choice.show_unchosen(&newer, true);
                Some(newer)
            }
            (Some((job, false)), _) => Some(job),
            (None, newest) => {
                let (is_alive, _, job) = newest?;
                self.choice.show_unchosen(&job, is_alive);
                Some(job)
            }
        }
    }

    /// Each rank with its process id; `None` if the process is gone or cannot be seen from here.
    pub(in crate::live::source) fn processes(
        &mut self,
    ) -> Result<Vec<(Rank, Option<u32>)>, SourceError> {
        self.list()?;
        let ranks = self.rings.iter();
        Ok(ranks
            .map(|(&(rank, _), ring)| (rank, ring.follower.reader().process()))
            .collect::<BTreeMap<_, _>>()
            .into_iter()
            .collect())
    }

    /// Each rank with a program's own ring and the socket of its endpoint, which is next to the ring. The rings of
    /// NCCL's plug-in have no endpoint.
    pub(in crate::live::source) fn sockets(&mut self) -> Result<Vec<(Rank, PathBuf)>, SourceError> {
        self.list()?;
        let rings = self.rings.iter();
        let rings = rings.filter(|((_, part), _)| *part == RingPart::Program);
        let socket = |ring: &Ring| ring.follower.reader().path().with_extension("sock");
        Ok(rings
            .map(|(&(rank, _), ring)| (rank, socket(ring)))
            .collect())
    }

    /// Attaches a ring; if that fails, adds a problem.
    fn attach(&mut self, found: Candidate) {
        let path = found.path;
        match RingReader::attach(&path) {
            Ok(reader) => {
                let ring = Ring {
                    follower: RingFollower::new(reader, NEWEST),
                    attempt: found.attempt,
                    created_ns: found.created_ns,
                };
                self.rings.insert(found.key, ring);
                self.last_new_ring = Some(Instant::now());
            }
            Err(error) => self.problems.push(unreadable(&path, &error)),
        }
    }

    /// The error if there is no ring to show; `jobs` are the jobs that have rings.
    fn no_ring(&self, jobs: &[String]) -> SourceError {
        let place = self.directory.display();
        let wanted = self.choice.shown().map(|(job, _)| job);
        let what = match (wanted, jobs) {
            (Some(job), []) => format!("no ring of job `{job}` or any other in {place}"),
            (Some(job), jobs) => {
                let named = jobs.iter().take(MOST_NAMED).map(String::as_str);
                let named = named.collect::<Vec<_>>().join(", ");
                let rest = match jobs.len().saturating_sub(MOST_NAMED) {
                    0 => String::new(),
                    rest => format!(" and {rest} more (`rcomm-fr rings` lists them)"),
                };
                format!("no ring of job `{job}` in {place}; there are: {named}{rest}")
            }
            (None, _) => format!("no ring of any job in {place}"),
        };
        SourceError::Nothing {
            what,
            hint: "start a job on this node, name the directory of its rings with --ring-dir, or \
                   look at dumps with `rcomm-top replay DIR`"
                .into(),
        }
    }
}

fn unreadable(path: &Path, error: &dyn std::error::Error) -> Problem {
    Problem::unreadable_dump(path.display().to_string(), error.to_string())
}

impl Source for RingSource {
    fn name(&self) -> String {
        let place = self.directory.display();
        match self.choice.shown() {
            Some((job, _)) => format!("rings of job {job} in {place}"),
            None => format!("rings in {place}"),
        }
    }

    fn poll(&mut self, deadline: Instant) -> Result<Poll, SourceError> {
        let job_changed = self
            .choice
            .shown()
            .is_some_and(|(job, _)| self.job.as_ref() != Some(&job));
        let is_starting = self
            .last_new_ring
            .is_some_and(|last_new_ring| last_new_ring.elapsed() < START_DURATION);
        let interval = match is_starting {
            true => LIST_INTERVAL_AT_START,
            false => LIST_INTERVAL,
        };
        let is_due = self
            .listed
            .is_none_or(|listed| listed.elapsed() >= interval);
        let is_searched = job_changed || is_due || self.rings.is_empty();
        let restart = is_searched && self.list()?;
        let mut world_size = None;
        let observations = self.rings.iter_mut().map(|(&(rank, part), ring)| {
            let (liveness, seen) = if Instant::now() > deadline {
                let unreached = Seen::Failed("it was not reached in time".into());
                (Liveness::Unknown, unreached)
            } else {
                ring.poll()
            };
            world_size = world_size.max(ring.follower.dump().identity.world_size);
            Observation {
                rank,
                part: part as u8,
                liveness,
                seen,
            }
        });
        let observations: Vec<Observation> = observations.collect();
        // Launch records matter only once a process is gone, or for ranks without a ring: a rank that ends in order
        // removes its ring, and a rank that has not joined has none.
        let is_dead = |observation: &Observation| observation.liveness == Liveness::Dead;
        let has_ended = observations.iter().any(is_dead);
        let is_over = !observations.is_empty() && observations.iter().all(is_dead);
        if !is_over {
            self.later_attempt = None;
        } else if is_searched && let Some(job) = &self.job {
            let attempts = self.rings.values().map(|ring| ring.attempt);
            let attempt = attempts.max().unwrap_or(0);
            self.later_attempt =
                later::later_attempt(job, attempt, &RankProcess::list(), RankProcess::has_ring);
        }
        let rings = self.rings.values();
        let paths: Vec<&Path> = rings.map(|ring| ring.follower.reader().path()).collect();
        let ranks = observations.iter().map(|observation| observation.rank);
        let ranks: BTreeSet<Rank> = ranks.collect();
        let lacks_ranks = world_size.is_some_and(|size| (ranks.len() as u64) < u64::from(size));
        let job = self.job.as_deref().filter(|_| has_ended || lacks_ranks);
        Ok(Poll {
            launches: job.map_or_else(Vec::new, |job| LaunchRecord::of_job(&self.directory, job)),
            later_attempt: self.later_attempt.clone(),
            observations,
            problems: self.problems.clone(),
            world_size,
            remains: is_over.then(|| remains::sentence(&paths)),
            restart,
            ..Poll::default()
        })
    }
}

impl Ring {
    /// Reads what has changed in the ring.
    fn poll(&mut self) -> (Liveness, Seen) {
        let poll = self.follower.poll();
        if !poll.whole {
            let truncated = "its ring was truncated".to_owned();
            return (Liveness::Unknown, Seen::Failed(truncated));
        }
        let liveness = match poll.alive {
            true => Liveness::Alive,
            false => Liveness::Dead,
        };
        let seen = match poll.changed {
            true => Seen::Changed(Box::new(self.follower.dump().clone())),
            false => Seen::Unchanged {
                heartbeat_ns: poll.heartbeat_ns,
                as_of_ns: poll.as_of_ns,
            },
        };
        (liveness, seen)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::live::Urgency;
    use crate::{Anchor, Live, LiveOptions};
    use rcomm_recorder::model::{OpType, ProcessGroupInfo};
    use rcomm_recorder::record::{
        FlightRecorder, Operation, Placement, RecorderConfig, SignatureKey, SignatureRef,
    };
    use rcomm_verdict::{Code, Report, Verdict, analyze};
    use std::sync::Arc;

    fn recorder(directory: &std::path::Path, job: &str, rank: Rank) -> FlightRecorder {
        let mut config = RecorderConfig::new(job, rank, 2);
        config.placement = Placement::Dir(directory.to_owned());
        FlightRecorder::create(&config).expect("a ring can be made in a fresh directory")
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    fn issue(recorder: &FlightRecorder, seq: u64) {
        let info = ProcessGroupInfo {
            id: 0,
            name: "0".into(),
            desc: "default_pg".into(),
            ranks: [0, 1].into(),
        };
        let group = recorder.add_group(&info, Duration::from_secs(60));
        let signature = recorder.intern(&SignatureKey {
            backend: "cpu",
            op_name: "barrier",
            ..SignatureKey::default()
        });
        let signature = SignatureRef::Id(signature.expect("a new table has free rows"));
        let operation = Operation {
            collective_seq_id: seq,
            ..Operation::new(group, OpType::Barrier, signature)
        };
        recorder.begin(&operation);
    }

    #[test]
    fn a_ring_is_read_and_its_changes_are_noticed() {
        let directory = tempfile::tempdir().expect("a temporary directory can be made");
        let recorder = recorder(directory.path(), "job", 1);
        issue(&recorder, 1);
        let mut source = RingSource::new(directory.path().to_owned(), None);
        let poll = source.poll(soon()).expect("there is a ring");
        assert_eq!(poll.world_size, Some(2));
        let [observation] = poll.observations.as_slice() else {
            panic!("one ring, {:?}", poll.observations);
        };
        assert_eq!(
            (observation.rank, observation.liveness),
            (1, Liveness::Alive)
        );
        assert!(matches!(&observation.seen, Seen::Changed(dump) if dump.entries.len() == 1));
        let unchanged = source.poll(soon()).expect("the ring is still there");
        assert!(matches!(
            unchanged.observations[0].seen,
            Seen::Unchanged { .. }
        ));
        issue(&recorder, 2);
        let changed = source.poll(soon()).expect("the ring is still there");
        assert!(matches!(&changed.observations[0].seen, Seen::Changed(d) if d.entries.len() == 2));
    }

    #[test]
    fn without_a_ring_the_error_says_how_to_get_one() {
        let directory = tempfile::tempdir().expect("a temporary directory can be made");
        let place = directory.path().join("none");
        let error = RingSource::new(place, None)
            .poll(soon())
            .expect_err("the directory has no ring");
        assert!(error.to_string().contains("rcomm-top replay"), "{error}");
        let _other = recorder(directory.path(), "other", 0);
        let error = RingSource::new(directory.path().to_owned(), Some("mine".into()))
            .poll(soon())
            .expect_err("there is no ring of that job");
        assert!(error.to_string().contains("there are: other;"), "{error}");
        let _more: Vec<_> = (10..19)
            .map(|job| recorder(directory.path(), &format!("job-{job}"), 0))
            .collect();
        let error = RingSource::new(directory.path().to_owned(), Some("mine".into()))
            .poll(soon())
            .expect_err("there is no ring of that job");
        let error = error.to_string();
        assert!(error.contains("and 2 more (`rcomm-fr rings`"), "{error}");
    }

    #[test]
    fn a_view_stays_with_its_job_until_another_is_chosen() {
        let directory = tempfile::tempdir().expect("a temporary directory can be made");
        let _first = recorder(directory.path(), "first", 0);
        let choice = JobChoice::default();
        let mut source = RingSource::showing(directory.path().to_owned(), choice.clone());
        let mut job = || {
            // Without this, a poll searches for new rings only every two seconds.
            source.listed = None;
            let poll = source.poll(soon()).expect("there is a ring");
            assert_eq!(poll.observations.len(), 1);
            (source.name(), poll.restart)
        };
        let (name, _) = job();
        assert!(name.starts_with("rings of job first"), "{name}");
        let _second = recorder(directory.path(), "second", 0);
        let (name, restart) = job();
        assert!(name.starts_with("rings of job first") && !restart, "{name}");
        choice.choose("second");
        let (name, restart) = job();
        assert!(name.starts_with("rings of job second") && restart, "{name}");
        assert_eq!(choice.shown(), Some(("second".into(), true)));
    }

    #[test]
    fn a_living_job_replaces_one_that_ended_long_ago_unless_it_was_chosen() {
        let directory = tempfile::tempdir().expect("a temporary directory can be made");
        for chosen in [false, true] {
            let first = format!("first-{chosen}");
            let ended = recorder(directory.path(), &first, 0);
            let choice = JobChoice::default();
            let mut source = RingSource::showing(directory.path().to_owned(), choice.clone());
            if chosen {
                choice.choose(&first);
            }
            source.poll(soon()).expect("there is a ring");
            drop(ended);
            let _second = recorder(directory.path(), "second", 0);
            source.listed = None;
            source.poll(soon()).expect("the first job is still shown");
            assert_eq!(choice.shown(), Some((first.clone(), chosen)));
            source.ended = source
                .ended
                .and_then(|ended| ended.checked_sub(KEPT_AFTER_END));
            assert!(source.ended.is_some(), "the end was not noticed");
            source.listed = None;
            source.poll(soon()).expect("there is a ring");
            let expected = if chosen { &*first } else { "second" };
            assert_eq!(choice.shown(), Some((expected.to_owned(), chosen)));
        }
    }

    /// Shifts a ring's clock, as if the wall clock had jumped after the ring was created.
    fn shift_clock(recorder: &FlightRecorder, by_ns: i64) {
        use std::os::unix::fs::FileExt as _;
        /// The offset in the file of the wall time that the ring's times are relative to; see docs/FORMAT.md.
        const ANCHOR_WALL: u64 = 88;
        let path = recorder.storage().path().expect("the ring is in a file");
        let file = std::fs::File::options().read(true).write(true).open(path);
        let file = file.expect("the ring's file can be opened");
        let mut word = [0; 8];
        file.read_exact_at(&mut word, ANCHOR_WALL)
            .expect("the ring's header can be read");
        let moved = i64::from_le_bytes(word) + by_ns;
        let written = file.write_all_at(&moved.to_le_bytes(), ANCHOR_WALL);
        written.expect("the ring's header can be written");
    }

    #[test]
    fn a_clock_that_jumps_on_a_rank_or_while_it_is_watched_makes_nothing_overdue() {
        const HOUR: i64 = 3_600_000_000_000;
        for jump in [-HOUR, HOUR] {
            let directory = tempfile::tempdir().expect("a temporary directory can be made");
            let recorder = recorder(directory.path(), "job", 0);
            shift_clock(&recorder, jump);
            issue(&recorder, 1);
            let anchor = Anchor::now();
            let mut source = RingSource::new(directory.path().to_owned(), None);
            let mut live = Live::new(LiveOptions::default(), analyze, vec![source.name()]);
            let mut judge = |source: &mut RingSource| {
                live.observe(0, source.poll(soon()), anchor.moment());
                let urgency = live.urgency(anchor.moment());
                let snapshot = live.refresh(anchor.moment());
                (snapshot.map(|snapshot| snapshot.report), urgency)
            };
            let assert_undecided = |report: Option<Arc<Report>>| {
                let report = report.expect("changed observations give a report");
                // The other rank of the job has no ring.
                assert_eq!(report.verdict, Verdict::Inconclusive);
                assert!(report.findings.is_empty(), "{:?}", report.findings);
            };
            assert_undecided(judge(&mut source).0);
            // Nothing was written since the first poll.
            assert_eq!(judge(&mut source).1, Urgency::No);
            shift_clock(&recorder, jump);
            let (report, urgency) = judge(&mut source);
            assert_eq!(urgency, Urgency::Usual, "all recorded times have moved");
            assert_undecided(report);
        }
    }

    #[test]
    fn garbage_next_to_a_ring_is_a_note_and_the_ring_is_read() {
        let directory = tempfile::tempdir().expect("a temporary directory can be made");
        let recorder = recorder(directory.path(), "job", 0);
        let ring = recorder
            .storage()
            .path()
            .expect("the ring is in a file")
            .to_owned();
        let garbage = ring.with_file_name("1.0.ring");
        std::fs::write(&garbage, vec![0xa5; 8192]).expect("the file can be written");
        let mut source = RingSource::new(directory.path().to_owned(), None);
        let poll = source.poll(soon()).expect("there is a ring");
        assert_eq!(poll.observations.len(), 1);
        assert_eq!(poll.problems.len(), 1);
        assert_eq!(poll.problems[0].code, Code::N301);
    }
}
