//! A communicator as an owned value: it is polled while the library works on it, ended in the right order, and
//! aborted on drop. The module `init` creates communicators.
//!
//! Calls on a communicator wait for peers inside the library, unless `blocking = 0` is set: such calls
//! return `ncclInProgress`, and `ncclCommGetAsyncError` is polled with a deadline. Sources: for the states,
//! "Creating a communicator with options" and "Error handling and communicator abort" in NCCL's user guide;
//! for what the end of a communicator waits for, `ncclCommRevoke`, `ncclCommAbort` and `commReclaim` in
//! `init.cc` of NCCL 2.30.7.

mod arrivals;
pub(crate) mod bootstrap;
#[cfg(test)]
pub(crate) mod counting_store;
pub(crate) mod handle_slot;
pub(crate) mod init;
mod joined;
pub(crate) mod members;
mod peer_info;
mod properties;
pub(crate) mod store_exchange;

use crate::cuda::device::CudaDevice;
use crate::library::NcclLibrary;
use crate::library::foreign_call::ForeignCall;
use crate::library::sys::{self, NcclComm, NcclResult, result};
use handle_slot::HandleSlot;
use rcomm_core::{Deadline, Error, ErrorKind, Result};
use std::ffi::c_void;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

/// One rank's end of a communicator.
///
/// # Thread safety
/// Calls may come from any thread; a lock ensures that there is one call at a time. A call that never
/// returns (because it is stuck in the driver or waits for a peer) keeps the lock, and the communicator is not
/// freed then: NCCL allows no abort while another thread is in a call ("Fault Tolerance" in its user guide). A
/// revoke does not free the communicator, so it is made even during such a call: the revoke raises the flags that the
/// call checks. Code that must not wait uses [`status`](Comm::status).
pub(crate) struct Comm {
    library: Arc<NcclLibrary>,
    handle: Mutex<Handle>,
    /// The same handle, for a revoke during a call; null once the communicator was ended.
    raw: AtomicPtr<c_void>,
    /// Held while the communicator is revoked or ended. Taken before `handle`.
    ending: Mutex<()>,
    /// Children that were abandoned before the library was done with them.
    abandoned_children: Mutex<Vec<AbandonedChild>>,
    rank: u32,
    size: u32,
}

/// A communicator that was to be made from another, its parent, and whose creation was given up. Until the parent has
/// been aborted, the library may still write the child's handle to `slot`, and read `input`.
pub(crate) struct AbandonedChild {
    pub(crate) slot: HandleSlot,
    #[allow(dead_code, reason = "held, not read")]
    pub(crate) input: Box<dyn Send>,
}

impl AbandonedChild {
    /// Aborts the child, if the library has made it.
    fn abort(self, library: &NcclLibrary) -> Result<()> {
        let raw = self.slot.handle();
        if raw.is_null() {
            return Ok(());
        }
        // SAFETY: only this value has the handle. The library is done with the child: the parent's abort or destruction
        // has returned, and each joins the thread that makes the child (`ncclCommEnsureReady`, init.cc).
        let status = unsafe { (library.table().comm_abort)(raw) };
        library.check("ncclCommAbort", status)
    }
}

/// The state of a communicator.
pub(crate) enum CommStatus {
    /// No work is in progress in the background.
    Ready,
    /// Work is in progress in the background.
    InProgress,
    /// Another thread is inside a call on the communicator.
    InUse,
    /// The communicator was ended.
    Gone,
    /// The library reports an error.
    Failed(Error),
}

/// The library's handle of a communicator; null once it was destroyed, aborted or abandoned.
struct Handle(NcclComm);

// SAFETY: NCCL allows calls on a communicator from any thread, one at a time; the lock around the handle
// ensures that.
unsafe impl Send for Handle {}

impl Comm {
    /// How long the library may take to abort a dropped communicator before the aborting thread is
    /// detached.
    const LAST_ABORT: Duration = Duration::from_secs(10);
    /// How long calls on communicators that are ended together may take before they count as calls that do not return.
    pub(crate) const CALL: Duration = Duration::from_secs(1);
    /// How long work on the device may continue after an error of the communicator. The error may come from a rank that
    /// left after its part was done, so that data in flight still arrive.
    pub(crate) const GRACE: Duration = Duration::from_millis(500);

    /// Takes ownership of a communicator that the library has just made. Null counts as a communicator that has ended.
    ///
    /// # Safety
    /// `raw` is null, or a live communicator of this library that no other code ends.
    pub(crate) unsafe fn from_raw(
        library: &Arc<NcclLibrary>,
        raw: NcclComm,
        rank: u32,
        size: u32,
    ) -> Self {
        Self {
            library: library.clone(),
            handle: Mutex::new(Handle(raw)),
            raw: AtomicPtr::new(raw),
            ending: Mutex::default(),
            abandoned_children: Mutex::default(),
            rank,
            size,
        }
    }

    /// This rank's number in the communicator.
    pub(crate) fn rank(&self) -> u32 {
        self.rank
    }

    /// The number of ranks of the communicator.
    pub(crate) fn size(&self) -> u32 {
        self.size
    }

    /// Compares the library's number of ranks with the requested number, once the communicator is ready.
    /// After a failure that has left a group of calls open on a thread, NCCL ignores the thread's later
    /// calls without an error: a communicator from such a call seems ready, but has no ranks.
    ///
    /// # Errors
    /// `Backend` if they differ, or with the library's message.
    pub(crate) fn check_size(&self) -> Result<()> {
        let mut count = 0;
        self.with(|library, comm| {
            // SAFETY: `with` lends a live communicator, locked during the call, which writes one int
            // through a reference.
            let status = unsafe { (library.table().comm_count)(comm, &mut count) };
            // SAFETY: `with` lends a live communicator, locked during the call.
            unsafe { library.check_on(comm, "ncclCommCount", status) }
        })??;
        if u32::try_from(count) == Ok(self.size) {
            return Ok(());
        }
        let message = format!(
            "NCCL has made a communicator of {count} ranks instead of {}: an earlier failure may have left a \
             group of calls open on its thread",
            self.size
        );
        Err(Error::new(ErrorKind::Backend, message))
    }

    /// Whether the communicator was neither destroyed, aborted nor abandoned. One that was abandoned during a call that
    /// does not return still counts as live.
    pub(crate) fn is_live(&self) -> bool {
        !self.raw.load(Ordering::Acquire).is_null()
    }

    /// Makes one call on the communicator, when no other call uses it.
    ///
    /// # Errors
    /// `Closed` if the communicator was destroyed, aborted or abandoned.
    pub(crate) fn with<R>(&self, call: impl FnOnce(&NcclLibrary, NcclComm) -> R) -> Result<R> {
        let handle = self.handle.lock().unwrap_or_else(PoisonError::into_inner);
        if handle.0.is_null() {
            return Err(ended());
        }
        Ok(call(&self.library, handle.0))
    }

    /// Makes one call on the communicator on a separate thread, which holds the communicator until the call
    /// returns.
    ///
    /// # Errors
    /// `Io` if no thread can be started. The call itself returns its own result, or `Closed` as [`with`](Self::with).
    pub(crate) fn call_on_thread<R: Send + 'static>(
        self: &Arc<Self>,
        device: &Arc<CudaDevice>,
        call: impl FnOnce(&NcclLibrary, NcclComm) -> Result<R> + Send + 'static,
    ) -> Result<ForeignCall<Result<R>>> {
        let (comm, device) = (self.clone(), device.clone());
        ForeignCall::begin("rcomm/nccl-connect", move || {
            device
                .enter()
                .and_then(|_entered| comm.with(call).and_then(|called| called))
        })
    }

    /// Whether no work, such as joining, is in progress in the background.
    ///
    /// # Errors
    /// With the library's message: `PeerLost` if it reports that a peer or the network failed, `Timeout` if a deadline
    /// of its own has passed, else `Backend`. `Closed` as [`with`](Self::with).
    pub(crate) fn is_ready(&self) -> Result<bool> {
        self.with(Self::query)?
    }

    /// Returns the state, as [`is_ready`](Self::is_ready) would, for callers that must not wait for the lock.
    pub(crate) fn status(&self) -> CommStatus {
        let Ok(handle) = self.handle.try_lock() else {
            return CommStatus::InUse;
        };
        if handle.0.is_null() {
            return CommStatus::Gone;
        }
        match Self::query(&self.library, handle.0) {
            Ok(true) => CommStatus::Ready,
            Ok(false) => CommStatus::InProgress,
            Err(error) => CommStatus::Failed(error),
        }
    }

    /// Returns the library's error, if there is one and no other call uses the communicator.
    pub(crate) fn async_error(&self) -> Option<Error> {
        match self.status() {
            CommStatus::Failed(error) => Some(error),
            CommStatus::Ready | CommStatus::InProgress | CommStatus::InUse | CommStatus::Gone => {
                None
            }
        }
    }

    /// Returns whether no work is in progress in the background.
    ///
    /// # Errors
    /// `Backend`, `PeerLost` or `Timeout` with the library's message.
    fn query(library: &NcclLibrary, comm: NcclComm) -> Result<bool> {
        let mut state = result::SUCCESS;
        // SAFETY: both callers pass a live communicator under its lock; the call writes one int through a
        // reference.
        let query_status = unsafe { (library.table().comm_get_async_error)(comm, &mut state) };
        let (call, status) = match query_status {
            result::SUCCESS => ("a communicator's background work", state),
            _ => ("ncclCommGetAsyncError", query_status),
        };
        if status == result::IN_PROGRESS {
            return Ok(false);
        }
        // SAFETY: both callers pass a live communicator under its lock.
        unsafe { library.check_on(comm, call, status)? };
        Ok(true)
    }

    /// Begins to flush enqueued work; [`is_ready`](Self::is_ready) returns true when the flush is done. All ranks
    /// call this, then [`destroy`](Self::destroy).
    ///
    /// # Errors
    /// `Backend` with the library's message.
    pub(crate) fn finalize(&self) -> Result<()> {
        self.with(|library, comm| {
            // SAFETY: `with` lends a live communicator, locked during the call.
            let status = unsafe { (library.table().comm_finalize)(comm) };
            // SAFETY: `with` lends a live communicator, locked during the call.
            unsafe { library.check_begun(comm, "ncclCommFinalize", status) }
        })?
    }

    /// Frees the communicator after [`finalize`](Self::finalize), if no error has occurred on it. If this
    /// call fails, the library leaves a group of calls open on the thread (`ncclCommDestroy`, init.cc:
    /// `ncclCommEnsureReady` returns before `ncclGroupEndInternal`), so the thread makes no other call. A
    /// second call has no effect.
    ///
    /// # Errors
    /// `Backend` with the library's message.
    pub(crate) fn destroy(&self) -> Result<()> {
        let comm = {
            let _ending = self.ending.lock().unwrap_or_else(PoisonError::into_inner);
            let mut handle = self.handle.lock().unwrap_or_else(PoisonError::into_inner);
            self.take(&mut handle)
        };
        if comm.is_null() {
            return Ok(());
        }
        // SAFETY: the handle was taken out under the lock, so the communicator is freed once, and no thread is in a
        // call on it. The locks are free during the call, which may not return, so that an abort does not wait for it.
        let status = unsafe { (self.library.table().comm_destroy)(comm) };
        self.abort_children(status);
        self.library.check("ncclCommDestroy", status)
    }

    /// Stops this rank's pending work and keeps the communicator, from which another can be made afterwards;
    /// [`is_ready`](Self::is_ready) returns true when the work has stopped.
    ///
    /// # Errors
    /// `Unsupported` if the library has no such function (before 2.28.7); `Closed` if the communicator was ended;
    /// `Backend` with the library's message.
    ///
    /// # Blocking
    /// While another call uses the communicator, until the deadline.
    pub(crate) fn revoke(&self, deadline: Deadline) -> Result<()> {
        let Some(revoke) = self.library.table().comm_revoke else {
            return Err(self.library.lacks(
                "an abort that can be followed by a shrink",
                "ncclCommRevoke",
            ));
        };
        let _ending = self.ending.lock().unwrap_or_else(PoisonError::into_inner);
        // The lock keeps other calls from beginning. If a call that does not return has the lock, the communicator
        // is revoked without it.
        let _handle = self.lock_until(deadline);
        let comm = self.raw.load(Ordering::Acquire);
        if comm.is_null() {
            return Err(ended());
        }
        // SAFETY: the communicator is live: code that ends it takes `ending` first. The call does
        // not free it.
        let status = unsafe { revoke(comm, sys::REVOKE_DEFAULT) };
        // SAFETY: the communicator is live, since `ending` is still held.
        unsafe { self.library.check_begun(comm, "ncclCommRevoke", status) }
    }

    /// Returns the locked handle; `None` if calls hold it until the deadline.
    fn lock_until(&self, deadline: Deadline) -> Option<MutexGuard<'_, Handle>> {
        let deadline = deadline.started();
        loop {
            match self.handle.try_lock() {
                Ok(handle) => return Some(handle),
                Err(TryLockError::Poisoned(handle)) => return Some(handle.into_inner()),
                Err(TryLockError::WouldBlock) if deadline.has_passed() => return None,
                Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    /// Aborts several communicators in one group of calls. Separate aborts could deadlock: an abort frees
    /// memory of the device, which waits for the kernels of all its communicators, and those kernels end only
    /// when their own communicator is aborted. In a group, all communicators get the abort flag before the
    /// first is freed (`ncclCommAbort` raises the flag at once, and `ncclGroupEnd` frees).
    ///
    /// # Blocking
    /// Until the library has stopped its kernels and threads, and until no CUDA graph holds operations of one of the
    /// communicators.
    ///
    /// # Errors
    /// `Backend` with the library's message; `Timeout` if a call on a communicator does not return, so that it is not
    /// aborted.
    pub(crate) fn abort_all(library: &NcclLibrary, comms: &[Arc<Self>]) -> Result<()> {
        let mut result = Ok(());
        let mut ended = Vec::new();
        let group = library.group()?;
        let calls = Deadline::In(Self::CALL).started();
        for comm in comms {
            let _ending = comm.ending.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(mut handle) = comm.lock_until(calls) else {
                let message =
                    "a call on the communicator does not return: it is left to the library";
                result = result.and(Err(Error::new(ErrorKind::Timeout, message)));
                continue;
            };
            let raw = comm.take(&mut handle);
            if raw.is_null() {
                continue;
            }
            // SAFETY: the handle was taken out under the lock, so the communicator is freed once, and no thread is
            // in a call on it.
            let status = unsafe { (library.table().comm_abort)(raw) };
            result = result.and(library.check("ncclCommAbort", status));
            ended.push((comm, status));
        }
        let freed = group.end();
        for (comm, status) in ended {
            let status = if status == result::SUCCESS {
                freed
            } else {
                status
            };
            comm.abort_children(status);
        }
        result.and(library.check("ncclGroupEnd", freed))
    }

    /// Keeps an abandoned child until this communicator has ended.
    pub(crate) fn keep_child(&self, child: AbandonedChild) {
        let mut children = self
            .abandoned_children
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        children.push(child);
    }

    /// Leaks the communicator to the library as it is. Later calls fail with `Closed`, or wait for a call that does not
    /// return.
    pub(crate) fn abandon(&self) {
        let mut children = self
            .abandoned_children
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        std::mem::forget(std::mem::take(&mut *children));
        drop(children);
        let _ending = self.ending.lock().unwrap_or_else(PoisonError::into_inner);
        // If a call has not returned, it keeps the lock, so no later call is made in any case.
        if let Some(mut handle) = self.lock_until(Deadline::In(Duration::ZERO)) {
            self.take(&mut handle);
        }
    }

    /// Takes the handle out, for a caller that ends or abandons the communicator and holds `ending`.
    fn take(&self, handle: &mut Handle) -> NcclComm {
        self.raw.store(std::ptr::null_mut(), Ordering::Release);
        std::mem::replace(&mut handle.0, std::ptr::null_mut())
    }

    /// Aborts the abandoned children after the communicator's end has returned `status`.
    fn abort_children(&self, status: NcclResult) {
        let mut children = self
            .abandoned_children
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let children = std::mem::take(&mut *children);
        abort_children(&self.library, children, status);
    }

    /// Registers memory for operations of this communicator; returns the library's handle of the registration.
    ///
    /// # Errors
    /// `Unsupported` before 2.19; `Backend` with the library's message.
    ///
    /// # Safety
    /// The range is device memory that stays until [`deregister`](Self::deregister), or until the
    /// communicator has ended.
    pub(crate) unsafe fn register(&self, at: u64, bytes: usize) -> Result<u64> {
        let Some(register) = self.library.table().comm_register else {
            return Err(self.library.lacks("registered memory", "ncclCommRegister"));
        };
        self.with(|library, comm| {
            let mut handle: *mut c_void = std::ptr::null_mut();
            let at = std::ptr::with_exposed_provenance_mut(at as usize);
            // SAFETY: `with` lends a live communicator, locked during the call, which writes one pointer
            // through a reference. The caller keeps the range until it is deregistered or the communicator
            // has ended.
            let status = unsafe { register(comm, at, bytes, &mut handle) };
            // SAFETY: `with` lends a live communicator, locked during the call.
            unsafe { library.check_on(comm, "ncclCommRegister", status)? };
            Ok(handle.expose_provenance() as u64)
        })?
    }

    /// Undoes [`register`](Self::register), which returned `handle`. Each registration is undone once.
    ///
    /// # Errors
    /// `Closed` if the communicator was ended, which also ended its registrations; `Unsupported` before 2.19;
    /// `Backend` with the library's message.
    ///
    /// # Safety
    /// `handle` comes from this communicator, and is not used again.
    pub(crate) unsafe fn deregister(&self, handle: u64) -> Result<()> {
        let Some(deregister) = self.library.table().comm_deregister else {
            return Err(self
                .library
                .lacks("registered memory", "ncclCommDeregister"));
        };
        self.with(|library, comm| {
            let handle = std::ptr::with_exposed_provenance_mut(handle as usize);
            // SAFETY: `with` lends a live communicator, locked during the call. The caller guarantees that `handle`
            // comes from this communicator and is not used again.
            let status = unsafe { deregister(comm, handle) };
            // SAFETY: `with` lends a live communicator, locked during the call.
            unsafe { library.check_on(comm, "ncclCommDeregister", status) }
        })?
    }
}

fn ended() -> Error {
    let message = "the communicator was destroyed, aborted or left to the library";
    Error::new(ErrorKind::Closed, message)
}

/// Aborts abandoned children after their parent has ended. If ending the parent failed, they are leaked, since the
/// library may still write to them.
fn abort_children(library: &NcclLibrary, children: Vec<AbandonedChild>, status: NcclResult) {
    if status != result::SUCCESS {
        std::mem::forget(children);
        return;
    }
    for child in children {
        if let Err(error) = child.abort(library) {
            tracing::warn!(%error, "an abandoned child communicator could not be aborted");
        }
    }
}

impl Comm {
    /// Aborts the communicator if it was not ended, on a separate thread, since the library may never return from the
    /// call. Returns true if the communicator has ended; false after an error, or if the library has not returned
    /// within `limit`. The thread keeps `kept` until the library has returned.
    pub(crate) fn abort_on_thread(&mut self, limit: Duration, kept: impl Send + 'static) -> bool {
        let handle = self
            .handle
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        let handle = Handle(std::mem::replace(&mut handle.0, std::ptr::null_mut()));
        if handle.0.is_null() {
            return true;
        }
        let library = self.library.clone();
        let children = self.abandoned_children.get_mut();
        let children = std::mem::take(children.unwrap_or_else(PoisonError::into_inner));
        let abort = move || {
            let (handle, _kept) = (handle, kept);
            // SAFETY: the handle was taken out above, so the communicator is freed once. `self` is borrowed
            // exclusively, so no other thread is in a call on it.
            let status = unsafe { (library.table().comm_abort)(handle.0) };
            abort_children(&library, children, status);
            library.check("ncclCommAbort", status)
        };
        let rank = self.rank;
        let call = ForeignCall::begin("rcomm/nccl-abort", abort);
        match call.and_then(|mut call| call.wait(limit)) {
            Ok(Some(Ok(()))) => true,
            Ok(Some(Err(error))) | Err(error) => {
                tracing::warn!(%error, rank, "a communicator could not be aborted");
                false
            }
            Ok(None) => {
                tracing::error!(
                    rank,
                    "ncclCommAbort has not returned: its thread is detached"
                );
                false
            }
        }
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        self.abort_on_thread(Self::LAST_ABORT, ());
    }
}
