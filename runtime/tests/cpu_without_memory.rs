//! Ranks of one host that may make no memory to share: they use sockets, and log that once.
//!
//! Ranks are processes: this test starts itself once for each, with a limit on the size of files that no
//! shared memory fits under.
#![allow(clippy::unwrap_used)]

mod job;

use job::Rank;
use rcomm::{Buffer, Config, Op, ReduceOp};
use std::process::{Command, Stdio};

const RANKS: u32 = 3;

/// What a child does; does nothing when the tests are run.
#[test]
fn rank_process() {
    let Some((folder, rank)) = job::own_part() else {
        return;
    };
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
    let own = Rank::open(&folder, (rank, RANKS), Config::default());
    for wire_id in [1, 2] {
        let mut group = own.connect(wire_id);
        let mut data = vec![rank + 1; 100_000];
        let mut op = Op::AllReduce {
            buffer: Buffer::from_mut(&mut data),
            op: ReduceOp::Sum.into(),
        };
        group.run(&mut op).unwrap();
        drop(op);
        assert!(data.iter().all(|&sum| sum == 6));
        // No rank leaves while another still reads.
        group.run(&mut Op::Barrier).unwrap();
    }
}

#[test]
fn ranks_without_the_right_to_shared_memory_use_sockets_and_say_so_once() {
    let folder = tempfile::tempdir().unwrap();
    let ranks: Vec<_> = (0..RANKS)
        .map(|rank| {
            // A file larger than this is refused; the signal that goes with it is not wanted.
            let mut command = Command::new("sh");
            command
                .args(["-c", "trap '' XFSZ; ulimit -f 128; exec \"$@\"", "sh"])
                .arg(std::env::current_exe().unwrap());
            job::as_rank(&mut command, folder.path(), rank)
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
