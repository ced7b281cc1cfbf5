//! [`ProcessGroup`]: ranks that do things together, and the one place where an operation gets its
//! number.
//!
//! | file | holds |
//! |---|---|
//! | `handle` | [`ProcessGroup`]: what programs hold |
//! | `group` | what all handles of a group share; how it fails, is aborted and closed |
//! | `issue` | the road of every operation |
//! | `composite` | operations made of several, or carried another way |
//! | `pending_job`, `steps` | the threads on which they can be done, or go on |
//!
//! What the operations are called is next door (`collectives.rs`, `p2p.rs`); who looks after them when
//! nobody waits is the watchdog.

mod composite;
mod group;
mod handle;
mod issue;
mod steps;
mod worker;

pub(crate) use composite::{End, Noted, Parts, Share};
pub(crate) use group::{Group, GroupParts, Lane};
pub use handle::ProcessGroup;
pub(crate) use steps::{Next, TagQueue};
