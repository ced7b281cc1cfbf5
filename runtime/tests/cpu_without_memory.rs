//! Ranks of one host that may make no memory to share: they use sockets, and say so once.
//!
//! Ranks are processes: this test starts itself once for each, with a limit on the size of files that no
//! shared memory fits under.
#![allow(clippy::unwrap_used)]

use rcomm::backend::cpu::CpuFactory;
use rcomm::backend::{BackendFactory, Call, GroupContext, Observer, WorldContext};
use rcomm::{
    Buffer, Config, Deadline, FileStore, Hints, Op, ProcessGroupInfo, ReduceOp, Secret, Store,
};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

const RANKS: u32 = 3;
const DEADLINE: Duration = Duration::from_secs(60);

struct Deaf;
impl Observer for Deaf {
    fn started(&self) {}
    fn ended(&self) {}
}

/// What a child does; does nothing when the tests are run.
#[test]
fn rank_process() {
    let Ok(folder) = std::env::var("CPU_WITHOUT_MEMORY_FOLDER") else {
        return;
    };
    let rank: u32 = std::env::var("CPU_WITHOUT_MEMORY_RANK")
        .unwrap()
        .parse()
        .unwrap();
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
    let store = FileStore::open(Path::new(&folder).join("store"), None);
    let store: Arc<dyn Store> = Arc::new(store.unwrap());
    let world = WorldContext {
        rank,
        world_size: RANKS,
        local_rank: Some(rank),
        local_world_size: Some(RANKS),
        job: "without memory".into(),
        attempt: 0,
        store: store.clone(),
        secret: Secret::from_text("without memory"),
        config: Arc::new(Config::default()),
    };
    let factory = CpuFactory::open(&world).unwrap();
    for (wire_id, name) in [(1, "world"), (2, "again")] {
        let group = GroupContext {
            info: ProcessGroupInfo {
                id: 0,
                name: name.into(),
                desc: name.into(),
                ranks: (0..RANKS).collect(),
            },
            group_rank: rank,
            wire_id,
            store: store.clone(),
        };
        let backend = factory.connect(group, DEADLINE.into()).unwrap();
        let mut data = vec![rank + 1; 100_000];
        let run = |op: &mut Op<'_>, turn| {
            let call = Call {
                seq: turn,
                turn,
                deadline: Deadline::In(DEADLINE),
                hints: Hints::NONE,
            };
            backend.run(op, call, &Deaf).unwrap();
        };
        let mut op = Op::AllReduce {
            buffer: Buffer::from_mut(&mut data),
            op: ReduceOp::Sum.into(),
        };
        run(&mut op, 1);
        drop(op);
        assert!(data.iter().all(|&sum| sum == 6));
        // Nobody leaves while another still reads.
        run(&mut Op::Barrier, 2);
    }
}

#[test]
fn ranks_without_the_right_to_shared_memory_use_sockets_and_say_so_once() {
    let folder = tempfile::tempdir().unwrap();
    let ranks: Vec<_> = (0..RANKS)
        .map(|rank| {
            // A file larger than this is refused; the signal that goes with it is not wanted.
            Command::new("sh")
                .args(["-c", "trap '' XFSZ; ulimit -f 128; exec \"$@\"", "sh"])
                .arg(std::env::current_exe().unwrap())
                .args(["--exact", "rank_process", "--nocapture"])
                .env("CPU_WITHOUT_MEMORY_FOLDER", folder.path())
                .env("CPU_WITHOUT_MEMORY_RANK", rank.to_string())
                .stdout(Stdio::null())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    for (rank, child) in ranks.into_iter().enumerate() {
        let output = child.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success(),
            "rank {rank}: {}: {said}",
            output.status
        );
        let times = said.matches("no memory is shared").count();
        assert_eq!(times, 1, "rank {rank}: {said}");
    }
}
