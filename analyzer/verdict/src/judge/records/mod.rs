//! What happens to records before they are aligned: those of one job are selected ([`provenance`]), and what recorders
//! could not know is added ([`aborted`], [`timeouts`]). [`unkept`] reads what is no longer in any ring.

pub(crate) mod aborted;
pub(crate) mod misnamed;
pub(crate) mod provenance;
pub(crate) mod refused;
pub(crate) mod timeouts;
pub(crate) mod unkept;
