//! Starts this program again.

use anyhow::{Context, Result};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;

/// The name of the file that holds all programs, as releases and the Python package have it.
pub(crate) const COMBINED_NAME: &str = "rcomm";

/// The file of this process.
///
/// # Errors
/// If the system does not report the file, for example where `/proc` is not mounted.
pub(crate) fn file() -> Result<PathBuf> {
    std::env::current_exe().context("failed to find this program's own file")
}

/// Returns a command that starts this process's file as the program `name`, its zeroth argument: a file that holds
/// several programs runs the one of that name.
///
/// # Errors
/// Same as [`file()`].
pub(crate) fn command(name: &str) -> Result<Command> {
    let mut command = Command::new(file()?);
    command.arg0(name);
    Ok(command)
}
