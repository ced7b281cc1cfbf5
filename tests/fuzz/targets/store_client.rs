//! Gives the store's client arbitrary bytes as answers. `readers` says what must hold.
#![no_main]

#[allow(dead_code, reason = "each target calls one of the readers")]
mod readers;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| readers::store_client(bytes));
