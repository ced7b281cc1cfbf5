//! A profiler plug-in for NCCL, for versions 3 to 6 of the interface. It records the operations of any NCCL program,
//! without a change to the program, in the ring of rcomm's flight recorder.
//!
//! `NCCL_PROFILER_PLUGIN` names the library. NCCL loads it with the first communicator and reports each communicator
//! and operation to it. The plug-in keeps one ring for the process, `<rank>.<attempt>.nccl.ring`, which `rcomm-fr`,
//! `rcomm-top` and `rcomm-web` read. See `docs/NCCL-ANY.md`.
//!
//! ```sh
//! export NCCL_PROFILER_PLUGIN=$(rcomm-fr nccl-plugin)
//! torchrun train.py
//! ```
//!
//! The plug-in never makes NCCL fail, since it answers every event with success. It starts one thread, which removes
//! the rings of dead jobs and ends within seconds. If no ring can be created, it prints one line to standard error,
//! requests no events, and prints nothing more. A child that `fork` makes records nothing, since the ring belongs to
//! its parent.

#![warn(missing_docs)]

pub mod abi;
mod deepening;
mod entry;
mod events;
mod group_call;
mod handle;
mod links;
mod names;
mod opening;
mod operation;
mod order;
mod process;
mod settings;
mod shapes;
mod steps;

use abi::{DescriptorV3, DescriptorV4, DescriptorV5, InitV3, InitV4, InitV5, Profiler};
use entry::{
    finalize, init_old, init_v3, init_v4, init_v5, record_v3, record_v4, start_v3, start_v4,
    start_v5, stop,
};
use std::ffi::c_char;

const NAME: *const c_char = c"rcomm".as_ptr();

macro_rules! profiler {
    ($($(#[$about:meta])* $name:ident: $Init:ty, $Descriptor:ty = $init:ident, $start:ident, $record:ident;)*) => {$(
        $(#[$about])*
        #[unsafe(no_mangle)]
        #[allow(non_upper_case_globals)]
        pub static $name: Profiler<$Init, $Descriptor> = Profiler {
            name: NAME,
            init: $init,
            start_event: $start,
            stop_event: stop,
            record_event_state: $record,
            finalize,
        };
    )*};
}

profiler! {
    /// NCCL 2.23: refused with one line.
    ncclProfiler_v1: InitV3, DescriptorV3 = init_old, start_v3, record_v3;
    /// NCCL 2.24 and 2.25: refused with one line.
    ncclProfiler_v2: InitV3, DescriptorV3 = init_old, start_v3, record_v3;
    /// NCCL 2.26.
    ncclProfiler_v3: InitV3, DescriptorV3 = init_v3, start_v3, record_v3;
    /// NCCL 2.27.
    ncclProfiler_v4: InitV4, DescriptorV4 = init_v4, start_v4, record_v4;
    /// NCCL 2.28.
    ncclProfiler_v5: InitV5, DescriptorV5 = init_v5, start_v5, record_v4;
    /// NCCL 2.29 and later.
    ncclProfiler_v6: InitV5, DescriptorV5 = init_v5, start_v5, record_v4;
}
