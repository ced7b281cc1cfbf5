//! Compares rcomm's collectives with those of MPI libraries and of gloo.
//!
//! `cargo run --release -p rcomm-tests --bin peers-collectives -- --ranks 2`, with `RCOMM_TEST_PYTHON` naming a Python
//! that has torch, for gloo through torch. It builds and starts the peers that are asked for and installed: ours over
//! shared memory or TCP, Open MPI, MPICH, gloo through torch, and gloo through a C++ program (`gloo.cc`), where gloo
//! can poll in place of sleeping. A peer that is missing is named and left out.
//!
//! All peers stay up, asleep on a socket. In each round the program wakes one peer after the other for a few
//! milliseconds of one operation at one size, with a probe of the machine before and after: the round trip of a cache
//! line between two cores. A virtual machine under load may be moved to other cores, which changes all measured times:
//! a round in which the probe changed is not counted. The program prints the medians over the rounds, and the median,
//! min and max of the ratio to the first peer within a round (above 1: the first peer is faster).

#![allow(clippy::print_stdout, clippy::print_stderr)]

mod peer;
mod probe;
mod rank;

use anyhow::{Result, ensure};
use clap::Parser;
use peer::{Peer, Times};
use rcomm_tests::statistics::median;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

#[derive(Parser)]
struct Arguments {
    /// Ranks of each job.
    #[arg(short = 'n', long, default_value_t = 2)]
    ranks: u32,
    /// Operations to measure, separated by commas. `fresh_all_reduce` and so on write to every cache line of the
    /// buffers before each call, as callers do who compute what they send; of the other peers only MPI libraries
    /// have them.
    #[arg(long, value_delimiter = ',', default_value = "all_reduce")]
    operations: Vec<String>,
    /// Sizes in bytes, separated by commas.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "8,4096,65536,1048576,16777216,67108864"
    )]
    sizes: Vec<usize>,
    /// Steady rounds to measure; at most four times as many rounds are run for them.
    #[arg(long, default_value_t = 9)]
    rounds: usize,
    /// Milliseconds of one measurement.
    #[arg(long, default_value_t = 5)]
    millis: u64,
    /// Seconds after which no further measurement begins.
    #[arg(long, default_value_t = 80)]
    seconds: u64,
    /// Counts only rounds whose probes take at most this many nanoseconds; waits for such a probe before each round.
    #[arg(long, default_value_t = f64::INFINITY)]
    near: f64,
    /// The peers, separated by commas; the others are compared with the first. Also available are rcomm-registered,
    /// which is ours with buffers that the group allocated, rcomm-tcp, and gloo-busy-ring, gloo-cpp and
    /// gloo-cpp-ring, which are other modes of gloo's C++ program. rcomm=PROGRAM, rcomm-tcp=PROGRAM and so on run
    /// another build of this program.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "rcomm,openmpi,mpich,gloo,gloo-busy"
    )]
    peers: Vec<String>,
    /// The port on which the measuring program listens. With it, the program runs as one of our ranks.
    #[arg(long, hide = true)]
    control: Option<u16>,
    /// Name of the peer that this rank belongs to.
    #[arg(long, hide = true, default_value = "rcomm")]
    name: String,
}

/// The largest ratio of two probes within a round that counts.
const MAX_PROBE_RATIO: f64 = 1.4;

/// The times of one peer in one round.
#[derive(Clone, Copy)]
struct Sample {
    times: Times,
    /// Round trips of a cache line before and after the measurement, in nanoseconds.
    probes: [f64; 2],
}

/// The largest number of times that a peer runs an operation in one measurement.
const MAX_COUNT: usize = 20_000;

/// How often an operation of `micros` microseconds fits into `millis` milliseconds, but at least four and at most
/// [`MAX_COUNT`] times.
fn times_within(millis: u64, micros: f64) -> usize {
    ((millis as f64 * 1e3 / micros.max(0.01)) as usize).clamp(4, MAX_COUNT)
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    if let Some(port) = arguments.control {
        return rank::serve(port, &arguments.name);
    }
    ensure!(
        arguments.rounds > 0,
        "--rounds is 0: there is nothing to take a median of"
    );
    let mut peers = Vec::new();
    for name in &arguments.peers {
        match Peer::start(name, arguments.ranks)? {
            Ok(peer) => peers.push(peer),
            Err(reason) => eprintln!("skipped: {name}: {reason}"),
        }
    }
    ensure!(
        !peers.is_empty(),
        "none of {:?} can be measured here",
        arguments.peers
    );
    let end = Instant::now() + Duration::from_secs(arguments.seconds);
    println!(
        "{} ranks; p50 in us, then the first peer's p99 or the ratio to the first peer's p50: median (min, max) of the \
         steady rounds",
        arguments.ranks
    );
    for operation in &arguments.operations {
        for &bytes in &arguments.sizes {
            if Instant::now() > end {
                println!("{operation} {bytes}: no time left");
                continue;
            }
            measure(&arguments, &mut peers, operation, bytes, end)?;
            if operation == "barrier" {
                break;
            }
        }
    }
    Ok(())
}

/// Warms the peer up, and returns how often the operation then fits into `millis` milliseconds. The first runs are
/// slower: they touch every page, and ranks that share cores take some milliseconds to run in step. `None` if the peer
/// does not have the operation.
fn warm_up(peer: &mut Peer, operation: &str, bytes: usize, millis: u64) -> Result<Option<usize>> {
    let mut count = 2;
    loop {
        let start = Instant::now();
        let Some(times) = peer.run(operation, bytes, count)? else {
            return Ok(None);
        };
        if start.elapsed() >= Duration::from_millis(4 * millis) || count == MAX_COUNT {
            return Ok(Some(times_within(millis, times.p50)));
        }
        count = (4 * count).min(MAX_COUNT);
    }
}

/// Measures an operation of one size on all peers that have it, and prints a line with the result.
fn measure(
    arguments: &Arguments,
    peers: &mut Vec<Peer>,
    operation: &str,
    bytes: usize,
    end: Instant,
) -> Result<()> {
    let mut counts = BTreeMap::new();
    for peer in &mut *peers {
        if let Some(count) = warm_up(peer, operation, bytes, arguments.millis)? {
            counts.insert(peer.name().to_owned(), count);
        }
    }
    let mut rounds: Vec<BTreeMap<String, Sample>> = Vec::new();
    let mut steady = 0;
    let mut before = probe::round_trip();
    while steady < arguments.rounds && rounds.len() < arguments.rounds * 4 && Instant::now() < end {
        if before > arguments.near {
            std::thread::sleep(Duration::from_millis(100));
            before = probe::round_trip();
            continue;
        }
        let mut round = BTreeMap::new();
        for peer in &mut *peers {
            let Some(&count) = counts.get(peer.name()) else {
                continue;
            };
            let times = peer.run(operation, bytes, count)?;
            let after = probe::round_trip();
            if let Some(times) = times {
                let probes = [before, after];
                round.insert(peer.name().to_owned(), Sample { times, probes });
            }
            before = after;
        }
        steady += usize::from(is_steady(&round, arguments.near));
        rounds.push(round);
    }
    let counted: Vec<_> = rounds
        .iter()
        .filter(|round| is_steady(round, arguments.near))
        .collect();
    let probes = counted.iter().flat_map(|round| round.values());
    let mut probes: Vec<f64> = probes.flat_map(|sample| sample.probes).collect();
    print!(
        "{operation:<15}{bytes:>10}  probe {:>5.0} ns, {} of {} rounds",
        median(&mut probes),
        counted.len(),
        rounds.len()
    );
    let p50 = |round: &BTreeMap<String, Sample>, name: &str| {
        let sample = round.get(name);
        sample.map(|sample| sample.times.p50)
    };
    let first = peers[0].name().to_owned();
    for peer in &*peers {
        let name = peer.name();
        let mut p50s: Vec<f64> = counted
            .iter()
            .filter_map(|round| p50(round, name))
            .collect();
        if p50s.is_empty() {
            print!(" | {name} -");
            continue;
        }
        print!(" | {name} {:.2}", median(&mut p50s));
        if name == first {
            let mut tail: Vec<f64> = counted
                .iter()
                .filter_map(|round| round.get(name).map(|sample| sample.times.p99))
                .collect();
            print!(" p99 {:.2}", median(&mut tail));
            continue;
        }
        let mut ratios: Vec<f64> = counted
            .iter()
            .filter_map(|round| Some(p50(round, name)? / p50(round, &first)?))
            .collect();
        let middle = median(&mut ratios);
        if let (Some(min), Some(max)) = (ratios.first(), ratios.last()) {
            print!(" {middle:.2} ({min:.2}, {max:.2})");
        }
    }
    println!();
    Ok(())
}

/// Whether the probes of a round differ by no more than [`MAX_PROBE_RATIO`] and take at most `near` nanoseconds.
fn is_steady(round: &BTreeMap<String, Sample>, near: f64) -> bool {
    let probes = round.values().flat_map(|sample| sample.probes);
    let (min, max) = probes.fold((f64::INFINITY, 0.0), |(min, max): (f64, f64), ns| {
        (min.min(ns), max.max(ns))
    });
    max <= (min * MAX_PROBE_RATIO).min(near)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(probes: [f64; 2]) -> BTreeMap<String, Sample> {
        let times = Times { p50: 1.0, p99: 1.0 };
        BTreeMap::from([("one".to_owned(), Sample { times, probes })])
    }

    #[test]
    fn a_round_is_not_steady_if_its_probes_differ_or_are_slower_than_near() {
        assert!(is_steady(&round([100.0, 130.0]), f64::INFINITY));
        assert!(!is_steady(&round([100.0, 400.0]), f64::INFINITY));
        assert!(!is_steady(&round([400.0, 401.0]), 200.0));
    }

    #[test]
    fn times_within_is_what_fits_but_at_least_4_and_at_most_20000() {
        assert_eq!(times_within(5, 1.0), 5000);
        assert_eq!(times_within(5, 1e6), 4);
        assert_eq!(times_within(5, 0.0), 20_000);
    }
}
