//! Records a rank's operations in a ring, as they are issued and as they end.
//!
//! [`FlightRecorder`] is the interface: it creates the ring, takes each operation as it is issued and as it ends, and
//! returns a [`Dump`](crate::publish::Dump) of itself. Its input is an [`Operation`] (`operation`). Below it, `ring`
//! holds slots of atomic words that others read without a lock, and `progress` updates a slot. `layout` defines the
//! format, `file` is the ring's file and its owner's memory. `signature` encodes signatures, and `tables` stores each
//! repeated value once. `failures`, `peers`, `reducer` and `nccl` hold what a ring has besides operations. `decode`
//! turns the words back into a dump, for the owner and for readers outside.

pub(crate) mod bytes;
#[cfg(feature = "endpoint")]
pub(crate) mod changes;
pub(crate) mod clock;
mod config;
pub(crate) mod decode;
pub(crate) mod failures;
pub(crate) mod file;
mod flight_recorder;
mod lap;
pub(crate) mod layout;
pub(crate) mod nccl;
mod operation;
pub(crate) mod peers;
pub(crate) mod process;
mod processor_wait;
mod progress;
pub(crate) mod reducer;
pub(crate) mod ring;
#[cfg(test)]
mod ring_model;
pub(crate) mod rings;
mod signature;
pub(crate) mod sync;
mod tables;

pub use clock::Timestamp;
pub use config::{Placement, RecorderConfig, RingPart, Storage, Touch};
pub use file::directory::{default_directory, fallback_directory};
pub use file::names::is_ring_or_unnamed;
pub use flight_recorder::{
    ChannelEvent, CommunicatorInfo, Counters, FlightRecorder, KernelPlan, LinkHandle, LinkPlace,
    OnConflict, PeerHandle,
};
pub use nccl::{ALGORITHMS, PROTOCOLS};
pub use operation::{CallSite, CallSiteId, GroupHandle, Operation, SignatureRef, Start, Ticket};
pub use peers::PeerFacts;
pub use signature::cache::SignatureCache;
pub use signature::{SignatureId, SignatureKey, Tensor};
