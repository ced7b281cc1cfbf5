//! Several operations issued as one.
//!
//! The operations of a block share a sequence number, and none waits for another; all ranks of the group
//! list the same collectives in the same order.

use crate::group::p2p::coalesced_ops;
use crate::group::process_group::ProcessGroup;
use crate::group::work::Work;
use crate::op::buffer::Buffer;
use crate::op::element::Element;
use crate::op::error::Result;
use crate::op::{Op, Reduction};

/// Collects the operations of one block: either sends and receives, or collectives.
#[derive(Debug, Default)]
pub struct Coalescer<'a> {
    ops: Vec<Op<'a>>,
}

impl<'a> Coalescer<'a> {
    /// Adds any operation. Whether the block may hold it is checked when the block is issued.
    pub fn push(&mut self, op: Op<'a>) {
        self.ops.push(op);
    }

    /// Adds an `all_reduce`.
    pub fn all_reduce(&mut self, buffer: impl Into<Buffer<'a>>, op: impl Into<Reduction>) {
        self.push(Op::AllReduce {
            buffer: buffer.into(),
            op: op.into(),
        });
    }

    /// Adds a `broadcast`.
    pub fn broadcast(&mut self, buffer: impl Into<Buffer<'a>>, root: u32) {
        self.push(Op::Broadcast {
            buffer: buffer.into(),
            root,
        });
    }

    /// Adds an `all_gather_single`.
    pub fn all_gather_single(
        &mut self,
        input: impl Into<Buffer<'a>>,
        output: impl Into<Buffer<'a>>,
    ) {
        self.push(Op::AllGatherSingle {
            input: input.into(),
            output: output.into(),
        });
    }

    /// Adds a `reduce_scatter_single`.
    pub fn reduce_scatter_single(
        &mut self,
        input: impl Into<Buffer<'a>>,
        output: impl Into<Buffer<'a>>,
        op: impl Into<Reduction>,
    ) {
        self.push(Op::ReduceScatterSingle {
            input: input.into(),
            output: output.into(),
            op: op.into(),
        });
    }

    /// Adds a `send`.
    pub fn send<T: Element>(&mut self, buffer: &'a [T], peer: u32, tag: u32) {
        self.push(Op::Send {
            buffer: Buffer::from_slice(buffer),
            peer,
            tag,
        });
    }

    /// Adds a `recv`.
    pub fn recv<T: Element>(&mut self, buffer: &'a mut [T], peer: u32, tag: u32) {
        self.push(Op::Recv {
            buffer: Buffer::from_mut(buffer),
            peer: Some(peer),
            tag,
        });
    }
}

impl ProcessGroup {
    /// Runs the operations that `fill` adds as one operation, over the caller's memory. If `fill` adds none, no
    /// operation is issued: other members need not call this.
    ///
    /// # Blocking
    /// Until all operations of the block have ended, or the handle's time-out has passed.
    ///
    /// # Errors
    /// `InvalidArgument` if `fill` adds a block, or both collectives and messages; otherwise those of the operations.
    #[track_caller]
    pub fn coalesce<'a>(&self, fill: impl FnOnce(&mut Coalescer<'a>)) -> Result<()> {
        match self.collect(fill) {
            None => self.submit_empty().map(drop),
            Some(block) => self.run(block).map(drop),
        }
    }

    /// Like [`coalesce`](Self::coalesce), but returns at once; the [`Work`] returns the operations in their order, with
    /// their buffers.
    #[track_caller]
    pub fn coalesce_async(
        &self,
        fill: impl FnOnce(&mut Coalescer<'static>),
    ) -> Result<Work<Vec<Op<'static>>>> {
        match self.collect(fill) {
            None => self.submit_empty(),
            Some(block) => self.submit(block, coalesced_ops),
        }
    }

    /// The block of the operations that `fill` adds; `None` if it adds none.
    fn collect<'a>(&self, fill: impl FnOnce(&mut Coalescer<'a>)) -> Option<Op<'a>> {
        let mut block = Coalescer::default();
        fill(&mut block);
        (!block.ops.is_empty()).then_some(Op::Coalesced(block.ops))
    }
}
