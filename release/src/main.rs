//! `rcomm-pages DIR`: manual pages (`man/man1`) and completion scripts (`completions`) of the programs,
//! made from the definitions that `--help` is made from.
//!
//! `rcomm-fr` is not among them: it makes its own (`rcomm-fr man`, `rcomm-fr completions`).

#![forbid(unsafe_code)]

use anyhow::Context;
use clap::{Command, CommandFactory, Parser};
use clap_complete::Shell;
use std::fs;
use std::path::{Path, PathBuf};

/// Writes the manual pages and completion scripts of rcomm-top, rcomm-web, rcomm-run and rcomm-bench.
#[derive(Debug, Parser)]
struct Cli {
    /// Folder for `man/man1` and `completions`.
    #[arg(value_name = "DIR")]
    out: PathBuf,
}

fn main() -> anyhow::Result<()> {
    let out = Cli::parse().out;
    for program in programs() {
        write(&program, &out).with_context(|| {
            format!(
                "cannot write the pages of {} to {}",
                program.get_name(),
                out.display()
            )
        })?;
    }
    Ok(())
}

fn programs() -> [Command; 4] {
    [
        rcomm_top::start::cli::Cli::command(),
        rcomm_web::cli::Cli::command(),
        rcomm_tools::launch::Options::command(),
        rcomm_tools::bench::Args::command(),
    ]
}

fn write(program: &Command, out: &Path) -> anyhow::Result<()> {
    let pages = out.join("man/man1");
    fs::create_dir_all(&pages)?;
    clap_mangen::generate_to(program.clone(), &pages)?;
    let scripts = out.join("completions");
    fs::create_dir_all(&scripts)?;
    let name = program.get_name();
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut program.clone(), name, &mut script);
        fs::write(scripts.join(format!("{name}.{shell}")), script)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_program_has_a_page_and_a_script_for_each_shell() {
        let out = tempfile::tempdir().expect("a folder");
        for program in programs() {
            write(&program, out.path()).expect("the folder is writable");
            let name = program.get_name();
            let page = out.path().join(format!("man/man1/{name}.1"));
            let page = fs::read_to_string(page).expect("a page");
            assert!(page.contains(&format!(".TH {name} 1")), "{page}");
            for shell in ["bash", "zsh", "fish"] {
                let script = out.path().join(format!("completions/{name}.{shell}"));
                let script = fs::read_to_string(script).expect("a script");
                // Every program's --help is completed in every shell.
                assert!(script.contains(name) && script.contains("help"), "{script}");
            }
        }
    }
}
