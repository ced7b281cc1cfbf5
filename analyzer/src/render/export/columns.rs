//! Makes four tables of columns from the records and the report: `entries` (one row per recorded operation),
//! `collectives` (one per group and sequence number, joined over the ranks), `groups` and `findings`.
//!
//! Numbers are signed because queries subtract them; a value above `i64::MAX` becomes `i64::MAX`.

use crate::render::state_name;
use rcomm_recorder::model::{Entry, EntryState, Peer, ProcessGroupInfo, Rank, Signature};
use rcomm_recorder::publish::Dump;
use rcomm_verdict::Report;
use serde::Serialize;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io::{self, Write};

/// A table. Each column has one value per row.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Table {
    /// `entries`, `collectives`, `groups` or `findings`.
    pub name: &'static str,
    /// The columns, in the order in which they are shown.
    pub columns: Vec<Column>,
}

/// One column.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Column {
    /// The name of the column.
    pub name: &'static str,
    /// One value for each row.
    pub values: Values,
}

/// The values of a column: all of one type, `None` where nothing was recorded.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Values {
    /// Integers of 64 bits.
    Int64(Vec<Option<i64>>),
    /// Floats of 32 bits.
    Float32(Vec<Option<f32>>),
    /// Floats of 64 bits.
    Float64(Vec<Option<f64>>),
    /// Booleans.
    Bool(Vec<Option<bool>>),
    /// Texts.
    Text(Vec<Option<Cow<'static, str>>>),
}

/// A Rust type that the values of a column can have.
trait Value: Sized {
    fn values(cells: impl Iterator<Item = Option<Self>>) -> Values;
}

impl Value for i64 {
    fn values(cells: impl Iterator<Item = Option<Self>>) -> Values {
        Values::Int64(cells.collect())
    }
}

impl Value for f32 {
    fn values(cells: impl Iterator<Item = Option<Self>>) -> Values {
        Values::Float32(cells.collect())
    }
}

impl Value for f64 {
    fn values(cells: impl Iterator<Item = Option<Self>>) -> Values {
        Values::Float64(cells.collect())
    }
}

impl Value for bool {
    fn values(cells: impl Iterator<Item = Option<Self>>) -> Values {
        Values::Bool(cells.collect())
    }
}

impl Value for String {
    fn values(cells: impl Iterator<Item = Option<Self>>) -> Values {
        Values::Text(cells.map(|cell| cell.map(Cow::Owned)).collect())
    }
}

impl Value for &'static str {
    fn values(cells: impl Iterator<Item = Option<Self>>) -> Values {
        Values::Text(cells.map(|cell| cell.map(Cow::Borrowed)).collect())
    }
}

/// All four tables.
///
/// Dumps whose rank is unknown have no value in the column `rank`.
pub fn tables(dumps: &[Dump], report: &Report) -> [Table; 4] {
    [
        entries(dumps),
        collectives(dumps),
        groups(report),
        findings(report),
    ]
}

/// Writes all four tables as one JSON object, `rcomm.columns/1`: `tables` is a list of objects with `name` and
/// `columns`, and a column has a `name` and `values`, an object whose one key is the type: `int64`, `float32`,
/// `float64`, `bool` or `text`. Its value is the list of values, `null` where nothing was recorded.
///
/// # Errors
///
/// If `to` cannot be written to.
pub fn write(dumps: &[Dump], report: &Report, to: &mut dyn Write) -> io::Result<()> {
    #[derive(Serialize)]
    struct Document {
        schema: &'static str,
        tables: [Table; 4],
    }
    let document = Document {
        schema: "rcomm.columns/1",
        tables: tables(dumps, report),
    };
    let mut buffered = io::BufWriter::new(to);
    serde_json::to_writer(&mut buffered, &document)?;
    buffered.write_all(b"\n")?;
    buffered.flush()
}

/// The column of the values that `pick` returns for each row.
fn column<R, T: Value>(rows: &[R], name: &'static str, pick: impl Fn(&R) -> Option<T>) -> Column {
    Column {
        name,
        values: T::values(rows.iter().map(pick)),
    }
}

/// A [`column`] in which each row has a value.
fn full<R, T: Value>(rows: &[R], name: &'static str, pick: impl Fn(&R) -> T) -> Column {
    column(rows, name, |row| Some(pick(row)))
}

/// The number, or `i64::MAX` if it is larger.
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
        let outside_torch = frames().find(|frame| !frame.filename.contains("/torch/"));
        outside_torch
            .or_else(|| frames().next())
            .map(|frame| format!("{}:{}", frame.filename, frame.line))
    }
}

fn rows(dumps: &[Dump]) -> Vec<Row<'_>> {
    let row_of = |dump| move |entry| Row { dump, entry };
    dumps
        .iter()
        .flat_map(|dump| dump.entries.iter().map(row_of(dump)))
        .collect()
}

fn entries(dumps: &[Dump]) -> Table {
    let rows = rows(dumps);
    let columns = vec![
        column(&rows, "rank", |row| row.dump.identity.rank.map(signed)),
        column(&rows, "host", |row| non_empty(&row.dump.identity.host)),
        full(&rows, "record_id", |row| signed(row.entry.record_id)),
        column(&rows, "group_name", |row| {
            row.group().map(|group| group.name.clone())
        }),
        column(&rows, "group_desc", |row| {
            row.group().map(|group| group.desc.clone())
        }),
        full(&rows, "collective_seq_id", |row| {
            signed(row.entry.collective_seq_id)
        }),
        full(&rows, "p2p_seq_id", |row| signed(row.entry.p2p_seq_id)),
        full(&rows, "op_id", |row| signed(row.entry.op_id)),
        full(&rows, "op", |row| row.entry.op.name()),
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
        full(&rows, "state", |row| state_name(row.entry.state)),
        full(&rows, "retired", |row| row.entry.retired),
        full(&rows, "is_p2p", |row| row.entry.is_p2p),
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
        full(&rows, "timeout_ms", |row| signed(row.entry.timeout_ms)),
        column(&rows, "call_site", Row::call_site),
    ];
    Table {
        name: "entries",
        columns,
    }
}

/// The key of a collective: its group and its sequence number.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Instance<'a> {
    name: &'a str,
    desc: &'a str,
    ranks: &'a [Rank],
    seq: u64,
}

/// One row of the table `collectives`: the entries of a collective on all ranks, combined.
#[derive(Default)]
struct Joined {
    /// The name of the operation that was added last.
    op: &'static str,
    /// For each rank with an entry of the collective: whether all its entries have completed. In a coalesced block a
    /// rank has several.
    ranks: BTreeMap<Option<Rank>, bool>,
    /// The largest input of an entry, bytes.
    bytes: Option<i64>,
    /// When the collective was first issued, ns since the epoch; the next field: when it was last issued.
    first_created: Option<i64>,
    last_created: Option<i64>,
    /// The longest duration, ms.
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

fn collectives(dumps: &[Dump]) -> Table {
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
    let columns = vec![
        full(&rows, "group_name", |(instance, _)| {
            instance.name.to_owned()
        }),
        full(&rows, "group_desc", |(instance, _)| {
            instance.desc.to_owned()
        }),
        full(&rows, "group_size", |(instance, _)| {
            signed(instance.ranks.len())
        }),
        full(&rows, "collective_seq_id", |(instance, _)| {
            signed(instance.seq)
        }),
        full(&rows, "op", |(_, row)| row.op),
        full(&rows, "ranks_recorded", |(_, row)| signed(row.ranks.len())),
        full(&rows, "ranks_completed", |(_, row)| {
            signed(row.ranks.values().filter(|completed| **completed).count())
        }),
        column(&rows, "max_input_bytes", |(_, row)| row.bytes),
        column(&rows, "first_created_ns", |(_, row)| row.first_created),
        column(&rows, "last_created_ns", |(_, row)| row.last_created),
        column(&rows, "max_duration_ms", |(_, row)| row.max_duration),
    ];
    Table {
        name: "collectives",
        columns,
    }
}

fn groups(report: &Report) -> Table {
    let rows = &report.groups;
    let columns = vec![
        full(rows, "name", |row| row.group.name.clone()),
        full(rows, "desc", |row| row.group.desc.clone()),
        full(rows, "size", |row| signed(row.group.ranks.len())),
        full(rows, "ranks_read", |row| signed(row.ranks_read)),
        column(rows, "backend", |row| non_empty(&row.backend)),
        column(rows, "last_seq", |row| row.last_seq.map(signed)),
        column(rows, "min_seq", |row| row.min_seq.map(signed)),
        full(rows, "in_flight", |row| signed(row.in_flight)),
        column(rows, "lag_p50_ms", |row| row.lag_p50_ms),
        column(rows, "lag_p99_ms", |row| row.lag_p99_ms),
        column(rows, "busbw_gbs", |row| row.busbw_gbs),
    ];
    Table {
        name: "groups",
        columns,
    }
}

fn findings(report: &Report) -> Table {
    let rows = &report.findings;
    let list = |ranks: &[Rank]| {
        let ranks: Vec<String> = ranks.iter().map(Rank::to_string).collect();
        ranks.join(" ")
    };
    let columns = vec![
        full(rows, "id", |row| signed(row.id)),
        full(rows, "code", |row| row.code.id()),
        full(rows, "name", |row| row.name.clone()),
        full(rows, "confidence", |row| row.confidence),
        full(rows, "culprit_ranks", |row| list(&row.culprit_ranks)),
        column(rows, "group_desc", |row| {
            row.group.as_ref().map(|group| group.desc.clone())
        }),
        column(rows, "seq", |row| row.seq.map(signed)),
        column(rows, "caused_by", |row| row.caused_by.map(signed)),
        full(rows, "sentence", |row| row.sentence.clone()),
    ];
    Table {
        name: "findings",
        columns,
    }
}
