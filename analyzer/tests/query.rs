//! `rcomm-fr query` on real dumps: the feature `tables`.

use std::process::{Command, Output};

fn query(sql: &str, more: &[&str]) -> Output {
    let dumps = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../tests/fixtures/dumps/cascade-2x2x2/pickle"
    );
    Command::new(env!("CARGO_BIN_EXE_rcomm-fr"))
        .args(["query", sql, dumps])
        .args(more)
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
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("entries.parquet");
    let output = query(
        "select * from entries",
        &["--format", "parquet", "-o", path.to_str().expect("utf-8")],
    );
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let bytes = std::fs::read(&path).expect("written");
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
