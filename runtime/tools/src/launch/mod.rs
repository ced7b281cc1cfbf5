//! Starts the ranks of a job, and supervises them until the last has ended.
//!
//! The launcher serves the job's store, so that the store outlives every rank; through it the launchers of several
//! nodes agree on the job, and notify each other of a failure. Each rank has its own process group. One thread
//! watches the ranks, their output and signals; two others only write output, so that a stalled terminal never prevents
//! the launcher from ending the ranks. In a job on several nodes, one more thread listens to the other launchers.
//!
//! A launcher that is itself killed by SIGKILL cannot end its ranks: the kernel kills them in its place.

mod account;
mod nodes;
mod options;
mod output;
mod parent_death;
mod ranks;

pub use options::Options;

use crate::rank::new_secret;
use anyhow::{Context, Result};
use nodes::Nodes;
use output::Sinks;
use ranks::{Ranks, StartError};
use std::process::ExitCode;

/// Exit code for a failure of the launcher itself.
const LAUNCHER_FAILED: u8 = 125;

/// Why a job failed, and the exit code for it.
#[derive(Clone, Debug)]
struct Failure {
    sentence: String,
    code: u8,
    /// Whether the ranks may be started again: not after a signal to a launcher, or the loss of one.
    may_restart: bool,
}

/// Runs the job and blocks until it has ended. Returns the exit code, as listed in the help of `rcomm-run`.
pub fn run(options: &Options) -> ExitCode {
    let mut sinks = Sinks::start();
    let code = match try_run(options, &mut sinks) {
        Ok(None) => 0,
        Ok(Some(failure)) => failure.code,
        Err(error) => {
            sinks.print_message(&format!("{error:#}"));
            error
                .downcast_ref::<StartError>()
                .map_or(LAUNCHER_FAILED, StartError::code)
        }
    };
    sinks.finish();
    ExitCode::from(code)
}

fn try_run(options: &Options, sinks: &mut Sinks) -> Result<Option<Failure>> {
    let signals = ranks::Signals::catch().context("cannot catch signals")?;
    let secret = match &options.job_secret {
        Some(secret) => secret.clone(),
        None => new_secret()?,
    };
    if options.open_store && options.node_rank == 0 {
        sinks.print_message(
            "the store is open: whoever reaches its port can read and change the job's keys",
        );
    }
    let mut nodes = Nodes::join(options, &secret)?;
    let mut attempt = 0;
    loop {
        nodes.begin(attempt)?;
        let ranks = Ranks::start(options, &nodes.job, &secret, attempt)?;
        let own = ranks.supervise(options, &signals, &nodes, sinks)?;
        let is_silent = own.is_none();
        let failure = nodes.end(own)?;
        let restarts = match &failure {
            None => false,
            Some(failure) => {
                if is_silent {
                    sinks.print_message(&format!("on another node, {}", failure.sentence));
                }
                let wants = failure.may_restart && attempt < options.max_restarts;
                nodes.agree_to_restart(wants, options)?
            }
        };
        if !restarts {
            return nodes.leave(failure);
        }
        attempt += 1;
        let most = options.max_restarts;
        sinks.print_message(&format!(
            "all ranks start again: restart {attempt} of {most}"
        ));
    }
}
