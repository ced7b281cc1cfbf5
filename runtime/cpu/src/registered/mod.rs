//! Memory that a group has allocated, and that the other ranks access directly.
//!
//! Data of an ordinary buffer moves from rank to rank through slots of shared memory. A buffer that was
//! allocated by [`Backend::allocate`](rcomm_core::backend::Backend::allocate) is in a file that the other
//! processes of this host can map. In a long operation all ranks show where their bytes are. If all bytes that the
//! operation needs can be mapped, each rank reads, or reads and writes, the others' bytes in place, without avoidable
//! copies. Otherwise the operation runs as with ordinary buffers. [`algorithm`](crate::algorithm) divides the work;
//! this module has the agreement between the ranks, and ensures that no caller gets back memory that other ranks may
//! still access.
//!
//! | file | holds |
//! |---|---|
//! | `region` | a file and its mapping |
//! | `backing`, `registry` | the regions that hold buffers of this rank |
//! | `exposed` | a caller's loan while other ranks have access to it |
//! | `terms` | what ranks may do with each other's bytes, and the phases in which they agree |
//! | `access` | the other ranks' bytes while all have access to them |
//! | `offer`, `mapped_regions` | what ranks show; their agreement, and the other ranks' regions that are mapped here |

#[allow(unsafe_code)]
mod access;
#[allow(unsafe_code)]
mod backing;
#[allow(unsafe_code)]
mod exposed;
mod mapped_regions;
mod offer;
#[allow(unsafe_code)]
mod region;
mod registry;
mod terms;

pub(super) use access::DirectAccess;
pub(super) use backing::Backing;
pub(super) use exposed::Exposed;
pub(super) use mapped_regions::{AccessOutcome, MappedRegions};
pub(super) use region::{Region, RegionHandle};
pub(super) use registry::Registry;
pub(super) use terms::{AccessTerms, Need, Phases, Rule};

/// Decodes `bytes` as a rank's offer.
#[cfg(any(test, fuzzing))]
pub(super) fn read_any_bytes(bytes: &[u8]) {
    if let Some(offer) = offer::Offer::decode(bytes) {
        assert_eq!(
            offer::Offer::decode(&offer::Offer::encode(Some(&offer))),
            Some(offer)
        );
        let len = bytes.len();
        assert!(
            offer
                .bytes(len)
                .is_none_or(|range| range.end <= offer.region.len)
        );
    }
}
