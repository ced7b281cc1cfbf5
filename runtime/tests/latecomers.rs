//! A rank that comes after the others have given up the group is refused: whatever operation it calls, and however
//! little that operation needs from the others. Tested over both transports, with the first and with the last rank as
//! the late one.
//!
//! Ranks are processes: this program starts itself once for each rank. A job goes through all cases, each in a group
//! of its own.
#![allow(clippy::unwrap_used)]

mod job;

use job::{Group, Rank, TIME_LIMIT};
use rcomm::{Buffer, Config, Op, ReduceOp, Result};
use std::process::Stdio;
use std::time::Duration;

/// The time-out of the ranks that are in time.
const TIMEOUT: Duration = Duration::from_millis(200);

/// The time-out of the late rank; it may have to wait for connections that the others do not open any more.
const LATE_TIMEOUT: Duration = Duration::from_secs(1);

/// The operation that the ranks call in a case.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Call {
    AllReduce,
    Barrier,
    /// A broadcast from the late rank.
    BroadcastFromLate,
    /// A broadcast to the late rank and others.
    BroadcastToLate,
    /// A reduce whose result the late rank gets.
    ReduceToLate,
    /// A reduce whose result another rank gets.
    ReduceFromLate,
    /// The late rank sends a small message, which needs no answer, to a rank that has waited for the message.
    SendLate,
    /// The late rank receives a small message, which was sent before its sender gave up.
    ReceiveLate,
    /// Like [`Self::ReceiveLate`], but the late rank receives from any rank.
    ReceiveAnyLate,
}

const CALLS: [Call; 9] = [
    Call::AllReduce,
    Call::Barrier,
    Call::BroadcastFromLate,
    Call::BroadcastToLate,
    Call::ReduceToLate,
    Call::ReduceFromLate,
    Call::SendLate,
    Call::ReceiveLate,
    Call::ReceiveAnyLate,
];

#[derive(Clone, Copy, Debug)]
struct Case {
    call: Call,
    /// The rank that comes late.
    late: u32,
    /// Whether the group has run operations before, so that its connections are open.
    is_used: bool,
}

fn cases(ranks: u32) -> Vec<Case> {
    let mut every_case = Vec::new();
    for call in CALLS {
        for late in [0, ranks - 1] {
            for is_used in [true, false] {
                every_case.push(Case {
                    call,
                    late,
                    is_used,
                });
            }
        }
    }
    every_case
}

fn all_reduce(group: &mut Group, timeout: Duration) -> Result<()> {
    let mut data = [1f32; 8];
    let mut op = Op::AllReduce {
        buffer: Buffer::from_mut(&mut data),
        op: ReduceOp::Sum.into(),
    };
    group.run_within(timeout, &mut op).map(drop)
}

/// Sends a small message to `peer`, or receives one from it; from any rank, if `peer` is `None`.
fn message(group: &mut Group, timeout: Duration, is_send: bool, peer: Option<u32>) -> Result<()> {
    let mut data = [7i32; 4];
    let mut op = match is_send {
        true => Op::Send {
            buffer: Buffer::from_slice(&data),
            peer: peer.unwrap(),
            tag: 3,
        },
        false => Op::Recv {
            buffer: Buffer::from_mut(&mut data),
            peer,
            tag: 3,
        },
    };
    group.run_within(timeout, &mut op).map(drop)
}

/// Runs one rank's part of a case, and returns its outcome.
fn run(case: Case, group: &mut Group, rank: u32, ranks: u32) -> Result<()> {
    let timeout = match rank == case.late {
        true => LATE_TIMEOUT,
        false => TIMEOUT,
    };
    let other = (case.late + 1) % ranks;
    let mut data = [1f32; 8];
    let root = match case.call {
        Call::BroadcastFromLate | Call::ReduceToLate => case.late,
        _ => other,
    };
    let buffer = Buffer::from_mut(&mut data);
    match case.call {
        Call::AllReduce => all_reduce(group, timeout),
        Call::Barrier => group.run_within(timeout, &mut Op::Barrier).map(drop),
        Call::BroadcastFromLate | Call::BroadcastToLate => {
            let mut op = Op::Broadcast { buffer, root };
            group.run_within(timeout, &mut op).map(drop)
        }
        Call::ReduceToLate | Call::ReduceFromLate => {
            let op = ReduceOp::Sum.into();
            let mut op = Op::Reduce { buffer, op, root };
            group.run_within(timeout, &mut op).map(drop)
        }
        Call::SendLate if rank == case.late => message(group, timeout, true, Some(other)),
        Call::SendLate if rank == other => message(group, timeout, false, Some(case.late)),
        Call::ReceiveLate if rank == case.late => message(group, timeout, false, Some(other)),
        Call::ReceiveAnyLate if rank == case.late => message(group, timeout, false, None),
        Call::ReceiveLate | Call::ReceiveAnyLate if rank == other => {
            // If the connection is open, or this rank's number is larger than the late rank's, the send completes here
            // without the late rank. The operation after it does not.
            let sent = message(group, timeout, true, Some(case.late));
            if case.is_used || rank > case.late {
                sent.unwrap();
            }
            all_reduce(group, timeout)
        }
        Call::SendLate | Call::ReceiveLate | Call::ReceiveAnyLate => all_reduce(group, timeout),
    }
}

/// The body of a rank's process; does nothing when the tests are run.
#[test]
fn rank_process() {
    let Some((folder, rank)) = job::folder_and_rank() else {
        return;
    };
    let variable = |name: &str| std::env::var(name).unwrap();
    let ranks: u32 = variable("LATECOMERS_RANKS").parse().unwrap();
    let config = Config::from_lookup(|name| match name {
        "RCOMM_TRANSPORT" => Some(variable("LATECOMERS_TRANSPORT")),
        _ => None,
    });
    let this_rank = Rank::open(&folder, (rank, ranks), config.unwrap());
    let key = |number: usize, rank: u32| format!("outcomes/{number}/{rank}");
    let mut groups = Vec::new();
    for (number, &case) in cases(ranks).iter().enumerate() {
        let mut group = this_rank.connect(number as u64 + 1);
        if case.is_used {
            all_reduce(&mut group, TIME_LIMIT).unwrap();
            let next = (case.late + 1) % ranks;
            if rank == case.late || rank == next {
                let peer = if rank == next { case.late } else { next };
                message(&mut group, TIME_LIMIT, rank == next, Some(peer)).unwrap();
                message(&mut group, TIME_LIMIT, rank != next, Some(peer)).unwrap();
            }
        }
        if rank == case.late {
            let others = (0..ranks).filter(|&other| other != rank);
            let keys: Vec<String> = others.map(|other| key(number, other)).collect();
            let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
            this_rank.store.wait(&keys, TIME_LIMIT).unwrap();
        }
        let outcome = run(case, &mut group, rank, ranks);
        let text = outcome.map_or_else(|error| error.to_string(), |()| "ok".to_owned());
        this_rank
            .store
            .set(&key(number, rank), text.as_bytes())
            .unwrap();
        // The group is kept, since dropping it would close its connections: groups that were given up keep them.
        groups.push(group);
    }
    this_rank.store.set(&format!("end/{rank}"), b"").unwrap();
    let ends: Vec<String> = (0..ranks).map(|rank| format!("end/{rank}")).collect();
    let ends: Vec<&str> = ends.iter().map(String::as_str).collect();
    this_rank.store.wait(&ends, TIME_LIMIT).unwrap();
}

fn check_that_latecomers_are_refused(transport: &str, ranks: u32) {
    let folder = tempfile::tempdir().unwrap();
    let start = |rank| {
        let mut command = job::rank_command(folder.path(), rank);
        command
            .env("LATECOMERS_TRANSPORT", transport)
            .env("LATECOMERS_RANKS", ranks.to_string())
            .stdout(Stdio::null());
        command.spawn().unwrap()
    };
    let mut processes = job::Ranks((0..ranks).map(start).collect());
    for child in &mut processes.0 {
        assert!(child.wait().unwrap().success());
    }
    let store = job::store(folder.path());
    let mut wrong = String::new();
    for (number, case) in cases(ranks).iter().enumerate() {
        for rank in 0..ranks {
            let outcome = store
                .get(&format!("outcomes/{number}/{rank}"), TIME_LIMIT)
                .unwrap();
            if outcome == b"ok" {
                wrong.push_str(&format!("{case:?}: rank {rank} completed\n"));
            }
        }
    }
    assert!(wrong.is_empty(), "{transport}, {ranks} ranks:\n{wrong}");
}

#[test]
fn two_ranks_over_shared_memory_refuse_latecomers() {
    check_that_latecomers_are_refused("shm", 2);
}

#[test]
fn two_ranks_over_tcp_refuse_latecomers() {
    check_that_latecomers_are_refused("tcp", 2);
}

#[test]
fn four_ranks_over_shared_memory_refuse_latecomers() {
    check_that_latecomers_are_refused("shm", 4);
}

#[test]
fn four_ranks_over_tcp_refuse_latecomers() {
    check_that_latecomers_are_refused("tcp", 4);
}
