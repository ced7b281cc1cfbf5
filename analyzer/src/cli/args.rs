//! The command line, from which help, manual pages and completions are generated.

use clap::{Args, Parser, Subcommand, ValueEnum};
use rcomm_analyzer::parse_duration;
use rcomm_analyzer::source::{HostPort, WorkerAddress};
use std::num::{IntErrorKind, NonZeroU32, NonZeroUsize, ParseIntError};
use std::path::PathBuf;
use std::time::Duration;

/// The list of exit codes in `--help` of the program, `analyze` and `watch`.
const EXIT_CODES: &str = "\
Exit codes:
  0  healthy, running or ended, or cancelled with nothing wrong before;
     notes do not count
  1  at least one error or warning was found, or the job crashed
  2  inconclusive, or nothing to judge: wrong usage, no readable input,
     output not writable";

/// Reads flight recorder dumps and rings, and names the rank at fault.
#[derive(Debug, Parser)]
#[command(name = "rcomm-fr", version, after_help = EXIT_CODES, max_term_width = 100)]
#[command(disable_help_subcommand = true)]
#[command(
    override_usage = "rcomm-fr [OPTIONS] <COMMAND>\n       rcomm-fr PATH...   (as rcomm-fr analyze PATH...)\n       rcomm-fr           (looks for records on this node and judges the newest)"
)]
pub(crate) struct Cli {
    /// When to color the output; `auto` obeys NO_COLOR and CLICOLOR_FORCE.
    #[arg(long, value_enum, global = true, default_value_t = Color::Auto, value_name = "WHEN", display_order = 900)]
    pub(crate) color: Color,

    /// Without a command or path: show the evidence, every group and rank, and the merged stacks.
    #[arg(short, long)]
    pub(crate) verbose: bool,

    #[command(subcommand)]
    pub(crate) command: Option<Command>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Color {
    /// On a terminal only.
    Auto,
    /// Also in files and pipes.
    Always,
    /// Without color.
    Never,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Analyze(AnalyzeArgs),
    Watch(WatchArgs),
    Diff(DiffArgs),
    Collect(CollectArgs),
    Summarize(SummarizeArgs),
    Rings(RingsArgs),
    Dump(DumpArgs),
    #[cfg(feature = "tables")]
    Query(QueryArgs),
    /// Queries the tables; this build has none, and the command reports that.
    #[cfg(not(feature = "tables"))]
    #[command(hide = true, disable_help_flag = true)]
    Query {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        rest: Vec<std::ffi::OsString>,
    },
    Explain(ExplainArgs),
    Trends(TrendsArgs),
    NcclPlugin(NcclPluginArgs),
    Completions(CompletionsArgs),
    Man(ManArgs),
}

/// Read records and name the rank at fault, since when, and the ranks that wait for it.
///
/// A path is a file, a folder, a pattern, an archive (.tar, .rcap, with .gz or .zst), a ring or a summary (.rsum); `-`
/// is standard input. Files are recognized by content: PyTorch's dumps and ours, pickle or JSON, and logs of PyTorch,
/// NCCL and launchers. Files that are missing, cut short or from another run become notes and do not prevent a verdict.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct AnalyzeArgs {
    /// Files, folders, patterns, archives, rings, or `-`.
    #[arg(value_name = "PATH", required = true)]
    pub(crate) paths: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) show: ShowReportArgs,
    #[command(flatten)]
    pub(crate) judge: JudgeArgs,
    /// Show pseudonyms in place of paths, hosts and the program's own frames: the same one for the same name. Logs,
    /// stacks and RAS reports, which can hold anything, are left out.
    #[arg(long)]
    pub(crate) redact: bool,
}

/// How a report is shown.
#[derive(Debug, Args)]
pub(crate) struct ShowReportArgs {
    /// The output format.
    #[arg(long, value_enum, default_value_t = Format::Text, value_name = "FORMAT")]
    pub(crate) format: Format,
    /// Write to this file instead of standard output.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Show the evidence, every group and rank, and the merged stacks (text only).
    #[arg(short, long)]
    pub(crate) verbose: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For reading on a terminal.
    Text,
    /// For programs: rcomm.report/1.
    Json,
    /// One self-contained page: graph, matrix, timeline, stacks.
    Html,
    /// A timeline for ui.perfetto.dev.
    Perfetto,
    /// For programs: operations, collectives, groups and findings as columns, rcomm.columns/1.
    Columns,
}

/// How records are read and judged.
#[derive(Clone, Debug, Args)]
pub(crate) struct JudgeArgs {
    /// The records are a snapshot of a running job: an operation that is pending, but not overdue, is no finding.
    #[arg(long)]
    pub(crate) snapshot: bool,
    /// With --snapshot or --as-of: the age from which a pending operation is overdue; half of its own time-out if that
    /// is shorter.
    #[arg(long, value_name = "DURATION", default_value = "5s", value_parser = parse_duration)]
    pub(crate) overdue: Duration,
    /// Judge as of this time: `now`, or a time like `2026-01-31T13:00:05Z`. For records that state no time themselves,
    /// such as PyTorch's; operations younger than --overdue at that time are no finding.
    #[arg(long, value_name = "TIME")]
    pub(crate) as_of: Option<AsOf>,
    /// The number of ranks of the job, if the records do not show it.
    #[arg(long, value_name = "N", value_parser = number::<NonZeroU32>)]
    pub(crate) world_size: Option<NonZeroU32>,
    /// Files read at a time [default: one for each core].
    #[arg(long, value_name = "N", value_parser = number::<NonZeroUsize>)]
    pub(crate) jobs: Option<NonZeroUsize>,
    /// Give up, with exit code 2, once more memory than this is used (`512MiB`, `4GiB`).
    #[arg(long, value_name = "SIZE")]
    pub(crate) memory_limit: Option<ByteSize>,
    /// Whether the report shows pseudonyms.
    #[arg(skip)]
    pub(crate) redact: bool,
}

impl Default for JudgeArgs {
    fn default() -> Self {
        Self {
            snapshot: false,
            as_of: None,
            overdue: rcomm_analyzer::Policy::default().overdue,
            world_size: None,
            jobs: None,
            memory_limit: None,
            redact: false,
        }
    }
}

/// A time, wall clock, ns since the epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AsOf(pub(crate) i64);

impl std::str::FromStr for AsOf {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let time = match text {
            "now" => std::time::SystemTime::now(),
            text => humantime::parse_rfc3339_weak(text)
                .map_err(|_| "expected `now`, or a time in UTC as 2026-01-31T13:00:05Z")?,
        };
        let since = time
            .duration_since(std::time::UNIX_EPOCH)
            .map_err(|_| "expected a time after 1970")?;
        i64::try_from(since.as_nanos())
            .map(Self)
            .map_err(|_| "expected a time before 2262")
    }
}

/// An amount of memory, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ByteSize(pub(crate) u64);

impl std::str::FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let unit = text.trim_start_matches(|c: char| c.is_ascii_digit());
        let number = &text[..text.len() - unit.len()];
        let shift = match unit.trim().to_ascii_lowercase().as_str() {
            _ if number.is_empty() => return Err("it has to begin with a whole number".to_owned()),
            "" | "b" => 0,
            "k" | "kib" => 10,
            "m" | "mib" => 20,
            "g" | "gib" => 30,
            "t" | "tib" => 40,
            _ => return Err(format!("{unit:?} is not a unit; use KiB, MiB, GiB or TiB")),
        };
        let number: Option<u64> = number.parse().ok();
        let bytes = number.and_then(|number| number.checked_mul(1 << shift));
        Ok(Self(bytes.ok_or("it is too large")?))
    }
}

/// Parses a whole number of at least 1.
fn number<N: std::str::FromStr<Err = ParseIntError>>(text: &str) -> Result<N, &'static str> {
    let parsed: Result<N, ParseIntError> = text.parse();
    parsed.map_err(|error| match error.kind() {
        IntErrorKind::PosOverflow => "it is too large",
        _ => "expected a whole number of at least 1",
    })
}

/// Watch a folder while dumps arrive in it, and report once the dumps of all ranks are there.
///
/// Each change of the verdict, its sentence or the number of ranks is a line on standard error; the report follows at
/// the end, as with `analyze`. It ends when the dumps of all expected ranks are there and nothing has changed for a
/// moment, or at --timeout. Dumps that leave open how many ranks the job has need --timeout or --world-size.
#[derive(Debug, Args)]
#[command(after_help = EXIT_CODES)]
pub(crate) struct WatchArgs {
    /// The folder; it may not exist yet.
    #[arg(value_name = "DIR")]
    pub(crate) dir: PathBuf,
    /// Report what is there after this time, complete or not.
    #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
    pub(crate) timeout: Option<Duration>,
    /// How long the folder must be unchanged before the report is final.
    #[arg(long, value_name = "DURATION", default_value = "500ms", value_parser = parse_duration)]
    pub(crate) settle: Duration,
    #[command(flatten)]
    pub(crate) show: ShowReportArgs,
    #[command(flatten)]
    pub(crate) judge: JudgeArgs,
}

/// Compare two runs, or two moments of one: which findings are new, which groups progressed.
#[derive(Debug, Args)]
#[command(after_help = "\
Exit codes: 0 the second has no error or warning that the first lacks; 1 it has; 2 no comparison.")]
pub(crate) struct DiffArgs {
    /// Records (as for `analyze`), or a report that was saved as JSON.
    #[arg(value_name = "A")]
    pub(crate) before: PathBuf,
    /// The same for the later moment or the other run.
    #[arg(value_name = "B")]
    pub(crate) after: PathBuf,
    /// The output format.
    #[arg(long, value_enum, default_value_t = DiffFormat::Text, value_name = "FORMAT")]
    pub(crate) format: DiffFormat,
    /// Write to this file instead of standard output.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Show every group.
    #[arg(short, long)]
    pub(crate) verbose: bool,
    #[command(flatten)]
    pub(crate) judge: JudgeArgs,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum DiffFormat {
    /// For reading on a terminal.
    Text,
    /// For programs: rcomm.diff/1.
    Json,
}

/// Gather the records of this node, or of a list of hosts, into one archive.
///
/// The archive is a tar file (.rcap) whose last member, manifest.json, lists all other members and
/// everything that is absent. `rcomm-fr analyze` reads it as it is.
///
/// From folders only records are taken; a file that is named itself is taken without a check.
#[derive(Debug, Args)]
#[command(after_help = "\
Exit codes: 0 all there; 1 something is absent and named; 2 nothing could be gathered. With --analyze, those of `analyze`.

Example, a PyTorch job that hangs on this node:
  rcomm-fr collect --ask --analyze -o job.rcap

Example, over ssh:
  rcomm-fr collect -o job.rcap --hosts-from hosts.txt \\
    --command 'ssh {host} rcomm-fr collect -o - /tmp/dumps'")]
pub(crate) struct CollectArgs {
    /// Files and folders on this node.
    #[arg(
        value_name = "PATH",
        required_unless_present_any = ["host", "hosts_from", "rings", "ask", "torch_store", "worker_server"]
    )]
    pub(crate) paths: Vec<PathBuf>,
    /// Where the archive goes; `-` is standard output.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: PathBuf,
    /// Take the rings of this node as well, each as a dump.
    #[arg(long)]
    pub(crate) rings: bool,
    /// Take the records of a running PyTorch job from its ranks on this node: the job of --job, or one that records, or
    /// the newest.
    ///
    /// Names the job that it takes, and the others on this node with the option that takes each. Where no process of a
    /// rank has loaded PyTorch, it says so and takes another job. Within an allocation of Slurm (SLURM_JOB_ID) it takes
    /// none of another allocation, unless --job names it.
    ///
    /// Takes the rings of ranks that record. For the others it asks the worker servers that the job's store lists, and
    /// then the pipes of PyTorch's NCCL backend (TORCH_NCCL_DEBUG_INFO_PIPE_FILE). The job goes on. Python stacks come
    /// from the worker servers or, without these, from `py-spy` if it is in PATH. Then the native stack of the rank at
    /// fault is taken by the first of `py-spy`, `eu-stack` and `gdb` that gives one: that holds its process for a
    /// moment.
    #[arg(long)]
    pub(crate) ask: bool,
    /// With --ask: do not take native stacks.
    #[arg(long)]
    pub(crate) no_native_stack: bool,
    /// Ask the worker servers in this store of a PyTorch job, MASTER_ADDR:MASTER_PORT, on whatever node they are.
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) torch_store: Vec<HostPort>,
    /// Ask this PyTorch worker server, http://HOST:PORT or unix:PATH; without RANK= the rank is its position.
    #[arg(long, value_name = "[RANK=]ADDRESS")]
    pub(crate) worker_server: Vec<WorkerAddress>,
    /// Have all ranks on NCCL write their dumps through the job's store, and END THE JOB.
    ///
    /// Sets the key `exception_dump`, as a time-out does: each rank writes its dump, waits for
    /// TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC, and ends its process. This is for ranks whose pipes are not there.
    #[arg(long)]
    pub(crate) exception_dump: bool,
    /// How long the ranks may take to answer and to write.
    #[arg(long, value_name = "DURATION", default_value = "15s", value_parser = parse_duration)]
    pub(crate) wait: Duration,
    /// Judge the archive and print the report, with the stack of the rank at fault where one was taken.
    #[arg(long)]
    pub(crate) analyze: bool,
    #[command(flatten)]
    pub(crate) place: RingPlace,
    /// The number of ranks of the job, if the records do not show it: those without a record are named.
    #[arg(long, value_name = "N", value_parser = number::<NonZeroU32>)]
    pub(crate) world_size: Option<NonZeroU32>,
    /// Also collect from this host; may be repeated, or hold several separated by commas.
    #[arg(long, value_name = "HOST", value_delimiter = ',', requires = "command")]
    pub(crate) host: Vec<String>,
    /// Also collect from the hosts in this file, one per line.
    #[arg(long, value_name = "FILE", requires = "command")]
    pub(crate) hosts_from: Option<PathBuf>,
    /// The command that prints the archive of a host. `{host}` becomes its name; no shell is involved.
    #[arg(long, value_name = "COMMAND")]
    pub(crate) command: Option<String>,
    /// How long one host may take.
    #[arg(long, value_name = "DURATION", default_value = "60s", value_parser = parse_duration)]
    pub(crate) timeout: Duration,
    /// How many hosts are asked at once.
    #[arg(long, value_name = "N", default_value = "16", value_parser = number::<NonZeroUsize>)]
    pub(crate) jobs: NonZeroUsize,
    /// Put pseudonyms in place of paths, hosts and the program's own frames into the archive. Summaries, RAS reports
    /// and other files that are no dumps are left out.
    #[arg(long)]
    pub(crate) redact: bool,
}

/// Condense the records of this node into one small file for an analysis of all nodes.
///
/// `rcomm-fr analyze *.rsum` reads such files of all nodes and gives the same report as on the records themselves.
/// Nothing is judged here, since a rank cannot be judged without its peers.
#[derive(Debug, Args)]
#[command(after_help = "\
Exit codes: 0 all records are in the summary, which notes other files that were left aside (N300); 1 a record could not be used, or only in part, a path does not exist, a pattern matches nothing, or a link was not followed, which the summary lists; 2 no dump was read.

Example, on every node of a Slurm job, then once:
  srun --ntasks-per-node=1 sh -c \\
    'rcomm-fr summarize /tmp/dumps -o /shared/$SLURM_NODEID.rsum'
  rcomm-fr analyze /shared/*.rsum")]
pub(crate) struct SummarizeArgs {
    /// Records, as for `analyze`.
    #[arg(value_name = "PATH", required = true)]
    pub(crate) paths: Vec<PathBuf>,
    /// Where the summary goes (.rsum); `-` is standard output.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: PathBuf,
    /// Files read at a time [default: one for each core].
    #[arg(long, value_name = "N", value_parser = number::<NonZeroUsize>)]
    pub(crate) jobs: Option<NonZeroUsize>,
}

/// The exit codes in the help of `rings` and `rings list`.
const LIST_EXIT_CODES: &str = "\
Exit codes: 0 listed, even if there is no ring or one cannot be read; 2 the directory could not be read.";

/// List, show or remove the rings of this node: the records of jobs that run, hang, or died.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, after_help = LIST_EXIT_CODES)]
pub(crate) struct RingsArgs {
    #[command(subcommand)]
    pub(crate) action: Option<RingsAction>,
    #[command(flatten)]
    pub(crate) list: RingPlace,
}

#[derive(Debug, Subcommand)]
pub(crate) enum RingsAction {
    /// List every ring, and whether its process is alive (what `rings` alone does).
    #[command(after_help = LIST_EXIT_CODES)]
    List(RingPlace),
    /// Show one rank's ring: its groups, its pending and its newest operations.
    #[command(
        after_help = "Exit codes: 0 shown; 2 no ring matches, rings of several jobs do, or the ring or its directory could not be read."
    )]
    Show(ShowArgs),
    /// Remove the rings whose processes are gone. They are the record of what happened: dump or analyze them first.
    #[command(
        after_help = "Exit codes: 0 done, even if there was no ring to remove or one could not be read; 2 the directory could not be read, or a ring could not be removed."
    )]
    RemoveStale(RemoveStaleArgs),
}

/// Which rings a command takes: those in a directory, all or of one job.
#[derive(Debug, Args)]
pub(crate) struct RingPlace {
    /// Where the rings are [default: /dev/shm/rcomm-UID].
    #[arg(
        long,
        value_name = "DIR",
        env = "RCOMM_RING_DIR",
        hide_env_values = true
    )]
    pub(crate) dir: Option<PathBuf>,
    /// Only the rings of this job.
    #[arg(long, value_name = "JOB")]
    pub(crate) job: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct ShowArgs {
    /// A ring file, or the number of a rank.
    #[arg(value_name = "RING")]
    pub(crate) ring: String,
    /// Show every operation that the ring holds.
    #[arg(short, long)]
    pub(crate) verbose: bool,
    #[command(flatten)]
    pub(crate) place: RingPlace,
}

#[derive(Debug, Args)]
pub(crate) struct RemoveStaleArgs {
    /// Only list what would be removed.
    #[arg(long)]
    pub(crate) dry_run: bool,
    #[command(flatten)]
    pub(crate) place: RingPlace,
}

/// Write the rings of this node as dump files, which other flight recorder tools read as well.
///
/// Files are DIR/JOB/rank_N (JSON: rank_N.json); those of attempt A after the first are in
/// DIR/JOB/attempt_A. None is ever overwritten: a file whose name is taken gets `.1`, `.2` and so on
/// after it. Reading disturbs no process: a ring can be dumped while its job runs, hangs, or is gone.
#[derive(Debug, Args)]
#[command(
    after_help = "Exit codes: 0 all written; 1 a ring could not be read; 2 nothing was written, or a dump could not be written."
)]
pub(crate) struct DumpArgs {
    /// Ring files; without one, all rings in the directory.
    #[arg(value_name = "RING")]
    pub(crate) rings: Vec<PathBuf>,
    /// Where the dumps go; created if it does not exist.
    #[arg(short, long, value_name = "DIR")]
    pub(crate) output: PathBuf,
    /// The output format.
    #[arg(long, value_enum, default_value_t = DumpFormat::Pickle)]
    pub(crate) format: DumpFormat,
    #[command(flatten)]
    pub(crate) place: RingPlace,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum DumpFormat {
    /// What PyTorch writes and torchfrtrace reads; holds no code, only data.
    Pickle,
    /// The same as text.
    Json,
}

/// Query the records as tables with SQL.
///
/// Four tables: `entries` (one row for each operation of each rank), `collectives` (joined over the
/// ranks), `groups` and `findings`. `select * from entries limit 1` shows the columns. All records are
/// held in memory, and a copy of them as columns.
#[cfg(feature = "tables")]
#[derive(Debug, Args)]
#[command(after_help = "\
Exit codes: 0 answered; 2 a wrong query, or no readable input.

Example, the ranks that moved most bytes:
  rcomm-fr query \\
    'select rank, sum(input_bytes) as b from entries group by rank order by b desc' \\
    dumps/")]
pub(crate) struct QueryArgs {
    /// A query in SQL, such as a select statement.
    #[arg(value_name = "SQL")]
    pub(crate) sql: String,
    /// Records, as for `analyze`.
    #[arg(value_name = "PATH", required = true)]
    pub(crate) paths: Vec<PathBuf>,
    /// The output format.
    #[arg(long, value_enum, default_value_t = QueryFormat::Text, value_name = "FORMAT")]
    pub(crate) format: QueryFormat,
    /// Write to this file instead of standard output.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) judge: JudgeArgs,
}

#[cfg(feature = "tables")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum QueryFormat {
    /// Columns for people.
    Text,
    /// Comma-separated values.
    Csv,
    /// Apache Parquet.
    Parquet,
}

/// Explain a code: what it means, where it usually comes from and what to do.
#[derive(Debug, Args)]
#[command(after_help = "Exit codes: 0 explained; 2 there is no such code.")]
pub(crate) struct ExplainArgs {
    /// A code or its name (`E101`, `not_joined`); without one, all codes, one a line.
    #[arg(value_name = "CODE")]
    pub(crate) codes: Vec<String>,
}

/// Read the logs of NCCL's Inspector, and show how the times of operations develop.
///
/// Trends only: Inspector writes an operation once it has completed, so what hangs is not in its log. A path is a file
/// or a folder with the log of each process, as `NCCL_INSPECTOR_DUMP_DIR` names it.
#[derive(Debug, Args)]
#[command(after_help = "Exit codes: 0 shown; 2 no readable log, or the output is not writable.")]
pub(crate) struct TrendsArgs {
    /// Logs, and folders of logs.
    #[arg(value_name = "PATH", required = true)]
    pub(crate) paths: Vec<PathBuf>,
    /// The output format.
    #[arg(long, value_enum, default_value_t = TrendsFormat::Text, value_name = "FORMAT")]
    pub(crate) format: TrendsFormat,
    /// Write to this file instead of standard output.
    #[arg(short, long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Show every operation, not only the 20 with the most time (text only).
    #[arg(short, long)]
    pub(crate) verbose: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum TrendsFormat {
    /// For reading on a terminal.
    Text,
    /// For programs: rcomm.trends/1.
    Json,
}

/// Print the path of the profiler plug-in for NCCL: `NCCL_PROFILER_PLUGIN=$(rcomm-fr nccl-plugin)` records any NCCL
/// program.
#[derive(Debug, Args)]
#[command(
    after_help = "Exit codes: 0 printed; 2 the plug-in is not installed next to this program."
)]
pub(crate) struct NcclPluginArgs {}

/// Print a completion script for a shell.
#[derive(Debug, Args)]
#[command(after_help = "Exit codes: 0 printed; 2 wrong usage, such as an unknown shell.")]
pub(crate) struct CompletionsArgs {
    /// The shell.
    #[arg(value_enum)]
    pub(crate) shell: clap_complete::Shell,
}

/// Print the manual page (roff), or write one page for each command into a folder.
#[derive(Debug, Args)]
#[command(after_help = "Exit codes: 0 written; 2 a page or the folder could not be written.")]
pub(crate) struct ManArgs {
    /// Write the pages of all commands into this folder, which is created if it does not exist.
    #[arg(long, value_name = "DIR")]
    pub(crate) out_dir: Option<PathBuf>,
}
