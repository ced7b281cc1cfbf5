//! The state that the server shows: the newest snapshot of the job, and a history of earlier ones.

mod history;
pub(crate) mod snapshot;
pub(crate) mod store;
