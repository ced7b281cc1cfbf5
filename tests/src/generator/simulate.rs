//! Simulates programs, to find which rank completes which act, and when. Each rank does one act after the other. A
//! collective ends when all members are in it and agree; a message ends when both halves are posted and agree.

use super::Kind;
use super::Random;
use super::fault::Fault;
use super::mesh::Mesh;
use super::program::{Act, Call, Program};
use rcomm_recorder::model::{OpType, Rank};
use std::collections::{HashMap, VecDeque};

/// When an act was issued and ended, in ns since the start of the job. An act that never ended has no end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    pub(super) arrived: i64,
    pub(super) ended: Option<i64>,
    /// A bit for each message of a batch; it is set if the message's other half was posted.
    pub(super) matched: u32,
}

/// The result of the simulation.
#[derive(Clone, Debug)]
pub(super) struct Run {
    /// The times of the acts that each rank reached, by rank.
    pub(super) times: Vec<Vec<Times>>,
}

impl Run {
    /// Ranks that are in an act that did not end.
    pub(super) fn blocked(&self) -> Vec<Rank> {
        let ranks = self.times.iter().enumerate();
        ranks
            .filter(|(_, times)| times.last().is_some_and(|last| last.ended.is_none()))
            .map(|(rank, _)| rank as Rank)
            .collect()
    }
}

/// The receive and the send of a message, each with the rank that posted it, the time, and the number of elements.
type Halves = [Option<(Rank, i64, u64)>; 2];

/// The ranks whose posted half of a message is not matched yet, by group and receiver, for messages that the receiver
/// takes from any rank.
#[derive(Default)]
struct FromAny {
    sends: HashMap<(usize, u32), VecDeque<Rank>>,
    receives: HashMap<(usize, u32), VecDeque<Rank>>,
}

impl FromAny {
    /// Posts a half of a message. Returns the rank that had posted the other half, if there is one.
    fn post(&mut self, group: usize, receiver: u32, rank: Rank, sends: bool) -> Option<Rank> {
        let (same_side, others) = if sends {
            (&mut self.sends, &mut self.receives)
        } else {
            (&mut self.receives, &mut self.sends)
        };
        let key = (group, receiver);
        let matched = others.get_mut(&key).and_then(VecDeque::pop_front);
        if matched.is_none() {
            same_side.entry(key).or_default().push_back(rank);
        }
        matched
    }
}

/// Whether the calls of two members of a group agree.
fn agree(calls: &[Call], others: &[Call]) -> bool {
    calls.len() == others.len()
        && calls.iter().zip(others).all(|(a, b)| {
            let is_same_kind = a.op == b.op && a.dtype == b.dtype && a.fits && b.fits;
            is_same_kind
                && match a.op {
                    OpType::AllToAllSingle => true,
                    OpType::AllGatherV => a.output == b.output,
                    OpType::Gather => a.input == b.input && a.root == b.root,
                    _ => a.input == b.input && a.output == b.output,
                }
        })
}

/// Runs all programs until no rank can go on.
pub(super) fn run(mesh: &Mesh, programs: &[Program], faults: &[Fault], random: &mut Random) -> Run {
    let world = programs.len();
    let mut clock = vec![0i64; world];
    let mut times: Vec<Vec<Times>> = vec![Vec::new(); world];
    let mut seq: Vec<HashMap<usize, u32>> = vec![HashMap::new(); world];
    let mut counted: HashMap<(usize, u32, u32, bool), usize> = HashMap::new();
    let mut posted: HashMap<(usize, u32, u32, usize), Halves> = HashMap::new();
    let mut from_any = FromAny::default();
    let mut inside: HashMap<(usize, u32), Vec<Rank>> = HashMap::new();
    let mut queue: VecDeque<Rank> = (0..world as Rank).collect();
    let broken: Vec<(usize, u32)> = faults
        .iter()
        .filter(|fault| matches!(fault.kind, Kind::Fabric | Kind::Fails | Kind::Members))
        .map(|fault| {
            (
                fault.group,
                number_of(&programs[fault.rank as usize], fault),
            )
        })
        .collect();
    while let Some(rank) = queue.pop_front() {
        let index = rank as usize;
        let at = times[index]
            .iter()
            .filter(|times| times.ended.is_some())
            .count();
        let Some(act) = programs[index].acts.get(at) else {
            continue;
        };
        let is_new = times[index].len() == at;
        if is_new {
            let late = programs[index]
                .late
                .iter()
                .find(|(late_act, _)| *late_act == at)
                .map_or(0, |(_, ms)| *ms);
            clock[index] += 200_000 + (random.draw() % 60_000) as i64 + late as i64 * 1_000_000;
            times[index].push(Times {
                arrived: clock[index],
                ended: None,
                matched: 0,
            });
        }
        match act {
            Act::Collective { group, calls } => {
                let number = *seq[index].entry(*group).or_insert(0);
                let arrived = inside.entry((*group, number)).or_default();
                if is_new {
                    arrived.push(rank);
                }
                if arrived.len() < mesh.groups[*group].ranks.len()
                    || broken.contains(&(*group, number))
                {
                    continue;
                }
                let all_agree = arrived.iter().all(|&other| {
                    let other = &programs[other as usize].acts[times[other as usize].len() - 1];
                    matches!(other, Act::Collective { calls: others, .. } if agree(calls, others))
                });
                if !all_agree {
                    continue;
                }
                let arrivals = arrived
                    .iter()
                    .map(|&rank| times[rank as usize][times[rank as usize].len() - 1].arrived);
                let end = arrivals.max().unwrap_or(0) + 300_000;
                for other in arrived.clone() {
                    let other = other as usize;
                    clock[other] = end + (random.draw() % 20_000) as i64;
                    if let Some(last) = times[other].last_mut() {
                        last.ended = Some(clock[other]);
                    }
                    *seq[other].entry(*group).or_insert(0) += 1;
                    queue.push_back(other as Rank);
                }
            }
            Act::Batch {
                group, messages, ..
            } => {
                let Some(member) = mesh.member(*group, rank) else {
                    continue;
                };
                if let [message] = messages.as_slice()
                    && message.from_any
                {
                    let receiver = if message.sends { message.peer } else { member };
                    let matched = is_new
                        .then(|| from_any.post(*group, receiver, rank, message.sends))
                        .flatten();
                    if let Some(other) = matched {
                        let other = other as usize;
                        let other_arrived = times[other][times[other].len() - 1].arrived;
                        for end in [index, other] {
                            clock[end] = clock[index].max(other_arrived) + 200_000;
                            if let Some(last) = times[end].last_mut() {
                                last.ended = Some(clock[end]);
                            }
                            queue.push_back(end as Rank);
                        }
                    }
                    continue;
                }
                let mut is_complete = true;
                let mut end = clock[index];
                let mut wake = Vec::new();
                for (nth_of_batch, message) in messages.iter().enumerate() {
                    let ends = if message.sends {
                        (member, message.peer)
                    } else {
                        (message.peer, member)
                    };
                    let key = (*group, ends.0, ends.1, message.sends);
                    let nth = if is_new {
                        let nth = counted.entry(key).or_insert(0);
                        *nth += 1;
                        *nth - 1
                    } else {
                        counted[&key] - 1
                    };
                    let halves = posted.entry((*group, ends.0, ends.1, nth)).or_default();
                    halves[usize::from(message.sends)] =
                        Some((rank, times[index][at].arrived, message.elements));
                    match halves {
                        [Some(a), Some(b)] if a.2 == b.2 => {
                            end = end.max(a.1).max(b.1);
                            times[index][at].matched |= 1 << nth_of_batch;
                            wake.push(mesh.groups[*group].ranks[message.peer as usize]);
                        }
                        _ => is_complete = false,
                    }
                }
                if is_complete {
                    clock[index] = end + 200_000;
                    times[index][at].ended = Some(clock[index]);
                    queue.push_back(rank);
                }
                // The half that this act posts may be the last one for which another batch has waited.
                if is_complete || is_new {
                    queue.extend(wake.into_iter().filter(|&other| {
                        times[other as usize]
                            .last()
                            .is_some_and(|last| last.ended.is_none())
                    }));
                }
            }
        }
    }
    Run { times }
}

/// The number of the collective at which a fault was injected, among those of its group, from 0.
fn number_of(program: &Program, fault: &Fault) -> u32 {
    let before = program.acts[..fault.at].iter();
    before
        .filter(|act| matches!(act, Act::Collective { group, .. } if *group == fault.group))
        .count() as u32
}
