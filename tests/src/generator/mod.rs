//! Generates jobs with known faults: it writes programs for a mesh of ranks, injects faults, simulates which ranks
//! block, and writes the records that each kind of recorder would have left.
//!
//! Everything follows from one seed. The ranks at fault are known from the injected faults, never from the analysis.

mod damage;
mod entry;
mod fault;
mod host_fault;
mod kind;
mod mesh;
mod message_fault;
mod order_fault;
mod paced;
mod past;
mod program;
mod random;
mod record;
mod script;
mod simulate;

pub use damage::Damage;
pub use fault::Fault;
pub use kind::Kind;
pub use paced::{Layout, PacedJob, PacedSpec, Slow};
pub use past::Past;
pub use program::Exchange;
pub use random::Random;
pub use record::{Recording, Window};

use mesh::Mesh;
use rcomm_analyzer::{Analysis, Extent, Policy, Report};
use rcomm_recorder::model::Rank;
use rcomm_recorder::publish::{Dump, Recorder};

/// The parameters of a job.
#[derive(Clone, Debug)]
pub struct Spec {
    /// The seed of all random numbers.
    pub seed: u64,
    /// Tensor-parallel size.
    pub tp: u32,
    /// Pipeline stages.
    pub pp: u32,
    /// Data-parallel replicas.
    pub dp: u32,
    /// Expert-parallel size, a divisor of `dp`; 1 without expert parallelism.
    pub ep: u32,
    /// Steps of the training program.
    pub steps: u32,
    /// Micro-batches of a step.
    pub micro_batches: u32,
    /// Additional parts of the program.
    pub mix: Mix,
    /// The recorder, and what it records.
    pub recording: Recording,
    /// Kinds of the faults to inject, each on another rank.
    pub faults: Vec<Kind>,
}

/// Additional parts of a program.
#[derive(Clone, Copy, Debug, Default)]
pub struct Mix {
    /// Parameters are sharded over the data-parallel replicas, or over half of them in some jobs with enough replicas.
    /// They are gathered before each layer, and their gradients are reduced after it.
    pub sharded: bool,
    /// Tensor-parallel groups pass blocks around a ring, with a send and a receive in each batch.
    pub rings: bool,
    /// The first rank receives a message from each other rank, in whatever order they arrive.
    pub collects: bool,
    /// Data-parallel replicas gather parts of different lengths.
    pub ragged: bool,
    /// How adjacent pipeline stages exchange messages in both directions after each pass.
    pub exchange: Exchange,
}

/// A job with its records, and with the ranks that are at fault.
#[derive(Clone, Debug)]
pub struct Job {
    /// The parameters of the job.
    pub spec: Spec,
    /// The faults as they were injected.
    pub faults: Vec<Fault>,
    /// The records, ordered by rank: one for each recorder of each rank that left records.
    pub dumps: Vec<Dump>,
    /// Ranks that were still waiting at the end.
    pub blocked: Vec<Rank>,
    /// Whether the dumps hold enough to identify the ranks at fault.
    pub decidable: bool,
    /// Ranks whose file was cut short.
    pub cut: Vec<Rank>,
}

impl Spec {
    /// The parameters of a random job without faults. It has at most `max_ranks` ranks, and nearly as many if
    /// `max_ranks` is 1,024 or more.
    pub fn random(seed: u64, max_ranks: u32) -> Self {
        let mut random = Random::new(seed);
        let (tp, pp, dp) = loop {
            if max_ranks >= 1024 {
                let pp = *random.pick(&[1, 2, 4]);
                break (8, pp, max_ranks / (8 * pp));
            }
            let tp = *random.pick(&[1, 2, 2, 4, 4, 8]);
            let pp = *random.pick(&[1, 1, 2, 2, 4]);
            let dp = *random.pick(&[1, 2, 2, 3, 4, 8]);
            if (2..=max_ranks).contains(&(tp * pp * dp)) {
                break (tp, pp, dp);
            }
        };
        let ep = match dp {
            _ if dp.is_multiple_of(4) && random.chance(0.3) => 4,
            _ if dp.is_multiple_of(2) && random.chance(0.4) => 2,
            _ => 1,
        };
        let recorder = *random.pick(&[
            Recorder::Nccl,
            Recorder::Nccl,
            Recorder::Nccl,
            Recorder::Hook,
            Recorder::Hook,
            Recorder::Rcomm,
            Recorder::Rcomm,
            Recorder::NativeGloo,
            Recorder::Torchcomms,
        ]);
        // Gloo's recorder records no messages, and that of torchcomms no peers. Their records of a pipeline show too
        // little.
        let pp = match recorder {
            Recorder::NativeGloo => 1,
            Recorder::Torchcomms => pp.min(2),
            _ => pp,
        };
        let (dp, ep) = if tp * pp * dp < 2 { (2, 1) } else { (dp, ep) };
        let window = *random.pick(&[Window::Whole, Window::Whole, Window::Last, Window::Unequal]);
        // Torchcomms numbers all operations with one counter: if a ring has lost its beginning, the counter identifies
        // no operation.
        let window = match recorder {
            Recorder::Torchcomms => Window::Whole,
            _ => window,
        };
        // No real ring is so small that operations that were issued ahead push out the running ones.
        let ahead: &[usize] = if window == Window::Whole {
            &[0, 3, 12, 40]
        } else {
            &[0, 3, 8]
        };
        // These parts draw from other generators, so that they do not change what the first one gives for a seed.
        let mut second = Random::new(seed ^ 0xbe51_de00);
        let records_peers = !matches!(recorder, Recorder::NativeGloo | Recorder::Torchcomms);
        let mix = Mix {
            sharded: second.chance(0.25),
            rings: records_peers && second.chance(0.2),
            collects: records_peers && tp * pp * dp <= 16 && second.chance(0.2),
            ragged: Random::new(seed ^ 0x0a99_ed00).chance(0.2),
            exchange: Exchange::None,
        };
        Self {
            seed,
            tp,
            pp,
            dp,
            ep,
            steps: random.between(2, 6) as u32,
            micro_batches: *random.pick(&[1, 2, 4]),
            mix,
            recording: Recording {
                recorder,
                starts: random.chance(0.5),
                batched: random.chance(0.6),
                run_ahead: if recorder == Recorder::Nccl {
                    *random.pick(ahead)
                } else {
                    0
                },
                window,
                clock_spread_ms: *random.pick(&[0, 0, 5000]),
                drift_ppm: *random.pick(&[0, 50]),
                frames: random.chance(0.5),
                splits: random.chance(0.5),
                taken_at: None,
                second_recorder: None,
                per_host: 8,
                notice_ms: *second.pick(&[0, 0, 100]),
            },
            faults: Vec::new(),
        }
    }

    /// Number of ranks.
    pub fn world(&self) -> u32 {
        self.tp * self.pp * self.dp
    }

    /// Makes the job.
    pub fn make(&self) -> Job {
        let mut random = Random::new(self.seed ^ 0x9e37_79b9);
        let mesh = Mesh::new(self);
        let mut programs: Vec<program::Program> = (0..self.world())
            .map(|rank| script::write(self, &mesh, rank))
            .collect();
        let mut faults = Vec::new();
        for &kind in &self.faults {
            if let Some(fault) =
                fault::inject(kind, self, &mesh, &mut programs, &faults, &mut random)
            {
                faults.push(fault);
            }
        }
        let run = simulate::run(&mesh, &programs, &faults, &mut random);
        let dumps = record::dumps(self, &mesh, &programs, &run, &faults, &mut random);
        let blocked = run.blocked();
        let decidable = faults.iter().all(|fault| fault.decidable);
        Job {
            spec: self.clone(),
            faults,
            dumps,
            blocked,
            decidable,
            cut: Vec::new(),
        }
    }
}

impl Job {
    /// The analyzer's report on the records, each passed to it as whole or as cut short.
    pub fn judge(&self, policy: &Policy) -> Report {
        let mut analysis = Analysis::new(policy.clone());
        for dump in &self.dumps {
            let rank = dump.identity.rank.unwrap_or_default();
            let cut = self.cut.contains(&rank);
            let extent = if cut { Extent::Cut } else { Extent::Whole };
            analysis.add_from(&format!("rank_{rank}"), dump, extent);
        }
        analysis.finish()
    }

    /// The ranks at fault of all faults, ascending.
    pub fn culprits(&self) -> Vec<Rank> {
        let mut culprits: Vec<Rank> = self
            .faults
            .iter()
            .flat_map(|fault| fault.culprits.iter().copied())
            .collect();
        culprits.sort_unstable();
        culprits.dedup();
        culprits
    }
}
