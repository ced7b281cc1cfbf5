//! Coordination between the launchers of a job's nodes: their agreement before the job, and notifications during it.
//!
//! The launchers use the job's store, under keys with their own prefix. Node 0 serves the store, publishes the job's
//! name, and detects launchers that have ended: every launcher regularly increments a counter in the store, its pulse.

use super::options::Options;
use super::{Failure, LAUNCHER_FAILED};
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
/// Time between two increments of a launcher's pulse.
const PULSE: Duration = Duration::from_millis(500);
/// A launcher whose pulse has not advanced for this long counts as ended.
const SILENCE: Duration = Duration::from_secs(30);
/// How long node 0 waits for the others to read how the job ended.
const LEAVE_TIME: Duration = Duration::from_secs(5);

/// The facts about the whole job that the ranks need.
pub(super) struct Job {
    pub(super) id: String,
    pub(super) world_size: u32,
    /// The number of this host's first rank.
    pub(super) first_rank: u32,
    pub(super) master_port: u16,
}

/// A failure that a launcher reported, or that was detected because the pulse of a launcher stopped or the store could
/// not be reached.
#[derive(Default)]
struct RemoteFailure {
    failure: Mutex<Option<Failure>>,
    stop: AtomicBool,
}

pub(super) struct Nodes {
    pub(super) job: Job,
    /// Readable once [`Self::remote_failure`] returns a failure; of the current attempt.
    pub(super) wake: Arc<OwnedFd>,
    node_rank: u32,
    nnodes: u32,
    /// How often the ranks were started again.
    attempt: u32,
    keys: Arc<PrefixStore<TcpStore>>,
    remote: Arc<RemoteFailure>,
    listener: Option<JoinHandle<()>>,
}

impl Nodes {
    /// Opens the job's store, and reads how many ranks the other launchers start.
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
        let &Options {
            nnodes, node_rank, ..
        } = options;
        let started = Instant::now();
        let addr = options.master_addr.as_str();
        if nnodes == 1 {
            let store = TcpStore::host_with(addr, options.master_port, options.timeout, &access)?;
            return Self::agree(options, PrefixStore::new(KEYS, Arc::new(store)), started);
        }
        let mut rendezvous = Rendezvous::explicit(node_rank, nnodes, addr, options.master_port)?;
        if let Some(id) = &options.job_id {
            rendezvous.job.clone_from(id);
        }
        let store = rendezvous.connect_store(&access, options.timeout)?;
        let keys = PrefixStore::new(KEYS, Arc::new(store));
        rendezvous
            .check_in(&keys)
            .context("the launchers do not agree (what follows calls a node a rank)")?;
        Self::agree(options, keys, started)
    }

    fn agree(options: &Options, keys: PrefixStore<TcpStore>, started: Instant) -> Result<Self> {
        let &Options {
            nnodes, node_rank, ..
        } = options;
        let left = || options.timeout.saturating_sub(started.elapsed());
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
            .multi_get(&names, left())
            .context("cannot read how many ranks each node starts")?;
        let sizes = sizes
            .iter()
            .map(|size| {
                std::str::from_utf8(size)?
                    .parse::<u32>()
                    .map_err(Into::into)
            })
            .collect::<Result<Vec<u32>>>()
            .context("another launcher published an invalid number of ranks")?;
        let id = String::from_utf8_lossy(&keys.get("job", left())?).into_owned();
        let world_size = sizes
            .iter()
            .try_fold(0_u32, |sum, size| sum.checked_add(*size));
        let job = Job {
            id,
            world_size: world_size.context("the nodes start too many ranks together")?,
            first_rank: sizes[..node_rank as usize].iter().sum(),
            master_port: keys.inner().port(),
        };
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
        Ok(Self {
            job,
            wake,
            node_rank,
            nnodes,
            attempt: 0,
            keys: Arc::new(keys),
            remote: Arc::default(),
            listener: None,
        })
    }

    /// Begins an attempt: from now on failures of the other nodes in it are noticed.
    pub(super) fn begin(&mut self, attempt: u32) -> Result<()> {
        self.attempt = attempt;
        if self.nnodes > 1 {
            self.remote = Arc::default();
            self.wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
            self.listener = Some(self.listen()?);
        }
        Ok(())
    }

    fn listen(&self) -> Result<JoinHandle<()>> {
        let (keys, remote, wake) = (self.keys.clone(), self.remote.clone(), self.wake.clone());
        let (node_rank, nnodes) = (self.node_rank, self.nnodes);
        let failure_key = failure_key(self.attempt);
        let listen = move || {
            let mut pulses = Pulses::of(if node_rank == 0 { nnodes } else { 0 });
            while !remote.stop.load(Ordering::Relaxed) {
                let reported = keys
                    .add(&format!("pulse/{node_rank}"), 1)
                    .and_then(|_| pulses.missing(&*keys))
                    .and_then(|gone| match gone {
                        Some(node) => {
                            let failure = Failure {
                                sentence: format!(
                                    "the launcher of node {node} was silent for {} s",
                                    SILENCE.as_secs()
                                ),
                                code: LAUNCHER_FAILED,
                                may_restart: false,
                            };
                            let held = publish_failure(&*keys, &failure_key, &failure);
                            held.map(Some)
                        }
                        None => match keys.get(&failure_key, PULSE) {
                            Ok(text) => Ok(Some(read_failure(&text))),
                            Err(error) if error.kind() == ErrorKind::Timeout => Ok(None),
                            Err(error) => Err(error),
                        },
                    });
                let failure = match reported {
                    // A node also reads its own failure, which has no effect.
                    Ok(None) => continue,
                    Ok(Some(failure)) => failure,
                    Err(error) => Failure {
                        sentence: format!("the store of node 0's launcher failed: {error}"),
                        code: LAUNCHER_FAILED,
                        may_restart: false,
                    },
                };
                *remote
                    .failure
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner) = Some(failure);
                // A write to an eventfd fails only when it is full, and then it is readable.
                let _ = rustix::io::write(&*wake, &1_u64.to_ne_bytes());
                return;
            }
        };
        let thread = std::thread::Builder::new().name("rcomm-run/nodes".to_owned());
        Ok(thread.spawn(listen)?)
    }

    /// The job's failure as read from the store, if there is one; it may be the failure that this node reported.
    pub(super) fn remote_failure(&self) -> Option<Failure> {
        let failure = self.remote.failure.lock();
        failure.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Notifies the other launchers of a failure on this node. The first report is the job's failure.
    pub(super) fn publish_failure(&self, failure: &Failure) -> rcomm::Result<()> {
        match self.nnodes {
            1 => Ok(()),
            _ => publish_failure(&*self.keys, &failure_key(self.attempt), failure).map(drop),
        }
    }

    /// Ends the attempt on this node, and returns its failure, if any: with several nodes, the one that was reported
    /// first. Without a failure on this node, waits until the attempt has ended on all nodes or one of them has failed.
    pub(super) fn end(&mut self, failure: Option<Failure>) -> Result<Option<Failure>> {
        if self.nnodes == 1 {
            return Ok(failure);
        }
        let mut outcome = failure;
        if outcome.is_none() {
            let finished = format!("finished/{}", self.attempt);
            self.keys.add(&finished, 1)?;
            while outcome.is_none() && self.keys.add(&finished, 0)? < i64::from(self.nnodes) {
                std::thread::sleep(PULSE / 10);
                outcome = self.remote_failure();
            }
        }
        self.remote.stop.store(true, Ordering::Relaxed);
        if let Some(listener) = self.listener.take() {
            // The thread does not panic, and its failure is read above.
            let _ = listener.join();
        }
        Ok(outcome)
    }

    /// Whether all nodes want to start their ranks again after the attempt that has ended.
    ///
    /// # Blocking
    /// Until all launchers have ended their ranks: for the time that these may take, and the launchers' own time-out.
    pub(super) fn agree_to_restart(&self, wants: bool, options: &Options) -> Result<bool> {
        if self.nnodes == 1 {
            return Ok(wants);
        }
        let own = format!("restart/{}/{}", self.attempt, self.node_rank);
        let published = self.keys.set(&own, if wants { b"yes" } else { b"no" });
        if !wants {
            // The store may have failed; this node leaves in any case.
            return Ok(false);
        }
        published?;
        let all = (0..self.nnodes).map(|node| format!("restart/{}/{node}", self.attempt));
        let all: Vec<String> = all.collect();
        let all: Vec<&str> = all.iter().map(String::as_str).collect();
        let limit = options.linger + options.grace + options.timeout;
        let answers = self
            .keys
            .multi_get(&all, limit)
            .context("cannot start again: a node's launcher did not say whether it does")?;
        Ok(answers.iter().all(|answer| answer == b"yes"))
    }

    /// Ends the job on this node. Node 0, which serves the store, waits up to [`LEAVE_TIME`] for the others.
    pub(super) fn leave(&mut self, outcome: Option<Failure>) -> Result<Option<Failure>> {
        if self.nnodes == 1 {
            return Ok(outcome);
        }
        let left = self.keys.add("left", 1);
        if self.node_rank == 0 {
            let deadline = Instant::now() + LEAVE_TIME;
            while Instant::now() < deadline && self.keys.add("left", 0)? < i64::from(self.nnodes) {
                std::thread::sleep(PULSE / 10);
            }
        } else if outcome.is_none() {
            left?;
        }
        Ok(outcome)
    }
}

/// The other launchers' pulses, as read by node 0: node, last value, and when the value was first seen.
struct Pulses(Vec<(u32, i64, Instant)>);

impl Pulses {
    fn of(nnodes: u32) -> Self {
        Self((1..nnodes).map(|node| (node, 0, Instant::now())).collect())
    }

    /// Returns a node whose pulse has stopped, if there is one.
    fn missing(&mut self, keys: &impl Store) -> rcomm::Result<Option<u32>> {
        for (node, count, since) in &mut self.0 {
            let now = keys.add(&format!("pulse/{node}"), 0)?;
            if now != *count {
                (*count, *since) = (now, Instant::now());
            } else if since.elapsed() > SILENCE {
                return Ok(Some(*node));
            }
        }
        Ok(None)
    }
}

fn failure_key(attempt: u32) -> String {
    format!("failure/{attempt}")
}

/// Publishes a failure, unless there is one, and returns the one that is published.
fn publish_failure(keys: &impl Store, key: &str, failure: &Failure) -> rcomm::Result<Failure> {
    let restart = if failure.may_restart { " restart" } else { "" };
    let text = format!("{}{restart}\n{}", failure.code, failure.sentence);
    let held = keys.compare_set(key, b"", text.as_bytes())?;
    Ok(read_failure(&held))
}

fn read_failure(text: &[u8]) -> Failure {
    let text = String::from_utf8_lossy(text);
    let (head, sentence) = text.split_once('\n').unwrap_or(("", &text));
    let mut head = head.split(' ');
    let code = head.next().and_then(|code| code.parse().ok());
    Failure {
        sentence: sentence.to_owned(),
        code: code.unwrap_or(LAUNCHER_FAILED),
        may_restart: head.next() == Some("restart"),
    }
}
