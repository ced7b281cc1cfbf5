//! What the fuzzer may reach: everything that reads what another rank has sent.

pub use rcomm_cpu::fuzzing::{read_first_words, receive_any_bytes};
