//! Decides whether the job is over and how it ended.
//!
//! This is decided first, because an unfinished operation means a hang while the processes live, but nothing if they
//! were terminated in the middle of it. The record of a launcher has exit codes and signals. Without it, a ring shows
//! whether its process closed it, and, if not, when the process gave its last sign of life. Which of several processes
//! ended first then follows from these times, from the failures that the survivors recorded, and from operations that
//! failed long before their time-outs. If the records do not show it, the kind of end is unknown.

pub(crate) mod ending;
mod gave_up;
pub(crate) mod harm;
pub(crate) mod interrupted;
mod order;
mod outlived;
pub(crate) mod raised;

use crate::align::record::Record;
use crate::align::{Aligned, RecordIx};
use crate::judge::policy::{Policy, now_ns};
use crate::report::EndKind;
use gave_up::gave_up;
use order::{
    Order, are_whole_hosts, asked_each_ns, is_inside, is_order_hidden, order_of, was_asked,
};
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::{LaunchRecord, LaunchSignal, RankEnd};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::time::Duration;

/// Last signs of life closer together than this, ns, show no order: a watchdog makes one to ten rounds a second, and
/// fewer on a busy host.
const TOGETHER_NS: i64 = 1_000_000_000;
/// [`Policy::SETTLE`], ns.
const SETTLE_NS: i64 = Policy::SETTLE.as_nanos() as i64;
/// An operation that ended within this share of its time-out was not ended by the time-out.
pub(crate) const BEFORE_TIMEOUT: f64 = 0.9;
/// A launcher may notice ends closer together than this, ns, in any order.
const NOTICED_NS: i64 = 100_000_000;

/// Which processes of the job are gone, and how the job ended if all are.
#[derive(Debug)]
pub(crate) struct Life {
    /// The end of the job; `None` while a process may live.
    pub(crate) end: Option<End>,
    /// Ranks whose processes are gone, and ended neither because of another's end nor because they gave up. A rank that
    /// ended in order is among them only if the job is over and the end of this rank made others fail.
    first: Vec<Rank>,
    /// Whether some of `first` may have ended because of others of `first`.
    is_open: bool,
    /// If no process that left a record is left, and it is not known which process ended first: the ranks of which one
    /// may have been the first, ascending, with those that left no record. Empty if it may have been any.
    possible: Vec<Rank>,
    /// The ranks whose processes are gone.
    gone: BTreeMap<Rank, Gone>,
    /// Events after this common time, ns, may already belong to the end of the whole job.
    settled_ns: i64,
    /// When the last process that left a record ended, common time, ns, if none of these processes is left and the ends
    /// of ranks without a record are unknown. `None` if one is left, if the job is over, or if no sign of life dates
    /// the end.
    none_left_ns: Option<i64>,
    /// From this common time on, ns, failures follow from the signal by which the launcher or each process was asked to
    /// end; `i64::MAX` if none was.
    asked_ns: i64,
    /// When the first process noted that a signal asked it to end, common time, ns, if each has noted that at about one
    /// time, except those that ended in order, and some are gone.
    asked_each_ns: Option<i64>,
}

/// The end of a job that has no process left.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) kind: EndKind,
    /// Ranks whose processes ended before the others', ascending; if no order is known, all that did not end in order.
    /// Empty if one of several ended first, if only clocks that nothing relates tell which, or if the kind of the end
    /// is not [`EndKind::Crashed`].
    pub(crate) first: Vec<Rank>,
    /// If one of several ranks ended first: these ranks, ascending; empty if it may have been any.
    possible: Vec<Rank>,
    /// When the last of `first` ended, common time, ns; `last_ns` if `first` is empty.
    pub(crate) first_ns: i64,
    /// When the last process of all ended, common time, ns.
    pub(crate) last_ns: i64,
    /// Whether the time of the end is known, from signs of life or from a launcher. Otherwise the processes may have
    /// lived on long after their last operation.
    is_dated: bool,
    /// The signal by which the launcher was asked to end the job before any process failed, if it was.
    pub(crate) asked: Option<LaunchSignal>,
}

impl End {
    /// Whether the job may have been terminated without any fault, and nothing shows how long its unfinished operations
    /// had lasted.
    pub(crate) fn leaves_ages_open(&self) -> bool {
        !self.is_dated && matches!(self.kind, EndKind::Cancelled | EndKind::Unknown)
    }

    /// Whether the time of the end is known.
    pub(crate) const fn is_dated(&self) -> bool {
        self.is_dated
    }
}

/// A process that is gone.
#[derive(Clone, Debug)]
pub(crate) struct Gone {
    rank: Rank,
    /// Whether the process closed its record or exited with 0.
    in_order: bool,
    /// When the launcher noticed the end of the process, else the last time that the process noted; common time, ns.
    at_ns: i64,
    /// The last sign of life in the process's own ring, if there is one; else the same as `at_ns`.
    seen_ns: i64,
    /// How the process ended, if a launcher or the process itself recorded it.
    pub(crate) exit: Option<RankEnd>,
    /// Whether a launcher recorded the end of the process: a launcher knows of signals, too.
    is_launched: bool,
    /// Whether the launcher had sent the process a signal to end.
    was_signalled: bool,
}

impl Gone {
    /// When the process ended: when its launcher noticed it, else the last time that the process noted; common time,
    /// ns.
    pub(crate) const fn at_ns(&self) -> i64 {
        self.at_ns
    }

    /// The process's last sign of life, common time, ns; earlier than the end of the process if a stopped launcher
    /// noticed the end late.
    pub(crate) const fn seen_ns(&self) -> i64 {
        self.seen_ns
    }
}

impl Life {
    /// Derives the life of the job from its records and those of its launchers.
    pub(crate) fn new(aligned: &Aligned<'_>, policy: &Policy) -> Self {
        let launches = policy.launches.as_slice();
        let exits = exits(aligned, launches);
        let ranks = aligned.expected.iter();
        let mut gone: Vec<Gone> = ranks
            .filter_map(|&rank| gone(aligned, rank, exits.get(&rank)))
            .collect();
        gone.sort_by_key(|process| (process.at_ns, process.rank));
        let is_over = !gone.is_empty() && gone.len() == aligned.expected.len();
        let gone_ranks: HashSet<Rank> = gone.iter().map(|process| process.rank).collect();
        let mut records = aligned.records.iter();
        let none_left = !is_over
            && !aligned.records.is_empty()
            && records.all(|record| gone_ranks.contains(&record.rank));
        let asked_each_ns = asked_each_ns(aligned, &gone);
        let were_asked = asked_each_ns.is_some();
        let order = order_of(aligned, &gone, were_asked);
        let now = policy.snapshot.then(|| now_ns(aligned, policy)).flatten();
        let last_ns = gone.last().map_or(i64::MIN, |process| process.at_ns);
        // A launcher writes down one end after the other: a launch record that is only half written shows a wrong
        // order.
        let is_being_noted = now.is_some_and(|now| now.saturating_sub(last_ns) < SETTLE_NS)
            && gone
                .iter()
                .any(|process| is_awaited(aligned, process, launches));
        let end = (is_over && !is_being_noted)
            .then(|| End::of(aligned, &gone, order.clone(), were_asked, launches));
        let settled_ns = match (&end, now) {
            (None, Some(now)) => match is_over {
                true => last_ns.saturating_sub(SETTLE_NS),
                false => now.saturating_sub(SETTLE_NS),
            },
            _ => i64::MAX,
        };
        let asked_ns = asked(launches).map_or(i64::MAX, |asked| asked.time_ns);
        // While others live, each end may be a cause if no order of them is known, unless the whole job is being
        // terminated.
        let is_cause = |process: &&Gone| {
            let was_asked = process.was_signalled || were_asked;
            let by_itself = !process.in_order && !was_asked && process.at_ns < asked_ns;
            // A stopped process that is killed with all others gave its last sign of life long before.
            let is_dated = !is_being_noted || process.exit.is_some();
            by_itself && is_dated && process.at_ns <= settled_ns
        };
        let causes: BTreeSet<Rank> = gone
            .iter()
            .filter(is_cause)
            .map(|process| process.rank)
            .collect();
        let is_open = end.is_none() && !matches!(order, Order::First(_));
        let possible = match (&end, &order) {
            (Some(end), _) => end.possible.clone(),
            (None, Order::OneOf(possible)) if none_left && !possible.is_empty() => {
                let named: HashSet<Rank> = possible.iter().copied().collect();
                let expected = aligned.expected.iter().copied();
                expected
                    .filter(|rank| named.contains(rank) || !gone_ranks.contains(rank))
                    .collect()
            }
            _ => Vec::new(),
        };
        let mut first = match (&end, order) {
            (Some(end), _) => end.first.clone(),
            (None, Order::First(mut order)) => {
                order.retain(|rank| causes.contains(rank));
                order
            }
            // No process with a record is left that waits, and a rank without a record may have been the cause.
            (None, Order::OneOf(_) | Order::Unknown) if none_left => Vec::new(),
            (None, Order::OneOf(mut possible)) if !possible.is_empty() => {
                possible.retain(|rank| causes.contains(rank));
                possible
            }
            (None, Order::OneOf(_) | Order::Unknown) => causes.into_iter().collect(),
        };
        let named: HashSet<Rank> = first.iter().copied().collect();
        let gave_up: HashSet<Rank> = gone
            .iter()
            .filter(|process| named.contains(&process.rank) && gave_up(aligned, process))
            .map(|process| process.rank)
            .collect();
        first.retain(|rank| !gave_up.contains(rank));
        let is_dated = is_dated(aligned, &gone);
        Self {
            none_left_ns: (none_left && is_dated).then_some(last_ns),
            end,
            is_open: is_open && follow_each_other(aligned, &gone, &first),
            possible,
            first,
            gone: gone
                .into_iter()
                .map(|process| (process.rank, process))
                .collect(),
            settled_ns,
            asked_ns: asked_from(aligned, launches, asked_each_ns),
            asked_each_ns,
        }
    }

    /// Whether an event at this common time, ns, can be judged: a later one may already belong to the end of the whole
    /// job.
    pub(crate) const fn is_settled(&self, at_ns: i64) -> bool {
        at_ns <= self.settled_ns
    }

    /// Whether the launcher or each process had been asked to end by this common time, ns: a failure then may follow
    /// from that.
    pub(crate) const fn is_being_ended(&self, at_ns: i64) -> bool {
        at_ns >= self.asked_ns
    }

    /// When the launcher or each process was asked to end, common time, ns; `i64::MAX` if none was.
    pub(crate) const fn asked_ns(&self) -> i64 {
        self.asked_ns
    }

    /// Whether the end of a rank's process is a cause: no other process ended before it, and it did not end in order,
    /// unless its end made others fail. Processes that were ended together explain no wait, and neither do those that
    /// gave up.
    pub(crate) fn went_first(&self, rank: Rank) -> bool {
        self.first.contains(&rank)
    }

    /// Whether each process has noted at about one time that a signal asked it to end, except those that ended in
    /// order.
    pub(crate) const fn asked_each(&self) -> bool {
        self.asked_each_ns.is_some()
    }

    /// Whether a process whose end is a cause may have been ended, by a launcher, because another's was: which of them
    /// was the first is not recorded.
    pub(crate) const fn is_order_open(&self) -> bool {
        self.is_open
    }

    /// If no process that left a record is left, and it is not known which process ended first: the ranks of which one
    /// may have been the first, ascending. Empty if it may have been any.
    pub(crate) fn possible(&self) -> &[Rank] {
        &self.possible
    }

    /// When the last process that left a record ended, common time, ns, if none of these is left and nothing shows how
    /// the ranks without a record ended.
    pub(crate) const fn none_left_ns(&self) -> Option<i64> {
        self.none_left_ns
    }

    /// Whether a process that left a record may live: then its unfinished operations grow older.
    pub(crate) const fn lives_on(&self) -> bool {
        self.end.is_none() && self.none_left_ns.is_none()
    }

    /// Whether a rank is known to have ended in order: it closed its record or exited with 0.
    pub(crate) fn ended_in_order(&self, rank: Rank) -> bool {
        self.gone.get(&rank).is_some_and(|gone| gone.in_order)
    }

    /// The process of a rank, if it is gone.
    pub(crate) fn gone(&self, rank: Rank) -> Option<&Gone> {
        self.gone.get(&rank)
    }

    /// The policy for this job. If the job is over, the time of judgment is its end, or the time at which its launcher
    /// or its processes were asked to end it: operations that were young at that time are not a hang. If the time of
    /// the end is unknown, all pending operations count. If the job is not known to be over, the time of judgment is at
    /// most the end of the last process that left a record, if none of these is left, or the time at which the
    /// processes were asked to end.
    pub(crate) fn policy(&self, policy: &Policy) -> Policy {
        let mut policy = policy.clone();
        if let Some(end) = &self.end {
            // A process may take its time to end: what began to wait only after the request was no hang.
            let asked_ns = end.asked.map(|asked| asked.time_ns);
            let asked_ns = asked_ns.or(self.asked_each_ns).unwrap_or(i64::MAX);
            policy.now_ns = end.is_dated.then_some(end.last_ns.min(asked_ns));
            policy.snapshot = end.is_dated;
            // The last sign of life is somewhat older than the end.
            let age = Duration::from_nanos(TOGETHER_NS.unsigned_abs());
            policy.overdue = policy.overdue.saturating_sub(age);
        } else if let Some(last_ns) = self.none_left_ns {
            // A process that is gone waits for nothing: what its record holds does not age any more.
            policy.now_ns = Some(policy.now_ns.map_or(last_ns, |now| now.min(last_ns)));
            policy.snapshot = true;
            let age = Duration::from_nanos(TOGETHER_NS.unsigned_abs());
            policy.overdue = policy.overdue.saturating_sub(age);
        } else if let Some(asked_ns) = self.asked_each_ns {
            // The programs have left their operations.
            policy.now_ns = Some(policy.now_ns.map_or(asked_ns, |now| now.min(asked_ns)));
        }
        policy
    }
}

/// How ranks ended according to the records of launchers, each with whether the launcher had sent the process a signal
/// to end.
fn exits(aligned: &Aligned<'_>, launches: &[LaunchRecord]) -> BTreeMap<Rank, (RankEnd, bool)> {
    let mut exits = BTreeMap::new();
    for launch in launches {
        for process in &launch.ranks {
            let Some(end) = process.end else { continue };
            let mut records = aligned.records_of(process.rank);
            // The launch record of another attempt, or of an earlier run, is about other processes.
            let is_other = records.any(|index| {
                let record = &aligned.records[index];
                let identity = &record.identity;
                let is_other_process =
                    identity.pid != 0 && process.pid != 0 && identity.pid != process.pid;
                let lived_on = record.latest_ns().saturating_sub(end.time_ns) > TOGETHER_NS;
                let is_same_host = identity.host == launch.host;
                identity.attempt != launch.attempt || (is_other_process && is_same_host && lived_on)
            });
            if !is_other {
                let signalled = process
                    .sent
                    .iter()
                    .any(|sent| is_end_signal(sent.signal) && sent.time_ns <= end.time_ns);
                exits.insert(process.rank, (end, signalled));
            }
        }
    }
    exits
}

/// Whether the process of a rank is gone, and its launcher has not written down yet how it ended.
fn is_awaited(aligned: &Aligned<'_>, gone: &Gone, launches: &[LaunchRecord]) -> bool {
    let attempt = |record: RecordIx| aligned.records[record].identity.attempt;
    let attempt = aligned.record_of(gone.rank).map(attempt);
    launches.iter().any(|launch| {
        let is_its_own = attempt.is_none_or(|attempt| attempt == launch.attempt);
        let mut ranks = launch.ranks.iter();
        is_its_own && ranks.any(|process| process.rank == gone.rank && process.end.is_none())
    })
}

/// The first signal by which a launcher was asked to end the job, if any.
fn asked(launches: &[LaunchRecord]) -> Option<LaunchSignal> {
    let received = launches.iter().flat_map(|launch| &launch.received);
    received
        .filter(|received| is_end_signal(received.signal))
        .min_by_key(|received| received.time_ns)
        .copied()
}

/// From when on failures may follow from a signal that asked for the end, common time, ns. A launcher of these records'
/// attempt received it, or each process did, the first of them at `asked_each_ns`. `i64::MAX` if there was no such
/// signal.
fn asked_from(aligned: &Aligned<'_>, launches: &[LaunchRecord], asked_each_ns: Option<i64>) -> i64 {
    let is_theirs = |launch: &&LaunchRecord| {
        let mut records = aligned.records.iter();
        records.all(|record| record.identity.attempt == launch.attempt)
    };
    let received = launches.iter().filter(is_theirs);
    let signals = received.flat_map(|launch| &launch.received);
    let asked = signals.filter(|received| is_end_signal(received.signal));
    let first = asked.map(|received| received.time_ns);
    let first = first.chain(asked_each_ns).min();
    // A terminal sends its signal to the launcher and to the ranks at once, and any of them may note it first.
    first.map_or(i64::MAX, |time_ns| time_ns.saturating_sub(NOTICED_NS))
}

/// Whether this signal is one by which a job or a process is ended on purpose: SIGHUP, SIGINT, SIGKILL, SIGTERM.
const fn is_end_signal(signal: i32) -> bool {
    matches!(signal, 1 | 2 | 9 | 15)
}

/// The exit code of a program that a signal ended is higher than this by the number of the signal.
const SIGNALLED: i32 = 128;

/// Whether shells, and programs that handle signals, report one of [these signals](is_end_signal) as this exit code.
pub(crate) const fn is_of_end_signal(code: i32) -> bool {
    code > SIGNALLED && is_end_signal(code - SIGNALLED)
}

/// The process of a rank, if it is gone. `exit` is the rank's entry in [`exits`].
fn gone(aligned: &Aligned<'_>, rank: Rank, exit: Option<&(RankEnd, bool)>) -> Option<Gone> {
    let to_common = |record: RecordIx, ns: i64| ns.saturating_sub(aligned.offsets_ns[record]);
    if let Some(&(end, was_signalled)) = exit {
        let record = aligned.record_of(rank);
        let at_ns = record.map_or(end.time_ns, |record| to_common(record, end.time_ns));
        let seen = record.filter(|&record| aligned.records[record].is_ring());
        let seen = seen.map(|record| to_common(record, aligned.records[record].latest_ns()));
        return Some(Gone {
            rank,
            in_order: end.is_success(),
            at_ns,
            seen_ns: seen.map_or(at_ns, |seen| seen.min(at_ns)),
            exit: Some(end),
            is_launched: true,
            was_signalled,
        });
    }
    let mut found: Option<Gone> = None;
    for record in aligned.records_of(rank) {
        let full_record = &aligned.records[record];
        if !full_record.died() && !full_record.closed() {
            return None;
        }
        let at_ns = to_common(record, full_record.latest_ns().max(full_record.closed_ns));
        let gone = found.get_or_insert(Gone {
            rank,
            in_order: false,
            at_ns,
            seen_ns: at_ns,
            exit: None,
            is_launched: false,
            was_signalled: false,
        });
        if let Some(exit) = full_record.status.as_ref().and_then(|status| status.exit) {
            gone.exit = Some(RankEnd {
                time_ns: exit.time_ns,
                exit_code: Some(exit.code.into()),
                signal: None,
                out_of_memory: None,
            });
            gone.in_order |= exit.code == 0;
            gone.at_ns = gone.at_ns.max(to_common(record, exit.time_ns));
        }
        // With several recorders in one process, only the program's own is closed at the end.
        gone.in_order |= full_record.closed();
        gone.at_ns = gone.at_ns.max(at_ns);
        gone.seen_ns = gone.at_ns;
    }
    found
}

impl End {
    /// The end of a job whose processes are `gone`, in this order. `were_asked` states whether a signal asked all to
    /// end ([`asked_each_ns`]).
    fn of(
        aligned: &Aligned<'_>,
        gone: &[Gone],
        order: Order,
        were_asked: bool,
        launches: &[LaunchRecord],
    ) -> Self {
        let last_ns = gone.last().map_or(0, |process| process.at_ns);
        let failed: Vec<&Gone> = gone.iter().filter(|process| !process.in_order).collect();
        let earliest = failed.first().map_or(i64::MAX, |process| process.at_ns);
        let asked = asked(launches).filter(|asked| asked.time_ns <= earliest);
        let inside = |process: &Gone| {
            let mut records = aligned.records_of(process.rank);
            records.any(|record| is_inside(&aligned.records[record]))
        };
        let together = failed.len() == gone.len() && gone.len() > 1;
        let known = failed.iter().any(|process| process.exit.is_some());
        // A process that notes its exit code was not ended by a signal.
        let by_itself = failed.iter().any(|process| {
            process.exit.is_some() && !process.is_launched && !was_asked(aligned, process)
        });
        let is_dated = is_dated(aligned, gone);
        let mut possible = Vec::new();
        let (kind, first) = match order {
            _ if failed.is_empty() => (EndKind::Ended, Vec::new()),
            _ if asked.is_some() || were_asked => (EndKind::Cancelled, Vec::new()),
            Order::First(first) => (EndKind::Crashed, first),
            Order::OneOf(ranks) => {
                possible = ranks;
                (EndKind::Crashed, Vec::new())
            }
            // Nothing shows that the processes ended at the same time.
            Order::Unknown if !is_dated => (EndKind::Unknown, Vec::new()),
            Order::Unknown if !known && !gone.iter().any(inside) => (EndKind::Unknown, Vec::new()),
            Order::Unknown if together && !by_itself => match is_order_hidden(aligned, &failed) {
                true => (EndKind::Crashed, Vec::new()),
                false => (EndKind::Cancelled, Vec::new()),
            },
            Order::Unknown => {
                // A launcher asks the others to end once one has ended by itself.
                let mut first = failed.clone();
                first.retain(|process| !by_itself || !was_asked(aligned, process));
                (EndKind::Crashed, ranks_of(&first))
            }
        };
        let times = gone.iter().filter(|process| first.contains(&process.rank));
        let first_ns = times.map(|process| process.at_ns).max().unwrap_or(last_ns);
        Self {
            kind,
            first,
            possible,
            first_ns,
            last_ns,
            is_dated,
            asked,
        }
    }
}

/// Whether some of the ranks `first`, whose order is not known, may have been terminated because another one of them
/// ended. That is so if there are several, no launcher noted the end of any, not each noted its own exit, and they are
/// not all ranks of some hosts.
fn follow_each_other(aligned: &Aligned<'_>, gone: &[Gone], first: &[Rank]) -> bool {
    let first_gone = gone.iter().filter(|process| first.contains(&process.rank));
    let first_gone: Vec<&Gone> = first_gone.collect();
    first_gone.len() > 1
        && first_gone.iter().all(|process| !process.is_launched)
        && first_gone.iter().any(|process| process.exit.is_none())
        && !are_whole_hosts(aligned, &first_gone)
}

/// Whether a launcher or a sign of life shows when processes ended.
fn is_dated(aligned: &Aligned<'_>, gone: &[Gone]) -> bool {
    gone.iter().any(|process| process.exit.is_some()) || aligned.records.iter().any(beats)
}

/// Whether a record has a heartbeat of the watchdog, or was closed by its process.
fn beats(record: &Record) -> bool {
    record.closed_ns > 0
        || record
            .status
            .as_ref()
            .is_some_and(|status| status.heartbeat_ns > 0)
}

/// The ranks of these processes, ascending.
fn ranks_of(gone: &[&Gone]) -> Vec<Rank> {
    let mut ranks: Vec<Rank> = gone.iter().map(|process| process.rank).collect();
    ranks.sort_unstable();
    ranks
}
