//! Simulates programs: which rank completes which act, and when. Each rank does one act after the other; a
//! collective ends when all members are in it and agree, a message when both halves are posted and agree.

use super::Kind;
use super::Random;
use super::fault::Fault;
use super::mesh::Mesh;
use super::program::{Act, Call, Program};
use rcomm_recorder::model::{OpType, Rank};
use std::collections::{HashMap, VecDeque};

/// When one act was issued and ended, ns since the start; no end = it never did.
#[derive(Clone, Copy, Debug)]
pub(super) struct Times {
    pub(super) arrived: i64,
    pub(super) ended: Option<i64>,
    /// Of a batch that did not end: the messages whose other half was posted, a bit each.
    pub(super) matched: u32,
}

/// The result of the programs.
#[derive(Clone, Debug)]
pub(super) struct Run {
    /// By rank: the acts that it reached.
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

/// The receive and the send of a message: for each, which rank posted it, when, and with how many elements.
type Halves = [Option<(Rank, i64, u64)>; 2];

/// Messages that a receiver takes in any order: the ranks with a posted half that is not matched, by group and
/// receiver.
#[derive(Default)]
struct FromAny {
    sends: HashMap<(usize, u32), VecDeque<Rank>>,
    receives: HashMap<(usize, u32), VecDeque<Rank>>,
}

impl FromAny {
    /// Posts one half; returns the rank that posted the other, if it was there.
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
fn agree(a: &[Call], b: &[Call]) -> bool {
    a.len() == b.len()
        && a.iter().zip(b).all(|(a, b)| {
            let same = a.op == b.op && a.dtype == b.dtype && a.fits && b.fits;
            same && match a.op {
                OpType::AllToAllSingle => true,
                OpType::AllGatherV => a.output == b.output,
                OpType::Gather => a.input == b.input && a.root == b.root,
                _ => a.input == b.input && a.output == b.output,
            }
        })
}

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
        let me = rank as usize;
        let at = times[me]
            .iter()
            .filter(|times| times.ended.is_some())
            .count();
        let Some(act) = programs[me].acts.get(at) else {
            continue;
        };
        let fresh = times[me].len() == at;
        if fresh {
            let late = programs[me]
                .late
                .iter()
                .find(|(when, _)| *when == at)
                .map_or(0, |(_, ms)| *ms);
            clock[me] += 200_000 + (random.draw() % 60_000) as i64 + late as i64 * 1_000_000;
            times[me].push(Times {
                arrived: clock[me],
                ended: None,
                matched: 0,
            });
        }
        match act {
            Act::Collective { group, calls } => {
                let number = *seq[me].entry(*group).or_insert(0);
                let here = inside.entry((*group, number)).or_default();
                if fresh {
                    here.push(rank);
                }
                if here.len() < mesh.groups[*group].ranks.len()
                    || broken.contains(&(*group, number))
                {
                    continue;
                }
                let all_agree = here.iter().all(|&other| {
                    let other = &programs[other as usize].acts[times[other as usize].len() - 1];
                    matches!(other, Act::Collective { calls: others, .. } if agree(calls, others))
                });
                if !all_agree {
                    continue;
                }
                let newest = here
                    .iter()
                    .map(|&rank| times[rank as usize][times[rank as usize].len() - 1].arrived);
                let end = newest.max().unwrap_or(0) + 300_000;
                for other in here.clone() {
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
                    let matched = fresh
                        .then(|| from_any.post(*group, receiver, rank, message.sends))
                        .flatten();
                    if let Some(other) = matched {
                        let other = other as usize;
                        let there = times[other][times[other].len() - 1].arrived;
                        for one in [me, other] {
                            clock[one] = clock[me].max(there) + 200_000;
                            if let Some(last) = times[one].last_mut() {
                                last.ended = Some(clock[one]);
                            }
                            queue.push_back(one as Rank);
                        }
                    }
                    continue;
                }
                let mut complete = true;
                let mut end = clock[me];
                let mut wake = Vec::new();
                for (at_batch, message) in messages.iter().enumerate() {
                    let ends = if message.sends {
                        (member, message.peer)
                    } else {
                        (message.peer, member)
                    };
                    let key = (*group, ends.0, ends.1, message.sends);
                    let nth = if fresh {
                        let nth = counted.entry(key).or_insert(0);
                        *nth += 1;
                        *nth - 1
                    } else {
                        counted[&key] - 1
                    };
                    let halves = posted.entry((*group, ends.0, ends.1, nth)).or_default();
                    halves[usize::from(message.sends)] =
                        Some((rank, times[me][at].arrived, message.elements));
                    match halves {
                        [Some(a), Some(b)] if a.2 == b.2 => {
                            end = end.max(a.1).max(b.1);
                            times[me][at].matched |= 1 << at_batch;
                            wake.push(mesh.groups[*group].ranks[message.peer as usize]);
                        }
                        _ => complete = false,
                    }
                }
                if complete {
                    clock[me] = end + 200_000;
                    times[me][at].ended = Some(clock[me]);
                    queue.push_back(rank);
                }
                // The half posted here may be the last one for which another batch has waited.
                if complete || fresh {
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

/// The number in its group, from 0, of the collective at which a fault was injected.
fn number_of(program: &Program, fault: &Fault) -> u32 {
    let before = program.acts[..fault.at].iter();
    before
        .filter(|act| matches!(act, Act::Collective { group, .. } if *group == fault.group))
        .count() as u32
}
