//! The C binding of the flight recorder, and [`ForkGuarded`], on which it is based.
//!
//! `include/rcomm_recorder.h` is generated from this crate and documents its use from C. Only the
//! recorder is linked: neither the runtime of rcomm nor an async runtime. Codes of operations, reductions
//! and element types are those of `rcomm_recorder::model`.
//!
//! ```c
//! rcomm_recorder_config config = {.directory = "/dev/shm", .job = "train", .rank = 1, .world_size = 4};
//! rcomm_recorder *ring = NULL;
//! if (rcomm_recorder_open(&config, &ring) != RCOMM_RECORDER_OK) {
//!     fprintf(stderr, "%s\n", rcomm_recorder_last_error());
//! }
//! rcomm_recorder_phase(ring, "load data");
//! rcomm_recorder_step(ring, 9);
//! rcomm_recorder_close(ring);
//! ```
//!
//! | file | holds |
//! |---|---|
//! | `guarded` | a recorder that does nothing in a forked child |
//! | `table` | opening and closing, the path of the ring, groups, call sites, signatures |
//! | `operation` | operations: begin to retired |
//! | `outcome` | results of calls: codes, texts, the last error |
//! | `status` | phase, step, heartbeat |
#![allow(unsafe_code)]

mod guarded;
pub mod operation;
pub mod outcome;
pub mod status;
pub mod table;

pub use guarded::ForkGuarded;
