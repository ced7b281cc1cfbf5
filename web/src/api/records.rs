//! The records of this node for a collector: all of them, or what changed.
//!
//! A collector tells for each rank the first record id that it wants again: everything before is settled
//! and known to it. So an answer is as large as what happened in between, however large the rings are.
//! The answer is one line of JSON with what follows, then those records, as dumps in JSON.

use crate::error::Refusal;
use crate::routes::Shared;
use axum::extract::{Query, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use rcomm_analyzer::source::Liveness;
use rcomm_analyzer::{RankView, Snapshot};
use rcomm_recorder::model::{Entry, EntryState, Rank};
use rcomm_recorder::publish::Dump;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;

/// Name and version of the form.
pub(crate) const SCHEMA: &str = "rcomm.records/1";

/// What follows in the body.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Head {
    pub(crate) schema: String,
    /// Ranks of the job.
    pub(crate) world_size: usize,
    pub(crate) records: Vec<RecordHead>,
}

/// One rank's record.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct RecordHead {
    pub(crate) rank: Rank,
    /// Which of several recorders of one process.
    pub(crate) part: u8,
    /// Which process wrote it: what was known of another one is to be forgotten.
    pub(crate) attempt: u32,
    pub(crate) pid: u32,
    /// `null` = unknown.
    pub(crate) alive: Option<bool>,
    /// Why the rank does not answer, where it does not.
    pub(crate) failure: Option<String>,
    /// The record has all that the rank still has; else it begins at the id that was asked for.
    pub(crate) whole: bool,
    /// The oldest operation that the rank still has; older ones are to be forgotten.
    pub(crate) oldest: u64,
    /// The first record id to ask for the next time.
    pub(crate) next: u64,
    /// Length of the dump, bytes; 0 if nothing changed.
    pub(crate) bytes: usize,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Wanted {
    /// `rank.part.attempt.pid:next` for each record known, with commas.
    #[serde(default)]
    since: String,
}

type Key = (Rank, u8, u32, u32);

/// Reads `since`; a record whose cursor cannot be read is told whole.
fn known(since: &str) -> HashMap<Key, u64> {
    since
        .split(',')
        .filter_map(|cursor| {
            let (key, next) = cursor.split_once(':')?;
            let mut parts = key.split('.');
            let key = (
                parts.next()?.parse().ok()?,
                parts.next()?.parse().ok()?,
                parts.next()?.parse().ok()?,
                parts.next()?.parse().ok()?,
            );
            Some((key, next.parse().ok()?))
        })
        .collect()
}

pub(crate) async fn records(
    State(shared): State<Shared>,
    Query(wanted): Query<Wanted>,
) -> Result<Response, Refusal> {
    let snapshot = shared.board.newest().ok_or(Refusal::NotYet)?;
    let told = tokio::task::spawn_blocking(move || told(&snapshot, &known(&wanted.since)));
    let body = told.await.map_err(|_| Refusal::Stopping)?;
    Ok(([(header::CONTENT_TYPE, "application/octet-stream")], body).into_response())
}

fn told(snapshot: &Snapshot, known: &HashMap<Key, u64>) -> Vec<u8> {
    let mut bodies = Vec::new();
    let mut head = Head {
        schema: SCHEMA.to_owned(),
        world_size: snapshot.ranks.len(),
        records: Vec::new(),
    };
    for view in snapshot.ranks.iter() {
        for (part, dump) in (0..).zip(&view.dumps) {
            let (record, body) = record(view, part, dump, known);
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

fn record(
    view: &RankView,
    part: u8,
    dump: &Dump,
    known: &HashMap<Key, u64>,
) -> (RecordHead, Vec<u8>) {
    let id = &dump.identity;
    let open = |e: &&Entry| e.state < EntryState::Completed && !e.retired;
    let first_open = dump.entries.iter().find(open).map(|e| e.record_id);
    let beyond = dump.entries.last().map_or(1, |e| e.record_id + 1);
    let oldest = dump.entries.first().map_or(beyond, |e| e.record_id);
    let since = known.get(&(view.rank, part, id.attempt, id.pid)).copied();
    let from = since.map_or(0, |since| {
        dump.entries
            .partition_point(|entry| entry.record_id < since)
    });
    let body = if view.failure.is_some() {
        Vec::new()
    } else {
        let mut newer = dump.clone();
        newer.entries.drain(..from);
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
        next: first_open.unwrap_or(beyond),
        bytes: body.len(),
    };
    (head, body)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcomm_analyzer::simulate::{Simulation, Situation};
    use rcomm_analyzer::source::{SimulatedSource, Source};
    use rcomm_analyzer::{Live, LiveOptions, Moment, analyze};
    use std::time::{Duration, Instant};

    fn seen(live: &mut Live, ns: i64) -> Snapshot {
        let simulation = Simulation::new(Situation::Healthy, 8, 0);
        let at = Moment {
            elapsed: Duration::from_nanos(ns as u64),
            wall_ns: ns,
        };
        let mut source = SimulatedSource::new(simulation, move || ns);
        live.observe(0, source.poll(Instant::now()), at);
        live.refresh(at).expect("the job runs")
    }

    #[test]
    fn what_is_known_is_not_told_again() {
        let mut live = Live::new(LiveOptions::default(), analyze, vec!["test".into()]);
        let first = told(&seen(&mut live, 10_000_000_000), &HashMap::new());
        let line = first.split(|&byte| byte == b'\n').next().expect("a head");
        let head: Head = serde_json::from_slice(line).expect("JSON");
        assert!(head.records.iter().all(|record| record.whole));
        let cursor = |r: &RecordHead| ((r.rank, r.part, r.attempt, r.pid), r.next);
        let cursors = head.records.iter().map(cursor).collect();
        let second = told(&seen(&mut live, 10_200_000_000), &cursors);
        assert!(
            second.len() * 8 < first.len(),
            "{} {}",
            second.len(),
            first.len()
        );
    }
}
