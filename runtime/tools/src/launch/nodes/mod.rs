//! Coordination between the launchers of a job's hosts: their agreement before the job, and notifications during it.
//!
//! The launchers use the job's store, under keys with their own prefix. One launcher serves the store, publishes the
//! job's name, and detects launchers that have ended: every launcher regularly increments a counter in the store, its
//! *pulse*. The launcher with the store is that of host 0, unless the number of hosts may change (`rounds`).

mod ending;

use super::account::Account;
use super::options::Options;
use super::output::Sinks;
use super::pulses::{Life, PULSE, Pulses, pulse_key};
use super::rounds::{Next, Rounds};
use super::signals::Signals;
use super::{Failure, LAUNCHER_FAILED, Restart, STOPPED};
use anyhow::{Context, Result};
use rcomm::store::{PrefixStore, Store, StoreAccess, TcpStore};
use rcomm::{ErrorKind, Rendezvous, Secret, Tls};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The prefix of every key of the launchers.
const KEYS: &str = "rcomm-run";
/// How long the launcher with the store waits for the others to read how the job ended.
pub(super) const LEAVE_TIME: Duration = Duration::from_secs(5);
/// How long the store may take to note that a rank is ended because it was stopped. Meanwhile this launcher obeys no
/// signal and forwards no output.
const NOTE_TIME: Duration = Duration::from_secs(2);

/// The facts about the whole job that the ranks need.
#[derive(Clone, Default)]
pub(super) struct Job {
    /// The job's name.
    pub(super) id: String,
    pub(super) world_size: u32,
    /// The number of this host's first rank.
    pub(super) first_rank: u32,
    /// The port of the job's store.
    pub(super) master_port: u16,
    /// This host's number among the job's hosts, from 0.
    pub(super) node: u32,
    /// How many hosts the job has.
    pub(super) nnodes: u32,
}

/// What [`Nodes::begin`] has begun.
pub(super) enum BeginOutcome {
    /// An attempt.
    Attempt,
    /// Nothing: the job is over, with this failure, if any.
    Over(Option<Failure>),
}

/// What the listening thread has found.
#[derive(Default)]
struct RemoteFailure {
    /// A failure that a launcher reported, or that was detected because the pulse of a launcher stopped, another host
    /// came or the store could not be reached.
    failure: Mutex<Option<Failure>>,
    /// The end of a rank because it was stopped, as a launcher has published it; maybe this one.
    stopped: Mutex<Option<Failure>>,
    /// Whether [`Self::stopped`] was printed.
    is_stopped_told: AtomicBool,
    /// Set when the listening thread must end.
    stop: AtomicBool,
}

impl RemoteFailure {
    fn stopped(&self) -> Option<Failure> {
        let stopped = self.stopped.lock();
        stopped.unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn note_stopped(&self, failure: Failure) {
        let stopped = self.stopped.lock();
        *stopped.unwrap_or_else(PoisonError::into_inner) = Some(failure);
    }
}

/// This launcher's connection to the launchers of the other hosts, over the job's store.
pub(super) struct Nodes {
    pub(super) job: Job,
    /// Readable once [`Self::remote_failure`] returns a failure of the current attempt.
    pub(super) wake: Arc<OwnedFd>,
    /// The attempt of the job; `None` before the first.
    attempt: Option<u32>,
    /// The rounds of the launchers, if the number of hosts may change.
    rounds: Option<Rounds>,
    /// The job's store, below the prefix of the launchers.
    keys: Arc<PrefixStore<TcpStore>>,
    remote: Arc<RemoteFailure>,
    /// The pulses of the other launchers, as this one last saw them.
    pulses: Arc<Mutex<Pulses>>,
    /// The thread of [`listen`](Self::listen), during an attempt.
    listener: Option<JoinHandle<()>>,
}

impl Nodes {
    /// Opens the job's store, and reads how many ranks the other launchers start; if the number of hosts may change,
    /// registers this launcher instead.
    ///
    /// The store requires the job's `secret`, unless the options ask for an open store.
    pub(super) fn join(options: &Options, secret: &str) -> Result<Self> {
        let tls = options.tls_files().as_ref().map(Tls::from_files);
        let tls = tls.transpose().context("TLS cannot be used")?;
        let secret = Secret::from_text(secret);
        let access = match (options.open_store, tls) {
            (true, _) => StoreAccess::Open,
            (false, Some(tls)) => StoreAccess::Tls(tls, Some(secret)),
            (false, None) => StoreAccess::Secret(secret),
        };
        let started = Instant::now();
        let (addr, port) = (options.master_addr.as_str(), options.master_port);
        if options.nnodes.is_range() {
            return Self::join_rounds(options, &access);
        }
        if options.nnodes.most == 1 {
            let store = TcpStore::host_with(addr, port, options.timeout, &access)?;
            return Self::agree(options, PrefixStore::new(KEYS, Arc::new(store)), started);
        }
        let (node, nnodes) = (options.node_rank.unwrap_or(0), options.nnodes.most);
        let mut rendezvous = Rendezvous::explicit(node, nnodes, addr, port)?;
        if let Some(id) = &options.job_id {
            rendezvous.job.clone_from(id);
        }
        let store = rendezvous.connect_store(&access, options.timeout)?;
        let keys = PrefixStore::new(KEYS, Arc::new(store));
        rendezvous
            .check_in(&keys)
            .context("the launchers do not agree (what follows calls a host a rank)")?;
        Self::agree(options, keys, started)
    }

    /// Opens the store of a job whose number of hosts may change.
    fn join_rounds(options: &Options, access: &StoreAccess) -> Result<Self> {
        let open = |serves: bool| {
            let (addr, port) = (options.master_addr.as_str(), options.master_port);
            // In a rendezvous, rank 0 serves the store, and every other rank connects to it.
            let rendezvous = Rendezvous::explicit(u32::from(!serves), 2, addr, port)?;
            rendezvous.connect_store(access, options.timeout)
        };
        let (store, serves) = match options.serves_store() {
            Some(serves) => (open(serves)?, serves),
            // Only one process can listen at the address, and only on its own host.
            None => match open(true) {
                Ok(store) => (store, true),
                Err(error) => {
                    let store = open(false).with_context(|| {
                        format!("no launcher serves the store, and this one cannot ({error})")
                    })?;
                    (store, false)
                }
            },
        };
        let keys = PrefixStore::new(KEYS, Arc::new(store));
        let rounds = Rounds::register(&keys, options, serves)?;
        Self::new(Job::default(), keys, Some(rounds))
    }

    fn new(job: Job, keys: PrefixStore<TcpStore>, rounds: Option<Rounds>) -> Result<Self> {
        let pulses = rounds.as_ref().map(Rounds::pulses);
        Ok(Self {
            job,
            wake: Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?),
            attempt: None,
            rounds,
            keys: Arc::new(keys),
            remote: Arc::default(),
            pulses: pulses.unwrap_or_default(),
            listener: None,
        })
    }

    /// The latest attempt of the job that has begun; 0 before the first.
    pub(super) fn attempt(&self) -> u32 {
        self.attempt.unwrap_or(0)
    }

    /// The newest attempt that the job's ranks have begun themselves; 0 if they have begun none.
    ///
    /// # Errors
    /// Those of the store.
    pub(super) fn newest_attempt(&self) -> rcomm::Result<u32> {
        rcomm::newest_attempt(&**self.keys.inner())
    }

    /// Whether the job has launchers on other hosts, or can get some.
    fn has_others(&self) -> bool {
        self.job.nnodes > 1 || self.rounds.is_some()
    }

    /// Publishes how many ranks this launcher starts, and reads the numbers of the other launchers, from which the
    /// job's facts follow.
    fn agree(options: &Options, keys: PrefixStore<TcpStore>, started: Instant) -> Result<Self> {
        let (node_rank, nnodes) = (options.node_rank.unwrap_or(0), options.nnodes.most);
        let time_left = || options.timeout.saturating_sub(started.elapsed());
        if node_rank == 0 {
            let id = match &options.job_id {
                Some(id) => id.clone(),
                None => format!("rcomm-{}", &crate::rank::new_secret()?[..12]),
            };
            keys.set("job", id.as_bytes())?;
        }
        keys.set(
            &format!("nproc/{node_rank}"),
            options.nproc.to_string().as_bytes(),
        )?;
        let names: Vec<String> = (0..nnodes).map(|node| format!("nproc/{node}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let sizes = keys
            .multi_get(&names, time_left())
            .context("cannot read how many ranks each host starts")?;
        let sizes = sizes
            .iter()
            .map(|size| {
                std::str::from_utf8(size)?
                    .parse::<u32>()
                    .map_err(Into::into)
            })
            .collect::<Result<Vec<u32>>>()
            .context("another launcher published an invalid number of ranks")?;
        let id = String::from_utf8_lossy(&keys.get("job", time_left())?).into_owned();
        let world_size = sizes
            .iter()
            .try_fold(0_u32, |sum, size| sum.checked_add(*size));
        let job = Job {
            id,
            world_size: world_size.context("the hosts start too many ranks together")?,
            first_rank: sizes[..node_rank as usize].iter().sum(),
            master_port: keys.inner().port(),
            node: node_rank,
            nnodes,
        };
        Self::new(job, keys, None)
    }

    /// Begins an attempt, or returns that the job is over. During the attempt, failures of the other hosts are noticed.
    ///
    /// # Blocking
    /// If the number of hosts may change: like [`Rounds::next`].
    pub(super) fn begin(
        &mut self,
        options: &Options,
        signals: &Signals,
        sinks: &mut Sinks,
    ) -> Result<BeginOutcome> {
        self.attempt = Some(match &mut self.rounds {
            Some(rounds) => match rounds.next(&self.keys, options, signals, sinks)? {
                Next::Over(failure) => return Ok(BeginOutcome::Over(failure)),
                Next::Attempt(attempt, job) => {
                    self.job = job;
                    attempt
                }
            },
            None => match self.attempt {
                None => 0,
                Some(attempt) => 1 + attempt.max(self.newest_attempt()?),
            },
        });
        if self.has_others() {
            self.remote = Arc::default();
            self.wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
            self.listener = Some(self.listen(options)?);
        }
        Ok(BeginOutcome::Attempt)
    }

    /// Starts the thread that gives this launcher's pulse, waits for a failure of the attempt on another host, and
    /// notes that a rank there was ended because it was stopped.
    fn listen(&self, options: &Options) -> Result<JoinHandle<()>> {
        let (keys, remote, wake) = (self.keys.clone(), self.remote.clone(), self.wake.clone());
        let found = self.remote.clone();
        let failure_key = failure_key(self.attempt());
        let stopped_key = stopped_key(self.attempt());
        let (own_id, watched, after_loss, known_launchers) = match &self.rounds {
            None => {
                let others = 1..if self.job.node == 0 {
                    self.job.nnodes
                } else {
                    1
                };
                let others = others.map(|node| (node, format!("the launcher of host {node}")));
                (self.job.node, others.collect(), Restart::Never, None)
            }
            Some(rounds) => {
                let known_launchers = rounds.known_launchers(options);
                (
                    rounds.id(),
                    rounds.watched(),
                    Restart::Free,
                    known_launchers,
                )
            }
        };
        let silence = options.node_timeout;
        let others: Vec<u32> = watched.iter().map(|(id, _)| *id).collect();
        let poll = move |keys: &PrefixStore<TcpStore>, pulses: &mut Pulses| {
            keys.add(&pulse_key(own_id), 1)?;
            for (id, label) in &watched {
                if pulses.look(keys, *id, silence)? == Life::Silent {
                    let failure = Failure {
                        sentence: format!("{label} was silent for {} s", silence.as_secs()),
                        code: LAUNCHER_FAILED,
                        restart: after_loss,
                    };
                    return publish_failure(keys, &failure_key, &failure).map(Some);
                }
            }
            if let Some(known) = known_launchers
                && keys.add("members", 0)? > known
            {
                let failure = Failure {
                    sentence: "another host has joined".to_owned(),
                    code: 0,
                    restart: Restart::Free,
                };
                return publish_failure(keys, &failure_key, &failure).map(Some);
            }
            if found.stopped().is_none() && keys.check(&[&stopped_key])? {
                found.note_stopped(read_failure(&keys.get(&stopped_key, PULSE)?));
            }
            match keys.get(&failure_key, PULSE) {
                Ok(text) => Ok(Some(read_failure(&text))),
                Err(error) if error.kind() == ErrorKind::Timeout => Ok(None),
                Err(error) => Err(error),
            }
        };
        let pulses = self.pulses.clone();
        let listen = move || {
            let failure = loop {
                if remote.stop.load(Ordering::Relaxed) {
                    return;
                }
                let mut pulses = pulses.lock().unwrap_or_else(PoisonError::into_inner);
                match poll(&keys, &mut pulses) {
                    // A launcher also reads its own failure, which has no effect.
                    Ok(None) => {}
                    Ok(Some(failure)) => break failure,
                    Err(error) => {
                        break Failure {
                            sentence: format!("the store of host 0's launcher failed: {error}"),
                            code: LAUNCHER_FAILED,
                            restart: Restart::Never,
                        };
                    }
                }
            };
            *remote
                .failure
                .lock()
                .unwrap_or_else(PoisonError::into_inner) = Some(failure);
            // A write to an eventfd fails only when it is full, and then it is readable.
            let _ = rustix::io::write(&*wake, &1_u64.to_ne_bytes());
            // This launcher's pulse continues while the ranks end, and so does its watch over the others.
            while !remote.stop.load(Ordering::Relaxed) && keys.add(&pulse_key(own_id), 1).is_ok() {
                let mut pulses = pulses.lock().unwrap_or_else(PoisonError::into_inner);
                for &id in &others {
                    // If the store fails, the loop ends with this launcher's own pulse.
                    let _ = pulses.look(&*keys, id, silence);
                }
                drop(pulses);
                std::thread::sleep(PULSE / 5);
            }
        };
        let thread = std::thread::Builder::new().name("rcomm-run/nodes".to_owned());
        Ok(thread.spawn(listen)?)
    }

    /// The attempt's failure as the store has it, or the failure of the store; `None` if there is none. The failure may
    /// be the one that this launcher has published.
    pub(super) fn remote_failure(&self) -> Option<Failure> {
        let failure = self.remote.failure.lock();
        failure.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Notifies the other launchers of a failure on this host. The first report is the job's failure.
    pub(super) fn publish_failure(&self, failure: &Failure) -> rcomm::Result<()> {
        if !self.has_others() {
            return Ok(());
        }
        let published = match &self.rounds {
            Some(rounds) => rounds.as_published(&self.keys, failure)?,
            None => failure.clone(),
        };
        publish_failure(&*self.keys, &failure_key(self.attempt()), &published).map(drop)
    }

    /// Returns whether this launcher continues after the attempt that has ended with this failure. It does if every
    /// host may start its ranks again and no launcher was asked to stop meanwhile. If the number of hosts may change,
    /// it does unless it has left the job.
    ///
    /// # Blocking
    /// Until all launchers have ended their ranks, or one of them does not continue: for the time that the ranks' end
    /// may take, and the launchers' time-out. Not at all if the number of hosts may change: [`begin`](Self::begin) then
    /// waits.
    pub(super) fn agree_to_restart(
        &mut self,
        may_restart: bool,
        failure: &Failure,
        options: &Options,
        signals: &Signals,
        account: &mut Account,
        sinks: &mut Sinks,
    ) -> Result<bool> {
        if let Some(rounds) = &mut self.rounds {
            return match rounds.ended(&self.keys, failure) {
                // A rank was ended because it was stopped, which stays the job's failure if the store fails afterwards.
                Err(error) if failure.code == STOPPED => {
                    sinks.print_message(&format!("failed to notify the other hosts: {error:#}"));
                    Ok(false)
                }
                continues => continues,
            };
        }
        let (attempt, nnodes) = (self.attempt(), self.job.nnodes);
        if nnodes == 1 {
            return Ok(may_restart);
        }
        // One key, which is set once, so that all launchers read the same decision.
        let decision = format!("restart/{attempt}");
        let decide = |answer: &[u8]| self.keys.compare_set(&decision, b"", answer);
        if !may_restart {
            // The store may have failed; this launcher leaves in any case.
            let _ = decide(b"no");
            return Ok(false);
        }
        let ready = format!("restart/{attempt}/ready");
        if self.keys.add(&ready, 1)? == i64::from(nnodes) {
            return Ok(decide(b"yes")? == b"yes");
        }
        let limit = options.linger + options.grace + options.timeout;
        let began = Instant::now();
        loop {
            match self.keys.get(&decision, PULSE / 10) {
                Ok(decided) => return Ok(decided == b"yes"),
                Err(error) if error.kind() == ErrorKind::Timeout && began.elapsed() < limit => {}
                // This launcher leaves, unless the last one has come meanwhile.
                Err(error) => match decide(b"no") {
                    Ok(decided) if decided == b"yes" => return Ok(true),
                    _ => {
                        return Err(error).context(
                            "cannot start again: a host's launcher did not say whether it does",
                        );
                    }
                },
            }
            if signals.has_stop() {
                // A store that has failed keeps no launcher from ending its ranks.
                let goes_on = decide(b"no").is_ok_and(|decided| decided == b"yes");
                // If the launchers have agreed before, the next attempt begins, and takes the signal.
                if !goes_on {
                    self.stopped(signals, account, sinks);
                }
                return Ok(goes_on);
            }
        }
    }

    /// Ends the job on this host, and returns the job's failure, if any. The launcher with the store waits up to
    /// [`LEAVE_TIME`] for the others.
    pub(super) fn leave(
        &mut self,
        outcome: Option<Failure>,
        options: &Options,
    ) -> Result<Option<Failure>> {
        if let Some(rounds) = &mut self.rounds {
            // If the job failed, an error here does not change how this launcher ends: the launcher with the store may
            // have ended.
            let finished = rounds.finish(&self.keys, outcome.as_ref(), options);
            return match &outcome {
                None => finished.map(|()| None),
                Some(_) => Ok(outcome),
            };
        }
        if self.job.nnodes == 1 {
            return Ok(outcome);
        }
        let announced = self.keys.add("left", 1);
        if self.job.node == 0 {
            let deadline = Instant::now() + LEAVE_TIME;
            let nnodes = i64::from(self.job.nnodes);
            while Instant::now() < deadline && self.keys.add("left", 0)? < nnodes {
                std::thread::sleep(PULSE / 10);
            }
        } else if outcome.is_none() {
            announced?;
        }
        Ok(outcome)
    }
}

fn failure_key(attempt: u32) -> String {
    format!("failure/{attempt}")
}

fn stopped_key(attempt: u32) -> String {
    format!("stopped/{attempt}")
}

/// Publishes a failure unless the key already holds one. Returns the failure that the key holds afterwards.
fn publish_failure(
    keys: &(impl Store + ?Sized),
    key: &str,
    failure: &Failure,
) -> rcomm::Result<Failure> {
    let restart = match failure.restart {
        Restart::Never => "",
        Restart::Counted => " restart",
        Restart::Free => " again",
    };
    let text = format!("{}{restart}\n{}", failure.code, failure.sentence);
    let held = keys.compare_set(key, b"", text.as_bytes())?;
    Ok(read_failure(&held))
}

/// Reads what [`publish_failure`] has written. A malformed text is the sentence of a failure of the launcher.
fn read_failure(text: &[u8]) -> Failure {
    let text = String::from_utf8_lossy(text);
    let (head, sentence) = text.split_once('\n').unwrap_or(("", &text));
    let mut head = head.split(' ');
    let code = head.next().and_then(|code| code.parse().ok());
    Failure {
        sentence: sentence.to_owned(),
        code: code.unwrap_or(LAUNCHER_FAILED),
        restart: match head.next() {
            Some("restart") => Restart::Counted,
            Some("again") => Restart::Free,
            _ => Restart::Never,
        },
    }
}
