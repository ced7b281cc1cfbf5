//! What the ranks of these jobs do: train in two groups, until the culprit does its deed.
#![allow(clippy::print_stderr)]

use crate::process::CULPRIT;
use rcomm::{Config, GroupOptions, ReduceOp, World};
use rustix::process::{Resource, Rlimit, Signal, getpid, kill_process, setrlimit};
use std::fmt::Display;
use std::path::Path;
use std::process::ExitCode;
use std::str::FromStr;
use std::time::Duration;

/// What the culprit does in its step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Deed {
    /// Nothing; the job ends soon after.
    Nothing,
    /// Nothing; the job never ends.
    Forever,
    /// It is held inside an operation, until the file [`GO`] lets its peer join.
    Hold,
    /// Returns an error.
    Fail,
    Panic,
    /// Exits with code 3.
    Exit,
    /// Kills itself.
    Kill,
    /// Stops itself.
    Stop,
    /// Sleeps until it is killed.
    Sleep,
    /// Sleeps for six seconds, three times the time-out of its row.
    Late,
    /// Asks for more memory than it may have.
    Allocate,
    /// Uses more memory than its control group has.
    Exhaust,
}

/// All deeds, by name.
const DEEDS: [(&str, Deed); 12] = [
    ("nothing", Deed::Nothing),
    ("forever", Deed::Forever),
    ("hold", Deed::Hold),
    ("fail", Deed::Fail),
    ("panic", Deed::Panic),
    ("exit", Deed::Exit),
    ("kill", Deed::Kill),
    ("stop", Deed::Stop),
    ("sleep", Deed::Sleep),
    ("late", Deed::Late),
    ("allocate", Deed::Allocate),
    ("exhaust", Deed::Exhaust),
];

impl Deed {
    pub(super) fn name(self) -> &'static str {
        let of = DEEDS.iter().find(|(_, deed)| *deed == self);
        of.map_or("", |(name, _)| name)
    }
}

impl FromStr for Deed {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = DEEDS.iter().find(|(name, _)| *name == text);
        let found = found.ok_or_else(|| format!("there is no deed {text:?}"))?;
        Ok(found.1)
    }
}

/// The file that says that the culprit has reached its step.
pub(super) const BEGUN: &str = "begun";
/// The file that says that the culprit's peer is held back.
pub(super) const HELD: &str = "held";
/// The file that lets the culprit's peer go on.
pub(super) const GO: &str = "go";
/// The step of the deed; the job ends the same number of steps after it.
const STEP: i64 = 30;
const PAUSE: Duration = Duration::from_millis(5);
/// Bytes of an allocation: too many to come from memory that the process already has.
const CHUNK: usize = 64 << 20;

/// `rank DEED FOLDER`, with torchrun's variables in the environment.
pub fn main(args: &[String]) -> ExitCode {
    let failure = |error: &dyn Display| {
        eprintln!("{error}");
        ExitCode::FAILURE
    };
    let [deed, folder, ..] = args else {
        return failure(&"usage: rank DEED FOLDER");
    };
    match deed.parse() {
        Ok(deed) => match train(deed, Path::new(folder)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => failure(&error),
        },
        Err(error) => failure(&error),
    }
}

fn train(deed: Deed, folder: &Path) -> rcomm::Result<()> {
    let world = World::init(Config::from_environment()?)?;
    let rank = world.rank();
    let (row, column) = (rank / 2 * 2, rank % 2);
    let tp = world.new_group(&[row, row + 1], &GroupOptions::named("tp"))?;
    let dp = world.new_group(&[column, column + 2], &GroupOptions::named("dp"))?;
    for step in 0.. {
        if deed != Deed::Forever && step == 2 * STEP {
            break;
        }
        world.step(step);
        world.phase("load data");
        std::thread::sleep(PAUSE);
        if step == STEP && rank == CULPRIT {
            mark(folder, BEGUN);
            act(deed)?;
        }
        if step == STEP && rank == CULPRIT + 1 && deed == Deed::Hold {
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
    // Without it the row ends with an error that says what was waited for.
    let _ = std::fs::write(folder.join(name), "");
}

fn act(deed: Deed) -> rcomm::Result<()> {
    match deed {
        Deed::Nothing | Deed::Forever | Deed::Hold => {}
        Deed::Fail => {
            let no_more = "the data set has no more samples";
            return Err(rcomm::Error::new(
                rcomm::ErrorKind::InvalidArgument,
                no_more,
            ));
        }
        Deed::Panic => panic!("the data set is empty"),
        Deed::Exit => std::process::exit(3),
        Deed::Kill => signal(Signal::KILL),
        Deed::Stop => signal(Signal::STOP),
        Deed::Sleep => loop {
            std::thread::sleep(Duration::from_secs(1));
        },
        Deed::Late => std::thread::sleep(Duration::from_secs(6)),
        Deed::Allocate => {
            let none = Rlimit {
                current: Some(0),
                maximum: Some(0),
            };
            // An allocation that succeeds all the same shows in the row's answer.
            let _ = setrlimit(Resource::As, none);
            std::hint::black_box(vec![1u8; CHUNK]);
        }
        Deed::Exhaust => exhaust(),
    }
    Ok(())
}

/// Uses memory until the kernel kills this process. Does nothing outside of the control group of the row, where
/// it would use up the host's memory.
fn exhaust() {
    if std::env::var_os(super::stage::GROUP).is_none() {
        return;
    }
    let mut all = Vec::new();
    loop {
        all.push(std::hint::black_box(vec![1u8; CHUNK]));
    }
}

fn signal(signal: Signal) {
    // A signal to its own process cannot fail.
    let _ = kill_process(getpid(), signal);
}
