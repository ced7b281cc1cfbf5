//! Makes the four tables of [`columns`] with polars, answers queries in SQL about them, and writes tables as Parquet,
//! CSV or text. The feature `tables` enables this module.

mod ordinals;
mod parquet;
mod text;

use crate::export::columns::{self, Values};
use polars::prelude::*;
use polars::sql::SQLContext;
use polars_io::prelude::{CsvWriter, SerWriter};
use rcomm_recorder::publish::Dump;
use rcomm_verdict::Report;
use std::io::{Seek, Write};

/// Why a table could not be built, queried or written.
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    /// An error of polars, such as a column that does not exist; also an error of writing.
    #[error("{0}")]
    Polars(#[from] PolarsError),
    /// There is no table of this name.
    #[error("no table {0:?}; the tables are entries, collectives, groups and findings")]
    NoTable(String),
    /// A statement that is not a query: its first word.
    #[error(
        "{0:?} is no query; a query begins with `select`, `with`, `from`, `explain` or `show tables`"
    )]
    NotAQuery(String),
    /// A clause of a query, `group by` or `order by`, that names column 0.
    #[error("{0} 0: columns are counted from 1")]
    OrdinalZero(&'static str),
}

/// The inputs and the results of one analysis, as data frames.
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

/// The format in which a table is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableFormat {
    /// Apache Parquet, compressed with Snappy.
    Parquet,
    /// Comma-separated values with a header line.
    Csv,
    /// Aligned columns: every row, null as `-`.
    Text,
}

impl Tables {
    /// Builds all four tables.
    ///
    /// Dumps whose rank is unknown have a null in the column `rank`.
    ///
    /// # Errors
    /// [`TableError::Polars`] if the columns do not fit together (a bug).
    pub fn new(dumps: &[Dump], report: &Report) -> Result<Self, TableError> {
        let [entries, collectives, groups, findings] = columns::tables(dumps, report);
        Ok(Self {
            entries: frame(entries)?,
            collectives: frame(collectives)?,
            groups: frame(groups)?,
            findings: frame(findings)?,
        })
    }

    /// The names of the tables.
    pub const NAMES: [&'static str; 4] = ["entries", "collectives", "groups", "findings"];

    /// The table of this name.
    ///
    /// # Errors
    /// [`TableError::NoTable`] if there is no table of this name.
    pub fn get(&self, name: &str) -> Result<&DataFrame, TableError> {
        match name {
            "entries" => Ok(&self.entries),
            "collectives" => Ok(&self.collectives),
            "groups" => Ok(&self.groups),
            "findings" => Ok(&self.findings),
            other => Err(TableError::NoTable(other.to_owned())),
        }
    }

    /// Answers a query over the four tables, in polars' SQL; it begins with `select`, `with`, `show`, `explain` or
    /// `from`. Blocks until the answer is computed.
    ///
    /// # Errors
    /// [`TableError::NotAQuery`] if `sql` is not a query; [`TableError::OrdinalZero`] if it names column 0;
    /// [`TableError::Polars`] if it fails.
    pub fn query(&self, sql: &str) -> Result<DataFrame, TableError> {
        let statement = sql.trim_start_matches(|c: char| c.is_whitespace() || c == '(');
        let verb: String = statement
            .chars()
            .take_while(char::is_ascii_alphabetic)
            .collect();
        let query_verbs = ["select", "with", "show", "explain", "from"];
        if !query_verbs
            .iter()
            .any(|word| verb.eq_ignore_ascii_case(word))
        {
            return Err(TableError::NotAQuery(verb));
        }
        ordinals::check(sql)?;
        let mut context = SQLContext::new();
        for name in Self::NAMES {
            context.register(name, self.get(name)?.clone().lazy());
        }
        Ok(context.execute(sql)?.collect()?)
    }
}

fn frame(table: columns::Table) -> Result<DataFrame, TableError> {
    let columns = table.columns.into_iter();
    let columns: Vec<Column> = columns
        .map(|column| {
            let name = column.name.into();
            let series = match column.values {
                Values::Int64(values) => Series::new(name, values),
                Values::Float32(values) => Series::new(name, values),
                Values::Float64(values) => Series::new(name, values),
                Values::Bool(values) => Series::new(name, values),
                Values::Text(values) => Series::new(name, values),
            };
            series.into()
        })
        .collect();
    let height = columns.first().map_or(0, Column::len);
    Ok(DataFrame::new(height, columns)?)
}

/// Writes one table.
///
/// # Errors
/// [`TableError::Polars`], also if writing fails.
pub fn write(
    table: &DataFrame,
    format: TableFormat,
    mut to: impl Write + Seek,
) -> Result<(), TableError> {
    match format {
        TableFormat::Parquet => parquet::write(table, to)?,
        TableFormat::Csv => CsvWriter::new(to).finish(&mut table.clone())?,
        TableFormat::Text => text::write(table, &mut to)?,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::live::simulate::{Simulation, Situation};
    use rcomm_verdict::{Input, Verdict};

    fn empty_report() -> Report {
        Report {
            schema: Report::SCHEMA.into(),
            verdict: Verdict::Inconclusive,
            findings: vec![],
            problems: vec![],
            end: None,
            input: Input::default(),
            groups: vec![],
            ranks: vec![],
            in_flight: vec![],
            waits: vec![],
            stacks: vec![],
            now: vec![],
        }
    }

    fn stuck() -> (Vec<Dump>, Tables) {
        let simulation = Simulation::new(Situation::StuckRank, 16, 0);
        let dumps = simulation.dumps_at(simulation.fault_ns() + 1_000_000_000);
        let tables =
            Tables::new(&dumps, &empty_report()).expect("all columns of a table are equally long");
        (dumps, tables)
    }

    #[test]
    fn every_entry_is_a_row_and_sql_counts_them() {
        let (dumps, tables) = stuck();
        let entries: usize = dumps.iter().map(|dump| dump.entries.len()).sum();
        assert_eq!(tables.entries.height(), entries);
        let answer = tables
            .query("select rank, count(*) as n from entries group by rank order by rank")
            .expect("the query is valid");
        assert_eq!(answer.height(), dumps.len());
        let counted = answer
            .column("n")
            .expect("the answer has the column")
            .as_materialized_series()
            .sum::<i64>();
        assert_eq!(
            counted.expect("the column holds whole numbers"),
            entries as i64
        );
    }

    #[test]
    fn a_collective_that_a_rank_missed_has_fewer_ranks_than_its_group() {
        let (_, tables) = stuck();
        let missed = tables
            .query("select * from collectives where ranks_recorded < group_size")
            .expect("the query is valid");
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
            .expect_err("the table has no such column");
        assert!(error.to_string().contains("nonsense"), "{error}");
        assert!(matches!(tables.get("rows"), Err(TableError::NoTable(_))));
    }

    #[test]
    fn a_statement_that_is_no_query_is_refused() {
        let (_, tables) = stuck();
        for sql in ["drop table entries", "delete from entries", "", "selec 1"] {
            let error = tables.query(sql).expect_err("the text is not a query");
            assert!(matches!(error, TableError::NotAQuery(_)), "{sql}: {error}");
        }
        assert!(tables.query("(SELECT rank FROM entries)").is_ok());
    }

    #[test]
    fn a_query_opens_no_file() {
        let (_, tables) = stuck();
        for sql in [
            "select * from read_csv('/etc/hostname')",
            "select * from read_parquet('/etc/hostname')",
            "select * from '/etc/hostname'",
        ] {
            let error = tables.query(sql).expect_err("files are no tables");
            assert!(matches!(error, TableError::Polars(_)), "{sql}: {error}");
        }
    }

    #[test]
    fn numbers_can_be_subtracted_below_zero() {
        let (_, tables) = stuck();
        let answer = tables
            .query("select min(rank - 3) as below from entries")
            .expect("the query is valid");
        let below = answer
            .column("below")
            .expect("the answer has the column")
            .get(0);
        assert_eq!(
            below.expect("the column holds whole numbers"),
            AnyValue::Int64(-3)
        );
    }

    #[test]
    fn text_has_every_row_and_numbers_to_the_right() {
        let mut file = std::io::Cursor::new(Vec::new());
        let table = df!(
            "rank" => [Some(3_i64), Some(12), None],
            "op" => ["send", "all_reduce", "tab\there"],
            "late" => [true, false, false],
        );
        write(
            &table.expect("all columns of a table are equally long"),
            TableFormat::Text,
            &mut file,
        )
        .expect("writing to memory does not fail");
        let text = String::from_utf8(file.into_inner()).expect("the text is UTF-8");
        let expected = "\
rank  op            late
   3  send          yes
  12  all_reduce    no
   -  tab\\u{9}here  no
";
        assert_eq!(text, expected);
    }

    #[test]
    fn parquet_and_csv_hold_every_row() {
        let (dumps, tables) = stuck();
        for name in Tables::NAMES {
            let table = tables.get(name).expect("the table exists");
            let mut file = std::io::Cursor::new(Vec::new());
            write(table, TableFormat::Parquet, &mut file).expect("writing to memory does not fail");
            let (read, _) = parquet::tests::read(file.into_inner())
                .expect("the file that was written can be read");
            assert!(read.equals_missing(table), "{read} in place of {table}");
        }
        let entries: usize = dumps.iter().map(|dump| dump.entries.len()).sum();
        let mut text = std::io::Cursor::new(Vec::new());
        write(&tables.entries, TableFormat::Csv, &mut text)
            .expect("writing to memory does not fail");
        let lines = text
            .into_inner()
            .iter()
            .filter(|&&byte| byte == b'\n')
            .count();
        assert_eq!(lines, entries + 1);
    }
}
