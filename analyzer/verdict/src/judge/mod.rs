//! Makes a report from records: which ranks wait for which, why, and what to do.
//!
//! [`analysis`] is the entry point. It selects and corrects the records of one job ([`records`]), aligns them, builds
//! the graph of waits and finds its roots ([`waits`]); every [`check`] drafts findings from one [`context`], and
//! [`assemble`] ranks the drafts and writes the report.

mod analysis;
mod assemble;
mod bandwidth;
mod block;
mod channels;
mod check;
mod context;
mod disagreement;
mod elsewhere;
mod lateness;
mod life;
mod loss;
mod outdated;
mod overcome;
mod policy;
mod price;
mod program_order;
mod programs;
mod records;
mod siblings;
mod silence;
mod summary;
mod unmissed;
mod waits;
mod young;

pub use analysis::{Analysis, Unread, analyze};
pub use life::raised::is_exception;
pub use policy::{LaterAttempt, Policy, RecordFile};
