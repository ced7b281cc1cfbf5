//! Faults in what the ranks called: members, operations, sizes or orders that differ between them.

pub(super) mod extra_at_end;
pub(super) mod group_mismatch;
pub(super) mod mismatch;
pub(super) mod odd_message;
pub(super) mod p2p_size_mismatch;
pub(super) mod shifted;
pub(super) mod unequal_parts;
