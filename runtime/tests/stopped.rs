//! A process is stopped inside a collective and resumed after the others have timed out. A collective that the others
//! have given up fails in this process too, even if all data that it needs has come. A collective that the others have
//! completed completes there too. Both transports are tested.
//!
//! Ranks are processes: this program starts itself once for each rank. A job goes through all cases, each in a group
//! of its own.
#![allow(clippy::unwrap_used)]

mod job;

use job::{Group, Rank, TIME_LIMIT};
use rcomm::{Buffer, Config, Op, ReduceOp, Result, Store};
use rustix::process::{Pid, Signal, kill_process};
use std::process::Stdio;
use std::time::{Duration, Instant};

/// The time-out of the ranks that run, while they wait for the stopped one.
const TIMEOUT: Duration = Duration::from_millis(200);
/// After this many sleeps a thread is inside the collective's wait: the store's client sleeps less often before that.
const SLEEPS: u64 = 20;

/// The collectives, all of them too small for a channel to be full.
const COLLECTIVES: [&str; 3] = ["barrier", "all-reduce", "all-gather"];

/// A collective, and the rank that is stopped inside it.
#[derive(Clone, Copy, Debug)]
struct Case {
    /// One of [`COLLECTIVES`].
    collective: &'static str,
    stopped: u32,
}

fn cases(ranks: u32) -> impl Iterator<Item = Case> {
    let case = move |collective| {
        (0..ranks).map(move |stopped| Case {
            collective,
            stopped,
        })
    };
    COLLECTIVES.into_iter().flat_map(case)
}

fn run(collective: &str, group: &mut Group, ranks: u32, timeout: Duration) -> Result<()> {
    let mut data = [1f32; 8];
    let mut gathered = vec![0f32; 8 * ranks as usize];
    let mut op = match collective {
        "barrier" => Op::Barrier,
        "all-reduce" => Op::AllReduce {
            buffer: Buffer::from_mut(&mut data),
            op: ReduceOp::Sum.into(),
        },
        _ => Op::AllGatherSingle {
            input: Buffer::from_slice(&data),
            output: Buffer::from_mut(&mut gathered),
        },
    };
    group.run_within(timeout, &mut op).map(drop)
}

fn text(outcome: Result<()>) -> String {
    outcome.map_or_else(|error| error.to_string(), |()| "ok".to_owned())
}

/// The body of a rank's process; does nothing when the tests are run.
#[test]
fn rank_process() {
    let Some((folder, rank)) = job::folder_and_rank() else {
        return;
    };
    let variable = |name: &str| std::env::var(name).unwrap();
    let ranks: u32 = variable("STOPPED_RANKS").parse().unwrap();
    let config = Config::from_lookup(|name| match name {
        "RCOMM_TRANSPORT" => Some(variable("STOPPED_TRANSPORT")),
        _ => None,
    });
    let this_rank = Rank::open(&folder, (rank, ranks), config.unwrap());
    let mut groups = Vec::new();
    for (number, case) in cases(ranks).enumerate() {
        let mut group = this_rank.connect(number as u64 + 1);
        for collective in COLLECTIVES {
            run(collective, &mut group, ranks, TIME_LIMIT).unwrap();
        }
        let time = match rank == case.stopped {
            true => {
                let thread = rustix::thread::gettid().as_raw_nonzero().to_string();
                this_rank
                    .store
                    .set(&format!("enters/{number}"), thread.as_bytes())
                    .unwrap();
                TIME_LIMIT
            }
            false => {
                this_rank
                    .store
                    .wait(&[&format!("stopped/{number}")], TIME_LIMIT)
                    .unwrap();
                TIMEOUT
            }
        };
        // At the latest, the others give up the second operation, which the stopped rank does not reach.
        let outcomes = [(); 2].map(|()| text(run(case.collective, &mut group, ranks, time)));
        let outcomes = outcomes.join("\n");
        this_rank
            .store
            .set(&format!("outcomes/{number}/{rank}"), outcomes.as_bytes())
            .unwrap();
        // The group is kept, since dropping it would close its connections: groups that were given up keep them.
        groups.push(group);
    }
    this_rank.store.set(&format!("end/{rank}"), b"").unwrap();
    let ends: Vec<String> = (0..ranks).map(|rank| format!("end/{rank}")).collect();
    let ends: Vec<&str> = ends.iter().map(String::as_str).collect();
    this_rank.store.wait(&ends, TIME_LIMIT).unwrap();
}

/// How often a thread has slept.
fn sleeps(pid: Pid, thread: &str) -> u64 {
    let path = format!("/proc/{}/task/{thread}/status", pid.as_raw_nonzero().get());
    let status = std::fs::read_to_string(path).unwrap();
    let mut lines = status.lines();
    let count = lines.find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    count.unwrap().trim().parse().unwrap()
}

/// Stops a rank once its thread waits in the collective, and resumes it once the others have their outcomes.
fn stop_and_resume(store: &dyn Store, number: usize, case: Case, ranks: u32, pid: Pid) {
    let thread = store.get(&format!("enters/{number}"), TIME_LIMIT).unwrap();
    let thread = String::from_utf8(thread).unwrap();
    let (sleeps_at_start, deadline) = (sleeps(pid, &thread), Instant::now() + TIME_LIMIT);
    while sleeps(pid, &thread) < sleeps_at_start + SLEEPS {
        assert!(
            Instant::now() < deadline,
            "{case:?}: the rank does not wait"
        );
        std::thread::sleep(Duration::from_millis(2));
    }
    kill_process(pid, Signal::STOP).unwrap();
    store.set(&format!("stopped/{number}"), b"").unwrap();
    let others = (0..ranks).filter(|&rank| rank != case.stopped);
    let keys: Vec<String> = others
        .map(|rank| format!("outcomes/{number}/{rank}"))
        .collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    store.wait(&keys, TIME_LIMIT).unwrap();
    kill_process(pid, Signal::CONT).unwrap();
}

fn check_agreement_with_a_stopped_rank(transport: &str, ranks: u32) {
    let folder = tempfile::tempdir().unwrap();
    let start = |rank| {
        let mut command = job::rank_command(folder.path(), rank);
        command
            .env("STOPPED_TRANSPORT", transport)
            .env("STOPPED_RANKS", ranks.to_string())
            .stdout(Stdio::null());
        command.spawn().unwrap()
    };
    let mut processes = job::Ranks((0..ranks).map(start).collect());
    let store = job::store(folder.path());
    let mut wrong = String::new();
    for (number, case) in cases(ranks).enumerate() {
        let pid = Pid::from_child(&processes.0[case.stopped as usize]);
        stop_and_resume(&*store, number, case, ranks, pid);
        let outcomes: Vec<Vec<String>> = (0..ranks)
            .map(|rank| {
                let lines = store.get(&format!("outcomes/{number}/{rank}"), TIME_LIMIT);
                let lines = String::from_utf8(lines.unwrap()).unwrap();
                lines.split('\n').map(str::to_owned).collect()
            })
            .collect();
        for operation in 0..2 {
            let completed = |rank: u32| outcomes[rank as usize][operation] == "ok";
            let others = (0..ranks).filter(|&rank| rank != case.stopped);
            let all_others_completed = others.clone().all(completed);
            let is_wrong = match completed(case.stopped) {
                true => !all_others_completed,
                false => all_others_completed,
            };
            // Over shared memory, the others agree among themselves as well.
            let is_split =
                transport == "shm" && !all_others_completed && others.clone().any(completed);
            if is_wrong || is_split {
                wrong.push_str(&format!("{case:?}, operation {operation}: {outcomes:#?}\n"));
            }
        }
    }
    for child in &mut processes.0 {
        assert!(child.wait().unwrap().success());
    }
    assert!(wrong.is_empty(), "{transport}, {ranks} ranks:\n{wrong}");
}

#[test]
fn two_ranks_over_shared_memory_agree_with_one_that_was_stopped() {
    check_agreement_with_a_stopped_rank("shm", 2);
}

#[test]
fn two_ranks_over_tcp_agree_with_one_that_was_stopped() {
    check_agreement_with_a_stopped_rank("tcp", 2);
}

#[test]
fn three_ranks_over_tcp_agree_with_one_that_was_stopped() {
    check_agreement_with_a_stopped_rank("tcp", 3);
}

#[test]
fn four_ranks_over_shared_memory_agree_with_one_that_was_stopped() {
    check_agreement_with_a_stopped_rank("shm", 4);
}

#[test]
fn four_ranks_over_tcp_agree_with_one_that_was_stopped() {
    check_agreement_with_a_stopped_rank("tcp", 4);
}
