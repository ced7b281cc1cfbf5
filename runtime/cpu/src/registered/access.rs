//! How a rank uses the other ranks' bytes once all have agreed on the terms.

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

/// Another rank's region, and which bytes of it are used.
pub(super) type RegionBytes = (Arc<MappedRegion>, Range<usize>);

/// Where a rank's bytes are in this process.
struct MappedBytes {
    start: NonNull<u8>,
    len: usize,
    access: Access,
    /// The mapping of another rank's bytes; this rank's own bytes are lent instead.
    _mapped: Option<Arc<MappedRegion>>,
}

/// The period in which the ranks of a group access each other's bytes: all of them have agreed on the
/// terms, and none has announced yet that it has finished.
///
/// The other ranks are trusted to keep to the terms, as in the exchange area.
pub(crate) struct DirectAccess<'a> {
    own: Exposed<'a>,
    rank: usize,
    rule: Rule,
    /// Where the bytes of each rank are; `None` for a rank whose bytes the terms do not name.
    places: Vec<Option<MappedBytes>>,
}

impl<'a> DirectAccess<'a> {
    /// `mapped` are the other ranks' bytes that the terms name, with the lengths that the terms
    /// give.
    pub(super) fn new(
        mut own: Exposed<'a>,
        rank: usize,
        terms: &AccessTerms,
        mapped: Vec<Option<RegionBytes>>,
    ) -> Self {
        let mut places = Vec::with_capacity(mapped.len());
        for (at, (need, mapped)) in terms.needs.iter().zip(mapped).enumerate() {
            let place = need.map(|need| match mapped {
                Some((mapped, bytes)) => {
                    assert_eq!(bytes.len(), need.len, "as many bytes as the terms say");
                    let region = mapped.region();
                    assert!(bytes.end <= region.len(), "bytes that the region has");
                    MappedBytes {
                        // SAFETY: `bytes` ends within the region (checked), which `mapped` keeps mapped.
                        start: unsafe { region.start().add(bytes.start) },
                        len: need.len,
                        access: need.access,
                        _mapped: Some(mapped),
                    }
                }
                None => {
                    assert_eq!(at, rank, "what is not mapped is this rank's");
                    assert!(own.is_open() && own.len() == need.len, "it was exposed");
                    assert!(
                        need.access == Access::Read || own.access() == Access::Write,
                        "a buffer lent for reading is not written"
                    );
                    MappedBytes {
                        start: own.start(),
                        len: own.len(),
                        access: need.access,
                        _mapped: None,
                    }
                }
            });
            places.push(place);
        }
        if places[rank].is_none() {
            // Under these terms no rank has access to this rank's bytes.
            own.close();
        }
        Self {
            own,
            rank,
            rule: terms.rule,
            places,
        }
    }

    /// Returns the bytes of `rank`, under terms by which all ranks only read.
    pub(crate) fn of(&self, rank: usize) -> &[u8] {
        assert_eq!(
            self.rule,
            Rule::Read,
            "bytes that all ranks read stay as they are"
        );
        let place = self.places[rank].as_ref().expect("the terms name it");
        // SAFETY: `place.len` bytes, mapped (`place`) or lent (`own`), which no rank writes to before this
        // one has announced that it has finished, which consumes this access: under the terms all ranks
        // only read.
        unsafe { std::slice::from_raw_parts(place.start.as_ptr(), place.len) }
    }

    /// The bytes of `rank`, and this rank's own, which were lent for writing and which no other rank
    /// may access.
    pub(crate) fn of_and_own(&mut self, rank: usize) -> (&[u8], &mut [u8]) {
        assert!(
            self.places[self.rank].is_none() && self.own.access() == Access::Write,
            "bytes that are this rank's alone"
        );
        // SAFETY: lent for writing and never exposed, or known to all as closed before any rank had access
        // (`new`). They are in no other rank's bytes: those are other mappings.
        let own =
            unsafe { std::slice::from_raw_parts_mut(self.own.start().as_ptr(), self.own.len()) };
        (self.of(rank), own)
    }

    /// Returns the range of the bytes that this rank works on for all ranks; empty unless the rule is
    /// [`Rule::Share`].
    pub(crate) fn share(&self) -> Range<usize> {
        if self.rule != Rule::Share {
            return 0..0;
        }
        let len = self.places.iter().flatten().map(|place| place.len).min();
        share_of(self.rank, self.places.len(), len.unwrap_or(0))
    }

    /// Returns these bytes of every rank, by rank. They must be in this rank's share.
    pub(crate) fn shares(&mut self, bytes: Range<usize>) -> Vec<Data<'_>> {
        let share = self.share();
        assert!(
            share.start <= bytes.start && bytes.start <= bytes.end && bytes.end <= share.end,
            "a rank uses its own share only"
        );
        let shares = self.places.iter().map(|place| {
            let place = place.as_ref().expect("the bytes of all ranks are mapped");
            assert!(bytes.end <= place.len, "bytes that every rank has");
            // SAFETY: `bytes` ends within the place (checked), whose bytes are mapped or lent as long as
            // `self` lives.
            let start = unsafe { place.start.add(bytes.start) }.as_ptr();
            match place.access {
                Access::Read => {
                    // SAFETY: readable for `bytes.len()` bytes, and not written: under the terms no rank
                    // writes to this rank's bytes.
                    let bytes = unsafe { std::slice::from_raw_parts(start, bytes.len()) };
                    Data::Read(bytes)
                }
                Access::Write => {
                    // SAFETY: in the mapping of another rank's bytes, or lent to this rank for writing
                    // (`new`). The terms give this part of all ranks' bytes to this rank alone, until it has
                    // announced that it has finished, which consumes this access; `&mut self` excludes other
                    // users in this process. Mappings of two ranks' bytes do not overlap.
                    let bytes = unsafe { std::slice::from_raw_parts_mut(start, bytes.len()) };
                    Data::Write(bytes)
                }
            }
        });
        shares.collect()
    }

    /// Announces that this rank has finished, and waits until all ranks have.
    ///
    /// # Errors
    /// Those of the phases; then the other ranks' access to the bytes is revoked.
    pub(crate) fn end(mut self, phases: &mut impl Phases) -> Result<(), Failure> {
        phases.show(&[])?;
        self.own.close();
        Ok(())
    }
}
