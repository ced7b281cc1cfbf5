//! Memory that all ranks of a host share: access to it, and the exchange area of each group in it.
//!
//! All ranks of a job on a host share one *segment*: a sealed memfd without a path, so no file remains, however
//! the ranks end. The segment starts with a table of ranks, a directory of groups, and a table of agreements. The
//! areas of the groups follow, all of the same length, and without memory until they are used. An area consists of a
//! [`ShmExchange`] and, after it, the rings of a [stream](ShmStream) for each pair of ranks.
//!
//! An *exchange area* has, for each rank of the group, two *lines*, used alternately, and memory in which the rank
//! places its *slots* one after the other, and then from the beginning again. All ranks go through the same *phases* 1,
//! 2, 3, ... In phase p a rank writes its slot p, which does not overlap its slot p - 1, and its line p % 2, then
//! stores p into the line's flag. It waits until every line p % 2 of the others shows p, and then reads those lines and
//! slots. This is the only synchronization, and it is sufficient: a rank overwrites the line and the slot of phase p in
//! phase p + 2 at the earliest. It enters that phase only after it has seen the flag p + 1 of all ranks, which they
//! stored after they had read the lines and slots of phase p. For the same reason two ranks may swap the positions of
//! their slots (two for each rank, used alternately) when both have been used: a position is used again at least two
//! phases later.
//!
//! Only processes of one user have the segment: it is passed to those that prove the job's secret, and a process that
//! the system lets open another's files can open it without. Whoever has it is trusted to keep to the phases: bytes
//! that are written at another time make results wrong, as wrong numbers would, and may be read half-written. Any bytes
//! are valid numbers, and lengths among them are checked as those from a socket are. A rank that dies while it writes
//! has not stored the flag, so no other rank reads the incomplete bytes.
//!
//! A rank that gives up a phase decides together with the others whether the phase has failed (`outcome`).
//! A rank that arrives later finds that decision, and gets an error for the operation as the others do.
//!
//! A waiter that has polled long enough sleeps on the flag (a futex). A sleeper sets a mark, and a writer that sees the
//! mark wakes it. There is deliberately no fence between the store of the flag and the load of the mark. The writer can
//! miss the mark in the nanoseconds that a store takes to become visible; the waiter then sees the flag at the end of
//! its sleep, at most ten milliseconds later.

mod agreement;
mod area;
mod close_guard;
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
pub(crate) use close_guard::{Awaited, CloseGuard};
pub(crate) use error::ShmExchangeError;
pub(crate) use segment::Segment;
pub(crate) use shm_exchange::{ShmExchange, Slots, Streams, Traffic};
pub(crate) use stream::{Found, ShmStream, StreamView, Waits};
