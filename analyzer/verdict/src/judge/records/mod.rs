//! Prepares records before they are aligned: selects those of one job ([`provenance`], [`misnamed`]), marks those from
//! which operations were left out ([`only_active`]), corrects states that a recorder could not know ([`aborted`],
//! [`refused`]), and adds time-outs that none noted ([`timeouts`]). [`unkept`] finds operations that no ring holds any
//! longer.

pub(crate) mod aborted;
pub(crate) mod misnamed;
pub(crate) mod only_active;
pub(crate) mod provenance;
pub(crate) mod refused;
pub(crate) mod timeouts;
pub(crate) mod unkept;
