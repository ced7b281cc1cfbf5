//! A small job over the CPU backend alone, for tests. Ranks are processes: the running program starts itself once for
//! each rank.
#![allow(
    dead_code,
    reason = "each test that includes this module uses a part of it"
)]

use rcomm::backend::cpu::CpuFactory;
use rcomm::backend::{BackendFactory, Call, Done, GroupContext, Later, Observer, WorldContext};
use rcomm::{
    Backend, Config, Deadline, FileStore, Hints, Op, PrefixStore, ProcessGroupInfo, Result, Secret,
    Store,
};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::Duration;

/// The longest time that a test waits for something: much longer than a test takes.
pub(crate) const TIME_LIMIT: Duration = Duration::from_secs(120);

/// The processes of a job's ranks. Dropping it kills those that still run.
pub(crate) struct Ranks(pub(crate) Vec<Child>);

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // The process may have ended by itself.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

const FOLDER: &str = "TEST_JOB_FOLDER";
const RANK: &str = "TEST_JOB_RANK";

/// Adds arguments and variables to a command that starts this program, so that it becomes a rank of the job in
/// `folder`: it then runs only the test `rank_process`.
pub(crate) fn as_rank<'c>(command: &'c mut Command, folder: &Path, rank: u32) -> &'c mut Command {
    command
        .args(["--exact", "rank_process", "--nocapture"])
        .env(FOLDER, folder)
        .env(RANK, rank.to_string())
}

/// Returns a command that starts this program as a rank.
pub(crate) fn rank_command(folder: &Path, rank: u32) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    as_rank(&mut command, folder, rank);
    command
}

/// Returns the folder and the rank that this process was started with; `None` if it is not a rank's process.
pub(crate) fn folder_and_rank() -> Option<(PathBuf, u32)> {
    let folder = std::env::var_os(FOLDER)?;
    let rank = std::env::var(RANK).unwrap().parse().unwrap();
    Some((folder.into(), rank))
}

/// Opens the store of the job in `folder`.
pub(crate) fn store(folder: &Path) -> Arc<dyn Store> {
    Arc::new(FileStore::open(folder.join("store"), None).unwrap())
}

/// A rank of a job, with its store and its CPU backend.
pub(crate) struct Rank {
    pub(crate) rank: u32,
    size: u32,
    pub(crate) store: Arc<dyn Store>,
    factory: CpuFactory,
}

impl Rank {
    /// Opens a rank of the job in `folder`, which has `size` ranks.
    pub(crate) fn open(folder: &Path, (rank, size): (u32, u32), config: Config) -> Self {
        let store = store(folder);
        let job = folder.display().to_string();
        let world = WorldContext {
            rank,
            world_size: size,
            local_rank: Some(rank),
            local_world_size: Some(size),
            secret: Secret::from_text(&job),
            tls: config.read_tls().unwrap(),
            job,
            attempt: 0,
            store: store.clone(),
            config: Arc::new(config),
            recorder: None,
            deadline: Deadline::In(Duration::from_secs(60)).started(),
            later: Later::default(),
        };
        Self {
            rank,
            size,
            store,
            factory: CpuFactory::open(&world).unwrap(),
        }
    }

    /// Connects a group of all ranks. No other group of the job may have this `wire_id`.
    pub(crate) fn connect(&self, wire_id: u64) -> Group {
        let name = format!("group {wire_id}");
        let name_of_keys = name.clone();
        let group = GroupContext {
            info: ProcessGroupInfo {
                id: 0,
                desc: name.clone(),
                name,
                ranks: (0..self.size).collect(),
            },
            group_rank: self.rank,
            wire_id,
            store: Arc::new(PrefixStore::new(name_of_keys, self.store.clone())),
            hints: Hints::NONE,
        };
        Group {
            backend: self.factory.connect(group, TIME_LIMIT.into()).unwrap(),
            collectives: 0,
            messages: 0,
        }
    }
}

/// A group, and how many collectives and how many sends and receives it has run.
pub(crate) struct Group {
    pub(crate) backend: Arc<dyn Backend>,
    collectives: u64,
    messages: u64,
}

struct NoObserver;

impl Observer for NoObserver {
    fn started(&self) {}
    fn ended(&self) {}
}

impl Group {
    /// Runs an operation with [`TIME_LIMIT`] as its time-out, and blocks until it ends.
    pub(crate) fn run(&mut self, op: &mut Op<'_>) -> Result<Done> {
        self.run_within(TIME_LIMIT, op)
    }

    /// Runs an operation with the time-out `time`, and blocks until it ends.
    pub(crate) fn run_within(&mut self, time: Duration, op: &mut Op<'_>) -> Result<Done> {
        // The turns of collectives have no gaps: a backend would wait for a missing one.
        let count = match op.is_p2p() {
            true => &mut self.messages,
            false => &mut self.collectives,
        };
        *count += 1;
        let call = Call {
            seq: *count,
            turn: if op.is_p2p() { 0 } else { *count },
            deadline: Deadline::In(time),
            hints: Hints::NONE,
        };
        self.backend.run(op, call, &NoObserver)
    }
}
