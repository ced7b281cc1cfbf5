//! Bytes that a caller has lent to an operation, while other ranks have access to them.
//!
//! A caller must never get memory back that another rank may still access, however the operation ends. A rank that
//! gives up an operation does not wait for the others, since they may be frozen in the middle of it. Instead, it
//! replaces the exposed memory with private memory ([`Backing::cut_off`]). The others continue to use the file, which
//! this rank does not read any more, and which exists for as long as they have it mapped.

use super::backing::Backing;
use super::offer::Offer;
use super::registry::Registry;
use crate::collective::Data;
use rcomm_core::Access;
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

/// A *loan*: bytes that a caller has lent to an operation, and to which other ranks may get access.
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
    /// Makes a loan of bytes that the other ranks will read.
    pub(crate) fn read(registry: &Registry, bytes: &'a [u8]) -> Self {
        Self::new(registry, NonNull::from(bytes), Access::Read)
    }

    /// Makes a loan of bytes that the other ranks will read and write.
    pub(crate) fn write(registry: &Registry, bytes: &'a mut [u8]) -> Self {
        Self::new(registry, NonNull::from(bytes), Access::Write)
    }

    /// Makes a loan of bytes that the other ranks will read, and will also write if `data` is `Write`.
    pub(crate) fn of(registry: &Registry, data: Data<'a>) -> Self {
        match data {
            Data::Read(bytes) => Self::read(registry, bytes),
            Data::Write(bytes) => Self::write(registry, bytes),
        }
    }

    fn new(registry: &Registry, bytes: NonNull<[u8]>, access: Access) -> Self {
        let start = bytes.cast::<u8>();
        let address = start.addr().get();
        Self {
            start,
            len: bytes.len(),
            access,
            backing: registry.find(address..address + bytes.len()),
            is_open: false,
            loan: PhantomData,
        }
    }

    /// Returns the bytes of the loan, to which no other rank has access.
    pub(crate) fn take_back(self) -> Data<'a> {
        assert!(!self.is_open, "other ranks may still access these bytes");
        match self.access {
            Access::Read => {
                // SAFETY: `start` and `len` are those of a slice lent for `'a` (`new`), which `self`, now consumed,
                // held for this time. No other rank has access (checked).
                let bytes = unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) };
                Data::Read(bytes)
            }
            Access::Write => {
                // SAFETY: `start` and `len` are those of a slice lent for writing for `'a` (`new`), which `self`, now
                // consumed, held alone. No other rank has access (checked).
                let bytes =
                    unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) };
                Data::Write(bytes)
            }
        }
    }

    /// Returns the offer for the other ranks, which may access these bytes from now on. `None` if the others cannot
    /// map exactly these bytes: they then get no access.
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

    /// Address of the first byte of the loan.
    pub(super) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Length of the loan in bytes.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The access for which the bytes were lent.
    pub(super) fn access(&self) -> Access {
        self.access
    }

    /// Whether other ranks may access the bytes.
    pub(super) fn is_open(&self) -> bool {
        self.is_open
    }

    /// Ends the other ranks' access. The caller guarantees that no other rank accesses these bytes any more.
    pub(super) fn close(&mut self) {
        self.is_open = false;
    }
}

impl Drop for Exposed<'_> {
    fn drop(&mut self) {
        if let Some((backing, _)) = self.backing.take().filter(|_| self.is_open) {
            tracing::debug!("revoking exposed memory that peers may still access");
            // SAFETY: the bytes are whole pages: otherwise the loan would not be open (`open`). No thread of this
            // process writes to them: they are lent to this value for its whole life, and other buffers have other
            // pages.
            unsafe { backing.cut_off(self.start, self.len) };
        }
    }
}
