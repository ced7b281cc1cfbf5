//! What the server knows of the job: the newest snapshots, and a history of them.

mod history;
pub(crate) mod snapshot;
pub(crate) mod store;
