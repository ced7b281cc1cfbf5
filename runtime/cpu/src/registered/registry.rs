//! [`Registry`]: the memory that this rank has allocated for others to map.

use super::backing::{Backing, LiveBackings};
use rcomm_core::Buffer;
use rcomm_core::backend::support::element_size;
use rcomm_core::{Error, ErrorKind, Result};
use rcomm_recorder::model::DType;
use rustix::io::Errno;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The allocated memory of a rank, by address. Each world has one.
///
/// # Thread safety
/// Every method may be called from any thread.
#[derive(Default)]
pub(crate) struct Registry {
    live: Arc<LiveBackings>,
    reported: Reported,
}

/// The conditions that have been reported; each is reported once.
#[derive(Default)]
struct Reported {
    /// Allocated buffers are ordinary memory.
    ordinary: AtomicBool,
    /// Huge pages were refused.
    small_pages: AtomicBool,
    /// Another rank's memory could not be mapped.
    unreachable: AtomicBool,
}

impl Registry {
    /// Returns new memory, all zero, that the other processes of this host can map, or ordinary memory if the system
    /// does not let this process create such memory.
    ///
    /// # Errors
    /// `InvalidArgument` if the length does not fit into the address space; `Io` if the system is out of
    /// memory.
    pub(crate) fn allocate(self: &Arc<Self>, dtype: DType, len: usize) -> Result<Buffer<'static>> {
        let bytes = element_size(dtype).checked_mul(len);
        let bytes = bytes.filter(|&bytes| isize::try_from(bytes).is_ok());
        let bytes = bytes.ok_or_else(|| {
            Error::new(
                ErrorKind::InvalidArgument,
                format!("{len} elements of {dtype} exceed the address space"),
            )
        })?;
        let backing = match Backing::create(bytes, Arc::downgrade(&self.live)) {
            Ok(backing) => backing,
            Err(error) if is_refusal(&error) => {
                if !self.reported.ordinary.swap(true, Ordering::Relaxed) {
                    tracing::warn!(
                        %error,
                        "the system refused memory that other ranks can map: allocated buffers are \
                         ordinary memory"
                    );
                }
                return Buffer::zeroed(dtype, len);
            }
            Err(error) => return Err(Error::io("cannot allocate memory that ranks share", error)),
        };
        self.note_huge_pages(backing.region().request_huge_pages());
        let start = backing.region().start().addr().get();
        let weak = Arc::downgrade(&backing);
        // The backing is added after it was made into a buffer, which requires that it has no other reference.
        let buffer = backing.into_buffer(dtype, len)?;
        self.live.add(start, weak);
        Ok(buffer)
    }

    /// Whether all of `memory` was allocated by this registry, so that others can map it.
    pub(crate) fn has(&self, memory: &Buffer<'_>) -> bool {
        let start = memory.as_ptr().addr();
        self.find(start..start + memory.size_bytes()).is_some()
    }

    /// Logs once that the system refused huge pages, if the result `requested` of the request is an error.
    pub(crate) fn note_huge_pages(&self, requested: io::Result<()>) {
        if let Err(error) = requested
            && !self.reported.small_pages.swap(true, Ordering::Relaxed)
        {
            tracing::info!(
                %error,
                "huge pages were refused: memory that ranks share has small ones, and long \
                 operations may be slower"
            );
        }
    }

    /// Logs once that another rank's memory could not be mapped.
    pub(super) fn note_unreachable(&self, error: &io::Error) {
        if !self.reported.unreachable.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                %error,
                "the memory of another rank of this host cannot be mapped: registered buffers are \
                 treated as ordinary ones"
            );
        }
    }

    /// Returns the allocated memory that contains all of these bytes, and their range in it.
    pub(super) fn find(&self, bytes: Range<usize>) -> Option<(Arc<Backing>, Range<usize>)> {
        self.live.find(bytes)
    }
}

/// Whether the error means that the system does not let this process create memory that others can map, does not let
/// it create memory of this size, or has no file descriptor left for it. Running out of memory is not a refusal.
fn is_refusal(error: &io::Error) -> bool {
    let refusals = [
        Errno::PERM,
        Errno::ACCESS,
        Errno::NOSYS,
        Errno::INVAL,
        Errno::FBIG,
        Errno::MFILE,
        Errno::NFILE,
    ];
    Errno::from_io_error(error).is_some_and(|errno| refusals.contains(&errno))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocated_memory_is_found_by_its_address_until_it_is_dropped() {
        let registry = Arc::new(Registry::default());
        let buffer = registry.allocate(DType::F32, 3000).unwrap();
        let start = buffer.as_ptr().addr();
        let (_, inside) = registry.find(start + 4096..start + 12000).unwrap();
        assert_eq!(inside, 4096..12000);
        assert!(registry.find(start..start + 12001).is_none());
        assert!(registry.find(start - 1..start).is_none());
        drop(buffer);
        assert!(registry.find(start..start + 4).is_none());
        assert!(registry.live.is_empty());
    }

    #[test]
    fn a_size_beyond_the_limits_is_an_error_and_not_ordinary_memory() {
        let registry = Arc::new(Registry::default());
        let error = registry.allocate(DType::U8, usize::MAX).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        let error = registry.allocate(DType::U8, 1 << 60).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io);
    }
}
