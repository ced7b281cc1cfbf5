//! Options of the NCCL backend, and the environment variables that set them.

use super::comm::CommOptions;
use super::device::Priority;
use super::library::Search;
use crate::error::{Error, ErrorKind, Result};
use std::path::PathBuf;
use std::str::FromStr;

/// Options of the NCCL backend. Plain data: it can be filled in by hand.
///
/// | variable | option | default |
/// |---|---|---|
/// | `RCOMM_NCCL_LIB` | [`library`](Self::library) | `libnccl.so.2`, then that of the active Python environment |
/// | `RCOMM_CUDA_LIB` | [`driver`](Self::driver) | `libcuda.so.1` |
/// | `RCOMM_CUDA_DEVICE` | [`device`](Self::device) | the local rank |
/// | `RCOMM_NCCL_HIGH_PRIORITY`, `TORCH_NCCL_HIGH_PRIORITY` | [`priority`](Self::priority) | normal |
/// | `RCOMM_NCCL_TIMING`, `TORCH_NCCL_ENABLE_TIMING` | [`timing`](Self::timing) | off |
/// | `RCOMM_NCCL_RANKS_PER_ID`, `TORCH_NCCL_RANKS_PER_ROOT` | [`ranks_per_id`](Self::ranks_per_id) | 128 |
/// | `NCCL_MULTI_RANK_GPU_ENABLE` | [`device_sharing`](Self::device_sharing) | refused |
///
/// NCCL reads its own variables (`NCCL_*`) by itself.
#[derive(Clone, Debug)]
pub struct NcclOptions {
    /// Where the library is; `None` = searched for.
    pub library: Option<PathBuf>,
    /// Root of an active Python environment, whose `nvidia-nccl` package is tried last.
    pub python_prefix: Option<PathBuf>,
    /// Where the CUDA driver is; `None` = searched for.
    pub driver: Option<PathBuf>,
    /// The device of this rank; `None` = the local rank, counted round where there are fewer devices.
    pub device: Option<u16>,
    /// Of the streams that communicate.
    pub priority: Priority,
    /// Whether operations are timed by the device; [`Done::duration`](crate::backend::Done) then says
    /// how long they ran.
    pub timing: Timing,
    /// One unique id is made for so many ranks: large worlds start faster with several.
    pub ranks_per_id: u32,
    /// Whether two ranks may use one device.
    pub device_sharing: DeviceSharing,
    /// What NCCL is told of each communicator.
    pub comm: CommOptions,
}

/// Whether two ranks may use one device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceSharing {
    /// They may not: NCCL would refuse, or hang.
    #[default]
    Refused,
    /// They may, which is the library's affair from 2.30 on.
    Allowed,
}

/// Whether the device tells when operations start and end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Timing {
    /// It marks start and end, without times.
    #[default]
    Off,
    /// It marks start and end with the time.
    On,
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
            device_sharing: DeviceSharing::Refused,
            comm: CommOptions::default(),
        }
    }
}

impl NcclOptions {
    /// The defaults, and what `lookup` says of each variable.
    ///
    /// # Errors
    /// `InvalidArgument` names the variable, its value, and what it may be.
    pub fn from_lookup(lookup: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let text = |name: &str| lookup(name).filter(|value| !value.trim().is_empty());
        let mut options = Self::default();
        let path = |name: &str| text(name).map(PathBuf::from);
        options.library = path("RCOMM_NCCL_LIB");
        options.driver = path("RCOMM_CUDA_LIB");
        options.python_prefix = path("VIRTUAL_ENV").or_else(|| path("CONDA_PREFIX"));
        if let Some(value) = text("RCOMM_CUDA_DEVICE") {
            options.device = Some(number("RCOMM_CUDA_DEVICE", &value)?);
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
                options.ranks_per_id = number(name, &value)?;
                if options.ranks_per_id == 0 {
                    return Err(refused(name, &value, "at least 1"));
                }
            }
        }
        if text("NCCL_MULTI_RANK_GPU_ENABLE").is_some_and(|value| value.trim() == "1") {
            options.device_sharing = DeviceSharing::Allowed;
        }
        Ok(options)
    }

    pub(super) fn search(&self) -> Search {
        Search {
            explicit: self.library.clone(),
            python_prefix: self.python_prefix.clone(),
        }
    }
}

fn is_on(name: &str, value: &str) -> Result<bool> {
    match value.trim().to_ascii_lowercase().as_str() {
        "1" | "y" | "yes" | "true" | "on" => Ok(true),
        "0" | "n" | "no" | "false" | "off" => Ok(false),
        _ => Err(refused(name, value, "0 or 1")),
    }
}

fn number<T: FromStr>(name: &str, value: &str) -> Result<T> {
    let parsed = value.trim().parse();
    parsed.map_err(|_| refused(name, value, "a whole number that is not too large"))
}

fn refused(name: &str, value: &str, expected: &str) -> Error {
    Error::new(
        ErrorKind::InvalidArgument,
        format!("{name} is {value:?}: it must be {expected}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_variable_counts_before_the_borrowed_one() {
        let lookup = |name: &str| match name {
            "RCOMM_NCCL_TIMING" => Some("0".to_owned()),
            "TORCH_NCCL_ENABLE_TIMING" => Some("1".to_owned()),
            "TORCH_NCCL_HIGH_PRIORITY" => Some("true".to_owned()),
            "RCOMM_NCCL_RANKS_PER_ID" => Some("2".to_owned()),
            "TORCH_NCCL_RANKS_PER_ROOT" => Some("3".to_owned()),
            _ => None,
        };
        let options = NcclOptions::from_lookup(lookup).unwrap();
        assert_eq!(options.timing, Timing::Off);
        assert_eq!(options.priority, Priority::High);
        assert_eq!(options.ranks_per_id, 2);
    }

    #[test]
    fn what_makes_no_sense_is_refused_by_name() {
        let refusal = |name: &'static str, value: &'static str| {
            let lookup = move |asked: &str| (asked == name).then(|| value.to_owned());
            NcclOptions::from_lookup(lookup).unwrap_err().to_string()
        };
        assert_eq!(
            refusal("TORCH_NCCL_ENABLE_TIMING", "perhaps"),
            "TORCH_NCCL_ENABLE_TIMING is \"perhaps\": it must be 0 or 1"
        );
        assert!(refusal("RCOMM_NCCL_RANKS_PER_ID", "0").contains("at least 1"));
    }
}
