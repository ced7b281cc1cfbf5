//! Values as bytes, and the checks of their lengths.

use crate::op::error::{Error, ErrorKind, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The most bytes of one value as JSON: 64 MiB.
pub const MAX_OBJECT_BYTES: usize = 64 << 20;

/// The length that a rank sends if it could not serialize its value, or, as the root of a scatter, was not given one
/// for each rank.
pub(super) const NO_VALUE: u64 = u64::MAX;

/// Refuses, on every rank alike, a value that is too long or could not be serialized. `owner` returns the
/// rank in the group whose length has this index.
///
/// # Errors
/// `InvalidArgument` names the first such rank.
pub(super) fn check_lengths(lens: &[u64], owner: impl Fn(u32) -> u32) -> Result<()> {
    for (index, &len) in (0u32..).zip(lens) {
        let owner = owner(index);
        let message = if len == NO_VALUE {
            format!(
                "rank {owner} of the group gave no value that can be sent: it could not serialize one, or, as the root \
                 of a scatter, did not give one for each rank"
            )
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

/// The value that the rank `owner` of the group has sent.
///
/// # Errors
/// `Mismatch`, after which the group is usable, if the bytes are not the JSON of a `T`.
pub(super) fn decode<T: DeserializeOwned>(bytes: &[u8], owner: u32) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|error| {
        Error::new(
            ErrorKind::Mismatch,
            format!("the value of rank {owner} of the group is not of this rank's type"),
        )
        .with_source(error)
        .sparing_group()
    })
}

pub(super) fn decode_all<T: DeserializeOwned>(parts: &[Vec<u8>]) -> Result<Vec<T>> {
    let parts = (0u32..).zip(parts);
    parts.map(|(rank, part)| decode(part, rank)).collect()
}

/// The value as JSON. Empty if it cannot be serialized; the JSON of a value is never empty.
pub(super) fn encode<T: Serialize>(object: &T) -> Vec<u8> {
    serde_json::to_vec(object).unwrap_or_default()
}

/// The length to send for an encoded value: that of the bytes, or [`NO_VALUE`] if there are none.
pub(super) fn length_of(bytes: &[u8]) -> u64 {
    if bytes.is_empty() {
        NO_VALUE
    } else {
        bytes.len() as u64
    }
}

pub(super) fn zeros(lens: &[u64]) -> Vec<Vec<u8>> {
    lens.iter().map(|&len| vec![0; len as usize]).collect()
}
