//! Messages from one rank to another, alone and in batches.

use crate::backend::Done;
use crate::group::collectives::{vec_of, wrong_op_error};
use crate::group::process_group::ProcessGroup;
use crate::group::work::Work;
use crate::op::Op;
use crate::op::buffer::Buffer;
use crate::op::element::Element;
use crate::op::error::{Error, ErrorKind, Result};

impl ProcessGroup {
    /// Sends `buffer` to `peer` under a tag; only a receive with the same tag gets it.
    ///
    /// # Blocking
    /// Until the memory may be used again; a small message (in host memory, up to 64 KiB) may not have arrived by then.
    /// So `Ok` does not say that it was or will be received.
    ///
    /// # Errors
    /// `Mismatch` if the receiver expects another type or length. If the message was already sent (in host
    /// memory, up to 64 KiB), the group's next operation on this rank fails instead, with an error that
    /// reports this mismatch.
    #[track_caller]
    pub fn send<T: Element>(&self, buffer: &[T], peer: u32, tag: u32) -> Result<()> {
        let buffer = Buffer::from_slice(buffer);
        self.run(Op::Send { buffer, peer, tag })?;
        Ok(())
    }

    /// Like [`send`](Self::send), but returns at once; the vector comes back with the [`Work`].
    #[track_caller]
    pub fn send_async<T: Element>(
        &self,
        buffer: Vec<T>,
        peer: u32,
        tag: u32,
    ) -> Result<Work<Vec<T>>> {
        let buffer = Buffer::from_vec(buffer);
        self.submit(Op::Send { buffer, peer, tag }, message)
    }

    /// Receives the next message of `peer` under this tag into `buffer`.
    ///
    /// # Blocking
    /// Until the message has arrived, or the handle's time-out has passed.
    ///
    /// # Errors
    /// `Mismatch` if the message has another type or length than `buffer`.
    #[track_caller]
    pub fn recv<T: Element>(&self, buffer: &mut [T], peer: u32, tag: u32) -> Result<()> {
        let buffer = Buffer::from_mut(buffer);
        let peer = Some(peer);
        self.run(Op::Recv { buffer, peer, tag })?;
        Ok(())
    }

    /// Like [`recv`](Self::recv), but returns at once; the vector comes back with the [`Work`].
    #[track_caller]
    pub fn recv_async<T: Element>(
        &self,
        buffer: Vec<T>,
        peer: u32,
        tag: u32,
    ) -> Result<Work<Vec<T>>> {
        let buffer = Buffer::from_vec(buffer);
        let peer = Some(peer);
        self.submit(Op::Recv { buffer, peer, tag }, message)
    }

    /// Receives the next message from any rank under this tag; returns the sender's rank in the group.
    ///
    /// # Errors
    /// Those of [`recv`](Self::recv).
    #[track_caller]
    pub fn recv_any<T: Element>(&self, buffer: &mut [T], tag: u32) -> Result<u32> {
        let buffer = Buffer::from_mut(buffer);
        let peer = None;
        source_of(self.run(Op::Recv { buffer, peer, tag })?)
    }

    /// Like [`recv_any`](Self::recv_any), but returns at once; the vector and the sender come with the [`Work`].
    #[track_caller]
    pub fn recv_any_async<T: Element>(
        &self,
        buffer: Vec<T>,
        tag: u32,
    ) -> Result<Work<(Vec<T>, u32)>> {
        let buffer = Buffer::from_vec(buffer);
        let peer = None;
        self.submit(Op::Recv { buffer, peer, tag }, |op, done| {
            Ok((message(op, done)?, source_of(done)?))
        })
    }

    /// Starts several sends and receives at once. None waits for another, so both ends may list them in any
    /// order. The [`Work`] returns the operations in the order of `ops`, with their buffers. An empty list is no
    /// operation: its [`Work`] has ended.
    ///
    /// A rank may send to itself if the same list receives the message: the first send under a tag goes to the first
    /// receive under it, and so on.
    ///
    /// # Errors
    /// `InvalidArgument` if the list holds anything but sends and receives, or one half only of a message to this
    /// rank itself.
    #[track_caller]
    pub fn batch_isend_irecv(&self, ops: Vec<Op<'static>>) -> Result<Work<Vec<Op<'static>>>> {
        if ops.is_empty() {
            return self.submit_empty();
        }
        if !ops.iter().all(|op| op.op_type().is_p2p()) {
            return Err(Error::new(
                ErrorKind::InvalidArgument,
                "a batch holds sends and receives, and nothing else",
            ));
        }
        self.submit(Op::Coalesced(ops), coalesced_ops)
    }
}

/// The vector of a send or receive that has ended.
pub(crate) fn message<T: Element>(op: Op<'static>, _: Done) -> Result<Vec<T>> {
    if let Op::Send { buffer, .. } | Op::Recv { buffer, .. } = op {
        vec_of(buffer)
    } else {
        Err(wrong_op_error(op))
    }
}

/// The operations of a coalesced block that has ended.
pub(crate) fn coalesced_ops(op: Op<'static>, _: Done) -> Result<Vec<Op<'static>>> {
    if let Op::Coalesced(ops) = op {
        Ok(ops)
    } else {
        Err(wrong_op_error(op))
    }
}

fn source_of(done: Done) -> Result<u32> {
    done.source.ok_or_else(|| {
        Error::new(
            ErrorKind::Backend,
            "the backend did not return the sender of the message it received",
        )
    })
}
