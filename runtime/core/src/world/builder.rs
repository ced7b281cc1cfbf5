//! [`WorldBuilder`] makes a [`World`]: its ring, store, rendezvous, backends, threads, and the group of all ranks.

use crate::backend::{BackendFactory, BackendSet, Later, OpenBackend, WorldContext};
use crate::config::rendezvous::{InitMethod, Rendezvous};
use crate::config::{Config, DebugLevel};
use crate::group::maker::{GroupOptions, Origin};
use crate::op::deadline::Deadline;
use crate::op::error::{Error, ErrorKind, Result};
use crate::store::{FileStore, PrefixStore, Store, StoreQuery, TcpStoreServer};
use crate::watch::dump_writer::{DumpWriter, Dumps, FileDumpWriter};
#[cfg(feature = "endpoint")]
use crate::watch::endpoint;
use crate::watch::failure_broadcast::{
    FailureBroadcast, FailureBroadcastParts, NeighborProcesses, ResponderThread,
};
use crate::watch::heartbeat::HeartbeatMonitor;
use crate::watch::pipe::DumpPipe;
use crate::watch::wait_counters::{RuntimeWait, WaitCounters};
use crate::watch::watchdog::{Helpers, Watch, Watchdog};
use crate::world::counted_store::CountedStore;
use crate::world::failed_init::FailedInit;
#[cfg(feature = "endpoint")]
use crate::world::handlers;
use crate::world::init::{
    RendezvousResult, name_store_host, open_recorder, rendezvous, ring_place, run_name,
    store_silent, write_notes,
};
use crate::world::job_secret::JobSecret;
use crate::world::join;
use crate::world::session::{MeetingStore, StoreHost};
use crate::world::step_meter::StepMeter;
use crate::world::{Threads, World, WorldShared, session};
use rcomm_recorder::model::{LinkEnd, Rank};
use rcomm_recorder::publish::{KeptJobs, remove_abandoned_dumps, remove_jobs_beside};
use rcomm_recorder::record::{FlightRecorder, OnConflict, Storage};
use std::marker::PhantomData;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Builds a [`World`] with a store, backends or a dump writer that the program supplies.
pub struct WorldBuilder<B> {
    pub(super) config: Config,
    pub(super) store: Option<Arc<dyn Store>>,
    store_is_at_rank_0: bool,
    backends: Vec<OpenBackend>,
    dump_writer: Option<Box<dyn DumpWriter>>,
    set: PhantomData<fn() -> B>,
}

impl<B: BackendSet> WorldBuilder<B> {
    pub(super) fn new(config: Config) -> Self {
        Self {
            config,
            store: None,
            store_is_at_rank_0: false,
            backends: Vec::new(),
            dump_writer: None,
            set: PhantomData,
        }
    }

    /// Uses this store instead of connecting to one at the address of the rendezvous.
    #[must_use]
    pub fn store(mut self, store: Arc<dyn Store>) -> Self {
        self.store = Some(store);
        self
    }

    /// Says that the process of rank 0 serves the [`store`](Self::store), although the world does not: if the store
    /// does not reply, errors then name rank 0. This has an effect only if
    /// [`Rendezvous::uses_agent_store`] is set; otherwise the store is taken to be at rank 0 anyway.
    #[must_use]
    pub fn store_at_rank_0(mut self) -> Self {
        self.store_is_at_rank_0 = true;
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

    /// Passes dumps to this writer instead of writing them to files.
    #[must_use]
    pub fn dump_writer(mut self, writer: impl DumpWriter + 'static) -> Self {
        self.dump_writer = Some(Box::new(writer));
        self
    }

    /// Sets the place at which ranks meet, from a URL as `init_method` of PyTorch's `init_process_group` has it:
    /// `tcp://HOST:PORT` is the host and a free port of rank 0; `file://PATH` is a file that does not exist yet, in a
    /// directory that all ranks share; `env://` is the place that the launcher's variables name. Rank and world size
    /// may be in the URL instead (`tcp://HOST:PORT?rank=0&world_size=4`).
    ///
    /// With a file, ranks of several hosts need [`Config::socket_ifname`]: there is no store whose address leads to an
    /// interface.
    ///
    /// # Errors
    /// `Rendezvous` says what is wrong with the URL; otherwise those of [`FileStore::open`], if the URL names a file.
    pub fn init_method(
        mut self,
        url: &str,
        rank: Option<Rank>,
        world_size: Option<u32>,
    ) -> Result<Self> {
        match InitMethod::parse(url, rank, world_size)? {
            InitMethod::Environment => self.config.rendezvous = None,
            InitMethod::Tcp(place) => self.config.rendezvous = Some(place),
            InitMethod::File(path, place) => {
                self.store = Some(Arc::new(FileStore::open(path, Some(place.world_size))?));
                self.config.rendezvous = Some(place);
            }
        }
        Ok(self)
    }

    /// Makes the world.
    ///
    /// A process that joins a running job ([`Config::joins`]) first waits until the ranks of that job ask for its rank.
    ///
    /// # Blocking
    /// Until all ranks have arrived, for [`Config::init_timeout`] at most, and for [`Config::status_wait`] more if some
    /// have not or the store does not reply. The rank that serves the store then waits until the others have read why
    /// there is no world: for [`Config::status_wait`] at most, or for what is left of [`Config::init_timeout`], up to
    /// 10 s, if that is longer. If all have arrived: until the backends have connected, for [`Config::init_timeout`] at
    /// most.
    ///
    /// # Errors
    /// `Rendezvous` names the ranks that did not arrive, or says what the ranks disagree on: two ranks with
    /// the same number, two jobs at one store, different world sizes or job secrets. Otherwise the error of
    /// the part that failed: the configuration, the store, the ring, a backend or a thread.
    pub fn init(self) -> Result<World<B>> {
        B::prepare(&self.config)?;
        let place = self.config.rendezvous()?;
        let deadline = Deadline::In(self.config.init_timeout).started();
        if self.config.joins {
            return join::join(self, place, deadline);
        }
        let config = config_at(&self.config, &place);
        // The ring is opened before any step that may fail, so that a job that never starts leaves a record
        // too.
        let early_ring = open_recorder(&place, &config, OnConflict::Refuse)?.map(Arc::new);
        let mut failed_init = FailedInit {
            rank: place.rank,
            recorder: early_ring.clone(),
            kept_jobs: config.kept_jobs,
        };
        let made = self.make(place, config, deadline, early_ring);
        failed_init.end(made.as_ref().err());
        made
    }

    /// Makes the world. `early_ring` is the ring that `init` opened; `None` if another living process records as
    /// this rank.
    fn make(
        mut self,
        place: Rendezvous,
        config: Arc<Config>,
        deadline: Deadline,
        early_ring: Option<Arc<FlightRecorder>>,
    ) -> Result<World<B>> {
        if let Some(recorder) = &early_ring {
            recorder.phase("connect to the store");
        }
        let tls = config.read_tls()?;
        let secret = JobSecret::of(&config, &place)?;
        let host = match self.store_is_at_rank_0 {
            true => StoreHost::Rank0,
            false => StoreHost::of(&place),
        };
        let (store, server) = match self.store.take() {
            Some(store) => (MeetingStore::of_unknown_past(store, host), None),
            None => {
                let mut store = session::connect(&secret, &config, tls.as_ref(), &place, deadline)?;
                let server = store.take_server();
                let store = MeetingStore {
                    store: Arc::new(store),
                    host,
                    // Rank 0 has made the store, and the others have asked it.
                    is_first: !place.uses_agent_store,
                };
                (store, server)
            }
        };
        let meeting = Meeting::hold(place, config, (store, secret), early_ring, deadline)?;
        self.build(meeting, server)
    }

    /// Makes the world of ranks that have met.
    pub(super) fn build(
        self,
        meeting: Meeting,
        server: Option<TcpStoreServer>,
    ) -> Result<World<B>> {
        let Meeting {
            place,
            config,
            store,
            store_host,
            root,
            early_ring,
            agreed,
            waits,
            deadline,
        } = meeting;
        let tls = config.read_tls()?;
        let notes = notes_of(&root, &place);
        let (secret, run) = (agreed.secret, agreed.settings.run);
        let config = Arc::new(Config {
            tuning: agreed.settings.tuning,
            ..Config::clone(&config)
        });
        let recorder = match early_ring {
            Some(recorder) => recorder,
            // The rendezvous has succeeded, so this process is the rank. Another process that records as this
            // rank belongs to another job, or is left over from an earlier one.
            None => open_recorder(&place, &config, OnConflict::NextPlace)?
                .map(Arc::new)
                .ok_or_else(|| {
                    Error::new(
                        ErrorKind::Io,
                        "other processes use every place for the ring",
                    )
                })?,
        };
        recorder.phase("connect");
        let watch = Arc::new(Watch::new(waits));
        let dump_dir = config.dump_dir.join(run_name(&place.job, &run));
        // One rank of each host removes incomplete dumps, since each host may have a disk of its own. Where the
        // launcher gives no local ranks, only rank 0 does.
        let clears_dumps =
            self.dump_writer.is_none() && place.local_rank.unwrap_or(place.rank) == 0;
        let writer = self
            .dump_writer
            .unwrap_or_else(|| Box::new(FileDumpWriter::new(&dump_dir, config.dump_format)));
        let later = Later::new();
        later.add({
            let (ring, kept_jobs) = (recorder.storage().clone(), config.kept_jobs);
            let dumps = clears_dumps.then(|| config.dump_dir.clone());
            move || clear_old_files(ring, kept_jobs, dumps)
        });
        let dumps = Arc::new(Dumps::new(recorder.clone(), watch.clone(), writer));
        let pipes = open_pipes(&config.dump_pipes, place.rank);
        let processes = NeighborProcesses::new(recorder.clone(), root.clone(), place.attempt);
        let processes = Arc::new(processes);
        let broadcast = FailureBroadcast::new(FailureBroadcastParts {
            rank: place.rank,
            attempt: place.attempt,
            store_end: match (store_host, place.rank) {
                (StoreHost::Other, _) => Some(LinkEnd::Store),
                (StoreHost::Rank0, 0) => None,
                (StoreHost::Rank0, _) => Some(LinkEnd::StoreAtRank(0)),
            },
            root: root.clone(),
            watch: watch.clone(),
            recorder: recorder.clone(),
            processes: processes.clone(),
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
            tls,
            config: config.clone(),
            recorder: Some(recorder.clone()),
            deadline,
            later: later.clone(),
        };
        let to_open = B::backends(&config).into_iter().chain(self.backends);
        #[cfg(feature = "endpoint")]
        let mut endpoint = None;
        let announce = || {
            #[cfg(feature = "endpoint")]
            {
                let served = endpoint::serve(&place, &context, &recorder, &dumps, &root);
                let (served, announcement) = served.unzip();
                endpoint = served;
                announcement
                    .into_iter()
                    .chain(processes.note_of(place.rank))
                    .collect()
            }
            #[cfg(not(feature = "endpoint"))]
            processes.note_of(place.rank).into_iter().collect()
        };
        let opened = open_backends(to_open, &context, announce, &backends, &root);
        let factories =
            opened.map_err(|error| name_store_host(error, &*root, store_host, place.rank))?;
        let start_helpers = {
            let (watch, broadcast, timeout) =
                (watch.clone(), broadcast.clone(), config.heartbeat_timeout);
            move || {
                let start = || {
                    Ok(Helpers {
                        broadcast: ResponderThread::start(broadcast.clone(), pipes)?,
                        heartbeat: HeartbeatMonitor::start(watch, broadcast, timeout)?,
                    })
                };
                let helpers = start();
                later.run();
                helpers
            }
        };
        let interval = config.watchdog_interval;
        let threads = Threads {
            watchdog: Watchdog::start(watch.clone(), broadcast, interval, start_helpers)?,
            #[cfg(feature = "endpoint")]
            endpoint,
            server,
        };
        let shared = Arc::new(WorldShared {
            checks: AtomicBool::new(config.debug != DebugLevel::Off),
            is_ending: AtomicBool::new(false),
            failed_rounds: AtomicU32::new(0),
            remaining: AtomicU32::new(place.world_size),
            place,
            config,
            store,
            root,
            recorder,
            watch,
            dumps,
            dump_dir,
            run,
            step_meter: StepMeter::default(),
            factories,
            next_id: AtomicU32::new(0),
            made: Mutex::default(),
            registry: Mutex::default(),
            reused: Mutex::default(),
        });
        #[cfg(feature = "endpoint")]
        if let Some(endpoint) = &threads.endpoint {
            handlers::handle_timeouts(endpoint, &shared);
            let waits = shared.watch.waits().clone();
            endpoint.list_waits(move || waits.statistics());
        }
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

/// What a process has once it has met the other ranks of its world.
pub(super) struct Meeting {
    place: Rendezvous,
    config: Arc<Config>,
    store: Arc<dyn Store>,
    store_host: StoreHost,
    /// The part of the store that the world uses.
    root: Arc<dyn Store>,
    /// The ring; `None` if another living process recorded as this rank before the ranks met.
    early_ring: Option<Arc<FlightRecorder>>,
    agreed: RendezvousResult,
    /// How often and for how long this process waits, from here on.
    waits: Arc<WaitCounters>,
    /// The time by which the world must be made.
    deadline: Deadline,
}

impl Meeting {
    pub(super) fn rank(&self) -> Rank {
        self.place.rank
    }

    /// Holds the rendezvous: waits in the store for the other ranks, and agrees with them on the settings and on the
    /// job's secret, for which `secret` is this rank's source.
    ///
    /// # Errors
    /// Those of [`rendezvous`].
    pub(super) fn hold(
        place: Rendezvous,
        config: Arc<Config>,
        (meeting_store, secret): (MeetingStore, JobSecret),
        early_ring: Option<Arc<FlightRecorder>>,
        deadline: Deadline,
    ) -> Result<Self> {
        let waits = Arc::new(WaitCounters::default());
        let (store, store_host) = (meeting_store.store.clone(), meeting_store.host);
        let counted = MeetingStore {
            store: Arc::new(CountedStore::new(store.clone(), waits.clone())),
            ..meeting_store
        };
        if let Some(recorder) = &early_ring {
            recorder.phase("wait for all ranks");
        }
        let waiting = waits.begin(RuntimeWait::Rendezvous);
        let (root, agreed) = meet(counted, &place, &config, secret, deadline)?;
        drop(waiting);
        Ok(Self {
            place,
            config,
            store,
            store_host,
            root,
            early_ring,
            agreed,
            waits,
            deadline,
        })
    }
}

/// Holds the rendezvous, and returns the part of the store that this world uses.
///
/// # Blocking
/// Until the deadline, and for [`Config::status_wait`] after it at most, whether the store replies or not. The rank
/// that serves the store then waits until the others have read why there is no world, as [`Refused::keep_store`] does.
///
/// # Errors
/// Those of [`rendezvous`]; `Timeout` names the rank that serves the store, if the store does not reply.
fn meet(
    meeting: MeetingStore,
    place: &Rendezvous,
    config: &Arc<Config>,
    secret: JobSecret,
    deadline: Deadline,
) -> Result<(Arc<dyn Store>, RendezvousResult)> {
    let limit = deadline.remaining().saturating_add(config.status_wait);
    let (store, host) = (&meeting.store.clone(), meeting.host);
    let asked = {
        let (place, config) = (place.clone(), config.clone());
        // A request to a store that has stopped lasts until the store's own time-out, and there may be several.
        move |_: &dyn Store| {
            let root = meeting.part(place.attempt)?;
            let notes = notes_of(&root, &place);
            let met = rendezvous(&*root, &notes, &place, &config, secret, deadline);
            Ok((root, met))
        }
    };
    let silent = || store_silent(&**store, host, config);
    let began = Instant::now();
    let answer = StoreQuery::here(store, limit, asked).unwrap_or_else(|| Err(silent()));
    let (root, met) = answer.map_err(|error| name_store_host(error, &**store, host, place.rank))?;
    match met {
        Ok(agreed) => Ok((root, agreed)),
        // The limit has ended a request, which is no answer.
        Err(refused) if refused.is_without_answer() && began.elapsed() >= limit => Err(silent()),
        Err(refused) => {
            refused.keep_store(&notes_of(&root, place), place);
            Err(name_store_host(refused.error, &**store, host, place.rank))
        }
    }
}

/// The part of the store that has the keys of an attempt.
fn notes_of(root: &Arc<dyn Store>, place: &Rendezvous) -> PrefixStore<dyn Store> {
    PrefixStore::new(format!("rcomm/{}", place.attempt), root.clone())
}

/// The configuration of a rank at this place.
pub(super) fn config_at(config: &Config, place: &Rendezvous) -> Arc<Config> {
    Arc::new(Config {
        rendezvous: Some(place.clone()),
        ..config.clone()
    })
}

/// Opens the backends, and publishes the keys by which other ranks find this one: those of the first backend
/// together with those of the endpoint and the process, which `announce` returns, in one request; those of the other
/// backends, which are opened later, in a second one.
fn open_backends(
    mut to_open: impl Iterator<Item = OpenBackend>,
    context: &WorldContext,
    announce: impl FnOnce() -> Vec<(String, Vec<u8>)>,
    store: &PrefixStore<PrefixStore<dyn Store>>,
    root: &Arc<dyn Store>,
) -> Result<Vec<Arc<dyn BackendFactory>>> {
    let mut factories: Vec<Arc<dyn BackendFactory>> = Vec::new();
    if let Some(open) = to_open.next() {
        factories.push(open(context)?);
    }
    let write = |notes| {
        let limit = context.deadline.remaining();
        write_notes(
            root,
            notes,
            limit.saturating_add(context.config.status_wait),
        )
    };
    let full_name = |key: String| store.inner().name(&store.name(&key));
    let announced_by = |factory: &Arc<dyn BackendFactory>| {
        let notes = factory.announcement().into_iter();
        notes
            .map(|(key, note)| (full_name(key), note))
            .collect::<Vec<_>>()
    };
    let first = factories.iter().flat_map(&announced_by);
    write(first.chain(announce()).collect())?;
    let mut others = Vec::new();
    for open in to_open {
        // The other ranks know the ports by now, and a library may take long to load.
        context.later.run();
        let factory = open(context)?;
        others.extend(announced_by(&factory));
        factories.push(factory);
    }
    write(others)?;
    Ok(factories)
}

/// Removes the rings of old jobs beyond the limits, and incomplete dumps of processes that were killed from the
/// directory `dumps`, on a thread `rcomm/dump-file`, which is not joined: it ends with the disk's answer, and a job
/// must not wait for that. So the thread has only the place of this rank's ring: the recorder may end before.
fn clear_old_files(ring: Storage, kept: KeptJobs, dumps: Option<PathBuf>) {
    let thread = std::thread::Builder::new().name("rcomm/dump-file".to_owned());
    let started = thread.spawn(move || {
        remove_jobs_beside(&ring, &kept);
        if let Some(dumps) = dumps {
            remove_abandoned_dumps(&dumps);
        }
    });
    if let Err(error) = started {
        tracing::debug!(%error, "old rings and incomplete dumps of earlier runs stay");
    }
}

/// Makes the FIFOs by which dumps can be requested. If one cannot be made, that is logged, and the job
/// continues.
fn open_pipes(stems: &[PathBuf], rank: Rank) -> Vec<DumpPipe> {
    let open = |stem: &PathBuf| match DumpPipe::create(stem, rank) {
        Ok(pipe) => Some(pipe),
        Err(error) => {
            tracing::warn!(%error, "no dump can be requested by the pipe {}{rank}.pipe", stem.display());
            None
        }
    };
    stems.iter().filter_map(open).collect()
}
