//! Serves the records of this node, or their changes, to a collector.
//!
//! A rank has one dump for each of its recorders. For each dump the collector sends the first record id that it still
//! needs; the collector has all earlier entries, and they have ended. So an answer holds only the later entries,
//! regardless of the size of the rings. The members of groups are sent again only if they changed, the other tables
//! always. The answer is one line of JSON that lists the dumps, followed by the dumps as JSON.

use crate::api::app_state::AppState;
use crate::http::error::Refusal;
use axum::extract::{Query, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use rcomm_analyzer::source::{Liveness, RECORDS_SCHEMA, RecordHead, RecordsHead};
use rcomm_analyzer::{RankView, Snapshot};
use rcomm_recorder::model::{Entry, EntryState, Rank};
use rcomm_recorder::publish::{Dump, DumpGroup};
use serde::Deserialize;
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::RangeInclusive;

#[derive(Debug, Deserialize)]
pub(crate) struct RecordsQuery {
    /// `rank.part.attempt.pid:next:groups` for each dump that the collector has, separated by commas: `part` is the
    /// index of the dump among those of its rank; `next` and `groups` are those of [`RecordHead`]. `:groups` is
    /// optional.
    #[serde(default)]
    since: String,
    /// `first-last`: only the dumps of these ranks, so that `since` fits into a URI.
    ranks: Option<String>,
}

/// Rank, index of the dump among those of its rank, attempt, and process id.
type CursorKey = (Rank, u8, u32, u32);

/// What the collector has of a dump: `next` is the first id that it still needs, `groups` the hash of the groups that
/// it has.
#[derive(Clone, Copy, Debug)]
struct Cursor {
    next: u64,
    groups: Option<u64>,
}

/// Parses `first-last`; `None` if the text has another form.
fn range(ranks: &str) -> Option<RangeInclusive<Rank>> {
    let (first, last) = ranks.split_once('-')?;
    Some(first.parse().ok()?..=last.parse().ok()?)
}

/// Parses `since`. Invalid cursors are left out, so their dumps are sent whole.
fn parse_since(since: &str) -> HashMap<CursorKey, Cursor> {
    since
        .split(',')
        .filter_map(|cursor| {
            let (key, known) = cursor.split_once(':')?;
            let (next, groups) = match known.split_once(':') {
                Some((next, groups)) => (next, Some(groups.parse().ok()?)),
                None => (known, None),
            };
            let mut parts = key.split('.');
            let key = (
                parts.next()?.parse().ok()?,
                parts.next()?.parse().ok()?,
                parts.next()?.parse().ok()?,
                parts.next()?.parse().ok()?,
            );
            let next = next.parse().ok()?;
            Some((key, Cursor { next, groups }))
        })
        .collect()
}

pub(crate) async fn records(
    State(app): State<AppState>,
    Query(wanted): Query<RecordsQuery>,
) -> Result<Response, Refusal> {
    let snapshot = app.store.newest().ok_or(Refusal::NotYet)?;
    let ranks = match &wanted.ranks {
        None => 0..=Rank::MAX,
        Some(text) => range(text).ok_or_else(|| {
            Refusal::Query(format!(
                "`ranks` is {text:?}, expected two ranks as in 0-127"
            ))
        })?,
    };
    let body =
        tokio::task::spawn_blocking(move || encode(&snapshot, &ranks, &parse_since(&wanted.since)));
    let body = body.await.map_err(|_| Refusal::Stopping)?;
    Ok(([(header::CONTENT_TYPE, "application/octet-stream")], body).into_response())
}

/// The answer: the head, and the dumps of the wanted ranks without what the collector has.
fn encode(
    snapshot: &Snapshot,
    ranks: &RangeInclusive<Rank>,
    known: &HashMap<CursorKey, Cursor>,
) -> Vec<u8> {
    let mut bodies = Vec::new();
    let mut head = RecordsHead {
        schema: RECORDS_SCHEMA.to_owned(),
        world_size: match snapshot.report.input.may_have_more {
            true => 0,
            false => snapshot.ranks.len(),
        },
        later_attempt: snapshot.later_attempt.clone(),
        records: Vec::new(),
    };
    for view in snapshot
        .ranks
        .iter()
        .filter(|view| ranks.contains(&view.rank))
    {
        for (part, dump) in (0..).zip(&view.dumps) {
            let (record, body) = head_and_body(view, part, dump, known);
            head.records.push(record);
            bodies.extend(body);
        }
    }
    // Plain data always has a JSON form.
    let mut body = serde_json::to_vec(&head).unwrap_or_default();
    body.push(b'\n');
    body.extend(bodies);
    body
}

/// The head of a dump and, as JSON, the dump without the entries that the collector has. The JSON is empty if the rank
/// could not be read.
fn head_and_body(
    view: &RankView,
    part: u8,
    dump: &Dump,
    known: &HashMap<CursorKey, Cursor>,
) -> (RecordHead, Vec<u8>) {
    let id = &dump.identity;
    let open = |e: &&Entry| e.state < EntryState::Completed && !e.retired;
    let first_open = dump.entries.iter().find(open).map(|e| e.record_id);
    let after_last = dump.entries.last().map_or(1, |e| e.record_id + 1);
    let oldest = dump.entries.first().map_or(after_last, |e| e.record_id);
    let since = known.get(&(view.rank, part, id.attempt, id.pid));
    let from = since.map_or(0, |since| {
        dump.entries
            .partition_point(|entry| entry.record_id < since.next)
    });
    let groups = hash_of(&dump.groups);
    let body = if view.failure.is_some() {
        Vec::new()
    } else {
        let mut newer = without_earlier(dump, from);
        if since.is_some_and(|since| since.groups == Some(groups)) {
            for group in &mut newer.groups {
                group.info.ranks = [].into();
            }
        }
        newer.to_json()
    };
    let head = RecordHead {
        rank: view.rank,
        part,
        attempt: id.attempt,
        pid: id.pid,
        alive: match view.liveness {
            Liveness::Unknown => None,
            Liveness::Alive => Some(true),
            Liveness::Dead => Some(false),
        },
        failure: view.failure.as_deref().map(str::to_owned),
        whole: since.is_none(),
        oldest,
        next: first_open.unwrap_or(after_last),
        groups,
        bytes: body.len(),
    };
    (head, body)
}

/// A copy of the dump without the entries before index `from`.
fn without_earlier(dump: &Dump, from: usize) -> Dump {
    Dump {
        version: dump.version,
        recorder: dump.recorder,
        identity: dump.identity.clone(),
        status: dump.status.clone(),
        comm_lib_version: dump.comm_lib_version.clone(),
        groups: dump.groups.clone(),
        signatures: dump.signatures.clone(),
        frames: dump.frames.clone(),
        stacks: dump.stacks.clone(),
        threads: dump.threads.clone(),
        entries: dump.entries[from..].to_vec(),
        nccl_comm_state: dump.nccl_comm_state.clone(),
        failures: dump.failures.clone(),
        closed_ns: dump.closed_ns,
        peers: dump.peers.clone(),
        processor_wait: dump.processor_wait,
        reducer_steps: dump.reducer_steps.clone(),
    }
}

/// Hash of the groups, see [`RecordHead::groups`]. 53 bits, since some JSON readers have only floating point numbers.
fn hash_of(groups: &[DumpGroup]) -> u64 {
    let mut hash = DefaultHasher::new();
    for DumpGroup { info, .. } in groups {
        (info.id, &info.name, &info.desc, &info.ranks).hash(&mut hash);
    }
    hash.finish() >> 11
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcomm_analyzer::simulate::{Simulation, Situation};
    use rcomm_analyzer::source::{RecordsFollower, SimulatedSource, Source};
    use rcomm_analyzer::{LaterAttempt, Live, LiveOptions, Moment, Report, analyze};
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    fn snapshot_at(live: &mut Live, ns: i64) -> Snapshot {
        let simulation = Simulation::new(Situation::Healthy, 8, 0);
        let at = Moment {
            elapsed: Duration::from_nanos(ns as u64),
            wall_ns: ns,
        };
        let mut source = SimulatedSource::new(simulation, move || ns);
        live.observe(0, source.poll(Instant::now()), at);
        live.refresh(at).expect("the job runs")
    }

    const ALL: RangeInclusive<Rank> = 0..=Rank::MAX;

    fn head_of(body: &[u8]) -> RecordsHead {
        let line = body
            .split(|&byte| byte == b'\n')
            .next()
            .expect("the records start with a head");
        serde_json::from_slice(line).expect("the text is JSON")
    }

    #[test]
    fn known_entries_are_not_sent_again() {
        let mut live = Live::new(LiveOptions::default(), analyze, vec!["test".into()]);
        let first = encode(
            &snapshot_at(&mut live, 10_000_000_000),
            &ALL,
            &HashMap::new(),
        );
        let head = head_of(&first);
        assert!(head.records.iter().all(|record| record.whole));
        let cursor = |r: &RecordHead| {
            let known = Cursor {
                next: r.next,
                groups: Some(r.groups),
            };
            ((r.rank, r.part, r.attempt, r.pid), known)
        };
        let cursors = head.records.iter().map(cursor).collect();
        let second = encode(&snapshot_at(&mut live, 10_200_000_000), &ALL, &cursors);
        assert!(
            second.len() * 8 < first.len(),
            "{} {}",
            second.len(),
            first.len()
        );
        let text = String::from_utf8_lossy(&second);
        assert!(!text.contains("[0, 1"), "members again: {text}");
    }

    #[test]
    fn a_range_of_ranks_can_be_requested() {
        let mut live = Live::new(LiveOptions::default(), analyze, vec!["test".into()]);
        let wanted = range("2-4").expect("two ranks");
        let part = encode(
            &snapshot_at(&mut live, 10_000_000_000),
            &wanted,
            &HashMap::new(),
        );
        let head = head_of(&part);
        let ranks: Vec<Rank> = head.records.iter().map(|record| record.rank).collect();
        assert_eq!((ranks, head.world_size), (vec![2, 3, 4], 8));
        assert!(range("2").is_none() && range("2-x").is_none());
    }

    #[test]
    fn a_collector_learns_of_a_later_attempt_and_of_no_size_that_nothing_states() {
        let mut live = Live::new(LiveOptions::default(), analyze, vec!["test".into()]);
        let mut snapshot = snapshot_at(&mut live, 10_000_000_000);
        let mut follower = RecordsFollower::default();
        let question = follower.questions().remove(0);
        let mut take = |snapshot: &Snapshot| {
            let body = encode(snapshot, &ALL, &HashMap::new());
            let size = follower.take(&question, &body, &mut Vec::new());
            (
                size.expect("the answer is valid"),
                follower.later_attempt().cloned(),
            )
        };
        assert_eq!(take(&snapshot), (8, None));
        let later = LaterAttempt {
            attempt: 1,
            ranks: vec![4, 5],
        };
        snapshot.later_attempt = Some(later.clone());
        let mut report = Report::clone(&snapshot.report);
        report.input.may_have_more = true;
        snapshot.report = Arc::new(report);
        assert_eq!(take(&snapshot), (0, Some(later)));
    }
}
