//! The functions for the fuzz targets: all that read bytes which another rank has sent.

pub use rcomm_cpu::fuzzing::{read_handshakes, receive_any_bytes};
