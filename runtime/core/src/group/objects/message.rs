//! Values that one rank sends to another.

use super::encoding::{check_lengths, decode, encode, length_of};
use crate::backend::Done;
use crate::group::p2p::message;
use crate::group::process_group::{End, Next, OpParts, OpRecord, ProcessGroup, QueueKey};
use crate::group::work::Work;
use crate::op::Op;
use crate::op::buffer::Buffer;
use crate::op::error::Result;
use rcomm_recorder::model::{OpType, Peer};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::panic::Location;

impl ProcessGroup {
    /// Sends a value to `peer`, which receives it with [`recv_object`](Self::recv_object).
    ///
    /// # Blocking
    /// Until the value is sent; if it is long, until it is received.
    ///
    /// # Errors
    /// `InvalidArgument` if the value is too long or cannot be serialized; the receiver then gets an error too.
    #[track_caller]
    pub fn send_object<T: Serialize>(&self, object: &T, peer: u32, tag: u32) -> Result<()> {
        self.send_object_async(object, peer, tag)?.wait()
    }

    /// Like [`send_object`](Self::send_object), but returns at once.
    #[track_caller]
    pub fn send_object_async<T: Serialize>(
        &self,
        object: &T,
        peer: u32,
        tag: u32,
    ) -> Result<Work<()>> {
        let bytes = encode(object);
        let len = length_of(&bytes);
        let send = |buffer| Op::Send { buffer, peer, tag };
        let mut first = send(Buffer::from_vec(vec![len]));
        self.check_peer(&first)?;
        let own_rank = self.rank();
        let fits = check_lengths(&[len], |_| own_rank);
        if fits.is_ok() {
            first = Op::Coalesced(vec![first, send(Buffer::from_vec(bytes))]);
        }
        let op_record = op_record(OpType::Send, peer);
        self.issue_in_steps(&op_record, Location::caller(), None, first, move |_| {
            fits.clone().map(Next::Done)
        })
    }

    /// Receives a value from `peer`.
    ///
    /// # Blocking
    /// Until the value has arrived, and those before it from the same peer with the same tag.
    ///
    /// # Errors
    /// `InvalidArgument` if the value is too long or the sender could not serialize it; `Mismatch` if it cannot be
    /// deserialized as a `T`.
    #[track_caller]
    pub fn recv_object<T: DeserializeOwned>(&self, peer: u32, tag: u32) -> Result<T> {
        let work = self.receive(Location::caller(), peer, tag)?;
        self.read(&work.wait()?, peer)
    }

    /// Like [`recv_object`](Self::recv_object), but returns at once; the value comes with the [`Work`].
    ///
    /// Any number of receives may be under way; they get the values in the order of the calls. Until they
    /// have ended, nothing else may be received from this peer under this tag, since an object is two
    /// messages.
    #[track_caller]
    pub fn recv_object_async<T>(&self, peer: u32, tag: u32) -> Result<Work<T>>
    where
        T: DeserializeOwned + Send + 'static,
    {
        let work = self.receive(Location::caller(), peer, tag)?;
        let group = self.clone();
        Ok(work.and_then(move |bytes| group.read(&bytes, peer)))
    }

    /// Starts to receive the bytes of a value: first their number, then the bytes.
    fn receive(
        &self,
        site: &'static Location<'static>,
        peer: u32,
        tag: u32,
    ) -> Result<Work<Vec<u8>>> {
        let receive = move |buffer| Op::Recv {
            buffer,
            peer: Some(peer),
            tag,
        };
        let first = receive(Buffer::from_vec(vec![0u64]));
        self.check_peer(&first)?;
        let mut has_length = false;
        let then = move |op| {
            if has_length {
                return Ok(Next::Done(message::<u8>(op, Done::default())?));
            }
            let len = message::<u64>(op, Done::default())?;
            check_lengths(&len, |_| peer)?;
            has_length = true;
            let bytes = vec![0u8; len[0] as usize];
            Ok(Next::Issue(receive(Buffer::from_vec(bytes))))
        };
        let (op_record, queue) = (op_record(OpType::Recv, peer), QueueKey { peer, tag });
        self.issue_in_steps(&op_record, site, Some(queue), first, then)
    }

    fn read<T: DeserializeOwned>(&self, bytes: &[u8], peer: u32) -> Result<T> {
        decode(bytes, peer).map_err(|error| error.in_group(self.desc()))
    }

    fn check_peer(&self, op: &Op<'_>) -> Result<()> {
        op.validate(self.rank(), self.size())
            .map_err(|error| error.in_group(self.desc()))
    }
}

fn op_record(op: OpType, peer: u32) -> OpRecord<'static> {
    OpRecord {
        op,
        backend: "objects",
        peer: Peer::Rank(peer),
        tensor: None,
        parts: OpParts::Messages,
        end: End::Watched,
    }
}
