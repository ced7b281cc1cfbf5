//! The latest record of every rank, and a report kept fresh.
//!
//! [`Live`] is a value: it is told what sources saw and what time it is, and answers with a
//! [`Snapshot`]. It starts no thread and reads no clock; [`Watch`](crate::Watch) does that.
//!
//! | file | holds |
//! |---|---|
//! | `judging` | [`Live`]: when the records are judged again, and what goes into a snapshot |
//! | `kept` | what each source saw last |
//! | `seen` | findings that no record tells |
//! | `views` | the ranks as views show them |

mod judging;
mod kept;
mod options;
mod seen;
mod snapshot;
#[cfg(test)]
mod tests;
mod views;

pub use judging::{Live, Urgency};
pub use options::{Judge, LiveOptions, Moment};
pub use snapshot::{RankView, Snapshot, SourceStatus};
