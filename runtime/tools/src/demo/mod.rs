//! `rcomm-run demo KIND`: starts a job of real processes that is healthy, slow or faulty, for a user to try the other
//! programs on. It runs until ctrl-c.

mod cli;
mod training;

pub use cli::Demo;

use crate::launch::{self, Options};
use crate::same_program;
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
/// How long a demonstration continues after one of its ranks has failed, unless ctrl-c ends it.
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
    options.program_name = Some(launch::PROGRAM);
    options.job_id = Some(job.clone());
    options.grace = GRACE;
    options.linger = LINGER;
    let dumps = std::env::var_os("RCOMM_DUMP_DIR");
    let dumps = dumps.map_or_else(|| dump_directory(&job), PathBuf::from);
    let text = introduction(demo, &job, &program, &ring_dir(), &dumps);
    // The job is started even if standard output is closed.
    let _ = std::io::Write::write_all(&mut std::io::stdout(), text.as_bytes());
    let code = launch::run(&options);
    std::thread::sleep(LAST_LOOK);
    clean_up(&job);
    Ok(code)
}

/// The directory to which the ranks of this job write dumps, unless `RCOMM_DUMP_DIR` is set.
fn dump_directory(job: &str) -> PathBuf {
    std::env::temp_dir().join(format!("rcomm-{job}"))
}

/// Returns the text that is printed before the job starts: the job's name, what will happen to the job and when, and
/// the commands that show it.
fn introduction(
    demo: &Demo,
    job: &str,
    program: &Path,
    ring_dir: &RingDir,
    dumps: &Path,
) -> String {
    let command = |name: &str| command_for(program, name);
    // The other terminal may lack this one's environment variables.
    let rings = match ring_dir {
        RingDir::Dir(directory) => format!(" --ring-dir {}", directory.display()),
        RingDir::Shared | RingDir::Memory => String::new(),
    };
    let (top, web) = (command("rcomm-top"), command("rcomm-web"));
    let mut text = format!(
        "== job {job}: {} ranks. {}\n",
        demo.nproc,
        demo.kind.describe(demo)
    );
    text.push_str("== in another terminal:\n");
    // A command can be wider than the terminal, so what it is for comes first.
    let _ = writeln!(text, "==   the live view    {top} --job {job}{rings}");
    let _ = writeln!(
        text,
        "==   the verdict      {top} --once --job {job}{rings}"
    );
    let _ = writeln!(text, "==   the page         {web} --job {job}{rings}");
    if matches!(demo.kind, Kind::Kill | Kind::Mismatch) {
        let _ = writeln!(
            text,
            "==   after a failure  {} analyze {}",
            command("rcomm-fr"),
            dumps.display()
        );
    }
    text.push_str("== ctrl-c ends the job and removes its records\n");
    text
}

/// Returns the command that starts the program `name`. If the program is in `PATH`, that is the name alone. Otherwise
/// it is the program's path if the program lies in the folder of this one, or this program's file with the name as an
/// argument if the file holds several programs. In all other cases it is the name.
fn command_for(program: &Path, name: &str) -> String {
    let folder = program.parent().unwrap_or(Path::new("."));
    let path = std::env::var_os("PATH").unwrap_or_default();
    let is_on_path = std::env::split_paths(&path).any(|directory| directory.join(name).is_file());
    let beside_program = folder.join(name);
    match is_on_path {
        false if beside_program.is_file() => beside_program.display().to_string(),
        false if program.ends_with(same_program::COMBINED_NAME) => {
            format!("{} {name}", program.display())
        }
        _ => name.to_owned(),
    }
}

/// Where the ranks keep their rings; in memory if the configuration cannot be read, since no rank starts then.
fn ring_dir() -> RingDir {
    Config::from_environment().map_or(RingDir::Memory, |config| config.ring_dir)
}

/// Removes the job's rings and launch record, and its dumps unless `RCOMM_DUMP_DIR` names their directory. Errors are
/// ignored: `rcomm-fr rings remove-stale` finds the rings that stay.
fn clean_up(job: &str) {
    if std::env::var_os("RCOMM_DUMP_DIR").is_none() {
        let _ = std::fs::remove_dir_all(dump_directory(job));
    }
    let directory = match ring_dir() {
        RingDir::Shared => default_directory(),
        RingDir::Dir(directory) => directory,
        // There is nothing on disk.
        RingDir::Memory => return,
    };
    let _ = remove_stale_rings(&directory, Some(job));
    let launch_record = LaunchRecord::path(&directory, job, 0);
    let _ = std::fs::remove_file(&launch_record);
    if let Some(folder) = launch_record.parent() {
        // Only an empty folder is removed.
        let _ = std::fs::remove_dir(folder);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commands_to_copy_name_the_folders_of_this_job() {
        let demo = Demo::parse_after(["kill".into()].into_iter());
        let text = |ring_dir| {
            let program = Path::new("/nowhere/rcomm-run");
            introduction(
                &demo,
                "demo-kill-7",
                program,
                &ring_dir,
                Path::new("/var/dumps"),
            )
        };
        let here = text(RingDir::Dir("/var/rings".into()));
        let rings_option = " --job demo-kill-7 --ring-dir /var/rings\n";
        assert_eq!(here.matches(rings_option).count(), 3, "{here}");
        assert!(here.contains("rcomm-fr analyze /var/dumps\n"), "{here}");
        let usual = text(RingDir::Shared);
        assert!(!usual.contains("--ring-dir"), "{usual}");
    }
}
