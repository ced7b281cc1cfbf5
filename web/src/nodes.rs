//! A collector: the records of a whole job, from the instances of this program on its nodes.
//!
//! Every node is a source of its own, asked on a thread of its own for what changed since it was asked
//! last. So a node that is dead or slow is its own failure: its ranks fall silent, the others go on. An
//! answer is as large as what happened in between, so a round costs a small message a rank.

use crate::api::records::{Head, RecordHead, SCHEMA};
use crate::discovery::{Nodes, Place};
use rcomm_analyzer::source::{Liveness, Observation, Poll, Seen, Source, SourceError};
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::{Dump, FollowedDump};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read as _};
use std::ops::RangeInclusive;
use std::time::Instant;

/// The longest answer of a node, bytes.
const MOST_BYTES: u64 = 1 << 30;
/// The longest list of cursors that goes into an address, bytes.
const LONGEST_SINCE: usize = 7 * 1024;

/// One node's part of a job. See the module.
pub struct NodeSource {
    place: Place,
    /// Where it was found last; `None` = to be looked up.
    url: Option<String>,
    token: Option<String>,
    agent: ureq::Agent,
    node: Node,
}

impl NodeSource {
    /// A source for each of these nodes, which want this token.
    ///
    /// # Blocking
    ///
    /// Until a name is looked up, or the job's store has answered: five seconds at most.
    ///
    /// # Errors
    ///
    /// If it stands for nothing.
    pub fn all(nodes: Nodes, token: Option<&str>) -> io::Result<Vec<Box<dyn Source>>> {
        let places = Place::all(nodes)?;
        let source = |place| -> Box<dyn Source> {
            let config = ureq::Agent::config_builder()
                .http_status_as_error(false)
                .max_redirects(0)
                .build();
            Box::new(Self {
                place,
                url: None,
                token: token.map(str::to_owned),
                agent: config.into(),
                node: Node::default(),
            })
        };
        Ok(places.into_iter().map(source).collect())
    }
}

impl Source for NodeSource {
    fn name(&self) -> String {
        self.place.name()
    }

    fn poll(&mut self, deadline: Instant) -> Result<Poll, SourceError> {
        let url = match &self.url {
            Some(url) => url.clone(),
            None => {
                let url = self.place.url().map_err(|source| SourceError::Io {
                    place: self.name(),
                    source,
                })?;
                self.url.insert(url).clone()
            }
        };
        let mut observations = Vec::new();
        let token = self.token.as_deref();
        let looked = (self.node).look(&self.agent, &url, token, deadline, &mut observations);
        let world_size = match looked {
            Ok(world_size) => Some(world_size),
            Err(why) => {
                self.url = None;
                if self.node.records.is_empty() {
                    return Err(SourceError::Unusable {
                        place: url,
                        reason: why,
                    });
                }
                // What was told before it broke off is told.
                let told: BTreeSet<(Rank, u8)> =
                    observations.iter().map(|it| (it.rank, it.part)).collect();
                let untold = self.node.records.keys().filter(|key| !told.contains(key));
                observations.extend(untold.map(|&(rank, part)| Observation {
                    rank,
                    part,
                    liveness: Liveness::Unknown,
                    seen: Seen::Failed(format!("{url}: {why}")),
                }));
                None
            }
        };
        Ok(Poll {
            observations,
            world_size,
            ..Poll::default()
        })
    }
}

/// One node, and what it told last.
#[derive(Default)]
struct Node {
    records: BTreeMap<(Rank, u8), Record>,
}

struct Record {
    head: RecordHead,
    followed: FollowedDump,
}

impl Node {
    fn look(
        &mut self,
        agent: &ureq::Agent,
        url: &str,
        token: Option<&str>,
        deadline: Instant,
        observations: &mut Vec<Observation>,
    ) -> Result<u32, String> {
        let mut world_size = 0;
        for (ranks, since) in self.questions() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err("there was no time left to ask it".into());
            }
            let mut request = agent
                .get(format!("{}/api/v1/records", url.trim_end_matches('/')))
                .query("ranks", format!("{}-{}", ranks.start(), ranks.end()))
                .query("since", &since)
                .config()
                .timeout_global(Some(left))
                .build();
            if let Some(token) = token {
                request = request.header("authorization", format!("Bearer {token}"));
            }
            let mut answer = request.call().map_err(|error| error.to_string())?;
            match answer.status().as_u16() {
                200 => {}
                401 => return Err("it refused the token".into()),
                503 => return Err("it has not looked at its records yet".into()),
                status => return Err(format!("it answered with HTTP status {status}")),
            }
            let mut body = Vec::new();
            let reader = answer.body_mut().as_reader();
            let read = reader.take(MOST_BYTES).read_to_end(&mut body);
            read.map_err(|error| format!("its answer broke off: {error}"))?;
            let size = self.take(&ranks, &body, observations)?;
            world_size = size.max(world_size);
        }
        Ok(world_size)
    }

    /// What to ask for, so that each list of cursors fits into an address: ranges that leave out no rank.
    fn questions(&self) -> Vec<(RangeInclusive<Rank>, String)> {
        let mut questions = Vec::new();
        let (mut first, mut since) = (0, String::new());
        for (&(rank, _), record) in &self.records {
            // Without a cursor it is told whole.
            if record.head.next == 0 {
                continue;
            }
            let cursor = cursor(&record.head);
            if since.len() + cursor.len() >= LONGEST_SINCE && rank > first {
                questions.push((first..=rank - 1, std::mem::take(&mut since)));
                first = rank;
            }
            if !since.is_empty() {
                since.push(',');
            }
            since.push_str(&cursor);
        }
        questions.push((first..=Rank::MAX, since));
        questions
    }

    /// Takes in an answer about these ranks; returns how many the job has.
    fn take(
        &mut self,
        asked: &RangeInclusive<Rank>,
        body: &[u8],
        observations: &mut Vec<Observation>,
    ) -> Result<u32, String> {
        let end = body.iter().position(|&byte| byte == b'\n');
        let (line, mut rest) = body.split_at(end.ok_or("its answer has no head")?);
        rest = &rest[1..];
        let head: Head = serde_json::from_slice(line)
            .map_err(|error| format!("its answer makes no sense: {error}"))?;
        if head.schema != SCHEMA {
            return Err(format!("it speaks {:?}, expected {SCHEMA:?}", head.schema));
        }
        let mut present = BTreeSet::new();
        for record in head.records {
            let (bytes, after) = rest
                .split_at_checked(record.bytes)
                .ok_or("its answer is shorter than it says")?;
            rest = after;
            present.insert((record.rank, record.part));
            observations.push(self.observe(record, bytes));
        }
        self.records
            .retain(|key, _| !asked.contains(&key.0) || present.contains(key));
        Ok(u32::try_from(head.world_size).unwrap_or(u32::MAX))
    }

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
                Err(error) => Seen::Failed(format!("what its node tells is no record: {error}")),
            },
        };
        Observation {
            rank,
            part,
            liveness,
            seen,
        }
    }

    fn follow(&mut self, key: (Rank, u8), head: RecordHead, mut newer: Dump) -> Seen {
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
        // Members that did not change are not told again.
        for group in &mut newer.groups {
            let info = &mut group.info;
            let known = before.groups.iter().find(|it| it.info.id == info.id);
            if let Some(known) = known.filter(|_| info.ranks.is_empty()) {
                info.ranks.clone_from(&known.info.ranks);
            }
        }
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
        groups,
        ..
    } = head;
    format!("{rank}.{part}.{attempt}.{pid}:{next}:{groups}")
}
