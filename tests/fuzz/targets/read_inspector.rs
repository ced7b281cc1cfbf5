//! Any bytes as a log of NCCL's Inspector. `doors` says what must hold.
#![no_main]

#[allow(dead_code, reason = "each target is one of the doors")]
mod doors;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| doors::read_inspector(bytes));
