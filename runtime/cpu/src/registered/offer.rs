//! What a rank shows the others of its memory before an operation, and how they validate it.

use super::region::RegionHandle;
use std::ops::Range;

/// Bytes of an offer among the inline bytes of a phase.
pub(super) const OFFER_LEN: usize = 32;

/// Bytes of one rank to which the others may get access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Offer {
    /// The region that contains the bytes.
    pub(super) region: RegionHandle,
    /// The offset of the first byte in the region.
    pub(super) start: usize,
}

impl Offer {
    /// Encodes an offer, or the absence of one.
    pub(super) fn encode(offer: Option<&Self>) -> [u8; OFFER_LEN] {
        let mut bytes = [0; OFFER_LEN];
        if let Some(Self { region, start }) = offer {
            bytes[..8].copy_from_slice(&region.id.to_le_bytes());
            bytes[8..12].copy_from_slice(&region.pid.to_le_bytes());
            bytes[12..16].copy_from_slice(&region.number.to_le_bytes());
            bytes[16..24].copy_from_slice(&(region.len as u64).to_le_bytes());
            bytes[24..32].copy_from_slice(&(*start as u64).to_le_bytes());
        }
        bytes
    }

    /// Reads an offer; `None` if the bytes are not an offer.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; OFFER_LEN] = bytes.first_chunk()?;
        let word = |offset: usize| {
            u32::from_le_bytes([
                bytes[offset],
                bytes[offset + 1],
                bytes[offset + 2],
                bytes[offset + 3],
            ])
        };
        let long = |offset: usize| u64::from(word(offset)) | u64::from(word(offset + 4)) << 32;
        let (id, number) = (long(0), word(12).cast_signed());
        if id == 0 || number < 0 {
            return None;
        }
        Some(Self {
            region: RegionHandle {
                pid: word(8),
                number,
                id,
                len: usize::try_from(long(16)).ok()?,
            },
            start: usize::try_from(long(24)).ok()?,
        })
    }

    /// Returns the range of the first `len` offered bytes in the region; `None` if the region has fewer.
    pub(super) fn bytes(&self, len: usize) -> Option<Range<usize>> {
        let end = self.start.checked_add(len)?;
        (end <= self.region.len).then_some(self.start..end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn offer(len: usize, start: usize) -> Offer {
        Offer {
            region: RegionHandle {
                pid: 4_000_000_000,
                number: 12,
                id: 1 << 40,
                len,
            },
            start,
        }
    }

    #[test]
    fn offered_bytes_are_limited_to_the_region() {
        assert_eq!(offer(8192, 4096).bytes(4096), Some(4096..8192));
        assert_eq!(offer(8192, 4096).bytes(4097), None);
        assert_eq!(offer(8192, usize::MAX).bytes(2), None);
        assert_eq!(Offer::decode(&Offer::encode(None)), None);
        let sent = offer(1 << 41, 1 << 40);
        assert_eq!(Offer::decode(&Offer::encode(Some(&sent))), Some(sent));
    }

    proptest! {
        #[test]
        fn any_bytes_decode_to_none_or_to_an_offer(bytes: [[u8; 8]; OFFER_LEN / 8]) {
            let bytes: [u8; OFFER_LEN] = bytes.concat().try_into().unwrap();
            if let Some(offer) = Offer::decode(&bytes) {
                prop_assert_eq!(Offer::decode(&Offer::encode(Some(&offer))), Some(offer));
                if let Some(inside) = offer.bytes(4096) {
                    prop_assert!(inside.end <= offer.region.len);
                }
            }
        }
    }
}
