//! `rcomm-top`: see the library of the same name.
#![forbid(unsafe_code)]

use clap::Parser as _;
use rcomm_top::start::cli::Cli;
use std::process::ExitCode;

fn main() -> ExitCode {
    let cli = Cli::parse();
    match rcomm_top::start::start(cli, |name| std::env::var(name).ok()) {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            // The terminal is restored by now; standard error is the only output left.
            let _ = print_error(&error);
            ExitCode::from(2)
        }
    }
}

fn print_error(error: &anyhow::Error) -> std::io::Result<()> {
    use std::io::Write as _;
    writeln!(std::io::stderr(), "rcomm-top: {error:#}")
}
