//! [`World`]: one process's place in a job; it owns the groups, the threads, the ring and the store.
//!
//! Making a world opens the ring, finds the other ranks, agrees with them on the secret and the name of this
//! run, and starts the threads. A world has no global state: dropping it frees everything but the ring's
//! file.

mod departure;
mod failed_init;
pub(crate) mod group_init;
pub(crate) mod init;
pub(crate) mod job_secret;

use crate::backend::{BackendFactory, BackendSet, OpenBackend, WorldContext};
use crate::config::Config;
use crate::config::rendezvous::Rendezvous;
use crate::group::maker::{GroupMaker, GroupOptions, Origin};
use crate::group::process_group::ProcessGroup;
use crate::op::deadline::Deadline;
use crate::op::error::{Error, ErrorKind, Result};
use crate::store::{PrefixStore, Store, TcpStore};
use crate::watch::dump_writer::{DumpWriter, Dumps, FileDumpWriter};
#[cfg(feature = "endpoint")]
use crate::watch::endpoint;
use crate::watch::failure_broadcast::{FailureBroadcast, FailureBroadcastParts, ResponderThread};
use crate::watch::heartbeat::HeartbeatMonitor;
use crate::watch::pipe::DumpPipe;
use crate::watch::watchdog::{Helpers, Watch, Watchdog};
use crate::world::failed_init::FailedInit;
use crate::world::init::{open_recorder, rendezvous, ring_place, run_name, write_notes};
use crate::world::job_secret::JobSecret;
use rcomm_recorder::model::{LinkEnd, Rank};
use rcomm_recorder::publish::Dump;
#[cfg(feature = "endpoint")]
use rcomm_recorder::publish::{Endpoint, EndpointAddress};
use rcomm_recorder::record::{FlightRecorder, OnConflict};
use std::collections::HashMap;
use std::fmt;
use std::marker::PhantomData;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How long a world that is dropped tries to publish its shutdown notice.
const DROP_TIME: Duration = Duration::from_secs(1);

/// One process's place in a job.
///
/// ```no_run
/// use rcomm::{Config, ReduceOp, World};
///
/// let world = World::init(Config::from_environment()?)?;
/// let mut gradients = vec![1.0f32; 1024];
/// world.group().all_reduce(&mut gradients, ReduceOp::Sum)?;
/// world.shutdown()?;
/// # Ok::<(), rcomm::Error>(())
/// ```
///
/// Call [`shutdown`](Self::shutdown) at the end. A world that is dropped without it (on an early return, in a
/// panic) aborts its groups, logs that, and leaves its ring for others to read. On the rank that serves the
/// store, dropping waits until the worlds of the other ranks are dropped or shut down, since these ranks
/// exchange their status through the store: for [`Config::status_wait`] at most, then up to 10 s until they
/// have read that all have left.
///
/// `B` is the set of backends that every world of this type can open; [`WorldBuilder::backend`] adds others.
///
/// # Thread safety
/// May be shared between threads.
pub struct World<B> {
    shared: Arc<WorldShared>,
    group: ProcessGroup,
    /// `None` after shutdown.
    threads: Option<Threads>,
    backends: PhantomData<fn() -> B>,
}

/// The world's threads, in the order in which they end.
struct Threads {
    watchdog: Watchdog,
    #[cfg(feature = "endpoint")]
    endpoint: Option<Endpoint>,
}

/// The state that the groups of a world share.
pub(crate) struct WorldShared {
    pub(crate) place: Rendezvous,
    pub(crate) config: Arc<Config>,
    pub(crate) root: Arc<dyn Store>,
    pub(crate) recorder: Arc<FlightRecorder>,
    pub(crate) watch: Arc<Watch>,
    dumps: Arc<Dumps>,
    dump_dir: PathBuf,
    /// The factories of the backends. The world itself uses the first one to compare what ranks issue and to
    /// agree on values.
    pub(crate) factories: Vec<Arc<dyn BackendFactory>>,
    pub(crate) next_id: AtomicU32,
    /// How many ranks the program has not excluded.
    remaining: AtomicU32,
    /// How many groups were made with each name and list of members.
    pub(crate) made: Mutex<HashMap<(String, Vec<Rank>), u32>>,
}

/// Builds a [`World`] with a store, backends or a dump writer that the program supplies.
pub struct WorldBuilder<B> {
    config: Config,
    store: Option<Arc<dyn Store>>,
    backends: Vec<OpenBackend>,
    dump_writer: Option<Box<dyn DumpWriter>>,
    set: PhantomData<fn() -> B>,
}

impl<B: BackendSet> WorldBuilder<B> {
    /// Uses this store instead of connecting to one at the address of the rendezvous.
    #[must_use]
    pub fn store(mut self, store: Arc<dyn Store>) -> Self {
        self.store = Some(store);
        self
    }

    /// Adds a backend, which [`Config::backend`] and [`GroupOptions::backend`] select by its name.
    #[must_use]
    pub fn backend(
        mut self,
        make: impl FnOnce(&WorldContext) -> Result<Arc<dyn BackendFactory>> + Send + 'static,
    ) -> Self {
        self.backends.push(Box::new(make));
        self
    }

    /// Hands dumps to this writer instead of writing them to files.
    #[must_use]
    pub fn dump_writer(mut self, writer: impl DumpWriter + 'static) -> Self {
        self.dump_writer = Some(Box::new(writer));
        self
    }

    /// Makes the world.
    ///
    /// # Blocking
    /// Until all ranks have arrived, for [`Config::init_timeout`] at most; then until the backends have
    /// connected, for the same time at most.
    ///
    /// # Errors
    /// `Rendezvous` names the ranks that did not arrive, or says what the ranks disagree on: two ranks with
    /// the same number, two jobs at one store, different world sizes or job secrets. Otherwise the error of
    /// the part that failed: the configuration, the store, the ring, a backend or a thread.
    pub fn init(self) -> Result<World<B>> {
        let mut config = self.config.clone();
        let place = config.rendezvous()?;
        config.rendezvous = Some(place.clone());
        let config = Arc::new(config);
        let deadline = Deadline::In(config.init_timeout).started();
        // The ring is opened before any step that may fail, so that a job that never starts leaves a record
        // too.
        let early = open_recorder(&place, &config, OnConflict::Refuse)?.map(Arc::new);
        let mut failed_init = FailedInit {
            rank: place.rank,
            recorder: early.clone(),
        };
        let made = self.make(place, config, deadline, early);
        failed_init.end(made.as_ref().err());
        made
    }

    /// Makes the world. `early` is the ring that `init` opened; `None` if another living process records as
    /// this rank.
    fn make(
        self,
        place: Rendezvous,
        config: Arc<Config>,
        deadline: Deadline,
        early: Option<Arc<FlightRecorder>>,
    ) -> Result<World<B>> {
        let phase = |name: &str| {
            if let Some(recorder) = &early {
                recorder.phase(name);
            }
        };
        let secret = JobSecret::of(&config, &place)?;
        phase("connect to the store");
        let root: Arc<dyn Store> = match self.store {
            Some(store) => store,
            None => Arc::new(secret.connect_store(&config, &place, deadline.remaining())?),
        };
        let notes = PrefixStore::new(format!("rcomm/{}", place.attempt), root.clone());
        phase("wait for all ranks");
        let agreed = rendezvous(&*root, &notes, &place, &config, secret, deadline)?;
        let (secret, run) = (agreed.secret, agreed.settings.run);
        let config = Arc::new(Config {
            tuning: agreed.settings.tuning,
            ..Config::clone(&config)
        });
        let recorder = match early {
            Some(recorder) => recorder,
            // The rendezvous has succeeded, so this process is the rank. Another process that records as this
            // rank belongs to another job, or is left over from an earlier one.
            None => open_recorder(&place, &config, OnConflict::NextPlace)?
                .map(Arc::new)
                .ok_or_else(|| Error::new(ErrorKind::Io, "no place for the ring"))?,
        };
        recorder.phase("connect");
        let watch = Arc::new(Watch::default());
        let dump_dir = config.dump_dir.join(run_name(&place.job, &run));
        let writer = self
            .dump_writer
            .unwrap_or_else(|| Box::new(FileDumpWriter::new(&dump_dir, config.dump_format)));
        let dumps = Arc::new(Dumps::new(recorder.clone(), watch.clone(), writer));
        let pipes = open_pipes(&config.dump_pipes, place.rank);
        let broadcast = FailureBroadcast::new(FailureBroadcastParts {
            rank: place.rank,
            attempt: place.attempt,
            store_end: match (place.uses_agent_store, place.rank) {
                (true, _) => Some(LinkEnd::Store),
                (false, 0) => None,
                (false, _) => Some(LinkEnd::StoreAtRank(0)),
            },
            root: root.clone(),
            watch: watch.clone(),
            recorder: recorder.clone(),
            dumps: dumps.clone(),
            status_wait: config.status_wait,
            interval: config.signal_interval,
            propagation: config.propagation,
        })?;
        let backends = Arc::new(PrefixStore::new("backend", Arc::new(notes)));
        let context = WorldContext {
            rank: place.rank,
            world_size: place.world_size,
            local_rank: place.local_rank,
            local_world_size: place.local_world_size,
            job: place.job.clone(),
            attempt: place.attempt,
            store: backends.clone(),
            secret,
            config: config.clone(),
            recorder: Some(recorder.clone()),
        };
        let mut to_open = B::backends(&config).into_iter().chain(self.backends);
        let mut factories: Vec<Arc<dyn BackendFactory>> = Vec::new();
        if let Some(open) = to_open.next() {
            factories.push(open(&context)?);
        }
        #[cfg(feature = "endpoint")]
        let (endpoint, announcement) =
            endpoint::serve(&place, &config, &context.secret, &recorder, &dumps, &root).unzip();
        #[cfg(not(feature = "endpoint"))]
        let announcement = None;
        // One request carries the keys by which others find this rank: those of the first backend
        // and of the endpoint. A second one carries those of the other backends, which are opened later.
        let full_name = |key: String| backends.inner().name(&backends.name(&key));
        let notes_of = |factory: &Arc<dyn BackendFactory>| {
            let notes = factory.announcement().into_iter();
            notes
                .map(|(key, note)| (full_name(key), note))
                .collect::<Vec<_>>()
        };
        let first = factories.iter().flat_map(&notes_of).chain(announcement);
        write_notes(&*root, first.collect())?;
        let mut others = Vec::new();
        for open in to_open {
            let factory = open(&context)?;
            others.extend(notes_of(&factory));
            factories.push(factory);
        }
        write_notes(&*root, others)?;
        let start_helpers = {
            let (watch, broadcast, timeout) =
                (watch.clone(), broadcast.clone(), config.heartbeat_timeout);
            move || {
                Ok(Helpers {
                    broadcast: ResponderThread::start(broadcast.clone(), pipes)?,
                    heartbeat: HeartbeatMonitor::start(watch, broadcast, timeout)?,
                })
            }
        };
        let interval = config.watchdog_interval;
        let threads = Threads {
            #[cfg(feature = "endpoint")]
            endpoint,
            watchdog: Watchdog::start(watch.clone(), broadcast, interval, start_helpers)?,
        };
        let shared = Arc::new(WorldShared {
            remaining: AtomicU32::new(place.world_size),
            place,
            config,
            root,
            recorder,
            watch,
            dumps,
            dump_dir,
            factories,
            next_id: AtomicU32::new(0),
            made: Mutex::default(),
        });
        let ranks = (0..shared.place.world_size).collect();
        let options = GroupOptions::named("default_pg");
        let group = shared.make_group("0".to_owned(), ranks, &options, Origin::New)?;
        tracing::info!(
            rank = shared.place.rank,
            world_size = shared.place.world_size,
            job = shared.place.job,
            ring_mib = %format_args!("{:.1}", shared.recorder.size_bytes() as f64 / f64::from(1 << 20)),
            ring_entries = shared.recorder.entries(),
            ring = ring_place(&shared.recorder),
            "world made"
        );
        shared.recorder.phase("");
        shared.watch.world_is_made();
        Ok(World {
            shared,
            group,
            threads: Some(threads),
            backends: PhantomData,
        })
    }
}

/// Makes the FIFOs by which dumps can be requested. If one cannot be made, that is logged, and the job
/// continues.
fn open_pipes(stems: &[PathBuf], rank: Rank) -> Vec<DumpPipe> {
    let open = |stem: &PathBuf| match DumpPipe::create(stem, rank) {
        Ok(pipe) => Some(pipe),
        Err(error) => {
            tracing::warn!(%error, "cannot make the pipe {}<rank>.pipe for dump requests", stem.display());
            None
        }
    };
    stems.iter().filter_map(open).collect()
}

impl<B: BackendSet> World<B> {
    /// Joins the job that the configuration, or the launcher's environment, describes.
    ///
    /// # Blocking
    /// As [`WorldBuilder::init`].
    ///
    /// # Errors
    /// As [`WorldBuilder::init`].
    pub fn init(config: Config) -> Result<Self> {
        Self::builder(config).init()
    }

    /// Connects to the store at the rendezvous as [`init`](Self::init) does, with a proof of the secret if
    /// the store requires one. Rank 0 serves the store, unless the launcher's agent does; if the rendezvous
    /// has port 0, the kernel chooses a port ([`TcpStore::port`]). Programs that put their keys under a
    /// prefix pass the store to [`WorldBuilder::store`].
    ///
    /// # Blocking
    /// For `timeout` at most. Later calls to the store that do not wait for other ranks have the same limit.
    ///
    /// # Errors
    /// As [`Rendezvous::connect_store`]. `Io` if a secret can neither be read nor generated,
    /// `InvalidArgument` if [`Config::store`] requires a proof and there is no secret.
    pub fn connect_store(config: &Config, timeout: Duration) -> Result<TcpStore> {
        let place = config.rendezvous()?;
        JobSecret::of(config, &place)?.connect_store(config, &place, timeout)
    }

    /// A builder, by which a program can supply a store, backends and a dump writer.
    pub fn builder(config: Config) -> WorldBuilder<B> {
        WorldBuilder {
            config,
            store: None,
            backends: Vec::new(),
            dump_writer: None,
            set: PhantomData,
        }
    }
}

impl<B> World<B> {
    /// This process's rank.
    pub fn rank(&self) -> Rank {
        self.shared.place.rank
    }

    /// Ranks in the world.
    pub fn size(&self) -> u32 {
        self.shared.place.world_size
    }

    /// This process's place in the job.
    pub fn place(&self) -> &Rendezvous {
        &self.shared.place
    }

    /// The options of this world.
    pub fn config(&self) -> &Config {
        &self.shared.config
    }

    /// The group of all ranks.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// The store through which the ranks have met. In a job that also has ranks of PyTorch, these see the
    /// same keys.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.shared.root
    }

    /// The recorder, for readers in this process.
    pub fn recorder(&self) -> &Arc<FlightRecorder> {
        &self.shared.recorder
    }

    /// Address at which this rank answers status requests; `None` if it has no endpoint.
    #[cfg(feature = "endpoint")]
    pub fn endpoint(&self) -> Option<&EndpointAddress> {
        let endpoint = self.threads.as_ref()?.endpoint.as_ref();
        endpoint.map(Endpoint::address)
    }

    /// The directory for this run's dump files, which is made for the first dump.
    pub fn dump_dir(&self) -> &std::path::Path {
        &self.shared.dump_dir
    }

    /// Records what the program does from now on (`load data`), so that the record of a rank that issues
    /// nothing still shows where it is. Cheap enough for every step.
    pub fn phase(&self, name: &str) {
        self.shared.recorder.phase(name);
    }

    /// Records which step the program is in.
    pub fn step(&self, step: i64) {
        self.shared.recorder.step(step);
    }

    /// Makes a group of these ranks of the world, in this order. Exactly its members call this, all of them
    /// with the same list.
    ///
    /// Groups of different lists may be made in any order; of several with the same list and purpose, the
    /// first group that each member makes is the same one, then the second, and so on.
    ///
    /// # Blocking
    /// Waits for other members only if a backend connects at once.
    ///
    /// # Errors
    /// `InvalidArgument` if the list is empty, repeats a rank, holds a rank that is not in the world, or
    /// omits the caller. `Rendezvous` if another member wants other backends. Otherwise the error of a
    /// backend that cannot connect.
    pub fn new_group(&self, ranks: &[Rank], options: &GroupOptions) -> Result<ProcessGroup> {
        self.shared.clone().new_group(ranks, options, Origin::New)
    }

    /// Continues without these ranks, after they were lost: from now on [`group`](Self::group) is the group
    /// of the remaining ranks. Every remaining rank calls this with the same list
    /// ([`find_absent`](ProcessGroup::find_absent) returns one). Ranks keep their numbers in the world.
    ///
    /// Groups with a lost member are aborted; others continue. The store must still be there: a world without
    /// rank 0 can shrink only if another process serves its store.
    ///
    /// # Blocking
    /// Until all remaining ranks have called this, or the time-out of [`group`](Self::group) has passed.
    ///
    /// # Errors
    /// As [`ProcessGroup::shrink`]. [`group`](Self::group) is then the old one, groups with a lost member
    /// stay aborted, and the call may be repeated.
    pub fn shrink(&mut self, excluding: &[Rank]) -> Result<()> {
        for group in self.shared.watch.groups() {
            let lost = excluding
                .iter()
                .find(|rank| group.info().ranks.contains(rank));
            if let Some(lost) = lost
                && group.refusal().is_none()
            {
                let message = format!("rank {lost} was lost, and the others continue without it");
                let error = Error::new(ErrorKind::Aborted, message).with_rank(*lost);
                group.close(None, error.in_group(group.label()));
            }
        }
        let options = GroupOptions::named(self.group.desc());
        self.group = self.group.shrink(excluding, &options)?;
        let remaining = self.group.size();
        self.shared.remaining.store(remaining, Ordering::Relaxed);
        tracing::warn!(
            ?excluding,
            remaining,
            "the world continues without some of its ranks"
        );
        Ok(())
    }

    /// This rank's record as it is now.
    pub fn snapshot(&self) -> Dump {
        self.shared.recorder.snapshot()
    }

    /// Makes a dump now and returns its location.
    ///
    /// # Errors
    /// The error names what could not be written and why.
    pub fn dump(&self) -> Result<String> {
        self.shared.dumps.try_make("requested by the program")
    }

    /// Waits for pending operations and closes all groups, the newest first; then waits for the other ranks,
    /// and ends the threads, the ring and the store.
    ///
    /// All ranks call it, and each waits for the others: so a rank that was lost after its last operation is
    /// noticed, and no rank finds the store closed.
    ///
    /// # Blocking
    /// Until pending operations have ended, then until all ranks have called this: for the world's time-out
    /// at most in each case. The second wait ends early once the process of a missing rank is known to have
    /// ended. If a group has failed, it lasts for [`Config::status_wait`] at most. The rank that serves the
    /// store may wait 10 s longer, until the others have read that all have left.
    ///
    /// # Errors
    /// The first error that a group reports. If no group has failed, `PeerLost` or `Timeout` names the ranks
    /// that did not call this. Everything is closed in any case; after an error, or if a group has failed,
    /// the ring is kept.
    pub fn shutdown(self) -> Result<()> {
        let timeout = self.shared.config.timeout;
        self.shutdown_within(timeout)
    }

    /// As [`shutdown`](Self::shutdown), with `timeout` in place of the world's time-out: for programs in
    /// which not every rank shuts down at the same time. If this rank serves the store, ranks that shut down
    /// later no longer find it.
    ///
    /// # Errors
    /// As [`shutdown`](Self::shutdown).
    pub fn shutdown_within(mut self, timeout: Duration) -> Result<()> {
        let deadline = Deadline::In(timeout).started();
        let mut result = Ok(());
        for group in self.shared.watch.groups().iter().rev() {
            let closed = group.shut_down(deadline);
            if result.is_ok() {
                result = closed;
            }
            if let Err(error) = &result {
                group.close(None, error.clone());
            }
        }
        let mut failed = result.is_err() || self.shared.has_failed();
        let limit = if failed {
            // After a failure some ranks may never call `shutdown`.
            self.shared.config.status_wait.min(timeout)
        } else {
            timeout
        };
        if let Err(error) = self.shared.depart(self.group.ranks(), limit) {
            tracing::warn!(%error, "some ranks did not confirm the shutdown");
            if !failed {
                failed = true;
                let failure = error.failure(self.shared.place.rank);
                self.shared.recorder.note_failure(&failure);
                result = Err(error);
            }
        }
        self.close_threads();
        if failed {
            self.shared.recorder.mark_closed();
        } else {
            let closed = self.shared.recorder.close();
            if let Err(error) = closed {
                tracing::warn!(%error, "the ring file could not be removed");
            }
        }
        result
    }

    fn close_threads(&mut self) {
        if let Some(mut threads) = self.threads.take() {
            threads.watchdog.stop();
        }
    }
}

impl<B> Drop for World<B> {
    fn drop(&mut self) {
        if self.threads.is_none() {
            return;
        }
        tracing::warn!(
            rank = self.shared.place.rank,
            "the world was dropped without shutdown: its groups are aborted, its ring is kept"
        );
        for group in self.shared.watch.groups().iter().rev() {
            let error = Error::new(ErrorKind::Closed, "the world was dropped without shutdown");
            group.close(None, error.in_group(group.label()));
        }
        // The other ranks now see the failure, and exchange their status through the store.
        let serves_store = self.shared.place.serves_store();
        if serves_store {
            let limit = self.shared.config.status_wait;
            if let Err(error) = self.shared.depart(self.group.ranks(), limit) {
                tracing::debug!(%error, "some ranks did not confirm that they have left");
            }
        }
        self.close_threads();
        // This rank has published its status: the rank that serves the store need not wait for it.
        if !serves_store {
            self.shared.announce_departure(DROP_TIME);
        }
    }
}

impl WorldShared {
    /// Whether a group of this world has failed or was aborted.
    fn has_failed(&self) -> bool {
        self.watch.groups().iter().any(|group| group.has_failed())
    }
}

impl<B> fmt::Debug for World<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("World")
            .field("rank", &self.rank())
            .field("size", &self.size())
            .field("job", &self.place().job)
            .finish()
    }
}
