//! Runs arbitrary text as a query of `rcomm-fr query`, which must not panic.
#![no_main]

#[path = "readers/sql.rs"]
mod sql;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|input: &[u8]| sql::query_sql(input));
