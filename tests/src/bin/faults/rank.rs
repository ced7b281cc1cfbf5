//! Runs one rank of a job under test. The rank works until an operation fails or it is asked to stop, and logs its
//! events with their times.

use crate::extra::Extras;
use crate::scenario::{Act, At, Extra};
use clap::Args;
use rcomm::{Config, GroupOptions, ReduceOp, World};
use rcomm_tests::usage::Usage;
use rustix::process::{Resource, Rlimit, Signal, getpid, kill_process, setrlimit};
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// The step in which a rank applies its fault to itself.
const STEP_OF_FAULT: i64 = 20;

#[derive(Debug, Args)]
pub(crate) struct RankArgs {
    /// Where the job's files are.
    folder: PathBuf,
    /// What the ranks at fault do to themselves.
    #[arg(long)]
    act: Option<Act>,
    /// When they act on themselves.
    #[arg(long, default_value = "Between")]
    at: At,
    /// The ranks at fault.
    #[arg(long, value_delimiter = ',')]
    ranks: Vec<u32>,
    /// The limit of open files of these ranks.
    #[arg(long)]
    descriptors: Option<u64>,
    /// What all ranks do in every step besides their collectives.
    #[arg(long)]
    call: Option<Extra>,
    /// The rank that begins its init only when the driver lets it.
    #[arg(long)]
    held_before_init: Option<u32>,
    /// All ranks end their work by themselves, and the ranks at fault shut down only when the driver lets them.
    #[arg(long)]
    held_before_shutdown: bool,
}

/// An event that a rank logs, as one line of JSON.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Event {
    pub(crate) kind: EventKind,
    pub(crate) rank: u32,
    pub(crate) pid: u32,
    pub(crate) at_ms: u64,
}

/// What an event reports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum EventKind {
    /// The rank was started.
    Began,
    /// The rank has completed several steps.
    Ready,
    /// The rank applies its fault to itself, or is about to need the store that the driver has stopped.
    Fault,
    /// The rank waits for the driver before it shuts down.
    Held,
    /// A call failed.
    Failed {
        call: String,
        kind: String,
        ranks: Vec<u32>,
        text: String,
    },
    /// A result was wrong.
    Wrong(String),
    /// The rank has shut down cleanly.
    Ended,
    /// The rank has dropped its world. The numbers are how many more descriptors and threads it has than before it made
    /// the world.
    Left { fds: i64, threads: i64 },
}

pub(crate) fn now_ms() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.map_or(0, |now| u64::try_from(now.as_millis()).unwrap_or(u64::MAX))
}

/// The folder with the files of the ranks' events.
pub(crate) fn events_folder(folder: &Path) -> PathBuf {
    folder.join("events")
}

/// Rank 0 stops the job when it finds this file.
pub(crate) fn stop_file(folder: &Path) -> PathBuf {
    folder.join("stop")
}

/// All ranks make another group when rank 0 finds this file.
pub(crate) fn group_file(folder: &Path) -> PathBuf {
    folder.join("make-group")
}

/// Ranks that the driver holds go on when they find this file.
pub(crate) fn go_file(folder: &Path) -> PathBuf {
    folder.join("go")
}

fn wait_for_driver(folder: &Path) {
    while !go_file(folder).exists() {
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// What rank 0 asks all ranks to do, in one word.
const STOP: u32 = 1;
const MAKE_GROUP: u32 = 2;

/// The log of a rank's events.
struct Log {
    rank: u32,
    path: PathBuf,
}

impl Log {
    fn write(&self, kind: EventKind) {
        let event = Event {
            kind,
            rank: self.rank,
            pid: std::process::id(),
            at_ms: now_ms(),
        };
        let mut line = serde_json::to_string(&event).unwrap_or_default();
        line.push('\n');
        let file = std::fs::OpenOptions::new()
            .append(true)
            .create(true)
            .open(&self.path);
        // A rank without free descriptors cannot write the file: its error is also on its standard error.
        if let Ok(mut file) = file {
            let _ = file.write_all(line.as_bytes());
        }
    }

    fn failed(&self, call: &str, error: &rcomm::Error) {
        self.write(EventKind::Failed {
            call: call.to_owned(),
            kind: format!("{:?}", error.kind()),
            ranks: error.ranks().to_vec(),
            text: error.to_string(),
        });
    }
}

/// Works as one rank.
///
/// # Errors
/// An error of the runtime, which is in the log as well; an error of the preparation before that, which is not.
pub(crate) fn run(args: &RankArgs) -> anyhow::Result<()> {
    let rank: u32 = std::env::var("RANK")?.parse()?;
    let pid = std::process::id();
    let log = Log {
        rank,
        path: events_folder(&args.folder).join(format!("{rank}.{pid}")),
    };
    let is_culprit = args.ranks.contains(&rank);
    let act = args.act.filter(|_| is_culprit);
    log.write(EventKind::Began);
    crate::around::serve_once(&args.folder)?;
    if let Some(limit) = args.descriptors.filter(|_| is_culprit) {
        let limit = Rlimit {
            current: Some(limit),
            maximum: Some(limit),
        };
        setrlimit(Resource::Nofile, limit)?;
    }
    let act_at = |at: At| {
        if let Some(act) = act.filter(|_| args.at == at) {
            log.write(EventKind::Fault);
            act_on_oneself(act);
        }
    };
    act_at(At::Start);
    if args.held_before_init == Some(rank) {
        wait_for_driver(&args.folder);
    }
    let before = Usage::now();
    let world = match Config::from_environment().and_then(World::init) {
        Ok(world) => world,
        Err(error) => {
            log.failed("init", &error);
            leave(&log, &before);
            return Err(error.into());
        }
    };
    let worked = work(&world, args, &log, &act_at);
    let ended = match worked {
        Ok(()) => {
            act_at(At::End);
            if args.held_before_shutdown && is_culprit {
                log.write(EventKind::Held);
                wait_for_driver(&args.folder);
            }
            let ended = world.shutdown();
            if let Err(error) = &ended {
                log.failed("shutdown", error);
            }
            ended
        }
        Err(error) => {
            log.failed("operation", &error);
            drop(world);
            Err(error)
        }
    };
    if ended.is_ok() {
        log.write(EventKind::Ended);
    }
    leave(&log, &before);
    Ok(ended?)
}

/// Sums and broadcasts until an operation fails, or rank 0 is asked to stop. With [`At::End`] or
/// `--held-before-shutdown`, until the step of the fault.
fn work(world: &World, args: &RankArgs, log: &Log, act_at: &impl Fn(At)) -> rcomm::Result<()> {
    let (rank, size) = (world.rank(), world.size());
    let pair = [rank / 2 * 2, rank / 2 * 2 + 1];
    let pair = world.new_group(&pair, &GroupOptions::named("pair"))?;
    let total: u32 = (1..=size).sum();
    let extras = Extras::new(args.call, world.group())?;
    let check = |operation: &str, is_right: bool| {
        if !is_right {
            log.write(EventKind::Wrong(operation.to_owned()));
        }
    };
    for step in 0.. {
        world.step(step);
        world.phase("between");
        if step == STEP_OF_FAULT {
            act_at(At::Between);
        }
        check("result of the other call", extras.run(step)?);
        let length = 1 << (step % 4 * 5);
        let work = world
            .group()
            .all_reduce_async(vec![rank + 1; length], ReduceOp::Sum)?;
        if step == STEP_OF_FAULT {
            act_at(At::Call);
        }
        let sums = work.wait()?;
        check("all_reduce", sums.iter().all(|&sum| sum == total));
        let mut ones = [1_u32; 33];
        pair.all_reduce(&mut ones, ReduceOp::Sum)?;
        check("all_reduce of a pair", ones == [2; 33]);
        let asked = rank == 0 && stop_file(&args.folder).exists();
        let ends_by_itself =
            (args.act.is_some() && args.at == At::End) || args.held_before_shutdown;
        let ends_by_itself = ends_by_itself && step == STEP_OF_FAULT;
        let mut order = [match asked || ends_by_itself {
            true => STOP,
            false if rank == 0 && group_file(&args.folder).exists() => MAKE_GROUP,
            false => 0,
        }];
        world.group().broadcast(&mut order, 0)?;
        if step == STEP_OF_FAULT / 2 {
            log.write(EventKind::Ready);
        }
        match order {
            [STOP] => break,
            [MAKE_GROUP] => {
                log.write(EventKind::Fault);
                let all: Vec<u32> = (0..size).collect();
                world.new_group(&all, &GroupOptions::named("another"))?;
            }
            _ => {}
        }
        // The rank leaves the processors to the others from time to time.
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

fn act_on_oneself(act: Act) {
    let signal = |signal| {
        // A signal to this process cannot fail.
        let _ = kill_process(getpid(), signal);
    };
    match act {
        Act::Kill => signal(Signal::KILL),
        Act::Terminate => signal(Signal::TERM),
        Act::Interrupt => signal(Signal::INT),
        Act::Segfault => {
            // The handler of Rust's runtime removes itself at the first signal; the second one ends the process.
            signal(Signal::SEGV);
            signal(Signal::SEGV);
        }
        Act::Leave => std::process::exit(0),
        Act::Freeze => signal(Signal::STOP),
        Act::Abort => std::process::abort(),
        Act::Exit => std::process::exit(3),
        Act::Panic => std::panic::panic_any("asked to"),
        Act::Sleep => loop {
            std::thread::sleep(Duration::from_secs(60));
        },
        Act::Exhaust => {
            let limit = Rlimit {
                current: Some(1 << 30),
                maximum: Some(1 << 30),
            };
            // Without the limit the allocation fails all the same on most machines.
            let _ = setrlimit(Resource::As, limit);
            std::hint::black_box(vec![1_u8; 1 << 40]);
        }
        Act::Spin => loop {
            std::hint::spin_loop();
        },
    }
}

/// Waits for threads that are ending, and logs the resources that are left of the world.
fn leave(log: &Log, before: &Usage) {
    // A thread that waits for a store that does not answer ends with the store's own time-out.
    let Usage { fds, threads } = before.left(crate::job::INIT_TIMEOUT + crate::job::SLACK);
    log.write(EventKind::Left { fds, threads });
}
