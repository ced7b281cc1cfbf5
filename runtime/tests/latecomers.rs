//! A rank that comes after the others have given up the group is refused: whatever operation it calls, and however
//! little that needs of the others. The same over both transports, and whichever rank is late.
//!
//! Ranks are processes: this program starts itself once for each rank. A job goes through all scenes, each in a group
//! of its own.
#![allow(clippy::unwrap_used)]

mod job;

use job::{DEADLINE, Group, Rank};
use rcomm::{Buffer, Config, Op, ReduceOp, Result};
use std::process::Stdio;
use std::time::Duration;

/// For how long the ranks that are in time wait for the late one.
const PATIENCE: Duration = Duration::from_millis(200);

/// For how long the late rank waits; it may have to wait for connections that the others do not open any more.
const LATE_PATIENCE: Duration = Duration::from_secs(1);

/// What the ranks do in a scene.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Act {
    AllReduce,
    Barrier,
    /// From the late rank.
    BroadcastFromLate,
    /// To the late rank, among others.
    BroadcastToLate,
    ReduceToLate,
    ReduceFromLate,
    /// The late rank sends a small message, which needs no answer, to one that has waited for it.
    SendLate,
    /// The late rank receives a small message, which was sent before its sender gave up.
    ReceiveLate,
    /// The same from any rank.
    ReceiveAnyLate,
}

const ACTS: [Act; 9] = [
    Act::AllReduce,
    Act::Barrier,
    Act::BroadcastFromLate,
    Act::BroadcastToLate,
    Act::ReduceToLate,
    Act::ReduceFromLate,
    Act::SendLate,
    Act::ReceiveLate,
    Act::ReceiveAnyLate,
];

#[derive(Clone, Copy, Debug)]
struct Scene {
    act: Act,
    late: u32,
    /// Whether the group has run operations before, so that its connections are open.
    is_used: bool,
}

fn scenes(ranks: u32) -> Vec<Scene> {
    let mut all = Vec::new();
    for act in ACTS {
        for late in [0, ranks - 1] {
            for is_used in [true, false] {
                all.push(Scene { act, late, is_used });
            }
        }
    }
    all
}

fn all_reduce(group: &mut Group, time: Duration) -> Result<()> {
    let mut data = [1f32; 8];
    let mut op = Op::AllReduce {
        buffer: Buffer::from_mut(&mut data),
        op: ReduceOp::Sum.into(),
    };
    group.run_within(time, &mut op).map(drop)
}

fn message(group: &mut Group, time: Duration, sends: bool, peer: Option<u32>) -> Result<()> {
    let mut data = [7i32; 4];
    let mut op = match sends {
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
    group.run_within(time, &mut op).map(drop)
}

/// Runs the operation of a scene on one rank, to its outcome.
fn perform(scene: Scene, group: &mut Group, rank: u32, ranks: u32) -> Result<()> {
    let time = match rank == scene.late {
        true => LATE_PATIENCE,
        false => PATIENCE,
    };
    let other = (scene.late + 1) % ranks;
    let mut data = [1f32; 8];
    let root = match scene.act {
        Act::BroadcastFromLate | Act::ReduceToLate => scene.late,
        _ => other,
    };
    let buffer = Buffer::from_mut(&mut data);
    match scene.act {
        Act::AllReduce => all_reduce(group, time),
        Act::Barrier => group.run_within(time, &mut Op::Barrier).map(drop),
        Act::BroadcastFromLate | Act::BroadcastToLate => {
            let mut op = Op::Broadcast { buffer, root };
            group.run_within(time, &mut op).map(drop)
        }
        Act::ReduceToLate | Act::ReduceFromLate => {
            let op = ReduceOp::Sum.into();
            let mut op = Op::Reduce { buffer, op, root };
            group.run_within(time, &mut op).map(drop)
        }
        Act::SendLate if rank == scene.late => message(group, time, true, Some(other)),
        Act::SendLate if rank == other => message(group, time, false, Some(scene.late)),
        Act::ReceiveLate if rank == scene.late => message(group, time, false, Some(other)),
        Act::ReceiveAnyLate if rank == scene.late => message(group, time, false, None),
        Act::ReceiveLate | Act::ReceiveAnyLate if rank == other => {
            // Complete as far as the sender is concerned; what it waits for next is not.
            let sent = message(group, time, true, Some(scene.late));
            if scene.is_used || rank > scene.late {
                sent.unwrap();
            }
            all_reduce(group, time)
        }
        Act::SendLate | Act::ReceiveLate | Act::ReceiveAnyLate => all_reduce(group, time),
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
    let own = Rank::open(&folder, (rank, ranks), config.unwrap());
    let said = |number: usize, rank: u32| format!("said/{number}/{rank}");
    let mut groups = Vec::new();
    for (number, &scene) in scenes(ranks).iter().enumerate() {
        let mut group = own.connect(number as u64 + 1);
        if scene.is_used {
            all_reduce(&mut group, DEADLINE).unwrap();
            let next = (scene.late + 1) % ranks;
            if rank == scene.late || rank == next {
                let peer = if rank == next { scene.late } else { next };
                message(&mut group, DEADLINE, rank == next, Some(peer)).unwrap();
                message(&mut group, DEADLINE, rank != next, Some(peer)).unwrap();
            }
        }
        if rank == scene.late {
            let others = (0..ranks).filter(|&other| other != rank);
            let keys: Vec<String> = others.map(|other| said(number, other)).collect();
            let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
            own.store.wait(&keys, DEADLINE).unwrap();
        }
        let outcome = perform(scene, &mut group, rank, ranks);
        let text = outcome.map_or_else(|error| error.to_string(), |()| "ok".to_owned());
        own.store.set(&said(number, rank), text.as_bytes()).unwrap();
        // A group that is dropped closes its connections: what is tested is one that was given up.
        groups.push(group);
    }
    own.store.set(&format!("end/{rank}"), b"").unwrap();
    let ends: Vec<String> = (0..ranks).map(|rank| format!("end/{rank}")).collect();
    let ends: Vec<&str> = ends.iter().map(String::as_str).collect();
    own.store.wait(&ends, DEADLINE).unwrap();
}

fn refuses_latecomers(transport: &str, ranks: u32) {
    let folder = tempfile::tempdir().unwrap();
    let start = |rank| {
        let mut command = job::rank_of(folder.path(), rank);
        command
            .env("LATECOMERS_TRANSPORT", transport)
            .env("LATECOMERS_RANKS", ranks.to_string())
            .stdout(Stdio::null());
        command.spawn().unwrap()
    };
    let mut all = job::Ranks((0..ranks).map(start).collect());
    for child in &mut all.0 {
        assert!(child.wait().unwrap().success());
    }
    let store = job::store(folder.path());
    let mut wrong = String::new();
    for (number, scene) in scenes(ranks).iter().enumerate() {
        for rank in 0..ranks {
            let said = store
                .get(&format!("said/{number}/{rank}"), DEADLINE)
                .unwrap();
            if said == b"ok" {
                wrong.push_str(&format!("{scene:?}: rank {rank} completed\n"));
            }
        }
    }
    assert!(wrong.is_empty(), "{transport}, {ranks} ranks:\n{wrong}");
}

#[test]
fn two_ranks_over_shared_memory() {
    refuses_latecomers("shm", 2);
}

#[test]
fn two_ranks_over_tcp() {
    refuses_latecomers("tcp", 2);
}

#[test]
fn four_ranks_over_shared_memory() {
    refuses_latecomers("shm", 4);
}

#[test]
fn four_ranks_over_tcp() {
    refuses_latecomers("tcp", 4);
}
