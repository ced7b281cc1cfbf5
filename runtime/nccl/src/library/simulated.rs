//! The simulated end of a group of calls, which returns how long the library expects the calls to take.

use super::Group;
use super::sys::NcclResult;
use std::ffi::c_uint;

/// `ncclSimInfo_t`, whose layout has not changed since 2.22.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(crate) struct SimInfo {
    size: usize,
    magic: c_uint,
    version: c_uint,
    /// Microseconds; negative (`NCCL_UNDEF_FLOAT`) until the library writes it.
    estimated_time: f32,
}

impl SimInfo {
    const MAGIC: c_uint = 0x7468_5283;
    const VERSION: c_uint = 22_200;

    /// `NCCL_SIM_INFO_INITIALIZER`.
    const fn new() -> Self {
        Self {
            size: size_of::<Self>(),
            magic: Self::MAGIC,
            version: Self::VERSION,
            estimated_time: -1.0,
        }
    }
}

/// `ncclGroupSimulateEnd`.
pub(crate) type SimulateEnd = unsafe extern "C" fn(*mut SimInfo) -> NcclResult;

impl Group<'_> {
    /// Ends the group and launches none of its calls. Returns the library's status, and the library's estimate of the
    /// time of the group's last collective, in microseconds: negative if there is no estimate.
    pub(crate) fn simulate(mut self, end: SimulateEnd) -> (NcclResult, f32) {
        self.open = false;
        let mut info = SimInfo::new();
        // SAFETY: this thread opened the group (`Group` is not `Send`), which is ended once: `open` is false from here
        // on. The call reads and writes one structure, of the size that it contains, through a reference.
        let status = unsafe { end(&mut info) };
        (status, info.estimated_time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_structure_has_the_layout_of_the_header() {
        assert_eq!(size_of::<SimInfo>(), 24);
        assert_eq!(std::mem::offset_of!(SimInfo, magic), 8);
        assert_eq!(std::mem::offset_of!(SimInfo, estimated_time), 16);
    }

    #[test]
    fn the_real_library_takes_the_structure_and_has_no_estimate_of_an_empty_group() {
        let Some(library) = crate::library::tests::real_library() else {
            return;
        };
        // The library checks the structure's first fields, which needs no device.
        if let Some(end) = library.table().group_simulate_end {
            let group = library.group().unwrap();
            let (status, microseconds) = group.simulate(end);
            assert_eq!(status, crate::library::sys::result::SUCCESS);
            assert!(microseconds < 0.0, "{microseconds}");
        }
    }
}
