//! [`Shared`]: the state that the queues of one backend share, made from the options.

pub(crate) mod doubt;
pub(crate) mod ends;
pub(crate) mod launch_order;
pub(crate) mod nan;
pub(crate) mod options;
mod ras;

use crate::cuda::device::CudaDevice;
use crate::cuda::event::{EventPool, EventTiming};
use crate::cuda::memory::DeviceBuffer;
use crate::cuda::stream::{CudaStream, Priority};
use crate::library::NcclLibrary;
use doubt::Notes;
use ends::Ends;
use nan::{NanFinder, SearchStreams};
use options::{NcclOptions, Timing};
use ras::Ras;
use rcomm_core::backend::WorldContext;
use rcomm_core::{Buffer, Device};
use rcomm_core::{Error, ErrorKind, Result};
use rcomm_recorder::model::DType;
use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// The state that the queues of one backend share.
pub(crate) struct Shared {
    pub(crate) library: Arc<NcclLibrary>,
    pub(crate) device: Arc<CudaDevice>,
    pub(crate) options: Arc<NcclOptions>,
    /// [`NcclOptions::algorithms`] for the library.
    pub(crate) algorithms: Option<&'static CStr>,
    /// The name of this host.
    pub(crate) host: String,
    /// Events that mark the end of operations that are not timed.
    marks: Arc<EventPool>,
    /// Events that mark the start and the end of operations that are timed.
    timed_marks: Arc<EventPool>,
    /// Whether operations that are issued now are timed.
    is_timed: AtomicBool,
    /// Events by which one stream waits for another.
    pub(crate) sync_events: Arc<EventPool>,
    pub(crate) default_stream: Arc<CudaStream>,
    /// A stream for work that waits for no kernel: new memory is filled with zeros here.
    pub(crate) copies: Arc<CudaStream>,
    /// The error of the abort, which is set once.
    pub(crate) aborted: OnceLock<Error>,
    /// Whether the device memory of the communicators is released.
    pub(crate) suspended: AtomicBool,
    /// The number of operations whose buffers were leaked, because the device may still use them.
    pub(crate) leaked: AtomicU64,
    /// The world's job and attempt, as text.
    pub(crate) world: Arc<str>,
    /// The groups with CUDA graphs that may delay the end of this backend's communicators. Set once, after an abort.
    pub(crate) graphs_in_the_way: OnceLock<String>,
    /// How long a rank that gives up waits for the others to report their outcome.
    pub(crate) report_time: Duration,
    pub(crate) nans: Arc<NanFinder>,
    pub(crate) ras: Arc<Ras>,
    pub(crate) ends: Arc<Ends>,
    /// The group's notes of ranks that have given up the group. Set once, and not in a group of one rank.
    pub(crate) notes: OnceLock<Notes>,
}

impl Shared {
    /// Makes the state of a world's factory, from which [`sibling`](Self::sibling) makes the state of each backend.
    ///
    /// # Errors
    /// Same as [`NcclFactory::open`](crate::NcclFactory::open).
    pub(crate) fn open(world: &WorldContext, options: NcclOptions) -> Result<Self> {
        let device = options.open_device(world.local_rank.unwrap_or(world.rank))?;
        let library = Arc::new(NcclLibrary::load(&options.search())?);
        let launch_order = launch_order::check(&options, library.version())?;
        tracing::info!(
            rank = world.rank,
            nccl = %library.version(),
            library = %library.path().display(),
            launch_order,
            ?device,
            "NCCL loaded"
        );
        let algorithms = match &options.algorithms {
            Some(_) if library.table().all_reduce_config.is_none() => {
                return Err(library.lacks("a selection of algorithms", "ncclAllReduceConfig"));
            }
            Some(names) => Some(library.static_name(names)?),
            None => None,
        };
        let system = rustix::system::uname();
        let host = system.nodename().to_string_lossy();
        // Two ranks query the job's report, so that a dump has it even if one of them has ended.
        let queries_ras = world.rank == 0 || world.rank + 1 == world.world_size;
        let ras = Ras::new(options.ras.clone().filter(|_| queries_ras), Ras::TIMEOUTS);
        Ok(Self {
            marks: EventPool::new(&device, EventTiming::Untimed),
            timed_marks: EventPool::new(&device, EventTiming::Timed),
            is_timed: AtomicBool::new(options.timing == Timing::On),
            sync_events: EventPool::new(&device, EventTiming::Untimed),
            default_stream: CudaStream::default_of(&device),
            copies: CudaStream::new(&device, Priority::Normal)?,
            library,
            device,
            options: Arc::new(options),
            algorithms,
            host: host.into_owned(),
            aborted: OnceLock::new(),
            suspended: AtomicBool::new(false),
            leaked: AtomicU64::new(0),
            world: match world.attempt {
                0 => format!("job {}", world.job).into(),
                attempt => format!("job {}, attempt {attempt}", world.job).into(),
            },
            graphs_in_the_way: OnceLock::new(),
            report_time: world.config.status_wait,
            nans: Arc::default(),
            ras: Arc::new(ras),
            ends: Arc::default(),
            notes: OnceLock::new(),
        })
    }

    /// Makes the state for the queues of another backend of this world.
    pub(crate) fn sibling(&self) -> Arc<Self> {
        Arc::new(Self {
            library: self.library.clone(),
            device: self.device.clone(),
            options: self.options.clone(),
            algorithms: self.algorithms,
            host: self.host.clone(),
            marks: EventPool::new(&self.device, EventTiming::Untimed),
            timed_marks: EventPool::new(&self.device, EventTiming::Timed),
            is_timed: AtomicBool::new(self.options.timing == Timing::On),
            sync_events: EventPool::new(&self.device, EventTiming::Untimed),
            default_stream: self.default_stream.clone(),
            copies: self.copies.clone(),
            aborted: OnceLock::new(),
            suspended: AtomicBool::new(false),
            leaked: AtomicU64::new(0),
            world: self.world.clone(),
            graphs_in_the_way: OnceLock::new(),
            report_time: self.report_time,
            nans: self.nans.clone(),
            ras: self.ras.clone(),
            ends: self.ends.clone(),
            notes: OnceLock::new(),
        })
    }

    /// Refuses a buffer that is not in the memory of this rank's device, or that does not keep its memory alive.
    pub(crate) fn check_place(&self, buffer: &Buffer<'_>) -> Result<()> {
        let refuse = |reason: String| {
            let message = format!("{buffer:?}: {reason}");
            Err(Error::new(ErrorKind::InvalidArgument, message))
        };
        if buffer.device() != self.device.place() {
            let place = match buffer.device() {
                Device::Cpu => "host memory".to_owned(),
                Device::Cuda(ordinal) => format!("memory of cuda:{ordinal}"),
            };
            return refuse(format!(
                "it is {place}; on this rank the group works on {:?}",
                self.device
            ));
        }
        if buffer.owner().is_none() {
            return refuse("nothing keeps the memory alive until the device is done".to_owned());
        }
        Ok(())
    }

    /// The events that mark the ends of operations that are issued now and, if they are timed, their starts; and
    /// whether they are.
    pub(crate) fn marks(&self) -> (&Arc<EventPool>, Timing) {
        match self.is_timed.load(Ordering::Relaxed) {
            false => (&self.marks, Timing::Off),
            true => (&self.timed_marks, Timing::On),
        }
    }

    /// Sets whether operations that are issued from now on are timed.
    pub(crate) fn set_timing(&self, is_on: bool) {
        self.is_timed.store(is_on, Ordering::Relaxed);
    }

    /// Refuses work while the device memory of the communicators is released.
    pub(crate) fn check_awake(&self) -> Result<()> {
        if !self.suspended.load(Ordering::Acquire) {
            return Ok(());
        }
        let message = "the group is suspended: call `resume` on all its ranks first";
        Err(Error::new(ErrorKind::InvalidArgument, message))
    }

    /// Whether the group was aborted and its communicators are left to the library as they are.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.aborted.get().is_some() && !self.options.error_handling.cleans_up()
    }

    /// Makes a buffer in memory that the library allocates, with all elements zero.
    ///
    /// # Errors
    /// Same as [`DeviceBuffer::from_library`].
    pub(crate) fn allocate(
        &self,
        stream: &Arc<CudaStream>,
        dtype: DType,
        len: usize,
    ) -> Result<DeviceBuffer> {
        let zeroing = (&*self.copies, &self.sync_events);
        DeviceBuffer::from_library(&self.library, zeroing, stream, (dtype, len))
    }

    /// Returns the index of the first NaN of a buffer, if there is one.
    ///
    /// # Errors
    /// Same as [`NanFinder::find`].
    pub(crate) fn find_nan(&self, buffer: &Buffer<'_>) -> Result<Option<u64>> {
        let streams = SearchStreams {
            default: &self.default_stream,
            copies: &self.copies,
            sync_events: &self.sync_events,
        };
        self.nans.find(buffer, &streams, &self.aborted)
    }
}
