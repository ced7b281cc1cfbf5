//! Creates communicators: by joining with unique ids, by splitting another communicator, or by shrinking another to the
//! remaining ranks.
//!
//! A [`CommInit`] is begun and then polled until it ends, so the caller can wait with a deadline. The library then
//! works in the background. If the communicator is configured as blocking, the call runs on a separate thread, which is
//! detached if the call never returns.
//!
//! If the caller passes a [`WarmUp`], the communicator makes one small broadcast, so that the library connects its
//! rings (`ncclCollPreconnectFunc`, group.cc). Otherwise the first operation connects them, and waits for peers.
//!
//! The library's number of ranks is compared with the requested one before a communicator is returned.
//!
//! Sources: for the states, "Creating a communicator with options" and "Creating more communicators" in NCCL's
//! user guide; for the slot to which a child's handle is written, `ncclCommSplit` in NCCL's `init.cc`.

use super::handle_slot::HandleSlot;
use crate::comm::{AbandonedChild, Comm};
use crate::cuda::device::CudaDevice;
use crate::cuda::memory::DeviceBuffer;
use crate::cuda::stream::CudaStream;
use crate::library::NcclLibrary;
use crate::library::config::{Blocking, CommOptions, RawConfig};
use crate::library::foreign_call::ForeignCall;
use crate::library::sys::{self, NcclComm, NcclResult, UniqueId};
use rcomm_core::{Error, ErrorKind, Result};
use std::ffi::c_int;
use std::sync::Arc;
use std::time::Duration;

/// The communicator that a rank joins, and its rank there.
pub(crate) struct InitParams {
    /// One id, or several for a faster start of large worlds (2.23). They are the same on all ranks. Empty for a child.
    pub(crate) ids: Vec<UniqueId>,
    pub(crate) rank: u32,
    /// The number of ranks.
    pub(crate) size: u32,
    pub(crate) name: String,
}

/// The stream and the buffer that a communicator's first broadcast uses.
#[derive(Clone)]
pub(crate) struct WarmUp {
    pub(crate) stream: Arc<CudaStream>,
    /// A buffer of four bytes or more.
    pub(crate) word: DeviceBuffer,
}

impl WarmUp {
    /// Checks the size of a communicator that is ready, and begins to connect its rings if there is a warm-up. A single
    /// rank has no peers to connect to.
    ///
    /// # Errors
    /// Same as [`Comm::check_size`]; `Backend` with the library's message.
    fn begin(warm_up: Option<Self>, comm: &Comm) -> Result<()> {
        comm.check_size()?;
        match warm_up {
            Some(warm_up) if comm.size() > 1 => {
                let _entered = warm_up.stream.device().enter()?;
                warm_up.connect(comm)
            }
            _ => Ok(()),
        }
    }

    /// Makes the library connect the rings of a communicator that is ready. All ranks call this.
    fn connect(&self, comm: &Comm) -> Result<()> {
        let at = std::ptr::with_exposed_provenance_mut(self.word.address() as usize);
        comm.with(|library, raw| {
            // SAFETY: the communicator is live, and the stream is of its device. The word's memory is freed only after
            // the work that is enqueued on this stream, on which it was allocated.
            let status = unsafe {
                (library.table().broadcast)(
                    at,
                    at,
                    1,
                    sys::data_type::UINT32,
                    0,
                    raw,
                    self.stream.raw(),
                )
            };
            // SAFETY: the communicator is live and locked while it is lent.
            unsafe { library.check_begun(raw, "ncclBroadcast", status) }
        })?
    }
}

/// The result of one step of a creation.
pub(crate) enum InitStep {
    /// The creation has not ended yet.
    NotYet,
    /// The communicator; `None` for a rank that took part in a split and is in none of its parts.
    Ready(Option<Comm>),
}

/// A communicator that is being created.
pub(crate) struct CommInit(InitStage);

/// How far a creation has come.
enum InitStage {
    /// The rank is joining, and the handle exists. The rings are connected after all ranks have joined.
    Joining(Comm, Option<WarmUp>),
    /// The library connects the rings, if it was asked to.
    Connecting(Comm),
    /// The communicator is being split off or shrunk; the handle is written when the parent is ready again.
    Child(Child),
    /// The creation is inside a call that blocks.
    Blocked(ForeignCall<Result<Option<Comm>>>),
    /// The creation has ended.
    Over,
}

/// A communicator that the library is making from another.
struct Child {
    library: Arc<NcclLibrary>,
    parent: Arc<Comm>,
    rank: u32,
    size: u32,
    warm_up: Option<WarmUp>,
    /// Passed to the parent if this value is dropped early, since the library may still write to the slot.
    slot: Option<HandleSlot>,
    /// Kept as long as the slot, as a precaution: the library copies the input during the call.
    input: Option<Box<Input>>,
}

/// A communicator that is to be made from another.
struct NewChild {
    params: InitParams,
    /// Ranks of the parent that are left out.
    excluded: Vec<c_int>,
    warm_up: Option<WarmUp>,
}

/// The arguments of a call that makes a child.
struct Input {
    config: RawConfig,
    /// Ranks of the parent that are left out.
    excluded: Vec<c_int>,
}

impl Drop for Child {
    /// Passes the slot, to which the library may still write, to the parent.
    fn drop(&mut self) {
        if let (Some(slot), Some(input)) = (self.slot.take(), self.input.take()) {
            self.parent.keep_child(AbandonedChild { slot, input });
        }
    }
}

impl CommInit {
    /// Begins to join. The communicator uses the device whose context is current.
    ///
    /// # Errors
    /// `Backend` with the library's message; `Unsupported` for several ids with a library older than 2.23.
    pub(crate) fn join(
        library: &Arc<NcclLibrary>,
        device: &Arc<CudaDevice>,
        params: InitParams,
        warm_up: Option<WarmUp>,
        options: &CommOptions,
    ) -> Result<Self> {
        let config = config_for(library, &params, options)?;
        let library = library.clone();
        let make = move || join(&library, &params, config);
        match options.blocking {
            Blocking::No => make().map(|comm| Self(InitStage::Joining(comm, warm_up))),
            Blocking::Yes => on_thread(device, move || {
                let comm = make()?;
                WarmUp::begin(warm_up, &comm)?;
                Ok(Some(comm))
            }),
        }
    }

    /// Begins to split a communicator: all its ranks call this. Ranks with the same `color` form one communicator,
    /// ordered by `params.rank`; a rank without a color gets no communicator.
    ///
    /// No other call may be made on the parent until the split has ended.
    ///
    /// # Errors
    /// `Unsupported` if the library has no such function; `Backend` with the library's message.
    pub(crate) fn split(
        library: &Arc<NcclLibrary>,
        device: &Arc<CudaDevice>,
        parent: &Arc<Comm>,
        (color, params): (Option<u32>, InitParams),
        warm_up: Option<WarmUp>,
        options: &CommOptions,
    ) -> Result<Self> {
        let Some(split) = library.table().comm_split else {
            return Err(library.lacks("a split of a group", "ncclCommSplit"));
        };
        let color = color.map_or(Ok(sys::SPLIT_NO_COLOR), to_c)?;
        let key = to_c(params.rank)?;
        let call = move |parent: NcclComm, slot: *mut NcclComm, input: &mut Input| {
            // SAFETY: `derive` lends a parent that is live and locked during the call; `slot` and `input`
            // are on the heap, and stay until the parent is ready again, or are leaked.
            unsafe { split(parent, color, key, slot, input.config.as_mut()) }
        };
        let child = NewChild {
            params,
            excluded: Vec::new(),
            warm_up,
        };
        derive(
            library,
            device,
            parent,
            child,
            ("ncclCommSplit", call),
            options,
        )
    }

    /// Begins to make a communicator of the remaining ranks. All remaining ranks call this with the same list of
    /// excluded ranks (ranks of the parent). `flags` is `SHRINK_DEFAULT` or `SHRINK_ABORT`.
    ///
    /// # Errors
    /// `Unsupported` if the library has no such function; `Backend` with the library's message.
    pub(crate) fn shrink(
        library: &Arc<NcclLibrary>,
        device: &Arc<CudaDevice>,
        parent: &Arc<Comm>,
        (excluded, params, flags): (&[u32], InitParams, c_int),
        warm_up: Option<WarmUp>,
        options: &CommOptions,
    ) -> Result<Self> {
        let Some(shrink) = library.table().comm_shrink else {
            return Err(library.lacks("a communicator of the remaining ranks", "ncclCommShrink"));
        };
        let excluded: Result<Vec<c_int>> = excluded.iter().map(|&rank| to_c(rank)).collect();
        let excluded = excluded?;
        let count = c_int::try_from(excluded.len()).map_err(|_| too_large(excluded.len()))?;
        let call = move |parent: NcclComm, slot: *mut NcclComm, input: &mut Input| {
            let (list, config) = (input.excluded.as_mut_ptr(), input.config.as_mut());
            // SAFETY: `derive` lends a parent that is live and locked during the call; `slot` and `input`, whose
            // list has `count` ranks, are on the heap, and stay until the parent is ready again, or are leaked.
            unsafe { shrink(parent, list, count, slot, config, flags) }
        };
        let child = NewChild {
            params,
            excluded,
            warm_up,
        };
        derive(
            library,
            device,
            parent,
            child,
            ("ncclCommShrink", call),
            options,
        )
    }

    /// Advances as far as possible without waiting. To be called again only after `NotYet`.
    ///
    /// # Errors
    /// `Backend`, `PeerLost` or `Timeout` with the library's message. The creation has then failed permanently.
    pub(crate) fn step(&mut self) -> Result<InitStep> {
        let is_ready = match &mut self.0 {
            InitStage::Joining(comm, _) | InitStage::Connecting(comm) => comm.is_ready()?,
            // After an error the parent keeps the slot, and aborts a child that the library has still made.
            InitStage::Child(child) => child.parent.is_ready()?,
            InitStage::Blocked(call) => {
                return Ok(match call.wait(Duration::ZERO)? {
                    Some(made) => InitStep::Ready(made?),
                    None => InitStep::NotYet,
                });
            }
            InitStage::Over => return Ok(InitStep::Ready(None)),
        };
        if !is_ready {
            return Ok(InitStep::NotYet);
        }
        let (made, warm_up) = match std::mem::replace(&mut self.0, InitStage::Over) {
            InitStage::Joining(comm, warm_up) => (Some(comm), warm_up),
            InitStage::Child(mut child) => (child.take(), child.warm_up.take()),
            InitStage::Connecting(comm) => return Ok(InitStep::Ready(Some(comm))),
            InitStage::Blocked(_) | InitStage::Over => (None, None),
        };
        let Some(comm) = made else {
            return Ok(InitStep::Ready(None));
        };
        WarmUp::begin(warm_up, &comm)?;
        self.0 = InitStage::Connecting(comm);
        Ok(InitStep::NotYet)
    }
}

impl Child {
    /// Returns the communicator that the library has made, once the parent is ready; `None` if it has made none.
    fn take(&mut self) -> Option<Comm> {
        let raw = self
            .slot
            .take()
            .map_or(std::ptr::null_mut(), |slot| slot.handle());
        // The library will not read the input again.
        self.input = None;
        if raw.is_null() {
            return None;
        }
        // SAFETY: the library is done with the child, since the parent is ready. The slot was taken, so this value
        // alone has the handle, and this code runs once.
        Some(unsafe { Comm::from_raw(&self.library, raw, self.rank, self.size) })
    }
}

/// Returns the options in the library's form. The library reads them during the call, and keeps only the pointer to the
/// name.
fn config_for(
    library: &NcclLibrary,
    params: &InitParams,
    options: &CommOptions,
) -> Result<RawConfig> {
    let mut config = options.to_raw(&params.name)?;
    config.as_mut().comm_name = library.static_name(&params.name)?.as_ptr();
    Ok(config)
}

/// Joins with one id or several.
fn join(library: &Arc<NcclLibrary>, params: &InitParams, mut config: RawConfig) -> Result<Comm> {
    let mut raw: NcclComm = std::ptr::null_mut();
    let (rank, size) = (to_c(params.rank)?, to_c(params.size)?);
    let (call, status) = match params.ids.as_slice() {
        [id] => {
            // SAFETY: all pointers are to locals that outlive the call, which copies the configuration with
            // its strings, except for the name, which is never freed, and writes the handle before it
            // returns; the id is one of the library's.
            let status = unsafe {
                (library.table().comm_init_rank_config)(&mut raw, size, *id, rank, config.as_mut())
            };
            ("ncclCommInitRankConfig", status)
        }
        ids => {
            let Some(init) = library.table().comm_init_rank_scalable else {
                let feature = "a start with several unique ids";
                return Err(library.lacks(feature, "ncclCommInitRankScalable"));
            };
            let mut ids = ids.to_vec();
            let count = c_int::try_from(ids.len()).map_err(|_| too_large(ids.len()))?;
            // SAFETY: `raw`, `ids` (with `count` ids of the library's) and the configuration outlive the
            // call, which copies what it reads, except for the name, which is never freed, and writes the
            // handle before it returns.
            let status = unsafe {
                init(
                    &mut raw,
                    size,
                    rank,
                    count,
                    ids.as_mut_ptr(),
                    config.as_mut(),
                )
            };
            ("ncclCommInitRankScalable", status)
        }
    };
    // SAFETY: `raw` is null or the communicator that the call above has made, which no other code has. It is owned
    // from here on, so that it is aborted after an error.
    let comm = unsafe { Comm::from_raw(library, raw, params.rank, params.size) };
    // SAFETY: `raw` is null, or lives as long as `comm`.
    unsafe { library.check_begun(raw, call, status)? };
    Ok(comm)
}

/// Begins to make a child. `call` gets the parent, the slot for the handle, and the input.
///
/// The `unsafe` code of `call` relies on this contract: the parent is live and locked while the call runs. The slot and
/// the input are on the heap, and stay there until the parent is ready again, or are leaked.
fn derive(
    library: &Arc<NcclLibrary>,
    device: &Arc<CudaDevice>,
    parent: &Arc<Comm>,
    child: NewChild,
    (name, call): (
        &'static str,
        impl FnOnce(NcclComm, *mut NcclComm, &mut Input) -> NcclResult + Send + 'static,
    ),
    options: &CommOptions,
) -> Result<CommInit> {
    let NewChild {
        params,
        excluded,
        warm_up,
    } = child;
    let config = config_for(library, &params, options)?;
    let input = Box::new(Input { config, excluded });
    let (library, parent) = (library.clone(), parent.clone());
    let begin = move || -> Result<Child> {
        let mut child = Child {
            library: library.clone(),
            parent: parent.clone(),
            rank: params.rank,
            size: params.size,
            warm_up,
            slot: Some(HandleSlot::default()),
            input: Some(input),
        };
        if let (Some(slot), Some(input)) = (&child.slot, &mut child.input) {
            let at = slot.as_ptr();
            parent.with(|library, raw| {
                let status = call(raw, at, input);
                // SAFETY: the parent is live and locked while it is lent.
                unsafe { library.check_begun(raw, name, status) }
            })??;
        }
        Ok(child)
    };
    match options.blocking {
        Blocking::No => begin().map(|child| CommInit(InitStage::Child(child))),
        Blocking::Yes => on_thread(device, move || {
            let mut child = begin()?;
            let made = child.take();
            if let Some(comm) = &made {
                WarmUp::begin(child.warm_up.take(), comm)?;
            }
            Ok(made)
        }),
    }
}

/// Runs a blocking call on a separate thread, in the device's context. A communicator that is made after the caller
/// has given up is dropped there, and so aborted.
fn on_thread(
    device: &Arc<CudaDevice>,
    make: impl FnOnce() -> Result<Option<Comm>> + Send + 'static,
) -> Result<CommInit> {
    let device = device.clone();
    let work = move || device.enter().and_then(|_entered| make());
    ForeignCall::begin("rcomm/nccl-init", work).map(|call| CommInit(InitStage::Blocked(call)))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::CudaDriver;
    use crate::library::tests::{real_library, skip};
    use std::time::{Duration, Instant};

    #[test]
    fn the_real_library_refuses_to_join_without_a_driver() {
        let Some(library) = real_library().map(Arc::new) else {
            return;
        };
        if CudaDriver::load(None).is_ok() {
            skip::<()>("there is a CUDA driver");
            return;
        }
        let params = InitParams {
            ids: vec![library.unique_id().unwrap()],
            rank: 0,
            size: 1,
            name: "alone".to_owned(),
        };
        let config = config_for(&library, &params, &CommOptions::default()).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        let error = join(&library, &params, config).and_then(|comm| {
            while !comm.is_ready()? {
                assert!(Instant::now() < deadline, "no answer");
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok(())
        });
        let error = error.expect_err("there is no driver").to_string();
        assert!(error.contains("unhandled cuda error"), "{error}");
    }
}
