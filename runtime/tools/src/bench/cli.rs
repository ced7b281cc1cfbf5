//! The command line of `rcomm-bench`.

use super::operation::{Operation, Reduction};
use clap::{Parser, Subcommand, ValueEnum};
use rcomm::tuning::Topology;
use rcomm_recorder::model::text::NO_DURATION;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

const AFTER_HELP: &str = "\
The table has a line for each size: the median (p50) and the 99th percentile (p99) of the time of a call, each the \
maximum over the ranks, in microseconds, and algbw and busbw, defined as in nccl-tests, in 10^9 bytes per second. \
Buffers are in host memory. nccl-tests has these columns twice, for calls out of place and in place; here \
all_reduce, reduce and broadcast work in place, and the other collectives out of place.

Without -n, the ranks are those of a launcher: rcomm-run, torchrun, mpirun or srun.

Examples:
  rcomm-bench all_reduce -n 4
  rcomm-bench all_reduce,all_gather -n 4 -b 1K -e 16M --check
  rcomm-run -n 4 rcomm-bench broadcast

Exit codes:
  0  measured, and every checked result was right
  1  a result was wrong
  2  could not measure: wrong usage, a rank failed";

/// Measures the latency and bandwidth of collectives for a range of sizes, like nccl-tests.
#[derive(Clone, Debug, Parser)]
#[command(name = "rcomm-bench", version, after_help = AFTER_HELP, max_term_width = 100)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct Args {
    #[command(subcommand)]
    pub(crate) command: Option<Command>,
    /// Operations to measure, separated by commas.
    #[arg(value_enum, value_delimiter = ',', required = true)]
    pub(crate) operations: Vec<Operation>,
    /// Start this many ranks on this machine.
    #[arg(
        short = 'n',
        visible_short_alias = 'g',
        long = "ranks",
        value_name = "N",
        value_parser = number
    )]
    pub(crate) ranks: Option<NonZeroU32>,
    /// Smallest size, in bytes; K, M and G are powers of 1024.
    #[arg(short = 'b', long, value_name = "SIZE", default_value = "8", value_parser = parse_size)]
    pub(crate) min_bytes: usize,
    /// Largest size, in bytes.
    #[arg(short = 'e', long, value_name = "SIZE", default_value = "64M", value_parser = parse_size)]
    pub(crate) max_bytes: usize,
    /// Each size is this many times the size before it.
    #[arg(short = 'f', long, value_name = "FACTOR", default_value_t = 2, value_parser = clap::value_parser!(u32).range(2..))]
    pub(crate) factor: u32,
    /// Type of the elements.
    #[arg(short = 'd', long, value_enum, default_value_t = Dtype::F32)]
    pub(crate) dtype: Dtype,
    /// How reductions combine values.
    #[arg(short = 'o', long, value_enum, default_value_t = Reduction::Sum)]
    pub(crate) op: Reduction,
    /// Root of broadcast, reduce, gather and scatter.
    #[arg(short = 'r', long, default_value_t = 0)]
    pub(crate) root: u32,
    /// Compare every result with the expected one, and count the elements that differ.
    #[arg(short = 'c', long)]
    pub(crate) check: bool,
    /// Use registered buffers: memory that the group allocates and that all ranks of the host can access.
    #[arg(short = 'R', long)]
    pub(crate) registered: bool,
    /// How long to measure each size; the number of iterations follows from it.
    #[arg(long, value_name = "DURATION", default_value = "200ms", value_parser = duration)]
    pub(crate) time: Duration,
    /// Measure each size with exactly this many iterations.
    #[arg(long, value_name = "N", value_parser = number)]
    pub(crate) iterations: Option<NonZeroU32>,
    /// Number of calls that are not measured, before those that are [default: a tenth of the iterations].
    #[arg(short = 'w', long, value_name = "N")]
    pub(crate) warmup: Option<usize>,
    /// How to call the operations; `async` and `overlap` are for all_reduce only.
    #[arg(long, value_enum, default_value_t = Calls::Blocking)]
    pub(crate) calls: Calls,
    /// Whether to pin the ranks that -n starts to cores.
    #[arg(long, value_enum, default_value_t = Bind::Core)]
    pub(crate) bind: Bind,
    /// Output format.
    #[arg(long, value_enum, default_value_t = Format::Table)]
    pub(crate) format: Format,
}

/// The commands other than a measurement of operations.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Command {
    /// Measure which algorithm is fastest on this machine for which operation and size, and write the table for
    /// RCOMM_TUNING_FILE.
    Tune(TuneArgs),
}

/// Options of `tune`.
#[derive(Clone, Debug, clap::Args)]
#[command(
    after_help = "Exit codes: 0 the table was written or printed; 2 wrong usage, or a measurement failed."
)]
pub(crate) struct TuneArgs {
    /// Only print the table that is in use: RCOMM_TUNING and RCOMM_TUNING_FILE, then the built-in one.
    #[arg(long)]
    pub(crate) print: bool,
    /// Numbers of ranks to measure, separated by commas.
    #[arg(
        short = 'n',
        long = "ranks",
        value_name = "N",
        value_delimiter = ',',
        default_value = "2,4",
        value_parser = number
    )]
    pub(crate) ranks: Vec<NonZeroU32>,
    /// Topologies to measure, separated by commas: in `memory` all ranks share memory, in `sockets` none do, and in
    /// `hosts` only those of one host do. The last two are simulated over this machine's loopback interface.
    #[arg(long, value_name = "TOPOLOGY", value_delimiter = ',', default_value = "memory,sockets,hosts", value_parser = parse_topology)]
    pub(crate) topologies: Vec<Topology>,
    /// Smallest size, in bytes; K, M and G are powers of 1024.
    #[arg(short = 'b', long, value_name = "SIZE", default_value = "1K", value_parser = parse_size)]
    pub(crate) min_bytes: usize,
    /// Largest size, in bytes.
    #[arg(short = 'e', long, value_name = "SIZE", default_value = "1M", value_parser = parse_size)]
    pub(crate) max_bytes: usize,
    /// How long to measure each size of each algorithm in each round.
    #[arg(long, value_name = "DURATION", default_value = "20ms", value_parser = duration)]
    pub(crate) time: Duration,
    /// Number of rounds; each measures everything once, and the best time counts.
    #[arg(long, value_name = "N", default_value = "3", value_parser = number)]
    pub(crate) rounds: NonZeroU32,
    /// Write the table to this file [default: standard output].
    #[arg(short = 'o', long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
}

/// Parses the name of a topology.
fn parse_topology(text: &str) -> Result<Topology, String> {
    let known = Topology::ALL
        .iter()
        .find(|topology| topology.name() == text);
    known.copied().ok_or_else(|| {
        let names = Topology::ALL.iter().map(|topology| topology.name());
        let names: Vec<&str> = names.collect();
        format!("give {}", names.join(", "))
    })
}

/// Type of an element.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Dtype {
    /// 32-bit float.
    F32,
    /// 64-bit float.
    F64,
    /// 16-bit float, IEEE 754.
    F16,
    /// 16-bit float, the upper half of an `f32`.
    Bf16,
    /// Signed 32-bit integer.
    I32,
    /// Signed 64-bit integer.
    I64,
    /// Unsigned 8-bit integer.
    U8,
}

/// How operations are called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Calls {
    /// The call returns when the operation has ended.
    Blocking,
    /// The call returns at once, and the caller waits for the operation; adds the column `issue`, the time of the call
    /// alone.
    Async,
    /// The call returns at once, and before the caller waits it computes for as long as the operation takes alone; adds
    /// the column `overlap`: 0 if operation and computation ran one after the other, 1 if both ran at the same time.
    Overlap,
}

/// Where ranks run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Bind {
    /// Rank r runs on core r; if there are more ranks than cores, several share a core.
    Core,
    /// The kernel chooses the cores.
    None,
}

/// Output format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// Columns for people.
    Table,
    /// One JSON object.
    Json,
    /// Comma-separated values.
    Csv,
}

/// Parses a duration, such as `500ms`, `5s`, `2m`, `1h 30m`.
fn duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text).map_err(|_| NO_DURATION.to_owned())
}

/// Parses a whole number from 1.
fn number(text: &str) -> Result<NonZeroU32, String> {
    text.parse()
        .map_err(|_| format!("expected a whole number from 1 to {}", u32::MAX))
}

/// Parses a size: `8`, `64K`, `1.5M`.
fn parse_size(text: &str) -> Result<usize, String> {
    let split = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let number: f64 = number
        .parse()
        .map_err(|_| format!("{text:?} is not a size: give bytes, or a number with K, M or G"))?;
    let unit = match unit
        .trim()
        .to_ascii_uppercase()
        .trim_end_matches("IB")
        .trim_end_matches('B')
    {
        "" => 1.0,
        "K" => 1024.0,
        "M" => 1024.0 * 1024.0,
        "G" => 1024.0 * 1024.0 * 1024.0,
        other => return Err(format!("{other:?} is not a unit: give K, M or G")),
    };
    Ok((number * unit) as usize)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_help_of_the_program_and_of_tune_has_the_exit_codes() {
        let mut program = Args::command();
        let help = program.render_long_help().to_string();
        let (_, codes) = help.split_once("Exit codes:\n").expect(&help);
        let codes: Vec<&str> = codes
            .lines()
            .filter_map(|line| line.split_whitespace().next())
            .collect();
        assert_eq!(codes, ["0", "1", "2"]);
        let tune = program
            .find_subcommand_mut("tune")
            .expect("tune is a command");
        let help = tune.render_long_help().to_string();
        assert!(help.contains("Exit codes: 0 "), "{help}");
    }

    #[test]
    fn sizes_are_read_with_binary_units() {
        assert_eq!(parse_size("8"), Ok(8));
        assert_eq!(parse_size("64K"), Ok(65536));
        assert_eq!(parse_size("1.5MiB"), Ok(1_572_864));
        assert!(parse_size("many").is_err());
        assert!(parse_size("3Q").is_err());
    }

    #[test]
    fn wrong_numbers_and_durations_are_answered_by_what_to_write() {
        let answer = |option: &str, value: &str| {
            let line = ["rcomm-bench", "all_reduce", option, value];
            let wrong = Args::try_parse_from(line).expect_err("the value is wrong");
            wrong.to_string()
        };
        for (option, value) in [("-n", "0"), ("-n", "x"), ("--iterations", "0")] {
            let text = answer(option, value);
            assert!(text.contains("expected a whole number from 1"), "{text}");
        }
        let text = answer("--time", "5");
        assert!(text.contains(NO_DURATION), "{text}");
    }

    #[test]
    fn command_line_is_consistent() {
        use clap::CommandFactory;
        Args::command().debug_assert();
    }
}
