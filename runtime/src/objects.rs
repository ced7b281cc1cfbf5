//! Collectives and messages of values that are no arrays: anything that serde can write and read.
//!
//! For settings, names and small tables, not for data: values travel as JSON, and one may have
//! [`MAX_OBJECT_BYTES`] at most. Lengths travel first, so that every rank refuses what is too long, and
//! none is left waiting. A collective of objects is one operation of the group, made of two; a message is
//! two messages. Some ranks may run a collective and others issue it.

use crate::buffer::Buffer;
use crate::error::{Error, ErrorKind, Result};
use crate::op::Op;
use crate::process_group::{End, Noted, ProcessGroup, Share};
use crate::work::Work;
use rcomm_recorder::model::{OpType, Peer};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::panic::Location;

/// The most bytes of one value, written as JSON.
pub const MAX_OBJECT_BYTES: usize = 64 << 20;

/// Sent in place of a length by a rank that could not write its value.
const UNWRITABLE: u64 = u64::MAX;

impl ProcessGroup {
    /// Every rank's `object` ends as the root's.
    ///
    /// # Errors
    /// On all ranks: `InvalidArgument` if the root's value is too long or cannot be written, `Mismatch`
    /// if a rank cannot read it as its own type (on that rank).
    #[track_caller]
    pub fn broadcast_object<T>(&self, object: &mut T, root: u32) -> Result<()>
    where
        T: Serialize + DeserializeOwned,
    {
        let place = self.place_with(root)?;
        let bytes = if place.is(root) {
            encode(object)
        } else {
            Vec::new()
        };
        let noted = noted(OpType::Broadcast);
        let value = self.carry_out(&noted, Location::caller(), |share| {
            broadcast(share, place, bytes, root)
        })?;
        if !place.is(root) {
            *object = decode(&value, root).map_err(|error| error.in_group(self.desc()))?;
        }
        Ok(())
    }

    /// As [`broadcast_object`](Self::broadcast_object), at once; the root's value comes with the
    /// [`Work`].
    #[track_caller]
    pub fn broadcast_object_async<T>(&self, object: T, root: u32) -> Result<Work<T>>
    where
        T: Serialize + DeserializeOwned + Send + 'static,
    {
        let place = self.place_with(root)?;
        let bytes = if place.is(root) {
            encode(&object)
        } else {
            Vec::new()
        };
        let noted = noted(OpType::Broadcast);
        self.set_aside(&noted, Location::caller(), move |share| {
            let value = broadcast(share, place, bytes, root)?;
            if place.is(root) {
                return Ok(object);
            }
            decode(&value, root)
        })
    }

    /// Everybody's objects, by rank.
    ///
    /// # Errors
    /// As [`broadcast_object`](Self::broadcast_object), for the value of any rank.
    #[track_caller]
    pub fn all_gather_object<T>(&self, object: &T) -> Result<Vec<T>>
    where
        T: Serialize + DeserializeOwned,
    {
        let (bytes, place) = (encode(object), self.place());
        let noted = noted(OpType::AllGatherV);
        self.carry_out(&noted, Location::caller(), |share| {
            decode_all(&all_gather(share, place, &bytes)?)
        })
    }

    /// As [`all_gather_object`](Self::all_gather_object), at once.
    #[track_caller]
    pub fn all_gather_object_async<T>(&self, object: &T) -> Result<Work<Vec<T>>>
    where
        T: Serialize + DeserializeOwned + Send + 'static,
    {
        let (bytes, place) = (encode(object), self.place());
        let noted = noted(OpType::AllGatherV);
        self.set_aside(&noted, Location::caller(), move |share| {
            decode_all(&all_gather(share, place, &bytes)?)
        })
    }

    /// On the root, everybody's objects by rank; elsewhere `None`.
    ///
    /// # Errors
    /// As [`broadcast_object`](Self::broadcast_object), for the value of any rank.
    #[track_caller]
    pub fn gather_object<T>(&self, object: &T, root: u32) -> Result<Option<Vec<T>>>
    where
        T: Serialize + DeserializeOwned,
    {
        let (bytes, place) = (encode(object), self.place_with(root)?);
        let noted = noted(OpType::GatherV);
        self.carry_out(&noted, Location::caller(), |share| {
            let parts = gather(share, place, &bytes, root)?;
            parts.map(|parts| decode_all(&parts)).transpose()
        })
    }

    /// As [`gather_object`](Self::gather_object), at once.
    #[track_caller]
    pub fn gather_object_async<T>(&self, object: &T, root: u32) -> Result<Work<Option<Vec<T>>>>
    where
        T: Serialize + DeserializeOwned + Send + 'static,
    {
        let (bytes, place) = (encode(object), self.place_with(root)?);
        let noted = noted(OpType::GatherV);
        self.set_aside(&noted, Location::caller(), move |share| {
            let parts = gather(share, place, &bytes, root)?;
            parts.map(|parts| decode_all(&parts)).transpose()
        })
    }

    /// The root's object for this rank. Elsewhere than on the root, `objects` is not looked at.
    ///
    /// # Errors
    /// `InvalidArgument` if the root does not give one for each rank; else as
    /// [`broadcast_object`](Self::broadcast_object).
    #[track_caller]
    pub fn scatter_object<T>(&self, objects: &[T], root: u32) -> Result<T>
    where
        T: Serialize + DeserializeOwned,
    {
        let place = self.place_with(root)?;
        let parts = parts_of(place, objects, root);
        let noted = noted(OpType::ScatterV);
        self.carry_out(&noted, Location::caller(), |share| {
            decode(&scatter(share, place, &parts, root)?, root)
        })
    }

    /// As [`scatter_object`](Self::scatter_object), at once.
    #[track_caller]
    pub fn scatter_object_async<T>(&self, objects: &[T], root: u32) -> Result<Work<T>>
    where
        T: Serialize + DeserializeOwned + Send + 'static,
    {
        let place = self.place_with(root)?;
        let parts = parts_of(place, objects, root);
        let noted = noted(OpType::ScatterV);
        self.set_aside(&noted, Location::caller(), move |share| {
            decode(&scatter(share, place, &parts, root)?, root)
        })
    }

    /// Sends a value to `peer`, which receives it with [`recv_object`](Self::recv_object).
    ///
    /// # Errors
    /// `InvalidArgument` if the value is too long or cannot be written; the receiver is told too.
    #[track_caller]
    pub fn send_object<T: Serialize>(&self, object: &T, peer: u32, tag: u32) -> Result<()> {
        let bytes = encode(object);
        let len = [length_of(&bytes)];
        self.send(&len, peer, tag)?;
        self.checked(&len, self.rank())?;
        self.send(&bytes, peer, tag)
    }

    /// As [`send_object`](Self::send_object), at once.
    #[track_caller]
    pub fn send_object_async<T: Serialize>(
        &self,
        object: &T,
        peer: u32,
        tag: u32,
    ) -> Result<Work<()>> {
        let bytes = encode(object);
        let len = vec![length_of(&bytes)];
        if let Err(error) = self.checked(&len, self.rank()) {
            self.send(&len, peer, tag)?;
            return Err(error);
        }
        let send = |buffer| Op::Send { buffer, peer, tag };
        let both = vec![send(Buffer::from_vec(len)), send(Buffer::from_vec(bytes))];
        let work = self.batch_isend_irecv(both)?;
        Ok(work.and_then(|_| Ok(())))
    }

    /// Receives a value from `peer`.
    ///
    /// # Errors
    /// `InvalidArgument` if the sender could not write it or it is too long; `Mismatch` if it cannot be
    /// read as a `T`.
    #[track_caller]
    pub fn recv_object<T: DeserializeOwned>(&self, peer: u32, tag: u32) -> Result<T> {
        let mut len = [0u64];
        self.recv(&mut len, peer, tag)?;
        self.checked(&len, peer)?;
        let mut bytes = vec![0; len[0] as usize];
        self.recv(&mut bytes, peer, tag)?;
        decode(&bytes, peer).map_err(|error| error.in_group(self.desc()))
    }

    fn checked(&self, len: &[u64], owner: u32) -> Result<()> {
        check_lengths(len, |_| owner).map_err(|error| error.in_group(self.desc()))
    }

    fn place(&self) -> Place {
        Place {
            rank: self.rank(),
            size: self.size(),
        }
    }

    /// The same, if there is such a root.
    fn place_with(&self, root: u32) -> Result<Place> {
        let buffer = Buffer::from_vec(vec![0u8]);
        Op::Broadcast { buffer, root }
            .validate(self.rank(), self.size())
            .map_err(|error| error.in_group(self.desc()))?;
        Ok(self.place())
    }
}

/// This rank among those of its group.
#[derive(Clone, Copy)]
struct Place {
    rank: u32,
    size: u32,
}

impl Place {
    fn is(self, rank: u32) -> bool {
        self.rank == rank
    }
}

/// Lengths, then values.
fn noted(op: OpType) -> Noted<'static> {
    Noted {
        op,
        backend: "objects",
        peer: Peer::None,
        tensor: None,
        collectives: 2,
        end: End::Watched,
    }
}

fn broadcast(share: &mut Share, place: Place, mut bytes: Vec<u8>, root: u32) -> Result<Vec<u8>> {
    let mut len = [0];
    if place.is(root) {
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

fn all_gather(share: &mut Share, place: Place, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
    let mut parts = zeros(&exchange_lengths(share, place, bytes)?);
    let outputs = parts.iter_mut().map(|part| Buffer::from_mut(part));
    share.run(&mut Op::AllGatherV {
        input: Buffer::from_slice(bytes),
        outputs: outputs.collect(),
    })?;
    Ok(parts)
}

fn gather(
    share: &mut Share,
    place: Place,
    bytes: &[u8],
    root: u32,
) -> Result<Option<Vec<Vec<u8>>>> {
    let lens = exchange_lengths(share, place, bytes)?;
    let mut parts = if place.is(root) {
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
    Ok(place.is(root).then_some(parts))
}

/// What the root gives, written; nothing elsewhere.
fn parts_of<T: Serialize>(place: Place, objects: &[T], root: u32) -> Vec<Vec<u8>> {
    if place.is(root) {
        objects.iter().map(encode).collect()
    } else {
        Vec::new()
    }
}

fn scatter(share: &mut Share, place: Place, parts: &[Vec<u8>], root: u32) -> Result<Vec<u8>> {
    let mut lens = vec![UNWRITABLE; place.size as usize];
    if place.is(root) && parts.len() == lens.len() {
        lens = parts.iter().map(|part| length_of(part)).collect();
    }
    let buffer = Buffer::from_mut(&mut lens);
    share.run(&mut Op::Broadcast { buffer, root })?;
    check_lengths(&lens, |_| root)?;
    let mut own = vec![0; lens[place.rank as usize] as usize];
    let inputs = parts.iter().map(|part| Buffer::from_slice(part));
    share.run(&mut Op::ScatterV {
        inputs: inputs.collect(),
        output: Buffer::from_mut(&mut own),
        root,
    })?;
    Ok(own)
}

fn exchange_lengths(share: &mut Share, place: Place, bytes: &[u8]) -> Result<Vec<u64>> {
    let mut lens = vec![0; place.size as usize];
    share.run(&mut Op::AllGatherSingle {
        input: Buffer::from_slice(&[length_of(bytes)]),
        output: Buffer::from_mut(&mut lens),
    })?;
    check_lengths(&lens, |rank| rank)?;
    Ok(lens)
}

/// Refuses, on every rank alike, what is too long or was not written.
fn check_lengths(lens: &[u64], owner: impl Fn(u32) -> u32) -> Result<()> {
    for (rank, &len) in (0u32..).zip(lens) {
        let owner = owner(rank);
        let message = if len == UNWRITABLE {
            format!("rank {owner} of the group could not write its value, or gave none")
        } else if len > MAX_OBJECT_BYTES as u64 {
            format!(
                "the value of rank {owner} of the group has {len} bytes, more than {MAX_OBJECT_BYTES}"
            )
        } else {
            continue;
        };
        return Err(Error::new(ErrorKind::InvalidArgument, message));
    }
    Ok(())
}

fn decode<T: DeserializeOwned>(bytes: &[u8], owner: u32) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|error| {
        Error::new(
            ErrorKind::Mismatch,
            format!("the value of rank {owner} of the group is not of this rank's type"),
        )
        .with_source(error)
    })
}

fn decode_all<T: DeserializeOwned>(parts: &[Vec<u8>]) -> Result<Vec<T>> {
    let parts = (0u32..).zip(parts);
    parts.map(|(rank, part)| decode(part, rank)).collect()
}

/// The value as JSON; empty, which no value is, if it cannot be written.
fn encode<T: Serialize>(object: &T) -> Vec<u8> {
    serde_json::to_vec(object).unwrap_or_default()
}

fn length_of(bytes: &[u8]) -> u64 {
    if bytes.is_empty() {
        UNWRITABLE
    } else {
        bytes.len() as u64
    }
}

fn zeros(lens: &[u64]) -> Vec<Vec<u8>> {
    lens.iter().map(|&len| vec![0; len as usize]).collect()
}
