//! `rcomm-fr man`: prints the manual page of `rcomm-fr`, or writes one page for each command to a folder. The pages
//! come from the same definitions as `--help`.

use crate::cli::args::{Cli, ManArgs};
use crate::cli::failure::Failure;
use crate::cli::output;
use clap::CommandFactory;
use clap_mangen::Man;
use std::process::ExitCode;

pub(super) fn run(args: &ManArgs, color: anstream::ColorChoice) -> Result<ExitCode, Failure> {
    let command = Cli::command();
    match &args.out_dir {
        None => output::write_to(None, color, |out| Man::new(command).render(out))?,
        Some(dir) => std::fs::create_dir_all(dir)
            .and_then(|()| clap_mangen::generate_to(command, dir))
            .map_err(|source| Failure::Write {
                target: dir.clone(),
                source,
            })?,
    }
    Ok(ExitCode::SUCCESS)
}
