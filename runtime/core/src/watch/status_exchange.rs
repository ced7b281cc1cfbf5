//! The ranks' progress, published and read through the store after a fault.
//!
//! | key, below `rcomm/status/<attempt>/<alarm>` | holds | writer |
//! |---|---|---|
//! | `<rank>` | progress of this rank, in JSON | every rank |
//! | `<group>/<seq>/asking` | how many members have asked about this operation of a large group | each rank that asks |
//! | `<group>/<seq>` | the summary of the answers, as text | the first rank that asked |
//!
//! In a small group every member reads every answer. In a group of thousands that would be millions of reads
//! from one store within two seconds. So in a large group the first member that asks reads the answers, in
//! chunks, and publishes a summary for the rest.

use crate::op::error::Result;
use crate::store::{Store, which_are_set};
use rcomm_recorder::model::text;
use rcomm_recorder::model::{ProcessGroupStatus, Rank, RankStatus};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

/// The largest group in which every member reads all answers.
const SMALL_GROUP: usize = 64;
/// The most answers that are read in one call to the store.
const CHUNK: usize = 256;
/// The most ranks that an error lists by number.
const MAX_RANKS: usize = 16;

/// One rank's progress, as it publishes it.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct RankReport {
    /// The status of each group, by its `wire_id` in hexadecimal.
    groups: BTreeMap<String, ProcessGroupStatus>,
    phase: String,
    /// How long the program has been in `phase`, in ms.
    phase_ms: u64,
    /// The step that the program set last; -1 if it set none.
    step: i64,
}

impl RankReport {
    /// A report of these groups, by `wire_id`. `now_ms` is the wall clock, in ms since the epoch.
    pub(crate) fn new(
        groups: impl Iterator<Item = (u64, ProcessGroupStatus)>,
        now_ms: i64,
        status: RankStatus,
    ) -> Self {
        Self {
            groups: groups.map(|(id, status)| (wire_name(id), status)).collect(),
            phase_ms: u64::try_from(now_ms - status.phase_since_ns / 1_000_000).unwrap_or(0),
            phase: status.phase,
            step: status.step,
        }
    }
}

/// The operation whose members' status is requested.
pub(crate) struct StatusQuery<'a> {
    pub(crate) members: &'a [Rank],
    pub(crate) wire_id: u64,
    pub(crate) seq: u64,
    pub(crate) is_p2p: bool,
    /// Members whose processes are known to have ended: their answers are not waited for.
    pub(crate) gone: &'a [Rank],
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
    fn key(&self, what: impl std::fmt::Display) -> String {
        format!("rcomm/status/{}/{}/{what}", self.attempt, self.alarm)
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
    /// Until all members have answered, for about `wait_time` and `read_time` together at most, however many
    /// ranks there are.
    pub(crate) fn collect(&self, store: &dyn Store, query: &StatusQuery<'_>) -> StatusReplies {
        if query.members.len() <= SMALL_GROUP {
            return self.read_all(store, query);
        }
        let topic = self.key(format_args!("{}/{}", wire_name(query.wire_id), query.seq));
        match store.add(&format!("{topic}/asking"), 1) {
            Ok(1) => {
                let answers = self.read_all(store, query);
                // If this fails, the other members report that they have no summary.
                let _ = store.set(&topic, answers.text.as_bytes());
                answers
            }
            Ok(_) => match store.get(&topic, self.wait_time + self.read_time) {
                Ok(answers) => StatusReplies::text(String::from_utf8_lossy(&answers).into_owned()),
                Err(error) => StatusReplies::text(format!(
                    "what the {} members answered was not passed on: {error}",
                    query.members.len()
                )),
            },
            Err(error) => StatusReplies::text(format!(
                "the status of the other ranks is not known: {error}"
            )),
        }
    }

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
        // The result of the wait is not used: those answers that have arrived are read below.
        let _ = store.wait(&keys, self.wait_time);
        let until = Instant::now() + self.read_time;
        let came = which_are_set(store, &keys, until);
        let present: Vec<&str> = keys
            .iter()
            .zip(&came)
            .filter_map(|(key, came)| came.then_some(*key))
            .collect();
        let mut reports = present.chunks(CHUNK).flat_map(|keys| {
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
        for (rank, came) in ranks.into_iter().zip(came) {
            let value = if came { reports.next().flatten() } else { None };
            let report = value.and_then(|bytes| serde_json::from_slice(&bytes).ok());
            arrivals.add(query, rank, report);
        }
        StatusReplies {
            text: arrivals.to_text(query.is_p2p),
            arrived: arrivals.arrived.clone(),
            absent: arrivals.absent(),
        }
    }
}

/// The status of an operation's members.
#[derive(Debug, Default)]
pub(crate) struct StatusReplies {
    /// All of it, as text.
    pub(crate) text: String,
    /// Members that have issued the operation. Empty for messages, and if only the text of another member's
    /// summary was read.
    pub(crate) arrived: Vec<Rank>,
    /// Members that have not issued the operation, have not answered, or have ended. Empty if only the text
    /// of another member's summary was read.
    pub(crate) absent: Vec<Rank>,
}

impl StatusReplies {
    /// A status of which only the text is known.
    pub(crate) fn text(text: String) -> Self {
        Self {
            text,
            ..Self::default()
        }
    }
}

fn wire_name(wire_id: u64) -> String {
    format!("{wire_id:016x}")
}

/// The members of an operation, by whether they have arrived.
#[derive(Default)]
struct Arrivals {
    /// How many members there are.
    members: usize,
    arrived: Vec<Rank>,
    /// Members that have answered but not arrived (of a message: all that have answered), and their progress
    /// as text.
    missing: Vec<(Rank, String)>,
    /// Members that have not answered.
    silent: Vec<Rank>,
    /// Members whose processes have ended.
    gone: Vec<Rank>,
}

impl Arrivals {
    /// Adds a member by its answer, `None` if it has not answered.
    fn add(&mut self, query: &StatusQuery<'_>, rank: Rank, report: Option<RankReport>) {
        let Some(report) = report else {
            self.silent.push(rank);
            return;
        };
        let status = report.groups.get(&wire_name(query.wire_id));
        let last = status.map_or(-1, |status| status.last_enqueued);
        let seq = i64::try_from(query.seq).unwrap_or(i64::MAX);
        if !query.is_p2p && last >= seq {
            self.arrived.push(rank);
            return;
        }
        let mut place = match (status, last) {
            (None, _) => "has not made this group".to_owned(),
            (_, ..=0) => "has called no collective here yet".to_owned(),
            (_, last) => format!("last collective here is #{last}"),
        };
        if !report.phase.is_empty() {
            let lasted = text::duration(Duration::from_millis(report.phase_ms));
            let _ = write!(place, ", in phase {:?} for {lasted}", report.phase);
        }
        if report.step >= 0 {
            let _ = write!(place, ", in step {}", report.step);
        }
        self.missing.push((rank, place));
    }

    /// The members that are not known to have arrived, ascending.
    fn absent(&self) -> Vec<Rank> {
        let missing = self.missing.iter().map(|(rank, _)| rank);
        let all = missing.chain(&self.silent).chain(&self.gone);
        let mut all: Vec<Rank> = all.copied().collect();
        all.sort_unstable();
        all
    }

    fn to_text(&self, is_p2p: bool) -> String {
        let mut parts = Vec::new();
        if !is_p2p {
            let none = self.arrived.is_empty();
            parts.push(format!(
                "arrived: {}",
                if none {
                    "none".to_owned()
                } else {
                    list(&self.arrived)
                }
            ));
        }
        if !self.missing.is_empty() {
            let what = if is_p2p { "members" } else { "not arrived" };
            let mut text = format!("{what}: ");
            for (at, (rank, place)) in self.missing.iter().take(MAX_RANKS).enumerate() {
                let comma = if at == 0 { "" } else { ", " };
                let _ = write!(text, "{comma}rank {rank} ({place})");
            }
            if let Some(more) = self.missing.len().checked_sub(MAX_RANKS + 1) {
                let _ = write!(text, " and {} more", more + 1);
            }
            parts.push(text);
        }
        if !self.gone.is_empty() {
            parts.push(format!("gone: {}", list(&self.gone)));
        }
        if !self.silent.is_empty() {
            let answered = self.arrived.len() + self.missing.len();
            parts.push(format!(
                "no answer: {} ({answered} of {} members answered)",
                list(&self.silent),
                self.members
            ));
        }
        parts.join("; ")
    }
}

/// `rank 3`, `ranks 1, 2, 5`, or the first few and how many more.
fn list(ranks: &[Rank]) -> String {
    let shown: Vec<String> = ranks.iter().take(MAX_RANKS).map(Rank::to_string).collect();
    let mut text = format!(
        "rank{} {}",
        if ranks.len() == 1 { "" } else { "s" },
        shown.join(", ")
    );
    if ranks.len() > MAX_RANKS {
        let _ = write!(text, " and {} more", ranks.len() - MAX_RANKS);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{HashStore, TcpStore};
    use std::sync::Arc;

    fn query(members: &[Rank]) -> StatusQuery<'_> {
        StatusQuery {
            members,
            wire_id: 7,
            seq: 41,
            is_p2p: false,
            gone: &[],
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
    fn arrived_and_absent_ranks_are_listed_in_one_line() {
        let members = [0, 1, 2, 3];
        let store = HashStore::new();
        let short = Duration::from_millis(20);
        for (rank, last, phase) in [(0, 41, ""), (1, 42, "backward"), (2, 40, "load data")] {
            let published = exchange(rank, short).publish(&store, &report(last, phase));
            published.expect("a store in memory");
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
    fn four_thousand_ranks_are_asked_once_and_the_answers_are_passed_on() {
        let store: Arc<TcpStore> = TcpStore::host("127.0.0.1", 0, Duration::from_secs(60))
            .expect("a port on the loopback interface")
            .into();
        let members: Vec<Rank> = (0..4096).collect();
        let silent = [17, 18, 1_000, 4_095];
        for &rank in members.iter().filter(|rank| !silent.contains(rank)) {
            let last = if rank == 300 { 40 } else { 41 };
            let published = exchange(rank, Duration::ZERO).publish(&*store, &report(last, ""));
            published.expect("the store is there");
        }
        let first = exchange(5, Duration::from_millis(50))
            .collect(&*store, &query(&members))
            .text;
        assert!(first.starts_with("arrived: ranks 0, 1, 2, 3,"), "{first}");
        for published in [
            " and 4075 more; not arrived: rank 300 (last collective here is #40)",
            "; no answer: ranks 17, 18, 1000, 4095 (4092 of 4096 members answered)",
        ] {
            assert!(first.contains(published), "{first}");
        }
        // The second rank does not read the answers again: late ones change nothing.
        exchange(17, Duration::ZERO)
            .publish(&*store, &report(41, ""))
            .expect("the store is there");
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
    fn answers_that_are_not_passed_on_are_reported_missing() {
        let store = HashStore::new();
        let members: Vec<Rank> = (0..100).collect();
        let asking = exchange(0, Duration::ZERO).key(format_args!("{}/41/asking", wire_name(7)));
        store.add(&asking, 1).expect("a store in memory");
        let second = StatusExchange {
            read_time: Duration::ZERO,
            ..exchange(1, Duration::from_millis(10))
        };
        let answers = second.collect(&store, &query(&members)).text;
        assert!(
            answers.starts_with("what the 100 members answered was not passed on: key"),
            "{answers}"
        );
    }

    #[test]
    fn a_long_list_is_cut() {
        let ranks: Vec<Rank> = (0..20).collect();
        assert!(list(&ranks).ends_with("14, 15 and 4 more"));
        assert_eq!(list(&[3]), "rank 3");
    }
}
