//! Creates windows: all ranks exchange descriptions of their memory, and then register it together.

use super::{NcclWindow, OpenWindow, Outgoing, STAGING, Signals, WORD, WindowMemory, keep_alive};
use crate::comm::handle_slot::HandleSlot;
use crate::comm::store_exchange::StoreExchange;
use crate::context::Shared;
use crate::cuda;
use crate::cuda::device::CudaDevice;
use crate::cuda::memory::DeviceBuffer;
use crate::cuda::stream::{CudaStream, Priority};
use crate::library::config::Blocking;
use crate::library::{NcclLibrary, sys};
use crate::queue::CommQueue;
use rcomm_core::Buffer;
use rcomm_core::Deadline;
use rcomm_core::backend::{BackendWindow, GroupContext};
use rcomm_core::{Error, ErrorKind, Result};
use rcomm_recorder::model::DType;
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, Instant};

/// The description of a rank's part that the rank publishes for the others.
#[derive(Serialize, Deserialize)]
struct PartInfo {
    /// The code of the element type.
    dtype: u8,
    bytes: usize,
    /// The reason why the rank cannot take part, if there is one.
    refusal: Option<String>,
}

/// The group that opens a window.
pub(crate) struct WindowGroup<'a> {
    pub(crate) group: &'a GroupContext,
    pub(crate) shared: &'a Shared,
    pub(crate) main: &'a Arc<CommQueue>,
    pub(crate) signals: &'a Arc<Signals>,
    /// The number of windows that the group has begun to make.
    pub(crate) windows: &'a AtomicU64,
}

impl WindowGroup<'_> {
    /// Makes a window of this rank's `memory`. All ranks call this.
    ///
    /// # Blocking
    /// Until all ranks have registered their memory, or the deadline.
    ///
    /// # Errors
    /// `Unsupported` if the library, the communicator, or a rank cannot take part; `InvalidArgument` for memory that
    /// cannot be made into a window; `Mismatch` if element types differ; `Timeout`; `Store`; those of the queue.
    pub(crate) fn open(
        &self,
        memory: Buffer<'static>,
        deadline: Deadline,
    ) -> Result<Arc<dyn BackendWindow>> {
        let deadline = deadline.started();
        self.main.join(deadline, self.shared.report_time)?;
        let nth = self.windows.fetch_add(1, Ordering::Relaxed);
        let exchange = StoreExchange::new(self.group, format!("window/{nth}"));
        let prepared = self.prepare(&memory, deadline);
        let refusal = prepared.as_ref().err().map(ToString::to_string);
        let info = PartInfo {
            dtype: memory.dtype().code(),
            bytes: memory.size_bytes(),
            refusal,
        };
        let info = serde_json::to_vec(&info).map_err(|error| {
            Error::new(
                ErrorKind::Backend,
                "the description of this rank's part cannot be written",
            )
            .with_source(error)
        })?;
        exchange.publish("part", &info, deadline)?;
        let infos = exchange.gather("part", deadline)?;
        let (placeholder, words, copies) = prepared?;
        let parts = self.check_infos(memory.dtype(), &infos)?;
        let register = |at: u64, bytes: usize| {
            let made = self.main.register_window(at, bytes, &exchange, deadline);
            made.inspect_err(|error| exchange.publish_failure(error))
        };
        let (at, bytes) = match &placeholder {
            Some(placeholder) => (placeholder.address(), placeholder.len()),
            None => (memory.as_ptr().addr() as u64, memory.size_bytes()),
        };
        // From here on, the library may refer to the memory for as long as the communicator exists.
        let kept = (keep_alive(&memory)?, placeholder, words.clone());
        let kept = self.main.registry.keep(Box::new(kept));
        let data = register(at, bytes).inspect_err(|error| {
            if error.kind() == ErrorKind::Unsupported {
                // Nothing was registered, so the memory is released.
                self.main.registry.release(kept);
            }
        })?;
        let window = OpenWindow {
            data,
            control: register(words.address(), words.len() * WORD)?,
            memory,
            words,
            kept,
        };
        let size = self.group.size() as usize;
        let window = NcclWindow {
            queue: self.main.clone(),
            signals: self.signals.clone(),
            group_rank: self.group.group_rank,
            parts,
            exchange,
            all_have_closed: Mutex::new(false),
            copies,
            open: RwLock::new(Some(window)),
            outgoing: Mutex::new(Outgoing::new(size)),
            incoming: (0..size).map(|_| Mutex::default()).collect(),
        };
        if self.shared.library.table().put_signal.is_some() {
            window.connect(deadline)?;
        }
        Ok(Arc::new(window))
    }

    /// Checks that this rank can take part, and allocates what it needs in addition to its memory: a placeholder for
    /// empty memory, the words with the staging area, and a stream for copies. Waits for the pending work of the queue,
    /// but makes no call that the other ranks must make.
    #[allow(clippy::type_complexity, reason = "three values, used once")]
    fn prepare(
        &self,
        memory: &Buffer<'static>,
        deadline: Deadline,
    ) -> Result<(Option<DeviceBuffer>, DeviceBuffer, Arc<CudaStream>)> {
        let shared = &self.shared;
        if shared.library.table().comm_window_register.is_none() {
            let feature = "a window on device memory";
            return Err(shared.library.lacks(feature, "ncclCommWindowRegister"));
        }
        shared.check_place(memory)?;
        if !memory.is_empty() {
            check_kind(&shared.device, memory)?;
        }
        self.main.check_symmetric()?;
        let stream = self.main.stream();
        let make = |dtype, len| shared.allocate(stream, dtype, len);
        // The library accepts no empty range, and all ranks must make the call.
        let placeholder = match memory.is_empty() {
            true => Some(make(DType::U8, 1)?),
            false => None,
        };
        let words = make(DType::U64, 2 * self.group.size() as usize + STAGING / WORD)?;
        let copies = CudaStream::new(&shared.device, Priority::High)?;
        // The memory must be filled with zeros before a peer writes to it.
        self.main.drain(deadline)?;
        Ok((placeholder, words, copies))
    }

    /// Returns the sizes in bytes of all parts.
    ///
    /// # Errors
    /// `Unsupported` if a rank cannot take part; `Mismatch` if element types differ, or a description cannot be read.
    fn check_infos(&self, dtype: DType, infos: &[Vec<u8>]) -> Result<Vec<usize>> {
        let refuse = |kind, message: String| Err(Error::new(kind, message));
        let mut parts = Vec::with_capacity(infos.len());
        for (info, rank) in infos.iter().zip(&*self.group.info.ranks) {
            let info: PartInfo = serde_json::from_slice(info).map_err(|error| {
                let message = format!("the description of the part of rank {rank} cannot be read");
                Error::new(ErrorKind::Mismatch, message).with_source(error)
            })?;
            if let Some(reason) = info.refusal {
                let message = format!("rank {rank} cannot take part in the window: {reason}");
                return refuse(ErrorKind::Unsupported, message);
            }
            let theirs = DType::from_code(info.dtype).unwrap_or(DType::Other);
            if theirs != dtype {
                let message = format!(
                    "the elements of a window have one type, but this rank's are {dtype} and those of rank {rank} \
                     {theirs}"
                );
                return refuse(ErrorKind::Mismatch, message);
            }
            parts.push(info.bytes);
        }
        Ok(parts)
    }
}

/// Refuses memory that the library cannot share with other ranks ("Memory Allocator" in NCCL's user guide), since the
/// registration would fail on all ranks.
fn check_kind(device: &CudaDevice, memory: &Buffer<'_>) -> Result<()> {
    if !memory.as_ptr().addr().is_multiple_of(sys::WIN_ALIGNMENT) {
        let message = format!(
            "{memory:?}: the address of a window's memory must be a multiple of {} bytes",
            sys::WIN_ALIGNMENT
        );
        return Err(Error::new(ErrorKind::InvalidArgument, message));
    }
    let _entered = device.enter()?;
    let table = device.driver().table();
    let mut handle = 0;
    // SAFETY: the call writes one handle; any address may be queried.
    let status = unsafe {
        (table.mem_retain_allocation_handle)(&mut handle, memory.as_ptr().cast_mut().cast())
    };
    if status != cuda::SUCCESS {
        let message = format!(
            "{memory:?}: only memory of `allocate`, or of the driver's virtual memory functions, can be made \
             into a window"
        );
        return Err(Error::new(ErrorKind::InvalidArgument, message));
    }
    // SAFETY: the call releases the reference taken above.
    let status = unsafe { (table.mem_release)(handle) };
    device.driver().check("cuMemRelease", status)
}

impl CommQueue {
    /// Fails if the library reports that the communicator does not support symmetric memory or one-sided operations.
    fn check_symmetric(&self) -> Result<()> {
        let refuse = |feature: &str| {
            let message = format!(
                "NCCL offers no {feature} on this communicator: its devices or its network do not support it, or \
                 NCCL_WIN_ENABLE or NCCL_CUMEM_ENABLE is 0, or there are no contexts for one-sided operations"
            );
            Err(Error::new(ErrorKind::Unsupported, message))
        };
        let Some(comm) = self.comm() else {
            return Ok(());
        };
        let Some(properties) = comm.properties()? else {
            // Before 2.29 this is detected only when the window is registered.
            return Ok(());
        };
        if properties.device_api_support == 0 {
            return refuse("symmetric memory");
        }
        if self.shared.library.version().0 > sys::CommProperties::LAST_WITHOUT_HOST_RMA
            && properties.host_rma_support == 0
        {
            return refuse("one-sided operations");
        }
        Ok(())
    }

    /// Registers memory as a window, together with all other ranks. The queue must already keep the memory
    /// ([`Registry::keep`](crate::queue::registry::Registry::keep)).
    ///
    /// # Errors
    /// `Unsupported` if the library has no windows, or makes none on this communicator; the failure of another rank;
    /// those of [`take_over`](Self::take_over).
    fn register_window(
        &self,
        at: u64,
        bytes: usize,
        exchange: &StoreExchange,
        deadline: Deadline,
    ) -> Result<WindowMemory> {
        /// The interval at which the store is polled for the failure of another rank.
        const POLL_INTERVAL: Duration = Duration::from_millis(50);
        let Some(register) = self.shared.library.table().comm_window_register else {
            let feature = "a window on device memory";
            return Err(self.shared.library.lacks(feature, "ncclCommWindowRegister"));
        };
        let slot = HandleSlot::default();
        let target = slot.clone();
        let call = move |library: &NcclLibrary, raw| {
            let at = std::ptr::with_exposed_provenance_mut(at as usize);
            // SAFETY: the communicator is live. The queue keeps the range, and ends its communicator before it
            // releases the range. The library writes the handle to the heap, perhaps later: the slot is leaked
            // below unless the call has ended.
            let status =
                unsafe { register(raw, at, bytes, target.as_ptr(), sys::WIN_COLL_SYMMETRIC) };
            // SAFETY: the communicator is live and locked, as for the call above.
            unsafe { library.check_begun(raw, "ncclCommWindowRegister", status) }
        };
        let is_on_thread = self.shared.options.comm.blocking == Blocking::Yes;
        let device = &self.shared.device;
        let mut next_poll = Instant::now() + POLL_INTERVAL;
        let done = self.take_over(
            |comm| {
                // The call waits for all other ranks.
                if is_on_thread {
                    return Ok((comm.clone(), Some(comm.call_on_thread(device, call)?)));
                }
                comm.with(call)??;
                Ok((comm.clone(), None))
            },
            |(comm, thread_call)| {
                match thread_call {
                    Some(call) => {
                        if let Some(called) = call.wait(Duration::ZERO)? {
                            return called.map(Some);
                        }
                    }
                    None if comm.is_ready()? => return Ok(Some(())),
                    None => {}
                }
                if Instant::now() >= next_poll {
                    exchange.check_failed(deadline)?;
                    next_poll = Instant::now() + POLL_INTERVAL;
                }
                Ok(None)
            },
            deadline,
        );
        if let Err(error) = done {
            slot.leak();
            return Err(error);
        }
        let handle = slot.handle();
        if handle.is_null() {
            // The result is the same on all ranks (`ncclCommWindowRegister`, dev_runtime.cc).
            let message = "NCCL returned no window: this communicator has no symmetric memory";
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        Ok(WindowMemory {
            handle: AtomicPtr::new(handle),
            at,
        })
    }

    /// Undoes [`register_window`](Self::register_window).
    ///
    /// # Errors
    /// `Timeout` if the communicator is not free in time; the error of an abort; the library's error.
    pub(super) fn deregister_window(&self, window: &WindowMemory) -> Result<()> {
        let library = &self.shared.library;
        let (Some(comm), Some(deregister)) = (self.comm(), library.table().comm_window_deregister)
        else {
            return Ok(());
        };
        let _alone = self.lock_idle(comm)?;
        let _entered = self.shared.device.enter()?;
        comm.with(|library, raw| {
            // SAFETY: the communicator is live. The window belongs to it, and is deregistered once: `close` has
            // taken it out of the open window.
            let status = unsafe { deregister(raw, window.handle()) };
            // SAFETY: `with` lends a live communicator, locked during the call.
            unsafe { library.check_on(raw, "ncclCommWindowDeregister", status) }
        })?
    }
}
