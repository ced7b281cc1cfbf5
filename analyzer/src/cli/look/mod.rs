//! `rcomm-fr` without arguments: looks for records in the usual paths of this node, and shows the report on the newest
//! that can be judged. If several jobs live, it prefers those whose report has an error. Prints how to get records of
//! jobs of which these paths hold none.

mod advice;

pub(super) use advice::advice_for_paths;

use super::args::JudgeArgs;
use super::judge::{Judged, Keep, judge};
use super::{analyze, output};
use crate::cli::failure::Failure;
use anstream::ColorChoice;
use rcomm_analyzer::Severity;
use rcomm_analyzer::format::{count, duration_ms, printable};
use rcomm_analyzer::print::human;
use rcomm_analyzer::source::{RankJob, dump_beginnings};
use rcomm_recorder::publish::list_rings;
use rcomm_recorder::record::default_directory;
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::DirEntry;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

/// At most this many other items are listed below the report.
const MOST_LISTED: usize = 9;
/// At most this many living jobs are judged, the newest.
const MOST_JUDGED: usize = 16;

/// A path that was searched for records, and what was found there.
struct SearchedPath {
    path: PathBuf,
    found: String,
}

/// The rings of one job, or the dumps below one path.
struct Records {
    /// What the records are, for a line of the list.
    description: String,
    /// What is judged: the folder of the rings, or the files.
    paths: Vec<PathBuf>,
    /// The command that repeats the analysis.
    command: String,
    /// When the newest of the records was written.
    written: SystemTime,
    /// When the newest ring was created; for dumps, the same as `written`.
    created: SystemTime,
    /// Whether a process of the job is alive: then a pending operation alone is not a finding.
    alive: bool,
}

/// The end of a shell pattern for names that go on with a digit.
const A_DIGIT_FIRST: &str = "[0-9]*";

/// What the rings of one job state together.
struct JobRings {
    /// The folder of the rings.
    folder: PathBuf,
    /// The number of rings.
    count: usize,
    /// The number of rings whose process is alive.
    alive: usize,
    /// The newest heartbeat or creation of a ring, ns since the epoch.
    written_ns: i64,
    /// When the newest ring was created, ns since the epoch.
    created_ns: i64,
}

/// The paths that were searched, and the records that were found.
#[derive(Default)]
struct Search {
    searched: Vec<SearchedPath>,
    records: Vec<Records>,
}

pub(super) fn run(verbose: bool, color: ColorChoice) -> Result<ExitCode, Failure> {
    let environment = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let mut search = Search::default();
    search.add_rings(&match environment("RCOMM_RING_DIR") {
        Some(folder) if folder != "memory" => PathBuf::from(folder),
        _ => default_directory(),
    });
    for beginning in dump_beginnings(|name| environment(name).map(PathBuf::from)) {
        search.add_files("PyTorch's dumps", &beginning);
    }
    let dumps = environment("RCOMM_DUMP_DIR").map_or_else(|| "rcomm-dumps".into(), PathBuf::from);
    search.add_folder("dumps of rcomm", &dumps);
    // The rings of all living jobs were written just now, so the newest of these jobs is the one created last.
    search.records.sort_by_key(|records| {
        let time = match records.alive {
            true => records.created,
            false => records.written,
        };
        std::cmp::Reverse((records.alive, time))
    });
    match search.records.len() {
        1.. => show_first(&search, verbose, color),
        0 => {
            let text = advice::advice(&search.searched, &RankJob::of_node(), &environment);
            output::write_to(None, color, |out| out.write_all(text.as_bytes()))?;
            Ok(ExitCode::from(2))
        }
    }
}

/// Judges the records of one job or path.
fn judge_records(records: &Records) -> Result<Judged, Failure> {
    let args = JudgeArgs {
        snapshot: records.alive,
        ..JudgeArgs::default()
    };
    judge(&records.paths, &args, Keep::Report)
}

/// Records older than this may belong to another job than the one the user means.
const OLD: Duration = Duration::from_secs(600);

/// Shows the report on the newest records that can be judged or, if several jobs live and some reports have findings of
/// severity error, the newest of these reports. The list of the other records has the verdicts of those that were
/// judged, and why others could not be.
fn show_first(search: &Search, verbose: bool, color: ColorChoice) -> Result<ExitCode, Failure> {
    let is_error = |judged: &Judged| {
        let mut findings = judged.report.findings.iter();
        findings.any(|finding| finding.severity == Severity::Error)
    };
    let living = search.records.iter().take_while(|records| records.alive);
    let judged_at_once = match living.count() {
        0 | 1 => 1,
        living => living.min(MOST_JUDGED),
    };
    let mut reports = Vec::new();
    for records in &search.records {
        // Records cannot be judged if, for example, their job has ended since and removed them.
        if reports.len() >= judged_at_once && reports.iter().any(Result::is_ok) {
            break;
        }
        reports.push(judge_records(records));
    }
    let in_trouble = (reports.iter().take(judged_at_once))
        .position(|report| report.as_ref().is_ok_and(is_error));
    let judged = reports.iter().position(Result::is_ok);
    let shown_index = in_trouble.or(judged).unwrap_or(0);
    let verdicts: Vec<String> = reports
        .iter()
        .map(|report| match report {
            Ok(judged) => format!(": {}", judged.report.word()),
            Err(error) => format!(": cannot be judged: {}", printable(&error.to_string())),
        })
        .collect();
    // If none can be judged, this is the error of the newest.
    let shown = reports.swap_remove(shown_index)?;
    let now = SystemTime::now();
    let line = |records: &Records| {
        let age = now.duration_since(records.written).unwrap_or_default();
        format!(
            "{}, written {} ago",
            records.description,
            duration_ms(age.as_secs_f64() * 1e3)
        )
    };
    let not_found = jobs_not_found(&search.records);
    let which = match shown_index {
        0 => "the newest records here",
        _ if in_trouble.is_some() => {
            "the records of the newest living job whose report has an error"
        }
        _ => "the newest records here that can be judged",
    };
    output::write_to(None, color, |out| {
        let records = &search.records[shown_index];
        let age = now.duration_since(records.written).unwrap_or_default();
        // A job without rings may have just written its dumps. Records that are not old therefore count as those of a
        // running job.
        let are_old = !records.alive && age > OLD;
        if are_old {
            let age = duration_ms(age.as_secs_f64() * 1e3);
            let line = "No process has a record in the paths searched.";
            if !not_found.is_empty() {
                writeln!(out, "{line}")?;
                out.write_all(advice::running(&not_found).as_bytes())?;
                writeln!(out, "\nThe newest records are {age} old:")?;
            } else {
                writeln!(out, "{line} The newest records are {age} old:")?;
            }
        }
        human::write(&shown.report, &analyze::layout(verbose), out)?;
        let wrapped = |text: String| textwrap::fill(&text, output::page_width());
        let heading = wrapped(format!("{which}: {}", line(records)));
        writeln!(out, "\n{heading}\n  {}", records.command)?;
        let others = (0..).zip(&search.records);
        let others = others.filter(|(other, _)| *other != shown_index);
        let others_count = search.records.len() - 1;
        if others_count > 0 {
            writeln!(out, "others:")?;
        }
        for (other, records) in others.take(MOST_LISTED) {
            let verdict = verdicts.get(other).map_or("", String::as_str);
            writeln!(out, "  {}{verdict}\n    {}", line(records), records.command)?;
        }
        if others_count > MOST_LISTED {
            writeln!(out, "  and {} more", others_count - MOST_LISTED)?;
        }
        write!(out, "looked in:\n{}", list_of(&search.searched))?;
        if !are_old && !not_found.is_empty() {
            writeln!(out)?;
            out.write_all(advice::running(&not_found).as_bytes())?;
        }
        Ok(())
    })?;
    Ok(ExitCode::from(shown.report.exit_code()))
}

/// The jobs with ranks on this node whose rings are not among these records.
fn jobs_not_found(records: &[Records]) -> Vec<RankJob> {
    let mut jobs = RankJob::of_node();
    let is_among = |folder: &PathBuf| {
        let mut living = records.iter().filter(|records| records.alive);
        living.any(|records| records.paths.iter().any(|path| is_same(path, folder)))
    };
    jobs.retain(|job| !job.rings.as_ref().is_some_and(is_among));
    jobs
}

/// Whether two paths name the same file or folder. A path from the environment can be relative or lead over a link; one
/// from a process's mappings cannot.
fn is_same(one: &Path, other: &Path) -> bool {
    let resolved = |path: &Path| path.canonicalize().ok();
    one == other || resolved(one).is_some_and(|one| resolved(other) == Some(one))
}

/// The entries of a folder; empty if the folder does not exist. The error says why it cannot be listed.
fn entries_of(folder: &Path) -> Result<Vec<DirEntry>, String> {
    match std::fs::read_dir(folder) {
        Ok(entries) => Ok(entries.flatten().collect()),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(format!("cannot be listed: {error}")),
    }
}

/// The kind of an entry in a folder of dumps, by the rules of [`load`](rcomm_analyzer::load).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    File,
    Folder,
    /// A hidden file, such as a dump that is still being written (`.rank_0.77.0.part`), a link to a folder, or what
    /// cannot be read as a file.
    Other,
}

/// The kind of this entry.
fn kind_of(entry: &DirEntry) -> Kind {
    if entry.file_name().as_encoded_bytes().starts_with(b".") {
        return Kind::Other;
    }
    match entry.file_type() {
        Ok(kind) if kind.is_dir() => Kind::Folder,
        Ok(kind) if kind.is_file() => Kind::File,
        Ok(kind) if kind.is_symlink() && entry.path().is_file() => Kind::File,
        Ok(_) | Err(_) => Kind::Other,
    }
}

/// The arguments of a shell command that name these files of a folder and no others: a pattern, or each file if no
/// pattern does. Sorts the files. `others` are the other files of the folder; it may lack hidden files, which no
/// pattern names.
fn argument_for(folder: &Path, files: &mut [PathBuf], others: &[PathBuf]) -> String {
    files.sort();
    let (Some(first), Some(last)) = (files.first(), files.last()) else {
        return String::new();
    };
    let name = |path: &Path| path.file_name().unwrap_or_default().to_os_string();
    let (first, last) = (name(first), name(last));
    // All names between the first and the last in order begin as these two do.
    let common = first.as_encoded_bytes().iter();
    let common = common.zip(last.as_encoded_bytes());
    let common = common.take_while(|(one, other)| one == other && one.is_ascii());
    let beginning = &first.as_encoded_bytes()[..common.count()];
    let is_shared = |path: &PathBuf| name(path).as_encoded_bytes().starts_with(beginning);
    match std::str::from_utf8(beginning) {
        Ok(beginning) if files.len() > 1 && !others.iter().any(is_shared) => {
            format!("{}*", quoted(&folder.join(beginning)))
        }
        _ => {
            let files: Vec<String> = files.iter().map(|file| quoted(file)).collect();
            files.join(" ")
        }
    }
}

impl Search {
    /// Adds the rings below a directory, those of each job as one item.
    fn add_rings(&mut self, directory: &Path) {
        let mut jobs: BTreeMap<String, JobRings> = BTreeMap::new();
        let (listed, problem) = match list_rings(directory) {
            Ok(listed) => (listed, None),
            Err(error) => (Vec::new(), Some(error.to_string())),
        };
        for listing in &listed {
            let (Ok(ring), Some(folder)) = (&listing.ring, listing.path.parent()) else {
                continue;
            };
            let job = jobs
                .entry(ring.identity.job.clone())
                .or_insert_with(|| JobRings {
                    folder: folder.to_owned(),
                    count: 0,
                    alive: 0,
                    written_ns: 0,
                    created_ns: 0,
                });
            job.count += 1;
            job.alive += usize::from(ring.alive);
            job.written_ns = job.written_ns.max(ring.heartbeat_ns).max(ring.created_ns);
            job.created_ns = job.created_ns.max(ring.created_ns);
        }
        self.searched.push(SearchedPath {
            path: directory.to_owned(),
            found: match (jobs.len(), problem) {
                (0, None) => "no rings".to_owned(),
                (0, Some(problem)) => problem,
                (jobs, _) => format!("rings of {}", count(jobs as u64, "job")),
            },
        });
        let time_of =
            |ns: i64| SystemTime::UNIX_EPOCH + Duration::from_nanos(u64::try_from(ns).unwrap_or(0));
        for (job, rings) in jobs {
            let snapshot = if rings.alive > 0 { "--snapshot " } else { "" };
            self.records.push(Records {
                description: format!(
                    "{} of job {}, {} alive",
                    count(rings.count as u64, "ring"),
                    printable(&job),
                    match rings.alive {
                        1 => "1 process".to_owned(),
                        alive => format!("{alive} processes"),
                    }
                ),
                command: format!("rcomm-fr analyze {snapshot}{}", quoted(&rings.folder)),
                paths: vec![rings.folder],
                written: time_of(rings.written_ns),
                created: time_of(rings.created_ns),
                alive: rings.alive > 0,
            });
        }
    }

    /// Adds the files whose path continues `beginning` with a digit: PyTorch appends the rank.
    fn add_files(&mut self, description: &str, beginning: &Path) {
        let (Some(folder), Some(stem)) = (beginning.parent(), beginning.file_name()) else {
            return;
        };
        let is_dump = |name: &std::ffi::OsStr| {
            let rest = name
                .as_encoded_bytes()
                .strip_prefix(stem.as_encoded_bytes());
            rest.is_some_and(|rest| rest.first().is_some_and(u8::is_ascii_digit))
        };
        let (entries, problem) = match entries_of(folder) {
            Ok(entries) => (entries, None),
            Err(problem) => (Vec::new(), Some(problem)),
        };
        let files: Vec<PathBuf> = entries
            .into_iter()
            .filter(|entry| is_dump(&entry.file_name()))
            .map(|entry| entry.path())
            .collect();
        let mut pattern = beginning.to_owned().into_os_string();
        pattern.push(A_DIGIT_FIRST);
        self.note(Path::new(&pattern), files.len(), problem);
        let argument = format!("{}{A_DIGIT_FIRST}", quoted(beginning));
        self.add(description.to_owned(), &argument, files);
    }

    /// Adds the files directly in a folder as one item, and those of each subfolder (one run) as a separate item.
    fn add_folder(&mut self, description: &str, folder: &Path) {
        let (mut files, mut runs, mut others) = (Vec::new(), Vec::new(), Vec::new());
        let (entries, mut problem) = match entries_of(folder) {
            Ok(entries) => (entries, None),
            Err(problem) => (Vec::new(), Some(problem)),
        };
        for entry in entries {
            match kind_of(&entry) {
                Kind::Folder => runs.push(entry.path()),
                Kind::File => files.push(entry.path()),
                Kind::Other => others.push(entry.path()),
            }
        }
        let argument = match runs.is_empty() {
            true => quoted(folder),
            false => argument_for(folder, &mut files, &[&runs[..], &others].concat()),
        };
        let mut found = vec![(description.to_owned(), argument, files)];
        runs.sort();
        for run in runs {
            let name = run.file_name().unwrap_or_default().display();
            let description = format!("{description} of the run {name}");
            let (files, unlisted) = Self::files_of_run(&run);
            problem = problem.or(unlisted);
            found.push((description, quoted(&run), files));
        }
        let number = found.iter().map(|(_, _, files)| files.len()).sum();
        self.note(folder, number, problem);
        for (description, argument, files) in found {
            self.add(description, &argument, files);
        }
    }

    /// The files in a folder and in its direct subfolders, and the first reason why one of these cannot be listed.
    fn files_of_run(folder: &Path) -> (Vec<PathBuf>, Option<String>) {
        let (mut files, mut problem) = (Vec::new(), None);
        let mut pending = vec![(folder.to_owned(), 0)];
        while let Some((folder, depth)) = pending.pop() {
            let entries = entries_of(&folder).unwrap_or_else(|why| {
                problem.get_or_insert_with(|| format!("{} {why}", folder.display()));
                Vec::new()
            });
            for entry in entries {
                match kind_of(&entry) {
                    Kind::Folder if depth < 1 => pending.push((entry.path(), depth + 1)),
                    Kind::File => files.push(entry.path()),
                    Kind::Folder | Kind::Other => {}
                }
            }
        }
        (files, problem)
    }

    /// Notes a path that was searched, how many files were found, and why not all could be searched.
    fn note(&mut self, path: &Path, files: usize, problem: Option<String>) {
        self.searched.push(SearchedPath {
            path: path.to_owned(),
            found: match (files, problem) {
                (0, None) => "no files".to_owned(),
                (0, Some(problem)) => problem,
                (files, None) => count(files as u64, "file"),
                (files, Some(problem)) => format!("{}; {problem}", count(files as u64, "file")),
            },
        });
    }

    /// Adds files as one item, if there are any. `argument` names them in a shell command, and is quoted.
    fn add(&mut self, description: String, argument: &str, files: Vec<PathBuf>) {
        let written = files
            .iter()
            .filter_map(|file| file.metadata().ok()?.modified().ok());
        if let Some(written) = written.max() {
            self.records.push(Records {
                description: format!("{description}, {}", count(files.len() as u64, "file")),
                command: format!("rcomm-fr analyze {argument}"),
                paths: files,
                written,
                created: written,
                alive: false,
            });
        }
    }
}

/// One line for each path: the path, and what was found there.
fn list_of(searched: &[SearchedPath]) -> String {
    let paths = searched.iter().map(|item| item.path.display().to_string());
    let widest = paths.map(|path| path.chars().count()).max().unwrap_or(0);
    searched.iter().fold(String::new(), |mut text, item| {
        let path = item.path.display().to_string();
        let _ = writeln!(text, "  {path:<widest$}  {}", item.found);
        text
    })
}

/// The path as a word of a shell command.
fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    shlex::try_quote(&text).map_or(text.clone(), std::borrow::Cow::into_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_over_links_and_relative_ones_are_the_same_as_what_they_lead_to() {
        let folder = tempfile::tempdir().expect("a temporary directory can be made");
        let real = folder
            .path()
            .canonicalize()
            .expect("it exists")
            .join("rings");
        std::fs::create_dir(&real).expect("a directory can be made");
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&real, &link).expect("a link can be made");
        let around = real.join("..").join("rings");
        for path in [&link, &around, &real] {
            assert!(is_same(path, &real), "{}", path.display());
        }
        assert!(!is_same(folder.path(), &real));
        assert!(!is_same(Path::new("/nowhere/a"), Path::new("/nowhere/b")));
    }

    #[test]
    fn a_living_job_that_cannot_be_judged_does_not_hide_the_others() {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/dumps");
        let records = |path: PathBuf, alive| Records {
            description: path.display().to_string(),
            command: format!("rcomm-fr analyze {}", quoted(&path)),
            paths: vec![path],
            written: SystemTime::now(),
            created: SystemTime::now(),
            alive,
        };
        let gone = || records(PathBuf::from("/nowhere/rings/job"), true);
        let search = |records| Search {
            searched: Vec::new(),
            records,
        };
        let dumps = records(fixtures.join("healthy-w4/pickle"), false);
        assert!(show_first(&search(vec![gone(), dumps]), false, ColorChoice::Never).is_ok());
        let both = search(vec![gone(), gone()]);
        assert!(show_first(&both, false, ColorChoice::Never).is_err());
    }

    #[test]
    fn files_beside_folders_are_named_without_these() {
        let folder = Path::new("dumps of me");
        let argument = |files: &[&str], folders: &[&str]| {
            let paths = |names: &[&str]| names.iter().map(|name| folder.join(name)).collect();
            let (mut files, folders): (Vec<_>, Vec<_>) = (paths(files), paths(folders));
            argument_for(folder, &mut files, &folders)
        };
        let ranks = ["rank_1", "rank_0.json", "rank_10"];
        assert_eq!(argument(&ranks, &["run7"]), "'dumps of me/rank_'*");
        let each = "'dumps of me/rank_0' 'dumps of me/rank_1'";
        assert_eq!(argument(&["rank_0", "rank_1"], &["rank_of_b"]), each);
        assert_eq!(argument(&["rank_0"], &["run7"]), "'dumps of me/rank_0'");
        assert_eq!(
            argument(&["a", "b"], &["run7"]),
            "'dumps of me/a' 'dumps of me/b'"
        );
        assert_eq!(argument(&[], &["run7"]), "");
    }

    #[test]
    fn paths_from_the_environment_come_before_the_defaults() {
        let environment = |name: &str| match name {
            "TORCH_FR_DUMP_TEMP_FILE" => Some("/shared/run7/rank_"),
            "HOME" => Some("/home/u"),
            _ => None,
        };
        let expected = [
            "/shared/run7/rank_",
            "/home/u/.cache/torch/comm_lib_trace_rank_",
            "/tmp/nccl_trace_rank_",
        ];
        assert_eq!(
            dump_beginnings(|name| environment(name).map(PathBuf::from)),
            expected.map(PathBuf::from)
        );
    }
}
