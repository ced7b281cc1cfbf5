//! Finds the best algorithm for each operation on this machine: each algorithm is measured at every size, in
//! turn.
//!
//! Each measurement is another run of this program, with a single algorithm in `RCOMM_TUNING`. The topology `sockets`
//! is measured with `RCOMM_TRANSPORT=tcp`, the others with `shm`; for the topology `hosts`, the ranks of this machine
//! get two host ids.

use super::NAME;
use super::cli::TuneArgs;
use crate::same_program;
use anyhow::{Context, bail, ensure};
use rcomm::tuning::{Algorithm, Choice, Pattern, Topology};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::num::NonZeroU32;
use std::path::Path;
use std::process::Stdio;

/// The output of `rcomm-bench`, reduced to the fields needed here.
#[derive(Deserialize)]
struct BenchOutput {
    rows: Vec<MeasuredRow>,
}

/// One row of the output.
#[derive(Deserialize)]
struct MeasuredRow {
    op: String,
    bytes: usize,
    p50_us: f64,
}

/// The best median time of a call in microseconds, by size in bytes.
type Times = BTreeMap<usize, f64>;

/// Measures and writes a table, or prints the table in use.
pub(crate) fn run(args: &TuneArgs) -> anyhow::Result<()> {
    let config = rcomm::Config::from_environment()?;
    if args.print {
        write!(std::io::stdout().lock(), "{}", config.tuning)?;
        return Ok(());
    }
    ensure!(
        args.min_bytes <= args.max_bytes,
        "--min-bytes {} is larger than --max-bytes {}",
        args.min_bytes,
        args.max_bytes
    );
    // The file is opened before minutes of measuring, which would be in vain if the table could not be written.
    let mut output = args.output.as_deref().map(writable).transpose()?;
    let mut table = String::from(
        "# Written by rcomm-bench tune. A line applies to at most this many ranks and bytes.\n\
         # operation     topology  ranks  bytes  algorithm\n",
    );
    let mut ranks = args.ranks.clone();
    ranks.sort_unstable();
    for &topology in &args.topologies {
        for &ranks in &ranks {
            if topology == Topology::Hosts && ranks.get() < 3 {
                // Two hosts with one rank each share no memory, as in the topology `sockets`.
                continue;
            }
            for choice in measure(args, topology, ranks)? {
                table.push_str(&format!("{choice}\n"));
            }
        }
    }
    match (&args.output, &mut output) {
        (Some(path), Some(file)) => {
            replace(file, &table).with_context(|| format!("failed to write {}", path.display()))?
        }
        _ => std::io::stdout().lock().write_all(table.as_bytes())?,
    }
    Ok(())
}

/// Opens the file at `path` for writing, and keeps the file's content.
fn writable(path: &Path) -> anyhow::Result<File> {
    let mut options = File::options();
    let file = options.create(true).append(true).open(path);
    file.with_context(|| format!("failed to write {}", path.display()))
}

/// Replaces the content of a file with `table`. What is not a regular file, such as a pipe, has no length to set.
fn replace(file: &mut File, table: &str) -> io::Result<()> {
    if file.metadata()?.is_file() {
        file.set_len(0)?;
    }
    file.write_all(table.as_bytes())
}

/// The best choices for this number of ranks, operation by operation.
fn measure(args: &TuneArgs, topology: Topology, ranks: NonZeroU32) -> anyhow::Result<Vec<Choice>> {
    let patterns = Pattern::ALL.iter().copied();
    let patterns = patterns.filter(|&pattern| Algorithm::of(pattern, topology).len() > 1);
    let mut choices = Vec::new();
    for pattern in patterns {
        let algorithms = Algorithm::of(pattern, topology).iter().copied();
        let algorithms: Vec<_> = algorithms
            .filter(|algorithm| algorithm.allows_ranks(ranks.get() as usize))
            .collect();
        let mut times = vec![Times::new(); algorithms.len()];
        for _ in 0..args.rounds.get() {
            for (&algorithm, times) in algorithms.iter().zip(&mut times) {
                for row in time(args, pattern, topology, ranks, algorithm)? {
                    let best = times.entry(row.bytes).or_insert(f64::INFINITY);
                    *best = best.min(row.p50_us);
                }
            }
        }
        for (index, bytes) in cut(&times) {
            choices.push(Choice {
                pattern,
                topology,
                ranks: Some(ranks.get() as usize),
                bytes,
                algorithm: algorithms[index],
            });
        }
    }
    Ok(choices)
}

/// Measures one algorithm at all sizes.
fn time(
    args: &TuneArgs,
    pattern: Pattern,
    topology: Topology,
    ranks: NonZeroU32,
    algorithm: Algorithm,
) -> anyhow::Result<Vec<MeasuredRow>> {
    let mut command = same_program::command(NAME)?;
    command
        .arg(pattern.name())
        .args(["--format", "json", "--ranks", &ranks.to_string()])
        .args(["--min-bytes", &args.min_bytes.to_string()])
        .args(["--max-bytes", &args.max_bytes.to_string()])
        .args(["--time", &format!("{}us", args.time.as_micros())])
        .env(
            "RCOMM_TUNING",
            format!("{pattern} {topology} any any {algorithm}"),
        )
        .stdin(Stdio::null())
        .stderr(Stdio::inherit());
    if algorithm == Algorithm::Direct {
        command.arg("--registered");
    }
    match topology {
        Topology::Sockets => command.env("RCOMM_TRANSPORT", "tcp"),
        Topology::Hosts => command.env(super::ranks::HOSTS, "2"),
        _ => command.env("RCOMM_TRANSPORT", "shm"),
    };
    let measurement = || format!("{pattern} over {topology} by {algorithm} among {ranks} ranks");
    let output = command
        .output()
        .with_context(|| format!("failed to measure {}", measurement()))?;
    if !output.status.success() {
        bail!("failed to measure {}: {}", measurement(), output.status);
    }
    let parsed: BenchOutput = serde_json::from_slice(&output.stdout)
        .with_context(|| format!("failed to read the times of {}", measurement()))?;
    let rows = parsed.rows.into_iter();
    Ok(rows.filter(|row| row.op == pattern.name()).collect())
}

/// Cuts the sizes into ranges, at most one for each algorithm and in the order of the algorithms. The cuts minimize the
/// geometric mean, over all sizes, of the time at a size divided by the best time at that size.
///
/// Returns each algorithm that has a range, with the last size of the range; the last range has no end (`None`).
fn cut(times: &[Times]) -> Vec<(usize, Option<usize>)> {
    let sizes: Vec<usize> = times[0].keys().copied().collect();
    let cost = |algorithm: usize, size: usize| {
        let best = times
            .iter()
            .map(|times| times[&size])
            .fold(f64::INFINITY, f64::min);
        (times[algorithm][&size] / best).ln()
    };
    // For each algorithm: the minimum cost of the sizes so far if the last of them is assigned to the algorithm,
    // and the assignment of each size.
    let mut min_costs: Vec<(f64, Vec<usize>)> = vec![(0.0, Vec::new()); times.len()];
    for &size in &sizes {
        let before = min_costs.clone();
        for (algorithm, (sum, assignment)) in min_costs.iter_mut().enumerate() {
            let reachable = before[..=algorithm].iter();
            let (cheapest, path) = reachable
                .min_by(|one, other| one.0.total_cmp(&other.0))
                .cloned()
                .unwrap_or_default();
            *sum = cheapest + cost(algorithm, size);
            *assignment = path;
            assignment.push(algorithm);
        }
    }
    let best = min_costs
        .into_iter()
        .min_by(|one, other| one.0.total_cmp(&other.0));
    let assignment = best.map(|(_, assignment)| assignment).unwrap_or_default();
    let mut cuts: Vec<(usize, Option<usize>)> = Vec::new();
    for (&algorithm, &size) in assignment.iter().zip(&sizes) {
        match cuts.last_mut() {
            Some((last, max_bytes)) if *last == algorithm => *max_bytes = Some(size),
            _ => cuts.push((algorithm, Some(size))),
        }
    }
    if let Some((_, max_bytes)) = cuts.last_mut() {
        *max_bytes = None;
    }
    cuts
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::fd::OwnedFd;

    /// Returns these times, for the sizes 1, 2, 4 and so on.
    fn times(values: &[f64]) -> Times {
        let sizes = (0..).map(|exponent| 1 << exponent);
        sizes.zip(values.iter().copied()).collect()
    }

    #[test]
    fn a_table_is_written_to_a_file_in_place_of_its_text_and_to_a_pipe() {
        let path = std::env::temp_dir().join(format!("rcomm-tune-{}", std::process::id()));
        std::fs::write(&path, "an older and longer table").unwrap();
        replace(&mut writable(&path).unwrap(), "a table").unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "a table");
        std::fs::remove_file(&path).unwrap();
        let (mut reader, writer) = io::pipe().unwrap();
        replace(&mut File::from(OwnedFd::from(writer)), "a table").unwrap();
        let mut text = String::new();
        reader.read_to_string(&mut text).unwrap();
        assert_eq!(text, "a table");
    }

    #[test]
    fn sizes_are_cut_where_another_algorithm_becomes_better() {
        let small = times(&[1.0, 1.0, 4.0, 8.0]);
        let large = times(&[2.0, 2.0, 2.0, 2.0]);
        assert_eq!(cut(&[small, large]), [(0, Some(2)), (1, None)]);
    }

    #[test]
    fn a_single_disturbed_size_makes_no_cut() {
        let small = times(&[1.0, 1.1, 1.0, 4.0]);
        let large = times(&[2.0, 1.0, 2.0, 2.0]);
        assert_eq!(cut(&[small, large]), [(0, Some(4)), (1, None)]);
    }

    #[test]
    fn an_algorithm_that_is_never_better_gets_no_range() {
        let one = times(&[1.0, 2.0]);
        let never = times(&[3.0, 3.0]);
        let other = times(&[2.0, 1.0]);
        assert_eq!(
            cut(&[one.clone(), never.clone(), other]),
            [(0, Some(1)), (2, None)]
        );
        assert_eq!(cut(&[one, never]), [(0, None)]);
    }
}
