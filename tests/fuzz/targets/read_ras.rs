//! Parses any bytes as a report of NCCL's RAS. It must not panic, and must bound its memory.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rcomm_analyzer::ras::RasReport;

fuzz_target!(|bytes: &[u8]| {
    let _ = RasReport::parse(bytes);
});
