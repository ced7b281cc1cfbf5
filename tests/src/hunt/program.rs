//! The program of a rank: what it computes, and what it issues.

use super::job::{Backend, Fault, Job, MS, Wrong};
use crate::generator::Random;
use rcomm_recorder::model::{OpType, Rank};

/// A collective or one half of a message.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Call {
    /// The index of the group in the job.
    pub(super) group: usize,
    pub(super) op: OpType,
    /// The other end's number in the group, for a send or a receive.
    pub(super) peer: Option<u32>,
    pub(super) elements: u64,
    pub(super) dtype: &'static str,
    pub(super) line: u32,
    /// The root, for an operation that has one.
    pub(super) root: Option<u32>,
    /// Its place in a batch of calls that are issued as one.
    pub(super) part: Option<Part>,
    /// Whether the program waits for it at once.
    pub(super) waits: bool,
}

/// The place of a call in a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) is_first: bool,
    pub(super) is_last: bool,
}

/// A part of a program.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Act {
    /// A new step begins.
    Step(u32),
    /// The host waits this long for data, ns.
    Load(i64),
    /// This much work, ns: of the device if there is one, else of the host.
    Compute(i64),
    /// An operation.
    Issue(Call),
    /// The program waits for all operations that it issued without waiting.
    Join,
    /// The host waits for its device.
    Sync,
    /// The fault of this index strikes.
    Strike(usize),
}

/// The programs of all ranks, with the job's faults in them. A fault that has no place in its rank's program is left
/// out. Also returns the faults that are in a program.
pub(super) fn programs(job: &Job, random: &mut Random) -> (Vec<Vec<Act>>, Vec<Fault>) {
    let pauses: Vec<i64> = (0..job.steps)
        .map(|_| {
            if random.chance(0.1) {
                random.between(100, 2500) as i64 * MS
            } else {
                random.between(1, 10) as i64 * MS
            }
        })
        .collect();
    let base = random.between(200, 8_000) as i64 * 1_000;
    let mut programs: Vec<Vec<Act>> = (0..job.world())
        .map(|rank| write(job, rank, base, &pauses, random))
        .collect();
    let mut faults = Vec::new();
    for &fault in &job.faults {
        let program = &mut programs[fault.rank as usize];
        if inject(job, fault, faults.len(), program) {
            faults.push(fault);
        }
    }
    (programs, faults)
}

/// The program of a rank. `base` is the unit of its work, ns; `pauses` are the longest times to load data in each step,
/// ns.
fn write(job: &Job, rank: Rank, base: i64, pauses: &[i64], random: &mut Random) -> Vec<Act> {
    let (_, stage, _) = job.place(rank);
    let pace = if job.is_uneven {
        random.between(80, 140)
    } else {
        random.between(98, 102)
    };
    let mut acts = Vec::new();
    let times = job.slow.filter(|(slow, _)| *slow == rank);
    let times = times.map_or(1, |(_, times)| times);
    let work = |random: &mut Random, share: i64| {
        let jitter = random.between(90, 115) as i64;
        Act::Compute(base * share * times * pace as i64 * jitter / 100_000)
    };
    let world = 0;
    let tp = job.group_of("tp", rank).map(|(group, _)| group);
    let pp = job.group_of("pp", rank).map(|(group, _)| group);
    let dp = job.group_of("dp", rank).map(|(group, _)| group);
    let dp = dp.or((job.dp > 1).then_some(world));
    let call = |group: usize, op: OpType, elements: u64, line: u32, waits: bool| {
        Act::Issue(Call {
            group,
            op,
            peer: None,
            elements,
            dtype: "BFloat16",
            line,
            root: (op == OpType::Broadcast).then_some(0),
            part: None,
            waits,
        })
    };
    let message = |op: OpType, peer: u32, line: u32| {
        pp.map(|group| {
            Act::Issue(Call {
                group,
                op,
                peer: Some(peer),
                elements: 65_536,
                dtype: "BFloat16",
                line,
                root: None,
                part: None,
                waits: op == OpType::Recv || !job.sends_early,
            })
        })
    };
    acts.push(call(world, OpType::Broadcast, 4096, 10, true));
    for step in 0..job.steps {
        acts.push(Act::Step(step));
        // In each step one rank loads data for the whole pause, and the others for at most 5 ms.
        let slow = u64::from(step) * 7919 % u64::from(job.world());
        let pause = pauses[step as usize];
        acts.push(Act::Load(if u64::from(rank) == slow {
            pause
        } else {
            pause.min(5 * MS)
        }));
        for (forward, line) in [(true, 100), (false, 200)] {
            for _ in 0..job.micro_batches {
                let (from, to) = match forward {
                    true => (stage.checked_sub(1), Some(stage + 1)),
                    false => (Some(stage + 1), stage.checked_sub(1)),
                };
                let exists = |peer: &u32| *peer < job.pp;
                acts.extend(
                    from.filter(exists)
                        .and_then(|peer| message(OpType::Recv, peer, line)),
                );
                for layer in 0..2 {
                    if let Some(dp) = dp.filter(|_| job.is_sharded) {
                        let gather = |elements: u64| {
                            call(dp, OpType::AllGatherSingle, elements, line + 2, false)
                        };
                        match job.batches {
                            true => acts.extend(batch([gather(8192 + layer), gather(64 + layer)])),
                            false => acts.push(gather(8192 + layer)),
                        }
                    }
                    acts.push(work(random, 2));
                    if job.is_sharded {
                        acts.push(Act::Join);
                    }
                    if let Some(tp) = tp {
                        acts.push(call(tp, OpType::AllReduce, 2048, line + 4, true));
                    }
                }
                acts.push(work(random, 1));
                acts.extend(
                    to.filter(exists)
                        .and_then(|peer| message(OpType::Send, peer, line + 6)),
                );
            }
        }
        if let Some(dp) = dp {
            let op = match job.is_sharded {
                true => OpType::ReduceScatterSingle,
                false => OpType::AllReduce,
            };
            for bucket in 0..3 {
                acts.push(call(dp, op, 100_000 + bucket, 300, !job.overlaps));
                acts.push(work(random, 1));
            }
        }
        acts.push(Act::Join);
        if job.batches {
            acts.extend(ring(job, rank));
            acts.push(Act::Join);
        }
        if job.broadcasts {
            acts.push(call(world, OpType::Broadcast, 16, 305, true));
        }
        if step % 2 == 1 {
            acts.push(call(world, OpType::AllReduce, 1, 310, true));
        }
        if job.backend == Backend::Nccl && step % 2 == 0 {
            acts.push(Act::Sync);
        }
    }
    acts.push(Act::Join);
    acts.push(call(world, OpType::Barrier, 0, 400, true));
    acts.push(Act::Sync);
    acts
}

/// A batch of messages around the ring of all ranks: each sends to its successor and receives from its predecessor.
fn ring(job: &Job, rank: Rank) -> impl Iterator<Item = Act> {
    let world = job.world();
    let (to, from) = ((rank + 1) % world, (rank + world - 1) % world);
    batch(
        [(OpType::Send, to), (OpType::Recv, from)].map(|(op, peer)| {
            Act::Issue(Call {
                group: 0,
                op,
                peer: Some(peer),
                elements: 32_768,
                dtype: "BFloat16",
                line: 320,
                root: None,
                part: None,
                waits: false,
            })
        }),
    )
}

/// Two calls that are issued as one.
fn batch(calls: [Act; 2]) -> impl Iterator<Item = Act> {
    let places = [true, false].map(|is_first| Part {
        is_first,
        is_last: !is_first,
    });
    calls.into_iter().zip(places).map(|(mut act, place)| {
        if let Act::Issue(call) = &mut act {
            call.part = Some(place);
        }
        act
    })
}

/// Puts a fault into a rank's program; returns whether it has a place there.
fn inject(job: &Job, fault: Fault, index: usize, program: &mut Vec<Act>) -> bool {
    let from = ((program.len() as f64 * fault.at) as usize).min(program.len() - 1);
    let is_collective = |act: &Act| {
        matches!(act, Act::Issue(call) if call.peer.is_none() && job.groups[call.group].ranks.len() > 1
            && call.op != OpType::Barrier)
    };
    let next = (from..program.len()).find(|&at| is_collective(&program[at]));
    let change_call = |program: &mut Vec<Act>, at: usize, change: &dyn Fn(&mut Call)| {
        if let Act::Issue(call) = &mut program[at] {
            change(call);
        }
        program.insert(at, Act::Strike(index));
        true
    };
    match fault.wrong {
        Wrong::Hangs | Wrong::DeviceHangs | Wrong::Stopped | Wrong::Killed | Wrong::Raises => {
            program.insert(from, Act::Strike(index));
            true
        }
        Wrong::Catches => {
            let is_step = |act: &Act| matches!(act, Act::Step(_));
            let Some(after) = (from + 1..program.len()).find(|&at| is_step(&program[at])) else {
                return false;
            };
            // Without a collective in between, the other ranks would miss nothing.
            if !program[from..after].iter().any(is_collective) {
                return false;
            }
            program.splice(from..after, [Act::Strike(index), Act::Join]);
            true
        }
        Wrong::OtherOperation => next.is_some_and(|at| {
            change_call(program, at, &|call| {
                call.op = match call.op {
                    OpType::AllReduce => OpType::Broadcast,
                    _ => OpType::AllReduce,
                };
            })
        }),
        Wrong::OtherSize => next.is_some_and(|at| {
            change_call(program, at, &|call| call.elements = call.elements * 2 + 1)
        }),
        Wrong::OtherType => {
            next.is_some_and(|at| change_call(program, at, &|call| call.dtype = "Float"))
        }
        Wrong::OtherRoot => {
            let has_root = |act: &Act| matches!(act, Act::Issue(call) if call.root.is_some());
            let next = (from..program.len()).find(|&at| has_root(&program[at]));
            next.is_some_and(|at| change_call(program, at, &|call| call.root = Some(1)))
        }
        Wrong::SkipsBatch => {
            let part = |act: &Act| match act {
                Act::Issue(call) => call.part,
                _ => None,
            };
            let is_first = |act: &Act| part(act).is_some_and(|part| part.is_first);
            let is_last = |act: &Act| part(act).is_some_and(|part| part.is_last);
            let first = (from..program.len()).find(|&at| is_first(&program[at]));
            let Some(first) = first else { return false };
            let length = program[first..].iter().position(is_last).unwrap_or(0);
            program.splice(first..=first + length, [Act::Strike(index)]);
            true
        }
        Wrong::Skips => next.is_some_and(|at| {
            program[at] = Act::Strike(index);
            true
        }),
        Wrong::Adds => next.is_some_and(|at| {
            let mut extra = program[at].clone();
            if let Act::Issue(call) = &mut extra {
                (call.elements, call.line) = (7, 350);
            }
            program.splice(at..at, [Act::Strike(index), extra]);
            true
        }),
        Wrong::Swaps => {
            let Some(at) = next else { return false };
            let Act::Issue(first) = program[at].clone() else {
                return false;
            };
            let is_other = |act: &Act| {
                matches!(act, Act::Issue(call) if call.group == first.group && call.peer.is_none()
                    && (call.op, call.elements) != (first.op, first.elements))
            };
            let is_step = |act: &Act| matches!(act, Act::Step(_));
            let mut later = at + 1..program.len();
            let Some(other) = later.find(|&at| is_other(&program[at]) || is_step(&program[at]))
            else {
                return false;
            };
            if is_step(&program[other]) {
                return false;
            }
            program.swap(at, other);
            program.insert(at, Act::Strike(index));
            true
        }
    }
}
