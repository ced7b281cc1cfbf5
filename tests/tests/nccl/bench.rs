//! Runs the program that measures real devices on the simulator, where its numbers mean nothing and are not printed.

use super::{RANKS, over};
use rcomm_tests::process::Job;
use rcomm_tests::simulator;

#[test]
fn the_device_bench_succeeds_on_the_simulator() {
    let simulator = simulator::path();
    let program = env!("CARGO_BIN_EXE_device_bench");
    for timing in ["0", "1"] {
        let mut job = Job::start_as(program, RANKS, "--quiet", |_, command| {
            over(&simulator, command);
            command
                .env("RCOMM_NCCL_TIMING", timing)
                .env("RCOMM_TIMEOUT_MS", "60000")
                .env("RCOMM_NCCL_RAS", "0");
        });
        for rank in 0..RANKS {
            let ended = job.wait(rank);
            assert!(ended.status.success(), "rank {rank}: {ended:?}");
        }
    }
}
