//! What the fuzzer may reach: everything that reads what another rank has sent.

pub use rcomm_cpu::fuzzing::{read_handshakes, receive_any_bytes};
