//! Matches the records of all ranks by group and sequence number.
//!
//! [`shared`] converts dumps into compact records ([`record`]), [`corrections`] and `batches` repair what some
//! recorders leave out or record differently, and [`membership`] resolves the groups of a job. [`aligned`] puts all of
//! it together as [`Aligned`]. From that, [`p2p`] pairs sends with receives by the rule of [`message`], [`clocks`]
//! estimates clock offsets, and [`pending`] and [`one_sided`] list the pending operations of each rank. [`presence`]
//! says whether a rank issued a collective, and [`event`] when it came to a point of the program. [`taken`] marks
//! records that were taken too early. [`signature`] compares the arguments of calls, and [`numbers`] sums up what all
//! members of a group recorded.

mod aligned;
mod batches;
pub(crate) mod clocks;
mod comm_members;
pub(crate) mod corrections;
pub(crate) mod event;
mod gloo_world;
mod membership;
mod message;
mod numbers;
pub(crate) mod one_sided;
pub(crate) mod p2p;
pub(crate) mod pending;
mod presence;
mod ran_on;
pub(crate) mod record;
pub(crate) mod shared;
pub(crate) mod signature;
mod taken;
mod workers;

pub use message::{Message, MessageNumbers};
pub use record::{Extent, MAX_WORLD, ended_ns, retiring_is_all, seq_of, status_entry};
pub use workers::Workers;

pub(crate) use aligned::{Aligned, Alignment, Lane};
pub(crate) use gloo_world::GlooWorld;
pub(crate) use membership::{Group, GroupIx, RecordIx, names_newest_only};
pub(crate) use numbers::{Number, Numbers};
pub(crate) use presence::{Presence, UnknownReason};
pub(crate) use record::position;
pub(crate) use taken::{EARLY, Taken};
