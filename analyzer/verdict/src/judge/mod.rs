//! From aligned records to a report: which ranks wait for which, why, and what to do.
//!
//! [`analysis`] is the entry. It selects the records of one job ([`provenance`]), aligns them, builds
//! the graph of waits ([`wait_graph`]) and finds its roots ([`sink`]); every file of [`check`] drafts
//! findings from one [`case`], and [`assemble`] ranks the drafts and writes the report.

mod analysis;
mod assemble;
mod bandwidth;
mod case;
mod check;
mod components;
mod disagreement;
mod lateness;
mod missed;
mod policy;
mod program_order;
mod programs;
mod provenance;
mod sink;
mod summary;
mod wait_graph;

pub use analysis::{Analysis, Unread, analyze};
pub use policy::Policy;
