//! Tests `rcomm-fr` from outside: its output, errors and exit codes.
#![expect(clippy::unwrap_used, reason = "a test may panic")]

mod analyze;
mod collect;
mod diff;
mod explain;
// The snapshots of help are those of the program as it is built by default.
#[cfg(not(feature = "tables"))]
mod help;
mod links;
mod look;
mod nccl_plugin;
mod program;
mod progress;
mod ras;
mod redact;
mod rings;
#[path = "../sources/server.rs"]
mod server;
mod summarize;
mod transcripts;
mod trends;
mod views;
mod watch;
