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
use std::collections::BTreeMap;
use std::io::{self, Read as _};
use std::time::Instant;

/// The longest answer of a node, bytes.
const MOST_BYTES: u64 = 1 << 30;
/// The longest list of cursors that goes into an address; beyond it all is asked for.
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
        let looked = self
            .node
            .look(&self.agent, &url, self.token.as_deref(), deadline);
        match looked {
            Ok((observations, world_size)) => Ok(Poll {
                observations,
                world_size: Some(world_size),
                ..Poll::default()
            }),
            Err(why) => {
                self.url = None;
                if self.node.records.is_empty() {
                    return Err(SourceError::Unusable {
                        place: url,
                        reason: why,
                    });
                }
                let failed = |&(rank, part): &(Rank, u8)| Observation {
                    rank,
                    part,
                    liveness: Liveness::Unknown,
                    seen: Seen::Failed(format!("{url}: {why}")),
                };
                Ok(Poll {
                    observations: self.node.records.keys().map(failed).collect(),
                    ..Poll::default()
                })
            }
        }
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
    ) -> Result<(Vec<Observation>, u32), String> {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err("there was no time left to ask it".into());
        }
        let cursors: Vec<String> = self.records.values().map(|it| cursor(&it.head)).collect();
        let mut since = cursors.join(",");
        if since.len() > LONGEST_SINCE {
            since.clear();
        }
        let mut request = agent
            .get(format!("{}/api/v1/records", url.trim_end_matches('/')))
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
        self.take(&body)
    }

    /// Takes an answer in.
    fn take(&mut self, body: &[u8]) -> Result<(Vec<Observation>, u32), String> {
        let end = body.iter().position(|&byte| byte == b'\n');
        let (line, mut rest) = body.split_at(end.ok_or("its answer has no head")?);
        rest = &rest[1..];
        let head: Head = serde_json::from_slice(line)
            .map_err(|error| format!("its answer makes no sense: {error}"))?;
        if head.schema != SCHEMA {
            return Err(format!("it speaks {:?}, expected {SCHEMA:?}", head.schema));
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
