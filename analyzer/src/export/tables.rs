//! The records as tables: Parquet, CSV and SQL, by polars. Behind the feature `tables`.
//!
//! Four tables: `entries` (one row per recorded operation), `collectives` (one per group and sequence
//! number, joined over the ranks), `groups` and `findings`. The verdict itself never passes through
//! here: matching is dense arrays, a data frame would be about ten times slower.

use crate::Report;
use polars::prelude::*;
use polars::sql::SQLContext;
use rcomm_recorder::model::{EntryState, Peer};
use rcomm_recorder::publish::Dump;
use std::collections::BTreeMap;
use std::io::{Seek, Write};

/// Why a table could not be made, asked or written.
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    /// polars refused; the text names column or query.
    #[error("{0}")]
    Polars(#[from] PolarsError),
    /// There is no table of this name.
    #[error("no table {0:?}; the tables are entries, collectives, groups and findings")]
    NoTable(String),
}

/// What one analysis was made of and what it says, as data frames.
pub struct Tables {
    /// One row per recorded operation.
    pub entries: DataFrame,
    /// One row per collective, joined over the ranks that recorded it.
    pub collectives: DataFrame,
    /// One row per group.
    pub groups: DataFrame,
    /// One row per finding.
    pub findings: DataFrame,
}

/// How a table is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableFormat {
    /// Apache Parquet, compressed.
    Parquet,
    /// Comma-separated values with a header line.
    Csv,
}

impl Tables {
    /// Builds all four tables.
    ///
    /// Dumps whose rank is unknown have a null in the column `rank`.
    ///
    /// # Errors
    /// [`TableError::Polars`] if the columns do not fit together (a bug).
    pub fn new(dumps: &[Dump], report: &Report) -> Result<Self, TableError> {
        Ok(Self {
            entries: entries(dumps)?,
            collectives: collectives(dumps)?,
            groups: groups(report)?,
            findings: findings(report)?,
        })
    }

    /// The names that [`Tables::get`] and queries know.
    pub const NAMES: [&'static str; 4] = ["entries", "collectives", "groups", "findings"];

    /// One table by name.
    ///
    /// # Errors
    /// [`TableError::NoTable`].
    pub fn get(&self, name: &str) -> Result<&DataFrame, TableError> {
        match name {
            "entries" => Ok(&self.entries),
            "collectives" => Ok(&self.collectives),
            "groups" => Ok(&self.groups),
            "findings" => Ok(&self.findings),
            other => Err(TableError::NoTable(other.to_owned())),
        }
    }

    /// Answers a `select` over the four tables, in polars' SQL.
    ///
    /// # Errors
    /// [`TableError::Polars`] says what is wrong with the query.
    pub fn query(&self, sql: &str) -> Result<DataFrame, TableError> {
        let mut context = SQLContext::new();
        for name in Self::NAMES {
            context.register(name, self.get(name)?.clone().lazy());
        }
        Ok(context.execute(sql)?.collect()?)
    }
}

/// Writes one table.
///
/// # Errors
/// [`TableError::Polars`], with the cause where writing failed.
pub fn write(
    table: &DataFrame,
    format: TableFormat,
    to: impl Write + Seek,
) -> Result<(), TableError> {
    let mut table = table.clone();
    match format {
        TableFormat::Parquet => {
            ParquetWriter::new(to).finish(&mut table)?;
        }
        TableFormat::Csv => CsvWriter::new(to).finish(&mut table)?,
    }
    Ok(())
}

/// Null where a time was not seen.
fn seen(ns: i64) -> Option<i64> {
    (ns != 0).then_some(ns)
}

fn state_name(state: EntryState) -> &'static str {
    match state {
        EntryState::Scheduled => "scheduled",
        EntryState::Started => "started",
        EntryState::Completed => "completed",
        EntryState::Failed => "failed",
    }
}

fn frame(columns: Vec<Column>) -> Result<DataFrame, TableError> {
    let height = columns.first().map_or(0, Column::len);
    Ok(DataFrame::new(height, columns)?)
}

/// One column from every entry of every dump.
fn column<T, N>(
    dumps: &[Dump],
    name: &str,
    pick: impl Fn(&Dump, &rcomm_recorder::model::Entry) -> T,
) -> Column
where
    Series: NamedFrom<Vec<T>, N>,
    N: ?Sized,
{
    let values: Vec<T> = dumps
        .iter()
        .flat_map(|dump| {
            dump.entries
                .iter()
                .map(|entry| pick(dump, entry))
                .collect::<Vec<_>>()
        })
        .collect();
    Series::new(name.into(), values).into()
}

fn entries(dumps: &[Dump]) -> Result<DataFrame, TableError> {
    let group = |dump: &Dump, index: u32| {
        dump.groups
            .get(index as usize)
            .map(|group| group.info.clone())
    };
    frame(vec![
        column(dumps, "rank", |dump, _| dump.identity.rank),
        column(dumps, "host", |dump, _| dump.identity.host.clone()),
        column(dumps, "record_id", |_, entry| entry.record_id),
        column(dumps, "group_name", |dump, entry| {
            group(dump, entry.group).map(|group| group.name)
        }),
        column(dumps, "group_desc", |dump, entry| {
            group(dump, entry.group).map(|group| group.desc)
        }),
        column(dumps, "collective_seq_id", |_, entry| {
            entry.collective_seq_id
        }),
        column(dumps, "p2p_seq_id", |_, entry| entry.p2p_seq_id),
        column(dumps, "op_id", |_, entry| entry.op_id),
        column(dumps, "op", |_, entry| entry.op.name()),
        column(dumps, "op_name", |dump, entry| {
            signature(dump, entry.signature, |s| s.op_name.clone())
        }),
        column(dumps, "backend", |dump, entry| {
            signature(dump, entry.signature, |s| s.backend.clone())
        }),
        column(dumps, "dtype", |dump, entry| {
            signature(dump, entry.signature, |s| {
                s.input_dtypes.first().or(s.output_dtypes.first()).cloned()
            })
            .flatten()
        }),
        column(dumps, "input_bytes", |dump, entry| {
            signature(dump, entry.signature, |s| s.input_bytes())
        }),
        column(dumps, "output_bytes", |dump, entry| {
            signature(dump, entry.signature, |s| s.output_bytes())
        }),
        column(dumps, "peer", |_, entry| match entry.peer {
            Peer::Rank(rank) => Some(rank),
            Peer::None | Peer::Any => None,
        }),
        column(dumps, "root", |_, entry| entry.root),
        column(dumps, "reduce_op", |_, entry| {
            entry.reduce_op.map(|op| op.name())
        }),
        column(dumps, "state", |_, entry| state_name(entry.state)),
        column(dumps, "retired", |_, entry| entry.retired),
        column(dumps, "is_p2p", |_, entry| entry.is_p2p),
        column(dumps, "time_created_ns", |_, entry| {
            seen(entry.time_created_ns)
        }),
        column(dumps, "time_discovered_started_ns", |_, entry| {
            seen(entry.time_discovered_started_ns)
        }),
        column(dumps, "time_discovered_completed_ns", |_, entry| {
            seen(entry.time_discovered_completed_ns)
        }),
        column(dumps, "duration_ms", |_, entry| entry.duration_ms),
        column(dumps, "timeout_ms", |_, entry| entry.timeout_ms),
        column(dumps, "call_site", |dump, entry| {
            call_site(dump, entry.stack)
        }),
    ])
}

fn signature<T>(
    dump: &Dump,
    index: u32,
    pick: impl Fn(&rcomm_recorder::model::Signature) -> T,
) -> Option<T> {
    dump.signatures.get(index as usize).map(pick)
}

/// The innermost frame of the program that is not the library's own, else the innermost frame.
fn call_site(dump: &Dump, stack: Option<u32>) -> Option<String> {
    let stack = dump.stacks.get(stack? as usize)?;
    let frames = || {
        stack
            .iter()
            .filter_map(|&index| dump.frames.get(index as usize))
    };
    let own = frames().find(|frame| !frame.filename.contains("/torch/"));
    own.or_else(|| frames().next())
        .map(|frame| format!("{}:{}", frame.filename, frame.line))
}

/// What the ranks of one collective recorded, folded.
#[derive(Default)]
struct Joined {
    op: &'static str,
    ranks: u32,
    completed: u32,
    bytes: u64,
    first_created_ns: i64,
    last_created_ns: i64,
    max_duration_ms: Option<f32>,
}

fn collectives(dumps: &[Dump]) -> Result<DataFrame, TableError> {
    let mut joined: BTreeMap<(&str, &str, &[u32], u64), Joined> = BTreeMap::new();
    for dump in dumps {
        for entry in dump
            .entries
            .iter()
            .filter(|entry| !entry.is_p2p && !entry.op.is_p2p())
        {
            let Some(group) = dump.groups.get(entry.group as usize) else {
                continue;
            };
            let info = &group.info;
            let key = (
                info.name.as_str(),
                info.desc.as_str(),
                info.ranks.as_slice(),
                entry.collective_seq_id,
            );
            let row = joined.entry(key).or_insert_with(|| Joined {
                op: entry.op.name(),
                first_created_ns: entry.time_created_ns,
                ..Joined::default()
            });
            row.ranks += 1;
            row.completed += u32::from(entry.state == EntryState::Completed);
            row.bytes = row
                .bytes
                .max(signature(dump, entry.signature, |s| s.input_bytes()).unwrap_or(0));
            row.first_created_ns = row.first_created_ns.min(entry.time_created_ns);
            row.last_created_ns = row.last_created_ns.max(entry.time_created_ns);
            if let Some(duration) = entry.duration_ms {
                row.max_duration_ms = Some(
                    row.max_duration_ms
                        .map_or(duration, |longest| longest.max(duration)),
                );
            }
        }
    }
    let rows: Vec<_> = joined.into_iter().collect();
    let of = |name: &str, pick: fn(&(&str, &str, &[u32], u64)) -> String| -> Column {
        Series::new(
            name.into(),
            rows.iter().map(|(key, _)| pick(key)).collect::<Vec<_>>(),
        )
        .into()
    };
    frame(vec![
        of("group_name", |key| key.0.to_owned()),
        of("group_desc", |key| key.1.to_owned()),
        Series::new(
            "group_size".into(),
            rows.iter()
                .map(|(key, _)| key.2.len() as u64)
                .collect::<Vec<_>>(),
        )
        .into(),
        Series::new(
            "collective_seq_id".into(),
            rows.iter().map(|(key, _)| key.3).collect::<Vec<_>>(),
        )
        .into(),
        Series::new(
            "op".into(),
            rows.iter().map(|(_, row)| row.op).collect::<Vec<_>>(),
        )
        .into(),
        Series::new(
            "ranks_recorded".into(),
            rows.iter().map(|(_, row)| row.ranks).collect::<Vec<_>>(),
        )
        .into(),
        Series::new(
            "ranks_completed".into(),
            rows.iter()
                .map(|(_, row)| row.completed)
                .collect::<Vec<_>>(),
        )
        .into(),
        Series::new(
            "max_input_bytes".into(),
            rows.iter().map(|(_, row)| row.bytes).collect::<Vec<_>>(),
        )
        .into(),
        Series::new(
            "first_created_ns".into(),
            rows.iter()
                .map(|(_, row)| seen(row.first_created_ns))
                .collect::<Vec<_>>(),
        )
        .into(),
        Series::new(
            "last_created_ns".into(),
            rows.iter()
                .map(|(_, row)| seen(row.last_created_ns))
                .collect::<Vec<_>>(),
        )
        .into(),
        Series::new(
            "max_duration_ms".into(),
            rows.iter()
                .map(|(_, row)| row.max_duration_ms)
                .collect::<Vec<_>>(),
        )
        .into(),
    ])
}

fn groups(report: &Report) -> Result<DataFrame, TableError> {
    let all = &report.groups;
    frame(vec![
        Series::new(
            "name".into(),
            all.iter().map(|g| g.group.name.clone()).collect::<Vec<_>>(),
        )
        .into(),
        Series::new(
            "desc".into(),
            all.iter().map(|g| g.group.desc.clone()).collect::<Vec<_>>(),
        )
        .into(),
        Series::new(
            "size".into(),
            all.iter()
                .map(|g| g.group.ranks.len() as u64)
                .collect::<Vec<_>>(),
        )
        .into(),
        Series::new(
            "ranks_read".into(),
            all.iter().map(|g| g.ranks_read as u64).collect::<Vec<_>>(),
        )
        .into(),
        Series::new(
            "backend".into(),
            all.iter().map(|g| g.backend.clone()).collect::<Vec<_>>(),
        )
        .into(),
        Series::new(
            "last_seq".into(),
            all.iter().map(|g| g.last_seq).collect::<Vec<_>>(),
        )
        .into(),
        Series::new(
            "min_seq".into(),
            all.iter().map(|g| g.min_seq).collect::<Vec<_>>(),
        )
        .into(),
        Series::new(
            "in_flight".into(),
            all.iter().map(|g| g.in_flight as u64).collect::<Vec<_>>(),
        )
        .into(),
        Series::new(
            "lag_p50_ms".into(),
            all.iter().map(|g| g.lag_p50_ms).collect::<Vec<_>>(),
        )
        .into(),
        Series::new(
            "lag_p99_ms".into(),
            all.iter().map(|g| g.lag_p99_ms).collect::<Vec<_>>(),
        )
        .into(),
        Series::new(
            "busbw_gbs".into(),
            all.iter().map(|g| g.busbw_gbs).collect::<Vec<_>>(),
        )
        .into(),
    ])
}

fn findings(report: &Report) -> Result<DataFrame, TableError> {
    let all = &report.findings;
    let ranks = |ranks: &[u32]| {
        ranks
            .iter()
            .map(u32::to_string)
            .collect::<Vec<_>>()
            .join(" ")
    };
    frame(vec![
        Series::new("id".into(), all.iter().map(|f| f.id).collect::<Vec<_>>()).into(),
        Series::new(
            "code".into(),
            all.iter().map(|f| f.code.id()).collect::<Vec<_>>(),
        )
        .into(),
        Series::new(
            "name".into(),
            all.iter().map(|f| f.name.clone()).collect::<Vec<_>>(),
        )
        .into(),
        Series::new(
            "confidence".into(),
            all.iter().map(|f| f.confidence).collect::<Vec<_>>(),
        )
        .into(),
        Series::new(
            "culprit_ranks".into(),
            all.iter()
                .map(|f| ranks(&f.culprit_ranks))
                .collect::<Vec<_>>(),
        )
        .into(),
        Series::new(
            "group_desc".into(),
            all.iter()
                .map(|f| f.group.as_ref().map(|g| g.desc.clone()))
                .collect::<Vec<_>>(),
        )
        .into(),
        Series::new("seq".into(), all.iter().map(|f| f.seq).collect::<Vec<_>>()).into(),
        Series::new(
            "caused_by".into(),
            all.iter().map(|f| f.caused_by).collect::<Vec<_>>(),
        )
        .into(),
        Series::new(
            "sentence".into(),
            all.iter().map(|f| f.sentence.clone()).collect::<Vec<_>>(),
        )
        .into(),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulate::{Simulation, Situation};
    use crate::{Input, Verdict};

    fn empty_report() -> Report {
        Report {
            schema: Report::SCHEMA.into(),
            verdict: Verdict::Inconclusive,
            findings: vec![],
            problems: vec![],
            input: Input::default(),
            groups: vec![],
            ranks: vec![],
            in_flight: vec![],
            waits: vec![],
            stacks: vec![],
        }
    }

    fn stuck() -> (Vec<Dump>, Tables) {
        let simulation = Simulation::new(Situation::StuckRank, 16, 0);
        let dumps = simulation.dumps_at(simulation.fault_ns() + 1_000_000_000);
        let tables = Tables::new(&dumps, &empty_report()).expect("columns fit");
        (dumps, tables)
    }

    #[test]
    fn every_entry_is_a_row_and_sql_counts_them() {
        let (dumps, tables) = stuck();
        let all: usize = dumps.iter().map(|dump| dump.entries.len()).sum();
        assert_eq!(tables.entries.height(), all);
        let answer = tables
            .query("select rank, count(*) as n from entries group by rank order by rank")
            .expect("valid query");
        assert_eq!(answer.height(), dumps.len());
        let counted = answer
            .column("n")
            .expect("named")
            .as_materialized_series()
            .sum::<u64>();
        assert_eq!(counted.expect("numbers"), all as u64);
    }

    #[test]
    fn a_collective_that_a_rank_missed_has_fewer_ranks_than_its_group() {
        let (_, tables) = stuck();
        let missed = tables
            .query("select * from collectives where ranks_recorded < group_size")
            .expect("valid query");
        assert!(missed.height() > 0);
    }

    #[test]
    fn tables_without_rows_have_their_columns() {
        let (_, tables) = stuck();
        assert_eq!(tables.findings.height(), 0);
        assert!(tables.query("select code, sentence from findings").is_ok());
    }

    #[test]
    fn a_wrong_query_is_an_error_that_names_the_column() {
        let (_, tables) = stuck();
        let error = tables
            .query("select nonsense from entries")
            .expect_err("no such column");
        assert!(error.to_string().contains("nonsense"), "{error}");
        assert!(matches!(tables.get("rows"), Err(TableError::NoTable(_))));
    }

    #[test]
    fn parquet_and_csv_hold_every_row() {
        let (dumps, tables) = stuck();
        let all: usize = dumps.iter().map(|dump| dump.entries.len()).sum();
        let mut file = std::io::Cursor::new(Vec::new());
        write(&tables.entries, TableFormat::Parquet, &mut file).expect("writes to memory");
        file.set_position(0);
        let back = ParquetReader::new(file).finish().expect("our own file");
        assert_eq!(back.height(), all);
        let mut text = std::io::Cursor::new(Vec::new());
        write(&tables.entries, TableFormat::Csv, &mut text).expect("writes to memory");
        let lines = text
            .into_inner()
            .iter()
            .filter(|&&byte| byte == b'\n')
            .count();
        assert_eq!(lines, all + 1);
    }
}
