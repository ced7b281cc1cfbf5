//! `rcomm-bench OPERATION…`: measures the latency and bandwidth of collectives. See `rcomm_tools::bench`.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    rcomm_tools::bench::main(std::env::args_os().collect())
}
