//! Lists the jobs whose ranks run on this node. The first one is taken if the user names none.

use super::processes::{ProcessJob, RankProcess};
use rcomm_recorder::record::is_ring_or_unnamed;
use rcomm_verdict::format::{printable, time_of_day};
use std::cmp::Reverse;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// The longest command that is shown, in characters.
const MAX_COMMAND: usize = 100;

/// What a rank's process runs, as its memory mappings show it. The later the variant, the likelier the process is a
/// rank of a PyTorch job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Program {
    /// No Python, or its mappings cannot be read.
    Other,
    /// Python, which has not loaded PyTorch.
    Python,
    /// Python, or another program, that has loaded PyTorch.
    PyTorch,
}

/// One attempt of a job with ranks on this node.
#[derive(Clone, Debug)]
pub struct RankJob {
    /// The processes of the job's ranks, in the order in which they were found; at least one.
    pub processes: Vec<RankProcess>,
    /// What the job's ranks run; if they differ, the last in the order of [`Program`].
    pub program: Program,
    /// The folder of the rings that the job's ranks have mapped; `None` if no rank has mapped one, or if the mappings
    /// cannot be read.
    pub rings: Option<PathBuf>,
    /// When the first of the job's processes started, s since the boot of this node; 0 if that cannot be read.
    started: f64,
}

impl RankJob {
    /// The jobs of these processes: those that run PyTorch first, then those that run Python; among equals, those that
    /// keep rings first, and then those that started last.
    pub fn group(processes: Vec<RankProcess>) -> Vec<Self> {
        let mut jobs: Vec<Self> = Vec::new();
        for process in processes {
            let (program, rings) = read_mappings(process.pid);
            let started = started(process.pid).unwrap_or(0.0);
            let process_job = ProcessJob::of(&process);
            let mut known = jobs.iter_mut();
            match known.find(|job| ProcessJob::of(&job.processes[0]) == process_job) {
                Some(job) => {
                    job.processes.push(process);
                    job.program = job.program.max(program);
                    job.rings = job.rings.take().or(rings);
                    job.started = job.started.min(started);
                }
                None => jobs.push(Self {
                    processes: vec![process],
                    program,
                    rings,
                    started,
                }),
            }
        }
        let newest_pid = |job: &Self| job.processes.iter().map(|process| process.pid).max();
        jobs.sort_by(|a, b| {
            let kind = |job: &Self| Reverse((job.program, job.rings.is_some()));
            let by_kind = kind(a).cmp(&kind(b));
            by_kind
                .then(b.started.total_cmp(&a.started))
                .then(newest_pid(b).cmp(&newest_pid(a)))
        });
        jobs
    }

    /// The jobs of this node whose processes' environments this user may read; in the order of
    /// [`group`](Self::group). Blocks as [`RankProcess::list`] does.
    pub fn of_node() -> Vec<Self> {
        Self::group(RankProcess::list())
    }

    /// The name of the job, as `--job` takes it; `None` if the environment of the ranks states none.
    pub fn name(&self) -> Option<&str> {
        self.processes[0].job()
    }

    /// A description of the job without its name, like `4 processes of PyTorch without a record, since 17:43:15 UTC:
    /// python train.py (rank 0: process 3744)`.
    pub fn describe(&self) -> String {
        let first = &self.processes[0];
        let number = match self.processes.len() {
            1 => "1 process".to_owned(),
            number => format!("{number} processes"),
        };
        let program = match self.program {
            Program::PyTorch => " of PyTorch",
            Program::Python => " of Python",
            Program::Other => "",
        };
        let record = match &self.rings {
            Some(folder) => format!("with rings in {}", printable(&folder.display().to_string())),
            None => "without a record".to_owned(),
        };
        let since = self.started_at().map_or(String::new(), |started_ns| {
            format!(", since {}", time_of_day(started_ns))
        });
        let command = first
            .command()
            .map_or(String::new(), |command| format!(": {command}"));
        let (rank, pid) = (first.launched.rank, first.pid);
        format!("{number}{program} {record}{since}{command} (rank {rank}: process {pid})")
    }

    /// A name, quoted so that a shell takes it as one word; control characters are escaped.
    pub fn argument(name: &str) -> String {
        let name = printable(name);
        shlex::try_quote(&name).map_or(name.to_string(), std::borrow::Cow::into_owned)
    }

    /// One line for each of these jobs, with the option that chooses it.
    pub fn lines(jobs: &[Self]) -> Vec<String> {
        let line = |job: &Self| match job.name() {
            Some(name) => format!("--job {}   {}", Self::argument(name), job.describe()),
            None => format!("without a name   {}", job.describe()),
        };
        jobs.iter().map(line).collect()
    }

    /// When the first of the job's processes started, ns since the epoch; `None` if that cannot be read.
    fn started_at(&self) -> Option<i64> {
        let uptime = fs::read_to_string("/proc/uptime").ok()?;
        let uptime: f64 = uptime.split_ascii_whitespace().next()?.parse().ok()?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
        let started = now.as_secs_f64() - (uptime - self.started);
        (self.started > 0.0).then_some((started * 1e9) as i64)
    }
}

impl RankProcess {
    /// The command line of the process, cut to a hundred characters; `None` if it cannot be read or is empty.
    pub fn command(&self) -> Option<String> {
        let bytes = fs::read(format!("/proc/{}/cmdline", self.pid)).ok()?;
        let words = bytes
            .split(|&byte| byte == 0)
            .filter(|word| !word.is_empty());
        let words: Vec<String> = words
            .map(|word| RankJob::argument(&String::from_utf8_lossy(word)))
            .collect();
        let command = words.join(" ");
        let mut shown: String = printable(&command).chars().take(MAX_COMMAND).collect();
        if shown.len() < command.len() {
            shown.push_str("...");
        }
        (!shown.is_empty()).then_some(shown)
    }
}

/// What a process runs, and the folder of the ring that it has mapped.
pub(super) fn read_mappings(pid: u32) -> (Program, Option<PathBuf>) {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let executable = fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
    let name = executable.file_name().unwrap_or_default().to_string_lossy();
    let has = |part: &str| maps.lines().any(|line| line.contains(part));
    let program = if has("/libtorch_cpu.") || has("/libtorch_python.") {
        Program::PyTorch
    } else if name.starts_with("python") || name.starts_with("pypy") || has("/libpython3") {
        Program::Python
    } else {
        Program::Other
    };
    let ring = maps.lines().find_map(mapped_ring);
    (
        program,
        ring.and_then(|path| path.parent().map(PathBuf::from)),
    )
}

/// The path of a ring, from a line of a process's mappings. A process maps its ring before the ring has its name, and
/// the kernel continues showing the first name, which is then a deleted one.
fn mapped_ring(line: &str) -> Option<&Path> {
    let path = line.get(line.find('/')?..)?;
    let path = Path::new(path.strip_suffix(" (deleted)").unwrap_or(path));
    is_ring_or_unnamed(path.file_name()?.to_str()?).then_some(path)
}

/// When a process started, s since the boot of this node. The fields of `stat` are counted from the last `)`, since the
/// process's name before it may hold anything.
pub(super) fn started(pid: u32) -> Option<f64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let ticks: u64 = stat
        .rsplit_once(')')?
        .1
        .split_ascii_whitespace()
        .nth(19)?
        .parse()
        .ok()?;
    Some(ticks as f64 / rustix::param::clock_ticks_per_second() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcomm_recorder::launch::Launched;
    use rcomm_recorder::record::{FlightRecorder, Placement, RecorderConfig};

    fn process(rank: u32, job: &str, pid: u32) -> RankProcess {
        RankProcess {
            pid,
            launched: Launched {
                rank,
                world_size: 2,
                job: Some(job.to_owned()),
                attempt: 0,
            },
            variables: [("MASTER_ADDR".to_owned(), "n07".to_owned())].into(),
        }
    }

    #[test]
    fn jobs_are_told_apart_and_named_with_the_option_that_chooses_each() {
        let own = std::process::id();
        let processes = vec![
            process(0, "gone", u32::MAX - 1),
            process(0, "it runs", own),
            process(1, "gone", u32::MAX),
        ];
        let jobs = RankJob::group(processes);
        // Of two jobs without PyTorch the one that started last is first; a process that is gone started at no time.
        let names: Vec<_> = jobs.iter().map(RankJob::name).collect();
        assert_eq!(names, [Some("it runs"), Some("gone")]);
        let lines = RankJob::lines(&jobs);
        // Another test may have made a ring in this process.
        let start = "--job 'it runs'   1 process with";
        assert!(lines[0].starts_with(start), "{lines:?}");
        assert!(lines[0].contains(", since "), "{lines:?}");
        assert!(lines[0].contains(" UTC: "), "{lines:?}");
        assert!(
            lines[0].ends_with(&format!("(rank 0: process {own})")),
            "{lines:?}"
        );
        let expected = format!(
            "--job gone   2 processes without a record (rank 0: process {})",
            u32::MAX - 1
        );
        assert_eq!(lines[1], expected);
    }

    #[test]
    fn the_rings_of_a_process_are_found_by_its_mappings() {
        let directory = tempfile::tempdir().expect("a temporary directory can be made");
        let mut config = RecorderConfig::new("it runs", 0, 2);
        config.placement = Placement::Dir(directory.path().to_owned());
        let _recorder = FlightRecorder::create(&config).expect("a ring can be made");
        let maps = fs::read_to_string("/proc/self/maps").expect("a process may read its mappings");
        let own = |line: &&str| line.contains(directory.path().to_str().expect("it is UTF-8"));
        let line = maps.lines().find(own).expect("the ring is mapped");
        let ring = mapped_ring(line).expect("the line is of a ring");
        let folder = ring.parent().expect("a ring is in a folder");
        assert_eq!(folder.parent(), Some(directory.path()));
        assert!(folder.is_dir(), "{line}");
        for other in [
            "7f-7f rw-s 00 00:1b 8 /dev/shm/a/1.0.sock",
            "7f-7f rw-p 00 00:00 0",
        ] {
            assert_eq!(mapped_ring(other), None);
        }
    }

    #[test]
    fn pytorch_is_last_in_the_order_of_programs_and_a_missing_process_counts_as_other() {
        let mut kinds = [Program::PyTorch, Program::Other, Program::Python];
        kinds.sort();
        assert_eq!(kinds, [Program::Other, Program::Python, Program::PyTorch]);
        assert_eq!(read_mappings(u32::MAX), (Program::Other, None));
    }
}
