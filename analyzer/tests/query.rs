//! `rcomm-fr query` on real dumps: the feature `tables`.

#[path = "../../tests/fuzz/targets/readers/sql.rs"]
#[allow(unreachable_pub)]
mod reader;

use std::path::Path;
use std::process::{Command, Output};

/// Runs `rcomm-fr query SQL DUMPS OPTIONS...` on the dumps of one job.
fn query(sql: &str, options: &[&str]) -> Output {
    let dumps = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../tests/fixtures/dumps/cascade-2x2x2/pickle"
    );
    Command::new(env!("CARGO_BIN_EXE_rcomm-fr"))
        .args(["query", sql, dumps])
        .args(options)
        .output()
        .expect("the program of this package starts")
}

#[test]
fn every_rank_of_the_job_is_in_the_table_of_entries() {
    let output = query(
        "select count(distinct rank) as ranks from entries",
        &["--format", "csv"],
    );
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert_eq!(String::from_utf8_lossy(&output.stdout), "ranks\n8\n");
}

#[test]
fn the_finding_names_its_culprit() {
    let sql = "select code, culprit_ranks from findings where caused_by is null";
    let output = query(sql, &["--format", "csv"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("E101,5"), "{text}");
}

#[test]
fn a_statement_that_is_no_query_is_exit_code_2() {
    let output = query("drop table entries", &[]);
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(text.contains("\"drop\" is no query"), "{text}");
}

#[test]
fn a_parquet_file_is_written_whole() {
    let folder = tempfile::tempdir().expect("a temporary directory can be made");
    let path = folder.path().join("entries.parquet");
    let output = query(
        "select * from entries",
        &[
            "--format",
            "parquet",
            "-o",
            path.to_str().expect("the path is UTF-8"),
        ],
    );
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let bytes = std::fs::read(&path).expect("the file was written");
    assert!(bytes.starts_with(b"PAR1") && bytes.ends_with(b"PAR1"));
}

#[test]
fn a_wrong_column_is_exit_code_2_and_a_hint() {
    let output = query("select nonsense from entries", &[]);
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        text.contains("nonsense") && text.contains("select * from entries"),
        "{text}"
    );
}

#[test]
fn columns_are_counted_from_1_in_every_part_of_a_query() {
    let refused = [
        ("select rank from entries group by 0", "group by 0: columns"),
        ("select rank from entries order by 0", "order by 0: columns"),
        (
            "select rank from entries group by 1, 00",
            "group by 0: columns",
        ),
        (
            "select rank from (select rank from entries group by 0) order by 1",
            "group by 0: columns",
        ),
        (
            "select rank from entries union all (select rank from entries order by 0)",
            "order by 0: columns",
        ),
        (
            "with a as (select rank from entries order by 0) select * from a",
            "order by 0: columns",
        ),
        ("select rank from entries group by 999999", "999999"),
        ("select rank from entries order by 999999", "999999"),
        ("select rank from entries order by -1", "-1"),
        ("select rank from entries limit -1", "LIMIT"),
    ];
    for (sql, reason) in refused {
        let output = query(sql, &[]);
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{sql}: {text}");
        assert!(text.contains(reason), "{sql}: {text}");
    }
    let sql = "select rank, count(*) as n from entries group by 1 order by 1 limit 1";
    let output = query(sql, &["--format", "csv"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.starts_with("rank,n\n0,"), "{text}");
}

/// The fuzz target `query_sql` tries more variants.
#[test]
fn no_query_of_the_corpus_and_no_variant_of_one_panics() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fuzz/corpus/query_sql");
    let files = std::fs::read_dir(corpus)
        .expect("the corpus is checked in")
        .flatten();
    let mut queries = 0;
    for file in files {
        queries += 1;
        let query = std::fs::read(file.path()).expect("the query's file can be read");
        println!("{}", file.path().display());
        reader::query_sql(&query);
        for index in (0..query.len()).step_by(6) {
            // The query cut before this byte, without this byte, and with another one in its place.
            let (before, after) = (&query[..index], &query[index + 1..]);
            reader::query_sql(before);
            reader::query_sql(&[before, after].concat());
            reader::query_sql(&[before, b"(", after].concat());
        }
    }
    assert!(queries >= 4, "{queries} queries in the corpus");
}
