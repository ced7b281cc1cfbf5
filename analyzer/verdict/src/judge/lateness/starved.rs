//! Decides whether a late rank was late because its threads got no processor.
//!
//! Then its host has more to run than processors, and any other rank in its place would have come late: this says
//! nothing about the rank. The recorder counts these waits (`ProcessorWait`) for the newest one to two minutes only, so
//! they are compared with what the rank cost in that time.

use super::chance::Loss;
use crate::align::{Aligned, RecordIx};

/// Waits for a processor explain a rank's lateness if they add up to at least this share of it: threads that issue no
/// operations wait too, are not measured, and delay those that do.
const EXPLAINS: f64 = 0.5;

/// A rank that came late and had no processor for as long.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Starved {
    /// The index of the rank's first record.
    pub(crate) record: RecordIx,
    /// How long its threads waited for a processor, ms.
    pub(crate) waited_ms: f64,
    /// What the rank's lateness cost in the same time, ms.
    pub(crate) cost_ms: f64,
}

/// The waits of a rank, if they explain its losses.
pub(super) fn starved(
    aligned: &Aligned<'_>,
    first: RecordIx,
    losses: &[(Loss, f32)],
) -> Option<Starved> {
    let mut records = aligned.records_of(aligned.records[first].rank);
    let (record, wait) = records.find_map(|record| {
        let wait = aligned.records[record].processor_wait?;
        (wait.since_ns > 0).then_some((record, wait))
    })?;
    let since_ns = wait.since_ns.saturating_sub(aligned.offsets_ns[record]);
    let own = losses.iter().map(|(loss, _)| loss);
    let own = own.filter(|loss| loss.unit == first && loss.at_ns >= since_ns);
    let cost_ms: f64 = own.map(|loss| f64::from(loss.ms)).sum();
    let waited_ms = wait.waited_ns as f64 / 1e6;
    (cost_ms > 0.0 && waited_ms >= cost_ms * EXPLAINS).then_some(Starved {
        record: first,
        waited_ms,
        cost_ms,
    })
}
