//! Measures what TLS costs: all_reduce over TCP and requests to the store, without and with TLS, in turn.
//!
//! The two ranks are threads of this process. They use the loopback interface, which is faster than any network:
//! between hosts the share of TLS is smaller. Each row has, for plain TCP and for TLS, the median and the least of the
//! rounds' means, and then the two ratios of TLS to plain TCP. Rounds with and without TLS alternate, so that other
//! load affects both.

#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs)]

#[path = "../../recorder/tests/certificates/mod.rs"]
mod certificates;

use certificates::Ca;
use rcomm::config::{EndpointChoice, RingDir, TransportChoice};
use rcomm::{Config, ReduceOp, Rendezvous, Secret, TlsFiles, World};
use std::net::TcpListener;
use std::sync::Barrier;
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(120);
const ROUNDS: usize = 15;
/// About how long a round without or with TLS takes; the number of its repetitions is chosen accordingly.
const ROUND: Duration = Duration::from_millis(60);
/// The sizes of an all_reduce, in bytes.
const SIZES: [usize; 4] = [8, 64 << 10, 1 << 20, 16 << 20];
/// The requests to the store.
const REQUESTS: [&str; 2] = ["set", "get"];
/// The sizes of the values in the store, in bytes.
const VALUES: [usize; 2] = [64, 64 << 10];

/// A rank's worlds: without TLS and with it.
fn worlds(rank: u32, ports: [u16; 2], tls: &TlsFiles) -> [World; 2] {
    [None, Some(tls.clone())].map(|tls| {
        let port = ports[usize::from(tls.is_some())];
        let config = Config {
            rendezvous: Some(Rendezvous::explicit(rank, 2, "127.0.0.1", port).unwrap()),
            transport: TransportChoice::Tcp,
            secret: Some(Secret::from_text("of this benchmark")),
            tls,
            ring_dir: RingDir::Memory,
            endpoint: EndpointChoice::Off,
            timeout: LONG,
            ..Config::default()
        };
        World::init(config).unwrap()
    })
}

/// The mean time of `work` over this many repetitions.
fn mean(repetitions: usize, mut work: impl FnMut()) -> Duration {
    let start = Instant::now();
    for _ in 0..repetitions {
        work();
    }
    start.elapsed() / u32::try_from(repetitions).unwrap()
}

/// The number of repetitions for one round, if a repetition takes `once`.
fn repetitions(once: Duration) -> usize {
    let count = ROUND.as_nanos() / once.as_nanos().max(1);
    usize::try_from(count).unwrap().clamp(3, 20_000)
}

/// Prints a row of the table. `rounds` are the mean times of the rounds without TLS and of those with it.
fn print(name: &str, mut rounds: [Vec<Duration>; 2]) {
    let numbers = rounds.each_mut().map(|rounds| {
        rounds.sort();
        let micros = |index: usize| rounds[index].as_secs_f64() * 1e6;
        (micros(rounds.len() / 2), micros(0))
    });
    let [(plain, plain_least), (tls, tls_least)] = numbers;
    println!(
        "{name:<24} {plain:>10.1} {plain_least:>10.1} {tls:>10.1} {tls_least:>10.1} {:>7.2} {:>7.2}",
        tls / plain,
        tls_least / plain_least
    );
}

/// Measures all_reduce, on both ranks at the same time. Returns the mean times of the rounds, without TLS and with it.
fn all_reduce(worlds: &[World; 2], together: &Barrier, size: usize) -> [Vec<Duration>; 2] {
    let mut numbers = vec![1.0_f32; size / 4];
    let mut reduce = |world: &World| {
        world
            .group()
            .all_reduce(&mut numbers, ReduceOp::Max)
            .unwrap();
    };
    // Both ranks must repeat the operation the same number of times, so the number follows from the size alone, by an
    // estimate of 1 GB/s and 30 µs for each repetition.
    let once = Duration::from_micros(30) + Duration::from_nanos(size as u64);
    let count = repetitions(once);
    for world in worlds {
        reduce(world);
    }
    let mut rounds = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        for (world, rounds) in worlds.iter().zip(&mut rounds) {
            together.wait();
            rounds.push(mean(count, || reduce(world)));
        }
    }
    rounds
}

/// Measures requests to the store for a value of `size` bytes. Returns the mean times of the rounds, without TLS and
/// with it.
fn request(worlds: &[World; 2], kind: &str, size: usize) -> [Vec<Duration>; 2] {
    let value = vec![7; size];
    let run = |world: &World| match kind {
        "set" => world.store().set("bench", &value).unwrap(),
        _ => drop(world.store().get("bench", LONG).unwrap()),
    };
    let count = worlds.each_ref().map(|world| {
        world.store().set("bench", &value).unwrap();
        repetitions(mean(10, || run(world)))
    });
    let mut rounds = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        for ((rounds, world), count) in rounds.iter_mut().zip(worlds).zip(count) {
            rounds.push(mean(count, || run(world)));
        }
    }
    rounds
}

fn main() {
    let folder = tempfile::tempdir().unwrap();
    let tls = Ca::new().issue(folder.path(), "rank");
    let ports = [0; 2].map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
    let ports = ports.map(|listener| listener.local_addr().unwrap().port());
    let together = Barrier::new(2);
    println!(
        "{:<24} {:>10} {:>10} {:>10} {:>10} {:>7} {:>7}",
        "operation, times in µs", "plain", "least", "TLS", "least", "ratio", "least"
    );
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let (tls, together) = (&tls, &together);
            scope.spawn(move || {
                let worlds = worlds(rank, ports, tls);
                for size in SIZES {
                    let rounds = all_reduce(&worlds, together, size);
                    if rank == 0 {
                        print(&format!("all_reduce of {size} bytes"), rounds);
                    }
                }
                if rank == 0 {
                    for kind in REQUESTS {
                        for size in VALUES {
                            print(
                                &format!("store {kind} of {size} bytes"),
                                request(&worlds, kind, size),
                            );
                        }
                    }
                }
                together.wait();
                for world in worlds {
                    world.shutdown().unwrap();
                }
            });
        }
    });
}
