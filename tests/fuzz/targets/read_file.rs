//! Reads any bytes as a file given by the user: archives, compressed files, and all that the other targets read,
//! distinguished by their content. It must not panic, and must read every file or report it as a problem.
#![no_main]

use libfuzzer_sys::fuzz_target;
use rcomm_analyzer::load::{LoadOptions, load};
use std::fs;
use std::num::NonZeroUsize;

fuzz_target!(|bytes: &[u8]| {
    let path = format!("/dev/shm/rcomm-fuzz-{}_rank_0", std::process::id());
    fs::write(&path, bytes).expect("memory is writable");
    let options = LoadOptions {
        jobs: NonZeroUsize::new(1),
        ..LoadOptions::default()
    };
    let mut dumps = 0;
    let loaded = load(&[path.clone().into()], &options, |_| dumps += 1).expect("the file exists");
    assert!(dumps + loaded.problems.len() + loaded.ras.len() + loaded.logs.len() > 0);
    fs::remove_file(&path).expect("the file is removed");
});
