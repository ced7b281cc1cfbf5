//! Memory that all ranks of a host share: how they come to have it, and the exchange area that a group has in it.
//!
//! One *segment* for all ranks of a job on a host: a sealed memfd without a name, so nothing is left
//! behind whatever happens to the ranks. It starts with a table of ranks, a directory of groups, and a table of
//! what members of groups have agreed on; then
//! come the areas of the groups, all of one length and empty until used. An area is a [`ShmExchange`], and behind it
//! the rings of a [stream](ShmStream) for each pair of ranks.
//!
//! An *exchange area* has, for each rank of the group, two *lines*, used in turn, and room for *slots*, one
//! behind the other and then from the beginning again; all ranks go through the same *phases* 1, 2, 3, ... In
//! phase p a rank writes its slot p, which does not overlap its slot p - 1, and its line p % 2, then stores p
//! into the line's flag; it waits until every line p % 2 of the others shows p, and then reads those lines
//! and slots. That is all the synchronisation there is. It is enough: a rank overwrites what it wrote in
//! phase p when it enters phase p + 2 at the earliest, which it does only after it has seen the flag p + 1 of
//! all ranks, which they stored after they had read everything of phase p. For the same reason two ranks may
//! swap the places of their slots, which are two for each, used in turn, when both have been used: a place is
//! used again two phases later at the earliest.
//!
//! Only ranks of this job have the segment: it is handed to processes of the same user that know the job's
//! secret. Such a rank is trusted to keep to the phases: what it writes out of turn spoils results, as wrong
//! numbers would, and may be read half-written. Any bytes are valid numbers, and lengths among them are
//! checked as those that come by a socket are. A rank that dies has not stored the flag of what it left half
//! done, so no other reads that.
//!
//! A rank that gives a phase up decides with the others whether it has failed (`outcome`): a rank that comes
//! later finds that decision, and gets an error for the operation as the others do.
//!
//! A waiter that has looked long enough sleeps on the flag (a futex). The writer wakes it if it has seen
//! the waiter's mark. There is deliberately no fence between its flag and that look: the mark can be
//! missed in the nanoseconds that a store takes to become visible, and the waiter then finds the flag
//! at the end of its sleep, a few milliseconds later at most.

mod agreement;
mod area;
mod error;
#[allow(unsafe_code)]
mod mapping;
mod outcome;
mod segment;
#[allow(unsafe_code)]
mod shm_exchange;
#[allow(unsafe_code)]
mod stream;

pub(crate) use area::{INLINE, SLOT};
pub(crate) use error::ShmExchangeError;
pub(crate) use segment::Segment;
pub(crate) use shm_exchange::{CloseGuard, ShmExchange, Slots, Streams, Traffic};
pub(crate) use stream::{Found, ShmStream, Sight, Waits};
