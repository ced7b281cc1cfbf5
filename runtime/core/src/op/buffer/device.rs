//! [`Device`]: where a buffer's memory is.

use std::fmt;

/// The device on which memory is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Device {
    /// Ordinary memory, readable by this process.
    #[default]
    Cpu,
    /// The memory of the CUDA device with this number in the process.
    Cuda(u16),
}

impl Device {
    /// The kind of device, which chooses the backend.
    pub const fn kind(self) -> DeviceKind {
        match self {
            Self::Cpu => DeviceKind::Cpu,
            Self::Cuda(_) => DeviceKind::Cuda,
        }
    }
}

impl fmt::Display for Device {
    /// `cpu`, or `cuda:2` for the CUDA device 2.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(number) => write!(f, "cuda:{number}"),
        }
    }
}

/// A kind of device. A group holds one backend for each kind it serves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DeviceKind {
    /// Ordinary memory.
    #[default]
    Cpu,
    /// CUDA devices.
    Cuda,
}

impl DeviceKind {
    /// `cpu` or `cuda`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        }
    }
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
