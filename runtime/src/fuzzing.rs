//! Functions for the fuzz targets: those of the CPU backend that read bytes which another rank has sent.

pub use rcomm_cpu::fuzzing::{read_fixed_messages, receive_any_bytes};
