//! Any bytes from another rank: no panic, no index astray, memory bounded.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rcomm::fuzzing::{read_first_words, receive_any_bytes};

fuzz_target!(|bytes: &[u8]| {
    read_first_words(bytes);
    receive_any_bytes(bytes).expect("a connection over the loopback interface");
});
