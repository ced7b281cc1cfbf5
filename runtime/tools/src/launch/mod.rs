//! Starts the ranks of a job, and supervises them until the last has ended.
//!
//! The launcher of host 0 serves the job's store, so that the store outlives every rank. Through it the launchers of
//! several hosts agree on the job, and notify each other of a failure. Each rank has a process group of its own. One
//! thread watches the ranks, their output and signals. Two other threads only write output, so that a stalled terminal
//! never prevents the launcher from ending the ranks. In a job on several hosts, one more thread listens to the other
//! launchers.
//!
//! A launcher that is itself killed by SIGKILL cannot end its ranks: the kernel kills them in its place.

mod account;
mod command;
mod countdown;
mod exits;
mod nodes;
mod options;
mod output;
mod parent_death;
mod pulses;
mod rank;
mod ranks;
mod rounds;
mod signals;
mod stop_watch;

pub use options::{NodeCount, Options};

use crate::rank::new_secret;
use anyhow::{Result, anyhow};
use nodes::{BeginOutcome, Nodes};
use output::Sinks;
use rank::StartError;
use ranks::Ranks;
use signals::Signals;
use std::process::ExitCode;

/// The name of the program that runs a job.
pub(crate) const PROGRAM: &str = "rcomm-run";

/// Exit code for a failure of the launcher itself.
const LAUNCHER_FAILED: u8 = 125;
/// Exit code if a rank was ended because it was stopped for too long.
const STOPPED: u8 = 124;

/// Why an attempt ended before all its ranks had exited with 0.
#[derive(Clone, Debug)]
struct Failure {
    sentence: String,
    /// The launcher's exit code; 0 if the attempt ended only because another host has joined.
    code: u8,
    restart: Restart,
}

impl Failure {
    /// The sentence with which the launchers of the other hosts report this failure.
    fn on_another_host(&self) -> String {
        match self.code {
            // Another host has joined: none has failed.
            0 => self.sentence.clone(),
            _ => format!("on another host, {}", self.sentence),
        }
    }
}

/// How the ranks of this host have ended in an attempt.
struct Ended {
    /// The job's first failure, on this host or on another. The other launchers know it.
    failure: Option<Failure>,
    /// The end of the first rank of this host that was ended because it was stopped.
    stopped: Option<Failure>,
}

/// Whether the ranks may be started again after a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Restart {
    /// No: for example, after a signal to a launcher, or after the store has failed.
    Never,
    /// Yes, as often as `--max-restarts` allows.
    Counted,
    /// Yes, without counting as a restart: a host has joined, was lost, or left. Only in jobs whose number of hosts may
    /// change.
    Free,
}

/// Runs the job and blocks until it has ended. Returns the exit code, as listed in the help of `rcomm-run`.
pub fn run(options: &Options) -> ExitCode {
    let mut sinks = Sinks::start();
    let signals = Signals::catch();
    let ended = match &signals {
        Ok(signals) => try_run(options, signals, &mut sinks),
        Err(error) => Err(anyhow!("cannot catch signals: {error}")),
    };
    let code = match ended {
        Ok(None) => 0,
        Ok(Some(failure)) => failure.code,
        Err(error) => {
            sinks.print_message(&format!("{error:#}"));
            error
                .downcast_ref::<StartError>()
                .map_or(LAUNCHER_FAILED, StartError::code)
        }
    };
    let stopped = sinks.finish(signals.as_ref().ok());
    ExitCode::from(stopped.map_or(code, signals::code_of))
}

/// Runs the job; returns its failure, or `None` if every rank of the last attempt exited with 0.
fn try_run(options: &Options, signals: &Signals, sinks: &mut Sinks) -> Result<Option<Failure>> {
    let secret = match &options.job_secret {
        Some(secret) => secret.clone(),
        None => new_secret()?,
    };
    if options.open_store && options.serves_store() == Some(true) {
        sinks.print_message(
            "the store is open: whoever reaches its port can read and change the job's keys",
        );
    }
    let mut nodes = Nodes::join(options, &secret)?;
    let mut restarts = 0;
    let mut reported = None;
    loop {
        match nodes.begin(options, signals, sinks)? {
            BeginOutcome::Attempt => {}
            BeginOutcome::Over(failure) => {
                let is_new = |over: &&Failure| {
                    let reported = reported.as_ref();
                    reported.is_none_or(|reported: &Failure| {
                        !reported.sentence.ends_with(&over.sentence)
                    })
                };
                if let Some(over) = failure.as_ref().filter(is_new) {
                    sinks.print_message(&over.sentence);
                }
                return nodes.leave(failure, options);
            }
        }
        let mut ranks = Ranks::start(options, &nodes.job, &secret, nodes.attempt())?;
        let ended = ranks.supervise(options, signals, &nodes, sinks)?;
        let failure = nodes.end(ended, signals, ranks.account(), sinks)?;
        let goes_on = match &failure {
            None => false,
            Some(failure) => {
                let may_restart =
                    failure.restart == Restart::Counted && restarts < options.max_restarts;
                let account = ranks.account();
                nodes.agree_to_restart(may_restart, failure, options, signals, account, sinks)?
            }
        };
        if !goes_on {
            return nodes.leave(failure, options);
        }
        reported = failure;
        if !options.nnodes.is_range() {
            restarts += 1;
            let most = options.max_restarts;
            sinks.print_message(&format!(
                "all ranks start again: restart {restarts} of {most}"
            ));
        }
    }
}
