//! Whether the job is over, and how it ended.
//!
//! Judged before everything else, since the same unfinished operation means a hang while its processes
//! live, and nothing at all where they were ended in the middle of it. A launcher's account has exit
//! codes and signals. Without it, a ring shows whether its owner closed it, and when a process that did
//! not close it gave its last sign of life; who of several went first is then taken from that, from the
//! failures that the survivors recorded, and from operations that failed long before their time-outs.
//! Where the records do not show it, the end is of unknown kind.

use crate::align::record::Record;
use crate::align::{Aligned, RecordIx};
use crate::judge::policy::Policy;
use crate::judge::wait_graph::now_ns;
use crate::report::EndKind;
use rcomm_recorder::model::{EntryState, FailureKind, Rank};
use rcomm_recorder::publish::{LaunchRecord, LaunchSignal, RankEnd};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Last signs of life nearer to each other than this show no order: a watchdog makes ten rounds a second,
/// on a busy host fewer.
const TOGETHER_NS: i64 = 1_000_000_000;
const SETTLE_NS: i64 = Policy::SETTLE.as_nanos() as i64;
/// A launcher that looks at several processes at once notices ends that are so near in any order.
const NOTICED_NS: i64 = 100_000_000;
/// The CPU backend notices within this time that a peer's process is gone, on a busy host, too.
const PEERS_NOTICE_NS: i64 = 3_000_000_000;
/// As the CPU backend calls itself in records.
const CPU: &str = "cpu";
/// An operation that failed within this share of its time-out was not ended by it.
const BEFORE_TIMEOUT: f64 = 0.9;

/// How the job lives.
#[derive(Debug)]
pub(crate) struct Life {
    /// How it ended, if no process is left.
    pub(crate) end: Option<End>,
    /// Whose processes are gone, have not ended in order, and were not ended by another's end.
    first: Vec<Rank>,
    /// Of each rank whose process is gone.
    gone: BTreeMap<Rank, Gone>,
    /// What happened after this may be the beginning of the end of the whole job, common time, ns.
    settled_ns: i64,
}

/// How a job ended of which no process is left.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) kind: EndKind,
    /// Whose processes ended before the others', ascending.
    pub(crate) first: Vec<Rank>,
    /// When the last of those gave its last sign of life, common time, ns.
    pub(crate) first_ns: i64,
    /// The same for the last of all.
    pub(crate) last_ns: i64,
    /// The processes gave signs of life, or their launcher noticed their ends: else they may have lived on
    /// for long after their last operation.
    is_dated: bool,
    /// The signal by which the launcher was asked to end the job before any process had failed.
    pub(crate) asked: Option<LaunchSignal>,
}

impl End {
    /// Whether the job may have been terminated while all was well: nothing shows for how long what is
    /// unfinished had been so.
    pub(crate) fn leaves_ages_open(&self) -> bool {
        !self.is_dated && matches!(self.kind, EndKind::Cancelled | EndKind::Unknown)
    }
}

/// A process that is no more.
#[derive(Clone, Debug)]
pub(crate) struct Gone {
    rank: Rank,
    /// It closed its record, or exited with 0.
    in_order: bool,
    /// Its end where the launcher noticed it, else its last sign of life, common time, ns.
    at_ns: i64,
    /// How it ended, where the launcher knows.
    pub(crate) exit: Option<RankEnd>,
    /// The launcher had told it to end.
    was_told: bool,
}

impl Gone {
    /// When the process ended, as far as is known: as its launcher noticed it, else its last sign of life;
    /// common time, ns.
    pub(crate) const fn at_ns(&self) -> i64 {
        self.at_ns
    }
}

impl Life {
    /// From what the records and the launcher's accounts show of the processes.
    pub(crate) fn new(aligned: &Aligned<'_>, policy: &Policy) -> Self {
        let launches = policy.launches.as_slice();
        let exits = exits(aligned, launches);
        let ranks = aligned.expected.iter();
        let mut gone: Vec<Gone> = ranks
            .filter_map(|&rank| gone(aligned, rank, exits.get(&rank)))
            .collect();
        gone.sort_by_key(|one| (one.at_ns, one.rank));
        let is_over = !gone.is_empty() && gone.len() == aligned.expected.len();
        let order = went_first(aligned, &gone);
        let end = is_over.then(|| End::of(aligned, &gone, order.clone(), launches));
        let now = policy.snapshot.then(|| now_ns(aligned, policy)).flatten();
        let settled_ns = match (&end, now) {
            (None, Some(now)) => now.saturating_sub(SETTLE_NS),
            _ => i64::MAX,
        };
        let asked_ns = asked(launches).map_or(i64::MAX, |asked| asked.time_ns);
        // While others live, each end that no order is known of may be a cause, unless the whole job is
        // being ended.
        let is_cause = |one: &&Gone| {
            let own = !one.in_order && !one.was_told && one.at_ns < asked_ns;
            own && one.at_ns <= settled_ns && !gave_up(aligned, one.rank)
        };
        let causes: BTreeSet<Rank> = gone.iter().filter(is_cause).map(|it| it.rank).collect();
        let first = match (&end, order) {
            (Some(end), _) => end.first.clone(),
            (None, Some(mut order)) => {
                order.retain(|rank| causes.contains(rank));
                order
            }
            (None, None) => causes.into_iter().collect(),
        };
        Self {
            end,
            first,
            gone: gone.into_iter().map(|one| (one.rank, one)).collect(),
            settled_ns,
        }
    }

    /// Whether what happened at this time, common time, ns, can be judged: what is newer may be the
    /// beginning of the end of the whole job.
    pub(crate) const fn is_settled(&self, at_ns: i64) -> bool {
        at_ns <= self.settled_ns
    }

    /// Whether the end of a rank's process is a cause: it did not end in order, and no other process ended
    /// before. Processes that were ended together explain no wait.
    pub(crate) fn went_first(&self, rank: Rank) -> bool {
        self.first.contains(&rank)
    }

    /// A rank's process, if it is gone.
    pub(crate) fn gone(&self, rank: Rank) -> Option<&Gone> {
        self.gone.get(&rank)
    }

    /// The parameters of the analysis: of a job that is over its end is the time of judgement, and what
    /// was young then was no hang. Where it is not known when it ended, all that is pending counts.
    pub(crate) fn policy(&self, policy: &Policy) -> Policy {
        let mut policy = policy.clone();
        if let Some(end) = &self.end {
            policy.now_ns = end.is_dated.then_some(end.last_ns);
            policy.snapshot = end.is_dated;
            // The last sign of life is a little older than the end.
            let age = Duration::from_nanos(TOGETHER_NS.unsigned_abs());
            policy.overdue = policy.overdue.saturating_sub(age);
        }
        policy
    }
}

/// How ranks ended, with whether their launcher had told them to.
fn exits(aligned: &Aligned<'_>, launches: &[LaunchRecord]) -> BTreeMap<Rank, (RankEnd, bool)> {
    let mut exits = BTreeMap::new();
    for launch in launches {
        for of in &launch.ranks {
            let mut records = aligned.records_of(of.rank);
            // An account of another attempt is about other processes.
            let other = records.any(|at| aligned.records[at].identity.attempt != launch.attempt);
            if let (Some(end), false) = (of.end, other) {
                let told = of
                    .sent
                    .iter()
                    .any(|sent| ends(sent.signal) && sent.time_ns <= end.time_ns);
                exits.insert(of.rank, (end, told));
            }
        }
    }
    exits
}

/// The first signal by which a launcher was asked to end the job.
fn asked(launches: &[LaunchRecord]) -> Option<LaunchSignal> {
    let received = launches.iter().flat_map(|launch| &launch.received);
    received
        .filter(|one| ends(one.signal))
        .min_by_key(|one| one.time_ns)
        .copied()
}

/// Whether a signal asks a process to end: SIGHUP, SIGINT, SIGKILL, SIGTERM.
const fn ends(signal: i32) -> bool {
    matches!(signal, 1 | 2 | 9 | 15)
}

/// The process of a rank, if it is no more.
fn gone(aligned: &Aligned<'_>, rank: Rank, exit: Option<&(RankEnd, bool)>) -> Option<Gone> {
    let own = |record: RecordIx, ns: i64| ns.saturating_sub(aligned.offsets_ns[record]);
    if let Some(&(end, was_told)) = exit {
        let record = aligned.record_of(rank);
        return Some(Gone {
            rank,
            in_order: end.is_success(),
            at_ns: record.map_or(end.time_ns, |record| own(record, end.time_ns)),
            exit: Some(end),
            was_told,
        });
    }
    let mut found: Option<Gone> = None;
    for record in aligned.records_of(rank) {
        let whole = &aligned.records[record];
        if !whole.died() && !whole.closed() {
            return None;
        }
        let at_ns = own(record, whole.latest_ns().max(whole.closed_ns));
        let gone = found.get_or_insert(Gone {
            rank,
            in_order: false,
            at_ns,
            exit: None,
            was_told: false,
        });
        // Several recorders of one process: the program's own is the one that is closed.
        gone.in_order |= whole.closed();
        gone.at_ns = gone.at_ns.max(at_ns);
    }
    found
}

impl End {
    fn of(
        aligned: &Aligned<'_>,
        gone: &[Gone],
        order: Option<Vec<Rank>>,
        launches: &[LaunchRecord],
    ) -> Self {
        let last_ns = gone.last().map_or(0, |one| one.at_ns);
        let failed: Vec<&Gone> = gone.iter().filter(|one| !one.in_order).collect();
        let earliest = failed.first().map_or(i64::MAX, |one| one.at_ns);
        let asked = asked(launches).filter(|asked| asked.time_ns <= earliest);
        let inside = |one: &Gone| {
            let mut records = aligned.records_of(one.rank);
            records.any(|record| is_inside(&aligned.records[record]))
        };
        let together = failed.len() == gone.len() && gone.len() > 1;
        let known = failed.iter().any(|one| one.exit.is_some());
        let (kind, first) = match order {
            _ if failed.is_empty() => (EndKind::Ended, Vec::new()),
            _ if asked.is_some() => (EndKind::Cancelled, Vec::new()),
            Some(first) => (EndKind::Crashed, first),
            None if !known && !gone.iter().any(inside) => (EndKind::Unknown, Vec::new()),
            None if together => (EndKind::Cancelled, Vec::new()),
            None => (EndKind::Crashed, ranks_of(&failed)),
        };
        let times = gone.iter().filter(|one| first.contains(&one.rank));
        let first_ns = times.map(|one| one.at_ns).max().unwrap_or(last_ns);
        Self {
            kind,
            first,
            first_ns,
            last_ns,
            is_dated: gone.iter().any(|one| one.exit.is_some())
                || aligned.records.iter().any(beats),
            asked,
        }
    }
}

fn beats(record: &Record) -> bool {
    record.closed_ns > 0
        || record
            .status
            .as_ref()
            .is_some_and(|status| status.heartbeat_ns > 0)
}

fn ranks_of(gone: &[&Gone]) -> Vec<Rank> {
    let mut ranks: Vec<Rank> = gone.iter().map(|one| one.rank).collect();
    ranks.sort_unstable();
    ranks
}

/// Of processes that are gone, in order of their ends: those that ended before the others and not in
/// order, ascending, where it is known.
fn went_first(aligned: &Aligned<'_>, gone: &[Gone]) -> Option<Vec<Rank>> {
    let failed: Vec<&Gone> = gone.iter().filter(|one| !one.in_order).collect();
    let all = aligned.expected.len();
    // A peer that goes fails the operations of those who live on; its own last operation does not fail.
    let suffers = |rank: Rank| {
        let mut records = aligned.records_of(rank);
        records.any(|record| {
            let whole = &aligned.records[record];
            names_another(whole) || failed_early(aligned, record)
        })
    };
    let by_launcher: Vec<&Gone> = failed
        .iter()
        .copied()
        .filter(|one| one.exit.is_some() && !one.was_told)
        .collect();
    // One signal that ends all of them at once came from outside.
    let signals: BTreeSet<_> = by_launcher
        .iter()
        .map(|one| one.exit.and_then(|it| it.signal))
        .collect();
    let spread = failed.last()?.at_ns.saturating_sub(failed.first()?.at_ns);
    let at_once = by_launcher.len() == all && all > 1 && spread <= TOGETHER_NS;
    if at_once && signals.len() == 1 && !signals.contains(&None) {
        return None;
    }
    if !by_launcher.is_empty() {
        let own: Vec<&Gone> = by_launcher
            .iter()
            .copied()
            .filter(|one| !suffers(one.rank))
            .collect();
        let of = if own.is_empty() { by_launcher } else { own };
        let earliest = of[0].at_ns;
        let near = |one: &&Gone| one.at_ns.saturating_sub(earliest) <= NOTICED_NS;
        let mut first = ranks_of(&of.into_iter().filter(near).collect::<Vec<_>>());
        let lost = lost_first(aligned);
        if first.iter().any(|rank| lost.contains(rank)) {
            first.retain(|rank| lost.contains(rank));
        }
        return Some(first);
    }
    if aligned.expected.iter().any(|&rank| suffers(rank)) {
        let own: Vec<&Gone> = failed
            .iter()
            .copied()
            .filter(|one| !suffers(one.rank))
            .collect();
        if !own.is_empty() && own.len() < all {
            return Some(ranks_of(&own));
        }
    }
    let gap = |pair: &[&Gone]| pair[1].at_ns.saturating_sub(pair[0].at_ns) > TOGETHER_NS;
    let at = failed.windows(2).position(gap)?;
    if waited_on(aligned, &failed[..=at], &failed[at + 1..]) {
        return None;
    }
    // An order of ends is no order of causes where nothing was interrupted.
    let interrupted = |one: &&Gone| {
        let mut records = aligned.records_of(one.rank);
        records.any(|record| {
            let record = &aligned.records[record];
            is_inside(record) || record.ops.iter().any(|op| op.state == EntryState::Failed)
        })
    };
    failed
        .iter()
        .any(interrupted)
        .then(|| ranks_of(&failed[..=at]))
}

/// Whether a rank recorded that another one is gone.
fn names_another(record: &Record) -> bool {
    let other = |rank: &Rank| *rank != record.rank;
    record
        .failures
        .iter()
        .any(|failure| failure.kind == FailureKind::PeerGone && failure.ranks.iter().any(other))
}

/// Whom the first rank that recorded the loss of a peer had lost.
fn lost_first<'a>(aligned: &'a Aligned<'_>) -> &'a [Rank] {
    let records = aligned.records.iter().zip(&aligned.offsets_ns);
    let failures = records.flat_map(|(record, offset)| {
        let own = record.failures.iter();
        own.map(move |failure| (failure.time_ns.saturating_sub(*offset), failure))
    });
    let lost = failures.filter(|(_, failure)| failure.kind == FailureKind::PeerGone);
    let first = lost.min_by_key(|(at_ns, _)| *at_ns);
    first.map_or(&[], |(_, failure)| &failure.ranks)
}

/// Whether others waited to their own ends for processes that had given no sign of life for long: had these
/// been gone, the others would have noticed it. They were stopped or without processor time, and ended with
/// the others.
fn waited_on(aligned: &Aligned<'_>, quiet: &[&Gone], others: &[&Gone]) -> bool {
    let Some(last) = quiet.last() else {
        return false;
    };
    let is_quiet = |rank: &Rank| quiet.iter().any(|one| one.rank == *rank);
    let noticing = others
        .iter()
        .filter(|one| one.at_ns.saturating_sub(last.at_ns) >= PEERS_NOTICE_NS);
    noticing.into_iter().any(|one| {
        let waits = |record: RecordIx| {
            let mut ops = aligned.records[record].ops.iter();
            ops.any(|op| {
                let call = aligned.shared.calls.get(op.call);
                let lane = &aligned.lanes[record][usize::from(op.group)];
                let age = one.at_ns.saturating_sub(aligned.created_ns(record, op));
                !op.retired
                    && op.state < EntryState::Completed
                    && call.signature.backend == CPU
                    && age >= PEERS_NOTICE_NS
                    && aligned.groups[lane.group].ranks.iter().any(is_quiet)
            })
        };
        aligned.records_of(one.rank).any(waits)
    })
}

/// Whether a rank gave up: at a time-out, whoever was missing, because it lost a peer, or by an abort. That
/// it ended is a consequence.
fn gave_up(aligned: &Aligned<'_>, rank: Rank) -> bool {
    let mut records = aligned.records_of(rank);
    records.any(|at| {
        let mut failures = aligned.records[at].failures.iter();
        failures.any(|failure| match failure.kind {
            FailureKind::PeerGone => failure.ranks.iter().any(|other| *other != rank),
            kind => matches!(kind, FailureKind::Timeout | FailureKind::Abort),
        })
    })
}

fn is_inside(record: &Record) -> bool {
    let mut ops = record.ops.iter();
    ops.any(|op| !op.retired && op.state < EntryState::Completed)
}

fn failed_early(aligned: &Aligned<'_>, record: RecordIx) -> bool {
    let mut ops = aligned.records[record].ops.iter();
    ops.any(|op| {
        let limit = aligned.shared.calls.get(op.call).timeout_ms as f64;
        let took = op.wait_ms().map(f64::from);
        op.state == EntryState::Failed
            && took.is_some_and(|took| limit == 0.0 || took < limit * BEFORE_TIMEOUT)
    })
}
