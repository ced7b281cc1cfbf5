//! What a rank does, written down while it does it.
//!
//! [`FlightRecorder`] is the whole face: it creates the ring, takes each operation as it is issued and
//! ends, and hands out a [`Dump`](crate::publish::Dump) of itself. `operation` is what it is told. Below
//! it, `ring` holds slots of atomic words that others read without asking, `progress` moves one of them
//! on, `layout` says where everything lies in the file and `header` writes its head, `signature` keeps
//! what repeats and `signature_cache` finds it again, `map` and `directory` own the file and its place,
//! and `decode` turns the words back into a dump, for the owner and for readers outside alike.

pub(crate) mod bytes;
#[cfg(feature = "endpoint")]
pub(crate) mod changes;
pub(crate) mod clock;
mod config;
pub(crate) mod decode;
pub(crate) mod directory;
mod flight_recorder;
mod header;
mod lap;
pub(crate) mod layout;
pub(crate) mod map;
mod operation;
pub(crate) mod process;
mod progress;
pub(crate) mod ring;
#[cfg(test)]
mod ring_model;
mod signature;
mod signature_cache;
pub(crate) mod sync;
mod tables;

pub use clock::Timestamp;
pub use config::{Placement, RecorderConfig, Storage, Touch};
pub use directory::default_directory;
pub use flight_recorder::{Counters, FlightRecorder};
pub use operation::{CallSite, CallSiteId, GroupHandle, Operation, SignatureRef, Start, Ticket};
pub use signature::{SignatureId, SignatureKey, Tensor};
pub use signature_cache::SignatureCache;
