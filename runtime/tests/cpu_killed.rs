//! A rank is killed in the middle of collectives or messages: the others get an error that names it, long before their
//! deadline.
//!
//! Ranks are processes: this program starts itself once for each rank.
#![allow(clippy::unwrap_used)]

mod job;

use job::{Rank, TIME_LIMIT};
use rcomm::{Buffer, Config, DType, ErrorKind, Op, ReduceOp};
use std::process::Stdio;
use std::time::{Duration, Instant};

const RANKS: u32 = 4;
/// Much longer than detection takes, but shorter than [`TIME_LIMIT`]: an operation that ends later was ended by its
/// deadline and has not detected the killed rank.
const DETECTED_WITHIN: Duration = Duration::from_secs(60);

/// The body of a rank's process; does nothing when the tests are run.
#[test]
fn rank_process() {
    let Some((folder, rank)) = job::folder_and_rank() else {
        return;
    };
    let variable = |name: &str| std::env::var(name).unwrap();
    let count: usize = variable("CPU_KILLED_COUNT").parse().unwrap();
    let config = Config::from_lookup(|name| match (name, &*variable("CPU_KILLED_WIRING")) {
        ("RCOMM_TRANSPORT", "hosts" | "registered") => Some("shm".into()),
        ("RCOMM_TRANSPORT", "streams") => Some("tcp".into()),
        ("RCOMM_SOCKET_STREAMS", "streams") => Some("3".into()),
        ("RCOMM_TRANSPORT", transport) => Some(transport.into()),
        ("RCOMM_HOST_ID", "hosts") => Some((rank / 2).to_string()),
        _ => None,
    })
    .unwrap();
    let this_rank = Rank::open(&folder, (rank, RANKS), config);
    let mut group = this_rank.connect(1);
    let mut data = match &*variable("CPU_KILLED_WIRING") {
        "registered" => group.backend.allocate(DType::F32, count).unwrap(),
        _ => Buffer::from_vec(vec![1f32; count]),
    };
    let message = vec![1f32; count];
    let killed = variable("CPU_KILLED_WHO").parse().unwrap();
    let is_collective = variable("CPU_KILLED_OPERATION") == "all_reduce";
    for turn in 1.. {
        let start = Instant::now();
        let mut op = if is_collective {
            Op::AllReduce {
                buffer: data.lend(),
                op: ReduceOp::Max.into(),
            }
        } else {
            // Each rank sends to the next one.
            Op::Coalesced(vec![
                Op::Send {
                    buffer: Buffer::from_slice(&message),
                    peer: (rank + 1) % RANKS,
                    tag: 0,
                },
                Op::Recv {
                    buffer: data.lend(),
                    peer: Some((rank + RANKS - 1) % RANKS),
                    tag: 0,
                },
            ])
        };
        match group.run(&mut op) {
            Ok(_) if turn == 20 => this_rank.store.set(&format!("ready/{rank}"), b"").unwrap(),
            Ok(_) => {}
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::PeerLost, "{error}");
                assert_eq!(error.rank(), Some(killed), "{error}");
                assert!(start.elapsed() < DETECTED_WITHIN, "{:?}", start.elapsed());
                return;
            }
        }
    }
}

fn kill_rank_2(operation: &str, wiring: &str, count: usize) {
    kill(2, operation, wiring, count);
}

/// Kills a rank during operations and checks that the others name it. `wiring` is `tcp`, `streams` (TCP with several
/// streams), `shm`, `registered` (shared memory and registered buffers), or `hosts` (two hosts of two ranks).
fn kill(killed: u32, operation: &str, wiring: &str, count: usize) {
    let folder = tempfile::tempdir().unwrap();
    let ranks = (0..RANKS).map(|rank| {
        job::rank_command(folder.path(), rank)
            .env("CPU_KILLED_OPERATION", operation)
            .env("CPU_KILLED_WIRING", wiring)
            .env("CPU_KILLED_WHO", killed.to_string())
            .env("CPU_KILLED_COUNT", count.to_string())
            .stdout(Stdio::null())
            .spawn()
            .unwrap()
    });
    let mut ranks = job::Ranks(ranks.collect());
    let ready: Vec<String> = (0..RANKS).map(|rank| format!("ready/{rank}")).collect();
    let ready: Vec<&str> = ready.iter().map(String::as_str).collect();
    job::store(folder.path()).wait(&ready, TIME_LIMIT).unwrap();
    ranks.0[killed as usize].kill().unwrap();
    for (rank, child) in ranks.0.iter_mut().enumerate() {
        let status = child.wait().unwrap();
        assert_eq!(
            status.success(),
            rank != killed as usize,
            "rank {rank}: {status}"
        );
    }
}

#[test]
fn a_rank_killed_during_large_operations_in_shared_memory_is_named() {
    kill_rank_2("all_reduce", "shm", 2 << 20);
}

#[test]
fn a_rank_killed_during_operations_in_registered_buffers_is_named() {
    kill_rank_2("all_reduce", "registered", 8 << 20);
}

#[test]
fn a_rank_killed_among_small_operations_in_shared_memory_is_named() {
    kill_rank_2("all_reduce", "shm", 2);
}

#[test]
fn a_rank_killed_during_large_operations_over_tcp_is_named() {
    kill_rank_2("all_reduce", "tcp", 1 << 20);
    kill_rank_2("all_reduce", "streams", 1 << 20);
}

#[test]
fn a_rank_killed_among_messages_is_named() {
    kill_rank_2("messages", "shm", 2);
    kill_rank_2("messages", "shm", 1 << 20);
    kill_rank_2("messages", "streams", 1 << 20);
}

#[test]
fn a_rank_killed_on_one_of_two_hosts_is_named_on_both() {
    // Rank 2 is the first of its host, which communicates with the other host; rank 3 is not.
    for killed in [2, 3] {
        kill(killed, "all_reduce", "hosts", 2);
        kill(killed, "all_reduce", "hosts", 1 << 20);
    }
}
