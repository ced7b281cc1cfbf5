//! All logs of one attempt of a job together: which ranks timed out in which operation, and the progress of each rank.

use super::facts::{Attempt, Ended, Event, Fact, Log, Progress, TimedOut};
use crate::report::LogLine;
use rcomm_recorder::model::Rank;
use std::collections::{BTreeMap, BTreeSet};

pub(super) const SIGABRT: i32 = 6;
pub(super) const SIGKILL: i32 = 9;
pub(super) const SIGTERM: i32 = 15;

/// A fact with the log that it comes from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Seen<'a> {
    pub(super) log: &'a Log,
    pub(super) fact: &'a Fact,
}

impl Seen<'_> {
    /// The line as evidence; `text` states what it shows.
    pub(super) fn cite(&self, text: String) -> LogLine {
        LogLine {
            path: self.log.path.clone(),
            line: self.fact.line,
            rank: self.fact.rank,
            text,
            contradicts: false,
        }
    }
}

/// The time-out of one rank in one operation.
#[derive(Clone, Debug)]
pub(super) struct TimedOutWait<'a> {
    pub(super) seen: Seen<'a>,
    pub(super) rank: Rank,
    /// The group; `None` if no line shows it.
    pub(super) group: Option<&'a str>,
    pub(super) timed_out: &'a TimedOut,
}

/// The facts of an attempt, indexed.
pub(super) struct Digest<'a> {
    /// All facts, in the order of the logs and of their lines.
    pub(super) all: Vec<Seen<'a>>,
    /// For each rank and group, the time-out with the lowest number; ordered by rank.
    pub(super) waits: Vec<TimedOutWait<'a>>,
    /// Time-outs whose rank is unknown.
    pub(super) nameless: Vec<Seen<'a>>,
    /// By group and rank: the furthest progress that a line shows.
    pub(super) positions: BTreeMap<(&'a str, Rank), (&'a Progress, Seen<'a>)>,
    /// The number of ranks of the job; `None` if neither the logs nor the caller state it.
    pub(super) world_size: Option<u32>,
    /// Ranks that logged a line, or that a line names.
    pub(super) named: BTreeSet<Rank>,
    /// For each log that states that the job was asked to end, by its address: the first line that does.
    terminations: BTreeMap<*const Log, u64>,
}

impl<'a> Digest<'a> {
    /// Indexes an attempt as its logs show it. `expected` is the number of ranks that the records or the caller state;
    /// a number in the logs takes precedence.
    pub(super) fn new(attempts: &[(&'a Log, &'a Attempt)], expected: Option<u32>) -> Self {
        let mut facts: Vec<Seen<'a>> = Vec::new();
        for (log, attempt) in attempts {
            facts.extend(attempt.facts.iter().map(|fact| Seen { log, fact }));
        }
        let stated = attempts
            .iter()
            .filter_map(|(_, attempt)| attempt.world_size)
            .max();
        let mut digest = Self {
            world_size: stated.or(expected),
            all: facts,
            waits: Vec::new(),
            nameless: Vec::new(),
            positions: BTreeMap::new(),
            named: BTreeSet::new(),
            terminations: BTreeMap::new(),
        };
        digest.gather_terminations();
        digest.gather_positions();
        digest.gather_waits();
        digest.name_ranks();
        digest
    }

    /// Finds the first line of each log by which the job was asked to end.
    fn gather_terminations(&mut self) {
        for seen in &self.all {
            if matches!(seen.fact.event, Event::Terminated) {
                let first = self.terminations.entry(seen.log);
                let first = first.or_insert(seen.fact.line);
                *first = seen.fact.line.min(*first);
            }
        }
    }

    /// The first line of the log of this fact by which the job was asked to end, if it has one.
    pub(super) fn termination_beside(&self, seen: Seen<'_>) -> Option<u64> {
        self.terminations
            .get(&std::ptr::from_ref(seen.log))
            .copied()
    }

    /// Whether any log states that the job was asked to end.
    pub(super) fn was_terminated(&self) -> bool {
        !self.terminations.is_empty()
    }

    /// The process that ended first: the one that the launcher names, or the first in the log that was not terminated
    /// by SIGTERM. What ends after the job was asked to end does not count: some processes end by another signal then,
    /// or with an error because their peers have gone.
    pub(super) fn first_end(&self) -> Option<(Seen<'a>, &'a Ended)> {
        let ends = || {
            self.all
                .iter()
                .filter_map(|&seen| match &seen.fact.event {
                    Event::Ended(end) => Some((seen, end)),
                    _ => None,
                })
                .filter(|&(seen, _)| !self.is_after_termination(seen))
        };
        ends()
            .find(|(_, end)| end.first)
            .or_else(|| ends().find(|(_, end)| end.code != -SIGTERM))
    }

    /// Whether the log of this line states before it that the job was asked to end.
    pub(super) fn is_after_termination(&self, seen: Seen<'_>) -> bool {
        let asked = self.termination_beside(seen);
        asked.is_some_and(|line| line < seen.fact.line)
    }

    /// The facts that may show why the job failed. A log that states that the job was asked to end has only those
    /// before that line. If nothing but that request explains the end of the job, no fact of the other logs counts:
    /// processes that end close their connections.
    pub(super) fn before_the_end(&self) -> impl Iterator<Item = Seen<'a>> {
        let are_others_late =
            self.was_terminated() && !self.any_timed_out() && self.first_end().is_none();
        self.all
            .iter()
            .copied()
            .filter(move |&seen| match self.termination_beside(seen) {
                Some(line) => seen.fact.line < line,
                None => !are_others_late,
            })
    }

    /// Finds the furthest progress of each rank in each group.
    fn gather_positions(&mut self) {
        for &seen in &self.all {
            let (Some(rank), Event::Progress(progress)) = (seen.fact.rank, &seen.fact.event) else {
                continue;
            };
            let key = (progress.group.as_str(), rank);
            let known = self.positions.get(&key);
            if known.is_none_or(|(known, _)| known.enqueued < progress.enqueued) {
                self.positions.insert(key, (progress, seen));
            }
        }
    }

    /// The groups of failed operations by rank and number; `None` where operations of two groups share both.
    fn groups_of_failed(&self) -> BTreeMap<(Rank, u64), Option<&'a str>> {
        let mut groups: BTreeMap<(Rank, u64), Option<&'a str>> = BTreeMap::new();
        for seen in &self.all {
            let (Some(rank), Event::Progress(progress)) = (seen.fact.rank, &seen.fact.event) else {
                continue;
            };
            if let Some(failed) = progress.failed {
                let group = Some(progress.group.as_str());
                let known = groups.entry((rank, failed)).or_insert(group);
                if *known != group {
                    *known = None;
                }
            }
        }
        groups
    }

    /// The groups whose time-outs without a global rank state as many different ranks as the job has; `None` is the
    /// group of lines that name none. A rank within a group is at most the global rank, so each is the global rank
    /// then.
    fn groups_of_all_ranks(&self) -> BTreeSet<Option<&'a str>> {
        let mut stated: BTreeMap<Option<&str>, BTreeSet<Rank>> = BTreeMap::new();
        for seen in self.all.iter().filter(|seen| seen.fact.rank.is_none()) {
            if let Event::TimedOut(timed_out) = &seen.fact.event {
                let ranks = stated.entry(timed_out.group.as_deref()).or_default();
                ranks.extend(timed_out.in_group);
            }
        }
        let size = self.world_size.map(|size| size as usize);
        let are_all = |ranks: &BTreeSet<Rank>| {
            size == Some(ranks.len()) && ranks.last().map(|&last| last as usize + 1) == size
        };
        stated
            .into_iter()
            .filter(|(_, ranks)| are_all(ranks))
            .map(|(group, _)| group)
            .collect()
    }

    /// Finds the oldest time-out of each rank in each group.
    fn gather_waits(&mut self) {
        let mut waits: BTreeMap<(Rank, Option<&str>), TimedOutWait<'a>> = BTreeMap::new();
        let failed = self.groups_of_failed();
        let of_all = self.groups_of_all_ranks();
        for &seen in &self.all {
            let Event::TimedOut(timed_out) = &seen.fact.event else {
                continue;
            };
            let in_group = timed_out
                .in_group
                .filter(|_| of_all.contains(&timed_out.group.as_deref()));
            let Some(rank) = seen.fact.rank.or(in_group) else {
                self.nameless.push(seen);
                continue;
            };
            let by_number = || *failed.get(&(rank, timed_out.seq?))?;
            let group = timed_out.group.as_deref().or_else(by_number);
            let wait = TimedOutWait {
                seen,
                rank,
                group,
                timed_out,
            };
            let older = waits
                .get(&(rank, group))
                .is_none_or(|known| timed_out.seq < known.timed_out.seq);
            if older {
                waits.insert((rank, group), wait);
            }
        }
        // A time-out without a group repeats one that another line reports with its group.
        let known: BTreeSet<(Rank, Option<u64>)> = waits
            .values()
            .filter(|wait| wait.group.is_some())
            .map(|wait| (wait.rank, wait.timed_out.seq))
            .collect();
        self.waits = waits
            .into_values()
            .filter(|wait| {
                wait.group.is_some() || !known.contains(&(wait.rank, wait.timed_out.seq))
            })
            .collect();
    }

    /// Collects the ranks that logged a line or that a line names.
    fn name_ranks(&mut self) {
        for seen in &self.all {
            self.named.extend(seen.fact.rank);
            match &seen.fact.event {
                Event::Differ(pair) => self.named.extend(pair.iter().map(|issued| issued.rank)),
                Event::NotJoined(absent) | Event::Lagging(absent) => {
                    self.named.extend(absent.iter().map(|absent| absent.rank))
                }
                Event::Newest { ranks, .. } | Event::BarrierMissed(ranks) => {
                    self.named.extend(ranks);
                }
                _ => {}
            }
        }
    }

    /// Whether a line was logged by this rank itself.
    pub(super) fn has_lines(&self, rank: Rank) -> bool {
        self.all.iter().any(|seen| seen.fact.rank == Some(rank))
    }

    /// Whether a line is about this rank, other than one about the end of its process, which its launcher writes.
    pub(super) fn has_own_lines(&self, rank: Rank) -> bool {
        let mut own = self.all.iter();
        own.any(|seen| seen.fact.rank == Some(rank) && !matches!(seen.fact.event, Event::Ended(_)))
    }

    /// Whether this rank reports a time-out.
    pub(super) fn timed_out(&self, rank: Rank) -> bool {
        self.waits.iter().any(|wait| wait.rank == rank)
    }

    /// Whether any rank, named or not, reports a time-out.
    pub(super) fn any_timed_out(&self) -> bool {
        !self.waits.is_empty() || !self.nameless.is_empty()
    }
}

/// Whether this is the group of all ranks, which PyTorch names `0`. A line without a group counts as a line about that
/// group.
pub(super) fn is_world(group: Option<&str>) -> bool {
    group.is_none_or(|name| name == "0" || name.contains("default_pg"))
}
