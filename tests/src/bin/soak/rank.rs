//! Works as one rank of a round.

use crate::draw::{Act, Draw, LauncherEnd, LauncherFault, Plan};
use crate::processor::ProcessorTime;
use crate::{RankReport, launched};
use anyhow::Context;
use rcomm::{Config, Error, ErrorKind, GroupOptions, ProcessGroup, ReduceOp, World};
use rcomm_tests::usage::{Usage, peak_memory_kib};
use rustix::process::{Signal, getpid, getppid, kill_process};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    AllReduce,
    AllReduceIssued,
    Reduce,
    Broadcast,
    AllGather,
    ReduceScatter,
    AllToAll,
    Barrier,
    Ring,
}

const KINDS: [Kind; 9] = [
    Kind::AllReduce,
    Kind::AllReduceIssued,
    Kind::Reduce,
    Kind::Broadcast,
    Kind::AllGather,
    Kind::ReduceScatter,
    Kind::AllToAll,
    Kind::Barrier,
    Kind::Ring,
];
/// How long the threads of a world may take to end: a thread that waits for a store that does not answer ends only with
/// the store's time-out.
pub(crate) const ENDING: Duration = Duration::from_secs(120);
/// The numbers of elements per rank.
const COUNTS: [usize; 6] = [1, 3, 64, 1_000, 5_000, 40_000];

/// The file that each rank of a round with a launcher keeps locked until its process ends.
fn alive_file() -> anyhow::Result<PathBuf> {
    let rings = std::env::var_os("RCOMM_RING_DIR").context("RCOMM_RING_DIR is not set")?;
    Ok(Path::new(&rings).with_file_name(launched::ALIVE))
}

/// Works through the plan as the rank that the environment names, and prints its report.
///
/// # Errors
/// The environment names no rank, the file of a round with a launcher cannot be locked, or the rank's world cannot be
/// made or shut down.
#[expect(
    clippy::print_stdout,
    reason = "the report goes to the program that started this one"
)]
pub(crate) fn run(plan: &Plan) -> anyhow::Result<()> {
    // The lock is held until this process has ended, in whatever way.
    let alive = match plan.launcher {
        Some(_) => Some(File::options().append(true).open(alive_file()?)?),
        None => None,
    };
    if let Some(alive) = &alive {
        alive.lock_shared()?;
    }
    let before = Usage::now();
    let world = World::init(Config::from_environment()?)?;
    let mut report = RankReport::default();
    match work(plan, &world, &mut report) {
        Ok(()) => world.shutdown()?,
        Err(error) => {
            report.timed_out = error.kind() == ErrorKind::Timeout;
            report.error = Some((error.to_string(), error.ranks().to_vec()));
            drop(world);
        }
    }
    let Usage { fds, threads } = before.left(ENDING);
    report.left = (fds, threads);
    report.memory_kib = peak_memory_kib();
    println!("{}", serde_json::to_string(&report)?);
    Ok(())
}

/// Makes the groups of a round, works through its steps, and destroys the groups.
pub(crate) fn work(plan: &Plan, world: &World, report: &mut RankReport) -> Result<(), Error> {
    let this_rank = world.rank();
    let mut groups = vec![world.group().clone()];
    for (number, ranks) in plan.groups().into_iter().enumerate() {
        if ranks.contains(&this_rank) {
            let options = GroupOptions::named(format!("random{number}"));
            groups.push(world.new_group(&ranks, &options)?);
        }
    }
    let all = plan.groups();
    for step in 0..plan.steps {
        if let Some(fault) = plan.fault
            && (fault.rank, fault.step) == (this_rank, step)
        {
            act_on_oneself(fault.act);
        }
        if let Some(LauncherFault { step: at, end }) = plan.launcher
            && (at, 0) == (step, this_rank)
        {
            end_launcher(end);
        }
        let mut draw = Draw::of(&[plan.seed, plan.round, 2, step]);
        // Every rank draws the same, also for a group of which it is no member.
        let group = draw.below(1 + all.len() as u64) as usize;
        let (kind, count, root) = (draw.one_of(&KINDS), draw.one_of(&COUNTS), draw.next());
        let group = match group {
            0 => groups.first(),
            number => {
                let name = format!("random{}", number - 1);
                groups.iter().find(|group| group.desc() == name)
            }
        };
        let Some(group) = group else { continue };
        let (began, processor) = (Instant::now(), ProcessorTime::now());
        let inputs = Inputs {
            step,
            ranks: group.ranks(),
            count,
        };
        match inputs.run(kind, group, root) {
            Ok(true) => report.checked += 1,
            Ok(false) => report
                .wrong
                .push(format!("{kind:?} of {count} in step {step}")),
            Err(error) => {
                report.turns = processor.since();
                report.waited_ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
                return Err(error);
            }
        }
    }
    // A fault in the last steps of other groups is met here.
    let (began, processor) = (Instant::now(), ProcessorTime::now());
    world.group().barrier().inspect_err(|_| {
        report.turns = processor.since();
        report.waited_ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
    })?;
    groups
        .into_iter()
        .skip(1)
        .try_for_each(ProcessGroup::destroy)
}

/// The inputs of all members of a group in one step.
struct Inputs<'a> {
    step: u64,
    ranks: &'a [u32],
    count: usize,
}

impl Inputs<'_> {
    /// The input of the member `rank`, a rank of the world, at this index.
    fn value(&self, rank: u32, index: usize) -> u64 {
        (self.step + 1) * 1_000_003 + u64::from(rank) * 7_919 + index as u64 * 31
    }

    /// The first elements of a member's input.
    fn of(&self, rank: u32, count: usize) -> Vec<u64> {
        (0..count).map(|index| self.value(rank, index)).collect()
    }

    fn sum(&self, index: usize) -> u64 {
        self.ranks.iter().map(|&rank| self.value(rank, index)).sum()
    }

    fn sums(&self, from: usize, count: usize) -> Vec<u64> {
        (from..from + count).map(|index| self.sum(index)).collect()
    }

    /// Runs an operation; returns whether its result is right.
    fn run(&self, kind: Kind, group: &ProcessGroup, root: u64) -> Result<bool, Error> {
        let (size, place) = (self.ranks.len(), group.rank() as usize);
        let root = (root % size as u64) as u32;
        let (this_rank, count) = (self.ranks[place], self.count);
        let mut buffer = self.of(this_rank, count);
        match kind {
            Kind::AllReduce => {
                group.all_reduce(&mut buffer, ReduceOp::Sum)?;
                Ok(buffer == self.sums(0, count))
            }
            Kind::AllReduceIssued => {
                let first = group.all_reduce_async(buffer.clone(), ReduceOp::Sum)?;
                let second = group.all_reduce_async(buffer, ReduceOp::Max)?;
                let (first, second) = (first.wait()?, second.wait()?);
                let last = self.ranks.iter().max().copied().unwrap_or(this_rank);
                Ok(first == self.sums(0, count) && second == self.of(last, count))
            }
            Kind::Reduce => {
                group.reduce(&mut buffer, ReduceOp::Sum, root)?;
                Ok(group.rank() != root || buffer == self.sums(0, count))
            }
            Kind::Broadcast => {
                group.broadcast(&mut buffer, root)?;
                Ok(buffer == self.of(self.ranks[root as usize], count))
            }
            Kind::AllGather => {
                let mut output = vec![0; count * size];
                group.all_gather_single(&buffer, &mut output)?;
                let mut parts = self.ranks.iter().zip(output.chunks(count));
                Ok(parts.all(|(&rank, part)| part == self.of(rank, count)))
            }
            Kind::ReduceScatter => {
                let input = self.of(this_rank, count * size);
                group.reduce_scatter_single(&input, &mut buffer, ReduceOp::Sum)?;
                Ok(buffer == self.sums(place * count, count))
            }
            Kind::AllToAll => {
                let (input, mut output) = (self.of(this_rank, count * size), vec![0; count * size]);
                group.all_to_all_single(&input, &mut output)?;
                let mut parts = self.ranks.iter().zip(output.chunks(count));
                Ok(parts.all(|(&rank, part)| {
                    let sent = &self.of(rank, count * size)[place * count..][..count];
                    part == sent
                }))
            }
            Kind::Barrier => group.barrier().map(|()| true),
            Kind::Ring => {
                let next = ((place + 1) % size) as u32;
                let before = (place + size - 1) % size;
                let sent = group.send_async(buffer, next, 7)?;
                let mut received = vec![0; count];
                group.recv(&mut received, before as u32, 7)?;
                sent.wait()?;
                Ok(received == self.of(self.ranks[before], count))
            }
        }
    }
}

fn end_launcher(end: LauncherEnd) {
    let signal = match end {
        LauncherEnd::Kill => Signal::KILL,
        LauncherEnd::Terminate => Signal::TERM,
        LauncherEnd::Interrupt => Signal::INT,
    };
    if let Some(launcher) = getppid() {
        // The launcher may have ended already, and then this process ends too.
        let _ = kill_process(launcher, signal);
    }
}

fn act_on_oneself(act: Act) {
    let signal = |signal| {
        // A signal to this process cannot fail.
        let _ = kill_process(getpid(), signal);
    };
    match act {
        Act::Kill => signal(Signal::KILL),
        Act::Freeze => signal(Signal::STOP),
        Act::Exit => std::process::exit(3),
    }
}
