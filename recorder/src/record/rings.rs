//! The rings that a layout places in a ring file: of slots, and of words.

use super::layout::{RingLayout, header, kernel, link, peer, phase, reducer, slot};
use super::ring::{LapRing, SlotRing};

/// The slots of operations.
pub(crate) fn slots(layout: &RingLayout) -> SlotRing<{ slot::WORDS }> {
    SlotRing::new(layout.slots.word, layout.slots.rows)
}

/// The slots of phases.
pub(crate) fn phases(layout: &RingLayout) -> SlotRing<{ phase::WORDS }> {
    SlotRing::new(layout.phases.word, layout.phases.rows)
}

/// The ring for data of variable length.
pub(crate) fn lap_ring(layout: &RingLayout) -> LapRing {
    LapRing::new(header::LAP_HEAD, layout.lap.word, layout.lap.rows)
}

/// The slots of the operations' progress on their channels.
pub(crate) fn kernels(layout: &RingLayout) -> SlotRing<{ kernel::WORDS }> {
    SlotRing::new(layout.kernels.word, layout.kernels.rows.max(1))
}

/// The rows of the links' progress.
pub(crate) fn links(layout: &RingLayout) -> SlotRing<{ link::WORDS }> {
    SlotRing::new(layout.links.word, layout.links.rows.max(1))
}

/// The rows of connections to other ends.
pub(crate) fn peers(layout: &RingLayout) -> SlotRing<{ peer::WORDS }> {
    SlotRing::new(layout.peers.word, layout.peers.rows.max(1))
}

/// The slots of the steps of reducers.
pub(crate) fn reducer(layout: &RingLayout) -> SlotRing<{ reducer::WORDS }> {
    SlotRing::new(layout.reducer.word, layout.reducer.rows.max(1))
}
