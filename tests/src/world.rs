//! Runs ranks as threads of the test, each with its own world.

use crate::registered::RegisteredFactory;
use crate::staged::StagedFactory;
use rcomm::backend::nccl::NcclOptions;
use rcomm::config::RingDir;
use rcomm::{
    BackendFactory, Config, FakeFabric, HashStore, Rank, Rendezvous, Result, Store, World,
    WorldBuilder,
};
use std::sync::Arc;
use std::time::Duration;

/// The backend of the groups of a test.
#[derive(Clone)]
pub enum Carrier {
    /// The CPU backend.
    Cpu,
    /// The CPU backend, on memory that its groups allocated.
    Registered,
    /// The fake backend, over this fabric.
    Fake(Arc<FakeFabric>),
}

impl Carrier {
    /// The backend's name in configurations.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Registered => RegisteredFactory::NAME,
            Self::Fake(_) => "fake",
        }
    }
}

/// A configuration for a test, with short time-outs and the ring in memory.
pub fn config(rank: Rank, world_size: u32) -> Config {
    let rendezvous = Rendezvous::explicit(rank, world_size, "127.0.0.1", 1);
    Config {
        rendezvous: Some(rendezvous.expect("the test's own numbers fit")),
        timeout: Duration::from_secs(20),
        init_timeout: Duration::from_secs(20),
        ring_dir: RingDir::Memory,
        ring_entries: 1024,
        signal_interval: Duration::from_millis(50),
        ..Config::default()
    }
}

/// The builder of a world that meets in `store` and works on the backend of `carrier`.
pub fn builder(config: Config, store: Arc<dyn Store>, carrier: &Carrier) -> WorldBuilder {
    let backend = carrier.name().to_owned();
    let mut config = config;
    if let Carrier::Registered = carrier {
        let tuned = RegisteredFactory::tune(&mut config.tuning);
        tuned.expect("the tuning lines are valid");
    }
    let builder = World::builder(Config { backend, ..config }).store(store);
    match carrier.clone() {
        Carrier::Cpu => builder,
        Carrier::Registered => builder.backend(|world| -> Result<Arc<dyn BackendFactory>> {
            Ok(Arc::new(RegisteredFactory::open(world)?))
        }),
        Carrier::Fake(fabric) => builder.backend(move |world| -> Result<Arc<dyn BackendFactory>> {
            Ok(fabric.factory(world.rank))
        }),
    }
}

/// The builder of a world that sends host memory over NCCL: the real one or the simulator, as the configuration's
/// libraries say.
pub fn over_nccl(config: Config) -> WorldBuilder {
    let backend = StagedFactory::NAME.to_owned();
    let builder = World::builder(Config { backend, ..config });
    builder.backend(|world| -> Result<Arc<dyn BackendFactory>> {
        Ok(StagedFactory::open(world, NcclOptions::of(&world.config)?)?)
    })
}

/// Runs `body` for each rank on a separate thread, and returns the results by rank. `change` may alter a rank's
/// configuration.
///
/// # Panics
/// If a rank's world cannot be made. If a rank panics, this function panics with that rank's message.
pub fn on_threads<R: Send>(
    world_size: u32,
    carrier: &Carrier,
    change: impl Fn(&mut Config) + Sync,
    body: impl Fn(World) -> R + Sync,
) -> Vec<R> {
    on_threads_with(
        Arc::new(HashStore::new()),
        world_size,
        carrier,
        change,
        body,
    )
}

/// Works like [`on_threads`], with the job's store given.
///
/// # Panics
/// As [`on_threads`].
pub fn on_threads_with<R: Send>(
    store: Arc<dyn Store>,
    world_size: u32,
    carrier: &Carrier,
    change: impl Fn(&mut Config) + Sync,
    body: impl Fn(World) -> R + Sync,
) -> Vec<R> {
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..world_size)
            .map(|rank| {
                let (store, change, body) = (store.clone(), &change, &body);
                let mut config = config(rank, world_size);
                change(&mut config);
                scope.spawn(move || {
                    let world = builder(config, store, carrier).init();
                    body(world.unwrap_or_else(|error| panic!("rank {rank}: {error}")))
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| match thread.join() {
                Ok(result) => result,
                Err(panic) => std::panic::resume_unwind(panic),
            })
            .collect()
    })
}
