//! A communicator as an owned value: begun, polled until it is ready, ended in the right order, aborted
//! on drop.
//!
//! Every communicator is non-blocking (`blocking = 0`): a call that has to wait for peers returns
//! `ncclInProgress`, and `ncclCommGetAsyncError` is polled with a deadline, so that nobody is stuck
//! inside the library. Source of the states: "Creating a communicator with options" and "Error handling
//! and communicator abort" in NCCL's user guide.

use super::library::NcclLibrary;
use super::sys::{self, NcclComm, NcclResult, UniqueId, result};
use crate::error::{Error, ErrorKind, Result};
use std::ffi::{CString, c_int};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Options of one communicator; `None` leaves the library's own choice.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommOptions {
    /// Fewest thread blocks per kernel.
    pub min_ctas: Option<i32>,
    /// Most thread blocks per kernel.
    pub max_ctas: Option<i32>,
    /// Thread block cluster size.
    pub cga_cluster_size: Option<i32>,
    /// Traffic class of the network (2.23).
    pub traffic_class: Option<i32>,
    /// Network module (`Socket`, `IB`, ...).
    pub net_name: Option<String>,
}

/// The C form of the options, with the strings that it points to.
struct RawConfig {
    config: sys::Config,
    _strings: [Option<CString>; 2],
}

impl CommOptions {
    /// `name` is what the library's logs and tools call the communicator (2.27).
    fn to_raw(&self, name: &str) -> Result<RawConfig> {
        let text = |what: &str, value: Option<&str>| {
            let value = value.map(CString::new).transpose();
            value.map_err(|_| {
                Error::new(
                    ErrorKind::InvalidArgument,
                    format!("the communicator's {what} holds a NUL byte"),
                )
            })
        };
        let name = text("name", Some(name))?;
        let net = text("network module", self.net_name.as_deref())?;
        let mut config = sys::Config::new();
        config.blocking = 0;
        let pointer = |string: &Option<CString>| {
            let string = string.as_ref();
            string.map_or(std::ptr::null(), |string| string.as_ptr())
        };
        config.comm_name = pointer(&name);
        config.net_name = pointer(&net);
        let set = |field: &mut c_int, value: Option<i32>| {
            if let Some(value) = value {
                *field = value;
            }
        };
        set(&mut config.min_ctas, self.min_ctas);
        set(&mut config.max_ctas, self.max_ctas);
        set(&mut config.cga_cluster_size, self.cga_cluster_size);
        set(&mut config.traffic_class, self.traffic_class);
        Ok(RawConfig {
            config,
            _strings: [name, net],
        })
    }
}

/// One rank's end of a communicator.
///
/// # Thread safety
/// Calls may come from any thread, one at a time: the lock sees to that, and no call waits for peers, so
/// an abort from another thread gets its turn and never frees the communicator under a call.
pub(super) struct Comm {
    library: Arc<NcclLibrary>,
    handle: Mutex<Handle>,
    rank: u32,
    size: u32,
}

/// Null after destroy or abort.
struct Handle(NcclComm);

// SAFETY: NCCL allows calls on a communicator from any thread, one at a time; the lock around the handle
// sees to that.
unsafe impl Send for Handle {}

/// Which communicator a rank joins, and as whom.
pub(super) struct Seat<'a> {
    /// One id, or several for a faster start of large worlds (2.23); the same on all ranks.
    pub(super) ids: &'a [UniqueId],
    pub(super) rank: u32,
    pub(super) size: u32,
    pub(super) name: &'a str,
}

impl Comm {
    /// Begins to join: [`is_ready`](Self::is_ready) says when all ranks have.
    ///
    /// The device whose context is current becomes the communicator's.
    ///
    /// # Errors
    /// `Backend` with the library's words; `Unsupported` for several ids with a library older than 2.23.
    pub(super) fn begin(
        library: &Arc<NcclLibrary>,
        seat: &Seat<'_>,
        options: &CommOptions,
    ) -> Result<Self> {
        let mut raw_config = options.to_raw(seat.name)?;
        let mut raw: NcclComm = std::ptr::null_mut();
        let (rank, size) = (to_c(seat.rank)?, to_c(seat.size)?);
        let (call, status) = match seat.ids {
            [id] => {
                // SAFETY: all pointers are to locals that outlive the call, which copies the
                // configuration with its strings; the id is one of the library's own.
                let status = unsafe {
                    (library.table().comm_init_rank_config)(
                        &mut raw,
                        size,
                        *id,
                        rank,
                        &mut raw_config.config,
                    )
                };
                ("ncclCommInitRankConfig", status)
            }
            ids => {
                let Some(init) = library.table().comm_init_rank_scalable else {
                    return Err(library.lacks(
                        "a start with several unique ids",
                        "ncclCommInitRankScalable",
                    ));
                };
                let mut ids = ids.to_vec();
                let count = c_int::try_from(ids.len()).map_err(|_| too_large(ids.len()))?;
                // SAFETY: as above; `ids` holds `count` ids.
                let status = unsafe {
                    init(
                        &mut raw,
                        size,
                        rank,
                        count,
                        ids.as_mut_ptr(),
                        &mut raw_config.config,
                    )
                };
                ("ncclCommInitRankScalable", status)
            }
        };
        let comm = Self {
            library: library.clone(),
            handle: Mutex::new(Handle(raw)),
            rank: seat.rank,
            size: seat.size,
        };
        if status != result::IN_PROGRESS {
            // SAFETY: the communicator is null or was just made.
            unsafe { library.check_on(raw, call, status)? };
        }
        Ok(comm)
    }

    /// This rank's number in the communicator.
    pub(super) fn rank(&self) -> u32 {
        self.rank
    }

    /// Ranks of the communicator.
    pub(super) fn size(&self) -> u32 {
        self.size
    }

    /// Makes one call on the communicator.
    ///
    /// # Errors
    /// `Closed` after destroy or abort.
    pub(super) fn with<R>(&self, call: impl FnOnce(&NcclLibrary, NcclComm) -> R) -> Result<R> {
        let handle = self.handle.lock().unwrap_or_else(PoisonError::into_inner);
        if handle.0.is_null() {
            return Err(Error::new(
                ErrorKind::Closed,
                "the communicator was destroyed or aborted",
            ));
        }
        Ok(call(&self.library, handle.0))
    }

    /// Whether nothing is going on in the background, such as joining.
    ///
    /// # Errors
    /// `Backend` with the library's words (a peer died, the network failed).
    pub(super) fn is_ready(&self) -> Result<bool> {
        self.with(Self::ask)?
    }

    /// As [`is_ready`](Self::is_ready) for whoever may not wait: says nothing if somebody else is making
    /// a call just now, or if the communicator is gone.
    pub(super) fn trouble(&self) -> Option<Error> {
        let handle = self.handle.try_lock().ok()?;
        if handle.0.is_null() {
            return None;
        }
        Self::ask(&self.library, handle.0).err()
    }

    fn ask(library: &NcclLibrary, comm: NcclComm) -> Result<bool> {
        let mut state = result::SUCCESS;
        // SAFETY: the communicator is live; writes one int through a valid pointer.
        let asked = unsafe { (library.table().comm_get_async_error)(comm, &mut state) };
        let (call, status) = match asked {
            result::SUCCESS => ("a communicator's background work", state),
            _ => ("ncclCommGetAsyncError", asked),
        };
        if status == result::IN_PROGRESS {
            return Ok(false);
        }
        // SAFETY: the communicator is live.
        unsafe { library.check_on(comm, call, status)? };
        Ok(true)
    }

    /// Begins to flush what was enqueued: [`is_ready`](Self::is_ready) says when it is. All ranks call
    /// it, then [`destroy`](Self::destroy).
    ///
    /// # Errors
    /// `Backend` with the library's words.
    pub(super) fn finalize(&self) -> Result<()> {
        self.with(|library, comm| {
            // SAFETY: the communicator is live.
            let status = unsafe { (library.table().comm_finalize)(comm) };
            if status == result::IN_PROGRESS {
                return Ok(());
            }
            // SAFETY: the communicator is live.
            unsafe { library.check_on(comm, "ncclCommFinalize", status) }
        })?
    }

    /// Frees the communicator after [`finalize`](Self::finalize). A second call does nothing.
    ///
    /// # Errors
    /// `Backend` with the library's words.
    pub(super) fn destroy(&self) -> Result<()> {
        let destroy = self.library.table().comm_destroy;
        self.end("ncclCommDestroy", destroy)
    }

    /// Ends every pending operation and frees the communicator, on this rank alone. A second call does
    /// nothing.
    ///
    /// # Blocking
    /// Until the library has stopped its kernels and threads.
    ///
    /// # Errors
    /// `Backend` with the library's words.
    pub(super) fn abort(&self) -> Result<()> {
        let abort = self.library.table().comm_abort;
        self.end("ncclCommAbort", abort)
    }

    fn end(
        &self,
        call: &str,
        function: unsafe extern "C" fn(NcclComm) -> NcclResult,
    ) -> Result<()> {
        let mut handle: MutexGuard<'_, Handle> =
            self.handle.lock().unwrap_or_else(PoisonError::into_inner);
        let comm = std::mem::replace(&mut handle.0, std::ptr::null_mut());
        if comm.is_null() {
            return Ok(());
        }
        // SAFETY: taken out under the lock, so it is freed once and nobody is in a call on it; abort is
        // allowed while operations are pending, destroy is called when there are none.
        let status = unsafe { function(comm) };
        self.library.check(call, status)
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        if let Err(error) = self.abort() {
            tracing::warn!(%error, rank = self.rank, "a communicator could not be aborted");
        }
    }
}

fn to_c(value: u32) -> Result<c_int> {
    c_int::try_from(value).map_err(|_| too_large(value as usize))
}

fn too_large(value: usize) -> Error {
    Error::new(
        ErrorKind::InvalidArgument,
        format!("{value} does not fit NCCL's int"),
    )
}
