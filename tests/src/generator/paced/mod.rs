//! Generates jobs for the judgment of lateness, simulated with the durations of all parts. Every rank has a host that
//! issues and a device that computes. An operation begins when all members have arrived, and a watchdog notices
//! completions when it polls.
//!
//! The records are those of PyTorch's NCCL recorder. The late ranks are known from the injected slowness.

mod program;
mod record;
mod run;

use super::Random;
use rcomm_analyzer::{Analysis, Extent, Policy, Report};
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::Dump;

/// How the ranks share the work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Replicas, which add up their gradients in buckets while they compute.
    Replicas,
    /// Sharded parameters, which are gathered before each layer; the gradients are reduced after it.
    Sharded,
    /// Tensor and data parallelism in a pipeline with this many chunks per stage.
    Pipeline(u32),
}

/// Which ranks are slow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Slow {
    /// Every rank is as fast as the others.
    None,
    /// The host of a rank begins each step this much later, in ms.
    Loading(Rank, u64),
    /// The host of a rank takes this many times as long as the others to issue.
    Issuing(Rank, u64),
    /// The device of a rank takes this many tenths of the others' time to compute.
    Device(Rank, u64),
    /// All ranks of a host begin each step this much later, in ms.
    Host(u32, u64),
    /// In each step, a random rank is late by one to two times this many ms.
    ByTurns(u64),
}

/// The parameters of a job.
#[derive(Clone, Debug)]
pub struct PacedSpec {
    /// The seed of all random numbers.
    pub seed: u64,
    /// How the ranks share the work.
    pub layout: Layout,
    /// Tensor-parallel size; 1 outside of pipelines.
    pub tp: u32,
    /// Pipeline stages; 1 outside of pipelines.
    pub pp: u32,
    /// Data-parallel replicas.
    pub dp: u32,
    /// Steps of the training program.
    pub steps: u32,
    /// The interval in which the watchdog polls, in µs.
    pub poll_interval_us: u64,
    /// Whether durations are recorded.
    pub timing: bool,
    /// Whether the host waits for its device at the end of each step; otherwise it waits one step later.
    pub waits: bool,
    /// The largest offset of the hosts' clocks to either side, in µs.
    pub clock_spread_us: u64,
    /// Number of ranks on each host.
    pub per_host: u32,
    /// Whether the records name their hosts.
    pub hosts_named: bool,
    /// Whether the marker that ends a batch of messages is recorded as a message itself.
    pub marked: bool,
    /// The number of operations that a ring holds.
    pub ring: usize,
    /// Which ranks are slow.
    pub slow: Slow,
}

/// A job's records, with the ranks that are slow.
#[derive(Clone, Debug)]
pub struct PacedJob {
    /// One record per rank, by rank.
    pub dumps: Vec<Dump>,
    /// The ranks that are slow, ascending.
    pub culprits: Vec<Rank>,
}

impl PacedSpec {
    /// The parameters of a random healthy job.
    pub fn random(seed: u64, layout: Layout, poll_interval_us: u64) -> Self {
        let mut random = Random::new(seed ^ 0x00ac_ed00);
        let (tp, pp, dp) = match layout {
            Layout::Replicas => (1, 1, *random.pick(&[2, 3, 4, 8, 16])),
            Layout::Sharded => (1, 1, *random.pick(&[4, 8, 16])),
            Layout::Pipeline(_) => {
                let tp = *random.pick(&[2, 2, 4]);
                (tp, *random.pick(&[2, 4]), *random.pick(&[1, 2, 2]))
            }
        };
        Self {
            seed,
            layout,
            tp,
            pp,
            dp,
            steps: random.between(20, 40) as u32,
            poll_interval_us,
            timing: random.chance(0.5),
            waits: random.chance(0.7),
            clock_spread_us: *random.pick(&[0, 2_000, 5_000_000]),
            per_host: *random.pick(&[2, 4, 8]),
            hosts_named: random.chance(0.3),
            marked: random.chance(0.5),
            ring: 2000,
            slow: Slow::None,
        }
    }

    /// Number of ranks.
    pub fn world(&self) -> u32 {
        self.tp * self.pp * self.dp
    }

    /// Makes the job.
    pub fn make(&self) -> PacedJob {
        let groups = program::groups(self);
        let programs: Vec<_> = (0..self.world())
            .map(|rank| program::write(self, &groups, rank))
            .collect();
        let times = run::run(self, &groups, &programs);
        let culprits = match self.slow {
            Slow::None | Slow::ByTurns(_) => Vec::new(),
            Slow::Loading(rank, _) | Slow::Issuing(rank, _) | Slow::Device(rank, _) => vec![rank],
            Slow::Host(host, _) => (0..self.world())
                .filter(|rank| rank / self.per_host == host)
                .collect(),
        };
        PacedJob {
            dumps: record::dumps(self, &groups, &programs, &times),
            culprits,
        }
    }
}

impl PacedJob {
    /// The analyzer's report on the records.
    pub fn judge(&self, policy: &Policy) -> Report {
        let mut analysis = Analysis::new(policy.clone());
        for dump in &self.dumps {
            let rank = dump.identity.rank.unwrap_or_default();
            analysis.add_from(&format!("rank_{rank}"), dump, Extent::Whole);
        }
        analysis.finish()
    }
}
