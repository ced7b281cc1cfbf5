//! The SQL of `rcomm-fr query`, over the records of a small job. This reader is separate from the others: it needs the
//! feature `tables`, which costs minutes of build.

use rcomm_analyzer::export::tables::{TableFormat, Tables, write};
use rcomm_analyzer::{Policy, analyze};
use rcomm_recorder::publish::Dump;
use std::io::Cursor;
use std::sync::OnceLock;

/// The longest query that is tried, in bytes.
const MAX_QUERY: usize = 4096;

fn tables() -> &'static Tables {
    static TABLES: OnceLock<Tables> = OnceLock::new();
    TABLES.get_or_init(|| {
        let files: [&[u8]; 3] = [
            include_bytes!("../../corpus/read_dump/own.json"),
            include_bytes!("../../corpus/read_dump/hook.json"),
            include_bytes!("../../corpus/read_dump/gloo.json"),
        ];
        let dumps = files.map(|bytes| Dump::read(bytes).expect("the file is a dump").0);
        let report = analyze(&dumps, &Policy::default());
        Tables::new(&dumps, &report).expect("the dumps and the report fit in tables")
    })
}

/// Answers a query, or refuses it, without a panic. Skips queries that are too long or could open files.
pub fn query_sql(input: &[u8]) {
    let Ok(sql) = std::str::from_utf8(input) else {
        return;
    };
    // A function that reads or makes a table (`read_csv`) is for the user's own files: no test may open a file with a
    // random name.
    if sql.len() > MAX_QUERY || sql.to_ascii_lowercase().contains("read_") {
        return;
    }
    if let Ok(answer) = tables().query(sql) {
        write(&answer, TableFormat::Text, Cursor::new(Vec::new()))
            .expect("the answer can be written as text");
    }
}
