//! [`DmaConnectivity`]: which devices of a host NVLink connects, as NVIDIA's management library (NVML) reports.
//!
//! Source: `nvml.h` of CUDA 13. All drivers since CUDA 11 have every function that is used.

use crate::library::foreign_call::ForeignCall;
use crate::library::sys::table;
use libloading::Library;
use rcomm_core::{Error, ErrorKind, Result};
use rcomm_recorder::model::text;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

const SONAME: &str = "libnvidia-ml.so.1";
/// `NVML_SUCCESS`.
const SUCCESS: c_int = 0;
/// `NVML_ERROR_INVALID_ARGUMENT`: a link of this number does not exist.
const INVALID_ARGUMENT: c_int = 2;
/// `NVML_ERROR_NOT_SUPPORTED`: the device has no NVLink, or does not have this link, or cannot tell where the link
/// leads.
const NOT_SUPPORTED: c_int = 3;
/// `NVML_NVLINK_MAX_LINKS`.
const MAX_LINKS: c_uint = 18;
/// `NVML_FEATURE_ENABLED`.
const ENABLED: c_uint = 1;
/// `NVML_NVLINK_DEVICE_TYPE_GPU`.
const REMOTE_GPU: c_uint = 0;
/// `NVML_NVLINK_DEVICE_TYPE_SWITCH`.
const REMOTE_SWITCH: c_uint = 2;

/// `nvmlDevice_t`.
type Device = *mut c_void;

/// `nvmlPciInfo_t`.
#[repr(C)]
pub(crate) struct PciInfo {
    bus_id_legacy: [c_char; 16],
    domain: c_uint,
    bus: c_uint,
    device: c_uint,
    device_id: c_uint,
    subsystem_id: c_uint,
    bus_id: [c_char; 32],
}

impl PciInfo {
    const EMPTY: Self = Self {
        bus_id_legacy: [0; 16],
        domain: 0,
        bus: 0,
        device: 0,
        device_id: 0,
        subsystem_id: 0,
        bus_id: [0; 32],
    };

    /// The bus id in lower case, such as `00000000:3b:00.0`.
    fn id(&self) -> String {
        let bytes = self.bus_id.iter().flat_map(|byte| byte.to_ne_bytes());
        let text: String = bytes
            .take_while(|byte| *byte != 0)
            .map(char::from)
            .collect();
        text.to_ascii_lowercase()
    }
}

table! {
    /// The functions of NVML that rcomm calls.
    pub(crate) struct NvmlTable;
    required {
        /// `nvmlInit_v2`
        init = "nvmlInit_v2": fn() -> c_int;
        /// `nvmlShutdown`
        shutdown = "nvmlShutdown": fn() -> c_int;
        /// `nvmlErrorString`
        error_string = "nvmlErrorString": fn(c_int) -> *const c_char;
        /// `nvmlDeviceGetCount_v2`
        device_get_count = "nvmlDeviceGetCount_v2": fn(*mut c_uint) -> c_int;
        /// `nvmlDeviceGetHandleByIndex_v2`
        device_get_handle = "nvmlDeviceGetHandleByIndex_v2": fn(c_uint, *mut Device) -> c_int;
        /// `nvmlDeviceGetPciInfo_v3`
        device_get_pci_info = "nvmlDeviceGetPciInfo_v3": fn(Device, *mut PciInfo) -> c_int;
        /// `nvmlDeviceGetNvLinkState`
        link_state = "nvmlDeviceGetNvLinkState": fn(Device, c_uint, *mut c_uint) -> c_int;
        /// `nvmlDeviceGetNvLinkRemoteDeviceType`
        link_remote_type = "nvmlDeviceGetNvLinkRemoteDeviceType": fn(Device, c_uint, *mut c_uint) -> c_int;
        /// `nvmlDeviceGetNvLinkRemotePciInfo_v2`
        link_remote_pci_info = "nvmlDeviceGetNvLinkRemotePciInfo_v2": fn(Device, c_uint, *mut PciInfo) -> c_int;
    }
    optional {}
}

/// How many links of NVLink join each two devices of this host. It replaces PyTorch's `_detect_dma_connectivity`.
///
/// All devices of the host are there, in NVML's order, whatever `CUDA_VISIBLE_DEVICES` says: a program finds its own by
/// their bus ids.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DmaConnectivity {
    /// The PCI bus id of each device, in lower case: `00000000:3b:00.0`.
    pub bus_ids: Vec<String>,
    /// `links[i][j]` is the number of links between devices `i` and `j`; 0 if there is none, and for a device itself.
    pub links: Vec<Vec<u32>>,
}

impl DmaConnectivity {
    /// Counts the active links of NVLink. For two devices, these are the links that join them, and as many links over
    /// switches as the device with fewer links to switches has. A link is left out if NVML cannot tell where it leads.
    /// `library` names a file to load instead of `libnvidia-ml.so.1`.
    ///
    /// # Blocking
    /// Until NVML has answered, for at most `timeout`: NVML has no deadlines, and if it has to start the driver, it
    /// takes seconds for each device. It is called on a thread of its own, which stays in the call if NVML does not
    /// return. While there is such a thread for a library, further calls for the library wait for its answer and start
    /// none.
    ///
    /// # Errors
    /// [`ErrorKind::Backend`] if NVML is not found, lacks a function, or refuses a call: the text has its reason.
    /// [`ErrorKind::Timeout`] names the call that has not returned in time. [`ErrorKind::Io`] if no thread can be
    /// started.
    pub fn nvlink(library: Option<&Path>, timeout: Duration) -> Result<Self> {
        let path = library.map_or_else(|| PathBuf::from(SONAME), Path::to_path_buf);
        let (query, is_own) = Query::find_or_begin(&path);
        let found = if is_own {
            let ending = Ending {
                query: query.clone(),
                path,
                found: None,
            };
            ForeignCall::begin("rcomm/nvml", move || ending.run())?.wait(timeout)?
        } else {
            query.wait(timeout)
        };
        found.unwrap_or_else(|| {
            let call = *lock(&query.current);
            let timeout = text::duration(timeout);
            let message =
                format!("NVML has not answered within {timeout}: {call} has not returned");
            Err(Error::new(ErrorKind::Timeout, message))
        })
    }
}

/// The queries that have not ended, by the file of the library.
static QUERIES: Mutex<BTreeMap<PathBuf, Arc<Query>>> = Mutex::new(BTreeMap::new());

/// One query of the links, for which several callers may wait: a caller that retries while NVML does not return must
/// not leave behind a thread each time.
struct Query {
    /// The call that was made last, for the error of a caller that has given up.
    current: Mutex<&'static str>,
    found: Mutex<Option<Result<DmaConnectivity>>>,
    ended: Condvar,
}

impl Query {
    /// The query of this library that has not ended; or a new one, and `true`: the caller then runs it.
    fn find_or_begin(path: &Path) -> (Arc<Self>, bool) {
        let mut queries = lock(&QUERIES);
        if let Some(query) = queries.get(path) {
            return (query.clone(), false);
        }
        let query = Arc::new(Self {
            current: Mutex::new("dlopen"),
            found: Mutex::new(None),
            ended: Condvar::new(),
        });
        queries.insert(path.to_path_buf(), query.clone());
        (query, true)
    }

    /// What a query that another caller runs has found; `None` if it does not end within `time`.
    fn wait(&self, time: Duration) -> Option<Result<DmaConnectivity>> {
        let found = lock(&self.found);
        let waited = self
            .ended
            .wait_timeout_while(found, time, |found| found.is_none());
        let (found, _) = waited.unwrap_or_else(PoisonError::into_inner);
        found.clone()
    }
}

/// Ends a query for those that wait for it, also if it panics or its thread cannot be started.
struct Ending {
    query: Arc<Query>,
    path: PathBuf,
    found: Option<Result<DmaConnectivity>>,
}

impl Ending {
    fn run(mut self) -> Result<DmaConnectivity> {
        let found = Nvml::load(&self.path, self.query.clone()).and_then(|nvml| nvml.connectivity());
        self.found = Some(found.clone());
        found
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        lock(&QUERIES).remove(&self.path);
        let found = self.found.take().unwrap_or_else(|| {
            let message = "the query of NVML has ended without an answer";
            Err(Error::new(ErrorKind::Backend, message))
        });
        *lock(&self.query.found) = Some(found);
        self.query.ended.notify_all();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// NVML, which is loaded and initialized. On drop it is shut down.
struct Nvml {
    table: NvmlTable,
    query: Arc<Query>,
    /// NVML is never unloaded: other parts of the program may use it.
    _library: ManuallyDrop<Library>,
}

impl Nvml {
    fn load(path: &Path, query: Arc<Query>) -> Result<Self> {
        let absent = |reason: String| {
            let path = path.display();
            let message = format!("NVML cannot be used; tried {path} ({reason})");
            Error::new(ErrorKind::Backend, message)
        };
        // SAFETY: loading runs the library's initializers. The file is NVML by its name, or the user named it as such.
        let library = unsafe { Library::new(path) }.map_err(|error| absent(error.to_string()))?;
        let library = ManuallyDrop::new(library);
        // SAFETY: the names and signatures are those of nvml.h; the library is never unloaded.
        let table = unsafe { NvmlTable::find(&library) }
            .map_err(|name| absent(format!("no symbol {name}")))?;
        *lock(&query.current) = "nvmlInit_v2";
        // SAFETY: `nvmlInit_v2` may be called first and more than once; it has no arguments.
        let status = unsafe { (table.init)() };
        if status != SUCCESS {
            let reason = text_of(&table, status);
            return Err(absent(format!("nvmlInit_v2 failed: {reason}")));
        }
        Ok(Self {
            table,
            query,
            _library: library,
        })
    }

    fn connectivity(&self) -> Result<DmaConnectivity> {
        let mut count = 0;
        let call = self.begin("nvmlDeviceGetCount_v2");
        // SAFETY: the call writes one number to a local that outlives it.
        let status = unsafe { (self.table.device_get_count)(&mut count) };
        self.check(call, status)?;
        let mut devices = Vec::new();
        let mut bus_ids = Vec::new();
        for index in 0..count {
            let mut device = std::ptr::null_mut();
            let call = self.begin("nvmlDeviceGetHandleByIndex_v2");
            // SAFETY: the call writes one handle to a local that outlives it.
            let status = unsafe { (self.table.device_get_handle)(index, &mut device) };
            self.check(call, status)?;
            let mut info = PciInfo::EMPTY;
            let call = self.begin("nvmlDeviceGetPciInfo_v3");
            // SAFETY: NVML returned the handle, and the call writes one structure to a local that outlives it.
            let status = unsafe { (self.table.device_get_pci_info)(device, &mut info) };
            self.check(call, status)?;
            devices.push(device);
            bus_ids.push(info.id());
        }
        let mut links = vec![vec![0; devices.len()]; devices.len()];
        let mut to_switches = vec![0; devices.len()];
        for (index, &device) in devices.iter().enumerate() {
            for remote in self.active_links(device)? {
                match remote {
                    Remote::Device(id) => {
                        // A device that this process does not see, such as one of another host, has no row.
                        let peer = bus_ids.iter().position(|known| *known == id);
                        if let Some(peer) = peer.filter(|&peer| peer != index) {
                            links[index][peer] += 1;
                        }
                    }
                    Remote::Switch => to_switches[index] += 1,
                }
            }
        }
        for (index, row) in links.iter_mut().enumerate() {
            for (peer, count) in row.iter_mut().enumerate() {
                if peer != index {
                    *count += u32::min(to_switches[index], to_switches[peer]);
                }
            }
        }
        Ok(DmaConnectivity { bus_ids, links })
    }

    /// The other end of each active link of a device.
    fn active_links(&self, device: Device) -> Result<Vec<Remote>> {
        let mut remotes = Vec::new();
        for link in 0..MAX_LINKS {
            let mut state = 0;
            let call = self.begin("nvmlDeviceGetNvLinkState");
            // SAFETY: NVML returned the handle, and the call writes one number to a local that outlives it.
            let status = unsafe { (self.table.link_state)(device, link, &mut state) };
            match status {
                INVALID_ARGUMENT => break,
                NOT_SUPPORTED => continue,
                status => self.check(call, status)?,
            }
            if state != ENABLED {
                continue;
            }
            let mut kind = c_uint::MAX;
            let call = self.begin("nvmlDeviceGetNvLinkRemoteDeviceType");
            // SAFETY: as above.
            let status = unsafe { (self.table.link_remote_type)(device, link, &mut kind) };
            if status == NOT_SUPPORTED {
                continue;
            }
            self.check(call, status)?;
            match kind {
                REMOTE_SWITCH => remotes.push(Remote::Switch),
                REMOTE_GPU => {
                    let mut info = PciInfo::EMPTY;
                    let call = self.begin("nvmlDeviceGetNvLinkRemotePciInfo_v2");
                    // SAFETY: NVML returned the handle, and the call writes one structure to a local that outlives it.
                    let status =
                        unsafe { (self.table.link_remote_pci_info)(device, link, &mut info) };
                    if status == NOT_SUPPORTED {
                        continue;
                    }
                    self.check(call, status)?;
                    remotes.push(Remote::Device(info.id()));
                }
                _ => {}
            }
        }
        Ok(remotes)
    }

    /// Notes the call that is made next, and returns its name.
    fn begin(&self, call: &'static str) -> &'static str {
        *lock(&self.query.current) = call;
        call
    }

    fn check(&self, call: &str, status: c_int) -> Result<()> {
        if status == SUCCESS {
            return Ok(());
        }
        let reason = text_of(&self.table, status);
        let message = format!("{call} failed: {reason} (code {status})");
        Err(Error::new(ErrorKind::Backend, message))
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        *lock(&self.query.current) = "nvmlShutdown";
        // SAFETY: `load` has initialized NVML once, and NVML counts that.
        let _ = unsafe { (self.table.shutdown)() };
    }
}

/// The other end of a link.
enum Remote {
    /// A device, by its bus id.
    Device(String),
    Switch,
}

/// NVML's own text for a code.
fn text_of(table: &NvmlTable, status: c_int) -> String {
    // SAFETY: the call takes any code, and returns a static text or null.
    let text = unsafe { (table.error_string)(status) };
    if text.is_null() {
        return "NVML has no text for it".to_owned();
    }
    // SAFETY: the pointer is not null, and NVML's texts are static.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}

#[cfg(test)]
#[path = "nvlink_tests.rs"]
mod tests;
