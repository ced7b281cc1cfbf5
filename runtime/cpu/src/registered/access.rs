//! How a rank accesses the other ranks' bytes after all ranks have agreed on the terms.

use super::exposed::Exposed;
use super::region::Region;
use super::terms::{AccessTerms, Phases, Rule, share_of};
use crate::collective::Data;
use crate::wait::Failure;
use rcomm_core::Access;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

/// A region of another rank that is mapped here.
pub(super) struct MappedRegion(Region);

impl MappedRegion {
    pub(super) fn new(region: Region) -> Self {
        Self(region)
    }

    pub(super) fn region(&self) -> &Region {
        &self.0
    }
}

/// Another rank's region, and the range of its bytes that are used.
pub(super) type RegionBytes = (Arc<MappedRegion>, Range<usize>);

/// Where a rank's bytes are in this process.
struct RankBytes {
    start: NonNull<u8>,
    len: usize,
    /// The access that the terms grant, not the one for which the bytes were lent.
    access: Access,
    /// The mapping of another rank's bytes; `None` for this rank's own bytes, which were lent.
    _mapped: Option<Arc<MappedRegion>>,
}

/// The right to access the bytes of a group's ranks: from the ranks' agreement on the terms until this rank announces
/// that it has finished.
///
/// The other ranks are trusted to keep to the terms, as those of a host are in the exchange area of `shm_exchange`.
pub(crate) struct DirectAccess<'a> {
    exposed: Exposed<'a>,
    rank: usize,
    rule: Rule,
    /// The bytes of each rank; `None` for a rank whose bytes the terms do not name.
    rank_bytes: Vec<Option<RankBytes>>,
}

impl<'a> DirectAccess<'a> {
    /// Makes the access. `mapped` has the other ranks' bytes that the terms name, in the lengths of the terms.
    pub(super) fn new(
        mut exposed: Exposed<'a>,
        rank: usize,
        terms: &AccessTerms,
        mapped: Vec<Option<RegionBytes>>,
    ) -> Self {
        let mut rank_bytes = Vec::with_capacity(mapped.len());
        for (owner, (need, mapped)) in terms.needs.iter().zip(mapped).enumerate() {
            let own_or_mapped = need.map(|need| match mapped {
                Some((mapped, bytes)) => {
                    assert_eq!(
                        bytes.len(),
                        need.len,
                        "the mapped bytes are not as long as the terms say"
                    );
                    let region = mapped.region();
                    assert!(bytes.end <= region.len(), "bytes outside the region");
                    RankBytes {
                        // SAFETY: `bytes` ends within the region (checked), which `mapped` keeps mapped.
                        start: unsafe { region.start().add(bytes.start) },
                        len: need.len,
                        access: need.access,
                        _mapped: Some(mapped),
                    }
                }
                None => {
                    assert_eq!(owner, rank, "another rank's bytes are not mapped");
                    assert!(
                        exposed.is_open() && exposed.len() == need.len,
                        "this rank's bytes are not exposed, or not in the length of the terms"
                    );
                    assert!(
                        need.access == Access::Read || exposed.access() == Access::Write,
                        "the terms let ranks write to a buffer lent for reading"
                    );
                    RankBytes {
                        start: exposed.start(),
                        len: exposed.len(),
                        access: need.access,
                        _mapped: None,
                    }
                }
            });
            rank_bytes.push(own_or_mapped);
        }
        if rank_bytes[rank].is_none() {
            // Under these terms no other rank accesses this rank's bytes.
            exposed.close();
        }
        Self {
            exposed,
            rank,
            rule: terms.rule,
            rank_bytes,
        }
    }

    /// Returns the bytes of `rank`, under terms by which all ranks only read.
    pub(crate) fn bytes_of(&self, rank: usize) -> &[u8] {
        assert_eq!(self.rule, Rule::Read, "the terms let ranks write");
        let own_or_mapped = self.rank_bytes[rank]
            .as_ref()
            .expect("the terms do not name the bytes of the requested rank");
        // SAFETY: the bytes are mapped (`own_or_mapped`) or lent (`exposed`). Under the terms all ranks only read, so
        // no rank writes to them before this rank has announced that it has finished, which consumes this access.
        unsafe { std::slice::from_raw_parts(own_or_mapped.start.as_ptr(), own_or_mapped.len) }
    }

    /// Returns the bytes of `rank`, and this rank's own bytes, which were lent for writing and which no other rank
    /// may access.
    pub(crate) fn bytes_of_and_own(&mut self, rank: usize) -> (&[u8], &mut [u8]) {
        assert!(
            self.rank_bytes[self.rank].is_none() && self.exposed.access() == Access::Write,
            "other ranks may access this rank's bytes, or they were lent for reading"
        );
        // SAFETY: the bytes were lent for writing. No other rank has access to them, since the terms do not name them
        // (`new`). They do not overlap other ranks' bytes, which are in other mappings.
        let own_bytes = unsafe {
            std::slice::from_raw_parts_mut(self.exposed.start().as_ptr(), self.exposed.len())
        };
        (self.bytes_of(rank), own_bytes)
    }

    /// Returns the range of the bytes that this rank works on for all ranks; empty unless the rule is
    /// [`Rule::Share`].
    pub(crate) fn share(&self) -> Range<usize> {
        if self.rule != Rule::Share {
            return 0..0;
        }
        let len = self
            .rank_bytes
            .iter()
            .flatten()
            .map(|own_or_mapped| own_or_mapped.len)
            .min();
        share_of(self.rank, self.rank_bytes.len(), len.unwrap_or(0))
    }

    /// Returns this range of every rank's bytes, by rank. The range must be in this rank's share.
    pub(crate) fn shares(&mut self, range: Range<usize>) -> Vec<Data<'_>> {
        let share = self.share();
        assert!(
            share.start <= range.start && range.start <= range.end && range.end <= share.end,
            "bytes outside this rank's share"
        );
        let shares = self.rank_bytes.iter().map(|own_or_mapped| {
            let own_or_mapped = own_or_mapped
                .as_ref()
                .expect("the terms do not name the bytes of every rank");
            assert!(
                range.end <= own_or_mapped.len,
                "a rank has fewer bytes than the share"
            );
            // SAFETY: `range` ends within the rank's bytes (checked), which are mapped or lent as long as `self`
            // lives.
            let start = unsafe { own_or_mapped.start.add(range.start) }.as_ptr();
            match own_or_mapped.access {
                Access::Read => {
                    // SAFETY: `range.len()` bytes are readable, and under the terms no rank writes to bytes to which
                    // they grant reading only.
                    let bytes = unsafe { std::slice::from_raw_parts(start, range.len()) };
                    Data::Read(bytes)
                }
                Access::Write => {
                    // SAFETY: the bytes are in the mapping of another rank's bytes, or were lent to this rank for
                    // writing (`new`). The terms give this share of all ranks' bytes to this rank alone, until it
                    // has announced that it has finished, which consumes this access; `&mut self` excludes other
                    // users in this process. Mappings of two ranks' bytes do not overlap.
                    let bytes = unsafe { std::slice::from_raw_parts_mut(start, range.len()) };
                    Data::Write(bytes)
                }
            }
        });
        shares.collect()
    }

    /// Announces that this rank has finished, and waits until all ranks have.
    ///
    /// # Errors
    /// Those of the phases; the other ranks' access to this rank's bytes is then revoked.
    pub(crate) fn end(mut self, phases: &mut impl Phases) -> Result<(), Failure> {
        phases.show(&[])?;
        self.exposed.close();
        Ok(())
    }
}
