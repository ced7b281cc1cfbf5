//! Faults that stop no operation, or have not yet: lateness, uneven work, risky orders, doubtful records.

pub(super) mod call_site_order;
pub(super) mod clock_uncertain;
pub(super) mod group_order;
pub(super) mod ring_too_small;
pub(crate) mod straggler;
pub(super) mod timeout_too_close;
pub(super) mod tiny_collectives;
pub(super) mod unbatched_sends;
pub(super) mod uneven_bytes;
