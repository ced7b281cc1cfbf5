//! Dumps in, findings out.
//!
//! A [`Report`] is what every analysis says, post-mortem or live: the same codes, names and
//! sentences in `rcomm-fr`, `rcomm-top` and `rcomm-web`.
#![forbid(unsafe_code)]

mod align;
mod analysis;
mod assemble;
mod bandwidth;
mod case;
pub mod causes;
mod check;
mod clocks;
mod comm_counter;
mod components;
mod difference;
mod disagreement;
mod event;
mod explain;
pub mod filter;
mod finding;
mod input;
mod lateness;
mod live;
pub mod matrix;
mod membership;
mod missed;
mod p2p;
mod pending;
mod policy;
mod program_order;
mod programs;
mod provenance;
mod record;
mod render;
mod report;
mod retired;
mod signature;
mod sink;
mod summary;
mod wait_graph;
pub mod words;

pub use align::needs_everybody;
pub use analysis::{Analysis, Unread, analyze};
pub use difference::{Difference, GroupChange};
pub use explain::{Explanation, explain};
pub use finding::{Code, Evidence, Finding, FrameRef, GroupRef, SeqKind, Severity};
pub use input::{load, ras, rsum};
pub use live::source::{self, Source};
pub use live::{
    Anchor, Judge, Live, LiveOptions, Moment, Pace, RankView, Snapshot, SourceStatus, Urgency,
    Watch, recording, simulate,
};
pub use policy::Policy;
pub use record::Extent;
pub use render::{export, print};
pub use report::{
    GroupReport, Input, InstanceReport, InstanceState, Problem, RankReport, Report, StackNode,
    Verdict, Wait,
};
