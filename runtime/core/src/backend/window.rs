//! Registered memory of a backend, and memory that all members of a group can reach.

use crate::backend::memory::RemoteMemory;
use crate::op::buffer::Buffer;
use crate::op::deadline::Deadline;
use crate::op::error::{Error, ErrorKind, Result};
use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

/// Memory that is registered with a backend ([`Backend::register`](crate::backend::Backend::register)). Keeps the
/// memory's owner alive.
#[derive(Clone)]
pub struct Registration {
    /// The backend's own number for the memory.
    pub id: u64,
    /// The owner of the memory.
    pub owner: Arc<dyn Any + Send + Sync>,
}

/// Memory of all members of a group, which each member reads and writes one-sidedly.
///
/// Offsets are in bytes. A read that overlaps a write may return part of the new data: order comes from
/// signals. A rank may name itself as the peer.
///
/// # Blocking
/// A method that takes a deadline may wait until then.
///
/// # Errors
/// `InvalidArgument` for a peer or a range that does not exist; `Timeout` at the deadline; `Closed` once the window was
/// closed or given up; the error of the abort once the group was aborted; `Unsupported` for what the backend or its
/// library cannot do.
pub trait BackendWindow: Send + Sync {
    /// The size in bytes of the part of rank `group_rank`; 0 if the group has no such rank. Once the window has ended,
    /// it may be 0 for every rank.
    fn size_bytes(&self, group_rank: u32) -> usize;

    /// Writes into the part of `peer`. Returns when `from` may be used again.
    fn put(&self, peer: u32, offset: usize, from: &Buffer<'_>, deadline: Deadline) -> Result<()>;

    /// Reads from the part of `peer`.
    fn get(
        &self,
        peer: u32,
        offset: usize,
        into: &mut Buffer<'_>,
        deadline: Deadline,
    ) -> Result<()>;

    /// Adds one to the count of signals that `peer` has from this rank, once everything that this rank put there before
    /// has arrived.
    fn signal(&self, peer: u32, deadline: Deadline) -> Result<()>;

    /// Consumes one signal from `peer`, and waits for it if there is none.
    fn wait_signal(&self, peer: u32, deadline: Deadline) -> Result<()>;

    /// Consumes one signal from `peer` if there is one; returns whether there was. Does not wait.
    fn take_signal(&self, peer: u32) -> Result<bool>;

    /// The part of `peer` in this process's own address space.
    ///
    /// # Errors
    /// `Unsupported` where it cannot be mapped; `put` and `get` still reach it.
    fn map_remote(&self, peer: u32) -> Result<RemoteMemory>;

    /// Waits until `word`, a word of a [mapped](Self::map_remote) part, is `from`, and sets it to `to` in one step;
    /// wakes those that wait for it. `peer` is the rank that makes it `from`, and `awaited` says what that rank has to
    /// do, for errors (`send a signal`).
    ///
    /// # Errors
    /// `Timeout` at the deadline. The default, for windows whose parts cannot be mapped: `Unsupported`.
    fn exchange_word(
        &self,
        peer: u32,
        word: &AtomicU32,
        (from, to): (u32, u32),
        awaited: fmt::Arguments<'_>,
        deadline: Deadline,
    ) -> Result<()> {
        let _ = (peer, word, from, to, awaited, deadline);
        let message = "the windows of this backend have no words that a rank can wait for";
        Err(Error::new(ErrorKind::Unsupported, message))
    }

    /// Ends the window; all members call it. Returns this rank's memory, unless a member still has it mapped.
    ///
    /// # Blocking
    /// Until all members have called it, or the deadline.
    fn close(&self, deadline: Deadline) -> Result<Option<Buffer<'static>>>;

    /// Ends the window at once, for this rank alone, even if other ranks still use it. When this returns, this rank's
    /// memory is used only where it is mapped: through [`map_remote`](Self::map_remote), or by the windows of other
    /// ranks.
    ///
    /// The default does nothing. That suffices if the backend keeps the memory alive for as long as any rank can reach
    /// it.
    fn give_up(&self) {}
}
