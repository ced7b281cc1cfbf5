//! A small job over the CPU backend alone, for tests and benches. Ranks are processes: the program that runs, started
//! once more for each.
#![allow(dead_code, reason = "each test that includes it uses a part of it")]

use rcomm::backend::cpu::CpuFactory;
use rcomm::backend::{BackendFactory, Call, Done, GroupContext, Observer, WorldContext};
use rcomm::{
    Backend, Config, Deadline, FileStore, Hints, Op, ProcessGroupInfo, Result, Secret, Store,
};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

/// Far beyond what anything here takes.
pub(crate) const DEADLINE: Duration = Duration::from_secs(120);

const FOLDER: &str = "TEST_JOB_FOLDER";
const RANK: &str = "TEST_JOB_RANK";

/// Has a command that starts this program start a rank of the job in `folder`: the test `rank_process`, where the
/// program is one of tests.
pub(crate) fn as_rank<'c>(command: &'c mut Command, folder: &Path, rank: u32) -> &'c mut Command {
    command
        .args(["--exact", "rank_process", "--nocapture"])
        .env(FOLDER, folder)
        .env(RANK, rank.to_string())
}

/// This program, as a rank.
pub(crate) fn rank_of(folder: &Path, rank: u32) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    as_rank(&mut command, folder, rank);
    command
}

/// The folder and the rank that this process was started with, if it is one of a job.
pub(crate) fn own_part() -> Option<(PathBuf, u32)> {
    let folder = std::env::var_os(FOLDER)?;
    let rank = std::env::var(RANK).unwrap().parse().unwrap();
    Some((folder.into(), rank))
}

/// Where the ranks of a job meet.
pub(crate) fn store(folder: &Path) -> Arc<dyn Store> {
    Arc::new(FileStore::open(folder.join("store"), None).unwrap())
}

/// One rank.
pub(crate) struct Rank {
    pub(crate) rank: u32,
    size: u32,
    pub(crate) store: Arc<dyn Store>,
    factory: CpuFactory,
}

impl Rank {
    /// A rank of the job in `folder`, which has `size`.
    pub(crate) fn open(folder: &Path, (rank, size): (u32, u32), config: Config) -> Self {
        let store = store(folder);
        let job = folder.display().to_string();
        let world = WorldContext {
            rank,
            world_size: size,
            local_rank: Some(rank),
            local_world_size: Some(size),
            secret: Secret::from_text(&job),
            job,
            attempt: 0,
            store: store.clone(),
            config: Arc::new(config),
            recorder: None,
        };
        Self {
            rank,
            size,
            store,
            factory: CpuFactory::open(&world).unwrap(),
        }
    }

    /// A group of all ranks, of which no other has this number.
    pub(crate) fn connect(&self, wire_id: u64) -> Group {
        let name = format!("group {wire_id}");
        let group = GroupContext {
            info: ProcessGroupInfo {
                id: 0,
                desc: name.clone(),
                name,
                ranks: (0..self.size).collect(),
            },
            group_rank: self.rank,
            wire_id,
            store: self.store.clone(),
        };
        Group {
            backend: self.factory.connect(group, DEADLINE.into()).unwrap(),
            turn: 0,
        }
    }
}

/// A group, and how many operations it has run.
pub(crate) struct Group {
    pub(crate) backend: Arc<dyn Backend>,
    turn: u64,
}

struct Deaf;

impl Observer for Deaf {
    fn started(&self) {}
    fn ended(&self) {}
}

impl Group {
    pub(crate) fn run(&mut self, op: &mut Op<'_>) -> Result<Done> {
        self.turn += 1;
        let call = Call {
            seq: self.turn,
            turn: if op.is_p2p() { 0 } else { self.turn },
            deadline: Deadline::In(DEADLINE),
            hints: Hints::NONE,
        };
        self.backend.run(op, call, &Deaf)
    }
}
