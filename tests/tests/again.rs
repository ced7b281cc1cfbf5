//! A process makes many worlds, one after another or all at once, and shuts them down. It keeps no descriptor, no
//! thread and no ring of them, and little memory.

#![allow(clippy::unwrap_used)]

use rcomm::store::TcpStoreServer;
use rcomm_tests::process::Job;
use std::net::Ipv4Addr;
use std::process::Command;

const RANKS: u32 = 4;
/// The memory that an allocator may add by chance after the first worlds, in KiB. A leak of the later worlds' rings
/// would be much more.
const SLACK_KIB: i64 = 4_096;

/// Runs a job whose ranks make many worlds, and asserts that they leave no descriptor, no thread, no ring and little
/// memory. `argument` selects how they make them; `label` names the job in messages.
fn make_worlds(label: &str, ranks: u32, argument: &str, change: impl Fn(&mut Command)) {
    let program = env!("CARGO_BIN_EXE_rank");
    let mut job = Job::start_as(program, ranks, argument, |_, command| {
        command.env("RCOMM_TIMEOUT_MS", "60000");
        change(command);
    });
    for rank in 0..ranks {
        let ended = job.wait(rank);
        assert!(ended.status.success(), "{label}, rank {rank}: {ended:?}");
        let output = &ended.stderr;
        let counts = output.split_once(" descriptors, 0 threads, ");
        let counts = counts.unwrap_or_else(|| panic!("{label}, rank {rank}: {output}"));
        let descriptors: i64 = counts.0.lines().last().unwrap().parse().unwrap();
        let kib: i64 = counts.1.split_once(" KiB").unwrap().0.parse().unwrap();
        assert_eq!(descriptors, 0, "{label}, rank {rank}: {output}");
        assert!(kib < SLACK_KIB, "{label}, rank {rank}: {output}");
    }
    // All worlds of a rank have this path for their rings.
    for ring in (0..ranks).map(|rank| job.ring_path(rank)) {
        assert!(!ring.exists(), "{label}: {} is left", ring.display());
    }
}

#[test]
fn worlds_follow_each_other_over_shared_memory_and_tcp() {
    for transport in ["shm", "tcp"] {
        make_worlds(transport, RANKS, "again", |command| {
            command.env("RCOMM_TRANSPORT", transport);
        });
    }
}

#[test]
fn worlds_follow_each_other_on_a_store_that_outlives_them() {
    let server = TcpStoreServer::bind(&[Ipv4Addr::LOCALHOST.into()], 0).unwrap();
    let port = server.port().to_string();
    make_worlds("a launcher's store", RANKS, "again", |command| {
        command
            .env("MASTER_PORT", &port)
            .env("TORCHELASTIC_USE_AGENT_STORE", "True");
    });
}

#[test]
#[ignore = "takes a minute or two on a busy machine; .ci/long runs it"]
fn fifty_worlds_live_at_once_in_one_process_and_leave_nothing() {
    let server = TcpStoreServer::bind(&[Ipv4Addr::LOCALHOST.into()], 0).unwrap();
    let port = server.port().to_string();
    make_worlds("fifty at once", 2, "together", |command| {
        command
            .env("MASTER_PORT", &port)
            .env("TORCHELASTIC_USE_AGENT_STORE", "True");
    });
}
