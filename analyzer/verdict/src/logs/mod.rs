//! Judges logs: the lines that PyTorch's watchdog, NCCL, gloo and launchers print when a job fails.
//!
//! A log holds less than a dump: it shows operations that failed, but rarely those that were never issued. So every
//! rule states how sure it is, and if the lines do not decide, the report lists what to collect. Other crates read the
//! lines; this module turns [`Log`]s into findings.
//!
//! A log may show several attempts of a job. Only the newest is judged, without the lines of earlier ones. If there is
//! no record and the newest attempt holds no fact, the report is about an earlier attempt and states that.
//!
//! Without any record, the logs alone make the report. With records, they are further evidence: a finding cites the
//! lines that agree with it, and marks those that contradict it.

mod attempts;
mod conclusion;
mod digest;
mod ends;
mod facts;
mod failures;
mod gloo;
mod join;
mod rules;
mod timeouts;

pub use facts::{
    Absent, Attempt, Ended, Event, Fact, GroupName, Issued, Log, LoggedOp, Progress, TimedOut,
};
pub use join::join;
