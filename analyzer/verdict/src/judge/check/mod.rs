//! The checks: each looks for one kind of fault in the aligned records and the wait-for graph.
//!
//! A check returns drafts of findings; [`assemble`](crate::judge::assemble) ranks them, lists consequences under their
//! causes and counts victims. A new check is a type that implements [`Check`], in a new file in one of the folders
//! here. It has a line in [`ALL`], after the checks whose findings it needs to see, and, for a new kind of finding, a
//! [`Code`].

mod calls;
mod failures;
mod waits;
pub(crate) mod warnings;

pub(crate) use failures::rank_failed::gone_members;
pub(crate) use failures::recorded_failure::first_recorded_failure;

use crate::judge::context::{Context, FindingDraft};
use crate::report::Code;

/// One check; it keeps no state between runs.
pub(crate) trait Check: Sync {
    /// The codes of the findings that it may return.
    fn codes(&self) -> &'static [Code];

    /// Returns what it finds. `so_far` are the findings of the checks before it in [`ALL`].
    fn run(&self, ctx: &Context<'_>, so_far: &[FindingDraft]) -> Vec<FindingDraft>;
}

/// All checks, in the order in which they run: each sees the findings of those before it. Faults that the records prove
/// come first, then those that explain waits, then those that count only if nothing before explains the waits, and last
/// the warnings.
pub(crate) const ALL: &[&dyn Check] = &[
    &calls::group_mismatch::GroupMismatch,
    &calls::mismatch::Mismatch,
    &calls::shifted::Shifted,
    &calls::extra_at_end::ExtraAtEnd,
    &calls::unequal_parts::UnequalParts,
    &calls::odd_message::OddMessage,
    &calls::p2p_size_mismatch::P2pSizeMismatch,
    &failures::unreachable::Unreachable,
    &failures::rank_failed::ProcessGone,
    &failures::rank_frozen::RankFrozen,
    &waits::p2p_unmatched::P2pUnmatched,
    &waits::not_joined::NotJoined,
    &waits::left_the_ring::LeftTheRing,
    &waits::cross_group_deadlock::CrossGroupDeadlock,
    // After the checks that explain waits: it reports processes that are gone and that none of them blames.
    &failures::rank_failed::UnmissedProcessGone,
    &failures::recorded_failure::RecordedFailure,
    &waits::missing_dump::MissingDump,
    &failures::rank_failed::OperationFailed,
    &waits::all_arrived_stuck::AllArrivedStuck,
    &failures::store_lost::StoreLost,
    &failures::watchdog_stalled::WatchdogStalled,
    &warnings::straggler::Straggler,
    &warnings::timeout_too_close::TimeoutTooClose,
    &warnings::uneven_bytes::UnevenBytes,
    &warnings::tiny_collectives::TinyCollectives,
    &warnings::call_site_order::CallSiteOrder,
    &warnings::group_order::GroupOrder,
    &warnings::unbatched_sends::UnbatchedSends,
    &warnings::clock_uncertain::ClockUncertain,
    &warnings::ring_too_small::RingTooSmall,
];
