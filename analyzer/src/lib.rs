//! Dumps in, findings out.
//!
//! A [`Report`] is what every analysis says, post-mortem or live: the same codes, names and
//! sentences in `rcomm-fr`, `rcomm-top` and `rcomm-web`.
#![forbid(unsafe_code)]

pub mod causes;
mod difference;
mod explain;
pub mod export;
pub mod filter;
mod finding;
pub mod label;
mod live;
pub mod load;
pub mod matrix;
mod policy;
pub mod print;
mod report;
pub mod simulate;
pub mod source;
mod watch;

pub use difference::{Difference, GroupChange};
pub use explain::{Explanation, explain};
pub use finding::{Code, Evidence, Finding, FrameRef, GroupRef, SeqKind, Severity};
pub use live::{Judge, Live, LiveOptions, Moment, RankView, Snapshot, SourceStatus};
pub use policy::Policy;
pub use report::{
    GroupReport, Input, InstanceReport, InstanceState, Problem, RankReport, Report, StackNode,
    Verdict, Wait,
};
pub use source::Source;
pub use watch::{Anchor, Pace, Watch};
