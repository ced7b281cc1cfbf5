//! The ranks' progress, published and read through the store after a fault.
//!
//! | key, below `rcomm/status/<attempt>/<alarm>` | holds | writer |
//! |---|---|---|
//! | `<rank>` | progress of this rank, in JSON | every rank |
//! | `<group>/<seq>/asking` | how many members have asked about this collective of a large group | each rank that asks |
//! | `<group>/<seq>` | the summary of the answers, in JSON | the first rank that asked |
//! | `<group>/p2p/<seq>/asking`, `<group>/p2p/<seq>` | the same for the messages to which their ranks gave this number | as above |
//!
//! In a small group every member reads every answer. In a group of thousands that would be millions of reads
//! from one store within two seconds. So in a large group the first member that asks reads the answers, in
//! chunks, and publishes a summary for the rest. Each rank counts its own messages, apart from collectives: so ranks
//! that ask about different messages may share a summary. The waits in the summary are true, but may start at a rank
//! for which only the rank that has made the summary waits.

mod arrivals;
mod replies;
mod report;
#[cfg(test)]
mod tests;

pub(crate) use replies::StatusReplies;
pub(crate) use report::RankReport;

use crate::op::error::{ErrorKind, Result};
use crate::store::{Store, which_are_set};
use crate::watch::failure_broadcast::{LOOK_TIME, RollCall, STOPPED_TIME};
use arrivals::Arrivals;
use rcomm_recorder::model::Rank;
use rcomm_recorder::model::text;
use replies::Summary;
use report::{is_long, wire_name};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::time::{Duration, Instant};

/// The largest group in which every member reads all answers.
const SMALL_GROUP: usize = 64;
/// The longest wait for the answers of ranks whose processes may have ended, once all others have answered. It is also
/// the shortest wait for ranks that have not answered a roll call.
const LOST_TIME: Duration = Duration::from_millis(250);
/// The most answers that are read in one call to the store.
const CHUNK: usize = 256;
/// The most ranks that an error lists by number.
const MAX_RANKS: usize = 16;

/// The operation whose members' status is requested.
pub(crate) struct StatusQuery<'a> {
    pub(crate) members: &'a [Rank],
    pub(crate) wire_id: u64,
    pub(crate) seq: u64,
    pub(crate) is_p2p: bool,
    /// Members whose processes are known to have ended: their answers are not waited for.
    pub(crate) gone: &'a [Rank],
    /// Members to which a connection was lost. Their processes may have ended, so their answers are waited for only
    /// briefly.
    pub(crate) lost: &'a [Rank],
    /// Returns whether a signal has stopped the process of a member, so that it cannot answer.
    pub(crate) is_stopped: &'a dyn Fn(Rank) -> bool,
    /// The call by which ranks asked, before the time-out, which of them run: a rank that has not answered it has been
    /// silent since.
    pub(crate) roll_call: Option<RollCall>,
    /// The ranks for which this rank waited until its time-out; empty after any other failure.
    pub(crate) waited_for: &'a [Rank],
    /// The operation's time-out.
    pub(crate) timeout: Duration,
}

/// One rank's part in one exchange of status.
pub(crate) struct StatusExchange {
    pub(crate) rank: Rank,
    pub(crate) attempt: u32,
    /// The number of the alarm for which status is exchanged.
    pub(crate) alarm: i64,
    /// How long to wait for answers.
    pub(crate) wait_time: Duration,
    /// How long to read the answers that have arrived, after `wait_time`.
    pub(crate) read_time: Duration,
}

impl StatusExchange {
    fn key(&self, name: impl std::fmt::Display) -> String {
        format!("rcomm/status/{}/{}/{name}", self.attempt, self.alarm)
    }

    /// Publishes this rank's status.
    pub(crate) fn publish(&self, store: &dyn Store, report: &RankReport) -> Result<()> {
        let report = serde_json::to_vec(report).unwrap_or_default();
        store.set(&self.key(self.rank), &report)
    }

    /// The status of the members: those that have arrived at the operation, and those that have not. If the
    /// store fails, the text says so.
    ///
    /// # Blocking
    /// Until all members have answered, and the ranks that they wait for. It waits less for ranks that a signal has
    /// stopped ([`STOPPED_TIME`]), and, once they have not answered a roll call for `wait_time`, for silent ones
    /// ([`LOST_TIME`]). In all it waits for at most about `wait_time` and `read_time` together, however many ranks
    /// there are.
    pub(crate) fn collect(&self, store: &dyn Store, query: &StatusQuery<'_>) -> StatusReplies {
        if query.members.len() <= SMALL_GROUP {
            return self.read_all(store, query);
        }
        let kind = if query.is_p2p { "p2p/" } else { "" };
        let name = wire_name(query.wire_id);
        let topic = self.key(format_args!("{name}/{kind}{}", query.seq));
        match store.add(&format!("{topic}/asking"), 1) {
            Ok(1) => {
                let answers = self.read_all(store, query);
                let summary = Summary::of(&answers);
                let summary = serde_json::to_vec(&summary).unwrap_or_default();
                // If this fails, the other members report that they have no summary.
                let _ = store.set(&topic, &summary);
                answers
            }
            Ok(_) => match store.get(&topic, self.wait_time + self.read_time) {
                Ok(summary) => match serde_json::from_slice::<Summary>(&summary) {
                    Ok(summary) => summary.replies(query, self.rank),
                    Err(error) => StatusReplies::text(format!(
                        "the answers of the {} members cannot be read: {error}",
                        query.members.len()
                    )),
                },
                Err(error) => StatusReplies::text(format!(
                    "the answers of the {} members were not passed on: {error}",
                    query.members.len()
                )),
            },
            Err(error) => StatusReplies::text(format!(
                "the status of the other ranks is not known: {error}"
            )),
        }
    }

    /// Reads the answers of all members, after waiting for them.
    fn read_all(&self, store: &dyn Store, query: &StatusQuery<'_>) -> StatusReplies {
        let mut arrivals = Arrivals {
            members: query.members.len(),
            ..Arrivals::default()
        };
        let mut ranks = Vec::with_capacity(query.members.len());
        for &rank in query.members {
            match query.gone.contains(&rank) {
                true => arrivals.gone.push(rank),
                false => ranks.push(rank),
            }
        }
        let keys: Vec<String> = ranks.iter().map(|rank| self.key(rank)).collect();
        let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
        let is_stopped: Vec<bool> = ranks.iter().map(|&rank| (query.is_stopped)(rank)).collect();
        let (mut others, mut lost, mut stopped) = (Vec::new(), Vec::new(), Vec::new());
        for ((&rank, &key), is_stopped) in ranks.iter().zip(&keys).zip(is_stopped) {
            match (is_stopped, query.lost.contains(&rank)) {
                (true, _) => stopped.push((rank, key)),
                (false, true) => lost.push(key),
                (false, false) => others.push(rank),
            }
        }
        // The results of the waits are not used: those answers that have arrived are read below.
        let began = Instant::now();
        let until = began + self.wait_time + self.read_time;
        self.wait_for(store, query, &others, began);
        if !lost.is_empty() {
            let time_left = self.wait_time.saturating_sub(began.elapsed());
            let _ = store.wait(&lost, time_left.min(LOST_TIME));
        }
        self.wait_for_stopped(store, query, stopped, began);
        let are_set = which_are_set(store, &keys, until);
        let present: Vec<&str> = keys
            .iter()
            .zip(&are_set)
            .filter_map(|(key, is_set)| is_set.then_some(*key))
            .collect();
        let mut answers = present.chunks(CHUNK).flat_map(|keys| {
            // The keys exist, so this does not wait.
            let soon = Duration::from_millis(1);
            let values = if Instant::now() < until {
                store.multi_get(keys, soon).ok()
            } else {
                None
            };
            values.map_or_else(
                || vec![None; keys.len()],
                |values| values.into_iter().map(Some).collect(),
            )
        });
        let mut reports = BTreeMap::new();
        let mut are_all_read = true;
        for (rank, is_set) in ranks.into_iter().zip(are_set) {
            let value = if is_set {
                answers.next().flatten()
            } else {
                None
            };
            are_all_read &= is_set == value.is_some();
            let report: Option<RankReport> =
                value.and_then(|bytes| serde_json::from_slice(&bytes).ok());
            arrivals.add(query, rank, report.as_ref());
            reports.insert(rank, report);
        }
        // This rank has published its own answer. If that is not there, or not there any more, or time has run out, the
        // store has failed, and an answer that is missing says nothing about its rank.
        if let Some(own) = reports.get(&self.rank) {
            let works = || {
                let own = self.key(self.rank);
                Instant::now() < until && store.check(&[&own]).unwrap_or(false)
            };
            if own.is_none() || !are_all_read || !works() {
                let unread = "the answers of the members cannot be read from the store";
                return StatusReplies::text(unread.to_owned());
            }
        }
        let mut text = arrivals.to_text(query.is_p2p);
        let (arrived, absent) = (arrivals.arrived.clone(), arrivals.absent(query.is_p2p));
        // A rank that has arrived at the operation does not delay it.
        let have_come = query.waited_for.iter().all(|rank| arrived.contains(rank));
        let roots = match have_come && !query.waited_for.is_empty() {
            true => &absent,
            false => query.waited_for,
        };
        let is_uncertain = query.is_p2p || !arrivals.silent.is_empty();
        let last_in_chain = match self.follow_waits(store, query, roots, &mut reports, began) {
            Some((hops, last)) => {
                text.push_str(&hops);
                last
            }
            None => Vec::new(),
        };
        StatusReplies {
            text,
            arrived,
            absent,
            is_uncertain,
            last_in_chain,
        }
    }

    /// Waits for the answers of these ranks until `wait_time` after `began`, the time of the alarm. Those that have not
    /// answered a roll call are waited for until their silence has lasted for `wait_time` in all, and [`LOST_TIME`]
    /// after `began` in any case.
    fn wait_for(&self, store: &dyn Store, query: &StatusQuery<'_>, ranks: &[Rank], began: Instant) {
        let wait = |ranks: &mut dyn Iterator<Item = Rank>, limit: Duration| {
            let keys: Vec<String> = ranks.map(|rank| self.key(rank)).collect();
            let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
            let time_left = limit.saturating_sub(began.elapsed());
            store.wait(&keys, time_left)
        };
        let all = &mut ranks.iter().copied();
        let Some(call) = query.roll_call else {
            let _ = wait(all, self.wait_time);
            return;
        };
        match wait(all, self.wait_for_silent(call)) {
            Err(error) if error.kind() == ErrorKind::Timeout => {}
            // All have answered, or the store has failed.
            _ => return,
        }
        let until = began + self.wait_time + self.read_time;
        let answered = call.answered(store, self.attempt, ranks, until);
        if !answered.is_empty() {
            let _ = wait(&mut answered.into_iter(), self.wait_time);
        }
    }

    /// How long after an alarm this rank waits for ranks that have not answered this call.
    fn wait_for_silent(&self, call: RollCall) -> Duration {
        let rest = self.wait_time.saturating_sub(call.age);
        rest.max(LOST_TIME).min(self.wait_time)
    }

    /// Waits for the answers of `stopped`, the ranks that a signal had stopped at `began`: until [`STOPPED_TIME`] after
    /// that, or not longer than for silent ranks if none of them has answered a roll call. Those that were continued in
    /// between are waited for as others, until `wait_time` after `began`: the ranks of a suspended job are continued
    /// one after another.
    fn wait_for_stopped(
        &self,
        store: &dyn Store,
        query: &StatusQuery<'_>,
        mut stopped: Vec<(Rank, &str)>,
        began: Instant,
    ) {
        let time_left = || self.wait_time.saturating_sub(began.elapsed());
        let mut continued = Vec::new();
        let limit = match query.roll_call {
            Some(call) if !stopped.is_empty() => {
                let ranks: Vec<Rank> = stopped.iter().map(|(rank, _)| *rank).collect();
                let until = began + self.wait_time + self.read_time;
                let have_answered = call.answered(store, self.attempt, &ranks, until);
                match have_answered.is_empty() {
                    true => self.wait_for_silent(call),
                    false => self.wait_time,
                }
            }
            _ => self.wait_time,
        };
        while !stopped.is_empty() {
            let keys: Vec<&str> = stopped.iter().map(|(_, key)| *key).collect();
            match store.wait(&keys, LOOK_TIME.min(time_left())) {
                Err(error) if error.kind() == ErrorKind::Timeout => {}
                // All have answered, or the store has failed.
                _ => break,
            }
            stopped.retain(|&(rank, key)| {
                let is_stopped = (query.is_stopped)(rank);
                if !is_stopped {
                    continued.push(key);
                }
                is_stopped
            });
            if began.elapsed() >= STOPPED_TIME.min(limit) {
                break;
            }
        }
        if !continued.is_empty() {
            let _ = store.wait(&continued, time_left());
        }
    }

    /// Follows the waits of `roots`, from rank to rank, and returns them as text, and the ranks at which they end.
    /// `None` if `roots` wait for no other rank, or if the waits return to this rank or never leave a cycle.
    ///
    /// Reports that are not in `reports`, of ranks that are no members, are waited for as those of the members are.
    fn follow_waits(
        &self,
        store: &dyn Store,
        query: &StatusQuery<'_>,
        roots: &[Rank],
        reports: &mut BTreeMap<Rank, Option<RankReport>>,
        began: Instant,
    ) -> Option<(String, Vec<Rank>)> {
        let mut text = String::new();
        let mut to_follow: Vec<Rank> = roots.to_vec();
        let mut seen = BTreeSet::from([self.rank]);
        let mut last = BTreeSet::new();
        while let Some(rank) = to_follow.pop() {
            if rank == self.rank {
                return None;
            }
            // Several ranks may wait for the same one.
            if !seen.insert(rank) {
                continue;
            }
            let next = self.waits_of(store, query, rank, reports, began);
            if next.is_empty() {
                last.insert(rank);
                continue;
            }
            let _ = write!(
                text,
                "; rank {rank} waits for {}",
                text::ranks(&next, MAX_RANKS)
            );
            to_follow.extend(next);
        }
        (!last.is_empty() && !text.is_empty()).then(|| (text, last.into_iter().collect()))
    }

    /// The ranks for which `rank` has waited for at least half of the operation's time-out: those that its report
    /// names, and the members of its pending collectives that have not arrived or have not answered. Empty if `rank`
    /// has not answered.
    fn waits_of(
        &self,
        store: &dyn Store,
        query: &StatusQuery<'_>,
        rank: Rank,
        reports: &mut BTreeMap<Rank, Option<RankReport>>,
        began: Instant,
    ) -> Vec<Rank> {
        let timeout = query.timeout;
        let mut ask = |rank: Rank| {
            let report = reports.entry(rank);
            report
                .or_insert_with(|| self.report_of(store, query, rank, began))
                .clone()
        };
        let Some(report) = ask(rank) else {
            return Vec::new();
        };
        let mut waits: BTreeSet<Rank> = report.long_waits(timeout).collect();
        let pending = report.pending.iter();
        for collective in pending.filter(|pending| is_long(pending.waited_ms, timeout)) {
            let absent = collective.members.iter().copied().filter(|&member| {
                member != rank
                    && !ask(member).is_some_and(|report| report.has_arrived_at(collective))
            });
            waits.extend(absent);
        }
        waits.into_iter().collect()
    }

    /// A rank's report, if the store has it in time.
    fn report_of(
        &self,
        store: &dyn Store,
        query: &StatusQuery<'_>,
        rank: Rank,
        began: Instant,
    ) -> Option<RankReport> {
        let is_late = || began.elapsed() >= self.wait_time + self.read_time;
        if is_late() {
            return None;
        }
        let key = self.key(rank);
        match (query.is_stopped)(rank) {
            true => self.wait_for_stopped(store, query, vec![(rank, &key)], began),
            false => self.wait_for(store, query, &[rank], began),
        }
        if is_late() || !store.check(&[&key]).ok()? {
            return None;
        }
        // The key exists, so this does not wait.
        let report = store.get(&key, Duration::from_millis(1)).ok()?;
        serde_json::from_slice(&report).ok()
    }
}
