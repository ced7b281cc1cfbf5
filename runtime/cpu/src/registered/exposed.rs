//! Bytes that a caller lent to an operation, while other ranks are let into them.
//!
//! A caller must never get memory back that another rank may still be at, however the operation ends. So
//! whoever gives up an operation in whose midst others may be does not wait for them, who may be frozen: it
//! puts memory of its own in the place of what it had exposed ([`Backing::cut_off`]). They go on in the
//! file, which nobody looks at any more, and which stays there for as long as they have it mapped.

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

/// A loan that other ranks may be let into.
pub(crate) struct Exposed<'a> {
    start: NonNull<u8>,
    len: usize,
    access: Access,
    backing: Option<(Arc<Backing>, Range<usize>)>,
    /// Whether others may be at it.
    is_open: bool,
    loan: PhantomData<&'a mut [u8]>,
}

impl<'a> Exposed<'a> {
    /// Bytes that the others would read.
    pub(crate) fn read(registry: &Registry, bytes: &'a [u8]) -> Self {
        Self::new(registry, NonNull::from(bytes), Access::Read)
    }

    /// Bytes that the others would write as well.
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

    /// The loan, which nobody else was let into, or will be.
    pub(crate) fn take_back(self) -> Data<'a> {
        assert!(!self.is_open, "others may be at these bytes");
        match self.access {
            Access::Read => {
                // SAFETY: the slice that this was made from, for the same time.
                let bytes = unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) };
                Data::Read(bytes)
            }
            Access::Write => {
                // SAFETY: as above; exclusive then and now, since nobody else has been let in.
                let bytes =
                    unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) };
                Data::Write(bytes)
            }
        }
    }

    /// What the others are told, who may be at these bytes from now on.
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

    /// All ranks know that none is at these bytes any more.
    pub(super) fn close(&mut self) {
        self.is_open = false;
    }
}

impl Drop for Exposed<'_> {
    fn drop(&mut self) {
        if let Some((backing, _)) = self.backing.take().filter(|_| self.is_open) {
            tracing::debug!("memory is taken back from ranks that may be at it");
            // SAFETY: whole pages, or it would not be open (`open`). Nobody in this process writes there:
            // these bytes are lent to this for its whole life, and other buffers have other pages.
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

/// The time in which the ranks of a group are at each other's bytes: all of them have agreed on the terms,
/// and none has said yet that it is through.
///
/// What is believed of the others is what the exchange area believes of them: that they keep to the terms.
pub(crate) struct Meeting<'a> {
    own: Exposed<'a>,
    rank: usize,
    rule: Rule,
    /// Those that the terms name.
    places: Vec<Option<Place>>,
}

impl<'a> Meeting<'a> {
    /// `reached` are the other ranks' bytes that the terms name, as long as these say.
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
                        // SAFETY: inside the mapping, as just checked.
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
                        "nobody writes to what is lent for reading"
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
            // The terms let nobody in.
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
        assert_eq!(self.rule, Rule::Read, "nobody writes to what all read");
        let place = self.places[rank].as_ref().expect("the terms name it");
        // SAFETY: so many bytes, mapped (`place`) or lent (`own`), which nobody writes to before this rank
        // has said that it is through, which takes the meeting: the terms have all ranks read only.
        unsafe { std::slice::from_raw_parts(place.start.as_ptr(), place.len) }
    }

    /// The bytes of `rank`, and this rank's own, which it was lent for writing and nobody is let into.
    pub(crate) fn of_and_own(&mut self, rank: usize) -> (&[u8], &mut [u8]) {
        assert!(
            self.places[self.rank].is_none() && self.own.access == Access::Write,
            "bytes that are this rank's alone"
        );
        // SAFETY: lent for writing and never exposed, or known to all as closed before anybody came (`new`).
        // They are in no other rank's bytes: those are other mappings.
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
            "a rank is at its own share only"
        );
        let shares = self.places.iter().map(|place| {
            let place = place.as_ref().expect("whoever shares shares with all");
            assert!(bytes.end <= place.len, "bytes that every rank has");
            // SAFETY: inside what is mapped or lent, as just checked.
            let start = unsafe { place.start.add(bytes.start) }.as_ptr();
            match place.access {
                Access::Read => {
                    // SAFETY: readable for so many bytes, and written by nobody: the terms have nobody write
                    // to this rank's bytes.
                    let bytes = unsafe { std::slice::from_raw_parts(start, bytes.len()) };
                    Data::Read(bytes)
                }
                Access::Write => {
                    // SAFETY: in the mapping of another rank's bytes, or lent to this rank for writing (`new`).
                    // The terms give this part of everybody's bytes to this rank alone, until it has said that
                    // it is through, which takes the meeting; `&mut self` has nobody else here at it. Mappings
                    // of two ranks' bytes do not overlap.
                    let bytes = unsafe { std::slice::from_raw_parts_mut(start, bytes.len()) };
                    Data::Write(bytes)
                }
            }
        });
        shares.collect()
    }

    /// All ranks have said that they are through.
    pub(super) fn close(mut self) {
        self.own.close();
    }
}
