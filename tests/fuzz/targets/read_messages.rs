//! Reads arbitrary bytes as messages of another rank. The reader must not panic, must use no index out of range, and
//! must bound its memory.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rcomm::fuzzing::{read_fixed_messages, receive_any_bytes};

fuzz_target!(|bytes: &[u8]| {
    read_fixed_messages(bytes);
    receive_any_bytes(bytes).expect("a connection over the loopback interface");
});
