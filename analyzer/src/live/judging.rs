//! [`Live`] decides when the records are judged again, and makes snapshots.

use super::latest::{Horizon, LatestRecords, Watched};
use super::seen;
use super::views::{add_unjudged, collected_views, recorded_views};
use super::{Judge, LiveOptions, Moment, RankView, Snapshot, SourceStatus};
use crate::live::source::{Poll, SourceError};
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::Dump;
use rcomm_verdict::{Code, Finding, Input, LaterAttempt, MAX_WORLD, Report, Severity, Verdict};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// While operations are pending, or the job may have stopped communicating, the records are judged again after this
/// time if they were polled since, because sentences contain ages.
const AGES_INTERVAL: Duration = Duration::from_secs(5);

/// A job that issued or completed an operation less than this long ago is running, though nothing is in flight at the
/// moment of a look: without this, the verdict on a job that is well would alternate between healthy and running.
const BETWEEN_OPERATIONS: Duration = Duration::from_secs(10);

/// How urgent a new judgment is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Urgency {
    /// Not needed: nothing has changed.
    No,
    /// A record or the state of a source changed, a rank fell silent or answers again, or the findings may change with
    /// time alone: ages grow, or [`Live::due`] has come.
    Usual,
    /// An operation became overdue in a record that had no overdue one, and another record had one before.
    More,
    /// The first poll that shows anything, or an operation that became overdue while no record had an overdue one: a
    /// user waits for the report.
    First,
}

/// Keeps the report on a running job current; see the parent module.
pub struct Live {
    options: LiveOptions,
    judge: Judge,
    pub(super) kept: LatestRecords,
    /// The ranks that were silent when the records were judged last.
    silent: BTreeSet<Rank>,
    /// The stragglers of the newest report (W220).
    stragglers: Vec<Rank>,
    /// Whether a poll has changed anything since the records were judged last.
    changed: bool,
    /// The number of the newest snapshot; 0 before the first.
    number: u64,
    /// When the records were judged last, and for which time of the job's clock, ns since the epoch.
    judged: Option<(Duration, Option<i64>)>,
    /// When the verdict may change although no record changes.
    due: Option<Duration>,
    /// When a poll last changed anything.
    changed_at: Duration,
    /// Whether the verdict of the newest report depends on whether the ranks continue to issue operations.
    may_fall_silent: bool,
    /// Whether the job may have more ranks than are expected, according to the newest report that rests on a record.
    may_have_more: bool,
}

impl Live {
    /// A view of sources with these names that has observed nothing yet.
    pub fn new(options: LiveOptions, judge: Judge, sources: Vec<String>) -> Self {
        Self {
            options,
            judge,
            kept: LatestRecords::new(sources),
            silent: BTreeSet::new(),
            stragglers: Vec::new(),
            changed: false,
            number: 0,
            judged: None,
            due: None,
            changed_at: Duration::ZERO,
            may_fall_silent: false,
            may_have_more: false,
        }
    }

    /// Takes the result of a poll of source number `source`, which counts from 0 in the order of the names.
    pub fn observe(&mut self, source: usize, poll: Result<Poll, SourceError>, at: Moment) {
        if self.kept.observe(source, poll, at, &self.options) {
            self.changed = true;
            self.changed_at = at.elapsed;
        }
    }

    /// How urgent a call of [`Live::refresh`] is.
    pub fn urgency(&self, at: Moment) -> Urgency {
        let Some((judged_at, judged_as_of)) = self.judged else {
            return match self.changed {
                true => Urgency::First,
                false => Urgency::No,
            };
        };
        let silent = self.kept.silent(self.options.silent_after);
        let horizon = self.horizon(at, &silent);
        if let Some(Horizon { ns, .. }) = horizon {
            let mut slots = self.kept.slots.values();
            if slots.any(|slot| !slot.was_overdue && slot.is_overdue(ns)) {
                let mut slots = self.kept.slots.values();
                let had_overdue = slots.any(|slot| slot.was_overdue);
                return match had_overdue {
                    true => Urgency::More,
                    false => Urgency::First,
                };
            }
        }
        let polled_since = horizon.map(|horizon| horizon.ns) > judged_as_of;
        let states_ages = self.has_unfinished() || self.is_quiet(at);
        let is_outdated = polled_since && at.elapsed >= judged_at + AGES_INTERVAL && states_ages;
        let is_due = self.due.is_some_and(|due| due <= at.elapsed);
        if self.changed || is_outdated || is_due || silent != self.silent {
            Urgency::Usual
        } else {
            Urgency::No
        }
    }

    /// When the sources should be polled again, as [`Moment::elapsed`]: the earliest time at which an operation that
    /// was pending at the last poll becomes overdue. `None` if there is no such operation, the job is not live, or the
    /// records state no time.
    pub fn poll_due(&self, at: Moment) -> Option<Duration> {
        let horizon = self.horizon(at, &self.silent)?;
        let due = self.kept.slots.values().flat_map(|slot| &slot.due);
        let young = due.filter_map(|due| {
            let left = due.saturating_sub(horizon.ns);
            u64::try_from(left).ok().filter(|&left| left > 0)
        });
        let left = young.min()?;
        Some(horizon.polled + Duration::from_nanos(left))
    }

    /// When [`Live::refresh`] may have a new snapshot although nothing is observed, as [`Moment::elapsed`]; `None` if
    /// never.
    pub fn due(&self) -> Option<Duration> {
        self.due
    }

    /// Whether nothing has changed for so long that the job may have stopped communicating.
    fn is_quiet(&self, at: Moment) -> bool {
        let silence = self.options.policy.shortest_silence();
        self.may_fall_silent && at.elapsed >= self.changed_at + silence
    }

    fn has_unfinished(&self) -> bool {
        self.kept.slots.values().any(|slot| !slot.due.is_empty())
    }

    /// The time for which the records are judged; `None` if each record's own time counts, because the job is not live
    /// or the records state no time.
    fn horizon(&self, at: Moment, silent: &BTreeSet<Rank>) -> Option<Horizon> {
        let is_live = self.options.policy.snapshot;
        is_live.then(|| self.kept.horizon(at, silent)).flatten()
    }

    /// A snapshot of the job; `None` if [`Live::urgency`] is [`Urgency::No`].
    ///
    /// The report is a collector's own if that has read more ranks than the other sources. Otherwise it is made from
    /// the records of all ranks that are not silent. Findings on silent ranks and from NCCL's RAS are added to both.
    pub fn refresh(&mut self, at: Moment) -> Option<Snapshot> {
        if self.urgency(at) == Urgency::No {
            return None;
        }
        let began = Instant::now();
        self.silent = self.kept.silent(self.options.silent_after);
        self.changed = false;
        let mut policy = self.options.policy.clone();
        policy.now_ns = self.horizon(at, &self.silent).map(|horizon| horizon.ns);
        let stated = self.kept.feeds.iter().filter_map(|feed| feed.world_size);
        let known = self
            .kept
            .slots
            .keys()
            .map(|&(rank, ..)| rank.saturating_add(1));
        let is_possible = |size: &u32| *size <= MAX_WORLD;
        let stated = stated.chain(policy.world_size).filter(is_possible);
        let stated: Vec<u32> = stated.collect();
        let sizes = stated.iter().copied().chain(known.filter(is_possible));
        let world_size = sizes.max();
        // The highest rank that was seen states no size: the job may have more ranks.
        policy.world_size = world_size.filter(|_| !stated.is_empty());
        policy.newest = self.kept.newest;
        let launches = self.kept.feeds.iter().flat_map(|feed| &feed.launches);
        policy.launches = launches.cloned().collect();
        let later = self.kept.feeds.iter();
        policy.later_attempt = newest_attempt(later.filter_map(|feed| feed.later_attempt.as_ref()));
        policy.silent = self.silent.iter().copied().collect();
        policy.late = std::mem::take(&mut self.stragglers);
        for slot in self.kept.slots.values_mut() {
            slot.take_signs();
        }
        let mut ranks = recorded_views(&self.kept, &self.silent, at, world_size);
        // The last record of a silent rank is old: if it were judged with the new records of the others, the rank would
        // be blamed for operations that it may have issued since.
        let dumps: Vec<Arc<Dump>> = ranks
            .iter()
            .filter(|view| !view.silent)
            .flat_map(|view| view.dumps.iter().cloned())
            .collect();
        policy.files = self.kept.files_of(&dumps);
        let collected = self.kept.collected().cloned();
        let mut report = match &collected {
            Some(collected) => Report::clone(&collected.report),
            // Without any record, only the state of the ranks is known.
            None if dumps.is_empty() && self.kept.communicators().next().is_some() => Report {
                input: Input {
                    ranks_expected: ranks.len(),
                    ..Input::default()
                },
                ..Report::clone(&Snapshot::empty(at).report)
            },
            None => {
                let mut judged = (self.judge)(&dumps, &policy);
                add_unjudged(&mut judged, &ranks);
                judged
            }
        };
        // Once no record is left to judge, what the records showed last holds, unless a size is stated.
        match dumps.is_empty() && collected.is_none() {
            true => report.input.may_have_more = self.may_have_more && stated.is_empty(),
            false => self.may_have_more = report.input.may_have_more,
        }
        if let Some(collected) = &collected {
            ranks = collected_views(ranks, collected);
        }
        let problems = self.kept.feeds.iter().flat_map(|feed| &feed.problems);
        report.problems.extend(problems.cloned());
        report.problems.extend(seen::never_read(&ranks));
        let watched: Vec<Watched> = self.kept.communicators().cloned().collect();
        seen::set_remarks(&watched, &mut ranks);
        let ranks: Arc<[RankView]> = ranks.into();
        let now_ns = policy.now_ns.unwrap_or(at.wall_ns);
        self.may_fall_silent = report.verdict == Verdict::Healthy || report.silence().is_some();
        let until_change = self.add_unrecorded_findings(&mut report, &watched, &ranks, at, now_ns);
        let late = report.findings.iter();
        let late = late.filter(|finding| finding.code == Code::W220);
        self.stragglers = late
            .flat_map(|finding| finding.culprit_ranks.iter().copied())
            .collect();
        self.number += 1;
        self.remember(at, policy.now_ns, &watched);
        let is_healthy = report.verdict == Verdict::Healthy;
        let until_quiet = policy
            .now_ns
            .filter(|_| is_healthy)
            .and_then(|now_ns| between_operations(&dumps, now_ns));
        if until_quiet.is_some() {
            report.verdict = Verdict::Running;
        }
        let changes = until_change.into_iter().chain(until_quiet);
        let changes = changes.map(|left| at.elapsed + left);
        self.due = self.due.into_iter().chain(changes).min();
        let sources = self.kept.feeds.iter().map(|feed| SourceStatus {
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
            later_attempt: policy.later_attempt,
            cost: began.elapsed(),
        })
    }

    /// Stores what [`urgency`](Self::urgency) compares with.
    fn remember(&mut self, at: Moment, as_of: Option<i64>, watched: &[Watched]) {
        self.judged = Some((at.elapsed, as_of));
        for slot in self.kept.slots.values_mut() {
            slot.was_overdue = as_of.is_some_and(|as_of| slot.is_overdue(as_of));
        }
        let uneven = watched.iter().filter(|watched| watched.is_uneven());
        let overdue = self.options.policy.overdue;
        self.due = uneven
            .map(|watched| watched.since + overdue)
            .filter(|due| *due > at.elapsed)
            .min();
    }

    /// Adds the findings on silent ranks and from NCCL's RAS, except those from RAS that only repeat a recorded failure
    /// or a silence. An error from RAS turns the verdicts `healthy`, `running` and `inconclusive` into `stuck`. Returns
    /// the time after which findings on ended processes and recorded failures may change although no record does;
    /// `None` if they will not.
    fn add_unrecorded_findings(
        &self,
        report: &mut Report,
        watched: &[Watched],
        ranks: &[RankView],
        at: Moment,
        now_ns: i64,
    ) -> Option<Duration> {
        let is_error = |finding: &Finding| finding.severity == Severity::Error;
        let is_explained = report.findings.iter().any(is_error);
        let overdue = self.options.policy.overdue;
        let library = seen::library_findings(watched, ranks, at.elapsed, overdue, is_explained);
        let failed: BTreeSet<Rank> = (report.findings.iter())
            .filter(|finding| finding.code == Code::E150)
            .flat_map(|finding| finding.culprit_ranks.iter().copied())
            .collect();
        let is_repetition = |finding: &Finding| {
            let named = &finding.culprit_ranks;
            !named.is_empty()
                && match finding.code {
                    Code::E150 => named.iter().all(|rank| failed.contains(rank)),
                    Code::W150 => named.iter().all(|rank| self.silent.contains(rank)),
                    _ => false,
                }
        };
        let library = library.into_iter();
        let library: Vec<Finding> = library.filter(|found| !is_repetition(found)).collect();
        let may_be_stuck = matches!(
            report.verdict,
            Verdict::Healthy | Verdict::Running | Verdict::Inconclusive
        );
        if may_be_stuck && library.iter().any(is_error) {
            report.verdict = Verdict::Stuck;
        }
        let ids = report.findings.iter().map(|finding| finding.id);
        let first_id = ids.max().unwrap_or(0) + 1;
        let added = library
            .into_iter()
            .chain(seen::silence(&self.silent, ranks));
        let numbered = (first_id..)
            .zip(added)
            .map(|(id, finding)| Finding { id, ..finding });
        report.findings.extend(numbered);
        report.findings.sort_by_key(|finding| finding.severity);
        let goes_on = self.options.policy.snapshot && report.end.is_none();
        goes_on
            .then(|| seen::until_change(ranks, now_ns, overdue))
            .flatten()
    }
}

/// The time after which a job in which nothing is in flight at `now_ns` has been quiet for [`BETWEEN_OPERATIONS`], at
/// least a second; `None` if it has been already.
fn between_operations(dumps: &[Arc<Dump>], now_ns: i64) -> Option<Duration> {
    let newest = dumps.iter().filter_map(|dump| dump.entries.last());
    let newest = newest.map(|entry| {
        entry
            .time_created_ns
            .max(entry.time_discovered_completed_ns)
    });
    let quiet_for = u64::try_from(now_ns.saturating_sub(newest.max()?)).unwrap_or(0);
    let left = BETWEEN_OPERATIONS.checked_sub(Duration::from_nanos(quiet_for))?;
    (!left.is_zero()).then(|| left.max(Duration::from_secs(1)))
}

/// The newest of these attempts, with all of its ranks that any source saw: the processes of a job may be on several
/// hosts.
fn newest_attempt<'a>(
    seen: impl Iterator<Item = &'a LaterAttempt> + Clone,
) -> Option<LaterAttempt> {
    let attempt = seen.clone().map(|later| later.attempt).max()?;
    let of_newest = seen.filter(|later| later.attempt == attempt);
    let ranks: BTreeSet<Rank> = of_newest
        .flat_map(|later| later.ranks.iter().copied())
        .collect();
    Some(LaterAttempt {
        attempt,
        ranks: ranks.into_iter().collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_attempt_has_the_ranks_that_all_sources_saw() {
        let later = |attempt: u32, ranks: &[Rank]| LaterAttempt {
            attempt,
            ranks: ranks.to_vec(),
        };
        let seen = [later(1, &[2, 3]), later(0, &[4]), later(1, &[0, 1, 2])];
        assert_eq!(newest_attempt(seen.iter()), Some(later(1, &[0, 1, 2, 3])));
        assert_eq!(newest_attempt([].iter()), None);
    }
}
