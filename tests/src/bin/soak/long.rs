//! Runs one job that lives through many rounds, and judges what its ranks use meanwhile.

use crate::draw::Plan;
use crate::{ENDING, Limits, RankReport, Ranks, Sample, Soak, rank};
use anyhow::{Context, bail, ensure};
use rcomm::{Config, World};
use rcomm_tests::usage::{Held, Usage, peak_memory_kib, resident_memory_kib};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// The longest time between two samples.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(60);
/// With fewer samples, the resources of a rank are not judged.
const FEWEST_SAMPLES: usize = 16;
/// How many more descriptors of a kind, and threads, are no growth: a connection or a thread may be ending at the time
/// of a sample.
const ENDING_NOW: u64 = 1;
/// Descriptors that a rank opens for each peer when it first needs them, which may be at any time, and then keeps: the
/// connections for collectives and messages of the world's group, one by which each of the two notices the other's end,
/// and a handle of the peer's process. If one round in twenty leaves a descriptor behind, a thousand rounds leave more.
const FIRST_USE: [(&str, u64); 2] = [("socket", 4), ("anon_inode:[pidfd]", 1)];
/// Growth of memory that is allowed, because an allocator does not keep the same amount at all times: a share of what
/// was used before, whose divisor is the first number, or the second number in KiB if that is more.
const MEMORY_NOISE: (u64, u64) = (20, 2 << 10);

/// One of the numbers of a sample.
type Number = fn(&Sample) -> u64;

/// Runs the job; returns whether it was right.
pub(crate) fn soak(args: &Soak) -> anyhow::Result<bool> {
    let began = Instant::now();
    let seconds = args.minutes * 60.0;
    let time = Duration::try_from_secs_f64(seconds);
    let time = time.context("--minutes is not a valid number of minutes")?;
    let plan = Plan::of_long_job(args.seed, args.round);
    let limits = Limits {
        timeout: Duration::from_secs(args.timeout),
        slack: Duration::from_secs(args.slack),
    };
    let mut ranks = Ranks::start(&plan, &limits, "long-rank", &[seconds.to_string()])?;
    let reports = ranks.wait(&plan, time + ENDING)?;
    let (mut checked, mut rounds, mut is_right) = (0, 0, true);
    for (rank, report) in &reports {
        checked += report.checked;
        rounds = rounds.max(report.rounds);
        match judge(report, u64::from(plan.ranks - 1)) {
            Ok(uses) => println!("rank {rank}: {uses}"),
            Err(error) => {
                is_right = false;
                println!("rank {rank}: WRONG: {error:#}");
            }
        }
    }
    let again = match is_right {
        true => String::new(),
        false => format!(
            "; again: soak --long --seed {} --round {} --minutes {} --timeout {} --slack {}",
            args.seed, args.round, args.minutes, args.timeout, args.slack
        ),
    };
    println!(
        "seed {}, one job of {} ranks over {}: {rounds} rounds in {:.0} s, {checked} operations checked{again}",
        args.seed,
        plan.ranks,
        plan.transport,
        began.elapsed().as_secs_f64(),
    );
    Ok(is_right)
}

/// What a rank used, as text.
///
/// # Errors
/// A wrong result, an error, a leak, or a resource of which the rank used more at the end than at the beginning.
fn judge(report: &RankReport, peers: u64) -> anyhow::Result<String> {
    ensure!(report.wrong.is_empty(), "{}", report.wrong.join("; "));
    if let Some((error, _)) = &report.error {
        bail!("{error}");
    }
    let (fds, threads) = report.left;
    ensure!(
        fds <= 0 && threads <= 0,
        "at the end it has {fds} more descriptors and {threads} more threads than at the start"
    );
    let samples = &report.samples;
    let (first, last) = match samples.len() {
        0 => return Ok("no sample".to_owned()),
        count if count < FEWEST_SAMPLES => (&samples[..1], &samples[count - 1..]),
        count => (
            &samples[count / 4..count / 2],
            &samples[count - count / 4..],
        ),
    };
    let mut texts = vec![format!("{} samples", samples.len())];
    let (share, least) = MEMORY_NOISE;
    let memory = |sample: &Sample| sample.memory_kib;
    let fds = |sample: &Sample| sample.held.fds.values().sum();
    let threads = |sample: &Sample| sample.held.threads;
    let uses: [(&str, Number); 3] = [
        ("KiB of memory", memory),
        ("descriptors", fds),
        ("threads", threads),
    ];
    for (name, number) in uses {
        let (before, after) = (median(first, number), median(last, number));
        let noise = match name {
            "KiB of memory" => least.max(before / share),
            "descriptors" => {
                let per_peer: u64 = FIRST_USE.iter().map(|(_, count)| count).sum();
                ENDING_NOW + per_peer * peers
            }
            _ => ENDING_NOW,
        };
        let text = format!("{before} to {after} {name}");
        let is_judged = samples.len() >= FEWEST_SAMPLES;
        ensure!(!is_judged || after <= before + noise, "{text}: it grows");
        texts.push(text);
    }
    if samples.len() >= FEWEST_SAMPLES {
        let grown = grown_descriptors(first, last, peers);
        ensure!(grown.is_empty(), "{}", grown.join(", "));
    } else {
        texts.push(format!("fewer than {FEWEST_SAMPLES} samples: not judged"));
    }
    Ok(texts.join(", "))
}

/// The kinds of descriptors of which there are more than there may be, as text. `peers`: the number of other ranks.
fn grown_descriptors(first: &[Sample], last: &[Sample], peers: u64) -> Vec<String> {
    let kinds: BTreeSet<&String> = last
        .iter()
        .flat_map(|sample| sample.held.fds.keys())
        .collect();
    let grown = kinds.into_iter().filter_map(|kind| {
        let count = |sample: &Sample| sample.held.fds.get(kind).copied().unwrap_or(0);
        let (before, after) = (median(first, count), median(last, count));
        let at_first_use = FIRST_USE.iter().find(|(name, _)| name == kind);
        let allowed = ENDING_NOW + at_first_use.map_or(0, |(_, per_peer)| per_peer * peers);
        (after > before + allowed).then(|| format!("{before} to {after} of {kind}: it grows"))
    });
    grown.collect()
}

fn median(samples: &[Sample], number: impl Fn(&Sample) -> u64) -> u64 {
    let mut numbers: Vec<u64> = samples.iter().map(number).collect();
    numbers.sort_unstable();
    numbers[numbers.len() / 2]
}

/// Works as the rank that the environment names: makes rounds until the time is over, then prints its report.
///
/// # Errors
/// The environment names no rank, or the rank's world cannot be made or shut down.
#[expect(
    clippy::print_stdout,
    reason = "the report goes to the program that started this one"
)]
pub(crate) fn rank(seed: u64, first: u64, seconds: f64) -> anyhow::Result<()> {
    let before = Usage::now();
    let world = World::init(Config::from_environment()?)?;
    let mut report = RankReport::default();
    match rounds(seed, first, seconds, &world, &mut report) {
        Ok(()) => world.shutdown()?,
        Err(error) => {
            report.error = Some((error.to_string(), error.ranks().to_vec()));
            drop(world);
        }
    }
    let Usage { fds, threads } = before.left(rank::ENDING);
    report.left = (fds, threads);
    report.memory_kib = peak_memory_kib();
    println!("{}", serde_json::to_string(&report)?);
    Ok(())
}

fn rounds(
    seed: u64,
    first: u64,
    seconds: f64,
    world: &World,
    report: &mut RankReport,
) -> rcomm::Result<()> {
    let began = Instant::now();
    // A short job has as many samples as it needs to be judged.
    let interval = SAMPLE_INTERVAL.as_secs_f64().min(seconds / 24.0);
    for round in first.. {
        rank::work(&Plan::of_long_job(seed, round), world, report)?;
        report.rounds += 1;
        let passed = began.elapsed().as_secs_f64();
        if passed >= interval * (report.samples.len() + 1) as f64 {
            report.samples.push(Sample {
                round,
                memory_kib: resident_memory_kib(),
                held: Held::now(),
            });
        }
        // The clocks of two ranks differ: rank 0 decides whether another round begins.
        let mut goes_on = [u32::from(passed < seconds)];
        world.group().broadcast(&mut goes_on, 0)?;
        if goes_on == [0] {
            break;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A number in each round.
    type InRound = fn(u64) -> u64;

    fn report(memory_kib: impl Fn(u64) -> u64, fds: &[(&str, InRound)]) -> RankReport {
        let sample = |round| Sample {
            round,
            memory_kib: memory_kib(round),
            held: Held {
                fds: fds
                    .iter()
                    .map(|(kind, count)| ((*kind).to_owned(), count(round)))
                    .collect(),
                threads: 5,
            },
        };
        RankReport {
            samples: (0..60).map(sample).collect(),
            ..RankReport::default()
        }
    }

    #[test]
    fn growth_within_the_first_quarter_is_allowed() {
        let uses = judge(
            &report(
                |round| 20_000 + 1_000 * round.min(10),
                &[("socket", |round| 7 + round.min(10)), ("pipe", |_| 2)],
            ),
            3,
        );
        assert_eq!(
            uses.unwrap_or_default(),
            "60 samples, 30000 to 30000 KiB of memory, 19 to 19 descriptors, 5 to 5 threads"
        );
    }

    #[test]
    fn slow_growth_is_found() {
        assert!(judge(&report(|round| 30_000 + 100 * round, &[]), 3).is_err());
        let slow: InRound = |round| 9 + round / 10;
        for kind in ["pipe", "anon_inode:[eventfd]"] {
            let leak = judge(&report(|_| 30_000, &[(kind, slow)]), 3);
            let expected = format!("11 to 14 of {kind}: it grows");
            assert_eq!(leak.unwrap_err().to_string(), expected);
        }
        let leak = judge(&report(|_| 30_000, &[("socket", |round| 9 + round)]), 3);
        assert!(leak.is_err());
        // Each round leaves a file of its own open.
        let mut files = report(|_| 30_000, &[]);
        for sample in &mut files.samples {
            let opened = (0..=sample.round).map(|round| (format!("/tmp/{round}"), 1));
            sample.held.fds = opened.collect();
        }
        assert!(judge(&files, 3).is_err());
    }

    #[test]
    fn a_connection_for_each_peer_may_be_opened_at_any_time() {
        let late: InRound = |round| 9 + 3 * round.saturating_sub(40).min(3);
        assert!(judge(&report(|_| 30_000, &[("socket", late)]), 3).is_ok());
        assert!(judge(&report(|_| 30_000, &[("socket", late)]), 1).is_err());
    }
}
