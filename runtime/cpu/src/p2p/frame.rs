//! [`Frame`]: the header on the wire of a message, an offer, or the answer to an offer.

use crate::wait::Failure;
use rcomm_recorder::model::{DType, Rank};

/// The maximum size in bytes of a message that is sent without an offer.
pub(super) const EAGER: usize = 64 << 10;
/// Bytes of an encoded [`Frame`].
pub(super) const FRAME: usize = 32;
/// `rcp1` in ASCII: marks a frame of this layout.
const MAGIC: u32 = 0x7263_7031;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FrameKind {
    /// The message follows.
    Eager = 1,
    /// A message of this length is ready; the sender waits for `Clear` or `Refuse`.
    Offer = 2,
    /// The receiver is ready for the message offered under this id.
    Clear = 3,
    /// The message offered under this id follows.
    Data = 4,
    /// The message offered under this id does not fit its receive, whose type and length the frame has.
    Refuse = 5,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) kind: FrameKind,
    pub(super) tag: u32,
    pub(super) dtype: DType,
    /// The sender's identifier of the message; 0 for a message that is sent at once, which gets no reply.
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
    pub(super) fn encode(self) -> [u8; FRAME] {
        let mut bytes = [0; FRAME];
        bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4] = self.kind as u8;
        bytes[5] = self.dtype.code();
        bytes[8..12].copy_from_slice(&self.tag.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.id.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.len.to_le_bytes());
        bytes
    }

    /// Reads a frame; `None` if the bytes are not a valid frame. An `Eager` frame of more than [`EAGER`] bytes is not.
    pub(super) fn decode(bytes: &[u8; FRAME]) -> Option<Self> {
        let word = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
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
        if frame.kind == FrameKind::Eager && frame.len > EAGER as u64 {
            return None;
        }
        Some(frame)
    }

    /// Returns the failure of a send whose receiver, rank `at` of the group, expects another type or length.
    pub(super) fn refused(&self, dtype: DType, len: u64, at: usize, rank: Rank) -> Failure {
        let message = format!(
            "{} {} are sent with tag {}, but rank {at} of the group receives {} {dtype}",
            elements(self.dtype, self.len),
            self.dtype,
            self.tag,
            elements(dtype, len)
        );
        Failure::Mismatch(rank, message)
    }

    /// Returns the failure of a receive of this type and length, for which rank `at` of the group has sent this
    /// frame.
    pub(super) fn misfits(&self, dtype: DType, len: u64, at: usize, rank: Rank) -> Failure {
        let message = format!(
            "rank {at} of the group sent {} {} with tag {}, but {} {dtype} are received",
            elements(self.dtype, self.len),
            self.dtype,
            self.tag,
            elements(dtype, len)
        );
        Failure::Mismatch(rank, message)
    }
}

fn elements(dtype: DType, len: u64) -> u64 {
    len / dtype.size().unwrap_or(1) as u64
}
