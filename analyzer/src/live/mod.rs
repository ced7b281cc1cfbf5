//! The latest record of every rank, and a report that is kept current.
//!
//! [`Live`] takes the observations of sources and the time, and returns a [`Snapshot`]. It starts no thread;
//! [`Watch`](crate::Watch) does that.
//!
//! | file | holds |
//! |---|---|
//! | `judging` | [`Live`]: when the records are judged again, and the making of a snapshot |
//! | `jobs` | the list of a node's jobs with their verdicts |
//! | `latest` | the last answer of each source |
//! | `look` | the command that shows more about a rank |
//! | `options` | [`LiveOptions`], and [`Moment`], a time on both clocks |
//! | `reducers` | the newest step of each reducer |
//! | `seen` | findings that no record shows |
//! | `snapshot` | [`Snapshot`] and [`RankView`]: the data that a view shows |
//! | `states` | the states of ranks and groups that every view shows |
//! | `views` | the ranks as views show them |
//! | [`source`] | the sources of records, such as rings, endpoints, files and collectors |
//! | `watch` | the threads that read sources and refresh a [`Live`] |
//! | [`recording`] | recorded views, and their replay |
//! | [`simulate`] | a simulated job |

mod jobs;
mod judging;
mod latest;
mod look;
mod options;
pub mod recording;
mod reducers;
mod seen;
pub mod simulate;
mod snapshot;
pub mod source;
mod states;
#[cfg(test)]
mod tests;
mod views;
mod watch;

pub use jobs::{JobsWatch, NodeJob, NodeJobs};
pub use judging::{Live, Urgency};
pub use options::{Judge, LiveOptions, Moment};
pub use reducers::ReducerView;
pub use snapshot::{RankView, Snapshot, SourceStatus};
pub use states::{GroupState, RankState, States};
pub use watch::{Anchor, Pace, Watch};
