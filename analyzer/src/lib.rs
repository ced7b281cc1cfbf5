//! Dumps in, findings out.
//!
//! A [`Report`] is what every analysis says, post-mortem or live: the same codes, names and
//! sentences in `rcomm-fr`, `rcomm-top` and `rcomm-web`.
#![forbid(unsafe_code)]

mod finding;
mod policy;
mod report;

pub use finding::{Code, Evidence, Finding, FrameRef, GroupRef, SeqKind, Severity};
pub use policy::Policy;
pub use report::{
    GroupReport, Input, InstanceReport, InstanceState, Problem, RankReport, Report, StackNode,
    Verdict, Wait,
};
