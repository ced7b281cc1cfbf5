//! Our collectives compared with those of MPI libraries and of gloo: the ratio, measured fairly.
//!
//! `cargo run --release -p rcomm-tests --bin peers-collectives -- --ranks 2`, with `RCOMM_TEST_PYTHON`
//! naming a Python that has torch. It builds and starts the peers that are installed: ours over shared memory
//! and over TCP, Open MPI, MPICH, gloo through torch, and gloo through a C++ program (`gloo.cc`), where it can
//! poll in place of sleeping. A peer that is missing is named and left out.
//!
//! All of them stay up, asleep on a socket; the program wakes one after the other for a few milliseconds
//! of one operation at one size, round after round, with a probe of the machine before and after: the
//! round trip of a cache line between two cores. A virtual machine under load may be moved to other cores,
//! which changes every time: a round in which the probe changed is not counted. The program prints the medians
//! over the rounds and the median, least and greatest ratio within a round (above 1: ours is faster).

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
    /// What is measured, with commas.
    #[arg(long, value_delimiter = ',', default_value = "all_reduce")]
    operations: Vec<String>,
    /// At which sizes, in bytes, with commas.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "8,4096,65536,1048576,16777216,67108864"
    )]
    sizes: Vec<usize>,
    /// Rounds to be counted, at least.
    #[arg(long, default_value_t = 9)]
    rounds: usize,
    /// Milliseconds of one measurement.
    #[arg(long, default_value_t = 5)]
    millis: u64,
    /// Seconds after which no further measurement begins.
    #[arg(long, default_value_t = 80)]
    seconds: u64,
    /// Counts only rounds whose probes are below so many nanoseconds, and waits for such a time.
    #[arg(long, default_value_t = f64::INFINITY)]
    near: f64,
    /// The peers, with commas; the others are compared with the first. Also available are rcomm-registered,
    /// which is ours with buffers that the group allocated, rcomm-tcp, and gloo-busy-ring, gloo-cpp and
    /// gloo-cpp-ring, which are other ways of gloo's C++; rcomm=PROGRAM and the like are other builds of this
    /// program.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "rcomm,openmpi,mpich,gloo,gloo-busy"
    )]
    peers: Vec<String>,
    /// Be one of our ranks: where the program listens.
    #[arg(long, hide = true)]
    control: Option<u16>,
    /// By which name.
    #[arg(long, hide = true, default_value = "rcomm")]
    name: String,
}

/// The largest ratio of two probes within a round.
const STEADY: f64 = 1.4;

/// The times of one peer in one round.
#[derive(Clone, Copy)]
struct Sample {
    times: Times,
    /// Round trips of a cache line before and after, in nanoseconds.
    probes: [f64; 2],
}

/// The most often that a peer is asked for an operation at a time.
const MOST_TIMES: usize = 20_000;

/// How often an operation fits into the time.
fn times_within(millis: u64, micros: f64) -> usize {
    ((millis as f64 * 1e3 / micros.max(0.01)) as usize).clamp(4, MOST_TIMES)
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
            Err(why) => eprintln!("skipped: {name}: {why}"),
        }
    }
    ensure!(
        !peers.is_empty(),
        "none of {:?} can be measured here",
        arguments.peers
    );
    let end = Instant::now() + Duration::from_secs(arguments.seconds);
    println!(
        "{} ranks; p50 in us, then how many times the first's it is: median (least, greatest) of the \
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

/// How often the operation fits into the time, once it is as fast as it gets: the first runs touch every
/// page, and ranks that share cores take some milliseconds to fall into step. None if the peer does not have
/// it.
fn settle(peer: &mut Peer, operation: &str, bytes: usize, millis: u64) -> Result<Option<usize>> {
    let mut count = 2;
    loop {
        let begun = Instant::now();
        let Some(times) = peer.run(operation, bytes, count)? else {
            return Ok(None);
        };
        if begun.elapsed() >= Duration::from_millis(4 * millis) || count == MOST_TIMES {
            return Ok(Some(times_within(millis, times.p50)));
        }
        count = (4 * count).min(MOST_TIMES);
    }
}

fn measure(
    arguments: &Arguments,
    peers: &mut Vec<Peer>,
    operation: &str,
    bytes: usize,
    end: Instant,
) -> Result<()> {
    let mut counts = BTreeMap::new();
    for peer in &mut *peers {
        if let Some(count) = settle(peer, operation, bytes, arguments.millis)? {
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
    let p50 = |round: &BTreeMap<String, Sample>, name: &str| round.get(name).map(|s| s.times.p50);
    let first = peers[0].name().to_owned();
    for peer in &*peers {
        let name = peer.name();
        let mut own: Vec<f64> = counted
            .iter()
            .filter_map(|round| p50(round, name))
            .collect();
        if own.is_empty() {
            print!(" | {name} -");
            continue;
        }
        print!(" | {name} {:.2}", median(&mut own));
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
        if let (Some(least), Some(greatest)) = (ratios.first(), ratios.last()) {
            print!(" {middle:.2} ({least:.2}, {greatest:.2})");
        }
    }
    println!();
    Ok(())
}

/// Whether the machine stayed as it was for a whole round, its cores this near to each other.
fn is_steady(round: &BTreeMap<String, Sample>, near: f64) -> bool {
    let probes = round.values().flat_map(|sample| sample.probes);
    let (least, greatest) = probes
        .fold((f64::INFINITY, 0.0), |(least, greatest): (f64, f64), ns| {
            (least.min(ns), greatest.max(ns))
        });
    greatest <= (least * STEADY).min(near)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(probes: [f64; 2]) -> BTreeMap<String, Sample> {
        let times = Times { p50: 1.0, p99: 1.0 };
        BTreeMap::from([("one".to_owned(), Sample { times, probes })])
    }

    #[test]
    fn a_round_in_which_the_machine_moved_is_not_steady() {
        assert!(is_steady(&round([100.0, 130.0]), f64::INFINITY));
        assert!(!is_steady(&round([100.0, 400.0]), f64::INFINITY));
        assert!(!is_steady(&round([400.0, 401.0]), 200.0));
    }

    #[test]
    fn times_are_as_many_as_fit_and_at_least_a_few() {
        assert_eq!(times_within(5, 1.0), 5000);
        assert_eq!(times_within(5, 1e6), 4);
        assert_eq!(times_within(5, 0.0), 20_000);
    }
}
