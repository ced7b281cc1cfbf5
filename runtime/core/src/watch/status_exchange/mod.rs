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
//! for which only the first of those that ask waits.

mod arrivals;
mod replies;
mod report;

pub(crate) use replies::StatusReplies;
pub(crate) use report::RankReport;

use crate::op::error::Result;
use crate::store::{Store, which_are_set};
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
/// The longest wait for the answers of ranks whose processes may have ended, once all others have answered.
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
    /// shortly.
    pub(crate) lost: &'a [Rank],
    /// Members whose processes a signal has stopped: they cannot answer, so their answers are not waited for.
    pub(crate) stopped: &'a [Rank],
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
    /// Until all members that can have answered, for about `wait_time` and `read_time` together at most, however many
    /// ranks there are.
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
        let may_answer = |(rank, _): &(&Rank, &&str)| !query.stopped.contains(rank);
        let by_rank = || ranks.iter().zip(&keys).filter(may_answer);
        let keys_of =
            |lost: bool| by_rank().filter(move |(rank, _)| query.lost.contains(rank) == lost);
        let (lost, others): (Vec<&str>, Vec<&str>) = (
            keys_of(true).map(|(_, key)| *key).collect(),
            keys_of(false).map(|(_, key)| *key).collect(),
        );
        // The results of the waits are not used: those answers that have arrived are read below.
        let began = Instant::now();
        let _ = store.wait(&others, self.wait_time);
        if !lost.is_empty() {
            let time_left = self.wait_time.saturating_sub(began.elapsed());
            let _ = store.wait(&lost, time_left.min(LOST_TIME));
        }
        let until = Instant::now() + self.read_time;
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
        for (rank, is_set) in ranks.into_iter().zip(are_set) {
            let value = if is_set {
                answers.next().flatten()
            } else {
                None
            };
            let report: Option<RankReport> =
                value.and_then(|bytes| serde_json::from_slice(&bytes).ok());
            arrivals.add(query, rank, report.as_ref());
            reports.insert(rank, report);
        }
        let mut text = arrivals.to_text(query.is_p2p);
        let (arrived, absent) = (arrivals.arrived.clone(), arrivals.absent(query.is_p2p));
        // A rank that has come to the operation does not hold it up.
        let have_come = query.waited_for.iter().all(|rank| arrived.contains(rank));
        let roots = match have_come && !query.waited_for.is_empty() {
            true => &absent,
            false => query.waited_for,
        };
        let is_uncertain = query.is_p2p || !arrivals.silent.is_empty();
        let last_in_chain = match self.follow_waits(store, query, roots, &mut reports, until) {
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

    /// Follows the waits of `roots`, from rank to rank, and returns them as text, and the ranks at which they end.
    /// `None` if `roots` wait for no other rank, or if the waits return to this rank or never leave a cycle.
    ///
    /// Reports that are not in `reports` are read from the store until `until`.
    fn follow_waits(
        &self,
        store: &dyn Store,
        query: &StatusQuery<'_>,
        roots: &[Rank],
        reports: &mut BTreeMap<Rank, Option<RankReport>>,
        until: Instant,
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
            let next = self.waits_of(store, rank, query.timeout, reports, until);
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

    /// The ranks for which `rank` has waited for at least half of `timeout`: those that its report names, and the
    /// members of its pending collectives that have not come to them, or have not answered. Empty if `rank` has not
    /// answered.
    fn waits_of(
        &self,
        store: &dyn Store,
        rank: Rank,
        timeout: Duration,
        reports: &mut BTreeMap<Rank, Option<RankReport>>,
        until: Instant,
    ) -> Vec<Rank> {
        let mut ask = |rank: Rank| {
            let report = reports.entry(rank);
            report
                .or_insert_with(|| self.report_of(store, rank, until))
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

    /// A rank's report, if the store has it by `until`.
    fn report_of(&self, store: &dyn Store, rank: Rank, until: Instant) -> Option<RankReport> {
        let key = self.key(rank);
        if Instant::now() >= until || !store.check(&[&key]).ok()? {
            return None;
        }
        // The key exists, so this does not wait.
        let report = store.get(&key, Duration::from_millis(1)).ok()?;
        serde_json::from_slice(&report).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::report::PendingCollective;
    use super::*;
    use crate::store::{HashStore, TcpStore};
    use rcomm_recorder::model::ProcessGroupStatus;
    use std::sync::Arc;

    fn query(members: &[Rank]) -> StatusQuery<'_> {
        StatusQuery {
            members,
            wire_id: 7,
            seq: 41,
            is_p2p: false,
            gone: &[],
            lost: &[],
            stopped: &[],
            waited_for: &[],
            timeout: Duration::from_secs(3),
        }
    }

    fn report(last: i64, phase: &str) -> RankReport {
        let status = ProcessGroupStatus {
            last_enqueued: last,
            ..ProcessGroupStatus::default()
        };
        RankReport {
            groups: BTreeMap::from([(wire_name(7), status)]),
            phase: phase.to_owned(),
            phase_ms: 6_100,
            step: -1,
            ..RankReport::default()
        }
    }

    fn exchange(rank: Rank, wait_time: Duration) -> StatusExchange {
        StatusExchange {
            rank,
            attempt: 0,
            alarm: 1,
            wait_time,
            read_time: Duration::from_secs(60),
        }
    }

    #[test]
    fn a_wait_for_a_rank_that_waits_for_another_is_followed_to_its_end() {
        let store = HashStore::new();
        let exchange = exchange(1, Duration::ZERO);
        let publish = |rank: Rank, waits: &[(Rank, u64)]| {
            let report = RankReport {
                waits: waits.iter().copied().collect(),
                ..report(40, "")
            };
            let bytes = serde_json::to_vec(&report).unwrap();
            store.set(&exchange.key(rank), &bytes).unwrap();
        };
        let ask = |waited_for: &[Rank]| {
            let query = StatusQuery {
                waited_for,
                ..query(&[0, 1])
            };
            exchange.collect(&store, &query)
        };
        publish(1, &[(0, 3_000)]);
        // A wait that has just begun is not why this rank waits for rank 0.
        publish(0, &[(2, 20)]);
        assert!(ask(&[0]).last_in_chain.is_empty());
        // Rank 3 has left no report, and is no member of the group.
        publish(0, &[(2, 2_900)]);
        publish(2, &[(3, 2_800)]);
        let replies = ask(&[0]);
        assert_eq!(
            replies.cause_of_wait(&[0]).map(|cause| cause.ranks),
            Some(&[3][..])
        );
        let hops = "; rank 0 waits for rank 2; rank 2 waits for rank 3";
        assert!(replies.text.ends_with(hops), "{}", replies.text);
        // A cycle has no end, with this rank or without it.
        publish(2, &[(1, 2_800)]);
        assert!(ask(&[0]).last_in_chain.is_empty());
        publish(2, &[(0, 2_800)]);
        assert!(ask(&[0]).last_in_chain.is_empty());
    }

    #[test]
    fn a_pending_collective_is_followed_to_the_members_that_have_not_come_to_it() {
        let store = HashStore::new();
        let exchange = exchange(1, Duration::ZERO);
        let publish = |rank: Rank, last_of_others: i64, waited_ms: u64| {
            let mut report = report(40, "");
            let status = ProcessGroupStatus {
                last_enqueued: last_of_others,
                ..ProcessGroupStatus::default()
            };
            report.groups.insert(wire_name(8), status);
            report.pending.push(PendingCollective {
                group: wire_name(8),
                seq: 78,
                members: vec![0, 2, 3],
                waited_ms,
            });
            let bytes = serde_json::to_vec(&report).unwrap();
            store.set(&exchange.key(rank), &bytes).unwrap();
        };
        let ask = || {
            let query = StatusQuery {
                waited_for: &[0],
                ..query(&[0, 1, 2, 3])
            };
            exchange.collect(&store, &query)
        };
        publish(2, 78, 2_900);
        // A collective that has just begun is not why this rank waits for rank 0.
        publish(0, 78, 20);
        assert!(ask().last_in_chain.is_empty());
        // Rank 3 has left no report.
        publish(0, 78, 2_900);
        assert_eq!(
            ask().cause_of_wait(&[0]).map(|cause| cause.ranks),
            Some(&[3][..])
        );
        // All have come: the operation of the other group is not why.
        publish(3, 78, 2_900);
        assert!(ask().last_in_chain.is_empty());
        // Rank 0 has come to the operation that timed out, so the members that have not are followed.
        let mut came = report(41, "");
        let both = ProcessGroupStatus {
            last_enqueued: 78,
            ..ProcessGroupStatus::default()
        };
        came.groups.insert(wire_name(8), both);
        let came = serde_json::to_vec(&came).unwrap();
        for rank in [0, 1] {
            store.set(&exchange.key(rank), &came).unwrap();
        }
        publish(2, 78, 2_900);
        store.delete(&exchange.key(3)).unwrap();
        assert_eq!(
            ask().cause_of_wait(&[0]).map(|cause| cause.ranks),
            Some(&[3][..])
        );
    }

    #[test]
    fn an_answer_does_not_show_whether_a_rank_has_come_to_a_message() {
        let store = HashStore::new();
        let exchange = exchange(0, Duration::ZERO);
        for rank in [0, 2] {
            let bytes = serde_json::to_vec(&report(18, "")).unwrap();
            store.set(&exchange.key(rank), &bytes).unwrap();
        }
        let ask = |members: &[Rank]| {
            let query = StatusQuery {
                is_p2p: true,
                ..query(members)
            };
            exchange.collect(&store, &query)
        };
        assert_eq!(
            ask(&[0, 2, 3]).cause_of_wait(&[]).map(|cause| cause.ranks),
            Some(&[3][..])
        );
        assert_eq!(ask(&[0, 2]).cause_of_wait(&[]), None);
    }

    #[test]
    fn arrived_and_absent_ranks_are_listed_in_one_line() {
        let members = [0, 1, 2, 3];
        let store = HashStore::new();
        let short = Duration::from_millis(20);
        for (rank, last, phase) in [(0, 41, ""), (1, 42, "backward"), (2, 40, "load data")] {
            let published = exchange(rank, short).publish(&store, &report(last, phase));
            published.expect("the store in memory failed");
        }
        assert_eq!(
            exchange(0, short).collect(&store, &query(&members)).text,
            "arrived: ranks 0, 1; not arrived: rank 2 (last collective here is #40, in phase \
             \"load data\" for 6.1 s); no answer: rank 3 (3 of 4 members answered)"
        );
        let gone = StatusQuery {
            gone: &[3],
            ..query(&members)
        };
        let answers = exchange(0, Duration::from_secs(60)).collect(&store, &gone);
        assert_eq!((answers.arrived, answers.absent), (vec![0, 1], vec![2, 3]));
        let answers = answers.text;
        assert!(answers.ends_with("; gone: rank 3"), "{answers}");
    }

    #[test]
    fn a_rank_to_which_a_connection_was_lost_is_asked_and_not_called_gone() {
        let store = HashStore::new();
        let members = [0, 1, 2, 3];
        for rank in [0, 1, 2] {
            let published = exchange(rank, Duration::ZERO).publish(&store, &report(41, ""));
            published.expect("the store in memory failed");
        }
        let lost = |lost: &[Rank]| {
            let query = StatusQuery {
                lost,
                ..query(&members)
            };
            let asks = exchange(0, Duration::from_secs(60));
            let began = Instant::now();
            let text = asks.collect(&store, &query).text;
            (text, began.elapsed() < Duration::from_secs(30))
        };
        let silent = "arrived: ranks 0, 1, 2; no answer: rank 3 (3 of 4 members answered)";
        assert_eq!(lost(&[2, 3]), (silent.to_owned(), true));
        let published = exchange(3, Duration::ZERO).publish(&store, &report(41, ""));
        published.expect("the store in memory failed");
        let all = "arrived: ranks 0, 1, 2, 3";
        assert_eq!(lost(&[2, 3]), (all.to_owned(), true));
    }

    #[test]
    fn the_answer_of_a_stopped_process_is_not_waited_for_but_read_if_it_is_there() {
        let store = HashStore::new();
        let members = [0, 1, 2, 3];
        let publish = |rank: Rank| {
            let published = exchange(rank, Duration::ZERO).publish(&store, &report(41, ""));
            published.expect("the store in memory failed");
        };
        [0, 1, 3].into_iter().for_each(publish);
        let ask = || {
            let query = StatusQuery {
                stopped: &[2, 3],
                ..query(&members)
            };
            let began = Instant::now();
            let replies = exchange(0, Duration::from_secs(60)).collect(&store, &query);
            (replies.text, began.elapsed() < Duration::from_secs(30))
        };
        // Rank 3 answered before it was stopped.
        let silent = "arrived: ranks 0, 1, 3; no answer: rank 2 (3 of 4 members answered)";
        assert_eq!(ask(), (silent.to_owned(), true));
    }

    #[test]
    fn four_thousand_ranks_are_asked_once_and_the_answers_are_passed_on() {
        let store: Arc<TcpStore> = TcpStore::host("127.0.0.1", 0, Duration::from_secs(60))
            .expect("no port on the loopback interface")
            .into();
        let members: Vec<Rank> = (0..4096).collect();
        let silent = [17, 18, 1_000, 4_095];
        for &rank in members.iter().filter(|rank| !silent.contains(rank)) {
            let last = if rank == 300 { 40 } else { 41 };
            let published = exchange(rank, Duration::ZERO).publish(&*store, &report(last, ""));
            published.expect("the store failed");
        }
        let first = exchange(5, Duration::from_millis(50))
            .collect(&*store, &query(&members))
            .text;
        assert!(first.starts_with("arrived: ranks 0, 1, 2, 3,"), "{first}");
        for expected in [
            " and 4075 more; not arrived: rank 300 (last collective here is #40)",
            "; no answer: ranks 17, 18, 1000, 4095 (4092 of 4096 members answered)",
        ] {
            assert!(first.contains(expected), "{first}");
        }
        // The second rank does not read the answers again: late ones change nothing.
        exchange(17, Duration::ZERO)
            .publish(&*store, &report(41, ""))
            .expect("the store failed");
        let second = exchange(6, Duration::from_secs(60))
            .collect(&*store, &query(&members))
            .text;
        assert_eq!(second, first);
        // A request about another operation gets a separate answer.
        let other = StatusQuery {
            seq: 42,
            ..query(&members)
        };
        let third = exchange(6, Duration::from_millis(50))
            .collect(&*store, &other)
            .text;
        assert!(third.starts_with("arrived: none;"), "{third}");
    }

    #[test]
    fn a_summary_accuses_no_rank_that_the_answers_themselves_would_not() {
        let store = HashStore::new();
        let members: Vec<Rank> = (0..100).collect();
        for &rank in members.iter().filter(|rank| ![6, 40].contains(rank)) {
            let published = exchange(rank, Duration::ZERO).publish(&store, &report(41, ""));
            published.expect("the store in memory failed");
        }
        let ask = |rank: Rank, is_p2p: bool, waited_for: &[Rank]| {
            let query = StatusQuery {
                is_p2p,
                waited_for,
                ..query(&members)
            };
            let replies = exchange(rank, Duration::ZERO).collect(&store, &query);
            let cause = replies.cause_of_wait(waited_for);
            cause.map(|cause| cause.ranks.to_vec())
        };
        // Rank 3 has answered, which does not show that it has come to the message: it stays the one that is named.
        assert_eq!([5, 7].map(|rank| ask(rank, true, &[3])), [None, None]);
        // Rank 3 has come to the collective of the same number. Rank 6 asks, so it has come, too.
        assert_eq!(ask(5, false, &[3]), Some(vec![6, 40]));
        assert_eq!(ask(7, false, &[3]), Some(vec![6, 40]));
        assert_eq!(ask(6, false, &[3]), Some(vec![40]));
    }

    #[test]
    fn answers_that_are_not_passed_on_are_reported_missing() {
        let store = HashStore::new();
        let members: Vec<Rank> = (0..100).collect();
        let asking = exchange(0, Duration::ZERO).key(format_args!("{}/41/asking", wire_name(7)));
        store.add(&asking, 1).expect("the store in memory failed");
        let second = StatusExchange {
            read_time: Duration::ZERO,
            ..exchange(1, Duration::from_millis(10))
        };
        let answers = second.collect(&store, &query(&members)).text;
        assert!(
            answers.starts_with("the answers of the 100 members were not passed on: key"),
            "{answers}"
        );
    }
}
