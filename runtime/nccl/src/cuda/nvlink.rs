//! [`DmaConnectivity`]: which devices of a host NVLink connects, as NVIDIA's management library (NVML) tells.
//!
//! Source: `nvml.h` of CUDA 13. All drivers since CUDA 11 have every function that is used.

use crate::library::sys::table;
use libloading::Library;
use rcomm_core::{Error, ErrorKind, Result};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};

const SONAME: &str = "libnvidia-ml.so.1";
/// `NVML_SUCCESS`.
const SUCCESS: c_int = 0;
/// `NVML_ERROR_INVALID_ARGUMENT`: a link of this number does not exist.
const INVALID_ARGUMENT: c_int = 2;
/// `NVML_ERROR_NOT_SUPPORTED`: the device has no NVLink.
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
        let bytes = self.bus_id.iter().take_while(|byte| **byte != 0);
        let text: String = bytes
            .map(|&byte| char::from(byte.cast_unsigned()))
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

/// How many direct links lead from each device of this host to each other one, as `_detect_dma_connectivity` of PyTorch.
///
/// The devices are all of the host's, in the order of NVML, whatever `CUDA_VISIBLE_DEVICES` says: a program finds its own
/// by their bus ids.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DmaConnectivity {
    /// The PCI bus id of each device, in lower case: `00000000:3b:00.0`.
    pub bus_ids: Vec<String>,
    /// `links[i][j]` is the number of links between devices `i` and `j`; 0 if there is none, and for a device itself.
    pub links: Vec<Vec<u32>>,
}

impl DmaConnectivity {
    /// The links of NVLink that are active: those that join two devices, and between two devices that are joined to
    /// switches as many as the one with fewer has. `library` names a file to load instead of `libnvidia-ml.so.1`.
    ///
    /// # Errors
    /// [`ErrorKind::Backend`] if NVML is not found, lacks a function, or refuses a call: the text has its reason.
    pub fn nvlink(library: Option<&Path>) -> Result<Self> {
        Nvml::load(library)?.connectivity()
    }
}

/// NVML, until it is dropped.
struct Nvml {
    table: NvmlTable,
    /// NVML is never unloaded: other parts of the program may use it.
    _library: ManuallyDrop<Library>,
}

impl Nvml {
    fn load(explicit: Option<&Path>) -> Result<Self> {
        let path = explicit.map_or_else(|| PathBuf::from(SONAME), Path::to_path_buf);
        let absent = |reason: String| {
            let path = path.display();
            let message = format!("NVML cannot be used; tried {path} ({reason})");
            Error::new(ErrorKind::Backend, message)
        };
        // SAFETY: loading runs the library's initializers. The file is NVML by its name, or the user named it as such.
        let library = unsafe { Library::new(&path) }.map_err(|error| absent(error.to_string()))?;
        let library = ManuallyDrop::new(library);
        // SAFETY: the names and signatures are those of nvml.h; the library is never unloaded.
        let table = unsafe { NvmlTable::find(&library) }
            .map_err(|name| absent(format!("no symbol {name}")))?;
        // SAFETY: `nvmlInit_v2` may be called first and more than once; it has no arguments.
        let status = unsafe { (table.init)() };
        if status != SUCCESS {
            let reason = text_of(&table, status);
            return Err(absent(format!("nvmlInit_v2 failed: {reason}")));
        }
        Ok(Self {
            table,
            _library: library,
        })
    }

    fn connectivity(&self) -> Result<DmaConnectivity> {
        let mut count = 0;
        // SAFETY: the call writes one number to a local that outlives it.
        let status = unsafe { (self.table.device_get_count)(&mut count) };
        self.check("nvmlDeviceGetCount_v2", status)?;
        let mut devices = Vec::new();
        let mut bus_ids = Vec::new();
        for index in 0..count {
            let mut device = std::ptr::null_mut();
            // SAFETY: the call writes one handle to a local that outlives it.
            let status = unsafe { (self.table.device_get_handle)(index, &mut device) };
            self.check("nvmlDeviceGetHandleByIndex_v2", status)?;
            let mut info = PciInfo::EMPTY;
            // SAFETY: NVML returned the handle, and the call writes one structure to a local that outlives it.
            let status = unsafe { (self.table.device_get_pci_info)(device, &mut info) };
            self.check("nvmlDeviceGetPciInfo_v3", status)?;
            devices.push(device);
            bus_ids.push(info.id());
        }
        let mut links = vec![vec![0; devices.len()]; devices.len()];
        let mut to_switches = vec![0; devices.len()];
        for (index, &device) in devices.iter().enumerate() {
            for remote in self.active_links(device)? {
                match remote {
                    Remote::Device(id) => {
                        // A device of another host, say, has no row.
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
            // SAFETY: NVML returned the handle, and the call writes one number to a local that outlives it.
            let status = unsafe { (self.table.link_state)(device, link, &mut state) };
            if matches!(status, NOT_SUPPORTED | INVALID_ARGUMENT) {
                break;
            }
            self.check("nvmlDeviceGetNvLinkState", status)?;
            if state != ENABLED {
                continue;
            }
            let mut kind = c_uint::MAX;
            // SAFETY: as above.
            let status = unsafe { (self.table.link_remote_type)(device, link, &mut kind) };
            self.check("nvmlDeviceGetNvLinkRemoteDeviceType", status)?;
            match kind {
                REMOTE_SWITCH => remotes.push(Remote::Switch),
                REMOTE_GPU => {
                    let mut info = PciInfo::EMPTY;
                    // SAFETY: NVML returned the handle, and the call writes one structure to a local that outlives it.
                    let status =
                        unsafe { (self.table.link_remote_pci_info)(device, link, &mut info) };
                    self.check("nvmlDeviceGetNvLinkRemotePciInfo_v2", status)?;
                    remotes.push(Remote::Device(info.id()));
                }
                _ => {}
            }
        }
        Ok(remotes)
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
