//! Memory that all ranks of a host share: how they get access to it, and the exchange area of a group in
//! it.
//!
//! All ranks of a job on a host share one *segment*: a sealed memfd without a name, so no file is left
//! behind whatever happens to the ranks. The segment starts with a table of ranks, a directory of groups,
//! and a table of what members of groups have agreed on. The areas of the groups follow, all of one length
//! and empty until used. An area consists of a [`ShmExchange`] and, after it, the rings of a
//! [stream](ShmStream) for each pair of ranks.
//!
//! An *exchange area* has, for each rank of the group, two *lines*, used alternately, and room for *slots*,
//! one after the other and then from the beginning again. All ranks go through the same *phases* 1, 2, 3,
//! ... In phase p a rank writes its slot p, which does not overlap its slot p - 1, and its line p % 2, then
//! stores p into the line's flag. It waits until every line p % 2 of the others shows p, and then reads
//! those lines and slots. This is the only synchronization, and it is sufficient: a rank overwrites what it
//! wrote in phase p when it enters phase p + 2 at the earliest. It does that only after it has seen the
//! flag p + 1 of all ranks, which they stored after they had read everything of phase p. For the same
//! reason two ranks may swap the places of their slots (two for each rank, used alternately) when both have
//! been used: a place is used again two phases later at the earliest.
//!
//! Only ranks of this job have the segment: it is passed to processes of the same user that prove the job's
//! secret. Such a rank is trusted to keep to the phases: bytes that it writes out of turn spoil results, as
//! wrong numbers would, and may be read half-written. Any bytes are valid numbers, and lengths among them
//! are checked as those from a socket are. A rank that dies has not stored the flag of what it left
//! incomplete, so no other rank reads that.
//!
//! A rank that gives up a phase decides together with the others whether the phase has failed (`outcome`).
//! A rank that arrives later finds that decision, and gets an error for the operation as the others do.
//!
//! A waiter that has polled long enough sleeps on the flag (a futex). The writer wakes it if the writer has
//! seen the waiter's mark. There is deliberately no fence between the store of the flag and the load of the
//! mark: the mark can be missed in the nanoseconds that a store takes to become visible, and the waiter
//! then finds the flag at the end of its sleep, at most ten milliseconds later.

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
pub(crate) use stream::{Found, ShmStream, StreamView, Waits};
