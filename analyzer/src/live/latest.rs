//! Keeps the last answer of each source: its records, and when it was polled.

use super::{LiveOptions, Moment, SourceStatus};
use crate::input::ras::Communicator;
use crate::live::source::{Collected, Liveness, Observation, Poll, Seen, SourceError};
use rcomm_recorder::model::{Entry, EntryState, Rank};
use rcomm_recorder::publish::{Dump, LaunchRecord, RingReader};
use rcomm_verdict::{LaterAttempt, Policy, Problem, RecordFile};
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

/// By how much the time of a kept record may lag behind its signs of life, ns. Snapshots share the record, so bringing
/// it up to date copies all of it.
const SIGNS_LAG_NS: i64 = 20_000_000_000;

/// The last version of one record from a source, and what later polls have shown.
#[derive(Default)]
pub(super) struct Slot {
    pub(super) dump: Option<Arc<Dump>>,
    /// What is known of the file of this version.
    pub(super) file: RecordFile,
    pub(super) liveness: Liveness,
    /// When a poll last read the record or found it unchanged.
    pub(super) answered: Option<Duration>,
    /// Why the last poll could not read the record; `None` if it could.
    pub(super) failure: Option<Arc<str>>,
    /// When each unfinished operation of the record becomes overdue, by the rank's clock, ns since the epoch.
    pub(super) due: Vec<i64>,
    /// Whether the record had an overdue operation when it was last judged.
    pub(super) was_overdue: bool,
    /// The rank's clock minus the local one at the last poll that stated the rank's time, ns; `None` if none did.
    ahead_ns: Option<i64>,
    /// The signs of life: heartbeat and time of the last poll that found the record otherwise unchanged, ns since the
    /// epoch by the rank's clock. `(0, 0)` if the record has changed since.
    signs: (i64, i64),
}

/// The time up to which the records show what happened.
#[derive(Clone, Copy, Debug)]
pub(super) struct Horizon {
    /// By the local monotonic clock.
    pub(super) polled: Duration,
    /// By the job's clock, ns since the epoch.
    pub(super) ns: i64,
}

impl Slot {
    /// Whether an unfinished operation was overdue at `as_of_ns` by the job's clock.
    pub(super) fn is_overdue(&self, as_of_ns: i64) -> bool {
        self.due.iter().any(|&due| due <= as_of_ns)
    }

    /// Copies signs of life into the record if they matter: an operation has become overdue since the record's time,
    /// the process is stopped or traced, or the signs are newer than the record by [`SIGNS_LAG_NS`]. A heartbeat that
    /// is not copied would seem to have stopped.
    pub(super) fn take_signs(&mut self) {
        let (heartbeat, as_of) = self.signs;
        let Some(taken) = self.dump.as_ref().map(|dump| dump.identity.dump_time_ns) else {
            return;
        };
        let lags = as_of.saturating_sub(taken) >= SIGNS_LAG_NS;
        let became_overdue = self.due.iter().any(|&due| taken < due && due <= as_of);
        let stopped_reasons = [RingReader::OWNER_IS_STOPPED, RingReader::OWNER_IS_TRACED];
        // The findings state how long the process has been stopped.
        let is_stopped = |dump: &Dump| stopped_reasons.contains(&dump.identity.reason.as_str());
        let matters = |dump: &&mut Arc<Dump>| lags || became_overdue || is_stopped(dump);
        let Some(dump) = self.dump.as_mut().filter(matters) else {
            return;
        };
        let dump = Arc::make_mut(dump);
        dump.identity.dump_time_ns = as_of;
        if let Some(status) = &mut dump.status {
            status.heartbeat_ns = status.heartbeat_ns.max(heartbeat);
        }
    }
}

/// The last answer of one source. The fields from `problems` on come from its [`Poll`]s; a launch record stays once it
/// was seen, until a restart.
#[derive(Default)]
pub(super) struct Feed {
    pub(super) status: SourceStatus,
    /// When the source answered last.
    pub(super) answered: Option<Duration>,
    /// When the source was polled last.
    polled: Duration,
    pub(super) problems: Vec<Problem>,
    pub(super) world_size: Option<u32>,
    pub(super) launches: Vec<LaunchRecord>,
    pub(super) later_attempt: Option<LaterAttempt>,
    pub(super) communicators: Vec<Watched>,
    pub(super) collected: Option<Collected>,
}

/// The last answers of all sources.
#[derive(Default)]
pub(super) struct LatestRecords {
    /// By rank, number of the source, and [`Observation::part`].
    pub(super) slots: BTreeMap<(Rank, usize, u8), Slot>,
    pub(super) feeds: Vec<Feed>,
    /// The members of groups, stored once for all ranks that list them.
    members: HashSet<Arc<[Rank]>>,
    /// The limit of operations per record at the last poll; `None` = no limit.
    pub(super) newest: Option<usize>,
}

impl LatestRecords {
    pub(super) fn new(sources: Vec<String>) -> Self {
        let feed = |name| Feed {
            status: SourceStatus {
                name,
                ..SourceStatus::default()
            },
            ..Feed::default()
        };
        Self {
            feeds: sources.into_iter().map(feed).collect(),
            ..Self::default()
        }
    }

    /// Takes the result of a poll and returns whether anything is new. Of each record, the newest operations are kept:
    /// `entry_budget` divided by the number of records, but at least 64, and never more than `record_budget`. All from
    /// the oldest pending one on are kept in any case.
    pub(super) fn observe(
        &mut self,
        source: usize,
        poll: Result<Poll, SourceError>,
        at: Moment,
        options: &LiveOptions,
    ) -> bool {
        let Some(feed) = self.feeds.get_mut(source) else {
            return false;
        };
        feed.polled = at.elapsed;
        let poll = match poll {
            Ok(poll) => poll,
            Err(error) => {
                let error = error.to_string();
                let changed = feed.status.error.as_deref() != Some(&error);
                feed.status.error = Some(error);
                feed.status.answered = 0;
                return changed;
            }
        };
        let mut changed = feed.answer(&poll, at);
        feed.problems = poll.problems;
        feed.world_size = poll.world_size;
        let mut launches = poll.launches;
        if !poll.restart {
            // A launch record that was removed still shows how the job ended, like a ring that was removed.
            let is_replaced = |old: &LaunchRecord| launches.iter().any(|new| new.node == old.node);
            let kept = feed.launches.iter().filter(|old| !is_replaced(old));
            let kept: Vec<LaunchRecord> = kept.cloned().collect();
            launches.extend(kept);
            launches.sort_by_key(|launch| launch.node);
        }
        changed |= feed.launches != launches;
        feed.launches = launches;
        changed |= feed.later_attempt != poll.later_attempt;
        feed.later_attempt = poll.later_attempt;
        let communicators = Watched::update(&feed.communicators, poll.communicators, at.elapsed);
        let earlier = feed
            .communicators
            .iter()
            .map(|watched| &watched.communicator);
        changed |= !earlier.eq(communicators.iter().map(|watched| &watched.communicator));
        feed.communicators = communicators;
        let state = |collected: &Option<Collected>| {
            collected
                .as_ref()
                .map(|c| (Arc::as_ptr(&c.report), c.silent.clone()))
        };
        changed |= state(&feed.collected) != state(&poll.collected);
        feed.collected = poll.collected;
        if poll.restart {
            self.slots
                .retain(|&(_, slot_source, _), _| slot_source != source);
        }
        let records = self.slots.len().max(poll.observations.len()).max(1);
        let keep = (options.entry_budget / records)
            .max(64)
            .min(options.record_budget);
        self.newest = (keep < usize::MAX).then_some(keep);
        let mut files = poll.files;
        for observation in poll.observations {
            let (rank, part) = (observation.rank, observation.part);
            let is_new = matches!(observation.seen, Seen::Changed(_));
            changed |= self.take_observation(source, observation, at, keep, &options.policy);
            if let Some(slot) = self.slots.get_mut(&(rank, source, part)).filter(|_| is_new) {
                slot.file = files.remove(&(rank, part)).unwrap_or_default();
            }
        }
        if self.members.len() > 4 * (self.slots.len() + 16) {
            self.members.retain(|ranks| Arc::strong_count(ranks) > 1);
        }
        changed
    }

    /// Takes one observation and returns whether anything is new. At most the `keep` newest operations are kept, apart
    /// from those since the oldest pending one.
    fn take_observation(
        &mut self,
        source: usize,
        observation: Observation,
        at: Moment,
        keep: usize,
        policy: &Policy,
    ) -> bool {
        let key = (observation.rank, source, observation.part);
        let slot = self.slots.entry(key).or_default();
        let mut changed = slot.liveness != observation.liveness;
        slot.liveness = observation.liveness;
        let as_of_ns = match observation.seen {
            Seen::Failed(reason) => {
                changed |= slot.failure.as_deref() != Some(&reason);
                slot.failure = Some(reason.into());
                return changed;
            }
            Seen::Unchanged {
                heartbeat_ns,
                as_of_ns,
            } => {
                slot.signs = (heartbeat_ns, as_of_ns);
                as_of_ns
            }
            Seen::Changed(mut dump) => {
                dump.keep_newest(keep);
                share_members(&mut self.members, &mut dump, slot.dump.as_deref());
                let open = dump.entries.iter().filter(|entry| is_open(entry));
                slot.due = open.map(|entry| due_ns(entry, policy)).collect();
                slot.signs = (0, 0);
                let as_of_ns = dump.identity.dump_time_ns;
                slot.dump = Some(Arc::from(dump));
                changed = true;
                as_of_ns
            }
        };
        // The record of a dead process ends when the process died.
        if as_of_ns > 0 && slot.liveness != Liveness::Dead {
            slot.ahead_ns = Some(as_of_ns.saturating_sub(at.wall_ns));
        }
        slot.answered = Some(at.elapsed);
        slot.failure = None;
        changed
    }

    /// Ranks that had not answered for longer than `limit` at the last poll. A rank that never answered is not one of
    /// them.
    pub(super) fn silent(&self, limit: Duration) -> BTreeSet<Rank> {
        // A rank answers as long as any source has a current record of it.
        let mut last: BTreeMap<Rank, Duration> = BTreeMap::new();
        for (&(rank, source, _), slot) in &self.slots {
            if let Some(answered) = slot.answered {
                let silence = self.feeds[source].polled.saturating_sub(answered);
                let shortest = last.entry(rank).or_insert(silence);
                *shortest = silence.min(*shortest);
            }
        }
        last.into_iter()
            .filter(|&(_, silence)| silence > limit)
            .map(|(rank, _)| rank)
            .collect()
    }

    /// The time up to which all records show what happened: the earliest of the last answers of the sources that have a
    /// record of a rank that is neither dead nor silent, by the median of these ranks' clocks. If there is no such
    /// rank, it is `at`. `None` if there are such ranks, but none has stated its time.
    ///
    /// So an operation counts as old as it was when it was last seen pending.
    pub(super) fn horizon(&self, at: Moment, silent: &BTreeSet<Rank>) -> Option<Horizon> {
        let mut polled = None;
        let mut ahead = Vec::new();
        for (&(rank, source, _), slot) in &self.slots {
            if slot.dump.is_some() && slot.liveness != Liveness::Dead && !silent.contains(&rank) {
                let answered = self.feeds[source].answered.unwrap_or_default();
                polled = Some(polled.map_or(answered, |polled| answered.min(polled)));
                ahead.extend(slot.ahead_ns);
            }
        }
        // The median, so one host with a wrong clock does not matter.
        let middle = ahead.len() / 2;
        let ahead = match (polled, ahead.is_empty()) {
            (Some(_), true) => return None,
            // Without living processes, the time since their death is measured by the local clock.
            (None, _) => 0,
            (Some(_), false) => *ahead.select_nth_unstable(middle).1,
        };
        let polled = polled.unwrap_or(at.elapsed);
        let since = at.elapsed.saturating_sub(polled).as_nanos();
        let then = at
            .wall_ns
            .saturating_sub(i64::try_from(since).unwrap_or(i64::MAX));
        Some(Horizon {
            polled,
            ns: then.saturating_add(ahead),
        })
    }

    /// What is known of the files of these records, in their order.
    pub(super) fn files_of(&self, dumps: &[Arc<Dump>]) -> Vec<RecordFile> {
        let slots = self.slots.values();
        let kept = slots.filter_map(|slot| Some((Arc::as_ptr(slot.dump.as_ref()?), slot.file)));
        let files: HashMap<*const Dump, RecordFile> = kept.collect();
        let file_of = |dump: &Arc<Dump>| files.get(&Arc::as_ptr(dump)).copied();
        dumps
            .iter()
            .map(|dump| file_of(dump).unwrap_or_default())
            .collect()
    }

    pub(super) fn communicators(&self) -> impl Iterator<Item = &Watched> {
        self.feeds.iter().flat_map(|feed| &feed.communicators)
    }

    /// The report of the collector that has read the most ranks; `None` if there is no collector, or the other sources
    /// have read some ranks, and no fewer than it.
    pub(super) fn collected(&self) -> Option<&Collected> {
        let has_records = |source: usize| self.feeds[source].collected.is_none();
        let read: BTreeSet<Rank> = (self.slots.iter())
            .filter(|((_, source, _), slot)| slot.dump.is_some() && has_records(*source))
            .map(|((rank, ..), _)| *rank)
            .collect();
        let collected = self.feeds.iter().filter_map(|feed| feed.collected.as_ref());
        let widest = collected.max_by_key(|collected| collected.report.input.ranks_read);
        let read = read.len();
        widest.filter(|collected| read == 0 || collected.report.input.ranks_read > read)
    }
}

impl Feed {
    /// Takes an answer and returns whether the status of the source or its problems changed.
    fn answer(&mut self, poll: &Poll, at: Moment) -> bool {
        // Count ranks and not records: a process may have several recorders.
        let ranks: BTreeSet<Rank> = poll.observations.iter().map(|o| o.rank).collect();
        let failed = poll.observations.iter();
        let failed = failed.filter(|o| matches!(o.seen, Seen::Failed(_)));
        let failed: BTreeSet<Rank> = failed.map(|o| o.rank).collect();
        let known = ranks.len();
        let answered = known - failed.len();
        let changed = self.status.error.take().is_some()
            || self.problems != poll.problems
            || (self.status.answered, self.status.known) != (answered, known)
            || self.status.remains != poll.remains;
        self.status.remains.clone_from(&poll.remains);
        self.status.answered = answered;
        self.status.known = known;
        self.answered = Some(at.elapsed);
        changed
    }
}

/// When an unfinished operation becomes overdue, by its rank's clock, ns since the epoch.
fn due_ns(entry: &Entry, policy: &Policy) -> i64 {
    let after = policy.overdue_after(entry.timeout_ms).as_nanos();
    let after = i64::try_from(after).unwrap_or(i64::MAX);
    entry.time_created_ns.saturating_add(after)
}

/// A communicator, and the time ([`Moment::elapsed`]) since which its counts have not changed.
#[derive(Clone, Debug)]
pub(super) struct Watched {
    pub(super) communicator: Communicator,
    pub(super) since: Duration,
}

impl Watched {
    /// The communicators as NCCL reports them now; `since` is kept for those whose counts are the same.
    pub(super) fn update(known: &[Self], now: Vec<Communicator>, at: Duration) -> Vec<Self> {
        let counts = |communicator: &Communicator| -> Vec<_> {
            let members = communicator.members.iter();
            members.map(|m| (m.rank, m.launched.clone())).collect()
        };
        let watched = now.into_iter().map(|communicator| {
            let before = known.iter().find(|known| {
                known.communicator.name == communicator.name
                    && known.communicator.others_launched == communicator.others_launched
                    && counts(&known.communicator) == counts(&communicator)
            });
            Self {
                since: before.map_or(at, |before| before.since),
                communicator,
            }
        });
        watched.collect()
    }

    /// Whether the communicator's members launched different numbers of operations.
    pub(super) fn is_uneven(&self) -> bool {
        !self.communicator.behind().is_empty()
    }
}

/// Whether an operation is unfinished.
pub(super) fn is_open(entry: &Entry) -> bool {
    entry.state < EntryState::Completed && !entry.retired
}

/// Replaces the members of a record's groups with equal lists of other records, so that they share memory.
fn share_members(members: &mut HashSet<Arc<[Rank]>>, dump: &mut Dump, before: Option<&Dump>) {
    let before = before.map_or(&[][..], |before| &before.groups);
    for (index, group) in dump.groups.iter_mut().enumerate() {
        let ranks = &mut group.info.ranks;
        let earlier = before.get(index).map(|before| &before.info.ranks);
        if let Some(equal) = earlier.filter(|earlier| *earlier == ranks) {
            *ranks = equal.clone();
        } else if let Some(known) = members.get(ranks) {
            *ranks = known.clone();
        } else {
            members.insert(ranks.clone());
        }
    }
}
