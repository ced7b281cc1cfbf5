//! The program of the ranks of the matrix of lives: it trains in two groups, and the culprit acts in one step.
#![allow(clippy::print_stderr)]

use crate::process::CULPRIT;
use rcomm::{Config, GroupOptions, ReduceOp, World};
use rustix::process::{
    Resource, Rlimit, Signal, getpid, kill_process, setpriority_process, setrlimit,
};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::fmt::Display;
use std::path::Path;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

/// What the culprit does in step [`STEP`], or from the start where an act says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CulpritAct {
    /// It works on, until the job ends soon after.
    Nothing,
    /// It works on in a job that never ends.
    Forever,
    /// It waits inside an operation until the file [`GO`] lets its peer join.
    Hold,
    /// It returns an error.
    Fail,
    /// It panics.
    Panic,
    /// It exits with code 3.
    Exit,
    /// It kills itself.
    Kill,
    /// It stops itself.
    Stop,
    /// It sleeps until it is killed.
    Sleep,
    /// It sleeps for six seconds, three times the time-out of its row.
    Late,
    /// It asks for more memory than its resource limit allows.
    Allocate,
    /// It uses more memory than its control group allows.
    Exhaust,
    /// It sleeps before the operations of each step, from the start, in a job that never ends.
    Dawdle,
    /// It shares one processor with threads that never sleep, from the start, in a job that never ends.
    Starve,
}

/// All acts, by name.
const ACTS: [(&str, CulpritAct); 14] = [
    ("nothing", CulpritAct::Nothing),
    ("forever", CulpritAct::Forever),
    ("hold", CulpritAct::Hold),
    ("fail", CulpritAct::Fail),
    ("panic", CulpritAct::Panic),
    ("exit", CulpritAct::Exit),
    ("kill", CulpritAct::Kill),
    ("stop", CulpritAct::Stop),
    ("sleep", CulpritAct::Sleep),
    ("late", CulpritAct::Late),
    ("allocate", CulpritAct::Allocate),
    ("exhaust", CulpritAct::Exhaust),
    ("dawdle", CulpritAct::Dawdle),
    ("starve", CulpritAct::Starve),
];

impl CulpritAct {
    pub(super) fn name(self) -> &'static str {
        let found = ACTS.iter().find(|(_, act)| *act == self);
        found.map_or("", |(name, _)| name)
    }

    const fn is_from_start(self) -> bool {
        matches!(self, Self::Dawdle | Self::Starve)
    }
}

impl FromStr for CulpritAct {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = ACTS.iter().find(|(name, _)| *name == text);
        let found = found.ok_or_else(|| format!("there is no act {text:?}"))?;
        Ok(found.1)
    }
}

/// The name of the file that tells that the culprit begins its act.
pub(super) const BEGUN: &str = "begun";
/// The name of the file that tells that the culprit's peer is held back.
pub(super) const HELD: &str = "held";
/// The name of the file that lets the culprit's peer go on.
pub(super) const GO: &str = "go";
/// The step of the act; the job ends the same number of steps after it.
const STEP: i64 = 30;
/// The pause before the operations of each step.
const PAUSE: Duration = Duration::from_millis(5);
/// The pause of a slow rank: far longer than a rank waits for a processor in one step, also on a busy host.
const LONG_PAUSE: Duration = Duration::from_millis(250);
/// The number of threads that keep the culprit's processor busy.
const BUSY_THREADS: usize = 2;
/// Bytes of an allocation: too many to come from memory that the process already has.
const CHUNK: usize = 64 << 20;

/// Runs the command line `rank ACT FOLDER`; the environment has torchrun's variables.
pub(super) fn main(args: &[String]) -> ExitCode {
    let failure = |error: &dyn Display| {
        eprintln!("{error}");
        ExitCode::FAILURE
    };
    let [act, folder, ..] = args else {
        return failure(&"usage: rank ACT FOLDER");
    };
    match act.parse() {
        Ok(act) => match train(act, Path::new(folder)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => failure(&error),
        },
        Err(error) => failure(&error),
    }
}

fn train(act: CulpritAct, folder: &Path) -> rcomm::Result<()> {
    let world = World::init(Config::from_environment()?)?;
    let rank = world.rank();
    let (tp_first, dp_first) = (rank / 2 * 2, rank % 2);
    let tp = world.new_group(&[tp_first, tp_first + 1], &GroupOptions::named("tp"))?;
    let dp = world.new_group(&[dp_first, dp_first + 2], &GroupOptions::named("dp"))?;
    if rank == CULPRIT && act.is_from_start() {
        mark(folder, BEGUN);
        if act == CulpritAct::Starve {
            starve();
        }
    }
    for step in 0.. {
        if act != CulpritAct::Forever && !act.is_from_start() && step == 2 * STEP {
            break;
        }
        world.step(step);
        world.phase("load data");
        std::thread::sleep(match (act, rank) {
            (CulpritAct::Dawdle, CULPRIT) => LONG_PAUSE,
            _ => PAUSE,
        });
        if step == STEP && rank == CULPRIT && !act.is_from_start() {
            mark(folder, BEGUN);
            carry_out(act)?;
        }
        if step == STEP && rank == CULPRIT + 1 && act == CulpritAct::Hold {
            mark(folder, HELD);
            while !folder.join(GO).exists() {
                std::thread::sleep(Duration::from_millis(5));
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

fn mark(folder: &Path, name: &str) {
    // If this fails, the row ends with an error that names what it waited for.
    let _ = std::fs::write(folder.join(name), "");
}

fn carry_out(act: CulpritAct) -> rcomm::Result<()> {
    match act {
        CulpritAct::Nothing
        | CulpritAct::Forever
        | CulpritAct::Hold
        | CulpritAct::Dawdle
        | CulpritAct::Starve => {}
        CulpritAct::Fail => {
            let no_more = "the data set has no more samples";
            return Err(rcomm::Error::new(
                rcomm::ErrorKind::InvalidArgument,
                no_more,
            ));
        }
        CulpritAct::Panic => panic!("the data set is empty"),
        CulpritAct::Exit => std::process::exit(3),
        CulpritAct::Kill => signal(Signal::KILL),
        CulpritAct::Stop => signal(Signal::STOP),
        CulpritAct::Sleep => loop {
            std::thread::sleep(Duration::from_secs(1));
        },
        CulpritAct::Late => std::thread::sleep(Duration::from_secs(6)),
        CulpritAct::Allocate => {
            let no_memory = Rlimit {
                current: Some(0),
                maximum: Some(0),
            };
            // If the allocation succeeds nevertheless, the row's answer shows that.
            let _ = setrlimit(Resource::As, no_memory);
            std::hint::black_box(vec![1u8; CHUNK]);
        }
        CulpritAct::Exhaust => exhaust(),
    }
    Ok(())
}

/// Uses memory until the kernel kills this process. Does nothing outside of the control group of the row, where
/// it would use up the host's memory.
fn exhaust() {
    if std::env::var_os(super::job::GROUP).is_none() {
        return;
    }
    let mut chunks = Vec::new();
    loop {
        chunks.push(std::hint::black_box(vec![1u8; CHUNK]));
    }
}

/// Binds this thread and its later child threads to one processor, starts threads there that never sleep, and gives
/// this thread a lower priority than theirs.
fn starve() {
    let Ok(allowed) = sched_getaffinity(None) else {
        return;
    };
    let mut shared = CpuSet::new();
    let first = (0..CpuSet::MAX_CPU).find(|&cpu| allowed.is_set(cpu));
    first.into_iter().for_each(|cpu| shared.set(cpu));
    // If the system refuses one of these calls, the rank is not late, and the row's answer is still right.
    let _ = sched_setaffinity(None, &shared);
    for _ in 0..BUSY_THREADS {
        std::thread::spawn(|| {
            loop {
                std::hint::spin_loop();
            }
        });
    }
    let _ = setpriority_process(None, 10);
}

fn signal(signal: Signal) {
    // A process may always signal itself.
    let _ = kill_process(getpid(), signal);
}
