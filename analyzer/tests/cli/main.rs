//! `rcomm-fr` as a script sees it: arguments in; output, errors and exit code out.
#![expect(clippy::unwrap_used, reason = "a test may fail where it stands")]

mod analyze;
mod collect;
mod diff;
mod explain;
mod help;
mod program;
mod ras;
mod rings;
mod summarize;
mod transcripts;
mod watch;
