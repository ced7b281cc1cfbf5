//! Follows the records that an `rcomm-web` serves to another one or to a terminal, and defines their format.
//!
//! For each record, the client states the first id that it needs. It has all operations before that one, and they no
//! longer change. So the size of an answer depends on the changes and not on the size of the rings. An answer is one
//! line of JSON ([`RecordsHead`]), followed by the records as dumps in JSON.

use crate::live::source::{Liveness, Observation, Seen, has_same_facts};
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::{Dump, FollowedDump};
use rcomm_verdict::LaterAttempt;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

/// The longest list of cursors in a URL, bytes.
const LONGEST_SINCE: usize = 7 * 1024;

/// Name and version of the format.
pub const RECORDS_SCHEMA: &str = "rcomm.records/1";

/// The first line of an answer: the records that follow in the body.
#[derive(Debug, Serialize, Deserialize)]
pub struct RecordsHead {
    /// [`RECORDS_SCHEMA`].
    pub schema: String,
    /// The number of ranks of the job; 0 if nothing states it.
    pub world_size: usize,
    /// A later attempt of the job, if its processes were seen on the server's node and have left no record yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub later_attempt: Option<LaterAttempt>,
    /// Every record, in the order of the dumps that follow.
    pub records: Vec<RecordHead>,
}

/// The head of one record.
#[derive(Debug, Serialize, Deserialize)]
pub struct RecordHead {
    /// The rank of the record.
    pub rank: Rank,
    /// The index of the record's recorder among those of one process, from 0.
    pub part: u8,
    /// The attempt of the job. With `pid` it identifies the process: data of another process must be dropped.
    pub attempt: u32,
    /// The process id; see `attempt`.
    pub pid: u32,
    /// Whether the process is alive; `null` = unknown.
    pub alive: Option<bool>,
    /// Why the rank does not answer; `null` if it does.
    pub failure: Option<String>,
    /// Whether the record is complete; else it begins at the requested id.
    pub whole: bool,
    /// The oldest record id that the rank still has; older ones must be dropped.
    pub oldest: u64,
    /// The first record id to request the next time. The follower sets it to 0 to request the complete record.
    pub next: u64,
    /// A number that changes with the groups of the record. If the request has the same number, the groups of the dump
    /// are sent without their ranks.
    #[serde(default)]
    pub groups: u64,
    /// The length of the dump, bytes; 0 if the rank does not answer.
    pub bytes: usize,
}

/// The records of one server, kept current with its answers.
#[derive(Default)]
pub struct RecordsFollower {
    records: BTreeMap<(Rank, u8), FollowedRecord>,
    later_attempt: Option<LaterAttempt>,
}

struct FollowedRecord {
    head: RecordHead,
    followed: FollowedDump,
}

/// One request for changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordsQuestion {
    /// The ranks of this request.
    pub ranks: RangeInclusive<Rank>,
    /// The value of the URL's parameter `since`: the cursors of the known records.
    pub since: String,
}

impl RecordsQuestion {
    /// The value of the URL's parameter `ranks`.
    pub fn ranks_text(&self) -> String {
        format!("{}-{}", self.ranks.start(), self.ranks.end())
    }
}

impl RecordsFollower {
    /// The requests to send. The ranges of ranks cover all ranks, and each list of cursors fits into a URL.
    pub fn questions(&self) -> Vec<RecordsQuestion> {
        let mut questions = Vec::new();
        let (mut first, mut since) = (0, String::new());
        for (&(rank, _), record) in &self.records {
            // A record without a cursor is sent completely.
            if record.head.next == 0 {
                continue;
            }
            let cursor = cursor(&record.head);
            if since.len() + cursor.len() >= LONGEST_SINCE && rank > first {
                questions.push(RecordsQuestion {
                    ranks: first..=rank - 1,
                    since: std::mem::take(&mut since),
                });
                first = rank;
            }
            if !since.is_empty() {
                since.push(',');
            }
            since.push_str(&cursor);
        }
        questions.push(RecordsQuestion {
            ranks: first..=Rank::MAX,
            since,
        });
        questions
    }

    /// The rank and the part of each known record.
    pub fn known(&self) -> impl Iterator<Item = (Rank, u8)> + '_ {
        self.records.keys().copied()
    }

    /// A later attempt of the job, by the newest answer.
    pub fn later_attempt(&self) -> Option<&LaterAttempt> {
        self.later_attempt.as_ref()
    }

    /// Adds a failure for each known record that has no observation, after a request to the server failed.
    pub fn break_off(&self, observations: &mut Vec<Observation>, why: &str) {
        let observed = observations.iter();
        let answered: BTreeSet<(Rank, u8)> = observed
            .map(|observation| (observation.rank, observation.part))
            .collect();
        let silent = self.known().filter(|key| !answered.contains(key));
        observations.extend(silent.map(|(rank, part)| Observation {
            rank,
            part,
            liveness: Liveness::Unknown,
            seen: Seen::Failed(why.to_owned()),
        }));
    }

    /// Takes an answer: adds an observation for each record and returns the number of ranks of the job, 0 if nothing
    /// states it.
    ///
    /// # Errors
    ///
    /// If the answer is not valid, a sentence with the reason. The records before the invalid part are taken, the other
    /// known ones remain as they were.
    pub fn take(
        &mut self,
        question: &RecordsQuestion,
        body: &[u8],
        observations: &mut Vec<Observation>,
    ) -> Result<u32, String> {
        let end = body.iter().position(|&byte| byte == b'\n');
        let (line, mut rest) = body.split_at(end.ok_or("its answer has no head")?);
        rest = &rest[1..];
        let head: RecordsHead = serde_json::from_slice(line)
            .map_err(|error| format!("its answer is invalid: {error}"))?;
        if head.schema != RECORDS_SCHEMA {
            return Err(format!(
                "its records have the schema {:?}, but this build reads {RECORDS_SCHEMA:?}",
                head.schema
            ));
        }
        self.later_attempt = head.later_attempt;
        let mut present = BTreeSet::new();
        for record in head.records {
            let (bytes, after) = rest
                .split_at_checked(record.bytes)
                .ok_or("its answer is shorter than announced")?;
            rest = after;
            present.insert((record.rank, record.part));
            observations.push(self.observe(record, bytes));
        }
        self.records
            .retain(|key, _| !question.ranks.contains(&key.0) || present.contains(key));
        Ok(u32::try_from(head.world_size).unwrap_or(u32::MAX))
    }

    /// Takes one record of an answer.
    fn observe(&mut self, head: RecordHead, bytes: &[u8]) -> Observation {
        let (rank, part) = (head.rank, head.part);
        let liveness = match head.alive {
            None => Liveness::Unknown,
            Some(true) => Liveness::Alive,
            Some(false) => Liveness::Dead,
        };
        let seen = match &head.failure {
            Some(why) => Seen::Failed(why.clone()),
            None => match Dump::read(bytes) {
                Ok((newer, _)) => self.follow((rank, part), head, newer),
                Err(error) => Seen::Failed(format!("invalid record: {error}")),
            },
        };
        Observation {
            rank,
            part,
            liveness,
            seen,
        }
    }

    /// Takes a record of a rank that answers: a complete one replaces the known one, else its changes are added.
    fn follow(&mut self, key: (Rank, u8), head: RecordHead, mut newer: Dump) -> Seen {
        let is_same_process = |record: &&mut FollowedRecord| {
            (record.head.attempt, record.head.pid) == (head.attempt, head.pid)
        };
        let known = self.records.get_mut(&key).filter(is_same_process);
        let Some(record) = known.filter(|_| !head.whole) else {
            let followed = FollowedDump::of(newer);
            let dump = followed.dump().clone();
            self.records.insert(key, FollowedRecord { head, followed });
            return Seen::Changed(Box::new(dump));
        };
        let heartbeat_ns = newer
            .status
            .as_ref()
            .map_or(0, |status| status.heartbeat_ns);
        let as_of_ns = newer.identity.dump_time_ns;
        let before = record.followed.dump();
        // The members of unchanged groups are not sent again.
        for group in &mut newer.groups {
            let info = &mut group.info;
            let mut groups = before.groups.iter();
            let known = groups.find(|group| group.info.id == info.id);
            if let Some(known) = known.filter(|_| info.ranks.is_empty()) {
                info.ranks.clone_from(&known.info.ranks);
            }
        }
        // Pending operations are sent every time, so an operation is a change only if it is new or its state differs.
        let has_changed = newer.entries.iter().any(|entry| {
            let index = before
                .entries
                .binary_search_by_key(&entry.record_id, |old| old.record_id);
            index.map_or(true, |index| {
                let old = &before.entries[index];
                (old.state, old.retired) != (entry.state, entry.retired)
            })
        });
        let is_unchanged =
            !has_changed && before.groups == newer.groups && has_same_facts(before, &newer);
        let newest = newer.entries.last().or(before.entries.last());
        let held_by_rank = newest.map(|entry| (entry.record_id + 1).saturating_sub(head.oldest));
        record.followed.take_in(newer, held_by_rank);
        record.head = head;
        if record.followed.is_overgrown() {
            // Request the complete record the next time.
            record.head.next = 0;
        }
        if is_unchanged {
            Seen::Unchanged {
                heartbeat_ns,
                as_of_ns,
            }
        } else {
            Seen::Changed(Box::new(record.followed.dump().clone()))
        }
    }
}

/// The cursor of a known record: process, first id to request, and number of the groups.
fn cursor(head: &RecordHead) -> String {
    let RecordHead {
        rank,
        part,
        attempt,
        pid,
        next,
        groups,
        ..
    } = head;
    format!("{rank}.{part}.{attempt}.{pid}:{next}:{groups}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcomm_recorder::model::{Failure, FailureKind};

    fn head(rank: Rank, next: u64, bytes: usize) -> RecordHead {
        RecordHead {
            rank,
            part: 0,
            attempt: 0,
            pid: 7,
            alive: Some(true),
            failure: None,
            whole: next <= 1,
            oldest: 1,
            next,
            groups: 5,
            bytes,
        }
    }

    fn answer(records: Vec<RecordHead>, body: &[u8]) -> Vec<u8> {
        let head = RecordsHead {
            schema: RECORDS_SCHEMA.into(),
            world_size: 2,
            later_attempt: None,
            records,
        };
        let mut answer = serde_json::to_vec(&head).expect("the value can be written as JSON");
        answer.push(b'\n');
        answer.extend(body);
        answer
    }

    fn dump(rank: Rank) -> Vec<u8> {
        let mut dump = Dump::default();
        dump.identity.rank = Some(rank);
        dump.to_json()
    }

    #[test]
    fn an_invalid_record_fails_alone_and_an_invalid_answer_changes_nothing() {
        let mut follower = RecordsFollower::default();
        let question = follower.questions().remove(0);
        assert_eq!(
            (question.ranks_text(), &*question.since),
            ("0-4294967295".into(), "")
        );
        let good = dump(0);
        let records = vec![head(0, 1, good.len()), head(1, 1, 7)];
        let body = [&good[..], b"garbage"].concat();
        let mut taken = Vec::new();
        let size = follower.take(&question, &answer(records, &body), &mut taken);
        assert_eq!(size, Ok(2));
        assert!(matches!(taken[0].seen, Seen::Changed(_)));
        assert!(matches!(&taken[1].seen, Seen::Failed(why) if why.contains("invalid record")));
        assert_eq!(follower.known().collect::<Vec<_>>(), [(0, 0)]);
        let short = answer(vec![head(0, 1, 900)], b"short");
        let other = br#"{"schema": "rcomm.records/9", "world_size": 2, "records": []}"#;
        let other = [&other[..], b"\n"].concat();
        for (body, part) in [
            (&b"<html>"[..], "no head"),
            (b"<html>\n", "is invalid"),
            (&other, "rcomm.records/9"),
            (&short, "shorter than announced"),
        ] {
            let error = follower.take(&question, body, &mut taken).expect_err(part);
            assert!(error.contains(part), "{error}");
            assert_eq!(follower.known().count(), 1);
        }
        let mut observations = Vec::new();
        follower.break_off(&mut observations, "it is gone");
        assert!(matches!(&observations[0].seen, Seen::Failed(why) if why == "it is gone"));
    }

    #[test]
    fn a_failure_and_an_end_without_a_new_operation_are_changes() {
        let mut follower = RecordsFollower::default();
        let question = follower.questions().remove(0);
        let mut newest = Dump::default();
        newest.identity.rank = Some(0);
        newest.identity.pid = 7;
        let mut seen = |dump: &Dump, whole: bool| {
            let body = dump.to_json();
            let head = RecordHead {
                whole,
                ..head(0, 1, body.len())
            };
            let mut taken = Vec::new();
            let answer = answer(vec![head], &body);
            let size = follower.take(&question, &answer, &mut taken);
            assert_eq!(size, Ok(2));
            taken.remove(0).seen
        };
        seen(&newest, true);
        assert!(matches!(seen(&newest, false), Seen::Unchanged { .. }));
        let failure = Failure::new(FailureKind::PeerGone, &[1], 0, "its connection ended");
        newest.failures.push(failure);
        assert!(matches!(seen(&newest, false), Seen::Changed(dump) if dump.failures.len() == 1));
        newest.closed_ns = 9;
        assert!(matches!(seen(&newest, false), Seen::Changed(dump) if dump.closed_ns == 9));
        assert!(matches!(seen(&newest, false), Seen::Unchanged { .. }));
    }

    #[test]
    fn a_long_list_of_cursors_is_split_into_ranges_that_cover_all_ranks() {
        let mut follower = RecordsFollower::default();
        let question = follower.questions().remove(0);
        let body: Vec<u8> = (0..2_000).flat_map(dump).collect();
        let heads = (0..2_000).map(|rank| {
            let mut head = head(rank, 1, dump(rank).len());
            head.next = 123_456_789;
            head
        });
        let answer = answer(heads.collect(), &body);
        follower
            .take(&question, &answer, &mut Vec::new())
            .expect("the answer is valid");
        let questions = follower.questions();
        assert!(questions.len() > 2);
        let mut next = 0;
        for question in &questions {
            assert!(question.since.len() <= LONGEST_SINCE);
            assert_eq!(*question.ranks.start(), next);
            next = question.ranks.end().wrapping_add(1);
        }
        assert_eq!(next, 0, "the last range ends at the largest rank");
    }
}
