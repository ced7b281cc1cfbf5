//! The rows and columns of the four tables.
//!
//! Numbers are signed because queries subtract them; values beyond 63 bits are replaced by the largest one.

use super::TableError;
use polars::prelude::*;
use rcomm_recorder::model::{Entry, EntryState, Peer, ProcessGroupInfo, Rank, Signature};
use rcomm_recorder::publish::Dump;
use rcomm_verdict::Report;
use std::collections::BTreeMap;

/// The column of the values that `pick` returns for each row.
fn column<R, T, N: ?Sized>(rows: &[R], name: &str, pick: impl Fn(&R) -> T) -> Column
where
    Series: NamedFrom<Vec<T>, N>,
{
    let values: Vec<T> = rows.iter().map(pick).collect();
    Series::new(name.into(), values).into()
}

fn frame(columns: Vec<Column>) -> Result<DataFrame, TableError> {
    let height = columns.first().map_or(0, Column::len);
    Ok(DataFrame::new(height, columns)?)
}

fn signed(number: impl TryInto<i64>) -> i64 {
    number.try_into().unwrap_or(i64::MAX)
}

/// A time, ns since the epoch; null if it was not recorded.
fn recorded_time(ns: i64) -> Option<i64> {
    (ns != 0).then_some(ns)
}

/// A text; null if it is empty, which means that it was not recorded.
fn non_empty(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_owned())
}

fn state_name(state: EntryState) -> &'static str {
    match state {
        EntryState::Scheduled => "scheduled",
        EntryState::Started => "started",
        EntryState::Completed => "completed",
        EntryState::Failed => "failed",
    }
}

/// An operation with its dump.
struct Row<'a> {
    dump: &'a Dump,
    entry: &'a Entry,
}

impl<'a> Row<'a> {
    fn group(&self) -> Option<&'a ProcessGroupInfo> {
        let group = self.dump.groups.get(self.entry.group as usize)?;
        Some(&group.info)
    }

    fn signature(&self) -> Option<&'a Signature> {
        self.dump.signatures.get(self.entry.signature as usize)
    }

    fn input_bytes(&self) -> Option<i64> {
        Some(signed(self.signature()?.input_bytes()))
    }

    /// The innermost frame outside of PyTorch, or else the innermost frame; null without a stack.
    fn call_site(&self) -> Option<String> {
        let stack = self.dump.stacks.get(self.entry.stack? as usize)?;
        let frames = || {
            stack
                .iter()
                .filter_map(|&index| self.dump.frames.get(index as usize))
        };
        let own = frames().find(|frame| !frame.filename.contains("/torch/"));
        own.or_else(|| frames().next())
            .map(|frame| format!("{}:{}", frame.filename, frame.line))
    }
}

fn rows(dumps: &[Dump]) -> Vec<Row<'_>> {
    let of = |dump| move |entry| Row { dump, entry };
    dumps
        .iter()
        .flat_map(|dump| dump.entries.iter().map(of(dump)))
        .collect()
}

pub(super) fn entries(dumps: &[Dump]) -> Result<DataFrame, TableError> {
    let rows = rows(dumps);
    frame(vec![
        column(&rows, "rank", |row| row.dump.identity.rank.map(signed)),
        column(&rows, "host", |row| non_empty(&row.dump.identity.host)),
        column(&rows, "record_id", |row| signed(row.entry.record_id)),
        column(&rows, "group_name", |row| {
            row.group().map(|group| group.name.clone())
        }),
        column(&rows, "group_desc", |row| {
            row.group().map(|group| group.desc.clone())
        }),
        column(&rows, "collective_seq_id", |row| {
            signed(row.entry.collective_seq_id)
        }),
        column(&rows, "p2p_seq_id", |row| signed(row.entry.p2p_seq_id)),
        column(&rows, "op_id", |row| signed(row.entry.op_id)),
        column(&rows, "op", |row| row.entry.op.name()),
        column(&rows, "op_name", |row| non_empty(&row.signature()?.op_name)),
        column(&rows, "backend", |row| non_empty(&row.signature()?.backend)),
        column(&rows, "dtype", |row| {
            let signature = row.signature()?;
            let dtypes = [&signature.input_dtypes, &signature.output_dtypes];
            dtypes.into_iter().flatten().next().cloned()
        }),
        column(&rows, "input_bytes", Row::input_bytes),
        column(&rows, "output_bytes", |row| {
            Some(signed(row.signature()?.output_bytes()))
        }),
        column(&rows, "peer", |row| match row.entry.peer {
            Peer::Rank(rank) => Some(signed(rank)),
            Peer::None | Peer::Any => None,
        }),
        column(&rows, "root", |row| row.entry.root.map(signed)),
        column(&rows, "reduce_op", |row| {
            row.entry.reduce_op.map(|op| op.name())
        }),
        column(&rows, "state", |row| state_name(row.entry.state)),
        column(&rows, "retired", |row| row.entry.retired),
        column(&rows, "is_p2p", |row| row.entry.is_p2p),
        column(&rows, "time_created_ns", |row| {
            recorded_time(row.entry.time_created_ns)
        }),
        column(&rows, "time_discovered_started_ns", |row| {
            recorded_time(row.entry.time_discovered_started_ns)
        }),
        column(&rows, "time_discovered_completed_ns", |row| {
            recorded_time(row.entry.time_discovered_completed_ns)
        }),
        column(&rows, "duration_ms", |row| row.entry.duration_ms),
        column(&rows, "graph_id", |row| row.entry.graph_id.map(signed)),
        column(&rows, "timeout_ms", |row| signed(row.entry.timeout_ms)),
        column(&rows, "call_site", Row::call_site),
    ])
}

/// A collective: group and sequence number.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Instance<'a> {
    name: &'a str,
    desc: &'a str,
    ranks: &'a [Rank],
    seq: u64,
}

/// One row of the table: the entries of a collective, combined.
#[derive(Default)]
struct Joined {
    op: &'static str,
    /// Whether each rank with an entry has completed all its entries: of a coalesced block it has several.
    ranks: BTreeMap<Option<Rank>, bool>,
    bytes: Option<i64>,
    first_created: Option<i64>,
    last_created: Option<i64>,
    max_duration: Option<f32>,
}

impl Joined {
    fn add(&mut self, row: &Row<'_>) {
        let entry = row.entry;
        self.op = entry.op.name();
        let completed = self.ranks.entry(row.dump.identity.rank).or_insert(true);
        *completed &= entry.state == EntryState::Completed;
        self.bytes = self.bytes.max(row.input_bytes());
        if let Some(created) = recorded_time(entry.time_created_ns) {
            let first = self.first_created.unwrap_or(created);
            self.first_created = Some(first.min(created));
            self.last_created = self.last_created.max(Some(created));
        }
        if let Some(duration) = entry.duration_ms {
            let longest = self.max_duration.unwrap_or(duration);
            self.max_duration = Some(longest.max(duration));
        }
    }
}

pub(super) fn collectives(dumps: &[Dump]) -> Result<DataFrame, TableError> {
    let mut joined: BTreeMap<Instance<'_>, Joined> = BTreeMap::new();
    for row in rows(dumps) {
        let Some(group) = row.group() else { continue };
        if row.entry.is_p2p || row.entry.op.is_p2p() {
            continue;
        }
        let instance = Instance {
            name: &group.name,
            desc: &group.desc,
            ranks: &group.ranks,
            seq: row.entry.collective_seq_id,
        };
        joined.entry(instance).or_default().add(&row);
    }
    let rows: Vec<_> = joined.into_iter().collect();
    frame(vec![
        column(&rows, "group_name", |(of, _)| of.name.to_owned()),
        column(&rows, "group_desc", |(of, _)| of.desc.to_owned()),
        column(&rows, "group_size", |(of, _)| signed(of.ranks.len())),
        column(&rows, "collective_seq_id", |(of, _)| signed(of.seq)),
        column(&rows, "op", |(_, row)| row.op),
        column(&rows, "ranks_recorded", |(_, row)| signed(row.ranks.len())),
        column(&rows, "ranks_completed", |(_, row)| {
            signed(row.ranks.values().filter(|completed| **completed).count())
        }),
        column(&rows, "max_input_bytes", |(_, row)| row.bytes),
        column(&rows, "first_created_ns", |(_, row)| row.first_created),
        column(&rows, "last_created_ns", |(_, row)| row.last_created),
        column(&rows, "max_duration_ms", |(_, row)| row.max_duration),
    ])
}

pub(super) fn groups(report: &Report) -> Result<DataFrame, TableError> {
    let rows = &report.groups;
    frame(vec![
        column(rows, "name", |it| it.group.name.clone()),
        column(rows, "desc", |it| it.group.desc.clone()),
        column(rows, "size", |it| signed(it.group.ranks.len())),
        column(rows, "ranks_read", |it| signed(it.ranks_read)),
        column(rows, "backend", |it| non_empty(&it.backend)),
        column(rows, "last_seq", |it| it.last_seq.map(signed)),
        column(rows, "min_seq", |it| it.min_seq.map(signed)),
        column(rows, "in_flight", |it| signed(it.in_flight)),
        column(rows, "lag_p50_ms", |it| it.lag_p50_ms),
        column(rows, "lag_p99_ms", |it| it.lag_p99_ms),
        column(rows, "busbw_gbs", |it| it.busbw_gbs),
    ])
}

pub(super) fn findings(report: &Report) -> Result<DataFrame, TableError> {
    let rows = &report.findings;
    let list = |ranks: &[Rank]| {
        let ranks: Vec<String> = ranks.iter().map(Rank::to_string).collect();
        ranks.join(" ")
    };
    frame(vec![
        column(rows, "id", |it| signed(it.id)),
        column(rows, "code", |it| it.code.id()),
        column(rows, "name", |it| it.name.clone()),
        column(rows, "confidence", |it| it.confidence),
        column(rows, "culprit_ranks", |it| list(&it.culprit_ranks)),
        column(rows, "group_desc", |it| {
            it.group.as_ref().map(|group| group.desc.clone())
        }),
        column(rows, "seq", |it| it.seq.map(signed)),
        column(rows, "caused_by", |it| it.caused_by.map(signed)),
        column(rows, "sentence", |it| it.sentence.clone()),
    ])
}
