//! Options of the NCCL backend, and the environment variables that set them.

use crate::cuda::CudaDriver;
use crate::cuda::device::CudaDevice;
use crate::cuda::stream::Priority;
use crate::library::Search;
use crate::library::config::{Blocking, CommOptions};
use rcomm_core::config::Config;
use rcomm_core::{Error, ErrorKind, Result};
use std::fmt::Display;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

/// The address at which NCCL's monitor listens by default.
const DEFAULT_RAS: &str = "localhost:28028";

/// Options of the NCCL backend. They are plain data: a program can fill them in and
/// [put](rcomm_core::config::BackendOptions::set) them into [`Config::backend_options`]. Otherwise they are
/// read from the environment when the world is made.
///
/// | variable | option | default |
/// |---|---|---|
/// | `RCOMM_NCCL_LIB` | [`library`](Self::library) | `libnccl.so.2`, then that of the active Python environment |
/// | `VIRTUAL_ENV`, `CONDA_PREFIX` | [`python_prefix`](Self::python_prefix) | none |
/// | `RCOMM_CUDA_LIB` | [`driver`](Self::driver) | `libcuda.so.1` |
/// | `RCOMM_CUDA_DEVICE` | [`device`](Self::device) | the local rank |
/// | `RCOMM_NCCL_HIGH_PRIORITY`, `TORCH_NCCL_HIGH_PRIORITY` | [`priority`](Self::priority) | normal |
/// | `RCOMM_NCCL_TIMING`, `TORCH_NCCL_ENABLE_TIMING` | [`timing`](Self::timing) | off |
/// | `RCOMM_NCCL_RANKS_PER_ID`, `TORCH_NCCL_RANKS_PER_ROOT` | [`ranks_per_id`](Self::ranks_per_id) | 128 |
/// | `RCOMM_NCCL_BLOCKING`, `TORCH_NCCL_USE_COMM_NONBLOCKING` (its opposite) | [`CommOptions::blocking`] | on |
/// | `RCOMM_NCCL_LAZY` | [`connecting`](Self::connecting) | eager |
/// | `RCOMM_NCCL_ERROR_HANDLING`: `none`, `tear_down`, `clean_up_only`, `skip_clean_up`; `TORCH_NCCL_ASYNC_ERROR_HANDLING`: 0 to 3 | [`error_handling`](Self::error_handling) | `clean_up_only` |
/// | `RCOMM_NCCL_RAS`, `NCCL_RAS_ENABLE`, `NCCL_RAS_ADDR` | [`ras`](Self::ras) | `localhost:28028` |
/// | `NCCL_MULTI_RANK_GPU_ENABLE` | [`device_sharing`](Self::device_sharing) | refused |
/// | `RCOMM_NCCL_COMMS_PER_PAIR`: 1 or 2 | [`pairs`](Self::pairs) | 2 |
/// | `RCOMM_NCCL_LAUNCH_ORDER`: `implicit` or `library` | [`launch_order`](Self::launch_order) | `library` |
/// | `NCCL_PROFILER_PLUGIN` | [`tags`](Self::tags) | off |
/// | `RCOMM_NCCL_ALGORITHMS` | [`algorithms`](Self::algorithms) | NCCL chooses |
///
/// NCCL reads its own variables (`NCCL_*`) by itself.
#[derive(Clone, Debug)]
pub struct NcclOptions {
    /// Path of the library; `None` = search for it, as in the table above.
    pub library: Option<PathBuf>,
    /// Root of an active Python environment, whose `nvidia-nccl` package is tried last.
    pub python_prefix: Option<PathBuf>,
    /// Path of the CUDA driver; `None` = `libcuda.so.1` in the system's search path.
    pub driver: Option<PathBuf>,
    /// The device of this rank; `None` = the local rank, modulo the number of devices.
    pub device: Option<u16>,
    /// Priority of the streams that communicate.
    pub priority: Priority,
    /// Whether the device measures how long operations run, for [`Done::duration`](rcomm_core::backend::Done), in
    /// groups that are made from now on. [`ProcessGroup::set_timing`](rcomm_core::ProcessGroup::set_timing) switches it
    /// for a group.
    pub timing: Timing,
    /// Number of ranks for which one unique id is made. Large worlds start faster with several ids.
    pub ranks_per_id: u32,
    /// When the ranks of a group join its communicator.
    pub connecting: Connecting,
    /// How communicators and the process end after a failure.
    pub error_handling: ErrorHandling,
    /// The address of NCCL's own monitor, whose report is fetched when a dump is made; `None` = no report.
    pub ras: Option<String>,
    /// Whether two ranks may use one device.
    pub device_sharing: DeviceSharing,
    /// The communicators for single messages of two ranks.
    pub pairs: PairComms,
    /// The order of the launches of several communicators on one device.
    pub launch_order: LaunchOrder,
    /// Whether collectives pass their sequence number to NCCL's profiler plug-ins (2.32). The option is on if the
    /// environment names a plug-in.
    pub tags: bool,
    /// The algorithms that NCCL may use for each collective (`algSelection` of NCCL 2.32), the same on all ranks: names
    /// with commas between them, such as `ring,tree`, or `^` and the names of the algorithms that NCCL may not use. For
    /// a collective that none of them can carry out, NCCL chooses by itself. With an older library, the backend is
    /// refused.
    pub algorithms: Option<String>,
    /// The NCCL configuration of each communicator.
    pub comm: CommOptions,
}

/// Whether two ranks may use one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceSharing {
    /// Two ranks may not use one device, since NCCL would refuse or hang.
    #[default]
    Refused,
    /// Two ranks may use one device, which NCCL supports from 2.30 on.
    Allowed,
}

/// The communicators for single messages of two ranks. All ranks choose the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PairComms {
    /// Each direction has a communicator, so that two ranks that both send first do not wait for each other.
    #[default]
    PerDirection,
    /// Both directions have one communicator, as in c10d. This takes half the memory and half the time to make, but the
    /// messages run one after the other: if both ranks first send a large message and then receive, both hang.
    PerPair,
}

/// The order of the launches of several communicators on one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LaunchOrder {
    /// The order that NCCL's own variables select; by default, there is none. Ranks may issue in different orders over
    /// several groups, as long as the device can hold the kernels of all these groups at once.
    #[default]
    Library,
    /// The order of the calls on the host, which must be the same on all ranks over all groups of a device. Then the
    /// operations of any number of groups cannot wait for each other without end. When the world is made,
    /// `NCCL_LAUNCH_ORDER_IMPLICIT=1` and `NCCL_LAUNCH_RACE_FATAL=0` are set in the process's environment, unless they
    /// are set already. The process must have no other thread then. Refused before NCCL 2.26.
    Implicit,
}

/// Whether the device measures when operations start and end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Timing {
    /// Events mark where operations end, without the time.
    #[default]
    Off,
    /// Events mark start and end, with the time.
    On,
}

/// When the ranks of a group join its communicator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Connecting {
    /// When the group is made, which fails if the ranks cannot connect.
    #[default]
    Eager,
    /// At the group's first operation, whose deadline applies.
    Lazy,
}

/// How a group's communicators, and the process, end after an operation has failed or timed out: the modes of
/// c10d (`ErrorHandlingMode` of ProcessGroupNCCL).
///
/// In every mode the failure is first published to the other ranks, the dump is written, and every operation of
/// the group ends with the error. An abort that the program requests never ends the process. A communicator that is
/// still joining is aborted in every mode. Where NCCL can revoke and shrink communicators, the group's own one is
/// revoked instead of aborted, so that it can be shrunk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ErrorHandling {
    /// Communicators stay as they are, and the process continues (c10d: `NoHandling`).
    None,
    /// Communicators are aborted, and then the process (c10d: `TearDown`).
    TearDown,
    /// Communicators are aborted, and the process continues (c10d: `CleanUpOnly`).
    #[default]
    CleanUpOnly,
    /// Communicators stay as they are, and the process is aborted (c10d: `SkipCleanUp`, its default).
    SkipCleanUp,
}

impl ErrorHandling {
    /// The modes by rcomm's names. The index of a mode is its number in c10d.
    const NAMES: [(&'static str, Self); 4] = [
        ("none", Self::None),
        ("tear_down", Self::TearDown),
        ("clean_up_only", Self::CleanUpOnly),
        ("skip_clean_up", Self::SkipCleanUp),
    ];

    /// Whether communicators are aborted.
    pub(crate) fn cleans_up(self) -> bool {
        matches!(self, Self::TearDown | Self::CleanUpOnly)
    }

    /// Whether the process is aborted.
    pub(crate) fn ends_process(self) -> bool {
        matches!(self, Self::TearDown | Self::SkipCleanUp)
    }
}

impl Default for NcclOptions {
    fn default() -> Self {
        Self {
            library: None,
            python_prefix: None,
            driver: None,
            device: None,
            priority: Priority::Normal,
            timing: Timing::Off,
            ranks_per_id: 128,
            connecting: Connecting::Eager,
            error_handling: ErrorHandling::CleanUpOnly,
            ras: Some(DEFAULT_RAS.to_owned()),
            device_sharing: DeviceSharing::Refused,
            pairs: PairComms::PerDirection,
            launch_order: LaunchOrder::Library,
            tags: false,
            algorithms: None,
            comm: CommOptions::default(),
        }
    }
}

impl NcclOptions {
    /// Returns the options in [`Config::backend_options`]; without any, those of the process's environment.
    ///
    /// # Errors
    /// Same as [`from_lookup`](Self::from_lookup).
    pub fn of(config: &Config) -> Result<Self> {
        match config.backend_options.get::<Self>() {
            Some(options) => Ok(options.clone()),
            None => Self::from_lookup(|name| std::env::var(name).ok()),
        }
    }

    /// Returns the defaults, overridden by the variables that `lookup` finds.
    ///
    /// # Errors
    /// `InvalidArgument` if a value is not allowed. The error names the variable, the value, and what is allowed.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let text = |name: &str| lookup(name).filter(|value| !value.trim().is_empty());
        let mut options = Self::default();
        let path = |name: &str| text(name).map(PathBuf::from);
        options.library = path("RCOMM_NCCL_LIB");
        options.driver = path("RCOMM_CUDA_LIB");
        options.python_prefix = path("VIRTUAL_ENV").or_else(|| path("CONDA_PREFIX"));
        if let Some(value) = text("RCOMM_CUDA_DEVICE") {
            options.device = Some(number("RCOMM_CUDA_DEVICE", &value, 0)?);
        }
        let switch = |names: [&str; 2]| -> Result<bool> {
            for name in names {
                if let Some(value) = text(name) {
                    return is_on(name, &value);
                }
            }
            Ok(false)
        };
        if switch(["RCOMM_NCCL_HIGH_PRIORITY", "TORCH_NCCL_HIGH_PRIORITY"])? {
            options.priority = Priority::High;
        }
        if switch(["RCOMM_NCCL_TIMING", "TORCH_NCCL_ENABLE_TIMING"])? {
            options.timing = Timing::On;
        }
        for name in ["TORCH_NCCL_RANKS_PER_ROOT", "RCOMM_NCCL_RANKS_PER_ID"] {
            if let Some(value) = text(name) {
                options.ranks_per_id = number(name, &value, 1)?;
            }
        }
        if let Some(value) = text("TORCH_NCCL_USE_COMM_NONBLOCKING") {
            options.comm.blocking = match is_on("TORCH_NCCL_USE_COMM_NONBLOCKING", &value)? {
                true => Blocking::No,
                false => Blocking::Yes,
            };
        }
        if let Some(value) = text("RCOMM_NCCL_BLOCKING") {
            options.comm.blocking = match is_on("RCOMM_NCCL_BLOCKING", &value)? {
                true => Blocking::Yes,
                false => Blocking::No,
            };
        }
        if let Some(value) = text("RCOMM_NCCL_LAZY")
            && is_on("RCOMM_NCCL_LAZY", &value)?
        {
            options.connecting = Connecting::Lazy;
        }
        options.error_handling = error_handling(&text)?;
        options.ras = ras(&text)?;
        if text("NCCL_MULTI_RANK_GPU_ENABLE").is_some_and(|value| value.trim() == "1") {
            options.device_sharing = DeviceSharing::Allowed;
        }
        if let Some(value) = text("RCOMM_NCCL_COMMS_PER_PAIR") {
            options.pairs = match value.trim() {
                "1" => PairComms::PerPair,
                "2" => PairComms::PerDirection,
                _ => return Err(refused("RCOMM_NCCL_COMMS_PER_PAIR", &value, "1 or 2")),
            };
        }
        if let Some(value) = text("RCOMM_NCCL_LAUNCH_ORDER") {
            options.launch_order = match value.trim() {
                "library" => LaunchOrder::Library,
                "implicit" => LaunchOrder::Implicit,
                _ => {
                    let expected = "implicit or library";
                    return Err(refused("RCOMM_NCCL_LAUNCH_ORDER", &value, expected));
                }
            };
        }
        options.tags = text("NCCL_PROFILER_PLUGIN").is_some();
        if let Some(value) = text("RCOMM_NCCL_ALGORITHMS") {
            let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"_,^".contains(&byte);
            if value.len() > 256 || !value.bytes().all(is_name) {
                let expected = "at most 256 bytes of names of NCCL's algorithms with commas between them, after ^ \
                                those that it may not use";
                return Err(refused("RCOMM_NCCL_ALGORITHMS", &value, expected));
            }
            options.algorithms = Some(value);
        }
        Ok(options)
    }

    /// Loads the CUDA driver and opens this process's device, on which the program makes its streams and buffers
    /// and the groups of its world work. A device may be opened more than once.
    ///
    /// # Errors
    /// `Backend`, with every path that was tried, if there is no driver; `InvalidArgument` if there is no such device.
    pub fn open_device(&self, local_rank: u32) -> Result<Arc<CudaDevice>> {
        let driver = Arc::new(CudaDriver::load(self.driver.as_deref())?);
        let ordinal = match self.device {
            Some(ordinal) => ordinal,
            None => {
                let count = driver.device_count()?.max(1);
                u16::try_from(local_rank % count).unwrap_or(u16::MAX)
            }
        };
        CudaDevice::open(&driver, ordinal)
    }

    pub(crate) fn search(&self) -> Search {
        Search {
            explicit: self.library.clone(),
            python_prefix: self.python_prefix.clone(),
        }
    }
}

fn error_handling(text: &impl Fn(&str) -> Option<String>) -> Result<ErrorHandling> {
    const RCOMM_NAME: &str = "RCOMM_NCCL_ERROR_HANDLING";
    const TORCH_NAME: &str = "TORCH_NCCL_ASYNC_ERROR_HANDLING";
    if let Some(value) = text(RCOMM_NAME) {
        let wanted = value.trim().to_ascii_lowercase();
        let mut names = ErrorHandling::NAMES.iter();
        let found = names.find(|(name, _)| *name == wanted);
        let expected = "none, tear_down, clean_up_only or skip_clean_up";
        return match found {
            Some((_, mode)) => Ok(*mode),
            None => Err(refused(RCOMM_NAME, &value, expected)),
        };
    }
    let Some(value) = text(TORCH_NAME) else {
        return Ok(ErrorHandling::default());
    };
    let mode = value.trim().parse().ok();
    let mode = mode.and_then(|number: usize| ErrorHandling::NAMES.get(number));
    match mode {
        Some((_, mode)) => Ok(*mode),
        None => Err(refused(TORCH_NAME, &value, "0, 1, 2 or 3")),
    }
}

/// Returns the address of NCCL's monitor; `None` if it is off or must not be queried.
fn ras(text: &impl Fn(&str) -> Option<String>) -> Result<Option<String>> {
    let address = text("NCCL_RAS_ADDR").unwrap_or_else(|| DEFAULT_RAS.to_owned());
    let is_wanted = match text("RCOMM_NCCL_RAS") {
        Some(value) => is_on("RCOMM_NCCL_RAS", &value)?,
        None => text("NCCL_RAS_ENABLE").is_none_or(|value| value.trim() != "0"),
    };
    Ok(is_wanted.then(|| address.trim().to_owned()))
}

/// Parses a switch.
fn is_on(name: &str, value: &str) -> Result<bool> {
    match value.trim().to_ascii_lowercase().as_str() {
        "1" | "y" | "yes" | "true" | "on" => Ok(true),
        "0" | "n" | "no" | "false" | "off" => Ok(false),
        _ => Err(refused(name, value, "0 or 1")),
    }
}

/// Parses a value of the unsigned integer type `T` that is at least `least`.
fn number<T: FromStr + PartialOrd + Display>(name: &str, value: &str, least: T) -> Result<T> {
    let parsed = value.trim().parse().ok();
    parsed.filter(|number| *number >= least).ok_or_else(|| {
        let largest = u64::MAX >> (64 - 8 * size_of::<T>());
        let expected = format!("a whole number from {least} to {largest}");
        refused(name, value, &expected)
    })
}

/// Returns the error for a value that is not allowed.
fn refused(name: &str, value: &str, expected: &str) -> Error {
    Error::new(
        ErrorKind::InvalidArgument,
        format!("{name} is {value:?}: it must be {expected}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::library::sys::tests::{documented, names};
    use std::cell::RefCell;
    use std::collections::BTreeSet;

    #[test]
    fn the_documentation_lists_the_variables_that_are_read() {
        let names_read = RefCell::new(BTreeSet::new());
        let lookup = |name: &str| {
            names_read.borrow_mut().insert(name.to_owned());
            None
        };
        Config::from_lookup(lookup).unwrap();
        NcclOptions::from_lookup(lookup).unwrap();
        let names_read = names_read.into_inner();
        let section = documented("## Variables");
        let rows = section.lines().filter(|line| line.starts_with("| `"));
        for row in rows {
            let cells: Vec<&str> = row.split('|').map(str::trim).collect();
            let [torch_names, counterpart] = cells[1..3] else {
                panic!("{row}");
            };
            let has_counterpart = counterpart.starts_with('`');
            let is_borrowed = has_counterpart && !counterpart.contains("not borrowed");
            for name in names(torch_names) {
                assert_eq!(names_read.contains(name), is_borrowed, "{name}");
            }
            if has_counterpart {
                assert!(names_read.contains(names(counterpart)[0]), "{counterpart}");
            }
        }
        let (_, rest) = section.split_once("Without a counterpart:").unwrap();
        for name in names(rest) {
            assert!(names_read.contains(name), "{name}");
        }
        // The documentation names no other variables.
        let page = [
            "## Libraries",
            "## Groups",
            "## After a failure",
            "## Variables",
        ];
        let page: String = page.into_iter().map(documented).collect();
        let prefixes = [
            "TORCH_NCCL_",
            "TORCH_FR_",
            "TORCHCOMM_",
            "RCOMM_NCCL_",
            "RCOMM_CUDA_",
            "NCCL_",
        ];
        for name in names_read
            .iter()
            .filter(|name| prefixes.iter().any(|prefix| name.starts_with(prefix)))
        {
            assert!(
                page.contains(name.as_str()),
                "{name} is not in docs/NCCL.md"
            );
        }
    }

    /// The variables that PyTorch's ProcessGroupNCCL and flight recorder read, in 2.15 or, for two of them, before:
    /// each prefix, and the rest of each name.
    const PYTORCH: [(&str, &[&str]); 3] = [
        (
            "TORCH_NCCL_",
            &[
                "ABORT_IN_DESTROY_PG",
                "ASYNC_ERROR_HANDLING",
                "AVOID_RECORD_STREAMS",
                "BCAST_UNIQUEID",
                "BLOCKING_WAIT",
                "COORD_CHECK_MILSEC",
                "CUDA_EVENT_CACHE",
                "DEBUG_INFO_PIPE_FILE",
                "DEBUG_INFO_TEMP_FILE",
                "DESYNC_DEBUG",
                "DUMP_ON_TIMEOUT",
                "ENABLE_MONITORING",
                "ENABLE_TIMING",
                "EXTRA_DUMP_ON_EXEC",
                "HEARTBEAT_TIMEOUT_SEC",
                "HIGH_PRIORITY",
                "LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN",
                "NAN_CHECK",
                "NONBLOCKING_TIMEOUT",
                "PROPAGATE_ERROR",
                "RANKS_PER_ROOT",
                "RETHROW_CUDA_ERRORS",
                "SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING",
                "TEARDOWN_ON_TIMEOUT",
                "TRACE_BUFFER_SIZE",
                "TRACE_CPP_STACK",
                "USE_COMM_NONBLOCKING",
                "USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
                "WAIT_TIMEOUT_DUMP_MILSEC",
            ],
        ),
        (
            "TORCH_FR_",
            &[
                "BUFFER_SIZE",
                "CPP_STACK",
                "DUMP_DYNAMIC_FILE_NAME",
                "DUMP_ON_TIMEOUT",
                "DUMP_TEMP_FILE",
                "WAIT_TIMEOUT_DUMP_MILSEC",
            ],
        ),
        // Older names, which ProcessGroupNCCL still reads.
        (
            "NCCL_",
            &[
                "ASYNC_ERROR_HANDLING",
                "BLOCKING_WAIT",
                "DESYNC_DEBUG",
                "ENABLE_TIMING",
                "USE_TENSOR_REGISTER_ALLOCATOR_HOOK",
            ],
        ),
    ];
    /// The variables that torchcomms or its scripts use, as of commit 59426ba, without those of its own tests.
    /// Torchcomms reads a variable for the library of each backend; those of backends on NVIDIA's devices are listed.
    const TORCHCOMMS: &[&str] = &[
        "TORCHCOMMS_BACKEND_LIB_PATH_NCCL",
        "TORCHCOMMS_BACKEND_LIB_PATH_NCCLX",
        "TORCHCOMMS_COMPILE_IGNORE_PYTORCH_VERSION_REQUIREMENT",
        "TORCHCOMMS_PATCH_FOR_COMPILE",
        "TORCHCOMMS_RDMA_ENABLE_REG_VERBOSE_LOG",
        "TORCHCOMMS_SERIALIZATION",
        "TORCHCOMM_ABORT_ON_ERROR",
        "TORCHCOMM_BOOTSTRAP_RANKSIZE_QUERY_METHOD",
        "TORCHCOMM_FR_BUFFER_SIZE",
        "TORCHCOMM_FR_CPP_STACK",
        "TORCHCOMM_FR_DUMP_DYNAMIC_FILE_NAME",
        "TORCHCOMM_FR_DUMP_TEMP_FILE",
        "TORCHCOMM_GLOO_HOSTNAME",
        "TORCHCOMM_GLOO_INTERFACE",
        "TORCHCOMM_HEALTH_CHECK_WAIT_MS",
        "TORCHCOMM_HEALTH_CHECK_WAIT_SECONDS",
        "TORCHCOMM_NCCLX_BOOTSTRAP_UNIQUEID_EXCHANGE_METHOD",
        "TORCHCOMM_NCCLX_GRAPH_TIMEOUT_MONITORING",
        "TORCHCOMM_NCCL_BOOTSTRAP_UNIQUEID_EXCHANGE_METHOD",
        "TORCHCOMM_RANK",
        "TORCHCOMM_RCCLX_BOOTSTRAP_UNIQUEID_EXCHANGE_METHOD",
        "TORCHCOMM_RCCL_BOOTSTRAP_UNIQUEID_EXCHANGE_METHOD",
        "TORCHCOMM_SIZE",
        "TORCHCOMM_TIMEOUT_SECONDS",
        "TORCHCOMM_XCCL_BOOTSTRAP_UNIQUEID_EXCHANGE_METHOD",
    ];

    #[test]
    fn every_variable_of_pytorch_and_torchcomms_is_read_or_explained() {
        let section = documented("## Variables");
        let rows = section.lines().filter(|line| line.starts_with("| `"));
        let first = rows.filter_map(|row| row.split('|').nth(1));
        let explained: Vec<&str> = first.flat_map(names).collect();
        let pytorch = PYTORCH
            .iter()
            .flat_map(|(prefix, rest)| rest.iter().map(move |rest| format!("{prefix}{rest}")));
        let torchcomms = TORCHCOMMS.iter().map(|&name| name.to_owned());
        let theirs: BTreeSet<String> = pytorch.chain(torchcomms).collect();
        for name in &theirs {
            assert!(explained.contains(&name.as_str()), "{name}");
        }
        for name in explained {
            assert!(theirs.contains(name), "{name} is in no list above");
        }
    }

    #[test]
    fn a_variable_of_rcomm_overrides_that_of_pytorch() {
        let lookup = |name: &str| match name {
            "RCOMM_NCCL_TIMING" => Some("0".to_owned()),
            "TORCH_NCCL_ENABLE_TIMING" => Some("1".to_owned()),
            "TORCH_NCCL_HIGH_PRIORITY" => Some("true".to_owned()),
            "RCOMM_NCCL_RANKS_PER_ID" => Some("2".to_owned()),
            "RCOMM_NCCL_COMMS_PER_PAIR" => Some("1".to_owned()),
            "RCOMM_NCCL_LAUNCH_ORDER" => Some("implicit".to_owned()),
            "TORCH_NCCL_RANKS_PER_ROOT" => Some("3".to_owned()),
            _ => None,
        };
        let options = NcclOptions::from_lookup(lookup).unwrap();
        assert_eq!(options.timing, Timing::Off);
        assert_eq!(options.priority, Priority::High);
        assert_eq!(options.ranks_per_id, 2);
        assert_eq!(options.pairs, PairComms::PerPair);
        assert_eq!(options.launch_order, LaunchOrder::Implicit);
        assert!(!options.tags);
    }

    #[test]
    fn an_invalid_value_is_refused_with_its_variable_and_what_is_allowed() {
        let refusal = |name: &'static str, value: &'static str| {
            let lookup = move |read: &str| (read == name).then(|| value.to_owned());
            NcclOptions::from_lookup(lookup).unwrap_err().to_string()
        };
        assert_eq!(
            refusal("TORCH_NCCL_ENABLE_TIMING", "perhaps"),
            "TORCH_NCCL_ENABLE_TIMING is \"perhaps\": it must be 0 or 1"
        );
        assert!(refusal("RCOMM_NCCL_RANKS_PER_ID", "0").contains("from 1 to"));
        assert!(refusal("RCOMM_NCCL_COMMS_PER_PAIR", "3").contains("must be 1 or 2"));
        assert!(refusal("RCOMM_NCCL_ALGORITHMS", "ring tree").contains("commas"));
        assert!(refusal("RCOMM_NCCL_LAUNCH_ORDER", "host").contains("implicit or library"));
    }
}
