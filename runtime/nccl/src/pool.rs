//! [`MemoryPool`]: memory that NCCL allocates, for the allocator of a framework.
//!
//! The pool replaces c10d's `getMemAllocator`, `registerMemPool` and `deregisterMemPool` (ProcessGroupNCCL.cpp of
//! PyTorch 2.15). The framework's allocator takes segments from here. Each segment is registered with all groups with
//! which the pool is registered, whichever of segment and group came first.

use crate::context::options::NcclOptions;
use crate::cuda::device::CudaDevice;
use crate::cuda::memory::DeviceBuffer;
use crate::cuda::stream::CudaStream;
use crate::library::NcclLibrary;
use rcomm_core::backend::{Backend, Registration};
use rcomm_core::{Error, ErrorKind, Result};
use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Segments of device memory that NCCL allocates (`ncclMemAlloc`), for a framework's allocator that cuts them into
/// tensors.
///
/// A segment is registered with every group that the pool is [registered](Self::register_with) with, so that the
/// collectives of these groups use the segment's memory directly. A segment is deregistered before it is freed.
///
/// # Thread safety
/// Any thread may use it; one call at a time runs.
pub struct MemoryPool {
    library: Arc<NcclLibrary>,
    stream: Arc<CudaStream>,
    state: Mutex<PoolState>,
}

/// The pool's segments and groups.
#[derive(Default)]
struct PoolState {
    /// The segments, by address.
    segments: BTreeMap<u64, DeviceBuffer>,
    groups: Vec<PoolGroup>,
}

/// A group with which the pool is registered.
struct PoolGroup {
    backend: Weak<dyn Backend>,
    /// The registrations of segments, by the segment's address.
    registered: BTreeMap<u64, Registration>,
}

impl PoolGroup {
    fn has_backend(&self, backend: &Arc<dyn Backend>) -> bool {
        std::ptr::addr_eq(self.backend.as_ptr(), Arc::as_ptr(backend))
    }

    /// Registers the segments that are not registered yet; none if the communicator does not exist yet, or has ended.
    fn register_all(&mut self, segments: &BTreeMap<u64, DeviceBuffer>) -> Result<()> {
        let Some(backend) = self.backend.upgrade() else {
            return Ok(());
        };
        for (&at, segment) in segments {
            if self.registered.contains_key(&at) {
                continue;
            }
            match backend.register(&segment.buffer()?) {
                Ok(registration) => drop(self.registered.insert(at, registration)),
                Err(error) if error.kind() == ErrorKind::Closed => break,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Undoes the registration of a segment, if there is one. After an error, the registration stays.
    fn deregister(&mut self, at: u64) -> Result<()> {
        // A group that has ended has no registrations any more.
        if let Some(registration) = self.registered.get(&at)
            && let Some(backend) = self.backend.upgrade()
        {
            backend.deregister(registration.clone())?;
        }
        self.registered.remove(&at);
        Ok(())
    }
}

/// Functions with the signatures that PyTorch's `CUDAPluggableAllocator` and similar hooks of other frameworks ask for.
/// They take memory from the [installed](MemoryPool::install) pool of the device.
#[derive(Clone, Copy, Debug)]
pub struct AllocatorFunctions {
    /// Returns the address of a new segment of `size` bytes on `device`, or null. The stream is not used.
    pub allocate:
        unsafe extern "C" fn(size: isize, device: c_int, stream: *mut c_void) -> *mut c_void,
    /// Frees the segment at this address.
    pub free:
        unsafe extern "C" fn(at: *mut c_void, size: isize, device: c_int, stream: *mut c_void),
}

/// The installed pools, by the device's number; they are kept until the process ends.
static INSTALLED: Mutex<BTreeMap<c_int, Arc<MemoryPool>>> = Mutex::new(BTreeMap::new());

fn installed() -> MutexGuard<'static, BTreeMap<c_int, Arc<MemoryPool>>> {
    INSTALLED.lock().unwrap_or_else(PoisonError::into_inner)
}

fn refuse(message: String) -> Error {
    Error::new(ErrorKind::InvalidArgument, message)
}

impl MemoryPool {
    /// Makes a pool without segments for this device. `options` tell where to find NCCL.
    ///
    /// # Errors
    /// `Backend` if NCCL is not found; `Unsupported` if it is older than 2.19 and cannot allocate or register memory.
    pub fn new(options: &NcclOptions, device: &Arc<CudaDevice>) -> Result<Arc<Self>> {
        let library = Arc::new(NcclLibrary::load(&options.search())?);
        if library.table().mem_alloc.is_none() || library.table().mem_free.is_none() {
            return Err(library.lacks("a pool of memory", "ncclMemAlloc"));
        }
        if library.table().comm_register.is_none() {
            return Err(library.lacks("a pool of memory", "ncclCommRegister"));
        }
        Ok(Arc::new(Self {
            library,
            stream: CudaStream::default_of(device),
            state: Mutex::default(),
        }))
    }

    fn lock(&self) -> MutexGuard<'_, PoolState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allocates a segment, with undefined contents, and registers it with the groups of the pool. Returns its address.
    ///
    /// # Blocking
    /// Until other calls on the pool have ended. Then, for each registration, until no launch of its group is in
    /// progress, for at most 30 seconds.
    ///
    /// # Errors
    /// `InvalidArgument` for 0 bytes, or more than the address space; `Backend` if there is not enough memory; the
    /// error of a group that does not register the segment, which is then freed, unless a registration of it cannot be
    /// undone. A group that has ended is left out.
    pub fn allocate(&self, bytes: usize) -> Result<u64> {
        if bytes == 0 {
            return Err(refuse("a segment cannot have 0 bytes".to_owned()));
        }
        let segment = DeviceBuffer::segment_from_library(&self.library, &self.stream, bytes)?;
        let at = segment.address();
        let mut state = self.lock();
        let PoolState { segments, groups } = &mut *state;
        segments.insert(at, segment);
        groups.retain(|it| it.backend.strong_count() > 0);
        let registered = groups
            .iter_mut()
            .try_for_each(|group| group.register_all(segments));
        if let Err(error) = registered {
            let undone: Result<Vec<()>> = groups.iter_mut().map(|it| it.deregister(at)).collect();
            // If a registration cannot be undone, the library may still refer to the memory, and the pool keeps it.
            if undone.is_ok() {
                segments.remove(&at);
            }
            return Err(error.with_more(&format!("a segment of {bytes} bytes of a memory pool")));
        }
        Ok(at)
    }

    /// Deregisters the segment at this address from all groups and frees it. Operations on the segment must have
    /// ended, unless their buffers keep it alive.
    ///
    /// # Blocking
    /// Same as [`allocate`](Self::allocate); also until a group's operations on the segment have ended, at most 30
    /// seconds for each.
    ///
    /// # Errors
    /// `InvalidArgument` if the pool has no such segment; the error of a group that does not deregister it. The segment
    /// is then not freed, but other groups may have deregistered it.
    pub fn free(&self, at: u64) -> Result<()> {
        let mut state = self.lock();
        if !state.segments.contains_key(&at) {
            let message = format!("the pool has no segment at {at:#x}");
            return Err(refuse(message));
        }
        let groups = state.groups.iter_mut();
        let deregistered: Result<Vec<()>> = groups.map(|it| it.deregister(at)).collect();
        deregistered?;
        state.segments.remove(&at);
        Ok(())
    }

    /// Registers all present and future segments of the pool with the communicator of a group. If the communicator does
    /// not exist yet, the segments are registered once it exists: at the next allocation, or when this is called again.
    ///
    /// # Blocking
    /// Same as [`allocate`](Self::allocate).
    ///
    /// # Errors
    /// `Unsupported` if the backend registers no memory; the library's error. The group stays in the pool after an
    /// error, with the segments that were registered before it, until [`deregister_from`](Self::deregister_from);
    /// allocations fail as long as the group's error persists.
    pub fn register_with(&self, backend: &Arc<dyn Backend>) -> Result<()> {
        let mut state = self.lock();
        let PoolState { segments, groups } = &mut *state;
        groups.retain(|it| it.backend.strong_count() > 0);
        let position = groups.iter().position(|it| it.has_backend(backend));
        let position = position.unwrap_or_else(|| {
            groups.push(PoolGroup {
                backend: Arc::downgrade(backend),
                registered: BTreeMap::new(),
            });
            groups.len() - 1
        });
        groups[position].register_all(segments)
    }

    /// Undoes [`register_with`](Self::register_with).
    ///
    /// # Blocking
    /// Same as [`free`](Self::free).
    ///
    /// # Errors
    /// `InvalidArgument` if the pool is not registered with the group; the library's error, after which the segments
    /// that are left are still registered.
    pub fn deregister_from(&self, backend: &Arc<dyn Backend>) -> Result<()> {
        let mut state = self.lock();
        let PoolState { segments, groups } = &mut *state;
        let Some(position) = groups.iter().position(|it| it.has_backend(backend)) else {
            return Err(refuse(
                "the pool is not registered with this group".to_owned(),
            ));
        };
        segments
            .keys()
            .try_for_each(|&at| groups[position].deregister(at))?;
        groups.swap_remove(position);
        Ok(())
    }

    /// The address and the size in bytes of each segment, sorted by address.
    pub fn segments(&self) -> Vec<(u64, usize)> {
        let state = self.lock();
        let segments = state.segments.iter();
        segments.map(|(&at, segment)| (at, segment.len())).collect()
    }

    /// Makes this the pool from which [`AllocatorFunctions`] take memory of the pool's device, until the process ends.
    ///
    /// ```no_run
    /// # fn of(pool: std::sync::Arc<rcomm_nccl::MemoryPool>) -> rcomm_core::Result<()> {
    /// let functions = pool.install()?;
    /// // PyTorch: torch._C._cuda_customAllocator(allocate, free), with both as numbers.
    /// println!("{} {}", functions.allocate as usize, functions.free as usize);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `InvalidArgument` if another pool is installed for the device.
    pub fn install(self: &Arc<Self>) -> Result<AllocatorFunctions> {
        let device = c_int::from(self.stream.device().ordinal());
        let mut installed = installed();
        let known = installed.entry(device).or_insert_with(|| self.clone());
        if !Arc::ptr_eq(known, self) {
            let message = format!("another pool is installed for cuda:{device}");
            return Err(refuse(message));
        }
        Ok(AllocatorFunctions {
            allocate: allocate_segment,
            free: free_segment,
        })
    }
}

/// Calls `call` with the installed pool of a device. Returns `None` after an error or a panic, which is logged, since
/// the caller cannot return it. `action` is the subject of that message.
fn with_installed<T>(
    device: c_int,
    action: &str,
    call: impl FnOnce(&MemoryPool) -> Result<T>,
) -> Option<T> {
    let called = catch_unwind(AssertUnwindSafe(|| {
        // `INSTALLED` is not locked during the call, which may wait.
        let pool = installed().get(&device).cloned();
        let pool = pool.ok_or_else(|| refuse(format!("no pool is installed for cuda:{device}")))?;
        call(&pool)
    }));
    match called {
        Ok(Ok(value)) => Some(value),
        Ok(Err(error)) => {
            tracing::error!(%error, device, "memory pool: {action} failed");
            None
        }
        Err(_) => {
            tracing::error!(device, "memory pool: {action} panicked");
            None
        }
    }
}

/// [`AllocatorFunctions::allocate`].
///
/// # Safety
/// None: no argument is dereferenced.
unsafe extern "C" fn allocate_segment(size: isize, device: c_int, _: *mut c_void) -> *mut c_void {
    let at = with_installed(device, "the allocation of a segment", |pool| {
        let bytes = usize::try_from(size)
            .map_err(|_| refuse(format!("a segment cannot have {size} bytes")))?;
        pool.allocate(bytes)
    });
    let at = at.and_then(|at| usize::try_from(at).ok());
    at.map_or(std::ptr::null_mut(), std::ptr::with_exposed_provenance_mut)
}

/// [`AllocatorFunctions::free`].
///
/// # Safety
/// Nothing uses the segment at `at` any more.
unsafe extern "C" fn free_segment(at: *mut c_void, _: isize, device: c_int, _: *mut c_void) {
    if at.is_null() {
        return;
    }
    let at = at.expose_provenance() as u64;
    with_installed(device, "the freeing of a segment", |pool| pool.free(at));
}
