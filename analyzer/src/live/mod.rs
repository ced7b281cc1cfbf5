//! The latest record of every rank, and a report kept fresh.
//!
//! [`Live`] is a value: it takes what sources observed and the time, and returns a
//! [`Snapshot`]. It starts no thread and reads no clock; [`Watch`](crate::Watch) does that.
//!
//! | file | holds |
//! |---|---|
//! | `judging` | [`Live`]: when the records are judged again, and what goes into a snapshot |
//! | `jobs` | the jobs of a node, for a list |
//! | `latest` | what each source saw last |
//! | `seen` | findings that no record shows |
//! | `views` | the ranks as views show them |
//! | [`source`] | where records are read from: rings, endpoints, files, collectors |
//! | `watch` | the threads that read sources and refresh a [`Live`] |
//! | [`recording`] | what was seen, written down and played back |
//! | [`simulate`] | a simulated job |

mod jobs;
mod judging;
mod latest;
mod options;
pub mod recording;
mod seen;
pub mod simulate;
mod snapshot;
pub mod source;
#[cfg(test)]
mod tests;
mod views;
mod watch;

pub use jobs::{JobsWatch, NodeJob, NodeJobs};
pub use judging::{Live, Urgency};
pub use options::{Judge, LiveOptions, Moment};
pub use snapshot::{RankView, Snapshot, SourceStatus};
pub use watch::{Anchor, Pace, Watch};
