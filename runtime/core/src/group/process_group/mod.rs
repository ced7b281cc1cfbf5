//! [`ProcessGroup`]: a set of ranks that communicate. Only this module gives an operation its sequence
//! number.
//!
//! | file | holds |
//! |---|---|
//! | `handle` | [`ProcessGroup`]: what programs hold |
//! | `group` | what all handles of a group share; how it fails, is aborted and closed |
//! | `issue` | the path of every operation from call to backend |
//! | `composite` | operations made of several, or carried another way |
//! | `worker`, `steps` | the threads on which they can be done, or go on |
//!
//! The operations themselves are in `collectives.rs` and `p2p.rs`. The watchdog polls operations that no
//! caller waits for.

mod composite;
mod group;
mod handle;
mod issue;
mod steps;
mod worker;

pub(crate) use composite::{End, OpRecord, Parts, Share};
pub(crate) use group::{Group, GroupParts, Lane};
pub use handle::ProcessGroup;
pub(crate) use steps::{Next, TagQueue};
