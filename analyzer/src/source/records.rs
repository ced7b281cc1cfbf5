//! Records as one `rcomm-web` tells them to another, or to a terminal: all of them, or what changed.
//!
//! Whoever asks tells for each record the first id that it wants again: everything before is settled and
//! known. So an answer is as large as what happened in between, however large the rings are. It is one
//! line of JSON ([`RecordsHead`]), then those records, as dumps in JSON.

use super::{Liveness, Observation, Seen};
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::{Dump, FollowedDump};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The longest list of cursors that goes into an address; beyond it all is asked for.
const LONGEST_SINCE: usize = 7 * 1024;

/// Name and version of the form.
pub const RECORDS_SCHEMA: &str = "rcomm.records/1";

/// What follows in the body.
#[derive(Debug, Serialize, Deserialize)]
pub struct RecordsHead {
    /// [`RECORDS_SCHEMA`].
    pub schema: String,
    /// Ranks of the job.
    pub world_size: usize,
    /// Every record, in the order of the dumps that follow.
    pub records: Vec<RecordHead>,
}

/// One rank's record.
#[derive(Debug, Serialize, Deserialize)]
pub struct RecordHead {
    /// Whose it is.
    pub rank: Rank,
    /// Which of several recorders of one process.
    pub part: u8,
    /// Which process wrote it: what was known of another one is to be forgotten.
    pub attempt: u32,
    /// See `attempt`.
    pub pid: u32,
    /// `null` = unknown.
    pub alive: Option<bool>,
    /// Why the rank does not answer, where it does not.
    pub failure: Option<String>,
    /// The record has all that the rank still has; else it begins at the id that was asked for.
    pub whole: bool,
    /// The oldest operation that the rank still has; older ones are to be forgotten.
    pub oldest: u64,
    /// The first record id to ask for the next time.
    pub next: u64,
    /// Length of the dump, bytes; 0 if nothing changed.
    pub bytes: usize,
}

/// The records of one server, kept current by what it tells.
#[derive(Default)]
pub struct RecordsFollower {
    records: BTreeMap<(Rank, u8), Record>,
}

struct Record {
    head: RecordHead,
    followed: FollowedDump,
}

impl RecordsFollower {
    /// What to ask for, as the value of `since`: nothing is everything.
    pub fn since(&self) -> String {
        let cursors: Vec<String> = self.records.values().map(|it| cursor(&it.head)).collect();
        let mut since = cursors.join(",");
        if since.len() > LONGEST_SINCE {
            since.clear();
        }
        since
    }

    /// Each record known: its rank, and which of several recorders of one process.
    pub fn known(&self) -> impl Iterator<Item = (Rank, u8)> + '_ {
        self.records.keys().copied()
    }

    /// Takes an answer in: what was seen of each record, and how many ranks the job has.
    ///
    /// # Errors
    ///
    /// What is wrong with the answer. What was known stays known.
    pub fn take(&mut self, body: &[u8]) -> Result<(Vec<Observation>, u32), String> {
        let end = body.iter().position(|&byte| byte == b'\n');
        let (line, mut rest) = body.split_at(end.ok_or("its answer has no head")?);
        rest = &rest[1..];
        let head: RecordsHead = serde_json::from_slice(line)
            .map_err(|error| format!("its answer makes no sense: {error}"))?;
        if head.schema != RECORDS_SCHEMA {
            return Err(format!(
                "it speaks {:?}, expected {RECORDS_SCHEMA:?}",
                head.schema
            ));
        }
        let mut observations = Vec::new();
        let mut present = Vec::new();
        for record in head.records {
            let (bytes, after) = rest
                .split_at_checked(record.bytes)
                .ok_or("its answer is shorter than it says")?;
            rest = after;
            present.push((record.rank, record.part));
            observations.push(self.observe(record, bytes)?);
        }
        self.records.retain(|key, _| present.contains(key));
        let world_size = u32::try_from(head.world_size).unwrap_or(u32::MAX);
        Ok((observations, world_size))
    }

    fn observe(&mut self, head: RecordHead, bytes: &[u8]) -> Result<Observation, String> {
        let key = (head.rank, head.part);
        let liveness = match head.alive {
            None => Liveness::Unknown,
            Some(true) => Liveness::Alive,
            Some(false) => Liveness::Dead,
        };
        let seen = match &head.failure {
            Some(why) => Seen::Failed(why.clone()),
            None => {
                let (newer, _) = Dump::read(bytes)
                    .map_err(|error| format!("the record of rank {} is none: {error}", key.0))?;
                self.follow(key, head, newer)
            }
        };
        Ok(Observation {
            rank: key.0,
            part: key.1,
            liveness,
            seen,
        })
    }

    fn follow(&mut self, key: (Rank, u8), head: RecordHead, newer: Dump) -> Seen {
        let same_process = |record: &&mut Record| {
            (record.head.attempt, record.head.pid) == (head.attempt, head.pid)
        };
        let known = self.records.get_mut(&key).filter(same_process);
        let Some(record) = known.filter(|_| !head.whole) else {
            let followed = FollowedDump::of(newer);
            let dump = followed.dump().clone();
            self.records.insert(key, Record { head, followed });
            return Seen::Changed(Box::new(dump));
        };
        let heartbeat_ns = newer
            .status
            .as_ref()
            .map_or(0, |status| status.heartbeat_ns);
        let as_of_ns = newer.identity.dump_time_ns;
        let before = record.followed.dump();
        let told = |dump: &Dump| {
            let status = dump.status.as_ref();
            let status = status.map(|s| (s.phase.clone(), s.phase_since_ns, s.step, s.dropped));
            (status, dump.groups.len(), dump.identity.reason.clone())
        };
        // Pending operations come again every time: only if one of them moved is there something new.
        let moved = newer.entries.iter().any(|entry| {
            let at = before
                .entries
                .binary_search_by_key(&entry.record_id, |it| it.record_id);
            at.map_or(true, |at| {
                let old = &before.entries[at];
                (old.state, old.retired) != (entry.state, entry.retired)
            })
        });
        let same = !moved && told(before) == told(&newer);
        let newest = newer.entries.last().or(before.entries.last());
        let held = newest.map(|entry| (entry.record_id + 1).saturating_sub(head.oldest));
        record.followed.take_in(newer, held);
        record.head = head;
        if record.followed.is_overgrown() {
            // Asked for whole the next time.
            record.head.next = 0;
        }
        if same {
            Seen::Unchanged {
                heartbeat_ns,
                as_of_ns,
            }
        } else {
            Seen::Changed(Box::new(record.followed.dump().clone()))
        }
    }
}

/// What a node is told of a record that is known.
fn cursor(head: &RecordHead) -> String {
    let RecordHead {
        rank,
        part,
        attempt,
        pid,
        next,
        ..
    } = head;
    format!("{rank}.{part}.{attempt}.{pid}:{next}")
}
