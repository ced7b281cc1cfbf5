//! [`Frame`]: the header on the wire of a message, of an offer to send one (RTS in MPI libraries), or of the answer to
//! an offer (CTS).

use crate::wait::Failure;
use rcomm_recorder::model::{DType, Rank};

/// The maximum size in bytes of a message that is sent without an offer.
pub(super) const MAX_EAGER_BYTES: usize = 64 << 10;
/// Bytes of an encoded [`Frame`].
pub(super) const FRAME_BYTES: usize = 32;
/// Marks a frame of this layout. Like all numbers it is little-endian on the wire: the bytes `1pcr`.
const MAGIC: u32 = 0x7263_7031;

/// The purpose of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FrameKind {
    /// A message, which follows. It was not offered.
    Eager = 1,
    /// From the sender: a message of this length is ready (RTS). It waits for `Clear` or `Refuse`.
    Offer = 2,
    /// From the receiver: it is ready for the message that was offered under this id (CTS).
    Clear = 3,
    /// From the sender, after `Clear`: the message that was offered under this id, which follows.
    Data = 4,
    /// From the receiver: the message that was offered under this id does not fit its receive, whose type and length
    /// the frame has.
    Refuse = 5,
}

/// The header on the wire; see the documentation of this module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) kind: FrameKind,
    pub(super) tag: u32,
    pub(super) dtype: DType,
    /// The sender's number of the message, in the offer and in all that follows it; 0 in an `Eager` frame, which gets
    /// no answer.
    pub(super) id: u64,
    /// Length in bytes of the message; in a `Refuse`, of the receiver's buffer.
    pub(super) len: u64,
}

impl Frame {
    /// Makes the frame of a message of `len` bytes that is sent at once.
    #[inline]
    pub(super) fn eager(tag: u32, dtype: DType, len: usize) -> Self {
        Self {
            kind: FrameKind::Eager,
            tag,
            dtype,
            id: 0,
            len: len as u64,
        }
    }

    #[inline]
    pub(super) fn encode(self) -> [u8; FRAME_BYTES] {
        let mut bytes = [0; FRAME_BYTES];
        bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4] = self.kind as u8;
        bytes[5] = self.dtype.code();
        bytes[8..12].copy_from_slice(&self.tag.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.id.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.len.to_le_bytes());
        bytes
    }

    /// Reads a frame; `None` if the bytes are not a valid frame. An `Eager` frame of a message of more than
    /// [`MAX_EAGER_BYTES`] is not. Bytes 6, 7 and 12 to 15 are not used, and ignored.
    pub(super) fn decode(bytes: &[u8; FRAME_BYTES]) -> Option<Self> {
        let word = |offset: usize| {
            u32::from_le_bytes([
                bytes[offset],
                bytes[offset + 1],
                bytes[offset + 2],
                bytes[offset + 3],
            ])
        };
        let long = |offset: usize| u64::from(word(offset)) | u64::from(word(offset + 4)) << 32;
        if word(0) != MAGIC {
            return None;
        }
        let frame = Self {
            kind: match bytes[4] {
                1 => FrameKind::Eager,
                2 => FrameKind::Offer,
                3 => FrameKind::Clear,
                4 => FrameKind::Data,
                5 => FrameKind::Refuse,
                _ => return None,
            },
            dtype: DType::from_code(bytes[5])?,
            tag: word(8),
            id: long(16),
            len: long(24),
        };
        if frame.kind == FrameKind::Eager && frame.len > MAX_EAGER_BYTES as u64 {
            return None;
        }
        Some(frame)
    }

    /// Returns the failure of the send of this message, on the sender: rank `peer` of the group, which is `rank` in the
    /// world, has refused it, since its receive expects `expected` bytes of type `dtype`.
    pub(super) fn refused(&self, dtype: DType, expected: u64, peer: usize, rank: Rank) -> Failure {
        let message = format!(
            "the message with tag {} has {}, but the receive on rank {peer} of the group expects {}",
            self.tag,
            describe_length(self.dtype, self.len),
            describe_length(dtype, expected)
        );
        Failure::Mismatch(rank, message)
    }

    /// Returns the failure of the receive of this message, on the receiver: it expects `expected` bytes of type
    /// `dtype`. The sender is rank `peer` of the group, which is `rank` in the world.
    pub(super) fn misfits(&self, dtype: DType, expected: u64, peer: usize, rank: Rank) -> Failure {
        let message = format!(
            "the message with tag {} from rank {peer} of the group has {}, but its receive expects {}",
            self.tag,
            describe_length(self.dtype, self.len),
            describe_length(dtype, expected)
        );
        Failure::Mismatch(rank, message)
    }
}

/// Describes this number of bytes in elements of the type; in bytes if it is no whole number of elements, or the size
/// of an element is not known.
fn describe_length(dtype: DType, bytes: u64) -> String {
    let size = dtype.size().map_or(0, |size| size as u64);
    let (count, unit) = match size > 0 && bytes.is_multiple_of(size) {
        true => (bytes / size, "element"),
        false => (bytes, "byte"),
    };
    let plural = if count == 1 { "" } else { "s" };
    format!("{count} {unit}{plural} of {dtype}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_is_in_elements_only_if_it_is_a_whole_number_of_them() {
        assert_eq!(describe_length(DType::I32, 32), "8 elements of Int");
        assert_eq!(describe_length(DType::I32, 4), "1 element of Int");
        assert_eq!(describe_length(DType::I32, 7), "7 bytes of Int");
        assert_eq!(describe_length(DType::Other, 7), "7 bytes of Other");
    }
}
