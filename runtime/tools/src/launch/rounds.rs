//! Jobs whose number of hosts may change (`--nnodes MIN:MAX`): the launchers meet in rounds. Each round is an attempt
//! of the job, with the hosts that are present at its start.
//!
//! The launcher with the store decides who is in a round. A launcher that arrives later, or is not needed, waits for a
//! round that has a place for it.
//!
//! | key, below the launchers' prefix | holds | writer |
//! |---|---|---|
//! | `job` | the job's name | the launcher with the store, before it joins |
//! | `members` | how many launchers have joined | every launcher, once |
//! | `member/<id>` | the launcher's number of ranks and its host: `4 node-a` | every launcher; ids count from 0 |
//! | `pulse/<id>` | a counter that advances while the launcher lives | every launcher |
//! | `round/<n>` | the attempt, the job's name, and the ids of the members: `3\njob\n0 2`; or how the job ended: `over 0\n` | the launcher with the store |
//! | `rounds` | how many rounds were published | the launcher with the store |
//! | `ready/<attempt>/<id>` | `1`, once the launcher's ranks of that attempt have ended | every member of the round |
//! | `gone/<id>` | `1`: the launcher leaves, and the others go on | a launcher that was stopped by a signal |
//! | `left/<id>` | `1`, once the launcher knows how the job ended, or leaves | every launcher |

use super::nodes::{Job, LEAVE_TIME};
use super::options::Options;
use super::output::{Sinks, in_words};
use super::pulses::{Life, PULSE, Pulses, pulse_key};
use super::signals::{Signals, stopped_by};
use super::{Failure, LAUNCHER_FAILED, Restart};
use anyhow::{Context, Result, bail};
use rcomm::ErrorKind;
use rcomm::store::{PrefixStore, Store, TcpStore};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The job's store, below the prefix of the launchers.
type Keys = PrefixStore<TcpStore>;

/// The interval at which the launcher with the store checks which launchers are there, or know how the job ended.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Maximum number of launchers that may join a job, including those that wait for a place.
const MAX_LAUNCHERS: i64 = 65_536;

/// A launcher that has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Member {
    id: u32,
    /// The number of ranks that the launcher starts.
    nproc: u32,
    host: String,
}

/// This launcher's view of the rounds.
pub(super) struct Rounds {
    id: u32,
    serves_store: bool,
    /// The number of the next round.
    next: u32,
    /// The attempt and the members of the last round, the one with the store first; `None` before the first round, and
    /// if this launcher was not in the last one.
    round: Option<(u32, Vec<Member>)>,
    /// How many launchers had come when the last round was decided.
    seen: i64,
    /// How often a failure of ranks was followed by another round.
    restarts: u32,
    /// How the last attempt ended.
    failure: Option<Failure>,
    /// Whether this launcher has left the job, which continues without it.
    has_left: AtomicBool,
    /// The pulses of the other launchers, as this one last saw them, also while ranks run.
    pulses: Arc<Mutex<Pulses>>,
}

/// What this launcher does next.
pub(super) enum Next {
    /// The launcher starts ranks in this attempt.
    Attempt(u32, Job),
    /// The job is over, with this failure, if any.
    Over(Option<Failure>),
}

impl Rounds {
    /// Registers this launcher. The launcher with the store first publishes the job's name, for which the others wait.
    pub(super) fn register(keys: &Keys, options: &Options, serves_store: bool) -> Result<Self> {
        if serves_store {
            let id = match &options.job_id {
                Some(id) => id.clone(),
                None => format!("rcomm-{}", &crate::rank::new_secret()?[..12]),
            };
            keys.set("job", id.as_bytes())?;
        }
        // Waits for the launcher with the store, which publishes the job's name before it registers.
        keys.get("job", options.timeout)?;
        let count = keys.add("members", 1)?;
        if count > MAX_LAUNCHERS {
            bail!("{count} launchers have joined this job, which is more than {MAX_LAUNCHERS}");
        }
        let id = u32::try_from(count - 1)?;
        let host = rustix::system::uname();
        let host = host.nodename().to_string_lossy();
        keys.set(
            &member_key(id),
            format!("{} {host}", options.nproc).as_bytes(),
        )?;
        Ok(Self {
            id,
            serves_store,
            next: u32::try_from(keys.add("rounds", 0)?)?,
            round: None,
            seen: 0,
            restarts: 0,
            failure: None,
            has_left: AtomicBool::new(false),
            pulses: Arc::default(),
        })
    }

    pub(super) const fn id(&self) -> u32 {
        self.id
    }

    pub(super) fn pulses(&self) -> Arc<Mutex<Pulses>> {
        self.pulses.clone()
    }

    /// The launchers whose pulses this one watches, with a label for messages: the other members of the round if this
    /// launcher has the store, otherwise none.
    pub(super) fn watched(&self) -> Vec<(u32, String)> {
        let members = self.round.iter().flat_map(|(_, members)| members);
        let others = (0..).zip(members);
        let others = others.filter(|(_, member)| self.serves_store && member.id != self.id);
        let label = |(node, member): (u32, &Member)| {
            let label = format!("the launcher of host {node} ({})", member.host);
            (member.id, label)
        };
        others.map(label).collect()
    }

    /// If the current round has a place for another host: the number of launchers that had come when the round was
    /// decided. A larger number shows that one has come since. `None` if the round has no place, or if another launcher
    /// decides.
    pub(super) fn known_launchers(&self, options: &Options) -> Option<i64> {
        let members = self.round.as_ref().map_or(0, |(_, members)| members.len());
        (self.serves_store && members < options.nnodes.most as usize).then_some(self.seen)
    }

    /// Returns the failure to publish for the other launchers. If it allows no restart, as after a signal, a launcher
    /// without the store leaves the job, and the others continue.
    pub(super) fn as_published(&self, keys: &Keys, failure: &Failure) -> rcomm::Result<Failure> {
        if failure.restart != Restart::Never || self.serves_store {
            return Ok(failure.clone());
        }
        self.leave(keys)?;
        Ok(Failure {
            sentence: format!("a launcher leaves the job: {}", failure.sentence),
            restart: Restart::Free,
            ..failure.clone()
        })
    }

    /// Publishes that this launcher leaves the job, which continues without it.
    fn leave(&self, keys: &Keys) -> rcomm::Result<()> {
        self.has_left.store(true, Ordering::Relaxed);
        keys.set(&format!("gone/{}", self.id), b"1")
    }

    /// Notes how the attempt has ended, and that this launcher's ranks have ended. Returns whether this launcher takes
    /// part in what follows.
    pub(super) fn ended(&mut self, keys: &Keys, failure: &Failure) -> Result<bool> {
        self.failure = Some(failure.clone());
        if self.has_left.load(Ordering::Relaxed) {
            return Ok(false);
        }
        if let Some((attempt, _)) = &self.round {
            keys.set(&format!("ready/{attempt}/{}", self.id), b"1")?;
        }
        Ok(true)
    }

    /// Waits for the next round that this launcher is in, or for the end of the job.
    ///
    /// # Blocking
    /// A launcher that was in the last round waits for at most its time-outs. A launcher that the job has no place for
    /// waits until the job has one or ends. A signal ends the wait.
    pub(super) fn next(
        &mut self,
        keys: &Keys,
        options: &Options,
        signals: &Signals,
        sinks: &mut Sinks,
    ) -> Result<Next> {
        if self.serves_store {
            let text = self.decide(keys, options, signals, sinks)?;
            keys.set(&format!("round/{}", self.next), text.as_bytes())?;
            keys.add("rounds", 1)?;
        }
        let limit = options.linger + options.grace + options.timeout * 2;
        let mut since = Instant::now();
        let mut is_reported = false;
        loop {
            keys.add(&pulse_key(self.id), 1)?;
            if let Some(failure) = stop_of(signals) {
                self.leave(keys)?;
                return Ok(Next::Over(Some(failure)));
            }
            let text = match keys.get(&format!("round/{}", self.next), PULSE) {
                Err(error) if error.kind() == ErrorKind::Timeout => {
                    if self.round.is_some() && since.elapsed() > limit {
                        bail!(
                            "the launcher with the store has begun no new round within {}",
                            in_words(limit)
                        );
                    }
                    continue;
                }
                text => text.context("failed to read the next round from the job's store")?,
            };
            self.next += 1;
            since = Instant::now();
            match self.read(keys, &text)? {
                Some(next) => return Ok(next),
                None if is_reported => {}
                None => {
                    sinks.print_message(
                        "the job has as many hosts as it may have: this one waits until another is lost or leaves",
                    );
                    is_reported = true;
                }
            }
        }
    }

    /// Returns what a published round means for this launcher; `None` if the launcher is not in the round.
    fn read(&mut self, keys: &Keys, text: &[u8]) -> Result<Option<Next>> {
        let text = std::str::from_utf8(text).context(INVALID_KEY)?;
        let (head, rest) = text.split_once('\n').context(INVALID_KEY)?;
        if let Some(code) = head.strip_prefix("over ") {
            let failure = Failure {
                sentence: rest.to_owned(),
                code: code.parse().context(INVALID_KEY)?,
                restart: Restart::Never,
            };
            return Ok(Some(Next::Over((!rest.is_empty()).then_some(failure))));
        }
        let attempt: u32 = head.parse().context(INVALID_KEY)?;
        let (job, list) = rest.split_once('\n').context(INVALID_KEY)?;
        let ids = list.split(' ').map(|id| id.parse().context(INVALID_KEY));
        let ids = ids.collect::<Result<Vec<u32>>>()?;
        let Some(node) = ids.iter().position(|&id| id == self.id) else {
            self.round = None;
            return Ok(None);
        };
        let members = ids.iter().map(|&id| member(keys, id));
        let members = members.collect::<Result<Vec<Member>>>()?;
        let sizes = members.iter().map(|member| member.nproc);
        let world_size = sizes.clone().try_fold(0_u32, u32::checked_add);
        let job = Job {
            id: job.to_owned(),
            world_size: world_size.context("the hosts start too many ranks together")?,
            first_rank: sizes.take(node).sum(),
            master_port: keys.inner().port(),
            node: u32::try_from(node)?,
            nnodes: u32::try_from(members.len())?,
        };
        self.round = Some((attempt, members));
        Ok(Some(Next::Attempt(attempt, job)))
    }

    /// Decides who is in the next round, or that the job is over; returns the text to publish.
    fn decide(
        &mut self,
        keys: &Keys,
        options: &Options,
        signals: &Signals,
        sinks: &mut Sinks,
    ) -> Result<String> {
        let mut is_counted = false;
        match self.failure.take() {
            Some(failure) if failure.restart == Restart::Never => return Ok(over(&failure)),
            Some(failure) if failure.restart == Restart::Counted => {
                if self.restarts == options.max_restarts {
                    return Ok(over(&failure));
                }
                self.restarts += 1;
                is_counted = true;
            }
            _ => {}
        }
        let attempt = match &self.round {
            None => 0,
            Some((attempt, _)) => 1 + rcomm::newest_attempt(&**keys.inner())?.max(*attempt),
        };
        let members = match self.gather(keys, options, signals)? {
            Ok(members) => members,
            Err(failure) => return Ok(over(&failure)),
        };
        if attempt > 0 {
            let (restarts, most) = (self.restarts, options.max_restarts);
            let reason = match is_counted {
                true => format!("restart {restarts} of {most}"),
                false => "the hosts have changed".to_owned(),
            };
            sinks.print_message(&format!(
                "all ranks start again on {}: {reason}",
                match members.len() {
                    1 => "1 host".to_owned(),
                    count => format!("{count} hosts"),
                }
            ));
        }
        let ids: Vec<String> = members.iter().map(|member| member.id.to_string()).collect();
        let job = String::from_utf8_lossy(&keys.get("job", options.timeout)?).into_owned();
        Ok(format!("{attempt}\n{job}\n{}", ids.join(" ")))
    }

    /// Waits until enough launchers are there, and the ranks of the last attempt have ended; returns who is in the
    /// round, or why the job is over.
    fn gather(
        &mut self,
        keys: &Keys,
        options: &Options,
        signals: &Signals,
    ) -> Result<Result<Vec<Member>, Failure>> {
        let (is_first, before) = match &self.round {
            None => (true, Vec::new()),
            Some((_, members)) => (false, members.clone()),
        };
        let limit = match is_first {
            true => options.timeout,
            false => options.linger + options.grace + options.timeout,
        };
        let (least, most) = (options.nnodes.least as usize, options.nnodes.most as usize);
        let started = Instant::now();
        let mut enough_since = None;
        loop {
            keys.add(&pulse_key(self.id), 1)?;
            if let Some(failure) = stop_of(signals) {
                return Ok(Err(failure));
            }
            let (present, is_any_unready) = self.present(keys, &before, options)?;
            let chosen: Vec<Member> = present.into_iter().take(most).collect();
            if chosen.len() >= least {
                let since = *enough_since.get_or_insert_with(Instant::now);
                let last_call_is_over = !is_first || since.elapsed() >= options.last_call;
                if !is_any_unready && (chosen.len() == most || last_call_is_over) {
                    return Ok(Ok(chosen));
                }
            }
            if started.elapsed() > limit {
                let hosts: Vec<&str> = chosen.iter().map(|member| &*member.host).collect();
                let sentence = format!(
                    "the job needs {least} hosts, and within {} there were only {}: {}",
                    in_words(limit),
                    hosts.len(),
                    hosts.join(", ")
                );
                return Ok(Err(Failure {
                    sentence,
                    code: LAUNCHER_FAILED,
                    restart: Restart::Never,
                }));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Returns the launchers that are there: this one, those of the last round in their order, then others as they
    /// came. Also returns whether another launcher has yet to end its ranks, or to show that it lives, and so is left
    /// out.
    fn present(
        &mut self,
        keys: &Keys,
        before: &[Member],
        options: &Options,
    ) -> Result<(Vec<Member>, bool)> {
        let attempt = self.round.as_ref().map(|(attempt, _)| *attempt);
        let was_in = |id: u32| before.iter().any(|member| member.id == id);
        self.seen = keys.add("members", 0)?;
        let all = 0..u32::try_from(self.seen.min(MAX_LAUNCHERS))?;
        let others = before.iter().map(|member| member.id);
        let others = others.chain(all.filter(|&id| !was_in(id)));
        let mut pulses = self.pulses.lock().unwrap_or_else(PoisonError::into_inner);
        let mut present = vec![member(keys, self.id)?];
        let mut is_any_unready = false;
        for id in others.filter(|&id| id != self.id) {
            let is_set = |key: String| keys.check(&[&key]);
            if is_set(format!("gone/{id}"))? || !is_set(member_key(id))? {
                continue;
            }
            match pulses.look(keys, id, options.node_timeout)? {
                Life::Alive => {}
                Life::Silent => continue,
                Life::Unknown => {
                    is_any_unready = true;
                    continue;
                }
            }
            if let Some(attempt) = attempt.filter(|_| was_in(id))
                && !is_set(format!("ready/{attempt}/{id}"))?
            {
                is_any_unready = true;
                continue;
            }
            present.push(member(keys, id)?);
        }
        Ok((present, is_any_unready))
    }

    /// Ends the job on this launcher. The launcher with the store publishes how the job ended, and waits until the
    /// others know it, for at most [`LEAVE_TIME`].
    pub(super) fn finish(
        &mut self,
        keys: &Keys,
        outcome: Option<&Failure>,
        options: &Options,
    ) -> Result<()> {
        keys.set(&format!("left/{}", self.id), b"1")?;
        if !self.serves_store {
            return Ok(());
        }
        let text = outcome.map_or_else(|| "over 0\n".to_owned(), over);
        keys.compare_set(&format!("round/{}", self.next), b"", text.as_bytes())?;
        let deadline = Instant::now() + LEAVE_TIME;
        let mut pulses = self.pulses.lock().unwrap_or_else(PoisonError::into_inner);
        let all = 0..u32::try_from(keys.add("members", 0)?.min(MAX_LAUNCHERS))?;
        let mut others: Vec<u32> = all.filter(|&id| id != self.id).collect();
        while !others.is_empty() && Instant::now() < deadline {
            std::thread::sleep(POLL_INTERVAL);
            let mut unaware = Vec::new();
            for id in others {
                let knows = keys.check(&[&format!("left/{id}")])?
                    || pulses.look(keys, id, options.node_timeout)? == Life::Silent;
                if !knows {
                    unaware.push(id);
                }
            }
            others = unaware;
        }
        Ok(())
    }
}

/// The error for a value that no launcher writes.
const INVALID_KEY: &str =
    "a key of the launchers in the store has an invalid value: another program may have written it";

fn member_key(id: u32) -> String {
    format!("member/{id}")
}

/// Reads what the launcher with this id has published about itself.
fn member(keys: &Keys, id: u32) -> Result<Member> {
    let text = keys.get(&member_key(id), Duration::from_secs(1))?;
    let text = std::str::from_utf8(&text).context(INVALID_KEY)?;
    let (nproc, host) = text.split_once(' ').context(INVALID_KEY)?;
    Ok(Member {
        id,
        nproc: nproc.parse().context(INVALID_KEY)?,
        host: host.chars().filter(|c| !c.is_control()).take(64).collect(),
    })
}

/// The text of a round that says how the job ended.
fn over(failure: &Failure) -> String {
    format!("over {}\n{}", failure.code, failure.sentence)
}

/// Returns the failure of a launcher that a signal asks to stop while it has no ranks; `None` without such a signal.
fn stop_of(signals: &Signals) -> Option<Failure> {
    signals.take_stop().map(stopped_by)
}
