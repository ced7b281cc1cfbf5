//! Simulates the time of a job: hosts issue, devices compute, and operations end some time after all members have
//! arrived.

use super::program::{Act, ActKind, Group};
use super::{PacedSpec, Slow};
use crate::generator::Random;
use rcomm_recorder::model::Rank;
use std::collections::{HashMap, VecDeque};

/// When an act was issued by the host, was reached by the device, and ended, in ns since the start of the job. `ended`
/// is 0 for an act that has not ended.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Times {
    pub(super) issued: i64,
    pub(super) reached: i64,
    pub(super) ended: i64,
}

/// The state of a rank that runs its program.
struct Runner {
    random: Random,
    /// When the host has issued all its acts so far, in ns since the start of the job.
    host: i64,
    /// When the device has finished its computations so far, in ns since the start of the job.
    device: i64,
    /// When the last operation of each group ended, in ns since the start of the job.
    streams: HashMap<usize, i64>,
    /// The number of collectives of each group so far.
    counted: HashMap<usize, u64>,
    /// The numbers of messages to and from each peer so far, by group, direction and peer.
    messages: HashMap<(usize, bool, u32), u64>,
    steps: usize,
    /// When the work of the previous step was done, in ns since the start of the job.
    previous_done: i64,
    times: Vec<Times>,
    /// Whether the rank has issued its current act, which waits for other ranks.
    waits: bool,
}

const MS: i64 = 1_000_000;

/// Runs all programs, and returns the times of the acts of each rank.
pub(super) fn run(spec: &PacedSpec, groups: &[Group], programs: &[Vec<Act>]) -> Vec<Vec<Times>> {
    let mut job = Job {
        spec,
        groups,
        inside: HashMap::new(),
        posted: HashMap::new(),
        runners: (0..spec.world())
            .map(|rank| Runner::new(spec, rank))
            .collect(),
    };
    let mut queue: VecDeque<Rank> = (0..spec.world()).collect();
    while let Some(rank) = queue.pop_front() {
        while let Some(act) = programs[rank as usize].get(job.runners[rank as usize].times.len()) {
            if !job.act(rank, act, &mut queue) {
                break;
            }
        }
    }
    job.runners.into_iter().map(|runner| runner.times).collect()
}

/// A half of a message: its group, sender, receiver and number, and whether it is the send.
type Half = (usize, u32, u32, u64, bool);

/// The state of all ranks.
struct Job<'a> {
    spec: &'a PacedSpec,
    groups: &'a [Group],
    /// The ranks that are in each collective, with their times; by group and number.
    inside: HashMap<(usize, u64), Vec<(Rank, Times)>>,
    /// The rank that posted each half, with the index and the times of its act.
    posted: HashMap<Half, (Rank, usize, Times)>,
    runners: Vec<Runner>,
}

impl Runner {
    fn new(spec: &PacedSpec, rank: Rank) -> Self {
        Self {
            random: Random::new(spec.seed ^ (u64::from(rank) + 1) << 20),
            host: 0,
            device: 0,
            streams: HashMap::new(),
            counted: HashMap::new(),
            messages: HashMap::new(),
            steps: 0,
            previous_done: 0,
            times: Vec::new(),
            waits: false,
        }
    }

    /// Issues a computation and the operation after it.
    fn issue(&mut self, spec: &PacedSpec, rank: Rank, compute_us: u64) -> Times {
        let (mut host_ns, mut device_ns) =
            (50_000 + compute_us as i64 * 200, compute_us as i64 * 1000);
        match spec.slow {
            Slow::Issuing(slow, times) if slow == rank => host_ns *= times as i64,
            Slow::Device(slow, tenths) if slow == rank => {
                device_ns = device_ns * tenths as i64 / 10
            }
            _ => {}
        }
        self.host += self.about(host_ns, 10);
        self.device = self.device.max(self.host) + self.about(device_ns, 2);
        Times {
            issued: self.host,
            reached: self.device,
            ended: 0,
        }
    }

    /// The time, varied at random by up to `percent` percent.
    fn about(&mut self, ns: i64, percent: i64) -> i64 {
        let drawn = (self.random.draw() % 2001) as i64 - 1000;
        ns + ns * percent * drawn / 100_000
    }

    /// Begins a step.
    fn step(&mut self, spec: &PacedSpec, rank: Rank) {
        let done = self
            .streams
            .values()
            .copied()
            .max()
            .unwrap_or(0)
            .max(self.device);
        let awaited = if spec.waits { done } else { self.previous_done };
        self.previous_done = done;
        // The new parameters need all gradients.
        self.device = done;
        self.host = self.host.max(awaited);
        // All ranks draw the same numbers: which rank is late in the step.
        let mut turns = Random::new(spec.seed ^ 0x1234 ^ (self.steps as u64) << 32);
        let late_ms = match spec.slow {
            Slow::Loading(slow, ms) if slow == rank => ms,
            Slow::Host(host, ms) if rank / spec.per_host == host => ms,
            Slow::ByTurns(ms) if turns.draw() % u64::from(spec.world()) == u64::from(rank) => {
                turns.between(ms, 2 * ms)
            }
            _ => 0,
        };
        self.host += self.about(late_ms as i64 * MS, 10);
        self.steps += 1;
    }
}

impl Job<'_> {
    /// Runs an act; returns whether the rank may continue with its next one.
    fn act(&mut self, rank: Rank, act: &Act, queue: &mut VecDeque<Rank>) -> bool {
        let index = rank as usize;
        if self.runners[index].waits {
            return false;
        }
        match act.kind {
            ActKind::Step => {
                self.runners[index].step(self.spec, rank);
                let host = self.runners[index].host;
                self.runners[index].times.push(Times {
                    issued: host,
                    reached: host,
                    ended: host,
                });
                true
            }
            ActKind::Collective {
                group,
                takes_us,
                needed,
                ..
            } => {
                let runner = &mut self.runners[index];
                let mut times = runner.issue(self.spec, rank, act.compute_us);
                let stream = runner.streams.get(&group).copied().unwrap_or(0);
                times.reached = times.reached.max(stream);
                let number = *runner.counted.entry(group).or_default();
                runner.waits = true;
                let arrived = self.inside.entry((group, number)).or_default();
                arrived.push((rank, times));
                if arrived.len() < self.groups[group].ranks.len() {
                    return false;
                }
                let arrived = std::mem::take(arrived);
                let start = arrived.iter().map(|(_, times)| times.reached).max();
                let end = start.unwrap_or(0) + takes_us as i64 * 1000;
                for (other, mut times) in arrived {
                    let runner = &mut self.runners[other as usize];
                    times.ended = end + (runner.random.draw() % 20_000) as i64;
                    runner.streams.insert(group, times.ended);
                    if needed {
                        runner.device = runner.device.max(times.ended);
                    }
                    *runner.counted.entry(group).or_default() += 1;
                    runner.waits = false;
                    runner.times.push(times);
                    if other != rank {
                        queue.push_back(other);
                    }
                }
                true
            }
            ActKind::Message { group, sends, peer } => {
                self.message(rank, (group, sends, peer), act.compute_us, queue)
            }
        }
    }

    /// Runs a message; returns whether the rank may continue with its next act. A send does not block its rank. A
    /// receive blocks its rank until the send is posted.
    fn message(
        &mut self,
        rank: Rank,
        (group, sends, peer): (usize, bool, u32),
        compute_us: u64,
        queue: &mut VecDeque<Rank>,
    ) -> bool {
        let index = rank as usize;
        let ranks = &self.groups[group].ranks;
        let member = ranks.iter().position(|&member| member == rank);
        let member = member.unwrap_or(0) as u32;
        let runner = &mut self.runners[index];
        let mut times = runner.issue(self.spec, rank, compute_us);
        let nth = runner.messages.entry((group, sends, peer)).or_default();
        *nth += 1;
        let ends = if sends {
            (member, peer)
        } else {
            (peer, member)
        };
        let key = |sends: bool| (group, ends.0, ends.1, *nth, sends);
        let Some(&(other, at, other_times)) = self.posted.get(&key(!sends)) else {
            self.posted
                .insert(key(sends), (rank, runner.times.len(), times));
            runner.waits = !sends;
            if sends {
                runner.times.push(times);
            }
            return sends;
        };
        times.ended = times.reached.max(other_times.reached) + 200_000;
        let end = times.ended;
        runner.times.push(times);
        if sends {
            // The receiver has waited.
            let receiver = &mut self.runners[other as usize];
            receiver.waits = false;
            receiver.device = receiver.device.max(end);
            receiver.times.push(Times {
                ended: end,
                ..other_times
            });
            queue.push_back(other);
        } else {
            runner.device = runner.device.max(end);
            self.runners[other as usize].times[at].ended = end;
        }
        true
    }
}
