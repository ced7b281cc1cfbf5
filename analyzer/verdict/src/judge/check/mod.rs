//! The checks: each looks for one kind of fault in the aligned records and the wait-for graph.
//!
//! A check returns drafts of findings; [`assemble`](crate::judge::assemble) ranks them, lists consequences under their
//! causes and counts victims. Adding a check means adding a type that implements [`Check`], a line in [`ALL`] after the
//! checks whose findings it needs to see, and, for a new kind of finding, a [`Code`].

mod all_arrived_stuck;
mod call_site_order;
mod clock_uncertain;
mod cross_group_deadlock;
mod group_mismatch;
mod group_order;
mod mismatch;
mod missing_dump;
mod not_joined;
mod odd_message;
mod p2p_size_mismatch;
mod p2p_unmatched;
mod rank_failed;
mod rank_frozen;
mod recorded_failure;
mod ring_too_small;
mod shifted;
mod store_lost;
pub(crate) mod straggler;
mod timeout_too_close;
mod tiny_collectives;
mod unbatched_sends;
mod unequal_parts;
mod uneven_bytes;
mod unreachable;
mod watchdog_stalled;

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
    &group_mismatch::GroupMismatch,
    &mismatch::Mismatch,
    &shifted::Shifted,
    &unequal_parts::UnequalParts,
    &odd_message::OddMessage,
    &p2p_size_mismatch::P2pSizeMismatch,
    &unreachable::Unreachable,
    &rank_failed::ProcessGone,
    &rank_frozen::RankFrozen,
    &p2p_unmatched::P2pUnmatched,
    &not_joined::NotJoined,
    &cross_group_deadlock::CrossGroupDeadlock,
    // After the checks that explain waits: it reports processes that are gone and that none of them blames.
    &rank_failed::UnmissedProcessGone,
    &recorded_failure::RecordedFailure,
    &missing_dump::MissingDump,
    &rank_failed::OperationFailed,
    &all_arrived_stuck::AllArrivedStuck,
    &store_lost::StoreLost,
    &watchdog_stalled::WatchdogStalled,
    &straggler::Straggler,
    &timeout_too_close::TimeoutTooClose,
    &uneven_bytes::UnevenBytes,
    &tiny_collectives::TinyCollectives,
    &call_site_order::CallSiteOrder,
    &group_order::GroupOrder,
    &unbatched_sends::UnbatchedSends,
    &clock_uncertain::ClockUncertain,
    &ring_too_small::RingTooSmall,
];
