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
pub mod export;
pub mod filter;
mod finding;
mod lateness;
mod live;
pub mod load;
pub mod matrix;
mod membership;
mod missed;
mod p2p;
mod pending;
mod policy;
pub mod print;
mod program_order;
mod programs;
mod provenance;
pub mod ras;
mod record;
pub mod recording;
mod report;
mod retired;
pub mod rsum;
mod signature;
pub mod simulate;
mod sink;
pub mod source;
mod summary;
mod wait_graph;
mod watch;
pub mod words;

pub use align::needs_everybody;
pub use analysis::{Analysis, Unread, analyze};
pub use difference::{Difference, GroupChange};
pub use explain::{Explanation, explain};
pub use finding::{Code, Evidence, Finding, FrameRef, GroupRef, SeqKind, Severity};
pub use live::{Judge, Live, LiveOptions, Moment, RankView, Snapshot, SourceStatus, Urgency};
pub use policy::Policy;
pub use record::Extent;
pub use report::{
    GroupReport, Input, InstanceReport, InstanceState, Problem, RankReport, Report, StackNode,
    Verdict, Wait,
};
pub use source::Source;
pub use watch::{Anchor, Pace, Watch};
