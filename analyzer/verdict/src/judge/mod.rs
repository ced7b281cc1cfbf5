//! Makes a report from records: which ranks wait for which, why, and what to do.
//!
//! [`analysis`] is the entry point. It selects the records of one job ([`provenance`]), aligns them, builds the graph
//! of waits ([`wait_graph`]) and finds its roots ([`wait_root`]); every [`check`] drafts findings from one [`context`],
//! and [`assemble`] ranks the drafts and writes the report.

mod aborted;
mod analysis;
mod assemble;
mod bandwidth;
mod block;
mod channels;
mod check;
mod components;
mod context;
mod disagreement;
mod elsewhere;
mod lateness;
mod life;
mod loss;
mod missed;
mod overcome;
mod policy;
mod price;
mod program_order;
mod programs;
mod provenance;
mod siblings;
mod silence;
mod summary;
mod timeouts;
mod wait_graph;
mod wait_root;

pub use analysis::{Analysis, Unread, analyze};
pub use policy::Policy;
