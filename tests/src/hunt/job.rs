//! Draws a job from a seed: its ranks and groups, its backend and recorder, and what goes wrong in it.

use crate::generator::Random;
use rcomm_recorder::model::Rank;

/// What carries out the operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    /// NCCL: the host issues operations, and the device waits for them.
    Nccl,
    /// PyTorch's gloo: the host waits, and its error names no rank.
    Gloo,
    /// rcomm's CPU backend: the host waits, and its error names ranks.
    Cpu,
}

/// What records the operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Records {
    /// PyTorch's own recorder, whose dumps a live process writes.
    Dumps,
    /// A ring, which outlives its process.
    Rings,
    /// rcomm's recorder, whose dumps a live process writes.
    Own,
}

/// What a rank does wrong, or what happens to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wrong {
    /// It issues nothing from some act on.
    Hangs,
    /// Its device begins nothing from some operation on.
    DeviceHangs,
    /// SIGSTOP stops it.
    Stopped,
    /// SIGKILL ends it.
    Killed,
    /// It raises an exception, and ends.
    Raises,
    /// It raises an exception in a step, catches it, and goes on with the next step.
    Catches,
    /// It issues another operation.
    OtherOperation,
    /// It passes another size.
    OtherSize,
    /// It passes another type.
    OtherType,
    /// It leaves out a collective.
    Skips,
    /// It issues a collective that no other rank issues.
    Adds,
    /// It issues two collectives of one group in the other order.
    Swaps,
    /// It names another root.
    OtherRoot,
    /// It leaves out a batch of calls.
    SkipsBatch,
}

impl Wrong {
    /// Faults that every backend can have. One that is listed twice is drawn twice as often.
    pub(super) const COMMON: &[Self] = &[
        Self::Hangs,
        Self::Hangs,
        Self::Stopped,
        Self::Killed,
        Self::Raises,
    ];
    /// Faults after which ranks disagree. rcomm's own backend refuses such calls at once, so [`Job::draw`] gives none
    /// of these to a job on it.
    pub(super) const DISAGREEMENTS: &[Self] = &[
        Self::Catches,
        Self::OtherOperation,
        Self::OtherSize,
        Self::OtherType,
        Self::Skips,
        Self::Adds,
        Self::Swaps,
    ];

    /// Whether the fault ends the rank's process.
    pub const fn ends_process(self) -> bool {
        matches!(self, Self::Killed | Self::Raises)
    }
}

/// A fault: what goes wrong, on which rank, and at which share of its program.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fault {
    /// What goes wrong.
    pub wrong: Wrong,
    /// The rank.
    pub rank: Rank,
    /// Where in the program of the rank, 0..1.
    pub at: f64,
}

/// A group of ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Its name, as PyTorch numbers groups.
    pub name: String,
    /// What it is for.
    pub purpose: &'static str,
    /// Its members, ascending.
    pub ranks: Vec<Rank>,
}

/// A job, before anything of it has run.
#[derive(Clone, Debug)]
pub struct Job {
    /// The seed from which everything is drawn.
    pub seed: u64,
    /// Tensor-parallel size.
    pub tp: u32,
    /// Pipeline stages.
    pub pp: u32,
    /// Data-parallel replicas.
    pub dp: u32,
    /// Whether parameters are sharded: gathered ahead, asynchronously.
    pub is_sharded: bool,
    /// Whether gradients are reduced asynchronously.
    pub overlaps: bool,
    /// The number of steps of the program.
    pub steps: u32,
    /// The number of micro-batches in a step.
    pub micro_batches: u32,
    /// Whether sends end before their receives are posted.
    pub sends_early: bool,
    /// What carries out the operations.
    pub backend: Backend,
    /// What records them.
    pub records: Records,
    /// Whether NCCL's recorder notes when operations start.
    pub notes_starts: bool,
    /// How many of the newest operations a record holds.
    pub ring_size: usize,
    /// The time-out of the operations, ns.
    pub timeout_ns: i64,
    /// The number of ranks on each host.
    pub per_host: u32,
    /// The largest error of a host's clock, ns.
    pub clock_error_ns: i64,
    /// Whether a launcher ends the others once a rank has failed.
    pub is_launched: bool,
    /// Whether the launcher writes down what it sees.
    pub launcher_notes: bool,
    /// Whether ranks differ in their pace.
    pub is_uneven: bool,
    /// A rank that computes this many times as long as the others.
    pub slow: Option<(Rank, i64)>,
    /// Whether each step has a broadcast.
    pub broadcasts: bool,
    /// Whether gathers of parameters, and messages around the ring of all ranks, are issued in batches of two.
    pub batches: bool,
    /// The share of the job's time, 0..1, after which the launcher is asked to end it; `None` if it is not asked.
    pub cancelled_at: Option<f64>,
    /// What goes wrong.
    pub faults: Vec<Fault>,
    /// The groups; the first is the world.
    pub groups: Vec<Group>,
}

pub(super) const MS: i64 = 1_000_000;
pub(super) const SECOND: i64 = 1_000 * MS;

impl Job {
    /// The job of this seed.
    pub fn draw(seed: u64) -> Self {
        let random = &mut Random::new(seed ^ 0x4e55_4e54);
        let (tp, pp, dp) = loop {
            let tp = *random.pick(&[1, 1, 1, 2, 2, 4, 8]);
            let pp = *random.pick(&[1, 1, 1, 2, 3, 4]);
            let dp = *random.pick(&[1, 2, 2, 3, 4, 4, 6, 8, 16]);
            if (2..=64).contains(&(tp * pp * dp)) {
                break (tp, pp, dp);
            }
        };
        let (backend, records) = *random.pick(&[
            (Backend::Nccl, Records::Dumps),
            (Backend::Nccl, Records::Dumps),
            (Backend::Nccl, Records::Rings),
            (Backend::Gloo, Records::Dumps),
            (Backend::Gloo, Records::Rings),
            (Backend::Gloo, Records::Rings),
            (Backend::Cpu, Records::Rings),
            (Backend::Cpu, Records::Rings),
        ]);
        let world = tp * pp * dp;
        let mut faults = Vec::new();
        let mut cancelled_at = None;
        match random.between(0, 99) {
            0..=19 => {}
            20..=24 => cancelled_at = Some(random.between(10, 95) as f64 / 100.0),
            25..=29 => {
                faults.push(Self::fault(random, backend, world));
                let second = Fault {
                    wrong: *random.pick(Wrong::COMMON),
                    ..Self::fault(random, backend, world)
                };
                faults.extend(Some(second).filter(|second| second.rank != faults[0].rank));
            }
            _ => faults.push(Self::fault(random, backend, world)),
        }
        let mut job = Self {
            seed,
            tp,
            pp,
            dp,
            is_sharded: dp > 1 && random.chance(0.3),
            overlaps: random.chance(0.6),
            steps: random.between(3, 9) as u32,
            micro_batches: *random.pick(&[1, 2, 4]),
            sends_early: backend == Backend::Cpu && random.chance(0.5),
            backend,
            records,
            notes_starts: random.chance(0.3),
            ring_size: *random.pick(&[usize::MAX, usize::MAX, 2000, 96, 64]),
            timeout_ns: *random.pick(&[20, 30, 60, 120, 600]) * SECOND,
            per_host: *random.pick(&[2, 4, 8, 8]),
            clock_error_ns: *random.pick(&[0, 0, 0, 20, 400, 5000]) * MS,
            is_launched: random.chance(0.7),
            launcher_notes: random.chance(0.4),
            is_uneven: random.chance(0.4),
            slow: None,
            broadcasts: false,
            batches: false,
            cancelled_at,
            faults,
            groups: Vec::new(),
        };
        job.set_groups();
        job
    }

    /// Draws a fault that a job on this backend can have.
    pub(super) fn fault(random: &mut Random, backend: Backend, world: u32) -> Fault {
        let wrong = match backend {
            Backend::Cpu => *random.pick(Wrong::COMMON),
            _ if random.chance(0.5) => *random.pick(Wrong::DISAGREEMENTS),
            Backend::Nccl if random.chance(0.1) => Wrong::DeviceHangs,
            _ => *random.pick(Wrong::COMMON),
        };
        Fault {
            wrong,
            rank: (random.draw() % u64::from(world)) as Rank,
            at: random.between(5, 98) as f64 / 100.0,
        }
    }

    /// Number of ranks.
    pub fn world(&self) -> u32 {
        self.tp * self.pp * self.dp
    }

    /// The rank at a place of the mesh.
    pub(super) fn rank(&self, dp: u32, pp: u32, tp: u32) -> Rank {
        (dp * self.pp + pp) * self.tp + tp
    }

    /// The place of a rank in the mesh: its replica, stage and shard.
    pub(super) fn place(&self, rank: Rank) -> (u32, u32, u32) {
        let (tp, rest) = (rank % self.tp, rank / self.tp);
        (rest / self.pp, rest % self.pp, tp)
    }

    /// The number of a rank's host.
    pub(super) fn host(&self, rank: Rank) -> u32 {
        rank / self.per_host
    }

    /// The rank's group of this purpose, and its number in that group.
    pub(super) fn group_of(&self, purpose: &str, rank: Rank) -> Option<(usize, u32)> {
        let mut groups = self.groups.iter().enumerate();
        groups.find_map(|(index, group)| {
            let member = group.ranks.iter().position(|&member| member == rank)?;
            (group.purpose == purpose).then_some((index, member as u32))
        })
    }

    /// Gives the job the groups that follow from the sizes of its mesh.
    pub(super) fn set_groups(&mut self) {
        self.groups = self.make_groups();
    }

    fn make_groups(&self) -> Vec<Group> {
        let mut lists: Vec<(&'static str, Vec<Rank>)> =
            vec![("default_pg", (0..self.world()).collect())];
        let (tps, pps, dps) = (0..self.tp, 0..self.pp, 0..self.dp);
        if self.tp > 1 {
            for dp in dps.clone() {
                for pp in pps.clone() {
                    lists.push(("tp", tps.clone().map(|tp| self.rank(dp, pp, tp)).collect()));
                }
            }
        }
        if self.pp > 1 {
            for dp in dps.clone() {
                for tp in tps.clone() {
                    lists.push(("pp", pps.clone().map(|pp| self.rank(dp, pp, tp)).collect()));
                }
            }
        }
        if self.dp > 1 && self.dp < self.world() {
            for pp in pps {
                for tp in tps.clone() {
                    lists.push(("dp", dps.clone().map(|dp| self.rank(dp, pp, tp)).collect()));
                }
            }
        }
        let group = |(index, (purpose, ranks)): (usize, (&'static str, Vec<Rank>))| Group {
            name: index.to_string(),
            purpose,
            ranks,
        };
        lists.into_iter().enumerate().map(group).collect()
    }
}
