//! Ranks of one host that may not make shared memory use sockets and log it once.
//!
//! Ranks are processes: this program starts itself once for each rank, with a limit on the size of files that is
//! smaller than any shared memory.
#![allow(clippy::unwrap_used)]

mod job;

use job::Rank;
use rcomm::{Buffer, Config, Op, ReduceOp};
use std::process::{Command, Stdio};

const RANKS: u32 = 3;

/// The body of a rank's process; does nothing when the tests are run.
#[test]
fn rank_process() {
    let Some((folder, rank)) = job::folder_and_rank() else {
        return;
    };
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
    let this_rank = Rank::open(&folder, (rank, RANKS), Config::default());
    for wire_id in [1, 2] {
        let mut group = this_rank.connect(wire_id);
        let mut data = vec![rank + 1; 100_000];
        let mut op = Op::AllReduce {
            buffer: Buffer::from_mut(&mut data),
            op: ReduceOp::Sum.into(),
        };
        group.run(&mut op).unwrap();
        drop(op);
        assert!(data.iter().all(|&sum| sum == 6));
        // No rank may exit while another still reads.
        group.run(&mut Op::Barrier).unwrap();
    }
}

#[test]
fn ranks_that_may_not_make_shared_memory_use_sockets_and_log_it_once() {
    let folder = tempfile::tempdir().unwrap();
    let ranks: Vec<_> = (0..RANKS)
        .map(|rank| {
            // The limit is 128 blocks. The trap ignores SIGXFSZ, so that the call fails instead of the process.
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
        let log = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success(),
            "rank {rank}: {}: {log}",
            output.status
        );
        let count = log.matches("it shares no memory on its host").count();
        assert_eq!(count, 1, "rank {rank}: {log}");
    }
}
