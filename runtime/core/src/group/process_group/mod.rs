//! [`ProcessGroup`]: a set of ranks that communicate. Only this module gives an operation its sequence
//! number.
//!
//! | file | holds |
//! |---|---|
//! | `handle` | [`ProcessGroup`]: a program's handle to a group |
//! | `group` | the state that all handles of a group share; how a group fails, is aborted and closed |
//! | `issue` | the path of a single [`Op`](crate::Op) from call to backend |
//! | `composite` | operations that consist of several, or use a window or the store |
//! | `worker`, `steps` | the threads that run operations of `composite` in the background |
//!
//! The operations themselves are in the other modules of [`group`](super), such as `collectives` and `p2p`. The
//! watchdog polls operations that no caller waits for.

mod composite;
mod group;
mod handle;
mod issue;
mod steps;
mod worker;

pub(crate) use composite::{End, OpParts, OpRecord, Share};
pub use group::Timing;
pub(crate) use group::{Group, GroupParts, Lane};
pub use handle::ProcessGroup;
pub(crate) use steps::{Next, QueueKey};
