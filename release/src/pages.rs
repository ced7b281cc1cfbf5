//! `rcomm pages DIR`: manual pages and completion scripts of the programs. They come from the same definitions of the
//! command line as `--help`.

use anyhow::Context;
use clap::{Command, CommandFactory};
use clap_complete::Shell;
use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;

/// Writes the pages to `man/man1` and the scripts to `completions` in this folder. Creates the folder if it is missing.
pub(crate) fn main(directory: &Path) -> ExitCode {
    let Err(error) = write_all(directory) else {
        return ExitCode::SUCCESS;
    };
    // If standard error is closed, the message is lost.
    let _ = writeln!(std::io::stderr(), "rcomm: {error:#}");
    ExitCode::from(2)
}

fn write_all(directory: &Path) -> anyhow::Result<()> {
    for program in programs() {
        write(&program, directory).with_context(|| {
            format!(
                "failed to write the pages of {} to {}",
                program.get_name(),
                directory.display()
            )
        })?;
    }
    Ok(())
}

fn programs() -> [Command; 5] {
    [
        rcomm_analyzer::cli::command(),
        rcomm_top::start::cli::Cli::command(),
        rcomm_web::cli::Cli::command(),
        rcomm_tools::launch::Options::command(),
        rcomm_tools::bench::Args::command(),
    ]
}

fn write(program: &Command, directory: &Path) -> anyhow::Result<()> {
    let pages = directory.join("man/man1");
    fs::create_dir_all(&pages)?;
    clap_mangen::generate_to(program.clone(), &pages)?;
    let scripts = directory.join("completions");
    fs::create_dir_all(&scripts)?;
    let name = program.get_name();
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut program.clone(), name, &mut script);
        fs::write(scripts.join(format!("{name}.{shell}")), script)?;
    }
    Ok(())
}
