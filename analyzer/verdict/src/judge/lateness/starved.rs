//! Decides whether a late rank was late because its threads got no processor.
//!
//! In that case its host has more to run than processors, and any other rank in its place would have come late. The
//! recorder counts these waits (`ProcessorWait`) for the newest one to two minutes only, so they are compared with what
//! the rank cost in that time.
//!
//! They are also compared with the waits of the other ranks of the host. Ranks that already wait in their operations
//! take turns on the processors. A rank that works or sleeps in that time waits less for a processor than they do: its
//! lateness has another cause.

use super::chance::Loss;
use super::hosts::Hosts;
use crate::align::{Aligned, RecordIx};
use rcomm_recorder::model::{ProcessorWait, Rank};

/// Waits for a processor explain a rank's lateness if they add up to at least this share of it. They need not add up to
/// all: threads that issue no operations wait too, are not measured, and delay those that do.
const EXPLAINS: f64 = 0.5;
/// A rank got more processor time than the other ranks of its host if it waited for a processor for at most this share
/// of what each of them waited.
const WAITS_LESS: f64 = 0.75;

/// A rank that came late because it waited for a processor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Starved {
    /// The index of the rank's first record.
    pub(crate) record: RecordIx,
    /// How long its threads waited for a processor, ms.
    pub(crate) waited_ms: f64,
    /// What the rank's lateness cost in the same time, ms.
    pub(crate) cost_ms: f64,
}

/// The waits of the rank whose first record is `first`, if they explain its losses; else `None`.
pub(super) fn starved(
    aligned: &Aligned<'_>,
    hosts: &Hosts,
    first: RecordIx,
    losses: &[(Loss, f32)],
) -> Option<Starved> {
    let rank = aligned.records[first].rank;
    let (record, wait) = wait_of(aligned, rank)?;
    let since_ns = wait.since_ns.saturating_sub(aligned.offsets_ns[record]);
    let of_rank = losses.iter().map(|(loss, _)| loss);
    let of_rank = of_rank.filter(|loss| loss.unit == first && loss.at_ns >= since_ns);
    let cost_ms: f64 = of_rank.map(|loss| f64::from(loss.ms)).sum();
    let waited_ms = wait.waited_ns as f64 / 1e6;
    let explains = cost_ms > 0.0 && waited_ms >= cost_ms * EXPLAINS;
    (explains && !waits_less(aligned, hosts, rank)).then_some(Starved {
        record: first,
        waited_ms,
        cost_ms,
    })
}

/// The waits of a rank, with the record that counted them; `None` if none did.
fn wait_of(aligned: &Aligned<'_>, rank: Rank) -> Option<(RecordIx, ProcessorWait)> {
    aligned.records_of(rank).find_map(|record| {
        let wait = aligned.records[record].processor_wait?;
        (wait.since_ns > 0).then_some((record, wait))
    })
}

/// Whether a rank waited clearly less than each other rank of its host whose waits are known. False if no others are
/// known.
fn waits_less(aligned: &Aligned<'_>, hosts: &Hosts, rank: Rank) -> bool {
    // The records count for times of different lengths.
    let share = |rank: Rank| -> Option<f64> {
        let (record, wait) = wait_of(aligned, rank)?;
        let counted_ns = aligned.records[record].latest_ns() - wait.since_ns;
        (counted_ns > 0).then(|| wait.waited_ns as f64 / counted_ns as f64)
    };
    let host = aligned.records_of(rank).find_map(|record| hosts.of(record));
    let Some((waited, host)) = share(rank).zip(host) else {
        return false;
    };
    let others = hosts.ranks(host).iter().copied();
    let least = others
        .filter(|other| *other != rank)
        .filter_map(share)
        .reduce(f64::min);
    least.is_some_and(|least| waited <= least * WAITS_LESS)
}
