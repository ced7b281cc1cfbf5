//! `rcomm-run demo KIND`: a job of real processes that does what its kind says until ctrl-c, to look at with
//! the other programs.

mod cli;
mod training;

pub use cli::Demo;

use crate::launch::{self, Options};
use crate::{run, same_program};
use anyhow::{Context, Result};
use cli::Kind;
use rcomm::Config;
use rcomm::config::RingDir;
use rcomm_recorder::publish::{LaunchRecord, remove_stale_rings};
use rcomm_recorder::record::default_directory;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// How long the ranks may take to end after ctrl-c, before they are killed. A stopped rank does not end by itself.
const GRACE: Duration = Duration::from_secs(2);
/// How long the records stay after the end, so that a live view of the job can read how it ended.
const LAST_LOOK: Duration = Duration::from_secs(2);
/// How long a demonstration continues after one of its ranks has died, unless ctrl-c ends it.
const LINGER: Duration = Duration::from_secs(24 * 60 * 60);

/// Runs the demonstration, or one of its ranks. Blocks until the job has ended.
///
/// # Errors
/// A sentence that names what failed.
pub fn run(demo: &Demo) -> Result<ExitCode> {
    if demo.rank {
        training::run(demo)?;
        return Ok(ExitCode::SUCCESS);
    }
    let job = format!("demo-{}-{}", demo.kind.name(), std::process::id());
    let program = same_program::file()?;
    let program_name = program
        .to_str()
        .with_context(|| format!("{} is not valid UTF-8", program.display()))?;
    let mut options = Options::new(demo.nproc, vec![program_name.to_owned()]);
    options.program.extend(demo.as_arguments());
    options.program_name = Some(run::NAME);
    options.job_id = Some(job.clone());
    options.grace = GRACE;
    options.linger = LINGER;
    // The job is started even if standard output is closed.
    let _ = std::io::Write::write_all(
        &mut std::io::stdout(),
        introduction(demo, &job, &program).as_bytes(),
    );
    let code = launch::run(&options);
    std::thread::sleep(LAST_LOOK);
    clean_up(&job);
    Ok(code)
}

/// The directory to which the ranks of this job write dumps, unless `RCOMM_DUMP_DIR` is set.
fn dump_directory(job: &str) -> PathBuf {
    std::env::temp_dir().join(format!("rcomm-{job}"))
}

/// A text that says which job is started, what will happen to it and when, and by which commands to look at it.
fn introduction(demo: &Demo, job: &str, program: &Path) -> String {
    let command = |name: &str| command_for(program, name);
    let (top, web) = (command("rcomm-top"), command("rcomm-web"));
    let mut text = format!(
        "== job {job}: {} ranks. {}\n",
        demo.nproc,
        demo.kind.describe(demo)
    );
    text.push_str("== in another terminal:\n");
    let _ = writeln!(text, "==   {top} --job {job}          the live view");
    let _ = writeln!(text, "==   {top} --once --job {job}   the verdict as text");
    let _ = writeln!(text, "==   {web} --job {job}          the page");
    if matches!(demo.kind, Kind::Kill | Kind::Mismatch) {
        let _ = writeln!(
            text,
            "==   {} analyze {}   the dumps that the ranks write when they fail",
            command("rcomm-fr"),
            dump_directory(job).display()
        );
    }
    text.push_str("== ctrl-c ends the job and removes its records\n");
    text
}

/// The command that starts the program `name`: the name alone if the program is in `PATH`; else its path if it lies in
/// the folder of this program, or this program's file with the name as an argument if that file holds several programs;
/// else the name.
fn command_for(program: &Path, name: &str) -> String {
    let folder = program.parent().unwrap_or(Path::new("."));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let is_on_path = std::env::split_paths(&path).any(|at| at.join(name).is_file());
    let next_to_it = folder.join(name);
    match is_on_path {
        false if next_to_it.is_file() => next_to_it.display().to_string(),
        false if program.ends_with(same_program::OF_SEVERAL) => {
            format!("{} {name}", program.display())
        }
        _ => name.to_owned(),
    }
}

/// Removes the job's rings, launch record and dumps. Errors are ignored: `rcomm-fr rings remove-stale` finds the rings
/// that stay.
fn clean_up(job: &str) {
    if std::env::var_os("RCOMM_DUMP_DIR").is_none() {
        let _ = std::fs::remove_dir_all(dump_directory(job));
    }
    let directory = match Config::from_environment().map(|config| config.ring_dir) {
        Ok(RingDir::Shared) => default_directory(),
        Ok(RingDir::Dir(directory)) => directory,
        // There is nothing on disk.
        Ok(RingDir::Memory) | Err(_) => return,
    };
    let _ = remove_stale_rings(&directory, Some(job));
    let launch_record = LaunchRecord::path(&directory, job, 0);
    let _ = std::fs::remove_file(&launch_record);
    if let Some(folder) = launch_record.parent() {
        // Only an empty folder is removed.
        let _ = std::fs::remove_dir(folder);
    }
}
