//! The records of all ranks side by side, matched by group and sequence number.
//!
//! [`record`] holds one rank's record in compact columns, [`membership`] resolves the groups of a job,
//! and [`aligned`] joins both into [`Aligned`], which everything else here reads: sends and their
//! receives ([`p2p`], by the rule of [`message`]), clock offsets ([`clocks`]), and what each rank has pending ([`pending`]).

mod aligned;
pub(crate) mod clocks;
pub(crate) mod comm_counter;
pub(crate) mod event;
mod membership;
mod message;
pub(crate) mod p2p;
pub(crate) mod pending;
pub(crate) mod record;
mod retired;
mod seats;
pub(crate) mod signature;

pub use message::{Message, MessageNumbers};
pub use record::Extent;

pub(crate) use aligned::{Aligned, Lane, Presence, UnknownReason, is_message, retiring_is_all};
pub(crate) use membership::{GroupIx, RecordIx};
