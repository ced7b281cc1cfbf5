//! The checks: one question each, asked of the aligned records and the wait-for graph.
//!
//! A check hands in drafts; [`assemble`](crate::assemble) ranks them, hangs consequences under their
//! causes and counts victims. Adding a check means adding a file and a line in [`ALL`].

mod all_arrived_stuck;
mod cross_group_deadlock;
mod mismatch;
mod missing_dump;
mod not_joined;
mod p2p_size_mismatch;
mod p2p_unmatched;
mod shifted;
mod straggler;

use crate::case::{Case, Draft};
use crate::finding::Code;

/// One question.
pub(crate) trait Check: Sync {
    /// The codes of the findings it may hand in.
    fn codes(&self) -> &'static [Code];

    /// Looks, and hands in what it finds. `so_far` are the findings of the checks before it in [`ALL`].
    fn run(&self, case: &Case<'_>, so_far: &[Draft]) -> Vec<Draft>;
}

/// All checks. Those that need no other's answer come first.
pub(crate) const ALL: &[&dyn Check] = &[
    &mismatch::Mismatch,
    &shifted::Shifted,
    &p2p_size_mismatch::P2pSizeMismatch,
    &p2p_unmatched::P2pUnmatched,
    &not_joined::NotJoined,
    &cross_group_deadlock::CrossGroupDeadlock,
    &missing_dump::MissingDump,
    &all_arrived_stuck::AllArrivedStuck,
    &straggler::Straggler,
];
