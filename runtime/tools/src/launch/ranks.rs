//! The ranks of this host, which are started, watched, and ended together.

use super::account::Account;
use super::command::command_of;
use super::countdown::Countdown;
use super::exits::{code_of, describe_end};
use super::nodes::{Job, Nodes};
use super::options::Options;
use super::output::{Output, Sinks, Stream, in_words};
use super::parent_death::die_with_this_thread;
use super::rank::Rank;
use super::signals::{Signals, asks_to_stop, name_of, stopped_by};
use super::stop_watch::{Action, Seen, State, StopWatch};
use super::{Ended, Failure, Restart, STOPPED};
use anyhow::{Context, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::AsFd;
use rustix::io::Errno;
use rustix::process::Signal;
use std::process::Command;
use std::time::{Duration, Instant};

/// How long output is still read after the last rank has ended: processes that the ranks left behind may still write.
const DRAIN: Duration = Duration::from_secs(1);
/// How often a wait checks whether a stalled stream of this process accepts data again.
const RETRY: Duration = Duration::from_millis(10);

/// An event source of a wait.
#[derive(Clone, Copy)]
enum Source {
    /// A signal to this process.
    Signals,
    /// A failure of the job on another host.
    RemoteFailure,
    /// The end of the process at this index.
    End(usize),
    /// A stream of a process: the indices of the process and of the stream.
    Output(usize, usize),
}

/// The progress of ending the ranks.
struct Ending {
    /// The time until SIGTERM is sent; `None` once it has been sent, or if a signal to the launcher was forwarded
    /// instead.
    terminate: Option<Countdown>,
    /// The time until SIGKILL is sent; `None` before the ranks were asked to end, and once it has been sent.
    kill: Option<Countdown>,
    /// Whether a signal to stop came while the ranks were being ended, so that the grace period is over.
    at_once: bool,
}

/// The ranks of this host. If they are dropped before they have ended, they are killed.
pub(super) struct Ranks {
    /// All processes that were started, also those that have ended.
    ranks: Vec<Rank>,
    started: Instant,
    /// `None` until the ranks are to end.
    ending: Option<Ending>,
    /// The job's first failure.
    failure: Option<Failure>,
    /// Whether a signal that asks to stop has come: whatever ended the ranks, they are then not started again.
    must_stop: bool,
    stop_watch: StopWatch,
    /// The end of the first rank that was ended because it was stopped. The other ranks continue.
    stopped: Option<Failure>,
    account: Account,
    job: Job,
    secret: String,
    attempt: u32,
    /// How many processes were started in place of ranks that failed.
    replaced: u32,
}

impl Ranks {
    /// Starts all ranks.
    ///
    /// # Errors
    /// If a rank cannot be started: the ranks that have been started are then killed.
    pub(super) fn start(options: &Options, job: &Job, secret: &str, attempt: u32) -> Result<Self> {
        let now = Instant::now();
        let mut started = Self {
            ranks: Vec::new(),
            started: now,
            ending: None,
            failure: None,
            must_stop: false,
            stop_watch: StopWatch::new(options.stop_timeout(), options.grace, now),
            stopped: None,
            account: Account::open(job, attempt),
            job: job.clone(),
            secret: secret.to_owned(),
            attempt,
            replaced: 0,
        };
        for local_rank in 0..options.nproc {
            let rank = started.spawn(options, local_rank, |_| {})?;
            started.account.started(rank.rank, rank.child.id());
            started.ranks.push(rank);
        }
        Ok(started)
    }

    /// Starts a process for a rank. `change` may add to its command.
    fn spawn(
        &self,
        options: &Options,
        local_rank: u32,
        change: impl FnOnce(&mut Command),
    ) -> Result<Rank> {
        let mut command = command_of(options, &self.job, &self.secret, local_rank);
        command.env("TORCHELASTIC_RESTART_COUNT", self.attempt.to_string());
        change(&mut command);
        // This is the launcher's main thread, which lives as long as the launcher.
        die_with_this_thread(&mut command);
        Rank::start(command, self.job.first_rank + local_rank)
    }

    /// Starts a process that joins in place of the failed one at this index, and returns true. Returns false, and
    /// starts none, if the job is ending or `--replace` processes were already started.
    fn replace(
        &mut self,
        index: usize,
        failure: &Failure,
        options: &Options,
        sinks: &mut Sinks,
    ) -> Result<bool> {
        if self.ending.is_some() || self.replaced >= options.replace {
            return Ok(false);
        }
        self.replaced += 1;
        let most = options.replace;
        sinks.print_message(&format!(
            "{}; a process joins in its place, {} of {most}",
            failure.sentence, self.replaced
        ));
        let local_rank = self.ranks[index].rank - self.job.first_rank;
        let rank = self.spawn(options, local_rank, |command| {
            command.env("RCOMM_JOIN", "1");
        })?;
        self.account.replaced(index, rank.child.id());
        // The process that ended stays in the list: its output may not have been read to the end.
        self.ranks.push(rank);
        Ok(true)
    }

    /// Supervises the ranks until the last has ended. After a signal that asks to stop, their failures allow no restart.
    pub(super) fn supervise(
        &mut self,
        options: &Options,
        signals: &Signals,
        nodes: &Nodes,
        sinks: &mut Sinks,
    ) -> Result<Ended> {
        let mut buffer = vec![0; 64 << 10];
        let mut drain_deadline = None;
        self.account.write(sinks);
        loop {
            for source in self.wait(signals, nodes, sinks, drain_deadline)? {
                match source {
                    Source::Signals => {
                        for signal in signals.take() {
                            self.obey_signal(signal, options, nodes, sinks);
                        }
                    }
                    Source::RemoteFailure => {
                        if let Some(mut failure) = nodes.remote_failure() {
                            // With code 0, another host has joined, and no rank has failed: none has a dump to write.
                            let linger = match failure.code {
                                0 => Duration::ZERO,
                                _ => options.linger,
                            };
                            failure.sentence = failure.on_another_host();
                            self.fail(failure, linger, sinks);
                        }
                    }
                    Source::End(rank) => self.reap(rank, options, nodes, sinks)?,
                    Source::Output(rank, stream) => {
                        let output = &mut self.ranks[rank].outputs[stream];
                        if let Some(open) = output
                            && !open.forward(&mut buffer, sinks)
                        {
                            *output = None;
                        }
                    }
                }
            }
            self.end_overdue_ranks(options, sinks);
            self.end_stopped_ranks(nodes, sinks);
            if self.stopped.is_none() {
                nodes.tell_stopped_elsewhere(sinks);
            }
            self.account.write(sinks);
            if self.ranks.iter().all(|rank| rank.has_ended) {
                let deadline = *drain_deadline.get_or_insert_with(|| Instant::now() + DRAIN);
                if self.must_stop {
                    sinks.limit_stall();
                }
                let are_all_closed = self.outputs().next().is_none();
                // While this process's streams are stalled, the ranks' output is not read.
                let accepts_output =
                    sinks.has_room(Stream::Stdout) && sinks.has_room(Stream::Stderr);
                let is_read = accepts_output && Instant::now() >= deadline;
                if are_all_closed || is_read || sinks.are_given_up() {
                    let outputs = self.ranks.iter_mut().flat_map(|rank| &mut rank.outputs);
                    for output in outputs {
                        // Processes that the ranks left behind cannot write any more.
                        if let Some(mut output) = output.take() {
                            output.finish(sinks);
                        }
                    }
                    let mut ended = Ended {
                        failure: self.failure.take(),
                        stopped: self.stopped.take(),
                    };
                    if self.must_stop {
                        let failures = [&mut ended.failure, &mut ended.stopped];
                        for failure in failures.into_iter().flatten() {
                            failure.restart = Restart::Never;
                        }
                    }
                    return Ok(ended);
                }
            }
        }
    }

    /// The launcher's record of the ranks.
    pub(super) fn account(&mut self) -> &mut Account {
        &mut self.account
    }

    /// The outputs that are open.
    fn outputs(&self) -> impl Iterator<Item = (Source, &Output)> {
        self.ranks.iter().enumerate().flat_map(|(index, rank)| {
            let outputs = rank.outputs.iter().enumerate();
            outputs.filter_map(move |(stream, output)| {
                Some((Source::Output(index, stream), output.as_ref()?))
            })
        })
    }

    /// Waits for the next event or deadline.
    fn wait(
        &self,
        signals: &Signals,
        nodes: &Nodes,
        sinks: &mut Sinks,
        drain_deadline: Option<Instant>,
    ) -> Result<Vec<Source>> {
        let mut sources = Vec::new();
        let mut fds = Vec::new();
        let mut add = |source, fd| {
            sources.push(source);
            fds.push(PollFd::from_borrowed_fd(fd, PollFlags::IN));
        };
        for fd in signals.fds() {
            add(Source::Signals, fd);
        }
        if nodes.remote_failure().is_none() {
            add(Source::RemoteFailure, nodes.wake.as_fd());
        } else if self.failure.is_none() {
            return Ok(vec![Source::RemoteFailure]);
        }
        for (index, rank) in self.ranks.iter().enumerate() {
            if !rank.has_ended {
                add(Source::End(index), rank.pidfd.as_fd());
            }
        }
        let accepts_output =
            [Stream::Stdout, Stream::Stderr].map(|stream| (stream, sinks.has_room(stream)));
        for (source, output) in self.outputs() {
            if accepts_output.contains(&(output.stream(), true)) {
                add(source, output.as_fd());
            }
        }
        let retry = accepts_output
            .iter()
            .any(|(_, accepts)| !accepts)
            .then(|| Instant::now() + RETRY);
        let ending = self.ending.as_ref();
        let is_watching = self.ranks.iter().any(|rank| !rank.has_ended) && ending.is_none();
        let deadline = [
            retry,
            drain_deadline.filter(|&at| ends_wait(at, retry, Instant::now())),
            is_watching.then(|| self.stop_watch.next_look()),
            ending.and_then(|ending| Some(ending.terminate.as_ref()?.next_look())),
            ending.and_then(|ending| Some(ending.kill.as_ref()?.next_look())),
        ]
        .into_iter()
        .flatten()
        .min()
        .map(|time| time.saturating_duration_since(Instant::now()));
        let limit = deadline.map(Timespec::try_from).transpose()?;
        match poll(&mut fds, limit.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error).context("cannot wait for the ranks"),
        }
        let ready = fds.iter().map(|fd| !fd.revents().is_empty());
        Ok(sources
            .into_iter()
            .zip(ready)
            .filter_map(|(source, ready)| ready.then_some(source))
            .collect())
    }

    /// Handles the end of a process, if it has ended. A process that failed is replaced or ends the job, unless the job
    /// is ending already or the process was asked to end because it was stopped.
    fn reap(
        &mut self,
        index: usize,
        options: &Options,
        nodes: &Nodes,
        sinks: &mut Sinks,
    ) -> Result<()> {
        let rank = &mut self.ranks[index];
        let Some(status) = rank.child.try_wait()? else {
            return Ok(());
        };
        rank.has_ended = true;
        if self.replaced > 0 {
            match nodes.newest_attempt() {
                Ok(attempt) => self.account.attempt_begun(attempt),
                Err(error) => {
                    sinks.print_message(&format!("failed to read the job's attempt: {error}"))
                }
            }
        }
        self.account.ended(index, status);
        if status.success() {
            self.stop_watch.ended_in_order(Instant::now());
        }
        if status.success() || self.failure.is_some() || self.stop_watch.was_asked_to_end(index) {
            return Ok(());
        }
        let failure = Failure {
            sentence: format!(
                "{} {} after {:.1} s",
                self.ranks[index].name(),
                describe_end(status),
                self.started.elapsed().as_secs_f64()
            ),
            code: code_of(status),
            restart: Restart::Counted,
        };
        if self.replace(index, &failure, options, sinks)? {
            return Ok(());
        }
        if let Err(error) = nodes.publish_failure(&failure) {
            sinks.print_message(&format!("failed to notify the other hosts: {error}"));
        }
        self.fail(failure, options.linger, sinks);
        Ok(())
    }

    /// Reports the job's first failure, and gives the remaining ranks the time `linger` until they get SIGTERM.
    fn fail(&mut self, failure: Failure, linger: Duration, sinks: &mut Sinks) {
        if self.failure.is_some() {
            return;
        }
        let left = self.ranks.iter().filter(|rank| !rank.has_ended).count();
        let rest = match (left, linger.is_zero()) {
            (0, _) => String::new(),
            (left, true) => format!("; ending the other ranks of this host ({left})"),
            (left, false) => format!(
                "; ending the other ranks of this host ({left}) in {}",
                in_words(linger)
            ),
        };
        sinks.print_message(&format!("{}{rest}", failure.sentence));
        self.failure = Some(failure);
        self.ending = Some(Ending {
            terminate: Some(Countdown::new(linger, Instant::now())),
            kill: None,
            at_once: false,
        });
    }

    /// Forwards a signal to the ranks that have not ended. A signal other than SIGUSR1 and SIGUSR2 also ends the job.
    fn obey_signal(&mut self, signal: Signal, options: &Options, nodes: &Nodes, sinks: &mut Sinks) {
        self.account.received(signal);
        self.signal_all(signal);
        if !asks_to_stop(signal) {
            return;
        }
        let is_first = !std::mem::replace(&mut self.must_stop, true);
        let failure = stopped_by(signal);
        // The others know of a failure of this launcher's ranks; where the number of hosts may change, they must also
        // know that this launcher leaves.
        let is_news = self.failure.is_none() || options.nnodes.is_range();
        if is_first
            && is_news
            && let Err(error) = nodes.publish_failure(&failure)
        {
            sinks.print_message(&format!("failed to notify the other hosts: {error}"));
        }
        // With code 0, another host has joined: the signal is why this one ends.
        if self.failure.as_ref().is_none_or(|first| first.code == 0) {
            self.failure = Some(failure);
        }
        let name = name_of(signal);
        if self.ranks.iter().all(|rank| rank.has_ended) {
            // Only output is left, which no process may be reading.
            sinks.print_message(&format!("{name}: the ranks of this host have ended"));
            sinks.limit_wait();
            return;
        }
        // While the ranks linger, this signal is the first that asks them to end, so their grace period begins now. If
        // they were asked before, the grace period is over at once.
        let ending = self.ending.as_ref();
        let were_asked = ending.is_some_and(|ending| ending.terminate.is_none());
        let are_killed = were_asked && ending.is_some_and(|ending| ending.kill.is_none());
        let grace = match were_asked {
            true => Duration::ZERO,
            false => options.grace,
        };
        if !were_asked {
            sinks.print_message(&format!("{name}: forwarded to the ranks"));
        }
        self.ending = Some(Ending {
            terminate: None,
            kill: (!are_killed).then(|| Countdown::new(grace, Instant::now())),
            at_once: were_asked,
        });
    }

    /// Sends SIGTERM and SIGKILL when they are due.
    fn end_overdue_ranks(&mut self, options: &Options, sinks: &mut Sinks) {
        let Some(ending) = &mut self.ending else {
            return;
        };
        let now = Instant::now();
        let is_over = |time: &mut Option<Countdown>| {
            let over = time.take_if(|time| time.is_over(now));
            over.is_some()
        };
        if is_over(&mut ending.terminate) {
            ending.kill = Some(Countdown::new(options.grace, now));
            self.signal_all(Signal::TERM);
        }
        let Some(ending) = &mut self.ending else {
            return;
        };
        if is_over(&mut ending.kill) {
            let left: Vec<String> = self
                .ranks
                .iter()
                .filter(|rank| !rank.has_ended)
                .map(|rank| rank.rank.to_string())
                .collect();
            if !left.is_empty() {
                let reason = match ending.at_once {
                    true => "at a signal that came while the ranks were ending".to_owned(),
                    false => format!("after {}", in_words(options.grace)),
                };
                let left = left.join(", ");
                sinks.print_message(&format!(
                    "killing the remaining ranks {reason}: rank {left}"
                ));
            }
            self.signal_all(Signal::KILL);
        }
    }

    /// Ends the ranks that were stopped for too long, and only these.
    fn end_stopped_ranks(&mut self, nodes: &Nodes, sinks: &mut Sinks) {
        if self.ending.is_some() {
            return;
        }
        let ranks = &self.ranks;
        let seen = || {
            let left = ranks.iter().enumerate().filter(|(_, rank)| !rank.has_ended);
            let seen = left.map(|(index, rank)| Seen {
                index,
                name: rank.name(),
                state: State::of(rank.child.id()),
            });
            seen.collect()
        };
        for action in self.stop_watch.look(seen, Instant::now()) {
            match action {
                Action::Print(text) => sinks.print_message(&text),
                Action::Terminate(index, sentence) => {
                    sinks.print_message(&sentence);
                    if self.stopped.is_none() {
                        let failure = Failure {
                            sentence,
                            code: STOPPED,
                            restart: Restart::Counted,
                        };
                        // Before the rank ends: ranks of other hosts may fail because of that.
                        if let Err(error) = nodes.publish_stopped(&failure) {
                            sinks.print_message(&format!(
                                "failed to notify the other hosts: {error}"
                            ));
                        }
                        self.stopped = Some(failure);
                    }
                    self.signal(index, Signal::TERM);
                    // A stopped process handles SIGTERM only once it is continued.
                    self.ranks[index].signal(Signal::CONT);
                }
                Action::Kill(index) => {
                    sinks.print_message(&format!("killing {}", self.ranks[index].name()));
                    self.signal(index, Signal::KILL);
                }
            }
        }
    }

    /// Sends a signal to the process at this index and its process group, and records that it was sent.
    fn signal(&mut self, index: usize, signal: Signal) {
        if self.ranks[index].signal(signal) {
            self.account.sent(index, signal);
        }
    }

    /// Sends a signal to the ranks that have not ended.
    fn signal_all(&mut self, signal: Signal) {
        for index in 0..self.ranks.len() {
            self.signal(index, signal);
        }
    }
}

/// Whether a wait ends when the time for the rest of the output is over. Not again once it is: a wait for stalled
/// streams then ends only at the next look at these.
fn ends_wait(drain_deadline: Instant, retry: Option<Instant>, now: Instant) -> bool {
    retry.is_none() || drain_deadline > now
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            if !rank.has_ended {
                rank.signal(Signal::KILL);
                // The rank was killed, so the wait is short. After an error, nothing more can be done.
                let _ = rank.child.wait();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_for_stalled_output_does_not_end_again_and_again_once_the_time_is_over() {
        let now = Instant::now();
        let (later, retry) = (now + RETRY, Some(now + RETRY));
        assert!(ends_wait(later, retry, now) && ends_wait(later, None, now));
        assert!(ends_wait(now, None, now));
        assert!(!ends_wait(now, retry, now));
    }
}
