//! [`World`]: one process's place in a job; it owns the groups, the threads, the ring and the store.
//!
//! Making a world opens the ring, finds the other ranks, agrees with them on the secret and the name of this
//! run, and starts the threads. A world has no global state: dropping it frees everything but the ring's
//! file.

mod builder;
mod counted_store;
mod departure;
mod failed_init;
pub(crate) mod group_init;
mod groups;
mod grow;
#[cfg(feature = "endpoint")]
mod handlers;
pub(crate) mod init;
pub(crate) mod job_secret;
mod join;
mod meeting;
mod merge;
mod merge_remote;
mod merge_rounds;
mod mesh;
mod round;
mod session;
mod step_meter;

pub use builder::WorldBuilder;
pub use mesh::DeviceMesh;
pub use round::newest_attempt;

use crate::backend::{BackendFactory, BackendSet};
use crate::config::Config;
use crate::config::rendezvous::Rendezvous;
use crate::group::maker::{GroupMaker, GroupOptions, Origin};
use crate::group::process_group::{Group, ProcessGroup};
use crate::op::deadline::Deadline;
use crate::op::error::{Error, ErrorKind, Result};
use crate::store::{Store, TcpStore, TcpStoreServer};
use crate::watch::dump_writer::{DumpHandle, Dumps};
use crate::watch::watchdog::{Watch, Watchdog};
use crate::watch::watched::{Held, WatchedGroup};
use crate::world::job_secret::JobSecret;
use crate::world::step_meter::StepMeter;
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::Dump;
#[cfg(feature = "endpoint")]
use rcomm_recorder::publish::{Endpoint, EndpointAddress};
use rcomm_recorder::record::FlightRecorder;
use std::collections::HashMap;
use std::fmt;
use std::marker::PhantomData;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, Weak};
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
/// Call [`shutdown`](Self::shutdown) at the end. A world that is dropped without it (on an early return, in a panic)
/// aborts its groups, logs that, and leaves its ring for others to read. On the rank that serves the store, dropping
/// waits until the worlds of the other ranks are dropped or shut down, since these ranks exchange their status through
/// the store. It waits for at most [`Config::status_wait`], then up to 10 s until they have read that all have left.
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
    /// The store's server, if it runs in this process. Its port is free once this has been dropped, even if a thread
    /// that waits for a reply still holds the store.
    server: Option<TcpStoreServer>,
}

/// The state that the groups of a world share.
pub(crate) struct WorldShared {
    pub(crate) place: Rendezvous,
    pub(crate) config: Arc<Config>,
    /// The whole store, of which `root` is this world's part.
    pub(crate) store: Arc<dyn Store>,
    pub(crate) root: Arc<dyn Store>,
    pub(crate) recorder: Arc<FlightRecorder>,
    pub(crate) watch: Arc<Watch>,
    dumps: Arc<Dumps>,
    dump_dir: PathBuf,
    /// The name of this run, which distinguishes it from other worlds of a job of this name.
    run: String,
    step_meter: StepMeter,
    /// The factories of the backends. The world itself uses the first one to compare what ranks issue and to
    /// agree on values.
    pub(crate) factories: Vec<Arc<dyn BackendFactory>>,
    pub(crate) next_id: AtomicU32,
    /// How many ranks the program has not excluded.
    remaining: AtomicU32,
    /// Whether groups that are made from now on compare what their ranks issue.
    checks: AtomicBool,
    /// Set before the groups of a world that ends are closed: no group is made in it from then on.
    is_ending: AtomicBool,
    /// How many rounds to recreate this world have failed.
    failed_rounds: AtomicU32,
    /// How many groups were made with each name and list of members, and how often each group was merged for a purpose.
    pub(crate) made: Mutex<HashMap<(String, Vec<Rank>), u32>>,
    /// All groups, in order of creation.
    pub(crate) registry: Mutex<Vec<Weak<Group>>>,
    /// The groups of `shared_group`, with the purpose for which each was made.
    pub(crate) reused: Mutex<Vec<(String, ProcessGroup)>>,
}

/// What it means that other ranks have not shut down when this one ends its world.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Others {
    /// An error.
    MustCome,
    /// Nothing: they may end later.
    MayStay,
}

impl<B: BackendSet> World<B> {
    /// Joins the job that the configuration, or the launcher's environment, describes.
    ///
    /// # Blocking
    /// See [`WorldBuilder::init`].
    ///
    /// # Errors
    /// Those of [`WorldBuilder::init`].
    pub fn init(config: Config) -> Result<Self> {
        Self::builder(config).init()
    }

    /// Connects to the store at the rendezvous as [`init`](Self::init) does, with a proof of the secret if
    /// the store requires one. Rank 0 serves the store, unless the launcher's agent does; if the rendezvous
    /// has port 0, the kernel chooses a port ([`TcpStore::port`]). Programs that put their keys under a
    /// prefix pass the store to [`WorldBuilder::store`].
    ///
    /// # Blocking
    /// For at most `timeout`; the system's look-up of a host name may take longer. Later calls to the store that do not
    /// wait for other ranks have the same limit.
    ///
    /// # Errors
    /// Those of [`Rendezvous::connect_store`]. `Io` if a secret can neither be read nor generated,
    /// `InvalidArgument` if [`Config::store`] requires a proof and there is no secret, or if a file of
    /// [`Config::tls`] cannot be used.
    pub fn connect_store(config: &Config, timeout: Duration) -> Result<TcpStore> {
        let place = config.rendezvous()?;
        let tls = config.read_tls()?;
        JobSecret::of(config, &place)?.connect_store(config, tls.as_ref(), &place, timeout)
    }

    /// A builder, by which a program can supply a store, backends and a dump writer.
    pub fn builder(config: Config) -> WorldBuilder<B> {
        WorldBuilder::new(config)
    }
}

impl<B> World<B> {
    /// This process's rank.
    pub fn rank(&self) -> Rank {
        self.shared.place.rank
    }

    /// The number of ranks in the world.
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

    /// The group of all ranks; after [`shrink`](Self::shrink), of the remaining ones.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// The store through which the ranks found each other. In a job that also has ranks of PyTorch, these see the
    /// same keys.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.shared.store
    }

    /// The recorder, for readers in this process.
    pub fn recorder(&self) -> &Arc<FlightRecorder> {
        &self.shared.recorder
    }

    /// The address at which this rank answers status requests; `None` if it has no endpoint.
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
    /// nothing still shows where it is. A call is cheap enough for every step.
    pub fn phase(&self, name: &str) {
        self.shared.recorder.phase(name);
    }

    /// Records which step the program is in. After a few steps, the log says once how many steps the ring holds.
    pub fn step(&self, step: i64) {
        self.shared.recorder.step(step);
        self.shared
            .step_meter
            .note(step, self.shared.place.rank, &self.shared.recorder);
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
    /// Those of [`ProcessGroup::shrink`]. [`group`](Self::group) is then the old one, groups with a lost member
    /// stay aborted, and the call may be repeated.
    pub fn shrink(&mut self, excluding: &[Rank]) -> Result<()> {
        self.shared.abort_groups_with(excluding);
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

    /// This rank's records as they are now.
    pub fn snapshot(&self) -> Dump {
        self.shared.recorder.snapshot()
    }

    /// Makes a dump now and returns its location.
    ///
    /// # Errors
    /// The error names what could not be written and why.
    pub fn dump(&self) -> Result<String> {
        self.dump_handle().dump()
    }

    /// A handle that makes dumps of this world without a reference to it. [`grow`](Self::grow) recreates the world:
    /// afterwards a handle from before has the records from before.
    pub fn dump_handle(&self) -> DumpHandle {
        DumpHandle(self.shared.dumps.clone())
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

    /// Like [`shutdown`](Self::shutdown), with `timeout` instead of the world's time-out: for programs in which not
    /// every rank shuts down at the same time. If this rank serves the store, ranks that shut down later no longer find
    /// it.
    ///
    /// # Errors
    /// Those of [`shutdown`](Self::shutdown).
    pub fn shutdown_within(self, timeout: Duration) -> Result<()> {
        self.end(timeout, Others::MustCome)
    }

    /// Like [`shutdown_within`](Self::shutdown_within), for programs whose ranks end whenever they like: ranks that
    /// have not shut down are no error. Only the rank that serves the store waits for them, since they still need the
    /// store.
    ///
    /// # Blocking
    /// Until pending operations have ended; on the rank that serves the store then until all ranks have shut down. Each
    /// wait is for at most `timeout`, and 10 s longer on the rank that serves the store, until the others have read
    /// that all have left.
    ///
    /// # Errors
    /// The first error that a group reports. Everything is closed in any case; if a group has failed, the ring is kept.
    pub fn leave_within(self, timeout: Duration) -> Result<()> {
        self.end(timeout, Others::MayStay)
    }

    fn end(mut self, timeout: Duration, others: Others) -> Result<()> {
        let deadline = Deadline::In(timeout).started();
        let mut result = Ok(());
        for group in self.shared.last_groups().iter().rev() {
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
        if others == Others::MayStay && !self.shared.place.serves_store() {
            self.shared.leave(limit.min(DROP_TIME));
        } else if let Err(error) = self.shared.depart(self.group.ranks(), limit) {
            if others == Others::MayStay {
                tracing::debug!(%error, "some ranks did not confirm that they have left");
            } else {
                tracing::warn!(%error, "some ranks did not confirm the shutdown");
            }
            if !failed && others == Others::MustCome {
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
        for group in self.shared.last_groups().iter().rev() {
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
            self.shared.leave(DROP_TIME);
        }
    }
}

impl WorldShared {
    /// Aborts the groups with a member in `lost`.
    fn abort_groups_with(&self, lost: &[Rank]) {
        for group in self.watch.groups().iter() {
            let lost = lost.iter().find(|rank| group.info().ranks.contains(rank));
            if let Some(lost) = lost
                && group.refusal().is_none()
            {
                let message = format!("rank {lost} was lost, and the others continue without it");
                let error = Error::new(ErrorKind::Aborted, message).with_rank(*lost);
                group.close(None, error.in_group(group.label()));
            }
        }
    }

    /// The groups that the world closes as it ends. No group is made from then on.
    fn last_groups(&self) -> Held<dyn WatchedGroup> {
        self.is_ending.store(true, Ordering::SeqCst);
        self.watch.groups()
    }

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
