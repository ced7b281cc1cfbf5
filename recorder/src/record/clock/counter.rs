//! The processor's time-stamp counter, where the kernel itself uses it as its clock.

#![allow(unsafe_code)]

use crate::record::process::read_short;

/// Whether [`ticks`] may be used: the kernel has verified that the counter runs at one rate on all
/// cores through every power state, and uses it as its clock source.
pub(super) fn is_trusted() -> bool {
    const NAME: &str = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    cfg!(target_arch = "x86_64") && read_short(NAME).is_ok_and(|name| name.trim() == "tsc")
}

/// The counter's current value. Not ordered with neighboring instructions: it may be read a few ns early.
#[inline]
#[cfg(target_arch = "x86_64")]
pub(super) fn ticks() -> u64 {
    // SAFETY: `rdtsc` exists on every x86-64 processor and touches no memory. A process may be barred
    // from it (PR_SET_TSC): the instruction then faults, as the vDSO's clock does, which is not undefined behavior.
    unsafe { core::arch::x86_64::_rdtsc() }
}

/// Never used: [`is_trusted`] is false on other processors.
#[inline]
#[cfg(not(target_arch = "x86_64"))]
pub(super) fn ticks() -> u64 {
    0
}
