//! The command line of `rcomm-run demo`.

use clap::{Parser, ValueEnum};
use std::ffi::OsString;

/// Approximate number of steps per second of the demonstrations other than `slow` and `pipeline`. A step of `slow`
/// takes 0.4 s, and a step of a pipeline of N ranks takes N times 30 ms.
const STEPS_PER_SECOND: f64 = 10.0;

/// Start a job of real processes on this host that is healthy, slow or faulty, to watch with rcomm-top or
/// rcomm-web. It runs until ctrl-c.
#[derive(Clone, Debug, Parser)]
#[command(name = "rcomm-run demo", version, max_term_width = 100)]
#[command(
    after_help = "Exit codes: those of rcomm-run; after ctrl-c 130, or 137 if a rank had been killed before (`kill`)."
)]
pub struct Demo {
    /// What the job does.
    #[arg(value_enum, value_name = "KIND")]
    pub(super) kind: Kind,

    /// How many ranks to start.
    #[arg(short = 'n', long = "nproc", default_value_t = 4, value_name = "N",
          value_parser = clap::value_parser!(u32).range(2..=64))]
    pub(super) nproc: u32,

    /// About how many seconds pass until the fault; fewer in a pipeline of two ranks, more in one of four or more.
    /// `healthy` and `slow` ignore it.
    #[arg(long, default_value_t = 5.0, value_name = "SECONDS", value_parser = seconds)]
    pub(super) after: f64,

    /// Whether this process is a rank that the demonstration started.
    #[arg(long, hide = true)]
    pub(super) rank: bool,
}

/// What a demonstration shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Kind {
    /// Nothing is wrong.
    Healthy,
    /// One rank loads its data more slowly than the others.
    Slow,
    /// One rank does not return from loading its data.
    Stuck,
    /// One rank is killed inside a collective.
    Kill,
    /// One rank's process is stopped (SIGSTOP).
    Freeze,
    /// One rank passes a buffer of a different size.
    Mismatch,
    /// Two groups are used in different orders.
    Deadlock,
    /// Stages pass on activations, and one leaves out a send.
    Pipeline,
}

impl Demo {
    /// Reads the arguments after `demo`; ends the process if they are wrong or ask for help.
    pub(super) fn parse_after(arguments: impl Iterator<Item = OsString>) -> Self {
        Self::parse_from(std::iter::once("rcomm-run demo".into()).chain(arguments))
    }

    /// Returns the demonstration that these arguments ask for; `None` if the second one is not `demo`. The first one is
    /// the program's name. Ends the process if the arguments after `demo` are wrong or ask for help.
    pub(crate) fn from_arguments(arguments: &[OsString]) -> Option<Self> {
        let [_, first, rest @ ..] = arguments else {
            return None;
        };
        (first == "demo").then(|| Self::parse_after(rest.iter().cloned()))
    }

    /// The arguments with which a rank of the demonstration is started.
    pub(super) fn as_arguments(&self) -> Vec<String> {
        let (ranks, after) = (self.nproc.to_string(), self.after.to_string());
        let kind = self.kind.name();
        let arguments = ["demo", kind, "-n", &ranks, "--after", &after, "--rank"];
        arguments.map(str::to_owned).to_vec()
    }

    /// The rank at fault, except in a pipeline (see [`stage_at_fault`](Self::stage_at_fault)).
    pub(super) fn culprit(&self) -> u32 {
        self.nproc / 2
    }

    /// The stage of a pipeline that is at fault. It is not the last stage, which sends to no other.
    pub(super) fn stage_at_fault(&self) -> u32 {
        self.culprit().min(self.nproc - 2)
    }

    /// The step in which the fault happens; it is the same step on all ranks.
    pub(super) fn step_of_fault(&self) -> i64 {
        (self.after * STEPS_PER_SECOND) as i64
    }
}

impl Kind {
    /// The kind's name on the command line.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Healthy => "healthy",
            Self::Slow => "slow",
            Self::Stuck => "stuck",
            Self::Kill => "kill",
            Self::Freeze => "freeze",
            Self::Mismatch => "mismatch",
            Self::Deadlock => "deadlock",
            Self::Pipeline => "pipeline",
        }
    }

    /// Returns a sentence, without a full stop, on what will happen.
    pub(super) fn describe(self, demo: &Demo) -> String {
        let (rank, after) = (demo.culprit(), demo.after);
        match self {
            Self::Healthy => "Nothing is wrong with it".to_owned(),
            Self::Slow => format!("Rank {rank} loads its data 0.3 s longer than the others"),
            Self::Stuck => {
                format!("After {after} s rank {rank} does not return from loading its data")
            }
            Self::Kill => format!("After {after} s rank {rank} kills itself with SIGKILL"),
            Self::Freeze => format!("After {after} s rank {rank} stops itself with SIGSTOP"),
            Self::Mismatch => {
                format!("After {after} s rank {rank} passes a smaller buffer than the others")
            }
            Self::Deadlock => format!(
                "After {after} s rank {rank} uses two groups in a different order from the others"
            ),
            Self::Pipeline => {
                let stage = demo.stage_at_fault();
                format!("After {after} s stage {stage} leaves out a send to the next")
            }
        }
    }
}

fn seconds(text: &str) -> Result<f64, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds")?;
    match (0.0..=86_400.0).contains(&seconds) {
        true => Ok(seconds),
        false => Err("not between 0 and 86400".to_owned()),
    }
}
