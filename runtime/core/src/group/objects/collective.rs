//! Collectives of values that serde can serialize and deserialize.

use super::encoding::{NO_VALUE, check_lengths, decode, decode_all, encode, length_of, zeros};
use crate::group::process_group::{End, OpParts, OpRecord, ProcessGroup, Share};
use crate::group::work::Work;
use crate::op::Op;
use crate::op::buffer::Buffer;
use crate::op::error::Result;
use rcomm_recorder::model::{OpType, Peer};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::panic::Location;

impl ProcessGroup {
    /// Every rank's `object` ends as the root's.
    ///
    /// # Errors
    /// `InvalidArgument`, on all ranks, if the root's value is too long or cannot be serialized. `Mismatch`, only on
    /// the ranks that cannot deserialize the value as their type.
    #[track_caller]
    pub fn broadcast_object<T>(&self, object: &mut T, root: u32) -> Result<()>
    where
        T: Serialize + DeserializeOwned,
    {
        let membership = self.membership_with(root)?;
        let bytes = if membership.is_rank(root) {
            encode(object)
        } else {
            Vec::new()
        };
        let op_record = op_record(OpType::Broadcast);
        let value = self.run_recorded(&op_record, Location::caller(), |share| {
            broadcast(share, membership, bytes, root)
        })?;
        if !membership.is_rank(root) {
            *object = decode(&value, root).map_err(|error| error.in_group(self.desc()))?;
        }
        Ok(())
    }

    /// Like [`broadcast_object`](Self::broadcast_object), but returns at once; the root's value comes with the
    /// [`Work`].
    #[track_caller]
    pub fn broadcast_object_async<T>(&self, object: T, root: u32) -> Result<Work<T>>
    where
        T: Serialize + DeserializeOwned + Send + 'static,
    {
        let membership = self.membership_with(root)?;
        let bytes = if membership.is_rank(root) {
            encode(&object)
        } else {
            Vec::new()
        };
        let op_record = op_record(OpType::Broadcast);
        self.run_on_worker(&op_record, Location::caller(), move |share| {
            let value = broadcast(share, membership, bytes, root)?;
            if membership.is_rank(root) {
                return Ok(object);
            }
            decode(&value, root)
        })
    }

    /// Returns the objects of all ranks, by rank.
    ///
    /// # Errors
    /// Those of [`broadcast_object`](Self::broadcast_object), for the value of any rank.
    #[track_caller]
    pub fn all_gather_object<T>(&self, object: &T) -> Result<Vec<T>>
    where
        T: Serialize + DeserializeOwned,
    {
        let (bytes, membership) = (encode(object), self.membership());
        let op_record = op_record(OpType::AllGatherV);
        self.run_recorded(&op_record, Location::caller(), |share| {
            decode_all(&all_gather(share, membership, &bytes)?)
        })
    }

    /// Like [`all_gather_object`](Self::all_gather_object), but returns at once.
    #[track_caller]
    pub fn all_gather_object_async<T>(&self, object: &T) -> Result<Work<Vec<T>>>
    where
        T: Serialize + DeserializeOwned + Send + 'static,
    {
        let (bytes, membership) = (encode(object), self.membership());
        let op_record = op_record(OpType::AllGatherV);
        self.run_on_worker(&op_record, Location::caller(), move |share| {
            decode_all(&all_gather(share, membership, &bytes)?)
        })
    }

    /// Returns the objects of all ranks on the root, by rank; `None` elsewhere.
    ///
    /// # Errors
    /// Those of [`broadcast_object`](Self::broadcast_object), for the value of any rank.
    #[track_caller]
    pub fn gather_object<T>(&self, object: &T, root: u32) -> Result<Option<Vec<T>>>
    where
        T: Serialize + DeserializeOwned,
    {
        let (bytes, membership) = (encode(object), self.membership_with(root)?);
        let op_record = op_record(OpType::GatherV);
        self.run_recorded(&op_record, Location::caller(), |share| {
            let parts = gather(share, membership, &bytes, root)?;
            parts.map(|parts| decode_all(&parts)).transpose()
        })
    }

    /// Like [`gather_object`](Self::gather_object), but returns at once.
    #[track_caller]
    pub fn gather_object_async<T>(&self, object: &T, root: u32) -> Result<Work<Option<Vec<T>>>>
    where
        T: Serialize + DeserializeOwned + Send + 'static,
    {
        let (bytes, membership) = (encode(object), self.membership_with(root)?);
        let op_record = op_record(OpType::GatherV);
        self.run_on_worker(&op_record, Location::caller(), move |share| {
            let parts = gather(share, membership, &bytes, root)?;
            parts.map(|parts| decode_all(&parts)).transpose()
        })
    }

    /// Returns the root's object for this rank. `objects` is ignored on ranks other than the root.
    ///
    /// # Errors
    /// `InvalidArgument`, on all ranks, if the root does not give one object for each rank; otherwise as
    /// [`broadcast_object`](Self::broadcast_object).
    #[track_caller]
    pub fn scatter_object<T>(&self, objects: &[T], root: u32) -> Result<T>
    where
        T: Serialize + DeserializeOwned,
    {
        let membership = self.membership_with(root)?;
        let parts = parts_of(membership, objects, root);
        let op_record = op_record(OpType::ScatterV);
        self.run_recorded(&op_record, Location::caller(), |share| {
            decode(&scatter(share, membership, &parts, root)?, root)
        })
    }

    /// Like [`scatter_object`](Self::scatter_object), but returns at once.
    #[track_caller]
    pub fn scatter_object_async<T>(&self, objects: &[T], root: u32) -> Result<Work<T>>
    where
        T: Serialize + DeserializeOwned + Send + 'static,
    {
        let membership = self.membership_with(root)?;
        let parts = parts_of(membership, objects, root);
        let op_record = op_record(OpType::ScatterV);
        self.run_on_worker(&op_record, Location::caller(), move |share| {
            decode(&scatter(share, membership, &parts, root)?, root)
        })
    }

    fn membership(&self) -> Membership {
        Membership {
            rank: self.rank(),
            size: self.size(),
        }
    }

    /// Like `membership`, but checks that `root` is a rank of the group.
    fn membership_with(&self, root: u32) -> Result<Membership> {
        let buffer = Buffer::from_vec(vec![0u8]);
        Op::Broadcast { buffer, root }
            .validate(self.rank(), self.size())
            .map_err(|error| error.in_group(self.desc()))?;
        Ok(self.membership())
    }
}

/// This rank's number in its group, and the size of the group.
#[derive(Clone, Copy)]
struct Membership {
    rank: u32,
    size: u32,
}

impl Membership {
    fn is_rank(self, rank: u32) -> bool {
        self.rank == rank
    }
}

/// The record of an operation on objects. Such an operation consists of two collectives: one of the lengths, one of the
/// values.
fn op_record(op: OpType) -> OpRecord<'static> {
    OpRecord {
        op,
        backend: "objects",
        peer: Peer::None,
        tensor: None,
        parts: OpParts::Collectives(2),
        end: End::Watched,
    }
}

/// Sends the length of the root's bytes, then the bytes. Returns the bytes, on all ranks.
fn broadcast(
    share: &mut Share,
    membership: Membership,
    mut bytes: Vec<u8>,
    root: u32,
) -> Result<Vec<u8>> {
    let mut len = [0];
    if membership.is_rank(root) {
        len = [length_of(&bytes)];
    }
    let buffer = Buffer::from_mut(&mut len);
    share.run(&mut Op::Broadcast { buffer, root })?;
    check_lengths(&len, |_| root)?;
    bytes.resize(len[0] as usize, 0);
    let buffer = Buffer::from_mut(&mut bytes);
    share.run(&mut Op::Broadcast { buffer, root })?;
    Ok(bytes)
}

/// Exchanges the lengths, then the bytes. Returns the bytes of all ranks.
fn all_gather(share: &mut Share, membership: Membership, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
    let mut parts = zeros(&exchange_lengths(share, membership, bytes)?);
    let outputs = parts.iter_mut().map(|part| Buffer::from_mut(part));
    share.run(&mut Op::AllGatherV {
        input: Buffer::from_slice(bytes),
        outputs: outputs.collect(),
    })?;
    Ok(parts)
}

/// Exchanges the lengths, then gathers the bytes on the root; `None` elsewhere.
fn gather(
    share: &mut Share,
    membership: Membership,
    bytes: &[u8],
    root: u32,
) -> Result<Option<Vec<Vec<u8>>>> {
    let lens = exchange_lengths(share, membership, bytes)?;
    let mut parts = if membership.is_rank(root) {
        zeros(&lens)
    } else {
        Vec::new()
    };
    let outputs = parts.iter_mut().map(|part| Buffer::from_mut(part));
    share.run(&mut Op::GatherV {
        input: Buffer::from_slice(bytes),
        outputs: outputs.collect(),
        root,
    })?;
    Ok(membership.is_rank(root).then_some(parts))
}

/// The root's values, encoded; empty on other ranks.
fn parts_of<T: Serialize>(membership: Membership, objects: &[T], root: u32) -> Vec<Vec<u8>> {
    if membership.is_rank(root) {
        objects.iter().map(encode).collect()
    } else {
        Vec::new()
    }
}

/// Sends the lengths of the root's parts, then each rank its part. Returns this rank's part.
fn scatter(
    share: &mut Share,
    membership: Membership,
    parts: &[Vec<u8>],
    root: u32,
) -> Result<Vec<u8>> {
    let mut lens = vec![NO_VALUE; membership.size as usize];
    if membership.is_rank(root) && parts.len() == lens.len() {
        lens = parts.iter().map(|part| length_of(part)).collect();
    }
    let buffer = Buffer::from_mut(&mut lens);
    share.run(&mut Op::Broadcast { buffer, root })?;
    check_lengths(&lens, |_| root)?;
    let mut own_part = vec![0; lens[membership.rank as usize] as usize];
    let inputs = parts.iter().map(|part| Buffer::from_slice(part));
    share.run(&mut Op::ScatterV {
        inputs: inputs.collect(),
        output: Buffer::from_mut(&mut own_part),
        root,
    })?;
    Ok(own_part)
}

/// The lengths of the bytes of all ranks. Refuses those that [`check_lengths`] refuses.
fn exchange_lengths(share: &mut Share, membership: Membership, bytes: &[u8]) -> Result<Vec<u64>> {
    let mut lens = vec![0; membership.size as usize];
    share.run(&mut Op::AllGatherSingle {
        input: Buffer::from_slice(&[length_of(bytes)]),
        output: Buffer::from_mut(&mut lens),
    })?;
    check_lengths(&lens, |rank| rank)?;
    Ok(lens)
}
