//! The latest record of every rank, and a report kept fresh.
//!
//! [`Live`] is a value: it is told what sources saw and what time it is, and answers with a
//! [`Snapshot`]. It starts no thread and reads no clock; [`Watch`](crate::Watch) does that.

mod seen;
mod snapshot;

pub use snapshot::{RankView, Snapshot, SourceStatus};

use crate::finding::{Code, Finding, Severity};
use crate::policy::Policy;
use crate::report::{Problem, Report, Verdict};
use crate::source::{Collected, Liveness, Observation, Poll, Seen, SourceError};
use rcomm_recorder::model::{EntryState, Rank};
use rcomm_recorder::publish::Dump;
use seen::Watched;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// A point in time on both clocks: ages are monotonic, stamps are wall clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment {
    /// Since some fixed beginning; never runs backwards.
    pub elapsed: Duration,
    /// Wall clock, ns since the epoch.
    pub wall_ns: i64,
}

/// Parameters of a [`Live`].
#[derive(Clone, Debug)]
pub struct LiveOptions {
    /// What the analysis takes for granted; its time of judgement is set by [`Live`].
    pub policy: Policy,
    /// From which age of its last answer on a rank counts as silent.
    pub silent_after: Duration,
    /// How many operations are kept in memory over all ranks. Where rings hold more, the oldest
    /// finished ones are let go, and show as lost.
    pub entry_budget: usize,
}

impl Default for LiveOptions {
    fn default() -> Self {
        Self {
            policy: Policy {
                snapshot: true,
                ..Policy::default()
            },
            silent_after: Duration::from_secs(5),
            entry_budget: 1_000_000,
        }
    }
}

impl LiveOptions {
    /// For records that will not change any more: dumps are judged as made because something hung,
    /// and no rank is expected to answer again.
    pub fn post_mortem() -> Self {
        let mut options = Self {
            silent_after: Duration::MAX,
            entry_budget: usize::MAX,
            ..Self::default()
        };
        options.policy.snapshot = false;
        options
    }
}

/// How dumps are judged: [`analyze`](crate::analyze), unless a test says otherwise.
pub type Judge = fn(&[Arc<Dump>], &Policy) -> Report;

/// One record as a source left it.
struct Slot {
    dump: Option<Arc<Dump>>,
    liveness: Liveness,
    answered: Option<Duration>,
    failure: Option<Arc<str>>,
    /// Heartbeat and time of looks that found nothing else new; taken into the record when it is
    /// judged next.
    signs: (i64, i64),
    /// Whether the record has unfinished operations.
    pending: bool,
    /// From which time of a look on one of them is overdue that was young at the last look, wall clock
    /// of the record, ns since the epoch.
    overdue_from: Option<i64>,
}

impl Slot {
    /// Notes what is unfinished, as seen at `now_ns`.
    fn note_pending(&mut self, now_ns: i64, overdue: Duration) {
        let overdue = i64::try_from(overdue.as_nanos()).unwrap_or(i64::MAX);
        let entries = self.dump.iter().flat_map(|dump| &dump.entries);
        let open = entries.filter(|e| e.state < EntryState::Completed && !e.retired);
        let mut from = open.map(|e| e.time_created_ns.saturating_add(overdue));
        let first = from.next();
        self.pending = first.is_some();
        self.overdue_from = first
            .into_iter()
            .chain(from)
            .filter(|&at| at > now_ns)
            .min();
    }
}

/// See the module.
pub struct Live {
    options: LiveOptions,
    judge: Judge,
    slots: BTreeMap<(Rank, usize, u8), Slot>,
    sources: Vec<Feed>,
    silent: BTreeSet<Rank>,
    changed: bool,
    number: u64,
    /// When the verdict may change without any record changing.
    due: Option<Duration>,
}

#[derive(Default)]
struct Feed {
    status: SourceStatus,
    answered: Option<Duration>,
    problems: Vec<Problem>,
    world_size: Option<u32>,
    communicators: Vec<Watched>,
    collected: Option<Collected>,
}

impl Live {
    /// Nothing seen yet, from sources of these names.
    pub fn new(options: LiveOptions, judge: Judge, sources: Vec<String>) -> Self {
        let feed = |name| Feed {
            status: SourceStatus {
                name,
                ..SourceStatus::default()
            },
            ..Feed::default()
        };
        Self {
            options,
            judge,
            slots: BTreeMap::new(),
            sources: sources.into_iter().map(feed).collect(),
            silent: BTreeSet::new(),
            changed: false,
            number: 0,
            due: None,
        }
    }

    /// Takes in what the source of this number saw.
    pub fn observe(&mut self, source: usize, poll: Result<Poll, SourceError>, at: Moment) {
        let Some(feed) = self.sources.get_mut(source) else {
            return;
        };
        let poll = match poll {
            Ok(poll) => poll,
            Err(error) => {
                let error = error.to_string();
                self.changed |= feed.status.error.as_deref() != Some(&error);
                feed.status.error = Some(error);
                feed.status.answered = 0;
                return;
            }
        };
        // A process may have several recorders: ranks are counted, not records.
        let ranks: BTreeSet<Rank> = poll.observations.iter().map(|o| o.rank).collect();
        let failed = poll.observations.iter();
        let failed = failed.filter(|o| matches!(o.seen, Seen::Failed(_)));
        let failed: BTreeSet<Rank> = failed.map(|o| o.rank).collect();
        let known = ranks.len();
        let answered = known - failed.len();
        self.changed |= feed.status.error.take().is_some()
            || feed.problems != poll.problems
            || (feed.status.answered, feed.status.known) != (answered, known);
        feed.status.answered = answered;
        feed.status.known = known;
        feed.answered = Some(at.elapsed);
        feed.problems = poll.problems;
        feed.world_size = poll.world_size;
        let communicators = Watched::update(&feed.communicators, poll.communicators, at.elapsed);
        let same = |a: &Watched, b: &Watched| a.communicator == b.communicator;
        let told = &feed.communicators;
        self.changed |= told.len() != communicators.len()
            || !told.iter().zip(&communicators).all(|(a, b)| same(a, b));
        feed.communicators = communicators;
        let number = |collected: &Option<Collected>| {
            collected
                .as_ref()
                .map(|c| (Arc::as_ptr(&c.report), c.silent.clone()))
        };
        self.changed |= number(&feed.collected) != number(&poll.collected);
        feed.collected = poll.collected;
        if poll.restart {
            self.slots.retain(|&(_, of, _), _| of != source);
        }
        let records = self.slots.len().max(known).max(1);
        let keep = (self.options.entry_budget / records).clamp(64, 1 << 20);
        for observation in poll.observations {
            self.take(source, observation, at, keep);
        }
    }

    fn take(&mut self, source: usize, observation: Observation, at: Moment, keep: usize) {
        let key = (observation.rank, source, observation.part);
        let slot = self.slots.entry(key).or_insert(Slot {
            dump: None,
            liveness: Liveness::Unknown,
            answered: None,
            failure: None,
            signs: (0, 0),
            pending: false,
            overdue_from: None,
        });
        self.changed |= slot.liveness != observation.liveness;
        slot.liveness = observation.liveness;
        match observation.seen {
            Seen::Failed(reason) => {
                if slot.failure.as_deref() != Some(&reason) {
                    slot.failure = Some(reason.into());
                    self.changed = true;
                }
                return;
            }
            Seen::Unchanged {
                heartbeat_ns,
                as_of_ns,
            } => {
                slot.signs = (heartbeat_ns, as_of_ns);
                let looked = if as_of_ns == 0 { at.wall_ns } else { as_of_ns };
                if slot.overdue_from.is_some_and(|from| from <= looked) {
                    slot.note_pending(looked, self.options.policy.overdue);
                    self.changed = true;
                }
            }
            Seen::Changed(mut dump) => {
                trim(&mut dump, keep);
                let taken = dump.identity.dump_time_ns;
                slot.dump = Some(Arc::from(dump));
                slot.note_pending(taken, self.options.policy.overdue);
                slot.signs = (0, 0);
                self.changed = true;
            }
        }
        slot.answered = Some(at.elapsed);
        slot.failure = None;
    }

    /// Whether [`Live::refresh`] has something new to say.
    pub fn is_due(&self, at: Moment) -> bool {
        self.changed
            || self.due.is_some_and(|due| due <= at.elapsed)
            || self.silent_ranks(at) != self.silent
    }

    /// When the verdict may change although nothing is observed, if it may.
    pub fn due(&self) -> Option<Duration> {
        self.due
    }

    fn silent_ranks(&self, at: Moment) -> BTreeSet<Rank> {
        // A rank speaks while any of its records is answered for.
        let mut last: BTreeMap<Rank, Duration> = BTreeMap::new();
        for (&(rank, ..), slot) in &self.slots {
            if let Some(answered) = slot.answered {
                let newest = last.entry(rank).or_default();
                *newest = (*newest).max(answered);
            }
        }
        let limit = self.options.silent_after;
        last.into_iter()
            .filter(|(_, answered)| at.elapsed.saturating_sub(*answered) > limit)
            .map(|(rank, _)| rank)
            .collect()
    }

    /// The job at this moment, if anything changed since the last time.
    ///
    /// The records are judged again only if one of them changed, a rank fell silent, or a look showed
    /// that what is pending is overdue by now; and, since ages go into sentences, now and then while
    /// anything is pending.
    pub fn refresh(&mut self, at: Moment) -> Option<Snapshot> {
        if !self.is_due(at) {
            return None;
        }
        let began = std::time::Instant::now();
        self.silent = self.silent_ranks(at);
        self.changed = false;
        let world = self
            .sources
            .iter()
            .filter_map(|feed| feed.world_size)
            .chain(self.options.policy.world_size)
            .max();
        self.take_signs();
        let mut ranks = self.views(at, world);
        // What a silent rank last wrote is old: judged with the others' new records it would be
        // accused of what it may have done since.
        let dumps: Vec<Arc<Dump>> = ranks
            .iter()
            .filter(|view| !view.silent)
            .flat_map(|view| view.dumps.iter().cloned())
            .collect();
        let mut policy = self.options.policy.clone();
        if policy.snapshot {
            policy.now_ns = Some(at.wall_ns);
        }
        policy.world_size = world;
        let collected = self.collected(&ranks).cloned();
        let mut report = match &collected {
            Some(collected) => Report::clone(&collected.report),
            // Nobody gave a record: what is left is what is said of the ranks.
            None if dumps.is_empty() && self.communicators().next().is_some() => Report {
                input: crate::report::Input {
                    ranks_expected: ranks.len(),
                    ..Default::default()
                },
                ..Report::clone(&Snapshot::empty(at).report)
            },
            None => (self.judge)(&dumps, &policy),
        };
        if let Some(collected) = &collected {
            ranks = collected_views(ranks, collected);
        }
        let problems = self.sources.iter().flat_map(|feed| &feed.problems).cloned();
        report.problems.extend(problems);
        let watched: Vec<Watched> = self.communicators().cloned().collect();
        seen::remark(&watched, &mut ranks);
        let ranks: Arc<[RankView]> = ranks.into();
        self.add_seen(&mut report, &watched, &ranks, at);
        self.number += 1;
        let cost = began.elapsed();
        self.due = policy.snapshot.then(|| self.next_due(at, cost)).flatten();
        let uneven = watched.iter().filter(|w| w.is_uneven());
        let overdue = uneven
            .map(|w| w.since + policy.overdue)
            .filter(|due| *due > at.elapsed);
        self.due = self.due.into_iter().chain(overdue).min();
        let sources = self.sources.iter().map(|feed| SourceStatus {
            silence: feed.answered.map(|then| at.elapsed.saturating_sub(then)),
            ..feed.status.clone()
        });
        let job = dumps
            .iter()
            .find(|dump| !dump.identity.job.is_empty())
            .map(|dump| dump.identity.job.clone())
            .or(collected.map(|collected| collected.job))
            .unwrap_or_default();
        Some(Snapshot {
            number: self.number,
            at,
            report: Arc::new(report),
            ranks,
            sources: sources.collect(),
            job,
            cost,
        })
    }

    /// Signs of life since a record last changed go into the record: a heartbeat that is only not
    /// looked at would seem to have stopped.
    fn take_signs(&mut self) {
        for slot in self.slots.values_mut() {
            let (heartbeat, as_of) = std::mem::take(&mut slot.signs);
            if let Some(dump) = slot.dump.as_mut().filter(|_| (heartbeat, as_of) != (0, 0)) {
                let dump = Arc::make_mut(dump);
                dump.identity.dump_time_ns = dump.identity.dump_time_ns.max(as_of);
                if let Some(status) = &mut dump.status {
                    status.heartbeat_ns = status.heartbeat_ns.max(heartbeat);
                }
            }
        }
    }

    /// When to judge again although nothing changes: since ages go into sentences, every few seconds
    /// while anything is pending; at most a fiftieth of the time.
    fn next_due(&self, at: Moment, cost: Duration) -> Option<Duration> {
        let pending = self.slots.values().any(|slot| slot.pending);
        pending.then(|| at.elapsed + Duration::from_secs(5).max(cost * 50))
    }

    fn communicators(&self) -> impl Iterator<Item = &Watched> {
        self.sources.iter().flat_map(|feed| &feed.communicators)
    }

    /// A collector's report, where it read more ranks than we did.
    fn collected(&self, ranks: &[RankView]) -> Option<&Collected> {
        let own = ranks.iter().filter(|view| !view.dumps.is_empty()).count();
        let collected = self
            .sources
            .iter()
            .filter_map(|feed| feed.collected.as_ref());
        let widest = collected.max_by_key(|collected| collected.report.input.ranks_read);
        widest.filter(|collected| own == 0 || collected.report.input.ranks_read > own)
    }

    /// Adds the findings that no record tells.
    fn add_seen(&self, report: &mut Report, watched: &[Watched], ranks: &[RankView], at: Moment) {
        let is_error = |finding: &Finding| finding.severity == Severity::Error;
        let explained = report.findings.iter().any(is_error);
        let overdue = self.options.policy.overdue;
        let library = seen::library(watched, ranks, at.elapsed, overdue, explained);
        let failed: BTreeSet<Rank> = (report.findings.iter())
            .filter(|finding| finding.code == Code::E150)
            .flat_map(|finding| finding.culprit_ranks.iter().copied())
            .collect();
        let known = |finding: &Finding| {
            let named = &finding.culprit_ranks;
            !named.is_empty()
                && match finding.code {
                    Code::E150 => named.iter().all(|rank| failed.contains(rank)),
                    Code::W150 => named.iter().all(|rank| self.silent.contains(rank)),
                    _ => false,
                }
        };
        let library: Vec<Finding> = library.into_iter().filter(|f| !known(f)).collect();
        let unsettled = matches!(
            report.verdict,
            Verdict::Healthy | Verdict::Running | Verdict::Inconclusive
        );
        if unsettled && library.iter().any(is_error) {
            report.verdict = Verdict::Stuck;
        }
        let first = report.findings.iter().map(|f| f.id).max().unwrap_or(0) + 1;
        let more = library
            .into_iter()
            .chain(seen::silence(&self.silent, ranks));
        let numbered = (first..)
            .zip(more)
            .map(|(id, finding)| Finding { id, ..finding });
        report.findings.extend(numbered);
    }

    fn views(&self, at: Moment, world: Option<u32>) -> Vec<RankView> {
        let mut views: BTreeMap<Rank, RankView> = (0..world.unwrap_or(0))
            .map(|rank| (rank, RankView::missing(rank)))
            .collect();
        let mut hosts: BTreeSet<Arc<str>> = BTreeSet::new();
        for (&(rank, ..), slot) in &self.slots {
            let view = views.entry(rank).or_insert_with(|| RankView::missing(rank));
            let silence = slot.answered.map(|then| at.elapsed.saturating_sub(then));
            view.silence = match (view.silence, silence) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            };
            view.liveness = view.liveness.max(slot.liveness);
            if view.failure.is_none() {
                view.failure.clone_from(&slot.failure);
            }
            if let Some(dump) = &slot.dump {
                view.add(dump);
                let host = dump.identity.host.as_str();
                if view.host.is_empty() && !host.is_empty() {
                    let known = hosts.get(host).cloned();
                    let host = known.unwrap_or_else(|| Arc::from(host));
                    hosts.insert(host.clone());
                    view.host = host;
                }
            }
        }
        let mut views: Vec<RankView> = views.into_values().collect();
        for view in &mut views {
            view.silent = self.silent.contains(&view.rank);
        }
        number_on_hosts(&mut views);
        views
    }
}

/// The ranks of a collector's report, beside those that we read.
fn collected_views(own: Vec<RankView>, collected: &Collected) -> Vec<RankView> {
    let mut views: BTreeMap<Rank, RankView> =
        own.into_iter().map(|view| (view.rank, view)).collect();
    for told in &collected.report.ranks {
        let view = views
            .entry(told.rank)
            .or_insert_with(|| RankView::missing(told.rank));
        if view.host.is_empty() {
            view.host = told.host.as_str().into();
        }
        view.silent |= collected.silent.binary_search(&told.rank).is_ok();
    }
    let mut views: Vec<RankView> = views.into_values().collect();
    number_on_hosts(&mut views);
    views
}

/// Numbers the ranks of each host.
fn number_on_hosts(views: &mut [RankView]) {
    let mut on_host: BTreeMap<Arc<str>, u32> = BTreeMap::new();
    for view in views {
        let next = on_host.entry(view.host.clone()).or_default();
        view.local_rank = *next;
        *next += 1;
    }
}

/// Lets go of the oldest finished operations beyond the newest `keep`.
fn trim(dump: &mut Dump, keep: usize) {
    let beyond = dump.entries.len().saturating_sub(keep);
    let open = |e: &rcomm_recorder::model::Entry| e.state < EntryState::Completed && !e.retired;
    let first_open = dump.entries.iter().position(open).unwrap_or(usize::MAX);
    let cut = beyond.min(first_open);
    if cut > 0 {
        dump.entries.drain(..cut);
        dump.entries.shrink_to_fit();
    }
}

impl Report {
    /// The status a program that made this report ends with: 0 healthy or running, 1 at least one
    /// error or warning, 2 could not tell.
    pub fn exit_code(&self) -> u8 {
        let blamed = self.findings.iter().any(|f| f.severity != Severity::Note);
        match self.verdict {
            _ if blamed => 1,
            Verdict::Healthy | Verdict::Running => 0,
            Verdict::Stuck | Verdict::Mismatch | Verdict::Slow => 1,
            Verdict::Inconclusive => 2,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::{Input, InstanceReport, InstanceState};
    use crate::simulate::{Simulation, Situation};
    use crate::{GroupRef, SeqKind};

    /// Counts what it is given: one finding-free report, everything unfinished as one instance.
    fn count(dumps: &[Arc<Dump>], policy: &Policy) -> Report {
        let open = dumps
            .iter()
            .flat_map(|dump| &dump.entries)
            .filter(|e| !e.retired)
            .map(|e| e.time_created_ns)
            .min();
        let in_flight = open.map(|since| InstanceReport {
            group: GroupRef {
                name: "g".into(),
                desc: "g".into(),
                ranks: vec![],
            },
            seq: 1,
            seq_kind: SeqKind::CollectiveSeqId,
            op: "all_reduce".into(),
            bytes: 0,
            joined: vec![],
            missing: vec![],
            unknown: vec![],
            state: InstanceState::Waiting,
            age_ms: policy.now_ns.map(|now| (now - since) as f64 / 1e6),
        });
        Report {
            schema: Report::SCHEMA.into(),
            verdict: Verdict::Running,
            findings: vec![],
            problems: vec![],
            input: Input {
                files: dumps.len(),
                ranks_expected: policy.world_size.unwrap_or(0) as usize,
                ranks_read: dumps.len(),
                entries: 0,
            },
            groups: vec![],
            ranks: vec![],
            in_flight: in_flight.into_iter().collect(),
            waits: vec![],
            stacks: vec![],
        }
    }

    fn at(seconds: f64) -> Moment {
        let elapsed = Duration::from_secs_f64(seconds);
        Moment {
            elapsed,
            wall_ns: elapsed.as_nanos() as i64,
        }
    }

    fn live() -> Live {
        Live::new(LiveOptions::default(), count, vec!["test".into()])
    }

    fn poll(dumps: Vec<Dump>) -> Result<Poll, SourceError> {
        let observations = dumps
            .into_iter()
            .map(|dump| Observation {
                rank: dump.identity.rank.expect("simulated dumps know their rank"),
                part: 0,
                liveness: Liveness::Alive,
                seen: Seen::Changed(Box::new(dump)),
            })
            .collect();
        Ok(Poll {
            observations,
            ..Poll::default()
        })
    }

    fn unchanged(ranks: impl Iterator<Item = Rank>) -> Result<Poll, SourceError> {
        let observations = ranks
            .map(|rank| Observation {
                rank,
                part: 0,
                liveness: Liveness::Alive,
                seen: Seen::Unchanged {
                    heartbeat_ns: 0,
                    as_of_ns: 0,
                },
            })
            .collect();
        Ok(Poll {
            observations,
            ..Poll::default()
        })
    }

    #[test]
    fn nothing_is_judged_again_while_nothing_changes() {
        let simulation = Simulation::new(Situation::Healthy, 4, 0);
        let mut live = live();
        // Between two operations: nothing is pending, so nothing can become overdue.
        live.observe(0, poll(simulation.dumps_at(45_000_000)), at(0.045));
        assert!(live.refresh(at(0.045)).is_some());
        live.observe(0, unchanged(0..4), at(1.0));
        assert!(live.refresh(at(1.0)).is_none());
        live.observe(0, unchanged(0..4), at(5.9));
        assert!(live.refresh(at(6.0)).is_none());
    }

    #[test]
    fn what_is_pending_is_judged_again_when_a_look_shows_it_overdue() {
        let simulation = Simulation::new(Situation::StuckRank, 16, 0);
        let now = simulation.fault_ns() as f64 / 1e9 + 1.0;
        let mut live = live();
        live.observe(0, poll(simulation.dumps_at((now * 1e9) as i64)), at(now));
        let snapshot = live.refresh(at(now)).expect("first look");
        assert_eq!(snapshot.report.in_flight.len(), 1);
        live.observe(0, unchanged(0..16), at(now + 3.0));
        assert!(live.refresh(at(now + 3.0)).is_none());
        live.observe(0, unchanged(0..16), at(now + 4.9));
        assert!(live.refresh(at(now + 4.9)).is_some());
    }

    #[test]
    fn a_view_that_looks_too_rarely_does_not_call_the_job_stuck() {
        let simulation = Simulation::new(Situation::Healthy, 16, 0);
        let options = LiveOptions {
            silent_after: Duration::MAX,
            ..LiveOptions::default()
        };
        let mut live = Live::new(options, crate::analyze, vec!["test".into()]);
        // Everybody is inside the first operation of a step.
        live.observe(0, poll(simulation.dumps_at(4_602_000_000)), at(4.602));
        for now in [4.602, 9.7, 60.0] {
            let snapshot = live.refresh(at(now)).expect("something is pending");
            assert_eq!(snapshot.report.verdict, Verdict::Running, "{now}");
        }
    }

    #[test]
    fn a_silent_rank_is_named_and_its_old_record_is_not_judged() {
        let simulation = Simulation::new(Situation::Healthy, 4, 0);
        let mut live = live();
        live.observe(0, poll(simulation.dumps_at(45_000_000)), at(0.1));
        assert_eq!(live.refresh(at(0.1)).expect("first").report.input.files, 4);
        let mut later = unchanged((0..4).filter(|&rank| rank != 2)).expect("made above");
        later.observations.push(Observation {
            rank: 2,
            part: 0,
            liveness: Liveness::Unknown,
            seen: Seen::Failed("connection refused".into()),
        });
        live.observe(0, Ok(later), at(7.0));
        let snapshot = live.refresh(at(7.0)).expect("a rank fell silent");
        assert_eq!(snapshot.report.input.files, 3);
        let finding = &snapshot.report.findings[0];
        assert_eq!(
            (finding.code, &finding.culprit_ranks[..]),
            (Code::W150, &[2][..])
        );
        assert!(
            finding.sentence.contains("connection refused"),
            "{}",
            finding.sentence
        );
        assert_eq!(snapshot.report.exit_code(), 1);
        let view = snapshot.rank(2).expect("still shown");
        assert!(view.silent && view.dump().is_some());
    }

    #[test]
    fn ranks_of_a_post_mortem_never_fall_silent() {
        let simulation = Simulation::new(Situation::Healthy, 4, 0);
        let mut live = Live::new(LiveOptions::post_mortem(), count, vec!["dumps".into()]);
        live.observe(0, poll(simulation.dumps_at(45_000_000)), at(0.1));
        assert!(live.refresh(at(0.1)).is_some());
        assert!(live.refresh(at(86_400.0)).is_none());
    }

    #[test]
    fn a_source_that_fails_is_shown_with_its_error_and_its_ranks_fall_silent() {
        let simulation = Simulation::new(Situation::Healthy, 4, 0);
        let mut live = live();
        live.observe(0, poll(simulation.dumps_at(45_000_000)), at(0.1));
        live.refresh(at(0.1));
        let gone = SourceError::Unusable {
            place: "x".into(),
            reason: "gone".into(),
        };
        live.observe(0, Err(gone), at(8.0));
        let snapshot = live.refresh(at(8.0)).expect("an error is news");
        assert_eq!(
            snapshot.sources[0].error.as_deref(),
            Some("cannot use x: gone")
        );
        assert_eq!(snapshot.report.findings[0].culprit_ranks, [0, 1, 2, 3]);
    }

    #[test]
    fn a_large_record_keeps_its_newest_and_every_pending_operation() {
        let simulation = Simulation::new(Situation::StuckRank, 16, 0);
        let mut dump = simulation
            .dumps_at(simulation.fault_ns() + 1_000_000_000)
            .remove(0);
        let (before, open) = (dump.entries.len(), dump.entries.last().cloned());
        trim(&mut dump, 64);
        assert!(dump.entries.len() == 64 && before > 64);
        assert_eq!(dump.entries.last().cloned(), open);
        dump.entries[0].retired = false;
        dump.entries[0].state = EntryState::Started;
        trim(&mut dump, 8);
        assert_eq!(dump.entries.len(), 64);
    }

    #[test]
    fn ranks_of_one_host_are_numbered_on_it() {
        let simulation = Simulation::new(Situation::Healthy, 16, 0);
        let mut live = live();
        live.observe(0, poll(simulation.dumps_at(45_000_000)), at(0.1));
        let snapshot = live.refresh(at(0.1)).expect("first look");
        let view = snapshot.rank(11).expect("known");
        assert_eq!((view.host.as_ref(), view.local_rank), ("n001", 3));
    }
}
