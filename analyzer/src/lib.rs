//! Reads the records of a job, from files or live, and judges them.
//!
//! A [`Report`] is the result of every analysis, post-mortem or live: the same codes, names and
//! sentences in `rcomm-fr`, `rcomm-top` and `rcomm-web`.
#![forbid(unsafe_code)]

mod input;
mod live;
mod render;

pub use input::{load, log, ras, rsum};
pub use live::source::{self, Source};
pub use live::{
    Anchor, JobsWatch, Judge, Live, LiveOptions, Moment, NodeJob, NodeJobs, Pace, RankView,
    Snapshot, SourceStatus, Urgency, Watch, recording, simulate,
};
pub use rcomm_verdict::{
    Analysis, Code, Difference, Evidence, Explanation, Extent, Finding, FrameRef, GroupChange,
    GroupRef, GroupReport, Input, InstanceReport, InstanceState, LogInput, LogLine, Message,
    MessageNumbers, Policy, Problem, RankReport, Report, SeqKind, Severity, StackNode, Unread,
    Verdict, Wait, analyze, causes, explain, filter, format, logs, matrix,
};
pub use render::{export, print};
