//! What an analysis returns, and helpers to show it.
//!
//! [`document`] is the report itself, [`finding`] the table of finding codes, [`explain`] the long text
//! of each code, [`format`] the text of ranks, groups, times and sizes.

pub mod causes;
mod difference;
mod document;
mod explain;
pub mod filter;
mod finding;
pub mod format;
pub mod matrix;

pub use difference::{Difference, GroupChange};
pub use document::{
    EndKind, GroupReport, Input, InstanceReport, InstanceState, JobEnd, LogInput, Problem,
    RankReport, Report, StackNode, Verdict, Wait,
};
pub use explain::{Explanation, explain};
pub use finding::{
    Code, Evidence, Finding, FrameRef, GroupRef, LogLine, SeqKind, Severity, Since, Until,
};
