//! Collectives and messages of values that are no arrays: anything that serde can write and read.
//!
//! For settings, names and small tables, not for data: values travel as JSON, and one may have
//! [`MAX_OBJECT_BYTES`] at most. Lengths travel first, so that every rank refuses what is too long, and
//! none is left waiting. Each call is two operations of the group.

use crate::element::Element;
use crate::error::{Error, ErrorKind, Result};
use crate::process_group::ProcessGroup;
use serde::Serialize;
use serde::de::DeserializeOwned;

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
        let is_root = self.rank() == root;
        let mut bytes = if is_root { encode(object) } else { Vec::new() };
        let mut len = [length_of(&bytes, is_root)];
        self.broadcast(&mut len, root)?;
        self.check_lengths(&len, |_| root)?;
        bytes.resize(len[0] as usize, 0);
        self.broadcast(&mut bytes, root)?;
        if !is_root {
            *object = self.decode(&bytes, root)?;
        }
        Ok(())
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
        let bytes = encode(object);
        let lens = self.exchange_lengths(&bytes)?;
        let mut parts = zeros(&lens);
        let mut outputs: Vec<&mut [u8]> = parts.iter_mut().map(Vec::as_mut_slice).collect();
        self.all_gather_v(&bytes, &mut outputs)?;
        self.decode_all(&parts)
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
        let bytes = encode(object);
        let lens = self.exchange_lengths(&bytes)?;
        let is_root = self.rank() == root;
        let mut parts = if is_root { zeros(&lens) } else { Vec::new() };
        let mut outputs: Vec<&mut [u8]> = parts.iter_mut().map(Vec::as_mut_slice).collect();
        self.gather_v(&bytes, &mut outputs, root)?;
        if !is_root {
            return Ok(None);
        }
        self.decode_all(&parts).map(Some)
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
        let size = self.size() as usize;
        let is_root = self.rank() == root;
        let parts: Vec<Vec<u8>> = if is_root {
            objects.iter().map(encode).collect()
        } else {
            Vec::new()
        };
        let mut lens = vec![UNWRITABLE; size];
        if is_root && parts.len() == size {
            lens = parts.iter().map(|part| length_of(part, true)).collect();
        }
        self.broadcast(&mut lens, root)?;
        self.check_lengths(&lens, |_| root)?;
        let mut own = vec![0; lens[self.rank() as usize] as usize];
        let inputs: Vec<&[u8]> = parts.iter().map(Vec::as_slice).collect();
        self.scatter_v(&inputs, &mut own, root)?;
        self.decode(&own, root)
    }

    /// Sends a value to `peer`, which receives it with [`recv_object`](Self::recv_object).
    ///
    /// # Errors
    /// `InvalidArgument` if the value is too long or cannot be written; the receiver is told too.
    #[track_caller]
    pub fn send_object<T: Serialize>(&self, object: &T, peer: u32, tag: u32) -> Result<()> {
        let bytes = encode(object);
        let len = [length_of(&bytes, true)];
        self.send(&len, peer, tag)?;
        self.check_lengths(&len, |_| self.rank())?;
        self.send(&bytes, peer, tag)
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
        self.check_lengths(&len, |_| peer)?;
        let mut bytes = vec![0; len[0] as usize];
        self.recv(&mut bytes, peer, tag)?;
        self.decode(&bytes, peer)
    }

    #[track_caller]
    fn exchange_lengths(&self, bytes: &[u8]) -> Result<Vec<u64>> {
        let mut lens = vec![0; self.size() as usize];
        self.all_gather_single(&[length_of(bytes, true)], &mut lens)?;
        self.check_lengths(&lens, |rank| rank)?;
        Ok(lens)
    }

    /// Refuses, on every rank alike, what is too long or was not written.
    fn check_lengths(&self, lens: &[u64], owner: impl Fn(u32) -> u32) -> Result<()> {
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
            return Err(Error::new(ErrorKind::InvalidArgument, message).in_group(self.desc()));
        }
        Ok(())
    }

    fn decode<T: DeserializeOwned>(&self, bytes: &[u8], owner: u32) -> Result<T> {
        serde_json::from_slice(bytes).map_err(|error| {
            Error::new(
                ErrorKind::Mismatch,
                format!("the value of rank {owner} of the group is not of this rank's type"),
            )
            .with_source(error)
            .in_group(self.desc())
        })
    }

    fn decode_all<T: DeserializeOwned>(&self, parts: &[Vec<u8>]) -> Result<Vec<T>> {
        let parts = (0u32..).zip(parts);
        parts.map(|(rank, part)| self.decode(part, rank)).collect()
    }
}

/// The value as JSON; empty, which no value is, if it cannot be written.
fn encode<T: Serialize>(object: &T) -> Vec<u8> {
    serde_json::to_vec(object).unwrap_or_default()
}

fn length_of(bytes: &[u8], is_owner: bool) -> u64 {
    if is_owner && bytes.is_empty() {
        UNWRITABLE
    } else {
        bytes.len() as u64
    }
}

fn zeros<T: Element>(lens: &[u64]) -> Vec<Vec<T>> {
    lens.iter()
        .map(|&len| vec![T::default(); len as usize])
        .collect()
}
