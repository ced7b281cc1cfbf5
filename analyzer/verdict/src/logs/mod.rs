//! Judgement of logs: what PyTorch's watchdog, NCCL, gloo and launchers print when a job fails.
//!
//! A log holds less than a dump: operations that failed, seldom those that did not happen. So every rule
//! states how sure it is, and where the lines do not decide, the report lists what to collect. Reading is
//! done elsewhere; here [`Log`]s come in and findings go out.
//!
//! Without any record the logs alone make the report. With records they are further evidence: a line that
//! agrees with a finding is cited there, one that contradicts it is cited as a contradiction.

mod digest;
mod facts;
mod failures;
mod join;
mod rules;
mod timeouts;

pub use facts::{Ended, Event, Fact, GroupName, Issued, Log, LoggedOp, Progress, TimedOut};
pub use join::join;
