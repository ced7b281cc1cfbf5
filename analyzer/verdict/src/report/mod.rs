//! The result of an analysis, and helpers to show it.
//!
//! [`document`] has the report, `first_line` the sentence that views begin with, [`finding`] the table of finding
//! codes, [`explain`](mod@explain) the explanation of each code, [`difference`] the changes between two reports,
//! [`causes`] the chain of waits, [`filter`] the filter language of the live views, [`matrix`](mod@matrix) the
//! collectives of a group by rank, [`format`](mod@format) the text of ranks, times and sizes, `names` that of groups,
//! `refs` what findings refer to, and `stack` the merged call stacks.

pub mod causes;
mod difference;
mod document;
mod explain;
pub mod filter;
mod finding;
mod first_line;
pub mod format;
pub mod matrix;
mod names;
mod refs;
mod stack;

pub use difference::{Difference, GroupChange};
pub use document::{
    EndKind, GroupReport, Input, InstanceReport, InstanceState, JobEnd, LogInput, Place, Problem,
    RankReport, Report, Verdict, Wait,
};
pub use explain::{Explanation, explain};
pub use finding::{Code, Evidence, Finding, LogLine, Price, Severity, Since, Until};
pub use refs::{FrameRef, GroupRef, SeqKind};
pub use stack::StackNode;
