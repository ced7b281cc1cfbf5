//! [`World`]: one process's place in a job; it owns the groups, the threads, the ring and the store.
//!
//! Making a world finds the other ranks, agrees with them on the secret and the name of this run, opens the
//! ring, and starts the threads. It has no global state: dropping the world frees everything.

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
/// store, dropping waits until the worlds of the other ranks are dropped or shut down, for
/// [`Config::status_wait`] at most, since these ranks exchange their status through the store.
///
/// `B` is the set of backends that it can open by itself; more come with
/// [`WorldBuilder::backend`].
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
    /// Ranks that the program has not excluded.
    left: AtomicU32,
    /// How many groups were made with each name and list of members.
    pub(crate) made: Mutex<HashMap<(String, Vec<Rank>), u32>>,
}

/// Makes a world from parts of the caller's own.
pub struct WorldBuilder<B> {
    config: Config,
    store: Option<Arc<dyn Store>>,
    backends: Vec<OpenBackend>,
    dump_writer: Option<Box<dyn DumpWriter>>,
    set: PhantomData<fn() -> B>,
}

impl<B: BackendSet> WorldBuilder<B> {
    /// Uses this store in place of one at the rendezvous.
    #[must_use]
    pub fn store(mut self, store: Arc<dyn Store>) -> Self {
        self.store = Some(store);
        self
    }

    /// Adds a backend, to be asked for by name in [`Config::backend`].
    #[must_use]
    pub fn backend(
        mut self,
        make: impl FnOnce(&WorldContext) -> Result<Arc<dyn BackendFactory>> + Send + 'static,
    ) -> Self {
        self.backends.push(Box::new(make));
        self
    }

    /// Hands dumps to this writer in place of files.
    #[must_use]
    pub fn dump_writer(mut self, writer: impl DumpWriter + 'static) -> Self {
        self.dump_writer = Some(Box::new(writer));
        self
    }

    /// Makes the world.
    ///
    /// # Blocking
    /// Until all ranks have come, or [`Config::init_timeout`] has passed.
    ///
    /// # Errors
    /// `Rendezvous` names the ranks that did not come, or what they do not agree on: two ranks of one number,
    /// two jobs at one store, world sizes or job secrets that differ.
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

    /// Makes the world with the ring that was opened before; that is `None` if another process uses its name.
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
        phase("wait for all ranks to come");
        let agreed = rendezvous(&*root, &notes, &place, &config, secret, deadline)?;
        let (secret, run) = (agreed.secret, agreed.settings.run);
        let config = Arc::new(Config {
            tuning: agreed.settings.tuning,
            ..Config::clone(&config)
        });
        let recorder = match early {
            Some(recorder) => recorder,
            // The rendezvous has succeeded, so this process is the rank. A process that records under its
            // name belongs to another job, or is left over from an earlier one.
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
        // One request carries all keys by which others find this rank.
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
            left: AtomicU32::new(place.world_size),
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

/// The FIFOs that ask for dumps. One that cannot be made is logged, and the job continues.
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
    /// Until all ranks have come, or [`Config::init_timeout`] has passed.
    ///
    /// # Errors
    /// See [`WorldBuilder::init`].
    pub fn init(config: Config) -> Result<Self> {
        Self::builder(config).init()
    }

    /// Connects to the store at the rendezvous as [`init`](Self::init) does, with a proof of the secret where
    /// one is asked for. Rank 0 serves it, unless the launcher's agent does; if the rendezvous has port 0, the
    /// kernel chooses a port ([`TcpStore::port`]). For [`WorldBuilder::store`], by programs that put their
    /// keys under a prefix.
    ///
    /// # Blocking
    /// Up to `timeout`, which is also that of later calls to the store that do not wait for other ranks.
    ///
    /// # Errors
    /// As [`Rendezvous::connect_store`]. `Io` if the user's secret can neither be read nor made,
    /// `InvalidArgument` if a proof is asked for and there is no secret.
    pub fn connect_store(config: &Config, timeout: Duration) -> Result<TcpStore> {
        let place = config.rendezvous()?;
        JobSecret::of(config, &place)?.connect_store(config, &place, timeout)
    }

    /// A builder, for choosing more than the configuration: the store, backends, the dump writer.
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

    /// The store at which the ranks met. PyTorch's ranks of a mixed job see the same keys.
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

    /// Where this run's dump files go.
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
    /// Not for other ranks, unless a backend connects at once.
    ///
    /// # Errors
    /// `InvalidArgument` if the list is empty, has a rank twice or one that is not there, or omits the
    /// caller. `Rendezvous` if another member wants another backend.
    pub fn new_group(&self, ranks: &[Rank], options: &GroupOptions) -> Result<ProcessGroup> {
        self.shared.clone().new_group(ranks, options, Origin::New)
    }

    /// Continues without these ranks, after they were lost: from now on [`group`](Self::group) is the group
    /// of the remaining ranks. All of these call this with the same list
    /// ([`find_absent`](ProcessGroup::find_absent) makes one). Ranks keep their numbers in the world.
    ///
    /// Groups with a member that is lost are aborted; others continue. The store must still be there: a
    /// world without rank 0 can shrink only if another process serves its store.
    ///
    /// # Blocking
    /// Until all that are left have come, or the world's time-out has passed.
    ///
    /// # Errors
    /// As [`ProcessGroup::shrink`]; the world is then unchanged, and the call may be repeated.
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
        let left = self.group.size();
        self.shared.left.store(left, Ordering::Relaxed);
        tracing::warn!(
            ?excluding,
            left,
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

    /// Flushes and closes all groups, the newest first, then the threads, the ring and the store.
    ///
    /// All ranks call it, and each waits for the others: so a rank that was lost after its last operation is
    /// noticed, and no rank finds the store closed.
    ///
    /// # Blocking
    /// Until what is pending has ended and all have come: for the world's time-out at most, and no longer once
    /// the process of a rank that has not come is known to be gone.
    ///
    /// # Errors
    /// The first error that a group reports; else `PeerLost` or `Timeout`, which names the ranks that did not
    /// come. After the failure of a group these are not errors. Everything is closed in any case; after an
    /// error the ring is kept.
    pub fn shutdown(self) -> Result<()> {
        let timeout = self.shared.config.timeout;
        self.shutdown_within(timeout)
    }

    /// As [`shutdown`](Self::shutdown), within this time in place of the world's time-out: for programs in
    /// which not every rank shuts down at the same time. Ranks that use a store which this rank serves
    /// find it gone afterwards.
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
            // After a failure some ranks will not come.
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
