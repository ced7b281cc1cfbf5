//! Bytes that a caller lent to an operation, while other ranks have access to them.
//!
//! A caller must never get memory back that another rank may still access, however the operation ends. A
//! rank that gives up an operation does not wait for the others, which may be frozen in the midst of it: it
//! replaces what it had exposed by memory of its own ([`Backing::cut_off`]). The others go on in the file,
//! which this rank does not read any more, and which exists for as long as they have it mapped.

use super::backing::Backing;
use super::offer::Offer;
use super::reach::{Found, Reached, Rule, Terms, share_of};
use super::registry::Registry;
use crate::collective::Data;
use rcomm_core::Access;
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

/// A loan that other ranks may get access to.
pub(crate) struct Exposed<'a> {
    start: NonNull<u8>,
    len: usize,
    access: Access,
    backing: Option<(Arc<Backing>, Range<usize>)>,
    /// Whether other ranks may access the bytes.
    is_open: bool,
    loan: PhantomData<&'a mut [u8]>,
}

impl<'a> Exposed<'a> {
    /// Bytes that the others will read.
    pub(crate) fn read(registry: &Registry, bytes: &'a [u8]) -> Self {
        Self::new(registry, NonNull::from(bytes), Access::Read)
    }

    /// Bytes that the others will write as well.
    pub(crate) fn write(registry: &Registry, bytes: &'a mut [u8]) -> Self {
        Self::new(registry, NonNull::from(bytes), Access::Write)
    }

    /// Bytes of either kind.
    pub(crate) fn of(registry: &Registry, data: Data<'a>) -> Self {
        match data {
            Data::Read(bytes) => Self::read(registry, bytes),
            Data::Write(bytes) => Self::write(registry, bytes),
        }
    }

    fn new(registry: &Registry, bytes: NonNull<[u8]>, access: Access) -> Self {
        let start = bytes.cast::<u8>();
        let at = start.addr().get();
        Self {
            start,
            len: bytes.len(),
            access,
            backing: registry.find(at..at + bytes.len()),
            is_open: false,
            loan: PhantomData,
        }
    }

    /// The loan, to which no other rank had access, or will have.
    pub(crate) fn take_back(self) -> Data<'a> {
        assert!(!self.is_open, "others may be at these bytes");
        match self.access {
            Access::Read => {
                // SAFETY: `start` and `len` are those of a slice lent for `'a` (`new`), which `self`, now
                // consumed, held for this time. No other rank got access (checked).
                let bytes = unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) };
                Data::Read(bytes)
            }
            Access::Write => {
                // SAFETY: `start` and `len` are those of a slice lent for writing for `'a` (`new`), which
                // `self`, now consumed, held alone. No other rank got access (checked).
                let bytes =
                    unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) };
                Data::Write(bytes)
            }
        }
    }

    /// The offer that the other ranks see. From now on they may access these bytes.
    pub(super) fn open(&mut self) -> Option<Offer> {
        let (backing, bytes) = self.backing.as_ref()?;
        let region = backing.whole_pages(bytes)?;
        backing.lend();
        self.is_open = true;
        Some(Offer {
            region,
            start: bytes.start,
        })
    }

    /// All ranks know that none accesses these bytes any more.
    pub(super) fn close(&mut self) {
        self.is_open = false;
    }
}

impl Drop for Exposed<'_> {
    fn drop(&mut self) {
        if let Some((backing, _)) = self.backing.take().filter(|_| self.is_open) {
            tracing::debug!("revoking exposed memory that peers may still access");
            // SAFETY: whole pages, or it would not be open (`open`). No thread of this process writes
            // there: these bytes are lent to this for its whole life, and other buffers have other pages.
            unsafe { backing.cut_off(self.start, self.len) };
        }
    }
}

/// Where a rank's bytes are in this process.
struct Place {
    start: NonNull<u8>,
    len: usize,
    access: Access,
    /// What keeps them mapped; this rank's own are lent.
    _reached: Option<Arc<Reached>>,
}

/// The time in which the ranks of a group access each other's bytes: all of them have agreed on the terms,
/// and none has announced yet that it has finished.
///
/// The other ranks are trusted as in the exchange area: to keep to the terms.
pub(crate) struct Meeting<'a> {
    own: Exposed<'a>,
    rank: usize,
    rule: Rule,
    /// The places that the terms name.
    places: Vec<Option<Place>>,
}

impl<'a> Meeting<'a> {
    /// `reached` are the other ranks' bytes that the terms name, with the lengths that the terms
    /// give.
    pub(super) fn new(
        mut own: Exposed<'a>,
        rank: usize,
        terms: &Terms,
        reached: Vec<Option<Found>>,
    ) -> Self {
        let mut places = Vec::with_capacity(reached.len());
        for (at, (need, reached)) in terms.needs.iter().zip(reached).enumerate() {
            let place = need.map(|need| match reached {
                Some((reached, bytes)) => {
                    assert_eq!(bytes.len(), need.len, "as many bytes as the terms say");
                    let region = reached.region();
                    assert!(bytes.end <= region.len(), "bytes that the region has");
                    Place {
                        // SAFETY: `bytes` ends within the region (checked), which `reached` keeps mapped.
                        start: unsafe { region.start().add(bytes.start) },
                        len: need.len,
                        access: need.access,
                        _reached: Some(reached),
                    }
                }
                None => {
                    assert_eq!(at, rank, "what is not reached is this rank's");
                    assert!(own.is_open && own.len == need.len, "it was exposed");
                    assert!(
                        need.access == Access::Read || own.access == Access::Write,
                        "a buffer lent for reading is not written"
                    );
                    Place {
                        start: own.start,
                        len: own.len,
                        access: need.access,
                        _reached: None,
                    }
                }
            });
            places.push(place);
        }
        if places[rank].is_none() {
            // The terms give no rank access.
            own.close();
        }
        Self {
            own,
            rank,
            rule: terms.rule,
            places,
        }
    }

    /// The bytes of `rank`, where all only read.
    pub(crate) fn of(&self, rank: usize) -> &[u8] {
        assert_eq!(
            self.rule,
            Rule::Read,
            "bytes that all ranks read stay as they are"
        );
        let place = self.places[rank].as_ref().expect("the terms name it");
        // SAFETY: so many bytes, mapped (`place`) or lent (`own`), which no rank writes to before this one
        // has announced that it has finished, which takes the meeting: the terms have all ranks read only.
        unsafe { std::slice::from_raw_parts(place.start.as_ptr(), place.len) }
    }

    /// The bytes of `rank`, and this rank's own, which were lent for writing and which no other rank
    /// may access.
    pub(crate) fn of_and_own(&mut self, rank: usize) -> (&[u8], &mut [u8]) {
        assert!(
            self.places[self.rank].is_none() && self.own.access == Access::Write,
            "bytes that are this rank's alone"
        );
        // SAFETY: lent for writing and never exposed, or known to all as closed before any rank had access
        // (`new`). They are in no other rank's bytes: those are other mappings.
        let own = unsafe { std::slice::from_raw_parts_mut(self.own.start.as_ptr(), self.own.len) };
        (self.of(rank), own)
    }

    /// Bytes of the part that this rank works on for all.
    pub(crate) fn share(&self) -> Range<usize> {
        if self.rule != Rule::Share {
            return 0..0;
        }
        let len = self.places.iter().flatten().map(|place| place.len).min();
        share_of(self.rank, self.places.len(), len.unwrap_or(0))
    }

    /// These bytes of every rank, by rank, which must be of this rank's share.
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
                    // SAFETY: readable for so many bytes, and not written: under the terms no rank writes to
                    // this rank's bytes.
                    let bytes = unsafe { std::slice::from_raw_parts(start, bytes.len()) };
                    Data::Read(bytes)
                }
                Access::Write => {
                    // SAFETY: in the mapping of another rank's bytes, or lent to this rank for writing
                    // (`new`). The terms give this part of all ranks' bytes to this rank alone, until it has
                    // announced that it has finished, which takes the meeting; `&mut self` excludes other
                    // users in this process. Mappings of two ranks' bytes do not overlap.
                    let bytes = unsafe { std::slice::from_raw_parts_mut(start, bytes.len()) };
                    Data::Write(bytes)
                }
            }
        });
        shares.collect()
    }

    /// All ranks have announced that they have finished.
    pub(super) fn close(mut self) {
        self.own.close();
    }
}
