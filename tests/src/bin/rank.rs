//! One rank of a test job. The first argument says what the rank does:
//!
//! - the name of a [`Fault`]: it trains in two groups until the culprit's fault ends it. In `rank FAULT [STEP
//!   [PAUSE_MS]]`, the fault happens in this step, and each step loads data for this long;
//! - `shrink`: it sums in one group, and goes on when the culprit is killed;
//! - `grow`, `grow-and-hang`: it goes on with a process that replaces the culprit, or is that process;
//! - `grow-in-vain`: it waits in vain for such a process, and goes on without the culprit;
//! - `monitored-barrier`: it runs a monitored barrier that the culprit misses;
//! - `again`, `together`: it makes and shuts down one world after the other, or many at once.
#![allow(clippy::print_stderr)]

use rcomm::{Config, GroupOptions, MissingRanks, PrefixStore, ReduceOp, Store, World};
use rcomm_tests::fault::Fault;
use rcomm_tests::process::CULPRIT;
use rcomm_tests::usage::{Held, Usage, resident_memory_kib};
use rustix::process::{Signal, getpid, kill_process};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

const STEPS: i64 = 6;
const STEP_OF_FAULT: i64 = 3;

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let role = args.next().unwrap_or_default();
    exit_code(match role.as_str() {
        "shrink" => survive(),
        "grow" => grow(Then::End),
        "grow-and-hang" => grow(Then::Hang),
        "grow-in-vain" => grow(Then::Shrink),
        "monitored-barrier" => run_monitored_barrier(),
        "again" => make_worlds(),
        "together" => hold_worlds(),
        fault => run(fault, args),
    })
}

fn run(fault: &str, mut args: impl Iterator<Item = String>) -> Result<(), String> {
    let fault = fault.parse()?;
    let mut number = |default: i64| match args.next() {
        Some(text) => text.parse().map_err(|_| format!("{text:?} is no number")),
        None => Ok(default),
    };
    let (step, pause_ms) = (number(STEP_OF_FAULT)?, number(0)?);
    let pause = Duration::from_millis(pause_ms.unsigned_abs());
    train(fault, step, pause).map_err(|error| error.to_string())
}

/// Prints the error, if there is one; returns the exit code of the process.
fn exit_code(result: Result<(), String>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

/// Sums until the culprit is killed, and goes on without it.
fn survive() -> Result<(), String> {
    let text = |error: rcomm::Error| error.to_string();
    let config = Config::from_environment().map_err(text)?;
    let mut world = World::init(config).map_err(text)?;
    let mut last = [0.0f32; 64];
    for step in 0..STEPS {
        if world.rank() == CULPRIT && step == STEP_OF_FAULT {
            signal(Signal::KILL);
        }
        let mut numbers = [1.0f32; 64];
        if let Err(error) = world.group().all_reduce(&mut numbers, ReduceOp::Sum) {
            eprintln!("lost: {error}");
            let absent = world.group().find_absent(Duration::from_secs(5));
            let absent = absent.map_err(text)?;
            eprintln!("absent: {absent:?}");
            world.shrink(&absent).map_err(text)?;
            numbers = [1.0; 64];
            let again = world.group().all_reduce(&mut numbers, ReduceOp::Sum);
            again.map_err(text)?;
        }
        last = numbers;
    }
    let group = world.group();
    eprintln!("sum: {} of ranks {:?}", last[0], group.ranks());
    world.shutdown().map_err(text)
}

/// What a rank does after the culprit is gone.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Then {
    /// It makes its world anew with the process that has joined, and shuts down after two operations.
    End,
    /// It makes its world anew; then rank 1 does not come to the last operation.
    Hang,
    /// It tries in vain to make its world anew, since no process has joined, and goes on without the culprit.
    Shrink,
}

/// Runs barriers until the culprit is killed, and goes on with a process that joins in its place; or is that process.
fn grow(then: Then) -> Result<(), String> {
    let text = |error: rcomm::Error| error.to_string();
    let config = Config::from_environment().map_err(text)?;
    let joins = config.joins;
    let mut world = World::init(config).map_err(text)?;
    for step in 0..STEPS {
        if joins {
            break;
        }
        if world.rank() == CULPRIT && step == STEP_OF_FAULT {
            signal(Signal::KILL);
        }
        if let Err(error) = world.group().barrier() {
            eprintln!("lost: {error}");
            let absent = world.group().find_absent(Duration::from_secs(5));
            let absent = absent.map_err(text)?;
            if then == Then::Shrink {
                let config = Config {
                    init_timeout: Duration::from_secs(5),
                    ..world.config().clone()
                };
                let size = world.size();
                let grown = world.grow_with(&absent, size, World::builder(config));
                eprintln!("vain: {}", grown.err().ok_or("a process has joined")?);
                world.shrink(&absent).map_err(text)?;
            } else {
                world.grow(&absent, world.size()).map_err(text)?;
            }
            break;
        }
    }
    let attempt = world.place().attempt;
    world.step(i64::from(attempt));
    let mut numbers = [world.rank() + 1; 64];
    let summed = world.group().all_reduce(&mut numbers, ReduceOp::Sum);
    summed.map_err(text)?;
    let (sum, ranks) = (numbers[0], world.group().ranks().to_vec());
    eprintln!("sum: {sum} of ranks {ranks:?} in attempt {attempt}");
    if then == Then::Hang && world.rank() == 1 {
        world.phase("load data");
        loop {
            std::thread::park();
        }
    }
    world.group().barrier().map_err(text)?;
    world.shutdown().map_err(text)
}

/// How many worlds a rank makes.
const WORLDS: u64 = 24;
/// The world, counted from 0, after which the process's resources must no longer grow.
const SETTLED: u64 = 8;

/// Makes a world, works in it and shuts it down, again and again, and reports how the process's resources have changed
/// since the first worlds.
fn make_worlds() -> Result<(), String> {
    let text = |error: rcomm::Error| error.to_string();
    let config = Config::from_environment().map_err(text)?;
    let mut settled = None;
    for world in 0..WORLDS {
        make_world(&config, world).map_err(|error| format!("world {world}: {error}"))?;
        if world == SETTLED {
            settled = Some(Resources::at_rest());
        }
    }
    settled.unwrap_or_default().report_growth();
    Ok(())
}

/// How many worlds a rank holds at once.
const AT_ONCE: u64 = 50;
/// How often a rank makes so many worlds.
const ROUNDS: u64 = 3;

/// Makes all worlds at once, works in each and shuts them down, several times, and reports how the process's resources
/// have changed since the first time.
fn hold_worlds() -> Result<(), String> {
    let text = |error: rcomm::Error| error.to_string();
    let config = Config::from_environment().map_err(text)?;
    let limit = Duration::from_secs(60);
    let store: Arc<dyn Store> = Arc::new(World::connect_store(&config, limit).map_err(text)?);
    let mut settled = None;
    for round in 0..ROUNDS {
        // Each world has its own keys in the one store, since several worlds live at the same time.
        let make = |number: u64| {
            let store = PrefixStore::new(format!("{round}/{number}"), store.clone());
            World::builder(config.clone()).store(Arc::new(store)).init()
        };
        let worlds: Result<Vec<World>, _> = (0..AT_ONCE).map(make).collect();
        let worlds = worlds.map_err(text)?;
        for (world, number) in worlds.iter().zip(0..) {
            let mut sums = [number; 1_000];
            world
                .group()
                .all_reduce(&mut sums, ReduceOp::Sum)
                .map_err(text)?;
            assert_eq!(
                sums,
                [number * u64::from(world.size()); 1_000],
                "a sum of world {number} is wrong"
            );
        }
        for world in worlds {
            world.shutdown().map_err(text)?;
        }
        settled.get_or_insert_with(Resources::at_rest);
    }
    settled.unwrap_or_default().report_growth();
    Ok(())
}

fn make_world(config: &Config, world: u64) -> Result<(), rcomm::Error> {
    let made = World::init(config.clone())?;
    let all: u64 = (0..u64::from(made.size())).sum();
    let pair = made.rank() / 2 * 2;
    let pair = made.new_group(&[pair, pair + 1], &GroupOptions::named("pair"))?;
    for group in [made.group(), &pair] {
        let size = u64::from(group.size());
        let mut sums = [world; 10_000];
        group.all_reduce(&mut sums, ReduceOp::Sum)?;
        assert_eq!(
            sums,
            [world * size; 10_000],
            "a sum of world {world} is wrong"
        );
    }
    let mut ranks = [u64::from(made.rank())];
    made.group().all_reduce(&mut ranks, ReduceOp::Sum)?;
    assert_eq!(
        ranks,
        [all],
        "the sum of the ranks of world {world} is wrong"
    );
    made.shutdown()
}

/// The resources that a process holds.
#[derive(Default)]
struct Resources {
    held: Held,
    resident_kib: i64,
}

impl Resources {
    /// Counts the resources once the threads of the worlds have ended, after half a minute at the latest: a thread that
    /// waits for an answer of the store ends only when the answer comes.
    fn at_rest() -> Self {
        let deadline = Instant::now() + Duration::from_secs(30);
        while Usage::now().threads > 1 && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        // What a thread held is counted only now, since it may have given it up after a count and before its end.
        Self {
            held: Held::now(),
            resident_kib: count(resident_memory_kib()),
        }
    }

    /// Prints how the process's resources have grown since `self` was counted, and which kinds of descriptors it has
    /// more of.
    fn report_growth(&self) {
        let after = Self::at_rest();
        let descriptors = |held: &Held| count(held.fds.values().sum());
        for (kind, &number) in &after.held.fds {
            let before = self.held.fds.get(kind).copied().unwrap_or(0);
            if number > before {
                eprintln!("{kind}: {before} descriptors, later {number}");
            }
        }
        eprintln!(
            "{} descriptors, {} threads, {} KiB",
            descriptors(&after.held) - descriptors(&self.held),
            count(after.held.threads) - count(self.held.threads),
            after.resident_kib - self.resident_kib
        );
    }
}

fn count(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// Runs a monitored barrier that the killed culprit misses, and goes on in the same group, then without the culprit.
fn run_monitored_barrier() -> Result<(), String> {
    let text = |error: rcomm::Error| error.to_string();
    let config = Config::from_environment().map_err(text)?;
    let mut world = World::init(config).map_err(text)?;
    let rank = world.rank();
    if rank == CULPRIT {
        signal(Signal::KILL);
    }
    // The barrier's time-out counts from when the groups of all remaining ranks exist.
    let here = |rank: u32| format!("test/here/{rank}");
    world.store().set(&here(rank), b"1").map_err(text)?;
    let remaining = (0..world.size()).filter(|&rank| rank != CULPRIT);
    let remaining: Vec<String> = remaining.map(here).collect();
    let remaining: Vec<&str> = remaining.iter().map(String::as_str).collect();
    let patience = Duration::from_secs(60);
    world.store().wait(&remaining, patience).map_err(text)?;
    let brief = world.group().within(Duration::from_secs(2));
    let work = brief
        .monitored_barrier_async(MissingRanks::All)
        .map_err(text)?;
    let Err(error) = work.wait() else {
        return Err("no rank was missed".to_owned());
    };
    eprintln!("missed: {error}");
    let mut number = [rank];
    match rank {
        0 => world.group().send(&number, 1, 0).map_err(text)?,
        1 => world.group().recv(&mut number, 0, 0).map_err(text)?,
        _ => {}
    }
    eprintln!("number: {}", number[0]);
    world.shrink(&[CULPRIT]).map_err(text)?;
    world.group().barrier().map_err(text)?;
    world.shutdown().map_err(text)
}

/// Trains in two groups of two until the culprit's fault ends the job, or for three steps from `step_of_fault` on.
fn train(fault: Fault, step_of_fault: i64, pause: Duration) -> rcomm::Result<()> {
    let world = World::init(Config::from_environment()?)?;
    let rank = world.rank();
    let (tp_first, dp_first) = (rank / 2 * 2, rank % 2);
    let tp = world.new_group(&[tp_first, tp_first + 1], &GroupOptions::named("tp"))?;
    let dp = world.new_group(&[dp_first, dp_first + 2], &GroupOptions::named("dp"))?;
    for step in 0..step_of_fault + 3 {
        world.step(step);
        world.phase("load data");
        std::thread::sleep(pause);
        if rank == CULPRIT && step == step_of_fault {
            match fault {
                Fault::None => {}
                Fault::StopJoining => sleep_forever(),
                Fault::Kill => signal(Signal::KILL),
                Fault::Freeze => signal(Signal::STOP),
                Fault::StickInTeardown => {
                    let broken = rcomm::Error::new(
                        rcomm::ErrorKind::InvalidArgument,
                        "the data set has no more samples",
                    );
                    eprintln!("{broken}");
                    drop(world);
                    sleep_forever();
                }
                Fault::Leave => return world.shutdown(),
            }
        }
        let mut numbers = vec![1.0f32; 256];
        world.phase("forward");
        tp.all_reduce(&mut numbers, ReduceOp::Sum)?;
        world.phase("backward");
        let work = dp.all_reduce_async(numbers, ReduceOp::Sum)?;
        assert_eq!(work.wait()?, vec![4.0; 256]);
    }
    world.shutdown()
}

fn signal(signal: Signal) {
    // A signal to this process cannot fail.
    let _ = kill_process(getpid(), signal);
}

fn sleep_forever() -> ! {
    loop {
        std::thread::sleep(Duration::from_secs(1));
    }
}
