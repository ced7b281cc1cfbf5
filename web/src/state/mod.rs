//! The state of jobs: the newest snapshots, a history of them, and the list of the node's jobs.

mod history;
pub(crate) mod jobs;
pub(crate) mod snapshot;
pub(crate) mod store;
