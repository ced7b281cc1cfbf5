//! The rings of slots that a layout places in a ring file.

use super::layout::{Layout, header, kernel, link, phase, slot};
use super::ring::{LapRing, SlotRing};

/// The slots of operations.
pub(crate) fn slots(layout: &Layout) -> SlotRing<{ slot::WORDS }> {
    SlotRing::new(layout.slots.word, layout.slots.rows)
}

/// The slots of phases.
pub(crate) fn phases(layout: &Layout) -> SlotRing<{ phase::WORDS }> {
    SlotRing::new(layout.phases.word, layout.phases.rows)
}

/// The ring of what varies.
pub(crate) fn lap_ring(layout: &Layout) -> LapRing {
    LapRing::new(header::LAP_HEAD, layout.lap.word, layout.lap.rows)
}

/// The rows of operations' progress.
pub(crate) fn kernels(layout: &Layout) -> SlotRing<{ kernel::WORDS }> {
    SlotRing::new(layout.kernels.word, layout.kernels.rows.max(1))
}

/// The rows of connections' progress.
pub(crate) fn links(layout: &Layout) -> SlotRing<{ link::WORDS }> {
    SlotRing::new(layout.links.word, layout.links.rows.max(1))
}
